"""Who is better over many columns, and how well that is known: pure arithmetic on a table of values.

Three questions are answered apart. *Win rate* and *average rank* describe the table as it is. A
*rank interval* says which places a row may have on other columns of the same kind: whoever is above
(or below) it by a test that counts all pairs of rows, and no one else, is sure to be before (or
after) it (Mogstad, Romano, Shaikh and Wilhelm, 2023). *Leaders* are those that nobody is above.

Nothing is imputed: two rows are compared on the columns that both have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backbench.stats.column_comparisons import compared_pairs

if TYPE_CHECKING:
    import numpy as np

MOST_ROWS = 2000  # every pair is compared: 4 s and half a gigabyte
_TURNS, _STEP = 100, 2.0  # of Newton's iteration for Bradley and Terry's strengths


@dataclass(frozen=True)
class RankPlace:
    """How one row stands among the others; rank 1 is the best, and equals share a rank."""

    rank: int
    interval: tuple[int, int]  # of ranks, 95% for all rows together
    average: float | None  # mean over columns of its rank among those there; None: it has none
    win_rate: float  # percent of comparisons that it should win, by Bradley and Terry's model
    columns: int  # that it has a value in
    group: int  # 1: nobody is above it; 2: only rows of group 1 are; and so on


@dataclass(frozen=True)
class Ranking:
    """`places` as the rows came; `over` is what was taken for random: datasets, columns or images;
    `units` how many of it. `above[a, b]`: a is better than b by test."""

    places: list[RankPlace]
    over: str
    units: int
    above: np.ndarray
    tested: bool  # whether any pair was: enough columns, or predictions to resample

    def taken(self, order: Sequence[int]) -> Ranking:
        """The same with the rows in this order."""
        import numpy as np

        above = self.above[np.ix_(order, order)]
        places = [self.places[i] for i in order]
        return Ranking(places, self.over, self.units, above, self.tested)

    @property
    def leaders(self) -> list[int]:
        """Rows that nobody is above, the best rank first."""
        first = [i for i, place in enumerate(self.places) if place.group == 1]
        return sorted(first, key=lambda i: (self.places[i].rank, i))


def ranking(
    values: np.ndarray,
    datasets: Sequence[str],
    noise: np.ndarray | None = None,
) -> Ranking:
    """`values` (rows, columns), higher is better, nan where missing. `datasets` names each column's;
    columns of one dataset are one unit where there are datasets enough, else each column is one.
    `noise` (rows, columns, resamples) is how the values move on resamples of the test images, the
    same images for all columns of one dataset: nan where a row kept no predictions.
    """
    import numpy as np

    values = np.asarray(values, float)
    found = compared_pairs(values, datasets, noise)
    strength = _strengths(*_wins(values))
    places = _places(values, strength, found.above)
    return Ranking(places, found.over, found.units, found.above, found.tested)


# ---- what the table says of itself


def column_ranks(values: np.ndarray) -> np.ndarray:
    """(rows, columns): 1 is the highest of its column, equals share the mean of their ranks, nan
    stays nan."""
    import numpy as np

    higher = np.full(values.shape, np.nan)
    for c, column in enumerate(values.T):
        there = ~np.isnan(column)
        known = np.sort(column[there])
        below = np.searchsorted(known, column[there], "left")
        equal = np.searchsorted(known, column[there], "right") - below
        higher[there, c] = len(known) - below - equal + (equal + 1) / 2
    return higher


def _wins(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, rows): in how many columns a is above b, ties as half; and how many both have."""
    import numpy as np

    there = ~np.isnan(values)
    have = there.astype(np.float32)
    met = (have @ have.T).astype(float)
    higher = np.zeros(met.shape, np.int16)
    for column, known in zip(values.T, there.T):
        # Small whole numbers in the order of the values: they are compared many at a time.
        place = np.unique(column, return_inverse=True)[1].astype(np.int16)
        # Nothing is above what is missing, nor that above anything.
        over, under = np.where(known, place, -1), np.where(known, place, np.int16(32767))
        higher += (over[:, None] > under[None, :]).view(np.int8)
    # Of those that both have, what neither wins is a tie.
    won = (higher - higher.T.astype(float) + met) / 2
    np.fill_diagonal(won, 0)
    np.fill_diagonal(met, 0)
    return won, met


def _strengths(won: np.ndarray, met: np.ndarray) -> np.ndarray:
    """(rows,) logarithms of Bradley and Terry's strengths: the most likely ones. Everybody also
    meets one imagined row of strength 1 and ties, or who wins all would be infinitely strong."""
    import numpy as np
    from scipy.special import expit

    log_strength = np.zeros(len(won))
    total = won.sum(1) + 0.5
    for _ in range(_TURNS):
        # Newton's step on a concave likelihood: the wins that are there minus those expected
        p = expit(log_strength[:, None] - log_strength[None, :])
        alone = expit(log_strength)
        missing = total - (met * p).sum(1) - alone
        weight = met * p * (1 - p)
        curved = np.diag(weight.sum(1) + alone * (1 - alone)) - weight
        step = np.linalg.solve(curved, missing)
        log_strength = log_strength + np.clip(step, -_STEP, _STEP)
        if np.abs(step).max(initial=0.0) < 1e-7:
            break
    return log_strength


def _places(
    values: np.ndarray,
    strength: np.ndarray,
    above: np.ndarray,
) -> list[RankPlace]:
    import numpy as np
    from scipy.special import expit

    rows = len(values)
    # 1. What a row should win of the others, and its rank by that: equals within rounding share it.
    expected = expit(strength[:, None] - strength[None, :])
    np.fill_diagonal(expected, 0)
    rate = 100 * expected.sum(1) / max(rows - 1, 1)
    rough = -np.round(rate, 6)
    rank = 1 + np.searchsorted(np.sort(rough), rough, "left")
    # 2. The interval: who is surely before it, and who surely after. Its own rank is always in it.
    low = np.minimum(1 + above.sum(0), rank)
    high = np.maximum(rows - above.sum(1), rank)
    # 3. The plain mean of its ranks.
    ranks = column_ranks(values)
    group = _groups(above)
    out = []
    for i in range(rows):
        known = ranks[i][~np.isnan(ranks[i])]
        mean = float(known.mean()) if len(known) else None
        interval = (int(low[i]), int(high[i]))
        out.append(RankPlace(int(rank[i]), interval, mean, float(rate[i]), len(known), group[i]))
    return out


def _groups(above: np.ndarray) -> list[int]:
    """Those that nobody is above; of the others those that nobody of the others is; and so on."""
    import numpy as np

    group = np.zeros(len(above), int)
    number = 0
    while (left := group == 0).any():
        number += 1
        beaten = (above & left[:, None]).any(0)
        first = left & ~beaten
        # A circle (a above b above c above a) has no first: it is a group.
        group[first if first.any() else left] = number
    return [int(g) for g in group]
