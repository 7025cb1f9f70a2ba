"""The public files of a list: found on this disk, checked by digest, fetched with `--download`.

DIR/NAME/FILE             a complete file, of the published digest if one is printed
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
from backbench.published.selection import PublicFile, ReproductionList
from backbench.runs import atomic, failures
from backbench.runs.terminal import log
from backbench.untrusted import jsons, opening, printable

PIECE = 1 << 20  # bytes
TIMEOUT_S = 60
AGAIN = "the same command continues"


# ---- files on this disk


@dataclass(frozen=True)
class FoundFile:
    """A file of the list that is on this disk; its digest is the printed one, where one is printed."""

    path: Path
    about: PublicFile
    size: int
    sha256: str
    md5: str

    @property
    def checked_by(self) -> str:
        """The printed digest that the file was compared with."""
        printed = [f"{kind} {digits}" for kind, digits in self.about.printed.items()]
        return printed[0] if printed else "no printed digest"


DIGESTS_FILE = "files.json"  # of a run, beside its bundle


def find(
    listed: ReproductionList,
    names: Sequence[str],
    files: Path,
    *,
    note: Path,
    download: bool,
    dry_run: bool,
) -> dict[str, FoundFile]:
    """Those of `names` that are below `files`, after a download where asked; the others are named.
    BadInput for one that is not the published file; if it was downloaded, it is removed again. A
    dry run downloads and writes nothing."""
    there: dict[str, FoundFile] = {}
    for name in names:
        about = listed.files[name]
        path = about.path_below(files, name)
        fetched = (
            download and not dry_run and about.url is not None and not path.exists()
        )
        if fetched:
            fetch(str(about.url), path)
        if not path.exists():
            by_us = "a dry run fetches nothing" if download else "--download fetches it"
            how = about.by_hand or by_us
            log.warning(f"{name}: no {path}; {about.page}: {how}")
            continue
        digests = _digests(path, note, keep=not dry_run)
        found = FoundFile(path, about, path.stat().st_size, *digests)
        if wrong := unlike(about, *digests):
            if fetched:
                path.unlink()
            hint = "it may be damaged or another version: fetch it again"
            hint = "it was removed again: look at it" if fetched else hint
            where = f"{path}: not the published file: {wrong}; {hint}"
            raise BadInput(f"{where} from {about.page}, or leave it out (--only)")
        log.info(f"{name}: {path}, {found.checked_by}")
        there[name] = found
    if not there:
        example = f"{names[0]}/{listed.files[names[0]].file}"
        none = f"none of the files of '{listed.name}' is below {files}; add --download"
        raise BadInput(
            f"{none} (without --dry-run), or put them there as NAME/FILE ({example})"
        )
    return there


def _digests(path: Path, note: Path, *, keep: bool = True) -> tuple[str, str]:
    """sha256 and md5 of a file. `note` has those that were kept: a file that nobody wrote to since
    (size, inode and ctime, which no program can set) is not read again."""
    known: dict[str, list[object]] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = dict(jsons.read(note))
    with opening.open_regular(path) as file:
        about = os.fstat(file.fileno())
        state = [about.st_size, about.st_ino, about.st_ctime_ns]
        match known.get(key := str(path.resolve())):
            case [[*noted], str(sha256), str(md5)] if noted == state:
                return sha256, md5
        digests = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        while piece := file.read(PIECE):
            for digest in digests:
                digest.update(piece)
    sha256, md5 = (digest.hexdigest() for digest in digests)
    if keep:
        atomic.write_json(note, {**known, key: [state, sha256, md5]})
    return sha256, md5


def unlike(about: PublicFile, sha256: str, md5: str) -> str | None:
    """The printed digest that a file does not have, and where it is printed; None where all agree."""
    has = {"sha256": sha256, "md5": md5}
    for kind, printed in about.printed.items():
        if not has[kind].startswith(printed):
            begins = has[kind][: max(8, len(printed))]
            return f"its {kind} begins {begins}, printed is {printed} ({about.digest_page})"
    return None


# ---- downloads


def fetch(url: str, file: Path) -> None:
    """Download `url` into `file.part`, from where that ends, and rename it when it is complete.
    Failed where the connection breaks or less comes than was announced; the part is kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    version = part.with_name(f"{part.name}.json")
    try:
        _continue(url, part, version)
    except (
        OSError,
        http.client.HTTPException,
        ValueError,
    ) as error:  # the last of a bad address
        # The disk's errors name a file, those of a connection none
        on_disk = getattr(error, "filename", None) is not None
        if on_disk and not isinstance(error, urllib.error.URLError):
            raise
        said = printable.shown(str(error), 120) or type(error).__name__
        why = f"{url}: cannot be fetched ({said})"
        raise Failed(f"{why}; {AGAIN}, or copy the file to {file}") from None
    with failures.naming(file):
        part.replace(file)
    version.unlink(missing_ok=True)


def _continue(url: str, part: Path, version: Path) -> None:
    # 1. The server sends the rest of the version that was begun, or all of another one
    tag, have = None, 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        noted = jsons.read(version)
        if noted["url"] == url and noted["tag"]:
            tag, have = noted["tag"], part.stat().st_size
    headers = {"User-Agent": "backbench"}
    if tag and have:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        # Nothing after the last byte of the part; a shorter version is fetched anew
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return  # the part is whole: killed before it was renamed
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
        # 2. The version is noted first: all bytes in the part are of it. A weak tag does not promise
        #    equal bytes, the time of the last change does
        own = answer.headers.get("ETag", "")
        if not own or own.startswith("W/"):
            own = answer.headers.get("Last-Modified")
        atomic.write_json(version, {"url": url, "tag": own or tag})
        log.info(
            f"{url}: {_size(length)}, {'from ' + _size(have) if have else 'all of it'}"
        )
        with part.open("ab" if have else "wb") as out:
            while piece := answer.read(PIECE):
                with failures.naming(part):
                    out.write(piece)
                    out.flush()
                have += len(piece)
    if length is not None and have != length:
        raise Failed(f"{url}: broke off at {_size(have)} of {_size(length)}; {AGAIN}")


def _size(count: int | None) -> str:
    return "of unknown length" if count is None else f"{count / 1e6:.1f} MB"
