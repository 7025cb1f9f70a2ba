"""`backbench clean`: what runs hold on disk, and what can go without losing a number or the way back to one.

What can go: the training state of a pretraining whose checkpoint is written and reads whole, the state of a detection
run whose results are there, and temporary files of writers that died. Everything else stays: checkpoints, results,
predictions, metrics, pictures, logs, and every state of a run that is not finished.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from backbench.errors import BadInput
from backbench.results import store
from backbench.runs.folder import CHECKPOINT_FILE, RESULTS_FILE, RUN_FILE, STATE_FILE
from backbench.weights import header

STILL_WRITTEN_S = 3600  # a temporary file younger than this may have a living writer


@dataclass
class Held:
    """One run folder: bytes in all, and the files that can go with the reason for each."""

    run: Path
    verb: str
    finished: bool
    size: int = 0
    removable: list[tuple[Path, int, str]] = field(default_factory=list)


def held(runs: Iterable[str | Path]) -> list[Held]:
    """Every run folder (one with run.json) at or below `runs`, in order of path. Links are not followed."""
    found: dict[Path, Held] = {}
    loose: dict[Path, list[tuple[Path, int, str]]] = {}
    seen: set[Path] = set()
    for top in map(Path, runs):
        if not top.is_dir():
            raise BadInput(f"{top}: no such folder; give one or more run folders")
        owner: dict[Path, Held] = {}
        for name, _, files in os.walk(top):
            folder = Path(name)
            mine = (
                found.get(folder) or _open(folder)
                if RUN_FILE in files
                else owner.get(folder.parent)
            )
            if mine is not None:
                owner[folder] = found[mine.run] = mine
            if folder in seen:
                continue
            seen.add(folder)
            for file in (folder / f for f in files):
                try:
                    stat = file.lstat()
                except OSError:
                    continue  # removed while we looked
                if mine is not None:
                    mine.size += stat.st_blocks * 512
                if (reason := _can_go(file, stat, mine)) is not None:
                    into = mine.removable if mine is not None else loose.setdefault(top, [])
                    into.append((file, stat.st_blocks * 512, reason))
    out = sorted(found.values(), key=lambda h: h.run)
    for top, files_ in loose.items():
        out.append(Held(top, "-", True, sum(size for _, size, _ in files_), files_))
    return out


def _open(folder: Path) -> Held:
    try:
        verb = str(json.loads((folder / RUN_FILE).read_text()).get("verb"))
    except (OSError, json.JSONDecodeError, AttributeError):
        verb = "?"
    if verb == "pretrain":
        return Held(folder, verb, _whole(folder / CHECKPOINT_FILE))
    file = folder / RESULTS_FILE
    return Held(
        folder, verb, file.exists() and any(not isinstance(x, str) for x in store.read_file(file))
    )


def _whole(checkpoint: Path) -> bool:
    """A checkpoint that can be loaded: its header reads and its tensors are all there."""
    found = header.read(checkpoint)
    return found is not None and bool(found.about) and checkpoint.stat().st_size == found.size


def _can_go(file: Path, stat: os.stat_result, run: Held | None) -> str | None:
    if (
        file.name.startswith(".")
        and file.name.endswith(".tmp")
        and time.time() - stat.st_mtime > STILL_WRITTEN_S
    ):
        return "left by a writer that died"
    if (
        run is not None
        and run.finished
        and run.verb in ("pretrain", "detect")
        and file == run.run / STATE_FILE
    ):
        return "training state of a finished run"
    return None


def run(args: argparse.Namespace) -> int:
    """The verb `clean`."""
    all_held = held(args.runs)
    if not all_held:
        print("no run folders here")
        return 0
    wide = max(len(str(h.run)) for h in all_held)
    total = sum(h.size for h in all_held)
    free = 0
    for h in all_held:
        can_go = sum(size for _, size, _ in h.removable)
        free += can_go
        state = "finished" if h.finished else "unfinished"
        print(
            f"{h.run!s:<{wide}}  {h.verb:<11} {state:<10} {_size(h.size):>9}  {_size(can_go) if can_go else '':>9}"
        )
    print(f"{len(all_held)} folders hold {_size(total)}; {_size(free)} can go")
    for h in all_held:
        for file, size, reason in h.removable:
            if args.yes:
                file.unlink(missing_ok=True)
            print(f"{'removed' if args.yes else 'can go '} {file}  {_size(size)}, {reason}")
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
