"""The papers' tables out of the board, as LaTeX and Markdown ready to paste.

Each table has the papers' own rows first, marked, then the measured ones. Only measured values are ever bold, and only
where a paired test puts them above every other measured value of their column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.board.board import (
    BEST,
    MEASURED,
    PUBLISHED,
    TWELVE,
    Board,
    Column,
    Judged,
    Row,
    standing,
)
from backbench.results import published
from backbench.runs import atomic
from backbench.runs.folder import log

BOLD = "Bold: above every other measured value by a paired test."


@dataclass(frozen=True)
class Wanted:
    """A column of a printed table: heading, and what may stand in it."""

    group: str
    heading: str
    task: str
    dataset: str
    metric: str


@dataclass(frozen=True)
class Table:
    name: str
    caption: str
    paper: str
    table: str
    wanted: tuple[Wanted, ...]


_NAMES = ("Aircraft", "Birdsnap", "Caltech-101", "Cars", "CIFAR10", "CIFAR100", "DTD", "Flowers", "Food", "Pets",
          "Places365", "SUN397")  # fmt: skip
_IMAGENET = (
    Wanted("", "Top-1", "linear", "imagenet", "top1"),
    Wanted("", "Top-5", "linear", "imagenet", "top5"),
)
_TRANSFER = (
    *(
        Wanted("", heading, "linear", name, metric)
        for heading, (name, metric) in zip(_NAMES, TWELVE.items())
    ),
    Wanted("", "Average", "linear", "average", "average"),
)
_SEMI = tuple(
    Wanted(f"{share}% labels", heading, f"semi_{share}pct", "imagenet", metric)
    for share in (1, 10)
    for heading, metric in (("Top-1", "top1"), ("Top-5", "top5"))
)
_COCO = tuple(
    Wanted(group, heading, task, "coco2017", f"{kind}_{heading}")
    for group, task, kind in (
        ("Faster R-CNN", "faster_rcnn", "bbox"),
        ("Mask R-CNN", "mask_rcnn", "segm"),
        ("Keypoint R-CNN", "keypoint_rcnn", "keypoints"),
    )
    for heading in ("AP", "AP50", "AP75")
)
TABLES = (
    Table(
        "lorac_table1",
        "Linear classification on frozen features, ImageNet-1K",
        "LORAC",
        "1",
        _IMAGENET,
    ),
    Table(
        "lorac_table2", "Linear classification on twelve other datasets", "LORAC", "2", _TRANSFER
    ),
    Table("lorac_table3", "Semi-supervised learning on ImageNet-1K", "LORAC", "3", _SEMI),
    Table(
        "lorac_table4",
        "Detection, instance segmentation and keypoints on COCO",
        "LORAC",
        "4",
        _COCO,
    ),
    Table(
        "jcl_table1", "Linear classification on frozen features, ImageNet-1K", "JCL", "1", _IMAGENET
    ),
    Table(
        "jcl_table2", "Detection, instance segmentation and keypoints on COCO", "JCL", "2", _COCO
    ),
)


@dataclass(frozen=True)
class Printed:
    """One line of one table: a value may be None (not measured), and bold only by test."""

    row: Row
    values: tuple[float | None, ...]
    bold: tuple[bool, ...]


def write(
    board: Board, judged: Sequence[Judged], *, latex: Path | None, markdown: Path | None
) -> None:
    """DIR/<table>.tex and DIR/<table>.md; one of each per set of protocols, where several were used for one table."""
    for table in TABLES:
        sets = protocol_sets(board, table) or [()]
        for n, columns in enumerate(sets):
            name = table.name + (f"_{_slug(columns)}" if n else "")
            lines = measured_lines(board, columns)
            if latex:
                atomic.write_text(latex / f"{name}.tex", to_latex(table, columns, lines))
            if markdown:
                atomic.write_text(markdown / f"{name}.md", to_markdown(table, columns, lines))
    if markdown:
        atomic.write_text(markdown / "board.md", board_markdown(board))
        atomic.write_text(markdown / "reproduction.md", reproduction_markdown(judged))
    for folder in {f for f in (latex, markdown) if f}:
        log.info(f"tables in {folder}")


def protocol_sets(board: Board, table: Table) -> list[tuple[Column | None, ...]]:
    """The measured columns of a table, one list per (protocol, engine): unlike protocols never share a table's column.

    Those that the paper used come first; a protocol that fills nothing of the table gives no list.
    """
    measured = {
        c
        for row in board.rows
        if row.source == MEASURED
        for c in board.columns
        if board.cell(row, c)
    }
    keys = {(c.protocol, c.engine) for c in measured for w in table.wanted if _is(c, w)}
    usual = {
        published.protocol(r)
        for r in published.rows()
        if (r.paper, r.table) == (table.paper, table.table)
    }
    out = []
    for protocol, engine in sorted(keys, key=lambda k: (k not in usual, k[0], k[1] or "")):
        fits = {
            w: c
            for c in measured
            for w in table.wanted
            if _is(c, w) and (c.protocol, c.engine) == (protocol, engine)
        }
        out.append(tuple(fits.get(w) for w in table.wanted))
    return out


def _is(column: Column, wanted: Wanted) -> bool:
    same = (column.task, column.dataset, column.metric) == (
        wanted.task,
        wanted.dataset,
        wanted.metric,
    )
    return same and column.split is None


def _slug(columns: Sequence[Column | None]) -> str:
    column = next(c for c in columns if c is not None)
    return published.slug(column.protocol + (f"-{column.engine}" if column.engine else ""))


def measured_lines(board: Board, columns: Sequence[Column | None]) -> list[Printed]:
    """The measured rows that have at least one of the columns, in the board's order."""
    best: dict[Column, set[str]] = {}
    for column in columns:
        if column is not None:
            marks = standing(board, column)
            best[column] = {checkpoint for checkpoint, mark in marks.items() if mark == BEST}
    out = []
    labels = board.labels()
    for row in board.rows:
        cells = [board.cell(row, c) if c is not None else None for c in columns]
        values = tuple(None if cell is None else cell.value for cell in cells)
        if row.source == MEASURED and any(v is not None for v in values):
            bold = tuple(c is not None and row.checkpoint in best[c] for c in columns)
            named = Row(row.checkpoint, labels[row.checkpoint], row.method, row.arch, row.epochs)
            out.append(Printed(named, values, bold))
    return out


def published_lines(table: Table) -> list[Printed]:
    """The rows that the paper printed, in its order."""
    rows: dict[str, Row] = {}
    values: dict[str, dict[tuple[str, str, str], float]] = {}
    for number in published.rows():
        if (number.paper, number.table) == (table.paper, table.table):
            name = (
                number.model
                if number.key.count(":") == 4
                else f"{number.model}, {number.note.split(':')[0]}"
            )
            rows.setdefault(
                number.key,
                Row(number.key, name, number.model, number.arch, number.epochs, PUBLISHED),
            )
            values.setdefault(number.key, {})[number.task, number.dataset, number.metric] = (
                number.value
            )
    return [
        Printed(
            row,
            tuple(values[key].get((w.task, w.dataset, w.metric)) for w in table.wanted),
            (False,) * 99,
        )
        for key, row in rows.items()
    ]


def _protocol_note(columns: Sequence[Column | None]) -> str:
    """By which protocol the measured rows of a table were made."""
    used = sorted(
        {c.protocol + (f" + {c.engine}" if c.engine else "") for c in columns if c is not None}
    )
    return ", ".join(used)


def to_latex(table: Table, columns: Sequence[Column | None], measured: Sequence[Printed]) -> str:
    """A booktabs table. Needs \\usepackage{booktabs}."""
    groups = [w.group for w in table.wanted]
    lines = [
        f"% {table.paper} Table {table.table}; made by backbench leaderboard --latex",
        r"\begin{table}[t]",
    ]
    note = f" Measured by {_latex(_protocol_note(columns))}." if measured else ""
    bold = f" {BOLD}" if any(any(p.bold) for p in measured) else ""
    lines += [
        r"\centering",
        rf"\caption{{{_latex(table.caption)}, in \%.{note}{bold}}}",
        rf"\label{{tab:{table.name}}}",
    ]
    lines += [rf"\begin{{tabular}}{{ll{'c' * len(table.wanted)}}}", r"\toprule"]
    if any(groups):
        spans = [(g, groups.count(g)) for g in dict.fromkeys(groups)]
        lines.append(
            " & & "
            + " & ".join(rf"\multicolumn{{{n}}}{{c}}{{{_latex(g)}}}" for g, n in spans)
            + r" \\"
        )
    lines += [
        "Model & Epochs & " + " & ".join(_latex(w.heading) for w in table.wanted) + r" \\",
        r"\midrule",
    ]
    span = 2 + len(table.wanted)
    lines.append(
        rf"\multicolumn{{{span}}}{{l}}{{\emph{{Published}} ({table.paper}, Table {table.table})}} \\"
    )
    lines += [_latex_line(p) for p in published_lines(table)]
    lines += [r"\midrule", rf"\multicolumn{{{span}}}{{l}}{{\emph{{Measured}}}} \\"]
    lines += [_latex_line(p) for p in measured] or [
        rf"\multicolumn{{{span}}}{{l}}{{nothing measured yet}} \\"
    ]
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _latex_line(printed: Printed) -> str:
    cells = [
        "--" if v is None else rf"\textbf{{{v:.1f}}}" if bold else f"{v:.1f}"
        for v, bold in zip(printed.values, printed.bold)
    ]
    epochs = "--" if printed.row.epochs is None else str(printed.row.epochs)
    return " & ".join([_latex(printed.row.name), epochs, *cells]) + r" \\"


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(char, "\\" + char if char in "&%$#_{}" else char) for char in text)


def to_markdown(table: Table, columns: Sequence[Column | None], measured: Sequence[Printed]) -> str:
    """A pipe table with the same lines."""
    heads = [f"{w.group}: {w.heading}" if w.group else w.heading for w in table.wanted]
    lines = [f"**{table.caption}**, in %. Layout of {table.paper} Table {table.table}.", ""]
    lines += [
        _pipes(["Model", "Epochs", "Source", *heads]),
        _pipes(["---", "---:", "---", *["---:"] * len(heads)]),
    ]
    for printed in (*published_lines(table), *measured):
        cells = [
            "" if v is None else f"**{v:.1f}**" if bold else f"{v:.1f}"
            for v, bold in zip(printed.values, printed.bold)
        ]
        epochs = "" if printed.row.epochs is None else str(printed.row.epochs)
        lines.append(_pipes([printed.row.name, epochs, printed.row.source, *cells]))
    if measured:
        lines += [
            "",
            f"Measured by {_protocol_note(columns)}. {BOLD}",
        ]
    else:
        lines += ["", "Nothing measured yet."]
    return "\n".join(lines) + "\n"


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def board_markdown(board: Board) -> str:
    """Every measured column, as it stands in the csv, with half-widths of the intervals."""
    rows = [row for row in board.rows if row.source == MEASURED]
    columns = [c for c in board.columns if any(board.cell(row, c) for row in rows)]
    labels = board.labels()
    lines = [
        _pipes(["column", *(labels[row.checkpoint] for row in rows)]),
        _pipes(["---", *["---:"] * len(rows)]),
    ]
    for column in columns:
        marks = standing(board, column)
        cells = []
        for row in rows:
            cell = board.cell(row, column)
            if cell is None or cell.value is None:
                cells.append("" if cell is None else "undefined")
                continue
            half = "" if cell.ci95 is None else f" ±{(cell.ci95[1] - cell.ci95[0]) / 2:.1f}"
            value = f"{cell.value:.1f}"
            cells.append((f"**{value}**" if marks.get(row.checkpoint) == BEST else value) + half)
        lines.append(_pipes([f"`{column.name}`", *cells]))
    return "\n".join(lines) + "\n"


def reproduction_markdown(judged: Sequence[Judged]) -> str:
    """What was judged against a published number, with the verdict and the hardware."""
    if not judged:
        return "No checkpoint here names a published row by a protocol that was run: nothing was judged.\n"
    head = [
        "checkpoint",
        "column",
        "published row",
        "published",
        "measured",
        "95% interval",
        "tolerance",
        "verdict",
    ]
    lines = [_pipes([*head, "hardware"]), _pipes(["---"] * (len(head) + 1))]
    for j in judged:
        interval = "" if j.ci95 is None else f"{j.ci95[0]:.2f} to {j.ci95[1]:.2f}"
        verdict = "within" if j.within else "**outside**"
        cells = [
            j.row.name,
            j.column.name,
            j.key,
            f"{j.published:g}",
            f"{j.measured:.2f}",
            interval,
        ]
        lines.append(_pipes([*cells, f"{j.tolerance:g}", verdict, j.hardware]))
    return "\n".join(lines) + "\n"
