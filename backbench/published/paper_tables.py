"""The papers' tables as data: their columns, the rows that were printed, the measured rows that fit.

tables.py writes them. A table's caption is the title of the grid that measures it (configs/grids).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from backbench.board.board import PUBLISHED, Board, Column, Row, joined, standing
from backbench.published import judging_rules, published
from backbench.published.judging_rules import column_of
from backbench.published.published import Published
from backbench.recipes import config
from backbench.records import column_keys
from backbench.tasks import TASKS

# ---- the columns of a printed table


@dataclass(frozen=True)
class TableColumn:
    """A column of a printed table: its heading, and which measured columns fit it."""

    group: str  # the heading above the headings of several neighbours; may be empty
    heading: str
    task: str
    dataset: str
    metric: str
    split: str | None = None  # where it differs from the task's usual split

    @property
    def key(self) -> tuple[str, str, str]:
        return self.task, self.dataset, self.metric

    def fits(self, column: Column) -> bool:
        """Return True if `column` measures the same by any protocol, on the same split."""
        usual = self.split or TASKS[self.task].split
        split = column.split or column_keys.USUAL_SPLIT
        return (
            self.key == (column.task, column.dataset, column.metric) and split == usual
        )


@dataclass(frozen=True)
class PaperTable:
    """One printed table."""

    paper: str
    table: str
    columns: tuple[TableColumn, ...]

    @property
    def name(self) -> str:
        """The name of the grid that measures it, which its files have, too: lorac_table1."""
        return published.grid_name(self.paper, self.table)

    @property
    def where(self) -> str:
        """Where it is printed: LORAC Table 1."""
        return f"{self.paper} {published.place_in_paper(self.table)}"

    @property
    def caption(self) -> str:
        return str(config.read_recipe(config.find_recipe(self.name, "grids"))["title"])

    def numbers(self) -> list[Published]:
        """Return the printed numbers, in the paper's order."""
        wanted = (self.paper, self.table)
        return [n for n in published.rows() if (n.paper, n.table) == wanted]


def tables() -> list[PaperTable]:
    """Return every table that prints scores, in the order of published.csv."""
    # The inner dicts stand for sets that keep their order.
    columns: dict[tuple[str, str], dict[TableColumn, None]] = {}
    for number in published.rows():
        if judging_rules.reason(number) not in judging_rules.NO_SCORES:
            of_table = columns.setdefault((number.paper, number.table), {})
            of_table[_column(number)] = None
    found = []
    for (paper, table), of_table in columns.items():
        # The paper's order, but with the columns of one group side by side.
        groups = [column.group for column in of_table]
        ordered = sorted(of_table, key=lambda column: groups.index(column.group))
        found.append(PaperTable(paper, table, tuple(ordered)))
    return found


_METRIC_HEADINGS = {"top1": "Top-1", "top5": "Top-5", "train_top1": "Train top-1"}


def _column(number: Published) -> TableColumn:
    """Return the column of a printed number, as it is measured, under the paper's headings."""
    task = TASKS[number.task]
    measured = judging_rules.as_measured(number)
    dataset = _dataset_heading(number.dataset)
    if number.task == "knn":
        dataset += " kNN"
    metric = measured.metric.removesuffix("_k5")
    # bbox_AP has the heading AP
    heading = _METRIC_HEADINGS.get(metric) or metric.rpartition("_")[2]
    group = dataset
    if (number.paper, number.table) == ("LORAC", "2"):
        # One metric on twelve sets: the sets are the headings.
        group = ""
        heading = dataset
    elif task.detects:
        group = task.title
    elif task.percent is not None:
        group = f"{task.percent}% labels"
    elif number.dataset == "imagenet" and number.paper in ("LORAC", "JCL"):
        group = ""
    return TableColumn(
        group=group,
        heading=heading,
        task=number.task,
        dataset=number.dataset,
        metric=measured.metric,
        split=measured.split,
    )


def _dataset_heading(dataset: str) -> str:
    """Return a dataset's name as LORAC writes it."""
    if dataset.startswith(("cifar", "dtd", "stl", "sun")):
        return dataset.upper()
    return dataset.capitalize().replace("Caltech", "Caltech-")


# ---- the lines of a table


@dataclass(frozen=True)
class TableLine:
    """One line of a table; a value is None where nothing was measured or printed."""

    row: Row
    values: Sequence[float | None]
    marks: Sequence[str | None]  # those of board.standing


# One measured column for each TableColumn; None where none fits
Columns = Sequence[Column | None]


def published_lines(table: PaperTable) -> list[TableLine]:
    """Return the rows that the paper printed, in its order."""
    # One key is one printed row; its numbers come one by one.
    rows: dict[str, Row] = {}
    values: dict[str, dict[tuple[str, str, str], float]] = {}
    for number in table.numbers():
        name = number.model
        key = number.printed_row
        # A key with a sixth part is one of several rows under one name; the note tells them apart.
        if key.count(":") > 4:
            name += f", {published.variant(number.note)}"
        row = Row(key, name, number.model, number.arch, number.epochs, PUBLISHED)
        rows.setdefault(key, row)
        measured = judging_rules.as_measured(number)
        of_row = values.setdefault(key, {})
        of_row[number.task, number.dataset, measured.metric] = measured.value
    lines = []
    for key, row in rows.items():
        line = [values[key].get(column.key) for column in table.columns]
        lines.append(TableLine(row, line, [None] * len(line)))
    return lines


def protocol_sets(board: Board, table: PaperTable) -> list[tuple[Column | None, ...]]:
    """Return the measured columns of a table, one tuple per (protocol, engine), the paper's first.

    Unlike protocols never share a column, and a protocol that fills no column gives no tuple.
    """
    fitting: dict[tuple[str, str | None], dict[TableColumn, Column]] = {}
    for column in board.measured_columns():
        for wanted in table.columns:
            if wanted.fits(column):
                way = (column.protocol, column.engine)
                fitting.setdefault(way, {})[wanted] = column
    papers_own = {(c.protocol, c.engine) for c in map(column_of, table.numbers())}
    in_order = sorted(
        fitting, key=lambda way: (way not in papers_own, way[0], way[1] or "")
    )

    # A table of several datasets has a protocol for each: of the paper's own protocols, those that
    # fill different columns stand side by side.
    sets: list[dict[TableColumn, Column]] = []
    for way in in_order:
        columns = fitting[way]
        beside = None
        if way in papers_own:
            free = (one for one in sets if not one.keys() & columns.keys())
            beside = next(free, None)
        if beside is None:
            sets.append(columns)
        else:
            beside.update(columns)
    return [tuple(map(one.get, table.columns)) for one in sets]


def measured_lines(board: Board, columns: Columns) -> list[TableLine]:
    """Return the measured rows that have a value in at least one of the columns, in the board's
    order."""
    lines = []
    labels = board.labels()
    for row in board.measured_rows:
        values: list[float | None] = []
        marks: list[str | None] = []
        for column in columns:
            cell = None if column is None else board.cell(row, column)
            if column is None or cell is None:
                values.append(None)
                marks.append(None)
            else:
                values.append(cell.value)
                marks.append(standing(board, column).get(row.checkpoint))
        if any(value is not None for value in values):
            named = replace(row, name=labels[row.checkpoint])
            lines.append(TableLine(named, values, marks))
    return lines


def protocols_of(columns: Columns) -> str:
    """Return the protocols by which the measured rows of a table were made: `a, b + detectron2`."""
    used = set()
    for column in columns:
        if column is not None:
            used.add(joined(" + ", column.protocol, column.engine))
    return ", ".join(sorted(used))
