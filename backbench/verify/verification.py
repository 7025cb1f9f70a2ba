"""Verify records: compute every number again from what was kept beside it.

`of_run` gives each row of a results.jsonl a level, or says why it fails. It reads only the folder,
and needs neither torch nor images. A forgery that agrees with itself (predictions, value and
interval) is not seen.
"""

import csv
import functools
import gzip
import hashlib
import io
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from backbench.images.multilabel import table_of
from backbench.records import (
    ap_errors,
    clean_test,
    data_manifests,
    kept_scores,
    label_tables,
)
from backbench.records.predictions import Arrays, hits, load
from backbench.records.result_line import Result
from backbench.stats import confidence, dense_counts, partitions, resampling
from backbench.tasks import TASKS
from backbench.untrusted import opening, printable
from backbench.verify import resamples

LISTS = "lists"  # folder of a corpus: <sha256>.tsv.gz, each list of images once
# The levels of a row that stands
FROM_LIST = 3
FROM_KEPT = 2
UNBACKED = 1
LEVELS = {
    FROM_LIST: "value and interval computed again from kept predictions, over the list of images",
    FROM_KEPT: "value and interval agree with what was kept; the list of images is not here",
    UNBACKED: "nothing was kept to compute it again from: it never leads",
}
_ALIKE = 1e-6  # percent: a number computed again
_CLOCKS = 3600  # seconds by which two machines' clocks may differ
# The mean of an AP's resamples lies near the AP: at most _AP_CHANCE of their standard deviations
# away by chance, and by their bias at most _AP_BELOW / sqrt(images) of them below and
# _AP_ABOVE / sqrt(images) above. In the demo's 30 APs of 40 images (docs/demo/records) it lies 0.0
# to 0.9 above. A bootstrap's bias falls with 1 / images and its spread with the root; the mean of
# 500 resamples is known to 0.045 of the spread.
_AP_CHANCE = 0.25
_AP_BELOW = 3.0
_AP_ABOVE = 12.0
# Percent: a stricter overlap may by chance of matching give so much more.
_AP_ORDER = 0.1
# Bounds on what a stranger's record may cost
_LARGEST_LIST = 16 * opening.MEGABYTE
_LARGEST_TABLE = 4 * opening.MEGABYTE
_MOST_HITS = 10_000_000  # draws times images that are computed with
_MOST_PENALTIES = 10_000
_MOST_CLUSTERS = 3_000  # more would take minutes to match with classes
_KEPT_LISTS = 64  # of at most a million images each, in memory
_LONGEST_KEPT_LIST = 10**6
# Kind of recipe -> the key of `chosen` that has the choice, and of the recipe that has the grid;
# both are "lr" for any other kind
_CHOSEN_BY = {
    "layers": "reading",
    "logreg": "l2",
    "multilabel": "l2",
    "seg_knn": "k",
}
_GRID_KEYS = {"finetune": "head_lr", "seg_knn": "k"}
_DIGEST = re.compile(r"[0-9a-f]{64}")
# As `Assignment.stem` ends the names of kept files (transfer/assignment.py)
_KEPT_NAME = re.compile(r"-s(-?\d+)-([0-9a-f]{12})\.npz$")
_COUNTS = re.compile(r"(train_)?top[15](_.*)?")  # metrics that count images
# What a stranger's record may provoke by a value of another type than it has here
_ODD = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, csv.Error)

# An older version may have computed an interval otherwise, and `rescore` leaves known rows alone
_SCORE_AGAIN = (
    "; if an older version made it, take this line out of the file and `backbench rescore`"
    " again"
)


class RowVerdict(NamedTuple):
    level: int
    why: str = ""  # the reason why the row does not stand; empty where it does


class _Unfit(Exception):
    """A row says something that does not follow."""


def of_run(rows: Sequence[Result], run: Path) -> list[RowVerdict]:
    """Return the verdict on each row of one results file, whose kept files lie below `run`."""
    now = time.time()
    verdicts = []
    # A file of scores gives a dozen rows, one behind the other
    load_scores = functools.lru_cache(maxsize=1)(kept_scores.load)
    for r in rows:
        try:
            _refuse_identity(r, now)
            level = _level(r, run, load_scores)
            _refuse_impossible(r)
            _refuse_choice(r)
            verdicts.append(RowVerdict(level))
        except _Unfit as error:
            why = str(error)
            if r.task == clean_test.TASK:
                why += _SCORE_AGAIN
            verdicts.append(RowVerdict(UNBACKED, why))
        except _ODD as error:
            why = printable.shown(" ".join(str(error).split()), 100)
            verdicts.append(
                RowVerdict(UNBACKED, f"it cannot be computed again ({why})")
            )
    for n, why in _contradictions(rows, verdicts):
        verdicts[n] = RowVerdict(UNBACKED, why)
    return verdicts


# ---- what a row says of itself


def _refuse_identity(r: Result, now: float) -> None:
    """Raise _Unfit for a checkpoint without a digest, or a date that has not come."""
    if not _DIGEST.fullmatch(r.checkpoint):
        raise _Unfit(f"checkpoint '{printable.shown(r.checkpoint, 20)}' is no digest")
    recorded = r.origin.get("recorded")
    if recorded is not None and not 0 <= recorded <= now + _CLOCKS:
        raise _Unfit(f"it was recorded in the future or before 1970 ({recorded:.0f} s)")


def _refuse_impossible(r: Result) -> None:
    """Raise _Unfit for a number that no measurement gives."""
    value = r.value
    ci95 = r.ci95
    # 1. A value that is undefined has no interval; a share lies between 0 and 100, and in its
    #    interval.
    if value is None:
        if ci95 is not None:
            raise _Unfit("an undefined value has no interval")
        return
    is_share = TASKS[r.task].ranked
    if is_share and not 0 <= value <= 100 + _ALIKE:
        raise _Unfit(f"{value:g} is no percentage")
    if ci95 is not None:
        low, high = ci95
        if not low - _ALIKE <= value <= high + _ALIKE:
            raise _Unfit(
                f"its interval {_shown(ci95)} does not hold its value {value:.4f}"
            )
        if is_share and not (low >= -_ALIKE and high <= 100 + _ALIKE):
            raise _Unfit(f"its interval {_shown(ci95)} leaves 0 to 100")
    # 2. It is the mean of its draws, and of as many as the recipe plans.
    count_of_draws = 1
    draws = r.provenance.get("draws")
    if isinstance(draws, list):
        count_of_draws = len(draws)
        recipe = r.facts.get("recipe") or {}
        planned = recipe.get("draws", len(draws))
        if len(draws) != planned:
            raise _Unfit(f"it has {len(draws)} draws, its recipe {planned}")
        if not draws or abs(sum(draws) / len(draws) - value) > _ALIKE:
            raise _Unfit(f"it says {value}, the mean of its draws is another")
    # 3. A metric that counts images is a whole number of them.
    images = r.facts.get("images")
    if _COUNTS.fullmatch(r.metric) and isinstance(images, dict):
        count = _tested(r, images) * count_of_draws
        right = value * count / 100
        if count and abs(right - round(right)) > max(_ALIKE, 1e-11 * count):
            raise _Unfit(f"{value:g} is no share of {count} images")


def _tested(r: Result, images: Mapping[str, int | None]) -> int:
    """Return how many images a probe's row was scored on; 0 where it does not say."""
    splits = ("train", "val") if r.split == "train" else (r.split,)
    return sum(images.get(split) or 0 for split in splits)


def _refuse_other_number(r: Result, what: str, images: int) -> None:
    """Raise _Unfit if the row says that it was scored on another number of images."""
    by_split = r.facts.get("images")
    if not isinstance(by_split, dict):
        return
    listed = _tested(r, by_split)
    if listed != images:
        raise _Unfit(f"its {what} are of {images} images, its list has {listed}")


def _shown(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.4f}, {interval[1]:.4f}]"


def _refuse_choice(r: Result) -> None:
    """Raise _Unfit if what was chosen is not the best of its scores, or not on the recipe's grid."""
    chosen: Mapping[str, Any] = r.chosen or {}
    recipe = r.facts.get("recipe") or {}
    noise = chosen.get("choice_noise", 0)
    if not isinstance(noise, int | float) or not 0 <= noise <= 100:
        raise _Unfit(
            f"its choice_noise {str(noise)[:20]!r} is no number of points from 0 to 100"
        )
    name = _CHOSEN_BY.get(str(recipe.get("kind")), "lr")
    if name not in chosen:
        return
    # 1. What was chosen, and what could be, in the words of the keys of `scores`.
    best = str(chosen[name]) if name == "reading" else f"{chosen[name]:g}"
    grid = [f"{value:g}" for value in _grid(recipe)]
    decays = recipe.get("weight_decays") or ()
    if len(decays) > 1:  # chosen together with the rate
        best += f" wd {chosen.get('weight_decay', math.nan):g}"
        grid = [f"{lr} wd {decay:g}" for lr in grid for decay in decays]
    if name == "k":
        best += f" {chosen.get('distance')}"
        grid = [f"{k} {distance}" for k in grid for distance in recipe["distances"]]
    if grid and best not in grid:
        raise _Unfit(
            f"its {name} {best} is not on its recipe's grid ({', '.join(grid)[:80]})"
        )
    # 2. A rate is used in proportion to the batch.
    if "lr_used" in chosen and chosen.get("batch_size"):
        used = chosen[name] * chosen["batch_size"] / chosen["reference_batch"]
        if not math.isclose(used, chosen["lr_used"], rel_tol=1e-9):
            raise _Unfit(f"its rate as used is {used:g}, it says {chosen['lr_used']}")
    # 3. The scores are of the grid, and the best of them was chosen.
    scores = chosen.get("scores")
    if not isinstance(scores, dict) or not scores:
        return
    if grid and set(grid) != set(scores):
        raise _Unfit(
            f"its scores are not of its recipe's grid ({', '.join(grid)[:80]})"
        )
    # Of equal scores the first of the grid counts: the smallest rate, the strongest penalty.
    # Without a grid nobody knows their order.
    highest = max(grid or scores, key=scores.__getitem__)
    is_best = best == highest if grid else scores[best] == scores[highest]
    if not is_best:
        raise _Unfit(f"its {name} {best} is not the best of its scores, {highest} is")
    if min(scores.values()) < 0 or max(scores.values()) > 100:
        raise _Unfit("one of its scores is no percentage")
    # 4. Chosen on test, the score of the choice is the value.
    is_chosen_by = chosen.get("on") == "test" and r.metric != "top5"
    if is_chosen_by and r.value is not None and abs(scores[best] - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, it was chosen on test with {scores[best]}")


def _grid(recipe: Mapping[str, Any]) -> list[float]:
    """Return the rates, penalties or numbers of neighbours of a recipe; of equals the first is
    chosen."""
    kind = str(recipe.get("kind"))
    if _CHOSEN_BY.get(kind) == "l2":
        smallest, largest, count = recipe["l2"]
        if count > _MOST_PENALTIES:
            raise _Unfit(f"its recipe has {count} penalties")
        # Evenly spaced on a logarithmic scale, the strongest penalty first
        low = math.log10(smallest)
        high = math.log10(largest)
        steps = max(count - 1, 1)
        return [10 ** (high - (high - low) * i / steps) for i in range(count)]
    values = recipe.get(_GRID_KEYS.get(kind, "lr"))
    return list(values) if isinstance(values, list | tuple) else []


def _contradictions(
    rows: Sequence[Result], verdicts: Sequence[RowVerdict]
) -> Iterator[tuple[int, str]]:
    """Return (index, reason) of rows that cannot be true beside another row of their run."""
    together: dict[tuple[object, ...], dict[str, int]] = {}  # metric -> its row
    owners: dict[str, tuple[object, ...]] = {}  # of files of predictions
    for n, r in enumerate(rows):
        if verdicts[n].why:
            continue
        number = (
            r.checkpoint,
            r.task,
            r.dataset,
            r.split,
            r.protocol,
            r.engine,
            r.seed,
        )
        file = r.facts.get("predictions")
        if file is not None:
            # One file may be written in many ways: a/./b, a//b.
            owner = owners.setdefault(os.path.normpath(file), number)
            if owner != number:
                shown = printable.shown(file, 80)
                yield n, f"its predictions '{shown}' are another number's"
                continue
        if r.value is not None:
            together.setdefault(number, {})[r.metric] = n
    for by_metric in together.values():
        for low in by_metric:
            high, slack = _never_less(low)
            if high not in by_metric:
                continue
            a = rows[by_metric[low]].value or 0.0
            b = rows[by_metric[high]].value or 0.0
            if a > b + slack:
                why = f"{low} {a:g} is above {high} {b:g} of the same run"
                yield by_metric[low], why
                yield by_metric[high], why


@functools.lru_cache(maxsize=1024)
def _never_less(metric: str) -> tuple[str, float]:
    """Return the metric that must be at least as high, or "", and by how much it may still be
    lower."""
    if metric.startswith("top1"):
        return metric.replace("top1", "top5", 1), _ALIKE
    kind, _, name = metric.rpartition("_")
    if name in ("AP", "AP75"):
        return f"{kind}_AP50", _AP_ORDER
    return "", 0.0


# ---- what was kept


def _level(r: Result, run: Path, load_scores: Callable[[Path], Arrays | None]) -> int:
    """Return the level at which a row is computed again; raise _Unfit where it does not follow."""
    # 1. The file of predictions, which must be this number's.
    if TASKS[r.task].from_scores:
        return _of_scores(r, run, load_scores)
    name = r.facts.get("predictions")
    if name is None:
        return UNBACKED
    arrays = load(run / name)
    if arrays is None:
        return UNBACKED
    kept = _KEPT_NAME.search(name)
    if kept and (int(kept[1]), kept[2]) != (r.seed, r.checkpoint[:12]):
        raise _Unfit(
            f"its predictions '{printable.shown(name, 80)}' are another number's"
        )
    _refuse_other_list(r, arrays)
    if TASKS[r.task].from_predictions:
        return _FROM_PREDICTIONS[r.task](r, run, arrays)
    if TASKS[r.task].explains:
        return _of_ap_errors(r, arrays)
    # 2. Numbers that no list of right images gives.
    if TASKS[r.task].detects:
        return _of_resamples(r, arrays)
    if r.metric in dense_counts.METRICS and dense_counts.NAMES[0] in arrays:
        return _of_counts(r, arrays)
    if TASKS[r.task].multilabel:
        return _of_label_tables(r, run, arrays)
    right = hits(arrays, r.metric)
    if right is None:
        return _of_test_images(r, run, arrays)
    # 3. Shares of right images: their number, value, interval and table of classes.
    if right.size > _MOST_HITS:
        raise _Unfit(f"{right.size} hits are more than any test list has")
    _refuse_other_count(r, arrays, right)
    again = resamples.value_again(arrays, r.metric)
    if again is None or r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its predictions give {again:.4f}")
    label = arrays.get("label") if r.metric.startswith("mean_per_class") else None
    interval = confidence.of_hits(right, label) if right.ndim == 1 else None
    _refuse_other_interval(r, interval or confidence.of_draws(right, label))
    _refuse_other_classes(r, run, arrays)
    return _of_listed_labels(r, run, arrays)


def _of_scores(
    r: Result, run: Path, load_scores: Callable[[Path], Arrays | None]
) -> int:
    """Return the level of a number that kept scores give."""
    name = r.facts.get("scores")
    if name is None:
        return UNBACKED
    arrays = load_scores(run / name)
    if arrays is None or r.metric not in kept_scores.names(arrays):
        return UNBACKED
    _refuse_other_list(r, arrays)
    differs = kept_scores.owner(arrays, r)  # "checkpoint", "head", ...
    if differs:
        raise _Unfit(
            f"its scores '{printable.shown(name, 80)}' are another {differs}'s"
        )
    again, interval = kept_scores.value(arrays, r.metric)
    if r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its scores give {again:.6f}")
    _refuse_other_interval(r, interval)
    if "rule" in (r.facts.get("recipe") or {}):
        # Labels are columns of the rule's logits, and not those of the list.
        return FROM_KEPT
    return _of_listed_labels(r, run, arrays)


def _of_clean_test(r: Result, run: Path, arrays: Arrays) -> int:
    """Return the level to which its predictions back a score on a clean test set, or the score's
    difference from that on the full one."""
    right = hits(arrays, clean_test.full_metric(r.metric)[1])
    if right is None:
        return UNBACKED
    if right.size > _MOST_HITS:
        raise _Unfit(f"{right.size} hits are more than any test list has")
    _refuse_other_count(r, arrays, right)
    fault = clean_test.fault(arrays, r)
    if fault:
        raise _Unfit(fault)
    computed, interval = clean_test.value(arrays, r.metric)
    if r.value is None or abs(computed - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its predictions give {computed:.4f}")
    _refuse_other_interval(r, interval)
    return _of_listed_labels(r, run, arrays)


# Tasks whose numbers follow from kept predictions and what is known of the images
_FROM_PREDICTIONS = {clean_test.TASK: _of_clean_test}


def _of_label_tables(r: Result, run: Path, arrays: Arrays) -> int:
    """Return the level of a score of images that show several classes. The kept scores and classes
    must give it."""
    why = label_tables.fault(arrays, r.metric)
    if why:
        raise _Unfit(why)
    table = arrays["table"]
    _refuse_other_number(r, "scores", len(table))
    again, interval = label_tables.value(arrays, r.metric)
    if r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its scores give {again:.4f}")
    _refuse_other_interval(r, interval)
    content = list_content(str(arrays["manifest"]), list_files(r, run))
    if content is None:
        return FROM_KEPT
    lines = content.decode(errors="replace").removesuffix("\n").split("\n")
    marks = [line.rpartition("\t")[2] for line in lines]
    if not np.array_equal(table_of(marks, table.shape[1]), table):
        raise _Unfit(
            "the classes beside its scores are not those of its list of images"
        )
    return FROM_LIST


def _of_ap_errors(r: Result, arrays: Arrays) -> int:
    """Return the level of a row that says how much AP a kind of error costs. The kept verdict on each
    detection must give it."""
    why = ap_errors.fault(arrays, r.metric)
    if why:
        raise _Unfit(why)
    _refuse_other_val(r, "detections", int(arrays["images"]))
    again = ap_errors.value(arrays, r.metric)
    if r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its detections give {again:.4f}")
    _refuse_other_interval(r, None)
    return FROM_KEPT


def _refuse_other_val(r: Result, what: str, images: int) -> None:
    """Raise _Unfit if a detector's row says that it was scored on another number of images."""
    count = r.facts.get("val", "").rpartition(":")[2]
    if count.isdigit() and int(count) != images:
        raise _Unfit(f"its {what} are of {images} images, its list has {count}")


def _refuse_other_list(r: Result, arrays: Arrays) -> None:
    """Raise _Unfit if predictions are of another list of images than the row says."""
    stated = data_manifests.scored_list(r)
    kept = str(arrays["manifest"])
    if stated and kept != stated:
        raise _Unfit(f"its predictions are of list {kept[:12]}, it says {stated[:12]}")


def _of_resamples(r: Result, arrays: Arrays) -> int:
    """Return the level of an AP. Its resamples must lie around it and give its interval."""
    draws = arrays.get(f"bootstrap_{r.metric}")
    if draws is None or "images" not in arrays:
        return UNBACKED
    # 1. As many resamples as ours have, of as many images as the list.
    if len(draws) != resampling.AP_COUNT:
        raise _Unfit(f"it has {len(draws)} resamples of {resampling.AP_COUNT}")
    images = int(arrays["images"])
    _refuse_other_val(r, "resamples", images)
    # 2. Their mean lies near the value (see _AP_CHANCE).
    defined = draws[np.isfinite(draws)].astype(float)
    if r.value is None or not len(defined):
        return UNBACKED
    spread = float(defined.std())
    gap = float(defined.mean()) - r.value
    below = _AP_CHANCE + _AP_BELOW / math.sqrt(images)
    above = _AP_CHANCE + _AP_ABOVE / math.sqrt(images)
    if not -below * spread - _ALIKE <= gap <= above * spread + _ALIKE:
        raise _Unfit(
            f"it says {r.value:.4f}, its resamples have a mean of {defined.mean():.4f}"
        )
    # 3. They give its interval.
    interval = confidence.of_resamples(r.value / 100, draws / 100, images)
    _refuse_other_interval(r, interval)
    return FROM_KEPT


def _of_counts(r: Result, arrays: Arrays) -> int:
    """Return the level of a score of label maps. The kept counts of pixels must give it and its
    interval."""
    images = int(arrays["images"])
    _refuse_other_number(r, "counts", images)
    counts = [arrays[name].sum(0, dtype=float) for name in dense_counts.NAMES]
    again = 100 * float(dense_counts.scores(*counts)[r.metric])
    if r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its counts of pixels give {again:.4f}")
    interval = None
    if r.metric in dense_counts.COVERED:
        drawn = arrays[f"bootstrap_{r.metric}"] / 100
        interval = confidence.of_resamples(r.value / 100, drawn, images)
    _refuse_other_interval(r, interval)
    return FROM_KEPT


def _of_test_images(r: Result, run: Path, arrays: Arrays) -> int:
    """Return the level of retrieval (a score for each query) and of clusters."""
    label = arrays.get("label")
    if label is None or label.size > _MOST_HITS:
        return UNBACKED
    _refuse_other_number(r, "predictions", label.size)
    queries = arrays.get(f"queries_{r.metric}")
    if queries is not None:
        again = _mean_of_queries(label, queries)
    elif "cluster" in arrays and r.metric in partitions.METRICS:
        classes = len(np.unique(label))
        clusters = len(np.unique(arrays["cluster"]))
        if max(classes, clusters) > _MOST_CLUSTERS:
            return UNBACKED
        again = partitions.agreement(label, arrays["cluster"])[r.metric]
    else:
        return UNBACKED
    if r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its predictions give {again:.4f}")
    _refuse_other_interval(r, None)
    return _of_listed_labels(r, run, arrays)


def _mean_of_queries(label: np.ndarray, queries: np.ndarray) -> float:
    """Return the mean score of the queries (N,), in percent: images whose class has others; nan
    elsewhere."""
    _, own, size = np.unique(label, return_inverse=True, return_counts=True)
    has_others = size[own] > 1
    if not np.array_equal(np.isnan(queries), ~has_others):
        raise _Unfit("its queries are not the images whose class has others")
    inside = queries[has_others]
    if not inside.size:
        raise _Unfit("no class has two test images, so there is no query")
    if not ((inside >= 0) & (inside <= 1)).all():
        raise _Unfit("one of its queries' scores is not between 0 and 1")
    return 100 * float(inside.mean())


def _refuse_other_interval(r: Result, again: tuple[float, float] | None) -> None:
    """Raise _Unfit if the row has another interval than what was kept gives."""
    if again is None or r.ci95 is None:
        if again is not r.ci95:
            raise _Unfit(f"its interval is {r.ci95}, what was kept gives {again}")
    elif max(abs(a - b) for a, b in zip(again, r.ci95)) > _ALIKE:
        raise _Unfit(
            f"its interval is {_shown(r.ci95)}, what was kept gives {_shown(again)}"
        )


def _refuse_other_count(r: Result, arrays: Arrays, right: np.ndarray) -> None:
    """Raise _Unfit if images or draws are missing, or draws have other values."""
    images = r.facts.get("images")
    count = _tested(r, images) if isinstance(images, dict) else 0
    if count and right.shape[-1] != count:
        raise _Unfit(
            f"its predictions are of {right.shape[-1]} images, its list has {count}"
        )
    if right.ndim == 1:
        best = hits(arrays, "top1")
        five_best = arrays.get("hits5")
        if best is None or five_best is None:
            return
        if (best & (five_best == 0)).any():
            raise _Unfit("an image is right by its best class and not by its five best")
        return
    # Draws of labels: as many as planned, and with the values that the row and the file state.
    recipe = r.facts.get("recipe") or {}
    planned = recipe.get("draws", len(right))
    if len(right) != planned:
        raise _Unfit(
            f"its predictions are of {len(right)} draws, its recipe has {planned}"
        )
    by_draw = 100 * right @ resamples.weights(arrays, r.metric)
    facts: Mapping[str, Any] = r.provenance
    for values in (arrays.get("values"), facts.get("draws")):
        if values is None:
            continue
        if len(values) != len(by_draw) or not np.allclose(
            values, by_draw, rtol=0, atol=_ALIKE
        ):
            raise _Unfit(
                f"its {len(values)} draws are not the {len(by_draw)} of its predictions"
            )


def _refuse_other_classes(r: Result, run: Path, arrays: Arrays) -> None:
    """Raise _Unfit if the table of classes beside the predictions counts other images."""
    name = r.facts.get("per_class")
    if name is None or arrays["prediction"].ndim != 1:
        return
    try:
        text = opening.read_bytes(run / name, most=_LARGEST_TABLE).decode()
    except (OSError, UnicodeDecodeError):
        return
    images = []  # of each class
    right = []  # how many of them are classified as it
    for row in csv.DictReader(io.StringIO(text)):
        images.append(int(row["images"]))
        right.append(int(row["right"]))
    label = arrays["label"]
    hit = label[arrays["prediction"] == label]
    classes = len(images)
    fits = (
        0 <= label.min() <= label.max() < classes
        and np.array_equal(images, np.bincount(label, minlength=classes))
        and np.array_equal(right, np.bincount(hit, minlength=classes))
    )
    if not fits:
        raise _Unfit(
            f"its table of classes '{printable.shown(name, 80)}' counts other images"
        )


# ---- lists of images


def _of_listed_labels(r: Result, run: Path, arrays: Arrays) -> int:
    """Return the level of predictions, whose labels must be those of the list where it is there."""
    listed = _labels(str(arrays["manifest"]), list_files(r, run))
    if listed is None:
        return FROM_KEPT
    if not np.array_equal(arrays["label"], listed):
        raise _Unfit(
            "the labels beside its predictions are not those of its list of images"
        )
    return FROM_LIST


def list_files(r: Result, run: Path) -> tuple[Path, ...]:
    """Return the files that may hold the list of a row's test images: in its run, or in a corpus
    above."""
    manifest = (r.facts.get("manifests") or {}).get("test") or ""
    own = run / "manifests" / f"{printable.part(r.dataset)}-test.tsv"
    if not _DIGEST.fullmatch(manifest):
        return (own,)
    name = f"{manifest}.tsv.gz"
    return (own, *(folder / LISTS / name for folder in (run, *run.parents)[:8]))


def list_content(manifest: str, files: Sequence[Path]) -> bytes | None:
    """Return the list of that digest, as 'path<TAB>label' lines; None where no file holds it."""
    for file in files:
        try:
            content = opening.read_bytes(file, most=_LARGEST_LIST)
            if file.suffix == ".gz":
                with gzip.open(io.BytesIO(content)) as packed:
                    content = packed.read(_LARGEST_LIST + 1)
        except (OSError, EOFError, zlib.error):
            continue
        if hashlib.sha256(content).hexdigest() == manifest:
            return content
    return None


_lists: dict[str, np.ndarray] = {}  # digest -> labels: the same wherever the list lies


def _labels(manifest: str, files: Sequence[Path]) -> np.ndarray | None:
    """Return the labels of the list of that digest (N,); None where no file holds it."""
    if manifest in _lists:
        return _lists[manifest]
    content = list_content(manifest, files)
    if content is None:
        return None
    lines = content.decode(errors="replace").removesuffix("\n").split("\n")
    labels = np.array([int(line.rpartition("\t")[2]) for line in lines])
    if len(_lists) < _KEPT_LISTS and len(labels) <= _LONGEST_KEPT_LIST:
        _lists[manifest] = labels
    return labels
