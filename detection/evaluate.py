"""AP from detections, the same way for both engines: in total, per category, with an interval."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from backbench.detection import coco_ap
from backbench.detection.data.dataset_dicts import Detection
from backbench.detection.data.split import Split
from backbench.errors import BadInput
from backbench.runs import seeding
from backbench.stats import confidence
from backbench.stats.resampling import AP_COUNT

if TYPE_CHECKING:
    import hotcoco

REHEARSED = 100  # images


@dataclass(frozen=True)
class ApKind:
    """One of COCO's ways to compare a detection with an object."""

    shape: Literal[
        "bbox", "segmentation", "keypoints"
    ]  # the field of a detection that it compares
    stats: Mapping[str, int]  # metric -> its place in the numbers of COCOeval.summarize


_BY_SIZE = {"AP": 0, "AP50": 1, "AP75": 2, "APs": 3, "APm": 4, "APl": 5}
AP_KINDS = {
    "bbox": ApKind("bbox", _BY_SIZE),
    "segm": ApKind("segmentation", _BY_SIZE),
    # COCO marks no keypoints on small objects.
    "keypoints": ApKind(
        "keypoints", {"AP": 0, "AP50": 1, "AP75": 2, "APm": 3, "APl": 4}
    ),
}


@dataclass(frozen=True)
class Scores:
    """Percent; None where undefined: nothing predicted at all, or no ground truth of that kind."""

    values: Mapping[str, float | None]
    ci95: Mapping[str, tuple[float, float] | None]
    per_category: Mapping[str, float | None]
    samples: Mapping[str, np.ndarray]  # AP, AP50, AP75 of each bootstrap draw


class ImageMatches(TypedDict):
    """COCOeval's matching of an image's d detections and g objects of one category, for one range
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
    """Return the AP of detections in COCO's format. `kind` is one of AP_KINDS; `sigmas` of
    keypoints default to COCO's; `manifest` decides the bootstrap's draws (None: none)."""
    stats = AP_KINDS[kind].stats
    if not detections:
        return Scores(dict.fromkeys(stats), {}, dict.fromkeys(split.categories), {})
    rows = rows_of(detections, split, kind)
    ev = matched(ground_truth(split, kind), rows, kind, sigmas)
    ev.accumulate()
    # hotcoco prints a table of its own and warns of other sigmas than COCO's
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ev.summarize()
    values = {name: _percent(ev.stats[i]) for name, i in stats.items()}
    # (T, R, K, areas, most detections) -> (T, R, K): all areas, the largest number of detections. A
    # category's AP is the mean over thresholds and recalls, as COCOeval.summarize averages over all
    assert ev.eval is not None
    precision = np.asarray(ev.eval["precision"])[:, :, :, 0, -1]
    per_category: dict[str, float | None] = {}
    for k, name in enumerate(split.categories):
        defined = precision[:, :, k][precision[:, :, k] > -1]
        per_category[name] = _percent(defined.mean()) if defined.size else None
    samples: dict[str, np.ndarray] = {}
    if manifest is not None:
        weights = drawn(len(split.records), manifest)
        samples = summarised(weighted_ap(ev, rows, len(split.ids), weights))
    intervals = intervals_of(values, samples, len(split.records))
    return Scores(values, intervals, per_category, samples)


def matched(
    truth: dict[str, object],
    rows: list[dict[str, object]],
    kind: str,
    sigmas: Sequence[float],
) -> hotcoco.COCOeval:
    """COCOeval of all images of `truth`, its matching done."""
    import hotcoco

    truth_ = hotcoco.COCO(truth)
    ev = hotcoco.COCOeval(truth_, truth_.load_res(rows), kind)
    if kind == "keypoints" and sigmas:
        ev.params.kpt_oks_sigmas = list(sigmas)
    ev.evaluate()
    return ev


def rehearse(split: Split, kind: str, sigmas: Sequence[float]) -> None:
    """Score some objects as if found: BadInput here, not after training, if that is impossible."""
    truth = ground_truth(split, kind)
    shape = AP_KINDS[kind].shape
    rows = []
    for record in split.records[:REHEARSED]:
        place = image_numbers(split)[record["image_id"]]
        for a in record["annotations"][:1]:
            label = a["category_id"] + 1
            row: dict[str, object] = {
                "image_id": place,
                "category_id": label,
                "score": 0.5,
            }
            if shape == "segmentation":
                empty = [record["height"] * record["width"]]
                row[shape] = {
                    "size": [record["height"], record["width"]],
                    "counts": empty,
                }
            else:
                row[shape] = a[shape]
            rows.append(row)
    if not rows:
        return
    try:
        matched(truth, rows, kind, sigmas).accumulate()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # hotcoco's own panics are no Exceptions
        cause = " ".join(str(error).split())[:160]
        raise BadInput(f"{split.file}: its {kind} cannot be scored ({cause})") from None


# Scoring numbers images, categories and objects itself, from 1: COCOeval takes whole numbers only,
# and for it an object with id 0 is no object. Images and categories stay in the order of their ids,
# by which COCOeval breaks ties.


def image_numbers(split: Split) -> dict[int | str, int]:
    return {record["image_id"]: i for i, record in enumerate(split.records, 1)}


def rows_of(
    detections: Sequence[Detection], split: Split, kind: str
) -> list[dict[str, object]]:
    """List detections with `kind`'s fields alone: COCO would take a mask's area from its box."""
    place, label = image_numbers(split), {id: i for i, id in enumerate(split.ids, 1)}
    shape = AP_KINDS[kind].shape
    out = []
    for d in detections:
        row: dict[str, object] = {shape: d[shape], "score": d["score"]}
        row["image_id"] = place[d["image_id"]]
        row["category_id"] = label[d["category_id"]]
        out.append(row)
    return out


def ground_truth(split: Split, kind: str) -> dict[str, object]:
    """List objects, crowds included, in COCO's format; absent `area` is the box's, `iscrowd` 0."""
    place, label = image_numbers(split), {id: i for i, id in enumerate(split.ids, 1)}
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
            row |= {
                "keypoints": points,
                "num_keypoints": a.get("num_keypoints", marked),
            }
        objects.append(row)
    images = [
        {"id": place[r["image_id"]], "height": r["height"], "width": r["width"]}
        for r in split.records
    ]
    categories = [{"id": i, "name": name} for i, name in enumerate(split.categories, 1)]
    return {"images": images, "annotations": objects, "categories": categories}


def _percent(value: float) -> float | None:
    """COCOeval says -1 where there is no ground truth."""
    return None if value < 0 or not np.isfinite(value) else 100 * float(value)


def drawn(images: int, manifest: str) -> Tensor:
    """Draw AP_COUNT times with replacement: how often each draw has each image, (draws, images). It
    depends on the list of images alone, so two checkpoints are compared draw by draw."""
    generator = seeding.generator(manifest, "bootstrap")
    draws = torch.randint(images, (AP_COUNT, images), generator=generator)
    weights = torch.zeros(AP_COUNT, images, dtype=torch.float64)
    return weights.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))


def summarised(aps: Tensor) -> dict[str, np.ndarray]:
    """(draws, thresholds 0.5, 0.55, ... 0.95) from 0 to 1 -> the three APs of each, in percent."""
    aps = 100 * aps
    return {
        "AP": aps.mean(1).numpy(),
        "AP50": aps[:, 0].numpy(),
        "AP75": aps[:, 5].numpy(),
    }


def intervals_of(
    values: Mapping[str, float | None], samples: Mapping[str, np.ndarray], images: int
) -> dict[str, tuple[float, float] | None]:
    """Return the 95% interval of each value in percent, by resamples (B,); None if undefined."""
    intervals: dict[str, tuple[float, float] | None] = {}
    for name, draws in samples.items():
        value = values[name]
        intervals[name] = None
        if value is not None:
            intervals[name] = confidence.of_resamples(value / 100, draws / 100, images)
    return intervals


def weighted_ap(
    ev: hotcoco.COCOeval,
    rows: Sequence[Mapping[str, object]],
    categories: int,
    weights: Tensor,
) -> Tensor:
    """(draws, images) multiplicities -> (draws, thresholds) AP, the mean over the categories 1, 2,
    ... with ground truth: COCOeval.accumulate for one area range (all) and most detections, each
    image counted `weight` times. `ev` stays matched for that range and the last category."""
    total = torch.zeros(len(weights), len(ev.params.iou_thrs), dtype=torch.float64)
    counted = torch.zeros(len(weights), 1, dtype=torch.float64)
    blocks = [part.T.contiguous().numpy() for part in weights.split(coco_ap.BLOCK)]
    image = np.array([row["image_id"] for row in rows])
    label = np.array([row["category_id"] for row in rows])
    score = np.array([row["score"] for row in rows])
    # One category at a time: the matches of every area, image and category at once are gigabytes of
    # lists
    ev.params.area_rng, ev.params.area_rng_lbl = ev.params.area_rng[:1], ["all"]
    for category in range(1, 1 + categories):
        mine = label == category
        ranked = ranked_detections(
            ev, category, image[mine], score[mine], weights.shape[1]
        )
        # A category counts in the draws that have ground truth of it.
        there = weights @ torch.from_numpy(ranked.truths) > 0
        if not there.any():
            continue
        counted[there] += 1
        total[there] += coco_ap.aps(ranked, blocks)[there]
    return total / counted.masked_fill(counted == 0, float("nan"))


def ranked_detections(
    ev: hotcoco.COCOeval,
    category: int,
    image: np.ndarray,
    score: np.ndarray,
    images: int,
) -> coco_ap.RankedDetections:
    """Match and rank one category's detections: `image` (D,), numbered from 1, and `score` (D,)."""
    thresholds = len(ev.params.iou_thrs)
    # 1. In images with objects of the category, as COCOeval matches them
    there = ev.coco_gt.get_img_ids(cat_ids=[category])
    matches: list[ImageMatches] = []
    if there:
        ev.params.cat_ids, ev.params.img_ids = [category], there
        ev.evaluate()
        matches = [cast(ImageMatches, m) for m in ev.eval_imgs if m is not None]
    truths = np.zeros(images)
    matched_image: list[int] = []
    matched_score: list[float] = []
    for m in matches:
        truths[m["image_id"] - 1] = len(m["gtIgnore"]) - sum(m["gtIgnore"])
        matched_image += [m["image_id"]] * len(m["dtScores"])
        matched_score += m["dtScores"]
    hit = _of_thresholds([m["dtMatches"] for m in matches], thresholds)
    skip = _of_thresholds([m["dtIgnore"] for m in matches], thresholds)
    # 2. In all others nothing can be matched: the surest of each image, as many as COCOeval takes
    others = ~np.isin(image, there)
    image, score = image[others], score[others]
    order = np.lexsort((-score, image))
    image, score = image[order], score[order]
    surest = (
        np.arange(len(image)) - np.searchsorted(image, image) < ev.params.max_dets[-1]
    )
    image = np.concatenate([np.array(matched_image, int), image[surest]])
    score = np.concatenate([np.array(matched_score, float), score[surest]])
    misses = np.ones((thresholds, int(surest.sum())), bool)
    # 3. The surest first; of equals the first image's, as COCOeval breaks ties
    ranking = np.lexsort((image, -score))
    return coco_ap.RankedDetections(
        image=image[ranking] - 1,
        hit=np.concatenate([hit & ~skip, ~misses], 1)[:, ranking],
        miss=np.concatenate([~hit & ~skip, misses], 1)[:, ranking],
        truths=truths,
    )


def _of_thresholds(
    lists: Sequence[Sequence[Sequence[int]]], thresholds: int
) -> np.ndarray:
    """The (T, d) lists of each image -> (T, sum of d) bool."""
    columns = [
        [value for of_image in lists for value in of_image[t]]
        for t in range(thresholds)
    ]
    return np.array(columns, np.int64).reshape(thresholds, -1) != 0
