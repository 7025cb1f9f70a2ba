"""Refuses, escapes or quotes characters that do harm, in texts from elsewhere."""

import re
import shlex
import unicodedata
from collections.abc import Mapping

# Characters of these Unicode categories change what a terminal shows, or where a line of a file ends:
# control (newline, escape), format (text that runs backwards), lone surrogates, line and paragraph
# separators.
_REFUSED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_QUOTING = ("'", '"', "\\")
_SPACES = re.compile(r"[ \t\r\n]+")
_DIVIDERS = {ord(c): f"%{ord(c):02X}" for c in "%/@+:`"}


def control_in(text: str, allowed: str = "") -> str | None:
    """Return the first control character in `text`, as Python writes it ('\\n'), or None."""
    # Nearly every text is printable, and this check is fast.
    if text.isprintable():
        return None
    for character in text:
        if unicodedata.category(character) in _REFUSED and character not in allowed:
            return ascii(character)
    return None


def control_below(
    value: object, path: str = "", allowed: str = ""
) -> tuple[str, str] | None:
    """Find the first key or text with a control character in plain values: (path, character)."""
    if isinstance(value, str):
        found = control_in(value, allowed)
        return (path, found) if found else None
    if isinstance(value, Mapping):
        for key, below in value.items():
            if found := control_in(str(key)):
                return ascii(str(key)), found
            path_below = f"{path}.{key}" if path else str(key)
            if inner := control_below(below, path_below, allowed):
                return inner
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            if inner := control_below(below, f"{path}[{number}]", allowed):
                return inner
    return None


def shown(text: str, most: int = 200) -> str:
    """Return `text` as it can be printed: cut to its first `most` characters, and with control
    characters written out."""
    cut = text if len(text) <= most else text[:most] + "..."
    if control_in(cut) is None:
        return cut
    pieces = []
    for character in cut:
        if control_in(character):
            pieces.append(ascii(character)[1:-1])  # \x1b, without the quotation marks
        else:
            pieces.append(character)
    return "".join(pieces)


def of_command(line: str) -> list[str]:
    """Split a command line into words as a shell does. ValueError for half a quotation."""
    # Nearly every line has neither quotes nor backslashes, and shlex reads character by character.
    if any(mark in line for mark in _QUOTING):
        return shlex.split(line)
    return [word for word in _SPACES.split(line) if word]


def spreadsheet(value: object) -> object:
    """Return a value for a csv cell: text that a spreadsheet would take for a formula gets an
    apostrophe before it; numbers stay numbers."""
    if not isinstance(value, str) or not value:
        return value
    if value[0] in "=+-@\t\r" and not _NUMBER.fullmatch(value):
        value = f"'{value}"
    # A folder's name may have bytes that are no text; Python keeps them as lone surrogates.
    return value.encode(errors="backslashreplace").decode()


def part(text: str) -> str:
    """Escape `text` as a part of a column's name (%2F, ...): `p+e` is not `p` with engine `e`."""
    return text.translate(_DIVIDERS)
