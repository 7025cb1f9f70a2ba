"""`backbench pretrain`: images -> Checkpoint. The loop is `train`, top to bottom."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision.amp import MixedPrecision
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor

from backbench import config as recipes
from backbench.datasets import catalog
from backbench.errors import EXIT_PREEMPTED, BadInput, Failed, Preempted
from backbench.images import views
from backbench.images.files import ImageList
from backbench.images.preprocess import Pixels, normalise
from backbench.results import store
from backbench.runs import atomic, distributed, seeding
from backbench.runs.folder import CHECKPOINT_FILE, RECIPE_FILE, STATE_FILE, Progress, log, open_run
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.resnet import Trunk, build_backbone
from pretrain import data, monitor, optim
from pretrain.config import PretrainConfig
from pretrain.method import Batch, Method, Setup, build_method

STATE_SECONDS = (
    30  # at the end of an epoch the state is written unless the last one is younger than this
)


def run(args: argparse.Namespace) -> int:
    config = recipes.load(PretrainConfig, args.recipe, args.overrides, kind="pretrain")
    found = catalog.open_split(args.data, config.data.dataset, config.data.split)
    ranks = args.devices * args.nodes
    check(config, found, ranks)
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise BadInput("--tensorboard needs the tensorboard package: pip install tensorboard")
    method = build(config, found)  # refuses what the method cannot do before anything starts
    identity = {"recipe": what_decides(config), "data": data.fingerprint(found), "processes": ranks}

    if (args.out / CHECKPOINT_FILE).exists():
        open_run(args.out, verb="pretrain", identity=identity)
        digest = Checkpoint.load(args.out / CHECKPOINT_FILE).digest
        log.info("%s: already finished, digest %s", args.out / CHECKPOINT_FILE, digest[:12])
        return 0

    if config.accumulate > 1 and not method.accumulates:
        raise BadInput(
            f"accumulate {config.accumulate}: the loss of '{config.method.name}' compares the samples of the whole "
            "batch, which micro-batches cannot; set accumulate to 1 and use more processes"
        )
    fabric = launch(config, args)
    try:
        if ranks > 1:
            method = build(config, found)  # again, now that the method can see the other ranks
        run = open_run(args.out, verb="pretrain", identity=identity)
        fabric.barrier()  # every rank has written what it writes there; from here on only rank 0 does
        if fabric.is_global_zero:
            atomic.remove_leftovers(run)
            atomic.write_text(run / RECIPE_FILE, recipes.to_yaml(config))
        workers = config.data.workers if args.workers is None else args.workers
        train(fabric, config, method, found, run, workers=workers, tensorboard=args.tensorboard)
    except (BadInput, Failed, Preempted):
        if fabric.is_global_zero:
            raise
        environment: Any = fabric.strategy.cluster_environment  # type: ignore[attr-defined]
        # A process that Fabric itself started must not look like a crash
        return EXIT_PREEMPTED if environment.creates_processes_externally else 0
    return 0


def check(config: PretrainConfig, found: ImageList, ranks: int) -> None:
    """Refuse what cannot work before anything starts."""
    parts = ranks * config.accumulate
    if parts < 1:
        raise BadInput(f"{ranks} processes in all: --devices and --nodes must be at least 1")
    if config.batch_size % parts:
        raise BadInput(
            f"batch_size {config.batch_size} does not divide over {ranks} processes x {config.accumulate} accumulation "
            f"steps; the nearest that does is {max(1, round(config.batch_size / parts)) * parts}"
        )
    if config.epochs and len(found) < config.batch_size:
        raise BadInput(
            f"{found.root}: {len(found)} images are fewer than one batch of {config.batch_size}; "
            f"set batch_size to at most {len(found)}"
        )


def what_decides(config: PretrainConfig) -> dict[str, Any]:
    """The recipe without what may change while a run goes on: how it is fed and watched, not what it computes."""
    recipe = recipes.to_dict(config)
    recipe["data"].pop("workers")
    for name in ("save_minutes", "log_every", "knn_every", "expected"):
        recipe.pop(name)
    return recipe


def build(config: PretrainConfig, found: ImageList) -> Method:
    """The method with its weights drawn from the seed; the trunk first, so that it is the same for all methods."""
    seeding.seed_everything(config.seed, "backbone")
    backbone = build_backbone(
        config.arch, config.stem, zero_init_residual=config.zero_init_residual
    )
    seeding.seed_everything(config.seed, "method")
    count = sum(crops.count for crops in config.views.crops)
    setup = Setup(
        batch_size=config.batch_size,
        views=count,
        seed=config.seed,
        images=len(found),
        classes=len(found.classes),
    )
    return build_method(config.method, backbone, setup)


class Precision(MixedPrecision):
    """Autocast as Fabric does it, but a Batch goes in as it is: autocast casts where it must."""

    def convert_input(self, data: Any) -> Any:
        return data


def launch(config: PretrainConfig, args: argparse.Namespace) -> Fabric:
    """Devices, precision and processes. Under Slurm or torchrun the processes are there already; otherwise Fabric
    starts this very command once for each device of the node."""
    accelerator = args.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cuda" and torch.cuda.device_count() < args.devices:
        raise BadInput(
            f"--devices {args.devices}: this machine has {torch.cuda.device_count()} GPUs"
        )
    plugins: list[Any] = []
    if config.precision in ("bf16", "fp16"):
        plugins.append(
            Precision("16-mixed" if config.precision == "fp16" else "bf16-mixed", accelerator)
        )
    several = args.devices * args.nodes > 1
    warnings.filterwarnings(
        "ignore", message="The `srun` command is available"
    )  # one process under no Slurm is fine
    warnings.filterwarnings(
        "ignore", message="`broadcast_buffers` is deprecated"
    )  # torch 2.11 knows no other name
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    fabric = Fabric(
        accelerator=accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        # Batch norm statistics are kept equal by the methods; broadcasting queues at every step would cost more
        strategy=DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
        if several
        else "auto",
        plugins=plugins or None,
    )
    fabric.launch()
    if not fabric.is_global_zero:
        log.setLevel(logging.ERROR)
    return fabric


def train(
    fabric: Fabric,
    config: PretrainConfig,
    method: Method,
    found: ImageList,
    run: Path,
    *,
    workers: int,
    tensorboard: bool = False,
) -> None:
    device, rank, ranks = fabric.device, fabric.global_rank, fabric.world_size
    on_gpu = device.type == "cuda"
    steps_per_epoch = len(found) // config.batch_size
    total = config.epochs * steps_per_epoch
    epochs = min(config.epochs, config.stop_after_epochs or config.epochs)
    last = epochs * steps_per_epoch

    if method.sync_batchnorm and ranks > 1:
        distributed.convert_sync_batchnorm(method)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    method.to(dtype).to(memory_format=layout)
    o = config.optim
    scale = config.batch_size / o.reference_batch if o.reference_batch else 1.0
    peak = o.lr * scale
    groups = optim.parameter_groups(
        method,
        weight_decay=o.weight_decay,
        decay_1d=o.decay_1d,
        adapt_1d=o.adapt_1d,
        lr_1d=None if o.lr_1d is None else o.lr_1d * scale,
    )
    rate = functools.partial(  # step -> learning rate
        optim.schedule,
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs,
        name=o.schedule,
        peak=peak,
        final=o.final_lr * scale,
        warmup_epochs=o.warmup_epochs,
        warmup_lr=o.warmup_lr * scale,
        milestones=o.milestones,
        gamma=o.gamma,
    )
    optimizer = optim.build(
        o.name,
        groups,
        lr=peak,
        momentum=o.momentum,
        betas=o.betas,
        trust=o.trust,
        clip=o.clip,
        fused=config.precision != "fp16",
    )
    backbone = method.backbone
    seen = monitor.Features(backbone)
    if config.compile:
        for module in method.modules():
            if isinstance(module, Trunk):
                module.compile()
    model, stepper = fabric.setup(method, optimizer)

    recipe = recipes.fingerprint(what_decides(config))
    step, recent = (
        0,
        list[dict[str, Tensor]](),
    )  # recent: the terms of the steps since the last row of metrics.jsonl
    if (run / STATE_FILE).exists():
        state = load_state(run / STATE_FILE)
        if state.get("recipe") != recipe:
            raise BadInput(
                f"{run / STATE_FILE}: the state of another recipe; move it away, or use another --out"
            )
        step, recent = (
            state["step"],
            [{k: v.to(device) for k, v in row.items()} for row in state["recent"]],
        )
        method.load_state_dict(state["method"])
        optimizer.load_state_dict(state["optimizer"])
        fabric.strategy.precision.load_state_dict(state["precision"])
        log.info("%s: continuing at step %d of %d", run, step, last)

    def save() -> None:
        """The state after `step` steps, by rank 0; weights that are not finite never replace a good state."""
        if (
            not torch.stack(torch._foreach_norm(list(method.parameters()))).isfinite().all()
        ):  # alike on all ranks
            raise Failed(f"after step {step} the weights are not finite; {last_good(run)}")
        if rank == 0:
            state = {
                "recipe": recipe,
                "step": step,
                "recent": recent,
                "method": method.state_dict(),
                "optimizer": optimizer.state_dict(),
                "precision": fabric.strategy.precision.state_dict(),
            }
            save_state(run / STATE_FILE, state)

    crops = [group for group in config.views.crops for _ in range(group.count)]
    pixels = Pixels(config.views.mean, config.views.std)
    batches = data.loader(
        found, config, first=step, last=last, workers=workers, rank=rank, ranks=ranks, on_gpu=on_gpu
    )
    metrics = monitor.Rows(run, from_step=step, tensorboard=tensorboard) if rank == 0 else None
    progress = Progress(run, last, config.name, done=step) if rank == 0 else None
    agree = distributed.Agreement()
    shown: dict[str, float] = {}
    saved = logged = time.monotonic()
    waited, made = 0.0, 0
    skipped: set[str] = set()
    method.train()

    with StopFlag() as stop:
        while step < last:
            epoch = step // steps_per_epoch
            lr = rate(step)
            optim.set_lr(optimizer, lr, peak)
            seeding.seed_everything(
                config.seed, "step", step
            )  # whatever draws from global state repeats itself too
            began = time.monotonic()
            parts = [next(batches) for _ in range(config.accumulate)]
            waited += time.monotonic() - began
            unreadable = agree.first(next((p["error"] for p in parts if "error" in p), None))
            if unreadable is not None:
                raise BadInput(unreadable)
            for line in {line for p in parts for line in p["skipped"]} - skipped:
                log.warning("left out: %s", line)
                skipped.add(line)
            made_terms = []
            for n, loaded in enumerate(parts):
                batch = Batch(
                    views=to_device(loaded, crops, pixels, device, dtype=dtype, layout=layout),
                    labels=loaded["labels"].to(device, non_blocking=True),
                    index=loaded["index"].to(device, non_blocking=True),
                    step=step,
                    epoch=epoch,
                    epochs=config.epochs,
                    progress=step / total,
                )
                with fabric.no_backward_sync(model, enabled=n + 1 < config.accumulate):
                    terms = model(batch)
                    fabric.backward(terms["loss"] / config.accumulate)
                made_terms.append({name: value.detach() for name, value in terms.items()})
            recent.append(
                {
                    k: torch.stack([t[k] for t in made_terms]).mean(0).to(device)
                    for k in made_terms[0]
                }
            )

            # The loss is read at every step where that costs nothing, on a GPU only when a row is due: reading waits
            row_due = (step + 1) % config.log_every == 0 or step + 1 == last
            bad = None
            if row_due or not on_gpu:
                finite = torch.stack([r["loss"] for r in recent]).isfinite().tolist()
                bad = None if all(finite) else step + 1 - len(recent) + finite.index(False)
            old = time.monotonic() - saved if rank == 0 else 0.0  # one clock decides for all ranks
            interrupted, failed, overdue, due = agree.any(
                stop.requested is not None,
                bad is not None,
                old > config.save_minutes * 60,
                old > STATE_SECONDS,
            )
            if failed:
                at = step if bad is None else bad
                value = float("nan") if bad is None else float(recent[at - step - 1]["loss"])
                raise Failed(
                    f"the loss is {value} at step {at} (lr {rate(at):.4g}); {last_good(run)}; a lower optim.lr, "
                    "a longer optim.warmup_epochs or precision=fp32 may help"
                )

            if o.clip_norm is not None:
                # fp16's scaler skips a step whose gradients overflowed; elsewhere save() refuses what is not finite
                fabric.clip_gradients(
                    model, stepper, max_norm=o.clip_norm, error_if_nonfinite=False
                )
            stepper.step()
            stepper.zero_grad(set_to_none=True)
            method.after_step((step + 1) / total)
            step += 1
            made += 1

            if row_due:
                now = time.monotonic()
                row: dict[str, float] = {
                    name: float(torch.stack([r[name].float() for r in recent]).mean())
                    for name in recent[0]
                }
                row |= seen.statistics()
                speed = {
                    "images_per_s": made * config.batch_size / (now - logged),
                    "waiting": waited / (now - logged),
                }
                recent.clear()
                logged, waited, made = now, 0.0, 0
                shown = {
                    "loss": row["loss"],
                    "lr": lr,
                    "img/s": speed["images_per_s"],
                    "waiting": speed["waiting"],
                }
                if metrics is not None:
                    metrics.write(step - 1, epoch=epoch, lr=lr, **row, **speed)
                    monitor.warn_if_collapsed(row, step)
            if progress is not None:
                progress.advance(1, **shown)

            epoch_ends = step % steps_per_epoch == 0
            knn_due = config.knn_every and ((epoch + 1) % config.knn_every == 0 or step == last)
            if (
                epoch_ends and knn_due and metrics is not None
            ):  # rank 0; the others wait in their next collective
                began = time.monotonic()
                score = monitor.knn_score(
                    backbone,
                    found,
                    pixels,
                    size=crops[0].size,
                    device=device,
                    stop=lambda: bool(stop.requested),
                )
                logged += time.monotonic() - began
                if score is not None:
                    metrics.write(step - 1, epoch=epoch, knn=score)
                    log.info("epoch %d: kNN %.2f%%", epoch + 1, score)
            if interrupted or step == last or (epoch_ends and due) or overdue:
                save()
                saved = time.monotonic()
            if interrupted and step < last:
                fabric.barrier()  # no rank leaves before the state is written
                by = stop.requested or "a signal to another process"
                raise Preempted(f"{run}: stopped by {by} at step {step} of {last}, state saved")

    if rank == 0:
        checkpoint = Checkpoint(
            arch=config.arch,
            stem=config.stem,
            method=config.method.name,
            epochs=epochs,
            state_dict=method.backbone.state_dict(),
            heads=method.heads(),
            pixels=pixels,
            provenance=provenance(config, found, ranks, device),
        )
        if last:
            monitor.plot_curves(run, config.name)
        checkpoint.save(run / CHECKPOINT_FILE)
        log.info("%s: digest %s", run / CHECKPOINT_FILE, checkpoint.digest[:12])
    fabric.barrier()


def to_device(
    loaded: dict[str, Any],
    crops: list[views.Crops],
    pixels: Pixels,
    device: torch.device,
    *,
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> list[Tensor]:
    """uint8 (N, h, w, 3) views -> the network's (N, 3, h, w) of `dtype` on `device`, in `layout`."""
    out = []
    for v, made in enumerate(loaded["views"]):
        images = made.to(device, non_blocking=True).permute(0, 3, 1, 2)
        if loaded["colour"]:
            colour = {k: x.to(device, non_blocking=True) for k, x in loaded["colour"][v].items()}
            images = views.apply_colour(images, **colour, crops=crops[v])
        out.append(normalise(images, pixels).to(dtype).contiguous(memory_format=layout))
    return out


def last_good(run: Path) -> str:
    """Where a run that went wrong can be taken up."""
    if not (run / STATE_FILE).exists():
        return "no state was saved before"
    return (
        f"the last good state is {run / STATE_FILE}, at step {load_state(run / STATE_FILE)['step']}"
    )


def provenance(
    config: PretrainConfig, found: ImageList, ranks: int, device: torch.device
) -> dict[str, Any]:
    """What is needed to repeat the run: recipe, code, versions, data."""
    from importlib.metadata import version

    return {
        "name": config.name,
        "recipe": recipes.to_dict(config),
        "expected": list(config.expected),
        "code": store.code_revision(),
        "versions": {
            "backbench": version("backbench"),
            "torch": torch.__version__,
            "torchvision": version("torchvision"),
            "python": platform.python_version(),
        },
        "data": {
            "dataset": config.data.dataset,
            "split": config.data.split,
            "images": len(found),
            "classes": len(found.classes),
            "fingerprint": data.fingerprint(found),
        },
        "processes": ranks,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine(),
    }
