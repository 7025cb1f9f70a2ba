"""Starts, joins and ends the processes of a run: one per GPU, or per rank on the CPU."""

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
from backbench.runs import atomic, failures
from backbench.runs.state import StopFlag, die_with_parent, signals_blocked
from backbench.runs.stopping import NUMBERS, listen
from backbench.runs.terminal import log

HOST = "127.0.0.1"
GRACE_SECONDS = 2
POLL_SECONDS = 0.2
JOIN_MINUTES = 30  # how long a rank waits for another in a collective
SPLITS_FILE = ".splits.pkl"  # in the run's folder, while its ranks are at work
# The run exits with the first of these that one of its ranks has exited with. Being stopped by a
# signal comes first, because then the state is saved, however the other ranks ended.
STATUSES = (EXIT_PREEMPTED, EXIT_BAD_INPUT, EXIT_FAILED)


@dataclass(frozen=True)
class Seat:
    """The place of a child process in the run."""

    rank: int  # among those of all machines
    local: int  # among those of this machine
    url: str  # where the ranks meet
    parent: int  # its process id
    log_level: int


# The store at which this process's ranks have met; empty while it is not joined
_meeting: list[dist.TCPStore] = []

# What a rank does; it returns its exit status.
Body: TypeAlias = Callable[[DetectionRun, Seat], int]


def gpus(given: Given) -> int:
    """Return the number of GPUs that the run may use; 0 for a run on the CPU."""
    wanted = given.get(DEVICE_KEY, "auto")
    count = torch.cuda.device_count()
    if wanted not in ("auto", "cpu", "cuda") or (wanted == "cuda" and count == 0):
        raise BadInput(
            f"{DEVICE_KEY} {wanted}: auto, cpu or cuda, of which {count} are here;"
            " CUDA_VISIBLE_DEVICES chooses among them"
        )
    return 0 if wanted == "cpu" else count


def device_of(given: Given, rank: int) -> torch.device:
    return torch.device("cuda", rank) if gpus(given) else torch.device("cpu")


def over_machines(
    run: DetectionRun, machines: int, machine: int, url: str
) -> DetectionRun:
    """Spread the run over several machines by Detectron2's flags, or by Slurm's tasks.

    In the latter case this process is one of the tasks, which `backbench launch` starts for each
    rank. Raises BadInput for flags that do not fit.
    """
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
    host = os.environ.get("MASTER_ADDR")
    task = os.environ.get("SLURM_PROCID")
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if host and task and not url and tasks > 1:
        if tasks != run.world:
            raise BadInput(
                f"Slurm has started {tasks} tasks, --num-gpus times --num-machines is {run.world}"
            )
        meet_at = os.environ.get("MASTER_PORT")
        if meet_at is None:
            raise BadInput(
                "MASTER_ADDR is set and MASTER_PORT is not; export a free port of that machine, too"
            )
        return replace(
            run,
            dist_url=f"tcp://{host}:{meet_at}",
            task_rank=int(task),
            local_rank=int(os.environ.get("SLURM_LOCALID", "0")),
        )
    if machines > 1 and not url:
        raise BadInput(
            f"--num-machines {machines}: where do they meet? --dist-url tcp://HOST:PORT, "
            "a free port of the first machine"
        )
    return run


def seat_of_task(run: DetectionRun) -> Seat:
    """Return the place of this process, which Slurm has started as a rank."""
    if gpus(run.given):
        torch.cuda.set_device(run.local_rank)
    return Seat(
        rank=run.task_rank or 0,
        local=run.local_rank,
        url=run.dist_url,
        parent=os.getppid(),
        log_level=log.level,
    )


def spawn(body: Body, run: DetectionRun) -> None:
    """Run `body` in this machine's share of the run's processes.

    They get our signals, and end with us. `body` must be importable by name. Raises SystemExit with
    their status if it is not 0.
    """
    # 1. Where the ranks meet: at a free port of this machine, unless the user has named one
    url = run.dist_url
    if not url:
        with socket.socket() as free:
            free.bind((HOST, 0))
            url = f"tcp://{HOST}:{free.getsockname()[1]}"
    # 2. The processes
    context = mp.get_context("spawn")
    children: list[BaseProcess] = []
    on_this_machine = run.world // run.machines
    for local in range(on_this_machine):
        seat = Seat(
            rank=run.machine * on_this_machine + local,
            local=local,
            url=url,
            parent=os.getpid(),
            log_level=log.level,
        )
        children.append(context.Process(target=_child, args=(body, run, seat)))
    # Starting the first child starts multiprocessing's resource tracker, which unblocks signals in
    # this process. It must run before they are blocked.
    resource_tracker.ensure_running()
    with StopFlag() as stop:
        with signals_blocked():
            for child in children:
                child.start()
        _watch(children, stop)
    # 3. Their status
    ended = {child.exitcode or 0 for child in children}
    if ended == {0}:
        return
    for status in STATUSES:
        if status in ended:
            raise SystemExit(status)
    # All that failed were killed.
    raise SystemExit(EXIT_FAILED)


def _watch(children: Sequence[BaseProcess], stop: StopFlag) -> None:
    """Wait until all ranks have ended. A state machine:

    running            -- this process gets a signal -->  signalled: each rank stops after its
                                                          iteration
    running, signalled -- a rank ends badly -->           the others get GRACE_SECONDS, and are then
                                                          killed

    A rank whose neighbour died would wait for it in a collective, so it is killed. A rank that was
    signalled ends with the status of a stopped run, which counts as a bad end, too: the other ranks
    were signalled as well, and end within the GRACE_SECONDS.
    """
    signalled = False
    while alive := [child for child in children if child.is_alive()]:
        alive[0].join(POLL_SECONDS)
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
    # A rank must not write to the run after its parent has ended. Where the parent ended before
    # die_with_parent, this process has another parent by now.
    die_with_parent()
    if os.getppid() != seat.parent:
        raise SystemExit(EXIT_FAILED)
    # A signal that came while this process was importing has been kept back until now. Later ones
    # end the process, until `body` has its own way with them.
    listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    if gpus(run.given):
        torch.cuda.set_device(seat.local)
    else:
        # Several ranks share this machine's CPUs. (A task of Slurm's has CPUs of its own.)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    raise SystemExit(body(run, seat))


@contextlib.contextmanager
def joined(run: DetectionRun, seat: Seat) -> Iterator[None]:
    """Make this process one of the run's ranks while inside."""
    host, _, port = seat.url.removeprefix("tcp://").rpartition(":")
    patience = datetime.timedelta(minutes=JOIN_MINUTES)
    meeting = dist.TCPStore(host, int(port), run.world, seat.rank == 0, patience)
    _meeting[:] = [meeting]
    dist.init_process_group(
        "nccl" if gpus(run.given) else "gloo",
        store=meeting,
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
    """Keep the splits in a file of the run's folder while inside.

    Ranks load the file instead of parsing the annotations again. They cannot inherit the splits,
    because a process that has seen a GPU cannot fork.
    """
    failures.make_folder(run.out)
    file = _splits_file(run)
    atomic.write_bytes(
        file, pickle.dumps((train, val), protocol=pickle.HIGHEST_PROTOCOL)
    )
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _splits_file(run: DetectionRun) -> Path:
    # Machines share the run's folder, so each has a file of its own.
    name = SPLITS_FILE
    if run.machine:
        name = f"{SPLITS_FILE}.{run.machine}"
    return run.out / name


def handed_over(run: DetectionRun) -> tuple[Split, Split]:
    """Load the train and val splits that this rank's own parent has written."""
    train, val = pickle.loads(_splits_file(run).read_bytes())
    return train, val


def barrier() -> None:
    """Wait for the other ranks; a run of one process does not wait."""
    if dist.is_initialized():
        dist.barrier()


def wait_until(there: Callable[[], bool]) -> None:
    """Wait for one rank's long work, such as COCO's scoring.

    In a collective, the run would end after JOIN_MINUTES. This wait ends with a signal, with the
    parent (see _watch), or with rank 0. Raises Failed in the last case.
    """
    while not there():
        for store in _meeting:
            try:
                # Any question will do: only rank 0's process, which holds the store, answers.
                store.check(["rank 0 is there"])
            except RuntimeError:
                # Rank 0 has ended. If it did so because all its work is done, its last file may
                # have come since the look above.
                time.sleep(POLL_SECONDS)
                if there():
                    return
                raise Failed("rank 0 has ended before its work was done") from None
        time.sleep(POLL_SECONDS)
