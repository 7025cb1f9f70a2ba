"""`backbench pretrain`: images -> Checkpoint. The loop is `Training.loop`."""

import logging
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision.amp import MixedPrecision
from lightning_fabric.strategies import DDPStrategy

from backbench.datasets import catalog
from backbench.errors import BadInput, Failed, Preempted
from backbench.images.image_list import ImageList
from backbench.parallel import batchnorm, distributed, division, loading, precision
from backbench.pretrain import data, monitor, optim
from backbench.pretrain.first_step import FirstStep
from backbench.pretrain.method import Batch, Method, Setup, build_method
from backbench.pretrain.recipe import PretrainConfig, overrides_of
from backbench.recipes import config as recipes
from backbench.records import store
from backbench.requests.pretrain import PretrainRequest
from backbench.runs import atomic, seeding
from backbench.runs.folder import (
    CHECKPOINT_FILE,
    RECIPE_FILE,
    RUN_FILE,
    STATE_FILE,
    open_run,
    recognise,
)
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk


def run(request: PretrainRequest) -> None:
    """The verb `pretrain`: train by a recipe until RUN/backbone.safetensors is there."""
    config = recipes.load(
        PretrainConfig, request.recipe, overrides_of(request), kind="pretrain"
    )
    found = catalog.open_split(request.data, config.data.dataset, config.data.split)
    found = data.to_train_on(found, config.data.hold_out)
    if request.workers is not None and request.workers < 0:
        raise BadInput(f"--workers {request.workers}: 0 (in this process) or more")
    ranks = request.devices * request.nodes
    division.check_batch(config.batch_size, ranks, config.accumulate)
    refuse_too_few(config, found)
    method = build(
        config, found
    )  # refuses what the method cannot do before anything starts
    identity: dict[str, Any] = {
        "recipe": what_decides(config),
        "data": data.dataset_fingerprint(found),
    }
    for groups in batchnorm.groups_of(method):
        if groups is None:
            identity["processes"] = ranks  # a group each: their number decides
        else:
            division.check_nesting(groups, ranks)

    if (request.out / CHECKPOINT_FILE).exists():
        if not recognise(request.out, verb="pretrain", identity=identity):
            made = f"not made by a pretraining in this folder, which has no {RUN_FILE}"
            file = request.out / CHECKPOINT_FILE
            raise BadInput(
                f"{file}: {made}; choose another --out, or move the file away"
            )
        digest = Checkpoint.load(request.out / CHECKPOINT_FILE).digest
        log.info(
            "%s: already finished, digest %s",
            request.out / CHECKPOINT_FILE,
            digest[:12],
        )
        return

    if config.accumulate > 1 and not method.accumulates:
        raise BadInput(
            f"accumulate {config.accumulate}: the loss of '{config.method.name}' compares the "
            "samples of the whole batch, which micro-batches cannot; set accumulate to 1 and use "
            "more processes"
        )
    fabric = launch(config, request)
    with distributed.rank_0_tells(watched=distributed.started_by_fabric()):
        if ranks > 1:
            method = build(
                config, found
            )  # again, now that the method can see the other ranks
        workers = min(config.data.workers, loading.cores(request.devices))
        if request.workers is not None:
            workers = request.workers
        # Only rank 0 writes in RUN, and makes sure that nobody else does
        opening = open_run(request.out, verb="pretrain", identity=identity)
        agree = distributed.Agreement()
        with agree.together(opening if fabric.is_global_zero else None):
            if fabric.is_global_zero and not (request.out / RECIPE_FILE).exists():
                atomic.write_text(request.out / RECIPE_FILE, recipes.to_yaml(config))
            recipe = recipes.fingerprint(identity["recipe"])
            training = Training(
                fabric, config, method, found, request.out, recipe, agree, workers
            )
            training.loop()
            training.write_checkpoint()


T = TypeVar("T")
EPOCH_END_SECONDS = (
    30  # a state younger than this is not written again at the end of an epoch
)
# Fabric's names of the precisions that autocast; fp32 and fp64 are the method's own dtype
AUTOCAST: dict[str, Literal["bf16-mixed", "16-mixed"]] = {
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
}


class Autocast(MixedPrecision):
    """Autocast as Fabric does it, but a Batch goes in as it is: autocast casts where it must."""

    def convert_input(self, data: T) -> T:
        return data


def launch(config: PretrainConfig, request: PretrainRequest) -> Fabric:
    """Make this process one of devices x nodes, all of them started. Under Slurm or torchrun the
    processes are there already; otherwise Fabric starts this command once a device."""
    accelerator = request.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cuda" and torch.cuda.device_count() < request.devices:
        raise BadInput(
            f"--devices {request.devices}: this machine has {torch.cuda.device_count()} GPUs"
        )
    precision.use("tf32" if config.precision == "tf32" else "fp32")
    autocast: Autocast | None = None
    if config.precision == "bf16":
        precision.warn_if_slow(accelerator)
    if config.precision in AUTOCAST:
        autocast = Autocast(AUTOCAST[config.precision], accelerator)
    strategy: DDPStrategy | str = "auto"
    if request.devices * request.nodes > 1:
        # Methods keep the statistics of batch norm equal; broadcasting queues at every step would
        # cost more
        strategy = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    # Nothing is said of what is as it should be: one process under no Slurm is fine, and torch 2.11
    # knows no other name for `broadcast_buffers`
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    fabric = Fabric(
        accelerator=accelerator,
        devices=request.devices,
        num_nodes=request.nodes,
        strategy=strategy,
        plugins=autocast,
    )
    distributed.launch(fabric)
    if not fabric.is_global_zero:
        log.setLevel(logging.ERROR)
    return fabric


def refuse_too_few(config: PretrainConfig, found: ImageList) -> None:
    """BadInput where the images do not make one batch."""
    batch = config.batch_size
    if config.epochs and len(found) < batch:
        most = f"set batch_size to at most {len(found)}"
        raise BadInput(
            f"{found.root}: {len(found)} images are fewer than one batch of {batch}; {most}"
        )


def what_decides(config: PretrainConfig) -> dict[str, Any]:
    """The part of the recipe that decides the numbers: without how the run is fed and watched."""
    recipe = recipes.to_dict(config)
    recipe["data"].pop("workers")
    for name in ("save_minutes", "log_every", "knn_every", "probe", "expected"):
        recipe.pop(name)
    return recipe


def build(config: PretrainConfig, found: ImageList) -> Method:
    """The method, drawn from the seed; the trunk first, so it is the same for all methods."""
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
        classes=len(found.classes)
        if min(found.labels, default=0) >= 0
        else 0,  # -1: unlabelled
        accumulate=config.accumulate,
    )
    return build_method(config.method, backbone, setup)


@dataclass
class SavedState:
    """RUN/state.pt: everything that decides the steps to come, written by rank 0 and read by all.
    recipe (the fingerprint of what decides a run's numbers), step (how many are made), recent (the
    terms since the last row of metrics.jsonl), method (parameters and buffers), optimizer,
    precision (fp16's gradient scale). Nothing random is in it: draws are functions of the step."""

    run: Path
    recipe: str
    fabric: Fabric
    method: Method
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        self.file = self.run / STATE_FILE
        self.saved = time.monotonic()

    def resume(self, last: int) -> tuple[int, monitor.RecentTerms]:
        """Return the step to continue at, of `last`, and the terms before it; 0 and none where
        nothing was saved. BadInput for a damaged state, or one of another recipe."""
        if not self.file.exists():
            return 0, monitor.RecentTerms()
        state = load_state(self.file)
        if state.get("recipe") != self.recipe:
            raise BadInput(
                f"{self.file}: the state of another recipe; move it away, or use another --out"
            )
        # The terms lie on the run's device, whatever the machine that saved them had
        step, recent = state["step"], monitor.RecentTerms()
        for row in state["recent"]:
            recent.rows.append(
                {name: x.to(self.fabric.device) for name, x in row.items()}
            )
        self.method.load_state_dict(state["method"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        log.info("%s: continuing at step %d of %d", self.file.parent, step, last)
        return step, recent

    def ages(self, save_minutes: float) -> tuple[bool, bool]:
        """Say if the last state is too old at any step, and at the end of an epoch. Rank 0's clock
        decides for all ranks; the others answer no."""
        if self.fabric.global_rank:
            return False, False
        old = time.monotonic() - self.saved
        return old > 60 * save_minutes, old > EPOCH_END_SECONDS

    def save(self, step: int, recent: monitor.RecentTerms) -> None:
        """Save the state after `step` steps, on rank 0. Weights that are not finite never replace a
        good state: all ranks call it, whose weights are alike, so that all fail or none."""
        # A norm is finite only where all elements are, and one read answers for all: parameters,
        # queues, running statistics
        held = [x for x in self.method.state_dict().values() if x.is_floating_point()]
        norms = torch._foreach_norm(held)
        if not torch.stack(norms).isfinite().all():
            what = "the weights, or queues and statistics beside them, are not finite"
            raise Failed(f"after step {step} {what}; {self.last_good()}")
        if self.fabric.global_rank == 0:
            state = {"recipe": self.recipe, "step": step, "recent": recent.rows}
            state["precision"] = self.fabric.strategy.precision.state_dict()
            state |= {
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            save_state(self.file, state)
        self.saved = time.monotonic()

    def last_good(self) -> str:
        """Where a run that went wrong can be taken up."""
        if not self.file.exists():
            return "no state was saved before"
        return f"the last good state is {self.file}, at step {load_state(self.file)['step']}"


class Verdict(NamedTuple):
    """All ranks act upon these in this step, because one of them has found them."""

    interrupted: bool  # a signal came: save and leave
    failed: bool  # a loss is not finite
    overdue: bool  # the last state is too old at any step
    due: bool  # the last state is too old at the end of an epoch


@dataclass
class Training:
    """A run of the loop knows what is trained, fed, watched and saved, and how far it is. `recipe`
    is the fingerprint that the state in RUN must have to continue."""

    fabric: Fabric
    config: PretrainConfig
    method: Method
    found: ImageList
    run: Path
    recipe: str
    agree: distributed.Agreement
    workers: int

    def __post_init__(self) -> None:
        fabric, config, method = self.fabric, self.config, self.method
        rank = fabric.global_rank
        # 1. How long: `total` steps are the schedule's length; MIO stops before its end
        self.steps_per_epoch = len(self.found) // config.batch_size
        self.total = config.epochs * self.steps_per_epoch
        self.epochs = min(config.epochs, config.stop_after_epochs or config.epochs)
        self.last = self.epochs * self.steps_per_epoch
        # 2. The method on its device and in its precision, its optimiser and its rates
        if method.sync_batchnorm and fabric.world_size > 1:
            batchnorm.convert_sync_batchnorm(method)
        self.form = data.InputFormat.of(config, fabric.device)
        method.to(self.form.dtype).to(memory_format=self.form.layout)
        optimizer = optim.of_recipe(config, method)
        self.rates = optim.LearningRates(optimizer, config, self.steps_per_epoch)
        self.features = monitor.Features(method.backbone)
        if config.compiles_on(fabric.device.type):
            for module in method.modules():  # every trunk: query, key and teacher
                if isinstance(module, Trunk):
                    module.compile()
        self.model, self.stepper = fabric.setup(method, optimizer)
        # 3. The state, the log and the batches from its step on
        self.state = SavedState(self.run, self.recipe, fabric, method, optimizer)
        self.step, self.recent = self.state.resume(self.last)
        self.record = monitor.RunLog(self.run, config, rank, self.step, self.last)
        self.rules = FirstStep(method, config.method.name)  # checked once, then silent
        self.batches = data.loader(
            self.found,
            config,
            first=self.step,
            last=self.last,
            workers=self.workers,
            rank=rank,
            ranks=fabric.world_size,
            on_gpu=fabric.device.type == "cuda",
        )
        method.train()

    def loop(self) -> None:
        """The steps that are left, and the last state."""
        config, record = self.config, self.record
        with StopFlag() as stop:
            if (
                self.step
                and self.step % self.steps_per_epoch == 0
                and not self.record.has_knn
            ):
                self.score_neighbours(
                    stop
                )  # which the stop at this epoch's end has ended
            while self.step < self.last:
                epoch = self.step // self.steps_per_epoch
                lr = self.rates.set(self.step)
                # Whatever draws from global state repeats itself too
                seeding.seed_everything(config.seed, "step", self.step)

                # 1. The batch, in micro-batches
                with record.waiting():
                    parts = [next(self.batches) for _ in range(config.accumulate)]
                self.refuse_unreadable(parts)

                # 2. The loss, and gradients that add up
                self.recent.add(self.gradients(parts, epoch), self.fabric.device)

                # 3. Reasons to stop or save, which one rank has found for all
                row_due = (
                    self.step + 1
                ) % config.log_every == 0 or self.step + 1 == self.last
                verdict = self.vote(stop, row_due)

                # 4. The step
                self.update()

                # 5. The log
                done, features = self.step, self.features
                record.step(
                    self.recent,
                    features,
                    done=done,
                    epoch=epoch,
                    lr=lr,
                    row_due=row_due,
                )
                epoch_ends = done % self.steps_per_epoch == 0
                if epoch_ends:
                    self.score_neighbours(stop)

                # 6. The state
                at_end = done == self.last or (epoch_ends and verdict.due)
                if verdict.interrupted or verdict.overdue or at_end:
                    self.state.save(done, self.recent)
                if verdict.interrupted and done < self.last:
                    self.fabric.barrier()  # no rank leaves before the state is written
                    by = stop.requested or "a signal to another process"
                    at = f"stopped by {by} at step {done} of {self.last}, state saved"
                    raise Preempted(f"{self.run}: {at}; the same command continues")

    def write_checkpoint(self) -> None:
        """RUN/backbone.safetensors and the curves, by rank 0; the others wait."""
        fabric, config, method = self.fabric, self.config, self.method
        if fabric.is_global_zero:
            if self.last:
                monitor.plot_curves(self.run, config.name)
            checkpoint = Checkpoint(
                arch=config.arch,
                stem=config.stem,
                method=config.method.name,
                epochs=self.epochs,
                state_dict=method.backbone.state_dict(),
                heads=method.heads(),
                pixels=config.views.pixels,
                provenance=provenance(
                    config, self.found, fabric.world_size, fabric.device
                ),
            )
            checkpoint.save(self.run / CHECKPOINT_FILE)
            log.info(
                "%s: digest %s", self.run / CHECKPOINT_FILE, checkpoint.digest[:12]
            )
        fabric.barrier()

    def refuse_unreadable(self, parts: Sequence[data.LoadedBatch]) -> None:
        """BadInput on all ranks for an image neither readable nor left out; else a warning."""
        errors = [part.error for part in parts if part.error is not None]
        unreadable = self.agree.first(errors[0] if errors else None)
        if unreadable is not None:
            raise BadInput(unreadable)
        self.record.warn_of_skipped(parts)

    def gradients(
        self, parts: Sequence[data.LoadedBatch], epoch: int
    ) -> list[dict[str, torch.Tensor]]:
        """Forward and backward of each micro-batch; returns the terms of each."""
        config, device = self.config, self.fabric.device
        terms_of_parts = []
        for n, loaded in enumerate(parts):
            batch = Batch(
                views=data.finish_views(loaded, config.views, self.form),
                labels=loaded.labels.to(device, non_blocking=True),
                index=loaded.index.to(device, non_blocking=True),
                step=self.step,
                epoch=epoch,
                epochs=config.epochs,
                progress=self.step / self.total,
            )
            # Ranks exchange gradients with the last micro-batch
            with self.fabric.no_backward_sync(
                self.model, enabled=n + 1 < config.accumulate
            ):
                terms = self.rules.terms(self.model(batch))
                self.fabric.backward(terms["loss"] / config.accumulate)
            terms_of_parts.append(
                {name: value.detach() for name, value in terms.items()}
            )
        self.rules.gradients()
        return terms_of_parts

    def vote(self, stop: StopFlag, row_due: bool) -> Verdict:
        """The reasons that any rank has found. A loss that is not finite ends the run on all of them."""
        # The loss is read at every step where that costs nothing, on a GPU only when a row is due:
        # reading waits
        on_gpu = self.fabric.device.type == "cuda"
        bad = self.recent.first_not_finite() if row_due or not on_gpu else None
        signalled = stop.requested is not None
        verdict = Verdict(
            *self.agree.any(
                signalled, bad is not None, *self.state.ages(self.config.save_minutes)
            )
        )
        if verdict.failed:
            raise self.loss_failure(bad)
        return verdict

    def loss_failure(self, bad: int | None) -> Failed:
        """Make the error for a loss that is not finite: its value, its step and what may help.
        `bad` is its place among the recent terms, None if only other ranks have found one."""
        value, step = float("nan"), self.step
        if bad is not None:
            value = float(self.recent.rows[bad]["loss"])
            step -= (
                len(self.recent) - 1 - bad
            )  # the last of the recent terms are this step's
        return Failed(
            f"the loss is {value} at step {step} (lr {self.rates.at(step):.4g});"
            f" {self.state.last_good()}; a lower optim.lr, a longer optim.warmup_epochs or"
            " precision=fp32 may help"
        )

    def update(self) -> None:
        """Step the optimiser, then the method. fp16's scaler skips gradients that overflowed;
        elsewhere `SavedState.save` refuses what is not finite."""
        norm = self.config.optim.clip_norm
        if norm is not None:
            self.fabric.clip_gradients(
                self.model, self.stepper, max_norm=norm, error_if_nonfinite=False
            )
        self.stepper.step()
        self.stepper.zero_grad(set_to_none=True)
        self.step += 1
        self.method.after_step(self.step / self.total)
        self.rules.state()

    def score_neighbours(self, stop: StopFlag) -> None:
        """Score by kNN at an epoch's end, if due; only rank 0 works, the others wait for it."""
        every, epoch = self.config.knn_every, self.step // self.steps_per_epoch - 1
        due = every > 0 and (self.step == self.last or (epoch + 1) % every == 0)
        if due and self.fabric.global_rank == 0:
            with self.record.paused():
                views, device = self.config.views, self.fabric.device
                knn = monitor.KnnScore(self.found, views, device, self.workers)
                # After the last step no run comes back to it
                score = knn(
                    self.method.backbone, stop if self.step < self.last else None
                )
            self.record.knn(score, done=self.step, epoch=epoch)


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
