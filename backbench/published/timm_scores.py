"""Printed counts of right images by models' own classifiers: timm's, and the ImageNet testbed's of
self-supervised ResNet-50s with their published heads.

timm_scores.csv holds results/*.csv of huggingface/pytorch-image-models at 4e5207c (2025-10-30), by
model and size. Each printed top-1 is a whole count over its set's images, rounded to four decimals
and then to three, so the count is known and a measurement is judged by it. testbed_scores.csv holds
four rows of robustness_top1s.csv of modestyachts/imagenet-testbed at 0170eec, whole counts too.
"""

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PrintedSet:
    """One of the sets. `rule` is the head's: `subset` of 200 classes, `any` label or all."""

    column: str  # of timm_scores.csv and testbed_scores.csv
    images: int
    rule: str
    tolerance: float  # in points


# The tolerances are above the largest difference of timm's numbers from those of
# modestyachts/imagenet-testbed (0170eec), over the same weights of 16 torchvision models: val .030,
# A .160, R .153, Sketch .036. V2 has several image sets of one name, up to 0.6 apart.
SETS = {
    "imagenet-val": PrintedSet("val", 50_000, "all", 0.1),
    "imagenet-v2-matched": PrintedSet("v2", 10_000, "all", 0.6),
    "imagenet-a": PrintedSet("a", 7_500, "subset", 0.3),
    "imagenet-r": PrintedSet("r", 30_000, "subset", 0.3),
    "imagenet-sketch": PrintedSet("sketch", 50_889, "all", 0.1),
    "imagenet-real": PrintedSet("real", 46_837, "any", 0.1),
}
# Those that the testbed alone prints: it has no ReaL
_TESTBED = {
    "imagenet-v2-threshold": PrintedSet("v2_threshold", 10_000, "all", 0.6),
    "imagenet-v2-top": PrintedSet("v2_top", 10_000, "all", 0.6),
}
WITHIN, OUTSIDE, UNLIKE = "within", "outside", "unlike"
# `backbench reproduce timm-a`
LISTS = {f"timm-{printed.column}": name for name, printed in SETS.items()}


@dataclass(frozen=True)
class PrintedScore:
    """One model at one size on one set."""

    model: str
    size: int
    dataset: str
    crop_pct: float
    interpolation: str
    right: int
    printed: PrintedSet
    source: str
    unlike: str  # why it is not judged, whatever is measured

    @property
    def top1(self) -> float:
        return 100 * self.right / self.printed.images


Scores = Mapping[tuple[str, int, str], PrintedScore]  # by (model, size, dataset)


def of_model(model: str, dataset: str) -> list[PrintedScore]:
    """A model's scores on a set, the smallest image size first."""
    printed = (*scores().values(), *testbed().values())
    found = [
        score for score in printed if (score.model, score.dataset) == (model, dataset)
    ]
    return sorted(found, key=lambda score: score.size)


@functools.cache
def scores() -> Scores:
    """timm's."""
    return _read("timm_scores.csv", "timm results")


@functools.cache
def testbed() -> Scores:
    """The testbed's, by its names of the models."""
    return _read("testbed_scores.csv", "imagenet-testbed")


def _read(name: str, source: str) -> Scores:
    out = {}
    with Path(__file__).with_name(name).open(newline="") as file:
        for line in csv.DictReader(file):
            model, size = line["model"], int(line["size"])
            cropped = float(line["crop_pct"]), line["interpolation"]
            unlike = line.get("unlike", "")
            if model.startswith("fasternet_"):
                unlike = "timm says to cut it at 0.9, and printed what it does at 1"
            for dataset, printed in {**SETS, **_TESTBED}.items():
                if right := line.get(printed.column):
                    of = (*cropped, int(right), printed, source, unlike)
                    out[model, size, dataset] = PrintedScore(model, size, dataset, *of)
    return out


def verdict(
    score: PrintedScore, *, right: int, images: int, crop_pct: float, interpolation: str
) -> tuple[str, str]:
    """The verdict on a measured count, and the reason where there is none."""
    if score.unlike:
        return UNLIKE, score.unlike
    # Interpolation alone moves A by up to .49 and V2 by .94 points: another measurement
    # (their csv files cut crop_pct to three decimals)
    if interpolation != score.interpolation or abs(crop_pct - score.crop_pct) > 0.001:
        printed = f"printed for {score.interpolation} at {score.crop_pct:g}"
        return UNLIKE, f"{interpolation} at {crop_pct:g}, {printed}"
    if images != score.printed.images:
        return UNLIKE, f"{images:,} images, printed of {score.printed.images:,}"
    off = abs(right - score.right)
    return (WITHIN if off <= score.printed.tolerance * images / 100 else OUTSIDE), ""
