"""What the tables of `errors` are called, and how checkpoints of one name are told apart."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from backbench.cli import errors
from backbench.tasks import TASKS

TASK = next(name for name, task in TASKS.items() if task.detects)


def table(**changes):
    whole = {
        "task": TASK,
        "dataset": "cells",
        "protocol": "p1",
        "engine": "torchvision",
        "val": "0123456789",
        "kind": "bbox",
    }
    return errors._Table(**{**whole, **changes})


TITLE = f"{TASKS[TASK].title} on cells"


@pytest.mark.parametrize(
    ("others", "title"),
    [
        ([], f"{TITLE}, bbox:"),
        # Another dataset, kind or task is told by the title alone
        ([{"dataset": "drones"}, {"kind": "segm"}], f"{TITLE}, bbox:"),
        ([{"protocol": "p2"}], f"{TITLE}, bbox, p1, torchvision:"),
        ([{"engine": "detectron2"}], f"{TITLE}, bbox, p1, torchvision:"),
        ([{"val": "abcdefghij"}], f"{TITLE}, bbox, p1, torchvision, boxes 01234567:"),
        (
            [{"val": "abcdefghij", "protocol": "p2"}, {"kind": "segm"}],
            f"{TITLE}, bbox, p1, torchvision:",
        ),
    ],
)
def test_a_table_is_called_by_what_tells_it_from_the_others(others, title):
    tables = [table(**changes) for changes in others]
    assert errors._title(table(), [*tables, table()]) == title


def test_a_table_without_an_engine_says_none():
    tables = [table(engine=None), table(engine=None, protocol="p2")]
    assert errors._title(tables[0], tables) == f"{TITLE}, bbox, p1:"


def named(*names):
    runs = []
    for number, name in enumerate(names):
        ap50 = {"bbox": SimpleNamespace(name=name), "segm": SimpleNamespace(name="x")}
        runs.append(SimpleNamespace(run=Path(f"runs/{number}"), ap50=ap50))
    return runs


def test_checkpoints_of_one_name_are_numbered(capsys):
    assert errors._names("bbox", named("a", "b")) == ["a", "b"]
    assert capsys.readouterr().out == ""
    numbered = errors._names("bbox", named("a", "b", "a"))
    assert numbered == ["(1) a", "(2) b", "(3) a"]
    assert capsys.readouterr().out == "(1) runs/0\n(2) runs/1\n(3) runs/2\n"
    assert errors._names("segm", named("a", "b")) == ["(1) x", "(2) x"]
