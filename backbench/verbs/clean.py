"""`backbench clean`: what runs hold on disk, and what can go without losing a number or the way
back to one.

What can go: the training state of a pretraining whose checkpoint is written and reads whole, the
state of a detection run whose results are there, and temporary files of writers that died.
Everything else stays: checkpoints, results, predictions, metrics, pictures, logs, and every state
of a run that is not finished.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from backbench.errors import BadInput
from backbench.results import store
from backbench.runs.folder import CHECKPOINT_FILE, RUN_FILE, STATE_FILE
from backbench.untrusted import jsons, printable
from backbench.weights import header

STILL_WRITTEN_S = 3600  # a temporary file younger than this may have a living writer


@dataclass(frozen=True)
class Removable:
    """A file that can go."""

    file: Path
    size: int  # bytes on disk
    reason: str


@dataclass
class Held:
    """One run folder: bytes in all, and what of it can go."""

    run: Path
    verb: str
    finished: bool
    size: int = 0
    removable: list[Removable] = field(default_factory=list)


def held(runs: Iterable[str | Path]) -> list[Held]:
    """Every run folder (one with run.json) at or below `runs`, in order of path. Links are not
    followed."""
    found: dict[Path, Held] = {}
    loose: dict[Path, list[Removable]] = {}  # below no run folder, by the folder that was given
    seen: set[Path] = set()  # two of `runs` may overlap
    for top in map(Path, runs):
        if not top.is_dir():
            raise BadInput(f"{top}: no such folder; give one or more run folders")
        # Folder -> the run that it belongs to: its own, or its parent's
        owner: dict[Path, Held] = {}
        for name, _, files in os.walk(top):
            folder = Path(name)
            # os.walk comes to a folder before it comes to what is below
            run = owner.get(folder.parent)
            if RUN_FILE in files:
                run = found.get(folder) or _open(folder)
            if run is not None:
                owner[folder] = found[run.run] = run
            if folder not in seen:
                seen.add(folder)
                _look(folder, files, run, loose.setdefault(top, []))
    out = sorted(found.values(), key=lambda each: each.run)
    # What belongs to no run stands under the folder that was given
    for top, removable in loose.items():
        if removable:
            out.append(Held(top, "-", True, sum(each.size for each in removable), removable))
    return out


def _look(folder: Path, names: Iterable[str], run: Held | None, loose: list[Removable]) -> None:
    """Count what a folder holds, and note what of it can go: in its run, or in `loose` where it
    belongs to none."""
    for file in (folder / name for name in names):
        try:
            stat = file.lstat()
        except OSError:
            continue  # removed while we looked
        # What it takes on disk; files with holes say more in st_size
        size = stat.st_blocks * 512
        if run is not None:
            run.size += size
        if (reason := _can_go(file, stat, run)) is not None:
            into = loose if run is None else run.removable
            into.append(Removable(file, size, reason))


def _open(folder: Path) -> Held:
    try:
        verb = printable.shown(str(jsons.read(folder / RUN_FILE).get("verb")), 40)
    except (OSError, ValueError, AttributeError):
        verb = "?"
    if verb == "pretrain":
        return Held(folder, verb, _whole(folder / CHECKPOINT_FILE))
    return Held(folder, verb, store.complete(folder))


def _whole(checkpoint: Path) -> bool:
    """A checkpoint that can be loaded: its header reads and its tensors are all there."""
    found = header.read(checkpoint)
    return found is not None and bool(found.about) and checkpoint.stat().st_size == found.size


def _can_go(file: Path, stat: os.stat_result, run: Held | None) -> str | None:
    """Why this file can go; None where it must stay."""
    temporary = file.name.startswith(".") and file.name.endswith(".tmp")
    if temporary and time.time() - stat.st_mtime > STILL_WRITTEN_S:
        return "left by a writer that died"
    # A state is the way back to a number until the number is there, and nothing afterwards
    if run is None or not run.finished or run.verb not in ("pretrain", "detect"):
        return None
    return "training state of a finished run" if file == run.run / STATE_FILE else None


def run(args: argparse.Namespace) -> int:
    """The verb `clean`."""
    all_held = held(args.runs)
    if not all_held:
        print("no run folders here")
        return 0
    wide = max(len(str(each.run)) for each in all_held)
    free = 0
    for each in all_held:
        can_go = sum(removable.size for removable in each.removable)
        free += can_go
        state = "finished" if each.finished else "unfinished"
        sizes = f"{_size(each.size):>9}  {_size(can_go) if can_go else '':>9}"
        print(f"{each.run!s:<{wide}}  {each.verb:<11} {state:<10} {sizes}")
    total = sum(each.size for each in all_held)
    print(f"{len(all_held)} folders hold {_size(total)}; {_size(free)} can go")
    done = "removed" if args.yes else "can go "
    for each in all_held:
        for removable in each.removable:
            if args.yes:
                removable.file.unlink(missing_ok=True)
            print(f"{done} {removable.file}  {_size(removable.size)}, {removable.reason}")
    if free and not args.yes:
        print("nothing was removed; --yes removes what can go")
    return 0


def _size(value: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
