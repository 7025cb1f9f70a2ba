"""`backbench demo`: the whole path on embedded data, as jobs of this machine.

Five ResNet-18 trunks (a random control and four pretrained ones) go through linear and few-label
probes, semi-supervised finetuning and COCO detection, and end on the leaderboard. The jobs run in
the launcher's local pool, two at a time with one thread each: finished ones are skipped the next
time, killed ones continue, and `backbench launch status --out OUT` shows them.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.datasets import embedded
from backbench.errors import EXIT_PREEMPTED, BadInput, Failed
from backbench.launch.clusters import Target, read_cluster
from backbench.launch.job import Job, finished
from backbench.launch.local import JobPool, run_here
from backbench.launch.plan import share_made, spent_seconds
from backbench.launch.records import Ledger
from backbench.runs import atomic, lock
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.run_progress import read_progress, seconds
from backbench.runs.terminal import log

if TYPE_CHECKING:
    from rich.table import Table

CHECKPOINTS = ("random", "simclr", "moco_v2", "moco_m", "lorac")
DETECTED = ("random", "lorac")  # the two that go through all three COCO tasks
TASKS = ("faster", "mask", "keypoint")
SAY_S = 15.0  # between two lines about where the running jobs are

# Seconds of one core for the full size, measured on two cores of a Xeon; only the ETA uses them
COSTS: dict[str, float] = {
    "pretrain/lorac": 136,
    "pretrain/moco_m": 135,
    "pretrain/moco_v2": 70,
    "pretrain/simclr": 82,
    "pretrain/random": 10,
    "linear": 30,
    "fewshot": 15,
    "knn": 16,
    "semisup": 29,
    "detection/faster": 80,
    "detection/mask": 95,
    "detection/keypoint": 80,
}


def demo_jobs(out: Path, size: str) -> list[Job]:
    """Return the demo's jobs in the order of start. Every command can be typed by hand."""
    data = str(out / "data")
    prefix = "demo" if size == "full" else "tiny"
    trunks = {name: str(out / "pretrain" / name / CHECKPOINT_FILE) for name in CHECKPOINTS}
    jobs: list[Job] = []

    def add(name: str, *words: str, needs: Sequence[str] = (), makes: str | None = None) -> None:
        job = Job(
            name=name,
            argv=(*words, "--data", data, "--out", str(out / name)),
            like=name if name in COSTS else name.rpartition("/")[0],
            cells=(name,),
            needs=tuple(needs),
            makes=makes,
        )
        jobs.append(job)

    for name in reversed(CHECKPOINTS):  # the longest first
        makes = f"pretrain/{name}/{CHECKPOINT_FILE}"
        add(f"pretrain/{name}", "pretrain", f"{prefix}_{name}", makes=makes)
    for name in DETECTED:
        for task in reversed(TASKS):
            words = ["detect", "--config-file", f"{prefix}_{task}_rcnn_R_18_FPN"]
            words += ["--engine", "torchvision", "--checkpoint", trunks[name], "--resume"]
            add(f"detection/{task}/{name}", *words, needs=[f"pretrain/{name}"])
    for name in CHECKPOINTS:
        words = ["semisup", trunks[name], "--percent", "10", "--lists", f"{data}/lists"]
        words += ["--protocol", f"semisup_{prefix}"]
        add(f"semisup/{name}", *words, needs=[f"pretrain/{name}"])
    # One pass for all trunks; the cheap probes have one protocol for both sizes
    everyone = [f"pretrain/{name}" for name in CHECKPOINTS]
    protocols = {"linear": f"linear_{prefix}", "fewshot": "fewshot_demo", "knn": "knn_demo"}
    for probe, protocol in protocols.items():
        words = ["linear", *trunks.values(), "--datasets", "digits", "--protocol", protocol]
        add(probe, *words, needs=everyone)
    return jobs


def run(args: argparse.Namespace) -> int:
    """Run the verb `demo`."""
    out = Path(args.out)
    _check_folder(out, args.size)
    started = time.monotonic()
    with lock.held(out):  # two demos in one folder would write the same data
        embedded.build(out / "data", args.size)
        exit_code = _run_jobs(out, args.size)
        if exit_code:
            return exit_code
        command = [sys.executable, "-m", "backbench", "leaderboard", "-q", str(out)]
        command += ["--csv", str(out / "leaderboard.csv"), "--tidy", str(out / "results.csv")]
        command += ["--html", str(out / "leaderboard.html")]
        if subprocess.run(command, check=False).returncode:
            raise Failed("the leaderboard was not written; the same command continues")
    _summary(out, args.size, time.monotonic() - started)
    return 0


def _check_folder(out: Path, size: str) -> None:
    """Refuse a folder that is no demo's, or another size's, before anything is written."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out}: is a file; --out needs a folder")
    out.mkdir(parents=True, exist_ok=True)
    about = out / "demo.json"
    if about.exists() and (was := json.loads(about.read_text())["size"]) != size:
        raise BadInput(f"{out}: holds a demo of size '{was}', not '{size}'; choose another --out")
    if not about.exists() and any(out.iterdir()):
        raise BadInput(f"{out}: is not empty and holds no demo; choose another --out")
    atomic.write_json(about, {"size": size})


def _run_jobs(out: Path, size: str) -> int:
    """Run the jobs that are missing, in the local pool, and return the exit status."""
    ledger = Ledger(out)
    jobs = demo_jobs(out, size)
    done = {job.name for job in jobs if finished(job, ledger.runs)}
    cluster = read_cluster("local")
    log.info(f"demo ({size}) in {out}: {len(jobs)} jobs, {cluster.jobs} at a time")
    if done:
        log.info(f"{len(done)} finished jobs recognised and skipped")
    missing = []
    for job in jobs:
        if job.name not in done:
            needs = tuple(name for name in job.needs if name not in done)
            missing.append(dataclasses.replace(job, needs=needs))
    progress = _Progress(ledger, missing, total=len(jobs))
    target = Target(cluster, (), "demo")
    exit_code = run_here(ledger, target, lambda: (missing, False), watch=progress)
    if exit_code not in (0, EXIT_PREEMPTED):
        for job in missing:
            status = ledger.status(job)
            if status["state"] == "failed":
                where = f"[all of it: {ledger.log(job)}]"
                raise Failed(f"{job.name} failed: {status.get('reason')} {where}")
    return exit_code


class _Progress:
    """Says every 15 s where the running jobs are and how long the rest will take."""

    def __init__(self, ledger: Ledger, jobs: Sequence[Job], total: int) -> None:
        self.ledger, self.jobs, self.total = ledger, jobs, total
        self.started = self.said = time.monotonic()

    def __call__(self, pool: JobPool) -> None:
        now = time.monotonic()
        if now - self.said < SAY_S:
            return
        self.said = now
        running = []
        for name in pool.running:
            note = read_progress(self.ledger.runs / name)
            running.append(
                f"{name} {note['done']}/{note['total']} {note['unit']}s" if note else name
            )
        over = self.total - len(self.jobs) + len(pool.outcomes)
        eta = seconds(self._eta(pool, now - self.started))
        log.info(
            f"{seconds(now - self.started):>6}  ETA {eta:>6}  {over}/{self.total} jobs; running:"
            f" {', '.join(running)}"
        )

    def _eta(self, pool: JobPool, spent: float) -> float:
        """Return the seconds left, by the measured costs and how fast this machine has been."""
        done = left = 0.0
        for job in self.jobs:
            cost = COSTS[job.like]
            share = 1.0 if job.name in pool.outcomes else 0.0
            if job.name in pool.running:
                share = share_made(self.ledger.runs / job.name)
            done += cost * share
            left += cost * (1 - share)
        # The pace is believed from a minute's worth of costs on
        pace = spent / done if done > 60 else 1 / pool.at_once
        return left * pace


def _summary(out: Path, size: str, took: float) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    spent: dict[str, float] = {}
    ledger = Ledger(out)
    for job in demo_jobs(out, size):
        kind = job.like.split("/")[0] if job.verb == "pretrain" else job.like
        spent[kind] = spent.get(kind, 0.0) + spent_seconds(ledger.status(job))
    table = _table(f"Seconds per kind of job ({seconds(took)} this time)", ["jobs", "s"])
    for kind, in_all in spent.items():
        table.add_row(kind, f"{in_all:.0f}")
    console.print(table)
    with (out / "leaderboard.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    console.print(_board(rows))
    for line in compare(out / "fewshot"):
        console.print(line, highlight=False)
    console.print(
        f"page:  {out / 'leaderboard.html'}\ntable: {out / 'leaderboard.csv'}", highlight=False
    )


def _table(title: str, columns: Iterable[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.columns[0].justify = "left"
    return table


def _board(rows: Sequence[Mapping[str, str]]) -> Table:
    """The leaderboard on its side: a line per column of the csv, a column per checkpoint.

    What only splits an AP by object size, and the boxes that come with masks and keypoints, stay in
    the csv.
    """
    table = _table("Leaderboard (percent)", ["", *(row["name"] for row in rows)])
    for column in rows[0] if rows else ():
        if "/" not in column:  # who it is, not what was measured
            continue
        task, _, metric = column.partition("@")[0].split("/")
        extra = metric.startswith("bbox") and task != "faster_rcnn"
        if not extra and not metric.endswith(("APs", "APm", "APl")):
            cells = [f"{float(row[column]):.1f}" if row[column] else "-" for row in rows]
            table.add_row(column, *cells)
    return table


def compare(run: Path) -> list[str]:
    """Each checkpoint's few-label accuracy minus the random trunk's, in points, over draws
    and images together.

    One line per checkpoint, with a paired 95% interval.
    """
    from backbench.results import store
    from backbench.results.paired_tests import compare as paired

    # All trunks see the same draws and images: their differences spread far less than they do
    rows = {row.name: row for row in store.read(run)[0] if row.task == "fewshot"}
    controls = [name for name in rows if "random" in name]
    if not controls:
        return []
    control = rows.pop(controls[0])
    lines = []
    for name, row in rows.items():
        its, other = (run / str(r.provenance["predictions"]) for r in (row, control))
        d = paired([its], [other], row.metric)
        if d is None:
            continue
        verdict = "no difference shown"
        if d.real:
            verdict = "better" if d.value > 0 else "worse"
        lines.append(
            f"few labels, {name} against {controls[0]}: {d.value:+.1f} points, paired 95% interval "
            f"[{d.ci95[0]:+.1f}, {d.ci95[1]:+.1f}] over {d.paired}: {verdict}"
        )
    return lines
