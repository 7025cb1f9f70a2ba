"""`backbench demo`: the whole path on embedded data, each stage a real command in a process of its own.

Five ResNet-18 trunks (a random control and four pretrained ones) go through linear and few-label probes,
semi-supervised finetuning and COCO detection, and end on the leaderboard. Stages run two at a time with one thread
each. A finished stage leaves OUT/stages/<name>.json and is skipped the next time; a killed one continues.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from backbench.datasets import embedded
from backbench.errors import EXIT_PREEMPTED, BadInput, Failed, Preempted
from backbench.runs import atomic
from backbench.runs.folder import PROGRESS_FILE, log, seconds
from backbench.runs.state import StopFlag

CHECKPOINTS = ("random", "simclr", "moco_v2", "moco_m", "lorac")
DETECTED = ("random", "lorac")  # the two that go through all three COCO tasks
TASKS = ("faster", "mask", "keypoint")
AT_ONCE = 2


@dataclass(frozen=True)
class Stage:
    """One command. `cost` is its share of the work in seconds of one core, measured, for the ETA of the whole."""

    name: str
    command: tuple[str, ...]
    run: Path
    after: tuple[str, ...] = ()
    cost: float = 10.0


# Seconds of one core for the full size; only the ETA uses them, corrected by the pace of this machine.
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
    data = str(out / "data")
    prefix = "demo" if size == "full" else "tiny"
    trunks = {name: str(out / "pretrain" / name / "backbone.safetensors") for name in CHECKPOINTS}
    plan: list[Stage] = []

    def add(name: str, kind: str, command: Sequence[str], after: Sequence[str] = ()) -> None:
        whole = (sys.executable, "-m", "backbench", *command)
        plan.append(Stage(name, whole, out / name, tuple(after), COSTS.get(kind, 10.0)))

    for name in reversed(CHECKPOINTS):  # the longest first
        command = [
            "pretrain",
            f"{prefix}_{name}",
            "--data",
            data,
            "--out",
            str(out / "pretrain" / name),
        ]
        add(f"pretrain/{name}", name, command)
    for name in DETECTED:
        pkl = str(out / "converted" / f"{name}.pkl")
        command = ["export", trunks[name], "--format", "detectron2", "--out", pkl]
        add(f"convert/{name}", "convert", command, [f"pretrain/{name}"])
        for task in reversed(TASKS):
            command = [
                "detect",
                "--config-file",
                f"{prefix}_{task}_rcnn_R_18_FPN",
                "--engine",
                "torchvision",
            ]
            command += ["--data", data, "--out", str(out / "detection" / task / name), "--resume"]
            add(
                f"detection/{task}/{name}",
                task,
                [*command, "MODEL.WEIGHTS", pkl],
                [f"convert/{name}"],
            )
    for name in CHECKPOINTS:
        command = [
            "semisup",
            trunks[name],
            "--percent",
            "10",
            "--lists",
            f"{data}/lists",
            "--data",
            data,
        ]
        command += ["--protocol", f"semisup_{prefix}", "--out", str(out / "semisup" / name)]
        add(f"semisup/{name}", "semisup", command, [f"pretrain/{name}"])
    for probe in ("linear", "fewshot", "knn"):
        command = ["linear", *trunks.values(), "--datasets", "digits", "--data", data]
        protocol = f"linear_{prefix}" if probe == "linear" else f"{probe}_demo"
        command += ["--protocol", protocol, "--out", str(out / probe)]
        add(probe, probe, command, [f"pretrain/{name}" for name in CHECKPOINTS])
    command = [
        "leaderboard",
        str(out),
        "--csv",
        str(out / "leaderboard.csv"),
        "--tidy",
        str(out / "results.csv"),
    ]
    command += ["--html", str(out / "leaderboard.html")]
    add("leaderboard", "leaderboard", command, [stage.name for stage in plan])
    return plan


def run(args: argparse.Namespace) -> int:
    """The verb `demo`."""
    return Demo(args.out, args.size).run()


class Demo:
    def __init__(self, out: Path, size: str) -> None:
        self.out, self.size = out, size
        self.plan = stages(out, size)
        self.running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes], float]] = {}
        self.done: dict[str, float] = {}
        self.skipped: list[str] = []
        self.started = time.monotonic()
        self._said = 0.0

    def run(self) -> int:
        with self._alone():
            log.info(
                f"demo ({self.size}) in {self.out}: {len(self.plan)} stages, {AT_ONCE} at a time"
            )
            embedded.build(self.out / "data", self.size)
            self._recognise()
            with StopFlag() as stop:
                try:
                    self._loop(stop)
                finally:
                    self._end_children()
        self._summary()
        return 0

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two demos in one folder would write the same files."""
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
        with (self.out / "demo.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadInput(
                    f"{self.out}: another demo is running here; wait for it or choose another --out"
                ) from None
            yield

    def _marker(self, stage: Stage) -> Path:
        return self.out / "stages" / f"{stage.name.replace('/', '-')}.json"

    def _recognise(self) -> None:
        """Stages that ended well with the same command, whose files are there, and whose inputs did too, are done."""
        for stage in self.plan:
            marker = self._marker(stage)
            if marker.exists() and all(name in self.done for name in stage.after):
                about = json.loads(marker.read_text())
                there = all(
                    Path(word).exists()
                    for word in stage.command
                    if word.startswith(f"{self.out}{os.sep}")
                )
                if about["command"] == list(stage.command[1:]) and there:
                    self.done[stage.name] = about["seconds"]
                    self.skipped.append(stage.name)
        if self.skipped:
            log.info(f"{len(self.skipped)} finished stages recognised and skipped")

    def _loop(self, stop: StopFlag) -> None:
        while len(self.done) < len(self.plan):
            for stage in self.plan:
                fresh = stage.name not in self.done and stage.name not in self.running
                ready = all(name in self.done for name in stage.after)
                if fresh and ready and len(self.running) < AT_ONCE:
                    self._start(stage)
            time.sleep(0.1)
            if stop.requested:
                raise Preempted(f"stopped by {stop.requested}; the same command continues")
            for name in list(self.running):
                self._collect(name)
            self._say()

    def _start(self, stage: Stage) -> None:
        logs = self.out / "logs"
        logs.mkdir(exist_ok=True)
        file = (logs / f"{stage.name.replace('/', '-')}.log").open("ab")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        child = subprocess.Popen(
            stage.command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        self.running[stage.name] = (child, file, time.monotonic())
        log.info(f"{self._clock()}  start  {stage.name}")

    def _collect(self, name: str) -> None:
        child, file, began = self.running[name]
        status = child.poll()
        if status is None:
            return
        del self.running[name]
        file.close()
        stage = next(s for s in self.plan if s.name == name)
        if status == EXIT_PREEMPTED:
            raise Preempted(
                f"stage {name} was stopped and saved its state; the same command continues"
            )
        if status != 0:
            tail = Path(file.name).read_text(errors="replace").strip().splitlines()[-1:]
            raise Failed(
                f"stage {name} failed (exit {status}): {''.join(tail)[:300]} [all of it: {file.name}]"
            )
        took = time.monotonic() - began
        self.done[name] = took
        atomic.write_json(
            self._marker(stage), {"command": list(stage.command[1:]), "seconds": round(took, 1)}
        )
        log.info(f"{self._clock()}  done   {name} in {seconds(took)}")

    def _end_children(self) -> None:
        """Ask the running stages to save and stop; those that do not within 20 s are killed."""
        for child, _, _ in self.running.values():
            child.send_signal(signal.SIGTERM)
        limit = time.monotonic() + 20
        for child, file, _ in self.running.values():
            try:
                child.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            file.close()
        self.running.clear()

    def _clock(self) -> str:
        return f"{seconds(time.monotonic() - self.started):>6}  ETA {seconds(self._eta()):>6}"

    def _eta(self) -> float:
        """What is left of the measured costs, scaled by how fast this machine has been so far."""
        cost = {s.name: s.cost for s in self.plan}
        left = sum(c for name, c in cost.items() if name not in self.done)
        for name in self.running:
            state = self._progress(name)
            if state and state["total"]:
                left -= cost[name] * min(1.0, state["done"] / state["total"])
        ran = [name for name in self.done if name not in self.skipped]
        expected = sum(cost[name] for name in ran)
        pace = sum(self.done[name] for name in ran) / expected if expected > 60 else 1.0
        return left * pace / AT_ONCE

    def _progress(self, name: str) -> dict[str, Any] | None:
        path = next(s.run for s in self.plan if s.name == name) / PROGRESS_FILE
        try:
            return json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            return None

    def _say(self) -> None:
        """Every 15 s, where the running stages are."""
        now = time.monotonic()
        if now - self._said < 15:
            return
        self._said = now
        parts = []
        for name in self.running:
            state = self._progress(name)
            parts.append(
                f"{name} {state['done']}/{state['total']} {state['unit']}s" if state else name
            )
        log.info(
            f"{self._clock()}  {len(self.done)}/{len(self.plan)} stages; running: {', '.join(parts)}"
        )

    def _summary(self) -> None:
        from rich.console import Console

        console = Console()
        console = console if console.is_terminal else Console(width=160)
        budget: dict[str, float] = {}
        for name, took in self.done.items():
            kind = name.rsplit("/", 1)[0] if "/" in name else name
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


def _die_with_parent() -> None:
    """Linux: a stage must not outlive a demo that is killed, or it would write beside the next one's."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6", use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _table(title: str, columns: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _board(rows: Sequence[dict[str, str]]) -> Any:
    """The leaderboard turned on its side: a line per column of the csv, a column per checkpoint. What only splits an AP
    by object size, and the boxes that come with masks and keypoints, stay in the csv."""
    fixed = ("checkpoint", "name", "method", "arch", "epochs", "source")
    table = _table("Leaderboard (percent)", ["", *(row["name"] for row in rows)])
    for column in [c for c in (rows[0] if rows else {}) if c not in fixed]:
        task, _, metric = column.partition("@")[0].split("/")
        extra = metric.startswith("bbox") and task != "faster_rcnn"
        if not extra and not metric.endswith(("APs", "APm", "APl")):
            table.add_row(
                column, *(f"{float(row[column]):.1f}" if row[column] else "-" for row in rows)
            )
    return table


def compare(run: Path) -> list[str]:
    """Each checkpoint's few-label accuracy minus the random trunk's, draw by draw, with a paired 95% interval."""
    import numpy

    from backbench.results import store
    from backbench.results.compare import of_draws

    rows = [r for r in store.read(run)[0] if r.task == "fewshot"]
    draws = {r.name: numpy.array(r.provenance["draws"]) for r in rows}
    control = next((name for name in draws if "random" in name), None)
    lines = []
    for name, values in draws.items():
        if control is None or name == control:
            continue
        d = of_draws(values - draws[control])
        verdict = ("better" if d.value > 0 else "worse") if d.real else "no difference shown"
        lines.append(
            f"few labels, {name} against {control}: {d.value:+.1f} points, paired 95% interval "
            f"[{d.ci95[0]:+.1f}, {d.ci95[1]:+.1f}] over {d.n} draws: {verdict}"
        )
    return lines
