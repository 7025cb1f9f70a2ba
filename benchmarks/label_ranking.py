"""Simulate how often the intervals of mean average precision, and of differences, hold the truth.

python benchmarks/label_ranking.py [--repeats R]; `benchmarks/label_ranking.txt` has its last figures.

Two trunks score the same images, each with noise of its own beside noise that they share. Classes are
of unlike frequency. The truth is the mean over repeats: the number on so many other images.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from backbench.stats import confidence, label_ranking, paired_differences, resampling
from backbench.stats.label_ranking import METRICS

# (images, classes, how far the images of a class lie above the others, by either trunk)
WORLDS = (
    (72, 3, (1.5, 1.0)),
    (72, 3, (1.5, 1.5)),
    (300, 20, (1.5, 1.0)),
    (300, 20, (2.5, 2.5)),
    (1000, 20, (2.5, 2.0)),
)


def simulate(number: int, repeats: int) -> list[str]:
    """Say how often both intervals held the truth in one world."""
    images, classes, above = WORLDS[number]
    rng = np.random.default_rng(number)
    share = np.sort(rng.beta(2, 8, classes)).clip(0.05)
    values = np.empty((repeats, 2, len(METRICS)))
    ends = np.empty((repeats, len(METRICS), 2))
    gap_ends = np.empty((repeats, len(METRICS), 2))
    scored = np.ones((images, classes), bool)
    for repeat in range(repeats):
        present = rng.random((images, classes)) < share
        shared = rng.normal(size=present.shape)
        counts = resampling.image_counts(repeat, images)
        drawn = []
        for trunk in range(2):
            own = rng.normal(size=present.shape)
            score = above[trunk] * present + 0.8 * shared + 0.6 * own
            whole = label_ranking.mean_precisions(score, present, scored)
            values[repeat, trunk] = [100 * whole[name][0] for name in METRICS]
            drawn.append(label_ranking.mean_precisions(score, present, scored, counts))
        for place, name in enumerate(METRICS):
            alone = confidence.of_resamples(
                values[repeat, 0, place] / 100, drawn[0][name], images
            )
            gaps = 100 * (drawn[0][name] - drawn[1][name])
            found = paired_differences.of_resamples(gaps, images)
            assert alone is not None and found is not None
            ends[repeat, place] = alone
            gap_ends[repeat, place] = found.ci95
    true = values.mean(0)
    lines = [f"{images} images, {classes} classes:"]
    for place, name in enumerate(METRICS):
        value = true[0, place]
        gap = value - true[1, place]
        held = (ends[:, place, 0] <= value) & (value <= ends[:, place, 1])
        gap_held = (gap_ends[:, place, 0] <= gap) & (gap <= gap_ends[:, place, 1])
        lines.append(
            f"  {name:<6} {value:5.1f}: covers {100 * held.mean():.1f}%; difference"
            f" {gap:+5.1f}: covers {100 * gap_held.mean():.1f}%"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--worlds", type=int, nargs="*", default=range(len(WORLDS)))
    given = parser.parse_args(arguments)
    for number in given.worlds:
        print("\n".join(simulate(number, given.repeats)), flush=True)


if __name__ == "__main__":
    main()
