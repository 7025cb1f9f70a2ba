"""Which files of a list are there, and whether they are the published ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput
from backbench.reproduce import download
from backbench.reproduce.selection import PublicFile, ReproductionList
from backbench.runs import atomic
from backbench.untrusted import jsons, opening

PIECE = 1 << 20
NOTE = "files.json"  # digests of files that were read before


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """A file of the list that is on this disk, and is what its page says as far as it says it."""

    name: str  # in the list
    path: Path
    about: PublicFile
    size: int
    sha256: str
    md5: str

    @property
    def checked_by(self) -> str:
        """What of it was held against a printed digest."""
        if self.about.sha256 is not None:
            return f"sha256 {self.about.sha256}"
        if self.about.md5 is not None:
            return f"md5 {self.about.md5}"
        return "no printed digest"


class Digests:
    """sha256 and md5 of files, each read once: a file that nobody wrote to since (size, inode and
    ctime, which no program can set) is not read again."""

    def __init__(self, note: Path) -> None:
        self.note = note
        try:
            known = jsons.read(note)
        except (OSError, ValueError):
            known = {}
        self.known = known if isinstance(known, dict) else {}

    def of(self, path: Path) -> tuple[str, str]:
        key = str(path.resolve())
        with opening.open_regular(path) as file:
            about = os.fstat(file.fileno())
            state = [about.st_size, about.st_ino, about.st_ctime_ns]
            known = self.known.get(key)
            if isinstance(known, dict) and known.get("state") == state:
                return str(known.get("sha256")), str(known.get("md5"))
            sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
            while piece := file.read(PIECE):
                sha256.update(piece)
                md5.update(piece)
        digests = {"sha256": sha256.hexdigest(), "md5": md5.hexdigest()}
        self.known[key] = {"state": state, **digests}
        atomic.write_json(self.note, self.known)
        return digests["sha256"], digests["md5"]


def find(
    asked: ReproductionList, names: Sequence[str], files: Path, note: Path
) -> dict[str, FoundFile]:
    """Those of `names` that are below `files`. BadInput for one that is not the published file."""
    digests = Digests(note)
    found: dict[str, FoundFile] = {}
    for name in names:
        about = asked.files[name]
        path = about.where(files, name)
        if not path.exists():
            continue
        sha256, md5 = digests.of(path)
        if wrong := unlike(about, sha256, md5):
            raise BadInput(
                f"{path}: not the published file: {wrong}; it may be damaged or another version:"
                f" fetch it again from {about.page}, or leave it out (--only)"
            )
        size = path.stat().st_size
        found[name] = FoundFile(
            name=name, path=path, about=about, size=size, sha256=sha256, md5=md5
        )
    return found


def unlike(about: PublicFile, sha256: str, md5: str) -> str | None:
    """Which printed digest a file's are not, with where it is printed."""
    for what, printed, has in (("sha256", about.sha256, sha256), ("md5", about.md5, md5)):
        if printed is not None and not has.startswith(printed):
            begins = has[: max(8, len(printed))]
            return f"its {what} begins {begins}, printed is {printed} ({about.digest_page})"
    return None


def fetch_missing(
    asked: ReproductionList, names: Sequence[str], files: Path, note: Path
) -> list[str]:
    """Download what is not there; the names of those that only a person can fetch.

    A file that is not the published one is removed again, so that the next try begins anew.
    """
    by_hand = []
    for name in names:
        about = asked.files[name]
        path = about.where(files, name)
        if path.exists():
            continue
        if about.url is None:
            by_hand.append(name)
            continue
        download.fetch(about.url, path)
        if wrong := unlike(about, *Digests(note).of(path)):
            path.unlink()
            raise BadInput(
                f"{about.url}: not the published file: {wrong}; it was removed again, look at"
                f" {about.page}"
            )
    return by_hand
