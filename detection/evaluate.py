"""Computes AP from detections, in total, per category and with an interval.

Both engines are scored here. hotcoco, a fast COCOeval, does the matching and the AP itself;
pycocotools must find the same on the first images.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import io
import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from backbench.detection.data import coco
from backbench.detection.data.dataset_dicts import Detection
from backbench.detection.data.split import Split
from backbench.errors import BadInput
from backbench.parallel import loading
from backbench.runs import seeding
from backbench.runs.garbage import many_objects
from backbench.stats import coco_ap, confidence
from backbench.stats.resampling import AP_COUNT

if TYPE_CHECKING:
    import hotcoco

REHEARSED = 100  # images whose objects `rehearse` scores
CHECKED = 100  # images that pycocotools scores, too
# Both add the same numbers in another order
ROUNDING = 1e-9
MOST_THREADS = 4  # that compute APs of draws; each holds some 50 MB


@dataclass(frozen=True)
class ApKind:
    """One of COCO's ways to compare a detection with an object."""

    # The field of a detection that is compared
    shape: Literal["bbox", "segmentation", "keypoints"]
    # Metric -> its index in the numbers of COCOeval.summarize
    stats: Mapping[str, int]


_BY_SIZE = {"AP": 0, "AP50": 1, "AP75": 2, "APs": 3, "APm": 4, "APl": 5}
# COCO marks no keypoints on small objects.
_WITHOUT_SMALL = {"AP": 0, "AP50": 1, "AP75": 2, "APm": 3, "APl": 4}
AP_KINDS = {
    "bbox": ApKind("bbox", _BY_SIZE),
    "segm": ApKind("segmentation", _BY_SIZE),
    "keypoints": ApKind("keypoints", _WITHOUT_SMALL),
}


@dataclass(frozen=True)
class Scores:
    """APs in percent. None is undefined: nothing was predicted, or there is no such ground truth."""

    values: Mapping[str, float | None]
    ci95: Mapping[str, tuple[float, float] | None]
    per_category: Mapping[str, float | None]
    samples: Mapping[str, np.ndarray]  # AP, AP50, AP75 of each bootstrap draw


class ImageMatches(TypedDict):
    """COCOeval's matching of one image's detections and objects of one category.

    It is for one range of areas and T thresholds of overlap. What is ignored counts neither as a hit
    nor as a miss.
    """

    image_id: int
    category_id: int
    aRng: Sequence[float]
    gtIgnore: Sequence[int]  # (g,) of the g objects
    dtScores: Sequence[float]  # (d,) of the d detections, falling
    dtMatches: Sequence[Sequence[int]]  # (T, d): the matched object's id, or 0
    dtIgnore: Sequence[Sequence[int]]  # (T, d)


@many_objects()
def score(
    split: Split,
    detections: Sequence[Detection],
    kind: str,
    sigmas: Sequence[float],
    *,
    manifest: str | None,
) -> Scores:
    """Return the AP of detections in COCO's format.

    `kind` is one of AP_KINDS. `sigmas` are the keypoints'; where empty, COCO's are used. `manifest`
    decides the bootstrap's draws; with None nothing is drawn and there are no intervals.
    """
    stats = AP_KINDS[kind].stats
    if not detections:
        return Scores(dict.fromkeys(stats), {}, dict.fromkeys(split.categories), {})
    # 1. AP in total
    rows = rows_of(detections, split, kind)
    truth = ground_truth(split, kind)
    check_with_pycocotools(split, truth, rows, kind, sigmas)
    ev = matched(truth, rows, kind, sigmas)
    values = {name: _percent(stat) for name, stat in _stats(ev, kind).items()}
    # 2. AP per category: the mean over thresholds and recalls, as COCOeval.summarize averages over
    #    everything. Precision has the axes (threshold, recall, category, area range, number of
    #    detections); area range 0 is all areas, the last number of detections the largest.
    assert ev.eval is not None
    precision = np.asarray(ev.eval["precision"])[:, :, :, 0, -1]
    per_category: dict[str, float | None] = dict.fromkeys(split.categories)
    for k, name in enumerate(split.categories):
        defined = precision[:, :, k][precision[:, :, k] > -1]
        if defined.size:
            per_category[name] = _percent(defined.mean())
    # 3. Intervals
    samples: dict[str, np.ndarray] = {}
    if manifest is not None:
        weights = drawn(len(split.records), manifest)
        samples = summarised(weighted_ap(ev, rows, len(split.ids), weights))
    intervals = intervals_of(values, samples, len(split.records))
    return Scores(values, intervals, per_category, samples)


def check_with_pycocotools(
    split: Split,
    truth: dict[str, object],
    rows: Sequence[dict[str, object]],
    kind: str,
    sigmas: Sequence[float],
) -> None:
    """Raise BadInput unless hotcoco and pycocotools find the same in the first CHECKED images.

    A release of hotcoco that counts in another way would change every AP, and nothing would show it.
    """
    # 1. The first images, whose numbers begin at 1, with their objects and detections
    few = {
        "images": cast(list[dict[str, object]], truth["images"])[:CHECKED],
        "annotations": _of_first_images(
            cast(list[dict[str, object]], truth["annotations"])
        ),
        "categories": truth["categories"],
    }
    few_rows = _of_first_images(rows)
    if not few_rows:
        return
    # 2. Every number of both
    ours = _stats(matched(few, few_rows, kind, sigmas), kind)
    theirs = _by_pycocotools(few, few_rows, kind, sigmas)
    for name, value in ours.items():
        if abs(value - theirs[name]) > ROUNDING:
            version = importlib.metadata.version("hotcoco")
            raise BadInput(
                f"{split.file}: {kind}_{name} of its first {CHECKED} images is {100 * value:.4f} by"
                f" hotcoco {version} and {100 * theirs[name]:.4f} by pycocotools; install another"
                " hotcoco and score again with --eval-only"
            )


def _of_first_images(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Choose the objects, or detections, of the first CHECKED images."""
    return [row for row in rows if cast(int, row["image_id"]) <= CHECKED]


def _stats(ev: hotcoco.COCOeval, kind: str) -> dict[str, float]:
    """Return the numbers of `kind`, from 0 to 1, of a COCOeval that has matched; -1 is undefined."""
    ev.accumulate()
    # hotcoco prints a table of its own, and warns of other sigmas than COCO's.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ev.summarize()
    return {name: float(ev.stats[i]) for name, i in AP_KINDS[kind].stats.items()}


def _by_pycocotools(
    truth: dict[str, object],
    rows: list[dict[str, object]],
    kind: str,
    sigmas: Sequence[float],
) -> dict[str, float]:
    """Return the same numbers by pycocotools, which prints on its way."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        objects = COCO()
        # It writes into what it is given.
        objects.dataset = copy.deepcopy(truth)
        objects.createIndex()
        ev = COCOeval(objects, objects.loadRes(copy.deepcopy(rows)), kind)
        if kind == "keypoints" and sigmas:
            ev.params.kpt_oks_sigmas = np.array(sigmas)
        ev.evaluate()
        ev.accumulate()
        ev.summarize()
    return {name: float(ev.stats[i]) for name, i in AP_KINDS[kind].stats.items()}


def matched(
    truth: dict[str, object],
    rows: list[dict[str, object]],
    kind: str,
    sigmas: Sequence[float],
) -> hotcoco.COCOeval:
    """Return a COCOeval that has matched all images of `truth`."""
    import hotcoco

    objects = hotcoco.COCO(truth)
    ev = hotcoco.COCOeval(objects, objects.load_res(rows), kind)
    if kind == "keypoints" and sigmas:
        ev.params.kpt_oks_sigmas = list(sigmas)
    ev.evaluate()
    return ev


def rehearse(split: Split, kind: str, sigmas: Sequence[float]) -> None:
    """Score some objects as if they had been found.

    Raises BadInput if scoring is impossible: before the training, instead of after it.
    """
    shape = AP_KINDS[kind].shape
    if shape == "segmentation":
        _refuse_without_outline(split)
    numbers = image_numbers(split)
    rows = []
    for record in split.records[:REHEARSED]:
        for a in record["annotations"][:1]:
            row: dict[str, object] = {
                "image_id": numbers[record["image_id"]],
                "category_id": a["category_id"] + 1,
                "score": 0.5,
            }
            if shape == "segmentation":
                row[shape] = _empty_mask(record["height"], record["width"])
            else:
                row[shape] = a[shape]
            rows.append(row)
    if not rows:
        return
    truth = ground_truth(split, kind)
    try:
        matched(truth, rows, kind, sigmas).accumulate()
        check_with_pycocotools(split, truth, rows, kind, sigmas)
    except (BadInput, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # hotcoco's own panics are no Exceptions
        cause = " ".join(str(error).split())[:160]
        raise BadInput(f"{split.file}: its {kind} cannot be scored ({cause})") from None


def _refuse_without_outline(split: Split) -> None:
    """Raise BadInput for objects with a box alone, whose outline is an empty list.

    Label programs write them so. No mask could find them, and COCO's tools end in an error."""
    objects = json.loads(split.annotations())["annotations"]
    bare = [each["id"] for each in objects if each["segmentation"] in ([], [[]])]
    if bare:
        raise BadInput(
            f"{split.file}: {len(bare)} of {len(objects)} objects have an empty 'segmentation' (first"
            f" annotation {bare[0]}), and masks are scored; {coco.OUTLINES_NEEDED}"
        )


def _empty_mask(height: int, width: int) -> dict[str, object]:
    """Return an empty mask in COCO's compressed form, the one that pycocotools takes of a detection."""
    from pycocotools import mask

    one_run = {"size": [height, width], "counts": [height * width]}
    compressed = mask.frPyObjects(one_run, height, width)
    return {"size": [height, width], "counts": compressed["counts"].decode()}


# Scoring numbers images, categories and objects itself, from 1: COCOeval takes whole numbers only,
# and for it an object with id 0 is no object. Images and categories stay in the order of their ids,
# by which COCOeval breaks ties.


def image_numbers(split: Split) -> dict[int | str, int]:
    """Return image id -> the image's number in scoring."""
    return {record["image_id"]: i for i, record in enumerate(split.records, 1)}


def category_numbers(split: Split) -> dict[int, int]:
    """Return category id of the file -> the category's number in scoring."""
    return {id: i for i, id in enumerate(split.ids, 1)}


def rows_of(
    detections: Sequence[Detection], split: Split, kind: str
) -> list[dict[str, object]]:
    """List detections for COCOeval, with only the field that `kind` compares: beside a box, COCO
    would take a mask's area from the box."""
    images = image_numbers(split)
    categories = category_numbers(split)
    shape = AP_KINDS[kind].shape
    rows = []
    for detection in detections:
        row: dict[str, object] = {
            "image_id": images[detection["image_id"]],
            "category_id": categories[detection["category_id"]],
            "score": detection["score"],
            shape: detection[shape],
        }
        rows.append(row)
    return rows


def ground_truth(split: Split, kind: str) -> dict[str, object]:
    """List all objects, crowds included, for COCOeval.

    What an object lacks (box, area, number of keypoints) is computed from what it has.
    """
    images = image_numbers(split)
    categories = category_numbers(split)
    sizes = {r["image_id"]: (r["height"], r["width"]) for r in split.records}
    objects: list[dict[str, object]] = []
    for a in json.loads(split.annotations())["annotations"]:
        if a["image_id"] not in images:
            continue
        box = coco.box_of(a, f"annotation {a['id']}")
        row: dict[str, object] = {
            "id": len(objects) + 1,
            "image_id": images[a["image_id"]],
            "category_id": categories[a["category_id"]],
            "bbox": box,
            "area": coco.area_of(a, box),
            "iscrowd": int(a.get("iscrowd", 0)),
        }
        if kind == "segm":
            row["segmentation"] = _scorable(a["segmentation"], *sizes[a["image_id"]])
        elif kind == "keypoints":
            points = a.get("keypoints") or [0] * 3 * len(split.keypoints)
            row["keypoints"] = points
            row["num_keypoints"] = coco.marks_of(a)
        objects.append(row)
    image_rows = [
        {"id": images[r["image_id"]], "height": r["height"], "width": r["width"]}
        for r in split.records
    ]
    category_rows = [{"id": i, "name": n} for i, n in enumerate(split.categories, 1)]
    return {
        "images": image_rows,
        "annotations": objects,
        "categories": category_rows,
    }


def _scorable(outline: Any, height: int, width: int) -> object:
    """Return an outline without what is no polygon, on which pycocotools ends; where nothing is left,
    an empty mask, which no detection finds."""
    if not isinstance(outline, list):
        return outline
    return coco.valid_polygons(outline) or _empty_mask(height, width)


# What hotcoco's health check says that our own reading says, too, or that is no fault
SAID_ALREADY = (
    "zero_instance_category",
    "low_instance_category",
    "bbox_out_of_bounds",
    "category_imbalance",
)


def health(split: Split) -> list[str]:
    """Return what hotcoco's health check finds in the boxes of a list, as one object boxed twice."""
    import hotcoco

    images = []
    objects: list[dict[str, object]] = []
    for number, record in enumerate(split.records, 1):
        size = {"height": record["height"], "width": record["width"]}
        images.append({"id": number, "file_name": record["file_name"], **size})
        for annotation in record["annotations"]:
            objects.append(
                {
                    "id": len(objects) + 1,
                    "image_id": number,
                    "category_id": annotation["category_id"],
                    "bbox": annotation["bbox"],
                    "area": annotation["bbox"][2] * annotation["bbox"][3],
                    "iscrowd": annotation["iscrowd"],
                }
            )
    classes = [{"id": i, "name": name} for i, name in enumerate(split.categories)]
    content = {"images": images, "categories": classes, "annotations": objects}
    report = hotcoco.COCO(content).healthcheck()
    notes = []
    for found in (*report["errors"], *report["warnings"]):
        if found["code"] not in SAID_ALREADY:
            notes.append(f"hotcoco's health check: {found['message']}")
    return notes


def _percent(value: float) -> float | None:
    # COCOeval says -1 where there is no ground truth.
    if value < 0 or not np.isfinite(value):
        return None
    return 100 * float(value)


def drawn(images: int, manifest: str) -> Tensor:
    """Draw the images AP_COUNT times with replacement.

    Returns how often each draw has each image, (draws, images). The draws depend on `manifest`, a
    digest of the list of images, alone, so that two checkpoints are compared draw by draw.
    """
    generator = seeding.generator(manifest, "bootstrap")
    draws = torch.randint(images, (AP_COUNT, images), generator=generator)
    weights = torch.zeros(AP_COUNT, images, dtype=torch.float64)
    return weights.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))


def summarised(aps: Tensor) -> dict[str, np.ndarray]:
    """Return the AP, AP50 and AP75 of each draw in percent.

    `aps` (draws, 10) are from 0 to 1, at the overlaps 0.5, 0.55, ... 0.95.
    """
    percent = 100 * aps
    return {
        "AP": percent.mean(1).numpy(),
        "AP50": percent[:, 0].numpy(),
        "AP75": percent[:, 5].numpy(),
    }


def intervals_of(
    values: Mapping[str, float | None], samples: Mapping[str, np.ndarray], images: int
) -> dict[str, tuple[float, float] | None]:
    """Return the 95% interval of each value from its resamples (draws,); None for an undefined value.
    All are in percent."""
    intervals: dict[str, tuple[float, float] | None] = dict.fromkeys(samples)
    for name, draws in samples.items():
        value = values[name]
        if value is not None:
            intervals[name] = confidence.of_resamples(value / 100, draws / 100, images)
    return intervals


def weighted_ap(
    ev: hotcoco.COCOeval,
    rows: Sequence[Mapping[str, object]],
    categories: int,
    weights: Tensor,
) -> Tensor:
    """Compute the AP of each draw at each threshold: (draws, thresholds), from 0 to 1.

    `weights` (draws, images) says how often a draw has each image. AP is the mean over the
    `categories` that have ground truth in the draw, NaN if none has. This is COCOeval.accumulate for
    all areas and the largest number of detections. `ev` is left with the matching of the last
    category.
    """
    whole = np.asfortranarray(weights.numpy(), np.int32)
    image = np.array([row["image_id"] for row in rows])
    label = np.array([row["category_id"] for row in rows])
    score = np.array([row["score"] for row in rows])
    # Categories are matched again one at a time, because the matches of every area, image and
    # category at once are gigabytes of lists.
    ev.params.area_rng = ev.params.area_rng[:1]
    ev.params.area_rng_lbl = ["all"]
    # APs of draws are numpy's work, which threads share; the next category is matched meanwhile.
    jobs: list[tuple[np.ndarray, Future[np.ndarray]]] = []
    with ThreadPoolExecutor(min(MOST_THREADS, loading.cores())) as pool:
        for category in range(1, 1 + categories):
            mine = label == category
            ranked = ranked_detections(
                ev, category, image[mine], score[mine], weights.shape[1]
            )
            # A category counts in the draws that have ground truth of it.
            has_truth = coco_ap.objects_of(ranked.truths, whole) > 0
            if has_truth.any():
                jobs.append((has_truth, pool.submit(coco_ap.aps, ranked, whole)))
    total = np.zeros((len(weights), len(ev.params.iou_thrs)))
    counted = np.zeros((len(weights), 1))
    for has_truth, aps in jobs:
        counted[has_truth] += 1
        total[has_truth] += aps.result()[has_truth]
    return torch.from_numpy(total / np.where(counted > 0, counted, np.nan))


def ranked_detections(
    ev: hotcoco.COCOeval,
    category: int,
    image: np.ndarray,
    score: np.ndarray,
    images: int,
) -> coco_ap.RankedDetections:
    """Match one category's detections and rank them.

    `image` (D,), numbered from 1, and `score` (D,) are the detections of the category; `images` is
    the number of all images.
    """
    thresholds = len(ev.params.iou_thrs)
    # 1. Images with objects of the category: COCOeval matches their detections.
    images_with_objects = ev.coco_gt.get_img_ids(cat_ids=[category])
    matches: list[ImageMatches] = []
    if images_with_objects:
        ev.params.cat_ids = [category]
        ev.params.img_ids = images_with_objects
        ev.evaluate()
        matches = [cast(ImageMatches, m) for m in ev.eval_imgs if m is not None]
    truths = np.zeros(images)
    matched_image: list[int] = []
    matched_score: list[float] = []
    for m in matches:
        truths[m["image_id"] - 1] = len(m["gtIgnore"]) - sum(m["gtIgnore"])
        matched_image += [m["image_id"]] * len(m["dtScores"])
        matched_score += m["dtScores"]
    hit = _side_by_side([m["dtMatches"] for m in matches], thresholds)
    ignored = _side_by_side([m["dtIgnore"] for m in matches], thresholds)
    # 2. All other images: every detection is a miss. COCOeval takes only the surest of an image.
    others = ~np.isin(image, images_with_objects)
    other_image, other_score = image[others], score[others]
    order = np.lexsort((-other_score, other_image))
    other_image, other_score = other_image[order], other_score[order]
    # In this order the first detection of an image is found by searchsorted, which gives every
    # detection its rank within its image.
    rank = np.arange(len(other_image)) - np.searchsorted(other_image, other_image)
    surest = rank < ev.params.max_dets[-1]
    other_image, other_score = other_image[surest], other_score[surest]
    misses = np.ones((thresholds, len(other_image)), bool)
    # 3. Together, the surest first. Of equals the first image's comes first, as in COCOeval.
    all_image = np.concatenate([np.array(matched_image, int), other_image])
    all_score = np.concatenate([np.array(matched_score, float), other_score])
    ranking = np.lexsort((all_image, -all_score))
    return coco_ap.RankedDetections(
        image=all_image[ranking] - 1,
        hit=np.concatenate([hit & ~ignored, ~misses], 1)[:, ranking],
        miss=np.concatenate([~hit & ~ignored, misses], 1)[:, ranking],
        truths=truths,
    )


def _side_by_side(
    lists: Sequence[Sequence[Sequence[int]]], thresholds: int
) -> np.ndarray:
    """Join the (T, d) lists of all images into one bool array (T, sum of d)."""
    rows = []
    for t in range(thresholds):
        values = itertools.chain.from_iterable([of_image[t] for of_image in lists])
        rows.append(np.fromiter(values, bool))
    return np.stack(rows)
