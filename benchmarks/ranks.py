"""Simulate boards: what rank intervals cover, how often equals are told apart, and the best one.

python benchmarks/ranks.py [--repeats R]; `benchmarks/ranks.txt` is its last output.

A board has rows whose true means over all datasets are given; on each dataset every row has an
advantage of its own, and its value is measured on that dataset's images. A true rank counts who is
truly before; of equals an interval must hold all the ranks that they share.
"""

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from backbench.results import resamples
from backbench.stats import rank_intervals, resampling

OWN = 1.5  # points: the spread of the difference of two equals between datasets
GAPS = (1.0, 2.0, 5.0)  # points
SHARED = 0.5  # part of an image's variance that all rows share
IMAGES = (500, 10_000)  # of a dataset, between these
SEED = 31  # of boards that nothing was chosen on
NAIVE, NAIVE_BOARDS = 300, 8  # resamples of the plain two-level bootstrap beside, of some boards


class Shape(NamedTuple):
    """A kind of board."""

    rows: int
    columns: int
    heavy: bool = False  # advantages with tails of Student's t with 4 degrees of freedom
    missing: float = 0.0  # share of cells
    uneven: bool = False  # rows whose advantages spread four times as much as those of others

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


class Simulated(NamedTuple):
    """Values (rows, columns) and how far each moves with other images, (rows, columns)."""

    values: np.ndarray
    error: np.ndarray


def board(rng: np.random.Generator, shape: Shape, truth: Sequence[float]) -> Simulated:
    """Values in points on datasets with images of their own."""
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
    return Simulated(values, np.broadcast_to(error, size))


def true_ranks(truth: Sequence[float]) -> np.ndarray:
    """(rows, 2): the first and the last of the ranks that a row and its equals share."""
    true = np.asarray(truth)
    return np.array([(1 + (true > t).sum(), len(true) - (true < t).sum()) for t in true])


def covered(intervals: np.ndarray, true: np.ndarray) -> float:
    return float(((intervals[:, 0] <= true[:, 0]) & (intervals[:, 1] >= true[:, 1])).mean())


def naive(rng: np.random.Generator, b: Simulated) -> np.ndarray:
    """(rows, 2): percentiles of the rank by mean rank, where columns are drawn again, and within
    them images: what a two-level bootstrap is when nothing is thought of ties."""
    rows, columns = b.values.shape
    found = np.empty((NAIVE, rows))
    for n in range(NAIVE):
        drawn = rng.integers(0, columns, columns)
        values = b.values[:, drawn] + b.error[:, drawn] * rng.standard_normal((rows, columns))
        mean = np.nanmean(rank_intervals.column_ranks(values), axis=1)
        found[n] = 1 + (mean[:, None] > mean[None, :]).sum(1)
    return np.percentile(found, [2.5, 97.5], axis=0).T


class Seen(NamedTuple):
    """Shares over many boards, in percent."""

    covered: float  # rank intervals of all rows
    together: float  # boards on which no pair of rows is told apart
    alone: float  # boards on which the last row leads alone
    beats: float  # of the others, those that the last row is above
    plain: float  # boards on which the last row has the best mean rank
    naive: float  # what the plain two-level bootstrap covers


def _seen_of(
    ranking: rank_intervals.Ranking, values: np.ndarray, true: np.ndarray
) -> tuple[float, ...]:
    """All fields of Seen but the last for one board, whose last row is the best."""
    last = len(values) - 1
    mean = np.nanmean(rank_intervals.column_ranks(values), axis=1)
    alone, first = ranking.leaders == [last], mean.argmin() == last
    intervals = np.array([place.interval for place in ranking.places])
    together = not ranking.above.any()
    return covered(intervals, true), together, alone, ranking.above[-1, :-1].mean(), first


def _shares(seen: Sequence[tuple[float, ...]]) -> Seen:
    """Means in percent, over those boards of which there is a number."""
    means = []
    for values in np.array(seen, float).T:
        known = values[~np.isnan(values)]
        means.append(100 * float(known.mean()) if len(known) else np.nan)
    return Seen(*means)


def _text(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.1f}"


def _power(seen: Seen) -> str:
    return f"{f'{seen.alone:.0f}, {seen.beats:.0f} ({seen.plain:.0f})':>15}"


def look(shape: Shape, truth: Sequence[float], repeats: int, *, beside: bool = False) -> Seen:
    kind = [shape.rows, shape.columns, shape.heavy, int(100 * shape.missing), shape.uneven]
    rng = np.random.default_rng([SEED, *kind, int(10 * max(truth))])
    true = true_ranks(truth)
    datasets = [str(c) for c in range(shape.columns)]
    seen = []
    for n in range(repeats):
        b = board(rng, shape, truth)
        ranking = rank_intervals.ranking(b.values, datasets)
        naively = covered(naive(rng, b), true) if beside and n < NAIVE_BOARDS else np.nan
        seen.append((*_seen_of(ranking, b.values, true), naively))
    return _shares(seen)


def of_images(rows: int, columns: int, gap: float, repeats: int) -> Seen:
    """Simulate few columns on the same 1,000 images: their ranks on other images, by predictions."""
    rng = np.random.default_rng([SEED, rows, columns, int(10 * gap)])
    true = true_ranks([0.0] * (rows - 1) + [gap])
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
        seen.append((*_seen_of(ranking, values, true), np.nan))
    return _shares(seen)


def main() -> None:
    from machine import describe

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    args = parser.parse_args()
    start = time.process_time()
    print(f"python benchmarks/ranks.py --repeats {args.repeats}; {describe()}")
    some, few = args.repeats // 4, args.repeats // 10
    print(f"Boards of seed {SEED}; nothing was chosen on them.\n")
    print("All rows equal, in percent of boards: intervals that cover, no two told apart; beside,")
    print("what a two-level bootstrap of the mean rank covers.")
    print(f"\n{'':42}{'covers':>8}{'together':>10}{'two-level':>11}")
    for shape in SHAPES:
        seen = look(shape, [0.0] * shape.rows, args.repeats, beside=not shape.missing)
        line = f"{shape.name:42}{seen.covered:8.1f}{seen.together:10.1f}{_text(seen.naive):>11}"
        print(line, flush=True)
    print("\nRows half a point apart, each from the next, in percent")
    print(f"\n{'':42}{'covers':>8}{'':10}{'two-level':>11}")
    for shape in SHAPES:
        seen = look(shape, [0.5 * n for n in range(shape.rows)], some, beside=not shape.missing)
        print(f"{shape.name:42}{seen.covered:8.1f}{'':10}{_text(seen.naive):>11}", flush=True)
    gaps = "".join(f"{f'{gap:.0f} pt':>15}" for gap in GAPS)
    print("\nOne row better than all others, which are equal, in percent: boards on which it leads")
    print("alone, the others that it is told apart from; in brackets: it has the best mean rank")
    print(f"\n{'':42}{gaps}{'covers':>8}")
    for shape in SHAPES:
        seen_at = [look(shape, [0.0] * (shape.rows - 1) + [gap], some) for gap in GAPS]
        least = min(seen.covered for seen in seen_at)
        print(f"{shape.name:42}{''.join(map(_power, seen_at))}{least:8.1f}", flush=True)
    print("\nColumns of one dataset of 1,000 images, with predictions kept: on other images")
    print(f"\n{'':42}{'covers':>8}{'together':>10}{gaps}")
    for rows, columns in ((2, 3), (5, 3), (5, 8)):
        equal = of_images(rows, columns, 0.0, some)
        line = f"{f'{rows} rows, {columns} columns':42}{equal.covered:8.1f}{equal.together:10.1f}"
        seen_at = [of_images(rows, columns, gap, few) for gap in GAPS]
        print(line + "".join(map(_power, seen_at)), flush=True)
    boards = f"{args.repeats} boards of equals of each kind, {some} of each other, {few} of images with one best"
    print(f"\n{boards}; {time.process_time() - start:.0f} s of one core")


if __name__ == "__main__":
    main()
