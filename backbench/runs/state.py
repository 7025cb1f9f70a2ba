"""Writes state files with their own digest, and tells loops and the code around them of signals.

With whole files (`atomic`) and repeatable decisions (`seeding`) a killed run can always continue.
"""

import contextlib
import ctypes
import hashlib
import io
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from backbench.errors import STOP_SIGNALS, BadInput, Preempted, Stopped
from backbench.runs.atomic import atomic_path

PR_SET_PDEATHSIG = 1  # of Linux's prctl
# A state file is one line, the magic and the sha256 of what follows, and then torch's own bytes
_STATE_MAGIC = b"backbench-state-v1 "


def save_state(path: str | Path, state: Mapping[str, object]) -> None:
    """Write a nested dict of tensors, numbers and strings, with a digest that shows damage."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(_STATE_MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n")
        file.write(data)


def load_state(path: str | Path) -> dict[str, Any]:
    """Read what `save_state` wrote, without running code. Raise BadInput for a damaged file, and for
    one that holds more than plain values and tensors."""
    import torch

    path = Path(path)
    with path.open("rb") as file:
        header = file.readline(256)
        data = file.read()
    if not header.startswith(_STATE_MAGIC):
        raise BadInput(f"{path}: not a backbench state file; remove it to start over")
    written = header[len(_STATE_MAGIC) :].strip().decode(errors="replace")
    if hashlib.sha256(data).hexdigest() != written:
        raise BadInput(
            f"{path}: the state is damaged (sha256 differs); remove it to start over"
        )
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise BadInput(
            f"{path}: another version wrote this state; remove it to start over"
        ) from None


class StopFlag:
    """Notes a signal, so that a loop can finish its step first: after SIGTERM, SIGUSR1, SIGUSR2 or
    Ctrl-C within `with StopFlag() as stop:` its name is in `stop.requested`. The loop asks between
    steps, saves and raises Preempted. A second Ctrl-C interrupts at once. Signal handlers need the
    main thread; in any other `requested` stays None."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self.requested_at = 0.0  # by the monotonic clock

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        self.requested_at = time.monotonic()

    def end_here(self, where: str) -> None:
        """Raise Preempted if a signal has come, in a loop whose steps are not worth saving."""
        if self.requested:
            raise Preempted(
                f"stopped by {self.requested} {where}; the same command continues"
            )

    def __enter__(self) -> "StopFlag":
        self._listening = _stop_signals_to(self._handle)
        self._listening.__enter__()
        _listening.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _listening.remove(self)
        self._listening.__exit__(None, None, None)


_listening: list[StopFlag] = []  # the flags whose blocks this process is in


def stop_if_asked_for(seconds: float) -> None:
    """Raise Stopped if a loop was asked to stop at least so many seconds ago. Whoever waits inside
    of a step calls this: the loop itself asks only when the step is done."""
    for flag in _listening:
        asked_ago = time.monotonic() - flag.requested_at
        if flag.requested and asked_ago >= seconds:
            raise Stopped(flag.requested)


@contextlib.contextmanager
def _stop_signals_to(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handle` get the stop signals inside; afterwards the handlers are as they were."""
    # The handlers that were there before, or one of the numbers SIG_DFL and SIG_IGN
    old: dict[int, Any] = {}
    try:
        for name in STOP_SIGNALS:
            number = getattr(signal, name)
            with contextlib.suppress(ValueError):  # not the main thread
                old[number] = signal.signal(number, handle)
        yield
    finally:
        for number, was in old.items():
            signal.signal(number, was)


@contextlib.contextmanager
def stops_at_once() -> Iterator[list[str]]:
    """Raise Stopped inside at a stop signal, unless a StopFlag within takes it over.

    This is for the code around the loops (importing, reading, scoring), which writes only whole
    files, so that it may end anywhere. Yields a list to which the names of signals are added, as
    compiled code may turn the exception into another one."""
    raised: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        raised.append(signal.Signals(number).name)
        raise Stopped(raised[-1])

    with _stop_signals_to(handle):
        yield raised


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Hide stop signals from the processes that are forked inside.

    The main process handles the signal: a SIGTERM to the whole group must not take the loader's
    workers from its last step. Signals that come meanwhile are handled at the end, so that no
    loader is left half made. That includes SIGCHLD, as torch raises at the death of a worker."""
    numbers = {signal.SIGCHLD, *(getattr(signal, name) for name in STOP_SIGNALS)}
    came: list[int] = []
    try:
        with _stop_signals_to(lambda number, _: came.append(number)):
            old = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, old)
    finally:
        for number in came:
            signal.raise_signal(number)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal when its parent ends. It works on Linux only, and misses a parent
    that is gone already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
