"""The board's own table and the papers' tables made from the board, as LaTeX and Markdown.

Printed tables have the papers' own rows first, marked. Only measured values are ever bold, and only
if a paired test puts them above every other measured value of their column. A table's caption is
the title of the grid that measures it (configs/grids).
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from backbench.board import overall
from backbench.board.board import (
    BEST,
    ONCE,
    PUBLISHED,
    TIED,
    UNSETTLED,
    Board,
    Column,
    Row,
    joined,
    standing,
    text_of,
)
from backbench.board.export import escaped, from_to, pipe_table
from backbench.board.overall import Overall
from backbench.published import judging_rules, published
from backbench.published.judge import Judged
from backbench.published.judging_rules import column_of
from backbench.recipes import config
from backbench.records import column_keys
from backbench.runs import atomic
from backbench.tasks import TASKS
from backbench.untrusted import printable

# ---- the two formats

BOLD = "Bold: above every other measured value by a paired test."
ITALIC = "Italic: the highest, and those that no test tells from it."
RING = "°: best of one training each."
UNFINISHED = "†: not ranked; the fit has not converged, or the page says why."

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
    # After the end of a line, LaTeX would read these as an option of that line end.
    return f"{{}}{line}" if line.startswith(("[", "*")) else line


class Form(NamedTuple):
    """How one of the two formats writes the cells of a table."""

    escaped: Callable[[str], str]
    marks: Mapping[str | None, str]  # of board.standing; others are written without one
    half: str  # half of a 95% interval, behind its value
    missing: str  # nothing was measured or printed
    undefined: str  # measured, without a value

    def number(self, value: float | None, mark: str | None) -> str:
        return self.marks.get(mark, "{}").format(
            text_of(value, ".1f", missing=self.missing)
        )


LATEX = Form(
    escaped=_latex,
    marks={
        BEST: r"\textbf{{{}}}",
        TIED: r"\textit{{{}}}",
        ONCE: r"{}$^\circ$",
        UNSETTLED: r"{}$^\dagger$",
    },
    half=r" {{\scriptsize$\pm${:.1f}}}",
    missing="--",
    undefined="--",
)
MARKDOWN = Form(
    escaped=escaped,
    marks={BEST: "**{}**", TIED: "*{}*", ONCE: "{}°", UNSETTLED: "{}†"},
    half=" ±{:.1f}",
    missing="",
    undefined="undefined",
)


# ---- the columns of a printed table


@dataclass(frozen=True)
class TableColumn:
    """A column of a printed table: its heading, and which measured columns fit it."""

    group: str
    heading: str
    task: str
    dataset: str
    metric: str
    split: str | None = None  # where it differs from the task's usual split

    @property
    def key(self) -> tuple[str, str, str]:
        return self.task, self.dataset, self.metric

    def fits(self, column: Column) -> bool:
        """True where `column` is this one by some protocol, on the task's usual split."""
        usual = self.split or TASKS[self.task].split
        split = column.split or column_keys.USUAL_SPLIT
        return (
            column.task,
            column.dataset,
            column.metric,
        ) == self.key and split == usual


@dataclass(frozen=True)
class PaperTable:
    """One printed table."""

    paper: str
    table: str
    columns: tuple[TableColumn, ...]

    @property
    def name(self) -> str:
        """That of the grid that measures it."""
        return published.grid_name(self.paper, self.table)

    @property
    def where(self) -> str:
        """LORAC Table 1."""
        return f"{self.paper} {published.place_in_paper(self.table)}"

    @property
    def caption(self) -> str:
        return str(config.read_recipe(config.find_recipe(self.name, "grids"))["title"])

    def numbers(self) -> list[published.Published]:
        """The printed numbers, in the paper's order."""
        return [
            n
            for n in published.rows()
            if (n.paper, n.table) == (self.paper, self.table)
        ]


def _dataset_heading(dataset: str) -> str:
    """A dataset's name as LORAC writes it."""
    if dataset.startswith(("cifar", "dtd", "stl", "sun")):
        return dataset.upper()
    return dataset.capitalize().replace("Caltech", "Caltech-")


_METRIC_HEADINGS = {"top1": "Top-1", "top5": "Top-5", "train_top1": "Train top-1"}


def _column(n: published.Published) -> TableColumn:
    """The column of a printed number, as it is measured, under the paper's headings."""
    task, measured = TASKS[n.task], judging_rules.as_measured(n)
    group = joined(" ", _dataset_heading(n.dataset), "kNN" if n.task == "knn" else None)
    metric = measured.metric.removesuffix("_k5")
    heading = _METRIC_HEADINGS.get(metric) or metric.rpartition("_")[2]  # AP of bbox_AP
    if (n.paper, n.table) == ("LORAC", "2"):
        group, heading = "", group
    elif task.detects:
        group = task.title
    elif task.percent is not None:
        group = f"{task.percent}% labels"
    elif n.dataset == "imagenet" and n.paper in ("LORAC", "JCL"):
        group = ""
    return TableColumn(
        group, heading, n.task, n.dataset, measured.metric, measured.split
    )


def tables() -> list[PaperTable]:
    """Every table that prints scores, in the order of published.csv."""
    columns: dict[
        tuple[str, str], dict[TableColumn, None]
    ] = {}  # the inner ones as sets
    for n in published.rows():
        if judging_rules.reason(n) not in judging_rules.NO_SCORES:
            columns.setdefault((n.paper, n.table), {})[_column(n)] = None
    out = []
    for (paper, table), of in columns.items():
        # In the order of the paper, with the columns of one group side by side
        groups = [column.group for column in of]
        ordered = sorted(of, key=lambda column: groups.index(column.group))
        out.append(PaperTable(paper, table, tuple(ordered)))
    return out


# ---- the lines of a table


@dataclass(frozen=True)
class TableLine:
    """One line of a table; a value is None where nothing was measured or printed."""

    row: Row
    values: Sequence[float | None]
    marks: Sequence[str | None]  # those of board.standing


Columns = Sequence[
    Column | None
]  # one for each TableColumn; None where no measured column fits


def protocol_sets(board: Board, table: PaperTable) -> list[tuple[Column | None, ...]]:
    """The measured columns of a table, one list per (protocol, engine), the paper's first. Unlike
    protocols never share a column, and a protocol that fills none gives no list."""
    fitting: dict[tuple[str, str | None], dict[TableColumn, Column]] = {}
    for column in board.measured_columns():
        for wanted in table.columns:
            if wanted.fits(column):
                fitting.setdefault((column.protocol, column.engine), {})[wanted] = (
                    column
                )
    papers_own = {(c.protocol, c.engine) for c in map(column_of, table.numbers())}

    # A table of several datasets has a protocol for each: of the paper's own protocols, those that
    # fill different columns stand side by side.
    sets: list[dict[TableColumn, Column]] = []
    for way in sorted(
        fitting, key=lambda way: (way not in papers_own, way[0], way[1] or "")
    ):
        columns = fitting[way]
        beside = [one for one in sets if way in papers_own and not one.keys() & columns]
        if beside:
            beside[0].update(columns)
        else:
            sets.append(columns)
    return [tuple(map(one.get, table.columns)) for one in sets]


def measured_lines(board: Board, columns: Columns) -> list[TableLine]:
    """The measured rows that have a value in at least one of the columns, in the board's order."""
    lines, labels = [], board.labels()
    for row in board.measured_rows:
        values: list[float | None] = [None] * len(columns)
        marks: list[str | None] = [None] * len(columns)
        for n, column in enumerate(columns):
            cell = None if column is None else board.cell(row, column)
            if column is not None and cell is not None:
                values[n], marks[n] = (
                    cell.value,
                    standing(board, column).get(row.checkpoint),
                )
        if any(value is not None for value in values):
            lines.append(
                TableLine(replace(row, name=labels[row.checkpoint]), values, marks)
            )
    return lines


def published_lines(table: PaperTable) -> list[TableLine]:
    """The rows that the paper printed, in its order."""
    # One key is one printed row; its numbers come one by one.
    rows: dict[str, Row] = {}
    values: dict[str, dict[tuple[str, str, str], float]] = {}
    for n in table.numbers():
        name, key = n.model, n.printed_row
        # A key with a sixth part is one of several rows under one name; the note tells them apart.
        if key.count(":") > 4:
            name += f", {published.variant(n.note)}"
        rows.setdefault(key, Row(key, name, n.model, n.arch, n.epochs, PUBLISHED))
        measured = judging_rules.as_measured(n)
        values.setdefault(key, {})[n.task, n.dataset, measured.metric] = measured.value
    lines = []
    for key, row in rows.items():
        line = [values[key].get(column.key) for column in table.columns]
        lines.append(TableLine(row, line, [None] * len(line)))
    return lines


def _protocols_of(columns: Columns) -> str:
    """The protocols by which the measured rows of a table were made."""
    used = {
        joined(" + ", column.protocol, column.engine)
        for column in filter(None, columns)
    }
    return ", ".join(sorted(used))


# ---- files


def write(
    board: Board,
    judged: Sequence[Judged],
    sets: Sequence[Overall] = (),
    *,
    latex: Path | None,
    markdown: Path | None,
) -> None:
    """Write DIR/<table>.tex and .md, one of each for every set of protocols of a table."""
    for table in tables():
        # A table of which nothing was measured is written too, with the paper's rows alone.
        for n, columns in enumerate(protocol_sets(board, table) or [()]):
            # The first set has the table's own name, the others add their protocol to it.
            name = table.name
            if n:
                first = next(column for column in columns if column is not None)
                name += "_" + published.slug(joined("-", first.protocol, first.engine))
            lines = measured_lines(board, columns)
            if latex:
                atomic.write_text(
                    latex / f"{name}.tex", to_latex(table, columns, lines)
                )
            if markdown:
                atomic.write_text(
                    markdown / f"{name}.md", to_markdown(table, columns, lines)
                )
    if latex:
        atomic.write_text(latex / "board.tex", board_to_latex(board))
    if markdown:
        atomic.write_text(markdown / "board.md", board_page(board, sets))
        atomic.write_text(markdown / "reproduction.md", reproduction_page(judged))


# ---- the papers' tables


def to_latex(table: PaperTable, columns: Columns, measured: Sequence[TableLine]) -> str:
    """A booktabs table. Needs \\usepackage{booktabs}."""
    width = len(table.columns)
    across = rf"\multicolumn{{{2 + width}}}{{l}}"
    caption = rf"{_latex(table.caption)}, in \%."
    if measured:
        caption += f" Measured by {_latex(_protocols_of(columns))}."
    caption += _legend({mark for line in measured for mark in line.marks})
    heads = []
    # Columns of one group are neighbours, so a heading spans as many columns as bear its name.
    groups = Counter(column.group for column in table.columns)
    if any(groups):
        above = [
            rf"\multicolumn{{{n}}}{{c}}{{{_latex(group)}}}"
            for group, n in groups.items()
        ]
        heads.append(" & & " + _ampersands(above))
    names = [_latex(column.heading) for column in table.columns]
    heads.append(_ampersands(["Model", "Epochs", *names]))
    body = [rf"{across}{{\emph{{Published}} ({table.where.replace(' ', ', ', 1)})}} \\"]
    body += [
        _ampersands([*w, *numbers])
        for w, numbers in _cells(published_lines(table), LATEX)
    ]
    body += [r"\midrule", rf"{across}{{\emph{{Measured}}}} \\"]
    body += [_ampersands([*w, *numbers]) for w, numbers in _cells(measured, LATEX)]
    if not measured:
        body.append(rf"{across}{{nothing measured yet}} \\")
    comment = f"% {table.where}; made by backbench leaderboard --latex"
    of = {"caption": caption, "label": table.name, "form": "ll" + "c" * width}
    return _latex_table([comment], heads, body, **of)


def to_markdown(
    table: PaperTable, columns: Columns, measured: Sequence[TableLine]
) -> str:
    """A pipe table with the same lines."""
    heads = {"Model": "---", "Epochs": "---:", "Source": "---"}
    for column in table.columns:
        heads[joined(": ", column.group, column.heading)] = "---:"
    lines = [*published_lines(table), *measured]
    rows = []
    for line, (who, numbers) in zip(lines, _cells(lines, MARKDOWN)):
        rows.append([*who, line.row.source, *numbers])
    note = "Nothing measured yet."
    if measured:
        note = f"Measured by {escaped(_protocols_of(columns))}. {BOLD} {ITALIC} {RING}"
        if any(UNSETTLED in line.marks for line in measured):
            note += f" {UNFINISHED}"
    title = f"**{table.caption}**, in %. Layout of {table.where}."
    return "\n".join([title, "", *pipe_table(heads, rows), "", note]) + "\n"


def _cells(
    lines: Sequence[TableLine], form: Form
) -> Iterator[tuple[list[str], list[str]]]:
    """(name and epochs, numbers) of each line."""
    for line in lines:
        epochs = text_of(line.row.epochs, "d", missing=form.missing)
        yield (
            [form.escaped(line.row.name), epochs],
            list(map(form.number, line.values, line.marks)),
        )


def _latex_table(
    comments: Sequence[str], heads: Sequence[str], body: Sequence[str], **of: str
) -> str:
    """A booktabs table `of` a caption, a label and a form of columns."""
    begin = [r"\begin{table}[t]", r"\centering", rf"\caption{{{of['caption']}}}"]
    begin += [
        rf"\label{{tab:{of['label']}}}",
        rf"\begin{{tabular}}{{{of['form']}}}",
        r"\toprule",
    ]
    end = [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join([*comments, *begin, *heads, r"\midrule", *body, *end]) + "\n"


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _legend(marks: Container[str | None]) -> str:
    """The meaning of each mark that a LaTeX table has."""
    ring, dagger = (
        RING.replace("°", r"$^\circ$"),
        UNFINISHED.replace("†", r"$^\dagger$"),
    )
    meanings = ((BEST, BOLD), (TIED, ITALIC), (ONCE, ring), (UNSETTLED, dagger))
    return "".join(f" {words}" for mark, words in meanings if mark in marks)


# ---- the board's own table: a row for each checkpoint, a column for each main metric


def board_to_latex(board: Board) -> str:
    """The table with the 95% intervals' halves and the page's marks. Needs \\usepackage{booktabs}."""
    columns = board.main_columns()
    heads = ["Checkpoint"]
    for heading in headings(columns):
        lines_of_head = r"\\".join(map(_latex, heading))
        heads.append(rf"\shortstack{{{lines_of_head}}}")
    body = list(map(_ampersands, _board_cells(board, columns, LATEX)))
    comments = ["% made by backbench leaderboard --latex"]
    comments += [f"% column {n}: {column.name}" for n, column in enumerate(columns, 1)]
    used = {mark for column in columns for mark in standing(board, column).values()}
    caption = (
        rf"Measured values in \%, with half of their 95\% intervals.{_legend(used)}"
    )
    form = "l" + "c" * len(columns)
    of = {"caption": caption, "label": "board", "form": form}
    return _latex_table(comments, [_ampersands(heads)], body, **of)


def board_page(board: Board, sets: Sequence[Overall]) -> str:
    """The answer, the ranks over each set of columns, and the same table."""
    columns, labels = board.main_columns(), board.labels()
    lines = [escaped(overall.answer(board, sets), 2000), ""]
    for of in sets:
        ranks = []
        for row, place in zip(of.rows, of.standing.places, strict=True):
            low, high = place.interval
            known = [str(place.rank), f"{low} to {high}", text_of(place.average, ".2f")]
            name = escaped(labels[row.checkpoint])
            known += [f"{place.win_rate:.0f}", str(place.columns)]
            ranks.append([*known, f"**{name}**" if place.group == 1 else name])
        numbers = ["rank", "95% interval", "average rank", "wins %", "columns"]
        heads = {**dict.fromkeys(numbers, "---:"), "checkpoint": "---"}
        lines += [
            f"Ranks over {of.title}, {of.basis}:",
            "",
            *pipe_table(heads, ranks),
            "",
        ]
    heads = {"checkpoint": "---"}
    heads |= dict.fromkeys(
        (escaped(" ".join(words)) for words in headings(columns)), "---:"
    )
    settled = all(cell.settled for cell in board.cells.values())
    dagger = "" if settled else f" {UNFINISHED}"
    lines += [*pipe_table(heads, _board_cells(board, columns, MARKDOWN)), ""]
    lines += [f"{BOLD} {ITALIC} {RING}{dagger} Columns:", ""]
    lines += [f"{n}. `{column.name}`" for n, column in enumerate(columns, 1)]
    return "\n".join(lines) + "\n"


def headings(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """Task, dataset and metric of each column, and its protocol where two have the same."""
    out: list[tuple[str, ...]] = []
    for column in columns:
        dataset = joined(":", column.dataset, column.split)
        out.append((TASKS[column.task].title, dataset, column.metric))
    how = [joined("+", column.protocol, column.engine) for column in columns]
    count = Counter(out)
    return [(*head, by) if count[head] > 1 else head for head, by in zip(out, how)]


def _board_cells(
    board: Board, columns: Sequence[Column], form: Form
) -> Iterator[list[str]]:
    """Each measured row: its name, and 71.2 ±0.8 for each column."""
    labels = board.labels()
    for row in board.measured_rows:
        cells = [form.escaped(labels[row.checkpoint])]
        for column in columns:
            cell, mark = (
                board.cell(row, column),
                standing(board, column).get(row.checkpoint),
            )
            if cell is None or cell.value is None:
                cells.append("" if cell is None else form.undefined)
                continue
            half = "" if cell.half_width is None else form.half.format(cell.half_width)
            cells.append(form.number(cell.value, mark) + half)
        yield cells


# ---- verdicts


def reproduction_page(judged: Sequence[Judged]) -> str:
    """Every measured number that was judged against a published one, with verdict and hardware."""
    if not judged:
        return (
            "No checkpoint here names a published row by a protocol that was run: "
            "nothing was judged.\n"
        )
    heads = (
        "checkpoint",
        "column",
        "published row",
        "published",
        "measured",
        "95% interval",
        "tolerance",
        "verdict",
        "hardware",
    )
    rows = []
    for j in judged:
        names = [escaped(j.row.name), escaped(j.column.name), escaped(j.key)]
        numbers = [
            f"{j.published:g}",
            f"{j.measured:.2f}",
            from_to(j.ci95),
            f"{j.tolerance:g}",
        ]
        verdict = j.verdict_and_way if j.within else f"**{j.verdict_and_way}**"
        rows.append([*names, *numbers, verdict, escaped(j.hardware)])
    return "\n".join(pipe_table(dict.fromkeys(heads, "---"), rows)) + "\n"
