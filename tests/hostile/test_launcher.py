"""Grids by strangers, and a folder of runs into which somebody else can write."""

import json
import re
import socket
import subprocess

import pytest
from support.layouts import trunk_file
from support.strangers import door, record, refused

from backbench.launch.records import Ledger

GRID = """
checkpoints: [{file}]
evaluate:
  - {{verb: linear, datasets: [digits], protocol: knn_demo, resources: {{{what}: {value}}}}}
"""


@pytest.fixture(scope="module")
def some_trunk(tmp_path_factory):
    return trunk_file(tmp_path_factory.mktemp("trunk") / "trunk.safetensors")


@pytest.mark.parametrize("what", ["account", "qos", "constraint", "partition"])
@pytest.mark.parametrize(
    "value", ['"x\\ntouch F #"', '"x; touch F"', '"$(touch F)"', '"-x y"']
)
def test_resources_are_plain_words(tmp_path, some_trunk, what, value):
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.format(file=some_trunk, what=what, value=value))
    where = ("--data", tmp_path, "--out", tmp_path / "runs", "--cluster", "local")
    refused(door("launch", "run", grid, *where, "--dry-run"), what)


@pytest.mark.parametrize(
    "override",
    [
        None,
        "command=touch {0}",
        "setup=[touch {0}]",
        "env.PATH={0}",
        "sbatch.wrap=touch {0}",
    ],
)
def test_a_stored_record_is_no_command_and_names_no_cluster(tmp_path, override):
    called = tmp_path / "called"
    own = tmp_path / "own.yaml"
    own.write_text(f"kind: local\ncommand: touch {called}\n")
    if override is None:
        changes = {"cluster": str(own)}
        instead = "name it, --cluster FILE"
    else:
        changes = {"cluster_overrides": [override.format(called)]}
        instead = "say it again, cluster."
    said = door("launch", "retry", "--out", record(tmp_path / "runs", **changes))
    assert not called.exists()
    refused(said, "never becomes a command", instead)


IMPORT = ["import", "x.pth"]
DETECT = ["detect", "--config-file", "demo_faster_rcnn_R_18_FPN"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*IMPORT, "--out", "{0}/elsewhere"], "outside"),
        ([*IMPORT, "--out", "{0}/runs/y/knn"], "outside of its own folder"),
        ([*IMPORT, "--out", "{0}/runs/.launch/submitit"], "outside of its own folder"),
        ([*IMPORT, "--out", "{0}/runs/x/knn", "--out", "{0}/elsewhere"], "2 x --out"),
        ([*IMPORT, "--out", "{0}/runs/x/knn", "--out={0}/elsewhere"], "--out=/"),
        (
            [*DETECT, "--out", "{0}/runs/x/knn", "OUTPUT_DIR", "{0}/elsewhere"],
            "OUTPUT_DIR",
        ),
        (DETECT, "0 x --out"),
    ],
)
def test_a_stored_command_writes_to_its_own_folder(tmp_path, argv, said):
    argv = [word.format(tmp_path) for word in argv]
    runs = record(tmp_path / "runs", job={"argv": argv})
    refused(door("launch", "retry", "--out", runs), said, "`backbench launch run`")
    assert not (tmp_path / "elsewhere").exists()


def test_the_demos_jobs_are_continued_by_the_demo(tmp_path):
    """Their commands are chains of several, which are never taken from a record."""
    runs = record(
        tmp_path / "runs", job={"argv": [*IMPORT, "--out", "a", "+", *IMPORT]}
    )
    (runs / "demo.json").write_text('{"size": "tiny"}')
    said = door("launch", "retry", "--out", runs)
    refused(said, f"`backbench demo --out {runs}`, with its --size, continues them")


@pytest.mark.parametrize("text", ["{}", "[]", "x", '{"size": "\\u001b[2J"}'])
def test_a_demos_folder_that_is_none(tmp_path, text):
    (tmp_path / "demo.json").write_text(text)
    said = door("demo", "--out", tmp_path)
    refused(said, "choose another --out")
    assert said.last.isprintable()


@pytest.mark.parametrize("probe", ["x\x1b]0;owned\x07", "{0}/knn.yaml"])
def test_a_checkpoints_own_probe_is_one_of_ours(tmp_path, tiny_root, probe):
    (tmp_path / "knn.yaml").write_text("base: knn_demo\n")
    recipe = {
        "probe": {"digits": probe.format(tmp_path)},
        "data": {"dataset": "digits"},
    }
    file = trunk_file(
        tmp_path / "x.safetensors", provenance={"name": "x", "recipe": recipe}
    )
    grid = tmp_path / "grid.yaml"
    entry = "{verb: linear, datasets: [own], protocol: own}"
    grid.write_text(f"{{checkpoints: [{file}], evaluate: [{entry}]}}")
    linear = ("linear", file, "--datasets", "digits", "--protocol", "own")
    for command in (linear, ("launch", "run", grid)):
        said = door(*command, "--data", tiny_root, "--out", tmp_path / "runs")
        refused(said, "is no name under configs/transfer", "--protocol FILE")
        assert said.last.isprintable()


def write_running(ledger, job, *, host, pid):
    """Let the job's status say that it runs there."""
    attempt = {"start": 1.0, "end": None, "host": host, "pid": pid}
    status = {"name": job.name, "state": "running", "attempts": [attempt]}
    ledger.write_status(job, status)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        (socket.gethostname(), "does not run it"),
        ("elsewhere", "runs on elsewhere: cancel it there"),
    ],
)
def test_a_stored_process_is_not_ended_by_its_number(tmp_path, host, says):
    """`launch cancel` ends the process that runs the job, and no other that a status names."""
    runs = record(tmp_path / "runs")
    ledger = Ledger(runs)
    job = ledger.records()["x/knn"].job
    with subprocess.Popen(["sleep", "60"]) as bystander, ledger.alone(job):
        write_running(ledger, job, host=host, pid=bystander.pid)
        said = door("launch", "cancel", "--out", runs)
        assert said.status == 0, said.err
        assert says in said.err
        assert "0 jobs cancelled, 1 marked only" in said.err
        assert bystander.poll() is None
        bystander.kill()


DIGITS = "1" + "0" * 4000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("time", DIGITS),
        ("time", "null"),
        ("time", "[]"),
        ("eta_s", DIGITS),
        ("eta_s", "[]"),
        ("eta_s", "NaN"),
        ("done", DIGITS),
        ("total", DIGITS),
    ],
)
def test_the_progress_of_a_stranger(tmp_path, some_trunk, key, value):
    """Of a job that seems to run; `status` shows it, and a grid is planned beside it."""
    runs = record(tmp_path / "runs", job={"argv": ["pretrain", "x", "--out", "y"]})
    ledger = Ledger(runs)
    job = ledger.records()["x/knn"].job
    note = {
        "what": "train",
        "done": 1,
        "total": 4,
        "unit": "step",
        "eta_s": 1.0,
        "time": 1.0,
    }
    text = json.dumps(note | {key: "?"}).replace('"?"', value)
    (runs / job.name).mkdir(parents=True)
    (runs / job.name / "progress.json").write_text(text)
    with ledger.alone(job):
        write_running(ledger, job, host="elsewhere", pid=5)
        said = door("launch", "status", "--once", "--out", runs)
        assert said.status == 0, said.err
        assert "1 running" in said.out
        grid = tmp_path / "grid.yaml"
        grid.write_text(GRID.format(file=some_trunk, what="cpus", value=1))
        where = ("--data", tmp_path, "--out", runs, "--cluster", "local", "--dry-run")
        said = door("launch", "run", grid, *where, "--data-later")
    assert said.status == 0, said.err
    assert "1 jobs" in said.out


# Files that are no JSON object
TORN = ("[", "[]", "5", "[" * 100000, "\x00")
# What a stranger may change in a submission, in a status, and in the note of an attempt
SUBMISSIONS = (
    {"job": {"argv": ["sh", "-c", "touch x"]}},
    {"job": {"argv": []}},
    {"job": {"name": "../../x"}},
    {"job": {"name": "x/" + "y" * 300}},
    {"job": {"name": ".launch/status"}},
    {"job": {"makes": "/etc/passwd"}},
    {"job": {"like": "a\nb"}},
    {"uid": "../../x"},
    {"ids": ["--all"]},
    {"ids": ["1_0", "1_1"]},
    {"jobs": [5]},
    {"kind": "cloud"},
    {"time": 10**4000},
    {"time": 1e13},
    {"grid": "g --output=/etc/passwd"},
)
STATUSES = ('{"state": "done"}', {"state": "odd"})
NOTES = (
    {"start": "x"},
    {"start": 10**4000},
    {"start": -1e13},
    {"end": 10**400},
    {"end": 1e13},
    # A process of anybody's, or of nobody's
    {"pid": 1},
    {"pid": -1},
    {"pid": 10**30},
)
BAD_RECORDS = [
    *(("submissions", wrong) for wrong in (*TORN, *SUBMISSIONS)),
    *(("status", wrong) for wrong in (*TORN, *STATUSES)),
    *(("status", {"attempts": [{"start": 1, **note}]}) for note in NOTES),
]


@pytest.mark.parametrize(("folder", "wrong"), BAD_RECORDS)
def test_a_bad_record_is_named_and_left_out(tmp_path, folder, wrong):
    # 1. A bad record: a text in place of the whole file, or a changed one
    if isinstance(wrong, str):
        runs = record(tmp_path / "runs")
        (file,) = (runs / ".launch" / folder).iterdir()
        file.write_text(wrong)
    elif folder == "status":
        runs = record(tmp_path / "runs", status=wrong)
    else:
        runs = record(tmp_path / "runs", **wrong)
    # 2. A good one beside it
    good = record(tmp_path / "good") / ".launch" / "submissions" / "abc123.json"
    text = good.read_text().replace("abc123", "good1").replace("x/knn", "y/knn")
    (runs / ".launch" / "submissions" / "good1.json").write_text(text)
    said = door("launch", "status", "--once", "--out", runs)
    assert said.status == 0, said.err
    assert re.search(rf"/{folder}/\w+\.json: left out", said.err), said.err
    assert "y/knn" in Ledger(runs).records()
