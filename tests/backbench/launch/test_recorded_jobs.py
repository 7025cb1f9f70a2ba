"""Jobs and records as strangers may write them: what is read of them, and what is refused."""

import json

import pytest

from backbench.errors import BadInput
from backbench.launch import records
from backbench.launch.job import Job, check_recorded_command, command_kind
from backbench.launch.records import Ledger, Record, Submission


def job(name="x/y", argv=("linear",), **more):
    return Job(name=name, argv=argv, like="linear", cells=(name,), **more)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (
            "linear a.pth b.pth --datasets d --seed 3 --out x --protocol p",
            "linear --datasets d --protocol p",
        ),
        ("linear a.pth", "linear"),
        (
            "detect --checkpoint a.pth --config-file c --num-gpus 2",
            "detect --config-file c --num-gpus 2",
        ),
        # What a pretraining begins with is its recipe
        ("pretrain simclr seed=3 epochs=5 --out x", "pretrain simclr epochs=5"),
        ("pretrain simclr seeds=3", "pretrain simclr seeds=3"),
    ],
)
def test_a_kind_of_command_has_no_checkpoint_no_seed_and_no_folder(words, kept):
    assert command_kind(words.split()) == tuple(kept.split())


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("--data d", "0 x --out"),
        ("--out {own} --out {own}", "2 x --out"),
        ("--out={own}", "--out={own}"),
        ("--out {own} --out=/tmp/x", "--out=/tmp/x"),
        ("--out {own} OUTPUT_DIR /tmp/x", "OUTPUT_DIR"),
        ("--out {own} -- OUTPUT /tmp/x", "--"),
    ],
)
def test_a_recorded_command_says_once_where_it_writes(tmp_path, words, wrong):
    own = str(tmp_path / "x" / "y")
    argv = ("linear", *words.format(own=own).split())
    with pytest.raises(BadInput) as refused:
        check_recorded_command(job(argv=argv), tmp_path)
    assert str(refused.value) == (
        f"x/y: its recorded command says where it writes by {wrong.format(own=own)[:80]}"
        f"{'...' * (len(wrong.format(own=own)) > 80)}; `backbench launch run` with its grid makes"
        " it anew"
    )


def test_a_recorded_command_writes_into_its_own_folder(tmp_path):
    own = tmp_path / "x" / "y"
    for out in (own, own / ".." / "y"):
        check_recorded_command(job(argv=("linear", "--out", str(out))), tmp_path)
    made = ("import", "--out", str(tmp_path / "x" / "z.safetensors"))
    check_recorded_command(job(argv=made, makes="x/z.safetensors"), tmp_path)
    for out in (own / "z", own.parent, tmp_path / "x" / "z.safetensors"):
        with pytest.raises(BadInput) as refused:
            check_recorded_command(job(argv=("linear", "--out", str(out))), tmp_path)
        assert f"writes to {out}, outside of its own folder below {tmp_path}" in str(
            refused.value
        )


def submission_of(*jobs, ids=()):
    return Submission(
        uid="u1",
        grid="g",
        cluster="c",
        cluster_overrides=(),
        kind="slurm",
        time=1.0,
        jobs=jobs,
        ids=ids,
    )


def written(tmp_path, change):
    """Return what is read of a submission's file after a change of it."""
    ledger = Ledger(tmp_path)
    two_jobs = (job("x/y"), job("x/z", makes="x/z/file"))
    submission = submission_of(*two_jobs, ids=("7_0", "8"))
    ledger.write_submission(submission)
    file = ledger.submission_file(submission)
    data = json.loads(file.read_text())
    file.write_text(json.dumps(change(data) or data))
    return ledger.records()


def test_names_of_folders_may_be_this_long(tmp_path):
    longest = "/".join(["a" * 255] * 7) + "/" + "b" * (2000 - 7 * 256)
    assert len(longest) == 2000
    found = written(tmp_path, lambda data: data["jobs"][0].update(name=longest))
    assert set(found) == {longest, "x/z"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(uid="u2"), "its uid is not its file's name"),
        (lambda d: d.update(grid="g/h"), "'grid' is no grid's name"),
        (lambda d: d.update(ids=["7_0", "8_"]), "'ids' are not Slurm's numbers"),
        (lambda d: d.update(ids=["7_0"]), "'ids' are not one for each job"),
        (lambda d: d.update(cluster="a\nb"), r"'cluster' holds the control character"),
        (lambda d: d["jobs"][1].update(argv=["rm"]), "is no verb of a grid"),
        (lambda d: d["jobs"][1].update(argv=[]), "is no verb of a grid"),
        (lambda d: d["jobs"][1].update(name="/x"), "'/x' is not below RUNS"),
        (lambda d: d["jobs"][1].update(name="a/../x"), "is not below RUNS"),
        (lambda d: d["jobs"][1].update(name="."), "'.' is not below RUNS"),
        (lambda d: d["jobs"][1].update(name=".launch/x"), "is not below RUNS"),
        (lambda d: d["jobs"][1].update(makes="../x"), "'../x' is not below RUNS"),
        (lambda d: d["jobs"][1].update(name="ü" * 128), "is too long for a folder's"),
        (
            lambda d: d["jobs"][0].update(name="/".join(["a" * 250] * 8)),
            "is too long for a folder's name",
        ),
    ],
)
def test_a_submission_that_no_launcher_wrote_is_left_out(
    tmp_path, caplog, change, says
):
    records._warn.cache_clear()
    assert written(tmp_path, change) == {}
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{tmp_path}/.launch/submissions/u1.json: left out: " in said
    assert says in said


def test_a_status_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    ledger = Ledger(tmp_path)
    status = {"name": "x/y", "state": "running", "attempts": []}
    assert ledger.write_status(job(), status)
    assert ledger.status(job()) == status
    blocked = Ledger(tmp_path / "other")
    blocked.root.mkdir(parents=True)
    (blocked.root / "status").touch()
    assert not blocked.write_status(job(), status)
    said = capsys.readouterr().err
    assert said.startswith("x/y: status not written: ")
    assert blocked.status(job()) == {"name": "x/y", "state": "new", "attempts": []}


def test_a_long_reason_is_cut(tmp_path):
    ledger = Ledger(tmp_path)
    status = {"name": "x/y", "state": "failed", "reason": "a\n" * 600, "attempts": []}
    ledger.write_status(job(), status)
    reason = ledger.status(job())["reason"]
    assert reason == r"a\n" * 500 + "..."


def test_a_jobs_last_line_is_the_last_that_says_something(tmp_path):
    ledger = Ledger(tmp_path)
    assert ledger.last_line(job()) is None
    log, other = ledger.log(job()), ledger.log(job(), rank=2)
    assert log != other
    log.parent.mkdir(parents=True)
    log.write_text(
        "$ backbench linear\nfirst\nstep 1\rstep 2\r\n\n$ backbench linear\n"
    )
    assert ledger.last_line(job()) == "step 2"
    other.write_text("x" * 301 + "\n  \n")
    assert ledger.last_line(job(), 2) == "x" * 300
    # Of a long log the last 4 KiB are read
    log.write_text("early\n" + "$ x\n" * 1023 + "abc\n")
    assert ledger.last_line(job()) == "abc"
    log.write_text("early\n" + "$ x\n" * 1024)
    assert ledger.last_line(job()) is None
    log.write_text("early\n" + "$ x\n" * 1022)
    assert ledger.last_line(job()) == "early"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, None),
        ("", None),
        ("why\nsrun: error: x\nslurmstepd: error: y\n", "why"),
        ("srun: error: x\nslurmstepd: error: y\n", "slurmstepd: error: y"),
    ],
)
def test_what_slurms_script_said_last(tmp_path, text, line):
    ledger = Ledger(tmp_path)
    submission = submission_of(job())
    if text is not None:
        file = ledger.submitit(submission) / "7_3_0_log.out"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert ledger.wrapper_line(Record(job(), submission, "7_3")) == line
