"""The processes of a run: one per GPU, or per CPU rank, started by one command and ended with
it."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from backbench.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_PREEMPTED
from backbench.runs.folder import log
from backbench.runs.state import StopFlag
from detection.config import DEVICE_KEY, Given
from detection.run import DetectionRun

HOST = "127.0.0.1"
PR_SET_PDEATHSIG = 1  # of Linux's prctl
GRACE_SECONDS = 2
# Status of the run where its ranks end differently: those stopped by a signal saved the state; bad
# input says most.
STATUSES = (EXIT_PREEMPTED, EXIT_BAD_INPUT, EXIT_FAILED)


@dataclass(frozen=True)
class Seat:
    """A child's place in the run."""

    rank: int
    port: int
    parent: int  # process id
    log_level: int


Body: TypeAlias = Callable[[DetectionRun, Seat], int]  # what a rank does; returns its exit status


def gpus(given: Given) -> int:
    """How many GPUs the run may use; 0 for a run on the CPU."""
    return 0 if given.get(DEVICE_KEY) == "cpu" else torch.cuda.device_count()


def device_of(given: Given, rank: int) -> torch.device:
    return torch.device("cuda", rank) if gpus(given) else torch.device("cpu")


def spawn(body: Body, run: DetectionRun) -> None:
    """Run `body` in `run.world` processes. Signals to this process reach all of them; its death
    ends them. Raises SystemExit with their status where it is not 0.

    `body` must be importable by its name: a child starts as a fresh interpreter.
    """
    port = _free_port()
    context = mp.get_context("spawn")
    children: list[BaseProcess] = []
    for rank in range(run.world):
        seat = Seat(rank, port, parent=os.getpid(), log_level=log.level)
        children.append(context.Process(target=_child, args=(body, run, seat)))
    with StopFlag() as stop:
        for child in children:
            child.start()
        _watch(children, stop)
    codes = {child.exitcode or 0 for child in children}
    if codes != {0}:
        raise SystemExit(next((status for status in STATUSES if status in codes), EXIT_FAILED))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


def _watch(children: Sequence[BaseProcess], stop: StopFlag) -> None:
    """Until all have ended:

    running  -- a signal here -->             told: each saves its state and ends by itself running
    or told -- one child failed -->   the others, who would wait for it in a collective, are killed
    """
    told = False
    while any(child.is_alive() for child in children):
        children[0].join(0.2)
        if stop.requested and not told:
            told = True
            for child in children:
                if child.pid and child.is_alive():
                    os.kill(child.pid, signal.SIGTERM)
        if any(child.exitcode not in (None, 0) for child in children):
            time.sleep(GRACE_SECONDS)  # ranks that were told to stop end within milliseconds
            for child in children:
                child.kill()
                child.join()


def _child(body: Body, run: DetectionRun, seat: Seat) -> None:
    with contextlib.suppress(
        OSError, AttributeError
    ):  # no orphan writes to the run after its parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != seat.parent:  # it died before it was asked to take us along
        raise SystemExit(EXIT_FAILED)
    if gpus(run.given):
        torch.cuda.set_device(seat.rank)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    raise SystemExit(body(run, seat))


@contextlib.contextmanager
def joined(run: DetectionRun, seat: Seat) -> Iterator[None]:
    """Inside, this process is one of the run's ranks."""
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(seat.port)}
    dist.init_process_group(
        "nccl" if gpus(run.given) else "gloo",
        rank=seat.rank,
        world_size=run.world,
        timeout=datetime.timedelta(minutes=30),
    )
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def barrier() -> None:
    """Wait for the other ranks; nothing in a run of one process."""
    if dist.is_initialized():
        dist.barrier()
