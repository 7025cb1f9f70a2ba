"""Rows of tasks and names that are nearly right: what every other room builds on."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import backbench
from backbench import plugins, tasks
from backbench.errors import nearest, no_folder
from backbench.tasks import Task

ROWS = """
[plain]
title = "Plain"
verb = "linear"
recipe = "x"
kind = "a"
price = "one fit"
priced = "a minute"
tolerance = 0.5
tolerances = {other = 1.5}

[boxes]
title = "Boxes"
verb = "detect"
recipe = "y"
ious = ["bbox", "segm"]

[why]
title = "Why"
verb = "errors"
recipe = "y"
explains = "boxes"
price = "nothing is read"

[own]
title = "Own"
verb = "linear"
recipe = "z"
kind = "b"
untrained = "own-"
from_scores = true

[fixed]
title = "Fixed"
verb = "linear"
recipe = "z"
trains = false
from_predictions = true
"""


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "tasks.toml").write_text(ROWS)
    return tasks.read(tmp_path / "tasks.toml")


def test_a_tasks_row_says_what_it_is(rows):
    assert list(rows) == list(tomllib.loads(ROWS))
    assert {name: task.detects for name, task in rows.items()} == {
        "plain": False,
        "boxes": True,
        "why": False,
        "own": False,
        "fixed": False,
    }
    splits = [task.split for task in rows.values()]
    assert splits == ["test", "val", "val", "test", "test"]
    assert [task.follows for task in rows.values()] == [False, False, True, True, True]
    assert rows["boxes"].ious == ("bbox", "segm") and rows["plain"].ious == ()
    assert rows["plain"].ranked and rows["plain"].pooled and not rows["plain"].cheap


def test_which_numbers_a_second_run_changes(rows):
    assert rows["plain"].trains_in("own-v1")
    assert rows["own"].trains_in("linear-v1")
    assert not rows["own"].trains_in("own-v1")
    assert not rows["fixed"].trains_in("linear-v1")


def test_a_tolerance_may_be_of_one_dataset(rows):
    assert rows["plain"].tolerance_on("imagenet") == 0.5
    assert rows["plain"].tolerance_on("other") == 1.5
    assert rows["boxes"].tolerance_on("other") is None


def test_prices_are_told_for_a_verb_or_for_all(rows, monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", rows)
    plain, why = "  plain: one fit (a minute)", "  why: nothing is read"
    assert tasks.prices() == f"{plain}\n{why}"
    assert tasks.prices("linear") == plain
    assert tasks.prices("errors") == why
    assert tasks.prices("pretrain") == ""
    long = Task("x", "X", "linear", "x", price="word " * 30 + "end")
    monkeypatch.setattr(tasks, "TASKS", {"x": long})
    lines = tasks.prices().splitlines()
    assert max(map(len, lines)) <= 78 and len(lines) == 3
    assert [len(line) - len(line.lstrip()) for line in lines] == [2, 4, 4]


def test_kinds_of_a_verbs_protocols(rows, monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", rows)
    assert tasks.by_kind("linear") == {"a": "plain", "b": "own"}
    assert tasks.by_kind("detect") == {}


def test_a_packages_file_lies_beside_its_init():
    point = EntryPoint("x", "backbench.records.store:Result", plugins.PROBES)
    file = Path(backbench.__file__).with_name("tasks.toml")
    assert plugins.package_file(point, "tasks.toml") == file
    for value in ("no_such_package.x:Y", "textwrap:fill"):
        point = EntryPoint("x", value, plugins.PROBES)
        package = value.partition(".")[0].partition(":")[0]
        with pytest.raises(FileNotFoundError, match=f"no package '{package}'"):
            plugins.package_file(point, "tasks.toml")
    assert plugins.origin(point) == "textwrap:fill"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("linar", "did you mean 'linear'?"),
        ("moco", "did you mean 'vision/moco'?"),  # without its folder
        ("text/moco", "did you mean 'vision/moco'?"),  # with another one
        ("vision/mocco", "did you mean 'vision/moco'?"),
        ("x/y/mocco", "did you mean 'vision/moco'?"),  # by its end alone
        ("zzz", "allowed: linear, old/simclr, simclr, vision/moco"),
        ("simclr", "did you mean 'old/simclr'?"),  # the first of two by name
    ],
)
def test_a_wrong_name_gets_the_nearest(name, said):
    assert nearest(name, ["vision/moco", "simclr", "linear", "old/simclr"]) == said


def test_what_a_path_is_that_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    assert no_folder(tmp_path / "file") == "is a file, no folder"
    assert no_folder(tmp_path / "none") == "no such folder"
