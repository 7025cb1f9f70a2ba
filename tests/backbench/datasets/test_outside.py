"""What a command writes lies outside of the datasets that it reads."""

import json

import pytest
from PIL import Image

from backbench.datasets import outside
from backbench.errors import BadInput


def class_folder(base, classes=("a", "b")):
    for name in classes:
        (base / name).mkdir(parents=True)
        Image.new("RGB", (3, 2)).save(base / name / "1.png")


@pytest.fixture
def root(tmp_path):
    class_folder(tmp_path / "data" / "mine" / "train")
    class_folder(tmp_path / "data" / "other")
    (tmp_path / "data" / "boxes" / "annotations").mkdir(parents=True)
    # One class alone is none, and neither is a folder without images
    class_folder(tmp_path / "data" / "lone", ["a"])
    for name in ("x", "y"):
        (tmp_path / "data" / "plain" / name).mkdir(parents=True)
    class_folder(tmp_path / "data" / "runs")
    (tmp_path / "data" / "runs" / "a" / "run.json").write_text(json.dumps({}))
    return tmp_path / "data"


def test_data_itself_is_no_place_for_a_run(root):
    with pytest.raises(BadInput) as refused:
        outside.refuse_inside(root, [], root / "." / ".." / "data")
    assert "is --data itself, so what is written there would be read as data" in str(
        refused.value
    )


@pytest.mark.parametrize("inside", ["mine", "mine/train/new", "other/run", "boxes/x/y"])
def test_a_place_in_a_dataset_is_refused_whether_or_not_it_is_named(root, inside):
    dataset = root / inside.partition("/")[0]
    for names in ([], ["mine"], ["absent", "mine"]):
        with pytest.raises(BadInput) as refused:
            outside.refuse_inside(root, names, root / inside)
        assert str(refused.value) == (
            f"--out {root / inside}: lies in the dataset {dataset}, so what is written there would"
            f" be read as its data; give a folder outside of it, as {root / 'runs'}"
        )


@pytest.mark.parametrize(
    "beside", ["new", "lone/x", "plain/x", "runs/b/c", "../elsewhere"]
)
def test_places_beside_the_datasets_are_free(root, beside):
    outside.refuse_inside(root, ["mine", "other"], root / beside)


def test_a_dataset_that_is_named_is_one_whatever_it_holds(root):
    with pytest.raises(BadInput, match="lies in the dataset"):
        outside.refuse_inside(root, ["mine", "plain"], root / "plain" / "x")


def test_the_cache_may_lie_in_a_hidden_folder_of_a_dataset(root, monkeypatch):
    monkeypatch.setenv("BACKBENCH_CACHE", str(root / "other" / ".cache" / "x"))
    outside.refuse_inside(root, ["mine", "other"], root / "new")
    monkeypatch.setenv("BACKBENCH_CACHE", str(root / "other" / "cache"))
    with pytest.raises(BadInput) as refused:
        outside.refuse_inside(root, ["mine", "other"], root / "new")
    assert str(refused.value) == (
        f"BACKBENCH_CACHE={root / 'other' / 'cache'}: lies in the dataset {root / 'other'}, so what"
        " is written there would be read as its data; set it to a folder outside of it, as"
        f" {root / 'cache'}"
    )


def test_data_may_be_the_one_dataset(root):
    with pytest.raises(BadInput, match=f"lies in the dataset {root / 'mine'}, so"):
        outside.refuse_inside(root / "mine", ["mine"], root / "mine" / "x", root=root)
    outside.refuse_inside(root / "mine", ["mine"], root / "new", root=root)
