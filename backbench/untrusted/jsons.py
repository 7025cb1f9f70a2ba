"""JSON from elsewhere: bounded in size, depth and digits, and wrong in one way, ValueError."""

import contextlib
import json
from pathlib import Path
from typing import Any

from backbench.untrusted import opening

DEEPEST = 60  # of nested lists and objects; what this suite writes has ten
MOST_DIGITS = (
    40  # of a whole number: one of 309 and more is no float, and ends arithmetic
)


def decode(text: str | bytes) -> Any:
    """Decode one JSON value. ValueError for anything else, for one nested deeper than DEEPEST, and
    for whole numbers of more than MOST_DIGITS digits."""
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None
    # A value is at most as deep as it has brackets: few values have to be walked through
    level = [value] if text.count("[") + text.count("{") > DEEPEST else []
    for _ in range(DEEPEST):
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = below
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    return value


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")


def decode_line(line: bytes) -> Any:
    """Do as `decode`, in a fifth of the time: pydantic's parser is faster than Python's and gives
    equal values. What it refuses, and what may be too deep or too long, is left to `decode`."""
    from pydantic_core import from_json

    short = b"0" * (MOST_DIGITS + 1) not in line.translate(_DIGITS_TO_0)
    if short and line.count(b"[") + line.count(b"{") <= DEEPEST:
        with contextlib.suppress(ValueError):
            return from_json(line)
    return decode(line)


def read(path: str | Path, *, most: int = 64 * opening.MEGABYTE) -> Any:
    """The JSON value in a file. OSError where it cannot be read, ValueError where it is no JSON."""
    return decode(opening.read_bytes(path, most=most))
