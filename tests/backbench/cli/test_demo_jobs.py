"""The demo's plan, its cheapest step as a job, and what it does where its jobs are stand-ins."""

import logging
import re
import sys
from itertools import groupby
from types import SimpleNamespace

import pytest
from support.records import a_result

from backbench.cli import demo, program
from backbench.launch.records import Ledger
from backbench.records import store
from backbench.requests import parsing
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.run_progress import Progress


def test_a_step_of_the_demo_runs_as_a_job(tmp_path, monkeypatch, capsys):
    """The trunk that nobody trains is there in seconds. Without the others nothing is calibrated, which
    is what the demo then says."""
    monkeypatch.setattr(demo, "CHAINS", {"pretraining-b": {"pretrain/random": 1}})
    out = tmp_path / "demo"
    assert program.main(["demo", "--size", "tiny", "--out", str(out)]) == 1
    assert "the scores were not calibrated" in capsys.readouterr().err
    assert (out / "pretrain" / "random" / CHECKPOINT_FILE).exists()
    (status,) = Ledger(out).statuses().values()
    assert [attempt["how"] for attempt in status["attempts"]] == ["done"]


# The plan


def test_every_step_is_in_one_chain_behind_what_it_needs(tmp_path):
    steps = demo.demo_steps(tmp_path, "tiny")
    jobs = demo.chained(steps)
    assert sorted(cell for job in jobs for cell in job.cells) == sorted(steps)
    for job in jobs:
        # A job's command is those of its steps, one after another
        words = [list(steps[name].argv) for name in job.cells]
        together = [
            list(group) for is_and, group in groupby(job.argv, "+".__eq__) if not is_and
        ]
        assert together == words
        of_training = job.name.startswith("pretraining")
        assert job.needs == (() if of_training else ("pretraining-a", "pretraining-b"))
    by_name = {job.name: job for job in jobs}
    assert by_name["pretraining-a"].makes == "pretrain/moco_m/backbone.safetensors"
    assert by_name["evaluation-b"].makes == "detection/lorac/keypoint/results.jsonl"
    # Detection makes torch deterministic, which a probe by hand is not: it comes last
    for job in jobs:
        detects = [name.startswith("detection") for name in job.cells]
        assert detects == sorted(detects)


def test_a_chain_that_is_done_is_waited_for_by_nobody(tmp_path):
    steps = demo.demo_steps(tmp_path, "tiny")
    left = {name: job for name, job in steps.items() if name.startswith("linear")}
    (job,) = demo.chained(left)
    assert (job.name, job.cells, job.needs) == ("evaluation-a", ("linear",), ())


@pytest.mark.parametrize(("size", "prefix"), [("full", "demo"), ("tiny", "tiny")])
def test_the_steps_are_of_their_size(tmp_path, size, prefix):
    for name, job in demo.demo_steps(tmp_path, size).items():
        command = parsing.parse(list(job.argv))
        assert command.out == tmp_path / name
        assert command.data == tmp_path / "data"
        if job.verb == "pretrain":
            assert command.recipe == f"{prefix}_{name.partition('/')[2]}"
        elif job.verb == "detect":
            assert command.config_file.startswith(f"{prefix}_")
            assert command.resume


def test_a_chain_ends_with_the_first_command_that_fails(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["untouched"])
    ran = []

    def run_verb(words):
        ran.append((words, sys.argv))
        return 3 if words[0] == "b" else 0

    assert demo.run_chain(["a", "1", "+", "b", "+", "c"], run_verb) == 3
    # Each command's records keep its own words
    assert ran == [
        (["a", "1"], ["backbench", "a", "1"]),
        (["b"], ["backbench", "b"]),
    ]
    assert capsys.readouterr().err == "$ backbench a 1\n$ backbench b\n"
    assert demo.run_chain(["a", "+", "c"], run_verb) == 0


# The folder


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"demo.json": '{"size": "full"}'}, "holds a demo of size 'full', not 'tiny'"),
        ({"demo.json": "{"}, "demo.json: damaged; choose another --out"),
        ({"demo.json": "[]"}, "demo.json: damaged"),
        ({"notes.txt": ""}, "is not empty and holds no demo; choose another --out"),
    ],
)
def test_a_folder_that_is_no_demo_of_this_size_is_left_alone(
    tmp_path, capsys, files, says
):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = ["demo", "--size", "tiny", "--out", str(tmp_path)]
    assert program.main(words) == 2
    assert says in capsys.readouterr().err
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == files


# The run, with stand-ins for what takes long


@pytest.fixture
def stand_ins(tmp_path, monkeypatch, caplog):
    """The pool makes what its jobs deliver, and the other commands are kept."""
    caplog.set_level(logging.INFO, "backbench")
    ours = SimpleNamespace(out=tmp_path / "demo", jobs=[], commands=[], fails=None)
    ours.status = 0

    def run_here(ledger, cluster, grid, find, *, watch):
        ours.jobs, more = find()
        assert not more
        if ours.status:
            return ours.status
        steps = demo.demo_steps(ours.out, "tiny")
        for name in [name for job in ours.jobs for name in job.cells]:
            run = ledger.runs / name
            run.mkdir(parents=True, exist_ok=True)
            if steps[name].makes:
                (ledger.runs / steps[name].makes).touch()
            else:
                store.owe(run, 1)
                store.append(run, [a_result(checkpoint="a" * 64, name=name)])
        return 0

    def run(command, **_):
        ours.commands.append([str(word) for word in command])
        return SimpleNamespace(returncode=int(ours.fails in command))

    monkeypatch.setattr(demo, "run_here", run_here)
    monkeypatch.setattr(demo.embedded, "build", lambda *_: None)
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run, DEVNULL=-3))
    return ours


def demonstrate(ours):
    return program.main(["demo", "--size", "tiny", "--out", str(ours.out)])


def test_the_demo_ends_with_its_page(stand_ins, capsys, caplog):
    assert demonstrate(stand_ins) == 0
    assert len(stand_ins.jobs) == 4
    calibrate, leaderboard = stand_ins.commands
    assert calibrate[3:] == ["calibrate", "-q", str(stand_ins.out / "linear")]
    assert leaderboard[3:6] == ["leaderboard", "-q", str(stand_ins.out)]
    named = dict(zip(leaderboard[6::2], leaderboard[7::2], strict=True))
    assert named == {
        "--html": str(stand_ins.out / "leaderboard.html"),
        "--csv": str(stand_ins.out / "leaderboard.csv"),
        "--tidy": str(stand_ins.out / "results.csv"),
    }
    said = capsys.readouterr().out
    assert re.search(r"^took \d.* this time; jobs: pretraining-a 0 s, ", said)
    assert f"page:  {stand_ins.out / 'leaderboard.html'}\n" in said
    assert "in 4 jobs, 2 at a time" in caplog.text
    # The same command again finds everything
    assert demonstrate(stand_ins) == 0
    assert stand_ins.jobs == []
    assert "19 finished steps recognised and skipped" in caplog.text


def test_a_stop_ends_the_demo_before_its_page(stand_ins):
    stand_ins.status = 75
    assert demonstrate(stand_ins) == 75
    assert stand_ins.commands == []


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("calibrate", "the scores were not calibrated; the same command continues"),
        ("leaderboard", "the leaderboard was not written; the same command continues"),
    ],
)
def test_what_was_not_written_is_said(stand_ins, capsys, fails, says):
    stand_ins.fails = fails
    assert demonstrate(stand_ins) == 1
    assert says in capsys.readouterr().err


def test_a_job_that_failed_is_named_with_its_reason_and_log(stand_ins, capsys):
    stand_ins.status = 1
    ledger = Ledger(stand_ins.out)
    job = demo.chained(demo.demo_steps(stand_ins.out, "tiny"))[2]
    status = {"name": job.name, "state": "failed", "reason": "no memory"}
    stand_ins.out.mkdir()
    (stand_ins.out / "demo.json").write_text('{"size": "tiny"}')
    ledger.write_status(job, status | {"attempts": []})
    assert demonstrate(stand_ins) == 1
    said = capsys.readouterr().err
    assert f"{job.name} failed: no memory [all of it: {ledger.log(job)}]" in said


def test_progress_tells_where_the_steps_are(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "backbench")
    now = [1000.0]
    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    ledger = Ledger(tmp_path)
    steps = demo.demo_steps(tmp_path, "tiny")
    chosen = ("pretrain/lorac", "pretrain/moco_m", "linear")
    missing = {name: steps[name] for name in chosen}
    say = demo._Progress(ledger, missing, total=20)
    pool = SimpleNamespace(running={"evaluation-a": None})
    now[0] += 14.0
    say(pool)
    assert caplog.text == ""  # every 15 s
    now[0] += 6.0
    say(pool)
    assert "17/20 steps; running: evaluation-a" in caplog.text
    assert "ETA" not in caplog.text  # nothing is made yet
    # One is done, and half of another: 49 and 19 of 103 parts, in 68 s
    (tmp_path / "pretrain" / "lorac").mkdir(parents=True)
    (tmp_path / steps["pretrain/lorac"].makes).touch()
    Progress(tmp_path / "pretrain" / "moco_m", 40, "walking", done=19).advance()
    now[0] = 1068.0
    say(pool)
    last = caplog.messages[-1]
    assert "1:08  ETA   35.0 s" in last or "ETA   0:35" in last
    assert "18/20 steps; running: pretrain/moco_m 20/40 steps" in last
    say(pool)
    assert len(caplog.messages) == 2
