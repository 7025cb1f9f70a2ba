"""The files of a board, whole: a row per checkpoint, a row per number, and the document for programs."""

import dataclasses
import json
from pathlib import Path

import pytest
from support.records import a_result

from backbench.board import export
from backbench.board.board import (
    PUBLISHED,
    UNBACKED,
    Cell,
    Measurement,
    Row,
    fill,
)
from backbench.recipes import fast

HELD = {"image_contents": None, "pixels": {}}
TRUNK = {"parameters": 5, "side": 8, "gflops": 0.5}


@pytest.fixture
def board():
    """Two seeds of one checkpoint, an undefined number of another, and a printed row."""
    origin = {"code": "abc", "hardware": "a CPU", "recorded": 7.5, "verified": 3}
    speed = {
        **origin,
        "images_per_second": 9.0,
        "command": ["backbench", "x", "--out=y"],
    }
    rows = [
        a_result(seed=1, value=71.25, ci95=(70.0, 72.12346), origin=speed),
        a_result(
            seed=0, value=70.0, ci95=None, origin=origin, chosen={"lr": 1, "l2": 2}
        ),
        a_result(
            checkpoint="b" * 64,
            name="=1+1",
            epochs=None,
            value=None,
            ci95=None,
            task="mask_rcnn",
            dataset="coco2017",
            split="val",
            metric="segm_AP",
            protocol="v1",
            engine="torchvision",
        ),
    ]
    keys = dict(fast.KEYS)
    trained = {**HELD, "trunk": TRUNK, fast.PRETRAINING: keys}
    held = [
        trained,
        trained,
        {"command": "backbench detect OUTPUT_DIR x"},
    ]
    rows = [dataclasses.replace(r, provenance=about) for r, about in zip(rows, held)]
    found = fill(Measurement(row, Path(f"run{n}")) for n, row in enumerate(rows))
    linear = found.columns[0]
    found.rows.append(Row("paper:1", "printed", "m", "r50", 9, PUBLISHED))
    found.cells["paper:1", linear] = Cell(88.5)
    # An average is computed from numbers that have lines of their own
    average = dataclasses.replace(linear, dataset="average", metric="average")
    found.columns.append(average)
    found.cells["a" * 64, average] = Cell(50.0)
    return found


A, B = "a" * 64, "b" * 64


def test_a_row_per_checkpoint_has_its_costs_and_its_columns(board, tmp_path):
    export.write_csv(board, tmp_path / "l.csv")
    linear, detected, _ = (column.name for column in board.columns)
    average = board.columns[-1].name
    assert (tmp_path / "l.csv").read_text().splitlines() == [
        "checkpoint,name,method,arch,epochs,source,parameters,side,gflops,images_per_second,"
        f"hardware,{linear},{detected},{average}",
        f"{B},'=1+1,simclr,resnet18,,measured,,,,,,,,",
        f"{A},x (fast),simclr,resnet18,2,measured,5,8,0.5,9.0,a CPU,70.625,,50",
        "paper:1,printed,m,r50,9,published,,,,,,88.5,,",
    ]


def test_a_row_per_number_has_its_origin(board, tmp_path):
    export.write_tidy(board, tmp_path / "t.csv")
    head = (
        "checkpoint,name,method,arch,epochs,source,task,dataset,split,metric,protocol,engine,"
        "seed,value,ci95_low,ci95_high,chosen,parameters,side,gflops,images_per_second,code,"
        "hardware,recorded,command,run"
    )
    of_a = f"{A},x (fast),simclr,resnet18,2,measured,linear,digits,test,top1,linear-demo-v1~unknown,"
    of_b = f"{B},'=1+1,simclr,resnet18,,measured,mask_rcnn,coco2017,"
    printed = (
        "paper:1,printed,m,r50,9,published,linear,digits,,top1,linear-demo-v1~unknown,"
    )
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0] == head
    # In the order in which the cells were read, seeds from the first on
    assert (
        lines[1]
        == f'{of_a},0,70,,,"{{""l2"": 2, ""lr"": 1}}",5,8,0.5,,abc,a CPU,7.5,,run1'
    )
    assert lines[2] == (
        f"{of_a},1,71.25,70,72.1235,,5,8,0.5,9.0,abc,a CPU,7.5,"
        "backbench x --out=runs/again,run0"
    )
    assert lines[3].startswith(of_b)
    assert lines[3].endswith(
        ",segm_AP,v1~unknown,torchvision,0,,,,,,,,,,,,"
        "backbench detect OUTPUT_DIR runs/again,run2"
    )
    assert lines[4] == f"{printed},,88.5{',' * 12}"
    assert len(lines) == 5


def test_programs_get_measured_rows_with_their_cells_and_marks(board):
    linear, detected, average = board.columns
    board.standings = {linear: {A: UNBACKED}, detected: {}, average: {}}
    board.problems.append("a problem")
    cells = {
        linear.name: {
            "value": 70.625,
            "ci95": board.cells[A, linear].ci95,
            "mark": UNBACKED,
        },
        average.name: {"value": 50.0, "ci95": None, "mark": None},
    }
    about = {"method": "simclr", "arch": "resnet18", "source": "measured"}
    of_b = {detected.name: {"value": None, "ci95": None, "mark": None}}
    found = export.document(board, "An answer.", ["judged"])
    assert found == {
        "answer": "An answer.",
        "rows": [
            {"checkpoint": B, "name": "=1+1", "epochs": None, **about, "cells": of_b},
            {"checkpoint": A, "name": "x (fast)", "epochs": 2, **about, "cells": cells},
        ],
        "judged": ["judged"],
        "problems": ["a problem"],
    }
    assert json.loads(json.dumps(found))["rows"][1]["cells"][linear.name]["mark"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.0, "0"), (100.0, "100"), (70.12346, "70.1235"), (-0.5, "-0.5")],
)
def test_a_number_has_four_decimals_at_most(value, text):
    assert export._number(value) == text


def test_markdown_takes_no_text_for_markup():
    assert export.escaped("a *b* [c](d) `e` <f> & \\ \n g") == (
        "a \\*b\\* \\[c\\](d) \\`e\\` &lt;f&gt; &amp; \\\\ g"
    )
    assert export.escaped("x" * 7, 5) == "xxxxx..."
    assert (export.from_to((1.0, 2.346)), export.from_to(None)) == ("1.00 to 2.35", "")
    table = export.pipe_table({"a|b": "---", "c": "---:"}, [["1", "x|y"], ["2", ""]])
    assert table == [
        "| a\\|b | c |",
        "| --- | ---: |",
        "| 1 | x\\|y |",
        "| 2 |  |",
    ]
