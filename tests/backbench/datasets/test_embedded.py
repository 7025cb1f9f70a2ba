"""The demo's scenes: their files fit together."""

import json

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def files(tiny_root):
    """(instances, people) of a split"""

    def of(split):
        folder = tiny_root / "scenes" / "annotations"
        names = (f"instances_{split}.json", f"person_keypoints_{split}.json")
        return [json.loads((folder / name).read_text()) for name in names]

    return of


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_a_scenes_objects_are_digits_and_things_with_keypoints(files, tiny_root, split):
    instances, people = files(split)
    digits = {row["id"]: row["name"] for row in instances["categories"]}
    assert digits == {number + 1: str(number) for number in range(10)}
    (person,) = people["categories"]
    names = person["keypoints"]
    assert set(names) == {"top", "bottom", "left", "right", "center"}
    # Each corner is joined with the centre
    pairs = [{names[place - 1] for place in pair} for pair in person["skeleton"]]
    assert pairs == [{name, "center"} for name in names if name != "center"]
    assert instances["images"] == people["images"]
    for image in instances["images"]:
        picture = Image.open(tiny_root / "scenes" / split / image["file_name"])
        assert picture.size == (image["width"], image["height"])
    assert [row["id"] for row in instances["annotations"]] == list(
        range(1, len(instances["annotations"]) + 1)
    )
    for one, same in zip(instances["annotations"], people["annotations"], strict=True):
        for key in ("id", "image_id", "bbox", "segmentation", "area"):
            assert one[key] == same[key]
        assert (one["iscrowd"], same["category_id"]) == (0, 1)
        marks = same["keypoints"][2::3]
        assert len(marks) == len(names)
        assert same["num_keypoints"] == sum(mark > 0 for mark in marks)
        x, y, width, height = one["bbox"]
        assert min(x, y) >= 0 and x + width <= 128 and y + height <= 128


def test_a_label_map_has_the_digits_of_its_scene(files, tiny_root):
    """A digit's pixels are its number and one more; those of a hidden one are ignored."""
    instances, _ = files("val2017")
    for image in instances["images"]:
        file = tiny_root / "scenes" / "maps" / "val2017" / f"{image['id']:012d}.png"
        labels = np.asarray(Image.open(file))
        objects = [r for r in instances["annotations"] if r["image_id"] == image["id"]]
        found = set(np.unique(labels).tolist()) - {0, 255}
        assert found == {row["category_id"] for row in objects}
        for row in objects:
            x, y, width, height = (round(value) for value in row["bbox"])
            part = labels[y : y + height, x : x + width]
            assert (part == row["category_id"]).sum() > 0.3 * row["area"]


def test_digits_are_dealt_out_once(tiny_root):
    """Equal drawings would be in two splits."""
    home = {}
    for file in sorted((tiny_root / "digits").rglob("*.png")):
        split = file.parent.parent.name
        assert home.setdefault(file.read_bytes(), split) == split
        assert Image.open(file).size == (32, 32)
    assert set(home.values()) == {"train", "val", "test"}
    train = {
        f"{file.parent.name}/{file.name}"
        for file in tiny_root.glob("digits/train/*/*.png")
    }
    few, more = (
        (tiny_root / "lists" / f"{percent}percent.txt").read_text().split()
        for percent in (1, 10)
    )
    assert set(few) <= set(more) <= train
    assert {name.split("/")[0] for name in few} == set("0123456789")
