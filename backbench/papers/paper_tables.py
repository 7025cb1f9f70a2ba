"""The papers' tables made from the board, as LaTeX and Markdown ready to paste.

Each table has the papers' own rows first, marked, then the measured ones. Only measured values are
ever bold, and only where a paired test puts them above every other measured value of their column.
The caption of a table is the title of the grid that measures it (configs/grids).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backbench.board.board import (
    AVERAGE,
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
from backbench.board.markdown import (
    BOLD,
    ITALIC,
    RING,
    UNFINISHED,
    board_page,
    bold,
    escaped,
    from_to,
    headings,
    marked,
    pipe_table,
)
from backbench.board.overall import Overall
from backbench.datasets.catalog import DATASETS, TWELVE
from backbench.papers import judging_rules, published
from backbench.papers.judge import Judged
from backbench.papers.judging_rules import column_of
from backbench.recipes import config
from backbench.results import column_keys
from backbench.runs import atomic
from backbench.tasks import TASKS
from backbench.untrusted import printable


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
        return (column.task, column.dataset, column.metric) == self.key and split == usual


@dataclass(frozen=True)
class PaperTable:
    """One printed table. `name` is that of the grid that measures it."""

    name: str
    paper: str
    table: str
    columns: tuple[TableColumn, ...]

    @property
    def where(self) -> str:
        """LORAC Table 1."""
        return f"{self.paper} {published.place_in_paper(self.table)}"

    @property
    def caption(self) -> str:
        return str(config.read_recipe(config.find_recipe(self.name, "grids"))["title"])

    def numbers(self) -> list[published.Published]:
        """The printed numbers, in the paper's order."""
        return [n for n in published.rows() if (n.paper, n.table) == (self.paper, self.table)]


# ---- the tables: which columns each has


def _dataset_heading(dataset: str) -> str:
    """A dataset's name as LORAC writes it."""
    if dataset.startswith(("cifar", "dtd", "stl", "sun")):
        return dataset.upper()
    return dataset.capitalize().replace("Caltech", "Caltech-")


def _imagenet(group: str = "", task: str = "linear") -> list[TableColumn]:
    tops = (("Top-1", "top1"), ("Top-5", "top5"))
    return [TableColumn(group, heading, task, "imagenet", metric) for heading, metric in tops]


def _twelve_and_average() -> list[TableColumn]:
    columns = []
    for name in TWELVE:
        metric = DATASETS[name].metric
        columns.append(TableColumn("", _dataset_heading(name), "linear", name, metric))
    columns.append(TableColumn("", "Average", "linear", AVERAGE, AVERAGE))
    return columns


def _few_labels() -> list[TableColumn]:
    columns = []
    for task in TASKS.values():
        if task.percent is not None:
            columns += _imagenet(f"{task.percent}% labels", task.name)
    return columns


def _coco() -> list[TableColumn]:
    columns = []
    for task in TASKS.values():
        if task.detects:
            for ap in ("AP", "AP50", "AP75"):
                metric = f"{task.ious[0]}_{ap}"
                columns.append(TableColumn(task.title, ap, task.name, "coco2017", metric))
    return columns


_METRIC_HEADINGS = {"top1": "Top-1", "top5": "Top-5", "train_top1": "Train top-1"}


def _as_printed(paper: str, table: str) -> list[TableColumn]:
    """One column for each dataset and metric that the table prints, as they are measured."""
    columns: dict[tuple[str, str, str], TableColumn] = {}
    for n in published.rows():
        is_score = judging_rules.reason(n) not in judging_rules.NO_SCORES
        if (n.paper, n.table) != (paper, table) or not is_score:
            continue
        measured = judging_rules.as_measured(n)
        group = joined(" ", _dataset_heading(n.dataset), "kNN" if n.task == "knn" else None)
        heading = _METRIC_HEADINGS[measured.metric.removesuffix("_k5")]
        column = TableColumn(group, heading, n.task, n.dataset, measured.metric, measured.split)
        columns.setdefault(column.key, column)
    # Datasets stand in the order of the paper, with the columns of one dataset side by side.
    groups = list(dict.fromkeys(column.group for column in columns.values()))
    return sorted(columns.values(), key=lambda column: groups.index(column.group))


# (paper, table) -> columns, where the paper's layout is not one group of columns for each dataset
_LAYOUTS = {
    ("LORAC", "1"): _imagenet,
    ("LORAC", "2"): _twelve_and_average,
    ("LORAC", "3"): _few_labels,
    ("LORAC", "4"): _coco,
    ("JCL", "1"): _imagenet,
    ("JCL", "2"): _coco,
}


def tables() -> list[PaperTable]:
    """Every table that prints scores, in the order of published.csv."""
    out = []
    for paper, table in dict.fromkeys((n.paper, n.table) for n in published.rows()):
        layout = _LAYOUTS.get((paper, table))
        columns = _as_printed(paper, table) if layout is None else layout()
        if columns:
            out.append(PaperTable(published.grid_name(paper, table), paper, table, tuple(columns)))
    return out


# ---- the lines of a table


@dataclass(frozen=True)
class TableLine:
    """One line of a table; a value is None where nothing was measured or printed."""

    row: Row
    values: tuple[float | None, ...]
    marks: tuple[str | None, ...]  # those of board.standing


Columns = Sequence[Column | None]  # one for each TableColumn; None where no measured column fits


def protocol_sets(board: Board, table: PaperTable) -> list[tuple[Column | None, ...]]:
    """The measured columns of a table, one list per (protocol, engine): unlike protocols never
    share a table's column. The protocols that the paper used come first. A protocol that fills
    nothing of the table gives no list."""
    fitting: dict[tuple[str, str | None], dict[TableColumn, Column]] = {}
    for column in board.measured_columns():
        for wanted in table.columns:
            if wanted.fits(column):
                fitting.setdefault((column.protocol, column.engine), {})[wanted] = column
    papers_own = {(c.protocol, c.engine) for c in map(column_of, table.numbers())}

    # A table of several datasets has a protocol for each: of the paper's own protocols, those that
    # fill different columns stand side by side.
    sets: list[dict[TableColumn, Column]] = []
    for way in sorted(fitting, key=lambda way: (way not in papers_own, way[0], way[1] or "")):
        columns = fitting[way]
        beside = None
        if way in papers_own:
            beside = next((one for one in sets if not one.keys() & columns), None)
        if beside is None:
            sets.append(dict(columns))
        else:
            beside.update(columns)
    return [tuple(map(one.get, table.columns)) for one in sets]


def measured_lines(board: Board, columns: Columns) -> list[TableLine]:
    """The measured rows that have a value in at least one of the columns, in the board's order."""
    standings = [{} if column is None else standing(board, column) for column in columns]
    lines = []
    labels = board.labels()
    for row in board.measured_rows:
        values: list[float | None] = []
        for column in columns:
            cell = None if column is None else board.cell(row, column)
            values.append(None if cell is None else cell.value)
        if any(value is not None for value in values):
            named = replace(row, name=labels[row.checkpoint])
            marks = tuple(of_column.get(row.checkpoint) for of_column in standings)
            lines.append(TableLine(named, tuple(values), marks))
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
        line = tuple(values[key].get(column.key) for column in table.columns)
        lines.append(TableLine(row, line, (None,) * len(line)))
    return lines


def _protocols_of(columns: Columns) -> str:
    """The protocols by which the measured rows of a table were made."""
    used = {joined(" + ", column.protocol, column.engine) for column in filter(None, columns)}
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
                atomic.write_text(latex / f"{name}.tex", to_latex(table, columns, lines))
            if markdown:
                atomic.write_text(markdown / f"{name}.md", to_markdown(table, columns, lines))
    if latex:
        atomic.write_text(latex / "board.tex", board_to_latex(board))
    if markdown:
        atomic.write_text(markdown / "board.md", board_page(board, sets))
        atomic.write_text(markdown / "reproduction.md", reproduction_page(judged))


def to_latex(table: PaperTable, columns: Columns, measured: Sequence[TableLine]) -> str:
    """A booktabs table. Needs \\usepackage{booktabs}."""
    width = len(table.columns)
    across = rf"\multicolumn{{{2 + width}}}{{l}}"
    caption = rf"{_latex(table.caption)}, in \%."
    if measured:
        caption += f" Measured by {_latex(_protocols_of(columns))}."
    caption += _legend({mark for line in measured for mark in line.marks})
    heads = _latex_groups(table)
    heads.append(
        _ampersands(["Model", "Epochs", *(_latex(column.heading) for column in table.columns)])
    )
    body = [
        rf"{across}{{\emph{{Published}} ({table.where.replace(' ', ', ', 1)})}} \\",
        *map(_latex_line, published_lines(table)),
        r"\midrule",
        rf"{across}{{\emph{{Measured}}}} \\",
        *map(_latex_line, measured),
    ]
    if not measured:
        body.append(rf"{across}{{nothing measured yet}} \\")
    comment = f"% {table.where}; made by backbench leaderboard --latex"
    of = {"caption": caption, "label": table.name, "form": "ll" + "c" * width}
    return _latex_table([comment], heads, body, **of)


def _latex_table(
    comments: Sequence[str], heads: Sequence[str], body: Sequence[str], **of: str
) -> str:
    """A booktabs table `of` a caption, a label and a form of columns."""
    begin = [r"\begin{table}[t]", r"\centering", rf"\caption{{{of['caption']}}}"]
    begin += [rf"\label{{tab:{of['label']}}}", rf"\begin{{tabular}}{{{of['form']}}}", r"\toprule"]
    end = [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join([*comments, *begin, *heads, r"\midrule", *body, *end]) + "\n"


def _latex_groups(table: PaperTable) -> list[str]:
    """The line above the headings, for a table that groups them."""
    groups = [column.group for column in table.columns]
    if not any(groups):
        return []
    heads = []
    # Columns of one group are neighbours, so a heading spans as many columns as bear its name.
    for group in dict.fromkeys(groups):
        heads.append(rf"\multicolumn{{{groups.count(group)}}}{{c}}{{{_latex(group)}}}")
    return [" & & " + _ampersands(heads)]


def _latex_line(line: TableLine) -> str:
    cells = [_latex(line.row.name), text_of(line.row.epochs, "d", missing="--")]
    for value, mark in zip(line.values, line.marks):
        cells.append(_LATEX_MARK.get(mark, "{}").format(text_of(value, ".1f", missing="--")))
    return _ampersands(cells)


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


_LATEX_MARK: dict[str | None, str] = {
    BEST: r"\textbf{{{}}}",
    TIED: r"\textit{{{}}}",
    ONCE: r"{}$^\circ$",
    UNSETTLED: r"{}$^\dagger$",
}


def _legend(marks: Container[str | None]) -> str:
    """The meaning of each mark that a LaTeX table has."""
    ring, dagger = RING.replace("°", r"$^\circ$"), UNFINISHED.replace("†", r"$^\dagger$")
    meanings = ((BEST, BOLD), (TIED, ITALIC), (ONCE, ring), (UNSETTLED, dagger))
    return "".join(f" {words}" for mark, words in meanings if mark in marks)


def board_to_latex(board: Board) -> str:
    """The board's own table: a row for each checkpoint, a column for each main metric, with the
    95% interval's half and the page's marks. Needs \\usepackage{booktabs}."""
    columns, labels = board.main_columns(), board.labels()
    heads = []
    for heading in headings(columns):
        lines_of_head = r"\\".join(map(_latex, heading))
        heads.append(rf"\shortstack{{{lines_of_head}}}")
    body, used = [], set()
    for row in board.measured_rows:
        cells = [_latex(labels[row.checkpoint])]
        for column in columns:
            cell, mark = board.cell(row, column), standing(board, column).get(row.checkpoint)
            text = "" if cell is None else text_of(cell.value, ".1f", missing="--")
            text = _LATEX_MARK.get(mark, "{}").format(text)
            if cell is not None and cell.half_width is not None:
                text += rf" {{\scriptsize$\pm${cell.half_width:.1f}}}"
            cells.append(text)
            used.add(mark)
        body.append(_ampersands(cells))
    comments = ["% made by backbench leaderboard --latex"]
    comments += [f"% column {n}: {column.name}" for n, column in enumerate(columns, 1)]
    caption = rf"Measured values in \%, with half of their 95\% intervals.{_legend(used)}"
    form = "l" + "c" * len(columns)
    of = {"caption": caption, "label": "board", "form": form}
    return _latex_table(comments, [_ampersands(["Checkpoint", *heads])], body, **of)


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


def to_markdown(table: PaperTable, columns: Columns, measured: Sequence[TableLine]) -> str:
    """A pipe table with the same lines."""
    heads = {"Model": "---", "Epochs": "---:", "Source": "---"}
    for column in table.columns:
        heads[joined(": ", column.group, column.heading)] = "---:"
    rows = []
    for line in (*published_lines(table), *measured):
        cells = [escaped(line.row.name), text_of(line.row.epochs, "d"), line.row.source]
        for value, mark in zip(line.values, line.marks):
            cells.append(marked(text_of(value, ".1f"), mark))
        rows.append(cells)
    note = "Nothing measured yet."
    if measured:
        note = f"Measured by {escaped(_protocols_of(columns))}. {BOLD} {ITALIC} {RING}"
        if any(UNSETTLED in line.marks for line in measured):
            note += f" {UNFINISHED}"
    title = f"**{table.caption}**, in %. Layout of {table.where}."
    return "\n".join([title, "", *pipe_table(heads, rows), "", note]) + "\n"


def reproduction_page(judged: Sequence[Judged]) -> str:
    """Every measured number that was judged against a published one, with verdict and hardware."""
    if not judged:
        return (
            "No checkpoint here names a published row by a protocol that was run: "
            "nothing was judged.\n"
        )
    heads = ("checkpoint", "column", "published row", "published", "measured", "95% interval",
             "tolerance", "verdict", "hardware")  # fmt: skip
    rows = []
    for j in judged:
        names = [escaped(j.row.name), escaped(j.column.name), escaped(j.key)]
        numbers = [f"{j.published:g}", f"{j.measured:.2f}", from_to(j.ci95), f"{j.tolerance:g}"]
        verdict = bold(j.verdict_and_way, when=not j.within)
        rows.append([*names, *numbers, verdict, escaped(j.hardware)])
    return "\n".join(pipe_table(dict.fromkeys(heads, "---"), rows)) + "\n"
