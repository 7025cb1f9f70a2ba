"""What the tables of `errors` are called, and how checkpoints of one name are told apart."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.records import a_result

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


# The lines of a table


@pytest.mark.parametrize(
    ("name", "head"),
    [("a" * 22, "a" * 22), ("a" * 23, f"{'a' * 19}..."), ("a\x1b", "a\\x1b")],
)
def test_a_name_fits_above_its_column(name, head):
    assert errors._cut(name) == head


def explained(name, *kinds, value=40.126, **changes):
    about = {"task": "faster_rcnn", "dataset": "cells", "ci95": None, "name": name}
    ap50 = {}
    for kind in kinds or ("bbox",):
        ap50[kind] = a_result(
            metric=f"{kind}_AP50",
            value=value,
            provenance={"val": "v"},
            **about | changes,
        )
    return errors.Explained(Path("runs") / name, f"of-{name}", {}, ap50, [])


@pytest.fixture
def costs(monkeypatch):
    """Every error costs 1.256 points and was made three times; two runs differ by a half."""
    compared = []

    def compare(first, second, metric):
        compared.append((first, second, metric))
        low, high = -0.125, 1.125
        same = metric.endswith("missed")
        return None if same else SimpleNamespace(value=0.5, ci95=(low, high))

    monkeypatch.setattr(errors.ap_errors, "value", lambda arrays, metric: 1.256)
    monkeypatch.setattr(errors.ap_errors, "count", lambda arrays, metric: 3)
    monkeypatch.setattr(errors.paired_tests, "compare", compare)
    return compared


def test_two_runs_are_printed_beside_their_difference(costs, capsys):
    errors._show([explained("one"), explained("a longer name than fits here")])
    title, head, ap50, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{TASKS['faster_rcnn'].title} on cells, bbox:"
    # A name that is longer than its column is cut
    names = f"{'one':>24}  a longer name than ..."
    assert head == f"points of AP50  {names}   difference"
    assert ap50 == f"AP50            {'40.13'.rjust(24)}{'40.13'.rjust(24)}"
    cells = 2 * "1.26 (3)".rjust(24)
    difference = "   +0.50 [-0.12, +1.12]"
    expected = []
    for error in errors.ERRORS:
        told = "" if error == "missed" else difference
        expected.append(f"{error:<16}{cells}{told}")
    assert lines == expected
    files = [
        [Path("runs") / name / "predictions" / f"of-{name}.npz"]
        for name in ("one", "a longer name than fits here")
    ]
    assert costs == [(*files, f"bbox_{error}") for error in errors.ERRORS]


@pytest.mark.parametrize("count", [1, 3])
def test_other_numbers_of_runs_have_no_difference(costs, capsys, count):
    errors._show([explained(f"net {n}", value=10.0 * n) for n in range(count)])
    _, head, ap50, *lines = capsys.readouterr().out.splitlines()
    names = [f"net {n}" for n in range(count)]
    assert head == "points of AP50  " + "".join(name.rjust(24) for name in names)
    assert ap50.split()[1:] == [f"{10 * n}.00" for n in range(count)]
    assert all(len(line) == 16 + 24 * count for line in lines)
    assert costs == []


def test_each_kind_and_each_list_of_boxes_has_a_table(costs, capsys):
    runs = [
        explained("one", "bbox", "segm", task="mask_rcnn"),
        explained("two", "bbox", task="mask_rcnn"),
        explained("three", "bbox", task="mask_rcnn", dataset="drones"),
    ]
    errors._show(runs)
    said = capsys.readouterr().out.splitlines()
    title = TASKS["mask_rcnn"].title
    titles = [line for line in said if line.startswith(title)]
    assert titles == [
        f"{title} on cells, bbox:",
        f"{title} on cells, segm:",
        f"{title} on drones, bbox:",
    ]
    heads = [line.split()[3:] for line in said if line.startswith("points of")]
    assert heads == [["one", "two", "difference"], ["one"], ["three"]]
