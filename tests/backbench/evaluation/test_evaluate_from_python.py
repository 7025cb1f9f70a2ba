"""What `backbench.evaluate` hands on: the tasks, the files of the models, the lists and the place."""

from pathlib import Path

import pytest
from support.layouts import picture

import backbench
from backbench.evaluation import api
from backbench.evaluation.api import Results
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint

VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"


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


def test_all_that_is_given_reaches_the_plan(mine, tmp_path, planned):
    point = Checkpoint(
        arch=VIT, method="random", state_dict=archs.build_trunk(VIT).state_dict()
    )
    out = tmp_path / "runs"
    how = {"engine": "own", "accelerator": "cpu", "workers": 2, "seed": 3}
    found = backbench.evaluate(
        point, "knn", data=str(mine), out=str(out), name="x", epochs=7, size=48, **how
    )
    assert found == ["plan"] and isinstance(found, Results)
    ((tasks, files, more),) = planned
    assert tasks == [("knn", "mine", "knn_own geometry.of=48")]
    assert more == {"root": mine.parent, "out": out, "lists": None, **how}
    ((file, kept),) = files.items()
    assert file == out / "checkpoint.safetensors" and file.exists()
    assert (kept.digest, kept.name, kept.epochs) == (point.digest, "x", 7)
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
