"""Fetching a public file: only where it is asked for, continued where it was cut off, checked.

FILE.part        what is there so far
FILE.part.json   of which version of which file: its address, length and tag
FILE             all of it, of the published digest where one is printed
"""

from __future__ import annotations

import contextlib
import http.client
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbench.errors import BadInput, Failed
from backbench.runs import atomic, failures
from backbench.runs.terminal import log
from backbench.untrusted import jsons, printable

PIECE = 1 << 20  # bytes
PATIENCE_S = 60
AGAIN = "the same command continues"


@dataclass(frozen=True)
class RemoteFile:
    """A version of a file as its server describes it. Length and tag may be unknown."""

    url: str
    length: int | None = None
    tag: str | None = None  # a strong ETag, or when it was changed

    def about(self) -> dict[str, Any]:
        return {"url": self.url, "length": self.length, "tag": self.tag}


def fetch(url: str, file: Path) -> None:
    """`url` into `file.part`, from where that ends, and then under its name. Failed where the
    connection breaks or less comes than was announced; what came is kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    try:
        _continue(url, part)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError) as error:
        raise Failed(f"{url}: {_why(error)}; {AGAIN}, or copy the file to {file}") from None
    except OSError as error:
        # The disk's errors name a file, those of a connection none
        if error.filename is not None:
            raise
        raise Failed(f"{url}: the connection broke ({error}); {AGAIN}") from None
    with failures.naming(file):
        part.replace(file)
    _note(part).unlink(missing_ok=True)


def forget(file: Path) -> None:
    """Nothing of an unfinished download is left."""
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)
    _note(part).unlink(missing_ok=True)


def _continue(url: str, part: Path) -> None:
    known, have = _begun(url, part)
    if known is not None and known.length == have:  # killed after its last byte
        return
    with contextlib.closing(_ask(url, known, have)) as answer:
        # 1. What the server sends: the rest of the version that was begun, or all of one
        if answer.status == http.client.PARTIAL_CONTENT:
            remote = _rest(answer, known, have, url)
        else:
            have, remote = 0, RemoteFile(url, _length(answer), _tag(answer))
        _refuse_page(answer, url)
        # 2. The note first: whatever is in the part is of that version
        atomic.write_json(_note(part), remote.about())
        log.info(f"{url}: {_size(remote.length)}, {'from ' + _size(have) if have else 'all of it'}")
        with failures.naming(part), part.open("ab" if have else "wb") as out:
            while piece := answer.read(PIECE):
                out.write(piece)
                have += len(piece)
    if remote.length is not None and have != remote.length:
        raise Failed(f"{url}: broke off at {_size(have)} of {_size(remote.length)}; {AGAIN}")


def _ask(url: str, known: RemoteFile | None, have: int) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": "backbench"})
    if known is not None:
        request.add_header("Range", f"bytes={have}-")
        if known.tag is not None:  # of another version all is sent
            request.add_header("If-Range", known.tag)
    try:
        return urllib.request.urlopen(request, timeout=PATIENCE_S)
    except urllib.error.HTTPError as error:
        # Nothing behind the last byte: either all of it is here, or it is not the same file
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and known is not None:
            return _ask(url, None, 0)
        raise


def _begun(url: str, part: Path) -> tuple[RemoteFile | None, int]:
    """The version that `part` is the beginning of, and how much of it; None where nobody knows, or
    where its server would not tell another version from it."""
    have = part.stat().st_size if part.is_file() else 0
    try:
        about = jsons.read(_note(part))
        known = RemoteFile(about["url"], about["length"], about["tag"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0
    usable = have > 0 and known.url == url and known.tag is not None
    return (known, have) if usable else (None, 0)


def _rest(answer: Any, known: RemoteFile | None, have: int, url: str) -> RemoteFile:
    said = answer.headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", said)
    if known is None or found is None or int(found[1]) != have:
        raise Failed(
            f"{url}: sends {printable.shown(said, 60)} where bytes from {have} were asked for"
        )
    total = known.length if found[3] == "*" else int(found[3])
    return RemoteFile(url, total, known.tag)


def _refuse_page(answer: Any, url: str) -> None:
    if answer.headers.get_content_type() == "text/html":
        raise BadInput(f"{url}: a web page, no checkpoint; look at it in a browser")


def _length(answer: Any) -> int | None:
    text = answer.headers.get("Content-Length", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _tag(answer: Any) -> str | None:
    tag = answer.headers.get("ETag", "")
    if tag and not tag.startswith("W/"):  # a weak one does not promise equal bytes
        return str(tag)
    changed = answer.headers.get("Last-Modified")
    return str(changed) if changed else None


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _why(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    reason = getattr(error, "reason", None) or error
    return f"cannot be fetched ({printable.shown(str(reason), 120) or type(error).__name__})"


def _size(count: int | None) -> str:
    return "of unknown length" if count is None else f"{count / 1e6:.1f} MB"
