"""Which config carries which protocol's name."""

import pytest

from backbench.errors import BadInput
from backbench.images.preprocess import IMAGENET_MEAN, IMAGENET_STD
from backbench.recipes import config as recipes
from backbench.tasks import DETECTION
from detection import dialect
from detection.evaluate import AP_KINDS
from detection.protocol import protocol
from detection.task_rows import DETECTION_TASKS, task_of

TINY = "tiny_faster_rcnn_R_18_FPN"


def test_protocol_names():
    def name(recipe, *opts):
        return protocol(dialect.read(recipe, opts))

    assert name("faster_rcnn_R_50_FPN_1x") == "detection-1x-v1"
    assert (
        name("keypoint_rcnn_R_50_FPN_1x", "SEED", "3", "SOLVER.CHECKPOINT_PERIOD", "7")
        == "detection-1x-v1"
    )
    assert name("demo_mask_rcnn_R_18_FPN") == "detection-demo-v1"
    assert name(TINY) == "detection-tiny-v1"
    # A frozen trunk under the same recipe has a name that says so; another trunk is another row
    vit, frozen = "mask_rcnn_ViT_B_SFP_1x", ("MODEL.TRUNK.FROZEN", "True")
    assert name(vit, "MODEL.TRUNK.ARCH", "timm:test_vit") == "detection-vit-b-1x-v1"
    assert name(vit, *frozen) == "detection-vit-b-1x-frozen-v1"
    half = ("SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bf16")
    assert name(vit, *frozen, *half) == "detection-vit-b-1x-frozen-bf16-v1"
    for other in (
        ("MODEL.TRUNK.DROP_PATH", "0.1"),
        ("MODEL.TRUNK.MAP_NORM", "True"),
        ("SOLVER.LAYER_DECAY", "0.9"),
        ("SOLVER.OPTIMIZER", "SGD"),
        ("MODEL.BACKBONE.NAME", "build_trunk_fpn_backbone"),
    ):
        assert "1x" not in name(vit, *other)
    changed = name("mask_rcnn_R_50_FPN_1x", "SOLVER.BASE_LR", "0.01")
    assert changed.startswith("detection-") and "1x" not in changed
    assert name("mask_rcnn_R_50_FPN_1x", "MODEL.FPN.NORM", "BN") != changed


STATED = {
    "demo_faster_rcnn_ConvNeXt_FPN": "detection-demo-fpn-v1",
    "demo_faster_rcnn_frozen": "detection-demo-frozen-v1",
    "demo_faster_rcnn_R_18_FPN": "detection-demo-v1",
    "demo_faster_rcnn_ViT_SFP": "detection-demo-simple-fpn-v2",
    "demo_keypoint_rcnn_frozen": "detection-demo-frozen-v1",
    "demo_keypoint_rcnn_R_18_FPN": "detection-demo-v1",
    "demo_mask_rcnn_frozen": "detection-demo-frozen-v1",
    "demo_mask_rcnn_R_18_FPN": "detection-demo-v1",
    "faster_rcnn_R_50_C4_VOC": "detection-c4-voc-v2",
    "faster_rcnn_ConvNeXt_T_FPN_1x": "detection-convnext-t-1x-v1",
    "faster_rcnn_R_50_FPN_1x": "detection-1x-v1",
    "faster_rcnn_ViT_B_SFP_1x": "detection-vit-b-1x-v1",
    "faster_rcnn_ViT_S_SFP_1x": "detection-vit-s-1x-v1",
    "keypoint_rcnn_R_50_FPN_1x": "detection-1x-v1",
    "mask_rcnn_R_50_C4_1x": "detection-c4-1x-v2",
    "mask_rcnn_R_50_C4_2x": "detection-c4-2x-v2",
    "mask_rcnn_ConvNeXt_T_FPN_1x": "detection-convnext-t-1x-v1",
    "mask_rcnn_R_50_FPN_1x": "detection-1x-v1",
    "mask_rcnn_ViT_B_SFP_1x": "detection-vit-b-1x-v1",
    "mask_rcnn_ViT_S_SFP_1x": "detection-vit-s-1x-v1",
    "tiny_faster_rcnn_ConvNeXt_FPN": "detection-tiny-fpn-v1",
    "tiny_faster_rcnn_frozen": "detection-tiny-frozen-v1",
    "tiny_faster_rcnn_R_18_FPN": "detection-tiny-v1",
    "tiny_faster_rcnn_ViT_SFP": "detection-tiny-simple-fpn-v1",
    "tiny_faster_rcnn_R_50_C4": "detection-c4-tiny-v2",
    "tiny_keypoint_rcnn_frozen": "detection-tiny-frozen-v1",
    "tiny_keypoint_rcnn_R_18_FPN": "detection-tiny-v1",
    "tiny_mask_rcnn_frozen": "detection-tiny-frozen-v1",
    "tiny_mask_rcnn_R_18_FPN": "detection-tiny-v1",
}


def test_every_shipped_config_states_its_protocol():
    """Under the names that rows on users' disks carry."""
    folder = recipes.configs_dir() / dialect.KIND
    assert {path.stem for path in folder.glob("[!_]*.yaml")} == set(STATED)
    for stem, name in STATED.items():
        assert protocol(dialect.read(stem, [])) == name


def test_detectron2_by_itself_reads_the_right_pixels():
    """Each shipped config of its trunks, read by Detectron2 alone: RGB, ImageNet's statistics."""
    pytest.importorskip("detectron2", reason="Detectron2 is not installed: `make detectron2`")
    from detectron2.config import get_cfg

    for stem in STATED:
        if "_R_" not in stem:
            continue
        cfg = get_cfg()
        cfg.merge_from_file(str(recipes.configs_dir() / dialect.KIND / f"{stem}.yaml"))
        assert cfg.INPUT.FORMAT == "RGB"
        assert pytest.approx([255 * v for v in IMAGENET_MEAN], abs=0.01) == cfg.MODEL.PIXEL_MEAN
        assert pytest.approx([255 * v for v in IMAGENET_STD], abs=0.01) == cfg.MODEL.PIXEL_STD


SHIPPED = {
    "faster_rcnn_R_50_FPN_1x": "faster_rcnn",
    "faster_rcnn_R_50_C4_VOC": "faster_rcnn",
    "mask_rcnn_R_50_C4_2x": "mask_rcnn",
    "demo_keypoint_rcnn_R_18_FPN": "keypoint_rcnn",
}


def test_every_detection_task_has_its_row():
    assert tuple(DETECTION_TASKS) == DETECTION
    for name, task in DETECTION_TASKS.items():
        assert task.name == name
        assert set(task.aps) <= set(AP_KINDS)


@pytest.mark.parametrize(("recipe", "name"), SHIPPED.items())
def test_a_config_says_its_task_by_a_switch(recipe, name):
    assert task_of(dialect.read(recipe, [])).name == name


def test_two_switches_are_refused():
    given = dialect.read("mask_rcnn_R_50_FPN_1x", ["MODEL.KEYPOINT_ON", "True"])
    with pytest.raises(BadInput, match="MASK_ON and KEYPOINT_ON together; choose one"):
        task_of(given)
