"""The board as files: leaderboard.csv and results.csv (docs/results.md).

Here are also the command that measures a number again, and the pieces that all Markdown tables are
made of.
"""

import csv
import dataclasses
import functools
import io
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from backbench.board.board import (
    PUBLISHED,
    Board,
    Column,
    Measurement,
    Row,
    standing,
    text_of,
)
from backbench.records import column_keys, trunk_costs
from backbench.records.result_line import Result
from backbench.runs import atomic
from backbench.untrusted import printable

ROW_FIELDS = ("checkpoint", "name", "method", "arch", "epochs", "source")
COLUMN_FIELDS = ("task", "dataset", "split", "metric", "protocol", "engine", "seed")
VALUE_FIELDS = ("value", "ci95_low", "ci95_high", "chosen")
ORIGIN_FIELDS = ("code", "hardware", "recorded")
COMMAND_FIELDS = ("command", "run")
# The cost of the trunk; its hardware is among ORIGIN_FIELDS already.
COST_FIELDS = tuple(name for name in trunk_costs.FIELDS if name not in ORIGIN_FIELDS)
Line = dict[str, object]  # field -> value; fields that are left out stay empty


def write_csv(board: Board, path: Path) -> None:
    """Write leaderboard.csv: one row per checkpoint, one column per `Column.name`, in percent;
    empty if not run or undefined. Costs of the trunks come first, if any row states one."""
    cost_fields = trunk_costs.FIELDS if board.costs else ()
    names = [column.name for column in board.columns]
    lines: list[list[object]] = [[*ROW_FIELDS, *cost_fields, *names]]
    for row in board.rows:
        line = list(_of_row(board, row).values())
        cost = board.costs.get(row.checkpoint)
        line += [getattr(cost, name, None) for name in cost_fields]
        for column in board.columns:
            cell = board.cell(row, column)
            line.append(_number(cell.value) if cell is not None else None)
        lines.append(line)
    write_lines(path, lines)


def write_lines(path: Path, lines: Iterable[Iterable[object]]) -> None:
    """Write a csv file without a cell that a spreadsheet would take for a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for line in lines:
        writer.writerow(map(printable.spreadsheet, line))
    atomic.write_text(path, text.getvalue())


def write_tidy(board: Board, path: Path) -> None:
    """Write results.csv: one row per number that counts, with its origin."""
    text = io.StringIO()
    fields: list[str] = [*ROW_FIELDS, *COLUMN_FIELDS, *VALUE_FIELDS]
    if board.costs:
        fields += COST_FIELDS
    fields += [*ORIGIN_FIELDS, *COMMAND_FIELDS]
    writer = csv.DictWriter(text, fields, restval="", lineterminator="\n")
    writer.writeheader()
    # The fields of a checkpoint and of a column stand on many lines: made once for all.
    of_row = {row.checkpoint: _escaped(_of_row(board, row)) for row in board.rows}
    of_column: dict[Column, Line] = {}
    for column in board.columns:
        split = column.split or column_keys.USUAL_SPLIT
        of_column[column] = _escaped(dataclasses.asdict(column) | {"split": split})
    # Cells stand in the order in which they were read, so a run's lines stay together.
    for (checkpoint, column), cell in board.cells.items():
        line = {**of_row[checkpoint], **of_column[column]}
        # A measured average has no line: it is computed from numbers that have theirs.
        if line["source"] == PUBLISHED:
            writer.writerow({**line, "split": "", "value": _number(cell.value)})
        for measurement in cell.parts:
            writer.writerow({**line, **_escaped(_of_measurement(measurement))})
    atomic.write_text(path, text.getvalue())


def document(board: Board, answer: str, judged: Sequence[object]) -> dict[str, object]:
    """Return the board for programs: the answer, each measured row with its cells by column,
    verdicts."""
    rows = []
    for row in board.measured_rows:
        cells = {}
        for column in board.columns:
            cell = board.cell(row, column)
            if cell is not None:
                mark = standing(board, column).get(row.checkpoint)
                cells[column.name] = {
                    "value": cell.value,
                    "ci95": cell.ci95,
                    "mark": mark,
                }
        rows.append(_of_row(board, row) | {"cells": cells})
    return {
        "answer": answer,
        "rows": rows,
        "judged": judged,
        "problems": board.problems,
    }


def _escaped(line: Line) -> Line:
    return {key: printable.spreadsheet(value) for key, value in line.items()}


def _of_row(board: Board, row: Row) -> Line:
    """Return the fields of ROW_FIELDS, in that order; csv writes None as an empty field."""
    return {name: getattr(row, name) for name in ROW_FIELDS} | {"name": board.name(row)}


def _of_measurement(measurement: Measurement) -> Line:
    """Return one measurement's value and origin."""
    result, run = measurement
    low, high = result.ci95 or (None, None)
    line: Line = {
        "seed": result.seed,
        "value": _number(result.value),
        "ci95_low": _number(low),
        "ci95_high": _number(high),
        "command": command_again(result),
        "run": str(run),
    }
    if result.chosen is not None:
        line["chosen"] = json.dumps(result.chosen, sort_keys=True)
    for name in ORIGIN_FIELDS:
        line[name] = result.origin.get(name)
    cost = trunk_costs.of_result(result)
    if cost is not None:
        line |= {name: getattr(cost, name) for name in COST_FIELDS}
    return line


def _number(value: float | None) -> str:
    """Return four decimals without trailing zeros; empty where there is no value."""
    return text_of(value, ".4f").rstrip("0").rstrip(".")


def command_again(result: Result, out: str = "runs/again") -> str | None:
    """Return the command that measures this number anew; None where no command was recorded."""
    command = result.facts.get("command") or result.origin.get("command")
    if not command:
        return None
    if isinstance(command, list):
        command = shlex.join(command)
    return _with_another_out(command, out)


# A run's numbers share their command, and splitting it is slow.
@functools.lru_cache(maxsize=65536)
def _with_another_out(command: str, out: str) -> str:
    """Return the command with another run folder, by `--out` or a detector's OUTPUT_DIR."""
    words = printable.of_command(command)
    for i, word in enumerate(words):
        if word in ("--out", "OUTPUT_DIR") and i + 1 < len(words):
            words[i + 1] = out
        elif word.startswith("--out="):
            words[i] = f"--out={out}"
    return shlex.join(words)


# ---- the pieces of Markdown tables

_ESCAPED = str.maketrans(
    {**{char: "\\" + char for char in "\\`*[]"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"}
)


def escaped(text: str, most: int = 400) -> str:
    """Return `text` on one line, with what Markdown would take for a tag, a link or emphasis
    escaped."""
    return printable.shown(" ".join(text.split()), most).translate(_ESCAPED)


def from_to(interval: tuple[float, float] | None) -> str:
    """Return an interval in percent; empty where there is none."""
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def pipe_table(heads: Mapping[str, str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a pipe table; `heads` are heading -> alignment (`---` or `---:`)."""
    lines = []
    for cells in (list(heads), list(heads.values()), *rows):
        escaped_cells = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped_cells)} |")
    return lines
