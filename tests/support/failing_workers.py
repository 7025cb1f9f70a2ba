"""Lets the loader workers of a verb fail, in a process that is about to run it.

`install(name, root)` patches what makes items in the three kinds of loaders. A failure happens in a
worker, at its first item; `root` is a copy of the data, which some failures damage.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_REC = 1 << 14
MS_PRIVATE = 1 << 18
MARK = "a-worker-sleeps"  # a file in `root`


def _raise(error):
    def fail(root):
        raise error

    return fail


def _unpicklable(root):
    class Local(Exception):
        pass

    error = Local("odd")
    error.lock = threading.Lock()
    raise error


def _signal(number):
    return lambda root: os.kill(os.getpid(), number)


def _exit(root):
    sys.exit(0)


def _sleep(root):
    (root / MARK).touch()
    time.sleep(100_000)


def _images(root):
    return [file for file in root.rglob("*") if file.suffix in (".png", ".jpg")]


def _truncate(root):
    for image in _images(root):
        # Another worker may be at it; half of a half is as good
        os.truncate(image, image.stat().st_size // 2)


def _remove(root):
    for image in _images(root):
        image.unlink(missing_ok=True)


def _nothing(root):
    pass


# Name -> (what a worker does, the exit statuses, words of the line)
WAYS = {
    "memory": (_raise(MemoryError("x")), (1,), "out of memory"),
    "descriptors": (
        _raise(OSError(errno.EMFILE, "Too many open files")),
        (1,),
        "ulimit -n",
    ),
    "disk": (
        _raise(OSError(errno.ENOSPC, "No space left")),
        (1,),
        "the disk is full",
    ),
    "killed": (_signal(signal.SIGKILL), (1,), "a loader worker was killed"),
    "fault": (_signal(signal.SIGSEGV), (1,), "a loader worker was killed"),
    "error": (_raise(RuntimeError("odd")), (1,), "RuntimeError: odd"),
    "undecodable": (
        _raise(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")),
        (1,),
        "UnicodeDecodeError",
    ),
    "exit": (_exit, (1,), "a loader worker was killed"),
    "interrupt": (_raise(KeyboardInterrupt()), (1,), "a loader worker was killed"),
    "truncated": (_truncate, (2,), "truncated"),
    "vanished": (_remove, (2,), "o such"),
    "unpicklable": (_unpicklable, (1,), "Local: odd"),
    # The process itself: enough, or it is said which limit it is
    "few files": (_nothing, (0, 1), ""),
    # Docker's default: enough, as batches find another way
    "shm 64m": (_nothing, (0,), ""),
    # Nothing fits in: enough for two workers' locks, or it is said at once
    "shm 64k": (_nothing, (0, 1), ""),
    # The test sends SIGTERM once a worker sleeps
    "asleep": (_sleep, (75,), "stopped by SIGTERM"),
}


def install(name, root):
    from torch.utils.data import Dataset, get_worker_info

    from backbench.parallel import loading

    root = Path(root)
    way = WAYS[name][0]
    if name.startswith("shm"):
        _small_shared_memory(name.split()[1])
    if name == "few files":
        _leave_few_descriptors()

    def fail():
        if get_worker_info() is not None:
            way(root)

    class Failing(Dataset):
        def __init__(self, items):
            self.items = items

        def __getitem__(self, key):
            fail()
            return self.items[key]

    begin = loading.WholeBatches.__init__
    loading.WholeBatches.__init__ = lambda self, items, collate: begin(
        self, Failing(items), collate
    )

    def failing_first(owner, method):
        get = getattr(owner, method)

        def failing(self, key):
            fail()
            return get(self, key)

        setattr(owner, method, failing)

    from backbench.pretrain.data import ViewBatches

    failing_first(ViewBatches, "__getitems__")
    try:
        from backbench.detection.engine_detectron2 import SeededImages
    except Exception:  # Detectron2 is not installed
        return
    failing_first(SeededImages, "__getitem__")


FEW = 8  # less than the pipes of two workers


def _leave_few_descriptors():
    """Let this process open FEW more files than it has."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + FEW, hard))


def _small_shared_memory(size):
    """Give this process a /dev/shm of its own, of so many bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = [
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()),
    ]
    if any(done):
        raise OSError(ctypes.get_errno(), "no mount namespace")
