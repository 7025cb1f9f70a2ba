"""Verifies records: every number is computed again from what was kept beside it. `of_run` gives
each row of a results.jsonl a level, or why it fails. It reads only the folder: no torch, no images.
A forgery that agrees with itself (predictions, value and interval) is not seen."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from backbench.records import data_manifests, kept_scores
from backbench.records.predictions import Arrays, hits, load
from backbench.records.result_line import Result
from backbench.stats import confidence, dense_counts, partitions, resampling
from backbench.tasks import TASKS
from backbench.untrusted import opening, printable
from backbench.verify import resamples

LISTS = "lists"  # folder of a corpus: <sha256>.tsv.gz, each list of images once
FROM_LIST, FROM_KEPT, UNBACKED = 3, 2, 1
LEVELS = {
    FROM_LIST: "value and interval computed again from kept predictions, over the list of images",
    FROM_KEPT: "value and interval agree with what was kept; the list of images is not here",
    UNBACKED: "nothing was kept to compute it again from: it never leads",
}
_ALIKE = 1e-6  # percent: a number computed again
_CLOCKS = 3600  # seconds by which two machines' clocks may differ
# How far the mean of an AP's resamples may lie below and above it, in their standard deviations:
# _AP_CHANCE, and as much over the root of the number of images. It lies above the AP, by 0.0 to 0.9
# in the demo's 30 APs of 40 images (docs/demo/records); a bootstrap's bias falls with 1 / images,
# its spread with the root, and the mean of 500 resamples is known to 0.045 of the spread.
_AP_CHANCE, _AP_BELOW, _AP_ABOVE = 0.25, 3.0, 12.0
_AP_ORDER = (
    0.1  # percent: a stricter overlap may by chance of matching give so much more
)
_LARGEST_LIST, _LARGEST_TABLE = 16 * opening.MEGABYTE, 4 * opening.MEGABYTE
_MOST_HITS = 10_000_000  # draws times images that are computed with
_MOST_PENALTIES = 10_000
_MOST_CLUSTERS = 3_000  # more would take minutes to match with classes
_KEPT_LISTS = 64  # of at most a million images, in memory
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEPT_NAME = re.compile(
    r"-s(-?\d+)-([0-9a-f]{12})\.npz$"
)  # as scoring.py ends its names
_COUNTS = re.compile(r"(train_)?top[15](_.*)?")  # metrics that count images
# What a stranger's record may provoke by a value of another type than it has here
_ODD = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, csv.Error)


class RowVerdict(NamedTuple):
    level: int
    why: str = ""  # the reason why the row does not stand; empty where it does


class _Unfit(Exception):
    """A row says something that does not follow."""


def of_run(rows: Sequence[Result], run: Path) -> list[RowVerdict]:
    """The verdict on each row of one results file, whose kept files lie below `run`."""
    now = time.time()
    verdicts = []
    for r in rows:
        try:
            _refuse_identity(r, now)
            level = _level(r, run)
            _refuse_impossible(r)
            _refuse_choice(r)
            verdicts.append(RowVerdict(level))
        except _Unfit as error:
            verdicts.append(RowVerdict(UNBACKED, str(error)))
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
    """Raises _Unfit for a checkpoint without a digest, or a date that has not come."""
    if not _DIGEST.fullmatch(r.checkpoint):
        raise _Unfit(f"checkpoint '{printable.shown(r.checkpoint, 20)}' is no digest")
    recorded = r.origin.get("recorded")
    if recorded is not None and not 0 <= recorded <= now + _CLOCKS:
        raise _Unfit(f"it was recorded in the future or before 1970 ({recorded:.0f} s)")


def _refuse_impossible(r: Result) -> None:
    """Raises _Unfit for a number that no measurement gives."""
    value, ci95, ranked = r.value, r.ci95, TASKS[r.task].ranked
    if value is None:
        if ci95 is not None:
            raise _Unfit("an undefined value has no interval")
        return
    if ranked and not 0 <= value <= 100 + _ALIKE:
        raise _Unfit(f"{value:g} is no percentage")
    if ci95 is not None:
        if not ci95[0] - _ALIKE <= value <= ci95[1] + _ALIKE:
            raise _Unfit(
                f"its interval {_shown(ci95)} does not hold its value {value:.4f}"
            )
        if ranked and not (ci95[0] >= -_ALIKE and ci95[1] <= 100 + _ALIKE):
            raise _Unfit(f"its interval {_shown(ci95)} leaves 0 to 100")
    facts = r.provenance
    draws = facts.get("draws")
    if isinstance(draws, list):
        planned = (r.facts.get("recipe") or {}).get("draws", len(draws))
        if len(draws) != planned:
            raise _Unfit(f"it has {len(draws)} draws, its recipe {planned}")
        if not draws or abs(sum(draws) / len(draws) - value) > _ALIKE:
            raise _Unfit(f"it says {value}, the mean of its draws is another")
    images = r.facts.get("images")
    if _COUNTS.fullmatch(r.metric) and isinstance(images, dict):
        count = _tested(r, images) * (len(draws) if isinstance(draws, list) else 1)
        right = value * count / 100
        if count and abs(right - round(right)) > max(_ALIKE, 1e-11 * count):
            raise _Unfit(f"{value:g} is no share of {count} images")


def _tested(r: Result, images: Mapping[str, int | None]) -> int:
    """How many images a probe's row was scored on; 0 where it does not say."""
    splits = ("train", "val") if r.split == "train" else (r.split,)
    return sum(images.get(split) or 0 for split in splits)


def _refuse_other_number(r: Result, what: str, images: int) -> None:
    """Raises _Unfit if the row says that it was scored on another number of images."""
    by_split = r.facts.get("images")
    if isinstance(by_split, dict) and (listed := _tested(r, by_split)) != images:
        raise _Unfit(f"its {what} are of {images} images, its list has {listed}")


def _shown(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.4f}, {interval[1]:.4f}]"


def _refuse_choice(r: Result) -> None:
    """Raises _Unfit if what was chosen is not the best of its scores, or not on the recipe's grid."""
    chosen: Mapping[str, Any] = r.chosen or {}
    recipe = r.facts.get("recipe") or {}
    noise = chosen.get("choice_noise", 0)
    if not isinstance(noise, int | float) or not 0 <= noise <= 100:
        raise _Unfit(
            f"its choice_noise {str(noise)[:20]!r} is no number of points from 0 to 100"
        )
    name = {"logreg": "l2", "seg_knn": "k"}.get(str(recipe.get("kind")), "lr")
    if name not in chosen:
        return
    grid = [f"{value:g}" for value in _grid(recipe)]
    best, scores = f"{chosen[name]:g}", chosen.get("scores")
    if (
        len(decays := recipe.get("weight_decays") or ()) > 1
    ):  # chosen together with the rate
        grid = [f"{lr} wd {decay:g}" for lr in grid for decay in decays]
        best = f"{best} wd {chosen.get('weight_decay', math.nan):g}"
    if name == "k":
        grid = [f"{k} {distance}" for k in grid for distance in recipe["distances"]]
        best = f"{best} {chosen.get('distance')}"
    if grid and best not in grid:
        raise _Unfit(
            f"its {name} {best} is not on its recipe's grid ({', '.join(grid)[:80]})"
        )
    if "lr_used" in chosen and chosen.get("batch_size"):
        used = chosen[name] * chosen["batch_size"] / chosen["reference_batch"]
        if not math.isclose(used, chosen["lr_used"], rel_tol=1e-9):
            raise _Unfit(f"its rate as used is {used:g}, it says {chosen['lr_used']}")
    if not isinstance(scores, dict) or not scores:
        return
    order = grid or list(scores)
    if set(order) != set(scores):
        raise _Unfit(
            f"its scores are not of its recipe's grid ({', '.join(order)[:80]})"
        )
    # Of equal scores the first counts: the smallest rate, the strongest penalty
    highest = max(order, key=scores.__getitem__)
    if not (best == highest if grid else scores[best] == scores[highest]):
        raise _Unfit(f"its {name} {best} is not the best of its scores, {highest} is")
    if min(scores.values()) < 0 or max(scores.values()) > 100:
        raise _Unfit("one of its scores is no percentage")
    main = chosen.get("on") == "test" and r.metric != "top5" and r.value is not None
    if main and abs(scores[best] - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, it was chosen on test with {scores[best]}")


def _grid(recipe: Mapping[str, Any]) -> list[float]:
    """The rates, penalties or numbers of neighbours of a recipe; of equals the first is chosen."""
    if recipe.get("kind") == "logreg":
        smallest, largest, count = recipe["l2"]
        if count > _MOST_PENALTIES:
            raise _Unfit(f"its recipe has {count} penalties")
        low, high = math.log10(smallest), math.log10(largest)
        return [
            10 ** (high - (high - low) * i / max(count - 1, 1)) for i in range(count)
        ]
    rates = recipe.get(
        {"finetune": "head_lr", "seg_knn": "k"}.get(str(recipe.get("kind")), "lr")
    )
    return list(rates) if isinstance(rates, list | tuple) else []


def _contradictions(
    rows: Sequence[Result], verdicts: Sequence[RowVerdict]
) -> Iterator[tuple[int, str]]:
    """(index, reason) of rows that cannot be true beside another row of their run."""
    together: dict[tuple[object, ...], dict[str, int]] = {}
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
        # One file may be written in many ways: a/./b, a//b
        if (
            file is not None
            and owners.setdefault(os.path.normpath(file), number) != number
        ):
            yield (
                n,
                f"its predictions '{printable.shown(file, 80)}' are another number's",
            )
        elif r.value is not None:
            together.setdefault(number, {})[r.metric] = n
    for metrics in together.values():
        for low in metrics:
            high, slack = _never_less(low)
            if high not in metrics:
                continue
            a, b = rows[metrics[low]].value or 0.0, rows[metrics[high]].value or 0.0
            if a > b + slack:
                why = f"{low} {a:g} is above {high} {b:g} of the same run"
                yield from ((metrics[low], why), (metrics[high], why))


@functools.lru_cache(maxsize=1024)
def _never_less(metric: str) -> tuple[str, float]:
    """The metric that must be at least as high, or "", and by how much it may still be lower."""
    if metric.startswith("top1"):
        return metric.replace("top1", "top5", 1), _ALIKE
    kind, _, name = metric.rpartition("_")
    return (f"{kind}_AP50", _AP_ORDER) if name in ("AP", "AP75") else ("", 0.0)


# ---- what was kept


def _level(r: Result, run: Path) -> int:
    """The level at which a row is computed again; raises _Unfit where it does not follow."""
    if TASKS[r.task].from_scores:
        return _of_scores(r, run)
    name = r.facts.get("predictions")
    arrays = load(run / name) if name is not None else None
    if name is None or arrays is None:
        return UNBACKED
    kept = _KEPT_NAME.search(name)
    if kept and (int(kept[1]), kept[2]) != (r.seed, r.checkpoint[:12]):
        raise _Unfit(
            f"its predictions '{printable.shown(name, 80)}' are another number's"
        )
    _refuse_other_list(r, arrays)
    if TASKS[r.task].detects:
        return _of_resamples(r, arrays)
    if r.metric in dense_counts.METRICS and dense_counts.NAMES[0] in arrays:
        return _of_counts(r, arrays)
    right = hits(arrays, r.metric)
    if right is None:
        return _of_test_images(r, run, arrays)
    if right.size > _MOST_HITS:
        raise _Unfit(f"{right.size} hits are more than any test list has")
    _refuse_other_count(r, arrays, right)
    label = arrays.get("label") if r.metric.startswith("mean_per_class") else None
    again = resamples.value_again(arrays, r.metric)
    if again is None or r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its predictions give {again:.4f}")
    interval = confidence.of_hits(right, label) if right.ndim == 1 else None
    _refuse_other_interval(r, interval or confidence.of_draws(right, label))
    _refuse_other_classes(r, run, arrays)
    return _of_listed_labels(r, run, arrays)


def _of_scores(r: Result, run: Path) -> int:
    """The level of a number that kept scores give."""
    name = r.facts.get("scores")
    arrays = kept_scores.load(run / name) if name is not None else None
    if arrays is None or r.metric not in kept_scores.names(arrays):
        return UNBACKED
    _refuse_other_list(r, arrays)
    if other := kept_scores.owner(arrays, r):
        raise _Unfit(
            f"its scores '{printable.shown(str(name), 80)}' are another {other}'s"
        )
    again, interval = kept_scores.value(arrays, r.metric)
    if r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its scores give {again:.6f}")
    _refuse_other_interval(r, interval)
    # Labels count the columns of a rule's logits, where there is a rule
    whole = "rule" not in (r.facts.get("recipe") or {})
    return _of_listed_labels(r, run, arrays) if whole else FROM_KEPT


def _refuse_other_list(r: Result, arrays: Arrays) -> None:
    stated = data_manifests.scored_list(r)
    kept = str(arrays["manifest"])
    if stated and kept != stated:
        raise _Unfit(f"its predictions are of list {kept[:12]}, it says {stated[:12]}")


def _of_resamples(r: Result, arrays: Arrays) -> int:
    """The level of an AP: its resamples must lie around it and give its interval."""
    draws = arrays.get(f"bootstrap_{r.metric}")
    if draws is None or "images" not in arrays:
        return UNBACKED
    if len(draws) != resampling.AP_COUNT:
        raise _Unfit(f"it has {len(draws)} resamples of {resampling.AP_COUNT}")
    images = int(arrays["images"])
    count = r.facts.get("val", "").rpartition(":")[2]
    if count.isdigit() and int(count) != images:
        raise _Unfit(f"its resamples are of {images} images, its list has {count}")
    defined = draws[np.isfinite(draws)].astype(float)
    if r.value is None or not len(defined):
        return UNBACKED
    spread, gap = float(defined.std()), float(defined.mean()) - r.value
    below, above = (
        _AP_CHANCE + bias / math.sqrt(images) for bias in (_AP_BELOW, _AP_ABOVE)
    )
    if not -below * spread - _ALIKE <= gap <= above * spread + _ALIKE:
        raise _Unfit(
            f"it says {r.value:.4f}, its resamples have a mean of {defined.mean():.4f}"
        )
    _refuse_other_interval(
        r, confidence.of_resamples(r.value / 100, draws / 100, images)
    )
    return FROM_KEPT


def _of_counts(r: Result, arrays: Arrays) -> int:
    """The level of a score of label maps: the counts of pixels give it and its interval."""
    images = int(arrays["images"])
    _refuse_other_number(r, "counts", images)
    counts = [arrays[name].sum(0, dtype=float) for name in dense_counts.NAMES]
    again = 100 * float(dense_counts.scores(*counts)[r.metric])
    if r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its counts of pixels give {again:.4f}")
    drawn = arrays[f"bootstrap_{r.metric}"] / 100
    covered = r.metric in dense_counts.COVERED
    interval = (
        confidence.of_resamples(r.value / 100, drawn, images) if covered else None
    )
    _refuse_other_interval(r, interval)
    return FROM_KEPT


def _of_test_images(r: Result, run: Path, arrays: Arrays) -> int:
    """The level of retrieval (a score for each query) and of clusters."""
    label, queries = arrays.get("label"), arrays.get(f"queries_{r.metric}")
    if label is None or label.size > _MOST_HITS:
        return UNBACKED
    _refuse_other_number(r, "predictions", label.size)
    _, own, others = np.unique(label, return_inverse=True, return_counts=True)
    if queries is not None:
        if not np.array_equal(np.isnan(queries), others[own] == 1):
            raise _Unfit("its queries are not the images whose class has others")
        inside = queries[others[own] > 1]
        if not inside.size:
            raise _Unfit("no class has two test images, so there is no query")
        if not ((inside >= 0) & (inside <= 1)).all():
            raise _Unfit("one of its queries' scores is not between 0 and 1")
        again = 100 * float(inside.mean())
    elif "cluster" in arrays and r.metric in partitions.METRICS:
        if (
            len(others) > _MOST_CLUSTERS
            or len(np.unique(arrays["cluster"])) > _MOST_CLUSTERS
        ):
            return UNBACKED
        again = partitions.agreement(label, arrays["cluster"])[r.metric]
    else:
        return UNBACKED
    if r.value is None or abs(again - r.value) > _ALIKE:
        raise _Unfit(f"it says {r.value}, its predictions give {again:.4f}")
    _refuse_other_interval(r, None)
    return _of_listed_labels(r, run, arrays)


def _refuse_other_interval(r: Result, again: tuple[float, float] | None) -> None:
    if again is None or r.ci95 is None:
        if again is not r.ci95:
            raise _Unfit(f"its interval is {r.ci95}, what was kept gives {again}")
    elif max(abs(a - b) for a, b in zip(again, r.ci95)) > _ALIKE:
        raise _Unfit(
            f"its interval is {_shown(r.ci95)}, what was kept gives {_shown(again)}"
        )


def _refuse_other_count(r: Result, arrays: Arrays, right: np.ndarray) -> None:
    """Raises _Unfit if images or draws are missing, or draws have other values."""
    images = r.facts.get("images")
    count = _tested(r, images) if isinstance(images, dict) else 0
    if count and right.shape[-1] != count:
        raise _Unfit(
            f"its predictions are of {right.shape[-1]} images, its list has {count}"
        )
    if right.ndim == 1:
        first = hits(arrays, "top1")
        if (
            first is not None
            and "hits5" in arrays
            and bool((first & (arrays["hits5"] == 0)).any())
        ):
            raise _Unfit("an image is right by its best class and not by its five best")
        return
    planned = (r.facts.get("recipe") or {}).get("draws", len(right))
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
    """Raises _Unfit if the table of classes beside the predictions counts other images."""
    name = r.facts.get("per_class")
    if name is None or arrays["prediction"].ndim != 1:
        return
    try:
        text = opening.read_bytes(run / name, most=_LARGEST_TABLE).decode()
    except (OSError, UnicodeDecodeError):
        return
    table = [
        (int(row["images"]), int(row["right"]))
        for row in csv.DictReader(io.StringIO(text))
    ]
    label, there = arrays["label"], np.asarray(table).reshape(-1, 2).T
    hit, inside = label[arrays["prediction"] == label], range(len(table))
    known = label.min() in inside and label.max() in inside
    again = (
        [np.bincount(some, minlength=len(table)) for some in (label, hit)]
        if known
        else []
    )
    if not np.array_equal(there, again):
        raise _Unfit(
            f"its table of classes '{printable.shown(name, 80)}' counts other images"
        )


# ---- lists of images


def _of_listed_labels(r: Result, run: Path, arrays: Arrays) -> int:
    """The level of predictions whose labels are those of the list, where it is there."""
    listed = _labels(str(arrays["manifest"]), list_files(r, run))
    if listed is None:
        return FROM_KEPT
    if not np.array_equal(arrays["label"], listed):
        raise _Unfit(
            "the labels beside its predictions are not those of its list of images"
        )
    return FROM_LIST


def list_files(r: Result, run: Path) -> tuple[Path, ...]:
    """The files that may hold the list of a row's test images: in its run, or in a corpus above."""
    manifest = (r.facts.get("manifests") or {}).get("test") or ""
    own = run / "manifests" / f"{printable.part(r.dataset)}-test.tsv"
    if not _DIGEST.fullmatch(manifest):
        return (own,)
    name = f"{manifest}.tsv.gz"
    return (own, *(folder / LISTS / name for folder in (run, *run.parents)[:8]))


def list_content(manifest: str, files: Sequence[Path]) -> bytes | None:
    """The list of that digest, as 'path<TAB>label' lines; None where no file holds it."""
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
    """The labels of the list of that digest (N,); None where no file holds it."""
    if manifest in _lists:
        return _lists[manifest]
    content = list_content(manifest, files)
    if content is None:
        return None
    lines = content.decode(errors="replace").removesuffix("\n").split("\n")
    labels = np.array([int(line.rpartition("\t")[2]) for line in lines])
    if len(_lists) < _KEPT_LISTS and len(labels) <= 10**6:
        _lists[manifest] = labels
    return labels
