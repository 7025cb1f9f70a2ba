"""Computes AP by VOC's rules, with its interval.

The numbers are those of Detectron2's evaluator: 11-point AP for 2007, the area under the curve for
later years. The evaluator does not tell which detection matched which object, so for the draws of
the interval every image is matched again, by the same rules. A test compares the AP of a draw that
has every image once with the evaluator's own.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backbench.detection import evaluate
from backbench.detection.data.dataset_dicts import Detection
from backbench.detection.data.split import Split
from backbench.errors import BadInput

THRESHOLDS = [0.5 + 0.05 * t for t in range(10)]  # of overlap; AP is the mean over them
CHUNK = 50  # draws at a time: for 50 draws, 25,000 detections of a category are 10 MB


@dataclass(frozen=True)
class VocObjects:
    """One category's objects in one image."""

    boxes: np.ndarray  # (m, 4): corners, 1-based and inclusive
    difficult: np.ndarray  # (m,) bool: neither hit nor miss


@dataclass(frozen=True)
class VocDetections:
    """One category's D detections in all images, in the order of the evaluator's file."""

    image: np.ndarray  # (D,): the index of the detection's image
    scores: np.ndarray  # (D,)
    boxes: np.ndarray  # (D, 4): corners, 1-based and inclusive


def score(
    split: Split, detections: Sequence[Detection], manifest: str | None
) -> evaluate.Scores:
    """Return AP, AP50 and AP75 of COCO-format detections in percent.

    `manifest` decides the draws of the intervals; with None there are none.
    """
    if not detections:
        undefined = dict.fromkeys(("AP", "AP50", "AP75"))
        return evaluate.Scores(undefined, {}, dict.fromkeys(split.categories), {})
    # 1. The evaluator's AP at each threshold; 0 for a category of which nothing was found
    aps = np.zeros((len(THRESHOLDS), len(split.categories)))
    lines = lines_by_label(detections)
    with tempfile.TemporaryDirectory() as folder:
        for label, name in enumerate(split.categories):
            if label not in lines:
                continue
            Path(folder, f"{name}.txt").write_text("\n".join(lines[label]))
            for t, overlap in enumerate(THRESHOLDS):
                aps[t, label] = 100 * evaluators_ap(split, folder, name, overlap)
    values = {
        "AP": float(aps.mean()),
        "AP50": float(aps[0].mean()),
        "AP75": float(aps[5].mean()),
    }
    per_category: dict[str, float | None] = {}
    for label, name in enumerate(split.categories):
        per_category[name] = float(aps[:, label].mean())
    # 2. Intervals
    samples: dict[str, np.ndarray] = {}
    if manifest is not None:
        samples = bootstrap(split, lines, manifest)
    intervals = evaluate.intervals_of(values, samples, len(split.records))
    return evaluate.Scores(values, intervals, per_category, samples)


def rehearse(split: Split) -> None:
    """Score an empty list of detections.

    Raises BadInput if the evaluator cannot read the annotations: before the training, not after it.
    """
    with tempfile.TemporaryDirectory() as folder:
        name = split.categories[0]
        Path(folder, f"{name}.txt").touch()
        try:
            evaluators_ap(split, folder, name, THRESHOLDS[0])
        except (ValueError, TypeError, AttributeError, OSError, SyntaxError) as error:
            cause = " ".join(str(error).split())[:160]
            raise BadInput(
                f"{split.file}: VOC's evaluator cannot score it ({cause}); it needs a name in every "
                "line, and in every object whole numbers for box, truncated and difficult"
            ) from None


def evaluators_ap(split: Split, folder: str, name: str, overlap: float) -> float:
    """Return Detectron2's AP, from 0 to 1, of the detections in FOLDER/<name>.txt.

    `name` is the category's, `overlap` the threshold.
    """
    from detectron2.evaluation.pascal_voc_evaluation import voc_eval

    detection_files = f"{folder}/{{}}.txt"
    annotation_files = str(split.folder.parent / "Annotations" / "{}.xml")
    with np.errstate(invalid="ignore"):
        _, _, ap = voc_eval(
            detection_files,
            annotation_files,
            str(split.file),
            name,
            overlap,
            _eleven_points(split),
        )
    return ap


def _eleven_points(split: Split) -> bool:
    return "2007" in split.name


def lines_by_label(detections: Sequence[Detection]) -> dict[int, list[str]]:
    """Return label -> the lines of VOC's file: image, score, corners 1-based and inclusive."""
    lines: dict[int, list[str]] = {}
    for d in detections:
        x, y, w, h = d["bbox"]
        line = f"{d['image_id']} {d['score']:.3f} {x + 1:.1f} {y + 1:.1f} {x + w:.1f} {y + h:.1f}"
        lines.setdefault(d["category_id"], []).append(line)
    return lines


def bootstrap(
    split: Split, lines: Mapping[int, Sequence[str]], manifest: str
) -> dict[str, np.ndarray]:
    """Return AP, AP50 and AP75 of each bootstrap draw in percent.

    `lines` are `lines_by_label`'s: read back from them, scores and boxes are rounded as the
    evaluator's.
    """
    image_index = {str(r["image_id"]): i for i, r in enumerate(split.records)}
    weights = evaluate.drawn(len(image_index), manifest)
    objects = _objects_by_label(split)
    total = torch.zeros(len(weights), len(THRESHOLDS), dtype=weights.dtype)
    for label, lines_of_label in lines.items():
        words = [line.split() for line in lines_of_label]
        detections = VocDetections(
            image=np.array([image_index[w[0]] for w in words]),
            scores=np.array([float(w[1]) for w in words]),
            boxes=np.array([[float(v) for v in w[2:]] for w in words]),
        )
        total += aps(detections, objects[label], weights, elevens=_eleven_points(split))
    return evaluate.summarised(total / len(split.categories))


def _objects_by_label(split: Split) -> list[dict[int, VocObjects]]:
    """Return, for each label, the objects of each image that has any, by the image's index."""
    out: list[dict[int, VocObjects]] = [{} for _ in split.categories]
    for image, record in enumerate(split.records):
        for label in {a["category_id"] for a in record["annotations"]}:
            corners = []
            difficult = []
            for a in record["annotations"]:
                if a["category_id"] == label:
                    # From COCO's x, y, w, h, which count from 0, to VOC's corners, which count from 1
                    # and are inclusive: x + 1 and (x + 1) + w - 1
                    x, y, w, h = a["bbox"]
                    corners.append([x + 1, y + 1, x + w, y + h])
                    difficult.append(a["difficult"])
            out[label][image] = VocObjects(np.array(corners), np.array(difficult))
    return out


def aps(
    detections: VocDetections,
    objects: Mapping[int, VocObjects],
    weights: Tensor,
    *,
    elevens: bool,
) -> Tensor:
    """Compute one category's AP, from 0 to 1, of each draw at each threshold: (draws, thresholds).

    `weights` (draws, images) says how often a draw has each image; `elevens` asks for VOC 2007's
    11-point AP. A draw without an object has AP 0, as in the evaluator.
    """
    # This call is the evaluator's own, so that ties are broken alike.
    ranking = np.argsort(-detections.scores)
    image = torch.from_numpy(detections.image[ranking])
    truths = torch.zeros(weights.shape[1], dtype=weights.dtype)
    for index, objects_of_image in objects.items():
        truths[index] = float((~objects_of_image.difficult).sum())
    out = torch.zeros(len(weights), len(THRESHOLDS), dtype=weights.dtype)
    for t, threshold in enumerate(THRESHOLDS):
        hits, misses = _matched(detections, ranking, objects, threshold)
        for start in range(0, len(weights), CHUNK):
            chunk = weights[start : start + CHUNK]
            times = chunk[:, image]
            out[start : start + CHUNK, t] = _average_precision(
                times * hits, times * misses, chunk @ truths, elevens=elevens
            )
    return out


def _matched(
    detections: VocDetections,
    ranking: np.ndarray,
    objects: Mapping[int, VocObjects],
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """Match the detections in the order of `ranking`: bool hits (D,) and misses (D,).

    A detection of a difficult object is neither.
    """
    hits = np.zeros(len(ranking), bool)
    misses = np.zeros(len(ranking), bool)
    found: set[tuple[int, int]] = set()  # (image, object)
    for i, d in enumerate(ranking):
        image = int(detections.image[d])
        if image not in objects:
            misses[i] = True
            continue
        overlaps = _overlaps(detections.boxes[d], objects[image].boxes)
        best = int(overlaps.argmax())
        if not overlaps[best] > threshold:
            misses[i] = True
        elif objects[image].difficult[best]:
            continue
        elif (image, best) in found:
            # An object is found once; to find it again is a miss.
            misses[i] = True
        else:
            hits[i] = True
            found.add((image, best))
    return torch.from_numpy(hits), torch.from_numpy(misses)


def _overlaps(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the intersection over union of one box (4,) with (m, 4); corners are inclusive."""
    low = np.maximum(box[:2], boxes[:, :2])
    high = np.minimum(box[2:], boxes[:, 2:])
    intersection = np.prod(np.maximum(high - low + 1, 0), axis=1)
    area = np.prod(box[2:] - box[:2] + 1)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    return intersection / (area + areas - intersection)


def _average_precision(
    hits: Tensor, misses: Tensor, truths: Tensor, *, elevens: bool
) -> Tensor:
    """Compute the AP of each draw, (draws,).

    Hits and misses (draws, D) are weighted by the draw; `truths` (draws,) counts its objects.
    """
    # 1. Precision and recall after each detection. A draw without an object has no recall, and its
    #    division by 1 makes it 0.
    true = hits.cumsum(1)
    false = misses.cumsum(1)
    recall = true / truths.clamp(min=1)[:, None]
    precision = true / (true + false).clamp(min=1e-12)
    # 2. The best precision at that recall or a larger one
    precision = precision.flip(1).cummax(1).values.flip(1)
    # 3. VOC 2007: the mean of it at eleven recalls, 0 where a recall is not reached
    if elevens:
        recalls = torch.from_numpy(np.arange(0, 1.1, 0.1)).expand(len(recall), -1)
        place = torch.searchsorted(recall.contiguous(), recalls.contiguous())
        reached = place < recall.shape[1]
        at_recalls = precision.gather(1, place.clamp(max=recall.shape[1] - 1))
        return (at_recalls * reached).sum(1) / 11
    # 4. Later years: the area below it
    zero = torch.zeros(len(recall), 1, dtype=recall.dtype)
    steps = torch.diff(recall, dim=1, prepend=zero)
    return (steps * precision).sum(1)
