"""Time the commands: their start, the launcher with 10,000 jobs, the leaderboard of 10^5 results.

start: against `import torch, torchvision`, by the clock. launcher: against an sbatch for every job,
measured on 20 of them; with Debian's Slurm installed (and as root), the jobs are really submitted to
a cluster on loopback, held, shown and cancelled. leaderboard: 10^3 checkpoints to csv and to the
page, and 10^3 results computed again from kept predictions, against limits in seconds on a core of
its own; a test sorts the page in a browser.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# The project before its tests, whose folders have the names of what they test
sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import least, print_ratios
from support import boards, fake_verbs, slurm_cluster

from backbench.board.board import collect, read_verified
from backbench.board.export import write_csv
from backbench.board.overall import overall
from backbench.cli import program
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.launch.records import Ledger
from backbench.launch.view import Snapshot
from backbench.records import store
from backbench.runs.garbage import many_objects
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint

HOME = Path(__file__).parent.parent
KEPT = 500  # checkpoints in two columns of 10,000 images whose predictions are kept
COLUMNS = [
    ("linear", "cifar10", "top1", "linear-lorac-v1", None),
    ("linear", "aircraft", "mean_per_class", "linear-lorac-v1", None),
]


def start(quick: bool) -> None:
    call = partial(subprocess.run, check=True, capture_output=True, cwd=HOME)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trunk.safetensors")
        state = build_trunk("resnet50").state_dict()
        Checkpoint(arch="resnet50", method="random", state_dict=state).save(file)
        commands = {  # what is shown of each, and the rest of it
            "data list": [],
            "verify": ["docs/demo/records"],
            "leaderboard": ["docs/demo/records", "--csv", f"{folder}/board.csv"],
            "paper": [],
            "inspect": [str(file)],
            "--help": [],
            "linear --help": [],
        }
        baseline = "import torchvision"
        ways = {baseline: partial(call, [sys.executable, "-c", baseline])}
        ways["limit: import torch"] = partial(
            call, [sys.executable, "-c", "import torch"]
        )
        for shown, more in commands.items():
            command = [sys.executable, "-m", "backbench", *shown.split(), *more]
            ways[shown] = partial(call, command)
        print_ratios("start", least(ways, 1 if quick else 3, wall=True))


def launcher(quick: bool) -> None:
    if reason := slurm_cluster.why_not():
        print(f"not measured, no Slurm here: {reason}")
        return
    with tempfile.TemporaryDirectory() as name, slurm_cluster.running_slurm():
        on_slurm(Path(name), 1000 if quick else 10_000)


def on_slurm(root: Path, jobs: int) -> None:
    """A grid of 20 datasets on as many checkpoints as make so many jobs, each named twice."""
    (root / "data").mkdir()
    for i in range(jobs // 20):
        fake_verbs.write_checkpoint(root / "ck" / f"c{i}.safetensors", str(i))
    datasets = [f"d{i}" for i in range(20)]
    content = {
        "name": "big",
        "data": str(root / "data"),
        "checkpoints": [f"{root}/ck/*"] * 2,
    }
    content["evaluate"] = [
        {"verb": "linear", "datasets": datasets, "protocol": "lorac"}
    ]
    grid, runs, cluster = root / "grid.yaml", root / "runs", root / "loop.yaml"
    grid.write_text(json.dumps(content))  # JSON is YAML
    # Held, as the single jobs below are: what is measured is the submission, not the jobs
    held = {
        "sbatch": {"hold": True},
        "resources": {"default": {"cpus": 1, "hours": 0.1}},
    }
    cluster.write_text(
        json.dumps({"name": "loop", "kind": "slurm", "max_array": 1000, **held})
    )
    out = ("--out", str(runs))
    # What the jobs read is not here, as nothing runs
    run = ("run", str(grid), "--cluster", str(cluster), "--data-later", *out)

    def submit_singly() -> None:
        for _ in range(20):
            single = ["sbatch", "--hold", "--wrap", "true", "-o", "/dev/null"]
            subprocess.run(single, check=True, capture_output=True)

    assert len(Expansion(read_grid(grid), runs, where="grid").jobs) == jobs
    found = {"one sbatch each": seconds(submit_singly) * jobs / 20}
    found["--dry-run"] = seconds(partial(launch, *run, "--dry-run"))
    found["run, as arrays of 1000"] = seconds(partial(launch, *run))
    # Slurm really has them all, and we know of every one that it waits
    snapshot = Snapshot(Ledger(runs))
    states = {state.name for state in snapshot.states.values()}
    assert len(snapshot.queue) >= jobs and states == {"queued"}
    found["status, all queued"] = seconds(partial(launch, "status", "--once", *out))
    found["run again, nothing to submit"] = seconds(partial(launch, *run))
    found["cancel"] = seconds(partial(launch, "cancel", *out))
    print_ratios(f"{jobs} Slurm jobs", found)


def launch(action: str, *words: str) -> None:
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        contextlib.redirect_stderr(said),
    ):
        code = program.main(["launch", action, "-q", *words])
    assert code == 0, said.getvalue()[-500:]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def leaderboard(quick: bool) -> None:
    checkpoints, columns = (100, 20) if quick else (1000, 100)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        runs, kept, page = root / "runs", root / "kept", root / "leaderboard.html"
        boards.many(runs, checkpoints, columns)
        names = [f"trunk-{n}" for n in range(KEPT)]
        boards.synthetic(kept, names, COLUMNS, images=10_000, gap=0.05)
        files, problems = store.files_below(kept), []
        marks = [time.process_time()]
        with many_objects():  # as the verb does
            board = collect([runs])
            # Ranked as if predictions were kept; what follows from none has no rank
            for cell in board.cells.values():
                cell.backed = True
            write_csv(board, root / "leaderboard.csv")
            marks.append(time.process_time())
            boards.write_whole_page(board, page, runs=[runs], sets=overall(board))
            marks.append(time.process_time())
            read_verified(files, problems)
            marks.append(time.process_time())
        assert not problems
        size = f"page of {page.stat().st_size / 1e6:.1f} MB (limit 20)"
    results = f"{checkpoints * columns} results"
    works = [
        (f"{results} as csv", 5, ""),
        (f"{results} as a page", 10, size),
        ("1000 results of 10,000 images verified", 60, ""),
    ]
    for (title, limit, note), (began, ended) in zip(works, pairwise(marks)):
        print_ratios(
            title, {f"limit, {limit} s": limit, "ours": ended - began}, note=note
        )
