"""The launcher on a real Slurm: Debian's packages, one node on loopback, started by a fixture."""

import contextlib
import re
import shlex
import subprocess
import sys
import time

import pytest
import torch
from support import slurm_cluster

from backbench.board.board import collect
from backbench.launch.records import Ledger
from backbench.launch.slurm_client import queue
from backbench.launch.view import ACTIVE
from backbench.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("slurm")


@pytest.fixture(autouse=True)
def node_stays_in_service(slurm):
    yield
    reason = slurm_cluster.why_drained()
    assert not reason, f"Slurm took its node out of service: {reason}"


def ids(lab, out):
    """Job name -> Slurm's number, as a look finds it"""
    return {name: record.id for name, record in lab.look(out).records.items()}


def ids_on_record(lab, out):
    return [record.id for record in Ledger(lab.root / out).records().values()]


@pytest.mark.slow
def test_twelve_jobs_run_as_one_array_and_fill_the_table_and_again_submits_nothing(lab):
    names = ("d1", "d2", "d3", "d4")
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a", "b", "c")], evaluate=lab.linear(*names)
    )
    cluster = lab.slurm()
    assert lab.run(grid, cluster, "runs") == 0
    submitted = ids(lab, "runs")
    assert len(submitted) == 12
    assert len({number.split("_")[0] for number in submitted.values()}) == 1
    assert lab.run(grid, cluster, "runs") == 0  # while they run
    lab.until_done("runs")
    assert lab.run(grid, cluster, "runs") == 0  # when they are done
    assert ids(lab, "runs") == submitted
    assert lab.values("runs") == lab.reference(grid)
    board = collect([lab.root / "runs"])
    assert len(board.rows) == 3
    assert len(board.cells) == 12


@pytest.mark.slow
def test_launcher_that_dies_during_sbatch_loses_nothing(lab, monkeypatch):
    """Slurm has the array; its number and submitit's files are not written yet."""
    import submitit

    grid = lab.grid(
        checkpoints=[lab.checkpoints("a", "b")], evaluate=lab.linear("d1", "d2")
    )
    cluster = lab.slurm()

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(submitit.core.utils.JobPaths, "move_temporary_file", die)
        assert lab.run(grid, cluster, "runs") == 75
    # 1. A look knows the array by its comment, and writes nothing
    assert ids_on_record(lab, "runs") == [None] * 4
    assert None not in ids(lab, "runs").values()
    assert ids_on_record(lab, "runs") == [None] * 4
    # 2. The next launcher takes it over
    jobs_on_slurm = len(queue())
    assert lab.run(grid, cluster, "runs") == 0
    assert len(queue()) == jobs_on_slurm, "submitted a second time"
    assert None not in ids_on_record(lab, "runs")
    lab.until_done("runs")
    assert {len(hows) for hows in lab.attempts("runs").values()} == {1}
    assert lab.values("runs") == lab.reference(grid)


def shown(number):
    """What Slurm says of a job, as KEY=VALUE words."""
    command = ["scontrol", "show", "job", number]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(word.split("=", 1) for word in said.split() if "=" in word)


@contextlib.contextmanager
def inside_a_job(lab, words, *options):
    """Let a job run a command of the launcher, and stay; whatever happens to the jobs that the
    command submits, this one runs on. Gives a file that is there once the command has succeeded."""
    script = lab.root / "parent.sh"
    file = lab.root / "submitted"
    command = shlex.join([sys.executable, "-m", "backbench", "launch", *words])
    script.write_text(f"#!/bin/bash\n{command} || exit 1\ntouch {file}\nsleep 900\n")
    where = ["--parsable", f"--output={lab.root}/parent.out", "--cpus-per-task=1"]
    sbatch = ["sbatch", *where, *options, str(script)]
    said = subprocess.run(sbatch, capture_output=True, text=True, check=True).stdout
    parent = said.strip() + ("_5" if "--array=5" in options else "")
    try:
        yield file
        about = shown(parent)
        assert about["JobState"] == "RUNNING" and about["Restarts"] == "0"
    finally:
        subprocess.run(["scancel", parent.split("_")[0]], check=True)


def begun(lab):
    """The numbers of the jobs whose own process has written that it runs: Slurm calls a job running
    before its script has set its trap."""
    ledger = Ledger(lab.root / "runs")
    found = []
    for record in lab.look("runs").records.values():
        if ledger.status(record.job)["state"] == "running":
            found.append(record.id)
    return found


def end_a_running_script(lab):
    """Send SIGTERM to the script of a job: the job, and no other, is answered for by its trap."""
    end = time.monotonic() + PATIENCE_S
    while not (running := begun(lab)):
        assert time.monotonic() < end, lab.logs("runs")
        time.sleep(0.3)
    subprocess.run(["scancel", "-s", "TERM", "-b", running[0]], check=True)


PATIENCE_S = 240.0  # with a loaded machine
PARENTS = pytest.mark.parametrize(
    "options",
    [["--mem-per-cpu=100"], ["--array=5", "--mem=500"]],
    ids=["memory", "array"],
)


@pytest.mark.slow
@PARENTS
def test_a_grid_can_be_submitted_from_inside_a_job(lab, options):
    """The jobs inherit nothing of that job, and what happens to them does not touch it."""
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2"))
    lab.dataset("d1", "d2", steps=60, step_s=0.1)
    words = ["run", grid, "--cluster", lab.slurm(), "--out", str(lab.root / "runs")]
    with inside_a_job(lab, words, *options):
        end_a_running_script(lab)
        lab.until(
            "runs", lambda states: not set(states.values()) & set(ACTIVE), PATIENCE_S
        )
    assert lab.run(grid, lab.slurm(), "runs") == 0
    lab.until_done("runs", PATIENCE_S)
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
@PARENTS
def test_failed_jobs_can_be_tried_again_from_inside_a_job(lab, options):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2"))
    lab.dataset("d1", "d2", fault="bad", times=1, steps=60, step_s=0.1)
    cluster = lab.slurm()
    assert lab.run(grid, cluster, "runs") == 0
    lab.until("runs", lambda states: set(states.values()) == {"failed"}, PATIENCE_S)
    failed = ids(lab, "runs")
    words = ["retry", "--cluster", cluster, "--out", str(lab.root / "runs")]
    with inside_a_job(lab, words, *options):
        end_a_running_script(lab)
        lab.until(
            "runs", lambda states: not set(states.values()) & set(ACTIVE), PATIENCE_S
        )
    assert not set(failed.values()) & set(ids(lab, "runs").values()), "submitted anew"
    lab.dataset("d1", "d2", steps=60, step_s=0.01)
    assert lab.run(grid, cluster, "runs") == 0
    lab.until_done("runs", PATIENCE_S)
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
@PARENTS
def test_a_grid_can_be_watched_from_inside_a_job(lab, options):
    """The watcher submits what is missing until all is done, and ends; the job goes on."""
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2"))
    lab.dataset("d1", "d2", steps=60, step_s=0.1, save_every=1)
    words = ["run", grid, "--cluster", lab.slurm(), "--out", str(lab.root / "runs")]
    words += ["--watch", "--interval", "1"]
    with inside_a_job(lab, words, *options) as all_is_done:
        end_a_running_script(lab)
        lab.until_done("runs", PATIENCE_S)
        end = time.monotonic() + PATIENCE_S
        while not all_is_done.exists():
            assert time.monotonic() < end, (lab.root / "parent.out").read_text()
            time.sleep(0.3)
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_what_needs_a_cancelled_job_is_blocked_until_it_is_tried_again(lab):
    lab.dataset("pretrain", steps=600, step_s=0.1)
    grid = lab.grid(recipes=["demo_random"], evaluate=lab.linear("d1", "d2"))
    cluster = lab.slurm()
    assert lab.run(grid, cluster, "runs") == 0

    def are(*names):
        return lambda states: sorted(states.values()) == sorted(names)

    lab.until("runs", are("running", "waiting", "waiting"))
    assert lab.launch("cancel", "runs", "pretrain") == 0
    lab.until("runs", are("cancelled", "blocked", "blocked"), 30)
    lab.dataset("pretrain", steps=600, step_s=0)
    assert lab.launch("retry", "runs", "--cluster", cluster) == 0
    lab.until_done("runs")
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"partition": "mian"}, r"partition 'mian'; did you mean 'main'"),
        (
            {"gpus": 3},
            r"with 3 GPUs, .* 0 have all \(at most 2 GPUs, 4 CPUs, 8000 MB\)",
        ),
        ({"cpus": 64}, r" 64 CPUs, 512 MB each; .* 0 have all"),
        ({"memory_gb": 100}, r" 102400 MB each; .* 0 have all"),
        ({"hours": 3}, r"3 hours; 'main' allows 2"),
        (
            {"constraint": "lop"},
            r"constraint 'lop' in partition 'main'; did you mean 'loop'",
        ),
        ({"nodes": 2}, r"2 node\(s\) .* of the 1 of partition 'main', 1 have all"),
        ({"hours": None}, r"has no `hours`"),
    ],
)
def test_resources_that_no_partition_has_are_refused(lab, bad_input, resources, says):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    before = queue()
    message = bad_input(lab.run(grid, lab.slurm(**resources), "runs"))
    assert len(message.strip().splitlines()) == 1
    assert re.search(says, message)
    assert queue().keys() == before.keys()
    assert not (lab.root / "runs" / ".launch" / "submissions").exists()


@pytest.mark.slow
def test_one_broken_rank_ends_the_job_with_its_own_words(lab):
    """Task 1 fails at once, task 0 would go on for ten minutes: nobody waits for it."""
    lab.dataset("pretrain", steps=6000, step_s=0.1, fault_rank="1")
    grid = lab.grid(recipes=["demo_random"])
    assert lab.run(grid, lab.slurm(tasks_per_node=2), "runs") == 0
    lab.until("runs", lambda states: list(states.values()) == ["failed"], 120)
    (status,) = lab.statuses("runs").values()
    (hows,) = lab.attempts("runs").values()
    assert set(hows) == {"failed"}
    # Three; one more for each in which task 0 got farther than before until it was ended
    assert 3 <= len(hows) <= 6
    why = "failed 3 times for the same reason: rank 1: backbench: this rank breaks"
    assert status["reason"].startswith(why)


@pytest.mark.slow
def test_where_the_first_task_has_nothing_to_begin_the_others_go_home(lab, shell):
    blocker = shell(
        "sbatch --parsable --cpus-per-task=4 --mem=100 --wrap 'sleep 600' -o /dev/null"
    )
    lab.dataset("pretrain", steps=6000, step_s=0.1)
    grid = lab.grid(recipes=["demo_random"])
    assert lab.run(grid, lab.slurm(tasks_per_node=2), "runs") == 0
    (record,) = lab.look("runs").records.values()
    Ledger(lab.root / "runs").mark_cancelled(record.job)
    shell(f"scancel {blocker}")

    def is_over(states):
        return list(states.values()) == ["cancelled"] and not shell("squeue -h")

    lab.until("runs", is_over, 60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_task_pretraining_equals_one_process(lab, tiny_root, shell):
    """In float64: in float32 a fresh ResNet-18's gradient at 32 pixels is 0.1% off."""
    overrides = ["optim.name=sgd", "optim.lr=0.01", "epochs=4", "precision=fp64"]
    recipe = {"recipe": "tiny_simclr", "overrides": overrides}
    grid = lab.grid(recipes=[recipe], data=str(tiny_root), evaluate=[])
    cluster = lab.slurm(fake=False, tasks_per_node=2, accelerator="cpu", hours=0.5)
    assert lab.run(grid, cluster, "runs") == 0
    lab.until("runs", lambda _: lab.run_files("runs", "progress.json"), 400)
    (number,) = ids(lab, "runs").values()
    shell(f"scancel --signal USR2 {number}")
    lab.until_done("runs", 500)
    (hows,) = lab.attempts("runs").values()
    assert hows == ["preempted", "done"]
    files = lab.root.glob("runs/.launch/meet/*/address.json")
    addresses = [file.read_text() for file in files]
    assert len(addresses) == 2
    assert len(set(addresses)) == 2, "each start has a port of its own"
    # The same in one process, without a signal
    assert lab.run(grid, lab.cluster("debug", fake=False), "whole") == 0
    two, one = (trunk_of(lab.root / out) for out in ("runs", "whole"))
    floats = [key for key in one if one[key].is_floating_point()]
    difference = norm([two[key] - one[key] for key in floats])
    assert difference / norm([one[key] for key in floats]) < 1e-5


def trunk_of(out):
    (file,) = out.glob("pretrain/*/backbone.safetensors")
    return Checkpoint.load(file).state_dict


def norm(tensors):
    """The Euclidean norm of all numbers together"""
    return float(torch.cat([x.flatten().double() for x in tensors]).norm())
