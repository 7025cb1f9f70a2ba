"""A record as it may be shown to everybody: without what it says of the machine's folders.

`backbench merge --public` writes records in this way. Commands stay, so that numbers can be measured
again; of a path that begins at the machine's root or at somebody's home only its last name stays.
"""

from __future__ import annotations

import re
import shlex

from backbench.untrusted import printable

_DRIVE = r"(?:[A-Za-z]:(?=[/\\]))?"
# Not within an address (https://...), a word (a/b) or a path that begins in the run (./a)
_ABSOLUTE = re.compile(rf"(?<![\w.:/\\~]){_DRIVE}(?:~[^\s/\\'\"]*)?[/\\][^\s'\",;:=]*")
_WHOLE = re.compile(rf"(?:file://)?{_DRIVE}(?:~[^/\\]*)?[/\\].*", re.DOTALL)


def shown(record: dict[str, object]) -> dict[str, object]:
    """The record, a line of results.jsonl, without the folders that its commands ran in and with
    paths cut to their names, wherever they stand."""
    out: dict[str, object] = {}
    for key, value in record.items():
        if key == "command":
            out[key] = _command(value)
        elif key != "cwd":
            out[_cut(key)] = _any(value)
    return out


def _any(value: object) -> object:
    if isinstance(value, dict):
        return shown(value)
    if isinstance(value, list | tuple):
        return [_any(one) for one in value]
    return _cut(value) if isinstance(value, str) else value


def _cut(text: str) -> str:
    if _WHOLE.fullmatch(text):
        return _last(text)
    return _ABSOLUTE.sub(lambda found: _last(found[0]), text)


def _last(path: str) -> str:
    """/home/me/x.pth -> x.pth; a root or a home has no name."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1].lstrip("~")


def _command(given: object) -> object:
    """A command whose words name no absolute path: `--data /scratch/x` and `data=/scratch/x` too."""
    if not isinstance(given, str):
        return [_word(str(word)) for word in given] if isinstance(given, list) else given
    try:
        said = printable.of_command(given)
    except ValueError:  # a quotation without an end
        return _cut(given)
    return shlex.join(map(_word, said))


def _word(word: str) -> str:
    name, equals, path = word.partition("=")
    if equals and _WHOLE.fullmatch(path):
        return f"{name}={_last(path)}"
    return _cut(word)
