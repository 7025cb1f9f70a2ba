"""Reads which tasks are wanted, on which dataset: knn, linear/cifar10@lorac, knn@RECIPE k=5."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from backbench.containers import finding
from backbench.datasets import catalog, outside
from backbench.datasets.boxes import box_folders
from backbench.datasets.boxes.parts import BoxFolder
from backbench.errors import BadInput, nearest, no_folder
from backbench.images.file_names import unusable_in
from backbench.recipes import config
from backbench.tasks import DETECTION, TASKS
from backbench.untrusted import printable

# The readings where no task is named: minutes on a CPU, from one pass over the images
DEFAULT_TASKS = ("knn", "fewshot", "logreg")
# Their recipes are fitted to the data and the trunk, where they ask for more than there is
FITTED = (*DEFAULT_TASKS, "label_curve")
# On a folder of one's own these take a protocol of their own (`own_recipe`): each trunk at its own
# size, and a training as long as the set is large
OWN_TASKS = (
    *FITTED,
    "layers",
    "loaders",
    "linear",
    "semi_1pct",
    "semi_10pct",
    "finetune",
    "multilabel",
    "multilabel_svm",
    *DETECTION,
)
# The tasks that `evaluate` accepts: all but those that other verbs compute from kept predictions or
# detections
ACCEPTED = tuple(
    name for name, task in TASKS.items() if task.from_scores or not task.follows
)


class WantedTask(NamedTuple):
    """A task to measure, `task/dataset[@recipe]`; `recipe` may have changes: "knn k=5,20"."""

    task: str
    dataset: str
    recipe: str

    @property
    def words(self) -> list[str]:
        """The recipe and its changes."""
        return re.split(r" +(?=[a-z_][\w.]*=)", self.recipe)

    @property
    def folder(self) -> str:
        """The name of its run folder: the task, the dataset and the recipe."""
        names = [Path(recipe).stem for recipe in self.words[0].split(",")]
        words = [*names, *self.words[1:]]
        name = re.sub(r"[^\w.-]+", "_", "-".join(words))
        return f"{self.task}-{self.dataset}-{name}"


def parse_task(task: str, folder: str = "") -> WantedTask:
    """Parse a task, such as "linear/cifar10@lorac" into ("linear", "cifar10", "lorac").

    The recipe may be left out, and the dataset where it is `folder`, whose name may have an @ in it.
    Further examples: "linear/all", "knn/dtd@knn k=5,20", "semi_1pct/imagenet" (with lists),
    "mask_rcnn/coco2017". "ood/imagenet-a" uses the heads that "linear/imagenet" left, and
    "calibration" the scores of linear and logreg."""
    what, _, recipe = task.partition("@")
    kind, slash, dataset = what.partition("/")
    if kind not in TASKS:
        raise BadInput(
            f"task '{task}': unknown task '{kind}'; {nearest(kind, ACCEPTED)}"
        )
    if TASKS[kind].from_predictions:
        raise BadInput(
            f"task '{task}': follows from kept predictions and a list; measure knn or another task,"
            f" then `backbench {TASKS[kind].verb} RUNS --list FILE`"
        )
    if TASKS[kind].explains:
        raise BadInput(
            f"task '{task}': follows from kept detections; measure {TASKS[kind].explains}, then"
            f" `backbench {TASKS[kind].verb} RUNS --data ROOT`"
        )
    dataset = dataset if slash else folder
    if not dataset:
        raise BadInput(
            f"task '{task}': expected task/dataset[@recipe], as in linear/cifar10"
        )
    if not recipe:
        recipe = TASKS[kind].recipe
        boxed = TASKS[kind].detects
        own = has_own_boxes(dataset) if boxed else is_own(dataset)
        if kind in OWN_TASKS and own:
            recipe = own_recipe(kind)
    return WantedTask(kind, dataset, recipe)


def own_recipe(kind: str) -> str:
    """Return the protocol of a task of `OWN_TASKS` on a folder of the user's own."""
    verb = TASKS[kind].verb
    return f"{verb}_own" if verb == "semisup" else f"{kind}_own"


def is_own(dataset: str) -> bool:
    """Return whether a dataset's name is that of a folder of the user's own."""
    return catalog.row(dataset) is None and dataset != "all"


def has_own_boxes(dataset: str) -> bool:
    """Return whether a detector's dataset is a folder of boxes of the user's own."""
    return dataset not in box_folders.KNOWN_BOXES


def place_tasks(
    tasks: str | Iterable[str] | None,
    data: Path,
    out: Path,
    *,
    size: int | None = None,
) -> tuple[Path, list[WantedTask]]:
    """Return ROOT and the tasks with their datasets. `data` is ROOT if the tasks name datasets,
    else the folder of one dataset. `size` is one size in pixels for all models; without it each
    is read as its protocol says. BadInput if `data` is no such folder."""
    root, found = _placed(tasks, data, out)
    if size is not None:
        found = [at_size(task, size) for task in found]
    return root, found


def at_size(task: WantedTask, size: int) -> WantedTask:
    """Read every model at `size` pixels, not at its own size. BadInput for a protocol whose size is
    fixed: its numbers are comparable as they are, and with nothing else."""
    row = TASKS[task.task]
    if row.from_scores:
        return task
    geometry: object = None
    if not row.detects:
        recipe = config.read_recipe(config.find_recipe(task.words[0], "transfer"))
        geometry = recipe.get("geometry")
    if not isinstance(geometry, dict) or "of" not in geometry:
        kind = task.task if task.task in OWN_TASKS and not row.detects else "knn"
        raise BadInput(
            f"--size {size}: {task.task}'s protocol {task.words[0]} has a size of its own; leave"
            f" --size out, or name a protocol of your own folder, as {kind}@{own_recipe(kind)}"
        )
    return task._replace(recipe=f"{task.recipe} geometry.of={size}")


def _placed(
    tasks: str | Iterable[str] | None, data: Path, out: Path
) -> tuple[Path, list[WantedTask]]:
    if tasks is None:
        names = list(DEFAULT_TASKS)
    elif isinstance(tasks, str):
        names = [tasks]
    else:
        names = list(tasks)
    if not names:
        raise BadInput(
            "no tasks given; a task is task/dataset[@recipe], as in linear/cifar10"
        )
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out}: is a file; --out needs a folder")
    if all("/" in text.partition("@")[0] for text in names):
        root = data
        tasks_there = [parse_task(text) for text in names]
    else:
        detects = all(text.partition("@")[0] in DETECTION for text in names)
        folder = dataset_folder(data, detects=detects)
        root = folder.parent
        boxes = boxes_in(folder, names if tasks is not None else None)
        if boxes is not None and tasks is None:
            names = box_tasks(boxes)
        tasks_there = [parse_task(text, folder.name) for text in names]
    datasets = {name for task in tasks_there for name in catalog.names(task.dataset)}
    outside.refuse_inside(data, sorted(datasets), out, root=root)
    return root, tasks_there


def refuse_boxes(root: Path, tasks: Iterable[WantedTask]) -> None:
    """Raise BadInput for boxes of the user's own that a detector would refuse: images are looked
    at, too."""
    for task in tasks:
        if not TASKS[task.task].detects or not has_own_boxes(task.dataset):
            continue
        # Detection imports torch, which refusals of other tasks do without
        from backbench.detection import lint, task_rows

        lint.check_folder(root / task.dataset, task_rows.DETECTION_TASKS[task.task])


def boxes_in(folder: Path, names: list[str] | None) -> BoxFolder | None:
    """Return the boxes of a folder, if it has any. BadInput for named tasks that cannot read what it
    holds: boxes or classes."""
    kinds = [text.partition("@")[0].partition("/")[0] for text in names or ()]
    try:
        boxes = box_folders.find(folder)
    except BadInput:
        # Label files alone are boxes without images
        if folder.name.lower() in ("annotations", "labels"):
            _refuse_part(folder, folder)
        raise
    others = [kind for kind in kinds if not _takes_boxes(kind)]
    if boxes is not None and others:
        raise BadInput(
            f"{folder}: holds boxes ({boxes.layout}'s layout), and {others[0]} reads one class an"
            " image; take faster_rcnn, or multilabel for the classes alone"
        )
    return boxes


def _takes_boxes(kind: str) -> bool:
    """Return whether a task reads a folder of boxes, or follows from one that does."""
    if kind not in TASKS:
        return False
    task = TASKS[kind]
    return task.detects or task.multilabel or task.explains is not None


def box_tasks(boxes: BoxFolder) -> list[str]:
    """Return the tasks where none is named: Mask R-CNN, too, where every object has an outline."""
    if boxes.has_outlines():
        return ["faster_rcnn", "mask_rcnn"]
    return ["faster_rcnn"]


def _refuse_part(folder: Path, data: Path) -> None:
    """Raise BadInput for a folder inside of a dataset: its images, its labels, or one class of a
    split."""
    base = box_folders.above(folder)
    for above in (folder.parent, folder.parent.parent):
        if base is None and {"train", "test"} <= set(catalog.splits_of(above)):
            base = above
    if base is not None:
        raise BadInput(f"--data {data}: lies inside the dataset {base}; give {base}")


def dataset_folder(data: Path, *, detects: bool = False) -> Path:
    """Return the folder of the one dataset that `data` is; BadInput where it is none. `detects` asks
    for one with boxes."""
    folder = Path(os.path.abspath(data))  # noqa: PTH100 - links stay as they are named
    # The archive of a dataset stands for the folder that it would unpack to
    endings = itertools.chain(*finding.ENDINGS.values())
    if folder.is_file() and folder.suffix.lower() in endings:
        if folder.with_suffix("").exists():
            raise BadInput(
                f"--data {data}: {folder.with_suffix('')} is beside it, and would be read in its"
                " place; name that one, or move one away"
            )
        folder = folder.with_suffix("")
    if not folder.is_dir() and finding.whole(folder) is None:
        if why := finding.refused(folder):
            raise BadInput(f"--data {why}")
        raise BadInput(
            f"--data {data}: {no_folder(folder)}; give the folder with the images, as"
            " mine/<class>/"
        )
    name = folder.name
    if "," in name or name == "all":
        raise BadInput(
            f"--data {data}: a dataset's name has no comma and is not 'all'; rename it"
        )
    catalog.refuse_taken_name(folder, f"--data {data}")
    if not detects and not box_folders.looks_like_boxes(folder):
        try:
            catalog.present(name, folder.parent)
        except BadInput:
            _refuse_part(folder, data)
            raise
        return folder
    if catalog.row(name) is not None or name in box_folders.KNOWN_BOXES:
        raise BadInput(
            f"--data {data}: has the name of the known dataset {name}; rename the folder"
        )
    if character := unusable_in(name):
        raise BadInput(
            f"--data {printable.shown(str(data))}: a dataset's name has no control character, as"
            f" {character}; rename it"
        )
    return folder
