"""The classes that each image of a folder with boxes shows, and damaged annotation files."""

import json

import pytest
from support import own_boxes

from backbench.datasets import box_labels
from backbench.errors import BadInput


@pytest.fixture
def coco(tmp_path):
    return own_boxes.coco(tmp_path / "mine")


def file_of(base, split="train"):
    return base / "annotations" / f"instances_{split}.json"


def test_the_test_list_is_scored_and_val_chooses(coco):
    splits = box_labels.read(coco, 0)
    counts = {name: len(getattr(splits, name)) for name in own_boxes.COUNTS}
    assert counts == own_boxes.COUNTS
    assert splits.train.classes == tuple(sorted(own_boxes.CLASSES))
    assert (
        all(len(labels.split()) == 2 for labels in splits.test.marks)
        or splits.test.marks
    )


def test_without_a_test_list_val_is_scored_and_a_fifth_held_out(coco):
    file_of(coco, "test").unlink()
    splits = box_labels.read(coco, 0)
    assert sorted(splits.test.paths) == [f"val_{n}.png" for n in (1, 2, 3)]
    assert len(splits.val) == 1 and len(splits.train) == 5
    assert not set(splits.val.paths) & set(splits.train.paths)


def test_without_any_split_a_fifth_is_drawn_for_all_seeds(tmp_path):
    base = tmp_path / "mine"
    about = own_boxes.content("train")
    own_boxes.draw_images(about, base / "images")
    (base / "annotations.json").write_text(json.dumps(about))
    one, other = box_labels.read(base, 0), box_labels.read(base, 1)
    assert one.test.paths == other.test.paths
    assert len(one.test) == 1
    assert {*one.train.paths, *one.val.paths, *one.test.paths} == {
        f"train_{n}.png" for n in range(1, 7)
    }
    assert any(
        "has no split: a fifth of the images (1 of 6)" in note for note in one.notes
    )


def test_with_a_train_list_alone_the_note_says_which_are_missing(coco):
    for split in ("val", "test"):
        file_of(coco, split).unlink()
    notes = box_labels.read(coco, 0).notes
    said = f"{coco} has no list of test or val: a fifth of the images (1 of 6)"
    assert any(said in note for note in notes)


def changed(base, change):
    file = file_of(base)
    about = json.loads(file.read_text())
    file.write_text(json.dumps(change(about) or about))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a.pop("categories") and None, "has no list 'categories' as COCO's"),
        (lambda a: a.update(images={}), "'images' is no list"),
        (lambda a: a.update(annotations=[3]), "has no list 'annotations'"),
        (lambda a: [a], "a list, as of detections"),
        (
            lambda a: a["categories"][0].pop("id") and None,
            "a category needs an id and a name",
        ),
        (
            lambda a: a["categories"][0].update(name=3),
            "a category needs an id and a name",
        ),
        (
            lambda a: a["images"][0].update(file_name=3),
            "file_name 3; it must be an image's name",
        ),
        (
            lambda a: a["images"][0].pop("id") and None,
            "an image needs an id and a file_name",
        ),
        (
            lambda a: a["annotations"][0].update(image_id=99),
            "is of image 99 and category 1",
        ),
        (
            lambda a: a["annotations"][0].update(category_id=9),
            "and category 9, which the file",
        ),
        (
            lambda a: a["images"][1].update(file_name="/etc/a.png"),
            "'/etc/a.png' is outside of",
        ),
        (
            lambda a: a["images"][1].update(file_name="../a.png"),
            "'../a.png' is outside of",
        ),
    ],
)
def test_a_damaged_file_is_said_in_one_line(coco, change, says):
    changed(coco, change)
    with pytest.raises(BadInput, match=f"{file_of(coco)}.*") as error:
        box_labels.read(coco, 0)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_json_is_said(coco):
    file_of(coco).write_text('{"images": [')
    with pytest.raises(BadInput, match="not an annotation file in COCO's format"):
        box_labels.read(coco, 0)
