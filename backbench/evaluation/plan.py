"""Plans an evaluation: which runs measure the wanted tasks, each as a typed request."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backbench.datasets import catalog
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.evaluation.wanted import FITTED, WantedTask, has_own_boxes, is_own
from backbench.recipes import config
from backbench.requests.measuring import measuring_request
from backbench.requests.options import Request
from backbench.requests.places import Accelerator
from backbench.tasks import TASKS
from backbench.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class PlannedRun:
    """One run folder: what is asked for, and the checkpoints of the request's files."""

    task: WantedTask
    request: Request
    checkpoints: tuple[Checkpoint, ...]
    out: Path


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """All runs of an evaluation, in the order of the wanted tasks."""

    root: Path
    out: Path
    seed: int
    wanted: tuple[WantedTask, ...]
    checkpoints: tuple[Checkpoint, ...]
    runs: list[PlannedRun] = field(default_factory=list)
    # (dataset, with label maps?, with several labels an image?) -> its images, read once for all runs
    images: dict[tuple[str, bool, bool], Splits] = field(default_factory=dict)

    def of(self, wanted: WantedTask) -> list[PlannedRun]:
        return [run for run in self.runs if run.task == wanted]


def make_plan(
    wanted: Sequence[WantedTask],
    checkpoints: Mapping[Path, Checkpoint],
    *,
    root: Path,
    out: Path,
    seed: int = 0,
    lists: Path | None = None,
    engine: str = "auto",
    accelerator: Accelerator = "auto",
    workers: int | None = None,
) -> EvaluationPlan:
    """Plan the runs of the wanted tasks. The checkpoint files have been read already."""
    plan = EvaluationPlan(
        root=root,
        out=out,
        seed=seed,
        wanted=tuple(wanted),
        checkpoints=tuple(checkpoints.values()),
    )
    files = {checkpoint.digest: file for file, checkpoint in checkpoints.items()}
    for task in wanted:
        row = TASKS[task.task]
        if row.from_scores:  # of what was measured before, in this call or another
            continue
        for fitted, group in _groups(task, plan):
            recipe, *overrides = fitted.words
            run = _run_folder(fitted, group, out, files)
            request = measuring_request(
                row.verb,
                [files[checkpoint.digest] for checkpoint in group],
                data=root,
                out=run,
                dataset=None if _config_names_data(task) else task.dataset,
                recipe=recipe,
                overrides=overrides,
                percent=row.percent,
                lists=lists,
                engine=engine,
                seed=seed,
                accelerator=accelerator,
                workers=workers,
            )
            plan.runs.append(PlannedRun(task, request, tuple(group), run))
    return plan


def _config_names_data(task: WantedTask) -> bool:
    """Return True for a detector on the datasets that its config names, such as COCO."""
    return TASKS[task.task].detects and not has_own_boxes(task.dataset)


def images_of(
    plan: EvaluationPlan, dataset: str, *, multilabel: bool = False
) -> Splits:
    """Read the images of a dataset, once for the whole plan."""
    key = (dataset, False, multilabel)
    if key not in plan.images:
        plan.images[key] = catalog.load(
            dataset, plan.root, seed=plan.seed, multilabel=multilabel
        )
    return plan.images[key]


def read_lists(plan: EvaluationPlan) -> None:
    """Read the lists of images that probes and trainings of classes need. BadInput for wrong ones."""
    for task in plan.wanted:
        row = TASKS[task.task]
        trains_own = row.verb in ("finetune", "semisup") and is_own(task.dataset)
        if row.verb != "linear" and not trains_own:
            continue
        for name in catalog.names(task.dataset):
            known = catalog.row(name)
            # Label maps and known images of several classes are read by their own readings
            if known is None or not (known.dense or known.multilabel):
                images_of(plan, name, multilabel=row.multilabel)


def _run_folder(
    task: WantedTask,
    group: Sequence[Checkpoint],
    out: Path,
    files: Mapping[str, Path],
) -> Path:
    """Return OUT/<task> for OUT's own checkpoint, with a mark behind it for any others."""
    from backbench.evaluation.models import FILE

    if [files[each.digest] for each in group] == [out / FILE]:
        return out / task.folder
    mark = hashlib.sha256("".join(each.digest for each in group).encode()).hexdigest()
    return out / f"{task.folder}-{mark[:8]}"


def _groups(
    wanted: WantedTask, plan: EvaluationPlan
) -> list[tuple[WantedTask, list[Checkpoint]]]:
    """Split a task into runs: all checkpoints together if its verb can, else one by one.

    A cheap reading by its default recipe is fitted: to the data, and to checkpoints that cannot take
    the recipe's image size."""
    groups: dict[WantedTask, list[Checkpoint]] = {wanted: list(plan.checkpoints)}
    defaults = (TASKS[wanted.task].recipe, f"{wanted.task}_own")
    recipe, *changes = wanted.words
    only_sized = all(change.startswith("geometry.") for change in changes)
    by_default = wanted.task in FITTED and recipe in defaults and only_sized
    if by_default and wanted.dataset != "all":
        groups = _fitted(wanted, plan)
    if TASKS[wanted.task].detects and recipe == f"{wanted.task}_own":
        groups = _by_pyramid(wanted, plan)
    if TASKS[wanted.task].verb in ("linear", "ood", "analyze"):
        return list(groups.items())
    return [(task, [each]) for task, together in groups.items() for each in together]


def _by_pyramid(
    wanted: WantedTask, plan: EvaluationPlan
) -> dict[WantedTask, list[Checkpoint]]:
    """Take another config for plain vision transformers, which have one map for the pyramid."""
    groups: dict[WantedTask, list[Checkpoint]] = {}
    for checkpoint in plan.checkpoints:
        trunk = checkpoint.blank()
        plain = len(trunk.strides) == 1
        recipe = f"{wanted.recipe}_plain" if plain else wanted.recipe
        groups.setdefault(wanted._replace(recipe=recipe), []).append(checkpoint)
    return groups


def _fitted(
    wanted: WantedTask, plan: EvaluationPlan
) -> dict[WantedTask, list[Checkpoint]]:
    """Group the checkpoints by the recipe of a cheap reading that suits the data and their input."""
    found = config.find_recipe(wanted.words[0], "transfer")
    recipe = config.read_recipe(found)
    shared_words = [wanted.recipe, *_fewer(wanted, recipe, plan)]
    geometry = recipe["geometry"]
    groups: dict[WantedTask, list[Checkpoint]] = {}
    for checkpoint in plan.checkpoints:
        words = list(shared_words)
        blank = checkpoint.blank()
        size = blank.size
        if "of" not in geometry:
            crop = geometry["crop"]
            if size not in (None, crop):
                # Resize and crop keep their ratio
                resize = round(geometry["resize"] * size / crop)
                words += [f"geometry.resize={resize}", f"geometry.crop={size}"]
        fitted = wanted._replace(recipe=" ".join(words))
        groups.setdefault(fitted, []).append(checkpoint)
    return groups


def _fewer(
    wanted: WantedTask, recipe: config.Recipe, plan: EvaluationPlan
) -> list[str]:
    """Return the changes to a recipe that asks for more neighbours or labels than there are
    images."""
    images = images_of(plan, wanted.dataset).both()
    if wanted.task == "knn" and max(recipe["k"]) > len(images):
        few = [k for k in recipe["k"] if k <= len(images)] or [1]
        return [f"k={','.join(map(str, few))}"]
    fewest = min(Counter(images.labels).values())
    if wanted.task == "fewshot" and recipe["shots"] > fewest:
        return [f"shots={fewest}"]
    if wanted.task == "label_curve":
        # A point that would use every label is left out, too: the one of all labels covers it
        few = []
        for k in recipe["labels"]:
            if k <= fewest and k * len(images.classes) < len(images):
                few.append(k)
        if few != recipe["labels"]:
            return [f"labels={','.join(map(str, few or [1]))}"]
    return []


def refuse_recipes(wanted: Sequence[WantedTask]) -> None:
    """Raise BadInput for a recipe that is not there, and for changes that its verb does not take,
    before anything is read."""
    for task in wanted:
        row = TASKS[task.task]
        if row.from_scores:
            continue
        recipe, *changes = task.words
        if changes and row.verb in ("analyze", "detect"):
            raise BadInput(
                f"'{changes[0]}' after {task.task}@{recipe}: `backbench {row.verb}` has options for"
                " that, and takes no changes"
            )
        several = row.verb == "linear"
        names = task.words[0].split(",") if several else task.words[:1]
        for name in names:
            config.find_recipe(name, "detection" if row.detects else "transfer")


def refuse_places(
    wanted: Sequence[WantedTask], accelerator: str, workers: int | None
) -> None:
    """Raise BadInput for options of place that one of the tasks does not take."""
    for task in wanted:
        if TASKS[task.task].detects and (accelerator != "auto" or workers is not None):
            raise BadInput(
                f"{task.task}: --accelerator and --workers are for the other tasks; leave them"
                " out, or use `backbench detect ... MODEL.DEVICE cpu`"
            )
