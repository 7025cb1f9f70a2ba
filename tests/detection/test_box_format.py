"""Boxes at the exact limits from which on a file is refused, or its boxes are said."""

import numpy as np
import pytest

from backbench.detection.data import box_format
from backbench.errors import BadInput

WIDTH, HEIGHT = 200, 100
GOOD = (10, 20, 25, 30)
CORNERS = (150, 50, 190, 90)  # reaches outside as COCO's, and not as corners


def check(*rows, size=(WIDTH, HEIGHT), areas=None, rule=box_format.COCO):
    """Check boxes of images of one size; the first is that of annotation 1."""
    return box_format.check(
        box_format.Boxes(
            "annotation",
            range(1, len(rows) + 1),
            np.array(rows, float).reshape(-1, 4),
            np.full((len(rows), 2), size, float),
            None if areas is None else np.array(areas, float),
            rule,
        )
    )


def refused(*rows, **more):
    with pytest.raises(BadInput) as error:
        check(*rows, **more)
    return str(error.value)


def test_no_boxes_are_no_fault():
    assert check() == []


def test_most_boxes_from_0_to_1_are_refused():
    unit = [(0, 0, 1, 1), (0.5, 0, 0.25, 1)]
    assert check(*unit, GOOD, GOOD) == []
    assert refused(GOOD, *unit) == (
        "2 of 3 boxes lie between 0 and 1, so they are normalised; first annotation 2:"
        " [0, 0, 1, 1] in 200 x 100 pixels; COCO's boxes are [x, y, width, height] in"
        " pixels: multiply them by the image's width and height"
    )
    # Neither without an area, nor where one of the four is no share
    for other in [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1.25), (-0.5, 0, 1, 1)]:
        assert "normalised" not in " ".join(check(GOOD, (0, 0, 1, 1), other))


def test_a_tenth_outside_that_fits_another_format_is_refused():
    assert refused(GOOD, *[CORNERS] * 2, *[GOOD] * 17) == (
        "2 of 20 boxes reach outside their image, but all fit as corners [x1, y1, x2, y2]; first"
        " annotation 2: [150, 50, 190, 90] in 200 x 100 pixels; COCO's boxes are [x, y, width,"
        " height] in pixels: convert them"
    )
    # A single one is an accident, and so are two of more than twenty, which are noted
    assert check(CORNERS, *[GOOD] * 9) == []
    assert check(*[CORNERS] * 2, *[GOOD] * 19) == [
        "2 of 21 boxes reach outside their image (they are cut to it); first annotation 1: [150,"
        " 50, 190, 90] in 200 x 100 pixels; perhaps boxes of images of another size"
    ]


def test_one_in_a_hundred_may_fit_no_other_format():
    no_corners = (100, 50, 20, 10)
    boxes = [*[CORNERS] * 20, *[GOOD] * 79]
    assert "20 of 100 boxes" in refused(*boxes, no_corners)
    (note,) = check(*boxes[:-1], *[no_corners] * 2)
    assert note.endswith(
        "; perhaps corners [x1, y1, x2, y2] or boxes of images of another size"
    )
    # Nine in ten are enough for a guess
    (note,) = check(*[CORNERS] * 10, *[GOOD] * 80, *[no_corners] * 10)
    assert "perhaps corners" in note
    (note,) = check(*[CORNERS] * 10, *[GOOD] * 79, *[no_corners] * 11)
    assert note.endswith("; perhaps boxes of images of another size")


@pytest.mark.parametrize(
    ("box", "formats"),
    [
        ((150, 60, 90, 70), "[centre x, centre y, width, height]"),
        ((40, 120, 90, 180), "corners with y first, [y1, x1, y2, x2]"),
        (
            (10, 120, 50, 70),
            "[y, x, height, width], or images whose width and height are exchanged",
        ),
        (
            (110, 45, 150, 80),
            "corners [x1, y1, x2, y2] or as [centre x, centre y, width, height]",
        ),
    ],
)
def test_every_format_that_fits_is_named(box, formats):
    said = refused(box, box)
    assert said.startswith(
        f"2 of 2 boxes reach outside their image, but all fit as {formats}; first annotation 1: ["
    )


def test_thousandths_reach_from_0_to_1000():
    whole = (0, 0, 1000, 1000)
    assert "corners from 0 to 1000, thousandths" in refused(whole, (500, 250, 750, 500))
    for other in [(0, 0, 1001, 1000), (-1, 0, 1000, 1000), (600, 0, 600, 1000)]:
        assert "thousandths" not in refused(whole, other)
    other = (600, 0, 600, 1000)
    assert "thousandths" in refused(*[whole] * 99, other)
    assert "thousandths" not in refused(*[whole] * 98, other, other)


def test_vocs_corners_are_guessed_in_no_other_format():
    said = refused(*[CORNERS] * 20, rule=box_format.VOC)
    assert said.startswith("20 of 20 boxes have their middle outside their image")
    assert "VOC's boxes are the corners xmin, ymin, xmax, ymax in pixels of" in said


@pytest.mark.parametrize(
    "beside",
    [(200, 20, 30, 40), (10, 100, 30, 40), (-30, 20, 30, 40), (10, -40, 30, 40)],
)
def test_a_box_that_ends_at_the_edge_does_not_touch_its_image(beside):
    shown = ", ".join(map(str, beside))
    assert refused(beside) == (
        f"none of 1 boxes touches its image; first annotation 1: [{shown}] in 200 x 100 pixels;"
        " COCO's boxes are [x, y, width, height] in pixels of their own image"
    )
    assert check(GOOD, beside) == [
        "1 of 2 boxes do not touch their image: they are never trained on, and missed in scoring;"
        f" first annotation 2: [{shown}] in 200 x 100 pixels"
    ]
    x, y, w, h = beside
    nearer = (x - np.sign(x - 50), y - np.sign(y - 20) * (x == 10), w, h)
    assert check(GOOD, nearer) == []


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        ((190, 20, 20, 40), (191, 20, 20, 40)),
        ((10, 90, 30, 20), (10, 91, 30, 20)),
        ((-10, 20, 20, 40), (-11, 20, 20, 40)),
        ((10, -10, 30, 20), (10, -11, 30, 20)),
    ],
)
def test_a_middle_on_the_edge_is_in_the_image(within, beyond):
    assert "(they are cut to it)" in check(within, within, rule=box_format.VOC)[0]
    assert check(GOOD, beyond) == []
    said = refused(GOOD, beyond, beyond, rule=box_format.VOC)
    assert said.startswith(
        "2 of 3 boxes have their middle outside their image, so they are in another format, or of"
        " images of another size; first annotation 2: ["
    )
    assert said.endswith("in pixels of their own image")


def test_two_pixels_outside_are_rounding():
    assert check((-2, -2, 204, 104), (-2, -2, 204, 104)) == []
    for box in [(-3, 0, 9, 9), (0, -3, 9, 9), (193, 0, 10, 9), (0, 93, 9, 10)]:
        (note,) = check(box, box, rule=box_format.VOC)
        assert note.startswith("2 of 2 boxes reach outside their image (they are cut")
        assert check(box, box, *[GOOD] * 198)[0].startswith(
            "2 of 200 boxes reach outside"
        )
        assert check(box, box, *[GOOD] * 199) == []


@pytest.mark.parametrize(
    ("far", "near"),
    [
        ((-201, 20, 251, 40), (-200, 20, 250, 40)),
        ((10, -101, 30, 151), (10, -100, 30, 150)),
        ((100, 20, 301, 40), (100, 20, 300, 40)),
        ((10, 50, 30, 151), (10, 50, 30, 150)),
    ],
)
def test_a_single_box_may_reach_outside_by_the_images_side(far, near):
    assert check(GOOD, GOOD, near) == []
    shown = ", ".join(map(str, far))
    assert check(GOOD, GOOD, far) == [
        "1 of 3 boxes reach outside their image by more than its side (they are cut to it); first"
        f" annotation 3: [{shown}] in 200 x 100 pixels; correct them"
    ]


def test_one_empty_box_in_a_hundred_is_noted():
    for empty in [(10, 20, 0, 30), (10, 20, 30, 0)]:
        assert check(*[GOOD] * 100, empty) == []
        shown = ", ".join(map(str, empty))
        assert check(*[GOOD] * 99, empty) == [
            "1 of 100 boxes have no width or no height: they are never trained on, and missed in"
            f" scoring; first annotation 100: [{shown}] in 200 x 100 pixels"
        ]
    assert refused((10, 20, 0, 30), (1, 2, 30, 0)).startswith(
        "no box has a width and a height; first annotation 1: [10, 20, 0, 30] in"
    )


def test_twenty_boxes_within_100_pixels_of_large_images_look_like_percent():
    box = (10, 20, 90, 30)
    assert check(*[box] * 20, size=(300, 200)) == [
        "no box goes beyond 100 pixels in images of 200 and more: perhaps they are percent; COCO's"
        " boxes are [x, y, width, height] in pixels"
    ]
    assert check(*[box] * 19, size=(300, 200)) == []
    assert check(*[box] * 19, (10, 20, 91, 30), size=(300, 200)) == []
    assert check(*[box] * 20, size=(300, 199)) == []


def test_areas_are_a_share_of_their_boxes():
    box = (10, 20, 20, 10)
    for area in (2, 300):
        assert check(box, box, areas=[area, area]) == []
    assert check(box, box, areas=[1, 1]) == [
        "areas are 0.005 times those of their boxes in the median, so one of the two is not in"
        " pixels; keypoint AP and AP by size need them: leave 'area' out, and it is computed"
    ]
    assert check(box, areas=[400])[0].startswith("areas are 2 times those of")
    # Of the areas that are stated, of boxes that have one, in the median
    nothing = (10, 20, 0, 10)
    assert check(box, box, areas=[np.nan, np.nan]) == []
    boxes = [box] * 200
    assert check(*boxes, nothing, areas=[*[100] * 101, *[900] * 99, 900]) == []
    assert check(box, box, box, areas=[np.nan, 400, 400])[0].startswith(
        "areas are 2 times"
    )
