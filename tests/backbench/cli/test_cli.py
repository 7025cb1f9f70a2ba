"""The command line answers fast, in one line, with promised statuses; `--json` is a document."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
import torch
from support import boards
from support.foreign_fixtures import known_resnet
from support.layouts import trunk_file

from backbench.__main__ import wait_without_spinning
from backbench.cli import program
from backbench.errors import BadInput
from backbench.requests import parsing


def backbench(*arguments, **kwargs):
    command = [sys.executable, "-m", "backbench", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, **kwargs
    )


HELP = """
import sys, contextlib, io
from backbench.cli import program
from backbench.requests.every import REQUESTS
for verb in ([], *(request.verb.split() for request in REQUESTS)):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        program.main([*verb, '--help'])
    assert out.getvalue().startswith(' '.join(['usage: backbench', *verb])) and '%%' not in out.getvalue()
heavy = {'torch', 'torchvision', 'numpy', 'pydantic', 'submitit', 'rich', 'matplotlib', 'yaml'}
print(sorted(heavy & set(sys.modules)))
"""


def test_help_imports_nothing_heavy():
    """Imports make --help slow, so they are pinned; benchmarks/commands.py measures the time."""
    done = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


QUICK = """
import sys
from backbench.cli import program
trunk, tiny_root, out, *theirs = sys.argv[1:]
assert program.main(['inspect', trunk]) == 0
data = ['--datasets', 'digits', '--data', tiny_root, '--workers', '0']
assert program.main(['linear', trunk, '--protocol', 'knn_demo', *data, '--out', out]) == 0
for file in theirs:
    assert program.main(['import', file, '--out', file + '.safetensors']) == 0
print(sorted({'torchvision', 'timm', 'torch._dynamo', 'sklearn'} & set(sys.modules)))
"""


def test_a_resnets_verbs_start_without_torchvision_and_torchs_compiler(
    tmp_path, tiny_root, python
):
    """Each takes as long to import as torch itself."""
    file = trunk_file(tmp_path / "r18.safetensors", 0)
    # Files of others, with a projector and with a classifier
    state = known_resnet("resnet18").state_dict()
    torch.save(state, tmp_path / "fc.pth")
    moco = {}
    for key, tensor in state.items():
        if key.startswith("fc."):
            moco[key.replace("fc.", "module.encoder_q.fc.0.")] = tensor
            moco[key.replace("fc.", "module.encoder_q.fc.2.")] = tensor
        else:
            moco[f"module.encoder_q.{key}"] = tensor
    torch.save({"state_dict": moco}, tmp_path / "moco.pth")
    theirs = [tmp_path / "fc.pth", tmp_path / "moco.pth"]
    status, out, err = python.run(QUICK, file, tiny_root, tmp_path / "out", *theirs)
    assert status == 0, err
    assert "its classifier of 1000 classes comes along (fc.weight, fc.bias" in out
    assert "beside the trunk encoder_q.fc.0.weight" in out
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "VERB"),
        (["lienar"], "lienar"),
        (["pretrain", "demo_lorac"], "--out"),
        (
            [
                "pretrain",
                "demo_lorac",
                "seed=1",
                "--data",
                ".",
                "--out",
                "x",
                "epohcs=1",
            ],
            "did you mean 'epochs'",
        ),
        (
            ["pretrain", "demo_lorac", "--data", ".", "--out", "x", "--epochs=1"],
            "unrecognized arguments: --epochs=1",
        ),
        (
            [
                "semisup",
                "x",
                "--percent",
                "7",
                "--lists",
                ".",
                "--data",
                ".",
                "--out",
                ".",
            ],
            "7",
        ),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments, words):
    done = backbench(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("word", ["-v", "-q", "--debug"])
def test_how_much_is_said_stands_before_the_verb_or_after_it(word):
    before = parsing.invocation([word, "doctor"])
    assert before == parsing.invocation(["doctor", word])
    assert before != parsing.invocation(["doctor"])


def test_debug_before_the_verb_shows_the_traceback(tmp_path, capsys):
    words = ["inspect", str(tmp_path / "none.pth")]
    assert program.main(words) == 2
    assert "Traceback" not in capsys.readouterr().err
    # Python prints this error with its traceback
    with pytest.raises(BadInput, match="no such file"):
        program.main(["--debug", *words])


def test_the_version_is_printed():
    said = backbench("--version").stdout
    assert re.match(r"backbench 0\.\d+\.\d+( \([0-9a-f]{40}(\+changes)?\))?\n$", said)


@pytest.mark.parametrize("words", [["data", "list"], ["paper"], ["--version"]])
def test_a_reader_that_has_seen_enough_is_no_fault(words):
    command = [sys.executable, "-u", "-m", "backbench", *words]
    read, write = os.pipe()
    os.close(read)  # as `| head` is gone
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.returncode in (0, 141) and done.stderr == ""


def document(capfd, *words, status=0):
    assert program.main([str(word) for word in words]) == status
    return json.loads(capfd.readouterr().out)


@pytest.fixture
def runs(tmp_path):
    boards.synthetic(tmp_path / "runs", ["one", "two"], boards.DEMO[:3], gap=30)
    return tmp_path / "runs"


def test_a_probe_prints_its_results(tiny_root, trunk, tmp_path, capfd):
    where = ["--data", tiny_root, "--out", tmp_path / "run", "--json"]
    words = ["linear", trunk, "--datasets", "digits", "--protocol", "knn_demo", *where]
    rows = document(capfd, *words)
    assert {row["metric"] for row in rows} == {"top1_k5", "top1_k20"}
    written = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").open()]
    assert [row["value"] for row in rows] == [row["value"] for row in written]
    assert rows[0].keys() == written[0].keys()
    assert document(capfd, *words) == rows, "a finished run has the same document"


def test_analysis_prints_its_results(tiny_root, trunk, tmp_path, capfd, monkeypatch):
    # Its figures take three seconds
    monkeypatch.setattr("backbench.transfer.analysis.pictures.draw", lambda *_: [])
    where = ["--data", tiny_root, "--out", tmp_path / "run", "--json"]
    words = [
        "analyze",
        trunk,
        "--dataset",
        "digits",
        "--recipe",
        "analyze_tiny",
        *where,
    ]
    assert {"rankme", "nuclear_norm"} <= {
        row["metric"] for row in document(capfd, *words)
    }


def test_the_leaderboard_is_a_document(runs, capfd):
    board = document(capfd, "leaderboard", runs, "--json")
    assert {row["name"] for row in board["rows"]} == {"one", "two"}
    assert board["answer"].endswith(".")
    (row,) = [row for row in board["rows"] if row["name"] == "two"]
    (cell,) = [cell for name, cell in row["cells"].items() if name.startswith("knn/")]
    assert cell["mark"] == "best" and cell["ci95"][0] < cell["value"] < cell["ci95"][1]


def test_ranks_are_a_document(runs, tmp_path, capfd):
    program.main(["leaderboard", str(runs), "--csv", str(tmp_path / "l.csv")])
    capfd.readouterr()
    ranked = document(capfd, "rank", tmp_path / "l.csv", "--json")
    assert {one["name"] for one in ranked["ranks"]} == {"one", "two"}
    assert ranked["answer"].startswith("No clear winner")


@pytest.mark.parametrize(
    ("words", "key", "others"),
    [
        (["paper", "--json"], "status", ["papers", "timm", "testbed", "pages"]),
        (["paper", "lorac:2", "--json"], "state", []),
        (["reproduce", "--json"], "gpu_hours", []),
        (["data", "list", "--json"], "on_disk", []),
    ],
)
def test_lists_are_documents(words, key, others, capfd):
    listed = document(capfd, *words)
    assert len(listed) > 1 + len(others)
    assert [one["source"] for one in listed if key not in one] == others


def test_a_check_of_data_says_its_problems(tiny_root, capfd):
    checked = document(capfd, "data", "check", "digits", "--data", tiny_root, "--json")
    assert checked == {"name": "digits", "problems": []}


@pytest.fixture
def incomplete_scenes(tiny_root, tmp_path):
    """Boxes in COCO's layout, of which an image is missing."""
    scenes = shutil.copytree(tiny_root / "scenes", tmp_path / "data" / "scenes")
    next(scenes.glob("val2017/*.jpg")).unlink()
    return tmp_path / "data"


def test_a_check_of_boxes_says_its_problems_too(incomplete_scenes, capfd):
    words = ("data", "check", "scenes", "--data", incomplete_scenes, "--json")
    checked = document(capfd, *words, status=1)
    assert any("1 files are missing" in problem for problem in checked["problems"])


@pytest.mark.parametrize("more", [["--record"], ["--copies", "copies.txt"]])
def test_boxes_are_neither_recorded_nor_compared(incomplete_scenes, bad_input, more):
    words = ["data", "check", "scenes", "--data", str(incomplete_scenes), *more]
    bad_input(program.main(words), more[0])


def test_an_error_prints_no_document(tmp_path, capfd):
    assert program.main(["leaderboard", str(tmp_path / "gone"), "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and "gone" in captured.err


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ({"GOMP_SPINCOUNT": "100"}, None),
    ],
)
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(
    monkeypatch, said, expected
):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    wait_without_spinning()
    assert os.environ.get("OMP_WAIT_POLICY") == expected


FREED = """
import resource

from backbench.__main__ import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
b"x" * 100_000_000
before = faults()
for _ in range(5):
    b"x" * 100_000_000
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's mallopt")
@pytest.mark.parametrize("said", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_freed_memory_serves_what_comes_next_unless_the_user_says_otherwise(said):
    """The kernel hands out 100 MB in 24,414 pages, or in 48 large ones."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FREED],
        capture_output=True,
        text=True,
        check=True,
        env={**kept, **said, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    asked = int(done.stdout)
    assert (asked < 100) if not said else (asked > 200)


WINDOWS = """
import sys
sys.platform = 'win32'
import backbench.__main__
"""


def test_windows_is_told_what_to_use():
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "use WSL" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell, capsys):
    pytest.importorskip("argcomplete")
    assert program.main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    assert "backbench" in script and "_ARGCOMPLETE" in script


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("backbench eva", ["evaluate"]),
        ("backbench launch r", ["run", "retry"]),
        ("backbench export x --format det", ["detectron2"]),
        ("backbench linear x --work", ["--workers"]),
    ],
)
def test_tab_completes_verbs_options_and_choices(line, words, tmp_path):
    pytest.importorskip("argcomplete")
    out = tmp_path / "words"
    about = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    command = [sys.executable, "-m", "backbench"]
    done = subprocess.run(
        command, env=os.environ | about, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(out.read_text().split()) == sorted(words)


def test_without_argcomplete_its_name_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert program.main(["--completion", "bash"]) == 2
    assert "pip install argcomplete" in capsys.readouterr().err
