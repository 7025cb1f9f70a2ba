"""Which config carries which protocol's name."""

import pytest

from backbench.errors import BadInput
from backbench.images.preprocess import IMAGENET_MEAN, IMAGENET_STD
from backbench.recipes import config as recipes
from backbench.tasks import DETECTION
from detection import dialect
from detection.evaluate import AP_KINDS
from detection.protocol import STATED, protocol
from detection.task_rows import DETECTION_TASKS, task_of

TINY = "tiny_faster_rcnn_R_18_FPN"


def test_protocol_names():
    def name(recipe, *opts):
        return protocol(dialect.read(recipe, opts))

    assert name("faster_rcnn_R_50_FPN_1x") == "detection-1x-v1"
    words = ("SEED", "3", "SOLVER.CHECKPOINT_PERIOD", "7")
    assert name("keypoint_rcnn_R_50_FPN_1x", *words) == "detection-1x-v1"
    assert name("demo_mask_rcnn_R_18_FPN") == "detection-demo-v1"
    assert name(TINY) == "detection-tiny-v1"
    # A frozen trunk under the same recipe has a name that says so; another trunk is another row
    vit, frozen = "mask_rcnn_ViT_B_SFP_1x", ("MODEL.TRUNK.FROZEN", "True")
    assert name(vit, "MODEL.TRUNK.ARCH", "timm:test_vit") == "detection-vit-b-1x-v1"
    assert name(vit, *frozen) == "detection-vit-b-1x-frozen-v1"
    on = ("SOLVER.AMP.ENABLED", "True")
    assert name("mask_rcnn_R_50_FPN_1x", *on) == "detection-1x-fp16-v1"
    assert name("mask_rcnn_R_50_FPN_1x", on[0], "False") == "detection-1x-v1"
    half = (*on, "SOLVER.AMP.PRECISION", "bf16")
    assert name(vit, *frozen, *half) == "detection-vit-b-1x-frozen-bf16-v1"
    others = {"MODEL.TRUNK.DROP_PATH": "0.1", "MODEL.TRUNK.MAP_NORM": "True"}
    others |= {"SOLVER.LAYER_DECAY": "0.9", "SOLVER.OPTIMIZER": "SGD"}
    for other in {**others, "MODEL.BACKBONE.NAME": "build_trunk_fpn_backbone"}.items():
        assert "1x" not in name(vit, *other)
    changed = name("mask_rcnn_R_50_FPN_1x", "SOLVER.BASE_LR", "0.01")
    assert changed.startswith("detection-") and "1x" not in changed
    assert name("mask_rcnn_R_50_FPN_1x", "MODEL.FPN.NORM", "BN") != changed


CONFIGS = sorted((recipes.configs_dir() / dialect.KIND).glob("[!_]*.yaml"))


def test_every_shipped_config_has_the_name_that_it_states():
    for path in CONFIGS:
        stated = f"{STATED}{protocol(dialect.read(path.stem, []))}"
        assert stated in path.read_text().splitlines(), path.stem


def test_detectron2_by_itself_reads_the_right_pixels():
    """Each shipped config of its trunks, read by Detectron2 alone: RGB, ImageNet's statistics."""
    pytest.importorskip("detectron2", reason="Detectron2 is not installed: `make detectron2`")
    from detectron2.config import get_cfg

    for path in (path for path in CONFIGS if "_R_" in path.stem):
        cfg = get_cfg()
        cfg.merge_from_file(str(path))
        assert cfg.INPUT.FORMAT == "RGB"
        assert pytest.approx([255 * v for v in IMAGENET_MEAN], abs=0.01) == cfg.MODEL.PIXEL_MEAN
        assert pytest.approx([255 * v for v in IMAGENET_STD], abs=0.01) == cfg.MODEL.PIXEL_STD


def test_every_detection_task_has_its_row():
    assert tuple(DETECTION_TASKS) == DETECTION
    for name, task in DETECTION_TASKS.items():
        assert task.name == name
        assert set(task.aps) <= set(AP_KINDS)


@pytest.mark.parametrize("name", DETECTION)
def test_a_config_says_its_task_by_a_switch(name):
    assert task_of(dialect.read(f"{name}_R_50_FPN_1x", [])).name == name


def test_two_switches_are_refused():
    given = dialect.read("mask_rcnn_R_50_FPN_1x", ["MODEL.KEYPOINT_ON", "True"])
    with pytest.raises(BadInput, match="MASK_ON and KEYPOINT_ON together; choose one"):
        task_of(given)
