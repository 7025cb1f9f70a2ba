"""python benchmarks/intervals.py [--repeats R]: what the intervals cover and the tests call, by
simulation. `benchmarks/intervals.txt` is what it printed.

Every kind of column has images of a difficulty that all trunks share; trunks have images of their
own that they are good at; draws of labels differ, for all trunks alike and for each. Shares are of
`R` simulated columns: at 2,000 they are good to half a point (one standard error).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.stats import norm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backbench.results import compare, intervals

IMAGES = (100, 500, 10_000)
TESTED = (100, 500, 1_000, 10_000)
SHARES = (0.5, 0.9, 0.99)
CLASSES = {100: 10, 500: 37, 1_000: 50, 10_000: 100}
DRAWS = 20
OWN, SHARED_DRAW, OWN_DRAW, LEFT = 0.6, 0.2, 0.15, 0.6  # spreads beside the images' own of 1
Scores = np.ndarray


class Population:
    """Trunks, images and draws as random as in real columns; `bank` spares drawing normals anew."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.bank = self.rng.standard_normal(1 << 22, dtype=np.float32)

    def noise(self, *shape: int) -> np.ndarray:
        """Standard normals: a window of the bank, somewhere."""
        size = int(np.prod(shape))
        start = int(self.rng.integers(0, len(self.bank) - size))
        return self.bank[start : start + size].reshape(shape)

    def labels(self, images: int) -> np.ndarray:
        """Classes of very unequal size, each at least once."""
        classes = CLASSES[images]
        share = self.rng.dirichlet(np.full(classes, 3.0))
        rest = self.rng.choice(classes, size=images - classes, p=share)
        return np.concatenate((np.arange(classes), rest))

    def hits(self, trunks: int, images: int, share: float, gap: float = 0.0) -> np.ndarray:
        """(trunks, images) bool; the last trunk is better by `gap`, in expected hits."""
        score = self.noise(images) + self.noise(trunks, images)
        edges = 2**0.5 * norm.ppf(
            1 - np.full(trunks, share) - gap * (np.arange(trunks) == trunks - 1)
        )
        return score > edges[:, None]

    def drawn(
        self, trunks: int, images: int, share: float, draws: int, gap: float = 0.0
    ) -> np.ndarray:
        """(trunks, draws, images) bool."""
        spread = (1 + OWN**2 + SHARED_DRAW**2 + OWN_DRAW**2 + LEFT**2) ** 0.5
        base = self.noise(images) + OWN * self.noise(trunks, 1, images)
        of_draw = SHARED_DRAW * self.noise(1, draws, 1) + OWN_DRAW * self.noise(trunks, draws, 1)
        score = base + of_draw + LEFT * self.noise(trunks, draws, images)
        edges = spread * norm.ppf(
            1 - np.full(trunks, share) - gap * (np.arange(trunks) == trunks - 1)
        )
        return score > edges[:, None, None]


def resampled(x: np.ndarray, population: Population, resamples: int = 500) -> np.ndarray:
    """The mean of x (N,) on resamples of its images (B,), as a detector's AP is kept."""
    found, count = np.unique(x, return_counts=True)
    counts = population.rng.multinomial(len(x), count / len(x), size=resamples)
    return counts @ found / len(x)


# ---- intervals


def top1(p: Population, n: int, share: float) -> intervals.Interval | None:
    return intervals.of_hits(p.rng.random(n) < share)


def per_class(p: Population, n: int, share: float) -> intervals.Interval | None:
    label = p.labels(n)
    spread = _spread_around(share, p.rng.normal(size=CLASSES[n]))
    return intervals.of_hits(p.rng.random(n) < spread[label], label)


def _spread_around(share: float, z: np.ndarray) -> np.ndarray:
    """Accuracies of classes whose mean is `share`: logistic of z, moved by bisection."""
    low, high = -12.0, 12.0
    for _ in range(40):
        middle = (low + high) / 2
        below = (1 / (1 + np.exp(-z - middle))).mean() < share
        low, high = (middle, high) if below else (low, middle)
    return 1 / (1 + np.exp(-z - low))


def few_labels(p: Population, n: int, share: float) -> intervals.Interval | None:
    return intervals.of_draws(p.drawn(1, n, share, DRAWS)[0])


def few_labels_per_class(p: Population, n: int, share: float) -> intervals.Interval | None:
    return intervals.of_draws(p.drawn(1, n, share, DRAWS)[0], p.labels(n))


def detection(p: Population, n: int, share: float) -> intervals.Interval | None:
    hits = p.rng.random(n) < share
    return intervals.of_resamples(float(hits.mean()), resampled(hits, p), n)


def average(p: Population, n: int, share: float) -> intervals.Interval | None:
    """The mean of twelve datasets: half-widths add in squares."""
    found = [(h.mean() * 100, intervals.of_hits(h)) for h in p.rng.random((12, n)) < share]
    value = float(np.mean([v for v, _ in found]))
    half = float(np.sqrt(sum(((b - a) / 2) ** 2 for _, (a, b) in found))) / 12
    return value - half, value + half


VALUES: dict[str, Callable[[Population, int, float], intervals.Interval | None]] = {
    "top-1": top1,
    "mean per class": per_class,
    "few labels, top-1": few_labels,
    "few labels, mean per class": few_labels_per_class,
    "AP (500 resamples)": detection,
    "average of twelve": average,
}


def coverage(repeats: int) -> None:
    print("95% intervals that cover the truth, in percent\n")
    print(f"{'':28}{'images':>8}" + "".join(f"{f'p = {s}':>10}" for s in SHARES) + f"{'mean':>8}")
    for name, interval in VALUES.items():
        for n in IMAGES:
            p, found = Population(n), []
            times = _times(repeats, name, n)
            for share in SHARES:
                ends = [interval(p, n, share) for _ in range(times)]
                found.append(
                    100 * np.mean([e is not None and e[0] <= 100 * share <= e[1] for e in ends])
                )
            print(
                f"{name:28}{n:8}" + "".join(f"{v:10.1f}" for v in found) + f"{np.mean(found):8.1f}",
                flush=True,
            )
    for seeds in (2, 3, 5, 10):
        values = Population(seeds).rng.normal(70, 0.5, size=(repeats, seeds))
        ends = [compare.seeds_interval(list(v)) for v in values]
        covered = 100 * np.mean([e is not None and e[0] <= 70 <= e[1] for e in ends])
        print(f"{f'mean of {seeds} seeds (new seeds)':36}{covered:10.1f}")
    print(
        "\np = 1, all images right: "
        + ", ".join(
            f"{n} images [{intervals.of_hits(np.ones(n, bool))[0]:.2f}, 100]" for n in IMAGES
        )
        + "\n"
    )


def _times(repeats: int, name: str, images: int) -> int:
    """Few-label columns of many images are 20 times the work."""
    return repeats // 2 if images > 5_000 and name.startswith("few") else repeats


# ---- differences

Pair = Callable[[Population, int, float, float], compare.Difference]


def pair_top1(p: Population, n: int, share: float, gap: float) -> compare.Difference:
    a, b = p.hits(2, n, share, gap)
    return compare.of_images(b.astype(float) - a)


def pair_per_class(p: Population, n: int, share: float, gap: float) -> compare.Difference:
    a, b = p.hits(2, n, share, gap)
    return compare.of_images(b.astype(float) - a, p.labels(n))


def pair_few_labels(p: Population, n: int, share: float, gap: float) -> compare.Difference:
    a, b = p.drawn(2, n, share, DRAWS, gap)
    return compare.of_draws_and_images(b.astype(float) - a)


def pair_few_labels_per_class(
    p: Population, n: int, share: float, gap: float
) -> compare.Difference:
    a, b = p.drawn(2, n, share, DRAWS, gap)
    return compare.of_draws_and_images(b.astype(float) - a, p.labels(n))


def pair_seeds(p: Population, n: int, share: float, gap: float) -> compare.Difference:
    a, b = p.drawn(2, n, share, 3, gap)
    return compare.of_draws_and_images(b.astype(float) - a)


def pair_detection(p: Population, n: int, share: float, gap: float) -> compare.Difference:
    a, b = p.hits(2, n, share, gap)
    return compare.of_resamples(100 * resampled(b.astype(float) - a, p), n)


PAIRS: dict[str, Pair] = {
    "top-1": pair_top1,
    "mean per class": pair_per_class,
    "few labels, top-1": pair_few_labels,
    "few labels, mean per class": pair_few_labels_per_class,
    "three seeds": pair_seeds,
    "AP (500 resamples)": pair_detection,
}


def false_calls(repeats: int) -> None:
    print(
        "Equal trunks called different, in percent; power: of trunks 2 and 5 points apart at p = 0.9\n"
    )
    head = "".join(f"{f'p = {s}':>10}" for s in SHARES)
    print(f"{'':28}{'images':>8}{head}{'2 points':>10}{'5 points':>10}")
    for name, pair in PAIRS.items():
        for n in TESTED:
            p, times = Population(n + 1), _times(repeats, name, n)
            rates = [100 * np.mean([pair(p, n, s, 0.0).real for _ in range(times)]) for s in SHARES]
            power = [
                100 * np.mean([pair(p, n, 0.9, g).real for _ in range(200)]) for g in (0.02, 0.05)
            ]
            shown = "".join(f"{v:10.1f}" for v in rates) + "".join(f"{v:10.0f}" for v in power)
            print(f"{name:28}{n:8}{shown}", flush=True)
    print()


def many_equals(repeats: int) -> None:
    print(
        "Of K equal trunks (1,000 images, p = 0.7), in percent of columns: one is called best; any is left out"
    )
    print(
        "of the tied; share of trunks left out. Power: the best of K by 5 points is called best.\n"
    )
    for trunks in (2, 5, 20):
        p = Population(trunks)
        best = left = share = power = 0.0
        for _ in range(repeats):
            out = _told_apart(p.hits(trunks, 1_000, 0.7))
            best, left, share = best + (out == trunks - 1), left + (out > 0), share + out / trunks
        for _ in range(200):
            power += _told_apart(p.hits(trunks, 1_000, 0.7, gap=0.05)) == trunks - 1
        shown = [100 * v / repeats for v in (best, left, share)]
        print(
            f"K = {trunks:2}: " + "".join(f"{v:8.1f}" for v in shown) + f"{power / 2:8.0f}",
            flush=True,
        )


def _told_apart(hits: np.ndarray) -> int:
    """How many trunks are told from the highest, as the leaderboard does it."""
    first, *others = sorted(hits, key=np.sum, reverse=True)
    found = [compare.of_images(first.astype(float) - other) for other in others]
    values = [d.p if d.real and d.value > 0 else 1.0 for d in found]
    return len(others) - compare.tied_with_first(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    start = time.process_time()
    coverage(repeats)
    false_calls(repeats)
    many_equals(repeats)
    print(f"\n{repeats} repeats, {time.process_time() - start:.0f} s of one core")


if __name__ == "__main__":
    main()
