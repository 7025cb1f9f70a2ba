"""How far the values of a column move when the same trunk's head or detector is trained again.

A difference of two rows that each trained once varies with the test images and with the trainings.
The images' variance V is known from the images, which are many. The trainings' is estimated here,
from the checkpoints that were trained with several seeds.

The variance s^2 of a checkpoint's values over seeds has two parts: the trainings differ on all
images of that kind (tau^2), and they differ on these images by chance (v). v is half the variance
over images of the difference of two seeds, and a test over images holds it already. So
    tau^2 = s^2 - v,  at least 0
is pooled over checkpoints with df = sum of (seeds - 1), and a difference of means over k_a and k_b
trainings has the variance V + tau^2 (1/k_a + 1/k_b) (Jordan, ICLR 2024, section 3; Bouthillier et
al., MLSys 2021). Its degrees of freedom are those of confidence.py's sums of draws and images, with
s^2 as the part that few seeds estimated. benchmarks/bold.py simulates how often the rule errs.

Where few validation images choose a rate, two trainings differ by nothing if they choose the same
rate, and by much if not; and a few seeds may by chance all choose the same. So tau^2 is at least c:
how far the value would move if other validation images chose (`of_choice`), in the mean over the
column's rows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from backbench.stats import confidence
from backbench.stats.paired_differences import Difference

# Degrees of freedom, as of two checkpoints with three seeds each. With two degrees, up to 7% of
# equals would be told apart
FEWEST = 4
RESAMPLES = 400  # of validation images


@dataclass(frozen=True)
class TrainingNoise:
    """The noise of a column's trainings, in points squared."""

    seed_variance: float  # s^2: the variance over seeds
    excess: float  # tau^2: its part that a test over images does not hold
    df: float
    source: str = "seeds measured here"

    @property
    def known(self) -> bool:
        """True if differences between trainings can be tested."""
        return self.df >= FEWEST

    def at_least(self, choice: float) -> "TrainingNoise":
        """Return this noise, but no less than `choice` (c above), in points squared."""
        if choice <= self.excess:
            return self
        source = f"{self.source}, and the choice on few validation images"
        return TrainingNoise(max(self.seed_variance, choice), choice, self.df, source)


# A second run gives the same number
NOTHING_TRAINED = TrainingNoise(0.0, 0.0, math.inf, "")


class Seeds(NamedTuple):
    """The values of one checkpoint over its seeds, and their v; 0 if unknown, which is cautious."""

    values: Sequence[float]
    by_images: float


def pooled(checkpoints: Iterable[Seeds]) -> TrainingNoise:
    """Pool the noise of a column over its checkpoints; those with one seed add nothing."""
    df = 0
    squares = 0.0
    image_squares = 0.0
    for values, v in checkpoints:
        mean = sum(values) / len(values)
        df += len(values) - 1
        squares += sum((value - mean) ** 2 for value in values)
        image_squares += (len(values) - 1) * v
    if not df:
        return TrainingNoise(0.0, 0.0, 0)
    return TrainingNoise(squares / df, max(squares - image_squares, 0.0) / df, df)


def by_images(hits: np.ndarray, classes: np.ndarray | None = None) -> float:
    """Return v of `hits` (K, N), K seeds on N images, in points squared.

    With `classes` (N,) it is that of the mean of class means."""
    n = hits.shape[1]
    step = confidence.weights(n, classes) * hits
    # v is half the variance, over images, of the difference of two seeds, in the mean over pairs of
    # seeds. Half the squared difference of two numbers, in the mean over pairs, is their variance
    # over seeds. And a sum of N steps varies by the sum of their squares less N times the squared
    # mean step
    squares = float(step.var(0, ddof=1).sum()) - float(step.sum(1).var(ddof=1)) / n
    return 1e4 * max(squares, 0.0)


def by_resamples(values: np.ndarray, images: int) -> float:
    """Return v, the variance between seeds of how they react to a resample of the images.

    `values` (K, B), in percent, are those of K seeds on B resamples of `images` images.
    """
    # A resample without a ground truth has no AP
    defined = np.isfinite(values).all(0)
    values = values[:, defined]
    resamples = values.shape[1]
    if resamples < 2:
        return 0.0  # one resample tells no variance
    centred = values - values.mean(1, keepdims=True)
    between_seeds = centred.var(0, ddof=1)
    # The mean, but that centring each seed took one degree of freedom from the resamples
    spread = float(between_seeds.sum()) / (resamples - 1)
    # A bootstrap's variance is too small by (images - 1) / images
    return spread * images / max(images - 1, 1)


def of_choice(hits: np.ndarray, classes: np.ndarray | None = None) -> float:
    """Return c: the mean square by which a value would move if other validation images chose.

    It is in points squared. `hits` (R, N) are those of R candidates on N validation images; with
    `classes` (N,), a candidate's value is a mean of class means. One resample chooses a candidate,
    and another one says how far it is from the candidate that is best on all images. So a choice
    that the images cannot make counts, also where two candidates are equal on all images.
    """
    rng = np.random.default_rng(0)
    n = hits.shape[1]
    step = confidence.weights(n, classes) * hits
    best = int(step.sum(1).argmax())
    squares = 0.0
    for _ in range(RESAMPLES):
        # (2, R): the candidates' values on two resamples
        choosing, judging = rng.multinomial(n, np.full(n, 1 / n), size=2) @ step.T
        chosen = int(choosing.argmax())  # of equals the first, as in scoring.best_of
        squares += float(judging[chosen] - judging[best]) ** 2
    return 1e4 * squares / RESAMPLES


def over_trainings(d: Difference, noise: TrainingNoise, a: int, b: int) -> Difference:
    """Return the difference `d`, of means over `a` and `b` trainings, as one for new images and new
    trainings."""
    of_trainings = 1 / a + 1 / b
    variance = d.variance + noise.excess * of_trainings
    # Degrees of freedom as on top of confidence.py
    part = min(noise.seed_variance * of_trainings / variance, 1.0)
    spread = confidence.poorly_known(part, noise.df)
    spread += (d.variance / variance) ** 2 / d.df
    df = 1 / spread if spread else math.inf
    error = math.sqrt(variance)
    half = confidence.t_quantile(df) * error
    return replace(
        d,
        ci95=(d.value - half, d.value + half),
        p=confidence.t_both_tails(d.value / error, df),
        paired=f"{d.paired} and trainings",
        variance=variance,
        df=df,
    )
