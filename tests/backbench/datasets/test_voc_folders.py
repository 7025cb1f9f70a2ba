"""Folders in VOC's format: lists, pairs, and what is wrong with them in one line."""

import pytest
from PIL import Image

from backbench.datasets.boxes import box_folders, voc_xml
from backbench.errors import BadInput

CORNERS = ("xmin", "ymin", "xmax", "ymax")


def an_object(name="cat", box=(1, 1, 4, 3), **changes):
    values = dict(zip(CORNERS, box, strict=True)) | changes
    inside = "".join(f"<{k}>{v}</{k}>" for k, v in values.items() if v is not None)
    named = "" if name is None else f"<name>{name}</name>"
    return f"<object>{named}<bndbox>{inside}</bndbox></object>"


def a_file(*objects, width=8, height=4):
    sides = f"<size><width>{width}</width><height>{height}</height></size>"
    return f"<annotation>{sides}{''.join(objects)}</annotation>"


@pytest.fixture
def folder(tmp_path):
    """folder(files): name -> its text, or a picture of 8 x 4 pixels for each .png."""
    base = tmp_path / "mine"

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


def named(*names, where="JPEGImages"):
    """Pictures and their annotations."""
    files = {f"{where}/{name}.png": "" for name in names}
    return files | {f"Annotations/{name}.xml": a_file(an_object()) for name in names}


def parts_of(base):
    found = voc_xml.find(base)
    return {split: [pair.image for pair in part.pairs] for split, part in found.items()}


LIST = "ImageSets/Main/{}.txt"


@pytest.mark.parametrize("where", ["JPEGImages", "images"])
def test_without_lists_all_pictures_are_one_part(folder, where):
    base = folder(named("a", "b", where=where))
    assert parts_of(base) == {"": [f"{where}/a.png", f"{where}/b.png"]}


@pytest.mark.parametrize(
    ("lists", "splits"),
    [
        ({"train": "a\nb 1\n\n", "val": "c -1"}, {"train": "ab", "val": "c"}),
        ({"trainval": "a\nb\nc", "test": "d"}, {"train": "abc", "test": "d"}),
        ({"trainval": "a\nb\nc", "train": "a", "val": "b"}, {"train": "a", "val": "b"}),
        # A val beside trainval alone is a part of it
        ({"trainval": "a\nb", "val": "b", "test": "d"}, {"train": "ab", "test": "d"}),
        ({"cat_train": "a", "train": "b"}, {"train": "b"}),
    ],
)
def test_lists_say_which_pictures_are_of_a_split(folder, lists, splits):
    files = named(*"abcd") | {LIST.format(name): text for name, text in lists.items()}
    expected = {
        k: [f"JPEGImages/{name}.png" for name in names] for k, names in splits.items()
    }
    assert parts_of(folder(files)) == expected


@pytest.mark.parametrize(
    ("labels", "pictures"),
    [("Annotations/", "JPEGImages/"), ("annotations/", "images/"), ("", "")],
)
def test_each_split_may_have_folders_of_its_own(folder, labels, pictures):
    files = {}
    for split, names in {"train": "ab", "valid": "c"}.items():
        for name in names:
            files[f"{split}/{labels}{name}.xml"] = a_file(an_object())
            files[f"{split}/{pictures}{name}.png"] = ""
    images = {"train": ["a", "b"], "valid": ["c"]}
    expected = {
        split: [f"{split}/{pictures}{name}.png" for name in names]
        for split, names in images.items()
    }
    expected["val"] = expected.pop("valid")
    assert parts_of(folder(files)) == expected
    # A split that lacks an image is not left out
    folder({f"valid/{labels}d.xml": a_file()})
    with pytest.raises(BadInput, match="1 label files have no image, first d"):
        parts_of(folder({}))


def test_annotations_in_a_folder_of_another_name_are_told_where_they_belong(folder):
    base = folder({"images/a.png": "", "labels/a.xml": a_file(an_object())})
    said = f"{base}/labels/a.xml is VOC's, whose XML lies in Annotations/ beside JPEGImages/"
    with pytest.raises(BadInput) as error:
        box_folders.must_find(base)
    assert said in str(error.value)
    folder({"labels/a.xml": "<svg/>"})
    with pytest.raises(BadInput, match=r"a.xml may hold boxes in a layout that is not"):
        box_folders.must_find(base)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"Annotations/a.xml": a_file()},
            "has 1 XML files in Annotations, and no images; put them",
        ),
        (
            named("a") | {LIST.format("train"): "a\na"},
            "line 2: 'a' is listed twice; take one out",
        ),
        (
            named("a") | {LIST.format("train"): "z"},
            "line 1: 'z' has no image; put it in",
        ),
        (
            named("a") | {LIST.format("train"): "\n"},
            "train.txt: lists no image; write one name",
        ),
        (
            named("a") | {"JPEGImages/b.png": "", LIST.format("train"): "a\nb"},
            "line 2: 'b' has no b.xml in",
        ),
        (
            named("a") | {"JPEGImages/b.png": ""},
            "1 images have no XML file, first b.png; write",
        ),
        (
            named("a") | {"Annotations/b.xml": a_file()},
            "1 label files have no image, first b.xml",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(folder, files, says):
    base = folder(files)
    with pytest.raises(BadInput) as error:
        voc_xml.find(base)
    assert says in str(error.value)
    assert str(base) in str(error.value) and "\n" not in str(error.value)


def read(base):
    return voc_xml.read(list(voc_xml.find(base).values()))


def test_corners_become_boxes_and_classes_are_those_of_all_parts(folder):
    files = named("a", "b")
    files["Annotations/a.xml"] = a_file(
        an_object("dog"), an_object("cat", (2, 2, 8, 4))
    )
    files["Annotations/b.xml"] = a_file(an_object("emu"))
    files |= {LIST.format("train"): "a", LIST.format("val"): "b"}
    train, val = read(folder(files))
    assert [row["name"] for row in train["categories"]] == ["cat", "dog", "emu"]
    assert train["categories"] == val["categories"]
    dog, cat = train["annotations"]
    assert (dog["category_id"], cat["category_id"]) == (2, 1)
    assert cat["bbox"][2:] == [7, 3]
    assert dog["bbox"][0] == cat["bbox"][0] - 1
    (image,) = val["images"]
    assert (image["width"], image["height"]) == (8, 4)
    assert image["file_name"].endswith("b.png")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (a_file(), "no image has an object; annotate some, as <object><name>..."),
        (a_file(an_object(None)), "has no <name>; write its class"),
        (a_file(an_object("  ")), "has no <name>; write its class"),
        (a_file(an_object("a&#9;b")), "its <name> holds"),
        (
            a_file(an_object(ymax=None)),
            "(cat) has no <bndbox><ymax>; a box has xmin, ymin, xmax",
        ),
        (a_file(an_object(xmin="left")), "(cat): <xmin> is 'left'; write pixels"),
        (a_file(an_object(xmin="nan")), "(cat): <xmin> is 'nan'; write pixels"),
        (
            a_file(an_object(), width=0),
            "<width> is '0'; write the image's width in pixels",
        ),
        (
            a_file(an_object(), height="4.5"),
            "<height> is '4.5'; write the image's height",
        ),
        (a_file(an_object(box=(4, 1, 1, 3))), "(cat)"),
        ("<annotation>", "a.xml"),
    ],
)
def test_a_wrong_file_is_named_with_what_to_write(folder, text, says):
    base = folder({**named("a"), "Annotations/a.xml": text})
    with pytest.raises(BadInput) as error:
        read(base)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_folder_of_voc_is_none(folder):
    assert voc_xml.find(folder({"cat/a.png": ""})) is None


def test_whole_rows_of_two_parts(folder):
    """Corners are counted from 1, the last one included; ids go on within a part."""
    files = named("a", "b", "c")
    files["Annotations/a.xml"] = a_file(
        an_object("dog", (1, 2, 4, 4)), an_object("cat", (5, 3, 5, 3))
    )
    files["Annotations/b.xml"] = a_file(an_object(" ant ", (1.5, 1, 3, 2.5)))
    files["Annotations/c.xml"] = a_file(width="12", height=" 7.0 ")
    files |= {LIST.format("train"): "a\nb", LIST.format("val"): "c"}
    train, val = read(folder(files))
    images = ("JPEGImages/a.png", "JPEGImages/b.png", "JPEGImages/c.png")
    wanted = [
        (1, images[0], 3, [0, 1, 4, 3], 12),
        (2, images[0], 2, [4, 2, 1, 1], 1),
        (3, images[1], 1, [0.5, 0, 2.5, 2.5], 6.25),
    ]
    keys = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
    assert train["annotations"] == [dict(zip(keys, (*row, 0))) for row in wanted]
    assert train["categories"] == [
        {"id": n, "name": name} for n, name in enumerate(("ant", "cat", "dog"), 1)
    ]
    assert val["annotations"] == []
    about = {"id": images[2], "file_name": images[2], "width": 12, "height": 7}
    assert val["images"] == [about]


def test_numbers_at_their_limits(folder):
    box = (-999_999, -999_999, 999_999, 999_999)
    text = a_file(an_object("cat", box), width=999_999, height=1)
    (content,) = read(folder({**named("a"), "Annotations/a.xml": text}))
    (row,) = content["annotations"]
    assert row["bbox"] == [-1_000_000, -1_000_000, 1_999_999, 1_999_999]
    assert content["images"][0]["width"] == 999_999


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            a_file(an_object(), width=1_000_000),
            "<width> is '1000000'; write the image's",
        ),
        (
            a_file(an_object(), height=0.5),
            "<height> is '0.5'; write the image's height",
        ),
        (
            a_file(an_object(), an_object("dog", xmax=1_000_000)),
            "a.xml: object 2 (dog): <xmax> is '1000000'; write pixels",
        ),
        (
            a_file(an_object("dog", ymin=-1_000_000)),
            "object 1 (dog): <ymin> is '-1000000'; write pixels",
        ),
        (
            a_file(an_object(box=(4, 1, 3, 3))),
            "object 1 (cat): xmax 3 lies before xmin 4; exchange the two",
        ),
        (
            a_file(an_object(box=(1, 3, 4, 2.5))),
            "object 1 (cat): ymax 2.5 lies before ymin 3; exchange the two",
        ),
        (
            "<boxes></boxes>",
            "a.xml: begins with <boxes>; VOC's begin with <annotation>",
        ),
        (
            "<annotation><size><width>3</width></size></annotation>",
            "a.xml: has no <size><height>; write the image's height in pixels",
        ),
    ],
)
def test_numbers_beyond_them_are_named(folder, text, says):
    base = folder({**named("a"), "Annotations/a.xml": text})
    with pytest.raises(BadInput) as error:
        read(base)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        (["train/a", "train/b", "valid/c"], {"train": "ab", "val": "c"}),
        (["a", "b"], {"": "ab"}),
    ],
)
def test_files_may_lie_beside_their_images(folder, places, wanted):
    files = {}
    for place in places:
        files |= {f"{place}.png": "", f"{place}.xml": a_file(an_object())}
    base = folder(files | {"other/x.png": ""})
    stems = {
        split: "".join(name.split("/")[-1][0] for name in names)
        for split, names in parts_of(base).items()
    }
    assert stems == wanted


def test_the_folder_of_xml_may_be_spelled_in_small_letters(folder):
    files = named("a", "b", where="images")
    files = {name.replace("Annotations", "annotations"): t for name, t in files.items()}
    base = folder(files)
    assert parts_of(base) == {"": ["images/a.png", "images/b.png"]}


def test_a_list_of_files_is_told_the_name_alone(folder):
    base = folder(named("a") | {LIST.format("train"): "JPEGImages/a.png\n"})
    said = r"train.txt: line 1: 'JPEGImages/a.png' is an image's file; .* alone, 'a'"
    with pytest.raises(BadInput, match=said):
        voc_xml.find(base)


def test_one_file_for_all_images_is_not_vocs(folder):
    """CVAT's own format; it lies beside the folder of the images."""
    base = folder(
        {"annotations.xml": "<annotations></annotations>", "images/a.png": ""}
    )
    assert voc_xml.find(base) is None
    said = "annotations.xml may hold boxes in a layout that is not read; export them as COCO"
    with pytest.raises(BadInput, match=said):
        box_folders.must_find(base)
