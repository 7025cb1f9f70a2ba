"""From the sums of one space to its numbers, and to the curves that its pictures are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backbench.images.image_list import ImageList
from backbench.knn import knn_scores
from backbench.runs import seeding
from backbench.stats import confidence
from transfer import feature_statistics as stats
from transfer import fewshot
from transfer.analyze_pass import Space
from transfer.analyze_recipe import AnalyzeConfig
from transfer.analyze_summary import MinMaxSummary, SpaceCurves, all_finite
from transfer.feature_rows import FeatureRows


@dataclass(frozen=True)
class Number:
    """One metric of one space; `about` goes to the provenance."""

    metric: str
    value: float
    ci95: tuple[float, float] | None = None
    about: str = ""


def summarise(
    space: Space, images: ImageList, recipe: AnalyzeConfig, seed: int
) -> tuple[list[Number], SpaceCurves]:
    """The numbers of one space, and what its pictures are drawn from. `images` is the sample."""
    sample, labels = space.sample, torch.tensor(images.labels)
    # 1. Over pairs of images of the sample; beside their contrast that of Gaussian noise, which is
    #    what no structure at all gives in as many dimensions.
    found = stats.pairs(sample, labels)
    order = torch.randperm(space.dim, generator=seeding.generator(seed, "coordinates", space.dim))
    contrast = stats.min_max(sample, order)
    noise = torch.randn(sample.shape, generator=seeding.generator(seed, "gaussian", *sample.shape))
    gaussian = stats.min_max(noise, order)
    # 2. Over all images.
    spectrum = space.moments.spectrum()

    numbers = [
        *_view_numbers(space.views),
        *_pair_numbers(found, contrast),
        *_rank_numbers(space.moments, spectrum),
    ]
    # 3. Over the labels of the sample, where there are enough.
    for probe in (neighbours(sample, images, recipe), few_labels(sample, images, recipe, seed)):
        if probe is not None:
            numbers.append(probe)
    curves: SpaceCurves = {
        "histograms": {name: h.to_json() for name, h in space.views.histograms.items()},
        "within": found.within.to_json(),
        "between": found.between.to_json(),
        "spectrum": all_finite((spectrum / spectrum.sum()).tolist()),
        "min_max": _min_max_summary(contrast),
        "min_max_gaussian": _min_max_summary(gaussian),
    }
    return numbers, curves


def _view_numbers(views: stats.ViewStatistics) -> list[Number]:
    nuclear, cosine = views.mean("nuclear_norm"), views.mean("view_cosine")
    diagonal, alignment = views.mean("covariance_diagonal"), views.mean("alignment")
    scaled = None
    if diagonal.ci95 is not None:
        scaled = (1e4 * diagonal.ci95[0], 1e4 * diagonal.ci95[1])
    return [
        Number("nuclear_norm", nuclear.value, nuclear.ci95),
        Number("view_cosine", cosine.value, cosine.ci95),
        Number("covariance_diagonal_e4", 1e4 * diagonal.value, scaled, "in units of 1e-4"),
        Number("alignment", alignment.value, alignment.ci95),
    ]


def _pair_numbers(found: stats.Pairs, contrast: stats.MinMax) -> list[Number]:
    shared = "shared area of the two histograms, percent"
    ratio = "(D_max - D_min) / D_min, mean over anchors"
    return [
        Number("uniformity", found.uniformity),
        Number("within_class_distance", found.within_mean),
        Number("between_class_distance", found.between_mean),
        Number("class_overlap", 100 * found.overlap, about=shared),
        Number("min_max_contrast", contrast.contrast[-1], about=ratio),  # in all dimensions
    ]


def _rank_numbers(moments: stats.Moments, spectrum: Tensor) -> list[Number]:
    collapse = stats.collapse(moments)
    live = 100 * collapse.live / collapse.possible
    return [
        Number("rankme", stats.entropy_rank(moments.singular_values())),
        # Roots of the covariance's eigenvalues: the singular values of the centred features, up to
        # a factor that no rank notices.
        Number("effective_rank", stats.entropy_rank(spectrum.sqrt())),
        Number("live_directions", live, about=f"percent of {collapse.possible}"),
        Number("collapse", float(collapse.kind), about="0 none, 1 dimensional, 2 complete"),
    ]


def _min_max_summary(curve: stats.MinMax) -> MinMaxSummary:
    return {
        "dims": curve.dims,
        "contrast": all_finite(curve.contrast),
        "variance": all_finite(curve.variance),
    }


# Probes on the sample: one half says what the other is


def halves(labels: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sample's labelled images in two halves, every other image of each class."""
    seen: dict[int, int] = {}
    parts: tuple[list[int], list[int]] = ([], [])
    for i, label in enumerate(labels):
        if label >= 0:
            parts[seen.get(label, 0) % 2].append(i)
            seen[label] = seen.get(label, 0) + 1
    return parts


def neighbours(sample: Tensor, images: ImageList, recipe: AnalyzeConfig) -> Number | None:
    """Weighted kNN accuracy of each half of the sample by the other, in percent."""
    a, b = halves(images.labels)
    if not a or not b:
        return None
    k = min(recipe.neighbours, len(a), len(b))
    classes = len(images.classes)
    labels = torch.tensor(images.labels)
    right, truth = [], []
    for bank, queries in ((a, b), (b, a)):
        scores = knn_scores(
            sample[queries],
            sample[bank],
            labels[bank],
            classes=classes,
            k=(k,),
            temperature=recipe.temperature,
        )
        right.append(scores[k].argmax(1) == labels[queries])
        truth.append(labels[queries])
    hits, known = torch.cat(right).numpy(), torch.cat(truth).numpy()
    interval = confidence.of_hits(hits)
    about = f"k {k}, each half of {len(known)} images by the other"
    return Number("knn", 100 * float(hits.mean()), interval, about)


def few_labels(
    sample: Tensor, images: ImageList, recipe: AnalyzeConfig, seed: int
) -> Number | None:
    """Accuracy on one half of the sample of logistic regression on
    `shots` labels per class of the other half."""
    bank_half, test_half = halves(images.labels)
    # Classes that the bank has enough of and the test half asks for;
    # fewer than two leave nothing to tell apart.
    banked = [images.labels[i] for i in bank_half]
    counts = np.bincount(banked, minlength=len(images.classes))
    asked = {images.labels[i] for i in test_half}
    known = {label for label in asked if counts[label] >= recipe.shots}
    if len(known) < 2:
        return None
    a = [i for i in bank_half if images.labels[i] in known]
    b = [i for i in test_half if images.labels[i] in known]
    bank, test = images.subset(a), images.subset(b)
    predicted = fewshot.predictions(
        FeatureRows((sample[a],)),
        bank.labels,
        sample[b],
        fewshot.draws(bank, shots=recipe.shots, count=recipe.draws, seed=seed),
        classes=len(images.classes),
        l2=recipe.l2,
        max_iterations=500,
        tolerance=1e-6,
    )
    about = (
        f"{recipe.shots} labels of {len(known)} classes, {recipe.draws} draws, {len(b)} test images"
    )
    hits = predicted == np.asarray(test.labels)
    return Number("fewshot", 100 * float(hits.mean()), confidence.of_draws(hits), about)
