"""What the launcher's tests share: a lab with stand-in verbs, a stand-in Slurm, and a real one."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import fake_verbs, slurm_cluster

from backbench.cli import program
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.launch.records import Ledger, Status
from backbench.launch.view import Snapshot
from backbench.records import store
from backbench.requests import parsing

FAKE = [sys.executable, str(Path(fake_verbs.__file__))]


class Lab:
    """A folder with all that a launch needs, and the launches that are made in it.

    ck/*.safetensors are checkpoints, data/*.json say how long a dataset takes and what goes wrong
    with it (`fake_verbs`). Grids and clusters are files beside them. `out` is the name of a folder
    of runs in the lab.
    """

    command = FAKE

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "data"
        self.data.mkdir()

    def checkpoints(self, *names: str) -> str:
        for name in names:
            fake_verbs.write_checkpoint(self.root / "ck" / f"{name}.safetensors", name)
        return str(self.root / "ck" / "*.safetensors")

    def dataset(self, *names: str, **behaviour) -> None:
        for name in names:
            (self.data / f"{name}.json").write_text(json.dumps(behaviour))

    def grid(self, **content) -> str:
        """Write a grid's file."""
        number = len(list(self.root.glob("grid*")))
        path = self.root / f"grid{number}.yaml"
        content = {"name": "lab", "data": str(self.data), **content}
        path.write_text(json.dumps(content))  # JSON is YAML
        return str(path)

    def linear(self, *datasets: str, **options) -> list[dict]:
        """What stands under `evaluate` in a grid."""
        probe = {"verb": "linear", "datasets": list(datasets), "protocol": "lorac"}
        return [probe | options]

    def cluster(self, kind: str, /, *, fake: bool = True, **content) -> str:
        """Write a cluster's file of this kind; with `fake` its verbs are the stand-ins."""
        number = len(list(self.root.glob(f"{kind}*")))
        path = self.root / f"{kind}{number}.yaml"
        whole = {"name": path.stem, "kind": kind, "signal_s": 20}
        if fake:
            whole["command"] = shlex.join(FAKE)
        path.write_text(json.dumps(whole | content))
        return str(path)

    def slurm(self, *, fake: bool = True, jobs: int = 4, **resources) -> str:
        asked = {"cpus": 1, "memory_gb": 0.5, "hours": 0.2, **resources}
        return self.cluster("slurm", fake=fake, jobs=jobs, resources={"default": asked})

    def run(self, grid: str, cluster: str, out: str, *more: str) -> int:
        where = ["--cluster", cluster, "--out", str(self.root / out)]
        return program.main(["launch", "run", grid, *where, *more])

    def launch(self, action: str, out: str, *more: str) -> int:
        return program.main(["launch", action, *more, "--out", str(self.root / out)])

    def background(
        self, grid: str, cluster: str, out: str, *more: str
    ) -> subprocess.Popen:
        """`run` as a process of its own."""
        command = [sys.executable, "-m", "backbench", "launch", "run", grid]
        command += ["--cluster", cluster, "--out", str(self.root / out), *more]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def look(self, out: str) -> Snapshot:
        return Snapshot(Ledger(self.root / out))

    def states(self, out: str) -> dict[str, str]:
        return {name: state.name for name, state in self.look(out).states.items()}

    def statuses(self, out: str) -> dict[str, Status]:
        return Ledger(self.root / out).statuses()

    def attempts(self, out: str) -> dict[str, list[str]]:
        """Job name -> how each of its attempts ended."""
        hows = {}
        for name, status in self.statuses(out).items():
            hows[name] = [attempt.get("how") for attempt in status["attempts"]]
        return hows

    def most_at_once(self, out: str) -> int:
        """The largest number of attempts that overlap in time."""
        spans = []
        for status in self.statuses(out).values():
            for attempt in status["attempts"]:
                spans.append((attempt["start"], attempt["end"]))
        # The number of overlapping attempts is largest when one of them starts.
        counts = []
        for moment, _ in spans:
            counts.append(sum(start <= moment < end for start, end in spans))
        return max(counts)

    def values(self, out: str) -> dict[tuple, float]:
        """(checkpoint, dataset, metric, protocol, seed) -> value, each of which is there once."""
        rows, problems = store.read(self.root / out)
        assert not problems
        values = {}
        for row in rows:
            key = (row.checkpoint, row.dataset, row.metric, row.protocol, row.seed)
            assert key not in values, "a number was appended twice"
            values[key] = row.value
        return values

    def run_files(self, out: str, name: str) -> list[Path]:
        """The files of this name in the folders of the runs."""
        return list((self.root / out).glob(f"*/*/{name}"))

    def until(self, out: str, condition, seconds: float = 60.0) -> None:
        """Wait until condition(states) holds."""
        end = time.monotonic() + seconds
        while not condition(states := self.states(out)):
            assert time.monotonic() < end, (
                f"waited {seconds:.0f} s; {states}\n{self.logs(out)}"
            )
            time.sleep(0.3)

    def logs(self, out: str) -> str:
        folder = self.root / out / ".launch"
        ends = []
        for file in (*folder.glob("logs/*"), *folder.glob("submitit/*/*.out")):
            ends.append(f"{file.name}: {file.read_text(errors='replace')[-2000:]}")
        return "\n".join(ends)

    def until_done(self, out: str, seconds: float = 60.0) -> None:
        self.until(
            out, lambda states: states and set(states.values()) == {"done"}, seconds
        )

    def reference(self, grid: str) -> dict[tuple, float]:
        """The numbers of the same grid without a launcher: its commands, one after the other."""
        out = f"reference{len(list(self.root.glob('reference*')))}"
        # A job stands behind those that it needs
        for job in Expansion(read_grid(grid), self.root / out, where="grid").jobs:
            args = parsing.parse(list(job.argv))
            fake_verbs.VERBS[args.verb](args)
        return self.values(out)


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


class StandInSlurm:
    """Slurm's commands as scripts that say what a test wants, for states that take Slurm hours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("squeue", "scancel", "srun"):
            self.says(name, "")
        self.says("sinfo", "main*|infinite|64|256000|gpu:8|(null)\n")
        self.says("scontrol", "", status=1)

    def says(self, name: str, text: str, *, status: int = 0) -> None:
        """Let a command print this text and end with this status."""
        (self.folder / f"{name}.out").write_text(text)
        script = self.folder / name
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {self.folder}/{name}.called\n'
            f"cat {self.folder}/{name}.out\nexit {status}\n"
        )
        script.chmod(0o755)

    def sbatch(self, script: str) -> None:
        """Let sbatch be these shell lines.

        They see the submission's comment as $uid, the script as $file, and how often they were
        called as $n.
        """
        program = self.folder / "sbatch"
        program.write_text(
            f"#!/bin/sh\necho called >> {self.folder}/sbatch.called\n"
            f"n=$(wc -l < {self.folder}/sbatch.called)\nfor file; do :; done\n"
            'uid=$(sed -n "s/^#SBATCH --comment=//p" "$file")\n'
            f"cd {self.folder}\n{script}\n"
        )
        program.chmod(0o755)

    def queue(self, *jobs: tuple[str, str, str, str]) -> None:
        """Let squeue list these jobs: (number, state, reason, comment) of each."""
        self.says("squeue", "".join("|".join(job) + "\n" for job in jobs))

    def called(self, name: str) -> list[str]:
        """The arguments of each call."""
        file = self.folder / f"{name}.called"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def stand_in_slurm(tmp_path, monkeypatch):
    folder = tmp_path / "stand_in_slurm"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return StandInSlurm(folder)


@pytest.fixture(scope="session")
def slurm():
    """A running Slurm with one node of 4 CPUs and 2 GPUs (empty files); skips where it cannot be."""
    with slurm_cluster.running_slurm() as folder:
        yield folder


@pytest.fixture(scope="module")
def three_nodes():
    """A Slurm of three nodes. Partition `urgent` preempts `grace`, after 20 s, and `main`, at once."""
    with slurm_cluster.running_slurm(nodes=3) as folder:
        yield folder


@pytest.fixture(scope="session")
def shell():
    """shell(command): what it prints; an error where it fails."""

    def run(command: str) -> str:
        words = shlex.split(command)
        return subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    return run
