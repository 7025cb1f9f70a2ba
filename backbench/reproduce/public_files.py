"""The public files of a list: found on this disk, compared with the printed digests, and fetched
where `--download` asks for it.

DIR/NAME/FILE             a complete file, of the published digest where one is printed
DIR/NAME/FILE.part        a download that was cut off
DIR/NAME/FILE.part.json   which version of which file it is: address and tag
"""

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def fetch(url: str, file: Path) -> None:
    """Download `url` into `file.part`, from where that ends, and rename it when it is complete.
    Failed where the connection breaks or less comes than was announced; the part is kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    version = part.with_name(f"{part.name}.json")
    try:
        _continue(url, part, version)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError) as error:
        raise Failed(f"{url}: {_why(error)}; {AGAIN}, or copy the file to {file}") from None
    except OSError as error:
        # The disk's errors name a file, those of a connection none
        if error.filename is not None:
            raise
        raise Failed(f"{url}: the connection broke ({error}); {AGAIN}") from None
    with failures.naming(file):
        part.replace(file)
    version.unlink(missing_ok=True)


def _continue(url: str, part: Path, version: Path) -> None:
    # 1. The server sends the rest of the version that was begun, or all of another one
    tag = _begun(url, version) if part.is_file() else None
    have = part.stat().st_size if tag else 0
    headers = {"User-Agent": "backbench"}
    if tag and have:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        # Nothing after the last byte: killed before it was renamed, or it is another version
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return
        version.unlink(missing_ok=True)
        _continue(url, part, version)
        return
    with contextlib.closing(answer):
        if answer.status != http.client.PARTIAL_CONTENT:
            tag, have, total = None, 0, answer.headers.get("Content-Length", "")
        else:
            sent = answer.headers.get("Content-Range", "")
            first, _, total = sent.removeprefix("bytes ").partition("/")
            if not first.startswith(f"{have}-"):
                said = printable.shown(sent, 60)
                raise Failed(f"{url}: sends {said} instead of bytes from {have}")
        length = int(total) if total.isascii() and total.isdigit() else None
        if answer.headers.get_content_type() == "text/html":
            raise BadInput(f"{url}: a web page, no checkpoint; look at it in a browser")
        # 2. The version is noted first: all bytes in the part are of it
        atomic.write_json(version, {"url": url, "tag": _tag(answer) or tag})
        log.info(f"{url}: {_size(length)}, {'from ' + _size(have) if have else 'all of it'}")
        with part.open("ab" if have else "wb") as out:
            while piece := answer.read(PIECE):
                with failures.naming(part):
                    out.write(piece)
                    out.flush()
                have += len(piece)
    if length is not None and have != length:
        raise Failed(f"{url}: broke off at {_size(have)} of {_size(length)}; {AGAIN}")


def _begun(url: str, version: Path) -> str | None:
    """The tag of the version of `url` that was begun; None where its server gave none."""
    try:
        noted = jsons.read(version)
        return noted["tag"] if noted["url"] == url else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tag(answer: http.client.HTTPResponse) -> str | None:
    """A strong ETag, or the time of the last change."""
    tag = answer.headers.get("ETag", "")
    if tag and not tag.startswith("W/"):  # a weak one does not promise equal bytes
        return str(tag)
    return answer.headers.get("Last-Modified")


def _why(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    reason = getattr(error, "reason", None) or error
    return f"cannot be fetched ({printable.shown(str(reason), 120) or type(error).__name__})"


def _size(count: int | None) -> str:
    return "of unknown length" if count is None else f"{count / 1e6:.1f} MB"
