"""AP from detections, the same way for both engines: in total, per category, with an interval."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.results import intervals
from backbench.runs import seeding
from detection.data.records import Detection
from detection.data.split import Split

if TYPE_CHECKING:
    import hotcoco

RESAMPLES = 500
REHEARSED = 100  # images


@dataclass(frozen=True)
class ApKind:
    """One of COCO's ways to compare a detection with an object."""

    shape: Literal["bbox", "segmentation", "keypoints"]  # the field of a detection that it compares
    stats: Mapping[str, int]  # metric -> its place in the numbers of COCOeval.summarize


_BY_SIZE = {"AP": 0, "AP50": 1, "AP75": 2, "APs": 3, "APm": 4, "APl": 5}
AP_KINDS = {
    "bbox": ApKind("bbox", _BY_SIZE),
    "segm": ApKind("segmentation", _BY_SIZE),
    # COCO marks no keypoints on small objects.
    "keypoints": ApKind("keypoints", {"AP": 0, "AP50": 1, "AP75": 2, "APm": 3, "APl": 4}),
}


@dataclass(frozen=True)
class Scores:
    """Percent; None where undefined: nothing predicted at all, or no ground truth of that kind."""

    values: Mapping[str, float | None]
    ci95: Mapping[str, tuple[float, float] | None]
    per_category: Mapping[str, float | None]
    samples: Mapping[str, np.ndarray]  # AP, AP50, AP75 of each bootstrap draw


class ImageMatches(TypedDict):
    """COCOeval's matching of one image's d detections and g objects of one category, for one range
    of areas, at T thresholds of overlap. A match is the object's id, 0 is none; what is ignored
    counts neither as hit nor as miss."""

    image_id: int
    category_id: int
    aRng: Sequence[float]
    gtIgnore: Sequence[int]  # (g,)
    dtScores: Sequence[float]  # (d,), falling
    dtMatches: Sequence[Sequence[int]]  # (T, d)
    dtIgnore: Sequence[Sequence[int]]  # (T, d)


def score(
    split: Split,
    detections: Sequence[Detection],
    kind: str,
    sigmas: Sequence[float],
    *,
    manifest: str | None,
) -> Scores:
    """AP of detections in COCO's format on a split. `kind` is one of AP_KINDS; `sigmas`, of each
    keypoint, are COCO's own where there are none; `manifest` decides the bootstrap's draws, None
    leaves them out."""
    stats = AP_KINDS[kind].stats
    if not detections:
        return Scores(dict.fromkeys(stats), {}, dict.fromkeys(split.categories), {})
    found = for_kind(renumbered(detections, split), kind)
    ev = matched(ground_truth(split, kind), found, kind, sigmas)
    ev.accumulate()
    with _silent():
        ev.summarize()
    values = {name: _percent(ev.stats[i]) for name, i in stats.items()}
    samples = bootstrap(ev, split, manifest) if manifest is not None else {}
    known = intervals_of(values, samples, len(split.records))
    return Scores(values, known, _per_category(ev, split), samples)


def matched(
    truth: dict[str, object],
    found: list[dict[str, object]],
    kind: str,
    sigmas: Sequence[float],
) -> hotcoco.COCOeval:
    """COCOeval of all images of `truth`, its matching done."""
    import hotcoco

    truth_ = hotcoco.COCO(truth)
    ev = hotcoco.COCOeval(truth_, truth_.load_res(found), kind)
    if kind == "keypoints" and sigmas:
        ev.params.kpt_oks_sigmas = list(sigmas)
    ev.evaluate()
    return ev


def rehearse(split: Split, kind: str, sigmas: Sequence[float]) -> None:
    """Score some objects of the split as if they had been found. Raises BadInput where its
    annotations cannot be scored, which would otherwise be learnt after the training."""
    truth = ground_truth(split, kind)
    shape = AP_KINDS[kind].shape
    found = []
    for record in split.records[:REHEARSED]:
        place = place_of(split)[record["image_id"]]
        for a in record["annotations"][:1]:
            row: dict[str, object] = {"image_id": place, "score": 0.5, "bbox": a["bbox"]}
            row["category_id"] = a["category_id"] + 1
            if shape == "segmentation":
                empty = [record["height"] * record["width"]]
                row[shape] = {"size": [record["height"], record["width"]], "counts": empty}
            elif shape == "keypoints":
                row[shape] = a["keypoints"]
            found.append({k: row[k] for k in ("image_id", "category_id", "score", shape)})
    if not found:
        return
    try:
        matched(truth, found, kind, sigmas).accumulate()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # hotcoco's own panics are no Exceptions
        line = " ".join(str(error).split())[:160]
        raise BadInput(f"{split.file}: its {kind} cannot be scored ({line})") from None


# Scoring numbers images, categories and objects itself, from 1: COCOeval takes whole numbers only,
# and for it an object with id 0 is no object. Images and categories stay in the order of their ids,
# by which COCOeval breaks ties.


def place_of(split: Split) -> dict[int | str, int]:
    return {record["image_id"]: i for i, record in enumerate(split.records, 1)}


def renumbered(detections: Sequence[Detection], split: Split) -> list[Detection]:
    """The file's image and category ids as scoring numbers them."""
    place, label = place_of(split), {id: i for i, id in enumerate(split.ids, 1)}
    out: list[Detection] = []
    for d in detections:
        numbers = {"image_id": place[d["image_id"]], "category_id": label[d["category_id"]]}
        out.append(cast(Detection, {**d, **numbers}))
    return out


def _per_category(ev: hotcoco.COCOeval, split: Split) -> dict[str, float | None]:
    """The mean of the precisions at all thresholds and recalls, as COCOeval.summarize averages them
    over all."""
    assert ev.eval is not None
    # (T, R, K, areas, most detections) -> (T, R, K): all areas, the largest number of detections
    precision = np.asarray(ev.eval["precision"])[:, :, :, 0, -1]
    out = {}
    for k, name in enumerate(split.categories):
        defined = precision[:, :, k][precision[:, :, k] > -1]
        out[name] = _percent(defined.mean()) if defined.size else None
    return out


def for_kind(detections: Sequence[Detection], kind: str) -> list[dict[str, object]]:
    """Only the fields that `kind` is scored by: COCO's loader takes an object's area from its box
    if there is one, and AP of masks by size would silently go by boxes."""
    shape = AP_KINDS[kind].shape
    out = []
    for d in detections:
        row: dict[str, object] = {shape: d[shape]}
        row |= {"image_id": d["image_id"], "category_id": d["category_id"], "score": d["score"]}
        out.append(row)
    return out


def ground_truth(split: Split, kind: str) -> dict[str, object]:
    """The objects of the annotation file in COCO's format, crowds included, with what `kind` is
    scored by. Objects without `area` or `iscrowd` get the box's and 0."""
    place, label = place_of(split), {id: i for i, id in enumerate(split.ids, 1)}
    objects: list[dict[str, object]] = []
    for a in json.loads(split.file.read_text())["annotations"]:
        if a["image_id"] not in place:
            continue
        row: dict[str, object] = {
            "id": len(objects) + 1,
            "image_id": place[a["image_id"]],
            "category_id": label[a["category_id"]],
            "bbox": a["bbox"],
            "area": a.get("area", a["bbox"][2] * a["bbox"][3]),
            "iscrowd": int(a.get("iscrowd", 0)),
        }
        if kind == "segm":
            row["segmentation"] = a["segmentation"]
        elif kind == "keypoints":
            points = a.get("keypoints") or [0] * 3 * len(split.keypoints)
            marked = sum(v > 0 for v in points[2::3])
            row |= {"keypoints": points, "num_keypoints": a.get("num_keypoints", marked)}
        objects.append(row)
    images = [
        {"id": place[r["image_id"]], "height": r["height"], "width": r["width"]}
        for r in split.records
    ]
    categories = [{"id": i, "name": name} for i, name in enumerate(split.categories, 1)]
    return {"images": images, "annotations": objects, "categories": categories}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """hotcoco's summarize prints a table of its own and warns of other sigmas than COCO's."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _percent(value: float) -> float | None:
    """COCOeval says -1 where there is no ground truth."""
    return None if value < 0 or not np.isfinite(value) else 100 * float(value)


def bootstrap(ev: hotcoco.COCOeval, split: Split, manifest: str) -> dict[str, np.ndarray]:
    """AP, AP50 and AP75 in percent of images drawn with replacement; the draws depend on the list
    of images alone, so two checkpoints are compared draw by draw. Matching is per image: a draw
    only reweights each image's detections."""
    ids = list(place_of(split).values())
    weights = drawn(len(ids), manifest)
    return summarised(weighted_ap(ev, ids, range(1, 1 + len(split.ids)), weights))


def drawn(images: int, manifest: str) -> Tensor:
    """How often each of RESAMPLES draws with replacement has each image: (draws, images)."""
    generator = seeding.generator(manifest, "bootstrap")
    draws = torch.randint(images, (RESAMPLES, images), generator=generator)
    weights = torch.zeros(RESAMPLES, images, dtype=torch.float64)
    return weights.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))


def summarised(aps: Tensor) -> dict[str, np.ndarray]:
    """(draws, thresholds 0.5, 0.55, ... 0.95) from 0 to 1 -> the three APs of each, in percent."""
    aps = 100 * aps
    return {"AP": aps.mean(1).numpy(), "AP50": aps[:, 0].numpy(), "AP75": aps[:, 5].numpy()}


def intervals_of(
    values: Mapping[str, float | None], samples: Mapping[str, np.ndarray], images: int
) -> dict[str, tuple[float, float] | None]:
    """The 95% interval of each value in percent from its values (B,) on resamples of so many
    images; none of a value that is not defined."""
    known: dict[str, tuple[float, float] | None] = {}
    for name, draws in samples.items():
        value = values[name]
        known[name] = (
            None if value is None else intervals.of_resamples(value / 100, draws / 100, images)
        )
    return known


def weighted_ap(
    ev: hotcoco.COCOeval, image_ids: Sequence[int], category_ids: Sequence[int], weights: Tensor
) -> Tensor:
    """(draws, images) multiplicities -> (draws, thresholds) AP, mean over the categories that have
    ground truth.

    COCOeval.accumulate for one area range (all) and most detections, with each image counted
    `weight` times.
    """
    column = {id: i for i, id in enumerate(image_ids)}
    thresholds = len(ev.params.iou_thrs)
    total = torch.zeros(len(weights), thresholds, dtype=torch.float64)
    counted = torch.zeros(len(weights), 1, dtype=torch.float64)
    for matches in _matches_by_category(ev, category_ids).values():
        matches.sort(key=lambda m: column[m["image_id"]])
        detections = _Ranked(matches, column, thresholds)
        # A category counts in the draws that have ground truth of it.
        positives = weights @ detections.truths  # (draws,)
        there = positives > 0
        counted[there] += 1
        if not detections.found:
            continue  # precision 0 everywhere
        weight = weights[:, detections.image]  # (draws, detections)
        for t in range(thresholds):
            ap = _average_precision(weight, detections.hit[t], detections.skip[t], positives)
            total[there, t] += ap[there]
    return total / counted.masked_fill(counted == 0, float("nan"))


def _matches_by_category(
    ev: hotcoco.COCOeval, category_ids: Sequence[int]
) -> dict[int, list[ImageMatches]]:
    """The matching that AP is made from: all areas, not AP by size."""
    whole = list(ev.params.area_rng[0])
    out: dict[int, list[ImageMatches]] = {id: [] for id in category_ids}
    for e in ev.eval_imgs:
        if e is not None and list(e["aRng"]) == whole:
            out[e["category_id"]].append(cast(ImageMatches, e))
    return out


class _Ranked:
    """One category's detections in all N images, D of them, the surest first."""

    truths: Tensor  # (N,) float64: objects to be found in each image
    found: bool  # D > 0; only then is there what follows
    image: Tensor  # (D,): the column of the image that each is in
    hit: Tensor  # (T, D) bool: it matched an object
    skip: Tensor  # (T, D) bool: it is ignored

    def __init__(
        self, matches: Sequence[ImageMatches], column: Mapping[int, int], thresholds: int
    ) -> None:
        self.truths = torch.zeros(len(column), dtype=torch.float64)
        self.found = False
        scores, image, hit, skip = [], [], [], []
        for m in matches:
            at = column[m["image_id"]]
            self.truths[at] = float((~np.asarray(m["gtIgnore"], bool)).sum())
            scores.append(np.asarray(m["dtScores"], float))
            image.append(np.full(len(scores[-1]), at))
            hit.append(np.asarray(m["dtMatches"]).reshape(thresholds, -1) != 0)
            skip.append(np.asarray(m["dtIgnore"]).reshape(thresholds, -1) != 0)
        if not sum(map(len, scores)):
            return
        self.found = True
        # Stable, so that equal scores keep the order of the images: COCOeval's own tie-break.
        ranking = np.argsort(-np.concatenate(scores), kind="mergesort")
        self.image = torch.from_numpy(np.concatenate(image)[ranking])
        self.hit = torch.from_numpy(np.concatenate(hit, 1)[:, ranking])
        self.skip = torch.from_numpy(np.concatenate(skip, 1)[:, ranking])


def _average_precision(weight: Tensor, hit: Tensor, skip: Tensor, positives: Tensor) -> Tensor:
    """weight (draws, D), hit and skip (D,) of ranked detections, positives (draws,) -> (draws,)."""
    # 1. Precision and recall after each detection
    true = (weight * (hit & ~skip)).cumsum(1)
    false = (weight * (~hit & ~skip)).cumsum(1)
    recall = true / positives.clamp(min=1)[:, None]
    precision = true / (true + false + np.spacing(1))
    # 2. The best precision at that recall or a larger one
    precision = precision.flip(1).cummax(1).values.flip(1)
    # 3. Read off at 101 recalls; 0 where a recall is not reached
    # numpy's, as COCOeval has them: torch's differ in the last bit, which a recall of 0.35 is on.
    recalls = torch.from_numpy(np.linspace(0, 1, 101)).expand(len(weight), -1)
    place = torch.searchsorted(recall.contiguous(), recalls.contiguous())
    reached = place < recall.shape[1]
    return (precision.gather(1, place.clamp(max=recall.shape[1] - 1)) * reached).mean(1)
