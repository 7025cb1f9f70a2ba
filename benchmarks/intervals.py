"""Simulate how often the intervals cover the truth and how often the tests call a difference.

python benchmarks/intervals.py [--repeats R]; `benchmarks/intervals.txt` has its last figures.

Every kind of column has images of a difficulty that all trunks share; trunks have images of their
own that they are good at; draws of labels differ, for all trunks alike and for each. One trunk's
top-1 is summed over all counts of hits; everything else is a share of simulated columns.
"""

import argparse
import bisect
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, ndtri
from scipy.stats import binom, norm

from backbench.stats import confidence, paired_differences

IMAGES = (100, 500, 10_000)
TESTED = (100, 500, 1_000, 10_000)
SHARES = (0.5, 0.9, 0.99)
GAPS = (0.02, 0.05, 0.10)
POWER_AT = 0.8  # the lower trunk's share, where power is measured
POWER_REPEATS = 100
CLASSES = {100: 10, 500: 37, 1_000: 50, 10_000: 100}
DRAWS = 20
SEEDS = 3
# Spreads beside the images' own of 1
OWN, SHARED_DRAW, OWN_DRAW, LEFT = (0.6, 0.2, 0.15, 0.6)
RESAMPLES = 500  # of a detector's images
SEED = 2_000_000  # of simulated columns that nothing was chosen on

Interval = confidence.Interval | None


class Population:
    """Trunks, images and draws as random as in real columns."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(SEED + seed)

    def noise(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def labels(self, images: int) -> np.ndarray:
        """Classes of very unequal size, each at least once."""
        classes = CLASSES[images]
        share = self.rng.dirichlet(np.full(classes, 3.0))
        rest = self.rng.choice(classes, size=images - classes, p=share)
        return np.concatenate((np.arange(classes), rest))

    def hits(
        self, trunks: int, images: int, share: float, gap: float = 0.0
    ) -> np.ndarray:
        """(trunks, images) bool; the last trunk is better by `gap`, in expected hits."""
        score = self.noise(images) + self.noise(trunks, images)
        return score > 2**0.5 * _edges(trunks, share, gap)[:, None]

    def drawn(
        self, trunks: int, images: int, share: float, draws: int, gap: float = 0.0
    ) -> np.ndarray:
        """(trunks, draws, images) bool."""
        spread = (1 + OWN**2 + SHARED_DRAW**2 + OWN_DRAW**2 + LEFT**2) ** 0.5
        base = self.noise(images) + OWN * self.noise(trunks, images)
        of_draw = SHARED_DRAW * self.noise(draws) + OWN_DRAW * self.noise(trunks, draws)
        edges = spread * _edges(trunks, share, gap)
        hits = np.empty((trunks, draws, images), bool)
        for k in range(trunks):
            needed = ((edges[k] - of_draw[k])[:, None] - base[k]) / LEFT
            np.greater(self.noise(draws, images), needed, out=hits[k])
        return hits


def _edges(trunks: int, share: float, gap: float) -> np.ndarray:
    """The standard normal score above which each trunk has a hit."""
    shares = np.full(trunks, share)
    shares[-1] += gap
    return np.asarray(-ndtri(shares), np.float32)


# ---- intervals


@functools.cache
def of_count(hits: int, n: int) -> confidence.Interval:
    """The interval of so many hits of n images."""
    return confidence.of_hits(np.arange(n) < hits)


def covers(found: Interval, share: float) -> bool:
    return found is not None and found[0] <= 100 * share <= found[1]


def top1(n: int, share: float) -> float:
    """The exact coverage: the probability of all counts whose interval covers the truth."""
    spread = (n * share * (1 - share)) ** 0.5
    ends = np.clip([n * share - 7 * spread, n * share + 7 * spread + 1], 0, n).astype(
        int
    )
    counts = np.arange(ends[0], ends[1] + 1)
    covered = np.array([covers(of_count(int(k), n), share) for k in counts])
    return float(binom.pmf(counts, n, share) @ covered)


def per_class(p: Population, n: int, share: float) -> Interval:
    label = p.labels(n)
    # Accuracies of classes whose mean is `share`: a logistic curve of normals, moved
    z = p.rng.normal(size=CLASSES[n])
    spread = expit(z + brentq(lambda moved: expit(z + moved).mean() - share, -12, 12))
    return confidence.of_hits(p.rng.random(n) < spread[label], label)


def few_labels(p: Population, n: int, share: float) -> Interval:
    return confidence.of_draws(p.drawn(1, n, share, DRAWS)[0])


def few_labels_per_class(p: Population, n: int, share: float) -> Interval:
    return confidence.of_draws(p.drawn(1, n, share, DRAWS)[0], p.labels(n))


def detection(p: Population, n: int, share: float) -> Interval:
    value = p.rng.binomial(n, share) / n
    return confidence.of_resamples(value, p.rng.binomial(n, value, RESAMPLES) / n, n)


def average(p: Population, n: int, share: float) -> Interval:
    """The mean of twelve datasets, one seed each."""
    counts = [int(k) for k in p.rng.binomial(n, share, 12)]
    ends = [of_count(k, n) for k in counts]
    return confidence.of_mean([100 * k / n for k in counts], ends, [math.inf] * 12)


def average_of_seeds(p: Population, n: int, share: float) -> Interval:
    """The same, with SEEDS seeds each, of which the images are as given."""
    shares = p.rng.normal(
        100 * share, 100 * (share * (1 - share) / n) ** 0.5, (12, SEEDS)
    )
    ends = [confidence.of_seeds(list(of_seeds)) for of_seeds in shares]
    assert None not in ends
    means = [float(mean) for mean in shares.mean(1)]
    return confidence.of_mean(means, [e for e in ends if e], [SEEDS - 1.0] * 12)


VALUES: dict[str, Callable[[Population, int, float], Interval]] = {
    "mean per class": per_class,
    "few labels, top-1": few_labels,
    "few labels, mean per class": few_labels_per_class,
    "AP (500 resamples)": detection,
    "average of twelve": average,
    "average of twelve, three seeds": average_of_seeds,
}


def covered(name: str, n: int, share: float, repeats: int) -> float:
    """How often the interval of a kind of value covers the truth."""
    if name == "top-1":
        return top1(n, share)
    p = Population(n + round(100 * share))
    found = [covers(VALUES[name](p, n, share), share) for _ in range(repeats)]
    return float(np.mean(found))


def _times(repeats: int, images: int) -> int:
    """Columns of many images are as much work as many columns."""
    return repeats // 2 if images > 5_000 else repeats


# ---- differences

AP = "AP (500 resamples)"
# Kind of column -> draws of labels (1: every image is predicted once), and whether classes weigh the
# same
PAIRS = {
    "top-1": (1, False),
    "mean per class": (1, True),
    "few labels, top-1": (DRAWS, False),
    "few labels, mean per class": (DRAWS, True),
    "three seeds": (SEEDS, False),
    AP: (1, False),
}


def pair(
    name: str, p: Population, n: int, share: float, gap: float
) -> paired_differences.Difference | None:
    """Two trunks in a kind of column, the second better by `gap`."""
    draws, per_class = PAIRS[name]
    if draws > 1:
        a, b = p.drawn(2, n, share, draws, gap)
    else:
        a, b = p.hits(2, n, share, gap)
    if name == AP:
        won, lost = float((b & ~a).mean()), float((a & ~b).mean())
        counts = p.rng.multinomial(
            n, [won, lost, max(1 - won - lost, 0)], size=RESAMPLES
        )
        return paired_differences.of_resamples(
            100 * (counts[:, 0] - counts[:, 1]) / n, n
        )
    difference = b.astype(float) - a
    label = p.labels(n) if per_class else None
    if draws > 1:
        return paired_differences.of_draws_and_images(difference, label)
    return paired_differences.of_images(difference, label)


def top1_called(n: int, share: float) -> float:
    """The exact rate at which equal trunks are called different: summed over the number of images on
    which only one is right, and over how many of these the first one wins."""
    # 1. Of an image whose difficulty is so many deviations, one trunk is right with `right`.
    deviations = np.linspace(-8, 8, 4001)
    right = norm.sf(2**0.5 * norm.isf(share) - deviations)
    density = norm.pdf(deviations)
    differ = float((density * 2 * right * (1 - right)).sum() / density.sum())
    # 2. Of m such images, the fewest that one trunk must win to be called better.
    spread = (n * differ * (1 - differ)) ** 0.5
    ends = np.clip([n * differ - 6 * spread, n * differ + 6 * spread + 1], 0, n).astype(
        int
    )
    total = 0.0
    for m in range(ends[0], ends[1] + 1):
        is_called = functools.partial(_is_called, m, n)
        least = bisect.bisect_left(range(m + 1), True, lo=(m + 1) // 2, key=is_called)
        total += float(binom.pmf(m, n, differ) * 2 * binom.sf(least - 1, m, 0.5))
    return total


def _is_called(differ: int, n: int, won: int) -> bool:
    """True if two trunks are told apart that disagree on `differ` of n images, one winning `won`."""
    d = np.zeros(n)
    d[:won], d[won:differ] = 1, -1
    return paired_differences.of_images(d).real


def called(name: str, n: int, share: float, repeats: int, gap: float = 0.0) -> float:
    """How often two trunks of a kind of column, `gap` apart, are called different."""
    if name == "top-1" and not gap:
        return top1_called(n, share)
    p = Population(n + round(100 * share) + 1)
    calls = 0
    for _ in range(repeats):
        tested = pair(name, p, n, share, gap)
        calls += tested is not None and tested.real
    return calls / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeats", type=int, default=4000, help="half for 10,000 images"
    )
    repeats = parser.parse_args().repeats
    for name, n in itertools.product(("top-1", *VALUES), IMAGES):
        found = [100 * covered(name, n, share, _times(repeats, n)) for share in SHARES]
        print(f"{name}, {n} images: at p = {SHARES} covers {_text(found)}%", flush=True)
    for seeds in (2, 3, 5, 10):
        values = Population(seeds).rng.normal(70, 0.5, size=(4 * repeats, seeds))
        share = np.mean([covers(confidence.of_seeds(list(v)), 0.7) for v in values])
        print(
            f"mean of {seeds} seeds: for new seeds covers {100 * share:.1f}%",
            flush=True,
        )
    for name, n in itertools.product(PAIRS, TESTED):
        rates = [100 * called(name, n, share, _times(repeats, n)) for share in SHARES]
        power = [100 * called(name, n, POWER_AT, POWER_REPEATS, gap) for gap in GAPS]
        print(
            f"{name}, {n} images: of equals at p = {SHARES} called different {_text(rates)}%;"
        )
        print(f"    at p = {POWER_AT} and {GAPS} apart {_text(power)}%", flush=True)


def _text(percents: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in percents)


if __name__ == "__main__":
    main()
