"""Printed counts of right images of timm's models, by their own classifiers, on six sets.

timm_scores.csv holds results/*.csv of huggingface/pytorch-image-models at 4e5207c (2025-10-30), by
model and size. Each printed top-1 is a whole count over its set's images, rounded to four decimals
and then to three, so the count is known and a measurement is judged by it.
"""

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PrintedSet:
    """One of timm's csv files. `rule` is the head's: `subset` of 200 classes, `any` label or all."""

    column: str  # of timm_scores.csv
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

    @property
    def top1(self) -> float:
        return 100 * self.right / self.printed.images

    @property
    def judgeable(self) -> bool:
        """False for FasterNets: timm says to cut them at 0.9, and printed what they do at 1."""
        return not self.model.startswith("fasternet_")


def sizes_of(model: str, dataset: str) -> list[int]:
    """The image sizes that a model's score is printed for."""
    return sorted(size for name, size, of in scores() if (name, of) == (model, dataset))


@functools.cache
def scores() -> Mapping[tuple[str, int, str], PrintedScore]:
    """By (model, size, dataset)."""
    out = {}
    with Path(__file__).with_name("timm_scores.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            size, crop_pct = int(line["size"]), float(line["crop_pct"])
            for dataset, printed in SETS.items():
                if right := line[printed.column]:
                    out[line["model"], size, dataset] = PrintedScore(
                        line["model"],
                        size,
                        dataset,
                        crop_pct,
                        line["interpolation"],
                        int(right),
                        printed,
                    )
    return out


def verdict(
    score: PrintedScore, *, right: int, images: int, crop_pct: float, interpolation: str
) -> tuple[str, str]:
    """The verdict on a measured count, and the reason where there is none."""
    # Interpolation alone moves A by up to .49 and V2 by .94 points: another measurement
    # (their csv files cut crop_pct to three decimals)
    if interpolation != score.interpolation or abs(crop_pct - score.crop_pct) > 0.001:
        printed = f"printed for {score.interpolation} at {score.crop_pct:g}"
        return UNLIKE, f"{interpolation} at {crop_pct:g}, {printed}"
    if images != score.printed.images:
        return UNLIKE, f"{images:,} images, printed of {score.printed.images:,}"
    off = abs(right - score.right)
    return (WITHIN if off <= score.printed.tolerance * images / 100 else OUTSIDE), ""
