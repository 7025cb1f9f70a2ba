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

from backbench.cli import program
from backbench.launch.records import Ledger
from backbench.launch.slurm_client import queue
from backbench.records import store
from backbench.requests import parsing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("three_nodes")]
FAULTS = 60
PAUSE_S = 1.0  # between two faults
LONG = 420.0  # seconds; for what takes one minute on an idle machine
ROWS = 3  # of each probe
# Faults by how often each is drawn
KINDS = {"requeue": 6, "preempt": 6, "user's signal": 5, "kill the command": 5}
KINDS |= {"kill the task": 4, "node down": 4, "scancel": 3, "SIGTERM": 2, "cancel": 1}
KINDS |= {"kill the launcher": 1, "lose rows": 2}


class Chaos:
    """The grid under way, and what can happen to it."""

    def __init__(self, lab, seed: int) -> None:
        self.lab, self.random = lab, random.Random(seed)
        self.over = (
            lab.root / "over"
        )  # without it some jobs do not end: the faults find them
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
        states = {n: q.state for n, q in queue().items()}
        records = self.ledger.records()
        found = {
            r.id: name for name, r in records.items() if states.get(r.id) == "RUNNING"
        }
        return dict(sorted(found.items()))

    def fault(self) -> None:
        """One fault, drawn again until there is something that it can happen to."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
            if self.happens(kind):
                self.happened[kind] += 1
                return
            time.sleep(0.2)
        raise AssertionError(f"nothing to disturb: {self.lab.states('runs')}")

    def happens(self, kind: str) -> bool:
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
            return (
                program.main(["launch", "cancel", name, "--out", str(self.ledger.runs)])
                == 0
            )
        nodes = slurm_cluster.output("squeue", "-h", "-j", number, "-o", "%N").strip()
        node = slurm_cluster.output("scontrol", "show", "hostnames", nodes).split()[-1:]
        if kind in ("preempt", "node down") and not node:
            return False
        hog = ["-p", "urgent", "-c", "4", "-o", "/dev/null", "--wrap", "sleep 1"]
        down = ["State=DOWN", "Reason=chaos"]
        commands = {
            "requeue": ["scontrol", "requeue", number],
            "scancel": ["scancel", number],
            "SIGTERM": ["scancel", "--signal", "TERM", number],
            "user's signal": ["scancel", "--signal", "USR2", number],
            "preempt": ["sbatch", "-w", *node, *hog],
            "node down": ["scontrol", "update", f"NodeName={''.join(node)}", *down],
        }
        slurm_cluster.output(*commands[kind])
        return True

    def kill(self, name: str, *, command: bool) -> bool:
        """SIGKILL for a job's command, or for the process above it."""
        records = self.ledger.records()
        attempts = self.ledger.status(records[name].job)["attempts"]
        if not attempts or attempts[-1].get("end") is not None:
            return False
        pid = attempts[-1]["pid"]
        if command:
            children = slurm_cluster.output(
                "ps", "-o", "pid=", "--ppid", str(pid)
            ).split()
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
        done = sorted(f.parent for f in self.ledger.runs.glob("*/*/results.jsonl"))
        whole = [run / "results.jsonl" for run in done if store.complete(run)]
        if not whole:
            return False
        file = self.random.choice(whole)
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:1]))
        return True

    def until_nothing_happens(self) -> None:
        end = time.monotonic() + LONG
        active = {"RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "REQUEUED"}
        while any(q.state in active for q in queue().values()):
            assert time.monotonic() < end, (self.lab.states("runs"), queue())
            slurm_cluster.why_drained(
                or_down=True
            )  # brings them back, as an administrator would
            time.sleep(1.0)


def undisturbed(jobs, lab) -> dict[tuple, float]:
    """The numbers of the same commands, one after the other in this process."""
    there = str(lab.root / "runs")
    for job in jobs:
        words = [
            word.replace(there, str(lab.root / "undisturbed")) for word in job.argv
        ]
        args = parsing.parse(words)
        fake_verbs.VERBS[args.verb](args)
    return lab.values("undisturbed")


@pytest.mark.timeout(1500)
def test_sixty_faults_over_forty_jobs(lab):
    began = time.monotonic()
    chaos = Chaos(lab, seed=int(os.environ.get("CHAOS_SEED", "17")))
    try:
        for _ in range(FAULTS):
            chaos.fault()
            time.sleep(PAUSE_S)
            slurm_cluster.why_drained(or_down=True)
        chaos.over.touch()
        faults_s = time.monotonic() - began
        chaos.until_nothing_happens()
    finally:
        chaos.launcher.kill()
        chaos.launcher.wait()
    before = Counter(lab.states("runs").values())
    slurm_cluster.why_drained()
    assert chaos.launch().wait(120) == 0, (lab.root / "launcher.log").read_text()
    lab.until_done("runs", LONG)
    got = lab.values("runs")  # fails where a number is there twice
    jobs = [record.job for record in lab.look("runs").records.values()]
    lab.dataset("pretrain", "short", "long", steps=60, rows=ROWS)
    jobs.sort(key=lambda job: job.verb != "pretrain")
    expected = undisturbed(jobs, lab)
    print(
        f"{FAULTS} faults in {faults_s:.0f} s ({dict(chaos.happened)}) over {len(jobs)} jobs;"
        f" before the last launch {dict(before)}; {len(got)} numbers, as undisturbed:"
        f" {got == expected}; {time.monotonic() - began:.0f} s"
    )
    assert sum(chaos.happened.values()) == FAULTS and len(jobs) == 40
    assert got == expected and len(got) == 38 * ROWS
