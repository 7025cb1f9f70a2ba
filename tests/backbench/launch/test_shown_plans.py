"""What a plan and a status say, line by line; the long ones are cut and counted."""

import pytest

from backbench.launch.clusters import read_cluster
from backbench.launch.grid import read_grid
from backbench.launch.job import Job
from backbench.launch.plan import (
    JobArray,
    Plan,
    _failed_need,
    arrays,
    make_plan,
    plan_text,
    without_done,
)
from backbench.launch.records import Ledger, Submission
from backbench.launch.view import MOST_KINDS, MOST_ROWS, Snapshot, State, status_text


def job(name, verb="linear", like="linear", **more):
    argv = (verb, *more.pop("words", ()))
    return Job(name=name, argv=argv, like=like, cells=(name,), **more)


@pytest.fixture
def cluster(lab):
    resources = {
        "default": {"cpus": 6},
        "pretrain": {"gpus": 2, "tasks_per_node": 2, "nodes": 3, "partition": "big"},
        "finetune": {"gpus": 4},
    }
    return read_cluster(lab.cluster("slurm", max_array=2, resources=resources))


def test_a_plan_is_told_array_by_array(cluster):
    jobs = [
        job("pretrain/a", "pretrain"),
        job("pretrain/b", "pretrain", words=("x", "--fast", "a b")),
        job("a/1"),
        job("a/2"),
        job("a/3", after=("a/1",)),
        job("a/4", needs=("pretrain/a",)),
        job("a/5", "finetune"),
    ]
    known = {
        "a/8": State("done"),
        "a/9": State("blocked", "pretrain/c failed"),
        "a/10": State("done"),
    }
    plan = Plan(jobs, known, ["runs/d", "runs/e"], {"a/1", "a/4", "elsewhere"})
    assert plan_text(plan, cluster).splitlines() == [
        "array 0: 2 jobs on big, 3 node(s) x 2 GPUs, 12 CPUs",
        "  6 CPUs feed a GPU 252 to 756 images/s in two views",
        "  pretrain/a",
        "  pretrain/b",
        "    backbench pretrain x --fast 'a b'",
        f"array 1: 2 jobs on {cluster.name}, 1 node(s) x 0 GPUs, 6 CPUs",
        "  a/1",
        "  a/2",
        f"array 2: 1 jobs on {cluster.name}, 1 node(s) x 4 GPUs, 6 CPUs",
        "  1.5 CPUs feed a GPU 375 to 1,125 images/s",
        "  a/5",
        f"array 3: 1 jobs on {cluster.name}, 1 node(s) x 0 GPUs, 6 CPUs, after array 1",
        "  a/3",
        f"array 4: 1 jobs on {cluster.name}, 1 node(s) x 0 GPUs, 6 CPUs, after pretrain/a",
        "  a/4",
        "skipped (done): a/8",
        "skipped (blocked): a/9",
        "skipped (done): a/10",
        "waiting for a checkpoint: runs/d",
        "waiting for a checkpoint: runs/e",
        "2 of them train the grid's first checkpoints again with seeds 1 and 2, without which no number can be"
        " bold; `again=0` leaves them out",
        "7 jobs, 2 skipped as done, 1 others",
    ]
    fast = Plan([jobs[1]], {}, [], set())
    assert "feed a GPU 1,008 to 3,024 images/s in two views" in plan_text(fast, cluster)


def test_an_array_waits_for_all_arrays_of_what_fills_its_cache(cluster):
    first = [job(f"a/{n}") for n in range(5)]
    last = job("b/1", needs=("z", "a/1"), after=("a/4", "a/0", "a/2", "unknown"))
    behind = job("c/1", needs=("b/1",))
    made = list(arrays(cluster, [*first, last, behind]))
    resources = cluster.resources_for(last)
    assert made == [
        JobArray(resources, first[:2], (), ()),
        JobArray(resources, first[2:4], (), ()),
        JobArray(resources, first[4:], (), ()),
        JobArray(resources, [last], ("a/1", "z"), (0, 1, 2)),
        JobArray(resources, [behind], ("b/1",), ()),
    ]


def test_only_dependencies_on_the_way_are_kept():
    new = [
        job("a"),
        job("b", needs=("done", "a", "runs", "failed"), after=("runs", "a", "gone")),
    ]
    states = {
        "done": State("done"),
        "runs": State("running"),
        "failed": State("failed"),
        "a": State("lost"),
    }
    first, second = without_done(new, states)
    assert first == new[0]
    assert (second.needs, second.after) == (("a", "runs"), ("a",))


def test_the_first_need_that_failed_for_good_is_named():
    one = job("x", needs=("unknown", "again", "well", "blocked", "failed"))
    states = {
        "again": State("failed"),
        "well": State("cancelled"),
        "blocked": State("blocked"),
        "failed": State("failed"),
    }
    assert _failed_need(one, states, {"again": job("again")}) == "blocked blocked"
    assert _failed_need(one, {**states, "blocked": State("lost")}, {}) == "again failed"
    assert _failed_need(one, {"well": State("cancelled")}, {}) is None


def submit(ledger, jobs, *, ids=(), uid="u1", kind="slurm"):
    submission = Submission(
        uid=uid,
        grid="lab",
        cluster="x",
        cluster_overrides=(),
        kind=kind,
        time=1.0,
        jobs=tuple(jobs),
        ids=ids,
    )
    ledger.write_submission(submission)
    return submission


def test_a_pack_goes_again_as_it_was_and_new_checkpoints_go_beside_it(lab):
    pattern = lab.checkpoints("b", "c")
    grid = read_grid(lab.grid(checkpoints=[pattern], evaluate=lab.linear("d1", pack=2)))
    ledger = Ledger(lab.root / "runs")

    def planned():
        found = make_plan(
            grid, Snapshot(ledger), where="grid", data=None, watching=False
        )
        assert found.known == {}
        return found.new

    (pack,) = planned()
    assert len(pack.cells) == 2
    submit(ledger, [pack], kind="local")
    lab.checkpoints("a")
    alone, again = planned()
    assert again == pack
    assert [cell.partition("-")[0] for cell in alone.cells] == ["a"]


def test_long_lists_of_jobs_and_of_kinds_are_cut(tmp_path):
    ledger = Ledger(tmp_path / "runs")
    failing = [job(f"f/{n:02}") for n in range(MOST_ROWS + 2)]
    lost = [job(f"l/{n:02}") for n in range(MOST_ROWS)]
    root = failing[0].name
    behind = [job(f"b/{n}", needs=(root,)) for n in range(2)]
    behind.append(job("b/3", needs=("b/1",)))
    # One more kind than is shown; the last one has two jobs, so it stands first
    kinds = [job(f"k/{n}", like=f"kind {n}") for n in range(MOST_KINDS + 1)]
    kinds.append(job("k/last", like=f"kind {MOST_KINDS}"))
    submit(ledger, [*failing, *lost, *behind, *kinds], kind="local")
    for one in failing:
        reason = f"broken {one.name}"
        status = {"name": one.name, "state": "failed", "reason": reason, "attempts": []}
        ledger.write_status(one, status)
    for one in kinds:
        status = {"name": one.name, "state": "stopped", "attempts": []}
        ledger.write_status(one, status)
    count = len(failing) + len(lost)
    lines = status_text(Snapshot(ledger), width=60).splitlines()
    assert lines[0] == (
        f"{MOST_ROWS + 2} failed  3 blocked  {MOST_ROWS} lost  {MOST_KINDS + 2} stopped"
    )
    assert lines[1] == "failed    f/00  broken f/00"
    assert lines[MOST_ROWS + 1] == "failed    ... and 2 more"
    own = "lost      never started:  l/00  its launcher ended first"
    assert lines[MOST_ROWS + 2] == own[:60]
    rest = lines[count:]
    assert rest[0] == "blocked   3 behind f/00  failed"
    assert rest[1] == f"stopped   2 x kind {MOST_KINDS}"
    assert rest[2:] == [f"stopped   1 x kind {n}" for n in range(MOST_KINDS - 1)]


def test_a_line_of_the_status_is_as_wide_as_the_terminal(tmp_path):
    ledger = Ledger(tmp_path / "runs")
    one = job("a/1")
    submit(ledger, [one], kind="local")
    status = {"name": "a/1", "state": "failed", "reason": "x" * 80, "attempts": []}
    ledger.write_status(one, status)
    assert status_text(Snapshot(ledger), width=30).splitlines()[1] == (
        "failed    a/1  " + "x" * 15
    )


def test_a_job_alone_and_an_array_are_recognised_in_the_queue(tmp_path, stand_in_slurm):
    """Slurm numbers a single job as itself, and shows what is left of an array."""
    ledger = Ledger(tmp_path / "runs")
    alone = submit(ledger, [job("a/1")], uid="one")
    several = submit(ledger, [job(f"b/{n}") for n in range(3)], uid="many")
    submit(ledger, [job("c/1")], uid="gone")
    stand_in_slurm.queue(
        ("6", "RUNNING", "None", "someone"),
        ("9_2", "RUNNING", "None", "many"),
        ("9_1", "PENDING", "Priority", "many"),
        ("7", "RUNNING", "None", "one"),
    )
    snapshot = Snapshot(ledger)
    numbers = {name: record.id for name, record in snapshot.records.items()}
    assert numbers == {
        "a/1": "7",
        "b/0": "9_0",
        "b/1": "9_1",
        "b/2": "9_2",
        "c/1": None,
    }
    ids = {each.uid: each.ids for each in snapshot.unnumbered}
    assert ids == {alone.uid: ("7",), several.uid: ("9_0", "9_1", "9_2")}
    assert snapshot.active_ids() == {"a/1": "7", "b/1": "9_1", "b/2": "9_2"}
