"""`backbench demo`: the whole path on embedded data, as jobs of this machine.

Five narrow ResNet-18 trunks (a random control and four pretrained ones) go through linear and
few-label probes, neighbours, semi-supervised finetuning and COCO detection on the frozen trunk, and
end on the leaderboard. Every step is a command that can be typed by hand. Steps that follow one
another share a process, which imports torch once: four such chains are the jobs of the launcher's
local pool, two at a time with one thread each. Finished steps are skipped the next time, killed
ones continue, and `backbench launch status --out OUT` shows the jobs.
"""

import dataclasses
import itertools
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backbench.cli import demo_ranges
from backbench.datasets import embedded
from backbench.errors import EXIT_PREEMPTED, BadInput, Failed
from backbench.launch.clusters import read_cluster
from backbench.launch.job import Job, finished
from backbench.launch.local import JobPool, run_here
from backbench.launch.records import Ledger, spent_seconds
from backbench.requests.demo import DemoRequest
from backbench.requests.detect import DetectRequest
from backbench.requests.finetune import SemisupRequest
from backbench.requests.options import Outcome, Request
from backbench.requests.pretrain import PretrainRequest
from backbench.requests.probe import LinearRequest
from backbench.runs import atomic, failures, lock
from backbench.runs.folder import CHECKPOINT_FILE, DEMO_FILE, RESULTS_FILE
from backbench.runs.run_progress import read_progress, seconds
from backbench.runs.terminal import log
from backbench.untrusted import jsons, printable

CHECKPOINTS = ("random", "simclr", "moco_v2", "moco_m", "lorac")
DETECTED = ("random", "lorac")  # the two that go through all three COCO tasks
TASKS = ("faster", "mask", "keypoint")
SAY_S = 15.0  # between two lines about where the running jobs are
AND = "+"  # between two commands of a chain
# The chains, of about equal cost, and the beginnings of their steps' names in the order of running.
# Detection comes last: it makes torch deterministic, which a probe by hand is not. The numbers are
# seconds of each step at full size, which the ETA weighs steps by.
CHAINS: dict[str, dict[str, int]] = {
    "pretraining-a": {"pretrain/lorac": 49, "pretrain/moco_m": 38},
    "pretraining-b": {
        "pretrain/random": 1,
        "pretrain/simclr": 31,
        "pretrain/moco_v2": 29,
    },
    "evaluation-a": {"linear": 16, "fewshot": 5, "knn": 7, "detection/random": 39},
    "evaluation-b": {"semisup": 12, "detection/lorac": 43},
}
COSTS = {start: cost for chain in CHAINS.values() for start, cost in chain.items()}
NEEDS = {"evaluation": ("pretraining-a", "pretraining-b")}


def demo_steps(out: Path, size: str) -> dict[str, Job]:
    """Return the demo's jobs by the names of their run folders."""
    data = out / "data"
    prefix = "demo" if size == "full" else "tiny"
    trunks = {name: out / "pretrain" / name / CHECKPOINT_FILE for name in CHECKPOINTS}
    steps: dict[str, Job] = {}

    def add(name: str, request: Request, makes: str | None = None) -> None:
        steps[name] = Job(
            name=name,
            argv=request.argv(),
            like=request.verb,
            cells=(name,),
            makes=makes,
        )

    for name in CHECKPOINTS:
        folder = f"pretrain/{name}"
        request = PretrainRequest(
            recipe=f"{prefix}_{name}", data=data, out=out / folder
        )
        add(folder, request, makes=f"{folder}/{CHECKPOINT_FILE}")
    # One pass for all trunks; the cheap probes have one protocol for both sizes
    protocols = {
        "linear": f"linear_{prefix}",
        "fewshot": "fewshot_demo",
        "knn": "knn_demo",
    }
    for folder, protocol in protocols.items():
        probe = LinearRequest(
            checkpoints=tuple(trunks.values()),
            datasets="digits",
            protocol=protocol,
            data=data,
            out=out / folder,
        )
        add(folder, probe)
    for name in CHECKPOINTS:
        folder = f"semisup/{name}"
        finetuning = SemisupRequest(
            checkpoint=trunks[name],
            percent=10,
            lists=data / "lists",
            protocol=f"semisup_{prefix}",
            data=data,
            out=out / folder,
        )
        add(folder, finetuning)
    for name, task in itertools.product(DETECTED, TASKS):
        folder = f"detection/{name}/{task}"
        detection = DetectRequest(
            config_file=f"{prefix}_{task}_rcnn_frozen",
            engine="torchvision",  # the same numbers with and without Detectron2
            checkpoint=trunks[name],
            resume=True,
            data=data,
            out=out / folder,
        )
        add(folder, detection)
    return steps


def chained(steps: Mapping[str, Job]) -> list[Job]:
    """Return a job for each chain that has any of these steps, in the order of start."""
    jobs: list[Job] = []
    for chain, beginnings in CHAINS.items():
        names = tuple(
            name for start in beginnings for name in steps if name.startswith(start)
        )
        if not names:
            continue
        argv = list(steps[names[0]].argv)
        for name in names[1:]:
            argv += [AND, *steps[name].argv]
        earlier = [job.name for job in jobs]
        stage = chain.rpartition("-")[0]  # evaluation-a: evaluation
        needs = tuple(need for need in NEEDS.get(stage, ()) if need in earlier)
        makes = steps[names[-1]].makes or f"{names[-1]}/{RESULTS_FILE}"
        job = Job(
            name=chain,
            argv=tuple(argv),
            like=chain,
            cells=names,
            needs=needs,
            makes=makes,
        )
        jobs.append(job)
    return jobs


def run_chain(words: Sequence[str], run_verb: Callable[[Sequence[str]], int]) -> int:
    """Run commands one after another in this process, until one fails; return its exit status."""
    for is_and, command in itertools.groupby(words, lambda word: word == AND):
        if is_and:
            continue
        sys.argv = ["backbench", *command]  # the command that the run's records keep
        print("$", shlex.join(sys.argv), file=sys.stderr, flush=True)
        exit_code = run_verb(sys.argv[1:])
        if exit_code:
            return exit_code
    return 0


def run(request: DemoRequest, run_command: Callable[[Sequence[str]], int]) -> Outcome:
    if request.chain:
        return Outcome(status=run_chain(request.chain, run_command))
    out = request.out
    _check_folder(out, request.size)
    started = time.monotonic()
    with lock.held(out):  # two demos in one folder would write the same data
        embedded.build(out / "data", request.size)
        exit_code = _run_jobs(out, request.size)
        if exit_code:
            return Outcome(status=exit_code)
        command = [sys.executable, "-m", "backbench"]
        # From the scores that the linear probe kept: nothing is measured
        calibrate = [*command, "calibrate", "-q", str(out / "linear")]
        if subprocess.run(calibrate, check=False, stdout=subprocess.DEVNULL).returncode:
            raise Failed("the scores were not calibrated; the same command continues")
        command += [
            "leaderboard",
            "-q",
            str(out),
            "--html",
            str(out / "leaderboard.html"),
        ]
        command += [
            "--csv",
            str(out / "leaderboard.csv"),
            "--tidy",
            str(out / "results.csv"),
        ]
        if subprocess.run(command, check=False).returncode:
            raise Failed("the leaderboard was not written; the same command continues")
    took = seconds(time.monotonic() - started)
    ledger = Ledger(out)
    spent = []
    for job in chained(demo_steps(out, request.size)):
        spent.append(f"{job.name} {spent_seconds(ledger.status(job)):.0f} s")
    if request.size == "full":
        for line in demo_ranges.of_demo(out):
            print(line)
    print(f"took {took} this time; jobs: {', '.join(spent)}")
    print(f"page:  {out / 'leaderboard.html'}\ntable: {out / 'leaderboard.csv'}")
    return Outcome()


def _check_folder(out: Path, size: str) -> None:
    """Refuse a folder that is no demo's, or another size's, before anything is written."""
    failures.make_folder(out)
    about = out / DEMO_FILE
    if about.exists():
        try:
            was = jsons.read(about)["size"]
        except (OSError, ValueError, KeyError, TypeError):
            raise BadInput(f"{about}: damaged; choose another --out") from None
        if was != size:
            other = (
                f"holds a demo of size '{printable.shown(str(was), 80)}', not '{size}'"
            )
            raise BadInput(f"{out}: {other}; choose another --out")
    if not about.exists() and any(out.iterdir()):
        raise BadInput(f"{out}: is not empty and holds no demo; choose another --out")
    atomic.write_json(about, {"size": size})


def _run_jobs(out: Path, size: str) -> int:
    """Run the steps that are missing, in the local pool, and return the exit status."""
    ledger = Ledger(out)
    steps = demo_steps(out, size)
    missing = {
        name: step for name, step in steps.items() if not finished(step, ledger.runs)
    }
    chain = shlex.join([sys.executable, "-m", "backbench", "demo", "--chain"])
    cluster = dataclasses.replace(read_cluster("local"), command=chain)
    jobs = chained(missing)
    at_once = f"in {len(jobs)} jobs, {cluster.jobs} at a time"
    log.info(f"demo ({size}) in {out}: {len(steps)} steps, {at_once}")
    if len(missing) < len(steps):
        log.info(f"{len(steps) - len(missing)} finished steps recognised and skipped")
    progress = _Progress(ledger, missing, total=len(steps))
    exit_code = run_here(ledger, cluster, "demo", lambda: (jobs, False), watch=progress)
    if exit_code not in (0, EXIT_PREEMPTED):
        for job in jobs:
            status = ledger.status(job)
            if status["state"] == "failed":
                where = f"[all of it: {ledger.log(job)}]"
                raise Failed(f"{job.name} failed: {status.get('reason')} {where}")
    return exit_code


class _Progress:
    """Says every 15 s how many steps are done, where the running ones are, and when all will be."""

    def __init__(self, ledger: Ledger, missing: Mapping[str, Job], total: int) -> None:
        self.ledger = ledger
        self.missing = missing
        self.total = total
        self.started = time.monotonic()
        self.said = self.started

    def __call__(self, pool: JobPool) -> None:
        now = time.monotonic()
        if now - self.said < SAY_S:
            return
        self.said = now
        steps_left = 0
        cost_made = 0.0
        cost_left = 0.0
        running = []
        for name, step in self.missing.items():
            cost = next(cost for start, cost in COSTS.items() if name.startswith(start))
            share = 1.0
            note = None
            if not finished(step, self.ledger.runs):
                steps_left += 1
                share = 0.0
                note = read_progress(self.ledger.runs / name)
            if note is not None:
                share = min(1.0, note["done"] / max(1, note["total"]))
                running.append(f"{name} {note['done']}/{note['total']} {note['unit']}s")
            cost_made += share * cost
            cost_left += (1 - share) * cost
        spent = now - self.started
        eta = ""
        if cost_made:
            eta = f"ETA {seconds(spent * cost_left / cost_made):>6}  "
        log.info(
            f"{seconds(spent):>6}  {eta}{self.total - steps_left}/{self.total} steps;"
            f" running: {', '.join(running) or ', '.join(pool.running)}"
        )
