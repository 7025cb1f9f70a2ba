"""Which config carries which protocol's name."""

from detection import config
from detection.protocol import protocol

TINY = "tiny_faster_rcnn_R_18_FPN"


def test_protocol_names():
    def name(recipe, *opts):
        return protocol(config.read(recipe, opts))

    assert name("faster_rcnn_R_50_FPN_1x") == "detection-1x-v1"
    assert (
        name("keypoint_rcnn_R_50_FPN_1x", "SEED", "3", "SOLVER.CHECKPOINT_PERIOD", "7")
        == "detection-1x-v1"
    )
    assert name("demo_mask_rcnn_R_18_FPN") == "detection-demo-v1"
    assert name(TINY) == "detection-tiny-v1"
    changed = name("mask_rcnn_R_50_FPN_1x", "SOLVER.BASE_LR", "0.01")
    assert changed.startswith("detection-") and "1x" not in changed
    assert name("mask_rcnn_R_50_FPN_1x", "MODEL.FPN.NORM", "BN") != changed
