"""What differs from the published protocol of detection, and what the data lacks, in words."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.detection_runs import run_of_config

from backbench.detection import lint
from backbench.detection.task_rows import FASTER_RCNN, MASK_RCNN

PROTOCOL = ("MODEL.BACKBONE.FREEZE_AT", "0", "MODEL.RESNETS.NORM", "SyncBN")
PROTOCOL += ("MODEL.FPN.NORM", "SyncBN", "TEST.PRECISE_BN.ENABLED", "True")
PROTOCOL += ("SOLVER.BASE_LR", "0.02", "SOLVER.IMS_PER_BATCH", "16")


def a_split(name="coco_2017_train", labels=(0, 1), notes=(), lists_digest=""):
    records = [{"annotations": [{"category_id": label}]} for label in labels]
    about = {
        "name": name,
        "records": records,
        "notes": notes,
        "categories": ("cat", "dog", "emu", "fox", "gnu", "hen", "ibis"),
    }
    return SimpleNamespace(
        file=Path(f"x/{name}.json"), lists_digest=lists_digest, **about
    )


@pytest.fixture
def said(tiny_root, tmp_path):
    def departures(*opts, train=None, val=None, task=FASTER_RCNN, model=None):
        name = f"tiny_{task.name}_R_18_FPN"
        words = ("MODEL.WEIGHTS", "random", *PROTOCOL, *opts)
        cfg = run_of_config(name, tiny_root, tmp_path, words).cfg.clone()
        cfg.defrost()
        # What Detectron2's engine alone takes
        for part, values in (model or {}).items():
            cfg.MODEL[part].update(values)
        train, val = train or a_split(), val or a_split("coco_2017_val")
        return lint.departures(cfg, task, train, val)

    return departures


def test_the_protocol_itself_departs_in_nothing(said):
    assert said() == []
    assert said(task=MASK_RCNN) == []
    assert said(model={"RESNETS": {"NORM": "naiveSyncBN"}}) == []


@pytest.mark.parametrize(
    ("opts", "says"),
    [
        (
            ("MODEL.RESNETS.NORM", "BN"),
            "RESNETS.NORM 'BN': the protocol has SyncBN in the trunk",
        ),
        (
            ("MODEL.FPN.NORM", "BN"),
            "FPN.NORM 'BN': the protocol has SyncBN; without it",
        ),
        (
            ("TEST.PRECISE_BN.ENABLED", "False"),
            "TEST.PRECISE_BN off: the protocol re-estimates",
        ),
        (
            ("SOLVER.BASE_LR", "0.009"),
            "BASE_LR 0.009 for 16 images per batch; 0.02 at 16 scales",
        ),
        (("SOLVER.BASE_LR", "0.041"), "BASE_LR 0.041 for 16 images"),
        (
            ("SOLVER.IMS_PER_BATCH", "4"),
            "BASE_LR 0.02 for 4 images per batch; 0.02 at 16 scales to 0.005",
        ),
    ],
)
def test_each_departure_is_said(said, opts, says):
    (found,) = said(*opts)
    assert found.startswith(says)


def test_what_detectron2_alone_takes_is_said(said):
    (found,) = said(model={"BACKBONE": {"FREEZE_AT": 2}})
    assert found == "FREEZE_AT 2: the protocol trains all layers (0)"
    norm = {"ROI_MASK_HEAD": {"NORM": "BN"}}
    (found,) = said(model=norm, task=MASK_RCNN)
    assert found.startswith(
        "norm in the heads: the protocol has it in trunk and FPN only"
    )
    assert said(model=norm) == []


def test_rates_may_be_half_or_twice_and_are_free_on_data_of_ones_own(said):
    for rate in ("0.01", "0.04"):
        assert said("SOLVER.BASE_LR", rate) == []
    far = ("SOLVER.BASE_LR", "0.5")
    assert said(*far, train=a_split("scenes_train")) == []
    assert said(*far, train=a_split(lists_digest="abc")) == []
    assert len(said(*far)) == 1


def test_adamw_has_a_rate_of_its_own_and_c4_any(said):
    adamw = ("SOLVER.OPTIMIZER", "ADAMW", "SOLVER.BASE_LR")
    for rate in ("0.00005", "0.0001", "0.0002"):
        assert said(*adamw, rate) == []
    (found,) = said(*adamw, "0.02")
    assert found == (
        "BASE_LR 0.02 for 16 images per batch; 0.0001 at 16 scales to 0.0001"
    )
    c4 = {"BACKBONE": {"NAME": "build_resnet_backbone"}, "FPN": {"NORM": ""}}
    assert said("SOLVER.BASE_LR", "0.5", model=c4) == []


def test_what_the_data_lack_is_said(said):
    (found,) = said(train=a_split(labels=(0,)), val=a_split("val", labels=(2, 1, 0)))
    assert (
        found
        == "coco_2017_train has no object of dog, emu, of which val has some: their AP will be 0"
    )
    (found,) = said(val=a_split("val", labels=range(6, -1, -1)))
    assert "has no object of emu, fox, gnu, hen, ibis, of which" in found
    (found,) = said(train=a_split(labels=()), val=a_split("val", labels=range(7)))
    assert "has no object of cat, dog, emu, fox, gnu, of which" in found
    (found,) = said(val=a_split("val", labels=()))
    assert found == "val has no ground truth at all: every AP will be undefined"
    notes = {"train": a_split(notes=("one",)), "val": a_split("val", notes=("two",))}
    assert said(**notes) == ["coco_2017_train.json: one", "val.json: two"]
