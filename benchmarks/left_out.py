"""Simulate how often the interval of a change holds the true one, when flawed test images are left out.

python benchmarks/left_out.py [--repeats R]; `benchmarks/left_out.txt` has its last figures. Those of
several draws take a thousand repeats, too: of 200 repeats with an exact interval, a seventh of the worlds
would lie outside of 93 to 97% by chance.

Each repeat has other test images, of which others are flawed. The trunk is right more often on copies
of training images, and less often where a label is wrong. A world is counted where at least a tenth of
its repeats have an interval.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from backbench.stats import left_out

IMAGES = (200, 1_000, 10_000)
FLAWED = (0.01, 0.05, 0.2)
ACCURACIES = (0.3, 0.5, 0.8, 0.95, 0.99)  # on the images that are left
SEED = 7_000_000


class FlawedNumber(NamedTuple):
    """A kind of number."""

    name: str
    draws: int = 1
    classes: int = 0  # 0: of a plain share
    relabelled: bool = False  # half of the flawed images have another right label
    # Spreads of few-label hits beside the images' own of 1: of a draw, and of a draw on an image
    of_draw: float = 0.2
    left: float = 0.6


KINDS = (
    FlawedNumber("top-1"),
    FlawedNumber("top-1, half of the flaws are mended", relabelled=True),
    FlawedNumber("means of 10 classes", classes=10),
    FlawedNumber("means of 50 classes", classes=50),
    FlawedNumber("top-1 of 3 draws", draws=3),
    FlawedNumber("top-1 of 5 draws", draws=5),
    FlawedNumber("top-1 of 5 unlike draws", draws=5, of_draw=0.6, left=1.0),
    FlawedNumber("top-1 of 20 draws", draws=20),
)


class FlawedImages(NamedTuple):
    """A kind of test images, and the accuracies of a trunk on those that are flawed and on others."""

    images: int
    share: float  # of the flawed ones
    on_kept: float
    on_flawed: float

    def __str__(self) -> str:
        return (
            f"{self.images} images, {100 * self.share:g}% flawed,"
            f" {self.on_kept} and {self.on_flawed} right"
        )


class Covered(NamedTuple):
    """How often a world had an interval, and how often that held the truth, as shares."""

    stated: float
    held: float
    world: FlawedImages


def hits(
    rng: np.random.Generator, chance: np.ndarray, kind: FlawedNumber
) -> np.ndarray:
    """The hits (D, N) of images that are right with these chances (N,), in the mean over draws."""
    draws = kind.draws
    if draws == 1:
        return rng.random((1, len(chance))) < chance
    spread = (1 + kind.of_draw**2 + kind.left**2) ** 0.5
    edge = -spread * ndtri(np.clip(chance, 1e-6, 1 - 1e-6))
    score = rng.normal(size=len(chance)) + kind.of_draw * rng.normal(size=(draws, 1))
    return score + kind.left * rng.normal(size=(draws, len(chance))) > edge


def simulate(kind: FlawedNumber, world: FlawedImages, repeats: int) -> Covered:
    """Say how often the interval of a world held its true change."""
    images, share, on_kept, on_flawed = world
    rng = np.random.default_rng(SEED + images + round(1000 * (share + on_kept)))
    by_right_label = 0.5  # of the images whose label is mended
    full = share * on_flawed + (1 - share) * on_kept
    clean = on_kept
    if kind.relabelled:
        mended = share / 2
        clean = ((1 - share) * on_kept + mended * by_right_label) / (1 - mended)
    true = 100 * (clean - full)
    stated = held = 0
    for _ in range(repeats):
        flawed = rng.random(images) < share
        right = hits(rng, np.where(flawed, on_flawed, on_kept), kind)
        kept = ~flawed
        by_label = right
        if kind.relabelled:
            mend = flawed & (rng.random(images) < 0.5)
            kept |= mend
            # A mended image is right by one of its labels at most
            other = ~right & (
                rng.random(images) < by_right_label / (1 - min(on_flawed, 0.5))
            )
            by_label = np.where(mend, other, right)
        label = rng.integers(0, kind.classes, images) if kind.classes else None
        found = left_out.change(
            right, by_label, kept, flawed, classes=label, clean_classes=label
        )
        if found.ci95 is not None:
            stated += 1
            held += found.ci95[0] <= true <= found.ci95[1]
    return Covered(stated / repeats, held / max(stated, 1), world)


def on_flawed(kind: FlawedNumber, on_kept: float) -> list[float]:
    """The accuracies on flawed images that are simulated beside one on the others."""
    # A mended image must be wrong by its old label to be right by the new one
    chances = {0.02, 0.3, on_kept, (1 + on_kept) / 2, 1.0}
    return sorted(c for c in chances if not kind.relabelled or c <= 0.5)


def lines(kind: FlawedNumber, found: Sequence[Covered]) -> list[str]:
    """Sum up the worlds of a kind."""
    of_group: dict[str, list[Covered]] = defaultdict(list)
    for one in found:
        if one.stated >= 0.1:
            often = one.stated >= 0.9
            group = "always or nearly" if often else "in 10 to 90% of repeats"
            of_group[group].append(one)
    none = sum(one.stated < 0.1 for one in found)
    text = [f"{kind.name}: {len(found)} worlds, {none} without an interval"]
    for group, worlds in sorted(of_group.items()):
        held = np.array([one.held for one in worlds])
        inside = 100 * np.mean((held >= 0.93) & (held <= 0.97))
        low = min(worlds, key=lambda one: one.held)
        high = max(worlds, key=lambda one: one.held)
        text += [
            f"  with one {group} ({len(worlds)}): {inside:.0f}% of them cover 93 to 97%;"
            f" mean {100 * held.mean():.1f}%",
            f"    lowest  {100 * low.held:.1f}%: {low.world}",
            f"    highest {100 * high.held:.1f}%: {high.world}",
        ]
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--images", type=int, nargs="*", default=IMAGES)
    parser.add_argument("--kinds", type=int, nargs="*", default=range(len(KINDS)))
    given = parser.parse_args(arguments)
    for kind in (KINDS[number] for number in given.kinds):
        found = []
        for images, share, on_kept in itertools.product(
            given.images, FLAWED, ACCURACIES
        ):
            for flawed in on_flawed(kind, on_kept):
                world = FlawedImages(images, share, on_kept, flawed)
                found.append(simulate(kind, world, given.repeats))
        print("\n".join(lines(kind, found)), flush=True)


if __name__ == "__main__":
    main()
