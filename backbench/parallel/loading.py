"""Starts loader workers: out of the reach of signals, and with errors that can be read.

A worker can end in many ways, and none of them may hold the command:

    it raises an error      The error travels as a value (`Reporting`) and is raised where the batch is
                            asked for, with its own type. torch would make a text of it.
    it cannot hand over     A batch is pickled where an error can still be told (`HandingOver`). In
                            the thread of a queue it would be lost, and the command would wait.
    it is killed            torch sees it; `WatchedBatches` raises only where a batch is asked for.
    it never ends           A signal to the command ends the wait for its batch (`STOP_PATIENCE_S`).
    no shared memory        Batches that do not fit travel through the workers' pipes (`HandingOver`).

Workers are deaf to the signals by which Python ends its children at its own end, where it then
waits for them; so they are killed before (`_kill_workers`).
"""

import atexit
import contextlib
import errno
import math
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

from backbench.errors import BadInput
from backbench.runs.state import signals_blocked, stop_if_asked_for

T = TypeVar("T")

PATIENCE_S = 1.0  # for workers to end when asked to; they write nothing
DEATH_PATIENCE_S = 3.0  # for the death of a worker to be seen, after what it did
STOP_PATIENCE_S = 6.0  # for a batch, once the command is asked to stop
RETRY_S = 0.1  # between a worker's attempts to open what no file is left for
SHARED_MEMORY = Path("/dev/shm")  # by which torch hands batches over
LOCKS = 3  # of each queue: one for the batches, and one for each worker's orders
PIPES = 3  # of each worker: its orders, its end, and the main process's end


def cores(devices: int = 1) -> int:
    """Count the CPU cores for each of `devices` processes."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, devices))


def default_workers(devices: int = 1) -> int:
    """Count the loader processes per device: the cores that are left, at most 12."""
    return min(12, max(1, cores(devices) - 1))


def _prepare_worker(_: int) -> None:
    """Give a worker one thread, as the workers are the parallelism, and a quiet end."""
    torch.set_num_threads(1)
    sys.excepthook = _quiet_where_main_speaks


def _quiet_where_main_speaks(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback, unless the error says only that the main process is gone, or that no file
    is left, which the main process says itself once its batch does not come."""
    if issubclass(kind, ConnectionError | EOFError):
        return
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        # The thread that hands batches over tries again at once, until the worker is killed
        time.sleep(RETRY_S)
        return
    sys.__excepthook__(kind, error, trace)


class _Flag:
    """A lock-free stand-in for multiprocessing.Event: a killed worker cannot leave it locked."""

    def __init__(self) -> None:
        # In memory that all processes share
        self.byte = multiprocessing.RawValue("b", 0)

    def set(self) -> None:
        self.byte.value = 1

    def is_set(self) -> bool:
        return bool(self.byte.value)


class _Forked(ForkContext):
    """Starts workers by a fork, with `_Flag` in place of the event that ends them."""

    def Event(self) -> Any:
        return _Flag()


def started(
    dataset: Dataset[T],
    keys: Iterable[Sequence[object]],
    *,
    workers: int,
    pin: bool = False,
    prefetch: int | None = None,
) -> Iterator[T]:
    """Return `dataset`'s batches, one for each list of `keys`.

    Workers start now, forked, so that nothing is pickled."""
    refuse_to_start_by_half(workers)
    loader = DataLoader(
        Reporting(dataset),
        batch_sampler=cast(Iterable[list[object]], keys),
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=prefetch if workers else None,
        collate_fn=HandingOver(_as_it_is, workers),
        multiprocessing_context=forked(workers),
        worker_init_fn=_prepare_worker,
    )
    with signals_blocked(), warnings.catch_warnings():
        # Whoever asks for more workers than cores gets them: they are slow, but no mistake
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return WatchedBatches(iter(loader))


class WatchedBatches(Iterator[T]):
    """A loader's batches. Asking for the next one raises if a worker was killed.

    torch's own SIGCHLD handler would raise anywhere: in the middle of reading a file, say, which
    would then be called damaged."""

    def __init__(self, batches: Iterator[T]) -> None:
        self.batches = batches
        self.process = os.getpid()
        self._hear(signal.SIG_DFL)
        self._let_signals_end_the_wait()

    def __next__(self) -> T:
        # A look before reading is not enough: a worker may die while its batch is read
        self._hear(lambda number, frame: _error_if_any_worker_fails())
        try:
            _error_if_any_worker_fails()
            batch = next(self.batches)
        except StopIteration:
            raise
        except FileNotFoundError as error:
            has_workers = bool(getattr(self.batches, "_workers", []))
            self.close()
            if not has_workers or error.filename is not None:
                raise
            # A worker that is about to end has removed the socket from which the batch was to be had
            raise RuntimeError(
                "DataLoader worker (pid ?) exited unexpectedly"
            ) from error
        except (RuntimeError, ConnectionError, EOFError) as error:
            self._hear(signal.SIG_DFL)
            death = self._death_of_a_worker()
            has_workers = bool(getattr(self.batches, "_workers", []))
            self.close()
            if death is not None:
                raise death from error
            if isinstance(error, RuntimeError) or not has_workers:
                raise
            raise RuntimeError(
                "Too many open files: a loader worker could not hand its batch over"
            ) from error
        except BaseException:
            self.close()
            raise
        finally:
            self._hear(signal.SIG_DFL)
        if isinstance(batch, FailedInWorker):
            self.close()
            raise batch.error
        return batch

    def __del__(self) -> None:
        # torch would wait for each worker, twice, before it gave up
        if not sys.is_finalizing():
            self.close()

    def _death_of_a_worker(self) -> RuntimeError | None:
        """Return an error that says, in torch's words, how a worker ended; None if none has.

        torch's own error names the signal only sometimes."""
        # Private to torch; an iterator without workers has no such list
        workers = getattr(self.batches, "_workers", [])
        if not workers:
            return None
        ended = wait([worker.sentinel for worker in workers], DEATH_PATIENCE_S)
        for worker in workers:
            if worker.sentinel not in ended:
                continue
            # The sentinel is ready as soon as the process closes its files, which is before it has an
            # exit status
            worker.join(DEATH_PATIENCE_S)
            if worker.exitcode is None:
                return RuntimeError("DataLoader worker (pid ?) exited unexpectedly")
            how = f"exited unexpectedly with status {worker.exitcode}"
            if worker.exitcode < 0:
                how = f"is killed by signal: {signal.strsignal(-worker.exitcode)}"
            return RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}")
        return None

    def close(self) -> None:
        """End the workers: those that have not ended after PATIENCE_S are killed."""
        if os.getpid() != self.process:
            return  # a forked child has a copy of this object; the workers are not its own
        workers = getattr(self.batches, "_workers", [])
        end = getattr(self.batches, "_shutdown_workers", None)
        if end is not None:
            # Beside this thread: torch waits for a thread of its own that may wait for ever, as for
            # the rest of a batch whose worker was killed
            ending = threading.Thread(target=end, daemon=True)
            ending.start()
            ending.join(PATIENCE_S)
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
        if end is not None:
            ending.join(PATIENCE_S)

    def _let_signals_end_the_wait(self) -> None:
        """Let a loop that waits for a batch end when it was asked to stop: a worker may have hung
        itself up, on a dead disk for instance."""
        look = getattr(self.batches, "_try_get_data", None)
        if look is None:
            return  # there are no workers

        def look_and_listen(timeout: float = 1.0) -> Any:
            found = look(timeout)
            if not found[0]:
                stop_if_asked_for(STOP_PATIENCE_S)
            return found

        self.batches._try_get_data = look_and_listen  # type: ignore[attr-defined]

    def _hear(
        self, handler: Callable[[int, FrameType | None], None] | signal.Handlers
    ) -> None:
        # Only the main thread may set a handler
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)


@atexit.register  # and so before multiprocessing's own end, which was registered earlier
def _kill_workers() -> None:
    """Kill the children that Python would ask to end, and wait for."""
    for child in multiprocessing.active_children():
        # A process that was forked has its parent's children on its list, too
        is_ours = getattr(child, "_parent_pid", None) == os.getpid()
        if child.daemon and is_ours:
            child.kill()


@dataclass(frozen=True)
class Unreadable:
    """Stands in the place of a batch with an image that cannot be read."""

    error: str


@dataclass(frozen=True)
class FailedInWorker:
    """Stands in the place of a batch, or of an item of one, that a worker could not make."""

    error: Exception

    @classmethod
    def of(cls, error: BaseException) -> "FailedInWorker":
        """Keep the error and, for --debug, its traceback. One that cannot be sent to another process,
        or would end it, becomes a RuntimeError of the same words."""
        trace = "".join(traceback.format_exception(error))
        sent: Exception = RuntimeError(f"{type(error).__name__}: {error}")
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                sent = pickle.loads(pickle.dumps(error))
        sent.add_note(f"In a loader worker: {trace}")
        return cls(sent)


def _reported(make: Callable[[Any], Any], argument: object) -> Any:
    """Return what `make` makes, or FailedInWorker where it raises an error in a worker."""
    try:
        return make(argument)
    # SystemExit and KeyboardInterrupt, too: they would end the worker without a word
    except BaseException as error:
        if get_worker_info() is None:
            raise
        return FailedInWorker.of(error)


class Reporting(Dataset[Any]):
    """Returns what a dataset returns, or FailedInWorker where it raises an error in a worker."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: object) -> Any:
        return _reported(self.dataset.__getitem__, key)

    def __getitems__(self, keys: Sequence[object]) -> Any:
        return _reported(self.dataset.__getitems__, keys)  # type: ignore[attr-defined]


class HandingOver:
    """Collates a batch and hands it to the main process: through shared memory, as torch does, or
    through the worker's pipe where little of that is left, as in docker's 64 MB."""

    def __init__(self, collate: Callable[[Any], Any], workers: int) -> None:
        self.collate = collate
        self.workers = workers

    def __call__(self, items: Any) -> Any:
        return _reported(self._handed_over, items)

    def _handed_over(self, items: Any) -> Any:
        if isinstance(items, FailedInWorker):
            return items
        if isinstance(items, list):
            for item in items:
                if isinstance(item, FailedInWorker):
                    return item
        batch = self.collate(items)
        if get_worker_info() is None:
            return batch
        # All workers may do so at this moment; and the main process may copy it
        needed = 2 * self.workers * _bytes_of(batch)
        if needed <= _free_shared_memory():
            return _Pickled(bytes(ForkingPickler.dumps(batch)))
        return _Pickled(pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL))


@dataclass(frozen=True)
class _Pickled:
    """A pickled batch, which comes out as itself in the main process."""

    batch: bytes

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.batch,)


def _bytes_of(value: object) -> int:
    """Count the bytes of all tensors in a batch."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_bytes_of(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(_bytes_of(part) for part in value)
    if isinstance(value, type):
        return 0  # to which an enumeration's values lead
    # A dataclass, or one of Detectron2's structures
    return sum(_bytes_of(part) for part in getattr(value, "__dict__", {}).values())


def _free_shared_memory() -> float:
    try:
        disk = os.statvfs(SHARED_MEMORY)
    except OSError:
        return math.inf  # this system has it elsewhere
    return disk.f_bavail * disk.f_frsize


def refuse_to_start_by_half(workers: int) -> None:
    """Raise the error of too little shared memory, or of too few open files, before torch leaves
    half a loader behind. A lock takes a page."""
    if not workers:
        return
    needed = LOCKS * (workers + 1) * mmap.PAGESIZE
    if _free_shared_memory() < needed:
        raise RuntimeError(
            f"unable to allocate shared memory for the locks of {workers} workers"
        )
    opened: list[int] = []
    try:
        for _ in range(1 + PIPES * workers):
            opened += os.pipe()
    finally:
        for file in opened:
            os.close(file)


def forked(workers: int) -> ForkContext | None:
    """Return how a loader starts its workers; None where it has none."""
    return _Forked() if workers else None


class WholeBatches(Dataset[T | Unreadable]):
    """Turns lists of items into batches, or Unreadable.

    An error travels as a value: raised in a worker it would arrive as a traceback's text, and other
    ranks would wait."""

    def __init__(
        self, items: Dataset[object], collate: Callable[[list[Any]], T]
    ) -> None:
        self.items = items
        self.collate = collate

    def __getitems__(self, keys: Sequence[object]) -> T | Unreadable:
        try:
            return self.collate([self.items[key] for key in keys])
        except BadInput as error:
            return Unreadable(str(error))


def stacked(items: Sequence[Any]) -> Any:
    """Stack tensors, make a tensor of numbers, and do so for each place of tuples: torch's
    default_collate, which would take shared memory for that, however little there is."""
    first = items[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(items))
    if isinstance(first, tuple):
        return [stacked(column) for column in zip(*items, strict=True)]
    return torch.tensor(items)


def _as_it_is(batch: T) -> T:
    """Collate what is a batch already."""
    return batch


def batches(
    items: Dataset[object],
    keys: Iterable[Sequence[object]],
    *,
    workers: int,
    pin: bool = False,
    prefetch: int | None = None,
    collate: Callable[[list[Any]], T] = stacked,
) -> Iterator[T | Unreadable]:
    """Return `items` at each list of `keys`, collated; Unreadable where one of them raised BadInput."""
    whole = WholeBatches(items, collate)
    return started(whole, keys, workers=workers, pin=pin, prefetch=prefetch)
