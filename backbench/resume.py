"""What makes a run unkillable: atomic files, verified state, the stop flag that signals set, and seeding.

Randomness is never saved and restored. Every random decision draws from a generator that is a pure function of the
seed and of what the decision is for, so a run that continues makes the same decisions as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.errors import BadInput

if TYPE_CHECKING:
    import torch

_STATE_MAGIC = b"backbench-state-v1 "


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`; it becomes `path` when the block ends well and vanishes when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp gives 0600; results are shared
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: str | Path) -> None:
    """Remove what writers killed inside `atomic_path` left in `folder`; only for the folder's sole writer."""
    for path in Path(folder).glob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_bytes(path: str | Path, data: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def save_state(path: str | Path, state: dict[str, Any]) -> None:
    """Write a (nested) dict of tensors, numbers and strings, with the digest that shows damage when it is read."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(_STATE_MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n")
        file.write(data)


def load_state(path: str | Path) -> dict[str, Any]:
    """Read what `save_state` wrote, without running code. Raises BadInput that names a damaged file."""
    import torch

    path = Path(path)
    with path.open("rb") as file:
        header = file.readline(256)
        data = file.read()
    if not header.startswith(_STATE_MAGIC):
        raise BadInput(f"{path}: not a backbench state file; remove it to start over")
    if hashlib.sha256(data).hexdigest() != header[len(_STATE_MAGIC) :].strip().decode(errors="replace"):
        raise BadInput(f"{path}: the state is damaged (its sha256 does not match); remove it to start over")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class StopFlag:
    """`with StopFlag() as stop:` -- SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C set `stop.requested` instead of killing.

    The loop asks between steps, saves and raises `Preempted`. A second Ctrl-C interrupts at once. Handlers can only be
    set in the main thread; elsewhere the flag stays False.
    """

    SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")

    def __init__(self) -> None:
        self.requested: str | None = None
        self._old: dict[int, Any] = {}

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name

    def __enter__(self) -> StopFlag:
        for name in self.SIGNALS:
            number = getattr(signal, name)
            with contextlib.suppress(ValueError):  # not the main thread
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)


def seed_of(*what: int | str) -> int:
    """A 63-bit seed, a pure function of its arguments: seed_of(seed, "views", epoch, image)."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*what: int | str) -> torch.Generator:
    """A fresh CPU torch generator for one decision; see `seed_of`."""
    import torch

    return torch.Generator().manual_seed(seed_of(*what))


def seed_everything(*what: int | str) -> None:
    """Seed python, numpy and torch (all devices) for what follows: initialisation, or one training step."""
    import random

    import numpy
    import torch

    seed = seed_of(*what)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
