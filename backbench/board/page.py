"""leaderboard.html: one self-contained file with the table, the charts, the pictures and where each number comes from.

The page is page.html beside this file with its data filled in. It asks the network for nothing.
"""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from backbench.board import figures
from backbench.board.board import (
    MEASURED,
    Board,
    Cell,
    Column,
    Judged,
    again,
    difference,
    many_objects,
    predictions,
    standing,
)
from backbench.results.store import Result
from backbench.runs import atomic
from backbench.runs.folder import CHECKPOINT_FILE, METRICS_FILE, RUN_FILE, read_metrics
from backbench.tasks import TASKS
from backbench.weights import header

TEMPLATE = Path(__file__).parent / "page.html"
CURVE_POINTS = 300
PICTURES, PICTURE_WIDTH, PICTURES_PER_RUN = 12, 720, 2
PAIRS = 6000  # tests computed in advance: about ten seconds
TEXT_BYTES = (
    20_000_000  # of provenance in the page; with many results each long value is cut to its share
)


def write_page(
    board: Board, path: Path, *, runs: Iterable[str | Path], judged: Sequence[Judged] = ()
) -> None:
    """Write the page for `board`; curves and pictures are looked for below `runs`."""
    with many_objects():
        data, origins = _table(board)
        data |= _more(board, runs, judged)
        page = (
            TEMPLATE.read_text()
            .replace("/*DATA*/", _json(data))
            .replace("/*ORIGINS*/", _json(origins))
        )
    atomic.write_text(path, page)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _more(board: Board, runs: Iterable[str | Path], judged: Sequence[Judged]) -> dict[str, Any]:
    return {
        "curves": curves(board, runs),
        "pictures": pictures(board),
        "figures": figures.for_page(board),
        "judged": [_judged(j) for j in judged],
        "problems": board.problems,
        "tasks": {name: task.title for name, task in TASKS.items()},
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "version": importlib.metadata.version("backbench"),
    }


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _table(board: Board) -> tuple[dict[str, Any], dict[str, Any]]:
    """(rows, columns, cells and paired differences), (the measurements behind them and their texts): compact lists."""
    labels = board.labels()
    index = {row.checkpoint: i for i, row in enumerate(board.rows)}
    numbers = sum(len(cell.parts) for cell in board.cells.values())
    texts = _Texts(max(150, TEXT_BYTES // max(1, numbers)))
    parts: list[list[Any]] = []
    cells: list[list[Any]] = []
    columns = []
    by_column: dict[Column, list[tuple[str, Cell]]] = {c: [] for c in board.columns}
    for (checkpoint, column), cell in board.cells.items():
        by_column[column].append((checkpoint, cell))
    for column in board.columns:
        marks = standing(board, column)
        entries: list[Any] = []
        for checkpoint, cell in by_column[column]:
            low, high = (None, None) if cell.ci95 is None else map(_round, cell.ci95)
            own = []
            for result, run in cell.parts:
                own.append(len(parts))
                parts.append(_part(result, run, texts))
            mark = marks.get(checkpoint, "")
            entries.append([index[checkpoint], _round(cell.value), low, high, mark, cell.note, own])
        cells.append(entries)
        count = sum(
            board.rows[entry[0]].source == MEASURED and entry[1] is not None for entry in entries
        )
        columns.append(
            {
                "name": column.name,
                "t": column.task,
                "d": column.dataset,
                "m": column.metric,
                "p": column.protocol,
                "e": column.engine,
                "s": column.split,
                "n": count,
            }
        )
    rows = [
        [
            r.checkpoint,
            r.name,
            r.method,
            r.arch,
            r.epochs,
            int(r.source != MEASURED),
            labels[r.checkpoint],
        ]
        for r in board.rows
    ]
    table = {
        "rows": rows,
        "columns": columns,
        "cells": cells,
        "pairs": _pairs(board, index),
        "numbers": numbers,
    }
    return table, {"parts": parts, "text": texts.all}


class _Texts:
    """Every distinct text once; long ones cut, since the run folder has them whole."""

    def __init__(self, longest: int) -> None:
        self.all: list[str] = []
        self._index: dict[str, int] = {}
        self._longest = longest

    def add(self, text: str, *, cut: bool = True) -> int:
        if cut and len(text) > self._longest:
            text = text[: self._longest] + " ... (the whole is in the run folder)"
        if text not in self._index:
            self._index[text] = len(self.all)
            self.all.append(text)
        return self._index[text]


def _part(result: Result, run: Path, texts: _Texts) -> list[Any]:
    """One measurement: split, seed, value, interval, then pairs of (key, value) as places in the texts."""
    low, high = (None, None) if result.ci95 is None else map(_round, result.ci95)
    out: list[Any] = [
        texts.add(result.split, cut=False),
        result.seed,
        _round(result.value),
        low,
        high,
    ]
    about = {**result.provenance, **result.origin, "chosen": result.chosen, "run": str(run)}
    about["command"] = again(result)
    for key, value in about.items():
        if isinstance(value, str):
            out += [texts.add(key, cut=False), texts.add(value, cut=key != "command")]
        elif value is not None:
            out += [texts.add(key, cut=False), texts.add(json.dumps(value, sort_keys=True))]
    return out


def _pairs(board: Board, index: dict[str, int]) -> list[list[Any]]:
    """Paired differences: [column, i, j, i minus j, low, high, p, real, over what, how many], with i < j.

    All pairs where they are few; else each column's best against the others, as far as PAIRS goes.
    """
    out: list[list[Any]] = []
    able = []
    for k, column in enumerate(board.columns):
        ranked = [(row, cell) for row, cell in board.measured(column) if predictions(cell)]
        if len(ranked) > 1:
            able.append((k, column, ranked))
    everything = sum(len(ranked) * (len(ranked) - 1) // 2 for _, _, ranked in able) <= PAIRS
    for k, column, ranked in able:
        for n, (row_a, cell_a) in enumerate(ranked if everything else ranked[:1]):
            for row_b, cell_b in ranked[n + 1 :]:
                if len(out) >= PAIRS:
                    return out
                i, j = index[row_a.checkpoint], index[row_b.checkpoint]
                first, second = (cell_a, cell_b) if i < j else (cell_b, cell_a)
                d = difference(first, second, column.metric)
                if d is not None:
                    interval = [_round(d.ci95[0]), _round(d.ci95[1])]
                    p = float(f"{d.p:.3g}")
                    out.append(
                        [
                            k,
                            min(i, j),
                            max(i, j),
                            _round(d.value),
                            *interval,
                            p,
                            int(d.real),
                            d.paired,
                            d.n,
                        ]
                    )
    return out


def curves(board: Board, runs: Iterable[str | Path]) -> list[dict[str, Any]]:
    """RUN/metrics.jsonl of every pretraining below `runs`, thinned to means of CURVE_POINTS bins.

    A pretraining is a run whose run.json says so; where its checkpoint has results, the curve takes that row's name.
    """
    index = {row.checkpoint: i for i, row in enumerate(board.rows)}
    labels = board.labels()
    out = []
    files = {
        f.resolve(): f for run in runs if Path(run).is_dir() for f in Path(run).rglob(METRICS_FILE)
    }
    for file in sorted(files.values()):
        try:
            if json.loads((file.parent / RUN_FILE).read_text()).get("verb") != "pretrain":
                continue
        except (OSError, json.JSONDecodeError, AttributeError):
            continue
        table = [row for row in read_metrics(file.parent) if "step" in row]
        if len(table) < 2:
            continue
        about = header.about(file.parent / CHECKPOINT_FILE)
        digest = about.get("digest")
        name = labels.get(str(digest)) or str(
            (about.get("provenance") or {}).get("name") or file.parent.name
        )
        curve: dict[str, Any] = {"name": name, "row": index.get(str(digest)), **_thin(table)}
        if curve["y"]:
            out.append(curve)
    return out


def _thin(table: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"x": steps, "y": {metric: means}}; numbers only, and only those that are there more than once."""
    size = math.ceil(len(table) / CURVE_POINTS)
    bins = [table[i : i + size] for i in range(0, len(table), size)]
    names = sorted(
        {k for row in table for k, v in row.items() if k != "step" and isinstance(v, int | float)}
    )
    y: dict[str, list[float | None]] = {}
    for name in names:
        means: list[float | None] = []
        for part in bins:
            values = [
                row[name]
                for row in part
                if isinstance(row.get(name), int | float) and math.isfinite(row[name])
            ]
            means.append(float(f"{sum(values) / len(values):.5g}") if values else None)
        if sum(v is not None for v in means) > 1:
            y[name] = means
    return {"x": [part[-1]["step"] for part in bins], "y": y}


def pictures(board: Board) -> list[dict[str, str]]:
    """RUN/pictures/* of the detection runs behind the board, as small images inside the page."""
    labels = board.labels()
    runs: dict[Path, Result] = {}
    for cell in board.cells.values():
        for result, run in cell.parts:
            if TASKS[result.task].detects:
                runs.setdefault(run, result)
    out: list[dict[str, str]] = []
    for nth in range(PICTURES_PER_RUN):
        for run, result in sorted(runs.items(), key=lambda x: (x[1].task, x[1].name)):
            files = sorted(p for p in (run / "pictures").glob("*") if p.suffix in (".png", ".jpg"))
            if nth < len(files) and len(out) < PICTURES and (source := _picture(files[nth])):
                name = labels.get(result.checkpoint, result.name)
                task = TASKS[result.task].title
                note = f"{task}, {result.dataset}, {result.protocol}" + (
                    f" + {result.engine}" if result.engine else ""
                )
                alt = (
                    f"{task} of {name} on image {files[nth].stem}: predictions beside ground truth"
                )
                out.append({"title": name, "note": note, "alt": alt, "src": source})
    return out


def _picture(file: Path) -> str | None:
    from PIL import Image

    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except OSError:
        return None
    if image.width > PICTURE_WIDTH:
        image = image.resize((PICTURE_WIDTH, round(image.height * PICTURE_WIDTH / image.width)))
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=82)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def _judged(verdict: Judged) -> dict[str, Any]:
    low, high = (None, None) if verdict.ci95 is None else verdict.ci95
    return {
        "name": verdict.row.name,
        "column": verdict.column.name,
        "key": verdict.key,
        "measured": _round(verdict.measured),
        "published": verdict.published,
        "low": _round(low),
        "high": _round(high),
        "tolerance": verdict.tolerance,
        "within": verdict.within,
        "hardware": verdict.hardware,
    }
