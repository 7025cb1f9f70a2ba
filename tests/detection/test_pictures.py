"""Pictures for people: which side is the truth, and what the labels say."""

import numpy as np
import pytest
from PIL import Image

from backbench.datasets import embedded
from detection import pictures
from detection.data import reading
from detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return embedded.build(tmp_path_factory.mktemp("data"), "tiny")


def found(record, ids, shift=0):
    """Every object of an image, found where it is or a little beside it."""
    out = []
    for n, a in enumerate(record["annotations"]):
        x, y, w, h = a["bbox"]
        detection = {"image_id": record["image_id"], "category_id": ids[a["category_id"]]}
        detection |= {"bbox": [x + shift, y, w, h], "score": 0.9 - n / 10}
        out.append(detection)
    return out


@pytest.mark.parametrize("task", [FASTER_RCNN, KEYPOINT_RCNN])
def test_each_side_says_what_it_is(root, tmp_path, task):
    name = "keypoints_scenes_val" if task.keypoints else "scenes_val"
    split = reading.read(reading.find(name, root), task)
    some = [d for record in split.records for d in found(record, split.ids)]
    drawn = pictures.write(tmp_path / "some", split, some)
    nothing = pictures.write(tmp_path / "none", split, [])
    assert len(drawn) == len(split.records) == len(nothing)
    one, bare = (np.asarray(Image.open(files[0]), int) for files in (drawn, nothing))
    assert one.shape == bare.shape
    middle, above = one.shape[1] // 2, pictures.LETTERS + 2 * pictures.GAP
    ink = 255 - one[:above].min(2)
    assert ink[:, :middle].max() > 200 and ink[:, middle:].max() > 200, "a word above either side"
    # The left is the truth's whatever was found; the right says that nothing was
    assert (one[:, : middle - pictures.GAP] == bare[:, : middle - pictures.GAP]).all()
    assert (one[:above, middle:] != bare[:above, middle:]).any()
    scene = np.asarray(Image.open(split.records[0]["file_name"]).resize((320, 320)), int)
    assert (bare[above:, -320:] == scene).all(), "where nothing was found, nothing is drawn"
    assert (one[above:, -320:] != scene).any()


def test_a_label_is_dark_on_the_ground_of_its_colour(root, tmp_path):
    split = reading.read(reading.find("scenes_val", root), FASTER_RCNN)
    record = split.records[0]
    best = found(record, split.ids)[:1]
    seen = np.asarray(Image.open(pictures.write(tmp_path, split, best)[0]), int)
    label = record["annotations"][0]["category_id"]
    colour = np.array(pictures.COLOURS[label % len(pictures.COLOURS)])
    right = seen[pictures.LETTERS + 2 * pictures.GAP :, -320:]
    ground = (abs(right - colour).sum(2) < 6).sum()
    outline = 2 * 2 * 2.5 * sum(best[0]["bbox"][2:])
    assert ground > outline + 300, "a patch, beside the lines of the box"
    assert (right.sum(2) < 90).sum() > 40, "and letters on it"
