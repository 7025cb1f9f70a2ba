"""Simulate boards: what rank intervals cover, how often equals are told apart, and the best one.

python benchmarks/ranks.py [--repeats R]; `benchmarks/ranks.txt` has its last figures.

A board has rows whose true means over all datasets are given; on each dataset every row has an
advantage of its own, and its value is measured on that dataset's images. A true rank counts who is
truly before; of equals an interval must hold all the ranks that they share.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from backbench.stats import rank_intervals, resampling
from backbench.verify import resamples

OWN = 1.5  # points: the spread of the difference of two equals between datasets
GAPS = (1.0, 2.0, 5.0)  # points
SHARED = 0.5  # part of an image's variance that all rows share
IMAGES = (500, 10_000)  # of a dataset, between these
SEED = 31  # of boards that nothing was chosen on


class Shape(NamedTuple):
    """A kind of board."""

    rows: int
    columns: int
    heavy: bool = (
        False  # advantages with tails of Student's t with 4 degrees of freedom
    )
    missing: float = 0.0  # share of cells
    uneven: bool = (
        False  # rows whose advantages spread four times as much as those of others
    )

    @property
    def name(self) -> str:
        more = ", heavy tails" if self.heavy else ""
        more += f", {100 * self.missing:.0f}% missing" if self.missing else ""
        more += ", uneven" if self.uneven else ""
        return f"{self.rows} rows, {self.columns} columns{more}"


SHAPES = (
    *(Shape(rows, columns) for columns in (6, 12, 30) for rows in (2, 5, 10, 20)),
    *(Shape(rows, 12, heavy=True) for rows in (5, 20)),
    *(Shape(rows, 12, missing=0.2) for rows in (5, 20)),
    *(Shape(rows, columns, uneven=True) for columns in (6, 12) for rows in (5, 20)),
)


def board(rng: np.random.Generator, shape: Shape, truth: Sequence[float]) -> np.ndarray:
    """Values (rows, columns) in points, on datasets with images of their own."""
    size = (shape.rows, shape.columns)
    images = np.exp(rng.uniform(*np.log(IMAGES), shape.columns))
    share = rng.uniform(0.5, 0.92, shape.columns)
    error = np.sqrt(1e4 * share * (1 - share) * (1 - SHARED) / images)
    own = rng.standard_t(4, size) / 2**0.5 if shape.heavy else rng.standard_normal(size)
    if shape.uneven:
        own = own * 2 ** rng.uniform(-1, 1, (shape.rows, 1))
    values = 100 * share + np.asarray(truth)[:, None] + OWN * own / 2**0.5
    values = values + error * rng.standard_normal(size)
    values[rng.random(size) < shape.missing] = np.nan
    return values


class Seen(NamedTuple):
    """Shares over many boards, in percent."""

    covered: float  # rank intervals of all rows
    together: float  # boards on which no pair of rows is told apart
    alone: float  # boards on which the last row leads alone
    beats: float  # of the others, those that the last row is above
    plain: float  # boards on which the last row has the best mean rank


def _seen_of(
    ranking: rank_intervals.Ranking, values: np.ndarray, truth: Sequence[float]
) -> tuple[float, ...]:
    """The fields of Seen for one board, whose last row is the best."""
    last, true = len(values) - 1, np.asarray(truth)
    mean = np.nanmean(rank_intervals.column_ranks(values), axis=1)
    alone, plain = ranking.leaders == [last], mean.argmin() == last
    # The first and the last of the ranks that a row and its equals share
    first = 1 + (true > true[:, None]).sum(1)
    end = len(true) - (true < true[:, None]).sum(1)
    low, high = np.array([place.interval for place in ranking.places]).T
    covered = ((low <= first) & (high >= end)).mean()
    return covered, not ranking.above.any(), alone, ranking.above[-1, :-1].mean(), plain


def _shares(seen: Sequence[tuple[float, ...]]) -> Seen:
    return Seen(*(100 * np.mean(np.array(seen, float), axis=0)))


def look(shape: Shape, truth: Sequence[float], repeats: int) -> Seen:
    kind = [
        shape.rows,
        shape.columns,
        shape.heavy,
        int(100 * shape.missing),
        shape.uneven,
    ]
    rng = np.random.default_rng([SEED, *kind, int(10 * max(truth))])
    datasets = [str(c) for c in range(shape.columns)]
    seen = []
    for _ in range(repeats):
        values = board(rng, shape, truth)
        ranking = rank_intervals.ranking(values, datasets)
        seen.append(_seen_of(ranking, values, truth))
    return _shares(seen)


def of_images(rows: int, columns: int, gap: float, repeats: int) -> Seen:
    """Simulate few columns on the same 1,000 images: their ranks on other images, by predictions."""
    rng = np.random.default_rng([SEED, rows, columns, int(10 * gap)])
    truth = [0.0] * (rows - 1) + [gap]
    label = np.zeros(1000, int)
    seen = []
    for n in range(repeats):
        hard = rng.standard_normal(1000)
        own = rng.standard_normal((rows, 1, 1000))
        score = hard + own + 0.5 * rng.standard_normal((rows, columns, 1000))
        share = np.full(rows, 0.8)
        share[-1] += gap / 100
        edge = np.quantile(rng.standard_normal(100_000) * 1.5, 1 - share)
        right = score > edge[:, None, None]
        moved = np.empty((rows, columns, resampling.COUNT))
        for r in range(rows):
            for c in range(columns):
                kept = {"label": label, "manifest": np.array(str(n))}
                kept["prediction"] = 1 - right[r, c].astype(int)
                values = resamples.of_arrays(kept, "top1")
                assert values is not None
                moved[r, c] = values - values.mean()
        values = 100 * right.mean(2)
        ranking = rank_intervals.ranking(values, ["one"] * columns, moved)
        seen.append(_seen_of(ranking, values, truth))
    return _shares(seen)


def _print(what: str, seen: Seen) -> None:
    shown = [f"{name} {value:.1f}" for name, value in seen._asdict().items()]
    print(f"{what}: {', '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    some = repeats // 4
    for shape in SHAPES:
        _print(f"{shape.name}, equal", look(shape, [0.0] * shape.rows, repeats))
        steps = [0.5 * n for n in range(shape.rows)]
        _print(f"{shape.name}, half a point apart", look(shape, steps, some))
        for gap in GAPS:
            truth = [0.0] * (shape.rows - 1) + [gap]
            _print(
                f"{shape.name}, one better by {gap:.0f} points",
                look(shape, truth, some),
            )
    for rows, columns in ((2, 3), (5, 3), (5, 8)):
        for gap in (0.0, *GAPS):
            what = f"{rows} rows, {columns} columns of one dataset, one better by {gap:.0f} points"
            _print(what, of_images(rows, columns, gap, some))


if __name__ == "__main__":
    main()
