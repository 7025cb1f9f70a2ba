"""`backbench evaluate`: one's own models on one's own images, to the table. `backbench.evaluate`
measures; this verb shows the plan, the table and the page, and commands for what takes hours."""

import argparse
from pathlib import Path

from backbench import api
from backbench.api import WantedTask
from backbench.board import overall
from backbench.board.board import (
    BEST,
    ONCE,
    Board,
    collect,
    compare_rows,
    standing,
    text_of,
)
from backbench.datasets import catalog
from backbench.errors import BadInput, nearest
from backbench.recipes import config
from backbench.runs import price
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.untrusted import printable
from backbench.weights import archs

# Tasks of hours, by what a step costs beside a forward pass (a backward pass costs two)
DEAR = {"linear": 1, "finetune": 3, "semi_10pct": 3}


def check(args: argparse.Namespace) -> None:
    """Split the words into `args.checkpoints` and `args.tasks`. BadInput for one that is neither a
    model nor a task, and for a folder that holds no classes."""
    args.checkpoints, tasks = [], []
    for word in args.words:
        kind = word.partition("@")[0].partition("/")[0]
        if archs.is_name(word) or Path(word).exists():
            args.checkpoints.append(Path(word))
        elif kind in TASKS:
            tasks.append(word)
        elif "." in kind or "/" in word:
            raise BadInput(f"{word}: no such file")
        else:
            raise BadInput(f"{word}: no such file, and no task; {nearest(kind, TASKS)}")
    if not args.checkpoints:
        raise BadInput(
            f"{args.words[0]}: is a task; name a checkpoint file or timm:NAME before it"
        )
    args.tasks = tasks or None
    _, wanted = api.place_tasks(args.tasks, args.data, args.out)
    for task in wanted:
        if TASKS[task.task].from_scores:
            continue
        detects = TASKS[task.task].detects
        several = TASKS[task.task].verb == "linear"
        for recipe in task.words[0].split(",") if several else task.words[:1]:
            config.find_recipe(recipe, "detection" if detects else "transfer")
        if detects and (args.accelerator != "auto" or args.workers is not None):
            others = (
                "--accelerator and --workers are for the other tasks; leave them out"
            )
            raise BadInput(
                f"{task.task}: {others}, or use `backbench detect ... MODEL.DEVICE cpu`"
            )


def run(args: argparse.Namespace) -> int:
    # 1. The plan
    root, wanted = api.place_tasks(args.tasks, args.data, args.out)
    names = list(dict.fromkeys(task.dataset for task in wanted))
    boxed = [task.dataset for task in wanted if TASKS[task.task].detects]
    for name in names:
        if name in [*catalog.DATASETS, *boxed, "all"]:
            continue
        images = catalog.load(name, root, seed=args.seed)
        counts = ", ".join(f"{len(part)} {split}" for split, part in images.items())
        classes = len(images.train.classes)
        log.info(f"{name}: {classes} classes; {counts} images")
    titles = ", ".join(
        f"{TASKS[task.task].title.lower()} ({task.recipe})" for task in wanted
    )
    models = len(args.checkpoints)
    log.info(
        f"plan: {titles}; {models} model{'s' if models > 1 else ''} on {', '.join(names)}"
    )
    # 2. The numbers
    options = [] if args.accelerator == "auto" else ["--accelerator", args.accelerator]
    options += [] if args.workers is None else ["--workers", str(args.workers)]
    args.document = results = api.evaluate(
        args.checkpoints,
        args.tasks,
        data=args.data,
        out=args.out,
        seed=args.seed,
        options=options,
        here=True,
    )
    # 3. The table, of all that OUT holds, and the page
    board = collect([args.out])
    sets = overall.overall(board)
    answer = overall.answer(board, sets)
    print_table(board)
    print(printable.shown(answer, 2000))
    from backbench.board import export
    from backbench.board.page import write_page
    from backbench.board.page_figures import collect_figures

    page, table = args.out / "leaderboard.html", args.out / "leaderboard.csv"
    pairs, figures = compare_rows(board), collect_figures(board, [args.out])
    write_page(board, page, pairs=pairs, figures=figures, answer=answer, sets=sets)
    export.write_csv(board, table)
    # 4. What takes longer, and where all of it is
    if args.tasks is None and results:
        files = sorted(args.out.glob("checkpoint*.safetensors"))
        rates = [
            r.origin["images_per_second"]
            for r in results
            if "images_per_second" in r.origin
        ]
        print("What takes longer, for one model (prices from the speed just seen):")
        for task in DEAR:
            wanted_task = WantedTask(task, names[0], TASKS[task].recipe)
            print(f"  {offer(wanted_task, root, files[0], rates)}")
        print("  detection needs boxes: `backbench detect --help`")
    print(f"table: {table}   page: {page}")
    return 0


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


def offer(wanted: WantedTask, root: Path, file: Path, rates: list[float]) -> str:
    """The command of a task that takes long, and its price by `rates` (images a second)."""
    run = file.parent / wanted.folder
    words = api.command_of([file], wanted, data=root, run=run, lists=None)
    command = f"backbench {' '.join(words)}"
    seen = images_seen(wanted.task, wanted.dataset, root)
    if not rates:
        return f"{command}  ({seen:,} images)"
    cost = price.spelled(seen * DEAR[wanted.task] / min(rates))
    return f"{command}  ({seen:,} images, about {cost} here)"


def images_seen(task: str, dataset: str, root: Path) -> int:
    """The number of images that a task's default protocol trains on, over all of its rates."""
    recipe = config.read_recipe(config.find_recipe(TASKS[task].recipe, "transfer"))
    batch, percent = recipe.get("batch_size", 256), TASKS[task].percent or 100
    if task == "linear":  # all rates in one pass, then the best one again
        lengths, trainings = recipe["length"], 2
        length = lengths.get(dataset, lengths["default"])
    else:
        length, trainings = (
            recipe["parts"][str(percent)]["length"],
            len(recipe["head_lr"]) + 1,
        )
    trained = (
        len(catalog.read_lists(catalog.find(dataset), root).both()) * percent // 100
    )
    once = (
        length["iterations"] * batch
        if "iterations" in length
        else length["epochs"] * trained
    )
    return int(once * trainings)
