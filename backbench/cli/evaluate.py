"""`backbench evaluate`: one's own models on one's own images, to the table: the plan, the numbers,
the table and the page, and commands for what takes hours."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.board import export, overall
from backbench.board.board import (
    BEST,
    ONCE,
    Board,
    collect,
    compare_rows,
    standing,
    text_of,
)
from backbench.board.page import write_page
from backbench.board.page_figures import collect_figures
from backbench.datasets import catalog
from backbench.datasets.splits import Splits
from backbench.errors import BadInput, nearest
from backbench.evaluation import models, wanted
from backbench.evaluation.measure import measure, refuse, sayings
from backbench.evaluation.plan import (
    EvaluationPlan,
    images_of,
    make_plan,
    refuse_places,
    refuse_recipes,
)
from backbench.evaluation.wanted import ACCEPTED, WantedTask
from backbench.recipes import config
from backbench.records.store import Result
from backbench.requests.detect import DetectRequest
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.measuring import measuring_request
from backbench.requests.options import Outcome
from backbench.requests.parsing import CHANGE
from backbench.runs import price
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.untrusted import printable
from backbench.weights import absent, archs

if TYPE_CHECKING:
    from backbench.weights.checkpoint import Checkpoint

# What may be measured next, each with its recipe where that is not the one of the papers. They are
# printed in this order, in two lists: what costs an hour at most on the images at hand, and the rest
OFFERED = (
    ("linear", "linear_own"),
    ("semi_10pct", "semisup_own"),
    ("finetune", "finetune_own"),
    ("linear", ""),
    ("semi_10pct", ""),
    ("finetune", ""),
)
HOUR = 3600
# What an image costs where all layers train, beside a forward pass: a backward pass costs two
TRAINED = 3


def models_and_tasks(
    request: EvaluateRequest,
) -> tuple[list[Path], list[str] | None]:
    """Split the words of a request into models and tasks. BadInput for one that is neither."""
    found: list[Path] = []
    tasks: list[str] = []
    for word in request.words:
        kind = word.partition("@")[0].partition("/")[0]
        # Run folders are often called as the task is: `./linear` is the folder
        is_task = kind in TASKS and not Path(word).is_file()
        if archs.is_name(word) or (Path(word).exists() and not is_task):
            found.append(Path(word))
        elif kind in TASKS:
            if CHANGE.match(word.partition("@")[2]):
                raise BadInput(
                    f"{word}: no recipe behind the @; write '{kind}@{TASKS[kind].recipe}"
                    f" {word.partition('@')[2]}'"
                )
            tasks.append(word)
        elif "." in kind or "/" in word or archs.meant_by(word):
            raise BadInput(absent.refusal(word))
        else:
            raise BadInput(f"{word}: no such file, and no task; {_meant_by(word)}")
    if not found:
        raise BadInput(
            f"{request.words[0]}: is a task; name a checkpoint file or timm:NAME before it"
        )
    return found, tasks or None


def _meant_by(word: str) -> str:
    """Return the end of the refusal of a word that is neither a model nor a task."""
    kind = word.partition("@")[0].partition("/")[0]
    if CHANGE.match(word):
        return f"a change to a protocol stands in one word with its task: 'knn@knn_own {word}'"
    parts = [part.strip() for part in word.split(",")]
    if len(parts) > 1 and all(part.partition("@")[0] in TASKS for part in parts):
        return f"write a blank between tasks: {' '.join(parts)}"
    if kind.lower() in TASKS:
        return f"did you mean '{kind.lower()}'?"
    return nearest(kind, ACCEPTED)


def check(request: EvaluateRequest) -> None:
    """Raise BadInput, before torch is imported, for a word that is neither a model nor a task, a recipe
    that is not there, and a folder that holds no classes."""
    _, tasks = models_and_tasks(request)
    _, tasks_there = wanted.place_tasks(
        tasks, request.data, request.out, size=request.size
    )
    refuse_recipes(tasks_there)
    refuse_places(tasks_there, request.accelerator, request.workers)


def run(request: EvaluateRequest) -> Outcome:
    """Run the verb `evaluate`."""
    # 1. The plan: models and images are read here, and nowhere again
    given, tasks = models_and_tasks(request)
    root, tasks_there = wanted.place_tasks(
        tasks, request.data, request.out, size=request.size
    )
    wanted.refuse_boxes(root, tasks_there)
    found = models.read_models(given)
    tell_untrained(found)
    alone = len(found) == 1
    files = {models.file_in(request.out, one, alone=alone): one for one in found}
    plan = make_plan(
        tasks_there,
        files,
        root=root,
        out=request.out,
        seed=request.seed,
        lists=root / "lists" if (root / "lists").is_dir() else None,
        accelerator=request.accelerator,
        workers=request.workers,
    )
    # 2. The numbers; a refusal before the first of them takes the weights away again
    with models.kept(request.out, files):
        refuse(plan)
        tell_plan(plan)
        results = measure(plan)
    # 3. The table, of all that OUT holds, and the page
    board = collect([request.out])
    sets = overall.overall(board)
    answer = overall.sentences(board, sets)
    print_table(board)
    for line in sayings(plan):
        print(printable.shown(line, 2000))
    print(printable.shown(" ".join(answer), 2000))
    page = request.out / "leaderboard.html"
    table = request.out / "leaderboard.csv"
    write_page(
        board,
        page,
        pairs=compare_rows(board),
        figures=collect_figures(board, [request.out]),
        answer=answer,
        sets=sets,
    )
    export.write_csv(board, table)
    # 4. What can be measured next, and where all of it is
    boxed = all(TASKS[task.task].detects for task in plan.wanted)
    if tasks is None and results and boxed:
        tell_more_seeds(plan, next(iter(files)))
    elif tasks is None and results:
        tell_what_is_next(plan, next(iter(files)), results, size=request.size)
    print(f"table: {table}   page: {page}")
    return Outcome(document=results)


def tell_untrained(checkpoints: Sequence[Checkpoint]) -> None:
    """Warn of each checkpoint that looks untrained, as where a load took nothing and said nothing."""
    from backbench.weights.inspecting import untrained_signs

    for checkpoint in checkpoints:
        if checkpoint.epochs == 0:  # a random trunk that was asked for
            continue
        signs = untrained_signs(checkpoint.state_dict)
        if signs:
            log.warning(f"{checkpoint.name}: looks untrained: {'; '.join(signs)}")


def tell_plan(plan: EvaluationPlan) -> None:
    """Say how many images there are, and what will be measured."""
    names = list(dict.fromkeys(task.dataset for task in plan.wanted))
    boxed = [task.dataset for task in plan.wanted if TASKS[task.task].detects]
    several = {task.dataset for task in plan.wanted if TASKS[task.task].multilabel}
    for name in names:
        if name in [*catalog.DATASETS, *boxed, "all"]:
            continue
        images = images_of(plan, name, multilabel=name in several)
        counts = ", ".join(f"{len(part)} {split}" for split, part in images.items())
        classes = len(images.train.classes)
        log.info(f"{name}: {classes} classes; {counts} images")
    titles = []
    for task in plan.wanted:
        titles.append(f"{TASKS[task.task].title.lower()} ({task.recipe})")
    models = price.plural(len(plan.checkpoints), "model")
    log.info(f"plan: {', '.join(titles)}; {models} on {', '.join(names)}")


def print_table(board: Board) -> None:
    """Print each column's values with 95% intervals: `*` means best, `°` best of one training."""
    labels = board.labels()
    width = max((len(labels[row.checkpoint]) for row in board.measured_rows), default=0)
    for column in board.measured_columns():
        marks = standing(board, column)
        # What has no rank may be in nats, of which a tenth is much
        form = ".1f" if TASKS[column.task].ranked else ".2f"
        print(column.name)
        for row, cell in board.measured(column):
            mark = {BEST: " *", ONCE: " °"}.get(marks.get(row.checkpoint, ""), "")
            half = "" if cell.half_width is None else f" ± {cell.half_width:{form}}"
            value = text_of(cell.value, form)
            print(f"  {labels[row.checkpoint]:<{width}}  {value:>5}{half}{mark}")


def tell_what_is_next(
    plan: EvaluationPlan,
    file: Path,
    results: Sequence[Result],
    *,
    size: int | None = None,
) -> None:
    """Print the commands of what was not measured: first what costs an hour at most. `size` is that
    of the images, where one was asked for."""
    dataset = plan.wanted[0].dataset
    images = images_of(plan, dataset)
    soon: list[str] = []
    later: list[str] = []
    priced = False
    for task, recipe in OFFERED:
        if recipe and not wanted.is_own(dataset):
            continue
        next_task = WantedTask(task, dataset, recipe or TASKS[task].recipe)
        if recipe and size is not None:
            next_task = wanted.at_size(next_task, size)
        command = command_of(next_task, plan, file)
        passes = forward_passes(next_task, images)
        cost = f"as {passes:,} images through the trunk"
        seconds_each = seconds_an_image(next_task, results)
        if seconds_each is None:
            later.append(f"{command}  ({cost})")
            continue
        priced = True
        seconds = passes * seconds_each
        cost += f", about {price.spelled(seconds)}"
        if seconds <= HOUR:
            soon.append(f"{command}  ({cost})")
        else:
            later.append(f"{command}  ({cost})")
    later.append(
        "detection needs boxes, as COCO's json, VOC's XML or YOLO's text: --data FOLDER"
    )
    if soon:
        print("Next, at most an hour each, for one model (by the speed just seen):")
        print("\n".join(f"  {line}" for line in soon))
    if priced:
        print("What takes longer:")
    else:
        print("Next (no time is known, as all features were kept from before):")
    print("\n".join(f"  {line}" for line in later))


def seconds_an_image(
    wanted_task: WantedTask, results: Sequence[Result]
) -> float | None:
    """Return how long an image takes through the slowest trunk of `results`, of the size that a task
    reads; None if no result tells a speed."""
    recipe = config.read_recipe(config.find_recipe(wanted_task.words[0], "transfer"))
    geometry = recipe.get("geometry") or {}
    slowest = None
    for result in results:
        speed = result.origin.get("images_per_second")
        if not speed:
            continue
        seconds = 1 / speed
        trunk: Any = result.provenance.get("trunk", {})
        seen = trunk.get("side")
        if "of" not in geometry and "crop" in geometry and seen:
            # It reads images of a size of its own, and the price goes with the pixels
            seconds *= (geometry["crop"] / seen) ** 2
        slowest = max(seconds, slowest or 0.0)
    return slowest


def tell_more_seeds(plan: EvaluationPlan, file: Path) -> None:
    """Print the commands that train the detectors of one model again, which tell how far chance moves
    them."""
    print(
        "Next, for one model: three seeds, which say how far a second training moves a number:"
    )
    for run in plan.runs:
        request = run.request
        if not isinstance(request, DetectRequest) or request.checkpoint != file:
            continue
        again = replace(
            request,
            out=Path(f"{run.out}-seeds"),
            seeds=3,
            seed=None,
            resume=False,
        )
        print(f"  {shlex.join(['backbench', *again.argv()])}")


def command_of(wanted_task: WantedTask, plan: EvaluationPlan, file: Path) -> str:
    """Return the command that measures a task for the checkpoint `file`."""
    recipe, *overrides = wanted_task.words
    request = measuring_request(
        TASKS[wanted_task.task].verb,
        [file],
        data=plan.root,
        out=file.parent / wanted_task.folder,
        dataset=wanted_task.dataset,
        recipe=recipe,
        overrides=overrides,
        percent=TASKS[wanted_task.task].percent,
    )
    return shlex.join(["backbench", *request.argv()])


def forward_passes(wanted_task: WantedTask, images: Splits) -> int:
    """Return the price of a task by its protocol, in images that pass forward through a trunk."""
    recipe = config.read_recipe(config.find_recipe(wanted_task.words[0], "transfer"))
    if wanted_task.task == "linear":
        if recipe["augment"] is None:  # features are computed once
            return sum(len(part) for _, part in images.items())
        lengths = recipe["length"]
        length = lengths.get(wanted_task.dataset, lengths["default"])
        trainings = 2  # all rates in one pass, then the best one again
        cost = 1
    else:
        percent = TASKS[wanted_task.task].percent or 100
        length = recipe["parts"][str(percent)]["length"]
        trainings = len(recipe["head_lr"]) + 1
        cost = TRAINED
    if length.get("iterations"):
        once = length["iterations"] * recipe.get("batch_size", 256)
    else:
        share = (TASKS[wanted_task.task].percent or 100) / 100
        once = round(length["epochs"] * len(images.both()) * share)
    return int(once * trainings * cost)
