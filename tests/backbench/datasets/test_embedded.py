"""The embedded data: real layouts, disjoint splits, annotations that pycocotools accepts."""

import json

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from torchvision.datasets import ImageFolder

from backbench.datasets import embedded


@pytest.fixture(scope="module")
def full_root(tmp_path_factory):
    return embedded.build(tmp_path_factory.mktemp("full"))


def test_digits_are_a_class_folder_with_disjoint_splits(full_root):
    seen: dict[bytes, str] = {}
    sizes = {}
    for split in ("train", "val", "test"):
        folder = ImageFolder(full_root / "digits" / split)
        assert folder.classes == [str(d) for d in range(10)]
        sizes[split] = len(folder)
        for path, _ in folder.samples:
            image = Image.open(path)
            assert image.mode == "RGB" and image.size == (32, 32)
            other = seen.setdefault(image.tobytes(), split)
            assert other == split, f"{path} is in {other}, too"
    assert sum(sizes.values()) == 1797
    assert sizes["test"] >= 700


def test_lists_are_nested_labelled_parts_of_train(full_root):
    one, ten = ((full_root / "lists" / f"{p}percent.txt").read_text().split() for p in (1, 10))
    assert set(one) < set(ten)
    assert {line.split("/")[0] for line in one} == {str(d) for d in range(10)}
    assert all((full_root / "digits" / "train" / line).is_file() for line in ten)


@pytest.mark.parametrize("part", ["train2017", "val2017"])
def test_scenes_are_coco(full_root, part):
    coco = COCO(full_root / "scenes" / "annotations" / f"instances_{part}.json")
    people = COCO(full_root / "scenes" / "annotations" / f"person_keypoints_{part}.json")
    assert len(coco.getCatIds()) == 10 and len(people.getCatIds()) == 1
    hidden = 0
    for annotation in people.loadAnns(people.getAnnIds()):
        info = coco.imgs[annotation["image_id"]]
        mask = coco.annToMask(coco.anns[annotation["id"]])
        x, y, w, h = (round(v) for v in annotation["bbox"])
        assert mask.shape == (info["height"], info["width"])
        outside = mask.copy()
        outside[y : y + h, x : x + w] = 0
        assert not outside.any(), "the mask stays in its box"
        points = np.array(annotation["keypoints"]).reshape(5, 3)
        assert (points[:, :2] >= 0).all() and (points[:, :2] < embedded.SCENE_SIZE).all()
        assert points[0, 1] <= points[4, 1] <= points[1, 1]
        assert points[2, 0] <= points[4, 0] <= points[3, 0]
        assert annotation["num_keypoints"] == 5
        hidden += int((points[:, 2] == 1).sum())
    assert hidden > 0, "some keypoints are occluded"
    images = {i["file_name"] for i in coco.imgs.values()}
    assert images == {p.name for p in (full_root / "scenes" / part).iterdir()}


def test_building_again_changes_nothing_and_another_size_replaces(tmp_path):
    root = embedded.build(tmp_path, size="tiny")
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}
    embedded.build(tmp_path, size="tiny")
    assert before == {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}
    again = embedded.build(tmp_path / "other", size="tiny")
    for path in before:
        assert (again / path.relative_to(root)).read_bytes() == path.read_bytes()
    scenes = json.loads((root / "scenes/annotations/instances_val2017.json").read_text())
    assert len(scenes["images"]) == 4
