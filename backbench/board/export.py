"""leaderboard.csv and results.csv (docs/results.md), and the command to measure a number again."""

from __future__ import annotations

import csv
import functools
import io
import json
import shlex
from pathlib import Path

from backbench.board.board import PUBLISHED, Board, Column, Measurement, Row, text_of
from backbench.results import column_keys, trunk_costs
from backbench.results.store import Result
from backbench.runs import atomic
from backbench.untrusted import printable

ABOUT = ("checkpoint", "name", "method", "arch", "epochs", "source")
WHAT = ("task", "dataset", "split", "metric", "protocol", "engine", "seed")
ORIGIN = ("code", "hardware", "recorded")
# What the trunk costs; "hardware" stands among ORIGIN already where each number has a line
COST = tuple(name for name in trunk_costs.FIELDS if name not in ORIGIN)
VALUE, AGAIN = ("value", "ci95_low", "ci95_high", "chosen"), ("command", "run")
Line = dict[str, object]  # field -> what stands in it; fields that are left out stay empty


def write_csv(board: Board, path: Path) -> None:
    """leaderboard.csv: one row per checkpoint, one column per
    `task/dataset/metric@protocol[+engine]`, in percent; empty where not run or undefined. Before
    them what the trunks cost, where any row says it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    cost = trunk_costs.FIELDS if board.costs else ()
    writer.writerow([*ABOUT, *cost, *(column.name for column in board.columns)])
    for row in board.rows:
        line = list(_about(board, row).values())
        line += [getattr(board.costs.get(row.checkpoint), name, None) for name in cost]
        for column in board.columns:
            cell = board.cell(row, column)
            line.append(_number(cell.value) if cell is not None else None)
        writer.writerow(map(printable.spreadsheet, line))
    atomic.write_text(path, text.getvalue())


def write_tidy(board: Board, path: Path) -> None:
    """results.csv: one row per number that counts, with where it comes from; published numbers have
    a source only."""
    text = io.StringIO()
    cost = COST if board.costs else ()
    fields = (*ABOUT, *WHAT, *VALUE, *cost, *ORIGIN, *AGAIN)
    writer = csv.DictWriter(text, fields, restval="", lineterminator="\n")
    writer.writeheader()
    # What is said of a checkpoint stands on each of its lines, and of a column: made once for all.
    about = {row.checkpoint: _cells(_about(board, row)) for row in board.rows}
    what = {column: _cells(_what(column)) for column in board.columns}
    # Cells stand in the order in which they were found, so a run's lines stay together.
    for (checkpoint, column), cell in board.cells.items():
        line = {**about[checkpoint], **what[column]}
        # A measured average has no line: it is computed from numbers that have theirs.
        if line["source"] == PUBLISHED:
            writer.writerow({**line, "value": _number(cell.value)})
        for measurement in cell.parts:
            line["split"] = printable.spreadsheet(column.split or column_keys.USUAL_SPLIT)
            writer.writerow({**line, **_cells(_measured(measurement))})
    atomic.write_text(path, text.getvalue())


def _cells(line: Line) -> Line:
    return {key: printable.spreadsheet(value) for key, value in line.items()}


def _about(board: Board, row: Row) -> Line:
    """The fields of ABOUT, in that order. csv writes None as an empty field."""
    return {name: getattr(row, name) for name in ABOUT} | {"name": board.name(row)}


def _what(column: Column) -> Line:
    """The fields of WHAT that are the column's: its protocol and split, as its name says them."""
    names = ("task", "dataset", "metric", "protocol", "engine")
    return {name: getattr(column, name) for name in names}


def _measured(measurement: Measurement) -> Line:
    """One measurement's value and where it comes from."""
    result, run = measurement
    low, high = result.ci95 or (None, None)
    line: Line = {
        "seed": result.seed,
        "value": _number(result.value),
        "ci95_low": _number(low),
        "ci95_high": _number(high),
        "command": again(result),
        "run": str(run),
    }
    if result.chosen is not None:
        line["chosen"] = json.dumps(result.chosen, sort_keys=True)
    for name in ORIGIN:
        line[name] = result.origin.get(name)
    cost = trunk_costs.of_result(result)
    if cost is not None:
        line |= {name: getattr(cost, name) for name in COST}
    return line


def _number(value: float | None) -> str:
    """Four decimals, without the zeros at the end; nothing where there is no value."""
    return text_of(value, ".4f").rstrip("0").rstrip(".")


def again(result: Result, out: str = "runs/again") -> str | None:
    """The command that measures this number anew, in a folder of its own; None where no command was
    recorded."""
    command = result.provenance.get("command") or result.origin.get("command")
    if not command:
        return None
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    return _elsewhere(str(command), out)


@functools.lru_cache(maxsize=65536)  # a run's numbers share their command, and splitting it is slow
def _elsewhere(command: str, out: str) -> str:
    """The command with another run folder, named as verbs do or as a detector's config does."""
    said = printable.of_command(command)
    # Changed in place: the word after one that names the folder, or the word that holds it.
    for i, word in enumerate(said):
        if word in ("--out", "OUTPUT_DIR") and i + 1 < len(said):
            said[i + 1] = out
        elif word.startswith("--out="):
            said[i] = f"--out={out}"
    return shlex.join(said)
