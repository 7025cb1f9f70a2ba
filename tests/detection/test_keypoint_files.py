"""Marked keypoints against the image and the box that they belong to."""

import pytest

from backbench.detection.data import box_format
from backbench.errors import BadInput


def check(*objects):
    """Check objects of one image of 200 x 100 pixels: (box, marked points as COCO has them)."""
    annotations = []
    for box, points in objects:
        # Half a pixel is added when a file is read
        values = [v for x, y in points for v in (x + 0.5, y + 0.5, 2)]
        annotations.append({"bbox": box, "keypoints": values})
    return box_format.check_keypoints(
        [{"width": 200, "height": 100, "annotations": annotations}]
    )


BOX = [50.0, 20.0, 100.0, 50.0]  # to 150, 70


def test_points_in_their_box_are_no_fault():
    assert check((BOX, [(50, 20), (150, 70), (100, 45)])) == []
    assert check((BOX, [])) == []
    # Nor are those that lie a tenth of its sides beside it
    assert check((BOX, [(41, 16), (159, 74), (159, 16)])) == []


@pytest.mark.parametrize("point", [(35, 45), (165, 45), (100, 10), (100, 80)])
def test_points_mostly_outside_of_their_box_are_noted(point):
    (note,) = check((BOX, [point, point, (100, 45)]))
    assert note.startswith(
        "2 of 3 marked keypoints are outside their object's box; COCO's"
    )
    # Not where they are half of them
    assert check((BOX, [point, (100, 45)])) == []


@pytest.mark.parametrize("point", [(-9, 50), (209, 50), (50, -9), (50, 109)])
def test_points_outside_of_the_image_are_noted(point):
    (note,) = check((BOX, [point, (100, 45), (100, 45)]))
    assert note.startswith(
        "1 of 3 marked keypoints are outside their image, so they are not"
    )


def test_points_of_another_image_or_as_shares_are_refused():
    with pytest.raises(BadInput, match="none of 2 marked keypoints is in its image"):
        check((BOX, [(500, 20), (20, 500)]))
    with pytest.raises(
        BadInput, match="2 of 3 marked keypoints lie between 0 and 1, so"
    ):
        check((BOX, [(0.5, 0.25), (1.0, 0.0), (100, 45)]))
    assert check((BOX, [(100, 45), (0.5, 0.25), (100, 45)])) == []


def test_what_is_not_marked_does_not_count():
    annotations = [
        {"bbox": BOX, "keypoints": [0, 0, 0, 900, 900, 0, 100.5, 45.5, 1]},
        {"bbox": BOX},
    ]
    record = {"width": 200, "height": 100, "annotations": annotations}
    assert box_format.check_keypoints([record]) == []


def test_limits_may_be_met():
    """An image's edge and two pixels more; a tenth of the box and two pixels more; a hundredth."""
    for edge in [(-2, 45), (202, 45), (100, -2), (100, 102)]:
        assert check((BOX, [edge, (100, 45), (100, 45)])) == []
    for beside in [(38, 45), (162, 45), (100, 13), (100, 77)]:
        assert check((BOX, [beside] * 3)) == []
    inside = [(100, 45)] * 98
    (note,) = check((BOX, inside), (BOX, [(100, 45), (-3, 45)]))
    assert note == (
        "1 of 100 marked keypoints are outside their image, so they are not trained on; COCO's"
        " keypoints are [x, y, visibility] in pixels of the image"
    )
    assert check((BOX, [*inside, (100, 45), (100, 45), (-3, 45)])) == []
    # Every object has its own box
    far = [0.0, 80.0, 10.0, 10.0]
    assert check((BOX, [(100, 45)]), (far, [(5, 85), (5, 85)])) == []
    assert check((far, [(100, 45)]), (BOX, [(5, 85)] * 2))[0].startswith("3 of 3")
    half = [(0, 1), (1, 0), (5, 5), (1.5, 0)]
    assert check(([0.0, 0.0, 9.0, 9.0], half)) == []
