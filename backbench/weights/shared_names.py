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
    """Return number of a file -> the nearest folders that tell it from the others, but for those that
    all have; none where they do not."""
    for depth in range(1, MOST + 1):
        near = {number: tuple(above[:depth]) for number, above in folders.items()}
        if len(near) > 1 and len(set(near.values())) == len(near):
            break
    else:
        return {}
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
