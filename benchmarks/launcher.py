"""How long the launcher takes with 10,000 jobs: python benchmarks/launcher.py [JOBS]

Baselines: one `json.dumps` + `json.loads` of all jobs (what merely writing and reading them costs),
and for Slurm one sbatch per job, measured on 20 of them. With Debian's Slurm installed (and as
root), the same jobs are really submitted to a cluster on loopback, held, shown and cancelled. Last
figures: benchmarks/launcher.txt.
"""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# The project before its tests, whose folders have the names of what they test
sys.path.insert(0, str(Path(__file__).parent.parent))

from support import fake_verbs, slurm_cluster

from backbench import cli
from backbench.launch.expansion import expand
from backbench.launch.grid import read_grid
from backbench.launch.job import Job
from backbench.launch.records import Ledger, Submission
from backbench.launch.view import Snapshot


@contextlib.contextmanager
def timed(
    what: str, limit_s: float | None = None, baseline: float | None = None
) -> Iterator[list[float]]:
    """Print how long the block takes; the list that it gives holds the seconds afterwards."""
    took: list[float] = []
    start = time.perf_counter()
    yield took
    took.append(time.perf_counter() - start)
    ratio = f"  {took[0] / baseline:6.1f} x baseline" if baseline else ""
    limit = f"  (allowed: {limit_s:g} s)" if limit_s else ""
    print(f"{what:62} {took[0]:7.2f} s{ratio}{limit}", flush=True)


def quiet(*command: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = cli.main([command[0], "-q", *command[1:]])
    assert code == 0, said.getvalue()[-500:]


def main(jobs: int = 10_000) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        grid, runs = write_grid(root, jobs), root / "runs"
        found = expand(read_grid(grid), runs, where="grid").jobs
        assert len(found) == jobs
        with timed(f"baseline: {jobs} jobs to JSON and back") as base:
            json.loads(json.dumps([dataclasses.asdict(job) for job in found]))
        with timed("expand and deduplicate (each checkpoint named twice)", 10, base[0]):
            expand(read_grid(grid), runs, where="grid")
        reason = slurm_cluster.why_not()
        if reason is None:
            with slurm_cluster.running_slurm():
                on_slurm(root, grid, runs, jobs, base[0])
        else:
            print(f"no Slurm here: {reason}")
            options = ("--cluster", "local", "--out", str(runs))
            with timed("dry run: expand, deduplicate, print as arrays", 10, base[0]):
                quiet("launch", "run", str(grid), *options, "--dry-run")
        everything_ended(root, found, base[0])


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


def on_slurm(root: Path, grid: Path, runs: Path, jobs: int, base: float) -> None:
    cluster = root / "loop.yaml"
    # Held, as the single jobs below are: what is measured is the submission, not the jobs
    held = {"sbatch": {"hold": True}, "resources": {"default": {"cpus": 1, "hours": 0.1}}}
    cluster.write_text(json.dumps({"name": "loop", "kind": "slurm", "max_array": 1000, **held}))
    options = ("--cluster", str(cluster), "--out", str(runs))
    with timed("dry run: expand, deduplicate, print as arrays", 10, base):
        quiet("launch", "run", str(grid), *options, "--dry-run")
    command = ["sbatch", "--hold", "--wrap", "true", "-o", "/dev/null"]
    with timed("sbatch, 20 single jobs") as single:
        for _ in range(20):
            subprocess.run(command, check=True, capture_output=True)
    print(f"{'baseline: an sbatch per job, extrapolated':62} {single[0] / 20 * jobs:7.2f} s")
    with timed("run: the same, submitted as arrays of 1000", None, single[0] / 20 * jobs):
        quiet("launch", "run", str(grid), *options)
    # Slurm really has them all, and we know of every one that it waits
    snapshot = Snapshot(Ledger(runs))
    states = {state.name for state in snapshot.states.values()}
    assert len(snapshot.queue) >= jobs and states == {"queued"}
    with timed("status, all queued (one squeue)", 2, base):
        quiet("launch", "status", "--once", "--out", str(runs))
    with timed("run again: nothing to submit", 10, base):
        quiet("launch", "run", str(grid), *options)
    with timed("cancel"):
        quiet("launch", "cancel", "--out", str(runs))


def everything_ended(root: Path, found: list[Job], base: float) -> None:
    """A status file per job, as jobs write them: half done, a tenth failed, the rest cancelled."""
    ledger = Ledger(root / "ended")
    named = {"uid": "x", "grid": "big", "cluster": "local", "cluster_overrides": ()}
    ledger.write_submission(Submission(**named, kind="local", time=0.0, jobs=tuple(found)))
    (ledger.root / "status").mkdir()
    attempt = {"start": time.time() - 9, "end": time.time(), "how": "done"}
    attempt |= {"host": "n1", "pid": 2, "gpus": 1}
    for i, job in enumerate(found):
        state = ("done", "failed", *("done", "cancelled") * 4)[i % 10]
        text = json.dumps({"name": job.name, "state": state, "reason": None, "attempts": [attempt]})
        (ledger.root / "status" / f"{job.key}.json").write_text(text)
    states = [state.name for state in Snapshot(ledger).states.values()]
    assert states.count("done") == len(found) // 2  # every file is read
    with timed("status, all ended (a status file each)", 2, base):
        quiet("launch", "status", "--once", "--out", str(ledger.runs))


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
