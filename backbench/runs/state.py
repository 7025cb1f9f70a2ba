"""State that survives, written with its own digest; and the flag with which a signal ends a loop.

The rest of what makes a run unkillable stands beside it: `atomic` (files), `seeding` (decisions
that repeat).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import signal
from pathlib import Path
from types import FrameType
from typing import Any

from backbench.errors import BadInput
from backbench.runs.atomic import atomic_path

# A state file is one line, the magic and the sha256 of what follows, and then torch's own bytes
_STATE_MAGIC = b"backbench-state-v1 "


def save_state(path: str | Path, state: dict[str, Any]) -> None:
    """Write a (nested) dict of tensors, numbers and strings, with the digest that shows damage when
    it is read."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(_STATE_MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n")
        file.write(data)


def load_state(path: str | Path) -> dict[str, Any]:
    """Read what `save_state` wrote, without running code.

    Raises BadInput that names a damaged file.
    """
    import torch

    path = Path(path)
    with path.open("rb") as file:
        header = file.readline(256)
        data = file.read()
    if not header.startswith(_STATE_MAGIC):
        raise BadInput(f"{path}: not a backbench state file; remove it to start over")
    told = header[len(_STATE_MAGIC) :].strip().decode(errors="replace")
    if hashlib.sha256(data).hexdigest() != told:
        raise BadInput(
            f"{path}: the state is damaged (its sha256 does not match); remove it to start over"
        )
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class StopFlag:
    """`with StopFlag() as stop:` -- SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C set `stop.requested`
    instead of killing.

    The loop asks between steps, saves and raises `Preempted`. A second Ctrl-C interrupts at once.
    Handlers can only be set in the main thread; elsewhere the flag stays None.
    """

    SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")

    def __init__(self) -> None:
        self.requested: str | None = None
        # What was there before: a handler, or one of the numbers SIG_DFL and SIG_IGN
        self._old: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
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
