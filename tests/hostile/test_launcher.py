"""Grids by strangers, and a folder of runs into which somebody else can write."""

import dataclasses
import json
import socket
import subprocess

import pytest
from support.layouts import trunk_file
from support.strangers import door, refused

from backbench.launch.job import Job
from backbench.launch.records import Ledger, Submission
from backbench.recipes import config

GRID = """
checkpoints: [{file}]
evaluate:
  - {{verb: linear, datasets: [digits], protocol: knn_demo, resources: {{{what}: {value}}}}}
"""


@pytest.fixture(scope="module")
def some_trunk(tmp_path_factory):
    return trunk_file(tmp_path_factory.mktemp("trunk") / "trunk.safetensors")


@pytest.mark.parametrize("what", ["account", "qos", "constraint", "partition"])
@pytest.mark.parametrize("value", ['"x\\ntouch F #"', '"x; touch F"', '"$(touch F)"', '"-x y"'])
def test_resources_are_plain_words(tmp_path, some_trunk, what, value):
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.format(file=some_trunk, what=what, value=value))
    where = ("--data", tmp_path, "--out", tmp_path / "runs", "--cluster", "local", "--dry-run")
    refused(door("launch", "run", grid, *where), what)


def record(runs, **changes):
    """A job that a launcher of this machine left behind; `changes` are a stranger's."""
    out = str(runs / "x" / "knn")
    argv = ("linear", "x.safetensors", "--datasets", "digits", "--data", str(runs), "--out", out)
    job = Job(name="x/knn", argv=argv, like="linear", cells=("x/knn",))
    about = {"uid": "abc123", "grid": "g", "cluster": "", "kind": "local", "time": 1.0}
    base = Submission(**about, cluster_overrides=(), jobs=())
    data = dataclasses.asdict(base)
    data["cluster"] = str(config.configs_dir() / "clusters" / "local.yaml")
    data["jobs"] = [dataclasses.asdict(job) | changes.pop("job", {})]
    data |= changes
    folder = runs / ".launch" / "submissions"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "abc123.json").write_text(json.dumps(data))
    status = {"name": job.name, "state": "failed", "attempts": []}
    (runs / ".launch" / "status").mkdir(exist_ok=True)
    (runs / ".launch" / "status" / f"{job.key}.json").write_text(json.dumps(status))
    return runs


@pytest.mark.parametrize(
    "override", ["command=touch {0}", "setup=[touch {0}]", "env.PATH={0}", "sbatch.wrap=touch {0}"]
)
def test_a_stored_record_is_no_command(tmp_path, override):
    runs = record(tmp_path / "runs", cluster_overrides=[override.format(tmp_path / "called")])
    said = door("launch", "retry", "--out", runs)
    assert not (tmp_path / "called").exists()
    refused(said, "never becomes a command")


def test_a_stored_record_names_no_cluster(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(f"base: []\nkind: local\ncommand: touch {tmp_path / 'called'}\n")
    runs = record(tmp_path / "runs", cluster=str(own))
    said = door("launch", "retry", "--out", runs)
    assert not (tmp_path / "called").exists()
    refused(said, "--cluster FILE")


IMPORT = ["import", "x.pth"]
DETECT = ["detect", "--config-file", "demo_faster_rcnn_R_18_FPN"]


@pytest.mark.parametrize(("argv", "said"), [
    ([*IMPORT, "--out", "{0}/elsewhere"], "outside"),
    ([*IMPORT, "--out", "{0}/runs/y/knn"], "outside of its own folder"),
    ([*IMPORT, "--out", "{0}/runs/.launch/submitit"], "outside of its own folder"),
    ([*IMPORT, "--out", "{0}/runs/x/knn", "--out", "{0}/elsewhere"], "2 x --out"),
    ([*IMPORT, "--out", "{0}/runs/x/knn", "--out={0}/elsewhere"], "--out=/"),
    ([*DETECT, "--out", "{0}/runs/x/knn", "OUTPUT_DIR", "{0}/elsewhere"], "OUTPUT_DIR"),
    (DETECT, "0 x --out"),
])  # fmt: skip
def test_a_stored_command_writes_to_its_own_folder(tmp_path, argv, said):
    argv = [word.format(tmp_path) for word in argv]
    runs = record(tmp_path / "runs", job={"argv": argv})
    refused(door("launch", "retry", "--out", runs), said, "`backbench launch run`")
    assert not (tmp_path / "elsewhere").exists()


def test_the_demos_jobs_are_continued_by_the_demo(tmp_path):
    """Their commands are chains of several, which are never taken from a record."""
    runs = record(tmp_path / "runs", job={"argv": [*IMPORT, "--out", "a", "+", *IMPORT]})
    (runs / "demo.json").write_text('{"size": "tiny"}')
    said = door("launch", "retry", "--out", runs)
    refused(said, f"`backbench demo --out {runs}`, with its --size, continues them")


@pytest.mark.parametrize(("host", "says"), [
    (socket.gethostname(), "does not run it"),
    ("elsewhere", "runs on elsewhere: cancel it there"),
])  # fmt: skip
def test_a_stored_process_is_not_ended_by_its_number(tmp_path, host, says):
    """`launch cancel` ends the process that runs the job, and no other that a status names."""
    runs = record(tmp_path / "runs")
    ledger = Ledger(runs)
    job = ledger.records()["x/knn"].job
    attempt = {"start": 1.0, "end": None, "host": host}
    with subprocess.Popen(["sleep", "60"]) as bystander, ledger.alone(job):
        attempt["pid"] = bystander.pid
        ledger.write_status(job, {"name": job.name, "state": "running", "attempts": [attempt]})
        said = door("launch", "cancel", "--out", runs)
        assert said.status == 0 and says in said.err, said.err
        assert "0 jobs cancelled, 1 marked only" in said.err
        assert bystander.poll() is None
        bystander.kill()


DIGITS = "1" + "0" * 4000


@pytest.mark.parametrize(("key", "value"), [
    *(("time", value) for value in (DIGITS, "null", "[]")),
    *(("eta_s", value) for value in (DIGITS, "[]", "NaN")),
    ("done", DIGITS),
    ("total", DIGITS),
])  # fmt: skip
def test_the_progress_of_a_stranger(tmp_path, some_trunk, key, value):
    """Of a job that seems to run; a grid asks for its cost."""
    runs = record(tmp_path / "runs", job={"argv": ["pretrain", "x", "--out", "y"]})
    ledger = Ledger(runs)
    job = ledger.records()["x/knn"].job
    attempt = {"start": 1.0, "end": None, "host": "elsewhere", "pid": 5}
    note = {"what": "train", "done": 1, "total": 4, "unit": "step", "eta_s": 1.0, "time": 1.0}
    text = json.dumps(note | {key: "?"}).replace('"?"', value)
    (runs / job.name).mkdir(parents=True)
    (runs / job.name / "progress.json").write_text(text)
    with ledger.alone(job):
        ledger.write_status(job, {"name": job.name, "state": "running", "attempts": [attempt]})
        said = door("launch", "status", "--once", "--out", runs)
        assert said.status == 0 and "1 running" in said.out, said.err
        grid = tmp_path / "grid.yaml"
        grid.write_text(GRID.format(file=some_trunk, what="cpus", value=1))
        where = ("--data", tmp_path, "--out", runs, "--cluster", "local", "--dry-run")
        said = door("launch", "run", grid, *where)
    assert said.status == 0 and "1 jobs" in said.out, said.err


BAD = {
    "verb": {"job": {"argv": ["sh", "-c", "touch x"]}},
    "no-argv": {"job": {"argv": []}},
    "name-outside": {"job": {"name": "../../x"}},
    "makes-outside": {"job": {"makes": "/etc/passwd"}},
    "uid": {"uid": "../../x"},
    "ids": {"ids": ["--all"]},
    "ids-short": {"ids": ["1_0", "1_1"]},
    "jobs-list": {"jobs": [5]},
    "kind": {"kind": "cloud"},
    "newline": {"job": {"like": "a\nb"}},
    "time-digits": {"time": 10**4000},
    "units-digits": {"job": {"units": 10**400}},
    "name-long": {"job": {"name": "x/" + "y" * 300}},
    "name-records": {"job": {"name": ".launch/status"}},
    "grid-words": {"grid": "g --output=/etc/passwd"},
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_named_and_left_out(tmp_path, case):
    runs = record(tmp_path / "runs", **BAD[case])
    good = record(tmp_path / "other") / ".launch" / "submissions" / "abc123.json"
    text = good.read_text().replace("abc123", "good1").replace("x/knn", "y/knn")
    (runs / ".launch" / "submissions" / "good1.json").write_text(text)
    said = door("launch", "status", "--once", "--out", runs)
    assert said.status == 0, said.err
    assert "abc123.json: left out" in said.err
    assert set(Ledger(runs).records()) == {"y/knn"}


@pytest.mark.parametrize("text", ["[", "[]", "5", "[" * 100000, "\x00"])
def test_a_submission_that_is_none(tmp_path, text):
    runs = record(tmp_path / "runs")
    (runs / ".launch" / "submissions" / "zzz.json").write_text(text)
    said = door("launch", "status", "--once", "--out", runs)
    assert said.status == 0 and "1 failed" in said.out, said.err
    assert "zzz.json: left out" in said.err


@pytest.mark.parametrize("status", [
    *("[", "[]", "5", "[" * 100000, "\x00"),
    {"name": "x/knn", "state": "odd", "attempts": []},
    {"name": "x/knn", "state": "running", "attempts": [{"start": "x"}]},
    {"name": "x/knn", "state": "running", "attempts": [{"start": 1, "pid": -1}]},
    {"state": "done"},
    {"name": "x/knn", "state": "running", "attempts": [{"start": 10**4000}]},
    {"name": "x/knn", "state": "running", "attempts": [{"start": 1, "end": 10**400}]},
    {"name": "x/knn", "state": "running", "attempts": [{"start": 1, "pid": 10**30}]},
])  # fmt: skip
def test_a_status_that_no_attempt_wrote(tmp_path, status):
    runs = record(tmp_path / "runs")
    for file in (runs / ".launch" / "status").glob("*.json"):
        file.write_text(status if isinstance(status, str) else json.dumps(status))
    said = door("launch", "status", "--once", "--out", runs)
    assert said.status == 0, said.err
    assert "left out" in said.err
