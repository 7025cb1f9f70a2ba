"""The demo's scenes: their files fit together."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from backbench.datasets import embedded
from backbench.records import store

RECORDS = Path(__file__).parents[3] / "docs" / "demo" / "records"


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


def test_a_drawing_is_scikit_learns_at_32_pixels(tiny_root):
    bunch = load_digits()
    for file in tiny_root.glob("digits/*/*/*.png"):
        index = int(file.stem)
        assert str(bunch.target[index]) == file.parent.name
        levels = np.rint(bunch.images[index] * 255 / 16).astype(np.uint8)
        wanted = Image.fromarray(levels).resize((32, 32), Image.Resampling.BICUBIC)
        for channel in Image.open(file).split():
            assert np.array_equal(np.asarray(channel), np.asarray(wanted))


def test_the_whole_demos_digits_are_dealt_out_as_on_record():
    """Whoever makes them has the lists of the records that are shipped."""
    records, problems = store.read(RECORDS)
    assert not problems
    row = next(r for r in records if (r.task, r.dataset) == ("knn", "digits"))
    _, members = embedded._digits("full")
    for name, part in members.items():
        lines = sorted(f"{label}/{index:04d}.png\t{label}\n" for index, label in part)
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        assert digest == row.provenance["manifests"][name], name
        assert len(part) == row.provenance["images"][name]


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_boxes_areas_and_outlines_are_those_of_what_is_seen(files, tiny_root, split):
    instances, people = files(split)
    things = {row["id"]: row for row in people["annotations"]}
    hidden = alone = 0
    for image in instances["images"]:
        file = tiny_root / "scenes" / "maps" / split / f"{image['id']:012d}.png"
        labels = np.asarray(Image.open(file))
        objects = [r for r in instances["annotations"] if r["image_id"] == image["id"]]
        counts = Counter(row["category_id"] for row in objects)
        for row in objects:
            seen = labels == row["category_id"]
            points = np.array(things[row["id"]]["keypoints"]).reshape(5, 3)
            for x, y, mark in points:
                assert mark == 1 or seen[y, x]
            (
                (_, top, _),
                (_, bottom, _),
                (left, _, _),
                (right, _, _),
                (middle, height, _),
            ) = points
            assert top <= height <= bottom and left <= middle <= right
            hidden += (points[:, 2] == 1).sum()
            if counts[row["category_id"]] > 1:
                continue
            # Of a digit that is there once, all is known
            alone += 1
            ys, xs = np.nonzero(seen)
            box = [xs.min(), ys.min(), np.ptp(xs) + 1, np.ptp(ys) + 1]
            assert row["bbox"] == box and row["area"] == seen.sum()
            filled = np.zeros(labels.shape, np.uint8)
            for outline in row["segmentation"]:
                assert len(outline) >= 6
                points_of = np.array(outline, np.int32).reshape(-1, 1, 2)
                cv2.fillPoly(filled, [points_of], 1)
            # Outlines have no holes, and leave out specks
            assert (filled.astype(bool) & seen).sum() >= 0.9 * seen.sum()
            if (points[:, 2] == 2).all():
                assert (top, bottom) == (ys.min(), ys.max())
                assert (left, right) == (xs.min(), xs.max())
    assert hidden > 0 and alone > 10


def test_an_object_by_hand():
    whole = np.zeros((6, 8), bool)
    whole[1:5, 2:7] = True
    whole[0, 4] = whole[3, 1] = True
    visible = whole.copy()
    visible[:, :4] = False
    shape, keypoints = embedded._object(whole, visible, [[1.0, 2.0]])
    assert shape == {"bbox": [4, 0, 3, 5], "area": 13, "segmentation": [[1.0, 2.0]]}
    # top, bottom and left-most, right-most: the first of each, and the middle of the whole stroke
    points = np.array(keypoints).reshape(5, 3).tolist()
    assert points == [[4, 0, 2], [2, 4, 1], [1, 3, 1], [6, 1, 2], [4, 2, 2]]


def test_parts_of_an_outline_have_an_area():
    mask = np.zeros((20, 20), bool)
    mask[2:6, 3:8] = True  # 3 x 4 between the middles of its pixels
    mask[10:13, 10:13] = True  # 2 x 2
    mask[15:17, 2:18] = True  # 1 x 15
    mask[18, 18] = True
    mask[8, 1:9] = True  # a line has none
    found = sorted(embedded._polygons(mask))
    assert [len(outline) for outline in found] == [8, 8, 8]
    assert {
        (min(o[0::2]), min(o[1::2]), max(o[0::2]), max(o[1::2])) for o in found
    } == {
        (3, 2, 7, 5),
        (10, 10, 12, 12),
        (2, 15, 17, 16),
    }


class Places:
    """A generator that draws given places."""

    def __init__(self, *places):
        self.places = list(places)
        self.asked = []

    def integers(self, low, high, size):
        self.asked.append((low, high, size))
        return np.array(self.places.pop(0))


def test_a_digit_comes_to_the_least_covered_of_four_places():
    left, top = (np.zeros((128, 128), bool) for _ in range(2))
    left[:, :20] = True
    top[:15, :] = True
    draw = Places((0, 0), (10, 50), (50, 10), (15, 50), (99, 99))
    assert embedded._place([left, top], 30, draw) == (50, 10)
    assert draw.asked == [(0, 99, 2)] * 4
    # Of equal places the first
    draw = Places((60, 60), (70, 70), (80, 20), (90, 90))
    assert embedded._place([left, top], 30, draw) == (60, 60)
    assert embedded._place([], 128, Places(*[(0, 0)] * 4)) == (0, 0)


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_a_list_has_a_share_of_each_class(tmp_path, size):
    _, members = embedded._digits(size)
    embedded._write_lists(tmp_path, members["train"])
    for percent in (1, 10):
        lines = (tmp_path / f"{percent}percent.txt").read_text().splitlines()
        wanted = []
        for label in range(10):
            own = [index for index, other in members["train"] if other == label]
            wanted += [
                f"{label}/{i:04d}.png"
                for i in own[: max(1, round(len(own) * percent / 100))]
            ]
        assert lines == wanted


class GivenDraws:
    """A generator whose whole numbers and shares are given, without noise."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)
        self.asked = []

    def integers(self, low, high, size=None):
        self.asked.append((low, high))
        number = self.numbers.pop(0)
        return number if size is None else np.array(number)

    def uniform(self, low, high, size=None):
        self.asked.append((low, high))
        return {2: np.array([10.0, -20.0]), 3: np.array([-9.0, 0.0, 9.0])}.get(
            size, 200.0
        )

    def normal(self, mean, deviation, shape):
        self.asked.append((mean, deviation))
        return np.zeros(shape)


@pytest.mark.parametrize(("top", "seen"), [(36, True), (35, False)])
def test_a_scene_by_hand(top, seen):
    """Of the first square the third one leaves 16 of 40 rows to be seen, or 15."""
    solid = np.full((3, 32, 32), 255, np.uint8)
    places = [40, *[(10, 20)] * 4, 30, *[(60, 90)] * 4, 40, *[(10, top)] * 4]
    draws = GivenDraws(*places)
    canvas, objects, labels = embedded._scene(solid, [(0, 3), (1, 7), (2, 5)], draws)
    assert draws.asked == [
        (-40, 40),
        (0, 6),
        *[(28, 64), *[(0, 89)] * 4, (170, 255), (-15, 15)],
        *[(28, 64), *[(0, 99)] * 4, (170, 255), (-15, 15)],
        *[(28, 64), *[(0, 89)] * 4, (170, 255), (-15, 15)],
    ]
    # The ground gets brighter downwards and darker to the right; the squares are tinted
    corners = [canvas[y, x].tolist() for y, x in ((0, 0), (127, 0), (0, 127))]
    assert corners == [[40] * 3, [50] * 3, [20] * 3]
    assert canvas[95, 65].tolist() == canvas[25, 15].tolist() == [191, 200, 209]
    wanted = np.zeros((128, 128), np.uint8)
    wanted[20:60, 10:50] = 4 if seen else 255
    wanted[90:120, 60:90] = 8
    wanted[top : top + 40, 10:50] = 6
    np.testing.assert_array_equal(labels, wanted)
    boxes = [(label, shape["bbox"]) for label, shape, _ in objects]
    others = [(7, [60, 90, 30, 30]), (5, [10, top, 40, 40])]
    assert boxes == ([(3, [10, 20, 40, 16])] if seen else []) + others


def test_half_a_stroke_is_mixed_with_the_ground_and_no_part_of_the_mask():
    """The mask is what has more than 0.4 of paint."""
    for level, masked in ((101, False), (103, True)):
        gray = np.full((1, 32, 32), level, np.uint8)
        draws = GivenDraws(30, *[(0, 0)] * 4)
        canvas, objects, labels = embedded._scene(gray, [(0, 0)], draws)
        assert bool(objects) == masked == bool(labels[10, 10] == 1)
        share = level / 255
        ground = 40 + 10 * 10 / 127 - 20 * 10 / 127
        mixed = [int(ground * (1 - share) + paint * share) for paint in (191, 200, 209)]
        assert canvas[10, 10].tolist() == mixed
