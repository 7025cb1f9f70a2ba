"""The records that leaderboard.html holds: one dataclass for each kind.

They are the only schema of the page. page.py and page_figures.py fill them, and page_*.js read the
same names: a field that is added here arrives in the scripts under its name. A single record stands
in the page as a JSON object (`as_object`). Many records of one kind stand there as a table
(`as_table`), one list per field: each field's name is written once, which keeps a page of 10^5
numbers small.

Numbers are in percent and have four decimals at most; None is undefined.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Table = dict[str, list[Any]]  # field -> its value in every record
# A verdict on a published number, made by published/judge.py
Verdict = dict[str, object]


def as_object(record: Any) -> dict[str, Any]:
    """Return one record as a JSON object; the records in its fields are left as they are."""
    return {field: getattr(record, field) for field in _fields(type(record))}


def as_table(kind: type, records: Sequence[Any]) -> Table:
    """Records of one kind as a table."""
    return {field: [getattr(r, field) for r in records] for field in _fields(kind)}


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


# ---- the table and what is computed from it


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRow:
    """A checkpoint, or a printed row of a paper."""

    checkpoint: str  # its digest, or the key of the published row
    name: str
    method: str
    arch: str
    epochs: int | None
    published: bool
    label: str  # unique among the measured rows
    labs: list[str]  # that measured it (merged boards only)
    trained: int | None  # the side of its training's images, in pixels
    # Empty unless trunks of several sizes are compared
    cost: str
    hardware: str  # on which its speed was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class PageColumn:
    """A way of measuring. `heading`, `decimals`, `ranks` and `by_size` are in board/metrics.py."""

    name: str
    task: str
    dataset: str
    metric: str
    heading: str
    decimals: int
    ranks: bool
    by_size: bool
    protocol: str
    engine: str | None
    split: str | None
    measured: int  # number of measured rows with a value
    # True for the first metric of a measurement, and for each of a task that is not ranked
    main: bool
    noise: str  # how far a second training moves its numbers, in words


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCell:
    """The number of a row in a column."""

    row: int
    value: float | None
    low: float | None
    high: float | None
    mark: str  # of board.standing, or empty
    note: int  # its index in PageData.notes
    parts: list[int]  # the indices of its measurements in PageOrigins.parts


@dataclass(frozen=True, kw_only=True, slots=True)
class PagePair:
    """A paired test in a column: row a minus row b, where a stands before b."""

    column: int
    a: int
    b: int
    value: float | None
    low: float | None
    high: float | None
    p: float
    real: bool  # p and interval tell the rows apart
    known: bool  # the test covers other trainings, too
    paired: str  # what was paired: images, draws, resamples
    n: int  # how many of them


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRank:
    """The place of a row over a set of columns."""

    row: int
    rank: int
    low: int
    high: int
    average: float | None  # mean of its ranks in the single columns
    win_rate: float  # percent
    columns: int  # in which it has a value
    group: int  # 1 for the rows that no row is shown to be better than


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRankSet:
    """The ranks over a named set of columns, best first."""

    title: str
    basis: str  # what the intervals are for
    ranks: Table  # of PageRank


# ---- what stands beside the table


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveMark:
    """A step of a pretraining at which something begins."""

    x: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCurve:
    """The metrics of one pretraining over its steps."""

    name: str
    row: int | None  # of its checkpoint, if that is on the board
    x: list[float]
    y: dict[str, list[float | None]]  # metric -> as many values as `x` has
    marks: list[CurveMark]


@dataclass(frozen=True, kw_only=True, slots=True)
class PagePicture:
    """Predictions of a run beside ground truth."""

    title: str
    note: str
    alt: str
    src: str  # a data URI
    width: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFigure:
    """An ablation, or the features of a checkpoint."""

    title: str
    src: str  # a data URI
    width: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayers:
    """The readings of one checkpoint's layers on one dataset. A reading is a layer and a pooling."""

    row: int
    column: int  # of the chosen reading's score on the test images
    layers: list[str]  # from the first on
    scores: dict[str, list[float | None]]  # pooling -> the score on val of each layer
    chosen: str
    chosen_score: float | None  # on val
    usual: str
    usual_score: float | None
    value: float | None  # of the chosen reading on the test images
    usual_value: float | None
    gain: float | None  # their paired difference
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PageErrors:
    """The columns of what each kind of error costs detectors on one list of boxes."""

    ap: int | None  # the column of the AP50 that they explain
    costs: dict[str, int]  # kind of error -> its column


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLabelCurve:
    """The points of one checkpoint's label curve on one dataset."""

    row: int
    columns: list[int]  # of each point, by its number of labels
    labels: list[float]  # per class


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFigures:
    """Everything that stands on the page beside the table, most of it from run folders."""

    curves: list[PageCurve]
    pictures: list[PagePicture]
    figures: list[PageFigure]
    layers: list[PageLayers]
    errors: list[PageErrors]
    label_curves: list[PageLabelCurve]


# ---- the two blocks of JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class PageData:
    """The block that is drawn at once."""

    answer: list[str]  # its sentences
    sets: list[PageRankSet]  # the widest first
    rows: Table  # of PageRow
    columns: Table  # of PageColumn
    cells: list[Table]  # of PageCell, one table for each column
    notes: list[str]  # each distinct note of a cell once, the empty one first
    pairs: Table  # of PagePair
    numbers: int  # of all measurements behind the cells
    curves: list[PageCurve]
    pictures: list[PagePicture]
    figures: list[PageFigure]
    layers: list[PageLayers]
    errors: list[PageErrors]
    label_curves: list[PageLabelCurve]
    judged: Sequence[Verdict]
    claims: Sequence[str]  # a paragraph each, below the verdicts
    problems: list[str]
    tasks: dict[str, str]  # task -> its title
    sizes: str  # what the metrics by size are
    newest: str  # day of the newest measurement, or empty
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PageMeasurement:
    """One measurement behind a number. `split`, `keys` and `texts` are indices in PageOrigins."""

    split: int  # a text
    seed: int
    value: float | None
    low: float | None
    high: float | None
    keys: int  # a list of keys
    texts: list[int]  # the value of each of these keys


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOrigins:
    """The block that is read when the first number is opened: where all numbers come from."""

    parts: Table  # of PageMeasurement
    keys: list[list[int]]  # lists of texts; most measurements share one
    texts: list[str]  # each distinct text once
