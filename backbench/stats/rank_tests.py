"""Which rows are better than which others, over columns or images: p-values of all pairs together.

backbench/stats/rank_intervals.py says what follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from backbench.runs import seeding

if TYPE_CHECKING:
    import numpy as np

ALPHA = 0.05
FEWEST = 6  # units of which anything is said of others; of fewer, these alone on other images
FLIPS = 2000
# What all pairs say of how much one differs between units is worth so much of what it says itself.
# Worth 3, a quarter of the rows spreading four times as much as the others broke it (82% of boards
# of equals in one group); at 1 no such board does.
PRIOR = 1.0
# For each pair of rows, outcomes of the signs of so many units that flips can tell it apart; of
# fewer, a t-test of each pair. The columns' own units, estimated from the same few rows, make
# differences more alike than they are: without a factor flips told two apart on 5 to 8% of boards of
# equals, and t-tests on 9.4% of those of three equals and 6% of those of five to twenty.
_OUTCOMES = 40
_ALIKE_FLIPS, _ALIKE_ONE, _ALIKE_MANY = 1.6, 8.0, 1.0
MOST = 100  # rows whose pairs are tested by flips; of more, by a t-test of each pair
_SURE = 1 - 1e-12
_AT_ONCE = 200  # flips, in memory


class TestedPairs(NamedTuple):
    """`above` (rows, rows): a is better than b by test; the others as Ranking says them."""

    above: np.ndarray
    over: str
    units: int
    tested: bool


def of_pairs(
    values: np.ndarray, datasets: Sequence[str], noise: np.ndarray | None = None
) -> TestedPairs:
    """All pairs of rows tested; arguments as of `ranks.ranking`."""
    import numpy as np

    scaled, usual = _scaled(values)
    units, over = _units(datasets, scaled)
    evidence = _evidence(scaled, units)
    by_image = None
    if noise is not None and over != "datasets" and len(values) <= MOST:
        by_image = _by_image(scaled, noise / usual[None, :, None])
        by_image = by_image if np.isfinite(by_image).any() else None
    if len(set(units)) >= FEWEST:
        tested = over == "datasets" or by_image is not None
        p = _by_columns(evidence, by_image, alike=over == "columns")
    else:
        over, tested = "images", by_image is not None
        p = _by_images_alone(evidence, by_image)
    above = (p < ALPHA) & (evidence.mean > 0)
    return TestedPairs(above, over, len(set(units)), tested)


@dataclass(frozen=True)
class _Evidence:
    """Of all pairs of rows (rows, rows): the mean difference over the units that both have, how
    many, the sum of squared differences, and the differences themselves (units, rows, rows)."""

    mean: np.ndarray
    count: np.ndarray
    squares: np.ndarray
    each: np.ndarray | None


def _scaled(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every column in units of its usual difference between two rows, so that no column counts
    more because its values spread more; the median of a column is 0. And these units (columns,)."""
    import numpy as np

    out = np.full(values.shape, np.nan)
    units = np.ones(values.shape[1])
    for c, column in enumerate(values.T):
        there = ~np.isnan(column)
        known = column[there]
        if len(known) < 2:
            continue
        units[c] = _usual_gap(known)
        out[there, c] = (known - np.median(known)) / units[c]
    return out, units


def _usual_gap(known: np.ndarray) -> float:
    """The median difference of two unequal values; of very many that of normal ones with their
    quartiles. 1 where all are equal."""
    import numpy as np

    if len(known) > MOST:
        low, high = np.percentile(known, [25, 75])
        return float(high - low) / 2**0.5 or 1.0
    first, second = np.triu_indices(len(known), 1)
    gaps = np.abs(known[first] - known[second])
    return float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1.0


def _units(datasets: Sequence[str], scaled: np.ndarray) -> tuple[list[int], str]:
    """The unit of each column, and what they are called."""
    import numpy as np

    used = ~np.isnan(scaled).all(0)
    names = sorted({name for name, there in zip(datasets, used) if there})
    if len(names) >= FEWEST:
        place = {name: n for n, name in enumerate(names)}
        return [place.get(name, len(names)) for name in datasets], "datasets"
    return list(range(len(datasets))), "columns"


def _evidence(scaled: np.ndarray, units: Sequence[int]) -> _Evidence:
    """Differences of all pairs, one for each unit: the mean over its columns that both have."""
    import numpy as np

    rows = len(scaled)
    if rows > MOST:
        return _much_evidence(scaled, units)
    kept, counted = [], []
    of = np.asarray(units)
    for unit in sorted(set(units)):
        part = scaled[:, of == unit]
        there = (~np.isnan(part)).astype(float)
        plain = np.nan_to_num(part)
        both = there @ there.T
        # a's sum over the columns that b has too, minus b's over the columns that a has too
        kept.append((plain @ there.T - there @ plain.T) / np.maximum(both, 1))
        counted.append(both > 0)
    each, count = np.array(kept), np.array(counted).sum(0)
    return _Evidence(each.sum(0) / np.maximum(count, 1), count, (each**2).sum(0), each)


def _much_evidence(scaled: np.ndarray, units: Sequence[int]) -> _Evidence:
    """The same of very many rows, each with the mean of what it has of a unit: sums over units are
    products of matrices."""
    import numpy as np

    of = np.asarray(units)
    there = ~np.isnan(scaled)
    plain = np.nan_to_num(scaled)
    member = of[:, None] == np.unique(of)[None, :]
    number = there @ member.astype(float)
    x, have = plain @ member / np.maximum(number, 1), (number > 0).astype(float)
    count = have @ have.T
    total = x @ have.T - have @ x.T
    squares = x**2 @ have.T + have @ (x**2).T - 2 * x @ x.T
    return _Evidence(total / np.maximum(count, 1), count, np.maximum(squares, 0.0), None)


def _distance(
    sums: np.ndarray, count: np.ndarray, squares: np.ndarray, df: np.ndarray
) -> np.ndarray:
    """A sum's t statistic as the normal deviate of as small a tail, squared (Wallace, 1959), so
    that pairs with different numbers of units can be compared."""
    import numpy as np

    share = np.minimum(sums**2 / np.maximum(count * squares, 1e-300), _SURE)  # t^2 / (t^2 + df)
    return df * ((8 * df + 1) / (8 * df + 3)) ** 2 * -np.log1p(-share)


def _by_columns(e: _Evidence, by_image: np.ndarray | None, *, alike: bool) -> np.ndarray:
    """(rows, rows) p-values of all pairs together, over units."""
    import numpy as np

    rows = len(e.mean)
    first, second = np.triu_indices(rows, 1)
    enough = e.count[first, second] >= FEWEST
    first, second = first[enough], second[enough]
    p = np.ones((rows, rows))
    if not len(first):
        return p
    count, squares = e.count[first, second], e.squares[first, second]
    sums = e.mean[first, second] * count
    df, squares = _with_prior(rows, sums, count, squares)
    distance = _distance(sums, count, squares, df)
    if alike:  # by chance: columns that share images. No difference is better known than by them.
        distance = np.minimum(distance, _of_images(e.mean, by_image)[first, second])
    outcomes = 2.0 ** (count.max() - 1)  # of signs, without their mirrors
    if e.each is None or outcomes < min(_OUTCOMES * len(first), FLIPS):
        found = _holm(np.minimum(1.0, _alike(len(first)) * _tail(distance)))
    else:
        found = _ALIKE_FLIPS * _step_down(e.each[:, first, second], distance, count, squares, df)
    p[first, second] = p[second, first] = found
    return p


def _with_prior(
    rows: int, sums: np.ndarray, count: np.ndarray, squares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(degrees of freedom, squares) of each pair, with what the usual pair's variance over units
    says beside its own: of a few units a variance is poorly known, and of hundreds of pairs some are
    far too small (a moderated t; Smyth, 2004). Of two rows there is no other pair."""
    import numpy as np

    own = count - 1
    worth = PRIOR * (1 - 2 / rows) * own
    variance = np.maximum(squares - sums**2 / count, 0.0) / own
    return own + worth, squares + worth * np.median(variance)


def _alike(pairs: int) -> float:
    return _ALIKE_MANY + (_ALIKE_ONE - _ALIKE_MANY) / pairs


def _step_down(
    each: np.ndarray, distance: np.ndarray, count: np.ndarray, squares: np.ndarray, df: np.ndarray
) -> np.ndarray:
    """(pairs,) adjusted p-values; `each` (units, pairs). How often the largest of the distances is
    as large when each unit's differences turn their signs by a coin (a wild bootstrap of units:
    Cameron, Gelbach and Miller, 2008), from the farthest pair down (Romano and Wolf, 2005)."""
    import numpy as np

    order = np.argsort(-distance, kind="stable")
    each, count, squares, df = each[:, order], count[order], squares[order], df[order]
    rng = np.random.default_rng(seeding.seed_of("ranks", *each.shape))
    beyond = np.ones(len(order))  # the observed signs are one of the draws
    for _ in range(FLIPS // _AT_ONCE):
        signs = rng.integers(0, 2, size=(_AT_ONCE, len(each))) * 2.0 - 1
        flipped = _distance(signs @ each, count, squares, df)
        # The largest among a pair and all those less far: what is told apart leaves the family.
        largest = np.maximum.accumulate(flipped[:, ::-1], 1)[:, ::-1]
        beyond += (largest >= distance[order] - 1e-9).sum(0)
    p = np.maximum.accumulate(beyond / (1 + FLIPS))
    out = np.empty(len(order))
    out[order] = p
    return out


def _by_images_alone(e: _Evidence, by_image: np.ndarray | None) -> np.ndarray:
    """p-values of all pairs where columns are too few to say anything of others: these columns, on
    other images. Without predictions nothing is told apart."""
    import numpy as np

    rows = len(e.mean)
    p = np.ones((rows, rows))
    first, second = np.triu_indices(rows, 1)
    tail = _tail(_of_images(e.mean, by_image)[first, second])
    p[first, second] = p[second, first] = _holm(tail)
    return p


def _holm(p: np.ndarray) -> np.ndarray:
    """p-values of so many tests together (Holm, 1979): the smallest times all, the next times one
    less, and none smaller than the one before. What is no smaller than ALPHA alone stays as it is:
    together with others it only grows."""
    import numpy as np

    small = np.flatnonzero(p < ALPHA)
    order = small[np.argsort(p[small], kind="stable")]
    left = len(p) - np.arange(len(order))
    out = p.copy()
    out[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * left))
    return out


def _by_image(scaled: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """(rows, rows): the variance over images of the mean difference of two rows, over the columns
    that both have; nan where one of them kept no predictions."""
    import numpy as np

    rows = len(scaled)
    there = ~np.isnan(scaled)
    out = np.full((rows, rows), np.nan)
    for a in range(rows):
        for b in range(a):
            both = there[a] & there[b]
            if both.any():
                moved = (noise[a, both] - noise[b, both]).mean(0)
                out[a, b] = out[b, a] = moved.var(ddof=1)
    return out


def _of_images(mean: np.ndarray, by_image: np.ndarray | None) -> np.ndarray:
    """Distances squared, in standard errors over images; 0 where nothing is known of these."""
    import numpy as np

    if by_image is None:
        return np.zeros_like(mean)
    known = by_image > 0
    return np.where(known, mean**2 / np.where(known, by_image, 1.0), 0.0)


def _tail(squared: np.ndarray) -> np.ndarray:
    from scipy.special import ndtr

    return 2 * ndtr(-(squared**0.5))
