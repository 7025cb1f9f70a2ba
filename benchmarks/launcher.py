"""The launcher with 10,000 jobs: each of its commands against an sbatch for every job, which is
measured on 20 of them.

With Debian's Slurm installed (and as root), the jobs are really submitted to a cluster on loopback,
held, shown and cancelled.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# The project before its tests, whose folders have the names of what they test
sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import print_ratios
from support import fake_verbs, slurm_cluster

from backbench import cli
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.launch.records import Ledger
from backbench.launch.view import Snapshot


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def quiet(*command: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = cli.main([command[0], "-q", *command[1:]])
    assert code == 0, said.getvalue()[-500:]


def run(quick: bool) -> None:
    jobs = 1000 if quick else 10_000
    reason = slurm_cluster.why_not()
    if reason is not None:
        print(f"not measured, no Slurm here: {reason}")
        return
    with tempfile.TemporaryDirectory() as name, slurm_cluster.running_slurm():
        on_slurm(Path(name), jobs)


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


def on_slurm(root: Path, jobs: int) -> None:
    grid, runs, cluster = write_grid(root, jobs), root / "runs", root / "loop.yaml"
    # Held, as the single jobs below are: what is measured is the submission, not the jobs
    held = {"sbatch": {"hold": True}, "resources": {"default": {"cpus": 1, "hours": 0.1}}}
    cluster.write_text(json.dumps({"name": "loop", "kind": "slurm", "max_array": 1000, **held}))
    options = ("--cluster", str(cluster), "--out", str(runs))
    run = ("launch", "run", str(grid), *options)
    status = ("launch", "status", "--once", "--out", str(runs))
    single = ["sbatch", "--hold", "--wrap", "true", "-o", "/dev/null"]

    def submit_singly() -> None:
        for _ in range(20):
            subprocess.run(single, check=True, capture_output=True)

    # Each checkpoint is named twice in the grid
    assert len(Expansion(read_grid(grid), runs, where="grid").jobs) == jobs
    found = {"an sbatch for each": seconds(submit_singly) * jobs / 20}
    found["--dry-run"] = seconds(lambda: quiet(*run, "--dry-run"))
    found["run, as arrays of 1000"] = seconds(lambda: quiet(*run))
    # Slurm really has them all, and we know of every one that it waits
    snapshot = Snapshot(Ledger(runs))
    states = {state.name for state in snapshot.states.values()}
    assert len(snapshot.queue) >= jobs and states == {"queued"}
    found["status, all queued"] = seconds(lambda: quiet(*status))
    found["run again, nothing to submit"] = seconds(lambda: quiet(*run))
    found["cancel"] = seconds(lambda: quiet("launch", "cancel", "--out", str(runs)))
    print_ratios(f"{jobs} jobs on Slurm", found)
