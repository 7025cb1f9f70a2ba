"""Results by strangers: a bad line is named and left out, the board stands."""

import csv
import functools
import io
import json
import os
import re
import shutil

import numpy as np
import pytest
from support.boards import DEMO, synthetic
from support.strangers import door


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Runs of two checkpoints, of which one is better."""
    root = tmp_path_factory.mktemp("good")
    synthetic(root, ["good-one", "good-two"], DEMO[:2], images=100)
    return root


@pytest.fixture
def runs(good, tmp_path):
    return shutil.copytree(good, tmp_path / "runs")


def board(runs, out):
    """The leaderboard with everything it can write; its csv, row by row."""
    asked = ("--csv", out / "x.csv", "--tidy", out / "t.csv", "--html", out / "x.html")
    said = door(
        "leaderboard", runs, *asked, "--markdown", out / "md", "--latex", out / "tex"
    )
    assert said.status == 0, (said.status, said.err[-2000:])
    assert "Traceback" not in said.err and "Logging error" not in said.err
    with (out / "x.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    return said, rows


@pytest.fixture(scope="module")
def before(good, tmp_path_factory):
    return board(good, tmp_path_factory.mktemp("before"))[1]


def a_line(runs, **changes):
    """One of the good lines, changed: what a key of None is, is left out."""
    file = sorted(runs.rglob("results.jsonl"))[0]
    line = json.loads(file.read_text().splitlines()[0])
    return json.dumps(line | {"checkpoint": "f" * 64, "name": "bad", **changes})


def beside(runs, line):
    (runs / "bad").mkdir(exist_ok=True)
    content = line if isinstance(line, bytes) else line.encode()
    (runs / "bad" / "results.jsonl").write_bytes(content + b"\n")


BAD = {
    "value-text": {"value": "abc"},
    "value-list": {"value": [1]},
    "value-digits": {"value": 10**4000},
    "value-true": {"value": True},
    "ci95-one": {"ci95": [1]},
    "ci95-text": {"ci95": ["a", "b"]},
    "epochs-nan": {"epochs": float("nan")},
    "epochs-text": {"epochs": "many"},
    "seed-list": {"seed": [0]},
    "name-list": {"name": ["bad"]},
    "name-newline": {"name": "bad\nrow"},
    "name-escape": {"name": "\x1b[2Jbad"},
    "name-surrogate": {"name": "bad\ud800"},
    "name-long": {"name": "b" * 5000},
    "protocol-long": {"protocol": "p" * 400},
    "checkpoint-number": {"checkpoint": 5},
    "engine-list": {"engine": ["x"]},
    "recorded-text": {"origin": {"recorded": "abc"}},
    "origin-list": {"origin": [1]},
    "command-quote": {"origin": {"command": "backbench linear 'x"}},
    "command-number": {"origin": {"command": 5}},
    "cwd-list": {"origin": {"command": "backbench linear x.safetensors", "cwd": [1]}},
    "provenance-text": {"provenance": "abc"},
    "provenance-empty-text": {"provenance": ""},
    "provenance-empty-list": {"provenance": []},
    "origin-zero": {"origin": 0},
    "chosen-false": {"chosen": False},
    "predictions-outside": {"provenance": {"predictions": "../../x.npz"}},
    "predictions-number": {"provenance": {"predictions": 5}},
    "schema-list": {"schema": [1]},
    "unknown-key": {"colour": "red"},
}


BESIDE = {
    "list": "[1, 2]",
    "number": "5",
    "deep": '{"schema": 1, "chosen": ' + "[" * 20000 + "]" * 20000 + "}",
    "binary": bytes(range(256)),
    "digits": "1" * 5000,
}
GEOMETRIES = ({}, [], 5, {"input_size": []}, {"input_size": 5}, {"input_size": [[1]]})


@pytest.mark.parametrize("case", [*BAD, *BESIDE])
def test_a_bad_line_is_named_and_left_out(runs, before, tmp_path, case):
    beside(runs, a_line(runs, **BAD[case]) if case in BAD else BESIDE[case])
    said, rows = board(runs, tmp_path)
    assert rows == before
    assert f"{runs / 'bad' / 'results.jsonl'}{':1' if case in BAD else ''}" in said.err


def test_geometries_that_are_none(runs, before, tmp_path):
    lines = []
    for number, geometry in enumerate(GEOMETRIES):
        about = {"name": f"odd{number}", "provenance": {"own_geometry": geometry}}
        lines.append(a_line(runs, metric="top1", checkpoint=f"{number:064x}", **about))
    beside(runs, "\n".join(lines))
    _, rows = board(runs, tmp_path)
    said = door("leaderboard", runs, "--check")
    assert "Traceback" not in said.err and "fault of backbench" not in said.err
    assert rows.keys() == before.keys() | {f"odd{n}" for n in range(len(GEOMETRIES))}


def deep(folder):
    """Make folders within folders, deeper than a path can name."""
    folder = os.open(folder, os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 100, dir_fd=folder)
        above = folder
        folder = os.open("d" * 100, os.O_RDONLY, dir_fd=above)
        os.close(above)
    os.close(folder)


def written(name, content):
    return lambda bad: (bad / name).write_bytes(content)


def deep_run(bad):
    metrics(b'{"step": 1, "loss": 2}')(bad)
    (bad / "run.json").write_bytes(b"[" * 100000)


def header(content):
    return written("backbone.safetensors", len(content).to_bytes(8, "little") + content)


def metrics(row):
    def make(bad):
        written("metrics.jsonl", row + b"\n" + row + b"\n")(bad)
        written("run.json", b'{"verb": "pretrain"}')(bad)

    return make


FOLDERS = {
    "fifo": lambda bad: os.mkfifo(bad / "results.jsonl"),
    "link-to-itself": lambda bad: (bad / "results.jsonl").symlink_to("results.jsonl"),
    "metrics-to-itself": lambda bad: (bad / "metrics.jsonl").symlink_to(
        "metrics.jsonl"
    ),
    "link-to-all": lambda bad: (bad / "again").symlink_to(bad.parent),
    "deep": deep,
    "header-deep": header(b"[" * 100000),
    "header-cut": header(b"{"),
    "header-binary": header(b'{"a": "\xff"}'),
    "header-list": header(b"[]"),
    "metrics-text": metrics(b'{"step": "x"}'),
    "metrics-list": metrics(b"[1]"),
    "metrics-nan": metrics(b'{"step": NaN, "loss": 1}'),
    "metrics-group": metrics(b'{"step": {}}'),
    "run-deep": deep_run,
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_of_no_run(runs, before, tmp_path, case):
    (runs / "bad").mkdir()
    FOLDERS[case](runs / "bad")
    said, rows = board(runs, tmp_path)
    assert rows == before
    assert case != "fifo" or "not a regular file" in said.err


def saved(save, *arrays, **named):
    """The bytes of a file that `save` of numpy writes."""
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


npz = functools.partial(saved, np.savez_compressed)
ONES = np.ones(100, dtype=np.int64)
PREDICTIONS = {
    "npy": saved(np.save, ONES),
    "empty": b"",
    "length": npz(manifest="m", prediction=ONES, label=ONES[:7]),
    "no-manifest": npz(prediction=ONES, label=ONES),
    "cut": npz(manifest="m", prediction=ONES, label=ONES)[:-40],
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_predictions_that_are_none(runs, before, tmp_path, case):
    victim = sorted(runs.rglob("*.npz"))[0]
    victim.write_bytes(PREDICTIONS[case])
    said, rows = board(runs, tmp_path)
    assert rows == before
    assert victim.name in said.err and "left out" in said.err


def stranger(runs, **changes):
    """The board of the good runs and one good row of a stranger's, under names of its own."""
    line = json.loads(a_line(runs, **changes))
    line["provenance"].pop("predictions", None)
    beside(runs, json.dumps(line))


@pytest.mark.parametrize(
    "name", ["=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3", "=LINK(0)"]
)
def test_a_name_is_no_formula(runs, before, tmp_path, name):
    stranger(runs, name=name)
    _, rows = board(runs, tmp_path)
    assert name not in rows and f"'{name}" in rows
    assert {key: rows[key] for key in before} == before
    with (tmp_path / "t.csv").open(newline="") as file:
        for row in csv.reader(file):
            assert not [cell for cell in row if cell[:1] in ("=", "+", "@")]


def test_a_name_is_no_markup(runs, before, tmp_path):
    stranger(runs, name="a<script>alert(1)</script>[x](javascript:alert(1))`b`*c*|d&e")
    board(runs, tmp_path)
    for page in [*(tmp_path / "md").glob("*.md"), tmp_path / "x.html"]:
        assert "<script>alert" not in page.read_text()
    for page in (tmp_path / "md").glob("*.md"):
        assert not re.search(r"(?<!\\)\]\(javascript", page.read_text())
    assert "&lt;script&gt;" in (tmp_path / "md" / "board.md").read_text()


def test_a_name_is_no_latex_and_no_formula_of_a_chart(runs, before, tmp_path):
    stranger(runs, name=r"[3pt]\input{x} $\frac$ %", seed=0)
    board(runs, tmp_path)
    for file in (tmp_path / "tex").glob("*.tex"):
        assert r"\input" not in file.read_text() and r"\frac" not in file.read_text()
    assert door("leaderboard", runs, "--figures", tmp_path / "figures").status == 0


def test_protocol_and_engine_stay_apart(runs, tmp_path):
    kind = {"protocol": "p+e", "value": 10.0, "ci95": None}
    stranger(runs, name="one", **kind)
    other = json.loads((runs / "bad" / "results.jsonl").read_text())
    other |= {"protocol": "p", "engine": "e", "value": 20.0}
    (runs / "other").mkdir()
    (runs / "other" / "results.jsonl").write_text(json.dumps(other) + "\n")
    said, rows = board(runs, tmp_path)
    values = [value for column, value in rows["one"].items() if "@p" in column]
    assert sorted(filter(None, values)) == ["10", "20"]
    assert "twice" not in said.err
