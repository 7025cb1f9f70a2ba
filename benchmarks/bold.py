"""Simulate boards of trained numbers: how often anybody is bold among equals, and the power left.

python benchmarks/bold.py [--repeats R]; `benchmarks/bold.txt` has its last figures.

All rows share the images' difficulty; every training has errors of its own on the images, and moves
by tau on all of them. tau is given in standard errors of the difference of two rows over images.
"""

import argparse
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from backbench.stats import paired_differences, training_noise
from backbench.stats.training_noise import Seeds, TrainingNoise

IMAGES, SHARE = 1000, 0.8
# Spreads of a row's and of a training's own errors, beside the images' of 1
OWN, LEFT = (0.7, 0.5)
LEVELS = (0.0, 0.5, 1.0, 2.0)  # tau / standard error over images
GAPS = (2.0, 3.0, 4.0)  # of the best row, in standard errors
SEED = 7


class Kind(NamedTuple):
    """A kind of board: of its rows, `repeated` have several seeds, the others one."""

    rows: int
    seeds: int
    repeated: int

    @property
    def df(self) -> int:
        return self.repeated * (self.seeds - 1)

    @property
    def name(self) -> str:
        return f"{self.rows} rows, {self.repeated} of them x {self.seeds} seeds (df {self.df})"


KINDS = (
    Kind(2, 3, 2),
    Kind(3, 3, 2),
    Kind(5, 3, 2),
    Kind(20, 3, 2),
    Kind(2, 6, 2),
    Kind(5, 3, 5),
)
EDGE = float(ndtri(1 - SHARE)) * (1 + OWN**2 + LEFT**2) ** 0.5
IMAGES_ALONE = training_noise.NOTHING_TRAINED
Hits = list[np.ndarray]  # of each row (its trainings, images)


def standard_error(rng: np.random.Generator) -> float:
    """Estimate the standard error of a difference of two rows of one training each, in images."""
    score = rng.standard_normal(200_000) + np.zeros((2, 1))
    score += (OWN**2 + LEFT**2) ** 0.5 * rng.standard_normal((2, 200_000))
    hits = (score > EDGE).astype(float)
    return float((hits[0] - hits[1]).std() / IMAGES**0.5)


def board(
    rng: np.random.Generator, kind: Kind, tau: float, gap: float, error: float
) -> Hits:
    """Hits of every training; the first row is better by `gap` standard errors."""
    hard = rng.standard_normal(IMAGES)
    rows = []
    for r in range(kind.rows):
        count = kind.seeds if r < kind.repeated else 1
        score = hard + OWN * rng.standard_normal(IMAGES)
        score = score + LEFT * rng.standard_normal((count, IMAGES))
        moved = error * (
            tau / 2**0.5 * rng.standard_normal(count) + (gap if r == 0 else 0.0)
        )
        share = np.clip(SHARE + moved, 0.01, 0.99)
        edge = ndtri(1 - share) * (1 + OWN**2 + LEFT**2) ** 0.5
        rows.append((score > edge[:, None]).astype(float))
    return rows


def left_out(rows: Hits, noise: TrainingNoise) -> tuple[int, int]:
    """The highest row and how many are told apart from it, as board.standing does it."""
    order = sorted(range(len(rows)), key=lambda r: -float(rows[r].mean()))
    first, others = rows[order[0]], [rows[r] for r in order[1:]]
    p_values = []
    for other in others:
        d = paired_differences.of_images(first.mean(0) - other.mean(0))
        d = training_noise.over_trainings(d, noise, len(first), len(other))
        p_values.append(d.p if d.real and d.value > 0 else 1.0)
    return order[0], len(others) - paired_differences.tied_with_first(p_values)


def look(kind: Kind, tau: float, gap: float, repeats: int) -> np.ndarray:
    """Shares in percent of boards: the first row bold, anybody bold, anybody left out of the tied;
    (3, 3) by the rule, over images alone, and that of one training each."""
    rng = np.random.default_rng([SEED, *kind, int(100 * tau), int(100 * gap)])
    error = standard_error(rng)
    seen = np.zeros((3, 3))
    for _ in range(repeats):
        rows = board(rng, kind, tau, gap, error)
        several = [hits for hits in rows if len(hits) > 1]
        seeds = [Seeds(100 * h.mean(1), training_noise.by_images(h)) for h in several]
        once = [hits[:1] for hits in rows]
        tests = (
            (rows, training_noise.pooled(seeds)),
            (rows, IMAGES_ALONE),
            (once, IMAGES_ALONE),
        )
        for n, (tested, noise) in enumerate(tests):
            first, out = left_out(tested, noise)
            is_bold = out == kind.rows - 1
            seen[n] += (is_bold and first == 0, is_bold, out > 0)
    return 100 * seen / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=4000)
    repeats = parser.parse_args().repeats
    print(
        "percent of boards: bold / anybody left out of the tied; (bold over images alone, of one"
    )
    print("training each). Of equals anybody may be bold, of others the better row\n")
    for kind in KINDS:
        for tau in LEVELS:
            rule, _, once = look(kind, tau, 0.0, repeats)
            shown = f"{rule[1]:.1f} / {rule[2]:.1f} ({once[1]:.1f})"
            print(f"{kind.name}, equal, tau = {tau:g} SE: {shown}", flush=True)
        for gap in GAPS:
            rule, alone, _ = look(kind, 0.0, gap, repeats // 4)
            shown = (
                f"{rule[0]:.0f} (the same trainings over images alone: {alone[0]:.0f})"
            )
            print(f"{kind.name}, {gap:g} SE better, tau = 0: {shown}", flush=True)


if __name__ == "__main__":
    main()
