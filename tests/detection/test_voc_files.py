"""PASCAL VOC's own files, as `--dataset VOC2007` reads them."""

import pytest

from backbench.detection.data import voc
from backbench.detection.data.split import DatasetFiles
from backbench.errors import BadInput

OBJECT = """<object><name>{name}</name><pose>Left</pose><truncated>0</truncated>
<difficult>{difficult}</difficult><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax>
<ymax>{y2}</ymax></bndbox></object>"""
WHOLE = {"name": "cat", "difficult": 0, "x1": 11, "y1": 21, "x2": 110, "y2": 60}


def an_object(**changes):
    return OBJECT.format(**WHOLE | changes)


def a_file(*objects, width=200, height=100):
    size = (
        f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    )
    return f"<annotation>{size}{''.join(objects)}</annotation>"


@pytest.fixture
def parse(tmp_path):
    """parse(names, files): the split of a list of images with these annotation files."""
    folder = tmp_path / "VOC2007" / "Annotations"
    folder.mkdir(parents=True)

    def split(names, files):
        for name, text in files.items():
            (folder / f"{name}.xml").write_text(text)
        images = folder.parent / "JPEGImages"
        lists = folder.parent / "ImageSets" / "Main" / "test.txt"
        return voc.parse(names, DatasetFiles("voc_2007_test", lists, images), None)

    return split


def test_corners_are_counted_from_one_and_inside(parse):
    files = {
        "000012": a_file(an_object(), an_object(name="dog", difficult=1)),
        "a-b": a_file(),
    }
    split = parse(b"000012\na-b\n", files)
    first, second = split.records
    assert (first["file_name"], first["image_id"]) == ("000012.jpg", "000012")
    assert (first["width"], first["height"]) == (200, 100)
    cat, dog = first["annotations"]
    assert cat["bbox"] == [10.0, 20.0, 100.0, 40.0]
    assert split.categories[cat["category_id"]] == "cat"
    assert split.categories[dog["category_id"]] == "dog"
    assert (cat["difficult"], dog["difficult"]) == (False, True)
    assert cat["iscrowd"] == 0
    assert second["annotations"] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (a_file(an_object(name="unicorn")), "not a VOC annotation file"),
        (a_file(an_object(x1="nan")), "a box"),
        (a_file(an_object(x2="inf")), "a box"),
        (a_file(an_object(y2="")), "not a VOC annotation file"),
        (
            a_file(an_object().replace("<pose>Left</pose>", "")),
            "an object has no <pose>",
        ),
        (a_file(an_object().replace("<truncated>0</truncated>", "")), "no <truncated>"),
        (a_file(an_object(), width=0), "0 x 100 pixels"),
        (a_file(an_object(), height=-1), "200 x -1 pixels"),
        (a_file(an_object(), width=1 << 31), "2147483648 x 100 pixels"),
        (a_file(an_object(), height=1 << 31), "200 x 2147483648 pixels"),
        (a_file(an_object(), height=0), "200 x 0 pixels"),
        (a_file(an_object(), width="wide"), "not a VOC annotation file"),
        ("<annotation>", "not a VOC annotation file"),
    ],
)
def test_a_damaged_file_is_named(parse, text, says):
    with pytest.raises(BadInput, match=r"^Annotations/000012\.xml: not a VOC") as error:
        parse(b"000012", {"000012": text})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (b"", "no images"),
        (b" \n", "no images"),
        (b"\xff\xfe", "not a list of images"),
        (b"../../etc/passwd", "a name that is no plain word"),
        (b"a" * 101, "a name that is no plain word"),
        (b"000099", r"Annotations/000099\.xml: not a VOC annotation file"),
    ],
)
def test_a_list_that_names_no_images_is_said(parse, names, says):
    with pytest.raises(BadInput, match=says):
        parse(names, {})
