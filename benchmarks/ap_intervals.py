"""The draws of COCO's AP intervals: over all detections, as COCOeval.accumulate goes over them,
against the suite's own way over hits alone; seconds, memory, and the APs compared bit by bit.

    python benchmarks/ap_intervals.py [--images 5000] [--detections 100]

Each way runs once, in a process of its own on one thread; both start from the same matched boxes.
Seconds are of the processor, memory is how far the peak rises above what stands before. The last
output is kept beside this script in ap_intervals.txt.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from detection import evaluate

if TYPE_CHECKING:
    import hotcoco

RECALLS = torch.from_numpy(np.linspace(0, 1, 101))


def over_all(ev: hotcoco.COCOeval, _: object, categories: int, weights: Tensor) -> Tensor:
    """Compute the APs of evaluate.weighted_ap from the matches of every area, image and category at
    once, with precision and recall after every detection. (draws, images) -> (draws, thresholds)."""
    total = torch.zeros(len(weights), len(ev.params.iou_thrs), dtype=torch.float64)
    counted = torch.zeros(len(weights), 1, dtype=torch.float64)
    whole = list(ev.params.area_rng[0])
    matches = [e for e in ev.eval_imgs if e is not None and list(e["aRng"]) == whole]
    for category in range(1, 1 + categories):
        mine = [e for e in matches if e["category_id"] == category]
        mine.sort(key=lambda e: e["image_id"])
        truths = torch.zeros(weights.shape[1], dtype=torch.float64)
        for e in mine:
            truths[e["image_id"] - 1] = float(np.sum(np.asarray(e["gtIgnore"]) == 0))
        positives = weights @ truths
        there = positives > 0
        counted[there] += 1
        scores = np.array([s for e in mine for s in e["dtScores"]])
        ranking = np.argsort(-scores, kind="stable")
        image = np.array([e["image_id"] - 1 for e in mine for _ in e["dtScores"]], int)[ranking]
        if not len(ranking):
            continue
        weight = weights[:, image]
        for t in range(total.shape[1]):
            hit, skip = (
                torch.tensor([bool(v) for e in mine for v in e[key][t]])[ranking]
                for key in ("dtMatches", "dtIgnore")
            )
            total[there, t] += average_precision(weight, hit, skip, positives)[there]
    return total / counted.masked_fill(counted == 0, float("nan"))


def average_precision(weight: Tensor, hit: Tensor, skip: Tensor, positives: Tensor) -> Tensor:
    """weight (draws, D), hit and skip (D,) of ranked detections, positives (draws,) -> (draws,)."""
    true = (weight * (hit & ~skip)).cumsum(1)
    false = (weight * (~hit & ~skip)).cumsum(1)
    recall = true / positives.clamp(min=1)[:, None]
    precision = true / (true + false + np.spacing(1))
    precision = precision.flip(1).cummax(1).values.flip(1)
    place = torch.searchsorted(recall, RECALLS.expand(len(weight), -1).contiguous())
    reached = place < recall.shape[1]
    return (precision.gather(1, place.clamp(max=recall.shape[1] - 1)) * reached).mean(1)


def peak() -> float:
    """The peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(
    truth: dict[str, Any], found: list[Any], way: Callable[..., Tensor], result: SimpleQueue
) -> None:
    """Put: processor seconds of the matching and of the draws' APs, MiB of these, and the APs."""
    begin = time.process_time()
    ev = evaluate.matched(truth, found, "bbox", [])
    ev.accumulate()
    matching = time.process_time() - begin
    weights = evaluate.drawn(len(truth["images"]), "benchmark")
    before, begin = peak(), time.process_time()
    aps = way(ev, found, len(truth["categories"]), weights)
    result.put((matching, time.process_time() - begin, peak() - before, aps.numpy()))


def main() -> None:
    from coco_eval import make
    from machine import describe

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--detections", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    truth, found = make(args.images, args.detections)
    print(describe())
    print(
        f"{args.images} images, {len(found)} boxes, {len(truth['categories'])} categories, "
        f"{evaluate.RESAMPLES} draws"
    )
    seconds, aps = {}, {}
    for name, way in (("hits alone", evaluate.weighted_ap), ("all detections", over_all)):
        # A child has what stands here, and a peak of its own.
        fork = multiprocessing.get_context("fork")
        result = fork.SimpleQueue()
        child = fork.Process(target=timed, args=(truth, found, way, result))
        child.start()
        matching, seconds[name], memory, aps[name] = result.get()
        child.join()
        print(f"  {name:16} {seconds[name]:6.1f} s, peak +{memory:.0f} MiB", flush=True)
    ratio = seconds["all detections"] / seconds["hits alone"]
    same = np.array_equal(aps["hits alone"], aps["all detections"])
    print(f"  ratio {ratio:.1f}; APs of all draws bit-identical: {same}")
    print(f"  the matching and the AP of all images themselves: {matching:.1f} s")


if __name__ == "__main__":
    main()
