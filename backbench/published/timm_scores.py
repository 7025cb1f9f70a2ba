"""Printed counts of right images by models' own classifiers on ImageNet and its relatives.

timm_scores.csv holds results/*.csv of huggingface/pytorch-image-models at 4e5207c (2025-10-30), by
model and image size. Each printed top-1 is a whole count over its set's images, rounded to four
decimals and then to three. So the count is known, and a measurement is judged by it.

testbed_scores.csv holds four rows of robustness_top1s.csv of modestyachts/imagenet-testbed at
0170eec, as whole counts, too: self-supervised ResNet-50s with their published heads, and the
supervised one.
"""

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PrintedSet:
    """One of the image sets.

    `rule` is how a head of 1000 classes is read on it: `all` classes compete; only the `subset` of
    200 classes that the set has; or `any` of an image's several labels counts as right.
    """

    column: str  # of timm_scores.csv and testbed_scores.csv
    images: int
    rule: str
    tolerance: float  # in points


# timm and modestyachts/imagenet-testbed (0170eec) both print numbers of the same weights of 16
# torchvision models. The tolerances are above the largest differences between the two, in points:
# val .030, A .160, R .153, Sketch .036. V2 has several image sets of one name, up to 0.6 apart.
SETS = {
    "imagenet-val": PrintedSet("val", 50_000, "all", 0.1),
    "imagenet-v2-matched": PrintedSet("v2", 10_000, "all", 0.6),
    "imagenet-a": PrintedSet("a", 7_500, "subset", 0.3),
    "imagenet-r": PrintedSet("r", 30_000, "subset", 0.3),
    "imagenet-sketch": PrintedSet("sketch", 50_889, "all", 0.1),
    "imagenet-real": PrintedSet("real", 46_837, "any", 0.1),
}
# Sets that the testbed alone prints
_TESTBED = {
    "imagenet-v2-threshold": PrintedSet("v2_threshold", 10_000, "all", 0.6),
    "imagenet-v2-top": PrintedSet("v2_top", 10_000, "all", 0.6),
}
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
    unlike: str  # why no measurement can be judged by it; empty if it can

    @property
    def top1(self) -> float:
        """In percent."""
        return 100 * self.right / self.printed.images


Scores = Mapping[tuple[str, int, str], PrintedScore]  # by (model, size, dataset)


def of_model(model: str, dataset: str) -> list[PrintedScore]:
    """Return a model's scores on a set, the smallest image size first."""
    found = []
    for score in (*scores().values(), *testbed().values()):
        if (score.model, score.dataset) == (model, dataset):
            found.append(score)
    return sorted(found, key=lambda score: score.size)


@functools.cache
def scores() -> Scores:
    """Return timm's scores."""
    return _read("timm_scores.csv", "timm results")


@functools.cache
def testbed() -> Scores:
    """Return the testbed's scores; the models have the testbed's names."""
    return _read("testbed_scores.csv", "imagenet-testbed")


def _read(name: str, source: str) -> Scores:
    found = {}
    with Path(__file__).with_name(name).open(newline="") as file:
        for line in csv.DictReader(file):
            model = line["model"]
            size = int(line["size"])
            unlike = line.get("unlike", "")
            if model.startswith("fasternet_"):
                unlike = "timm says to cut it at 0.9, and printed what it does at 1"
            for dataset, printed in {**SETS, **_TESTBED}.items():
                right = line.get(printed.column)
                if not right:
                    continue  # this file has no count of it
                found[model, size, dataset] = PrintedScore(
                    model=model,
                    size=size,
                    dataset=dataset,
                    crop_pct=float(line["crop_pct"]),
                    interpolation=line["interpolation"],
                    right=int(right),
                    printed=printed,
                    source=source,
                    unlike=unlike,
                )
    return found
