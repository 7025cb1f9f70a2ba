"""The public files of a reproduction list: they are found on this disk or downloaded, and compared
with the printed digests.

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
from backbench.published.reproduction_lists import PublicFile, ReproductionList
from backbench.runs import atomic, failures
from backbench.runs.terminal import log
from backbench.untrusted import jsons, opening, printable

PIECE = 1 << 20  # bytes that are read at once
TIMEOUT_S = 60
AGAIN = "the same command continues"
DIGESTS_FILE = "files.json"  # the digests of a run's files, beside its bundle


# ---- files on this disk


@dataclass(frozen=True)
class FoundFile:
    """A file of the list that is on this disk. It has the printed digest, if one is printed."""

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


def find(
    listed: ReproductionList,
    names: Sequence[str],
    files: Path,
    *,
    note: Path,
    download: bool,
    dry_run: bool,
) -> dict[str, FoundFile]:
    """Return the files of those checkpoints among `names` that are below `files`.

    A missing file is downloaded if `download` says so, else a warning says how to get it. `note` is
    where digests are kept. A dry run downloads and writes nothing. Raises BadInput if a file is not
    the published one (a downloaded one is removed again), or if there is none at all.
    """
    there: dict[str, FoundFile] = {}
    for name in names:
        about = listed.files[name]
        path = about.path_below(files, name)
        fetched = False
        if download and not dry_run and about.url is not None and not path.exists():
            fetch(about.url, path)
            fetched = True
        if not path.exists():
            if about.by_hand:
                how = about.by_hand
            elif download:
                how = "a dry run fetches nothing"
            else:
                how = "--download fetches it"
            log.warning(f"{name}: no {path}; {about.page}: {how}")
            continue
        sha256, md5 = _digests(path, note, keep=not dry_run)
        wrong = unlike(about, sha256, md5)
        if wrong:
            hint = "it may be damaged or another version: fetch it again"
            if fetched:
                path.unlink()
                hint = "it was removed again: look at it"
            raise BadInput(
                f"{path}: not the published file: {wrong}; {hint} from {about.page}, or leave"
                " it out (--only)"
            )
        there[name] = FoundFile(path, about, path.stat().st_size, sha256, md5)
        log.info(f"{name}: {path}, {there[name].checked_by}")
    if not there:
        example = f"{names[0]}/{listed.files[names[0]].file}"
        raise BadInput(
            f"none of the files of '{listed.name}' is below {files}; add --download"
            f" (without --dry-run), or put them there as NAME/FILE ({example})"
        )
    return there


def _digests(path: Path, note: Path, *, keep: bool = True) -> tuple[str, str]:
    """Return sha256 and md5 of a file, and keep them in `note` if `keep` says so.

    A file that nobody has written to since they were kept is not read again. Its size, inode and
    ctime tell that: no program can set the ctime.
    """
    known: dict[str, list[object]] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = dict(jsons.read(note))
    key = str(path.resolve())
    with opening.open_regular(path) as file:
        about = os.fstat(file.fileno())
        state = [about.st_size, about.st_ino, about.st_ctime_ns]
        match known.get(key):
            case [[*noted], str(sha256), str(md5)] if noted == state:
                return sha256, md5
        by_sha256 = hashlib.sha256()
        by_md5 = hashlib.md5(usedforsecurity=False)
        while piece := file.read(PIECE):
            by_sha256.update(piece)
            by_md5.update(piece)
    sha256, md5 = by_sha256.hexdigest(), by_md5.hexdigest()
    if keep:
        atomic.write_json(note, {**known, key: [state, sha256, md5]})
    return sha256, md5


def unlike(about: PublicFile, sha256: str, md5: str) -> str | None:
    """Say which printed digest a file does not have, and where it is printed; None if all agree."""
    has = {"sha256": sha256, "md5": md5}
    for kind, printed in about.printed.items():
        if not has[kind].startswith(printed):
            begins = has[kind][: max(8, len(printed))]
            return f"its {kind} begins {begins}, printed is {printed} ({about.digest_page})"
    return None


# ---- downloads


def fetch(url: str, file: Path) -> None:
    """Download `url` into `file.part`, continuing where that ends, and rename it once it is complete.

    Raises Failed if the connection breaks or fewer bytes come than were announced. The part is kept.
    """
    failures.make_folder(file.parent)
    part = file.with_name(f"{file.name}.part")
    version = part.with_name(f"{part.name}.json")
    try:
        _continue(url, part, version)
    # A bad address raises ValueError.
    except (OSError, http.client.HTTPException, ValueError) as error:
        # An error of the disk names a file; one of the connection names none.
        on_disk = getattr(error, "filename", None) is not None
        if on_disk and not isinstance(error, urllib.error.URLError):
            raise
        said = printable.shown(str(error), 120) or type(error).__name__
        raise Failed(
            f"{url}: cannot be fetched ({said}); {AGAIN}, or copy the file to {file}"
        ) from None
    with failures.naming(file):
        part.replace(file)
    version.unlink(missing_ok=True)


def _continue(url: str, part: Path, version: Path) -> None:
    """Download what `part` lacks; `version` says whose bytes it has: address and version."""
    # 1. Ask for the rest, if the version that was begun is known. By If-Range, the server sends all
    #    of the file instead if it has another version now.
    tag = None
    have = 0  # bytes
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        noted = jsons.read(version)
        if noted["url"] == url and noted["tag"]:
            have = part.stat().st_size
            tag = noted["tag"]
    headers = {"User-Agent": "backbench"}
    if tag and have:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        # The server has nothing behind the part's last byte.
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return  # the part is whole: the last command died before renaming it
        # The server's version is shorter: fetch it anew.
        version.unlink(missing_ok=True)
        _continue(url, part, version)
        return
    with contextlib.closing(answer):
        # 2. See what the answer holds: all of the file, or its rest.
        if answer.status == http.client.PARTIAL_CONTENT:
            sent = answer.headers.get("Content-Range", "")
            first, _, total = sent.removeprefix("bytes ").partition("/")
            if not first.startswith(f"{have}-"):
                said = printable.shown(sent, 60)
                raise Failed(f"{url}: sends {said} instead of bytes from {have}")
        else:
            tag = None
            have = 0
            total = answer.headers.get("Content-Length", "")
        length = int(total) if total.isascii() and total.isdigit() else None
        if answer.headers.get_content_type() == "text/html":
            raise BadInput(f"{url}: a web page, no checkpoint; look at it in a browser")
        # 3. Note the version before any byte of it is written, so that all bytes in the part are of
        #    it. A weak tag (W/...) does not promise equal bytes; the time of the last change does.
        own = answer.headers.get("ETag", "")
        if not own or own.startswith("W/"):
            own = answer.headers.get("Last-Modified")
        atomic.write_json(version, {"url": url, "tag": own or tag})
        begin = f"from {_size(have)}" if have else "all of it"
        log.info(f"{url}: {_size(length)}, {begin}")
        # 4. Write the bytes as they come.
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
