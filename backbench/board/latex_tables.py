"""The papers' tables out of the board, as LaTeX and Markdown ready to paste.

Each table has the papers' own rows first, marked, then the measured ones. Only measured values are
ever bold, and only where a paired test puts them above every other measured value of their column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backbench.board.board import (
    AVERAGE,
    BEST,
    PUBLISHED,
    Board,
    Cell,
    Column,
    Row,
    joined,
    standing,
    text_of,
)
from backbench.board.judge import Judged
from backbench.board.overall import Overall, answer
from backbench.datasets.catalog import DATASETS, TWELVE
from backbench.results import column_keys, judging_rules, published
from backbench.runs import atomic
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.untrusted import printable

BOLD = "Bold: above every other measured value by a paired test."


@dataclass(frozen=True)
class Wanted:
    """A column of a printed table: heading, and what may stand in it."""

    group: str
    heading: str
    task: str
    dataset: str
    metric: str
    split: str | None = None  # where it is not the task's

    def fits(self, column: Column) -> bool:
        """Whether `column` is this one by some protocol, on the split that it is usually about."""
        same = (column.task, column.dataset, column.metric) == (
            self.task,
            self.dataset,
            self.metric,
        )
        usual = self.split or TASKS[self.task].split
        return same and (column.split or column_keys.USUAL_SPLIT) == usual


@dataclass(frozen=True)
class PaperTable:
    name: str
    caption: str
    paper: str
    table: str
    wanted: tuple[Wanted, ...]

    @property
    def where(self) -> str:
        """Table 1, Fig. 7; Section 4.1, whose numbers stand in the text."""
        if self.table.startswith("Fig."):
            return f"Fig. {self.table.removeprefix('Fig.')}"
        kind = "Section" if "_sec" in self.name else "Table"
        return f"{kind} {self.table}"


_IMAGENET = (
    Wanted("", "Top-1", "linear", "imagenet", "top1"),
    Wanted("", "Top-5", "linear", "imagenet", "top5"),
)


def _heading(dataset: str) -> str:
    """A dataset's name as LORAC writes it."""
    if dataset.startswith(("cifar", "dtd", "stl", "sun")):
        return dataset.upper()
    return dataset.capitalize().replace("Caltech", "Caltech-")


def _transfer() -> tuple[Wanted, ...]:
    wanted = []
    for name in TWELVE:
        wanted.append(Wanted("", _heading(name), "linear", name, DATASETS[name].metric))
    return (*wanted, Wanted("", "Average", "linear", AVERAGE, AVERAGE))


def _semi() -> tuple[Wanted, ...]:
    wanted = []
    for task in TASKS.values():
        if task.percent is not None:
            group = f"{task.percent}% labels"
            wanted.append(Wanted(group, "Top-1", task.name, "imagenet", "top1"))
            wanted.append(Wanted(group, "Top-5", task.name, "imagenet", "top5"))
    return tuple(wanted)


def _coco() -> tuple[Wanted, ...]:
    wanted = []
    for task in TASKS.values():
        if task.detects:
            kind = task.ious[0]
            for ap in ("AP", "AP50", "AP75"):
                wanted.append(Wanted(task.title, ap, task.name, "coco2017", f"{kind}_{ap}"))
    return tuple(wanted)


_HEADINGS = {"top1": "Top-1", "top5": "Top-5", "train_top1": "Train top-1"}


def _printed(name: str, caption: str, paper: str, table: str) -> PaperTable:
    """A table whose columns are the sets and metrics that it prints, as they are measured."""
    wanted: dict[tuple[str, str, str], Wanted] = {}
    for n in published.rows():
        if (n.paper, n.table) != (paper, table) or judging_rules.reason(n) == judging_rules.SPREAD:
            continue
        measured = judging_rules.as_measured(n)
        group = joined(" ", _heading(n.dataset), "kNN" if n.task == "knn" else None)
        heading = _HEADINGS[measured.metric.removesuffix("_k5")]
        column = Wanted(group, heading, n.task, n.dataset, measured.metric, measured.split)
        wanted.setdefault((n.task, n.dataset, measured.metric), column)
    # The sets in the order of the paper, and what is of one set side by side.
    groups = list(dict.fromkeys(w.group for w in wanted.values()))
    columns = sorted(wanted.values(), key=lambda w: groups.index(w.group))
    return PaperTable(name, caption, paper, table, tuple(columns))


_LINEAR_CAPTION = "Linear classification on frozen features, ImageNet-1K"
_COCO_CAPTION = "Detection, instance segmentation and keypoints on COCO"
TABLES = (
    PaperTable("lorac_table1", _LINEAR_CAPTION, "LORAC", "1", _IMAGENET),
    PaperTable(
        "lorac_table2", "Linear classification on twelve other datasets", "LORAC", "2", _transfer()
    ),
    PaperTable("lorac_table3", "Semi-supervised learning on ImageNet-1K", "LORAC", "3", _semi()),
    PaperTable("lorac_table4", _COCO_CAPTION, "LORAC", "4", _coco()),
    PaperTable("jcl_table1", _LINEAR_CAPTION, "JCL", "1", _IMAGENET),
    PaperTable("jcl_table2", _COCO_CAPTION, "JCL", "2", _coco()),
    _printed("lorac_table5", "Priors on ImageNet-100", "LORAC", "5"),
    _printed("mio_table4", "Linear classification on CIFAR and STL-10", "MIO", "4"),
    _printed("mio_sec41", "Learning rate and temperature", "MIO", "4.1"),
    _printed("arb_table1", "Linear classification on CIFAR and ImageNet-100", "ARB", "1"),
    _printed("arb_table2", _LINEAR_CAPTION, "ARB", "2"),
    _printed("arb_table3", "Direct alignment and the base", "ARB", "3"),
    _printed("arb_table4", "Losses on ImageNet-100", "ARB", "4"),
    _printed("arb_table5", "Over features and over instances", "ARB", "5"),
    _printed("arb_fig7", "Convergence on CIFAR-100", "ARB", "Fig.7"),
    _printed("cllr_table1", "Dimensions on STL-10 and CIFAR-10", "CLLR", "1"),
    _printed("cllr_table3", "Negatives on ImageNet-100", "CLLR", "3"),
    _printed("cllr_table01", "lambda and alpha on STL-10", "CLLR", "0.1"),
    _printed("cllr_table02", "lambda and alpha on CIFAR-10", "CLLR", "0.2"),
    _printed("cllr_table04", "Beside distillation", "CLLR", "0.4"),
    _printed("cllr_table05", "On hosts without negatives", "CLLR", "0.5"),
    _printed("cllr_table06", "SGD and Adam on CIFAR-10", "CLLR", "0.6"),
)


@dataclass(frozen=True)
class Printed:
    """One line of one table: a value may be None (not measured), and bold only by test."""

    row: Row
    values: tuple[float | None, ...]
    bold: tuple[bool, ...]


Columns = Sequence[Column | None]  # one for each Wanted of a table; None where nothing fits


def write(
    board: Board,
    judged: Sequence[Judged],
    sets: Sequence[Overall] = (),
    *,
    latex: Path | None,
    markdown: Path | None,
) -> None:
    """DIR/<table>.tex and DIR/<table>.md; one of each per set of protocols, where several were used
    for one table."""
    for table in TABLES:
        # A table of which nothing was measured is written too, with the paper's rows alone.
        ways = protocol_sets(board, table) or [()]
        for n, columns in enumerate(ways):
            # The first of them has the table's own name, the others say by what they were measured.
            name = joined("_", table.name, _slug(columns) if n else None)
            lines = measured_lines(board, columns)
            if latex:
                atomic.write_text(latex / f"{name}.tex", to_latex(table, columns, lines))
            if markdown:
                atomic.write_text(markdown / f"{name}.md", to_markdown(table, columns, lines))
    if markdown:
        atomic.write_text(markdown / "board.md", board_markdown(board, sets))
        atomic.write_text(markdown / "reproduction.md", reproduction_markdown(judged))
    for folder in dict.fromkeys((latex, markdown)):
        if folder:
            log.info(f"tables in {folder}")


def protocol_sets(board: Board, table: PaperTable) -> list[tuple[Column | None, ...]]:
    """The measured columns of a table, one list per (protocol, engine): unlike protocols never
    share a table's column.

    Those that the paper used come first; a protocol that fills nothing of the table gives no list.
    """
    found: dict[tuple[str, str | None], dict[Wanted, Column]] = {}
    for column in board.measured_columns():
        for wanted in table.wanted:
            if wanted.fits(column):
                found.setdefault((column.protocol, column.engine), {})[wanted] = column
    # In the order: ways that the paper's own rows were scored by, then the others by name.
    papers = {judging_rules.protocol(number) for number in _numbers(table)}

    # A table of several sets has a protocol for each: of the paper's own ways, those that fill
    # different columns stand side by side.
    filled: list[dict[Wanted, Column]] = []
    for way in sorted(found, key=lambda way: (way not in papers, way[0], way[1] or "")):
        beside = next((f for f in filled if way in papers and not f.keys() & found[way]), None)
        if beside is None:
            filled.append(dict(found[way]))
        else:
            beside.update(found[way])
    return [tuple(map(columns.get, table.wanted)) for columns in filled]


def _numbers(table: PaperTable) -> list[published.Published]:
    """What the paper printed in this table, in its order."""
    return [n for n in published.rows() if (n.paper, n.table) == (table.paper, table.table)]


def _slug(columns: Columns) -> str:
    column = next(filter(None, columns))
    return published.slug(joined("-", column.protocol, column.engine))


def measured_lines(board: Board, columns: Columns) -> list[Printed]:
    """The measured rows that have at least one of the columns, in the board's order."""
    best: set[tuple[str, Column]] = set()
    for column in columns:
        if column is not None:
            for checkpoint, mark in standing(board, column).items():
                if mark == BEST:
                    best.add((checkpoint, column))
    lines = []
    labels = board.labels()
    for row in board.measured_rows:
        values: list[float | None] = [None] * len(columns)
        bold = [False] * len(columns)
        for place, column in enumerate(columns):
            cell = None if column is None else board.cell(row, column)
            if column is not None and cell is not None:
                values[place] = cell.value
                bold[place] = (row.checkpoint, column) in best
        if values.count(None) < len(values):
            named = replace(row, name=labels[row.checkpoint])
            lines.append(Printed(named, tuple(values), tuple(bold)))
    return lines


def published_lines(table: PaperTable) -> list[Printed]:
    """The rows that the paper printed, in its order."""
    # One key is one printed row; its numbers come one by one.
    rows: dict[str, Row] = {}
    values: dict[str, dict[tuple[str, str, str], float]] = {}
    for n in _numbers(table):
        name, key = n.model, n.printed_row
        # A key of five parts names its model alone; the note begins with what a sixth is for.
        if key.count(":") > 4:
            name += f", {published.variant(n.note)}"
        rows.setdefault(key, Row(key, name, n.model, n.arch, n.epochs, PUBLISHED))
        measured = judging_rules.as_measured(n)
        values.setdefault(key, {})[n.task, n.dataset, measured.metric] = measured.value
    lines = []
    wanted = [(w.task, w.dataset, w.metric) for w in table.wanted]
    for key, row in rows.items():
        line = tuple(map(values[key].get, wanted))
        lines.append(Printed(row, line, (False,) * len(line)))
    return lines


def _protocol_note(columns: Columns) -> str:
    """By which protocol the measured rows of a table were made."""
    used = {joined(" + ", column.protocol, column.engine) for column in filter(None, columns)}
    return ", ".join(sorted(used))


# ---- LaTeX


def to_latex(table: PaperTable, columns: Columns, measured: Sequence[Printed]) -> str:
    """A booktabs table. Needs \\usepackage{booktabs}."""
    width = len(table.wanted)
    across = rf"\multicolumn{{{2 + width}}}{{l}}"
    caption = rf"{_latex(table.caption)}, in \%."
    if measured:
        caption += f" Measured by {_latex(_protocol_note(columns))}."
    if any(any(printed.bold) for printed in measured):
        caption += f" {BOLD}"
    headings = [_latex(w.heading) for w in table.wanted]
    lines = [
        f"% {table.paper} {table.where}; made by backbench leaderboard --latex",
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{ll{'c' * width}}}",
        r"\toprule",
        *_latex_groups(table),
        _ampersands(["Model", "Epochs", *headings]),
        r"\midrule",
        rf"{across}{{\emph{{Published}} ({table.paper}, {table.where})}} \\",
        *map(_latex_line, published_lines(table)),
        r"\midrule",
        rf"{across}{{\emph{{Measured}}}} \\",
        *map(_latex_line, measured),
    ]
    if not measured:
        lines.append(rf"{across}{{nothing measured yet}} \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _latex_groups(table: PaperTable) -> list[str]:
    """The line above the headings, for a table that groups them."""
    groups = [w.group for w in table.wanted]
    if not any(groups):
        return []
    heads = []
    # Columns of one group are neighbours, so a heading spans as many columns as bear its name.
    for group in dict.fromkeys(groups):
        heads.append(rf"\multicolumn{{{groups.count(group)}}}{{c}}{{{_latex(group)}}}")
    return [" & & " + _ampersands(heads)]


def _latex_line(printed: Printed) -> str:
    row = printed.row
    cells = [_latex(row.name), text_of(row.epochs, "d", missing="--")]
    for value, bold in zip(printed.values, printed.bold):
        text = text_of(value, ".1f", missing="--")
        if bold and value is not None:
            text = rf"\textbf{{{text}}}"
        cells.append(text)
    return _ampersands(cells)


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{char: "\\" + char for char in "&%$#_{}"},
    }
)


def _latex(text: str) -> str:
    """`text` on one line, with what LaTeX would take for a command escaped."""
    line = printable.shown(" ".join(text.split()), 400).translate(_LATEX)
    # After the end of a line, these would be an option of that end
    return f"{{}}{line}" if line.startswith(("[", "*")) else line


# ---- Markdown


def to_markdown(table: PaperTable, columns: Columns, measured: Sequence[Printed]) -> str:
    """A pipe table with the same lines."""
    heads = [joined(": ", w.group, w.heading) for w in table.wanted]
    lines = [
        f"**{table.caption}**, in %. Layout of {table.paper} {table.where}.",
        "",
        _pipes(["Model", "Epochs", "Source", *heads]),
        _pipes(["---", "---:", "---", *["---:"] * len(heads)]),
    ]
    for printed in (*published_lines(table), *measured):
        row = printed.row
        cells = [_markdown(row.name), text_of(row.epochs, "d"), row.source]
        for value, bold in zip(printed.values, printed.bold):
            cells.append(_bold(text_of(value, ".1f"), bold and value is not None))
        lines.append(_pipes(cells))
    note = "Nothing measured yet."
    if measured:
        note = f"Measured by {_markdown(_protocol_note(columns))}. {BOLD}"
    return "\n".join([*lines, "", note]) + "\n"


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_MARKDOWN = str.maketrans(
    {**{char: "\\" + char for char in "\\`*[]"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"}
)


def _markdown(text: str, most: int = 400) -> str:
    """`text` on one line, with what Markdown would take for a tag, a link or emphasis escaped."""
    return printable.shown(" ".join(text.split()), most).translate(_MARKDOWN)


def _bold(text: str, really: bool = True) -> str:
    return f"**{text}**" if really else text


def board_markdown(board: Board, sets: Sequence[Overall]) -> str:
    """The answer, the ranks over each set of columns, and every measured column as it stands in
    the csv, with half-widths of the intervals."""
    rows, labels = board.measured_rows, board.labels()
    lines = [_markdown(answer(board, sets), 2000), "", *_ranks_markdown(sets, labels), "", BOLD, ""]
    lines += [
        _pipes(["column", *(_markdown(labels[row.checkpoint]) for row in rows)]),
        _pipes(["---", *["---:"] * len(rows)]),
    ]
    for column in board.measured_columns():
        marks = standing(board, column)
        cells = [f"`{column.name}`"]
        # An empty field was not run; "undefined" was, and has no value.
        for row in rows:
            best = marks.get(row.checkpoint) == BEST
            cells.append(_board_cell(board.cell(row, column), best))
        lines.append(_pipes(cells))
    return "\n".join(lines) + "\n"


def _ranks_markdown(sets: Sequence[Overall], labels: Mapping[str, str]) -> list[str]:
    """A table for each set: rank, its interval, the mean of ranks, and what should be won."""
    lines: list[str] = []
    for of in sets:
        lines += [
            "",
            f"Ranks over {of.title}, {of.basis}:",
            "",
            _pipes(["rank", "95% interval", "average rank", "wins %", "columns", "checkpoint"]),
            _pipes([*["---:"] * 5, "---"]),
        ]
        for row, place in zip(of.rows, of.standing.places, strict=True):
            low, high = place.interval
            cells = [str(place.rank), f"{low} to {high}", text_of(place.average, ".2f")]
            cells += [f"{place.win_rate:.0f}", str(place.columns)]
            lines.append(
                _pipes([*cells, _bold(_markdown(labels[row.checkpoint]), place.group == 1)])
            )
    return lines[1:]


def _board_cell(cell: Cell | None, best: bool) -> str:
    if cell is None:
        return ""
    if cell.value is None:
        return "undefined"
    half = "" if cell.half_width is None else f" ±{cell.half_width:.1f}"
    return _bold(f"{cell.value:.1f}", best) + half


def reproduction_markdown(judged: Sequence[Judged]) -> str:
    """What was judged against a published number, with the verdict and the hardware."""
    if not judged:
        return (
            "No checkpoint here names a published row by a protocol that was run: "
            "nothing was judged.\n"
        )
    head = ("checkpoint", "column", "published row", "published", "measured", "95% interval",
            "tolerance", "verdict", "hardware")  # fmt: skip
    lines = [_pipes(head), _pipes(["---"] * len(head))]
    for j in judged:
        interval = ""
        if j.ci95 is not None:
            interval = f"{j.ci95[0]:.2f} to {j.ci95[1]:.2f}"
        cells = [
            _markdown(j.row.name),
            _markdown(j.column.name),
            _markdown(j.key),
            f"{j.published:g}",
            f"{j.measured:.2f}",
            interval,
            f"{j.tolerance:g}",
            j.said if j.within else _bold(j.said),
            _markdown(j.hardware),
        ]
        lines.append(_pipes(cells))
    return "\n".join(lines) + "\n"
