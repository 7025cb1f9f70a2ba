"""Starts loader workers: out of the reach of signals, and with errors that can be read."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkContext
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

from backbench.errors import BadInput
from backbench.runs.state import signals_blocked

T = TypeVar("T")


def cores(devices: int = 1) -> int:
    """Count the CPU cores for each of `devices` processes."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, devices))


def default_workers(devices: int = 1) -> int:
    """Count the loader processes per device: the cores that are left, at most 12."""
    return min(12, max(1, cores(devices) - 1))


def _prepare_worker(_: int) -> None:
    """Give a worker one thread, as the workers are the parallelism, and a quiet end."""
    torch.set_num_threads(1)
    sys.excepthook = _quiet_when_hung_up


def _quiet_when_hung_up(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback, unless the error says only that the main process is gone."""
    if not issubclass(kind, ConnectionError | EOFError):
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
    loader = DataLoader(
        dataset,
        batch_sampler=cast(Iterable[list[object]], keys),
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=prefetch if workers else None,
        collate_fn=_as_it_is,
        multiprocessing_context=_Forked() if workers else None,
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
        self._hear(signal.SIG_DFL)
        _OPEN.add(self)

    def __next__(self) -> T:
        # A look before reading is not enough: a worker may die while its batch is read
        self._hear(lambda number, frame: _error_if_any_worker_fails())
        try:
            _error_if_any_worker_fails()
            batch = next(self.batches)
            if isinstance(batch, FailedInWorker):
                raise batch.error
            return batch
        except StopIteration:
            raise
        except (ConnectionError, EOFError) as error:
            self.close()
            # The dead worker's files are closed before its death can be seen
            raise RuntimeError(
                "DataLoader worker (pid ?) exited unexpectedly"
            ) from error
        except BaseException:
            self.close()
            raise
        finally:
            self._hear(signal.SIG_DFL)

    def close(self) -> None:
        """End the workers. They are deaf to the signals by which Python ends its children at its
        own end, where it then waits for them: one that is left would hold the command for ever."""
        _OPEN.discard(self)
        workers = getattr(self.batches, "_workers", [])
        end = getattr(self.batches, "_shutdown_workers", None)
        if end is not None:
            end()  # asks each worker, and waits some seconds
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _hear(
        self, handler: Callable[[int, FrameType | None], None] | signal.Handlers
    ) -> None:
        # Only the main thread may set a handler
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)


# Those whose workers may live. An error's traceback can hold them until Python ends
_OPEN: weakref.WeakSet[WatchedBatches[Any]] = weakref.WeakSet()


@atexit.register  # and so before multiprocessing's own end, which was registered earlier
def _end_workers() -> None:
    for batches in list(_OPEN):
        batches.close()


@dataclass(frozen=True)
class Unreadable:
    """Stands in the place of a batch of which an image cannot be read."""

    error: str


@dataclass(frozen=True)
class FailedInWorker:
    """Stands in the place of a batch for which the machine had no memory, file or disk."""

    error: OSError | MemoryError


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
        except (OSError, MemoryError) as error:
            if get_worker_info() is None:
                raise
            return cast(T, FailedInWorker(error))  # `WatchedBatches` raises it


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
    collate: Callable[[list[Any]], T] = default_collate,
) -> Iterator[T | Unreadable]:
    """Return `items` at each list of `keys`, collated; Unreadable where one of them raised BadInput."""
    whole = WholeBatches(items, collate)
    return started(whole, keys, workers=workers, pin=pin, prefetch=prefetch)
