"""Simulate how often the interval of "chosen reading minus usual reading" holds the true difference.

python benchmarks/best_layer.py [--repeats R]; `benchmarks/best_layer.txt` has its last figures.

A trunk has many readings, each right on images of its own and on images that all share. Val chooses
the best of them, and the first of equals, which is the usual one. Each repeat has other images. What is
simulated is the cost of choosing: the true difference is that of the reading that was chosen, whether or
not it is the best.
"""

import argparse
import itertools
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

from backbench.stats import paired_differences

IMAGES = ((50, 100), (100, 500), (1_000, 2_000), (5_000, 10_000))  # of val, and of test
READINGS = (8, 49)
USUAL = (0.3, 0.7, 0.95)  # accuracies of the usual reading
# How far the others lie from it, as standard deviations: all equal, and unlike
SPREADS = (0.0, 0.02, 0.1)
OWN = (0.3, 1.0)  # spread of a reading's own luck beside the images' difficulty of 1
SEED = 8_000_000
REPEATS_OF_MANY = 4  # fewer repeats by this for many images


def accuracies(
    rng: np.random.Generator, readings: int, usual: float, spread: float
) -> np.ndarray:
    """The usual reading's accuracy, then those of the others, which are mostly lower."""
    others = usual + spread * (rng.normal(size=readings - 1) - 0.5)
    return np.clip(np.append(usual, others), 0.02, 0.999)


def hits(
    rng: np.random.Generator, shares: np.ndarray, images: int, own: float
) -> np.ndarray:
    """The hits (readings, images)."""
    score = rng.standard_normal(images, dtype=np.float32)
    luck = rng.standard_normal((len(shares), images), dtype=np.float32)
    edge = -ndtri(shares)[:, None] * (1 + own**2) ** 0.5
    return score + np.float32(own) * luck > edge.astype(np.float32)


def simulate(
    shares: np.ndarray,
    images: tuple[int, int],
    own: float,
    *,
    repeats: int,
    rng: np.random.Generator,
) -> tuple[int, int, int]:
    """Count the repeats in which another reading was chosen, those whose interval held the true
    difference, and those in which equal readings were told apart."""
    chosen_other = held = wrong = 0
    for _ in range(repeats):
        on_val = hits(rng, shares, images[0], own).mean(1)
        best = int(on_val.argmax())
        if best == 0:
            continue
        test = hits(rng, shares[[0, best]], images[1], own)
        found = paired_differences.of_images(test[1].astype(float) - test[0])
        true = 100 * (shares[best] - shares[0])
        chosen_other += 1
        held += found.ci95[0] <= true <= found.ci95[1]
        wrong += true == 0 and not found.ci95[0] <= 0 <= found.ci95[1]
    return chosen_other, held, wrong


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args(arguments).repeats
    for images in IMAGES:
        of_images = repeats // (REPEATS_OF_MANY if images[1] > 500 else 1)
        of_images //= 5 if images[1] > 5_000 else 1
        lines = []
        for readings, usual, spread, own in itertools.product(
            READINGS, USUAL, SPREADS, OWN
        ):
            rng = np.random.default_rng(SEED + readings + images[0])
            shares = accuracies(rng, readings, usual, spread)
            other, held, _ = simulate(shares, images, own, repeats=of_images, rng=rng)
            if other < of_images / 10:
                continue
            about = f"{readings} readings around {usual}, spread {spread}, own {own}"
            lines.append((100 * held / other, about))
        covers = np.array([line[0] for line in lines])
        inside = 100 * np.mean((covers >= 93) & (covers <= 97))
        print(
            f"val {images[0]}, test {images[1]} images, {len(lines)} worlds,"
            f" {of_images} repeats: covers {covers.mean():.1f}% in the mean,"
            f" 93 to 97% in {inside:.0f}% of worlds"
        )
        print(f"  lowest  {min(lines)[0]:.1f}%: {min(lines)[1]}")
        print(f"  highest {max(lines)[0]:.1f}%: {max(lines)[1]}", flush=True)


if __name__ == "__main__":
    main()
