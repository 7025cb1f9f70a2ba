"""Reads JSON from elsewhere: bounded in size, depth and digits; ValueError for whatever is wrong."""

import codecs
import contextlib
import json
from pathlib import Path
from typing import Any

from backbench.untrusted import opening

DEEPEST = 60  # levels of nested lists and objects; what this suite writes has ten
# Digits of a whole number. One of 309 and more is no float, so that arithmetic with it fails.
MOST_DIGITS = 40


def decode(text: str | bytes) -> Any:
    """Decode one JSON value, behind a byte order mark or without one.

    ValueError for anything else, for a value nested deeper than DEEPEST, and for whole numbers of
    more than MOST_DIGITS digits."""
    if isinstance(text, bytes):
        # Programs of Windows put a mark of the byte order first
        data = text.removeprefix(codecs.BOM_UTF8)
        text = data.decode()
    else:
        data = text.encode(errors="surrogatepass")
    # Where no number is long, Python's own parser of numbers is several times as fast as `_whole`
    decoder = _DECODER if _may_be_long(data) else _PLAIN_DECODER
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None
    # A value is at most as deep as its text has brackets, so that few values are walked through.
    if text.count("[") + text.count("{") > DEEPEST:
        _refuse_deep(value)
    return value


def _refuse_deep(value: object) -> None:
    """Raise ValueError for a value that is nested deeper than DEEPEST."""
    # One level after another, rather than by recursion, which Python would end
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        below: list[object] = []
        for each in level:
            below += each.values() if isinstance(each, dict) else each
        level = [each for each in below if isinstance(each, (dict, list))]
    if level:
        raise ValueError(f"nested more than {DEEPEST} levels deep")


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)
_PLAIN_DECODER = json.JSONDecoder()
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")


def decode_line(line: bytes) -> Any:
    """Do as `decode`, in a fifth of the time.

    pydantic's parser is faster than Python's and gives equal values. What it refuses, and what may be
    too deep or too long, is left to `decode`.
    """
    from pydantic_core import from_json

    if is_bounded(line):
        with contextlib.suppress(ValueError):
            return from_json(line)
    return decode(line)


def is_bounded(line: bytes) -> bool:
    """Return True where no value can be nested too deep and no number can be too long.

    A quick look at the bytes: brackets and digits inside strings count, too."""
    too_deep = line.count(b"[") + line.count(b"{") > DEEPEST
    return not too_deep and not _may_be_long(line)


def _may_be_long(text: bytes) -> bool:
    """Return True where more than MOST_DIGITS digits stand in a row."""
    return b"0" * (MOST_DIGITS + 1) in text.translate(_DIGITS_TO_0)


def read(path: str | Path, *, most: int = 64 * opening.MEGABYTE) -> Any:
    """Read the JSON value in a file. OSError if it cannot be read, ValueError if it is no JSON."""
    return decode(opening.read_bytes(path, most=most))
