"""leaderboard.html: one self-contained file with the table, the charts and every number's origin.

page.html is filled with page.css, the scripts page_*.js and two blocks of JSON, whose schema is
page_records.py. The page asks the network for nothing. The block `data` is drawn at once; the block
`origins`, which is most of the page, is read when the first number is opened.
"""

import importlib.metadata
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from backbench.board import metrics
from backbench.board.board import (
    MEASURED,
    Board,
    Cell,
    Column,
    Measurement,
    PairedDifference,
    noise_of,
    noise_words,
    standing,
)
from backbench.board.export import command_again
from backbench.board.overall import Overall
from backbench.board.page_records import (
    PageCell,
    PageColumn,
    PageData,
    PageFigures,
    PageMeasurement,
    PageOrigins,
    PagePair,
    PageRank,
    PageRankSet,
    PageRow,
    Table,
    Verdict,
    as_object,
    as_table,
)
from backbench.board.verdict import listed
from backbench.runs import atomic
from backbench.runs.garbage import many_objects
from backbench.tasks import TASKS
from backbench.verify import verification

HERE = Path(__file__).parent
# page_*.js in the order in which they stand in the page; the last one draws it
SCRIPTS = (
    "data",
    "table",
    "number",
    "charts",
    "ranks",
    "pairs",
    "curves",
    "readings",
    "sections",
)
# A value of a provenance is cut to TEXT_BYTES / (number of measurements) characters, but never below
# SHORTEST_TEXT; commands are never cut.
TEXT_BYTES = 20_000_000
SHORTEST_TEXT = 150
YEAR_5138 = 1e11  # seconds since 1970; time.gmtime knows no date far beyond

# An encoder that is made once: json.dumps with sort_keys makes one for each call.
_IN_ORDER = json.JSONEncoder(sort_keys=True).encode


def write_page(
    board: Board,
    path: Path,
    *,
    pairs: Iterable[PairedDifference],
    figures: PageFigures,
    answer: Sequence[str],
    sets: Sequence[Overall],
    judged: Sequence[Verdict] = (),
    claims: Sequence[str] = (),
) -> None:
    """Write the page for `board`.

    Whatever takes tests or the reading of run folders is made before: `pairs` by
    board.compare_rows, `figures` by page_figures.collect_figures, `sets` and the sentences of
    `answer` by overall.py, `judged` and `claims` by published/.
    """
    with many_objects():
        count = sum(len(cell.parts) for cell in board.cells.values())
        origins = _Origins(longest=max(SHORTEST_TEXT, TEXT_BYTES // max(1, count)))
        notes = {"": 0}  # note of a cell -> its index
        columns, cells = _columns_and_cells(board, origins, notes)
        data = PageData(
            answer=list(answer),
            sets=[_rank_set(of, board) for of in sets],
            rows=as_table(PageRow, _rows(board)),
            columns=as_table(PageColumn, columns),
            cells=cells,
            notes=list(notes),
            pairs=as_table(PagePair, [_pair(pair) for pair in pairs]),
            numbers=count,
            curves=figures.curves,
            pictures=figures.pictures,
            figures=figures.figures,
            layers=figures.layers,
            errors=figures.errors,
            label_curves=figures.label_curves,
            judged=judged,
            claims=claims,
            problems=board.problems,
            tasks={name: task.title for name, task in TASKS.items()},
            sizes=_sizes(),
            newest=_newest_day(board),
            version=importlib.metadata.version("backbench"),
        )
        scripts = [(HERE / f"page_{name}.js").read_text() for name in SCRIPTS]
        content = {
            "STYLE": (HERE / "page.css").read_text(),
            "SCRIPT": "\n".join(scripts),
            "DATA": _json(data),
            "ORIGINS": _json(origins.block()),
        }
        # All slots are filled in one pass: a checkpoint whose name looks like a slot keeps it.
        template = (HERE / "page.html").read_text()
        page = re.sub(r"/\*([A-Z]+)\*/\n?", lambda slot: content[slot[1]], template)
    atomic.write_text(path, page)


def _json(record: PageData | PageOrigins) -> str:
    """Return compact JSON, without a < that could end the script block it stands in."""
    text = json.dumps(record, separators=(",", ":"), allow_nan=False, default=as_object)
    return text.replace("<", "\\u003c")


def _newest_day(board: Board) -> str:
    """Return the day of the newest measurement: unlike today's, it is the same for the same
    records."""
    times = [part.recorded for cell in board.cells.values() for part in cell.parts]
    newest = max(times, default=0.0)
    if not 0 < newest < YEAR_5138:
        return ""
    return time.strftime("%Y-%m-%d", time.gmtime(newest))


def _sizes() -> str:
    """Explain the metrics by size: `APs, APm and APl: small, medium and large objects`."""
    by_size = {name: kind for name, kind in metrics.METRICS.items() if kind.by_size}
    explained = listed([kind.explained for kind in by_size.values()])
    return f"{listed(list(by_size))}: {explained} objects"


def _round(value: float | None) -> float | None:
    """Return four decimals; a number that is not finite is undefined."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _ends(interval: tuple[float, float] | None) -> tuple[float | None, float | None]:
    low, high = interval or (None, None)
    return _round(low), _round(high)


# ---- the table


def _rows(board: Board) -> list[PageRow]:
    labels = board.labels()
    # Costs are worth a line only where trunks of several sizes are compared.
    sizes = {cost.parameters for cost in board.costs.values()}
    rows = []
    for row in board.rows:
        cost = board.costs.get(row.checkpoint) if len(sizes) > 1 else None
        one = PageRow(
            checkpoint=row.checkpoint,
            name=row.name,
            method=row.method,
            arch=row.arch,
            epochs=row.epochs,
            published=row.source != MEASURED,
            label=labels[row.checkpoint],
            labs=list(board.labs.get(row.checkpoint, ())),
            trained=board.trained.get(row.checkpoint),
            cost="" if cost is None else cost.text,
            hardware="" if cost is None else cost.hardware or "",
        )
        rows.append(one)
    return rows


def _columns_and_cells(
    board: Board, origins: "_Origins", notes: dict[str, int]
) -> tuple[list[PageColumn], list[Table]]:
    """Return every column, and the table of its cells. Each note of a cell goes into `notes`
    once."""
    # One pass over the cells sorts them by column: a lookup for each field of the table would
    # take longer.
    by_column: dict[Column, list[tuple[str, Cell]]] = {
        column: [] for column in board.columns
    }
    for (checkpoint, column), cell in board.cells.items():
        by_column[column].append((checkpoint, cell))
    row_index = board.row_index()
    measured = {row.checkpoint for row in board.measured_rows}
    # The columns stand in the board's order, so the first of a setting is its main column.
    settings: set[tuple[str, ...]] = set()
    columns = []
    tables = []
    for column, members in by_column.items():
        marks = standing(board, column)
        count = 0
        cells = []
        for checkpoint, cell in members:
            if cell.value is not None and checkpoint in measured:
                count += 1
            low, high = _ends(cell.ci95)
            one = PageCell(
                row=row_index[checkpoint],
                value=_round(cell.value),
                low=low,
                high=high,
                mark=marks.get(checkpoint, ""),
                # A new note gets the next index.
                note=notes.setdefault(cell.note, len(notes)),
                parts=[origins.add(part) for part in cell.parts],
            )
            cells.append(one)
        tables.append(as_table(PageCell, cells))
        main = column.setting not in settings or not TASKS[column.task].ranked
        settings.add(column.setting)
        columns.append(_column(board, column, measured=count, main=main))
    return columns, tables


def _column(board: Board, column: Column, *, measured: int, main: bool) -> PageColumn:
    kind = metrics.kind_of(column.metric)
    return PageColumn(
        name=column.name,
        task=column.task,
        dataset=column.dataset,
        metric=column.metric,
        heading=metrics.heading(column.metric),
        decimals=kind.decimals,
        ranks=kind.ranks,
        by_size=kind.by_size,
        protocol=column.protocol,
        engine=column.engine,
        split=column.split,
        measured=measured,
        main=main,
        noise=noise_words(noise_of(board, column)),
    )


def _pair(pair: PairedDifference) -> PagePair:
    tested = pair.difference
    low, high = _ends(tested.ci95)
    return PagePair(
        column=pair.column,
        a=pair.a,
        b=pair.b,
        value=_round(tested.value),
        low=low,
        high=high,
        p=float(f"{tested.p:.3g}"),
        real=tested.real,
        known=tested.trainings_known,
        paired=tested.paired,
        n=tested.n,
    )


def _rank_set(of: Overall, board: Board) -> PageRankSet:
    row_index = board.row_index()
    ranks = []
    for row, place in zip(of.rows, of.standing.places, strict=True):
        low, high = place.interval
        one = PageRank(
            row=row_index[row.checkpoint],
            rank=place.rank,
            low=low,
            high=high,
            average=_round(place.average),
            win_rate=round(place.win_rate, 2),
            columns=place.columns,
            group=place.group,
        )
        ranks.append(one)
    return PageRankSet(title=of.title, basis=of.basis, ranks=as_table(PageRank, ranks))


# ---- where the numbers come from


class _Origins:
    """The provenance of all numbers, each distinct text once, cut after `longest` characters."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._parts: list[PageMeasurement] = []
        self._texts: dict[str, int] = {}  # text -> its index
        # The keys of a measurement, by the indices of their texts -> the index of this list
        self._keys: dict[tuple[int, ...], int] = {}

    def add(self, measurement: Measurement) -> int:
        """Add a measurement; returns its index among the parts."""
        result, run = measurement
        about: dict[str, object] = {
            **result.provenance,
            **result.origin,
            "verified": verification.LEVELS.get(result.origin.get("verified", 0)),
            "chosen": result.chosen,
            "run": str(run),
            "command": command_again(result),
        }
        keys = []
        texts = []
        for key, value in about.items():
            if value is None:
                continue
            text = value if isinstance(value, str) else _IN_ORDER(value)
            # A command that is cut would not run.
            if key != "command" and len(text) > self._longest:
                text = text[: self._longest] + " ... (the whole is in the run folder)"
            keys.append(self._index_of(key))
            texts.append(self._index_of(text))
        low, high = _ends(result.ci95)
        part = PageMeasurement(
            split=self._index_of(result.split),
            seed=result.seed,
            value=_round(result.value),
            low=low,
            high=high,
            # Nearly all measurements have the same keys, so a part names the list.
            keys=self._keys.setdefault(tuple(keys), len(self._keys)),
            texts=texts,
        )
        self._parts.append(part)
        return len(self._parts) - 1

    def _index_of(self, text: str) -> int:
        # A text that was seen before keeps its index; a new one gets the next.
        return self._texts.setdefault(text, len(self._texts))

    def block(self) -> PageOrigins:
        return PageOrigins(
            parts=as_table(PageMeasurement, self._parts),
            keys=[list(keys) for keys in self._keys],
            texts=list(self._texts),
        )
