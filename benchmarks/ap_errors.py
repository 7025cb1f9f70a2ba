"""Simulate how often intervals of what errors cost in AP50, and of differences, hold the truth.

python benchmarks/ap_errors.py [--repeats R]; `benchmarks/ap_errors.txt` has its last figures.

Two detectors see the same images, some harder than others for both. An object is found, found
beside its place, found as another class, or missed; there are duplicates and detections on
background. Each repeat draws images from a pool.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbench.stats import ap_errors, confidence, paired_differences, resampling
from backbench.stats.ap_errors import (
    BACKGROUND,
    BOTH,
    CLASS,
    DUPLICATE,
    ERRORS,
    HIT,
    IMAGINED,
    LOCATION,
    MISSED,
    NO_CLASS,
    Outcomes,
)

POOL = 20_000
RESAMPLES = 200
# Logits of an object's fate (hit, location, class, missed) with a weak and with a good detector
WEAK = (0.3, 0.6, -1.5, -0.3)
GOOD = (2.0, 0.2, -1.5, -1.0)
# (classes, objects of an image, both detectors, images)
WORLDS = (
    (3, 6.0, GOOD, WEAK, 72),
    (3, 6.0, GOOD, GOOD, 72),
    (3, 6.0, GOOD, WEAK, 300),
    (3, 6.0, GOOD, GOOD, 300),
)


@dataclass(frozen=True)
class Pool:
    """The detections and objects of one detector in all images, in the order of images."""

    score: np.ndarray
    outcomes: Outcomes

    def drawn(self, chosen: np.ndarray) -> Outcomes:
        """Return the outcomes of the chosen images (N,), as images of their own."""
        o = self.outcomes
        copies, picked = _of_images(o.image, chosen, o.images)
        surest = np.argsort(-self.score[picked], kind="stable")
        object_copies, objects = _of_images(o.object_image, chosen, o.images)
        picked = picked[surest]
        return Outcomes(
            images=len(chosen),
            image=copies[surest],
            category=o.category[picked],
            fault=o.fault[picked],
            mended=o.mended[picked],
            object_image=object_copies,
            object_category=o.object_category[objects],
            object_missed=o.object_missed[objects],
        )


def _of_images(
    image: np.ndarray, chosen: np.ndarray, images: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each entry of a chosen image its new image and its index; `image` rises."""
    begin = np.searchsorted(image, np.arange(images + 1))
    length = np.diff(begin)[chosen]
    new = np.repeat(np.arange(len(chosen)), length)
    within = np.arange(length.sum()) - np.repeat(length.cumsum() - length, length)
    return new, np.repeat(begin[chosen], length) + within


def pools(
    seed: int, classes: int, objects: float, fates: Sequence[Sequence[float]]
) -> list[Pool]:
    """Draw a pool of images as each detector sees it."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(size=POOL)
    count = rng.poisson(objects * np.exp(0.5 * rng.normal(size=POOL) - 0.125))
    image = np.repeat(np.arange(POOL), count)
    share = rng.dirichlet(np.full(classes, 3.0))
    category = rng.choice(classes, len(image), p=share)
    shared = rng.gumbel(size=(len(image), 4))
    found = []
    for fate in fates:
        # 1. What becomes of each object
        logits = np.array(fate) + 0.5 * shared
        logits = logits + 0.5 * rng.gumbel(size=logits.shape)
        own = hard + 0.5 * rng.normal(size=POOL)
        logits[:, 0] -= 0.7 * own[image]
        ending = np.array([HIT, LOCATION, CLASS, MISSED])[logits.argmax(1)]
        # 2. Its detection, and a second one of it
        wrong = (category + rng.integers(1, classes, len(image))) % classes
        seen = ending != MISSED
        said = np.where(ending == CLASS, wrong, category)
        mended = np.where(ending == HIT, NO_CLASS, category)
        tables = [np.stack([image, said, ending, mended])[:, seen]]
        means = [np.where(ending == HIT, 1.5, 0.0)[seen]]
        again = seen & (rng.random(len(image)) < 0.25)
        second = np.where(rng.random(len(image)) < 0.4, DUPLICATE, LOCATION)
        nothing = np.full(len(image), NO_CLASS)
        tables.append(np.stack([image, category, second, nothing])[:, again])
        means.append(np.full(int(again.sum()), -0.5))
        # 3. Detections on nothing
        for kind, rate in ((BACKGROUND, 3.0), (BOTH, 1.0)):
            where = np.repeat(np.arange(POOL), rng.poisson(rate * np.exp(0.3 * own)))
            guessed = rng.choice(classes, len(where), p=share)
            same = np.full(len(where), kind)
            tables.append(
                np.stack([where, guessed, same, np.full(len(where), NO_CLASS)])
            )
            means.append(np.full(len(where), -0.5))
        table = np.concatenate(tables, 1)
        mean = np.concatenate(means)
        score = mean - 0.4 * own[table[0]] + rng.normal(size=len(mean))
        order = np.argsort(table[0], kind="stable")
        table = table[:, order]
        missed = (ending == MISSED).astype(np.uint8)
        whole = Outcomes(POOL, *table, image, category, missed)
        found.append(Pool(score[order], whole))
    return found


def simulate(number: int, repeats: int) -> list[str]:
    """Say how often the interval of each difference of costs holds the mean one of so many images.

    That of many images may be another: AP reads precision at 101 recalls, so costs move in steps."""
    classes, objects, first, second, images = WORLDS[number]
    both = pools(number, classes, objects, (first, second))
    ap50 = [ap_errors.ap50(pool.drawn(np.arange(POOL))) for pool in both]
    rng = np.random.default_rng(1000 + number)
    values = np.empty((repeats, 2, len(ERRORS)))
    spreads = np.empty((repeats, len(ERRORS)))
    ends = np.empty((repeats, len(ERRORS), 2))
    for repeat in range(repeats):
        chosen = rng.integers(0, POOL, images)
        counts = resampling.image_counts(repeat, images)[:RESAMPLES]
        drawn = []
        for detector, pool in enumerate(both):
            outcomes = pool.drawn(chosen)
            whole = ap_errors.costs(outcomes, np.ones((1, images)))
            values[repeat, detector] = [cost[0] for cost in whole.values()]
            drawn.append(ap_errors.costs(outcomes, counts))
        for place, error in enumerate(ERRORS):
            spreads[repeat, place] = drawn[0][error].std(ddof=1)
            found = paired_differences.of_resamples(
                drawn[0][error] - drawn[1][error],
                images,
                value=values[repeat, 0, place] - values[repeat, 1, place],
                imagined=IMAGINED,
            )
            assert found is not None
            ends[repeat, place] = found.ci95
    true = values.mean(0)
    gap = true[0] - true[1]
    held = (ends[..., 0] <= gap) & (gap <= ends[..., 1])
    half = confidence.t_quantile(images - 1) * resampling.widening(images) * spreads
    held_alone = np.abs(values[:, 0] - true[0]) <= half
    lines = [
        f"{classes} classes, {images} images, AP50 {ap50[0]:.0f} and {ap50[1]:.0f}:"
    ]
    for place, error in enumerate(ERRORS):
        lines.append(
            f"  {error:<11} difference {gap[place]:+6.2f}: covers"
            f" {100 * held[:, place].mean():.1f}%; {true[0, place]:5.2f} alone:"
            f" {100 * held_alone[:, place].mean():.1f}%"
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
