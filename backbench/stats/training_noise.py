"""How far the values of a column move when the same trunk's head or detector is trained again.

A difference of two rows that each trained once varies with the test images and with the trainings.
Images are many and say their variance V themselves; the trainings' is estimated here, from the
checkpoints that were trained with several seeds.

The variance s^2 of a checkpoint's values over seeds has two parts: the trainings differ on all
images of that kind (tau^2), and they differ on these images by chance (v). v is half the variance
over images of the difference of two seeds, and a test over images holds it already. So
    tau^2 = s^2 - v,  at least 0
is pooled over checkpoints with df = sum of (seeds - 1), and a difference of means over k_a and k_b
trainings has the variance V + tau^2 (1/k_a + 1/k_b) (Jordan, ICLR 2024, section 3; Bouthillier et
al., MLSys 2021). Its degrees of freedom are those of confidence.py's sums of draws and images, with
s^2 as the part that few seeds estimated. benchmarks/bold.py simulates what the rule errs.

Where few validation images choose a rate, trainings differ by much or by nothing as they choose the
same or not, and a few seeds may all have chosen the same. So tau^2 is at least c, how far the value
would move if other validation images chose (`of_choice`), in the mean over the column's rows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from backbench.stats import confidence
from backbench.stats.paired_differences import Difference

FEWEST = 4  # degrees of freedom: two checkpoints x three seeds. Two err on up to 7% of equals
RESAMPLES = 400  # of validation images


@dataclass(frozen=True)
class TrainingNoise:
    """The noise of a column's trainings, in points squared."""

    seeds: float  # s^2: the variance over seeds
    excess: float  # tau^2: its part that a test over images does not hold
    df: float
    source: str = "seeds measured here"

    @property
    def known(self) -> bool:
        """True if differences between trainings can be tested."""
        return self.df >= FEWEST

    def at_least(self, choice: float) -> "TrainingNoise":
        """This noise where choosing alone moves the values by `choice`, in points squared."""
        if choice <= self.excess:
            return self
        source = f"{self.source}, and the choice on few validation images"
        return TrainingNoise(max(self.seeds, choice), choice, self.df, source)


NOTHING_TRAINED = TrainingNoise(
    0.0, 0.0, math.inf, ""
)  # a second run gives the same number


class Seeds(NamedTuple):
    """The values of one checkpoint over its seeds, and v of them (0 if unknown: cautious)."""

    values: Sequence[float]
    by_images: float


def pooled(checkpoints: Iterable[Seeds]) -> TrainingNoise:
    """The noise of a column, pooled over its checkpoints; those with one seed say nothing of it."""
    df, squares, by_images = 0, 0.0, 0.0
    for values, v in checkpoints:
        mean = sum(values) / len(values)
        df += len(values) - 1
        squares += sum((value - mean) ** 2 for value in values)
        by_images += (len(values) - 1) * v
    if not df:
        return TrainingNoise(0.0, 0.0, 0)
    return TrainingNoise(squares / df, max(squares - by_images, 0.0) / df, df)


def by_images(hits: np.ndarray, classes: np.ndarray | None = None) -> float:
    """v of `hits` (K, N), K seeds on N images, in points^2; with `classes` (N,) of class means."""
    n = hits.shape[1]
    step = confidence.weights(n, classes) * hits
    # Half the squared difference of two seeds, in the mean over all pairs, is the variance over
    # seeds. The sum of N steps varies by their squares, less N times the squared mean step.
    squares = float(step.var(0, ddof=1).sum()) - float(step.sum(1).var(ddof=1)) / n
    return 1e4 * max(squares, 0.0)


def by_resamples(values: np.ndarray, images: int) -> float:
    """v of `values` (K, B) in percent, K seeds on B resamples of `images` images."""
    values = values[
        :, np.isfinite(values).all(0)
    ]  # a resample without a ground truth has no AP
    if values.shape[1] < 2:
        return 0.0
    centred = values - values.mean(1, keepdims=True)
    spread = float(centred.var(0, ddof=1).sum()) / (values.shape[1] - 1)
    return spread * images / max(images - 1, 1)


def of_choice(hits: np.ndarray, classes: np.ndarray | None = None) -> float:
    """The mean square, in points^2, by which a value would move if other validation images chose.

    `hits` (R, N) are those of R candidates on N validation images, `classes` (N,) the images' of
    class means. Some resamples choose, others say how far that candidate is from the best of all
    images: so a choice that the images cannot make counts, also where two candidates are level.
    """
    rng = np.random.default_rng(0)
    n = hits.shape[1]
    step = confidence.weights(n, classes) * hits
    best = int(step.sum(1).argmax())
    squares = 0.0
    for _ in range(RESAMPLES):
        choosing, judging = rng.multinomial(n, np.full(n, 1 / n), size=2) @ step.T
        chosen = int(choosing.argmax())  # of equals the first, as scoring.best_of
        squares += float(judging[chosen] - judging[best]) ** 2
    return 1e4 * squares / RESAMPLES


def over_trainings(d: Difference, noise: TrainingNoise, a: int, b: int) -> Difference:
    """The difference `d` of means over `a` and `b` trainings, for other images and trainings."""
    share = 1 / a + 1 / b
    variance = d.variance + noise.excess * share
    part = min(noise.seeds * share / variance, 1.0)
    spread = (
        confidence.poorly_known(part, noise.df) + (d.variance / variance) ** 2 / d.df
    )
    df = 1 / spread if spread else math.inf
    error = math.sqrt(variance)
    half = confidence.t_quantile(df) * error
    p = confidence.t_both_tails(d.value / error, df)
    interval = (d.value - half, d.value + half)
    paired = f"{d.paired} and trainings"
    return replace(d, ci95=interval, p=p, paired=paired, variance=variance, df=df)
