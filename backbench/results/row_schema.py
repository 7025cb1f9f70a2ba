"""What one line of results.jsonl may say: types and sizes, whoever wrote it.

A line that is wrong is left out by name, so that one bad file never takes the board down; what is
right here needs no check anywhere else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from backbench.errors import BadInput
from backbench.untrusted import printable

LARGEST = 1e12  # of a value: no percentage, no spectrum comes near
# Names become columns, headings and parts of files' names, which may have 255 bytes
_TEXTS = {
    **dict.fromkeys(("checkpoint", "task", "dataset", "split", "metric", "protocol"), 120),
    **dict.fromkeys(("name", "method", "arch"), 300),
}
_ORIGIN_TEXTS = ("cwd", "code", "hardware")


def check(data: Mapping[str, Any]) -> None:
    """BadInput that names the first key whose value cannot be what it stands for."""
    for key, most in _TEXTS.items():
        text = data.get(key)
        # Nearly every one is fine, and a call for each would take longer than all else here
        if not (type(text) is str and len(text) <= most and text.isprintable()):
            _check_text(key, text, most)
    if data.get("engine") is not None:
        _check_text("engine", data["engine"], 60)
    for key, least in (("epochs", 0), ("seed", -(2**63))):
        value = data.get(key, 0)
        if not (type(value) is int and least <= value < 2**63) and (value, key) != (None, "epochs"):
            raise BadInput(f"'{key}' is {_shown(value)}, not a whole number")
    _check_number("value", data.get("value"))
    ci95 = data.get("ci95")
    if ci95 is not None:
        if not isinstance(ci95, list | tuple) or len(ci95) != 2 or None in ci95:
            raise BadInput(f"'ci95' is {_shown(ci95)}, not two numbers")
        for end in ci95:
            _check_number("ci95", end)
    for key in ("chosen", "provenance", "origin"):
        if data.get(key) is not None and not isinstance(data[key], Mapping):
            raise BadInput(f"'{key}' is {_shown(data[key])}, not a group of keys")
    _check_provenance(data.get("provenance") or {})
    _check_origin(data.get("origin") or {})


def _check_provenance(provenance: Mapping[str, Any]) -> None:
    kept = provenance.get("predictions")
    if kept is not None:
        _check_text("provenance.predictions", kept, 300)
        # Beside the line, not anywhere on the disk of whoever reads it
        path = PurePosixPath(kept)
        if path.is_absolute() or ".." in path.parts:
            raise BadInput(f"'provenance.predictions' is {_shown(kept)}, outside the run folder")
    _check_command("provenance.command", provenance.get("command"))


def _check_origin(origin: Mapping[str, Any]) -> None:
    for key in ("recorded", "images_per_second"):
        _check_number(f"origin.{key}", origin.get(key))
    _check_command("origin.command", origin.get("command"))
    for key in _ORIGIN_TEXTS:
        text = origin.get(key)
        if text is not None:
            _check_text(f"origin.{key}", text, 4096)


def _check_text(key: str, value: Any, most: int) -> None:
    if not isinstance(value, str):
        raise BadInput(f"'{key}' is {_shown(value)}, not text")
    if len(value) > most:
        raise BadInput(f"'{key}' has {len(value)} characters, more than {most}")
    if found := printable.control_in(value):
        raise BadInput(f"'{key}' holds the control character {found}")


def _check_number(key: str, value: Any) -> None:
    if value is None or (type(value) is float and -LARGEST <= value <= LARGEST):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"'{key}' is {_shown(value)}, not a number")
    # nan and inf are undefined, as Result makes of them
    undefined = isinstance(value, float) and not math.isfinite(value)
    if not undefined and not -LARGEST <= value <= LARGEST:
        raise BadInput(f"'{key}' is {_shown(value)}, beyond {LARGEST:g}")


def _check_command(key: str, command: Any) -> None:
    if command is None:
        return
    listed = isinstance(command, list) and all(isinstance(word, str) for word in command)
    if not listed and not isinstance(command, str):
        raise BadInput(f"'{key}' is {_shown(command)}, neither text nor a list of texts")
    _check_words(key, "\0".join(command) if listed else command, listed)


@functools.lru_cache(maxsize=65536)  # a run's numbers share their command
def _check_words(key: str, text: str, listed: bool) -> None:
    for part in text.split("\0") if listed else (text,):
        if found := printable.control_in(part):
            raise BadInput(f"'{key}' holds the control character {found}")
    if not listed:
        try:
            printable.of_command(text)
        except ValueError as error:
            raise BadInput(f"'{key}' is no command line ({error})") from None


def _shown(value: Any) -> str:
    """The start of a value, on one line."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a number of many digits"
    return printable.shown(repr(value), 60)
