"""How a loader's worker ends, and what a batch takes of the memory that processes share."""

import errno
import math
import mmap
import os
import pickle
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch

from backbench.errors import BadInput
from backbench.parallel import loading


@pytest.mark.parametrize(
    ("error", "speaks"),
    [
        (BrokenPipeError(), False),
        (ConnectionResetError(), False),
        (EOFError(), False),
        (OSError(errno.EMFILE, "x"), False),
        (OSError(errno.ENFILE, "x"), False),
        (OSError(errno.ENOSPC, "x"), True),
        (ValueError("x"), True),
        (KeyboardInterrupt(), True),
    ],
)
def test_a_worker_says_nothing_where_the_main_process_speaks(
    monkeypatch, error, speaks
):
    said = []
    monkeypatch.setattr(sys, "__excepthook__", lambda *words: said.append(words))
    loading._quiet_where_main_speaks(type(error), error, None)
    assert said == ([(type(error), error, None)] if speaks else [])


def test_a_worker_has_one_thread_and_a_quiet_end(monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    loading._prepare_worker(3)
    assert threads == [1]
    assert sys.excepthook is loading._quiet_where_main_speaks


@pytest.mark.parametrize(
    ("cores", "workers"), [(1, 1), (2, 1), (5, 4), (13, 12), (64, 12)]
)
def test_workers_are_the_cores_that_are_left(monkeypatch, cores, workers):
    asked = []
    monkeypatch.setattr(
        loading, "cores", lambda devices: asked.append(devices) or cores
    )
    assert loading.default_workers(2) == workers
    assert asked == [2]


class Kind(Enum):
    ONE = 1


@dataclass
class Batch:
    pixels: torch.Tensor
    kind: Kind = Kind.ONE
    more: object = None


def test_a_batch_has_the_bytes_of_all_its_tensors():
    pixels = torch.zeros(2, 3, dtype=torch.uint8)
    labels = torch.zeros(2, dtype=torch.int64)
    assert loading._bytes_of(pixels) == 6
    assert loading._bytes_of({"a": pixels, "b": [labels, (pixels,)]}) == 28
    assert loading._bytes_of(Batch(pixels, more=Batch(labels))) == 22
    assert loading._bytes_of(["text", 3, None, Kind]) == 0


def test_shared_memory_is_what_is_free_or_without_a_limit(monkeypatch):
    free = loading._free_shared_memory()
    assert free > 0

    def statvfs(path):
        raise FileNotFoundError

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert loading._free_shared_memory() == math.inf


def test_a_flag_is_seen_by_all_processes():
    flag = loading._Flag()
    assert not flag.is_set()
    child = os.fork()
    if child == 0:
        flag.set()
        os._exit(0)
    os.waitpid(child, 0)
    assert flag.is_set()


class Unsendable(Exception):
    """Cannot be made again from its words."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (BadInput("x.png: corrupt"), BadInput, "x.png: corrupt"),
        (Unsendable(1, 2), RuntimeError, "Unsendable: 1 and 2"),
        (KeyboardInterrupt("now"), RuntimeError, "KeyboardInterrupt: now"),
        (SystemExit(3), RuntimeError, "SystemExit: 3"),
    ],
)
def test_an_error_of_a_worker_travels_as_a_value(error, kind, words):
    try:
        raise error
    except BaseException as raised:
        kept = loading.FailedInWorker.of(raised)
    sent = pickle.loads(pickle.dumps(kept)).error
    assert (type(sent), str(sent)) == (kind, words)
    (note,) = kept.error.__notes__
    assert note.startswith("In a loader worker: Traceback")
    assert words.split(": ")[-1] in note


class Squares(torch.utils.data.Dataset):
    """Numbers and their squares; some cannot be read."""

    def __len__(self):
        return 9

    def __getitem__(self, key):
        if key < 0:
            raise BadInput(f"{key}: corrupt")
        return key, torch.tensor([key, key * key])


def test_a_batch_with_an_unreadable_item_is_a_value():
    keys = [[1, 2], [3, -1, -2], [4]]
    first, second, third = loading.batches(Squares(), keys, workers=0)
    assert first[0].tolist() == [1, 2]
    assert first[1].tolist() == [[1, 1], [2, 4]]
    assert second == loading.Unreadable("-1: corrupt")
    assert third[1].tolist() == [[4, 16]]
    joined = loading.batches(Squares(), [[2, 3]], workers=0, collate=len)
    assert list(joined) == [2]


def test_an_error_in_the_main_process_is_raised_as_it_is():
    reporting = loading.Reporting(Squares())
    assert len(reporting) == 9
    assert reporting[3][1].tolist() == [3, 9]
    with pytest.raises(BadInput, match=r"^-1: corrupt$"):
        reporting[-1]


def test_items_are_stacked_by_their_kind():
    rows = [(1, torch.ones(2), (2.5, True)), (3, torch.zeros(2), (0.5, False))]
    numbers, tensors, (floats, truths) = loading.stacked(rows)
    assert numbers.tolist() == [1, 3] and numbers.dtype == torch.int64
    assert tensors.tolist() == [[1, 1], [0, 0]]
    assert floats.tolist() == [2.5, 0.5] and truths.dtype == torch.bool
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        loading.stacked([(1, 2), (3,)])


@pytest.mark.parametrize("fits", [True, False])
def test_a_batch_goes_through_the_pipe_where_shared_memory_is_short(monkeypatch, fits):
    """All of three workers may hand one over at a moment, and each may be copied."""
    batch = torch.arange(100, dtype=torch.uint8)
    needed = 2 * 3 * 100
    monkeypatch.setattr(loading, "get_worker_info", lambda: "a worker")
    monkeypatch.setattr(loading, "_free_shared_memory", lambda: needed - (not fits))
    shared = []
    dumps = loading.ForkingPickler.dumps
    monkeypatch.setattr(
        loading.ForkingPickler,
        "dumps",
        lambda value: shared.append(1) or pickle.dumps(value),
    )
    handing = loading.HandingOver(lambda items: items, 3)
    out = handing(batch)
    monkeypatch.setattr(loading.ForkingPickler, "dumps", dumps)
    assert bool(shared) == fits
    assert torch.equal(pickle.loads(pickle.dumps(out)), batch)
    failed = loading.FailedInWorker(ValueError("x"))
    assert handing(failed) is failed
    assert handing([1, failed, 2]) is failed


def test_a_worker_that_cannot_collate_says_so(monkeypatch):
    def collate(items):
        raise ValueError("of unlike sizes")

    handing = loading.HandingOver(collate, 1)
    with pytest.raises(ValueError, match="of unlike sizes"):
        handing([1])
    monkeypatch.setattr(loading, "get_worker_info", lambda: "a worker")
    assert str(handing([1]).error) == "of unlike sizes"


def test_what_workers_need_is_there_before_they_start(monkeypatch):
    files = len(list(Path("/proc/self/fd").iterdir()))
    # Three locks of each of four workers, and of the batches, a page each
    needed = 3 * 5 * mmap.PAGESIZE
    monkeypatch.setattr(loading, "_free_shared_memory", lambda: needed)
    loading.refuse_to_start_by_half(4)
    monkeypatch.setattr(loading, "_free_shared_memory", lambda: needed - 1)
    with pytest.raises(RuntimeError, match="shared memory for the locks of 4 workers"):
        loading.refuse_to_start_by_half(4)
    loading.refuse_to_start_by_half(0)
    monkeypatch.setattr(loading, "_free_shared_memory", lambda: math.inf)
    pipes = []
    pipe = os.pipe

    def counted():
        if len(pipes) == 7:
            raise OSError(errno.EMFILE, "Too many open files")
        pipes.append(1)
        return pipe()

    monkeypatch.setattr(os, "pipe", counted)
    loading.refuse_to_start_by_half(2)  # three of each worker, and one
    assert len(pipes) == 7
    with pytest.raises(OSError, match="Too many open files"):
        loading.refuse_to_start_by_half(2)
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_cores_are_divided_among_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    assert [loading.cores(devices) for devices in (1, 2, 7, 8, 0)] == [7, 3, 1, 1, 7]
    assert [loading.default_workers(devices) for devices in (1, 2, 4)] == [6, 2, 1]
