"""Ranks of rows over many columns, and how well they are known.

*Win rate* and *average rank* describe the table as it is. A *rank interval* says which ranks a row
may have on other columns of the same kind: surely before it are only the rows that a test of all
pairs together puts above it, and surely after it those below (column_comparisons.py; Mogstad,
Romano, Shaikh and Wilhelm, 2023). Nobody is above the *leaders*. Two rows are compared on the
columns that both have; nothing is imputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbench.stats.column_comparisons import Trainings, compared_pairs

MOST_ROWS = 2000  # every pair is compared, in seconds and half a gigabyte
# Of Newton's iteration for Bradley and Terry's strengths: iterations, and the largest step
_TURNS = 100
_STEP = 2.0


@dataclass(frozen=True)
class RankPlace:
    """One row's place among the others. Rank 1 is the best, and equals share a rank."""

    rank: int
    interval: tuple[int, int]  # of ranks, 95% for all rows together
    # Mean of its ranks in the columns that it has; None if it has none
    average: float | None
    # Percent of comparisons that it should win, by Bradley and Terry's model
    win_rate: float
    columns: int  # the number of columns in which it has a value
    group: int  # 1: nobody is above it; 2: only rows of group 1 are; and so on


@dataclass(frozen=True)
class Ranking:
    """The places of all rows, in the order of the table, and how they were compared (the last four
    fields: see ComparedPairs)."""

    places: list[RankPlace]
    over: str
    units: int
    above: np.ndarray
    tested: bool

    @property
    def leaders(self) -> list[int]:
        """The numbers of the rows that nobody is above, the best rank first."""
        first = [i for i, place in enumerate(self.places) if place.group == 1]
        return sorted(first, key=lambda i: (self.places[i].rank, i))


def ranking(
    values: np.ndarray,
    datasets: Sequence[str],
    noise: np.ndarray | None = None,
    trainings: Trainings | None = None,
    *,
    by_images: bool = False,
    images: np.ndarray | None = None,
) -> Ranking:
    """Rank the rows of `values` (rows, columns): higher is better, nan is missing.

    `datasets` names each column's dataset. `noise` (rows, columns, resamples) is how values move on
    resamples of the test images, which are the same for all columns of a dataset; nan without
    predictions. `images` (columns,) says of how many test images each column's values are means.
    `trainings` are those behind the values, None if nothing was trained. With `by_images`, pairs
    are compared over other images alone, however many columns there are."""
    values = np.asarray(values, float)
    compared = compared_pairs(
        values, datasets, noise, trainings, by_images=by_images, images=images
    )
    places = _places(values, _strengths(*_wins(values)), compared.above)
    return Ranking(
        places, compared.over, compared.units, compared.above, compared.tested
    )


def column_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks (rows, columns): 1 is the highest, equals share the mean rank, nan stays nan."""
    # Not `scipy.stats.rankdata`, for whose import every board would wait half a second
    ranks = np.full(values.shape, np.nan)
    for column, of_column in zip(values.T, ranks.T):
        known = ~np.isnan(column)
        _, place, count = np.unique(
            -column[known], return_inverse=True, return_counts=True
        )
        # Equals share the mean of the ranks from `last - count + 1` to `last`
        last = count.cumsum()
        of_column[known] = (last - (count - 1) / 2)[place]
    return ranks


def _wins(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two tables (rows, rows): in how many columns a is above b (ties count half), and how
    many columns both have."""
    there = ~np.isnan(values)
    have = there.astype(np.float32)
    met = (have @ have.T).astype(float)
    higher = np.zeros(met.shape, np.int16)
    for column, known in zip(values.T, there.T):
        # Small whole numbers in the order of the values, because many are compared at a time
        place = np.unique(column, return_inverse=True)[1].astype(np.int16)
        # A missing value is above nothing, and nothing is above it
        over = np.where(known, place, -1)
        under = np.where(known, place, np.int16(32767))
        higher += (over[:, None] > under[None, :]).view(np.int8)
    # Shared columns that neither row wins are ties, so a's wins and half of the ties are
    # h_ab + (met - h_ab - h_ba) / 2
    won = (higher - higher.T.astype(float) + met) / 2
    np.fill_diagonal(won, 0)
    np.fill_diagonal(met, 0)
    return won, met


def _strengths(won: np.ndarray, met: np.ndarray) -> np.ndarray:
    """Return the logarithms of Bradley and Terry's strengths (rows,) with the largest likelihood.

    A row of strength s beats one of strength t with probability s / (s + t). Every row also ties
    once with an imagined row of strength 1, so that no strength is infinite."""
    from scipy.special import expit

    log_strength = np.zeros(len(won))
    total = won.sum(1) + 0.5
    for _ in range(_TURNS):
        # Newton's step on a concave log-likelihood. Its gradient is the wins that were seen minus
        # those expected; its curvature is made of the variances of single comparisons
        p = expit(log_strength[:, None] - log_strength[None, :])
        against_imagined = expit(log_strength)
        gradient = total - (met * p).sum(1) - against_imagined
        weight = met * p * (1 - p)
        own = weight.sum(1) + against_imagined * (1 - against_imagined)
        step = np.linalg.solve(np.diag(own) - weight, gradient)
        log_strength = log_strength + np.clip(step, -_STEP, _STEP)
        if np.abs(step).max(initial=0.0) < 1e-7:
            break
    return log_strength


def _places(
    values: np.ndarray, strength: np.ndarray, above: np.ndarray
) -> list[RankPlace]:
    """Return the places of all rows, from Bradley and Terry's strengths and the tested pairs."""
    from scipy.special import expit

    rows = len(values)
    # 1. The share of comparisons that a row should win, and its rank by that; equals share a rank
    expected = expit(strength[:, None] - strength[None, :])
    np.fill_diagonal(expected, 0)
    rate = 100 * expected.sum(1) / max(rows - 1, 1)
    rough = -np.round(rate, 6)
    rank = 1 + np.searchsorted(np.sort(rough), rough, "left")
    # 2. The interval, by how many are surely before it, and how many surely after. It holds the rank
    low = np.minimum(1 + above.sum(0), rank)
    high = np.maximum(rows - above.sum(1), rank)
    # 3. The group, and the plain mean of its ranks
    group = _groups(above)
    out = []
    for i, ranks in enumerate(column_ranks(values)):
        known = ranks[~np.isnan(ranks)]
        out.append(
            RankPlace(
                rank=int(rank[i]),
                interval=(int(low[i]), int(high[i])),
                average=float(known.mean()) if len(known) else None,
                win_rate=float(rate[i]),
                columns=len(known),
                group=group[i],
            )
        )
    return out


def _groups(above: np.ndarray) -> list[int]:
    """Return the group of each row, from 1. Only rows of earlier groups are above its rows."""
    group = np.zeros(len(above), int)
    left = np.ones(len(above), bool)
    number = 0
    while left.any():
        number += 1
        beaten = (above & left[:, None]).any(0)
        first = left & ~beaten
        # In a circle (a above b above c above a) all are beaten: all that are left become a group
        group[first if first.any() else left] = number
        left = group == 0
    return [int(each) for each in group]
