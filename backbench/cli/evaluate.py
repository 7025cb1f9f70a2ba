"""`backbench evaluate`: one's own models on one's own images, to the table: the plan, the numbers,
the table and the page, and commands for what takes hours."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

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
from backbench.errors import BadInput, nearest
from backbench.evaluation import models, wanted
from backbench.evaluation.measure import measure
from backbench.evaluation.plan import (
    EvaluationPlan,
    images_of,
    make_plan,
    refuse_places,
    refuse_recipes,
)
from backbench.evaluation.wanted import WantedTask
from backbench.recipes import config
from backbench.records.store import Result
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.measuring import measuring_request
from backbench.requests.options import Outcome
from backbench.runs import price
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.untrusted import printable
from backbench.weights import archs

# Tasks of hours, by what a step costs beside a forward pass (a backward pass costs two)
DEAR = {"linear": 1, "finetune": 3, "semi_10pct": 3}


def models_and_tasks(
    request: EvaluateRequest,
) -> tuple[list[Path], list[str] | None]:
    """Split the words of a request into models and tasks. BadInput for one that is neither."""
    found: list[Path] = []
    tasks: list[str] = []
    for word in request.words:
        kind = word.partition("@")[0].partition("/")[0]
        if archs.is_name(word) or Path(word).exists():
            found.append(Path(word))
        elif kind in TASKS:
            tasks.append(word)
        elif "." in kind or "/" in word:
            raise BadInput(f"{word}: no such file")
        else:
            raise BadInput(f"{word}: no such file, and no task; {nearest(kind, TASKS)}")
    if not found:
        raise BadInput(
            f"{request.words[0]}: is a task; name a checkpoint file or timm:NAME before it"
        )
    return found, tasks or None


def check(request: EvaluateRequest) -> None:
    """BadInput, before torch is imported, for a word that is neither a model nor a task, a recipe
    that is not there, and a folder that holds no classes."""
    _, tasks = models_and_tasks(request)
    _, tasks_there = wanted.place_tasks(tasks, request.data, request.out)
    refuse_recipes(tasks_there)
    refuse_places(tasks_there, request.accelerator, request.workers)


def run(request: EvaluateRequest) -> Outcome:
    """The verb `evaluate`."""
    # 1. The plan: models and images are read here, and nowhere again
    given, tasks = models_and_tasks(request)
    root, tasks_there = wanted.place_tasks(tasks, request.data, request.out)
    found = models.read_models(given)
    alone = len(found) == 1
    files = {models.keep_in(request.out, one, alone=alone): one for one in found}
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
    tell_plan(plan)
    # 2. The numbers
    results = measure(plan)
    # 3. The table, of all that OUT holds, and the page
    board = collect([request.out])
    sets = overall.overall(board)
    answer = overall.answer(board, sets)
    print_table(board)
    print(printable.shown(answer, 2000))
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
    # 4. What takes longer, and where all of it is
    if tasks is None and results:
        tell_what_takes_longer(plan, next(iter(files)), results)
    print(f"table: {table}   page: {page}")
    return Outcome(document=results)


def tell_plan(plan: EvaluationPlan) -> None:
    """Say how many images there are, and what will be measured."""
    names = list(dict.fromkeys(task.dataset for task in plan.wanted))
    boxed = [task.dataset for task in plan.wanted if TASKS[task.task].detects]
    for name in names:
        if name in [*catalog.DATASETS, *boxed, "all"]:
            continue
        images = images_of(plan, name)
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
        print(column.name)
        for row, cell in board.measured(column):
            mark = {BEST: " *", ONCE: " °"}.get(marks.get(row.checkpoint, ""), "")
            half = "" if cell.half_width is None else f" ± {cell.half_width:.1f}"
            value = text_of(cell.value, ".1f")
            print(f"  {labels[row.checkpoint]:<{width}}  {value:>5}{half}{mark}")


def tell_what_takes_longer(
    plan: EvaluationPlan, file: Path, results: Sequence[Result]
) -> None:
    """Print the commands of tasks that take hours, with their prices by the speed just seen."""
    rates = []
    for result in results:
        if "images_per_second" in result.origin:
            rates.append(result.origin["images_per_second"])
    print("What takes longer, for one model (prices from the speed just seen):")
    for task in DEAR:
        dataset = plan.wanted[0].dataset
        dear = WantedTask(task, dataset, TASKS[task].recipe)
        print(f"  {offer(dear, plan, file, rates)}")
    print("  detection needs boxes: `backbench detect --help`")


def offer(
    dear: WantedTask, plan: EvaluationPlan, file: Path, rates: Sequence[float]
) -> str:
    """The command of a task that takes long, and its price by `rates` (images a second)."""
    request = measuring_request(
        TASKS[dear.task].verb,
        [file],
        data=plan.root,
        out=file.parent / dear.folder,
        dataset=dear.dataset,
        recipe=dear.recipe,
        percent=TASKS[dear.task].percent,
    )
    command = shlex.join(["backbench", *request.argv()])
    seen = images_seen(dear.task, dear.dataset, plan)
    if not rates:
        return f"{command}  ({seen:,} images)"
    cost = price.spelled(seen * DEAR[dear.task] / min(rates))
    return f"{command}  ({seen:,} images, about {cost} here)"


def images_seen(task: str, dataset: str, plan: EvaluationPlan) -> int:
    """The number of images that a task's default protocol trains on, over all of its rates."""
    recipe = config.read_recipe(config.find_recipe(TASKS[task].recipe, "transfer"))
    batch = recipe.get("batch_size", 256)
    percent = TASKS[task].percent or 100
    if task == "linear":  # all rates in one pass, then the best one again
        lengths = recipe["length"]
        length = lengths.get(dataset, lengths["default"])
        trainings = 2
    else:
        length = recipe["parts"][str(percent)]["length"]
        trainings = len(recipe["head_lr"]) + 1
    if "iterations" in length:
        once = length["iterations"] * batch
    else:
        images = len(images_of(plan, dataset).both())
        once = length["epochs"] * (images * percent // 100)
    return int(once * trainings)
