"""Trains Faster, Mask and Keypoint R-CNN from a Checkpoint on COCO and scores them, by two engines.

    python detection/train_net.py --config-file configs/detection/mask_rcnn_R_50_FPN_1x.yaml \
        --checkpoint X --data ROOT --out RUN [--engine torchvision] [--num-gpus 4] \
        [--num-machines 2 --machine-rank 0 --dist-url tcp://HOST:PORT] [--resume] [--eval-only] \
        [KEY VALUE ...]

Top down: `run` (the command), `prepare` (reads and checks), `work` (one process), `train` (loop).
"""

import sys

if __name__ == "__main__":
    # The same as `backbench detect ...`; before torch is imported for nothing
    from backbench.__main__ import program

    raise SystemExit(program(["detect", *sys.argv[1:]]))

import importlib.util
import logging
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from backbench.detection import (
    backbones,
    dialect,
    lint,
    measure,
    own_heads,
    process_group,
)
from backbench.detection.data import own, reading
from backbench.detection.data.split import training_records
from backbench.detection.engine import DetectionEngine, reestimate_batch_norm
from backbench.detection.protocol import decisive, stated
from backbench.detection.run import (
    DetectionRun,
    Prepared,
    SolverSchedule,
    count_in_epochs,
)
from backbench.detection.task_rows import task_of
from backbench.errors import BadInput, Failed
from backbench.parallel import distributed, precision
from backbench.records import store
from backbench.requests.detect import DetectRequest
from backbench.requests.options import Outcome
from backbench.runs import atomic, price, seeding
from backbench.runs.folder import STATE_FILE, open_run
from backbench.runs.resumable import ResumableSteps
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.step_metrics import Metrics
from backbench.runs.terminal import log

SAVE_SECONDS = 300
LOGGED = 4500  # rows of metrics.jsonl in a long run


def run(request: DetectRequest) -> Outcome | None:
    """Run the verb `detect`: train, evaluate, record. A finished run only prints its numbers."""
    run = from_arguments(request)
    prepared = prepare(run)
    who = identity(run, prepared)
    if run.eval_only:
        run = measure.evaluation(run, who)
    else:
        measure.refuse_another_scoring(run, who)
    if not run.leads:  # the run folder is the first machine's to open and to lock
        if not store.complete(run.out):
            start_ranks(run, prepared)
        return None
    # The weights are proven before the folder is made; a finished run needs no engine.
    finished = store.complete(run.out)
    if not finished and not (run.out / STATE_FILE).exists():
        lint.files(prepared)
    engine = None if finished else ready(run, prepared)
    with open_run(run.out, verb="detect", identity=who):
        if rows := measure.report(run.out):
            log.info(f"{run.out}: already finished")
            return Outcome(document=rows)
        if run.world > 1:
            # The engine was built for its errors: each rank builds its own.
            del engine
            measure.clear(run)
            start_ranks(run, prepared)
        else:
            work(run, prepared, engine or ready(run, prepared))
    return Outcome(document=measure.report(run.out))


def start_ranks(run: DetectionRun, p: Prepared) -> None:
    """Start this machine's ranks; of Slurm's tasks each is one already."""
    if run.task_rank is not None:
        device = process_group.device_of(run.given, run.local_rank)
        with process_group.joined(run, process_group.seat_of_task(run)):
            work(run, p, build_engine(run, p, device), run.task_rank)
        return
    with process_group.handing_over(run, p.train, p.val):
        process_group.spawn(take_part, run)


def from_arguments(request: DetectRequest) -> DetectionRun:
    """Return the command line and the config, read and checked once for all processes."""
    opts = list(request.opts)
    if request.seed is not None:
        if "SEED" in opts:
            raise BadInput("--seed (or --seeds) and SEED: give one of them")
        opts += ["SEED", str(request.seed)]
    own_heads.refuse_keys(request, opts)
    given = dialect.read(request.config_file or own_heads.config_for(request), opts)
    out = request.out or given.get("OUTPUT_DIR")
    if not out:
        raise BadInput("no run folder: give --out RUN (or OUTPUT_DIR RUN)")
    root = reading.root_folder(request.data)
    gpus = process_group.gpus(given)
    if gpus and request.num_gpus > gpus:
        raise BadInput(
            f"--num-gpus {request.num_gpus}: this machine has {gpus} GPUs; or MODEL.DEVICE cpu"
        )
    run = new_run(
        given,
        engine=request.engine,
        root=root,
        out=Path(str(out)),  # a number is refused where types are checked
        checkpoint=request.checkpoint,
    )
    run = replace(
        run,
        dataset=request.dataset,
        world=request.num_gpus,
        eval_only=request.eval_only,
    )
    return process_group.over_machines(
        run, request.num_machines, request.machine_rank, request.dist_url
    )


def new_run(
    given: dialect.Given,
    *,
    engine: str,
    root: Path,
    out: Path,
    checkpoint: Path | None = None,
) -> DetectionRun:
    """Choose the task and the engine of a config and check its keys."""
    task = task_of(given)
    if engine == "auto":
        engine = "detectron2"  # the reference
        if importlib.util.find_spec(engine) is None:
            engine = "torchvision"
            log.info(
                "engine torchvision: Detectron2 is not installed "
                "(`python -m backbench.detection.build_detectron2`)"
            )
    cfg = engine_class(engine).read_config(given)
    return DetectionRun(given, cfg, task, engine, checkpoint, root, out)


def engine_class(name: str) -> type[DetectionEngine]:
    """Return the engine of that name; importing Detectron2's raises BadInput where it is not
    installed."""
    if name == "detectron2":
        from backbench.detection.engine_detectron2 import Detectron2Engine

        return Detectron2Engine
    from backbench.detection.engine_torchvision import TorchvisionEngine

    return TorchvisionEngine


def identity(run: DetectionRun, p: Prepared) -> dict[str, object]:
    """Return the values that decide the numbers: with another value it is another run."""
    return {
        "config": stated(run.given)
        | {"MODEL.RESNETS.DEPTH": p.cfg.MODEL.RESNETS.DEPTH},
        "seed": p.seed,
        "engine": run.engine,
        "checkpoint": p.checkpoint.digest,
        "train": p.train.fingerprint,
        "val": p.val.fingerprint,
        "train_images": p.train.contents,
        "val_images": p.val.contents,
    }


def prepare(run: DetectionRun) -> Prepared:
    """Read and check weights, data and config: all errors come before any folder or process."""
    cfg = run.cfg.clone()
    # Before anything is computed from them: epochs are divided by the batch, steps by the length
    lint.check_values(cfg, run.given)
    seed = max(int(cfg.SEED), 0)  # Detectron2 writes -1 for "any seed"; ours is then 0
    # 1. The trunk, and whether it goes with the config
    named = str(run.given.get("MODEL.WEIGHTS") or "")
    checkpoint = backbones.read_trunk(
        run.checkpoint, named, backbones.arch_of(cfg), seed
    )
    backbones.refuse(cfg, run.given, checkpoint, checkpoint.blank())
    # 2. Its pixels, which are the checkpoint's to say
    cfg.MODEL.PIXEL_MEAN = [255 * v for v in checkpoint.pixels.mean]
    cfg.MODEL.PIXEL_STD = [255 * v for v in checkpoint.pixels.std]
    cfg.INPUT.FORMAT = checkpoint.pixels.order
    # 3. The data: minutes for COCO, so read once on each machine
    splits = run.splits
    if splits is None and run.dataset is not None:
        splits = own.read(run.root / run.dataset, run.task)
    elif splits is None:
        splits = reading.read_splits(run.given.path, cfg.DATASETS, run.root, run.task)
    train, val = splits
    if run.dataset is not None:
        own_heads.fit(cfg, run.task, train, val)
    count_in_epochs(cfg, len(training_records(train, run.task)))
    # 4. All of it together
    lint.check(cfg, run, train, val)
    schedule = SolverSchedule.of(cfg)
    return Prepared(cfg, run.task, seed, checkpoint, train, val, schedule)


def ready(run: DetectionRun, p: Prepared) -> DetectionEngine:
    """Build the engine and prove by its maps that the weights arrived; no folder is made yet."""
    if run.world == 1:
        device = process_group.device_of(run.given, 0)
    else:
        # The GPUs belong to the processes that will train; this one only looks.
        device = torch.device("cpu")
    engine = build_engine(run, p, device)
    if not run.final.exists():
        sides = backbones.padded_test_size(p.cfg)
        trunk = p.checkpoint.backbone()
        worst = backbones.check_features(p.checkpoint, trunk, engine, sides)
        log.info(
            f"{run.engine}: the maps equal those of {p.checkpoint.name} to {worst:.1e}"
        )
    return engine


def build_engine(
    run: DetectionRun, p: Prepared, device: torch.device
) -> DetectionEngine:
    precision.use("fp32")  # faster is what SOLVER.AMP asks for
    return engine_class(run.engine)(p, device)


def take_part(run: DetectionRun, seat: process_group.Seat) -> int:
    """Run one rank's process, started by process_group.spawn. Its errors are one line, from rank 0
    or from the rank that fails."""
    from backbench.runs.ending import guarded

    def action() -> int:
        with process_group.joined(run, seat):
            prepared = prepare(replace(run, splits=process_group.handed_over(run)))
            engine = build_engine(
                run, prepared, process_group.device_of(run.given, seat.local)
            )
            work(run, prepared, engine, seat.rank)
        return 0

    # What the command line asked for: -1 warnings only, 1 more output
    verbosity = 0
    if seat.log_level > logging.INFO:
        verbosity = -1
    elif seat.log_level < logging.INFO:
        verbosity = 1
    return guarded(action, verbosity=verbosity)


def work(
    run: DetectionRun, p: Prepared, engine: DetectionEngine, rank: int = 0
) -> None:
    """Run one process of the run: train from the saved state, evaluate its share; rank 0
    records."""
    # On a GPU some of the kernels that detection needs have no deterministic form.
    torch.use_deterministic_algorithms(engine.device.type == "cpu")
    if not run.final.exists():
        with StopFlag() as stop:
            train(run, p, engine, rank, stop)
        process_group.barrier()
    engine.model.load_state_dict(load_final(run.final))
    detections = measure.predict(run, p, engine, rank)
    if rank == 0:
        measure.record(run, p, detections, engine.images_per_second)
    measure.scored(run, rank)


def train(
    run: DetectionRun, p: Prepared, engine: DetectionEngine, rank: int, stop: StopFlag
) -> None:
    """Run the training loop. Every iteration is a function of the state before it and its
    number."""
    schedule = p.schedule
    last = schedule.iterations
    # Each group has its own base rate, as biases may; a saved state has the rates of its iteration.
    bases = [group["lr"] for group in engine.optimizer.param_groups]
    first = continue_from(run, engine)
    if rank == 0:
        announce(run, p, engine)
    records = training_records(p.train, p.task)
    engine.start(records, first, last)
    every = max(1, last // LOGGED)
    metrics = progress = None
    if rank == 0:
        metrics = Metrics(run.out, from_step=first)
        progress = Progress(run.out, last, p.task.name, unit="iteration", done=first)

    def keep_state(done: int) -> None:
        # After the last iteration the trained detector is kept instead
        if rank == 0 and done < last:
            save(run, engine, done)

    def due(done: int, age: float) -> bool:
        if done % schedule.save_every == 0 or age > SAVE_SECONDS:
            return True
        return schedule.scores_after(done)

    iterations = ResumableSteps(
        first,
        last,
        stop=stop,
        agreement=distributed.Agreement(),
        progress=progress,
        save=keep_state,
        due=due,
        place="after iteration {done}; saved",
        run=run.out,
    )
    # Nothing yet where a run continues between two logged iterations
    shown: dict[str, float] = {}
    for iteration in iterations:
        # 1. The score on the way. The state is saved by now, as scoring takes long; a run that
        #    continues at this iteration may have the score already.
        known = iteration == first and measure.was_scored(run, first)
        if iteration and schedule.scores_after(iteration) and not known:
            measure.on_the_way(run, p, engine, rank, iteration)
        # 2. The step. Whatever draws from a global generator in it draws from this iteration's.
        factor = schedule.factor_at(iteration)
        for group, base in zip(engine.optimizer.param_groups, bases, strict=True):
            group["lr"] = base * factor
        lr = p.cfg.SOLVER.BASE_LR * factor
        seeding.seed_everything(p.seed, "iteration", iteration, rank)
        losses = engine.step()
        # 3. The losses, only where they are logged: reading them waits for the GPU.
        if iteration % every == 0 or iteration + 1 == last:
            values = logged_losses(losses, run, iteration)
            shown = {"loss": values["loss"]}
            if metrics is not None:
                metrics.write(iteration, lr=lr, **values)
        iterations.show(**shown, lr=lr)
    # 4. The end
    if schedule.precise_bn is not None:
        reestimate_batch_norm(engine, records, batches=schedule.precise_bn, after=last)
    if rank == 0:
        keep_final(run, p, engine)


def announce(run: DetectionRun, p: Prepared, engine: DetectionEngine) -> None:
    """Tell the work that lies ahead, its price, and whether the data can show what it is for."""
    cheaper = ""
    if engine.device.type == "cpu":
        length = "EPOCHS" if p.cfg.SOLVER.EPOCHS else "MAX_ITER"
        cheaper = f"`SOLVER.{length} N` trains for less"
    price.announce(
        f"{p.task.name} by {run.engine}",
        f"{price.plural(len(p.train.records), 'image')} to train on,"
        f" {p.cfg.SOLVER.IMS_PER_BATCH} a step",
        work={"iteration": p.schedule.iterations, "image": len(p.val.records)},
        cheaper=cheaper,
    )
    if run.dataset is not None:
        few = lint.few_images(run.dataset, p.train, p.val, p.task)
        if few:
            log.warning(few)


def logged_losses(
    losses: dict[str, Tensor], run: DetectionRun, step: int
) -> dict[str, float]:
    """Return the loss of the global batch, then each of its terms. Raises Failed if it is not
    finite."""
    terms = torch.stack([term.detach().float() for term in losses.values()])
    means = distributed.mean_over_ranks(terms).tolist()
    values = dict(zip(losses, means, strict=True))
    total = sum(values.values())
    if not math.isfinite(total):
        raise Failed(
            f"{run.out}: the loss is {total} at iteration {step} ({values}); lower SOLVER.BASE_LR"
        )
    return {"loss": total, **values}


def save(run: DetectionRun, engine: DetectionEngine, iteration: int) -> None:
    """Save all that the next iteration depends on. Nothing random: see engine.py."""
    refuse_not_finite(run, engine, iteration)
    state = {
        "iteration": iteration,
        "scaler": engine.amp.scaler.state_dict(),
        "model": engine.model.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
    }
    save_state(run.out / STATE_FILE, state)


def refuse_not_finite(
    run: DetectionRun, engine: DetectionEngine, iteration: int
) -> None:
    """Raise Failed for weights that are not finite, so that they never replace a good state.

    The losses alone would not tell: most of them are never read.
    """
    tensors = engine.model.state_dict().values()
    weights = [tensor for tensor in tensors if tensor.is_floating_point()]
    norms = torch._foreach_norm(weights)
    if torch.stack(norms).isfinite().all():
        return
    if (run.out / STATE_FILE).exists():
        saved = f"the last good state is {run.out / STATE_FILE}"
    else:
        saved = "no state was saved before"
    raise Failed(
        f"{run.out}: the weights are not finite after iteration {iteration}; {saved}; lower"
        " SOLVER.BASE_LR"
    )


def continue_from(run: DetectionRun, engine: DetectionEngine) -> int:
    """Load the saved weights and optimiser, if there are any; returns the iteration to start at."""
    state_file = run.out / STATE_FILE
    if not state_file.exists():
        return 0
    state = load_state(state_file)
    # On every rank: DDP keeps equal what begins equal.
    engine.model.load_state_dict(state["model"])
    engine.optimizer.load_state_dict(state["optimizer"])
    if state.get("scaler"):  # float16's
        engine.amp.scaler.load_state_dict(state["scaler"])
    return state["iteration"]


def keep_final(run: DetectionRun, p: Prepared, engine: DetectionEngine) -> None:
    """Write the final weights and what they came from, and only then delete the state file."""
    refuse_not_finite(run, engine, p.schedule.iterations)
    origin = {
        "checkpoint": p.checkpoint.digest,
        "name": p.checkpoint.name,
        "method": p.checkpoint.method,
        "arch": p.checkpoint.arch,
        "epochs": p.checkpoint.epochs,
        "task": p.task.name,
        "engine": run.engine,
        "config": decisive(run.given),
    }
    with atomic.atomic_path(run.final) as temporary:
        torch.save({"model": engine.model.state_dict(), "backbench": origin}, temporary)
    (run.out / STATE_FILE).unlink(missing_ok=True)


def load_final(file: Path) -> dict[str, Tensor]:
    """Load the trained detector's state dict. BadInput if `keep_final` did not write it."""
    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
        data["backbench"]  # only what `keep_final` writes has it
        return data["model"]
    except Exception as error:
        said = " ".join(str(error).split())[:100]
        raise BadInput(f"{file}: not a detector of this suite ({said})") from None
