"""COCO's annotation files by hand: records, what is computed, what is noted, what is refused."""

import json
import re

import numpy as np
import pytest

from backbench.detection.data import box_format, coco
from backbench.detection.data.split import DatasetFiles
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN, MASK_RCNN
from backbench.errors import BadInput

WIDTH, HEIGHT = 200, 100
SQUARE = [[10.0, 20.0, 40.0, 20.0, 40.0, 60.0, 10.0, 60.0]]


def an_object(number=1, **changes):
    row = {
        "id": number,
        "image_id": 7,
        "category_id": 3,
        "bbox": [10, 20, 30, 40],
        "area": 600,
    }
    row |= {"segmentation": SQUARE} | changes
    return {key: value for key, value in row.items() if value is not None}


def a_file(*objects, **changes):
    image = {"id": 7, "file_name": "b.png", "width": WIDTH, "height": HEIGHT}
    other = {"id": 2, "file_name": "a.png", "width": 50.0, "height": 60.0}
    categories = [{"id": 9, "name": "dog"}, {"id": 3, "name": "cat"}]
    lists = {
        "images": [image, other],
        "categories": categories,
        "annotations": list(objects),
    }
    return lists | changes


@pytest.fixture
def parse(tmp_path):
    def split(content, task=FASTER_RCNN, limit=None):
        files = DatasetFiles(
            "coco_2017_val", tmp_path / "a.json", tmp_path / "x", limit
        )
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        return coco.parse(text, files, task)

    return split


def test_images_come_in_the_order_of_their_ids_with_their_objects(parse):
    split = parse(a_file(an_object(1), an_object(2, category_id=9, iscrowd=1)))
    first, second = split.records
    assert (first["image_id"], first["file_name"], first["annotations"]) == (
        2,
        "a.png",
        [],
    )
    assert (first["width"], first["height"]) == (50, 60)
    assert type(first["width"]) is int
    one, crowd = second["annotations"]
    assert one["bbox"] == [10, 20, 30, 40]
    assert (one["category_id"], one["iscrowd"]) == (0, 0)
    assert (crowd["category_id"], crowd["iscrowd"]) == (1, 1)
    assert "segmentation" not in one
    # Labels are in the order of the categories' ids
    assert (split.categories, split.ids) == (("cat", "dog"), (3, 9))
    assert (split.objects, split.notes, split.keypoints) == (2, (), ())
    (kept,) = parse(a_file(an_object()), limit=1).records
    assert kept["image_id"] == 2


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (
            {"area": None},
            "2 of 3 areas are missing or 0: computed from the outline, or else",
        ),
        ({"area": 0}, "2 of 3 areas are missing or 0"),
        ({"bbox": None}, "2 of 3 boxes are missing: computed from outlines"),
    ],
)
def test_what_is_missing_is_computed_and_told(parse, change, note):
    split = parse(a_file(an_object(1, **change), an_object(2), an_object(3, **change)))
    (said,) = split.notes
    assert said.startswith(note)
    boxes = [each["bbox"] for each in split.records[1]["annotations"]]
    assert boxes == [[10, 20, 30, 40]] * 3


def test_the_size_of_an_object():
    """As stated, or of its outline, or of its box."""
    box = [10, 20, 30, 40]
    assert coco.area_of({"area": 5.0, "segmentation": SQUARE}, box) == 5.0
    half = [[10.0, 20.0, 40.0, 20.0, 40.0, 60.0]]
    assert coco.area_of({"area": 0, "segmentation": half}, box) == 600.0
    assert coco.area_of({}, box) == 1200
    assert (
        coco.marks_of({"keypoints": [1, 1, 2, 1, 1, 0, 3, 3, 1], "num_keypoints": 0})
        == 2
    )
    assert coco.marks_of({}) == 0


# Masks


def test_outlines_of_fewer_than_three_points_are_skipped(parse):
    line = [10.0, 20.0, 40.0, 60.0]
    odd = [*SQUARE[0], 5.0]
    objects = [
        an_object(1, segmentation=[line, *SQUARE, odd]),
        an_object(2, segmentation=[line]),
    ]
    split = parse(a_file(*objects), MASK_RCNN)
    (kept,) = split.records[1]["annotations"]
    assert kept["segmentation"] == SQUARE
    (note,) = split.notes
    assert note.startswith("1 objects without a valid outline left out of the training")


def test_run_lengths_are_compressed_and_those_of_a_crowd_not_kept(parse):
    counts = [0, 100, WIDTH * HEIGHT - 100]  # the first column
    mask = {"size": [HEIGHT, WIDTH], "counts": counts}
    box = [0, 0, 1, 100]
    objects = [
        an_object(n, segmentation=mask, bbox=box, area=100, iscrowd=n - 1)
        for n in (1, 2)
    ]
    split = parse(a_file(*objects), MASK_RCNN)
    one, crowd = split.records[1]["annotations"]
    assert one["segmentation"]["size"] == [HEIGHT, WIDTH]
    again = an_object(1, segmentation=one["segmentation"], bbox=box, area=100)
    (same,) = parse(a_file(again), MASK_RCNN).records[1]["annotations"]
    assert same["segmentation"] == one["segmentation"]
    assert "segmentation" not in crowd


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (
            {"size": [WIDTH, HEIGHT], "counts": [20000]},
            "size [200, 100] is not the image's",
        ),
        ({"size": [HEIGHT, WIDTH], "counts": [19999]}, "do not fill the image"),
        ({"size": [HEIGHT, WIDTH], "counts": "!!"}, "do not fill the image"),
    ],
)
def test_a_mask_fills_its_image(parse, mask, says):
    with pytest.raises(BadInput) as error:
        parse(a_file(an_object(segmentation=mask)), MASK_RCNN)
    assert says in str(error.value) and str(error.value).startswith(
        "annotation 1: the mask's"
    )


@pytest.mark.parametrize("side", range(4))
def test_outlines_that_leave_their_box_are_refused_or_noted(parse, side):
    moved = [10.0, 20.0, 30.0, 40.0]
    moved[side] += 3 if side < 2 else -3  # more than the two pixels of a rounding
    near = [10.0, 20.0, 30.0, 40.0]
    near[side] += 2 if side < 2 else -2
    astray = [an_object(n, bbox=moved) for n in (1, 2)]
    right = [an_object(n, bbox=near) for n in (3, 4, 5)]
    with pytest.raises(BadInput, match="2 of 3 outlines leave their box; "):
        parse(a_file(*astray, right[0]), MASK_RCNN)
    (note,) = parse(a_file(*astray, *right), MASK_RCNN).notes
    assert note.startswith("2 of 5 outlines leave their box; ")
    assert parse(a_file(astray[0], *right), MASK_RCNN).notes == ()


# Keypoints


def posed(*values, number=1, **more):
    return an_object(number, keypoints=list(values), segmentation=None, **more)


def pose_file(*objects, **changes):
    person = {
        "id": 3,
        "name": "person",
        "keypoints": ["left_eye", "right_eye"],
    } | changes
    return a_file(*objects, categories=[person])


def test_keypoints_lie_in_the_middle_of_their_pixels(parse):
    objects = [
        posed(15, 25, 2, 20, 30, 0),
        posed(number=2),
        an_object(3, keypoints=None),
    ]
    split = parse(pose_file(*objects), KEYPOINT_RCNN)
    assert split.keypoints == ("left_eye", "right_eye")
    one, two, three = (each["keypoints"] for each in split.records[1]["annotations"])
    assert one == [15.5, 25.5, 2, 20.5, 30.5, 0]
    assert two == three == [0.5, 0.5, 0, 0.5, 0.5, 0]


def test_the_number_of_marks_is_counted_anew(parse):
    right = posed(15, 25, 2, 20, 30, 0, num_keypoints=1)
    wrong = posed(15, 25, 2, 20, 30, 1, num_keypoints=1, number=2)
    (note,) = parse(pose_file(right, wrong), KEYPOINT_RCNN).notes
    assert note.startswith(
        "1 of 2 num_keypoints are not the number of keypoints with a vis"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pose_file(posed(1, 2, 2)), "annotation 1: 3 keypoint values instead of 6"),
        (
            pose_file(posed(15, 25, 2, 20, 30, 3)),
            "annotation 1: keypoint 1: visibility 3; it is",
        ),
        (
            pose_file(posed(15, 25, 0, 20, 30, 0)),
            "every keypoint has visibility 0, so none",
        ),
        (
            pose_file(posed(0, 0, 0, 0, 0, 0)),
            "no annotation has keypoints; the keypoint task",
        ),
        (
            pose_file(posed(), keypoints=["a", "a"]),
            "category 3: two of its keypoints have one",
        ),
        (
            pose_file(posed(), keypoints=None),
            "has no 'keypoints' list; write their names into it",
        ),
        (a_file(an_object()), "this has 2 (cat, dog)"),
    ],
)
def test_wrong_keypoints_are_said(parse, content, says):
    with pytest.raises(BadInput) as error:
        parse(content, KEYPOINT_RCNN)
    assert says in str(error.value)


# What is refused


def images(*changes):
    return a_file(
        images=[
            {"id": 7, "file_name": "b", "width": 9, "height": 9} | c for c in changes
        ]
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON ("),
        (b"[]", "not JSON ("),
        (
            {"images": [], "categories": []},
            "has no 'annotations' list; expected COCO's format",
        ),
        (a_file(images={}), "has no 'images' list"),
        (a_file(3), "'annotations' number 1: 3 is not a row of `key: value`"),
        (
            a_file(an_object(), an_object(2, category_id=None)),
            "number 2 has no 'category_id'",
        ),
        (a_file(an_object(bbox=[1, 2, 3])), "'annotations' number 1: bbox [1, 2, 3]: "),
        (a_file(an_object(bbox=[1, 2, -3, 4])), "has a negative width or height"),
        (a_file(an_object(bbox=[1, 2, 3, "4"])), "'annotations' number 1: bbox '4': "),
        (a_file(an_object(bbox=[1, 2, 3, 1e13])), "'annotations' number 1: bbox 1"),
        (a_file(an_object(area=-1)), "number 1: area -1: "),
        (a_file(an_object(iscrowd=2)), "iscrowd 2: is neither 0 nor 1"),
        (a_file(an_object(1.5)), "id 1.5: is neither a whole number nor a text"),
        (a_file(an_object(True)), "id True: is neither"),
        (
            a_file(an_object("a" * 201)),
            "is neither a whole number nor a text of one short line",
        ),
        (
            a_file(an_object(), an_object()),
            "'annotations' number 2: its id appears twice (1)",
        ),
        (
            a_file(an_object(), an_object("x")),
            "ids of 'annotations': some are texts, some numb",
        ),
        (
            a_file(an_object(image_id=8)),
            "annotation 1: image 8 is not in the file's 'images'",
        ),
        (
            a_file(an_object(category_id=4)),
            "annotation 1: category 4 is not among the file's 2",
        ),
        (
            a_file(an_object(bbox=None, segmentation=None)),
            "has no 'bbox', and no outline to",
        ),
        (
            a_file(an_object(bbox=None, segmentation=[[]])),
            "annotation 1 has no 'bbox', and no",
        ),
        (a_file(categories=[]), "'categories' is empty"),
        (a_file(images=[]), "no images"),
        (
            a_file(
                an_object(1, category_id=1),
                an_object(2, category_id=2),
                categories=[{"id": 1, "name": "a"}, {"id": 2, "name": "a"}],
            ),
            "the name 'a'",
        ),
        (
            a_file(categories=[{"id": 1, "name": "a\u0007"}]),
            "holds the control character",
        ),
        (
            a_file(categories=[{"id": "1", "name": "a"}]),
            "'categories' number 1: id '1': ",
        ),
        (images({"width": 0}), "'images' number 1: width 0: "),
        (images({"width": 9.5}), "'images' number 1: width 9.5: "),
        (images({"height": 1 << 31}), "'images' number 1: height 2147483648: "),
        (images({"file_name": ""}), "'images' number 1: file_name '': "),
        (images({}, {}), "'images' number 2: its id appears twice (7)"),
    ],
)
def test_what_would_train_wrongly_is_named(parse, content, says):
    with pytest.raises(BadInput) as error:
        parse(content)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


# Boxes against their images


def checked(*rows):
    """Check boxes of images of 200 x 100 pixels."""
    values = [list(map(float, row)) for row in rows]
    sizes = np.full((len(rows), 2), (WIDTH, HEIGHT), float)
    names = list(range(1, len(rows) + 1))
    return box_format.check(
        box_format.Boxes("annotation", names, np.array(values), sizes)
    )


GOOD = (10, 20, 30, 40)


def test_sound_boxes_are_no_fault():
    assert checked(*[GOOD] * 9, (0, 0, WIDTH, HEIGHT)) == []
    # A rounding beyond the side, and one box that reaches out, are none either
    assert checked(*[GOOD] * 9, (100, 50, 102, 52)) == []


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [(0.1, 0.2, 0.3, 0.4)] * 3 + [GOOD] * 2,
            "3 of 5 boxes lie between 0 and 1, so they",
        ),
        ([(10, 20, 0, 0)] * 2, "no box has a width and a height; first"),
        ([(300, 20, 30, 40)] * 2, "none of 2 boxes touches its image; first"),
        (
            [(150, 50, 190, 90)] * 9 + [GOOD],
            "boxes reach outside their image, but all fit as",
        ),
    ],
)
def test_boxes_of_another_format_are_refused(rows, says):
    with pytest.raises(BadInput) as error:
        checked(*rows)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        (
            [(150, 50, 80, 20)] * 2,
            "2 of 100 boxes reach outside their image (they are cut to it)",
        ),
        (
            [(150, 50, 300, 20)],
            "1 of 100 boxes reach outside their image by more than its side",
        ),
        (
            [(250, 50, 30, 20)],
            "1 of 100 boxes do not touch their image: they are never trained",
        ),
        (
            [(50, 50, 0, 20)],
            "1 of 100 boxes have no width or no height: they are never trained",
        ),
    ],
)
def test_what_may_be_right_but_seldom_is_is_noted(rows, note):
    notes = checked(*rows, *[GOOD] * (100 - len(rows)))
    assert any(each.startswith(note) for each in notes), notes


# Limits


@pytest.mark.parametrize(
    "id", ["a" * 200, 2**599 - 1, 0, -5], ids=["text", "number", "zero", "negative"]
)
def test_an_id_may_be_as_long_as_a_line(parse, id):
    (row,) = parse(a_file(an_object(id))).records[1]["annotations"]
    assert row["bbox"] == [10, 20, 30, 40]


@pytest.mark.parametrize(
    "id", [2**599, "a\nb", None, [1]], ids=["number", "lines", "null", "list"]
)
def test_an_id_that_is_no_short_line_is_refused(parse, id):
    content = a_file(an_object())
    content["annotations"][0]["id"] = id
    with pytest.raises(BadInput, match="'annotations' number 1: id "):
        parse(content)


def test_of_many_outlines_some_are_compared_with_their_boxes(parse, monkeypatch):
    """Of five and at most some two, the first and the fourth."""
    monkeypatch.setattr(coco, "SAMPLED", 2)
    moved = [20, 30, 30, 40]

    whole = [an_object(n) for n in range(1, 6)]

    def changed(*astray):
        rows = [dict(row) for row in whole]
        for number in astray:
            rows[number - 1]["bbox"] = moved
        return a_file(*rows)

    assert parse(changed(2, 3, 5), MASK_RCNN).notes == ()
    assert parse(changed(1), MASK_RCNN).notes == ()
    with pytest.raises(
        BadInput, match=r"^2 of 2 outlines leave their box; COCO's boxes"
    ):
        parse(changed(1, 4), MASK_RCNN)


def test_a_half_or_a_tenth_of_outlines_may_leave_their_box(parse):
    def notes(astray, count):
        boxes = [[20, 30, 30, 40]] * astray + [[10, 20, 30, 40]] * (count - astray)
        rows = [an_object(n, bbox=box) for n, box in enumerate(boxes, 1)]
        return parse(a_file(*rows), MASK_RCNN).notes

    (note,) = notes(2, 4)
    assert note == (
        "2 of 4 outlines leave their box; COCO's boxes are [x, y, width, height] in pixels"
    )
    assert notes(2, 20)[0].startswith("2 of 20 outlines leave")
    assert notes(2, 21) == ()
    assert notes(1, 2) == ()


def test_three_classes_are_named_where_keypoints_need_one(parse):
    classes = [{"id": n, "name": f"c{n}"} for n in (4, 3, 2, 1)]
    with pytest.raises(BadInput) as error:
        parse(a_file(an_object(), categories=classes), KEYPOINT_RCNN)
    assert str(error.value) == (
        "keypoints need one category with a 'keypoints' list; this has 4 (c1, c2, c3)"
    )
    classes[0]["name"] = "c2"
    objects = [an_object(1, category_id=2), an_object(2, category_id=4)]
    with pytest.raises(BadInput) as error:
        parse(a_file(*objects, categories=classes))
    assert str(error.value) == (
        "two categories have the name 'c2' (ids 2 and 4), and objects; rename one, or give the"
        " objects of both one id"
    )


def test_a_group_of_classes_is_no_class(parse):
    """Roboflow lists the name of the group before its classes, and often they have the same."""
    group = {"id": 0, "name": "fish", "supercategory": "none"}
    fish = {"id": 3, "name": "fish", "supercategory": "fish"}
    crab = {"id": 2, "name": "crab", "supercategory": "fish"}
    split = parse(a_file(an_object(category_id=3), categories=[fish, group, crab]))
    assert (split.categories, split.ids) == (("crab", "fish"), (2, 3))
    assert split.records[1]["annotations"][0]["category_id"] == 1
    # Where the class has no object, either stands for it
    split = parse(a_file(an_object(category_id=2), categories=[group, crab, fish]))
    assert (split.categories, split.ids) == (("fish", "crab"), (0, 2))
    # A group of another name is a class without objects, but for keypoints, of which it has none
    group["name"] = "pose"
    fish["keypoints"] = ["eye"]
    lists = a_file(
        an_object(category_id=3, keypoints=[30.0, 40.0, 2]), categories=[group, fish]
    )
    assert parse(lists).categories == ("pose", "fish")
    assert parse(lists, KEYPOINT_RCNN).ids == (3,)
    fish["keypoints"] = []
    with pytest.raises(BadInput, match=r"this has 2 \(pose, fish\)"):
        parse(lists, KEYPOINT_RCNN)


def test_all_notes_of_a_file_come_together(parse):
    """Of two objects neither has an area, one no box and one no valid outline."""
    line = [10.0, 20.0, 40.0, 60.0]
    objects = [
        an_object(1, bbox=None, area=None),
        an_object(2, area=0, segmentation=[line]),
    ]
    split = parse(a_file(*objects), MASK_RCNN)
    assert split.notes == (
        "1 of 2 boxes are missing: computed from outlines",
        "2 of 2 areas are missing or 0: computed from the outline, or else the box",
        "1 objects without a valid outline left out of the training; scoring misses them",
    )
    assert split.objects == 2
    with pytest.raises(BadInput) as error:
        parse(a_file(objects[0], an_object(2, bbox=None, segmentation=None)), MASK_RCNN)
    said = "'annotations' number 2 has no 'bbox', and no outline to compute it from"
    assert str(error.value) == said
    with pytest.raises(BadInput) as error:
        parse(a_file(objects[0], an_object(2, segmentation=None)), MASK_RCNN)
    needed = "masks need an outline of each object; add it, or take faster_rcnn"
    assert str(error.value) == f"'annotations' number 2 has no 'segmentation'; {needed}"
    boxed = an_object(2)
    del boxed["segmentation"]
    with pytest.raises(BadInput) as error:
        parse(a_file(an_object(1), boxed), MASK_RCNN)
    assert str(error.value) == f"'annotations' number 2 has no 'segmentation'; {needed}"


def test_a_byte_order_mark_is_no_part_of_the_file(parse):
    text = json.dumps(a_file(an_object())).encode()
    assert parse(b"\xef\xbb\xbf" + text).records == parse(text).records


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ("images", coco.CocoImage),
        ("categories", coco.CocoCategory),
        ("annotations", coco.CocoBox),
    ],
)
def test_a_refusal_names_all_that_a_row_needs(rows, kind):
    named = set(re.findall(r"\w+", coco.ROWS_NEED[rows])) - {"and"}
    assert named == set(kind.__required_keys__)
