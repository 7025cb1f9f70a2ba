"""Tells checkpoints of one name apart by the folders of their files.

Trainings call their files last.ckpt, checkpoint.pth or model.safetensors, whatever was trained, and a
row of the table has the name of its file."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from backbench.untrusted import printable
from backbench.weights.checkpoint import Checkpoint

MOST = 5  # folders above a file that are looked at


def told_apart(
    checkpoints: Sequence[Checkpoint], given: Sequence[object]
) -> list[Checkpoint]:
    """Return the checkpoints, those that share a name named by folders of their files, too, in which
    these differ: simclr-last and byol-last. `given` are the files; what is no file keeps its name."""
    alike: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for number, (checkpoint, one) in enumerate(zip(checkpoints, given, strict=True)):
        if isinstance(one, str | Path) and Path(one).is_file():
            alike[checkpoint.name][number] = _folders(Path(one))
    out = list(checkpoints)
    for name, folders in alike.items():
        for number, prefix in _differing(folders).items():
            out[number] = checkpoints[number].described(f"{prefix}-{name}", None, None)
    return out


def _folders(file: Path) -> list[str]:
    """Return the names of the folders above a file, the nearest first."""
    # Links stay, since a file of the Hub's cache is one to a folder of blobs
    parts = [part for part in file.absolute().parent.parts[1:] if part != ".."]
    return parts[::-1][:MOST]


def _differing(folders: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Return, for each file's number, the names of the nearest folders that tell it from the other
    files. A folder that all files have is left out; the result is empty where the folders do not tell
    all files apart, or hold a control character."""
    depth = _telling_depth(folders)
    if depth is None:
        return {}
    near = {number: above[:depth] for number, above in folders.items()}
    out = {}
    for number, above in near.items():
        told = [
            folder
            for place, folder in enumerate(above)
            if any(folder not in other[place : place + 1] for other in near.values())
        ]
        out[number] = "-".join(told[::-1])
    if any(not prefix or printable.control_in(prefix) for prefix in out.values()):
        return {}
    return out


def _telling_depth(folders: Mapping[int, Sequence[str]]) -> int | None:
    """Return how many of the nearest folders tell all files apart; None where no number does."""
    if len(folders) < 2:
        return None
    for depth in range(1, MOST + 1):
        near = {tuple(above[:depth]) for above in folders.values()}
        if len(near) == len(folders):
            return depth
    return None
