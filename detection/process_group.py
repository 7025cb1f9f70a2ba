"""The processes of a run: one per GPU, or per CPU rank, begun and ended with one command."""

import contextlib
import datetime
import os
import pickle
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from backbench.detection.data.split import Split
from backbench.detection.dialect import DEVICE_KEY, Given
from backbench.detection.run import DetectionRun
from backbench.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    BadInput,
    Failed,
)
from backbench.runs import atomic
from backbench.runs.state import StopFlag, die_with_parent, signals_blocked
from backbench.runs.stopping import NUMBERS, listen
from backbench.runs.terminal import log

HOST = "127.0.0.1"
GRACE_SECONDS = 2
POLL_SECONDS = 0.2
JOIN_MINUTES = 30  # how long a rank waits for another in a collective
SPLITS_FILE = ".splits.pkl"  # in the run's folder, while its ranks are at work
# What the run exits with is the first of these that a rank did. Where one was stopped by a signal,
# its state is saved, however the others ended.
STATUSES = (EXIT_PREEMPTED, EXIT_BAD_INPUT, EXIT_FAILED)


@dataclass(frozen=True)
class Seat:
    """The place of a child process in the run."""

    rank: int  # on all machines
    local: int  # on this one
    url: str  # where the ranks meet
    parent: int  # process id
    log_level: int


_meeting: list[dist.TCPStore] = []  # the one of this process's run

Body: TypeAlias = Callable[
    [DetectionRun, Seat], int
]  # what a rank does; returns its exit status


def gpus(given: Given) -> int:
    """The number of GPUs that the run may use; 0 for a run on the CPU."""
    wanted, here = given.get(DEVICE_KEY, "auto"), torch.cuda.device_count()
    if wanted not in ("auto", "cpu", "cuda") or (wanted == "cuda" and not here):
        raise BadInput(
            f"{DEVICE_KEY} {wanted}: auto, cpu or cuda, of which {here} are here;"
            " CUDA_VISIBLE_DEVICES chooses among them"
        )
    return 0 if wanted == "cpu" else here


def device_of(given: Given, rank: int) -> torch.device:
    return torch.device("cuda", rank) if gpus(given) else torch.device("cpu")


def over_machines(
    run: DetectionRun, machines: int, machine: int, url: str
) -> DetectionRun:
    """Spread the run over several machines by Detectron2's flags, or make it one of Slurm's tasks,
    one for each rank, as `backbench launch` starts them."""
    if not 0 <= machine < machines:
        raise BadInput(
            f"--machine-rank {machine}: from 0 to --num-machines {machines} - 1"
        )
    port = re.fullmatch(r"tcp://[^/]+:(\d{1,5})", url)
    if url and not (port and 0 < int(port[1]) < 1 << 16):
        raise BadInput(
            f"--dist-url {url}: give tcp://HOST:PORT, a free port of the first machine"
        )
    run = replace(
        run,
        world=machines * run.world,
        machines=machines,
        machine=machine,
        dist_url=url,
    )
    host, task = os.environ.get("MASTER_ADDR"), os.environ.get("SLURM_PROCID")
    started = int(os.environ.get("SLURM_NTASKS", "1"))
    if host and task and not url and started > 1:
        if started != run.world:
            raise BadInput(
                f"Slurm has started {started} tasks, --num-gpus times --num-machines is {run.world}"
            )
        local = int(os.environ.get("SLURM_LOCALID", "0"))
        url = f"tcp://{host}:{os.environ['MASTER_PORT']}"
        return replace(run, dist_url=url, task_rank=int(task), local_rank=local)
    if machines > 1 and not url:
        where = "where do they meet? --dist-url tcp://HOST:PORT, a free port of the first machine"
        raise BadInput(f"--num-machines {machines}: {where}")
    return run


def seat_of_task(run: DetectionRun) -> Seat:
    """The place of this process, which Slurm has started as a rank."""
    rank, local = run.task_rank or 0, run.local_rank
    if gpus(run.given):
        torch.cuda.set_device(local)
    return Seat(rank, local, run.dist_url, parent=os.getppid(), log_level=log.level)


def spawn(body: Body, run: DetectionRun) -> None:
    """Run `body` in this machine's share of `run.world` processes, which get our signals and end
    with us; SystemExit with their status if not 0. `body` must be importable by name."""
    url = run.dist_url
    if not url:
        with socket.socket() as free:
            free.bind((HOST, 0))
            url = f"tcp://{HOST}:{free.getsockname()[1]}"
    context = mp.get_context("spawn")
    children: list[BaseProcess] = []
    here = run.world // run.machines
    for local in range(here):
        seat = Seat(
            run.machine * here + local,
            local,
            url,
            parent=os.getpid(),
            log_level=log.level,
        )
        children.append(context.Process(target=_child, args=(body, run, seat)))
    resource_tracker.ensure_running()  # by whom the signals would come through again
    with StopFlag() as stop:
        with signals_blocked():
            for child in children:
                child.start()
        _watch(children, stop)
    ended = {child.exitcode or 0 for child in children}
    if ended == {0}:
        return
    for status in STATUSES:
        if status in ended:
            raise SystemExit(status)
    raise SystemExit(EXIT_FAILED)  # killed


def _watch(children: Sequence[BaseProcess], stop: StopFlag) -> None:
    """Wait until all have ended. From state to state:

    running          -- a signal to this process -->   signalled: each rank stops after its iteration
    running, signalled    -- a rank ends badly -->     the others get GRACE_SECONDS, are then killed

    A signalled rank ends with the status of a stopped run, so nothing changes. One whose neighbour
    died would wait for it in a collective.
    """
    signalled = False
    while alive := [child for child in children if child.is_alive()]:
        alive[0].join(0.2)
        if stop.requested and not signalled:
            signalled = True
            for child in children:
                if child.pid and child.is_alive():
                    os.kill(child.pid, signal.SIGTERM)
        if any(child.exitcode not in (None, 0) for child in children):
            time.sleep(GRACE_SECONDS)
            for child in children:
                child.kill()
                child.join()


def _child(body: Body, run: DetectionRun, seat: Seat) -> None:
    # No orphan writes to the run after its parent. Where it died before this line, our parent is
    # another by now.
    die_with_parent()
    if os.getppid() != seat.parent:
        raise SystemExit(EXIT_FAILED)
    # A signal that came while this process was importing has waited; later ones end it plainly,
    # until what `body` does with them is in place
    listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    if gpus(run.given):
        torch.cuda.set_device(seat.local)
    else:  # of several on one machine, unlike a task of Slurm's, which has CPUs of its own
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    raise SystemExit(body(run, seat))


@contextlib.contextmanager
def joined(run: DetectionRun, seat: Seat) -> Iterator[None]:
    """Inside, this process is one of the run's ranks."""
    host, _, port = seat.url.removeprefix("tcp://").rpartition(":")
    patience = datetime.timedelta(minutes=JOIN_MINUTES)
    _meeting[:] = [dist.TCPStore(host, int(port), run.world, seat.rank == 0, patience)]
    dist.init_process_group(
        "nccl" if gpus(run.given) else "gloo",
        store=_meeting[0],
        rank=seat.rank,
        world_size=run.world,
        timeout=patience,
    )
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        _meeting.clear()


@contextlib.contextmanager
def handing_over(run: DetectionRun, train: Split, val: Split) -> Iterator[None]:
    """Keep the splits in a file of the run's folder while inside: ranks load that instead of
    parsing the annotations again. A process that has seen a GPU cannot fork."""
    run.out.mkdir(parents=True, exist_ok=True)
    file = _splits_file(run)
    atomic.write_bytes(
        file, pickle.dumps((train, val), protocol=pickle.HIGHEST_PROTOCOL)
    )
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _splits_file(run: DetectionRun) -> Path:
    """One for each machine: they share the run's folder."""
    return run.out / (SPLITS_FILE + (f".{run.machine}" if run.machine else ""))


def handed_over(run: DetectionRun) -> tuple[Split, Split]:
    """Load the train and val splits that this rank's own parent has written."""
    train, val = pickle.loads(_splits_file(run).read_bytes())
    return train, val


def barrier() -> None:
    """Wait for the other ranks; a run of one process does not wait."""
    if dist.is_initialized():
        dist.barrier()


def wait_until(there: Callable[[], bool]) -> None:
    """Wait for one rank's long work, such as COCO's scoring: a collective would end the run after
    JOIN_MINUTES. This wait ends with a signal, with the parent (see _watch), or with rank 0."""
    while not there():
        for store in _meeting:
            try:
                store.check(["rank 0 is there"])
            except RuntimeError:  # it has ended: perhaps because all is done
                time.sleep(POLL_SECONDS)
                if there():
                    return
                raise Failed("rank 0 has ended before its work was done") from None
        time.sleep(POLL_SECONDS)
