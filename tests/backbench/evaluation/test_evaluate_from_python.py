"""What `backbench.evaluate` hands on: the tasks, the files of the models, the lists and the place."""

from pathlib import Path

import pytest
from support.layouts import picture

import backbench
from backbench.errors import BadInput
from backbench.evaluation import api, models
from backbench.evaluation.api import Results
from backbench.images.preprocess import Pixels
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint

VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"
GREY = Pixels((0.5,) * 3, (0.25,) * 3)


@pytest.fixture
def mine(tmp_path):
    for seed, name in enumerate(3 * ["cat", "dog"]):
        picture(tmp_path / "data" / "mine" / name / f"{seed}.png", seed)
    return tmp_path / "data" / "mine"


@pytest.fixture
def planned(monkeypatch):
    """What the plan is made of; nothing is measured."""
    found = []

    def make_plan(tasks, files, **more):
        found.append((tasks, files, more))
        return "plan"

    monkeypatch.setattr(api.plan, "make_plan", make_plan)
    monkeypatch.setattr(api, "refuse", lambda plan: None)
    monkeypatch.setattr(api, "measure", lambda plan: [plan])
    return found


def test_all_that_is_given_reaches_the_plan(mine, tmp_path, planned, monkeypatch):
    described = []
    read = models.read_models

    def read_models(given, **about):
        described.append(about)
        return read(given, **about)

    monkeypatch.setattr(models, "read_models", read_models)
    point = Checkpoint(
        arch=VIT, method="random", state_dict=archs.build_trunk(VIT).state_dict()
    )
    out = tmp_path / "runs"
    how = {"engine": "own", "accelerator": "cpu", "workers": 2, "seed": 3}
    about = {"name": "x", "method": "m", "epochs": 7, "encoder": "e", "pixels": GREY}
    found = backbench.evaluate(
        point, "knn", data=str(mine), out=str(out), size=48, **about, **how
    )
    assert described == [about]
    assert found == ["plan"] and isinstance(found, Results)
    ((tasks, files, more),) = planned
    assert tasks == [("knn", "mine", "knn_own geometry.of=48")]
    assert more == {"root": mine.parent, "out": out, "lists": None, **how}
    ((file, kept),) = files.items()
    assert file == out / "checkpoint.safetensors" and file.exists()
    assert (kept.name, kept.method, kept.epochs) == ("x", "m", 7)
    assert kept.digest == point.replace(pixels=GREY).digest
    # Several models have files of their own
    moved = {name: value + 1 for name, value in point.state_dict.items()}
    other = point.replace(state_dict=moved)
    backbench.evaluate([point, other], data=mine, out=tmp_path / "both")
    _, files, more = planned[-1]
    names = [f"checkpoint-{each.digest[:12]}.safetensors" for each in (point, other)]
    assert [file.name for file in files] == names
    assert all(file.exists() for file in files)
    assert (more["seed"], more["engine"], more["accelerator"]) == (0, "auto", "auto")
    assert more["workers"] is None


def test_lists_beside_the_data_are_taken_unless_others_are_given(
    mine, tmp_path, planned
):
    point = Checkpoint(
        arch=VIT, method="random", state_dict=archs.build_trunk(VIT).state_dict()
    )
    (mine.parent / "lists").mkdir()
    for given, lists in ((None, mine.parent / "lists"), ("mine", Path("mine"))):
        backbench.evaluate(point, "knn", data=mine, out=tmp_path / "o", lists=given)
        assert planned[-1][2]["lists"] == lists


def test_what_a_run_would_refuse_is_refused_before_the_first_is_measured(
    mine, tmp_path, monkeypatch
):
    measured = []
    monkeypatch.setattr(api, "measure", lambda plan: measured.append(plan) or [])
    point = Checkpoint(
        arch=VIT, method="random", state_dict=archs.build_trunk(VIT).state_dict()
    )
    tasks = ["knn@knn_demo", "knn@knn_demo k=0"]
    out = tmp_path / "runs"
    with pytest.raises(BadInput, match=r"knn_demo k=0: 'k\[0\]' must be"):
        backbench.evaluate(point, tasks, data=mine, out=out)
    assert measured == []
    assert not out.exists()
    assert backbench.evaluate(point, tasks[:1], data=mine, out=out) == []
    (plan,) = measured
    assert [run.request.protocol for run in plan.runs] == ["knn_demo"]


@pytest.mark.parametrize(
    ("task", "more", "says"),
    [
        ("knn/mine@nobody", {}, "no recipe 'nobody'"),
        ("analyze/mine@analyze augmentations=4", {}, "takes no changes"),
        ("faster_rcnn/coco2017", {"accelerator": "cpu"}, "--accelerator and --workers"),
    ],
)
def test_a_task_that_cannot_run_so_is_refused_before_any_model_is_read(
    tmp_path, mine, task, more, says
):
    with pytest.raises(BadInput, match=says):
        backbench.evaluate(
            "absent.pth", task, data=mine.parent, out=tmp_path / "runs", **more
        )
