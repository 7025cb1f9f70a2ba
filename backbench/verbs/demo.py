"""`backbench demo`: the whole path on embedded data, each stage a command in a process of its own.

Five ResNet-18 trunks (a random control and four pretrained ones) go through linear and few-label
probes, semi-supervised finetuning and COCO detection, and end on the leaderboard. Stages run two at
a time with one thread each. A finished stage leaves OUT/stages/<name>.json and is skipped the next
time; a killed one continues.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.datasets import embedded
from backbench.errors import EXIT_PREEMPTED, BadInput, Failed, Preempted
from backbench.launch.pool import ProcessPool
from backbench.parallel.parent import die_with_parent
from backbench.runs import atomic, lock
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.run_progress import read_progress, seconds
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log

if TYPE_CHECKING:
    from rich.table import Table

CHECKPOINTS = ("random", "simclr", "moco_v2", "moco_m", "lorac")
DETECTED = ("random", "lorac")  # the two that go through all three COCO tasks
TASKS = ("faster", "mask", "keypoint")
AT_ONCE = 2
PATIENCE_S = 20.0  # for a stage to save when it is told to stop
SAY_S = 15.0  # between two lines about where the running stages are


@dataclass(frozen=True)
class Stage:
    """One command. `cost` is its share of the work in seconds of one core, for the ETA."""

    name: str
    command: tuple[str, ...]
    run: Path
    needs: tuple[str, ...] = ()  # names of stages that must have ended well
    cost: float = 10.0

    @property
    def file(self) -> str:
        """The name as a file name."""
        return self.name.replace("/", "-")


# Seconds of one core for the full size, measured; only the ETA uses them, and the machine's pace
COSTS: dict[str, float] = {
    "lorac": 136,
    "moco_m": 135,
    "moco_v2": 70,
    "simclr": 82,
    "linear": 30,
    "fewshot": 15,
    "knn": 16,
    "semisup": 29,
    "faster": 80,
    "mask": 95,
    "keypoint": 80,
}


def stages(out: Path, size: str) -> list[Stage]:
    """The demo as data, in the order of start. Every command can be typed by hand as it stands."""
    plan = [
        *_pretrainings(out, size),
        *_detections(out, size),
        *_semisup(out, size),
        *_probes(out, size),
    ]
    board = ["leaderboard", str(out), "--csv", str(out / "leaderboard.csv")]
    board += ["--tidy", str(out / "results.csv"), "--html", str(out / "leaderboard.html")]
    plan.append(_stage(out, "leaderboard", "leaderboard", board, [stage.name for stage in plan]))
    return plan


def _stage(
    out: Path, name: str, kind: str, command: Sequence[str], needs: Sequence[str] = ()
) -> Stage:
    whole = (sys.executable, "-m", "backbench", *command)
    return Stage(name, whole, out / name, tuple(needs), COSTS.get(kind, 10.0))


def _recipe_prefix(size: str) -> str:
    return "demo" if size == "full" else "tiny"


def _trunk(out: Path, name: str) -> str:
    return str(out / "pretrain" / name / CHECKPOINT_FILE)


def _pretrainings(out: Path, size: str) -> Iterator[Stage]:
    data = str(out / "data")
    for name in reversed(CHECKPOINTS):  # the longest first
        command = ["pretrain", f"{_recipe_prefix(size)}_{name}", "--data", data]
        command += ["--out", str(out / "pretrain" / name)]
        yield _stage(out, f"pretrain/{name}", name, command)


def _detections(out: Path, size: str) -> Iterator[Stage]:
    data = str(out / "data")
    for name in DETECTED:
        for task in reversed(TASKS):
            file = f"{_recipe_prefix(size)}_{task}_rcnn_R_18_FPN"
            command = ["detect", "--config-file", file, "--engine", "torchvision", "--data", data]
            command += ["--out", str(out / "detection" / task / name)]
            command += ["--checkpoint", _trunk(out, name), "--resume"]
            yield _stage(out, f"detection/{task}/{name}", task, command, [f"pretrain/{name}"])


def _semisup(out: Path, size: str) -> Iterator[Stage]:
    data = str(out / "data")
    for name in CHECKPOINTS:
        command = ["semisup", _trunk(out, name), "--percent", "10", "--lists", f"{data}/lists"]
        command += ["--data", data, "--protocol", f"semisup_{_recipe_prefix(size)}"]
        command += ["--out", str(out / "semisup" / name)]
        yield _stage(out, f"semisup/{name}", "semisup", command, [f"pretrain/{name}"])


def _probes(out: Path, size: str) -> Iterator[Stage]:
    # One pass for all trunks; the cheap probes have one protocol for both sizes
    trunks = [_trunk(out, name) for name in CHECKPOINTS]
    needs = [f"pretrain/{name}" for name in CHECKPOINTS]
    protocols = {"linear": f"linear_{_recipe_prefix(size)}", "fewshot": "fewshot_demo"}
    protocols["knn"] = "knn_demo"
    for probe, protocol in protocols.items():
        command = ["linear", *trunks, "--datasets", "digits", "--data", str(out / "data")]
        command += ["--protocol", protocol, "--out", str(out / probe)]
        yield _stage(out, probe, probe, command, needs)


def run(args: argparse.Namespace) -> int:
    """The verb `demo`."""
    return Demo(args.out, args.size).run()


class Demo:
    """One run of the demo.

    A stage is recognised as done by its marker OUT/stages/<name>.json, or is started when all that
    it needs is done, and is done when it exits 0. Any other exit ends the demo, which then ends the
    stages beside it; what they had saved is what the next demo continues from.
    """

    def __init__(self, out: Path, size: str) -> None:
        self.out, self.size = out, size
        self.plan = {stage.name: stage for stage in stages(out, size)}
        self.done: dict[str, float] = {}  # seconds that it took, now or when it ran
        self.skipped: list[str] = []
        self.began: dict[str, float] = {}
        self.started = time.monotonic()
        self._said = 0.0

    def run(self) -> int:
        with self._alone():
            log.info(
                f"demo ({self.size}) in {self.out}: {len(self.plan)} stages, {AT_ONCE} at a time"
            )
            embedded.build(self.out / "data", self.size)
            self._recognise()
            pool = ProcessPool(AT_ONCE, done=list(self.done))
            for name, stage in self.plan.items():
                if name not in self.done:
                    pool.add(name, needs=stage.needs)
            with StopFlag() as stop:
                try:
                    self._run_stages(pool, stop)
                finally:
                    pool.end(PATIENCE_S, kill=True)
        self._summary()
        return 0

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two demos in one folder would write the same files."""
        # Refused before anything is written: whatever is no demo's folder, and another size's
        if self.out.exists() and not self.out.is_dir():
            raise BadInput(f"{self.out}: is a file; --out needs a folder")
        self.out.mkdir(parents=True, exist_ok=True)
        about = self.out / "demo.json"
        if about.exists() and (was := json.loads(about.read_text())["size"]) != self.size:
            raise BadInput(
                f"{self.out}: holds a demo of size '{was}', not '{self.size}'; choose another --out"
            )
        if not about.exists() and any(self.out.iterdir()):
            raise BadInput(f"{self.out}: is not empty and holds no demo; choose another --out")
        atomic.write_json(about, {"size": self.size})
        with lock.held(self.out):
            yield

    # Finished stages leave a marker

    def _marker(self, stage: Stage) -> Path:
        return self.out / "stages" / f"{stage.file}.json"

    def _recognise(self) -> None:
        """Done are stages that ended well with the same command, whose files are there, and whose
        inputs are done as well: in the plan's order, so a stage made anew makes its users anew."""
        for name, stage in self.plan.items():
            marker = self._marker(stage)
            if not marker.exists() or not self.done.keys() >= set(stage.needs):
                continue
            about = json.loads(marker.read_text())
            if about["command"] == list(stage.command[1:]) and self._there(stage):
                self.done[name] = about["seconds"]
                self.skipped.append(name)
        if self.skipped:
            log.info(f"{len(self.skipped)} finished stages recognised and skipped")

    def _there(self, stage: Stage) -> bool:
        """Whether every file and folder of the demo that the command names is there."""
        inside = f"{self.out}{os.sep}"
        named = [Path(word) for word in stage.command if word.startswith(inside)]
        return all(path.exists() for path in named)

    def _write_marker(self, stage: Stage, took: float) -> None:
        # Without the interpreter: a moved environment makes no stage anew
        about = {"command": list(stage.command[1:]), "seconds": round(took, 1)}
        atomic.write_json(self._marker(stage), about)

    # Running the others

    def _run_stages(self, pool: ProcessPool, stop: StopFlag) -> None:
        while len(pool):
            for name in pool.ready():
                pool.start(name, self._start(self.plan[name]))
            time.sleep(0.1)
            # Before what has ended: a Ctrl-C reaches the stages as well, and they end by it
            if stop.requested:
                raise Preempted(f"stopped by {stop.requested}; the same command continues")
            for name, status in pool.ended():
                self._collect(self.plan[name], status)
            self._say(pool)

    def _log(self, stage: Stage) -> Path:
        return self.out / "logs" / f"{stage.file}.log"

    def _start(self, stage: Stage) -> subprocess.Popen[bytes]:
        self._log(stage).parent.mkdir(exist_ok=True)
        # One thread each: two processes whose threads spin slow each other down
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with self._log(stage).open("ab") as file:
            child = subprocess.Popen(
                stage.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                # A stage that outlives a killed demo would write beside the next one's
                preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        self.began[stage.name] = time.monotonic()
        log.info(f"{self._clock()}  start  {stage.name}")
        return child

    def _collect(self, stage: Stage, status: int) -> None:
        """A stage has ended: done, or the end of the demo."""
        name = stage.name
        began = self.began.pop(name)
        if status == EXIT_PREEMPTED:
            raise Preempted(
                f"stage {name} was stopped and saved its state; the same command continues"
            )
        if status != 0:
            file = self._log(stage)
            tail = file.read_text(errors="replace").strip().splitlines()[-1:]
            raise Failed(
                f"stage {name} failed (exit {status}): {''.join(tail)[:300]} [all of it: {file}]"
            )
        took = time.monotonic() - began
        self.done[name] = took
        self._write_marker(stage, took)
        log.info(f"{self._clock()}  done   {name} in {seconds(took)}")

    # What it says meanwhile

    def _clock(self) -> str:
        return f"{seconds(time.monotonic() - self.started):>6}  ETA {seconds(self._eta()):>6}"

    def _eta(self) -> float:
        """Seconds left, by the measured costs and how fast this machine has been so far."""
        # 1. What is left of the costs; a running stage counts as far as it has come
        left = 0.0
        for name, stage in self.plan.items():
            if name not in self.done:
                left += stage.cost * (1 - self._share(stage))
        # 2. The pace: seconds per second of cost, of the stages of this run; believed from the
        #    first minute's worth of them on
        took = expected = 0.0
        for name in self.done.keys() - set(self.skipped):
            took += self.done[name]
            expected += self.plan[name].cost
        pace = took / expected if expected > 60 else 1.0
        # 3. Side by side
        return left * pace / AT_ONCE

    def _share(self, stage: Stage) -> float:
        """How far a running stage has come, 0 to 1, by its own progress."""
        note = read_progress(stage.run) if stage.name in self.began else None
        if note is None or not note["total"]:
            return 0.0
        return min(1.0, note["done"] / note["total"])

    def _say(self, pool: ProcessPool) -> None:
        """Every 15 s, where the running stages are."""
        now = time.monotonic()
        if now - self._said < SAY_S:
            return
        self._said = now
        parts = []
        for name in pool.running:
            note = read_progress(self.plan[name].run)
            parts.append(f"{name} {note['done']}/{note['total']} {note['unit']}s" if note else name)
        stages_done = f"{len(self.done)}/{len(self.plan)} stages"
        log.info(f"{self._clock()}  {stages_done}; running: {', '.join(parts)}")

    def _summary(self) -> None:
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console = Console(width=160)
        # Stages of one kind are one row: pretrain, detection/mask, linear
        budget: dict[str, float] = {}
        for name, took in self.done.items():
            kind = name.rsplit("/", 1)[0]
            budget[kind] = budget.get(kind, 0.0) + took
        took_now = seconds(time.monotonic() - self.started)
        table = _table(
            f"Seconds per stage ({AT_ONCE} at a time; {took_now} this time)", ["stage", "s"]
        )
        for kind, took in budget.items():
            table.add_row(kind, f"{took:.0f}")
        console.print(table)
        with (self.out / "leaderboard.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        console.print(_board(rows))
        for line in compare(self.out / "fewshot"):
            console.print(line, highlight=False)
        console.print(
            f"page:  {self.out / 'leaderboard.html'}\ntable: {self.out / 'leaderboard.csv'}",
            highlight=False,
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
            table.add_row(column, *(_points(row[column]) for row in rows))
    return table


def _points(text: str) -> str:
    return f"{float(text):.1f}" if text else "-"


def compare(run: Path) -> list[str]:
    """Each checkpoint's few-label accuracy minus the random trunk's, in points, over draws
    and images together.

    One line per checkpoint, with a paired 95% interval.
    """
    from backbench.results import store
    from backbench.results.paired_tests import compare as paired

    # All trunks see the same draws of labels and the same test images, so their differences have
    # far less spread than they
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
