"""The sentence on top: what it says of boards whose truth is known, the same in every place, and
never less because of a column that cannot be tested yet."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.small_boards import Entry, Held, Kind, a_row, bare, board_of, write

from backbench.board.board import Board, Measurement, collect, difference, fill
from backbench.board.overall import Overall, answer, overall, sentences
from backbench.cli import program
from backbench.published import tables
from backbench.requests.detect import DetectRequest
from backbench.requests.parsing import parse
from backbench.verify import resamples

KNN: Kind = ("knn", "cifar", "top1_k20", "knn-v1", None)
KNN_32: Kind = ("knn", "cifar", "top1_k20", "knn-32px-v1", None)
FEW: Kind = ("fewshot", "cifar", "top1", "fewshot-v1", None)
LOGREG: Kind = ("logreg", "cifar", "top1", "logreg-v1", None)
LINEAR: Kind = ("linear", "cifar", "top1", "linear-lorac-v1", None)
TENTH: Kind = ("semi_10pct", "cifar", "top1", "semisup-v1", None)
CLUSTER: Kind = ("cluster", "cifar", "nmi", "cluster-v1", None)
DETECTORS: list[Kind] = [
    ("faster_rcnn", name, "bbox_AP", "detect-own-v1", "detectron2")
    for name in ("cells", "coins")
]
NEIGHBOURS: list[Kind] = [
    ("knn", name, "top1_k20", "knn-v1", None)
    for name in ("birds", "boats", "coins", "doors", "farms", "gates")
]
PROBES: list[Kind] = [
    ("linear", name, "top1", "linear-lorac-v1", None)
    for name in ("birds", "boats", "coins", "doors", "farms", "gates")
]


class Situation(NamedTuple):
    """A board, and what is right to say of it. A row without an entry was not measured there."""

    what: str
    board: dict[str, dict[Kind, Entry]]
    says: str


def on(columns: list[Kind], *values: float) -> dict[Kind, Entry]:
    """One value on all of these columns, or one on each."""
    if len(values) == 1:
        return dict.fromkeys(columns, values[0])
    return dict(zip(columns, values, strict=True))


SITUATIONS = [
    Situation(
        "no number at all",
        {},
        "Nothing is measured here.",
    ),
    Situation(
        "a single trunk",
        {"a": {KNN: 80}},
        "a is alone here: nothing to compare it with.",
    ),
    Situation(
        "a single trunk, away from its training's size",
        {"a": {KNN: Held(80, size=(224, 32))}},
        "a is alone here: nothing to compare it with. Trained at 32 pixels and"
        " measured at 224: a.",
    ),
    Situation(
        "two trunks, one ahead",
        {"a": {KNN: 80}, "b": {KNN: 60}},
        "a leads alone over Nearest neighbours: rank 1 of 2 with 95%"
        " confidence, for this measurement on other images.",
    ),
    Situation(
        "two trunks, half a point apart",
        {"a": {KNN: 80}, "b": {KNN: 79.5}},
        "No clear winner: a and b cannot be told apart over Nearest neighbours.",
    ),
    Situation(
        "two trunks that tie",
        {"a": {KNN: 80}, "b": {KNN: 80}},
        "No clear winner: a and b cannot be told apart over Nearest neighbours.",
    ),
    Situation(
        "three equals",
        {"a": {KNN: 80, FEW: 70}, "b": {KNN: 80, FEW: 70}, "c": {KNN: 80, FEW: 70}},
        "No clear winner: a, b and c cannot be told apart over all 2 "
        "measurements. None is best on any single measurement by a paired "
        "test.",
    ),
    Situation(
        "a leader in all tests",
        {"a": {KNN: 80, FEW: 70, LOGREG: 85}, "b": {KNN: 60, FEW: 50, LOGREG: 70}},
        "a leads alone over all 3 measurements: rank 1 of 2 with 95% "
        "confidence, for these measurements on other images. Best by a paired"
        " test: a in each of the 3 measurements.",
    ),
    Situation(
        "a trained trunk and a random one, the random one ahead",
        {"a": {KNN: 40}, "random": {KNN: 55}},
        "random leads alone over Nearest neighbours: rank 1 of 2 with 95%"
        " confidence, for this measurement on other images.",
    ),
    Situation(
        "two leaders, and a random trunk far behind",
        {
            "a": {KNN: 80, FEW: 70},
            "b": {KNN: 80, FEW: 70.5},
            "random": {KNN: 40, FEW: 30},
        },
        "b and a lead the 3 over all 2 measurements and cannot be told apart,"
        " with 95% confidence for these measurements on other images. None is"
        " best on any single measurement by a paired test.",
    ),
    Situation(
        "each is ahead in one column",
        {"a": {KNN: 80, FEW: 50}, "b": {KNN: 60, FEW: 70}},
        "No clear winner: a and b cannot be told apart over all 2 "
        "measurements. Best by a paired test: a in Nearest neighbours, b in "
        "Few labels.",
    ),
    Situation(
        "ahead in one column, equal in the other",
        {"a": {KNN: 80, FEW: 70}, "b": {KNN: 60, FEW: 70}},
        "a leads alone over all 2 measurements: rank 1 of 2 with 95% confidence,"
        " for these measurements on other images. Best by a paired test: a in"
        " Nearest neighbours; nobody in the other one.",
    ),
    Situation(
        "ahead in two columns, one image behind in the third",
        {
            "a": {KNN: 80, FEW: 60, LOGREG: 70},
            "b": {KNN: 80.25, FEW: 50, LOGREG: 60},
        },
        "a leads alone over all 3 measurements: rank 1 of 2 with 95% confidence,"
        " for these measurements on other images. Best by a paired test: a in"
        " Logistic regression and Few labels; nobody in the other one.",
    ),
    Situation(
        "a dataset that was changed before half of the trunks were measured",
        {
            "a": {KNN: 80},
            "b": {KNN: 80},
            "c": {KNN: Held(70, list_name="changed")},
        },
        "No clear winner: a and b cannot be told apart over Nearest neighbours on cifar."
        " Never measured together, as their images of cifar differ: {a, b} and c;"
        " `backbench linear trunks/c.safetensors --datasets cifar --protocol knn --data"
        " data --out runs/c-knn` connects them.",
    ),
    Situation(
        "one protocol each",
        {"a": {KNN: 80}, "b": {KNN_32: 60}},
        "No two checkpoints share a measurement: nothing here can be compared."
        " Never measured together: a and b; `backbench linear"
        " trunks/b.safetensors --datasets cifar --protocol knn --data data --out"
        " runs/b-knn` connects them.",
    ),
    Situation(
        "one task each",
        {"a": {KNN: 80}, "b": {FEW: 60}},
        "No two checkpoints share a measurement: nothing here can be compared."
        " Never measured together: a and b; `backbench linear"
        " trunks/b.safetensors --datasets cifar --protocol knn --data data --out"
        " runs/b-knn` connects them.",
    ),
    Situation(
        "three trunks, one column each",
        {"a": {KNN: 80}, "b": {KNN_32: 60}, "c": {FEW: 70}},
        "No two checkpoints share a measurement: nothing here can be compared."
        " Never measured together: a, b and c; `backbench linear"
        " trunks/b.safetensors --datasets cifar --protocol knn --data data --out"
        " runs/b-knn` connects the first two.",
    ),
    Situation(
        "two groups, by two protocols of one task and dataset",
        {"a": {KNN: 80}, "b": {KNN: 60}, "c": {KNN_32: 50}, "d": {KNN_32: 70}},
        "a leads alone over Nearest neighbours on cifar by knn-v1: rank 1 of 2"
        " with 95% confidence, for this measurement on other images; d leads"
        " alone over Nearest neighbours on cifar by knn-32px-v1: rank 1 of 2"
        " with 95% confidence, for this measurement on other images. Never"
        " measured together: {a, b} and {d, c}; `backbench linear"
        " trunks/d.safetensors --datasets cifar --protocol knn --data data --out"
        " runs/d-knn` connects them.",
    ),
    Situation(
        "two groups, the second led by a name that begins as a verdict does",
        {
            "Mix": {KNN: 80},
            "b": {KNN: 60},
            "No Crop": {KNN_32: 70},
            "d": {KNN_32: 50},
        },
        "Mix leads alone over Nearest neighbours on cifar by knn-v1: rank 1 of 2"
        " with 95% confidence, for this measurement on other images; No Crop leads"
        " alone over Nearest neighbours on cifar by knn-32px-v1: rank 1 of 2"
        " with 95% confidence, for this measurement on other images. Never"
        " measured together: {Mix, b} and {No Crop, d}; `backbench linear"
        " 'trunks/No Crop.safetensors' --datasets cifar --protocol knn --data data --out"
        " runs/No-Crop-knn` connects them.",
    ),
    Situation(
        "a group and a trunk of its own",
        {"a": {KNN: 80}, "b": {KNN: 60}, "c": {KNN_32: 90}},
        "a leads alone over Nearest neighbours on cifar by knn-v1: rank 1 of 2"
        " with 95% confidence, for this measurement on other images. Never"
        " measured together: {a, b} and c; `backbench linear"
        " trunks/c.safetensors --datasets cifar --protocol knn --data data --out"
        " runs/c-knn` connects them.",
    ),
    Situation(
        "a group of three and one of two",
        {
            "a": {KNN: 80},
            "b": {KNN: 60},
            "c": {KNN: 50},
            "d": {FEW: 50},
            "e": {FEW: 50},
        },
        "a leads alone over Nearest neighbours: rank 1 of 3 with 95%"
        " confidence, for this measurement on other images; no clear winner: d"
        " and e cannot be told apart over Few labels. Never measured together:"
        " {a, b, c} and {d, e}; `backbench linear trunks/d.safetensors"
        " --datasets cifar --protocol knn --data data --out runs/d-knn` connects"
        " them.",
    ),
    Situation(
        "five groups",
        {
            "a": {KNN: 80},
            "b": {KNN: 60},
            **{name: {kind: 50} for name, kind in zip("cdef", NEIGHBOURS)},
        },
        "a leads alone over Nearest neighbours on cifar: rank 1 of 2 with 95%"
        " confidence, for this measurement on other images. Never measured"
        " together: {a, b}, c, d and 2 other groups; `backbench linear"
        " trunks/c.safetensors --datasets cifar --protocol knn --data data --out"
        " runs/c-knn` connects the first two.",
    ),
    Situation(
        "two columns of one protocol and dataset at two sizes, all in both",
        {"a": {KNN: 80, KNN_32: 60}, "b": {KNN: 60, KNN_32: 80}},
        "No clear winner: a and b cannot be told apart over all 2 "
        "measurements. Best by a paired test: b in Nearest neighbours on "
        "cifar by knn-32px-v1, a in Nearest neighbours on cifar by knn-v1.",
    ),
    Situation(
        "a chain: a over b here, b over c there",
        {"a": {KNN: 80}, "b": {KNN: 60, FEW: 60}, "c": {FEW: 40}},
        "a leads alone over all 2 measurements: rank 1 to 2 of 3 with 95% "
        "confidence, for these measurements on other images; a was never "
        "measured with c. Best by a paired test: a in Nearest neighbours (2 "
        "of 3 measured), b in Few labels (2 of 3 measured).",
    ),
    Situation(
        "a chain whose ends are both ahead of its middle",
        {"a": {KNN: 80}, "b": {KNN: 60, FEW: 60}, "c": {FEW: 80}},
        "a and c lead the 3 over all 2 measurements and were never measured "
        "together, with 95% confidence for these measurements on other "
        "images. Best by a paired test: a in Nearest neighbours (2 of 3 "
        "measured), c in Few labels (2 of 3 measured).",
    ),
    Situation(
        "a chain whose middle is ahead of both ends",
        {"a": {KNN: 50}, "b": {KNN: 80, FEW: 80}, "c": {FEW: 60}},
        "b leads alone over all 2 measurements: rank 1 of 3 with 95% "
        "confidence, for these measurements on other images. Best by a paired"
        " test: b in each of the 2 measurements (in each a rival has no "
        "number).",
    ),
    Situation(
        "a chain of equals",
        {"a": {KNN: 80}, "b": {KNN: 80, FEW: 70}, "c": {FEW: 70}},
        "No clear winner among a, b and c over all 2 measurements; a was "
        "never measured with c. None is best on any single measurement by a "
        "paired test.",
    ),
    Situation(
        "a chain of four",
        {
            "a": {KNN: 80},
            "b": {KNN: 60, FEW: 60},
            "c": {FEW: 40, LOGREG: 40},
            "d": {LOGREG: 20},
        },
        "a leads alone over all 3 measurements: rank 1 to 3 of 4 with 95% "
        "confidence, for these measurements on other images; a was never "
        "measured with c and d. Best by a paired test: c in Logistic "
        "regression (2 of 4 measured), a in Nearest neighbours (2 of 4 "
        "measured), b in Few labels (2 of 4 measured).",
    ),
    Situation(
        "the best one in a column that its rival lacks",
        {"a": {KNN: 80, FEW: 70}, "b": {KNN: 80}, "c": {KNN: 40, FEW: 30}},
        "a and b lead the 3 over all 2 measurements and cannot be told apart,"
        " with 95% confidence for these measurements on other images. Best by"
        " a paired test: a in Few labels (2 of 3 measured); nobody in the "
        "other one.",
    ),
    Situation(
        "columns that overlap in part",
        {
            "a": {KNN: 80, FEW: 70},
            "b": {KNN: 60, LOGREG: 50},
            "c": {FEW: 50, LOGREG: 30},
        },
        "a leads alone over all 3 measurements: rank 1 of 3 with 95% "
        "confidence, for these measurements on other images. Best by a paired"
        " test: a in Nearest neighbours and Few labels (2 of 3 measured), b "
        "in Logistic regression (2 of 3 measured).",
    ),
    Situation(
        "one training each, nothing else",
        {"a": {LINEAR: 80}, "b": {LINEAR: 60}},
        "No verdict on a and b over Linear probe: too little was measured,"
        " trained again or kept to test them. Trained"
        " once each, so not tested yet: Linear probe; `backbench linear"
        " trunks/a.safetensors trunks/b.safetensors --datasets cifar --data data"
        " --out runs/seeds-linear --seeds 3` settles it.",
    ),
    Situation(
        "a tested tie, and two detectors that were trained once each",
        {
            "a": {KNN: 80, **on(DETECTORS, 80, 80)},
            "b": {KNN: 80, **on(DETECTORS, 60, 60)},
        },
        "No clear winner: a and b cannot be told apart over Nearest neighbours."
        " None is best on any single measurement by a paired test; best of one"
        " training each: a in Faster R-CNN on cells:val and coins:val. Trained"
        " once each, so not tested yet: Faster R-CNN on cells:val and coins:val;"
        " `backbench detect --config-file faster_rcnn_R_50_FPN_1x --dataset"
        " cells --checkpoint trunks/a.safetensors --data data --out"
        " runs/seeds-a-faster_rcnn --seeds 3` and the same for b settle Faster R-CNN on"
        " cells:val.",
    ),
    Situation(
        "three leaders of whom two share nothing, above a fourth",
        {
            "a": {KNN: 80},
            "b": {KNN: 80, FEW: 70},
            "c": {FEW: 70},
            "d": {KNN: 40, FEW: 30},
        },
        "b, a and c lead the 4 over all 2 measurements and were not all measured"
        " together, with 95% confidence for these measurements on other images;"
        " a was never measured with c. None is best on any single measurement by"
        " a paired test.",
    ),
    Situation(
        "three seeds of each",
        {"a": {LINEAR: [80, 80.5, 79.5]}, "b": {LINEAR: [60, 60.5, 59.5]}},
        "a leads alone over Linear probe: rank 1 of 2 with 95% confidence, for"
        " this measurement on other images and trainings.",
    ),
    Situation(
        "three seeds of each, which differ as much as the trunks",
        {"a": {LINEAR: [70, 80, 60]}, "b": {LINEAR: [65, 55, 75]}},
        "No clear winner: a and b cannot be told apart over Linear probe.",
    ),
    Situation(
        "a verdict, and a column of one training in which it leads",
        {"a": {KNN: 80, LINEAR: 80}, "b": {KNN: 60, LINEAR: 60}},
        "a leads alone over Nearest neighbours: rank 1 of 2 with 95% "
        "confidence, for this measurement on other images. Best of one "
        "training each: a in Linear probe. Trained once each, so not tested "
        "yet: Linear probe; `backbench linear trunks/a.safetensors "
        "trunks/b.safetensors --datasets cifar --data data --out "
        "runs/seeds-linear --seeds 3` settles it.",
    ),
    Situation(
        "a verdict, and a column of one training in which it is behind",
        {"a": {KNN: 80, LINEAR: 60}, "b": {KNN: 60, LINEAR: 80}},
        "a leads alone over Nearest neighbours: rank 1 of 2 with 95% "
        "confidence, for this measurement on other images. Best of one "
        "training each: b in Linear probe. Trained once each, so not tested "
        "yet: Linear probe; `backbench linear trunks/b.safetensors "
        "trunks/a.safetensors --datasets cifar --data data --out "
        "runs/seeds-linear --seeds 3` settles it.",
    ),
    Situation(
        "a verdict, and three columns of one training",
        {
            "a": {KNN: 80, LINEAR: 80, TENTH: 60, PROBES[0]: 50},
            "b": {KNN: 60, LINEAR: 60, TENTH: 50, PROBES[0]: 40},
        },
        "a leads alone over Nearest neighbours: rank 1 of 2 with 95% "
        "confidence, for this measurement on other images. Best of one "
        "training each: a in each of the 3 measurements. Trained once each, "
        "so not tested yet: Linear probe on birds and cifar, and 10% of "
        "labels; `backbench linear trunks/a.safetensors trunks/b.safetensors "
        "--datasets birds,cifar --data data --out runs/seeds-linear --seeds "
        "3` settles Linear probe on birds.",
    ),
    Situation(
        "a trunk that only a column of one training compares",
        {"a": {KNN: 80, LINEAR: 80}, "b": {KNN: 60, LINEAR: 60}, "c": {LINEAR: 70}},
        "a leads alone over Nearest neighbours: rank 1 of 2 with 95% "
        "confidence, for this measurement on other images. Best of one "
        "training each: a in Linear probe. Trained once each, so not tested "
        "yet: Linear probe; `backbench linear trunks/a.safetensors "
        "trunks/c.safetensors --datasets cifar --data data --out "
        "runs/seeds-linear --seeds 3` settles it.",
    ),
    Situation(
        "two groups that only a column of one training connects",
        {
            "a": {KNN: 80, LINEAR: 80},
            "b": {KNN: 60, LINEAR: 60},
            "c": {FEW: 70, LINEAR: 70},
            "d": {FEW: 50, LINEAR: 50},
        },
        "a leads alone over Nearest neighbours: rank 1 of 2 with 95% "
        "confidence, for this measurement on other images; over Few labels c "
        "leads. Best of one training each: a in Linear probe. Trained once "
        "each, so not tested yet: Linear probe; `backbench linear "
        "trunks/a.safetensors trunks/c.safetensors --datasets cifar --data "
        "data --out runs/seeds-linear --seeds 3` settles it.",
    ),
    Situation(
        "a verdict, and a column without predictions",
        {"a": {KNN: 80, FEW: bare(70)}, "b": {KNN: 60, FEW: bare(60)}},
        "a leads alone over Nearest neighbours: rank 1 of 2 with 95%"
        " confidence, for this measurement on other images. Nothing kept to test"
        " or rank: a and b in Few labels.",
    ),
    Situation(
        "no predictions at all",
        {"a": {KNN: bare(80)}, "b": {KNN: bare(60)}},
        "Nothing here can be compared. Nothing kept to test or rank: a and b in"
        " Nearest neighbours.",
    ),
    Situation(
        "a fit that has not converged",
        {"a": {KNN: 70, LOGREG: Held(90, converged=False)}, "b": {KNN: 50, LOGREG: 60}},
        "a leads alone over Nearest neighbours: rank 1 of 2 with 95%"
        " confidence, for this measurement on other images. Not ranked, as the fit has"
        " not converged: a in Logistic regression.",
    ),
    Situation(
        "the highest number of each of two columns is of trunks that saw the images",
        {
            "a": {KNN: Held(90, seen=True), FEW: 60},
            "b": {KNN: 70, FEW: Held(80, seen=True)},
            "c": {KNN: 50, FEW: 40},
        },
        "a and b lead the 3 over all 2 measurements and were never measured together,"
        " with 95% confidence for these measurements on other images. None is best on"
        " any single measurement by a paired test. Not ranked, as its trunk was trained"
        " on cifar:test: a in Nearest neighbours and b in Few labels.",
    ),
    Situation(
        "a fit that has not converged in the only column of both",
        {"a": {KNN: 70, LOGREG: Held(90, converged=False)}, "b": {LOGREG: 60}},
        "Nothing here can be compared. Not compared: a and b; a fit in Logistic"
        " regression has not converged.",
    ),
    Situation(
        "only measures that are not ranked",
        {"a": {CLUSTER: bare(50)}, "b": {CLUSTER: bare(40)}},
        "Nothing here can be compared. Without a number that can be ranked: a and b.",
    ),
    Situation(
        "a trained trunk measured away from its size",
        {
            "a": {KNN: Held(40, size=(224, 32))},
            "random": {KNN: Held(55, size=(224, 32))},
        },
        "random leads alone over Nearest neighbours: rank 1 of 2 with 95%"
        " confidence, for this measurement on other images. Trained at 32 pixels"
        " and measured at 224: a and random.",
    ),
    Situation(
        "trunks of three sizes",
        {
            "a": {KNN: Held(80, size=(224, 32))},
            "b": {KNN: Held(60, size=(224, 224))},
            "c": {KNN: Held(50, size=(224, 96))},
        },
        "a leads alone over Nearest neighbours: rank 1 of 3 with 95%"
        " confidence, for this measurement on other images. Trained at 32 pixels"
        " and measured at 224: a; trained at 96 pixels and measured at 224: c.",
    ),
    Situation(
        "six datasets, one ahead on all",
        {"a": on(NEIGHBOURS, 80), "b": on(NEIGHBOURS, 60)},
        "a leads alone over all 6 measurements: rank 1 of 2 with 95% "
        "confidence, for other datasets like these 6. Best by a paired test: "
        "a in each of the 6 measurements.",
    ),
    Situation(
        "six datasets of one training each, one ahead on all",
        {"a": on(PROBES, 80), "b": on(PROBES, 60)},
        "a leads alone over all 6 measurements: rank 1 of 2 with 95% "
        "confidence, for other datasets like these 6. None is best on any "
        "single measurement by a paired test; best of one training each: a in"
        " each of the 6 measurements.",
    ),
    Situation(
        "six columns of three datasets, one ahead on all",
        {
            "a": on([*PROBES[:3], *NEIGHBOURS[:3]], 80),
            "b": on([*PROBES[:3], *NEIGHBOURS[:3]], 60),
        },
        "a leads alone over all 6 measurements: rank 1 of 2 with 95% "
        "confidence, for other measurements like these 6, on other images. Best"
        " by a paired test: a in Nearest neighbours on birds, boats and coins;"
        " best of one training each: a in Linear probe on birds, boats and"
        " coins.",
    ),
    Situation(
        "six datasets, each ahead on three",
        {
            "a": on(NEIGHBOURS, 80, 80, 80, 60, 60, 60),
            "b": on(NEIGHBOURS, 60, 60, 60, 80, 80, 80),
        },
        "No clear winner: a and b cannot be told apart over all 6 "
        "measurements. Best by a paired test: a in Nearest neighbours on "
        "birds, boats and coins, b in Nearest neighbours on doors, farms and "
        "gates.",
    ),
    Situation(
        "five datasets that can be tested, and one of one training",
        {
            "a": {**on(NEIGHBOURS[:5], 80, 70, 70, 60, 60), PROBES[5]: 70},
            "b": {**on(NEIGHBOURS[:5], 60, 60, 60, 50, 55), PROBES[5]: 69},
            "c": {**on(NEIGHBOURS[:5], 40, 65, 68, 30, 20), PROBES[5]: 69.5},
        },
        "a leads alone over all 6 measurements: rank 1 of 3 with 95% "
        "confidence, for other datasets like these 6. Best by a paired test: "
        "a in Nearest neighbours on birds, boats, doors and farms; best of "
        "one training each: a in Linear probe; nobody in the other one.",
    ),
    Situation(
        "two groups, each on six datasets",
        {
            "a": on(NEIGHBOURS, 80),
            "b": on(NEIGHBOURS, 60),
            "c": on(PROBES, 50),
            "d": on(PROBES, 50.5),
        },
        "a leads alone over Nearest neighbours on 6 datasets: rank 1 of 2 "
        "with 95% confidence, for other datasets like these 6; d leads alone "
        "over Linear probe on 6 datasets: rank 1 of 2 with 95% confidence, "
        "for other datasets like these 6. Best by a paired test: a in 6 "
        "measurements; best of one training each: d in 6 measurements. Never "
        "measured together: {a, b} and {d, c}; `backbench linear "
        "trunks/d.safetensors --datasets birds --protocol knn --data data "
        "--out runs/d-knn` connects them.",
    ),
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda one: one.what)
def test_what_is_said_of_a_board_whose_truth_is_known(tmp_path, situation):
    board = board_of(tmp_path / "runs", situation.board)
    said = answer(board, overall(board))
    assert said == situation.says
    # Three sentences at most, and each command in them is one
    *pieces, last = said.split("`")
    assert len(pieces) % 2 == 0
    words = "".join([*pieces[::2], last])
    assert words.count(". ") <= 2 and words.endswith(".")
    for command in pieces[1::2]:
        program, *words_of_command = shlex.split(command)
        request = parse(words_of_command)
        assert program == "backbench"
        one_alone = isinstance(request, DetectRequest)
        files = [request.checkpoint] if one_alone else request.checkpoints
        for file in files:
            assert file.stem in situation.board


def test_an_ap_differs_by_what_the_two_numbers_do(tmp_path):
    """Not by the mean of its resamples, from which an AP of all images lies apart."""
    (cells, _) = DETECTORS
    board = board_of(tmp_path / "runs", {"a": {cells: 80}, "b": {cells: 60}})
    (column,) = board.main_columns()
    a, b = (board.cell(row, column) for row in board.rows)
    (measurement,) = a.parts
    moved = replace(measurement.result, value=a.value + 1)
    a.parts[:] = [measurement._replace(result=moved)]
    found = difference(board, column, a, b)
    assert found.value == pytest.approx(a.value + 1 - b.value)
    assert found.value == pytest.approx(21, abs=0.5)


def test_a_rank_of_few_columns_stands_below_the_others(tmp_path):
    table = {
        "a": on(NEIGHBOURS, 80),
        "b": on(NEIGHBOURS, 60),
        "best": {NEIGHBOURS[0]: 90},
    }
    (widest, *_) = overall(board_of(tmp_path / "runs", table))
    assert widest.names == ["a", "b", "best"]
    assert [place.rank for place in widest.standing.places] == [2, 3, 1]


def test_a_trunk_that_was_never_trained_was_trained_at_no_size(tmp_path):
    both = {"a": {KNN: Held(60, size=(224, 32))}, "b": {KNN: Held(20, size=(224, 32))}}
    board = board_of(tmp_path / "runs", both)
    said = answer(board, overall(board))
    assert said.endswith("Trained at 32 pixels and measured at 224: a and b.")
    for file in (tmp_path / "runs").rglob("results.jsonl"):
        row = json.loads(file.read_text())
        if row["name"] == "b":
            file.write_text(json.dumps({**row, "epochs": 0}) + "\n")
    board = collect([tmp_path / "runs"])
    said = answer(board, overall(board))
    assert said.endswith("Trained at 32 pixels and measured at 224: a.")


def test_the_same_sentence_stands_wherever_the_board_does(tmp_path, capsys):
    runs = tmp_path / "runs"
    table = {
        "a": {KNN: 80, LINEAR: 80},
        "b": {KNN: 60, LINEAR: 60},
        "c": {KNN_32: 50},
        "d": {KNN_32: 70},
    }
    write(runs, table)
    files = [f"--{kind}={tmp_path / kind}" for kind in ("html", "markdown", "latex")]
    assert program.main(["leaderboard", str(runs), *files, "-q"]) == 0
    said, *rest = capsys.readouterr().out.splitlines()
    assert "Never measured together: {a, b} and {d, c}" in said
    assert "--seeds 3` settles it" in said
    assert "[rank] over Nearest neighbours on cifar by knn-v1 among a and b" in rest[0]
    ranks = {line.split()[0]: line.split()[1] for line in rest[-4:]}
    assert ranks == {"a": "1", "b": "2", "d": "1", "c": "2"}, "in each group from 1"
    # 1. Elsewhere, word for word
    assert program.main(["rank", str(runs), "--json", "-q"]) == 0
    ranked = json.loads(capsys.readouterr().out)
    assert ranked["answer"] == said
    parts = [(one["part"], one["rank"], one["name"]) for one in ranked["ranks"]]
    assert parts == [(1, 1, "a"), (1, 2, "b"), (2, 1, "d"), (2, 2, "c")]
    assert (tmp_path / "markdown" / "board.md").read_text().splitlines()[0] == said
    page = (tmp_path / "html").read_text()
    for sentence in sentences(collect([runs]), overall(collect([runs]))):
        assert sentence in said and json.dumps(sentence) in page
    # 2. In LaTeX, with its commands as LaTeX must have them
    tex = (tmp_path / "latex" / "board.tex").read_text()
    caption = next(line for line in tex.splitlines() if line.startswith(r"\caption"))
    assert r"\texttt{backbench linear " in caption and r"-{}-seeds 3}" in caption
    plain = re.sub(
        r"\\texttt\{(.*?)\}(?=[ ;.])", r"`\1`", caption.replace("-{}-", "--")
    )
    assert said in re.sub(r"\\([%{}_])", r"\1", plain)


def test_heads_of_tables_name_the_protocol(tmp_path):
    """The five nearest neighbours at 32 pixels stand beside the twenty nearest at 224."""
    five: Kind = ("knn", "cifar", "top1_k5", "knn-32px-v1", None)
    write(tmp_path / "runs", {"a": {KNN: 80, five: 60}, "b": {KNN: 60, five: 50}})
    board = collect([tmp_path / "runs"])
    tables.write(board, [], overall(board), latex=tmp_path, markdown=tmp_path)
    tex = (tmp_path / "board.tex").read_text()
    heads = next(line for line in tex.splitlines() if line.startswith("Checkpoint"))
    assert r"top1\_k5\\\scriptsize knn-32px-v1}" in heads
    assert r"top1\_k20\\\scriptsize knn-v1}" in heads
    markdown = (tmp_path / "board.md").read_text()
    assert "top1_k20 knn-v1 |" in markdown and "top1_k5 knn-32px-v1 |" in markdown


# ---- evidence never takes a verdict back by its mere presence


class Drawn:
    """Random boards whose numbers and predictions are made once for all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[tuple[object, ...], Measurement] = {}

    def board(self, table: dict[str, dict[Kind, Entry]]) -> Board:
        measurements = []
        for name, entries in table.items():
            for kind, entry in entries.items():
                values = entry if isinstance(entry, list) else [entry]
                for seed, value in enumerate(values):
                    measurements.append(self._number(name, kind, value, seed))
        return fill(measurements)

    def _number(self, name: str, kind: Kind, value: float, seed: int) -> Measurement:
        key = (name, kind, value, seed)
        if key not in self.made:
            run = self.folder / f"{kind[0]}-{kind[1]}-{kind[3]}" / name
            row = a_row(run, name, kind, Held(value), seed)
            self.made[key] = Measurement(row, run)
        return self.made[key]


# What can be tested: of a column of LINEAR's kind every trunk has three seeds
TESTABLE = [KNN, KNN_32, FEW, LOGREG, LINEAR, *NEIGHBOURS[:5]]
VALUES = (40.0, 50.0, 55.0, 58.0, 70.0)


def a_random_table(rng: np.random.Generator) -> dict[str, dict[Kind, Entry]]:
    """Two to five trunks; each has a part of the columns."""
    names = list("abcde")[: rng.integers(2, 6)]
    kinds = [TESTABLE[i] for i in rng.permutation(len(TESTABLE))[: rng.integers(1, 8)]]
    share = rng.choice([0.5, 0.8, 1.0])
    table: dict[str, dict[Kind, Entry]] = {}
    for name in names:
        table[name] = {}
        for kind in kinds:
            value = float(rng.choice(VALUES))
            if rng.random() < share:
                table[name][kind] = [value] * 3 if kind == LINEAR else value
    return {name: entries for name, entries in table.items() if entries}


def winners(sets: Sequence[Overall]) -> dict[str, int]:
    """Who leads alone, and of how many trunks at most."""
    found: dict[str, int] = {}
    for of in sets:
        if of.is_decided:
            name = of.names[of.leaders[0]]
            found[name] = max(found.get(name, 0), len(of.names))
    return found


@pytest.fixture
def resampled_once(monkeypatch):
    """Predictions that many boards share are resampled once, which takes most of their time."""
    kept: dict[tuple[object, ...], object] = {}
    moved = resamples.moved

    def again(files, metric):
        key = (*files, metric)
        if key not in kept:
            kept[key] = moved(files, metric)
        return kept[key]

    monkeypatch.setattr(resamples, "moved", again)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("resampled_once")
def test_no_verdict_goes_because_of_evidence_that_cannot_speak_against_it(
    tmp_path, seed
):
    check_monotone(tmp_path, seed, boards=250)


@pytest.mark.usefixtures("resampled_once")
def test_a_verdict_stays_whatever_joins_it(tmp_path):
    check_monotone(tmp_path, seed=4, boards=40)


def check_monotone(folder: Path, seed: int, boards: int) -> None:
    """On random boards with a verdict: it stays when a column of one training joins in which the
    leader leads, and when one joins in which the leader is ahead of each by a test."""
    drawn = Drawn(folder)
    rng = np.random.default_rng(seed)
    seen = 0
    while seen < boards:
        table = a_random_table(rng)
        sets = overall(drawn.board(table))
        before = winners(sets)
        if not before:
            continue
        seen += 1
        leader = sorted(before)[int(rng.integers(len(before)))]
        untested = PROBES[int(rng.integers(len(PROBES)))]
        tested = NEIGHBOURS[5]
        # 1. A column of one training may have any trunk.
        everybody = [name for name in table if name != leader]
        joins = [(untested, 58.0, everybody)]
        # 2. A tested one has the rivals that the leader itself is above. Another group would bring
        #    a leader whom nobody measured with this one; and who is behind only one of the others
        #    may be shown to be ahead of that one.
        for of in sets:
            first = of.leaders[0]
            is_above = np.delete(of.standing.above[first], first)
            if of.is_decided and of.names[first] == leader and is_above.all():
                rivals = sorted(name for name in of.names if name != leader)
                joins.append((tested, 90.0, rivals))
                break
        for column, ahead, others in joins:
            joining = [name for name in others if rng.random() < 0.8] or others[:1]
            more = {name: dict(entries) for name, entries in table.items()}
            more[leader][column] = ahead
            for name in joining:
                more[name][column] = float(rng.choice(VALUES[:3]))
            board = drawn.board(more)
            sets = overall(board)
            after = winners(sets)
            assert after.get(leader, 0) >= before[leader], (table, column, after)
            if seen % 20 == 0:
                said = answer(board, sets)
                assert re.search(rf"{leader} leads|{leader} lead |too", said), said


@pytest.mark.parametrize(
    ("groups", "more"),
    [
        (2, ""),
        (3, "; 1 more group stands in the table"),
        (4, "; 2 more groups stand in the table"),
    ],
)
def test_of_many_groups_three_have_a_verdict_and_the_others_are_counted(
    tmp_path, groups, more
):
    table = {
        "a": {KNN: 80, FEW: 70, LOGREG: 85},
        "b": {KNN: 60, FEW: 50, LOGREG: 70},
    }
    for number, names in enumerate(("cd", "ef", "gh", "ij")[:groups]):
        better = 70 if names == "cd" else 90
        table[names[0]] = {NEIGHBOURS[number]: better}
        table[names[1]] = {NEIGHBOURS[number]: 70}
    board = board_of(tmp_path, table)
    said = sentences(board, overall(board))
    alone = "{} leads alone over {}: rank 1 of 2 with 95% confidence, for {} on other images"
    clauses = [
        alone.format("a", "3 measurements", "these measurements"),
        "no clear winner: c and d cannot be told apart over Nearest neighbours on birds",
        alone.format("e", "Nearest neighbours on boats", "this measurement"),
    ]
    assert said[0] == f"{'; '.join(clauses)}{more}."
    never = said[-1].partition("; `")[0]
    ends = {
        2: " and {e, f}",
        3: ", {e, f} and 1 other group",
        4: ", {e, f} and 2 other groups",
    }
    assert never == f"Never measured together: {{a, b}}, {{c, d}}{ends[groups]}"


def test_another_list_of_three_datasets_does_not_make_six(tmp_path):
    """Six datasets are enough to speak of others like them; three that each changed are not."""
    for list_name in ("usual", "changed"):
        table = {
            name: {kind: Held(value, list_name=list_name) for kind in NEIGHBOURS[:3]}
            for name, value in (("a", 80), ("b", 70))
        }
        write(tmp_path / list_name, table)
    board = collect([tmp_path])
    (of,) = overall(board)
    assert len(of.columns) == 6
    assert (of.standing.over, of.is_decided) == ("columns", True)
    assert "other datasets like these" not in answer(board, [of])


def test_neighbours_of_other_seeds_are_compared_and_draws_of_labels_are_not(
    tmp_path, monkeypatch
):
    """Nothing is drawn for neighbours, so seed 1 of one lab stands beside seed 0 of another."""
    write(tmp_path, {"a": {KNN: 80}, "b": {KNN: 60}})
    file = tmp_path / "knn-cifar-knn-v1" / "b" / "results.jsonl"
    file.write_text(json.dumps({**json.loads(file.read_text()), "seed": 1}) + "\n")
    board = collect([tmp_path])
    (column,) = board.main_columns()
    (_, first), (_, second) = board.measured(column)
    found = difference(board, column, first, second)
    assert found is not None and found.value == pytest.approx(20)
    said = answer(board, overall(board))
    assert said.startswith("a leads alone over Nearest neighbours")
    # Other labels were drawn by another seed
    monkeypatch.setattr("backbench.board.board.of_draws", lambda file, metric: True)
    assert difference(board, column, first, second) is None


def test_the_command_on_top_names_the_trunk_that_a_grid_pretrained(tmp_path):
    """Its row has the recipe's name, and its file that of all pretrainings."""
    command = (
        "backbench linear {}backbone.safetensors --datasets cifar --data d --out r"
    )
    for folder, file in (
        ("runs/pretrain/simclr-s0-1a2b/", "runs/pretrain/simclr-s0-1a2b/backbone"),
        ("", "a"),  # records to publish keep no folders
    ):
        held = Held(70, command=command.format(folder))
        table = {"a": {LINEAR: held}, "b": {LINEAR: 60}}
        board = board_of(tmp_path / f"runs{len(folder)}", table)
        said = answer(board, overall(board))
        assert f"`backbench linear {file}.safetensors" in said
