"""Turns a trained detector into its numbers: gathers detections, scores them, writes the results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.containers.provenance import container_provenance
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
from backbench.records import predictions, store
from backbench.records.store import Result
from backbench.runs import atomic
from backbench.runs.folder import PICTURES, RESULTS_FILE, RUN_FILE
from backbench.runs.run_progress import Progress
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.weights import trunk_facts

if TYPE_CHECKING:
    import numpy as np

EVALUATIONS_FOLDER = "evaluations"
SHARE = ".predictions.{}.json"  # a rank's detections, until they are scored
# Keys of a config that begin so are read by scoring alone
SCORING = ("DATASETS.TEST", "TEST.")
# The exception: the training reads those that begin so
TRAINING = "TEST.PRECISE_BN."
# The entries of a run's identity that digest the bytes of the images
IMAGES = ("train_images", "val_images")


def predict(
    run: DetectionRun, p: Prepared, engine: DetectionEngine, rank: int
) -> list[Detection]:
    """Detect objects in this rank's images, and gather all ranks' detections on rank 0.

    They are in the split's order, and their category ids are the file's own. The other ranks return
    nothing.
    """
    mine = p.val.records[rank :: run.world]
    progress = None
    if rank == 0:
        progress = Progress(run.out, len(mine), "evaluate", unit="image")
    by_image: list[list[Detection]] = []
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
    """Bring every rank's detections to rank 0, through files, as they are no tensor.

    The files stay until rank 0 has scored them: see `scored`.
    """
    if rank != 0:
        atomic.write_text(run.out / SHARE.format(rank), json.dumps(mine))
        return []
    shares = [mine]
    for other in range(1, run.world):
        file = run.out / SHARE.format(other)
        wait_until(file.exists)
        shares.append(json.loads(file.read_text()))
    # Rank r had the images r, r + world, r + 2 world, ...
    return [shares[i % run.world][i // run.world] for i in range(images)]


def clear(run: DetectionRun) -> None:
    """Remove the ranks' shares of a killed run, which may have had more ranks."""
    for file in run.out.glob(SHARE.format("*")):
        file.unlink(missing_ok=True)


def scored(run: DetectionRun, rank: int) -> None:
    """Let the other ranks wait here until rank 0 has scored what `predict` gave it."""
    # Rank 0 says so by removing the shares.
    if rank == 0:
        clear(run)
    else:
        share = run.out / SHARE.format(rank)
        wait_until(lambda: not share.exists())


def record(
    run: DetectionRun, p: Prepared, detections: list[Detection], speed: float | None
) -> None:
    """Score the detections and write AP with intervals, AP per category and pictures.

    All rows are appended in one write, once. `speed` is how many images a second the detector took
    on this rank.
    """
    from backbench.detection import pictures

    # 1. The detections themselves
    atomic.write_text(run.out / DETECTIONS_FILE, json.dumps(detections))
    # 2. AP. The draws of the intervals depend on the images alone, so that two checkpoints are
    #    compared draw by draw.
    manifest = hashlib.sha256(p.val.fingerprint.encode()).hexdigest()
    scores = {kind: _scores(kind, p, detections, manifest) for kind in p.task.aps}
    samples: dict[str, np.ndarray] = {}
    for kind, of_kind in scores.items():
        for name, draws in of_kind.samples.items():
            samples[f"bootstrap_{kind}_{name}"] = draws
    # 3. Files come first and rows last, because a run that has rows is finished.
    kept = predictions.keep(
        run.out,
        f"{p.task.name}_{run.engine}-s{p.seed}-{p.checkpoint.digest[:12]}",
        manifest=manifest,
        images=len(p.val.records),
        **samples,
    )
    per_category = {kind: of_kind.per_category for kind, of_kind in scores.items()}
    atomic.write_json(run.out / PER_CATEGORY_FILE, per_category)
    pictures.write(run.out / PICTURES, p.val, detections)
    origin: store.Origin = {}
    if speed is not None:
        origin["images_per_second"] = speed
    rows = results(run, p, scores, kept, origin)
    store.owe(run.out, len(rows))
    store.append(run.out, rows, skip_known=True)


def on_the_way(
    run: DetectionRun, p: Prepared, engine: DetectionEngine, rank: int, step: int
) -> None:
    """Score the detector after `step` iterations and append its AP to EVALUATIONS_FILE.

    It is there to look at: it is no row of the results, and it does not influence the training.
    """
    detections = predict(run, p, engine, rank)
    if rank == 0:
        values: dict[str, float | None] = {}
        for kind in p.task.aps:
            for metric, value in _scores(kind, p, detections, None).values.items():
                values[f"{kind}_{metric}"] = value
        # A killed run that continues from an earlier state has lines of later steps; they go.
        rows = [row for row in _evaluations(run) if row["step"] < step]
        rows.append({"step": step, **values})
        lines = [json.dumps(row) + "\n" for row in rows]
        atomic.write_text(run.out / EVALUATIONS_FILE, "".join(lines))
        log.info(f"after iteration {step}: {values}")
    scored(run, rank)


def was_scored(run: DetectionRun, step: int) -> bool:
    """Return True if EVALUATIONS_FILE has the line of `step`."""
    return any(row["step"] == step for row in _evaluations(run))


def _evaluations(run: DetectionRun) -> list[dict[str, Any]]:
    file = run.out / EVALUATIONS_FILE
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


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
    """Make a row for every AP; `kept` is the file of the draws."""
    protocol_name = protocol(run.given)
    sides = backbones.padded_test_size(p.cfg)
    evaluator = "detectron2 voc_eval" if p.val.name in voc.DATASETS else "hotcoco"
    provenance = {
        **fast.of_trunk(p.checkpoint.provenance),
        "config": run.given.path.stem,
        "recipe": decisive(run.given),
        "train": p.train.fingerprint,
        "val": p.val.fingerprint,
        contents.KEY: contents.whole(p.val.images),
        **container_provenance([("train", p.train.images), ("val", p.val.images)]),
        "predictions": kept,
        "per_category": PER_CATEGORY_FILE,
        "trunk": trunk_facts.of_maps(p.checkpoint, sides, backbones.scaled),
        "evaluator": evaluator,
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
                protocol=protocol_name,
                engine=run.engine,
                seed=p.seed,
                provenance=provenance,
                origin=origin,
            )
            rows.append(row)
    return rows


def report(out: Path) -> list[Result]:
    """Log the numbers of a finished run and return them; an unfinished run has none. What `errors`
    added to them is left to `errors`."""
    if not store.complete(out):
        return []
    found, _ = store.read(out / RESULTS_FILE)
    rows = [row for row in found if TASKS[row.task].explains is None]
    for row in rows:
        value = "undefined" if row.value is None else f"{row.value:.2f}"
        interval = ""
        if row.ci95:
            low, high = row.ci95
            interval = f"  [{low:.1f}, {high:.1f}]"
        log.info(f"{row.metric:16} {value}{interval}")
    return rows


def evaluation(run: DetectionRun, identity: Mapping[str, object]) -> DetectionRun:
    """Choose the folder of --eval-only: the trained run's own, or one below it.

    Whatever only scoring reads (the annotation file, the sizes and thresholds of testing) may differ
    from the training's. Then the evaluation is a run of its own, in a folder below the trained run,
    and both are on the board. Raises BadInput if there is no trained detector.
    """
    file = run.out / FINAL_FILE
    if not file.exists():
        raise BadInput(
            f"{file}: no trained detector to evaluate; run without --eval-only first"
        )
    now = json.loads(json.dumps(identity))
    then = _identity_of_training(run.out)
    if then is None or then == now:
        return run
    if _training_part(then) != _training_part(now):
        # It is another training's detector. Opening the run's folder says so, and what differs.
        return run
    named = {key: value for key, value in now.items() if key not in IMAGES}
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
    dataset = str(now["val"]).split(":")[0]
    out = run.out / EVALUATIONS_FOLDER / f"{dataset}-{digest[:8]}"
    return replace(run, out=out, trained=run.out)


def refuse_another_scoring(run: DetectionRun, identity: Mapping[str, object]) -> None:
    """Raise BadInput where the detector is there, and only what scoring reads is otherwise now."""
    then = _identity_of_training(run.out)
    now = json.loads(json.dumps(identity))
    if then is None or then == now or not run.final.exists():
        return
    if _training_part(then) != _training_part(now):
        return
    what = "its scored boxes" if then.get("val") != now["val"] else "what scoring reads"
    raise BadInput(
        f"{run.out}: holds the detector of this training, but {what} changed since; --eval-only"
        " scores it again without training, or choose another --out"
    )


def _identity_of_training(out: Path) -> dict[str, object] | None:
    """Return the identity of the run that made the detector; None where its folder does not say."""
    try:
        return dict(json.loads((out / RUN_FILE).read_text())["identity"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _training_part(identity: Mapping[str, object]) -> dict[str, object]:
    """Return the part of an identity that decides the detector itself."""
    training_config: dict[str, object] = {}
    config = identity.get("config")
    # A folder's file may hold anything.
    if isinstance(config, Mapping):
        for key, value in config.items():
            scoring = key.startswith(SCORING) and not key.startswith(TRAINING)
            if not scoring and not key.endswith("_TEST"):
                training_config[key] = value
    part: dict[str, object] = {**identity, "config": training_config}
    part.pop("val", None)
    part.pop("val_images", None)
    return part
