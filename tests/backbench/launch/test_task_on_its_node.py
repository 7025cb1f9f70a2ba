"""How a task of a Slurm job ends, begins again or goes back to the queue, with a Slurm and a clock of ours.

The commands are shell lines, which see MADE, the file that proves the job done.
"""

import json
import os
import signal
import socket
from types import SimpleNamespace

import pytest

from backbench.errors import Failed
from backbench.launch import slurm_client, slurm_task
from backbench.launch.job import Job
from backbench.launch.records import Ledger
from backbench.launch.slurm_task import SlurmTask

MAKES = "pretrain/a/checkpoint.safetensors"
DONE = 'mkdir -p "$(dirname "$MADE")"; touch "$MADE"; exit 0'
# The first attempt ends as told, the second is done
ONCE = 'if ! [ -e "$MADE.tried" ]; then mkdir -p "$(dirname "$MADE")"; touch "$MADE.tried"; '
SAVES = "trap 'exit 75' USR2 TERM; kill -{} $PPID; while :; do sleep 0.02; done"


class Node:
    """A node: what Slurm answers, what it was asked for, and a clock that only waiting moves."""

    def __init__(self, root) -> None:
        self.ledger = Ledger(root / "runs")
        self.now = 1000.0
        self.waits: list[float] = []
        self.standings: list[str | None] = [None]  # the last one stays
        self.takes_requeues = False
        self.refuses_once = False
        self.requeued: list[str] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def standing(self, number: str) -> str | None:
        return self.standings.pop(0) if len(self.standings) > 1 else self.standings[0]

    def requeue(self, number: str) -> bool:
        self.requeued.append(number)
        if self.refuses_once and len(self.requeued) == 1:
            return False
        return self.takes_requeues

    def task(self, script: str, **more) -> SlurmTask:
        argv = ("pretrain", "demo_random", "--out", str(self.ledger.runs / MAKES))
        job = Job(name="pretrain/a", argv=argv, like="x", cells=(), makes=MAKES)
        made = str(self.ledger.runs / MAKES)
        given = {"command": ("sh", "-c", script), "env": {"MADE": made}}
        return SlurmTask(job=job, ledger=self.ledger, **given, **more)

    def status(self) -> dict:
        (status,) = self.ledger.statuses().values()
        return status

    def hows(self) -> list[str]:
        return [attempt["how"] for attempt in self.status()["attempts"]]

    def meets(self, restarts: int = 0):
        (key,) = {self.task("").job.key}
        return self.ledger.root / "meet" / f"{key}-12-{restarts}"


@pytest.fixture
def node(tmp_path, monkeypatch):
    for key in list(os.environ):
        if key.startswith("SLURM"):
            monkeypatch.delenv(key)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    ours = Node(tmp_path)
    clock = SimpleNamespace(monotonic=lambda: ours.now, sleep=ours.wait)
    monkeypatch.setattr(slurm_task, "time", clock)
    monkeypatch.setattr(slurm_client, "standing", ours.standing)
    monkeypatch.setattr(slurm_client, "requeue", ours.requeue)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2)}
    yield ours
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_done_job_knows_its_place_in_the_array(node, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert node.task(DONE)() == "done"
    assert node.hows() == ["done"]
    assert node.status()["attempts"][0]["place"] == "slurm:11_3"
    assert node.requeued == []


def test_a_failed_job_goes_back_to_the_queue_under_its_own_number(node, monkeypatch):
    """SLURM_JOB_ID is the whole array in its last job: a requeue of that would stop the neighbours."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    node.takes_requeues = True
    with pytest.raises(Failed, match="pretrain/a: again: no luck"):
        node.task("echo no luck; exit 1")()
    assert node.requeued == ["11_3"]
    assert node.hows() == ["failed"]
    assert node.status()["state"] == "queued"
    # The SIGTERM that the requeue brings ends this process, which has nothing left to save
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert sum(node.waits) >= 30


def test_without_scontrol_a_failed_job_is_tried_three_times_in_its_place(node):
    with pytest.raises(Failed, match="pretrain/a: failed: failed 3 times"):
        node.task("echo no luck; exit 1")()
    assert node.hows() == ["failed"] * 3
    assert node.status()["state"] == "failed"
    assert len(node.requeued) == 2  # it was tried, and the last failure is final


def test_bad_input_is_not_tried_again(node):
    with pytest.raises(Failed, match="failed: no such recipe"):
        node.task("echo no such recipe; exit 2")()
    assert node.hows() == ["bad input"]
    assert node.requeued == []


@pytest.mark.parametrize(
    ("standings", "at_least", "most"),
    [([None], 900, 960), (["running"], 60, 90)],
    ids=["that is not asked", "that says nothing"],
)
def test_a_preempted_job_that_slurm_leaves_alone_begins_again(
    node, standings, at_least, most
):
    """Beside a Slurm that cannot be asked it waits for as long as a grace may be."""
    node.standings = standings
    assert node.task(f"{ONCE} exit 75; fi; {DONE}")() == "done"
    assert node.hows() == ["preempted", "done"]
    assert at_least <= sum(node.waits) <= most


def test_a_stopped_job_ends_as_soon_as_slurm_ends_it(node):
    """A process that lingers beyond the job's new start would drain the node."""
    node.standings = ["running", "running", "ending"]
    with pytest.raises(Failed, match="again"):
        node.task(f"{ONCE} exit 75; fi; {DONE}")()
    assert node.hows() == ["preempted"]
    assert len(node.waits) == 2


@pytest.mark.parametrize(
    ("limit_s", "how"),
    [(None, "preempted"), (3600.0, "preempted"), (90.0, "time limit")],
)
def test_usr2_is_a_preemption_or_the_warning_before_the_end(node, limit_s, how):
    node.takes_requeues = True
    with pytest.raises(Failed, match="again"):
        node.task(SAVES.format("USR2"), limit_s=limit_s, grace_s=40.0)()
    assert node.hows() == [how]
    assert node.requeued == ["12"]
    assert node.status()["state"] == "queued"


def test_whom_slurm_wants_gone_asks_to_be_requeued_again(node):
    """The first try failed: Slurm was busy. The place is still wanted."""
    node.standings = ["running"]
    node.takes_requeues = node.refuses_once = True
    with pytest.raises(Failed, match="again"):
        node.task(f"{ONCE} {SAVES.format('USR2')}; fi; {DONE}")()
    assert node.hows() == ["preempted"]
    assert len(node.requeued) == 2


def test_at_the_time_limit_nothing_begins_again_in_the_same_place(node):
    """Where it cannot be requeued either, it ends: another attempt would only be cut."""
    with pytest.raises(Failed, match="again"):
        node.task(SAVES.format("USR2"), limit_s=90.0, grace_s=40.0)()
    assert node.hows() == ["time limit"]


def test_a_term_in_the_grace_before_a_preemption_frees_the_place_at_once(node):
    node.standings = ["running", "preempted"]
    node.takes_requeues = True
    with pytest.raises(Failed, match="stopped"):
        node.task(SAVES.format("TERM"))()
    assert node.hows() == ["stopped"]
    assert node.requeued == ["12"]


def test_a_term_by_hand_is_no_reason_to_end(node):
    node.standings = ["running"]
    trapped = SAVES.format("TERM")
    assert node.task(f"{ONCE} {trapped}; fi; {DONE}")() == "done"
    assert node.hows() == ["stopped", "done"]
    assert node.requeued == []


def test_a_signal_before_the_start_starts_the_task_as_it_is(node):
    task = node.task(DONE)
    assert task.checkpoint().function is task


# Several tasks of one job


@pytest.fixture
def second(node, monkeypatch):
    """The second of two tasks, and where task 0 is."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    node.meets().mkdir(parents=True)

    def address(**content) -> None:
        (node.meets() / "address.json").write_text(json.dumps(content))

    return address


def test_a_follower_runs_its_rank_where_task_0_is(node, second):
    second(MASTER_ADDR="host7", MASTER_PORT="4711")
    told = node.ledger.runs / "told"
    # What another rank failed with is task 0's affair
    (node.meets() / "failed-2").write_text('["failed", "rank 2: no luck"]')
    script = f'echo "$MASTER_ADDR $MASTER_PORT $SLURM_PROCID" > {told}; sleep 0.1'
    assert node.task(script, tasks=3)() == "rank 1: exit 0"
    assert told.read_text() == "host7 4711 1\n"
    assert node.ledger.statuses() == {}  # task 0 keeps the job's status
    assert [file.name for file in node.meets().glob("failed-*")] == ["failed-2"]


def test_a_follower_leaves_its_failure_where_task_0_finds_it(node, second):
    second(MASTER_ADDR="host7", MASTER_PORT="4711")
    assert node.task("echo no luck; exit 1", tasks=2)() == "rank 1: exit 1"
    (file,) = node.meets().glob("failed-*")
    assert json.loads(file.read_text()) == ["failed", "rank 1: no luck"]


@pytest.mark.parametrize(
    "script", ["exit 75", "echo Connection closed by peer; exit 1"]
)
def test_what_ends_because_of_others_is_no_failure_of_its_own(
    node, second, monkeypatch, script
):
    monkeypatch.setattr("backbench.launch.attempt.PEER_S", 0.0)
    second(MASTER_ADDR="host7", MASTER_PORT="4711")
    node.task(script, tasks=2)()
    assert not list(node.meets().glob("failed-*"))


def test_a_follower_waits_for_task_0_and_not_for_ever(node, second):
    with pytest.raises(Failed, match="rank 1: task 0 did not begin within 180 s"):
        node.task(DONE, tasks=2)()
    assert 180 <= sum(node.waits) <= 185
    second()
    assert node.task(DONE, tasks=2)() == "rank 1: task 0 had nothing to begin"
    assert not (node.ledger.runs / MAKES).exists()


@pytest.mark.parametrize(
    ("nodes", "host"), [("1", "127.0.0.1"), ("2", socket.gethostname())]
)
def test_task_0_says_where_it_is(node, monkeypatch, nodes, host):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "4")
    told = node.ledger.runs / "told"
    script = f'echo "$MASTER_ADDR $MASTER_PORT" > {told}; {DONE}'
    assert node.task(script, tasks=2)() == "done"
    address = json.loads((node.meets(4) / "address.json").read_text())
    assert address["MASTER_ADDR"] == host
    assert 1024 <= int(address["MASTER_PORT"]) <= 65535
    assert told.read_text().split() == [host, address["MASTER_PORT"]]


def test_where_task_0_begins_nothing_the_others_are_told(node):
    task = node.task(DONE, tasks=2)
    node.ledger.mark_cancelled(task.job)
    with pytest.raises(Failed, match="cancelled"):
        task()
    assert json.loads((node.meets() / "address.json").read_text()) == {}
    assert not (node.ledger.runs / MAKES).exists()


def test_task_0_ends_with_the_reason_of_the_rank_that_failed(node):
    node.takes_requeues = True
    node.meets().mkdir(parents=True)
    reason = ["bad input", "rank 1: no such folder"]
    (node.meets() / "failed-1").write_text(json.dumps(reason))
    with pytest.raises(Failed, match="failed: rank 1: no such folder"):
        node.task("sleep 60", tasks=2)()
    assert node.hows() == ["bad input"]


def test_a_job_of_several_tasks_never_begins_again_by_itself(node):
    """The others have ended; only Slurm can start them all."""
    node.standings = ["running"]
    with pytest.raises(Failed, match="again"):
        node.task(f"{ONCE} exit 75; fi; {DONE}", tasks=2)()
    assert node.hows() == ["preempted"]
    assert len(node.requeued) == 2
