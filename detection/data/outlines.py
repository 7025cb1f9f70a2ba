"""Measures outlines as an annotation file has them: their box and their area.

They are polygons or COCO's run lengths. A file's outlines are checked for the mask task alone, so
whatever stands in their place gives None here, never an error.
"""

import math
from collections.abc import Sequence

Box = list[float]  # x, y, width, height


def bounding_box(outline: object) -> Box | None:
    """Return the box around all parts of an outline; None if it has no area."""
    if isinstance(outline, dict):
        return _box_of_runs(outline)
    xs: list[float] = []
    ys: list[float] = []
    for polygon in polygons(outline):
        xs += polygon[0::2]
        ys += polygon[1::2]
    if not xs:
        return None
    left, top = min(xs), min(ys)
    width, height = max(xs) - left, max(ys) - top
    if width <= 0 or height <= 0:
        return None
    return [left, top, width, height]


def area(outline: object) -> float | None:
    """Return the pixels in an outline; None if there are none.

    COCO's own areas are such sums over the polygons of an object, and counts of run lengths.
    """
    if isinstance(outline, dict):
        lengths = run_lengths(outline.get("counts"))
        total: float = sum(lengths[1::2]) if lengths else 0
    else:
        total = sum(_polygon_area(polygon) for polygon in polygons(outline))
    if not 0 < total < math.inf:
        return None
    return total


def polygons(outline: object) -> list[list[float]]:
    """Return the parts of an outline that are polygons: three points or more."""
    found = []
    for part in outline if isinstance(outline, list) else []:
        is_polygon = isinstance(part, list) and len(part) >= 6 and len(part) % 2 == 0
        if is_polygon and all(_is_finite(value) for value in part):
            found.append(part)
    return found


def run_lengths(counts: object) -> list[int] | None:
    """Return run lengths as numbers, zeros first; None if they are damaged."""
    if isinstance(counts, str):
        lengths = _uncompressed(counts)
    elif isinstance(counts, list) and all(type(count) is int for count in counts):
        lengths = counts
    else:
        lengths = None
    if lengths is None or min(lengths, default=0) < 0:
        return None
    return lengths


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _polygon_area(polygon: Sequence[float]) -> float:
    """Compute a polygon's area by the shoelace formula."""
    twice = 0.0
    x_before, y_before = polygon[-2:]
    for x, y in zip(polygon[0::2], polygon[1::2]):
        twice += x_before * y - x * y_before
        x_before, y_before = x, y
    return abs(twice) / 2


def _box_of_runs(mask: dict[str, object]) -> Box | None:
    """Return the box of the ones. Run lengths go down the columns of the image, one by one."""
    size = mask.get("size")
    lengths = run_lengths(mask.get("counts"))
    if not isinstance(size, list) or not size or type(size[0]) is not int:
        return None
    height = size[0]
    if not lengths or height < 1:
        return None
    columns: list[int] = []
    rows: list[int] = []
    end = 0
    for number, length in enumerate(lengths):
        begin = end
        end += length
        is_ones = number % 2 == 1
        if not is_ones or length == 0:
            continue
        first_column, first_row = divmod(begin, height)
        last_column, last_row = divmod(end - 1, height)
        columns += [first_column, last_column]
        if first_column == last_column:
            rows += [first_row, last_row]
        else:
            # It goes on at the top of the next column.
            rows += [0, height - 1]
    if not columns:
        return None
    left, top = min(columns), min(rows)
    return [
        float(left),
        float(top),
        float(max(columns) + 1 - left),
        float(max(rows) + 1 - top),
    ]


def _uncompressed(text: str) -> list[int] | None:
    """Decode COCO's compressed run lengths; None if the text is damaged.

    A character, less 48, holds five bits of a number, the lowest first, and a sixth which says that
    more follow. From the fourth number on, each is stored as its difference to the one before last
    (pycocotools' maskApi.c, rleFrString).
    """
    lengths: list[int] = []
    number = 0  # the bits read so far of the next number
    shift = 0  # and how many they are
    more = False  # whether that number is incomplete
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            return None
        number |= (bits & 31) << shift
        shift += 5
        more = bool(bits & 32)
        if more:
            continue
        if bits & 16:
            number -= 1 << shift  # negative, in two's complement
        if len(lengths) > 2:
            number += lengths[-2]
        lengths.append(number)
        number = 0
        shift = 0
    return None if more else lengths
