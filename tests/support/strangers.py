"""Writes files as a stranger would, and runs commands on them: what they said, how they ended."""

import dataclasses
import io
import json
import logging
import pickle
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backbench.launch.clusters import read_cluster
from backbench.launch.job import Job
from backbench.launch.records import Submission

# No command takes longer over a file that it refuses, in seconds of this process's own work.
PATIENCE_S = 5.0
# The same by the clock, which counts what others do on this machine, too
WAIT_S = 120.0


@dataclass
class Said:
    """How a command ended."""

    status: int | None
    out: str
    err: str
    seconds: float

    @property
    def last(self) -> str:
        lines = self.err.strip().splitlines()
        return lines[-1] if lines else ""


class TooLongError(BaseException):
    """A command took longer than PATIENCE_S."""


def door(*arguments) -> Said:
    """Run `backbench ARGUMENTS` in this process."""
    from backbench.cli import program

    def over(*_):
        raise TooLongError

    out = io.StringIO()
    err = io.StringIO()
    # As in a new process, messages go to where standard error goes now.
    handlers = logging.root.handlers
    logging.root.handlers = []
    numbers = (signal.SIGALRM, signal.SIGPROF)
    before = [signal.signal(number, over) for number in numbers]
    start = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = program.main([str(word) for word in arguments])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except TooLongError:
        status = None
    finally:
        logging.root.handlers = handlers
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
    return Said(status, out.getvalue(), err.getvalue(), time.process_time() - start)


_OPENING = """
import pathlib, sys
from backbench.datasets import catalog
from backbench.errors import BadInput
try:
    catalog.open_split(pathlib.Path(sys.argv[1]), *sys.argv[2:])
except BadInput as error:
    sys.exit(f"backbench: {error}" if "\\n" not in str(error) else "two lines")
print("opened")
"""


def opened(root: Path, name: str, split: str, *, limit_s: float = WAIT_S) -> Said:
    """Open a data set as a pretraining does, in a process of its own, as it may be killed."""
    command = [sys.executable, "-c", _OPENING, str(root), name, split]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return Said(None, "", "", limit_s)
    status = 2 if done.stderr.startswith("backbench: ") else done.returncode
    return Said(status, done.stdout, done.stderr, 0.0)


def refused(said: Said, *words) -> None:
    """Assert exit status 2 and a last line that holds the words."""
    assert said.status == 2, (said.status, said.err[-2000:])
    assert "Traceback" not in said.err
    for word in words:
        assert str(word) in said.last, f"'{word}' is not in: {said.last}"


def record(runs, status=None, **changes):
    """Write the record of a job that a launcher left behind; `changes` are a stranger's."""
    out = str(runs / "x" / "knn")
    argv = (
        "linear",
        "x.safetensors",
        "--datasets",
        "digits",
        "--data",
        str(runs),
        "--out",
        out,
    )
    job = Job(name="x/knn", argv=argv, like="linear", cells=("x/knn",))
    base = Submission.to(read_cluster("local"), "g", "abc123", [job])
    submission = dataclasses.asdict(base) | {"time": 1.0}
    submission["jobs"][0].update(changes.pop("job", {}))
    submission |= changes
    status_of_job = {"name": job.name, "state": "failed", "attempts": []}
    status_of_job |= status or {}
    files = {
        "submissions/abc123": submission,
        f"status/{job.key}": status_of_job,
    }
    for file, content in files.items():
        path = runs / ".launch" / f"{file}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return runs


# --- pickles ---
class Calls:
    """Its pickle calls a function with these arguments when it is read."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class _PointerType:
    """Its pickle is a dtype of python objects that says of itself that it holds none."""

    def __reduce__(self):
        return np.dtype, ("O", False, True), (3, "|", None, None, None, -1, -1, 0)


class Pointers:
    """Its pickle is an array of objects whose addresses the file gives."""

    def __reduce__(self):
        return np.ndarray, ((4,), _PointerType(), b"\x41" * 32)


def write_cifar10(root: Path, labels=(0, 1, 2, 1)) -> Path:
    """Write ROOT/cifar10 with four images a batch; return its folder."""
    folder = root / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    batches = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for i, name in enumerate(batches):
        pixels = np.full((4, 3072), i, dtype=np.uint8)
        content = {"data": pixels, "labels": labels}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    meta = {"label_names": ["a", "b", "c"]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return folder


def cut_record(source: Path, target: Path, record: str, length: int) -> None:
    """Copy a torch zip with one record cut to `length` bytes, and its checksums right again."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith(f"/{record}"):
                content = content[:length]
            new.writestr(info.filename, content)
