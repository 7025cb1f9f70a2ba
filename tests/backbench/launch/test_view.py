"""How jobs stand, by records, Slurm's queue and locks; and that a look leaves no trace."""

import hashlib
import json
import time

import pytest

from backbench.cli import program
from backbench.launch.clusters import read_cluster
from backbench.launch.job import Job
from backbench.launch.records import Ledger, Submission
from backbench.launch.slurm import catch_up
from backbench.launch.view import Snapshot, status_text

HOUR_AGO = time.time() - 3600


def job(name, **more):
    return Job(name=name, argv=("linear",), like="linear", cells=(name,), **more)


def submit(
    ledger, *jobs, uid="u1", kind="slurm", ids=(), cluster="slurm", when=HOUR_AGO
):
    """Put jobs on record as an array of Slurm, or as a local pool's list."""
    submission = Submission(
        uid=uid,
        grid="lab",
        cluster=cluster,
        cluster_overrides=(),
        kind=kind,
        time=when,
        jobs=jobs,
        ids=ids,
    )
    ledger.write_submission(submission)
    return submission


def write_status(ledger, job, state, reason=None, **attempt):
    """Write a status as the job itself would have written it."""
    attempts = [{"start": HOUR_AGO, "end": None, **attempt}]
    status = {"name": job.name, "state": state, "reason": reason, "attempts": attempts}
    ledger.write_status(job, status)


def shown(ledger):
    """Job name -> (its state, the detail)"""
    states = Snapshot(ledger).states
    return {name: (state.name, state.detail) for name, state in states.items()}


@pytest.mark.parametrize(
    ("queued", "was", "state"),
    [
        (("PENDING", "Resources"), None, ("queued", "Resources")),
        (("PENDING", "Dependency"), None, ("waiting", "")),
        # Submitted again
        (("PENDING", "BeginTime"), "failed", ("queued", "BeginTime")),
        (("RUNNING", "None"), None, ("running", "")),
        (("COMPLETING", "None"), "running", ("running", "")),
        # Its last process is on the way out
        (("RUNNING", "None"), "failed", ("failed", "why")),
        (("RUNNING", "None"), "done", ("done", "")),
        (("CANCELLED", "None"), "running", ("cancelled", "")),
        (("CANCELLED", "None"), "stopped", ("cancelled", "")),
        (("NODE_FAIL", "None"), "running", ("lost", "Slurm says node_fail")),
        (("COMPLETED", "None"), "running", ("lost", "started, not there any more")),
        (None, "running", ("lost", "started, not there any more")),
        (None, "stopped", ("stopped", "started, not there any more")),
        (None, "queued", ("stopped", "started, not there any more")),
        (None, "cancelled", ("cancelled", "")),
        (None, None, ("lost", "Slurm knows it no longer and it wrote nothing")),
    ],
)
def test_state_of_a_job_on_slurm(tmp_path, stand_in_slurm, queued, was, state):
    ledger = Ledger(tmp_path / "runs")
    one = job("x/one")
    submit(ledger, one, job("x/two"), ids=("7_0", "7_1"))
    if was is not None:
        write_status(ledger, one, was, "why")
    # Another cluster's job of the same number is not ours
    jobs = [("7_1", "RUNNING", "None", "someone")]
    if queued is not None:
        jobs.append(("7_0", *queued, "u1"))
    stand_in_slurm.queue(*jobs)
    gone = "Slurm knows it no longer and it wrote nothing"
    assert shown(ledger) == {"x/one": state, "x/two": ("lost", gone)}


def test_files_that_are_there_count_more_than_what_became_of_the_job(
    tmp_path, stand_in_slurm
):
    ledger = Ledger(tmp_path / "runs")
    gone = job("x/gone", makes="x/gone/file")
    failed = job("x/failed", makes="x/failed/file")
    submit(ledger, gone, failed, ids=("7_0", "7_1"))
    write_status(ledger, gone, "running")
    write_status(ledger, failed, "failed", "why")
    for one in (gone, failed):
        (ledger.runs / one.name).mkdir(parents=True)
        (ledger.runs / one.makes).touch()
    assert shown(ledger) == {"x/gone": ("done", ""), "x/failed": ("failed", "why")}


def test_jobs_behind_others(tmp_path, stand_in_slurm):
    ledger = Ledger(tmp_path / "runs")
    first = job("first")
    second = job("second", needs=("first",))
    third = job("third", needs=("second", "first"))
    submit(ledger, first, second, third, ids=("7_0", "7_1", "7_2"))
    # 1. While the first one runs
    stand_in_slurm.queue(
        ("7_0", "RUNNING", "None", "u1"),
        ("7_1", "PENDING", "Dependency", "u1"),
        ("7_2", "PENDING", "Dependency", "u1"),
    )
    assert shown(ledger) == {
        "first": ("running", ""),
        "second": ("waiting", "for first"),
        "third": ("waiting", "for second and 1 more"),
    }
    # 2. When it has failed: Slurm cancels the others, and forgets them later
    write_status(ledger, first, "failed", "why")
    cancelled = [(f"7_{i}", "CANCELLED", "Dependency", "u1") for i in (1, 2)]
    for jobs in (cancelled, []):
        stand_in_slurm.queue(*jobs)
        assert shown(ledger) == {
            "first": ("failed", "why"),
            "second": ("blocked", "first failed"),
            "third": ("blocked", "second blocked"),
        }


def test_a_long_chain_ends_no_look(lab, bad_input):
    """A list of 3,000 as a pool writes it, and backwards, as only a stranger does."""
    ledger = Ledger(lab.root / "runs")
    chain = [job(f"x/{i}", needs=(f"x/{i - 1}",)) for i in range(3000)]
    submit(ledger, *chain, kind="local")
    assert set(lab.states("runs").values()) == {"lost", "blocked"}
    submit(ledger, *reversed(chain), kind="local")
    says = "hundreds of jobs, each before the one that it needs"
    bad_input(lab.launch("status", "runs"), says)


def test_slurm_that_does_not_answer_loses_nothing(tmp_path, stand_in_slurm):
    ledger = Ledger(tmp_path / "runs")
    running, queued, failed = (job(name) for name in ("running", "queued", "failed"))
    submit(ledger, running, queued, failed, ids=("7_0", "7_1", "7_2"))
    write_status(ledger, running, "running")
    write_status(ledger, failed, "failed", "why")
    stand_in_slurm.says("squeue", "", status=1)
    assert shown(ledger) == {
        "running": ("running", "squeue does not answer"),
        "queued": ("queued", "squeue does not answer"),
        "failed": ("failed", "why"),
    }
    assert status_text(Snapshot(ledger)).splitlines()[1] == "! squeue: exit 1"


def test_state_of_a_job_of_this_machine(tmp_path):
    """Alive is who holds its lock; the list of a pool is worth as much as the pool is alive."""
    ledger = Ledger(tmp_path / "runs")
    runs = job("runs")
    behind = job("behind", needs=("runs",))
    next_one = job("next")
    left = job("left")
    jobs = (runs, behind, next_one, left)
    submit(ledger, *jobs, uid="pool-0", kind="local", cluster="local")
    write_status(ledger, runs, "running")
    write_status(ledger, left, "running")
    with ledger.alone(runs):
        # 1. The job and its pool live
        with ledger.running_pool("pool"):
            ledger.mark_cancelled(left)
            assert shown(ledger) == {
                "runs": ("running", ""),
                "behind": ("waiting", "for runs"),
                "next": ("queued", ""),
                "left": ("cancelled", ""),
            }
        # 2. Its pool was killed, the job was not
        assert shown(ledger)["runs"] == ("running", "")
        assert shown(ledger)["next"] == ("lost", "its launcher ended first")
    # 3. Both are gone
    assert shown(ledger)["runs"] == ("lost", "started, not there any more")


@pytest.mark.parametrize(
    "case",
    [
        (
            "OUT_OF_MEMORY",
            "running",
            "",
            "out of memory:  x  Slurm says out_of_memory | loss 3.2",
        ),
        (
            "NODE_FAIL",
            "running",
            "",
            "node failed:    x  Slurm says node_fail | loss 3.2",
        ),
        ("TIMEOUT", "running", "", "out of time:    x  Slurm says timeout | loss 3.2"),
        (
            None,
            "running",
            "",
            "killed:         x  started, not there any more | loss 3.2",
        ),
        (
            "FAILED",
            None,
            "script: line 9: module: command not found\nsrun: error: n1: task 0: Exited with 1\n",
            "never started:  x  Slurm says failed | script: line 9: module: command not found",
        ),
        (
            None,
            None,
            "srun: error: n1: no python\n",
            "never started:  x  srun: error: n1: no python",
        ),
        (
            None,
            None,
            None,
            "forgotten:      x  Slurm knows it no longer and it wrote nothing",
        ),
        (None, None, "", "not submitted:  x  sbatch was not done with it, or failed"),
    ],
)
def test_a_lost_job_has_its_cause_in_a_word_and_the_last_line_said(
    tmp_path, stand_in_slurm, case
):
    """By squeue's state, the job's status, and what Slurm's script printed around the job."""
    queued, was, wrapper, row = case
    ledger = Ledger(tmp_path / "runs")
    one = job("x")
    was_submitted = "not submitted" not in row
    submission = submit(ledger, one, ids=("7",) if was_submitted else ())
    if was is not None:
        write_status(ledger, one, was)
        ledger.log(one).parent.mkdir()
        ledger.log(one).write_text("$ backbench linear\nloss 3.2\r\n")
    if wrapper is not None:
        ledger.submitit(submission).mkdir(parents=True)
        (ledger.submitit(submission) / "7_0_log.out").write_text(wrapper)
    if queued is not None:
        stand_in_slurm.queue(("7", queued, "None", "u1"))
    assert status_text(Snapshot(ledger)).splitlines()[1:] == [f"lost      {row}"]


def test_what_is_blocked_is_told_by_its_root_in_one_line(tmp_path, stand_in_slurm):
    ledger = Ledger(tmp_path / "runs")
    first = job("pretrain/first")
    other = job("pretrain/other")
    middle = job("convert", needs=(first.name,))
    behind = [job(f"x/{i}", needs=("convert",)) for i in range(33)]
    alone = job("y", needs=(other.name,))
    submit(ledger, first, other, middle, *behind, alone)
    write_status(ledger, first, "failed", "no such folder")
    write_status(ledger, other, "cancelled")
    lines = status_text(Snapshot(ledger)).splitlines()
    assert lines == [
        "1 failed  35 blocked  1 cancelled",
        "failed    pretrain/first  no such folder",
        "cancelled pretrain/other  ",
        "blocked   34 behind pretrain/first  failed",
        "blocked   1 behind pretrain/other  cancelled",
    ]


@pytest.mark.parametrize(
    ("done", "eta_s", "age", "ends"),
    [
        (30, 100.0, 25, ", ETA 1:15"),
        (30, 100.0, 110, ", no news for 1:50"),
        (30, 5.0, 6, ""),  # a moment late is no news
        (100, 0.0, 5, ""),  # this part of the run is over
        (0, None, 5, ""),
    ],
)
def test_no_time_is_told_that_is_not_known(tmp_path, done, eta_s, age, ends):
    ledger = Ledger(tmp_path / "runs")
    one = job("x")
    submit(ledger, one, uid="pool-0", kind="local", cluster="local")
    write_status(ledger, one, "running")
    note = {
        "what": "probe",
        "done": done,
        "total": 100,
        "unit": "step",
        "eta_s": eta_s,
        "time": time.time() - age,
    }
    (ledger.runs / "x").mkdir()
    (ledger.runs / "x" / "progress.json").write_text(json.dumps(note))
    with ledger.alone(one):
        assert shown(ledger) == {"x": ("running", f"probe {done}/100 steps{ends}")}


def traces(folder):
    """Every file and folder below: its content's hash, and when it was changed last."""
    out = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        stat = path.lstat()
        content = ""
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        out[str(path)] = (content, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_mode)
    return out


def fill(lab, slurm):
    """A RUNS with everything in it: jobs of this machine and of Slurm, in every state."""
    lab.dataset("bad", fault="bad")
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "bad")
    )
    assert lab.run(grid, lab.cluster("local"), "runs") == 1
    ledger = Ledger(lab.root / "runs")
    # 1. Of this machine
    alive, dead, never = (job(f"here/{name}") for name in ("alive", "dead", "never"))
    submit(ledger, alive, dead, never, uid="pool-0", kind="local", cluster="local")
    for one in (alive, dead):
        write_status(ledger, one, "running")
    # 2. An array of Slurm
    runs, pends, cancelled, broke, vanished = (
        job(f"slurm/{name}")
        for name in ("runs", "pends", "cancelled", "broke", "vanished")
    )
    blocked = job("slurm/blocked", needs=(broke.name,))
    jobs = (runs, pends, cancelled, broke, vanished, blocked)
    cluster = lab.slurm()
    submit(ledger, *jobs, ids=tuple(f"7_{i}" for i in range(6)), cluster=cluster)
    for one in (runs, cancelled, vanished):
        write_status(ledger, one, "running")
    # 3. An array whose launcher died before it knew its number
    unnumbered = [job(f"unnumbered/{i}") for i in range(2)]
    submit(ledger, *unnumbered, uid="u2", cluster=cluster)
    slurm.queue(
        ("7_0", "RUNNING", "None", "u1"),
        ("7_1", "PENDING", "Resources", "u1"),
        ("7_2", "CANCELLED", "None", "u1"),
        ("7_3", "FAILED", "None", "u1"),
        ("7_4", "RUNNING", "None", "another cluster's"),
        ("8_1", "PENDING", "Resources", "u2"),
    )
    return ledger, alive, cluster


def test_a_look_leaves_no_trace(lab, stand_in_slurm, capsys):
    ledger, alive, cluster = fill(lab, stand_in_slurm)
    more = lab.grid(
        checkpoints=[lab.checkpoints("a", "b")], evaluate=lab.linear("d1", "d2")
    )
    runs = str(ledger.runs)
    looks = [
        ("launch", "status", "--once", "--out", runs),
        ("launch", "status", "--json", "--out", runs),
        ("leaderboard", runs),
    ]
    for place in (cluster, "local", "debug"):
        where = ("--cluster", place, "--out", runs)
        looks.append(("launch", "run", more, *where, "--dry-run", "--data-later"))
    with ledger.alone(alive):  # as the process that runs it
        before = traces(ledger.runs)
        for look in looks:
            capsys.readouterr()
            assert program.main(look) == 0, look
            assert traces(ledger.runs) == before, look
            if "--json" in look:
                states = json.loads(capsys.readouterr().out)
    expected = {
        "here/alive": "running",
        "here/dead": "lost",
        "here/never": "lost",
        "slurm/runs": "running",
        "slurm/pends": "queued",
        "slurm/cancelled": "cancelled",
        "slurm/broke": "lost",
        "slurm/vanished": "lost",
        "slurm/blocked": "blocked",
        # Known by the other's comment, and not in the queue any more
        "unnumbered/0": "lost",
        "unnumbered/1": "queued",
    }
    seen = {name: state["name"] for name, state in states.items()}
    assert expected.items() <= seen.items()
    others = [seen[name] for name in seen.keys() - expected.keys()]
    assert sorted(others) == ["done", "failed"]
    assert not stand_in_slurm.called("scancel")


def test_a_look_at_nothing_makes_no_folder(lab, capsys):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    assert lab.launch("status", "nowhere", "--once") == 0
    assert lab.launch("status", "nowhere", "--json") == 0
    assert lab.run(grid, lab.cluster("local"), "nowhere", "--dry-run") == 0
    assert "array 0: 1 jobs" in capsys.readouterr().out
    assert not (lab.root / "nowhere").exists()


def test_whoever_acts_writes_down_what_slurm_forgets(lab, stand_in_slurm):
    """An array's numbers after its launcher's death; who was cancelled. Then Slurm may forget."""
    ledger, _, cluster = fill(lab, stand_in_slurm)
    named = ["slurm/runs", "slurm/pends", "slurm/vanished"]
    assert program.main(["launch", "cancel", *named, "--out", str(ledger.runs)]) == 0
    # What runs goes last; the number of what vanished may be anybody's
    assert stand_in_slurm.called("scancel") == ["7_1 7_0"]
    catch_up(ledger, read_cluster(cluster))  # as `run` and `retry` are told
    records = ledger.records()
    assert [records[f"unnumbered/{i}"].id for i in range(2)] == ["8_0", "8_1"]
    pickles = (ledger.root / "submitit" / "u2").glob("*_submitted.pkl")
    assert sorted(p.name for p in pickles) == ["8_0_submitted.pkl", "8_1_submitted.pkl"]
    stand_in_slurm.queue()
    states = {name: state for name, (state, _) in shown(ledger).items()}
    assert states["slurm/cancelled"] == states["slurm/pends"] == "cancelled"
    assert states["slurm/broke"] == states["unnumbered/0"] == "lost"


@pytest.mark.parametrize(
    ("forgiven", "state", "cause"),
    [(0, "stopped", ""), (1, "lost", "forgotten")],
)
def test_a_job_that_was_submitted_again_has_not_begun(
    tmp_path, stand_in_slurm, forgiven, state, cause
):
    """Its earlier attempts were forgiven: nothing of it is there to be continued."""
    ledger = Ledger(tmp_path / "runs")
    one = job("x/one")
    submit(ledger, one, ids=("7",))
    attempts = [{"start": HOUR_AGO, "end": HOUR_AGO + 1, "how": "failed"}]
    status = {"name": one.name, "state": "queued", "attempts": attempts}
    ledger.write_status(one, {**status, "forgiven": forgiven})
    found = Snapshot(ledger).states[one.name]
    assert (found.name, found.cause) == (state, cause)
