"""How a loader's worker ends, and what a batch takes of the memory that processes share."""

import errno
import math
import os
import sys
from dataclasses import dataclass
from enum import Enum

import pytest
import torch

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
