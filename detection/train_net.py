"""Faster, Mask and Keypoint R-CNN on COCO, trained from a Checkpoint and scored; two engines behind one loop.

    python detection/train_net.py --config-file configs/detection/mask_rcnn_R_50_FPN_1x.yaml --checkpoint X \
        --data ROOT --out RUN [--engine detectron2] [--num-gpus 4] [--resume] [--eval-only] [KEY VALUE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import hashlib
import importlib
import json
import math
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbench.errors import BadInput, Failed, Preempted
from backbench.results import store
from backbench.runs import atomic, seeding
from backbench.runs.folder import RESULTS_FILE, STATE_FILE, Metrics, Progress, log, open_run
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.tasks import TASKS
from detection import config, convert, evaluate, lint
from detection.data import coco

FINAL, PREDICTIONS, PER_CATEGORY = "model_final.pth", "predictions.json", "per_category.json"
SAVE_SECONDS = 300
LOGGED = 4500  # rows of metrics.jsonl in a long run


@dataclass(frozen=True)
class Job:
    """What a process needs to take part in the run."""

    config_file: str
    opts: tuple[str, ...]
    engine: str
    checkpoint: Path | None
    root: Path
    out: Path
    world: int
    eval_only: bool


@dataclass
class Prepared:
    given: config.Given
    cfg: Any
    task: str
    seed: int
    checkpoint: Any
    train: coco.Split
    val: coco.Split


def run(args: argparse.Namespace) -> int:
    """The verb `detect`: train, evaluate, record. A finished run prints its numbers and changes nothing."""
    given = config.read(args.config_file, args.opts)
    out = args.out or (Path(given.get("OUTPUT_DIR")) if given.get("OUTPUT_DIR") else None)
    if out is None:
        raise BadInput("no run folder: give --out RUN (or OUTPUT_DIR RUN)")
    if args.num_gpus < 1:
        raise BadInput(f"--num-gpus {args.num_gpus}: at least 1")
    cuda = on_gpus(given)
    if cuda and args.num_gpus > cuda:
        raise BadInput(
            f"--num-gpus {args.num_gpus}: this machine has {cuda} GPUs; or MODEL.DEVICE cpu"
        )
    engine = choose_engine(args.engine, given)
    job = Job(
        args.config_file,
        tuple(args.opts),
        engine,
        args.checkpoint,
        coco.root_folder(args.data),
        out,
        args.num_gpus,
        args.eval_only,
    )
    prepared = prepare(job)
    identity = {
        "config": config.decisive(given)
        | {"MODEL.RESNETS.DEPTH": prepared.cfg.MODEL.RESNETS.DEPTH},
        "seed": prepared.seed,
        "engine": engine,
        "checkpoint": prepared.checkpoint.digest,
        "train": fingerprint(prepared.train),
        "val": fingerprint(prepared.val),
    }
    built = None if (out / RESULTS_FILE).exists() else ready(job, prepared)
    open_run(out, verb="detect", identity=identity)
    if report(out):
        log.info(f"{out}: already finished")
        return 0
    if job.world > 1:
        del built
        spawn(job)
    else:
        work(job, prepared, built or ready(job, prepared))
    report(out)
    return 0


def ready(job: Job, p: Prepared) -> Any:
    """The engine with the weights in place, proven by its features; refused before the run folder is made."""
    import torch

    final = job.out / FINAL
    if job.eval_only and not final.exists():
        raise BadInput(f"{final}: no trained detector to evaluate; run without --eval-only first")
    engine = build_engine(
        job, p, choose_device(p.given, 0) if job.world == 1 else torch.device("cpu")
    )
    if not final.exists():
        worst = convert.check_features(p.checkpoint, engine.stages, job.engine)
        log.info(f"{job.engine}: C2..C5 equal those of {p.checkpoint.name} to {worst:.1e}")
    return engine


def choose_engine(name: str, given: config.Given) -> str:
    """auto is torchvision's wherever it can run the config, so that a command means the same on every machine."""
    if name != "auto":
        return name
    c4 = "fpn" not in str(given.get("MODEL.BACKBONE.NAME", ""))
    return "detectron2" if c4 else "torchvision"


def prepare(job: Job) -> Prepared:
    """Everything that can be wrong is found here, before a folder is made or a process started."""
    given = config.read(job.config_file, job.opts)
    task = given.task
    if job.engine == "detectron2":
        from detection import engine_detectron2

        cfg = engine_detectron2.read_config(given)
    else:
        from detection import engine_torchvision

        cfg = config.embedded(given)
        engine_torchvision.check(cfg, given.path)
    seed = max(int(cfg.SEED), 0)
    checkpoint = convert.weights(
        job.checkpoint, str(given.get("MODEL.WEIGHTS") or ""), cfg.MODEL.RESNETS.DEPTH, seed
    )
    lint.weights(cfg, given, checkpoint)
    cfg.MODEL.PIXEL_MEAN = [255 * v for v in checkpoint.pixels.mean]
    cfg.MODEL.PIXEL_STD = [255 * v for v in checkpoint.pixels.std]
    cfg.INPUT.FORMAT = checkpoint.pixels.order
    train = coco.join([coco.read(name, job.root, task=task) for name in named(cfg, given, "TRAIN")])
    test = named(cfg, given, "TEST")
    if len(test) != 1:
        raise BadInput(f"{given.path}: DATASETS.TEST {test}: one dataset is scored in a run")
    val = coco.read(test[0], job.root, task=task)
    if val.name in coco.VOC and job.engine != "detectron2":
        raise BadInput(f"{given.path}: VOC's AP is Detectron2's; add --engine detectron2")
    lint.check(cfg, given, train, val, task=task, world=job.world)
    return Prepared(given, cfg, task, seed, checkpoint, train, val)


def named(cfg: Any, given: config.Given, part: str) -> list[str]:
    names = list(cfg.DATASETS[part])
    if not names:
        raise BadInput(f"{given.path}: DATASETS.{part} is empty")
    return names


def fingerprint(split: coco.Split) -> str:
    """Which images and annotations: the annotation file's sha256 and the number of images taken."""
    digest = hashlib.sha256()
    for file in (split.file, *split.more_files):
        digest.update(file.read_bytes())
    return f"{split.name}:{digest.hexdigest()[:16]}:{len(split.records)}"


def build_engine(job: Job, p: Prepared, device: Any) -> Any:
    module = importlib.import_module(f"detection.engine_{job.engine}")
    return module.Engine(
        p.cfg, p.checkpoint, flip_map=p.train.flip, task=p.task, seed=p.seed, device=device
    )


def work(job: Job, p: Prepared, engine: Any, rank: int = 0) -> None:
    """One process of the run: train from the saved state on, evaluate its share, and on rank 0 record the numbers."""
    import torch

    torch.use_deterministic_algorithms(engine.device.type == "cpu")
    final = job.out / FINAL
    if not final.exists():
        with StopFlag() as stop:
            train(job, p, engine, rank, stop)
        barrier()
    engine.model.load_state_dict(load_final(final)["model"])
    predictions = predict(job, p, engine, rank)
    if rank == 0:
        record(job, p, predictions)
    barrier()


def on_gpus(given: config.Given) -> int:
    """How many GPUs the run may use; 0 for a run on the CPU."""
    import torch

    return 0 if given.get(config.DEVICE_KEY) == "cpu" else torch.cuda.device_count()


def choose_device(given: config.Given, rank: int) -> Any:
    import torch

    return torch.device("cuda", rank) if on_gpus(given) else torch.device("cpu")


def train(job: Job, p: Prepared, engine: Any, rank: int, stop: StopFlag) -> None:
    """The loop. Every iteration is a pure function of the state before it and of its number."""
    import torch

    s = p.cfg.SOLVER
    state_file = job.out / STATE_FILE
    first = 0
    if state_file.exists():
        state = load_state(state_file)
        engine.model.load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        first = state["iteration"]
    records = coco.training_records(p.train, p.task)
    engine.start(records, first, s.MAX_ITER)
    engine.model.train()
    every = max(1, s.MAX_ITER // LOGGED)
    metrics = Metrics(job.out, from_step=first) if rank == 0 else None
    progress = (
        Progress(job.out, s.MAX_ITER, p.task, unit="iteration", done=first) if rank == 0 else None
    )
    saved = time.monotonic()
    for iteration in range(first, s.MAX_ITER):
        lr = lr_at(p.cfg, iteration)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        seeding.seed_everything(p.seed, "iteration", iteration, rank)
        losses = engine.step()
        if iteration % every == 0 or iteration + 1 == s.MAX_ITER:
            values = mean_over_ranks(losses)
            total = sum(values.values())
            if not math.isfinite(total):
                raise Failed(
                    f"{job.out}: the loss is {total} at iteration {iteration} ({values}); lower SOLVER.BASE_LR"
                )
            if metrics is not None:
                metrics.write(iteration, lr=lr, loss=total, **values)
        if progress is not None:
            progress.advance(loss=total, lr=lr)
        stopping = any_rank(stop.requested is not None)
        due = (iteration + 1) % s.CHECKPOINT_PERIOD == 0 or time.monotonic() - saved > SAVE_SECONDS
        if rank == 0 and (due or stopping) and iteration + 1 < s.MAX_ITER:
            saved = time.monotonic()
            keep_state(state_file, engine, iteration + 1)
        if stopping and iteration + 1 < s.MAX_ITER:
            by = stop.requested or "a signal"
            raise Preempted(
                f"{job.out}: stopped by {by} after iteration {iteration + 1}; saved, start again to continue"
            )
    if p.cfg.TEST.PRECISE_BN.ENABLED:
        precise_bn(engine, records, p.cfg.TEST.PRECISE_BN.NUM_ITER, s.MAX_ITER)
    if rank == 0:
        about = {
            **convert.about(p.checkpoint),
            "task": p.task,
            "engine": job.engine,
            "config": config.decisive(p.given),
        }
        with atomic.atomic_path(job.out / FINAL) as temporary:
            torch.save({"model": engine.model.state_dict(), "backbench": about}, temporary)
        state_file.unlink(missing_ok=True)


def lr_at(cfg: Any, iteration: int) -> float:
    """Linear warm-up from WARMUP_FACTOR, then x GAMMA at each of STEPS."""
    s = cfg.SOLVER
    lr = s.BASE_LR * s.GAMMA ** sum(iteration >= step for step in s.STEPS)
    if iteration < s.WARMUP_ITERS:
        alpha = iteration / s.WARMUP_ITERS
        lr *= s.WARMUP_FACTOR * (1 - alpha) + alpha
    return lr


def precise_bn(engine: Any, records: Sequence[Any], batches: int, after: int) -> None:
    """Batch norm statistics as true averages over `batches` training batches at the final weights (fvcore's)."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # fvcore.nn scripts its losses on import, which torch calls deprecated
        from fvcore.nn.precise_bn import update_bn_stats

    engine.start(records, after, after + batches)

    def forward() -> Iterator[int]:
        for iteration in range(after, after + batches):
            seeding.seed_everything(engine.seed, "precise batch norm", iteration)
            yield iteration

    class Forward(torch.nn.Module):
        """update_bn_stats calls this with each item of the stream; the engine brings its own batch."""

        def __init__(self) -> None:
            super().__init__()
            self.model = engine.model

        def forward(self, _: int) -> None:
            engine.losses()

    module = Forward().train()
    with torch.no_grad(), quiet("fvcore"):
        update_bn_stats(module, forward(), batches)


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    import logging

    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def keep_state(file: Path, engine: Any, iteration: int) -> None:
    save_state(
        file,
        {
            "iteration": iteration,
            "model": engine.model.state_dict(),
            "optimizer": engine.optimizer.state_dict(),
        },
    )


def load_final(file: Path) -> dict[str, Any]:
    import torch

    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
        return {"model": data["model"], "about": data["backbench"]}
    except Exception as error:
        raise BadInput(
            f"{file}: not a detector of this suite ({' '.join(str(error).split())[:100]})"
        ) from None


def mean_over_ranks(losses: dict[str, Any]) -> dict[str, float]:
    import torch

    from backbench.runs import distributed

    values = distributed.mean_over_ranks(torch.stack([v.detach().float() for v in losses.values()]))
    return dict(zip(losses, values.tolist()))


def any_rank(flag: bool) -> bool:
    """Whether any rank says yes; all must agree on when to stop."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return flag
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    value = torch.tensor(float(flag), device=device)
    dist.all_reduce(value)
    return bool(value > 0)


def barrier() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def predict(job: Job, p: Prepared, engine: Any, rank: int) -> list[dict[str, Any]]:
    """All images' detections on rank 0 in the order of the split; category ids are the file's own."""
    mine = p.val.records[rank :: job.world]
    progress = Progress(job.out, len(mine), "evaluate", unit="image") if rank == 0 else None
    found = []
    for record in mine:
        found.append(
            [{**d, "category_id": p.val.ids[d["category_id"]]} for d in engine.predict(record)]
        )
        if progress is not None:
            progress.advance()
    if job.world == 1:
        return [d for detections in found for d in detections]
    share = job.out / f".predictions.{rank}.json"
    atomic.write_text(share, json.dumps(found))
    barrier()
    if rank:
        return []
    files = [job.out / f".predictions.{r}.json" for r in range(job.world)]
    shares = [json.loads(f.read_text()) for f in files]
    for f in files:
        f.unlink()
    return [d for i in range(len(p.val.records)) for d in shares[i % job.world][i // job.world]]


def record(job: Job, p: Prepared, predictions: list[dict[str, Any]]) -> None:
    """AP with intervals, AP per category, pictures; all numbers appended in one write, once."""
    from detection import pictures

    atomic.write_text(job.out / PREDICTIONS, json.dumps(predictions))
    manifest = hashlib.sha256(fingerprint(p.val).encode()).hexdigest()
    about = convert.about(p.checkpoint)
    rows: list[dict[str, Any]] = []
    samples: dict[str, Any] = {}
    per_category: dict[str, Any] = {}
    for kind in TASKS[p.task].ious:
        if p.val.name in coco.VOC:
            from detection.engine_detectron2 import voc_scores

            scores = voc_scores(p.val, predictions)
        else:
            scores = evaluate.score(
                p.val, predictions, kind, p.cfg.TEST.KEYPOINT_OKS_SIGMAS, manifest=manifest
            )
        per_category[kind] = scores.per_category
        for name, value in scores.values.items():
            samples |= (
                {f"bootstrap_{kind}_{name}": scores.samples[name]} if name in scores.samples else {}
            )
            rows.append({"metric": f"{kind}_{name}", "value": value, "ci95": scores.ci95.get(name)})
    kept = store.keep_predictions(job.out, f"{p.task}_{job.engine}", manifest=manifest, **samples)
    atomic.write_json(job.out / PER_CATEGORY, per_category)
    pictures.write(job.out / "pictures", p.val, predictions, p.task)
    protocol = config.protocol(p.given)
    common: dict[str, Any] = {
        "task": p.task,
        "dataset": dataset_name(p.val),
        "split": "val",
        "protocol": protocol,
        "engine": job.engine,
        "seed": p.seed,
        "provenance": {
            "config": p.given.path.stem,
            "train": fingerprint(p.train),
            "val": fingerprint(p.val),
            "predictions": kept,
            "per_category": PER_CATEGORY,
            "evaluator": "detectron2 voc_eval" if p.val.name in coco.VOC else "hotcoco",
        },
    }
    store.append(job.out, [store.Result(**about, **common, **row) for row in rows])


def dataset_name(split: coco.Split) -> str:
    folder = split.folder.parent.name
    return {"coco": "coco2017", "VOC2007": "voc2007"}.get(folder, folder)


def report(out: Path) -> bool:
    """Print the numbers that the run holds; whether there are any."""
    if not (out / RESULTS_FILE).exists():
        return False
    rows, _ = store.read(out / RESULTS_FILE)
    for r in rows:
        interval = f"  [{r.ci95[0]:.1f}, {r.ci95[1]:.1f}]" if r.ci95 else ""
        log.info(f"{r.metric:16} {'undefined' if r.value is None else f'{r.value:.2f}'}{interval}")
    return bool(rows)


def spawn(job: Job) -> None:
    """One process per GPU, or per CPU rank. Signals to this process reach all of them; its death ends them."""
    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    level = log.level
    children = [
        context.Process(target=child, args=(job, rank, port, os.getpid(), level))
        for rank in range(job.world)
    ]
    with StopFlag() as stop:
        for c in children:
            c.start()
        told = False
        while any(c.is_alive() for c in children):
            children[0].join(0.2)
            if stop.requested and not told:
                told = True
                for c in children:
                    if c.pid and c.is_alive():
                        os.kill(c.pid, signal.SIGTERM)
            if any(c.exitcode not in (None, 0) for c in children):
                time.sleep(2)  # the others end by themselves when all were told to stop
                for c in children:
                    c.kill()
                    c.join()
    codes = sorted({c.exitcode or 0 for c in children})
    if codes != [0]:
        own = next((code for code in (75, 2, 1) if code in codes), 1)
        raise SystemExit(own)


def child(job: Job, rank: int, port: int, parent: int, level: int) -> None:
    """A rank's process; its errors are one line, from rank 0 or from whoever fails."""
    import torch
    import torch.distributed as dist

    from backbench.cli import guarded

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG: no orphan writes to the run after its parent
    if os.getppid() != parent:
        raise SystemExit(1)
    cuda = on_gpus(config.read(job.config_file, job.opts)) > 0
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    backend = "nccl" if cuda else "gloo"
    verbosity = -1 if level > 20 else 1 if level < 20 else 0

    def action() -> int:
        dist.init_process_group(
            backend, rank=rank, world_size=job.world, timeout=datetime.timedelta(minutes=30)
        )
        try:
            prepared = prepare(job)
            work(
                job,
                prepared,
                build_engine(job, prepared, choose_device(prepared.given, rank)),
                rank,
            )
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        return 0

    raise SystemExit(
        guarded(
            action,
            argparse.Namespace(quiet=verbosity < 0, verbosity=max(verbosity, 0), debug=False),
        )
    )


def main() -> int:
    """`python detection/train_net.py ...`, the same as `backbench detect ...`."""
    import sys

    from backbench.cli import main as backbench

    return backbench(["detect", *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
