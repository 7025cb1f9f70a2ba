"""Records that name no folder of a machine, for whoever publishes them."""

import re
import shlex

from backbench.untrusted import printable

_DRIVE = r"(?:[A-Za-z]:(?=[/\\]))?"
# Not within an address (https://...), a word (a/b) or a path that begins in the run (./a)
_ABSOLUTE = re.compile(rf"(?<![\w.:/\\~]){_DRIVE}(?:~[^\s/\\'\"]*)?[/\\][^\s'\",;:=]*")
_WHOLE = re.compile(rf"(?:file://)?{_DRIVE}(?:~[^/\\]*)?[/\\].*", re.DOTALL)


def without_folders(record: dict[str, object]) -> dict[str, object]:
    """Remove the commands' folders and cut absolute paths to their last name; commands stay."""
    out: dict[str, object] = {}
    for key, value in record.items():
        if key == "command" and isinstance(value, str | list):
            out[key] = _cut_command(value)
        elif key != "cwd":
            out[_cut_text(key)] = _cut(value)
    return out


def _cut(value: object) -> object:
    if isinstance(value, dict):
        return without_folders(value)
    if isinstance(value, list | tuple):
        return [_cut(each) for each in value]
    if isinstance(value, str):
        return _cut_text(value)
    return value


def _cut_text(text: str) -> str:
    if _WHOLE.fullmatch(text):
        return _last_name(text)
    return _ABSOLUTE.sub(lambda path: _last_name(path[0]), text)


def _last_name(path: str) -> str:
    """/home/me/x.pth -> x.pth; a root or a home has no name."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1].lstrip("~")


def _cut_command(command: str | list[object]) -> str | list[str]:
    """Return a command whose words name no absolute path: `--data /scratch/x` and `data=/scratch/x`
    too."""
    if not isinstance(command, str):
        return [_cut_word(str(word)) for word in command]
    try:
        words = printable.of_command(command)
    except ValueError:  # a quotation without an end
        return _cut_text(command)
    return shlex.join(_cut_word(word) for word in words)


def _cut_word(word: str) -> str:
    name, equals, path = word.partition("=")
    if equals and _WHOLE.fullmatch(path):
        return f"{name}={_last_name(path)}"
    return _cut_text(word)
