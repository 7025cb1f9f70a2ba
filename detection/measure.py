"""From a trained detector to its numbers: detections of all ranks, AP, and what is kept of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.containers import containers
from backbench.detection import backbones, evaluate, voc_ap
from backbench.detection.data import voc
from backbench.detection.data.dataset_dicts import Detection
from backbench.detection.engine import DetectionEngine
from backbench.detection.process_group import wait_until
from backbench.detection.protocol import decisive, protocol
from backbench.detection.run import (
    DETECTIONS_FILE,
    EVALUATIONS_FILE,
    FINAL_FILE,
    PER_CATEGORY_FILE,
    DetectionRun,
    Prepared,
)
from backbench.errors import BadInput
from backbench.images import contents
from backbench.parallel import loading
from backbench.recipes import fast
from backbench.records import store
from backbench.records.store import Result
from backbench.runs import atomic
from backbench.runs.folder import PICTURES, RESULTS_FILE, RUN_FILE
from backbench.runs.run_progress import Progress
from backbench.runs.terminal import log
from backbench.weights import trunk_facts

if TYPE_CHECKING:
    import numpy as np

EVALUATIONS_FOLDER = "evaluations"
SCORING = ("DATASETS.TEST", "TEST.")  # how the keys begin that only scoring reads
IMAGES = ("train_images", "val_images")  # of an identity: what the images hold
TRAINING = "TEST.PRECISE_BN."  # of those, what belongs to the training
SHARE = ".predictions.{}.json"  # a rank's detections, until they are scored


def predict(
    run: DetectionRun, p: Prepared, engine: DetectionEngine, rank: int
) -> list[Detection]:
    """Gather all detections, in the split's order, on rank 0; category ids are the file's own."""
    mine = p.val.records[rank :: run.world]
    progress = (
        Progress(run.out, len(mine), "evaluate", unit="image") if rank == 0 else None
    )
    by_image: list[list[Detection]] = []  # of each image
    workers = min(p.cfg.DATALOADER.NUM_WORKERS, loading.cores(run.world))
    for detections in engine.predictions(mine, workers=workers):
        for detection in detections:
            detection["category_id"] = p.val.ids[detection["category_id"]]
        by_image.append(detections)
        if progress is not None:
            progress.advance()
    by_image = _gather(run, by_image, rank, images=len(p.val.records))
    return [detection for detections in by_image for detection in detections]


def _gather(
    run: DetectionRun, mine: list[list[Detection]], rank: int, *, images: int
) -> list[list[Detection]]:
    """Bring every rank's images to rank 0, through files: masks of 5,000 images are no tensor. They
    lie there until rank 0 is through with them: see `scored`."""
    if rank:
        atomic.write_text(run.out / SHARE.format(rank), json.dumps(mine))
        return []
    shares = [mine]
    for r in range(1, run.world):
        file = run.out / SHARE.format(r)
        wait_until(file.exists)
        shares.append(json.loads(file.read_text()))
    # Rank r had the images r, r + world, r + 2 world, ...
    return [shares[i % run.world][i // run.world] for i in range(images)]


def clear(run: DetectionRun) -> None:
    """Remove the ranks' shares of a killed run, which may have had more ranks."""
    for file in run.out.glob(SHARE.format("*")):
        file.unlink(missing_ok=True)


def scored(run: DetectionRun, rank: int) -> None:
    """Rank 0 has scored what `predict` gave it; the others have waited here for that."""
    if rank:
        share = run.out / SHARE.format(rank)
        wait_until(lambda: not share.exists())
    else:
        clear(run)


def record(
    run: DetectionRun, p: Prepared, detections: list[Detection], speed: float | None
) -> None:
    """Write AP with intervals, AP per category and pictures; all numbers appended in one write,
    once. `speed` is how many images a second the detector took on this rank."""
    from backbench.detection import pictures

    # 1. What was found
    atomic.write_text(run.out / DETECTIONS_FILE, json.dumps(detections))
    # 2. Its AP. The intervals' draws depend on the images alone: checkpoints are compared by them.
    manifest = hashlib.sha256(p.val.fingerprint.encode()).hexdigest()
    scores = {kind: _scores(kind, p, detections, manifest) for kind in p.task.aps}
    samples: dict[str, np.ndarray] = {}
    for kind, of_kind in scores.items():
        for name, draws in of_kind.samples.items():
            samples[f"bootstrap_{kind}_{name}"] = draws
    # 3. Files first, rows last: a run that has rows is finished.
    stem = f"{p.task.name}_{run.engine}-s{p.seed}-{p.checkpoint.digest[:12]}"
    images = len(p.val.records)
    kept = store.keep_predictions(
        run.out, stem, manifest=manifest, images=images, **samples
    )
    per_category = {kind: of_kind.per_category for kind, of_kind in scores.items()}
    atomic.write_json(run.out / PER_CATEGORY_FILE, per_category)
    pictures.write(run.out / PICTURES, p.val, detections)
    origin: store.Origin = {} if speed is None else {"images_per_second": speed}
    rows = results(run, p, scores, kept, origin)
    store.owe(run.out, len(rows))
    store.append(run.out, rows, skip_known=True)


def on_the_way(
    run: DetectionRun, p: Prepared, engine: DetectionEngine, rank: int, step: int
) -> None:
    """Append AP after `step` iterations to EVALUATIONS_FILE, to look at: no row of results is made,
    and the training goes on as if it had not been."""
    detections = predict(run, p, engine, rank)
    if rank == 0:
        values: dict[str, float | None] = {}
        for kind in p.task.aps:
            for metric, value in _scores(kind, p, detections, None).values.items():
                values[f"{kind}_{metric}"] = value
        # What a lost future had written goes.
        rows = [row for row in _evaluations(run) if row["step"] < step]
        lines = [json.dumps(row) + "\n" for row in (*rows, {"step": step, **values})]
        atomic.write_text(run.out / EVALUATIONS_FILE, "".join(lines))
        log.info(f"after iteration {step}: {values}")
    scored(run, rank)


def was_scored(run: DetectionRun, step: int) -> bool:
    """True if EVALUATIONS_FILE has the line of `step`."""
    return any(row["step"] == step for row in _evaluations(run))


def _evaluations(run: DetectionRun) -> list[dict[str, float]]:
    file = run.out / EVALUATIONS_FILE
    return (
        [json.loads(line) for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )


def _scores(
    kind: str, p: Prepared, detections: list[Detection], manifest: str | None
) -> evaluate.Scores:
    if p.val.name in voc.DATASETS:
        return voc_ap.score(p.val, detections, manifest)
    sigmas = p.cfg.TEST.KEYPOINT_OKS_SIGMAS
    return evaluate.score(p.val, detections, kind, sigmas, manifest=manifest)


def results(
    run: DetectionRun,
    p: Prepared,
    scores: dict[str, evaluate.Scores],
    kept: str,
    origin: store.Origin,
) -> list[store.Result]:
    """A row for every AP; `kept` is the file of the draws."""
    name, sides = protocol(run.given), backbones.padded_test_size(p.cfg)
    provenance = {
        **fast.of_trunk(p.checkpoint.provenance),
        "config": run.given.path.stem,
        "recipe": decisive(run.given),
        "train": p.train.fingerprint,
        "val": p.val.fingerprint,
        contents.KEY: contents.whole(p.val.images),
        **containers.provenance([("train", p.train.images), ("val", p.val.images)]),
        "predictions": kept,
        "per_category": PER_CATEGORY_FILE,
        "trunk": trunk_facts.of_maps(p.checkpoint, sides, backbones.scaled),
        "evaluator": "detectron2 voc_eval" if p.val.name in voc.DATASETS else "hotcoco",
    }
    rows = []
    for kind, of_kind in scores.items():
        for metric, value in of_kind.values.items():
            row = store.Result(
                checkpoint=p.checkpoint.digest,
                name=p.checkpoint.name,
                method=p.checkpoint.method,
                arch=p.checkpoint.arch,
                epochs=p.checkpoint.epochs,
                task=p.task.name,
                dataset=p.val.dataset,
                split=p.val.part,
                metric=f"{kind}_{metric}",
                value=value,
                ci95=of_kind.ci95.get(metric),
                protocol=name,
                engine=run.engine,
                seed=p.seed,
                provenance=provenance,
                origin=origin,
            )
            rows.append(row)
    return rows


def report(out: Path) -> list[Result]:
    """Log the numbers that the run holds, and return them; none unless they are all that it owes."""
    if not store.complete(out):
        return []
    rows, _ = store.read(out / RESULTS_FILE)
    for r in rows:
        interval = f"  [{r.ci95[0]:.1f}, {r.ci95[1]:.1f}]" if r.ci95 else ""
        value = "undefined" if r.value is None else f"{r.value:.2f}"
        log.info(f"{r.metric:16} {value}{interval}")
    return rows


def evaluation(run: DetectionRun, identity: Mapping[str, object]) -> DetectionRun:
    """Choose the folder of --eval-only: the trained run's own if nothing differs, else a folder
    below it. Raises BadInput if there is no detector, or another training's."""
    # What only scoring reads -- the file that is scored on, sizes and thresholds of testing -- may
    # be another than in the training: that is a run of its own, both are on the board.
    file = run.out / FINAL_FILE
    if not file.exists():
        raise BadInput(
            f"{file}: no trained detector to evaluate; run without --eval-only first"
        )
    now = json.loads(json.dumps(identity))
    then = _trained(run.out)
    if then is None or then == now or _training(then) != _training(now):
        return run  # and the folder says what differs, if anything does
    named = {key: value for key, value in now.items() if key not in IMAGES}
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
    name = f"{str(now['val']).split(':')[0]}-{digest[:8]}"
    return replace(run, out=run.out / EVALUATIONS_FOLDER / name, trained=run.out)


def _trained(out: Path) -> dict[str, object] | None:
    """The identity of the run that made the detector; None where its folder does not say."""
    try:
        return dict(json.loads((out / RUN_FILE).read_text())["identity"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _training(identity: Mapping[str, object]) -> dict[str, object]:
    """The part of an identity that decides the detector itself."""
    out = {
        k: v for k, v in identity.items() if k not in ("config", "val", "val_images")
    }
    config, keys = identity.get("config"), {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        scoring = key.startswith(SCORING) and not key.startswith(TRAINING)
        if not scoring and not key.endswith("_TEST"):
            keys[key] = value
    return out | {"config": keys}
