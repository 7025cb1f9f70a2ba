"""Runs with a known truth for the board: `synthetic` keeps predictions, `many` is large."""

from pathlib import Path

import numpy as np

from backbench.board.board import compare_rows
from backbench.board.overall import overall, sentences
from backbench.board.page import write_page
from backbench.board.page_figures import collect_figures
from backbench.datasets.catalog import DATASETS, TWELVE
from backbench.records import store
from backbench.records.data_manifests import DETECTION_SIZES
from backbench.records.predictions import keep
from backbench.records.store import Result
from backbench.stats import confidence
from backbench.tasks import TASKS
from support import records
from support.records import digest_of

Kind = tuple[str, str, str, str, str | None]  # task, dataset, metric, protocol, engine
SCORES = {"1": 70.1, "3.16": 72.3, "10": 71.8}
CHOSEN = {"lr": 3.16, "on": "val", "scores": SCORES, "converged": True}


def detection(dataset: str, protocol: str, engine: str) -> list[Kind]:
    """AP, AP50 and AP75 of the three detectors."""
    kinds: list[Kind] = []
    heads = (
        ("faster_rcnn", "bbox"),
        ("mask_rcnn", "segm"),
        ("keypoint_rcnn", "keypoints"),
    )
    for task, iou in heads:
        kinds += [
            (task, dataset, f"{iou}_{ap}", protocol, engine)
            for ap in ("AP", "AP50", "AP75")
        ]
    return kinds


# The columns of the demo, and those of LORAC's tables.
DEMO: list[Kind] = [
    ("linear", "digits", "top1", "linear-demo-v1", None),
    ("knn", "digits", "top1_k20", "knn-demo-v1", None),
    ("fewshot", "digits", "top1", "fewshot-demo-v1", None),
    ("semi_10pct", "digits", "top1", "semisup-demo-v1", None),
    ("semi_10pct", "digits", "top5", "semisup-demo-v1", None),
    *detection("scenes", "detection-demo-v1", "torchvision"),
]
PAPER: list[Kind] = [
    ("linear", "imagenet", "top1", "linear-lorac-imagenet-v1", None),
    ("linear", "imagenet", "top5", "linear-lorac-imagenet-v1", None),
    *[
        ("linear", name, DATASETS[name].metric, "linear-lorac-v1", None)
        for name in TWELVE
    ],
    ("semi_1pct", "imagenet", "top1", "semisup-v1", None),
    ("semi_1pct", "imagenet", "top5", "semisup-v1", None),
    ("semi_10pct", "imagenet", "top1", "semisup-v1", None),
    ("semi_10pct", "imagenet", "top5", "semisup-v1", None),
    *detection("coco2017", "detection-1x-v1", "detectron2"),
]


def generator(what: str) -> np.random.Generator:
    return np.random.default_rng(int(digest_of(what)[:12], 16))


def synthetic(
    root: Path,
    names: list[str],
    kinds: list[Kind],
    *,
    seed: int = 0,
    images: int = 720,
    gap: float = 2.0,
    kept: bool = True,
    seeds: int = 1,
    trainings: float = 0.0,
) -> None:
    """Runs with kept predictions in which each next name is `gap` points better. All share the
    images' difficulties; trainings with other seeds spread by `trainings` points."""
    for kind in kinds:
        task, dataset, metric, *_ = kind
        rng = generator(f"{seed} {dataset} {task} {metric}")
        # The images of a detection dataset have a number that columns know.
        count = DETECTION_SIZES.get(dataset, (0, images))[1]
        base = rng.uniform(45, 85)
        if metric == "top5":  # never less than top-1
            base = 10 + generator(f"{seed} {dataset} {task} top1").uniform(45, 85)
        if task.endswith("_rcnn"):  # stricter overlaps give less
            family, _, name = metric.partition("_")
            base = generator(f"{seed} {dataset} {task} {family}").uniform(65, 85)
            base -= {"AP50": 0, "AP": 15, "AP75": 20}[name]
        hard = rng.normal(size=count)
        label = rng.integers(0, 60 if metric == "mean_per_class" else 10, size=count)
        held = held_of(kind, f"{count} {seed}", count)
        manifest = held.get("manifests", {}).get("test") or digest_of(held["val"])
        for nth, name in enumerate(names):
            run = root / f"{task}-{dataset}" / name
            rows = []
            for s in range(seeds):
                own = generator(f"{seed} {kind} {name} {s}")
                score = hard + own.normal(size=count)
                moved = trainings * own.normal() if trainings else 0.0
                share = min(0.99, (base + gap * nth + moved) / 100)
                hit = score > np.quantile(score if gap else hard, 1 - share)
                provenance = {"manifest": manifest, **held}
                arrays = predictions(kind, hit, label, manifest)
                arrays["manifest"] = manifest
                if kept:
                    file = keep(run, f"{metric}-{s}", **arrays)
                    provenance["predictions"] = file
                row = a_row(
                    kind,
                    name,
                    arrays,
                    seed=s,
                    provenance=provenance,
                    origin={"command": command(task, name, dataset, run)},
                )
                rows.append(row)
            store.append(run, rows)


def held_of(kind: Kind, what: str, images: int) -> dict:
    """The recipe and the lists of a row that was scored on so many images."""
    task, dataset, _, protocol, _ = kind
    held = records.held(task, dataset, protocol)
    if task.endswith("_rcnn"):
        digest = digest_of(f"{dataset} {what}")[:16]
        held["val"] = f"{dataset}:{digest}:{images}"
    else:
        test = digest_of(f"{dataset} test {what}")
        held["manifests"] = held["manifests"] | {"test": test}
        held["images"] = {"train": None, "val": None, "test": images}
    return held


def command(task: str, name: str, dataset: str, run: Path) -> str:
    return f"backbench {task} {name}.safetensors --datasets {dataset} --out {run}"


def predictions(kind: Kind, hit: np.ndarray, label: np.ndarray, manifest: str) -> dict:
    """What a run keeps: a detector the metric on resamples, others a class per image."""
    task, _, metric, *_ = kind
    if task.endswith("_rcnn"):
        rng = np.random.default_rng(int(manifest[:12], 16))
        resample = rng.integers(0, len(hit), size=(500, len(hit)))
        return {f"bootstrap_{metric}": 100 * hit[resample].mean(1), "images": len(hit)}
    wrong = (label + 1) % 1000
    return {"prediction": np.where(hit, label, wrong), "label": label, "hits5": hit}


def a_row(
    kind: Kind, name: str, arrays: dict, *, seed: int, provenance: dict, origin: dict
) -> Result:
    """What these predictions give as a result, with its interval."""
    task, dataset, metric, protocol, engine = kind
    if task.endswith("_rcnn"):
        draws = arrays[f"bootstrap_{metric}"]
        value = draws.mean()
        ci95 = confidence.of_resamples(value / 100, draws / 100, arrays["images"])
    else:
        label = arrays["label"]
        hit = arrays["prediction"] == label
        if metric == "mean_per_class":
            weight = confidence.ClassWeights(label).weight
            ci95 = confidence.of_hits(hit, label)
        else:
            weight = 1 / len(hit)
            ci95 = confidence.of_hits(hit, None)
        value = 100 * (hit * weight).sum()
    return records.a_result(
        checkpoint=digest_of(name),
        name=name,
        method=name.split("-", maxsplit=1)[0],
        arch="resnet18" if "demo" in protocol else "resnet50",
        epochs=None if name == "random" else 200,
        task=task,
        dataset=dataset,
        split=TASKS[task].split,
        metric=metric,
        protocol=protocol,
        engine=engine,
        value=value,
        ci95=ci95,
        chosen=chosen_of(provenance["recipe"]),
        seed=seed,
        provenance=provenance,
        origin=origin,
    )


def chosen_of(recipe: dict) -> dict:
    """A choice on the recipe's grid of rates, if it has one."""
    grid = recipe.get("head_lr") or recipe.get("lr")
    if not grid:
        return CHOSEN
    scores = {f"{lr:g}": 72.5 - i for i, lr in enumerate(grid)}
    return {"lr": grid[0], "on": "val", "scores": scores}


def write_whole_page(board, path: Path, *, runs=(), judged=(), sets=None) -> None:
    """The page with everything that `backbench leaderboard --html` puts on it."""
    if sets is None:
        sets = overall(board)
    write_page(
        board,
        path,
        pairs=compare_rows(board),
        figures=collect_figures(board, runs),
        answer=sentences(board, sets),
        sets=sets,
        judged=judged,
    )


def many(root: Path, checkpoints: int, columns: int) -> None:
    """checkpoints x columns results without predictions, 100 checkpoints to a file."""
    values = np.random.default_rng(0).uniform(20, 90, size=(checkpoints, columns))
    for start in range(0, checkpoints, 100):
        rows = []
        for i in range(start, min(start + 100, checkpoints)):
            rows += [one_of_many(i, c, values[i]) for c in range(columns)]
        store.append(root / f"run{start}", rows)


def one_of_many(i: int, c: int, values: np.ndarray) -> Result:
    dataset = f"set{c // 2:02}"
    protocol = f"linear-v{c % 3}"
    value = float(values[c])
    scores = {str(n): float(v) for n, v in enumerate(values[:7])}
    best = max(scores, key=scores.__getitem__)
    return records.a_result(
        checkpoint=digest_of(str(i)),
        name=f"checkpoint-{i}",
        arch="resnet50",
        method=("moco_v2", "lorac", "simclr")[i % 3],
        epochs=200,
        dataset=dataset,
        metric=("top1", "top5")[c % 2],
        protocol=protocol,
        value=value,
        ci95=(value - 1, value + 1),
        chosen={"lr": float(best), "on": "val", "scores": scores},
        provenance={"manifest": digest_of(dataset), "recipe": {"protocol": protocol}},
        origin={"command": command("linear", str(i), dataset, Path(f"runs/{i}"))},
    )
