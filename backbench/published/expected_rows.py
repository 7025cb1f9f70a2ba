"""Which published rows each checkpoint must reach, as its recipe or its import says."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from backbench.board.board import Board
from backbench.recipes import config, fast
from backbench.untrusted import printable, walking
from backbench.weights import header


def expected_keys_in(provenance: Mapping[str, object]) -> list[str]:
    """Return the keys of the published rows that a checkpoint's or a result's provenance names.

    Recipes name them under `expected`, and `import --published` under `published`: one key or a
    list of them.
    """
    holders = [provenance]
    for name in ("recipe", "checkpoint", "pretraining"):
        inner = provenance.get(name)
        if isinstance(inner, Mapping):
            holders.append(inner)
    keys: list[str] = []
    for holder in holders:
        for name in ("expected", "published"):
            value = holder.get(name)
            if isinstance(value, str):
                keys.append(value)
            elif isinstance(value, list | tuple):
                keys += map(str, value)
    return keys


def expected_keys(board: Board, runs: Iterable[str | Path]) -> dict[str, list[str]]:
    """Return, by checkpoint digest, the keys of the published rows that it must reach.

    The keys are in the results' provenance, and in checkpoint files: those below `runs`, and those
    that the results' commands name. These files also say how the checkpoints were pretrained, which
    is added to `board.ways` and `board.recipes`. A checkpoint without keys is left out.
    """
    # 1. The results say which checkpoints there are, and have keys themselves.
    keys: dict[str, set[str]] = {}
    commands: set[tuple[str, str]] = set()  # a set: most numbers share their command
    for cell in board.cells.values():
        for result, _ in cell.parts:
            own = expected_keys_in(result.provenance)
            keys.setdefault(result.checkpoint, set()).update(own)
            command = result.origin.get("command") or ""
            if isinstance(command, list):
                command = shlex.join(command)
            commands.add((result.origin.get("cwd") or ".", command))
    # 2. Find the checkpoint files.
    files: set[Path] = set()
    for cwd, command in commands:
        for word in printable.of_command(command):
            if word.endswith(".safetensors"):
                files.add(Path(cwd) / word)
    for run in map(Path, runs):
        if run.is_dir():
            files.update(f for f in walking.files(run) if f.suffix == ".safetensors")
    # 3. Read their headers alone; a checkpoint without results needs no keys.
    for file in files:
        about = header.about(file)
        digest = about.get("digest")
        provenance = about.get("provenance")
        if not isinstance(digest, str) or digest not in keys:
            continue
        if not isinstance(provenance, Mapping):
            continue
        keys[digest].update(expected_keys_in(provenance))
        way = fast.word(fast.of_trunk(provenance))
        if way:
            board.ways[digest] = way
        recipe = provenance.get("recipe")
        if isinstance(recipe, Mapping):
            board.recipes.setdefault(digest, config.flat(recipe))
    return {digest: sorted(own) for digest, own in keys.items() if own}
