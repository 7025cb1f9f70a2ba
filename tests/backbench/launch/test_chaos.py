"""Chaos: 60 faults, drawn by a seed (CHAOS_SEED), over a grid of 40 jobs on a Slurm of three nodes.

The grid, launched once more, must come to the numbers of an undisturbed run, each of them once.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from support import fake_verbs, slurm_cluster

from backbench.launch.records import Ledger
from backbench.launch.slurm_client import queue
from backbench.records import store
from backbench.requests import parsing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("three_nodes")]
FAULTS = 60
PAUSE_S = 1.0  # between two faults
LONG = 420.0  # seconds; for what takes one minute on an idle machine
ROWS = 3  # of each probe
# Each fault, and how often it is drawn
KINDS = {
    "requeue": 6,
    "preempt": 6,
    "user's signal": 5,
    "kill the command": 5,
    "kill the task": 4,
    "node down": 4,
    "scancel": 3,
    "SIGTERM": 2,
    "cancel": 1,
    "kill the launcher": 1,
    "lose rows": 2,
}


class Chaos:
    """The grid under way, and what can happen to it."""

    def __init__(self, lab, seed: int) -> None:
        self.lab = lab
        self.random = random.Random(seed)
        # Without this file some jobs do not end, so that the faults find them
        self.over = lab.root / "over"
        walk = {"steps": 60, "step_s": 0.2, "save_every": 4, "rows": ROWS}
        lab.dataset("pretrain", "short", **walk)
        lab.dataset("long", **walk, until=str(self.over))
        grace = {"partition": "grace"}
        # 2 pretrainings, one of them on two nodes; 2 probes of each, and of 17 checkpoints
        self.grid = lab.grid(
            recipes=[
                {"recipe": "demo_random", "seeds": [1], "resources": grace},
                {"recipe": "demo_random", "seeds": [2], "resources": {"nodes": 2}},
            ],
            checkpoints=[lab.checkpoints(*(f"c{number}" for number in range(17)))],
            evaluate=[*lab.linear("long", resources=grace), *lab.linear("short")],
            pack=1,
        )
        self.cluster = lab.slurm(jobs=8)
        self.happened: Counter[str] = Counter()
        self.launcher = self.launch("--watch", "--interval", "6")
        lab.until(
            "runs", lambda states: list(states.values()).count("running") > 3, LONG
        )

    def launch(self, *more: str) -> subprocess.Popen[str]:
        log = (self.lab.root / "launcher.log").open("a")
        words = ["backbench", "launch", "run", self.grid, "--cluster", self.cluster]
        words += ["--out", str(self.lab.root / "runs"), *more]
        return subprocess.Popen(
            [sys.executable, "-m", *words], stdout=log, stderr=log, text=True
        )

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.lab.root / "runs")

    def running(self) -> dict[str, str]:
        """Slurm's number -> name of our jobs that run."""
        on_slurm = queue()
        found = {}
        for name, record in self.ledger.records().items():
            if record.id in on_slurm and on_slurm[record.id].state == "RUNNING":
                found[record.id] = name
        return dict(sorted(found.items()))

    def fault(self) -> None:
        """One fault, drawn again until there is something that it can happen to."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            (kind,) = self.random.choices(list(KINDS), list(KINDS.values()))
            if self.happens(kind):
                self.happened[kind] += 1
                return
            time.sleep(0.2)
        raise AssertionError(f"nothing to disturb: {self.lab.states('runs')}")

    def happens(self, kind: str) -> bool:
        """Let it happen; False where there is nothing that it can happen to."""
        if kind == "kill the launcher":
            alive = self.launcher.poll() is None
            self.launcher.kill()
            return alive
        if kind == "lose rows":
            return self.lose_rows()
        running = self.running()
        if not running:
            return False
        number = self.random.choice(list(running))
        name = running[number]
        if kind in ("kill the command", "kill the task"):
            return self.kill(name, command=kind == "kill the command")
        if kind == "cancel":
            return self.lab.launch("cancel", "runs", name) == 0
        nodes = slurm_cluster.output("squeue", "-h", "-j", number, "-o", "%N").strip()
        hosts = slurm_cluster.output("scontrol", "show", "hostnames", nodes).split()
        if kind in ("preempt", "node down") and not hosts:
            return False
        node = hosts[-1] if hosts else ""
        hog = ["-p", "urgent", "-c", "4", "-o", "/dev/null", "--wrap", "sleep 1"]
        down = ["State=DOWN", "Reason=chaos"]
        commands = {
            "requeue": ["scontrol", "requeue", number],
            "scancel": ["scancel", number],
            "SIGTERM": ["scancel", "--signal", "TERM", number],
            "user's signal": ["scancel", "--signal", "USR2", number],
            "preempt": ["sbatch", "-w", node, *hog],
            "node down": ["scontrol", "update", f"NodeName={node}", *down],
        }
        slurm_cluster.output(*commands[kind])
        return True

    def kill(self, name: str, *, command: bool) -> bool:
        """SIGKILL for a job's command, or for the process above it."""
        job = self.ledger.records()[name].job
        attempts = self.ledger.status(job)["attempts"]
        if not attempts or attempts[-1].get("end") is not None:
            return False
        pid = attempts[-1]["pid"]
        if command:
            listed = slurm_cluster.output("ps", "-o", "pid=", "--ppid", str(pid))
            children = listed.split()
            if not children:
                return False
            pid = int(children[0])
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def lose_rows(self) -> bool:
        """All but one row of a probe that is done."""
        files = sorted(self.ledger.runs.glob("*/*/results.jsonl"))
        whole = [file for file in files if store.complete(file.parent)]
        if not whole:
            return False
        file = self.random.choice(whole)
        first_row, *_ = file.read_text().splitlines(keepends=True)
        file.write_text(first_row)
        return True

    def until_nothing_happens(self) -> None:
        end = time.monotonic() + LONG
        active = {"RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "REQUEUED"}
        while any(queued.state in active for queued in queue().values()):
            assert time.monotonic() < end, (self.lab.states("runs"), queue())
            bring_back_nodes()
            time.sleep(1.0)


def bring_back_nodes() -> None:
    """As an administrator would"""
    slurm_cluster.why_drained(or_down=True)


def undisturbed(jobs, lab) -> dict[tuple, float]:
    """The numbers of the same commands, one after the other in this process."""
    there = str(lab.root / "runs")
    here = str(lab.root / "undisturbed")
    for job in jobs:
        words = [word.replace(there, here) for word in job.argv]
        args = parsing.parse(words)
        fake_verbs.VERBS[args.verb](args)
    return lab.values("undisturbed")


@pytest.mark.timeout(1500)
def test_sixty_faults_over_forty_jobs(lab):
    # 1. The grid under way, and sixty faults; then it may end
    began = time.monotonic()
    chaos = Chaos(lab, seed=int(os.environ.get("CHAOS_SEED", "17")))
    try:
        for _ in range(FAULTS):
            chaos.fault()
            time.sleep(PAUSE_S)
            bring_back_nodes()
        chaos.over.touch()
        faults_s = time.monotonic() - began
        chaos.until_nothing_happens()
    finally:
        chaos.launcher.kill()
        chaos.launcher.wait()
    # 2. One launch more brings what is missing
    before = Counter(lab.states("runs").values())
    slurm_cluster.why_drained()
    assert chaos.launch().wait(120) == 0, (lab.root / "launcher.log").read_text()
    lab.until_done("runs", LONG)
    # 3. The numbers are those of a run that nothing disturbed, each of them once
    got = lab.values("runs")
    jobs = [record.job for record in lab.look("runs").records.values()]
    lab.dataset("pretrain", "short", "long", steps=60, rows=ROWS)
    jobs.sort(key=lambda job: job.verb != "pretrain")
    expected = undisturbed(jobs, lab)
    print(
        f"{FAULTS} faults in {faults_s:.0f} s ({dict(chaos.happened)}) over {len(jobs)} jobs;"
        f" before the last launch {dict(before)}; {len(got)} numbers, as undisturbed:"
        f" {got == expected}; {time.monotonic() - began:.0f} s"
    )
    assert sum(chaos.happened.values()) == FAULTS
    assert len(jobs) == 40
    assert len(got) == 38 * ROWS
    assert got == expected
