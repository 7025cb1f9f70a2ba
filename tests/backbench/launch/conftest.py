"""For the launcher's tests: a lab with checkpoints, data and stand-in verbs, and a real Slurm."""

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
from backbench.launch.records import Ledger, Status
from backbench.launch.view import Snapshot
from backbench.records import store

FAKE = [sys.executable, str(Path(fake_verbs.__file__))]


class Lab:
    """A folder with ck/*.safetensors, data/*.json (a dataset's time and faults) and clusters."""

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
        path = self.root / f"grid{len(list(self.root.glob('grid*')))}.yaml"
        # JSON is YAML
        path.write_text(json.dumps({"name": "lab", "data": str(self.data), **content}))
        return str(path)

    def linear(self, *datasets: str, **options) -> list[dict]:
        return [
            {
                "verb": "linear",
                "datasets": list(datasets),
                "protocol": "lorac",
                **options,
            }
        ]

    def cluster(self, kind: str, /, *, fake: bool = True, **content) -> str:
        """A cluster file of this kind; with `fake` its verbs are the stand-ins."""
        path = self.root / f"{kind}{len(list(self.root.glob(f'{kind}*')))}.yaml"
        command = {"command": shlex.join(FAKE)} if fake else {}
        text = {"name": path.stem, "kind": kind, "signal_s": 20, **command, **content}
        path.write_text(json.dumps(text))
        return str(path)

    def slurm(self, *, fake: bool = True, jobs: int = 4, **resources) -> str:
        asked = {"cpus": 1, "memory_gb": 0.5, "hours": 0.2, **resources}
        return self.cluster("slurm", fake=fake, jobs=jobs, resources={"default": asked})

    def run(self, grid: str, cluster: str, out: str, *more: str) -> int:
        line = [
            "launch",
            "run",
            grid,
            "--cluster",
            cluster,
            "--out",
            str(self.root / out),
            *more,
        ]
        return program.main(line)

    def launch(self, action: str, out: str, *more: str) -> int:
        return program.main(["launch", action, *more, "--out", str(self.root / out)])

    def background(
        self, grid: str, cluster: str, out: str, *more: str
    ) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "backbench",
            "launch",
            "run",
            grid,
            "--cluster",
            cluster,
        ]
        command += ["--out", str(self.root / out), *more]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def look(self, out: str) -> Snapshot:
        return Snapshot(Ledger(self.root / out))

    def states(self, out: str) -> dict[str, str]:
        return {name: state.name for name, state in self.look(out).states.items()}

    def statuses(self, out: str) -> dict[str, Status]:
        return Ledger(self.root / out).statuses()

    def attempts(self, out: str) -> dict[str, list[str]]:
        """Job name -> how each of its attempts ended."""
        attempts = {
            name: status["attempts"] for name, status in self.statuses(out).items()
        }
        return {
            name: [attempt.get("how") for attempt in made]
            for name, made in attempts.items()
        }

    def most_at_once(self, out: str) -> int:
        """The largest number of attempts that overlap in time."""
        spans = []
        for status in self.statuses(out).values():
            spans += [
                (attempt["start"], attempt["end"]) for attempt in status["attempts"]
            ]
        return max(
            sum(start <= moment < end for start, end in spans) for moment, _ in spans
        )

    def values(self, out: str) -> dict[tuple, float]:
        """(checkpoint, dataset, protocol, seed) -> value; every number must be there once."""
        rows, problems = store.read(self.root / out)
        assert not problems
        keys = [(r.checkpoint, r.dataset, r.metric, r.protocol, r.seed) for r in rows]
        assert len(keys) == len(set(keys)), "a number was appended twice"
        return {key: row.value for key, row in zip(keys, rows)}

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
        files = [*folder.glob("logs/*"), *folder.glob("submitit/*/*.out")]
        return "\n".join(
            f"{f.name}: {f.read_text(errors='replace')[-2000:]}" for f in files
        )

    def until_done(self, out: str, seconds: float = 60.0) -> None:
        self.until(
            out, lambda states: states and set(states.values()) == {"done"}, seconds
        )

    def reference(self, grid: str) -> dict[tuple, float]:
        """Return the numbers of the same grid under --cluster debug."""
        out = f"reference{len(list(self.root.glob('reference*')))}"
        assert self.run(grid, self.cluster("debug"), out) == 0
        return self.values(out)


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


class StandInSlurm:
    """squeue, sinfo and scancel that say what a test wants, for states that take Slurm hours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("squeue", "scancel", "srun"):
            self.says(name, "")
        self.says("sinfo", "main*|infinite|64|256000|gpu:8|(null)\n")
        self.says("scontrol", "", status=1)

    def says(self, name: str, text: str, *, status: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(text)
        script = self.folder / name
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {self.folder}/{name}.called\n'
            f"cat {self.folder}/{name}.out\nexit {status}\n"
        )
        script.chmod(0o755)

    def sbatch(self, script: str) -> None:
        """Shell lines that see the submission's comment as $uid and count their calls in $n."""
        program = self.folder / "sbatch"
        program.write_text(
            f"#!/bin/sh\necho called >> {self.folder}/sbatch.called\n"
            f"n=$(wc -l < {self.folder}/sbatch.called)\nfor file; do :; done\n"
            'uid=$(sed -n "s/^#SBATCH --comment=//p" "$file")\n'
            f"cd {self.folder}\n{script}\n"
        )
        program.chmod(0o755)

    def queue(self, *jobs: tuple[str, str, str, str]) -> None:
        """(number, state, reason, comment) of each job in the queue."""
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
    """A running Slurm with one node of 4 CPUs and 2 (empty-file) GPUs; skips where it cannot be."""
    with slurm_cluster.running_slurm() as folder:
        yield folder


@pytest.fixture(scope="module")
def three_nodes():
    """A Slurm of three nodes; before partition `urgent` preempts, `grace` has 20 s, `main` none."""
    with slurm_cluster.running_slurm(nodes=3) as folder:
        yield folder


@pytest.fixture(scope="session")
def shell():
    def run(command: str) -> str:
        words = shlex.split(command)
        return subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    return run
