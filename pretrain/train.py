"""`backbench pretrain` trains a backbone on images and writes a Checkpoint.

The loop is `Training.loop`."""

import logging
import platform
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from backbench.datasets import catalog
from backbench.errors import BadInput, Failed
from backbench.images.image_list import ImageList
from backbench.parallel import (
    batchnorm,
    distributed,
    division,
    gpus,
    loading,
    precision,
)
from backbench.parallel.lightning import DDPStrategy, Fabric, MixedPrecision
from backbench.pretrain import data, monitor, optim, own
from backbench.pretrain.first_step import FirstStep
from backbench.pretrain.method import Batch, Method, Setup, build_method
from backbench.pretrain.recipe import PretrainConfig, overrides_of
from backbench.recipes import config as recipes
from backbench.records import store
from backbench.requests.pretrain import PretrainRequest
from backbench.runs import atomic, seeding, terminal
from backbench.runs.folder import (
    CHECKPOINT_FILE,
    RECIPE_FILE,
    RUN_FILE,
    STATE_FILE,
    open_run,
    recognise,
)
from backbench.runs.resumable import ResumableSteps
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk

T = TypeVar("T")
# Where the last state is younger than this, the end of an epoch writes no other
EPOCH_END_SECONDS = 30
TIMED_SECONDS = 6.0  # of steps that say what an epoch costs
# Fabric's names of the precisions that autocast. The others are the method's own dtype
AUTOCAST: dict[str, Literal["bf16-mixed", "16-mixed"]] = {
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
}


def run(request: PretrainRequest) -> None:
    """Run the verb `pretrain`: train by a recipe until RUN/backbone.safetensors is there."""
    config = recipes.load(
        PretrainConfig, request.recipe, overrides_of(request), kind="pretrain"
    )
    found = data.to_train_on(images_of(request, config), config.data.hold_out)
    ranks = request.devices * request.nodes
    division.check_batch(config.batch_size, ranks, config.accumulate)
    refuse_too_few(config, found)
    # The method refuses what it cannot do here, before anything starts
    method = build(config, found)
    identity: dict[str, Any] = {
        "recipe": what_decides(config),
        "data": data.dataset_fingerprint(found),
    }
    for groups in batchnorm.groups_of(method):
        if groups is None:
            # Each process is a group of batch norm, so their number decides the results
            identity["processes"] = ranks
        else:
            division.check_nesting(groups, ranks)

    file = request.out / CHECKPOINT_FILE
    if file.exists():
        if not recognise(request.out, verb="pretrain", identity=identity):
            raise BadInput(
                f"{file}: not made by a pretraining in this folder, which has no {RUN_FILE};"
                " choose another --out, or move the file away"
            )
        digest = Checkpoint.load(file).digest
        log.info("%s: already finished, digest %s", file, digest[:12])
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
            # Again, now that the method can see the other ranks
            method = build(config, found)
        # Rank 0 alone writes in RUN, and makes sure that no other run does
        opening = open_run(request.out, verb="pretrain", identity=identity)
        agree = distributed.Agreement()
        with agree.together(opening if fabric.is_global_zero else None):
            if fabric.is_global_zero and not (request.out / RECIPE_FILE).exists():
                atomic.write_text(request.out / RECIPE_FILE, recipes.to_yaml(config))
            recipe = recipes.fingerprint(identity["recipe"])
            training = Training(
                fabric,
                config,
                method,
                found,
                request.out,
                recipe,
                agree,
                loader_workers(config, request),
            )
            training.loop()
            training.write_checkpoint()


def images_of(request: PretrainRequest, config: PretrainConfig) -> ImageList:
    """List the images of the recipe's dataset, or of the folder of one's own."""
    if request.images is not None:
        return own.open_images(request.images)
    if request.data is None:
        raise BadInput(
            "give --data ROOT, the folder with one folder per dataset; or --images FOLDER, pictures of"
            " your own"
        )
    return catalog.open_split(request.data, config.data.dataset, config.data.split)


def seconds_per_step(config: PretrainConfig, request: PretrainRequest) -> float:
    """Time the steps of a training that is thrown away: after a first one, those of TIMED_SECONDS, or
    all that it has."""
    found = images_of(request, config)
    refuse_too_few(config, found)
    fabric = launch(config, request)
    method = build(config, found)
    with tempfile.TemporaryDirectory() as folder, terminal.quiet():
        training = Training(
            fabric,
            config,
            method,
            found,
            Path(folder),
            "",
            distributed.Agreement(),
            loader_workers(config, request),
        )
        # The first step starts the machine up, so it counts only where there is no other
        began = time.monotonic()
        training.step_without_log(0)
        if training.last == 1:
            return time.monotonic() - began
        began = time.monotonic()
        took = 0.0
        steps = 0
        while steps + 1 < training.last and took < TIMED_SECONDS:
            steps += 1
            training.step_without_log(steps)
            took = time.monotonic() - began
    return took / steps


def loader_workers(config: PretrainConfig, request: PretrainRequest) -> int:
    """Return how many loader workers this process has: as asked, else the recipe's, at most one a
    core."""
    if request.workers is not None:
        return request.workers
    return min(config.data.workers, loading.cores(request.devices))


class Autocast(MixedPrecision):
    """Autocasts as Fabric does, but leaves the Batch as it is: autocast casts where it must."""

    def convert_input(self, data: T) -> T:
        return data


def launch(config: PretrainConfig, request: PretrainRequest) -> Fabric:
    """Make this process one of devices x nodes, all of them started. Under Slurm or torchrun the
    processes are there already; otherwise Fabric starts this command once a device."""
    accelerator = request.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    gpus.refuse_missing(accelerator, request.devices)
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
    # Silence two harmless warnings: a single process without Slurm is fine, and torch 2.11 has no
    # other name for `broadcast_buffers`
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
    """Raise BadInput where the images do not make one batch."""
    batch = config.batch_size
    if config.epochs and len(found) < batch:
        raise BadInput(
            f"{found.root}: {len(found)} images are fewer than one batch of {batch};"
            f" set batch_size to at most {len(found)}"
        )


def what_decides(config: PretrainConfig) -> dict[str, Any]:
    """Return the part of the recipe that decides the numbers, without how the run is fed and
    watched."""
    recipe = recipes.to_dict(config)
    recipe["data"].pop("workers")
    for name in ("save_minutes", "log_every", "knn_every", "probe", "expected"):
        recipe.pop(name)
    for crops in recipe["views"]["crops"]:
        # Runs from before this key had no other order, and are the same runs still.
        if not crops["gray_first"]:
            crops.pop("gray_first")
    return recipe


def build(config: PretrainConfig, found: ImageList) -> Method:
    """Build the method with weights drawn from the seed. The trunk is drawn first, from a seed of
    its own, so that all methods start from the same one."""
    archs.family_of(config.arch).refuse_pixels(config.arch, config.views.pixels)
    seeding.seed_everything(config.seed, "backbone")
    backbone = archs.build_trunk(
        config.arch, config.stem, zero_init_residual=config.zero_init_residual
    )
    seeding.seed_everything(config.seed, "method")
    classes = len(found.classes)
    if min(found.labels, default=0) < 0:  # -1: an image without a label
        classes = 0
    setup = Setup(
        batch_size=config.batch_size,
        views=len(config.views.per_view),
        seed=config.seed,
        images=len(found),
        classes=classes,
        accumulate=config.accumulate,
    )
    return build_method(config.method, backbone, setup)


@dataclass
class SavedState:
    """Writes and reads RUN/state.pt, which holds everything that decides the steps to come:

        recipe      the fingerprint of what decides the run's numbers
        step        how many steps are made
        recent      the terms since the last row of metrics.jsonl
        method      parameters and buffers
        optimizer   its state, such as momentum
        precision   fp16's gradient scale

    Rank 0 writes it and all ranks read it. It holds no random state, as all draws are functions of
    the seed and the step."""

    run: Path
    recipe: str
    fabric: Fabric
    method: Method
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        self.file = self.run / STATE_FILE

    def resume(self, last: int) -> tuple[int, monitor.RecentTerms]:
        """Load the state. Return the step to continue at (out of `last`) and the recent terms; 0
        and none where nothing was saved. Raise BadInput for a damaged state, or one of another
        recipe."""
        if not self.file.exists():
            return 0, monitor.RecentTerms()
        state = load_state(self.file)
        if state.get("recipe") != self.recipe:
            raise BadInput(
                f"{self.file}: the state of another recipe; move it away, or use another --out"
            )
        step = state["step"]
        # The terms go to this run's device, whatever the machine that saved them had
        recent = monitor.RecentTerms()
        for row in state["recent"]:
            recent.rows.append(
                {name: x.to(self.fabric.device) for name, x in row.items()}
            )
        self.method.load_state_dict(state["method"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        log.info("%s: continuing at step %d of %d", self.file.parent, step, last)
        return step, recent

    def save(self, step: int, recent: monitor.RecentTerms) -> None:
        """Save the state after `step` steps, on rank 0. Weights that are not finite raise Failed,
        so that they never replace a good state. All ranks call this and hold the same weights, so
        either all fail or none."""
        # A norm is finite only where all elements are. Stacked, the norms of all parameters, queues
        # and running statistics take a single read from the device
        held = [x for x in self.method.state_dict().values() if x.is_floating_point()]
        norms = torch._foreach_norm(held)
        if not torch.stack(norms).isfinite().all():
            raise Failed(
                f"after step {step} the weights, or queues and statistics beside them, are not"
                f" finite; {self.last_good()}"
            )
        if self.fabric.global_rank == 0:
            state = {
                "recipe": self.recipe,
                "step": step,
                "recent": recent.rows,
                "precision": self.fabric.strategy.precision.state_dict(),
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            save_state(self.file, state)

    def last_good(self) -> str:
        """Tell where a run that went wrong can be taken up, for its error message."""
        if not self.file.exists():
            return "no state was saved before"
        step = load_state(self.file)["step"]
        return f"the last good state is {self.file}, at step {step}"


@dataclass
class Training:
    """Trains the method from the step of the saved state to the last. `recipe` is the fingerprint
    of what decides the numbers: a state of another recipe is refused."""

    fabric: Fabric
    config: PretrainConfig
    method: Method
    found: ImageList
    run: Path
    recipe: str
    agree: distributed.Agreement
    workers: int

    def __post_init__(self) -> None:
        fabric = self.fabric
        config = self.config
        method = self.method
        rank = fabric.global_rank
        # 1. How long: the schedule spans `total` steps, of which MIO makes only the first `last`
        self.steps_per_epoch = len(self.found) // config.batch_size
        self.total = config.epochs * self.steps_per_epoch
        self.epochs = config.trained_epochs
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
        self.first, self.recent = self.state.resume(self.last)
        self.record = monitor.RunLog(self.run, config, rank, self.first, self.last)
        self.rules = FirstStep(method, config.method.name)  # checked once, then silent
        self.batches = data.loader(
            self.found,
            config,
            first=self.first,
            last=self.last,
            workers=self.workers,
            rank=rank,
            ranks=fabric.world_size,
            on_gpu=fabric.device.type == "cuda",
        )
        method.train()

    def loop(self) -> None:
        """Make the steps that are left."""
        config = self.config
        record = self.record
        with StopFlag() as stop:
            steps = ResumableSteps(
                self.first,
                self.last,
                stop=stop,
                agreement=self.agree,
                progress=record.progress,
                save=lambda done: self.state.save(done, self.recent),
                due=self.state_is_due,
                place="at step {done} of {total}, state saved",
                run=self.run,
            )
            for step in steps:
                epoch = step // self.steps_per_epoch
                # 1. The kNN score of the epoch that has ended
                if step % self.steps_per_epoch == 0:
                    self.score_neighbours(step, stop)

                lr = self.rates.set(step)
                # Whatever draws from global state repeats itself too
                seeding.seed_everything(config.seed, "step", step)

                # 2. The batch, in micro-batches
                with record.waiting():
                    parts = [next(self.batches) for _ in range(config.accumulate)]
                self.refuse_unreadable(parts)

                # 3. The loss, and gradients that add up
                terms = self.gradients(parts, step, epoch)
                self.recent.add(terms, self.fabric.device)
                done = step + 1
                row_due = done % config.log_every == 0 or done == self.last
                self.refuse_not_finite(step, row_due)

                # 4. The step of the optimiser, then of the method
                self.update(done)

                # 5. The log
                record.step(
                    self.recent,
                    self.features,
                    done=done,
                    epoch=epoch,
                    lr=lr,
                    row_due=row_due,
                )
                steps.show(**record.shown)
            # No signal cuts the last score short, since the run ends with it anyway
            self.score_neighbours(self.last, None)

    def step_without_log(self, step: int) -> None:
        """Make one step as `loop` does, and wait for it, as a GPU runs ahead."""
        parts = [next(self.batches) for _ in range(self.config.accumulate)]
        self.refuse_unreadable(parts)
        for terms in self.gradients(parts, step, epoch=0):
            terms["loss"].item()
        self.update(step + 1)

    def state_is_due(self, done: int, age: float) -> bool:
        """Return True where a state is due: every few minutes, at the ends of epochs that are not
        short, and at the end."""
        epoch_ends = done % self.steps_per_epoch == 0
        return (
            done == self.last
            or age > 60 * self.config.save_minutes
            or (epoch_ends and age > EPOCH_END_SECONDS)
        )

    def write_checkpoint(self) -> None:
        """Write RUN/backbone.safetensors and the curves, on rank 0; the others wait."""
        fabric = self.fabric
        config = self.config
        method = self.method
        if fabric.is_global_zero:
            if self.last:  # steps in all; a run of none has no curves
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
        """Raise BadInput on all ranks where an image of one of them can be neither read nor left
        out. Warn of each image that is left out."""
        errors = [part.error for part in parts if part.error is not None]
        unreadable = self.agree.first(errors[0] if errors else None)
        if unreadable is not None:
            raise BadInput(unreadable)
        self.record.warn_of_skipped(parts)

    def gradients(
        self, parts: Sequence[data.LoadedBatch], step: int, epoch: int
    ) -> list[dict[str, torch.Tensor]]:
        """Run forward and backward on each micro-batch. Return the terms of each, detached."""
        config = self.config
        device = self.fabric.device
        terms_of_parts = []
        for n, loaded in enumerate(parts):
            batch = Batch(
                views=data.finish_views(loaded, config.views, self.form),
                labels=loaded.labels.to(device, non_blocking=True),
                index=loaded.index.to(device, non_blocking=True),
                step=step,
                epoch=epoch,
                epochs=config.epochs,
                progress=step / self.total,
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

    def refuse_not_finite(self, step: int, row_due: bool) -> None:
        """Raise Failed on all ranks where a loss of one of them is infinite or nan."""
        # On a GPU the losses are read only when a row is due, since reading waits for the device;
        # elsewhere it costs nothing
        if not row_due and self.fabric.device.type == "cuda":
            return
        bad = self.recent.first_not_finite()
        (failed,) = self.agree.any(bad is not None)
        if failed:
            raise self.loss_failure(bad, step)

    def loss_failure(self, bad: int | None, step: int) -> Failed:
        """Make the error for a loss that is not finite, with its value, its step and what may help.
        `bad` is its place among the recent terms, or None where only other ranks have found one."""
        value = float("nan")
        if bad is not None:
            value = float(self.recent.rows[bad]["loss"])
            # The last of the recent terms are those of `step`
            step -= len(self.recent) - 1 - bad
        return Failed(
            f"the loss is {value} at step {step} (lr {self.rates.at(step):.4g});"
            f" {self.state.last_good()}; a lower optim.lr, a longer optim.warmup_epochs or"
            " precision=fp32 may help"
        )

    def update(self, done: int) -> None:
        """Step the optimiser, then the method; that makes `done` steps of the run. fp16's scaler
        skips gradients that overflowed; elsewhere `SavedState.save` refuses what is not finite."""
        norm = self.config.optim.clip_norm
        if norm is not None:
            self.fabric.clip_gradients(
                self.model, self.stepper, max_norm=norm, error_if_nonfinite=False
            )
        self.stepper.step()
        self.stepper.zero_grad(set_to_none=True)
        self.method.after_step(done / self.total)
        self.rules.state()

    def score_neighbours(self, done: int, stop: StopFlag | None) -> None:
        """Score by kNN after `done` steps, at an epoch's end, if that is due; only rank 0 works,
        the others wait for it."""
        if not done:
            return
        every = self.config.knn_every
        epoch = done // self.steps_per_epoch - 1
        due = every > 0 and (done == self.last or (epoch + 1) % every == 0)
        # A run that continues at an epoch's end has the score, unless it was stopped before
        known = done == self.first and self.record.has_knn
        if not due or known or self.fabric.global_rank:
            return
        with self.record.paused():
            knn = monitor.KnnScore(
                self.found, self.config.views, self.fabric.device, self.workers
            )
            score = knn(self.method.backbone, stop)
        self.record.knn(score, done=done, epoch=epoch)


def provenance(
    config: PretrainConfig, found: ImageList, ranks: int, device: torch.device
) -> dict[str, Any]:
    """Collect all that is needed to repeat the run: recipe, code, versions and data."""
    from importlib.metadata import version

    machine = platform.machine()
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
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
        "device": machine,
    }
