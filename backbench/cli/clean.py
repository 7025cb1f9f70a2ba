"""`backbench clean`: lists what runs hold on disk, and removes what no number depends on.

It removes the training state of a pretraining whose checkpoint reads whole, that of a detection run
with results, and temporary files of writers that died. The rest stays: checkpoints, results,
predictions, metrics, pictures, logs, and every state of an unfinished run.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from backbench.errors import BadInput, no_folder
from backbench.records import store
from backbench.requests.runs import CleanRequest
from backbench.runs.folder import CHECKPOINT_FILE, RUN_FILE, STATE_FILE
from backbench.untrusted import jsons, printable
from backbench.weights import header

STILL_WRITTEN_S = 3600  # a temporary file younger than this may have a living writer


@dataclass(eq=False)
class Held:
    """A run folder: all its bytes, and the files that can go. If `verb` is empty, it holds what
    stands beside runs, and only files that can go are counted."""

    run: Path
    verb: str = ""
    finished: bool = True
    size: int = 0
    # (file, bytes, reason)
    removable: list[tuple[Path, int, str]] = field(default_factory=list)

    def add(self, file: Path) -> None:
        """Count a file, and note it where it can go."""
        try:
            stat = file.lstat()
        except OSError:
            return  # removed while we looked
        size = stat.st_blocks * 512  # on disk: files with holes say more in st_size
        temporary = file.name.startswith(".") and file.name.endswith(".tmp")
        # A state is the way to a number until the number is there
        unneeded = self.finished and self.verb in ("pretrain", "detect")
        reason = ""
        if temporary and time.time() - stat.st_mtime > STILL_WRITTEN_S:
            reason = "left by a writer that died"
        elif unneeded and file == self.run / STATE_FILE:
            reason = "training state of a finished run"
        if reason:
            self.removable.append((file, size, reason))
        if reason or self.verb:
            self.size += size


def held(runs: Iterable[str | Path]) -> list[Held]:
    """Return every run folder (one with run.json) at or below `runs`, by path; links are not
    followed."""
    owners: dict[Path, Held] = {}  # folder -> whose its files are
    for top in map(Path, runs):
        if not top.is_dir():
            raise BadInput(f"{top}: {no_folder(top)}; give one or more run folders")
        beside = Held(top)
        # os.walk comes to a folder before it comes to what is below
        for name, _, files in os.walk(top):
            folder = Path(name)
            if folder in owners:  # two of `runs` overlap
                continue
            if RUN_FILE in files:
                owner = _open(folder)
            else:
                owner = owners.get(folder.parent, beside)
            owners[folder] = owner
            for file in files:
                owner.add(folder / file)
    shown = [
        each for each in dict.fromkeys(owners.values()) if each.verb or each.removable
    ]
    return sorted(shown, key=lambda each: (not each.verb, each.run))


def _open(folder: Path) -> Held:
    try:
        verb = printable.shown(str(jsons.read(folder / RUN_FILE).get("verb")), 40)
    except (OSError, ValueError, AttributeError):
        verb = "?"
    if verb != "pretrain":
        return Held(folder, verb, finished=store.complete(folder))
    # A checkpoint is whole where its header reads and its tensors are all there
    checkpoint = folder / CHECKPOINT_FILE
    head = header.read(checkpoint)
    whole = (
        head is not None and bool(head.about) and checkpoint.stat().st_size == head.size
    )
    return Held(folder, verb, finished=whole)


def run(request: CleanRequest) -> None:
    all_held = held(request.runs)
    if not all_held:
        print("no run folders here")
        return
    width = max(len(str(each.run)) for each in all_held)
    removable = [file for each in all_held for file in each.removable]
    for each in all_held:
        free = sum(size for _, size, _ in each.removable)
        state = "finished" if each.finished else "unfinished"
        can_go = _size(free) if free else ""
        sizes = f"{_size(each.size):>9}  {can_go:>9}"
        print(f"{each.run!s:<{width}}  {each.verb or '-':<11} {state:<10} {sizes}")
    free = sum(size for _, size, _ in removable)
    total = _size(sum(each.size for each in all_held))
    print(f"{len(all_held)} folders hold {total}; {_size(free)} can go")
    for file, size, reason in removable:
        done = "can go "
        if request.yes:
            file.unlink(missing_ok=True)
            done = "removed"
        print(f"{done} {file}  {_size(size)}, {reason}")
    if free and not request.yes:
        print("nothing was removed; --yes removes what can go")


def _size(value: float) -> str:
    """Return 1.5 KiB for 1536."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
