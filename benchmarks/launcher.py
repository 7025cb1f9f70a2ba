"""How long the launcher takes with 10,000 jobs: python benchmarks/launcher.py [JOBS]

With Debian's Slurm installed (and as root), the jobs are really submitted to a cluster on loopback,
held, shown and cancelled, beside one sbatch for each job, measured on 20 of them. Last figures:
benchmarks/launcher.txt.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# The project before its tests, whose folders have the names of what they test
sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import describe
from support import fake_verbs, slurm_cluster

from backbench import cli
from backbench.launch.expansion import expand
from backbench.launch.grid import read_grid
from backbench.launch.records import Ledger
from backbench.launch.view import Snapshot


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"  {what:62} {time.perf_counter() - start:7.2f} s", flush=True)


def quiet(*command: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = cli.main([command[0], "-q", *command[1:]])
    assert code == 0, said.getvalue()[-500:]


def main(jobs: int = 10_000) -> None:
    print(f"{describe()}\n\n{jobs} jobs")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        grid, runs = write_grid(root, jobs), root / "runs"
        with timed("expand and deduplicate (each checkpoint named twice)"):
            assert len(expand(read_grid(grid), runs, where="grid").jobs) == jobs
        reason = slurm_cluster.why_not()
        if reason is None:
            with slurm_cluster.running_slurm():
                on_slurm(root, grid, runs, jobs)
        else:
            print(f"no Slurm here: {reason}")
            with timed("dry run: expand, deduplicate, print as arrays"):
                options = ("--cluster", "local", "--out", str(runs))
                quiet("launch", "run", str(grid), *options, "--dry-run")


def write_grid(root: Path, jobs: int) -> Path:
    """A grid of 20 datasets on as many checkpoints as make so many jobs."""
    (root / "data").mkdir()
    for i in range(jobs // 20):
        fake_verbs.write_checkpoint(root / "ck" / f"c{i}.safetensors", str(i))
    datasets = [f"d{i}" for i in range(20)]
    pattern = str(root / "ck" / "*")
    evaluate = {"verb": "linear", "datasets": datasets, "protocol": "lorac"}
    content = {"name": "big", "data": str(root / "data"), "checkpoints": [pattern, pattern]}
    content["evaluate"] = [evaluate]
    grid = root / "grid.yaml"
    grid.write_text(json.dumps(content))  # JSON is YAML
    return grid


def on_slurm(root: Path, grid: Path, runs: Path, jobs: int) -> None:
    cluster = root / "loop.yaml"
    # Held, as the single jobs below are: what is measured is the submission, not the jobs
    held = {"sbatch": {"hold": True}, "resources": {"default": {"cpus": 1, "hours": 0.1}}}
    cluster.write_text(json.dumps({"name": "loop", "kind": "slurm", "max_array": 1000, **held}))
    options = ("--cluster", str(cluster), "--out", str(runs))
    with timed("dry run: expand, deduplicate, print as arrays"):
        quiet("launch", "run", str(grid), *options, "--dry-run")
    with timed(f"baseline: sbatch for 20 of them, of which all take {jobs // 20} times as long"):
        for _ in range(20):
            command = ["sbatch", "--hold", "--wrap", "true", "-o", "/dev/null"]
            subprocess.run(command, check=True, capture_output=True)
    with timed("run: submitted as arrays of 1000"):
        quiet("launch", "run", str(grid), *options)
    # Slurm really has them all, and we know of every one that it waits
    snapshot = Snapshot(Ledger(runs))
    states = {state.name for state in snapshot.states.values()}
    assert len(snapshot.queue) >= jobs and states == {"queued"}
    with timed("status, all queued (one squeue)"):
        quiet("launch", "status", "--once", "--out", str(runs))
    with timed("run again: nothing to submit"):
        quiet("launch", "run", str(grid), *options)
    with timed("cancel"):
        quiet("launch", "cancel", "--out", str(runs))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
