"""The public files of a list: found on this disk, compared with the printed digests, and fetched
where `--download` asks for it.

DIR/NAME/FILE             a complete file, of the published digest where one is printed
DIR/NAME/FILE.part        a download that was cut off
DIR/NAME/FILE.part.json   which version of which file it is: address, length and tag
"""

import contextlib
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backbench.errors import BadInput, Failed
from backbench.reproduce.selection import PublicFile, ReproductionList
from backbench.runs import atomic, failures
from backbench.runs.terminal import log
from backbench.untrusted import jsons, opening, printable

PIECE = 1 << 20  # bytes
TIMEOUT_S = 60
DIGESTS_FILE = "files.json"  # digests of files that were read before
AGAIN = "the same command continues"


# ---- files on this disk


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """A file of the list that is on this disk; its digest is the printed one, where one is printed."""

    name: str  # in the list
    path: Path
    about: PublicFile
    size: int
    sha256: str
    md5: str

    @property
    def checked_by(self) -> str:
        """The printed digest that the file was compared with."""
        if self.about.sha256 is not None:
            return f"sha256 {self.about.sha256}"
        if self.about.md5 is not None:
            return f"md5 {self.about.md5}"
        return "no printed digest"


def find(
    listed: ReproductionList, names: Sequence[str], files: Path, note: Path
) -> dict[str, FoundFile]:
    """Those of `names` that are below `files`. BadInput for one that is not the published file."""
    there: dict[str, FoundFile] = {}
    for name in names:
        about = listed.files[name]
        path = about.path_below(files, name)
        if not path.exists():
            continue
        sha256, md5 = _digests(path, note)
        if wrong := unlike(about, sha256, md5):
            raise BadInput(
                f"{path}: not the published file: {wrong}; it may be damaged or another version:"
                f" fetch it again from {about.page}, or leave it out (--only)"
            )
        size = path.stat().st_size
        there[name] = FoundFile(
            name=name, path=path, about=about, size=size, sha256=sha256, md5=md5
        )
    return there


def _digests(path: Path, note: Path) -> tuple[str, str]:
    """sha256 and md5 of a file. `note` keeps them: a file that nobody wrote to since (size, inode
    and ctime, which no program can set) is not read again."""
    try:
        known = jsons.read(note)
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    key = str(path.resolve())
    with opening.open_regular(path) as file:
        about = os.fstat(file.fileno())
        state = [about.st_size, about.st_ino, about.st_ctime_ns]
        noted = known.get(key)
        if isinstance(noted, dict) and noted.get("state") == state:
            return str(noted.get("sha256")), str(noted.get("md5"))
        sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        while piece := file.read(PIECE):
            sha256.update(piece)
            md5.update(piece)
    digests = {"sha256": sha256.hexdigest(), "md5": md5.hexdigest()}
    atomic.write_json(note, {**known, key: {"state": state, **digests}})
    return digests["sha256"], digests["md5"]


def unlike(about: PublicFile, sha256: str, md5: str) -> str | None:
    """The printed digest that a file does not have, and where it is printed; None where all agree."""
    for kind, printed, has in (("sha256", about.sha256, sha256), ("md5", about.md5, md5)):
        if printed is not None and not has.startswith(printed):
            begins = has[: max(8, len(printed))]
            return f"its {kind} begins {begins}, printed is {printed} ({about.digest_page})"
    return None


# ---- downloads


def fetch_missing(listed: ReproductionList, names: Sequence[str], files: Path, note: Path) -> None:
    """Download missing files; one that is not the published file is removed again."""
    for name in names:
        about = listed.files[name]
        path = about.path_below(files, name)
        if path.exists() or about.url is None:
            continue
        fetch(about.url, path)
        if wrong := unlike(about, *_digests(path, note)):
            path.unlink()
            again = f"it was removed again, look at {about.page}"
            raise BadInput(f"{about.url}: not the published file: {wrong}; {again}")


@dataclass(frozen=True)
class RemoteFile:
    """A version of a file as its server describes it. Length and tag may be unknown."""

    url: str
    length: int | None = None
    tag: str | None = None  # a strong ETag, or the time of the last change


def fetch(url: str, file: Path) -> None:
    """Download `url` into `file.part`, from where that ends, and rename it when it is complete.
    Failed where the connection breaks or less comes than was announced; the part is kept."""
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


def _continue(url: str, part: Path) -> None:
    known, have = _begun(url, part)
    if known is not None and known.length == have:  # killed after its last byte
        return
    with contextlib.closing(_request(url, known, have)) as answer:
        # 1. The server sends the rest of the version that was begun, or all of one.
        if answer.status == http.client.PARTIAL_CONTENT:
            remote = _rest(answer, known, have, url)
        else:
            length = answer.headers.get("Content-Length", "")
            known_length = int(length) if length.isascii() and length.isdigit() else None
            have, remote = 0, RemoteFile(url, known_length, _tag(answer))
        if answer.headers.get_content_type() == "text/html":
            raise BadInput(f"{url}: a web page, no checkpoint; look at it in a browser")
        # 2. The note is written first: all bytes in the part are of that version.
        atomic.write_json(_note(part), asdict(remote))
        log.info(f"{url}: {_size(remote.length)}, {'from ' + _size(have) if have else 'all of it'}")
        with failures.naming(part), part.open("ab" if have else "wb") as out:
            while piece := answer.read(PIECE):
                out.write(piece)
                have += len(piece)
    if remote.length is not None and have != remote.length:
        raise Failed(f"{url}: broke off at {_size(have)} of {_size(remote.length)}; {AGAIN}")


def _begun(url: str, part: Path) -> tuple[RemoteFile | None, int]:
    """The version that `part` is the beginning of, and its length so far; (None, 0) where nobody
    knows the version, or where its server would not tell another version from it."""
    have = part.stat().st_size if part.is_file() else 0
    try:
        about = jsons.read(_note(part))
        known = RemoteFile(about["url"], about["length"], about["tag"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0
    usable = have > 0 and known.url == url and known.tag is not None
    return (known, have) if usable else (None, 0)


def _request(url: str, known: RemoteFile | None, have: int) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": "backbench"})
    if known is not None:
        request.add_header("Range", f"bytes={have}-")
        if known.tag is not None:  # of another version all is sent
            request.add_header("If-Range", known.tag)
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        # Nothing after the last byte: either the file is complete, or it is another version
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and known is not None:
            return _request(url, None, 0)
        raise


def _rest(answer: Any, known: RemoteFile | None, have: int, url: str) -> RemoteFile:
    header = answer.headers.get("Content-Range", "")
    sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", header)
    if known is None or sent is None or int(sent[1]) != have:
        raise Failed(f"{url}: sends {printable.shown(header, 60)} instead of bytes from {have}")
    total = known.length if sent[3] == "*" else int(sent[3])
    return RemoteFile(url, total, known.tag)


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
