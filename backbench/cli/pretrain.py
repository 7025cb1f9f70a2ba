"""`backbench pretrain`: a recipe on its dataset; or a method on pictures of one's own, which ends with
the table of `evaluate` against the trunk that was never trained."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.options import Outcome
from backbench.requests.pretrain import PretrainRequest
from backbench.runs import price
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.terminal import log

if TYPE_CHECKING:
    from backbench.images.image_list import ImageList
    from backbench.pretrain.recipe import PretrainConfig

RANDOM = "random"  # the folder in RUN of the trunk that was never trained
TABLE = "evaluation"  # the folder in RUN of the table


def check(request: PretrainRequest) -> None:
    """Raise BadInput, before torch is imported, for a bad recipe or for options that do not fit."""
    from backbench.pretrain import own, recipe

    if request.images is not None:
        own.check(request)
        return
    if request.recipe in own.FORMS:
        raise BadInput(
            f"{request.recipe}: a method, which trains on pictures of your own; add --images FOLDER, or"
            " name a recipe with --data ROOT"
        )
    for flag, value in (
        ("--size", request.size),
        ("--budget", request.budget),
        ("--name", request.name),
    ):
        if value:
            raise BadInput(
                f"{flag} {value}: belongs to --images FOLDER; of a recipe, change a key, as"
                " epochs=100 or name=mine"
            )
    recipe.check(request)
    if request.data is None:
        raise BadInput(
            "give --data ROOT, the folder with one folder per dataset; or --images FOLDER, pictures of"
            " your own, with the name of a method"
        )


def run(request: PretrainRequest) -> Outcome | None:
    """Run the verb `pretrain`."""
    from backbench.pretrain import train

    if request.images is None:
        train.run(request)
        return None
    return on_own_images(request, request.images)


def on_own_images(request: PretrainRequest, images: Path) -> Outcome | None:
    """Train on one's own pictures, then compare the trunk with the one that it began as."""
    from backbench.pretrain import own, train

    # 1. The form for these pictures, at their size, as long as the budget
    found = own.open_images(images)
    size = request.size or own.usual_size(found)
    wanted, config = within_budget(request, found, size)
    tell(wanted, config, found, request.recipe)
    # 2. The training
    train.run(wanted)
    # 3. The trunk as it was before the first step: the same seed draws it
    untrained = replace(
        wanted,
        recipe="own/random",
        overrides=own.untrained(config),
        out=request.out / RANDOM,
    )
    train.run(untrained)
    # 4. What both are worth, on these pictures
    files = (request.out / CHECKPOINT_FILE, request.out / RANDOM / CHECKPOINT_FILE)
    if not catalog.is_class_folder(images):
        log.info(
            f"{images}: has no classes to be told apart; measure on pictures that have some:"
            f" backbench evaluate {shlex.join(map(str, files))} --data FOLDER --out"
            f" {shlex.quote(str(request.out / TABLE))}"
        )
        return None
    from backbench.cli import evaluate

    return evaluate.run(
        EvaluateRequest(
            words=tuple(str(file) for file in files),
            data=images,
            out=request.out / TABLE,
            accelerator=request.accelerator,
            workers=request.workers,
        )
    )


def within_budget(
    request: PretrainRequest, found: ImageList, size: int
) -> tuple[PretrainRequest, PretrainConfig]:
    """Return the request for the widest trunk that makes enough epochs within the budget, and its
    recipe. BadInput where the budget is shorter than an epoch."""
    from backbench.pretrain import own, train
    from backbench.pretrain.recipe import PretrainConfig, overrides_of
    from backbench.recipes import config as recipes

    def resolved(width: float, epochs: int) -> tuple[PretrainRequest, PretrainConfig]:
        one = own.request_for(request, found, size, width=width, epochs=epochs)
        config = recipes.load(
            PretrainConfig, one.recipe, overrides_of(one), kind="pretrain"
        )
        return one, config

    budget = own.parse_budget(request.budget)
    if budget.seconds is None:
        return resolved(1.0, budget.epochs or 0)
    if kept := own.kept_form(request.out):
        # It goes on as it was planned, whatever the machine does now
        width, epochs = kept
        log.info(f"{request.out}: has begun; it goes on with its {epochs} epochs")
        return resolved(width, epochs)
    seconds = budget.seconds * own.FOR_TRAINING
    log.info(f"--budget {request.budget}: a few steps say how many epochs that is")
    chosen = (0.0, 0)
    per_epoch = 0.0
    for width in own.widths(size):
        one, config = resolved(width, 0)
        steps = len(found) // config.batch_size
        per_epoch = train.seconds_per_step(config, one) * steps
        epochs = int(seconds / per_epoch)
        log.info(
            f"{config.arch}: {price.spelled(per_epoch)} an epoch here, {epochs} within the"
            " budget"
        )
        _, before = chosen
        if before and epochs < own.ENOUGH_EPOCHS:
            break  # the narrower one makes enough of them
        chosen = (width, epochs)
        # A trunk of twice the width takes three to four times as long
        if epochs < 3 * own.ENOUGH_EPOCHS:
            break
    width, epochs = chosen
    if epochs < 1:
        raise BadInput(
            f"--budget {request.budget}: one epoch of {len(found)} pictures takes"
            f" {price.spelled(per_epoch)} here; give a longer one, or fewer pixels with --size"
        )
    return resolved(width, epochs)


def tell(
    request: PretrainRequest, config: PretrainConfig, found: ImageList, method: str
) -> None:
    """Say what will be trained, what it changes of the paper, and how long it is."""
    from backbench.pretrain import own

    pixels = max(group.size for group in config.views.per_view)
    steps = config.trained_epochs * (len(found) // config.batch_size)
    log.info(
        f"{config.name}: {method} by {request.recipe}, {config.arch} at {pixels} pixels, on"
        f" {len(found)} pictures of {request.images}; {config.trained_epochs} epochs,"
        f" {steps} steps"
    )
    changes = own.changed(config, method)
    if changes:
        paper = own.form_of(method).paper
        log.info(f"changed from {paper}: {'; '.join(changes)}")
