"""Computes the statistics of features behind the papers' figures, in float64.

Memory stays bounded: all images enter sums, cross-products and histograms of fixed size
(`ViewStatistics`, `Moments`, `Groups`), and only a bounded sample enters the pairs. Rows are unit
vectors, except for the spectra and LiDAR.
"""

import math
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

BINS = 2000  # of the accumulated histograms; pictures merge neighbouring ones
CHUNK = 512  # anchors whose distances to the sample are held at once
ZERO = 1e-12  # squared distances of unit vectors below this are rounding


def finite(value: float | None) -> float | None:
    """Return the value, or None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def unit(features: Tensor) -> Tensor:
    """Scale rows (..., d) to length 1, in float64; a row of zeros stays zero."""
    x = features.double()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(norm > 0, norm, 1.0)


# Statistics of the views of one image: unit rows v_1 .. v_A of each of B images, (B, A, d) -> (B,).
# Means over pairs of views follow from the rows and their mean m: no A x A matrix is ever made.


def nuclear_norm(views: Tensor) -> Tensor:
    """Sum the singular values of each image's A x d matrix (LORAC Fig. 3b, 3c, 4c): for unit rows
    sqrt(A) if all views are alike, sqrt(A r) if they spread evenly over r directions."""
    return torch.linalg.svdvals(views).sum(-1)


def view_cosine(views: Tensor) -> Tensor:
    """Return the mean cosine over all A x A pairs, a view with itself included (JCL Fig. 3a)."""
    # mean_ij <v_i, v_j> = <m, m>, the squared length of the mean.
    return views.mean(1).square().sum(-1)


def covariance_diagonal(views: Tensor) -> Tensor:
    """Return the mean of the diagonal of the biased covariance of an image's views (JCL Fig. 3b)."""
    # diag Cov = mean_i (v_i - m)^2, so this is one mean over views and coordinates.
    return (views - views.mean(1, keepdim=True)).square().mean((1, 2))


def alignment(views: Tensor) -> Tensor:
    """Return the mean squared distance of two different views (Wang and Isola 2020, alpha 2)."""
    # sum_ij ||v_i - v_j||^2 = 2 A sum_i ||v_i - m||^2, and there are A (A - 1) pairs of different
    # views.
    a = views.shape[1]
    mean = views.mean(1, keepdim=True)
    return 2 * (views - mean).square().sum((1, 2)) / (a - 1)


class HistogramSummary(TypedDict):
    """Counts of equal bins of `width` from `low` on."""

    low: float
    width: float
    counts: list[int]


class Histogram:
    """Counts of values in BINS equal bins over a known range. What lies beyond the range is counted
    in the first or the last bin."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.counts = torch.zeros(BINS, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        place = (values - self.low) / (self.high - self.low) * BINS
        index = place.long().clamp_(0, BINS - 1)
        self.counts += torch.bincount(index.flatten().cpu(), minlength=BINS)

    def overlap(self, other: "Histogram") -> float:
        """Return the shared area of two normalised histograms of one range, 0 to 1; nan where one
        is empty."""
        mine = int(self.counts.sum())
        others = int(other.counts.sum())
        if not mine or not others:
            return math.nan
        shared = torch.minimum(self.counts / mine, other.counts / others)
        return float(shared.sum())

    def to_json(self, bars: int = 200) -> HistogramSummary:
        """Return the occupied part of the range as at most about `bars` bars."""
        first, last = 0, BINS
        occupied = self.counts.nonzero().flatten().tolist()
        if occupied:
            first, last = occupied[0], occupied[-1] + 1
        # Bars are whole from the start of the range on, so that histograms of one range share edges.
        merged = max(1, (last - first) // bars)
        first = first // merged * merged
        step = (self.high - self.low) / BINS * merged
        counts = [int(part.sum()) for part in self.counts[first:last].split(merged)]
        return {
            "low": self.low + first * step / merged,
            "width": step,
            "counts": counts,
        }


PER_IMAGE = {
    "nuclear_norm": nuclear_norm,
    "view_cosine": view_cosine,
    "covariance_diagonal": covariance_diagonal,
    "alignment": alignment,
}


class ViewStatistics:
    """Sums and histograms of the statistics of A augmentations, over any number of images."""

    def __init__(self, augmentations: int, dim: int) -> None:
        rank = min(augmentations, dim)
        ranges = {
            # The largest one is that of views which spread evenly over `rank` directions.
            "nuclear_norm": (0.0, math.sqrt(augmentations * rank)),
            "view_cosine": (0.0, 1.0),
            "covariance_diagonal": (0.0, 1.0 / dim),  # the d entries sum to 1 - <m, m>
            "alignment": (0.0, 4.0),  # opposite unit vectors
        }
        self.histograms = {name: Histogram(*ranges[name]) for name in PER_IMAGE}
        # Of each statistic: the number of images, the sum, the sum of squares
        self.sums = torch.zeros(len(PER_IMAGE), 3, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """Add the features (B, A, d) of the A views of B images."""
        views = unit(features)
        for i, (name, statistic) in enumerate(PER_IMAGE.items()):
            values = statistic(views)
            self.histograms[name].add(values)
            powers = torch.stack((torch.ones_like(values), values, values.square()))
            self.sums[i] += powers.sum(1).cpu()

    def mean(self, name: str) -> tuple[float, tuple[float, float] | None]:
        """Return the mean over the images, and its 95% interval, by the normal distribution."""
        n, total, squares = self.sums[list(PER_IMAGE).index(name)].tolist()
        if n == 0:
            return math.nan, None
        value = total / n
        if n == 1:
            return value, None
        # Rounding may leave less than 0.
        variance = max(0.0, (squares - total * value) / (n - 1))
        half = 1.959964 * math.sqrt(variance / n)
        return value, (value - half, value + half)

    def tensors(self) -> list[Tensor]:
        """Return all that is accumulated; filling these in place continues a stopped pass."""
        return [self.sums, *(h.counts for h in self.histograms.values())]


class Moments:
    """Count, sum and cross-products of feature rows. They are d x d numbers, and all that the
    spectra need."""

    def __init__(self, dim: int) -> None:
        self.rows = torch.zeros((), dtype=torch.int64)
        self.sum = torch.zeros(dim, dtype=torch.float64)
        # X^T X of all rows so far
        self.products = torch.zeros(dim, dim, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """Add rows (B, d)."""
        x = features.double().cpu()
        self.rows += len(x)
        self.sum += x.sum(0)
        self.products.addmm_(x.T, x)

    def tensors(self) -> list[Tensor]:
        """Return all that is accumulated; filling these in place continues a stopped pass."""
        return [self.rows, self.sum, self.products]

    @property
    def count(self) -> int:
        return int(self.rows)

    def spectrum(self) -> Tensor:
        """Return the eigenvalues (d,) of the features' biased covariance, the largest first."""
        # 1. Cov = X^T X / n - m m^T.
        mean = self.sum / self.count
        covariance = self.products / self.count - torch.outer(mean, mean)
        # 2. What is below d times eps times the second moment is rounding of that difference.
        second = float(self.products.trace())
        rounding = torch.finfo(torch.float64).eps * len(mean) * second / self.count
        # 3. eigvalsh gives the smallest first.
        values = torch.linalg.eigvalsh(covariance).flip(0)
        return torch.where(values > rounding, values, 0.0)

    def singular_values(self) -> Tensor:
        """Return the singular values (d,) of the raw rows, the largest first; what rounding hides
        is 0."""
        # They are the roots of the eigenvalues of X^T X. Squaring costs half of the digits: a value
        # below sqrt(eps) of the largest cannot be told from 0.
        values = torch.linalg.eigvalsh(self.products).flip(0).clamp_min(0)
        rounding = torch.finfo(torch.float64).eps * len(values) * values[0]
        return torch.where(values > rounding, values, 0.0).sqrt()


def entropy_rank(values: Tensor) -> float:
    """Return exp of the entropy of `values` >= 0 scaled to sum 1; nan where all are 0. Of singular
    values it is the effective rank (Roy and Vetterli 2007); of those of raw features it is RankMe
    (Garrido et al. 2023)."""
    total = float(values.sum())
    if not total > 0:
        return math.nan
    # r equal values: p = 1 / r, entropy log r, rank r. Zeros are left out, since 0 log 0 is 0.
    p = values[values > 0] / total
    return math.exp(float(-(p * p.log()).sum()))


WITHIN_RIDGE = 1e-4  # on the covariance within images
ALPHA_RANKS = (11, 50)  # of the eigenvalues that the power law is fitted to


class Groups:
    """Collects what LiDAR needs: cross-products of the means of each image's A views, and of the
    views around them. The views of an image come together, so no order of loading mixes two."""

    def __init__(self, dim: int) -> None:
        self.means = Moments(dim)
        self.around = Moments(dim)

    def add(self, features: Tensor) -> None:
        """Add the features (B, A, d) of the A views of B images."""
        views = features.double()
        means = views.mean(1)
        self.means.add(means)
        self.around.add((views - means[:, None]).flatten(0, 1))

    def tensors(self) -> list[Tensor]:
        """Return all that is accumulated; filling these in place continues a stopped pass."""
        return [*self.means.tensors(), *self.around.tensors()]

    def lidar(self) -> float:
        """Return LiDAR (Thilak et al., arXiv:2312.04000; galilai-group/stable-pretraining at
        d15ec96, callbacks/lidar.py): exp of the entropy of eig(Sw^-1/2 Sb Sw^-1/2). It is nan of
        fewer than two images."""
        n = self.means.count
        if n < 2:
            return math.nan
        # 1. Sb = sum_i (m_i - m)(m_i - m)^T / (n - 1), and Sw = sum_ij (x_ij - m_i)(x_ij - m_i)^T
        #    / (n (q - 1)) with a ridge.
        mean = self.means.sum / n
        between = (self.means.products - n * torch.outer(mean, mean)) / (n - 1)
        within = self.around.products / (self.around.count - n)
        within.diagonal().add_(WITHIN_RIDGE)
        # 2. With Sw = L L^T, L^-1 Sb L^-T has the same eigenvalues. There are at most n - 1.
        factor = torch.linalg.cholesky(within)
        half = torch.linalg.solve_triangular(factor, between, upper=False)
        whitened = torch.linalg.solve_triangular(factor, half.T, upper=False)
        values = torch.linalg.eigvalsh(whitened).flip(0)[: n - 1]
        return entropy_rank(values.clamp_min(0))


def alpha_req(spectrum: Tensor) -> float:
    """Return alpha-ReQ (Agrawal et al. 2022): minus the slope of the least-squares line through the
    log eigenvalues of ALPHA_RANKS against their log ranks. It is nan where one of these eigenvalues
    is 0 or missing."""
    first, last = ALPHA_RANKS
    values = spectrum[first - 1 : last]
    if len(values) < last - first + 1 or not bool((values > 0).all()):
        return math.nan
    x = torch.arange(first, last + 1, dtype=torch.float64).log()
    y = values.cpu().log()
    x = x - x.mean()
    return -float((x * (y - y.mean())).sum() / x.square().sum())


LIVE = 1e-5  # share of the largest variance below which a direction carries nothing
FULL, DIMENSIONAL, COMPLETE = 0, 1, 2  # kinds of collapse


@dataclass(frozen=True)
class Collapse:
    """In how many directions features vary (ARB Table 3; Jing et al. 2022)."""

    live: int  # directions whose variance exceeds LIVE times the largest
    possible: int  # min(d, n - 1)
    # COMPLETE: features hardly differ between images (relative variance below 1e-6). DIMENSIONAL:
    # less than half of the possible directions are live. FULL: neither.
    kind: int


def collapse(moments: Moments) -> Collapse:
    """Tell in how many directions features vary, and whether they have collapsed."""
    spectrum = moments.spectrum()
    possible = max(1, min(len(spectrum), moments.count - 1))
    second = float(moments.products.trace()) / max(1, moments.count)
    if second == 0 or float(spectrum.sum()) <= 1e-6 * second:
        return Collapse(0, possible, COMPLETE)
    live = int((spectrum > LIVE * spectrum[0]).sum())
    return Collapse(live, possible, DIMENSIONAL if live < possible / 2 else FULL)


# Pairs of images: a sample (n, d) of one row per image


@dataclass(frozen=True)
class Pairs:
    """Distances of unit features between images, nan where there is no such pair."""

    within: Histogram  # of one class (CLLR Fig. 2, 3)
    between: Histogram  # of two classes
    within_mean: float
    between_mean: float
    uniformity: float  # log of the mean over all pairs of exp(-2 distance^2), Wang and Isola 2020

    @property
    def overlap(self) -> float:
        """The shared area of the two histograms: 1 where distances say nothing about classes."""
        return self.within.overlap(self.between)


def _squared_distances(anchors: Tensor, sample: Tensor) -> Tensor:
    """Anchors (a, d), sample (n, d) -> (a, n). The caller cuts off rounding around 0."""
    # ||a - b||^2 = ||a||^2 + ||b||^2 - 2 <a, b> is one matrix product instead of a n d differences.
    of_anchors = anchors.square().sum(1)[:, None]
    of_sample = sample.square().sum(1)[None]
    return of_anchors + of_sample - 2 * anchors @ sample.T


def pairs(features: Tensor, labels: Tensor, *, chunk: int = CHUNK) -> Pairs:
    """Measure all pairs i < j of the sample (n, d); label -1 (unlabelled) is in no histogram."""
    x = unit(features)
    n = len(x)
    # Within a class, and between classes. Unit vectors are at most 2 apart.
    histograms = (Histogram(0.0, 2.0), Histogram(0.0, 2.0))
    totals = [0.0, 0.0]
    potential = 0.0
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        # 1. Row i of this block is image start + i, column j image start + j, so pairs i < j are
        #    above its diagonal.
        squared = _squared_distances(x[start:stop], x[start:])
        squared = torch.where(squared > ZERO, squared, 0.0)
        block = (stop - start, n - start)
        upper = torch.ones(block, dtype=torch.bool, device=x.device).triu(1)
        # 2. The Gaussian potential of uniformity, over all pairs.
        potential += float(torch.exp(-2 * squared[upper]).sum())
        # 3. The distances of labelled pairs, by whether their classes are equal.
        distance = squared.sqrt()
        mine = labels[start:stop, None]
        other = labels[None, start:]
        known = (mine >= 0) & (other >= 0) & upper
        for kind, chosen in enumerate((mine == other, mine != other)):
            values = distance[known & chosen]
            histograms[kind].add(values)
            totals[kind] += float(values.sum())
    means = []
    for histogram, total in zip(histograms, totals):
        of_kind = int(histogram.counts.sum())
        means.append(total / of_kind if of_kind else math.nan)
    count = n * (n - 1) // 2
    return Pairs(
        within=histograms[0],
        between=histograms[1],
        within_mean=means[0],
        between_mean=means[1],
        uniformity=math.log(potential / count) if count else math.nan,
    )


class MinMaxSummary(TypedDict):
    """The mean over anchors of (D_max - D_min) / D_min, where D are the distances to all others
    (CLLR, Eq. 5), for each number H of dimensions. It is None where no anchor has a positive least
    distance."""

    dims: list[int]
    contrast: list[float | None]


def min_max(features: Tensor, order: Tensor, *, chunk: int = CHUNK) -> MinMaxSummary:
    """Measure CLLR's Theorem 1 on a sample (n, d), by distances in the first H coordinates of the
    permutation `order`. The paper divides them by H, which cancels in the ratio."""
    x = unit(features)[:, order]
    n, dim = x.shape
    dims = [2**i for i in range(1, dim.bit_length()) if 2**i < dim]
    dims.append(dim)  # 2, 4, 8, ..., d
    # Of each number of dimensions: the sum of ratios, and the number of anchors that have one
    contrasts = torch.zeros(len(dims), 2, dtype=torch.float64)
    for start in range(0, n, chunk):
        anchors = x[start : start + chunk]
        # Where the anchors themselves are among the distances
        own = (torch.arange(len(anchors)), torch.arange(start, start + len(anchors)))
        squared = torch.zeros(len(anchors), n, dtype=torch.float64, device=x.device)
        done = 0
        for i, h in enumerate(dims):
            # 1. A squared distance is a sum over coordinates: only those since the last H are new.
            squared += _squared_distances(anchors[:, done:h], x[:, done:h])
            done = h
            distance = torch.where(squared > ZERO, squared, 0.0).sqrt()
            # 2. The largest and the least distance to the n - 1 others. For the largest the anchor
            #    itself is put at 0, for the least infinitely far.
            distance[own] = 0.0
            high = distance.amax(1)
            distance[own] = torch.inf
            low = distance.amin(1)
            # 3. The ratio. An anchor has none if its least distance is 0, that of a copy.
            apart = low > 0
            contrasts[i, 0] += (high[apart] / low[apart] - 1).sum().cpu()
            contrasts[i, 1] += int(apart.sum())
    means = (contrasts[:, 0] / contrasts[:, 1]).tolist()
    return {"dims": dims, "contrast": [finite(mean) for mean in means]}
