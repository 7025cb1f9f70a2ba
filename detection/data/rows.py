"""What one row of an annotation file must be before it is believed: one line of BadInput else.

Everything that training or scoring would stumble over is found here, so both engines refuse the
same files, before anything is trained.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeGuard

from backbench.errors import BadInput
from backbench.untrusted import printable

Json: TypeAlias = object  # whatever a JSON file can hold
Row: TypeAlias = Mapping[str, Json]
LARGEST = 1e12  # of a coordinate; what is larger is a mistake, and overflows on the way


def is_number(value: Json) -> TypeGuard[float]:
    """A finite number of a sensible size, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -LARGEST < value < LARGEST  # false for NaN


def is_identifier(value: Json) -> TypeGuard[int | str]:
    """A whole number or a text, as it can stand in a line: of at most 200 digits or characters."""
    if isinstance(value, str):
        return len(value) <= 200 and printable.control_in(value) is None
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 600


def row_of(value: Json, where: str) -> Row:
    if not isinstance(value, dict):
        raise BadInput(f"{where}: {_shown(value)} is not a row of `key: value`")
    return value


def identifiers(rows: Sequence[Json], name: str, file: Path) -> None:
    """The `id` of every row of the list `name`: all whole numbers or all texts, none twice."""
    seen: set[Json] = set()
    kinds: set[type] = set()
    for i, value in enumerate(rows):
        where = f"{file}: '{name}' number {i + 1}"
        row = row_of(value, where)
        if "id" not in row:
            raise BadInput(f"{where} has no 'id'")
        id_ = row["id"]
        if not is_identifier(id_):
            raise BadInput(f"{where}: id {_shown(id_)} is neither a whole number nor a text")
        if id_ in seen:
            raise BadInput(f"{where}: its id appears twice ({_shown(id_)})")
        seen.add(id_)
        kinds.add(type(id_))
    if len(kinds) > 1:
        raise BadInput(f"{file}: ids of '{name}': some are texts, some numbers; make them alike")


def category(row: Row, file: Path) -> str:
    """The name of a category, whose id must be a number: labels follow its order."""
    if not isinstance(row["id"], int):
        raise BadInput(f"{file}: category id {_shown(row['id'])} is not a whole number")
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise BadInput(f"{file}: category {row['id']}: name {_shown(name)} is not a text")
    return name


def keypoint_names(row: Row, file: Path) -> tuple[str, ...]:
    """A category's keypoints by name; () where it has none."""
    names = row.get("keypoints") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInput(f"{file}: category {row['id']}: 'keypoints' is not a list of names")
    if len(set(names)) < len(names):
        raise BadInput(f"{file}: category {row['id']}: two of its keypoints have one name")
    return tuple(names)


def image_size(row: Row, where: str) -> tuple[int, int]:
    """Height and width: whole and positive, 480 or 480.0."""
    out = []
    for key in ("height", "width"):
        value = row.get(key)
        if not is_number(value) or int(value) != value or value < 1:
            raise BadInput(f"{where}: {key} {_shown(value)} is not a positive whole number")
        out.append(int(value))
    return out[0], out[1]


def image_file(row: Row, folder: Path, where: str) -> str:
    """The path of the image, which must be inside its dataset's folder: another split's would be
    trained on in silence."""
    name = row.get("file_name")
    if not isinstance(name, str) or not name:
        raise BadInput(f"{where}: file_name {_shown(name)} is not the name of a file")
    if found := printable.control_in(name):
        raise BadInput(f"{where}: file_name holds the control character {found}")
    root = os.path.normpath(folder)
    path = os.path.normpath(Path(root) / name)
    if not path.startswith(root + os.sep):
        raise BadInput(f"{where}: file_name '{name}' is outside of {folder}")
    return path


def box(row: Row, where: str) -> list[float]:
    value = row.get("bbox")
    if not isinstance(value, list) or len(value) != 4 or not all(map(is_number, value)):
        raise BadInput(f"{where}: bbox {_shown(value)} is not [x, y, width, height]")
    if value[2] < 0 or value[3] < 0:
        raise BadInput(f"{where}: bbox {_shown(value)} has a negative width or height")
    return value


def crowd(row: Row, where: str) -> int:
    value = row.get("iscrowd", 0)
    if not isinstance(value, int) or value not in (0, 1):
        raise BadInput(f"{where}: iscrowd {_shown(value)} is neither 0 nor 1")
    return int(value)


def area(row: Row, where: str) -> None:
    """Which AP by size an object counts in; the box's where it is left out."""
    value = row.get("area", 0)
    if not is_number(value) or value < 0:
        raise BadInput(f"{where}: area {_shown(value)} is not a number; leave it out for the box's")


def keypoints(row: Row, count: int, where: str) -> list[float]:
    """x, y, visibility of each as in the file; [] for an object without any."""
    value = row.get("keypoints") or []
    if not isinstance(value, list) or not all(map(is_number, value)):
        raise BadInput(f"{where}: keypoints {_shown(value)} is not a list of numbers")
    if value and len(value) != 3 * count:
        raise BadInput(f"{where}: {len(value)} keypoint values instead of {3 * count}")
    marked = row.get("num_keypoints", 0)
    if not is_number(marked):
        raise BadInput(f"{where}: num_keypoints {_shown(marked)} is not a number")
    return value


def polygons(value: Json, where: str) -> list[list[float]]:
    """Outlines as lists of coordinates, whatever their lengths."""
    if not isinstance(value, list):
        raise BadInput(f"{where}: segmentation {_shown(value)} is not a list of polygons")
    for part in value:
        if not isinstance(part, list) or not all(map(is_number, part)):
            raise BadInput(f"{where}: segmentation has {_shown(part)}, which is no polygon")
    return value


def run_length(value: Json, size: tuple[int, int], where: str) -> None:
    """A crowd's mask: run lengths, plain or compressed, of the whole image."""
    row = row_of(value, where)
    if row.get("size") != list(size):
        raise BadInput(
            f"{where}: the mask's size {_shown(row.get('size'))} is not the image's {list(size)}"
        )
    counts = row.get("counts")
    if isinstance(counts, str):
        counts = _uncompressed(counts)
    lengths = counts if isinstance(counts, list) else [-1]
    good = all(isinstance(n, int) and n >= 0 for n in lengths)
    if not good or sum(lengths) != math.prod(size):
        raise BadInput(f"{where}: the mask's run lengths do not fill the image")


def _uncompressed(text: str) -> list[int] | None:
    """COCO's compressed run lengths as numbers, None where they are none: 5 bits a character from
    chr(48) on, the sixth says that more follow; from the third on, a difference to the one before
    last (pycocotools' maskApi.c, rleFrString)."""
    out: list[int] = []
    at = 0
    while at < len(text):
        number = shift = 0
        more = True
        while more:
            if at == len(text) or not 0 <= ord(text[at]) - 48 < 64:
                return None
            bits = ord(text[at]) - 48
            number |= (bits & 31) << shift
            more = bool(bits & 32)
            at, shift = at + 1, shift + 5
            if not more and bits & 16:
                number -= 1 << shift  # two's complement
        out.append(number + out[-2] if len(out) > 2 else number)
    return out


def _shown(value: Json) -> str:
    return printable.shown(repr(value), 60)
