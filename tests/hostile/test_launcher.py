"""Grids by strangers, and a folder of runs into which somebody else can write."""

import dataclasses
import json

import pytest
from support.strangers import door, refused

from backbench.launch.job import Job
from backbench.launch.records import Ledger, Submission

GRID = """
checkpoints: [{file}]
evaluate:
  - {{verb: linear, datasets: [digits], protocol: knn_demo, resources: {{{what}: {value}}}}}
"""


@pytest.mark.parametrize("what", ["account", "qos", "constraint", "partition"])
@pytest.mark.parametrize("value", ['"x\\ntouch F #"', '"x; touch F"', '"$(touch F)"', '"-x y"'])
def test_resources_are_plain_words(tmp_path, trunk, what, value):
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.format(file=trunk, what=what, value=value))
    where = ("--data", tmp_path, "--out", tmp_path / "runs", "--cluster", "local", "--dry-run")
    refused(door("launch", "run", grid, *where), what)


def record(runs, **changes):
    """A job that a launcher of this machine left behind; `changes` are a stranger's."""
    out = str(runs / "x" / "knn")
    argv = ("linear", "x.safetensors", "--datasets", "digits", "--data", str(runs), "--out", out)
    job = Job(name="x/knn", argv=argv, like="linear", cells=("x/knn",))
    base = Submission(
        uid="abc123", grid="g", cluster="", cluster_overrides=(), kind="local", time=1.0, jobs=()
    )
    from backbench import config

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
    "override",
    ["command=touch {0}", "setup=[touch {0}]", "env.PATH={0}", "sbatch.wrap=touch {0}"],
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


def test_a_stored_command_writes_below_its_runs(tmp_path):
    argv = ["import", "x.pth", "--out", str(tmp_path / "elsewhere")]
    runs = record(tmp_path / "runs", job={"argv": argv})
    refused(door("launch", "retry", "--out", runs), "outside")


BAD = {
    "verb": {"job": {"argv": ["sh", "-c", "touch x"]}},
    "no-argv": {"job": {"argv": []}},
    "argv-text": {"job": {"argv": "linear x"}},
    "name-outside": {"job": {"name": "../../x"}},
    "name-number": {"job": {"name": 5}},
    "makes-outside": {"job": {"makes": "/etc/passwd"}},
    "expects-text": {"job": {"expects": "many"}},
    "uid": {"uid": "../../x"},
    "ids": {"ids": ["--all"]},
    "ids-short": {"ids": ["1_0", "1_1"]},
    "jobs-number": {"jobs": 5},
    "jobs-list": {"jobs": [5]},
    "time-text": {"time": "now"},
    "kind": {"kind": "cloud"},
    "overrides-number": {"cluster_overrides": [5]},
    "newline": {"job": {"like": "a\nb"}},
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
@pytest.mark.parametrize("folder", ["submissions", "status"])
def test_records_that_are_none(tmp_path, folder, text):
    runs = record(tmp_path / "runs")
    (runs / ".launch" / folder / "zzz.json").write_text(text)
    said = door("launch", "status", "--once", "--out", runs)
    assert said.status == 0, said.err
    assert "1 failed" in said.out


@pytest.mark.parametrize(
    "status",
    [
        {"name": "x/knn", "state": "odd", "attempts": []},
        {"name": "x/knn", "state": "running", "attempts": 5},
        {"name": "x/knn", "state": "running", "attempts": [{"start": "x"}]},
        {"name": "x/knn", "state": "running", "attempts": [{"start": 1, "pid": -1}]},
        {"name": ["x"], "state": "done", "attempts": []},
        {"state": "done"},
    ],
)
def test_a_status_that_no_attempt_wrote(tmp_path, status):
    runs = record(tmp_path / "runs")
    for file in (runs / ".launch" / "status").glob("*.json"):
        file.write_text(json.dumps(status))
    said = door("launch", "status", "--once", "--out", runs)
    assert said.status == 0, said.err
    assert "left out" in said.err
