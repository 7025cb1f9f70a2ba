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
import threading
import time
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_REC = 1 << 14
MS_PRIVATE = 1 << 18
MARK = "a-worker-fails"  # a file in `root`, from the moment of the first failure


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


def no_files_left(root=None, but=0):
    """Let this process open no further file, or some at least."""
    first_free = os.dup(0)
    os.close(first_free)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + but, hard))


def _sleep(root):
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
    "files": (no_files_left, (1,), "ulimit -n"),
    # A batch finds its way to the main process no longer
    "files to receive by": (_nothing, (1,), "ulimit -n"),
    # A loader starts by half: its pipes need more
    "files to start by": (_nothing, (1,), "ulimit -n"),
    "disk": (
        _raise(OSError(errno.ENOSPC, "No space left")),
        (1,),
        "the disk is full",
    ),
    "disk that fails": (_raise(OSError(errno.EIO, "x")), (1,), "the disk fails"),
    # As the kernel does where memory ends
    "killed": (_signal(signal.SIGKILL), (1,), "killed, perhaps for memory: try fewer"),
    "fault": (_signal(signal.SIGSEGV), (1,), "crashed (Segmentation fault)"),
    "error": (_raise(RuntimeError("odd")), (1,), "RuntimeError: odd"),
    "exit": (_raise(SystemExit(3)), (1,), "SystemExit: 3"),
    "interrupt": (_raise(KeyboardInterrupt()), (1,), "KeyboardInterrupt"),
    "truncated": (_truncate, (2,), "truncated"),
    "vanished": (_remove, (2,), "o such"),
    "unpicklable": (_unpicklable, (1,), "Local: odd"),
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
    if name == "files to start by":
        look = loading.refuse_to_start_by_half

        def few_files(workers):
            no_files_left(but=8)
            look(workers)

        loading.refuse_to_start_by_half = few_files
    if name == "files to receive by":
        hear = loading.WatchedBatches.__init__

        def none_from_here(self, batches):
            hear(self, batches)
            no_files_left()

        loading.WatchedBatches.__init__ = none_from_here

    def fail():
        if get_worker_info() is not None:
            if not (root / MARK).exists():
                (root / MARK).touch()
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
