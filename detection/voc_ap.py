"""Computes AP by VOC's rules, with its interval.

The numbers are those of Detectron2's evaluator: 11-point AP for 2007, the area for later years. It
does not tell which detection matched what, so for the interval's draws each image is matched again
by its rules. A test holds the AP of every image once to the evaluator's own.
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
CHUNK = 50  # draws at a time: 25,000 detections of a category are 10 MB for 50


@dataclass(frozen=True)
class VocObjects:
    """One category's objects in one image."""

    boxes: np.ndarray  # (m, 4): corners, 1-based and inclusive
    difficult: np.ndarray  # (m,) bool: neither hit nor miss


@dataclass(frozen=True)
class VocDetections:
    """One category's detections in all images, in the order in which they were written down."""

    image: np.ndarray  # (D,): the image's place in the list
    scores: np.ndarray  # (D,)
    boxes: np.ndarray  # (D, 4), as VocObjects'


def score(
    split: Split, detections: Sequence[Detection], manifest: str | None
) -> evaluate.Scores:
    """Return AP, AP50 and AP75 of COCO-format detections, with intervals if `manifest` is given."""
    aps = np.zeros((len(THRESHOLDS), len(split.categories)))
    lines = lines_by_label(detections)
    with tempfile.TemporaryDirectory() as folder:
        for label, name in enumerate(split.categories):
            if label not in lines:
                continue  # nothing found: AP 0
            Path(folder, f"{name}.txt").write_text("\n".join(lines[label]))
            for t, overlap in enumerate(THRESHOLDS):
                aps[t, label] = 100 * evaluators_ap(split, folder, name, overlap)
    means = {
        "AP": float(aps.mean()),
        "AP50": float(aps[0].mean()),
        "AP75": float(aps[5].mean()),
    }
    of_category = {
        name: float(aps[:, label].mean()) for label, name in enumerate(split.categories)
    }
    if not detections:
        return evaluate.Scores(dict.fromkeys(means), {}, dict.fromkeys(of_category), {})
    samples = bootstrap(split, lines, manifest) if manifest is not None else {}
    intervals = evaluate.intervals_of(means, samples, len(split.records))
    return evaluate.Scores(means, intervals, of_category, samples)


def rehearse(split: Split) -> None:
    """Score nothing found, to raise BadInput before the training if the evaluator cannot read."""
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
    """Detectron2's AP of a category, from 0 to 1, of the detections in FOLDER/<name>.txt."""
    from detectron2.evaluation.pascal_voc_evaluation import voc_eval

    files, images = f"{folder}/{{}}.txt", str(split.file)
    annotations = str(split.folder.parent / "Annotations" / "{}.xml")
    with np.errstate(invalid="ignore"):
        _, _, ap = voc_eval(
            files, annotations, images, name, overlap, _eleven_points(split)
        )
    return ap


def _eleven_points(split: Split) -> bool:
    return "2007" in split.name


def lines_by_label(detections: Sequence[Detection]) -> dict[int, list[str]]:
    """Label -> VOC's lines: image, score, box with corners 1-based and inclusive."""
    lines: dict[int, list[str]] = {}
    for d in detections:
        x, y, w, h = d["bbox"]
        text = f"{d['image_id']} {d['score']:.3f} {x + 1:.1f} {y + 1:.1f} {x + w:.1f} {y + h:.1f}"
        lines.setdefault(d["category_id"], []).append(text)
    return lines


def bootstrap(
    split: Split, lines: Mapping[int, Sequence[str]], manifest: str
) -> dict[str, np.ndarray]:
    """AP, AP50 and AP75 in percent of images drawn again, `lines` as the evaluator has them."""
    place = {str(r["image_id"]): i for i, r in enumerate(split.records)}
    weights = evaluate.drawn(len(place), manifest)
    objects = _objects_by_label(split)
    total = torch.zeros(len(weights), len(THRESHOLDS), dtype=weights.dtype)
    for label, of_label in lines.items():
        words = [line.split() for line in of_label]
        ranked = VocDetections(
            image=np.array([place[w[0]] for w in words]),
            scores=np.array([float(w[1]) for w in words]),
            boxes=np.array([[float(v) for v in w[2:]] for w in words]),
        )
        total += aps(ranked, objects[label], weights, elevens=_eleven_points(split))
    return evaluate.summarised(total / len(split.categories))


def _objects_by_label(split: Split) -> list[dict[int, VocObjects]]:
    """Label -> place of an image in the list -> its objects."""
    out: list[dict[int, VocObjects]] = [{} for _ in split.categories]
    for image, record in enumerate(split.records):
        for label in {a["category_id"] for a in record["annotations"]}:
            mine = [a for a in record["annotations"] if a["category_id"] == label]
            # Corners again, 1-based and inclusive: from x, y, width, height
            corners = [
                [x + 1, y + 1, x + w, y + h] for x, y, w, h in (a["bbox"] for a in mine)
            ]
            difficult = [a["difficult"] for a in mine]
            out[label][image] = VocObjects(np.array(corners), np.array(difficult))
    return out


def aps(
    ranked: VocDetections,
    objects: Mapping[int, VocObjects],
    weights: Tensor,
    *,
    elevens: bool,
) -> Tensor:
    """Compute one category's AP, from 0 to 1: (draws, thresholds). `weights` (draws, images) says
    how often a draw has each image. A draw without an object has AP 0, as in the evaluator."""
    ranking = np.argsort(-ranked.scores)  # the evaluator's own call, its ties included
    image = torch.from_numpy(ranked.image[ranking])
    truths = torch.zeros(weights.shape[1], dtype=weights.dtype)
    for place, mine in objects.items():
        truths[place] = float((~mine.difficult).sum())
    out = torch.zeros(len(weights), len(THRESHOLDS), dtype=weights.dtype)
    for t, threshold in enumerate(THRESHOLDS):
        hits, misses = _matched(ranked, ranking, objects, threshold)
        for start in range(0, len(weights), CHUNK):
            part = weights[start : start + CHUNK]
            each = part[:, image]
            out[start : start + CHUNK, t] = _average_precision(
                each * hits, each * misses, part @ truths, elevens=elevens
            )
    return out


def _matched(
    ranked: VocDetections,
    ranking: np.ndarray,
    objects: Mapping[int, VocObjects],
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """Match the ranked detections: (D,) hits, (D,) misses; on difficult objects neither."""
    hits, misses = np.zeros(len(ranking), bool), np.zeros(len(ranking), bool)
    taken: set[tuple[int, int]] = set()
    for i, d in enumerate(ranking):
        place = int(ranked.image[d])
        mine = objects.get(place)
        if mine is None:
            misses[i] = True
            continue
        overlaps = _overlaps(ranked.boxes[d], mine.boxes)
        best = int(overlaps.argmax())
        # 1. On too little of an object
        if not overlaps[best] > threshold:
            misses[i] = True
        # 2. On an object that counts: the first finds it, the others find it again
        elif not mine.difficult[best]:
            hits[i] = (place, best) not in taken
            misses[i] = not hits[i]
            taken.add((place, best))
    return torch.from_numpy(hits), torch.from_numpy(misses)


def _overlaps(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Intersection over union of one box with (m, 4); a pixel is 1 wide."""
    low, high = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    both = np.prod(np.maximum(high - low + 1, 0), axis=1)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    return both / (np.prod(box[2:] - box[:2] + 1) + areas - both)


def _average_precision(
    hits: Tensor, misses: Tensor, truths: Tensor, *, elevens: bool
) -> Tensor:
    """AP of each draw, (draws,), from weighted hits and misses (draws, D) and objects (draws,)."""
    # 1. Precision and recall after each detection; without an object there is no recall
    true, false = hits.cumsum(1), misses.cumsum(1)
    recall = true / truths.clamp(min=1)[:, None]
    precision = true / (true + false).clamp(min=1e-12)
    # 2. The best precision at that recall or a larger one
    precision = precision.flip(1).cummax(1).values.flip(1)
    if (
        elevens
    ):  # 3a. its mean at eleven recalls (VOC 2007), 0 where a recall is not reached
        recalls = torch.from_numpy(np.arange(0, 1.1, 0.1)).expand(len(recall), -1)
        place = torch.searchsorted(recall.contiguous(), recalls.contiguous())
        reached = (place < recall.shape[1]) & (truths > 0)[:, None]
        return (
            precision.gather(1, place.clamp(max=recall.shape[1] - 1)) * reached
        ).sum(1) / 11
    # 3b. or the area below it
    steps = torch.diff(
        recall, dim=1, prepend=torch.zeros(len(recall), 1, dtype=recall.dtype)
    )
    return (steps * precision).sum(1)
