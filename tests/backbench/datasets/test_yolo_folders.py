"""Folders in YOLO's format: where images and labels lie, what data.yaml says, and each line by hand."""

import shutil

import pytest
from PIL import Image

from backbench.datasets.boxes import box_folders, yolo_text
from backbench.errors import BadInput

BOX = "0 0.5 0.5 0.25 0.5"  # of a picture of 8 x 4 pixels: 3 1 2 2
CLASSES = "classes.txt"


@pytest.fixture
def folder(tmp_path):
    """folder(files): name -> its text, or a picture of 8 x 4 pixels for each .png."""
    base = tmp_path / "mine"
    base.mkdir()

    def write(files):
        for name, text in files.items():
            file = base / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".png":
                Image.new("RGB", (8, 4)).save(file)
            else:
                file.write_text(text)
        return base

    return write


def pictures(base):
    """Split -> the pictures with the names of their label files."""
    found = {}
    for split, part in yolo_text.find(base).parts.items():
        pairs = [(pair.image, pair.labels and pair.labels.name) for pair in part.pairs]
        found[split] = pairs
    return found


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "train: images\nval: images/\ntest:",
            "train and val are the same images; leave val out, and a fifth of the images is drawn",
        ),
        (
            "train: one\nval: images\ntest: images",
            "val and test are the same images; leave test",
        ),
        (
            "train: images\ntest: images",
            "train and test are the same images; leave test out",
        ),
    ],
)
def test_two_splits_of_the_same_images_are_told_what_to_do(folder, lines, said):
    """Ultralytics' coco8.yaml and coco128.yaml name one folder twice."""
    files = {"images/a.png": "", "labels/a.txt": BOX, "one/b.png": "", "one/b.txt": BOX}
    base = folder(files | {"coco8.yaml": f"{lines}\nnames: [cat]"})
    with pytest.raises(BadInput) as error:
        yolo_text.find(base)
    assert f"coco8.yaml: {said}" in str(error.value)
    assert str(error.value).endswith("drawn for test") == ("\nval: images/" in lines)


@pytest.mark.parametrize(
    ("images", "labels", "split"),
    [
        ("images/train/a.png", "labels/train/a.txt", "train"),
        ("train/images/a.png", "train/labels/a.txt", "train"),
        ("val/a.png", "val/a.txt", "val"),
        ("images/a.png", "labels/a.txt", ""),
        ("a.png", "a.txt", ""),
    ],
)
def test_labels_lie_where_exporters_put_them(folder, images, labels, split):
    base = folder({images: "", labels: BOX, CLASSES: "cat\ndog\n"})
    assert pictures(base) == {split: [(images, "a.txt")]}
    assert yolo_text.find(base).classes == {0: "cat", 1: "dog"}


@pytest.mark.parametrize(
    "names",
    [
        "names: [cat, dog]",
        "names: {0: cat, 1: dog}\nnc: 2",
        "nc: 2\nnames:\n- cat\n- dog",
    ],
)
def test_data_yaml_names_classes_and_parts(folder, names):
    files = {"data.yaml": f"{names}\ntrain: train/images\nval: [one, two]\n"}
    for place in ("train/images", "one", "two"):
        files[f"{place}/{place[:3]}.png"] = ""
        files[f"{place}/{place[:3]}.txt".replace("images", "labels")] = BOX
    base = folder(files)
    assert yolo_text.find(base).classes == {0: "cat", 1: "dog"}
    assert pictures(base) == {
        "train": [("train/images/tra.png", "tra.txt")],
        "val": [("one/one.png", "one.txt"), ("two/two.png", "two.txt")],
    }


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("", "../images"),
        ("", "images"),
        ("path: .\n", "images"),
        ("path: data\n", "x"),
        ("", "./images"),
    ],
)
def test_paths_lead_to_a_folder_below(folder, path, place):
    files = {"data.yaml": f"names: [cat]\n{path}train: {place}\n"}
    inner = "data/x" if place == "x" else "images"
    base = folder(files | {f"{inner}/a.png": "", f"{inner}/a.txt": BOX})
    assert pictures(base) == {"train": [(f"{inner}/a.png", "a.txt")]}


def test_a_list_names_pictures(folder):
    listed = "images/a.png\n\n./images/b.png\n"
    files = {"data.yaml": "names: [cat]\ntrain: train.txt\n", "train.txt": listed}
    files |= {f"images/{name}.png": "" for name in "abc"}
    base = folder(files | {"labels/a.txt": BOX})
    assert pictures(base) == {
        "train": [("images/a.png", "a.txt"), ("images/b.png", None)]
    }


@pytest.mark.parametrize("above", ["", "data/"])
def test_darknets_description_is_read_as_cvat_writes_it(folder, above):
    """CVAT's YOLO 1.1; Darknet's own paths begin above the folder, at data/."""
    said = (
        f"classes = 2  # optional\nnames = {above}obj.names\ntrain = {above}train.txt\n"
    )
    files = {
        "obj.data": f"{said}valid = {above}valid.txt\nbackup = backup/\n",
        "obj.names": "cat\ndog\n",
        "train.txt": f"{above}obj_train_data/a.png\n{above}obj_train_data/b.png\n",
        "valid.txt": f"{above}obj_valid_data/c.png\n",
    }
    for place in ("obj_train_data/a", "obj_train_data/b", "obj_valid_data/c"):
        files |= {f"{place}.png": "", f"{place}.txt": BOX}
    base = folder(files)
    assert yolo_text.find(base).classes == {0: "cat", 1: "dog"}
    assert pictures(base) == {
        "train": [("obj_train_data/a.png", "a.txt"), ("obj_train_data/b.png", "b.txt")],
        "val": [("obj_valid_data/c.png", "c.txt")],
    }


@pytest.mark.parametrize(
    "content", [bytes(range(256)), b"5.1,3.5\n" * 10, b"a = b", b"x" * 2**21]
)
def test_numbers_called_data_describe_no_boxes(folder, content):
    base = folder({"images/a.png": "", "labels/a.txt": BOX, CLASSES: "cat\n"})
    (base / "iris.data").write_bytes(content)
    assert pictures(base) == {"": [("images/a.png", "a.txt")]}
    plain = folder({"cat/a.png": "", "dog/a.png": ""})
    (plain / "iris.data").write_bytes(content)
    (plain / CLASSES).unlink()
    shutil.rmtree(plain / "labels")
    assert yolo_text.find(plain) is None


def darknet(text):
    listed = {"obj.names": "cat\n", "train.txt": "obj_train_data/a.png\n"}
    images = {"obj_train_data/a.png": "", "obj_train_data/a.txt": BOX}
    return {**listed, **images, "obj.data": text}


PLAIN = {"images/a.png": "", "labels/a.txt": BOX}
DATA = {**PLAIN, "data.yaml": "names: [cat]\ntrain: images\n"}


def yaml(text):
    return {**PLAIN, "data.yaml": text}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (yaml("names: [cat"), "data.yaml: no YAML"),
        (yaml("train: images"), "data.yaml: has no 'names'; write `names: "),
        (yaml("names: cat"), "data.yaml: has no 'names'"),
        (yaml("names: []"), "data.yaml: names no class"),
        (yaml("names: [cat, cat]"), "two classes are called 'cat'; rename one"),
        (yaml('names: ["a\\u0007"]'), "a class name holds"),
        (yaml("names: {a: cat}"), "names: 'a' is no class number"),
        (yaml("names: {-1: cat}"), "names: -1 is no class number"),
        (yaml("names: {true: cat}"), "names: True is no class number"),
        (yaml("names: [cat]\nnc: 2"), "says 2 classes, but 1 names are there"),
        (
            {**DATA, "more.yaml": "names: [dog]"},
            "data.yaml and more.yaml both name classes",
        ),
        (
            yaml("names: [cat]\nval: images\nvalid: images"),
            "states val and valid; keep one",
        ),
        (yaml("names: [cat]\ntrain: [3]"), "train: 3 is no folder's name"),
        (darknet("names = none.names"), "'none.names' is no folder of images, and no"),
        (darknet("names = obj_train_data"), "obj.data: names is no file; write `na"),
        (
            darknet("names =\ntrain = train.txt"),
            "obj.data: names is no file; write `na",
        ),
        (
            darknet("classes = 2\nnames = obj.names\ntrain = train.txt"),
            "obj.data: says 2 classes, but 1 names are there",
        ),
        (
            darknet(f"classes = {'9' * 5000}\nnames = obj.names\ntrain = train.txt"),
            "obj.data: says 9999999999 classes, but 1 names are there",
        ),
        (
            {**darknet("names = obj.names"), "b.data": "names = obj.names"},
            "b.data and obj.data both name classes",
        ),
        (
            {**darknet("names=obj.names\ntrain=train.txt"), "train.txt": "x/b.png"},
            "train.txt: line 1: 'x/b.png' is no image below",
        ),
        (
            yaml("names: [cat]\ntrain: /etc"),
            "'/etc' is no folder of images, and no list, below",
        ),
        (
            {**yaml("names: [cat]\ntrain: empty"), "empty/x.md": ""},
            "empty: holds no image",
        ),
        (
            {**PLAIN},
            "has label files in labels/, and neither data.yaml nor classes.txt",
        ),
        ({**PLAIN, CLASSES: "\n \n"}, "classes.txt: names no class"),
        (
            {**DATA, "images/in/b.png": ""},
            "in: holds images, too; a split's images lie in one",
        ),
        (
            {**DATA, "images/b.png": "", "images/c.png": ""},
            "2 of 3 images have no label file",
        ),
        ({**DATA, "labels/b.txt": BOX}, "b.txt"),
        (
            {**yaml("names: [cat]\ntrain: a.txt"), "a.txt": "\n"},
            "a.txt: lists no image",
        ),
        (
            {**yaml("names: [cat]\ntrain: a.txt"), "a.txt": "images/z.png"},
            "line 1: 'images/z.png'",
        ),
        (
            {**yaml("names: [cat]\ntrain: a.txt"), "a.txt": "../a.png"},
            "line 1: '../a.png' is no",
        ),
        (
            {**yaml("names: [cat]\ntrain: a.txt"), "a.txt": "labels/a.txt"},
            "line 1: 'labels/a.txt'",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_in_one_line(folder, files, says):
    base = folder(files)
    with pytest.raises(BadInput) as error:
        yolo_text.find(base)
    assert says in str(error.value)
    assert str(base) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "files",
    [
        {"a.png": ""},
        {
            "classes.txt": "cat\n",
            "cat/a.png": "",
        },  # a folder for each class, with a list
        {"other.yaml": "names: [", "a.png": ""},
        {"other.yaml": "lr: 3", "a.png": ""},
        {"data.yaml": "names: [cat]", "cat/a.png": ""},
    ],
)
def test_what_is_no_folder_of_boxes_is_none(folder, files):
    assert yolo_text.find(folder(files)) is None


# Lines


def read(base, **more):
    boxes = yolo_text.find(base)
    (part,) = boxes.parts.values()
    return yolo_text.read(part, boxes.classes, keypoints=boxes.keypoints, **more)


def test_a_box_in_pixels(folder):
    base = folder({**DATA, "labels/a.txt": f"{BOX}\n\n0 0.5 0.5 1.0 1.0\n"})
    content = read(base)
    assert content["images"] == [
        {"id": "images/a.png", "file_name": "images/a.png", "width": 8, "height": 4}
    ]
    first, second = content["annotations"]
    assert (first["bbox"], first["area"]) == ([3.0, 1.0, 2.0, 2.0], 4.0)
    assert (second["bbox"], second["area"]) == ([0.0, 0.0, 8.0, 4.0], 32.0)
    assert (first["id"], second["id"], first["category_id"]) == (1, 2, 0)
    assert first["image_id"] == "images/a.png"
    assert content["categories"] == [{"id": 0, "name": "cat"}]


def test_an_outline_has_its_box_and_area(folder):
    triangle = "0 0.0 0.0 0.5 0.0 0.5 1.0"
    (row,) = read(folder({**DATA, "labels/a.txt": triangle}), outlines=True)[
        "annotations"
    ]
    assert row["segmentation"] == [[0.0, 0.0, 4.0, 0.0, 4.0, 4.0]]
    assert (row["bbox"], row["area"]) == ([0.0, 0.0, 4.0, 4.0], 8.0)


POSED = {
    **PLAIN,
    "data.yaml": "names: [cat]\ntrain: images\nkpt_shape: [2, 3]\nflip_idx: [1, 0]\n",
}


def test_keypoints_follow_their_box(folder):
    line = f"{BOX} 0.5 0.25 2 0 0 0"
    content = read(folder({**POSED, "labels/a.txt": line}))
    (row,) = content["annotations"]
    assert row["bbox"] == [3.0, 1.0, 2.0, 2.0]
    assert row["keypoints"] == [4.0, 1.0, 2, 0.0, 0.0, 0]
    assert content["categories"][0]["keypoints"] == ["keypoint_1", "keypoint_2"]
    assert yolo_text.find(folder({})).keypoints.partners == (1, 0)


def test_keypoints_without_a_visibility_are_marked_where_they_are(folder):
    about = (
        "names: [cat]\ntrain: images\nkpt_shape: [4, 2]\nkpt_names: {0: [a, b, c, d]}\n"
    )
    line = f"{BOX} 0.5 0.25 0 0 -0.001 0.5 0 0.5"
    content = read(folder({**PLAIN, "data.yaml": about, "labels/a.txt": line}))
    (row,) = content["annotations"]
    assert row["keypoints"][2::3] == [2, 0, 0, 2]
    assert content["categories"][0]["keypoints"] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("cat 0.5 0.5 0.2 0.2", "class 'cat' is no whole number"),
        ("1 0.5 0.5 0.2 0.2", "class 1 is none of the 1 named, 0 to 0"),
        ("-1 0.5 0.5 0.2 0.2", "class -1 is none"),
        (f"{'9' * 400} 0.5 0.5 0.2 0.2", f"class {'9' * 40}... is none of the 1 named"),
        ("0 0.5 0.5 1.5 0.2", "'1.5' is no share of the image's side"),
        ("0 0.5 0.5 nan 0.2", "'nan' is no share"),
        ("0 0.5 0.5 x 0.2", "'x' is no share"),
        ("0 -0.1 0.5 0.1 0.2", "'-0.1' is no share"),
        ("0 0.5 0.5 0 0.2", "a box of 0 x 0.2; width and height are above 0"),
        ("0 0.5 0.5 0.2 0", "a box of 0.2 x 0;"),
        ("0 0.5 0.5 0.2", "3 numbers behind the class; a box has 4"),
        ("0 0.5 0.5 0.2 0.2 0.1", "5 numbers behind the class"),
        (
            f"{BOX}\n0 0 0 0.5 0 0.5 1",
            "line 2: 6 numbers (outlines), but others have boxes",
        ),
        (f"{BOX} 0.5 0.5 2", "a box and 1 keypoints with their visibility, it seems"),
        (
            "\n".join([f"{BOX} 0.5 0.5 1 0 0 0"] * 3),
            "line 1: a box and 2 keypoints",
        ),
    ],
)
def test_a_wrong_line_is_named_with_what_to_do(folder, line, says):
    base = folder({**DATA, "labels/a.txt": line})
    with pytest.raises(BadInput) as error:
        read(base)
    assert says in str(error.value)
    assert f"{base / 'labels' / 'a.txt'}: line " in str(error.value)


def test_coordinates_may_leave_the_image_by_a_rounding(folder):
    base = folder({**DATA, "labels/a.txt": "0 0.5 0.5 1.001 1.0"})
    assert read(base)["annotations"][0]["bbox"][2] == pytest.approx(8.008)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            f"{BOX} 0.5 0.25 2",
            "7 numbers behind the class; kpt_shape [2, 3] asks for 10",
        ),
        (f"{BOX} 0.5 0.25 3 0 0 0", "keypoint 0: visibility '3'; it is 0 (not marked)"),
        (f"{BOX} 0.5 0.25 2 0 0 x", "keypoint 1: visibility 'x'"),
        (f"{BOX} 0.5 2.5 2 0 0 0", "'2.5' is no share"),
    ],
)
def test_a_wrong_line_with_keypoints_is_named(folder, line, says):
    with pytest.raises(BadInput) as error:
        read(folder({**POSED, "labels/a.txt": line}))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("flip_idx: [0]", "has flip_idx and no kpt_shape"),
        ("kpt_shape: [2]", "kpt_shape [2] is not [K, 2] or [K, 3]"),
        ("kpt_shape: [0, 3]", "kpt_shape [0, 3] is not"),
        ("kpt_shape: [2, 4]", "a keypoint has 2 numbers (x y) or 3"),
        ("kpt_shape: [1001, 3]", "K from 1 to 1000"),
        ("kpt_shape: [true, 3]", "is not [K, 2]"),
        (
            "kpt_shape: [2, 3]\nflip_idx: [0]",
            "flip_idx [0] does not have each of 0 to 1 once",
        ),
        (
            "kpt_shape: [3, 3]\nflip_idx: [1, 2, 0]",
            "keypoint 0 becomes 1, but 1 becomes 2",
        ),
        (
            "kpt_shape: [2, 3]\nkpt_names: [a]",
            "kpt_names has 1 names for class 0, and kpt_shape",
        ),
        (
            "kpt_shape: [2, 3]\nkpt_names: {1: [a, b]}",
            "kpt_names has no names for class 0",
        ),
        (
            "kpt_shape: [2, 3]\nkpt_names: [a, a]",
            "two keypoints of class 0 are called 'a'",
        ),
    ],
)
def test_wrong_keypoints_are_said(folder, said, says):
    base = folder(yaml(f"names: [cat]\ntrain: images\n{said}\n"))
    with pytest.raises(BadInput) as error:
        yolo_text.find(base)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({**DATA}, "labels/a.txt: line 1: a box, but Mask R-CNN needs outlines"),
        (
            {**POSED, "labels/a.txt": f"{BOX} 0 0 0 0 0 0"},
            "describes boxes with keypoints, but Mask",
        ),
    ],
)
def test_outlines_cannot_be_made_of_boxes(folder, files, says):
    with pytest.raises(BadInput) as error:
        read(folder(files), outlines=True)
    assert says in str(error.value)


def test_an_outline_of_any_turn_has_its_area(folder):
    """An L of 3/4 of the image, one way round and the other; both in one file."""
    corners = [(0, 0), (1, 0), (1, 0.5), (0.5, 0.5), (0.5, 1), (0, 1)]
    lines = []
    for each in (corners, corners[::-1]):
        lines.append("0 " + " ".join(f"{x} {y}" for x, y in each))
    (first, second) = read(folder({**DATA, "labels/a.txt": "\n".join(lines)}))[
        "annotations"
    ]
    assert first["area"] == second["area"] == 0.75 * 8 * 4
    assert first["bbox"] == second["bbox"] == [0, 0, 8, 4]
    assert first["segmentation"] == [[0, 0, 8, 0, 8, 2, 4, 2, 4, 4, 0, 4]]


def test_coordinates_at_their_limits(folder):
    edge = "0 -0.001 -0.001 1.001 -0.001 1.001 1.001"
    (row,) = read(folder({**DATA, "labels/a.txt": edge}))["annotations"]
    assert row["bbox"] == pytest.approx([-0.008, -0.004, 8.016, 4.008])
    for word in ("-0.0011", "1.0011"):
        line = f"0 0 0 1 0 1 {word}"
        with pytest.raises(
            BadInput, match=rf"'{word}' is no share of the image's side"
        ):
            read(folder({**DATA, "labels/a.txt": line}))


def test_rows_of_several_images_go_on_counting(folder):
    files = {**DATA, "data.yaml": "names: {3: cat, 5: dog}\ntrain: images\n"}
    files |= {"images/b.png": "", "labels/a.txt": f"3{BOX[1:]}\n\n5{BOX[1:]}"}
    content = read(folder(files | {"labels/b.txt": f"\n5{BOX[1:]}"}))
    rows = [
        (row["id"], row["image_id"], row["category_id"])
        for row in content["annotations"]
    ]
    assert rows == [
        (1, "images/a.png", 3),
        (2, "images/a.png", 5),
        (3, "images/b.png", 5),
    ]
    assert content["categories"] == [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog"}]
    base = folder({"labels/b.txt": f"5{BOX[1:]}\n4{BOX[1:]}"})
    with pytest.raises(BadInput) as error:
        read(base)
    assert str(error.value) == (
        f"{base / 'labels' / 'b.txt'}: line 2: class 4 is none of the 2 named, 3 to 5; name it in"
        " data.yaml (or classes.txt), or correct the line"
    )


def test_half_of_the_images_must_have_labels(folder):
    base = folder({**DATA, "images/b.png": ""})
    assert pictures(base) == {
        "train": [("images/a.png", "a.txt"), ("images/b.png", None)]
    }


def test_a_thousand_keypoints_are_read(folder):
    about = "names: [cat]\ntrain: images\nkpt_shape: [1000, 2]\n"
    line = BOX + " 0.5 0.25" * 1000
    (row,) = read(folder({**PLAIN, "data.yaml": about, "labels/a.txt": line}))[
        "annotations"
    ]
    assert row["keypoints"] == [4.0, 1.0, 2] * 1000


MAYBE = f"{BOX} 0.5 0.5 1 0 0 0"  # a box with two keypoints, or an outline


@pytest.mark.parametrize(
    "lines",
    [
        [MAYBE] * 2,
        [MAYBE, MAYBE, f"{BOX} 0.5 0.5 1 0 0 0.5"],
        [MAYBE, MAYBE, f"{MAYBE} 0.1 0.1 1 0.2 0.2 0"],
    ],
)
def test_few_or_unlike_lines_are_outlines(folder, lines):
    base = folder({**DATA, "labels/a.txt": "\n".join(lines)})
    assert len(read(base)["annotations"]) == len(lines)


def test_a_keypoints_name_is_printable(folder):
    said = 'kpt_shape: [2, 3]\nkpt_names: [a, "b\\u0007"]'
    base = folder(yaml(f"names: [cat]\ntrain: images\n{said}\n"))
    with pytest.raises(BadInput, match=r"kpt_names: a name holds '\\x07'; take it out"):
        yolo_text.find(base)


# What a folder holds instead


def test_what_is_there_instead_of_boxes_is_said(folder, tmp_path):
    base = folder(
        {
            "inside/images/a.png": "",
            "inside/labels/a.txt": BOX,
            "inside/classes.txt": "cat",
        }
    )
    with pytest.raises(
        BadInput, match="holds no boxes itself; its folder inside holds boxes; name "
    ):
        box_folders.must_find(base)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="empty: is empty; expected "):
        box_folders.must_find(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(BadInput, match="other: holds no boxes; expected "):
        box_folders.must_find(tmp_path / "other")
    (tmp_path / "packed.zip").touch()
    with pytest.raises(
        BadInput, match=r"packed\.zip: boxes are read from folders; unpack"
    ):
        box_folders.must_find(tmp_path / "packed")
    with pytest.raises(BadInput, match="nowhere: "):
        box_folders.must_find(tmp_path / "nowhere")
    assert box_folders.must_find(base / "inside").layout == "YOLO"
