"""Texts from elsewhere: which characters may not stand in them."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

# Control (newline, escape), format (text that runs backwards), lone surrogates, line and paragraph
# separators: they change what a terminal shows, or where a line of a file ends.
_REFUSED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def control_in(text: str, allowed: str = "") -> str | None:
    """The first control character in `text`, as Python writes it ('\\n'); None where there is
    none."""
    if text.isprintable():  # nearly always, and fast
        return None
    for character in text:
        if unicodedata.category(character) in _REFUSED and character not in allowed:
            return ascii(character)
    return None


def control_below(value: object, path: str = "", allowed: str = "") -> tuple[str, str] | None:
    """(path, character) of the first text, key or value, in nested plain values that holds a
    control character."""
    if isinstance(value, str):
        found = control_in(value, allowed)
        return (path, found) if found else None
    if isinstance(value, Mapping):
        for key, below in value.items():
            if found := control_in(str(key)):
                return ascii(str(key)), found
            if inner := control_below(below, f"{path}.{key}" if path else str(key), allowed):
                return inner
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            if inner := control_below(below, f"{path}[{number}]", allowed):
                return inner
    return None


def shown(text: str, most: int = 200) -> str:
    """`text` as it can be printed: control characters written out, cut to its first `most`."""
    cut = text if len(text) <= most else text[:most] + "..."
    if control_in(cut) is None:
        return cut
    pieces = []
    for character in cut:
        pieces.append(ascii(character)[1:-1] if control_in(character) else character)
    return "".join(pieces)
