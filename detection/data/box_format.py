"""Notices boxes and keypoints that are plainly no pixels of their image.

Boxes as corners, from 0 to 1, or of another picture train and score without any error. What a file
holds as a whole tells such a format: one box may reach outside its image, but not most of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backbench.detection.data.dataset_dicts import ImageRecord
from backbench.errors import BadInput

# So many pixels outside an image are rounding, or counting from 1.
TOLERANCE = 2.0
# From this share of a file's boxes on, what they have in common is no accident of a few.
MANY = 0.1
FEW = 0.01  # from here on it is said
NEARLY_ALL = 0.99
# Boxes within 100 pixels of the corner of larger images, at least so many, look like percent.
PERCENT = 20
# An object fills this much of its box, in the median of a file; COCO's fill 0.6.
LEAST_FILLED = 0.01
MOST_FILLED = 1.5
COCO = "COCO's boxes are [x, y, width, height] in pixels"
VOC = "VOC's boxes are the corners xmin, ymin, xmax, ymax in pixels"
Array = np.ndarray


@dataclass(frozen=True)
class Boxes:
    """The n boxes of a file, beside the sizes of their images."""

    kind: str  # what the names name: annotation, or image
    names: Sequence[int | str]
    values: Array  # (n, 4) x, y, width, height, as stated
    sizes: Array  # (n, 2) width and height of the image
    areas: Array | None = None  # (n,) as stated; NaN where there is none
    rule: str = COCO

    def shown(self, index: int) -> str:
        """Show one box with its image's size."""
        box = ", ".join(f"{value:g}" for value in self.values[index])
        width, height = self.sizes[index]
        return f"{self.kind} {self.names[index]}: [{box}] in {width:.0f} x {height:.0f} pixels"


def _corners(v: Array) -> Array:
    return v


def _from_origin(v: Array) -> Array:
    return np.concatenate([v[:, :2], v[:, :2] + v[:, 2:]], 1)


def _from_centre(v: Array) -> Array:
    return np.concatenate([v[:, :2] - v[:, 2:] / 2, v[:, :2] + v[:, 2:] / 2], 1)


def _swapped_corners(v: Array) -> Array:
    return v[:, [1, 0, 3, 2]]


def _swapped_origin(v: Array) -> Array:
    return _from_origin(v[:, [1, 0, 3, 2]])


# Format -> what turns its four numbers (n, 4) into corners x1, y1, x2, y2
OTHER_FORMATS: dict[str, Callable[[Array], Array]] = {
    "corners [x1, y1, x2, y2]": _corners,
    "[centre x, centre y, width, height]": _from_centre,
    "corners with y first, [y1, x1, y2, x2]": _swapped_corners,
    "[y, x, height, width], or images whose width and height are exchanged": (
        _swapped_origin
    ),
}


def check(boxes: Boxes) -> list[str]:
    """Return notes on boxes that look wrong.

    Raises BadInput if no box touches its image, or if another format plainly fits the whole file
    and COCO's does not.
    """
    if not len(boxes.values):
        return []
    has_area = _all(boxes.values[:, 2:] > 0)
    if not has_area.any():
        raise BadInput(
            f"no box has a width and a height; first {boxes.shown(0)}; {boxes.rule}"
        )
    corners = _from_origin(boxes.values)
    # 1. From 0 to 1
    in_unit = has_area & _all(corners[:, :2] >= 0) & _all(boxes.values <= 1)
    if 2 * in_unit.sum() > len(in_unit):
        first = boxes.shown(_first(in_unit))
        raise BadInput(
            f"{in_unit.sum()} of {len(in_unit)} boxes lie between 0 and 1, so they are normalised; "
            f"first {first}; {boxes.rule}: multiply them by the image's width and height"
        )
    # 2. Another format fits, COCO's does not.
    outside = has_area & ~_fits(corners, boxes.sizes)
    fitting = _formats_that_fit(boxes, NEARLY_ALL)
    if outside.sum() >= max(2, MANY * len(outside)) and fitting:
        first = boxes.shown(_first(outside))
        raise BadInput(
            f"{outside.sum()} of {len(outside)} boxes reach outside their image, but all fit as "
            f"{' or as '.join(fitting)}; first {first}; {boxes.rule}: convert them"
        )
    # 3. No box in any image
    begins_inside = _all(corners[:, :2] < boxes.sizes)
    touches = has_area & begins_inside & _all(corners[:, 2:] > 0)
    if not touches.any():
        raise BadInput(
            f"none of {len(touches)} boxes touches its image; first {boxes.shown(0)}; "
            f"{boxes.rule} of their own image"
        )
    # Boxes of whole objects, hidden parts included, may reach outside; their middle seldom does.
    middle = (corners[:, :2] + corners[:, 2:]) / 2
    astray = has_area & ~_all((middle >= 0) & (middle <= boxes.sizes))
    if 2 * astray.sum() > len(astray):
        raise BadInput(
            f"{astray.sum()} of {len(astray)} boxes have their middle outside their image, so they "
            "are in another format, or of images of another size; first "
            f"{boxes.shown(_first(astray))}; {boxes.rule} of their own image"
        )
    # 4. What may be right, but seldom is
    notes = []
    if outside.sum() >= max(2, FEW * len(outside)):
        likely = _formats_that_fit(boxes, 1 - MANY) if outside.mean() >= MANY else []
        reason = " or ".join([*likely, "boxes of images of another size"])
        notes.append(
            f"{outside.sum()} of {len(outside)} boxes reach outside their image (they are cut to "
            f"it); first {boxes.shown(_first(outside))}; perhaps {reason}"
        )
    else:
        # A single box may reach outside, but not by a whole image; those beside it are told below
        near = _all(corners[:, :2] >= -boxes.sizes)
        near &= _all(corners[:, 2:] <= 2 * boxes.sizes)
        far = touches & ~near
        if far.any():
            notes.append(
                f"{far.sum()} of {len(far)} boxes reach outside their image by more than its side "
                f"(they are cut to it); first {boxes.shown(_first(far))}; correct them"
            )
    beside = has_area & ~touches
    if beside.any():
        notes.append(
            f"{beside.sum()} of {len(beside)} boxes do not touch their image: they are never trained "
            f"on, and missed in scoring; first {boxes.shown(_first(beside))}"
        )
    empty = ~has_area
    if empty.mean() >= FEW:
        notes.append(
            f"{empty.sum()} of {len(empty)} boxes have no width or no height: they are never trained "
            f"on, and missed in scoring; first {boxes.shown(_first(empty))}"
        )
    if (
        len(corners) >= PERCENT
        and corners.max() <= 100
        and boxes.sizes.min() >= 2 * 100
    ):
        notes.append(
            f"no box goes beyond 100 pixels in images of {boxes.sizes.min():.0f} and more: perhaps "
            f"they are percent; {boxes.rule}"
        )
    return notes + check_areas(boxes)


def check_areas(boxes: Boxes) -> list[str]:
    """Return a note if the stated areas cannot be pixels: keypoint AP and AP by size need them."""
    if boxes.areas is None:
        return []
    of_box = boxes.values[:, 2] * boxes.values[:, 3]
    known = np.isfinite(boxes.areas) & (of_box > 0)
    if not known.any():
        return []
    ratio = float(np.median(boxes.areas[known] / of_box[known]))
    if LEAST_FILLED <= ratio <= MOST_FILLED:
        return []
    return [
        f"areas are {ratio:.3g} times those of their boxes in the median, so one of the two is not in "
        "pixels; keypoint AP and AP by size need them: leave 'area' out, and it is computed"
    ]


def check_keypoints(records: Sequence[ImageRecord]) -> list[str]:
    """Return notes on marked keypoints outside of their image, or mostly outside of their box.

    Raises BadInput if they are normalised, or if none is in its image.
    """
    points = []
    frames = []
    for record in records:
        for annotation in record["annotations"]:
            x, y, width, height = annotation["bbox"]
            frame = (record["width"], record["height"], x, y, x + width, y + height)
            values = annotation.get("keypoints", [])
            for place in range(0, len(values), 3):
                if values[place + 2] > 0:
                    points.append(values[place : place + 2])
                    frames.append(frame)
    if not points:
        return []
    # Half a pixel was added when they were read.
    xy = np.array(points, float) - 0.5
    frame_of = np.array(frames, float)
    sizes = frame_of[:, :2]
    count = len(xy)
    pixels = "COCO's keypoints are [x, y, visibility] in pixels of the image"
    in_unit = _all((xy >= 0) & (xy <= 1))
    if 2 * in_unit.sum() > count:
        raise BadInput(
            f"{in_unit.sum()} of {count} marked keypoints lie between 0 and 1, so they are "
            f"normalised; {pixels}: multiply them by its width and height"
        )
    outside = ~_all((xy >= -TOLERANCE) & (xy <= sizes + TOLERANCE))
    if outside.all():
        raise BadInput(f"none of {count} marked keypoints is in its image; {pixels}")
    notes = []
    if outside.mean() >= FEW:
        notes.append(
            f"{outside.sum()} of {count} marked keypoints are outside their image, so they are not "
            f"trained on; {pixels}"
        )
    reach = 0.1 * (frame_of[:, 4:] - frame_of[:, 2:4]) + TOLERANCE
    in_box = (xy >= frame_of[:, 2:4] - reach) & (xy <= frame_of[:, 4:] + reach)
    beside = ~_all(in_box)
    if 2 * beside.sum() > count:
        notes.append(
            f"{beside.sum()} of {count} marked keypoints are outside their object's box; {pixels}, "
            "and boxes [x, y, width, height]"
        )
    return notes


def _formats_that_fit(boxes: Boxes, share: float) -> list[str]:
    """List the formats other than COCO's in which at least this share of the boxes is sound."""
    if boxes.rule != COCO:
        return []
    found = []
    for name, convert in OTHER_FORMATS.items():
        corners = convert(boxes.values)
        sound = _fits(corners, boxes.sizes) & _all(corners[:, 2:] > corners[:, :2])
        if sound.mean() >= share:
            found.append(name)
    if found:
        return found
    # Pixels of smaller images would fit here, too, so it is tried last.
    ordered = _all(boxes.values[:, 2:] > boxes.values[:, :2])
    in_range = _all(boxes.values >= 0) & _all(boxes.values <= 1000)
    if (ordered & in_range).mean() >= share:
        found.append("corners from 0 to 1000, thousandths of the image's sides")
    return found


def _fits(corners: Array, sizes: Array) -> Array:
    """Return (n,) bool: the box stays in its image."""
    begins = _all(corners[:, :2] >= -TOLERANCE)
    ends = _all(corners[:, 2:] <= sizes + TOLERANCE)
    return begins & ends


def _all(conditions: Array) -> Array:
    """Return (n,) bool: all of a row's conditions (n, k) hold."""
    return np.logical_and.reduce(conditions, axis=1)


def _first(where: Array) -> int:
    return int(np.flatnonzero(where)[0])
