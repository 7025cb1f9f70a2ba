"""AP from predictions, the same way for both engines: hotcoco's evaluator, per category, with bootstrap intervals."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backbench.runs import seeding
from detection.data.coco import Split

RESAMPLES = 500
# Where COCOeval.summarize puts AP, AP50, AP75 and the sizes; keypoints have no small objects.
STATS = {
    "bbox": {"AP": 0, "AP50": 1, "AP75": 2, "APs": 3, "APm": 4, "APl": 5},
    "segm": {"AP": 0, "AP50": 1, "AP75": 2, "APs": 3, "APm": 4, "APl": 5},
    "keypoints": {"AP": 0, "AP50": 1, "AP75": 2, "APm": 3, "APl": 4},
}


@dataclass(frozen=True)
class Scores:
    """Percent; None where undefined: nothing predicted at all, or no ground truth of that kind."""

    kind: str
    values: Mapping[str, float | None]
    ci95: Mapping[str, tuple[float, float] | None]
    per_category: Mapping[str, float | None]
    samples: Mapping[str, np.ndarray]  # AP, AP50, AP75 of each bootstrap draw


def score(
    split: Split,
    predictions: Sequence[Mapping[str, Any]],
    kind: str,
    sigmas: Sequence[float],
    *,
    manifest: str,
) -> Scores:
    """AP of COCO-format predictions ({image_id, category_id, score, bbox | segmentation | keypoints}) on a split."""
    import hotcoco

    undefined = dict.fromkeys(STATS[kind])
    if not predictions:
        return Scores(kind, undefined, {}, dict.fromkeys(split.categories), {})
    truth = hotcoco.COCO(_with_areas(split))
    ev = hotcoco.COCOeval(truth, truth.load_res(for_kind(predictions, kind)), kind)
    ev.params.img_ids = [r["image_id"] for r in split.records]
    if kind == "keypoints" and sigmas:
        ev.params.kpt_oks_sigmas = list(sigmas)
    ev.evaluate()
    ev.accumulate()
    with _silent():
        ev.summarize()
    values = {name: _percent(ev.stats[i]) for name, i in STATS[kind].items()}
    assert ev.eval is not None
    precision = np.asarray(ev.eval["precision"])[
        :, :, :, 0, -1
    ]  # T, R, K at all areas and most detections
    per_category = {}
    for k, name in enumerate(split.categories):
        p = precision[:, :, k]
        per_category[name] = _percent(p[p > -1].mean()) if (p > -1).any() else None
    samples = bootstrap(ev, split, manifest)
    return Scores(
        kind,
        values,
        {name: interval(values) for name, values in samples.items()},
        per_category,
        samples,
    )


def for_kind(predictions: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Only the fields that `kind` is scored by: COCO's loader takes an object's area from its box if there is one,
    and AP of masks by size would silently go by boxes."""
    common = ("image_id", "category_id", "score")
    shape = {"bbox": "bbox", "segm": "segmentation", "keypoints": "keypoints"}[kind]
    return [{k: p[k] for k in (*common, shape)} for p in predictions]


def _with_areas(split: Split) -> dict[str, Any]:
    """The annotation file; objects without `area` or `iscrowd` get the box's and 0."""
    data = json.loads(Path(split.file).read_text())
    for a in data["annotations"]:
        a.setdefault("area", a["bbox"][2] * a["bbox"][3])
        a.setdefault("iscrowd", 0)
    return data


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """hotcoco's summarize prints its table and warns of other sigmas than COCO's; ours is printed once."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _percent(value: float) -> float | None:
    """COCOeval says -1 where there is no ground truth."""
    return None if value < 0 or not np.isfinite(value) else 100 * float(value)


def bootstrap(ev: Any, split: Split, manifest: str) -> dict[str, np.ndarray]:
    """AP, AP50 and AP75 in percent of images drawn with replacement; the draws depend on the list of images alone, so
    two checkpoints are compared draw by draw. Matching is per image: a draw only reweights each image's detections.
    """
    ids = [r["image_id"] for r in split.records]
    draws = torch.randint(
        len(ids), (RESAMPLES, len(ids)), generator=seeding.generator(manifest, "bootstrap")
    )
    weights = torch.zeros(RESAMPLES, len(ids), dtype=torch.float64)
    weights.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
    aps = 100 * weighted_ap(ev, ids, list(split.ids), weights)  # (draws, thresholds)
    return {"AP": aps.mean(1).numpy(), "AP50": aps[:, 0].numpy(), "AP75": aps[:, 5].numpy()}


def interval(samples: np.ndarray) -> tuple[float, float] | None:
    """95% percentile interval over the draws that are defined."""
    samples = samples[np.isfinite(samples)]
    return (
        (float(np.quantile(samples, 0.025)), float(np.quantile(samples, 0.975)))
        if len(samples)
        else None
    )


def weighted_ap(
    ev: Any, image_ids: Sequence[int], category_ids: Sequence[int], weights: torch.Tensor
) -> torch.Tensor:
    """(draws, images) multiplicities -> (draws, thresholds) AP, mean over the categories that have ground truth.

    COCOeval.accumulate for one area range (all) and most detections, with each image counted `weight` times.
    """
    column = {id: i for i, id in enumerate(image_ids)}
    recalls = torch.linspace(0, 1, 101, dtype=torch.float64)
    whole = list(ev.params.area_rng[0])
    by_category: dict[int, list[dict[str, Any]]] = {id: [] for id in category_ids}
    for e in ev.eval_imgs:
        if e is not None and list(e["aRng"]) == whole:
            by_category[e["category_id"]].append(e)
    thresholds = len(ev.params.iou_thrs)
    total = torch.zeros(len(weights), thresholds, dtype=torch.float64)
    counted = torch.zeros(len(weights), 1, dtype=torch.float64)
    for entries in by_category.values():
        entries.sort(key=lambda e: column[e["image_id"]])
        truths = torch.zeros(len(image_ids), dtype=torch.float64)
        scores, owner, matched, ignored = [], [], [], []
        for e in entries:
            at = column[e["image_id"]]
            truths[at] = float((~np.asarray(e["gtIgnore"], bool)).sum())
            scores.append(np.asarray(e["dtScores"], float))
            owner.append(np.full(len(scores[-1]), at))
            matched.append(np.asarray(e["dtMatches"]).reshape(thresholds, -1) != 0)
            ignored.append(np.asarray(e["dtIgnore"]).reshape(thresholds, -1) != 0)
        positives = weights @ truths  # (draws,)
        there = positives > 0
        counted[there] += 1
        if not entries or not sum(map(len, scores)):
            continue
        ranking = np.argsort(-np.concatenate(scores), kind="mergesort")
        w = weights[:, torch.from_numpy(np.concatenate(owner)[ranking])]  # (draws, detections)
        hit = torch.from_numpy(np.concatenate(matched, 1)[:, ranking])
        skip = torch.from_numpy(np.concatenate(ignored, 1)[:, ranking])
        for t in range(thresholds):
            true = (w * (hit[t] & ~skip[t])).cumsum(1)
            false = (w * (~hit[t] & ~skip[t])).cumsum(1)
            recall = true / positives.clamp(min=1)[:, None]
            precision = true / (true + false + np.spacing(1))
            precision = precision.flip(1).cummax(1).values.flip(1)
            place = torch.searchsorted(recall.contiguous(), recalls.expand(len(w), -1).contiguous())
            reached = place < recall.shape[1]
            ap = (precision.gather(1, place.clamp(max=recall.shape[1] - 1)) * reached).mean(1)
            total[there, t] += ap[there]
    return total / counted.masked_fill(counted == 0, float("nan"))
