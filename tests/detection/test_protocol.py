"""Which config carries which protocol's name."""

import pytest

from backbench import config as recipes
from backbench.images.preprocess import IMAGENET_MEAN, IMAGENET_STD
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


STATED = {
    "demo_faster_rcnn_R_18_FPN": "detection-demo-v1",
    "demo_keypoint_rcnn_R_18_FPN": "detection-demo-v1",
    "demo_mask_rcnn_R_18_FPN": "detection-demo-v1",
    "faster_rcnn_R_50_C4_VOC": "detection-c4-voc-v2",
    "faster_rcnn_R_50_FPN_1x": "detection-1x-v1",
    "keypoint_rcnn_R_50_FPN_1x": "detection-1x-v1",
    "mask_rcnn_R_50_C4_1x": "detection-c4-1x-v2",
    "mask_rcnn_R_50_C4_2x": "detection-c4-2x-v2",
    "mask_rcnn_R_50_FPN_1x": "detection-1x-v1",
    "tiny_faster_rcnn_R_18_FPN": "detection-tiny-v1",
    "tiny_faster_rcnn_R_50_C4": "detection-c4-tiny-v2",
    "tiny_keypoint_rcnn_R_18_FPN": "detection-tiny-v1",
    "tiny_mask_rcnn_R_18_FPN": "detection-tiny-v1",
}


def test_every_shipped_config_states_its_protocol():
    """Under the names that rows on users' disks carry."""
    folder = recipes.configs_dir() / config.KIND
    assert {path.stem for path in folder.glob("[!_]*.yaml")} == set(STATED)
    for stem, name in STATED.items():
        assert protocol(config.read(stem, [])) == name


def test_detectron2_by_itself_reads_the_right_pixels():
    """Every shipped config, read by Detectron2 alone: RGB and ImageNet's statistics."""
    pytest.importorskip("detectron2", reason="Detectron2 is not installed: `make detectron2`")
    from detectron2.config import get_cfg

    for stem in STATED:
        cfg = get_cfg()
        cfg.merge_from_file(str(recipes.configs_dir() / config.KIND / f"{stem}.yaml"))
        assert cfg.INPUT.FORMAT == "RGB"
        assert pytest.approx([255 * v for v in IMAGENET_MEAN], abs=0.01) == cfg.MODEL.PIXEL_MEAN
        assert pytest.approx([255 * v for v in IMAGENET_STD], abs=0.01) == cfg.MODEL.PIXEL_STD
