"""`backbench pretrain`: images -> Checkpoint. The loop is `train`, top to bottom."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric

from backbench.datasets import catalog
from backbench.errors import BadInput, Failed, Preempted
from backbench.images.image_list import ImageList
from backbench.parallel import batchnorm, distributed, division, loading
from backbench.recipes import config as recipes
from backbench.results import store
from backbench.runs import atomic, seeding
from backbench.runs.folder import CHECKPOINT_FILE, RECIPE_FILE, RUN_FILE, open_run, recognise
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk
from pretrain import data, monitor, optim, processes
from pretrain.first_step import FirstStep
from pretrain.method import Batch, Method, Setup, build_method
from pretrain.recipe import PretrainConfig, overrides_of
from pretrain.resume import SavedState


def run(args: argparse.Namespace) -> int:
    config = recipes.load(PretrainConfig, args.recipe, overrides_of(args), kind="pretrain")
    found = catalog.open_split(args.data, config.data.dataset, config.data.split)
    found = data.to_train_on(found, config.data.hold_out)
    ranks = args.devices * args.nodes
    division.check_batch(config.batch_size, ranks, config.accumulate)
    refuse_too_few(config, found)
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise BadInput("--tensorboard needs the tensorboard package: pip install tensorboard")
    method = build(config, found)  # refuses what the method cannot do before anything starts
    identity = {"recipe": what_decides(config), "data": data.dataset_fingerprint(found)}
    for groups in batchnorm.groups_of(method):
        if groups is None:
            identity["processes"] = ranks  # a group each: their number decides
        else:
            division.check_nesting(groups, ranks)

    if (args.out / CHECKPOINT_FILE).exists():
        if not recognise(args.out, verb="pretrain", identity=identity):
            raise BadInput(
                f"{args.out / CHECKPOINT_FILE}: not made by a pretraining in this folder, which has"
                f" no {RUN_FILE}; choose another --out, or move the file away"
            )
        digest = Checkpoint.load(args.out / CHECKPOINT_FILE).digest
        log.info("%s: already finished, digest %s", args.out / CHECKPOINT_FILE, digest[:12])
        return 0

    if config.accumulate > 1 and not method.accumulates:
        raise BadInput(
            f"accumulate {config.accumulate}: the loss of '{config.method.name}' compares the "
            "samples of the whole batch, which micro-batches cannot; set accumulate to 1 and use "
            "more processes"
        )
    fabric = processes.launch(config, args)
    with distributed.rank_0_tells(watched=distributed.started_by_fabric(fabric)):
        if ranks > 1:
            method = build(config, found)  # again, now that the method can see the other ranks
        workers = min(config.data.workers, loading.cores(args.devices))
        if args.workers is not None:
            workers = args.workers
        # Only rank 0 writes in RUN, and makes sure that nobody else does
        opening = open_run(args.out, verb="pretrain", identity=identity)
        agree = distributed.Agreement()
        with agree.together(opening if fabric.is_global_zero else None):
            if fabric.is_global_zero and not (args.out / RECIPE_FILE).exists():
                atomic.write_text(args.out / RECIPE_FILE, recipes.to_yaml(config))
            train(
                fabric,
                config,
                method,
                found,
                args.out,
                recipe=recipes.fingerprint(identity["recipe"]),
                agree=agree,
                workers=workers,
                tensorboard=args.tensorboard,
            )
    return 0


def refuse_too_few(config: PretrainConfig, found: ImageList) -> None:
    """BadInput where the images do not make one batch."""
    batch = config.batch_size
    if config.epochs and len(found) < batch:
        raise BadInput(
            f"{found.root}: {len(found)} images are fewer than one batch of {batch}; "
            f"set batch_size to at most {len(found)}"
        )


def what_decides(config: PretrainConfig) -> dict[str, Any]:
    """The part of the recipe that decides the numbers: without how the run is fed and watched."""
    recipe = recipes.to_dict(config)
    recipe["data"].pop("workers")
    for name in ("save_minutes", "log_every", "knn_every", "probe", "expected"):
        recipe.pop(name)
    return recipe


def build(config: PretrainConfig, found: ImageList) -> Method:
    """The method with its weights drawn from the seed. The trunk first, so that it is the same for
    all methods."""
    archs.family_of(config.arch).refuse_pixels(config.arch, config.views.pixels)
    seeding.seed_everything(config.seed, "backbone")
    backbone = archs.build_trunk(
        config.arch, config.stem, zero_init_residual=config.zero_init_residual
    )
    seeding.seed_everything(config.seed, "method")
    setup = Setup(
        batch_size=config.batch_size,
        views=len(config.views.per_view),
        seed=config.seed,
        images=len(found),
        classes=len(found.classes),
        accumulate=config.accumulate,
    )
    return build_method(config.method, backbone, setup)


class Verdict(NamedTuple):
    """All ranks act upon these in this step, because one of them has found them."""

    interrupted: bool  # a signal came: save and leave
    failed: bool  # a loss is not finite
    overdue: bool  # the last state is too old at any step
    due: bool  # the last state is too old at the end of an epoch


def train(
    fabric: Fabric,
    config: PretrainConfig,
    method: Method,
    found: ImageList,
    run: Path,
    *,
    recipe: str,
    agree: distributed.Agreement,
    workers: int,
    tensorboard: bool = False,
) -> None:
    """Train from the state in RUN, or from the beginning, and write RUN/backbone.safetensors.
    `recipe` is the fingerprint of what decides the run's numbers; only a state that has it
    continues."""
    device, rank, ranks = fabric.device, fabric.global_rank, fabric.world_size
    on_gpu = device.type == "cuda"
    steps_per_epoch = len(found) // config.batch_size
    total = config.epochs * steps_per_epoch  # the schedule's length; MIO stops before its end
    epochs = min(config.epochs, config.stop_after_epochs or config.epochs)
    last = epochs * steps_per_epoch

    if method.sync_batchnorm and ranks > 1:
        batchnorm.convert_sync_batchnorm(method)
    form = data.InputFormat.of(config, device)
    method.to(form.dtype).to(memory_format=form.layout)
    optimizer = optim.of_recipe(config, method)
    rates = optim.LearningRates(optimizer, config, steps_per_epoch)
    features = monitor.Features(method.backbone)
    if config.compiles_on(device.type):
        for module in method.modules():  # every trunk: query, key and teacher
            if isinstance(module, Trunk):
                module.compile()
    model, stepper = fabric.setup(method, optimizer)

    state = SavedState(run, recipe, fabric, method, optimizer, save_minutes=config.save_minutes)
    step, recent = state.resume(last)
    batches = data.loader(
        found, config, first=step, last=last, workers=workers, rank=rank, ranks=ranks, on_gpu=on_gpu
    )
    record = monitor.RunLog(run, config, rank=rank, step=step, last=last, tensorboard=tensorboard)
    rules = FirstStep(method, config.method.name)  # checked in the first step, then silent
    method.train()

    with StopFlag() as stop:
        while step < last:
            epoch = step // steps_per_epoch
            lr = rates.set(step)
            # Whatever draws from global state repeats itself too
            seeding.seed_everything(config.seed, "step", step)

            # 1. The batch, in micro-batches
            with record.waiting():
                parts = [next(batches) for _ in range(config.accumulate)]
            unreadable = agree.first(data.first_error(parts))
            if unreadable is not None:
                raise BadInput(unreadable)
            record.warn_of_skipped(parts)

            # 2. The loss, and gradients that add up; ranks exchange them with the last micro-batch
            terms_of_parts = []
            for n, loaded in enumerate(parts):
                batch = Batch(
                    views=data.finish_views(loaded, config.views, form),
                    labels=loaded.labels.to(device, non_blocking=True),
                    index=loaded.index.to(device, non_blocking=True),
                    step=step,
                    epoch=epoch,
                    epochs=config.epochs,
                    progress=step / total,
                )
                with fabric.no_backward_sync(model, enabled=n + 1 < config.accumulate):
                    terms = rules.terms(model(batch))
                    fabric.backward(terms["loss"] / config.accumulate)
                terms_of_parts.append({name: value.detach() for name, value in terms.items()})
            rules.gradients()
            recent.add(terms_of_parts, device)

            # 3. Reasons to stop or save. The loss is read at every step where that costs nothing,
            #    on a GPU only when a row is due: reading waits
            row_due = (step + 1) % config.log_every == 0 or step + 1 == last
            bad = recent.first_not_finite() if row_due or not on_gpu else None
            asked = stop.requested is not None
            verdict = Verdict(*agree.any(asked, bad is not None, *state.ages()))
            if verdict.failed:
                raise loss_failure(recent, bad, step, rates, state)

            # 4. The step. fp16's scaler skips one whose gradients overflowed; elsewhere state.save
            #    refuses what is not finite
            if config.optim.clip_norm is not None:
                fabric.clip_gradients(
                    model, stepper, max_norm=config.optim.clip_norm, error_if_nonfinite=False
                )
            stepper.step()
            stepper.zero_grad(set_to_none=True)
            method.after_step((step + 1) / total)
            rules.state()
            step += 1

            # 5. The log
            record.step(recent, features, done=step, epoch=epoch, lr=lr, row_due=row_due)
            epoch_ends = step % steps_per_epoch == 0
            knn_due = config.knn_every > 0 and (step == last or (epoch + 1) % config.knn_every == 0)
            if epoch_ends and knn_due and rank == 0:
                with record.paused():  # the other ranks wait in their next exchange
                    score = monitor.knn_score(
                        method.backbone, found, config.views, device, workers=workers, stop=stop
                    )
                record.knn(score, done=step, epoch=epoch)

            # 6. The state
            at_end = step == last or (epoch_ends and verdict.due)
            if verdict.interrupted or verdict.overdue or at_end:
                state.save(step, recent)
            if verdict.interrupted and step < last:
                fabric.barrier()  # no rank leaves before the state is written
                by = stop.requested or "a signal to another process"
                raise Preempted(
                    f"{run}: stopped by {by} at step {step} of {last}, state saved;"
                    " the same command continues"
                )

    if rank == 0:
        if last:
            monitor.plot_curves(run, config.name)
        checkpoint = Checkpoint(
            arch=config.arch,
            stem=config.stem,
            method=config.method.name,
            epochs=epochs,
            state_dict=method.backbone.state_dict(),
            heads=method.heads(),
            pixels=config.views.pixels,
            provenance=provenance(config, found, ranks, device),
        )
        checkpoint.save(run / CHECKPOINT_FILE)
        log.info("%s: digest %s", run / CHECKPOINT_FILE, checkpoint.digest[:12])
    fabric.barrier()


def loss_failure(
    recent: monitor.RecentTerms,
    bad: int | None,
    step: int,
    rates: optim.LearningRates,
    state: SavedState,
) -> Failed:
    """The error for a loss that is not finite, with its value, its step and what may help. `bad` is
    its place among the recent terms, or None if only other ranks have found one, in `step`."""
    value = float("nan")
    if bad is not None:
        value = float(recent.rows[bad]["loss"])
        step -= len(recent) - 1 - bad  # the last of the recent terms are this step's
    return Failed(
        f"the loss is {value} at step {step} (lr {rates.at(step):.4g}); {state.last_good()}; "
        "a lower optim.lr, a longer optim.warmup_epochs or precision=fp32 may help"
    )


def provenance(
    config: PretrainConfig, found: ImageList, ranks: int, device: torch.device
) -> dict[str, Any]:
    """Recipe, code, versions and data: all that is needed to repeat the run."""
    from importlib.metadata import version

    on_gpu = device.type == "cuda"
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
            "fingerprint": data.dataset_fingerprint(found),
        },
        "processes": ranks,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
    }
