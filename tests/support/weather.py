"""Many runs of real verbs, each a fork of one warm process, in a process group of its own:
`with warm(folder) as runs: run = runs.start(argv)`, signals to `run.pid`, then `run.wait()`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from backbench.records import store
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.weights.checkpoint import Checkpoint

HEAVY = (
    "backbench.pretrain.train",
    "backbench.transfer.linear",
    "backbench.transfer.finetune",
    "backbench.transfer.analysis.analyze",
)
HEAVY += (
    "backbench.detection.train_net",
    "backbench.detection.engine_torchvision",
    "backbench.datasets.embedded",
)
HEAVY += (
    "backbench.transfer.probes.sgd",
    "backbench.transfer.probes.knn",
    "backbench.transfer.probes.fewshot",
)
HEAVY += (
    "backbench.transfer.probes.logreg",
    "sklearn.datasets",
    "cv2",
    "lightning_fabric",
    "hotcoco",
)

PROBES = {"linear": "linear_tiny", "knn": "knn_demo", "fewshot": "fewshot_demo"}
PROBES["logreg"] = "logreg_demo"
VERBS = ("pretrain", *PROBES, "finetune", "semisup", "analyze", "detect")


def command(verb, root, trunk, out):
    """What runs for long, on the tiny data below `root`."""
    where = ["--data", root, "--out", out]
    if verb in ("detect", "detectron2"):
        engine = "torchvision" if verb == "detect" else "detectron2"
        file = ["--config-file", "tiny_faster_rcnn_R_18_FPN", "--engine", engine]
        return [
            "detect",
            *file,
            "--checkpoint",
            trunk,
            *where,
            "DATALOADER.NUM_WORKERS",
            "2",
        ]
    if verb == "evaluate":
        where[1] = root / "digits"
        words = ["evaluate", trunk, "knn"]
    elif verb == "pretrain":
        words = ["pretrain", "tiny_simclr"]
    elif verb == "analyze":
        words = ["analyze", trunk, "--dataset", "digits", "--recipe", "analyze_tiny"]
    elif verb == "semisup":
        words = ["semisup", trunk, "--percent", "10", "--lists", root / "lists"]
        words += ["--protocol", "semisup_tiny"]
    elif verb == "finetune":
        words = [
            "finetune",
            trunk,
            "--dataset",
            "digits",
            "--protocol",
            "finetune_demo",
        ]
    else:
        words = ["linear", trunk, "--datasets", "digits", "--protocol", PROBES[verb]]
    return [*words, *where, "--workers", "2"]


def numbers(out):
    """What a run was for; its rows once each."""
    if (out / CHECKPOINT_FILE).exists():
        return Checkpoint.load(out / CHECKPOINT_FILE).digest
    rows, problems = store.read(out)
    assert not problems
    values = {(row.checkpoint, row.column): row.value for row in rows}
    assert len(values) == len(rows), "a row was appended twice"
    return values


@dataclass
class WarmRun:
    runs: WarmRuns
    pid: int
    said_in: Path

    def wait(self):
        """(exit status, negative for a signal; all that it said)."""
        status = self.runs.ask(wait=self.pid)
        return status, self.said_in.read_text(errors="replace")


class WarmRuns:
    def __init__(self, folder, process):
        self.folder, self.process, self.count = folder, process, 0

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, argv, *, failing=None, **environment):
        """`failing` are the arguments of `failing_workers.install`."""
        self.count += 1
        said_in = self.folder / f"said-{self.count}.txt"
        argv = [str(word) for word in argv]
        pid = self.ask(
            argv=argv,
            environment=environment,
            said_in=str(said_in),
            failing=failing,
        )
        return WarmRun(self, pid, said_in)

    def __call__(self, argv, **environment):
        return self.start(argv, **environment).wait()


@contextlib.contextmanager
def warm(folder):
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "BACKBENCH_CACHE": str(folder / "cache"),
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)
    try:
        assert process.stdout.readline() == "warm\n"
        yield WarmRuns(folder, process)
    finally:
        process.stdin.close()
        process.wait(60)


@contextlib.contextmanager
def disk(path, size="1m", options="rw"):
    """A file system of its own at `path`."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},{options}", "none", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine lets nobody mount: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path):
    """The disk at `path` to its last byte."""
    with (path / "filling").open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


def _become(request):
    """The fork: a process like that of the command line."""
    os.setpgid(0, 0)
    os.environ.update(request["environment"])
    file = os.open(request["said_in"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for there, here in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(there, here)
    sys.argv = ["backbench", *request["argv"]]
    if request["failing"] is not None:
        failing_workers.install(*request["failing"])
    sys.exit(program(request["argv"]))


def _serve():
    import importlib

    import torch

    torch.set_num_threads(1)
    for name in HEAVY:
        importlib.import_module(name)
    # A fork is from its first moment what a process of the command line is
    listen()
    print("warm", flush=True)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if not pid:
            _become(request)
        print(pid, flush=True)


if __name__ == "__main__":
    # As a script it is in the folder of its neighbours
    import failing_workers

    from backbench.__main__ import listen, program

    _serve()
