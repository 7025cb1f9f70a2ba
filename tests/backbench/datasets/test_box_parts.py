"""Folders of boxes: where COCO's files and images lie, what a folder is taken for, and outlines."""

import json

import pytest
from PIL import Image

from backbench.datasets import box_labels, catalog
from backbench.datasets.boxes import box_folders, coco_json, parts
from backbench.errors import BadInput

WHOLE = {
    "images": [{"id": 1, "file_name": "a.png"}],
    "annotations": [],
    "categories": [],
}


@pytest.fixture
def folder(tmp_path):
    """folder(names, content): a picture for each .png, and COCO's lists in each .json."""
    base = tmp_path / "mine"

    def write(names, content=WHOLE):
        for name in names:
            file = base / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".png":
                Image.new("RGB", (8, 4)).save(file)
            else:
                file.write_text(json.dumps(content))
        return base

    return write


def found(base):
    """Split -> (its file, the folder of its images, its file of keypoints)"""

    def named(path):
        return path and path.relative_to(base).as_posix()

    of_splits = coco_json.find(base).items()
    return {
        split: (named(part.file), named(part.folder), named(part.keypoints))
        for split, part in of_splits
    }


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        # In annotations/, in the folder itself, beside the images of each split
        (
            ["annotations/instances_train2017.json", "train2017/a.png"],
            {"train": ("annotations/instances_train2017.json", "train2017", None)},
        ),
        (["boxes.json", "images/a.png"], {"": ("boxes.json", "images", None)}),
        (
            [
                "train/_annotations.coco.json",
                "train/a.png",
                "valid/x.json",
                "valid/a.png",
            ],
            {
                "train": ("train/_annotations.coco.json", "train", None),
                "val": ("valid/x.json", "valid", None),
            },
        ),
        # A split in the file's name comes before its folder's
        (
            ["train/my-val-x.json", "train/a.png"],
            {"val": ("train/my-val-x.json", "train", None)},
        ),
        # The last word of the name, then beside the file, then the usual folders
        (
            ["annotations/a_b.json", "b/a.png", "annotations/a.png"],
            {"": ("annotations/a_b.json", "b", None)},
        ),
        (
            ["annotations/a_b.json", "images/b/a.png", "images/a.png"],
            {"": ("annotations/a_b.json", "images/b", None)},
        ),
        (
            ["annotations/train.json", "images/a.png", "training/a.png"],
            {"train": ("annotations/train.json", "images", None)},
        ),
        (
            ["annotations/x_train.json", "images/training/a.png"],
            {"train": ("annotations/x_train.json", "images/training", None)},
        ),
        (["annotations/x.json", "a.png"], {"": ("annotations/x.json", ".", None)}),
        (
            ["annotations/x.json", "JPEGImages/a.png"],
            {"": ("annotations/x.json", "JPEGImages", None)},
        ),
        # Keypoints beside boxes, and alone
        (
            [
                "annotations/instances_val.json",
                "annotations/person_keypoints_val.json",
                "annotations/person_keypoints_train.json",
                "annotations/captions_val.json",
                "annotations/stuff_val.json",
                "images/a.png",
            ],
            {
                "train": (
                    "annotations/person_keypoints_train.json",
                    "images",
                    "annotations/person_keypoints_train.json",
                ),
                "val": (
                    "annotations/instances_val.json",
                    "images",
                    "annotations/person_keypoints_val.json",
                ),
            },
        ),
    ],
)
def test_where_annotations_and_their_images_lie(folder, names, wanted):
    assert found(folder(names)) == wanted


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["annotations/a_val.json", "annotations/b_valid.json"],
            "two annotation files for 'val', a_val.json and b_valid.json; keep one",
        ),
        (
            ["annotations/a.json", "annotations/b.json"],
            "two annotation files of no split, a.json and b.json; keep one, or name",
        ),
        (["annotations/a_val.json"], "{images,images/val,val}; put the images there"),
        (["annotations/a.json"], "{images,images/train,train}; put the images there"),
    ],
)
def test_annotations_that_cannot_be_told_apart_or_have_no_images(folder, names, says):
    base = folder(names)
    with pytest.raises(BadInput) as refused:
        coco_json.find(base)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1], "a list, as of detections, and no annotation file in COCO's format"),
        ({**WHOLE, "images": {}}, "'images' is no list, and so no annotation file"),
        ({**WHOLE, "images": []}, "its 'images' list is empty; list the images"),
        (
            {**WHOLE, "images": [{}]},
            "not an annotation file in COCO's format ('file_name')",
        ),
        (
            {**WHOLE, "images": [{"file_name": ""}]},
            "'images' number 1: file_name ''; it must",
        ),
        (
            {**WHOLE, "images": [{"file_name": 3}]},
            "'images' number 1: file_name 3; it must",
        ),
    ],
)
def test_an_annotation_file_names_its_first_image(folder, content, says):
    base = folder(["annotations/x.json"], content)
    with pytest.raises(BadInput) as refused:
        coco_json.find(base)
    assert str(refused.value).startswith(f"{base / 'annotations' / 'x.json'}: {says}")


def test_a_json_without_all_lists_is_of_something_else(folder):
    for key in WHOLE:
        less = {name: value for name, value in WHOLE.items() if name != key}
        assert coco_json.find(folder(["x.json", "a.png"], less)) is None
    assert coco_json.find(folder(["captions_x.json"])) is None


def test_a_folder_of_boxes_is_known_from_all_sides(folder, tmp_path):
    base = folder(
        ["annotations/x_train.json", "images/train/a.png", "images/val/b.png"]
    )
    assert box_folders.pictures_of(base) == base / "images" / "train"
    assert box_folders.above(base / "images") == base
    assert box_folders.above(base / "images" / "train") == base
    assert box_folders.above(base / "images" / "train" / "x") is None
    assert box_folders.above(base) is None
    with pytest.raises(BadInput) as refused:
        box_folders.refuse(base)
    assert str(refused.value) == (
        f"{base}: holds boxes, no folder for each class; `backbench evaluate CHECKPOINT --data"
        f" {base}` trains a detector on them and scores it"
    )
    # Something wrong with its boxes makes it no folder of classes
    (base / "annotations" / "y_train.json").write_text(json.dumps(WHOLE))
    assert box_folders.looks_like_boxes(base)
    assert box_folders.pictures_of(base) == base / "images"
    other = tmp_path / "other"
    other.mkdir()
    box_folders.refuse(other)
    assert box_folders.pictures_of(other) is None
    assert box_folders.find(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["annotations/x.json", "annotations/y_val.json", "annotations/z_test.json"],
            "x.json: its name tells no split, and test and val are beside it; call it train",
        ),
        (
            ["annotations/y_val.json", "annotations/z_test.json"],
            "has test, val, but no train list; call one of them train, or leave the split out",
        ),
    ],
)
def test_boxes_need_something_to_train_on(folder, names, says):
    base = folder([*names, "images/a.png"])
    with pytest.raises(BadInput) as refused:
        box_folders.find(base)
    assert says in str(refused.value)


def test_two_layouts_at_once_are_refused(folder):
    base = folder(["annotations/x.json", "images/a.png"])
    (base / "labels").mkdir()
    (base / "labels" / "a.txt").write_text("0 0.5 0.5 0.25 0.5\n")
    (base / "classes.txt").write_text("cat\n")
    with pytest.raises(BadInput) as refused:
        box_folders.find(base)
    said = f"{base}: holds boxes in the layouts of COCO and YOLO; move one of them away"
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("segmentations", "outlined"),
    [
        ([[[0, 0, 1, 0, 1, 1]], [[0, 0, 1, 0, 1, 1]]], True),
        ([[[0, 0, 1, 0, 1, 1]], []], False),
        ([[[0, 0, 1, 0, 1, 1]], None], False),
        ([[[0, 0, 1, 0, 1, 1]], [[]]], False),
        ([], False),
    ],
)
def test_cocos_objects_all_have_outlines_or_not(folder, segmentations, outlined):
    rows = [{"segmentation": each} for each in segmentations]
    names = ["annotations/x_train.json", "annotations/x_val.json", "images/a.png"]
    # The last object stands in the second file
    base = folder(names[:1] + names[2:], {**WHOLE, "annotations": rows[:1]})
    folder(names[1:2], {**WHOLE, "annotations": rows[1:]})
    assert box_folders.must_find(base).has_outlines() == outlined
    (base / "annotations" / "x_val.json").write_text(
        '{"images": [{"file_name": "a.png"}]}'
    )
    assert not box_folders.must_find(base).has_outlines()


@pytest.mark.parametrize(
    ("first", "second", "outlined"),
    [
        ("0 0 0 1 0 1 1", "", True),
        ("\n", "0 0 0 1 0 1 1", True),
        (None, " \n0 0 0 1 0 1 1", True),
        ("0 0.5 0.5 0.2 0.2", "0 0 0 1 0 1 1", False),
        ("", "", False),
    ],
)
def test_yolos_first_object_tells_of_outlines(folder, first, second, outlined):
    base = folder(["images/a.png", "images/b.png"])
    (base / "classes.txt").write_text("cat\n")
    (base / "labels").mkdir()
    for name, text in (("a", first), ("b", second)):
        if text is not None:
            (base / "labels" / f"{name}.txt").write_text(text)
    assert box_folders.must_find(base).has_outlines() == outlined


def test_texts_of_others_are_utf8(tmp_path):
    file = tmp_path / "x.txt"
    file.write_bytes("\ufeffü\n".encode())
    assert parts.read_text(file, most=6) == "ü\n"
    file.write_bytes(b"\xff")
    with pytest.raises(
        BadInput, match=f"{file}: is no text in UTF-8; save it as UTF-8"
    ):
        parts.read_text(file, most=6)
    file.write_bytes(bytes(7))
    with pytest.raises(
        BadInput, match=rf"{file}: not readable \(7 bytes, more than any"
    ):
        parts.read_text(file, most=6)


def test_pictures_of_one_stem_would_share_their_labels(tmp_path):
    for name in ("a.png", "b.jpg", "note.txt", ".c.png"):
        (tmp_path / name).touch()
    assert parts.pictures_in(tmp_path) == {
        "a": tmp_path / "a.png",
        "b": tmp_path / "b.jpg",
    }
    (tmp_path / "b.png").touch()
    with pytest.raises(BadInput) as refused:
        parts.pictures_in(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path / 'b.png'}: b.jpg beside it would have the same label file; rename one of the"
        " two"
    )
    assert parts.pictures_in(tmp_path / "nowhere") == {}


def test_label_files_without_images_are_counted(tmp_path):
    parts.refuse_unlike(["a", "b"], ["b"], tmp_path, ".txt")
    with pytest.raises(BadInput) as refused:
        parts.refuse_unlike(["a"], ["c", "b", "a"], tmp_path, ".txt")
    assert str(refused.value) == (
        f"{tmp_path}: 2 label files have no image, first b.txt; put the images there, or take the"
        " files away"
    )


def test_a_json_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "x.json"
    for text in ("{", "1" * 50):
        file.write_text(text)
        with pytest.raises(BadInput) as refused:
            box_labels._json_of(file)
        assert str(refused.value).startswith(f"{file}: not readable (")
        assert str(refused.value).endswith("); export it again")


def test_an_image_shows_the_classes_of_its_objects(folder):
    """Several objects, none, and a class twice; images in the order of their names."""
    content = {
        "images": [
            {"id": 7, "file_name": "c.png"},
            {"id": 2, "file_name": "a.png"},
            {"id": 3, "file_name": "b.png"},
        ],
        "categories": [{"id": 5, "name": "zebra"}, {"id": 9, "name": "ant"}],
        "annotations": [
            {"id": n, "image_id": image, "category_id": category}
            for n, (image, category) in enumerate([(7, 5), (7, 9), (7, 5), (2, 5)])
        ],
    }
    base = folder(["annotations/x_train.json", "images/c.png"], content)
    test = {**content, "annotations": [{"id": 1, "image_id": 3, "category_id": 9}]}
    folder(["annotations/x_test.json"], test)
    (base / "annotations" / "x_val.json").write_text(json.dumps(test))
    found = box_labels.read(base, 0)
    assert found.train.classes == ("ant", "zebra")
    marks = dict(zip(found.train.paths, found.train.marks))
    assert marks == {"a.png": "1", "b.png": "", "c.png": "0,1"}
    assert list(found.train.paths) == ["a.png", "b.png", "c.png"]
    assert found.test.marks == found.val.marks == ("", "0", "")
    assert found.train.labels == (0, 0, 0) and not found.held_out


# Names that are nearly right, and what is there in place of boxes


@pytest.mark.parametrize(
    "name",
    [
        "../images/a.png",
        "/elsewhere/images/a.png",
        "C:\\data\\images\\a.png",
        "photos/a.png",
        "A.PNG",
        "a.jpg",
        "a",
    ],
)
def test_a_name_that_is_nearly_right_is_told_the_right_one(folder, name):
    images = [{"id": 1, "file_name": name}]
    base = folder(
        ["annotations/train.json", "images/a.png"], WHOLE | {"images": images}
    )
    with pytest.raises(BadInput) as refused:
        coco_json.find(base)
    right = base / "images/a.png"
    assert str(refused.value) == (
        f"{base / 'annotations/train.json'}: its first image '{name}' is no image below {base}, but {right} is;"
        " write each file_name as it lies below its folder, 'a.png'"
    )


def test_an_absolute_name_inside_of_the_folder_is_found(folder, tmp_path):
    images = [{"id": 1, "file_name": str(tmp_path / "mine/images/a.png")}]
    base = folder(
        ["annotations/train.json", "images/a.png"], WHOLE | {"images": images}
    )
    assert found(base) == {"train": ("annotations/train.json", "images", None)}


def test_a_byte_order_mark_is_no_part_of_the_json(folder):
    base = folder(["annotations/train.json", "images/a.png"])
    file = base / "annotations/train.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert found(base) == {"train": ("annotations/train.json", "images", None)}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["VOC/mine/data.json", "VOC/mine/a.png"], "its folder VOC/mine holds boxes;"),
        (["images/a.png", "labels.csv"], "labels.csv may hold boxes in a layout that"),
        (
            ["train/boxes/a.json", "train/boxes/a.png"],
            "its folder train/boxes holds boxes; name ",
        ),
    ],
)
def test_what_may_have_been_meant_is_said(folder, names, said):
    base = folder(names)
    for read in (
        lambda: box_folders.must_find(base),
        lambda: catalog.present("mine", base.parent),
    ):
        with pytest.raises(BadInput, match=said):
            read()


def test_one_split_is_not_named_for_the_dataset(folder):
    base = folder(["train/annotations/a.json", "train/a.png", "val/annotations/b.json"])
    with pytest.raises(BadInput) as refused:
        box_folders.must_find(base)
    assert str(refused.value) == (
        f"{base}: holds no boxes itself; its folder train holds the boxes of one split; put train,"
        f" val together, as {box_folders.LAYOUTS}"
    )


def test_notes_beside_classes_are_no_boxes(folder):
    base = folder(["one/a.png", "one/notes.txt", "notes.txt"])
    assert box_folders.almost(base) == ""
    with pytest.raises(BadInput, match=r"<class>/<image>$"):
        catalog.present("mine", base.parent)


def test_the_image_that_a_wrong_name_means(tmp_path):
    for name in ("b.jpg", "b.png", "B.txt"):
        (tmp_path / name).touch()
    # The same name but for its folders and its letters, before one of another ending
    assert parts.near("/lab/x/b.png", tmp_path) == "b.png"
    assert parts.near(r"C:\x\B.JPG", tmp_path) == "b.jpg"
    assert parts.near("b", tmp_path) == parts.near("b.tif", tmp_path) == "b.jpg"
    assert parts.near("c.png", tmp_path) == ""
    assert parts.near("b.png", tmp_path / "none") == ""
