"""Lists whose images show several classes, or a class in each pixel."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from backbench.errors import BadInput
from backbench.images import dense, multilabel
from backbench.images.dense import DenseList
from backbench.images.multilabel import MultiLabelList


@pytest.mark.parametrize(
    ("present", "ignored", "text"),
    [
        ((), (), ""),
        ((7, 0), (), "0,7"),
        ((10, 9), (2,), "2?,9,10"),  # by number, not by letter
        ((1,), (1, 3), "1,3?"),  # one object that is not difficult is enough
    ],
)
def test_marks_are_written_and_read_back(present, ignored, text):
    assert multilabel.mark(present, ignored) == text
    (row,) = multilabel.table_of([text], 11)
    wanted = np.zeros(11, np.uint8)
    wanted[list(ignored)] = multilabel.IGNORED
    wanted[list(present)] = multilabel.PRESENT
    np.testing.assert_array_equal(row, wanted)


def test_a_table_has_a_row_for_each_image():
    images = MultiLabelList(
        Path("x"), ("1.jpg", "2.jpg", "3.jpg"), (0, 0, 0), ("a", "b"), ("1", "", "0?,1")
    )
    table = images.table()
    assert (table.dtype, table.tolist()) == (np.uint8, [[0, 1], [0, 0], [2, 1]])
    turned = images.subset(iter([2, 0]))
    assert turned.marks == ("0?,1", "1")
    assert tuple(turned.paths) == ("3.jpg", "1.jpg")
    assert multilabel.table_of([], 4).shape == (0, 4)


@pytest.mark.parametrize(
    ("text", "error"), [("2", IndexError), ("x", ValueError), ("0,?", ValueError)]
)
def test_other_marks_are_refused(text, error):
    with pytest.raises(error):
        multilabel.table_of(["0", text], 2)


@pytest.fixture
def maps(tmp_path):
    """Two images, higher than wide, with values 0, 3 and 7 in their maps."""
    for name, side in (("1", 5), ("2", 6)):
        Image.new("RGB", (4, side), (9, 9, 9)).save(tmp_path / f"{name}.jpg")
        values = np.zeros((side, 4), np.uint8)
        values[0, 1] = 3
        values[side - 1, 3] = 7
        Image.fromarray(values).save(tmp_path / f"{name}.png")
    return DenseList(
        tmp_path,
        ("1.jpg", "2.jpg"),
        (0, 0),
        ("ground", "thing"),
        ("1.png", "2.png"),
        {0: 0, 3: 1, 7: dense.IGNORED},
    )


def test_a_maps_values_become_classes(maps):
    for index, side in ((0, 5), (1, 6)):
        picture, classes = maps.pair(index)
        assert picture.size == (4, side)
        wanted = np.zeros((side, 4), np.uint8)
        wanted[0, 1] = 1
        wanted[side - 1, 3] = 255
        assert classes.dtype == np.uint8
        np.testing.assert_array_equal(classes, wanted)
    turned = maps.subset([1])
    assert (tuple(turned.paths), turned.maps) == (("2.jpg",), ("2.png",))


def test_a_list_of_maps_depends_on_the_maps_files(maps):
    assert tuple(maps.files.paths) == ("1.jpg", "2.jpg", "1.png", "2.png")
    read = [maps.files.read(i) for i in (1, 2)]
    assert read == [(maps.root / name).read_bytes() for name in ("2.jpg", "1.png")]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Image.new("L", (5, 4)), r"1\.png: 5 x 4 pixels, its image 1\.jpg has 4 x 5"),
        (Image.new("L", (4, 5), 9), r"1\.png: label 9 is none of this data set's"),
        # The first of several
        (
            Image.frombytes("L", (4, 5), bytes([0, 0, 8, 9] * 5)),
            r"1\.png: label 8 is none of this data set's",
        ),
        (
            Image.new("RGB", (4, 5)),
            r"1\.png: a label map is a PNG of .*this one is RGB",
        ),
        (Image.new("I;16", (4, 5)), r"this one is I;16"),
    ],
)
def test_a_map_that_is_none_is_named(maps, made, says):
    made.save(maps.root / "1.png")
    with pytest.raises(BadInput, match=says):
        maps.pair(0)


def test_a_palettes_indices_are_the_labels(maps):
    made = Image.new("P", (4, 5), 3)
    made.putpalette([0, 0, 0, 50, 60, 70, 1, 2, 3, 250, 251, 252])
    made.save(maps.root / "1.png")
    assert (maps.label_map(0) == 1).all()
