"""The suite from Python: `evaluate` measures checkpoints and torch modules. Each task runs as a
verb in its own process; a trunk that only this process holds (`ModuleTrunk`) is measured here."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import io
import itertools
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backbench.board.board import Board, Measurement, fill
from backbench.containers import containers
from backbench.datasets import catalog
from backbench.errors import (
    EXIT_BAD_INPUT,
    EXIT_PREEMPTED,
    BadInput,
    Failed,
    Preempted,
    nearest,
)
from backbench.recipes import config
from backbench.records import store
from backbench.records.store import Result
from backbench.runs.state import die_with_parent
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.weights import header

if TYPE_CHECKING:
    from torch import nn

    from backbench.images.preprocess import Pixels
    from backbench.weights.checkpoint import Checkpoint

    Model = Checkpoint | nn.Module | str | Path


class Results(list[Result]):
    """A list of Results that prints as a table; `board` is the same as rows and columns."""

    @property
    def board(self) -> Board:
        return fill(Measurement(result, Path()) for result in self)

    def __repr__(self) -> str:
        lines = []
        for r in self:
            value = "undefined" if r.value is None else f"{r.value:.2f}"
            interval = "" if r.ci95 is None else f"  [{r.ci95[0]:.2f}, {r.ci95[1]:.2f}]"
            lines.append(f"{r.name:20} {r.column:60} {value:>9}{interval}")
        return "\n".join(lines) or "no results"

    def _repr_html_(self) -> str:
        """The board on its side, for a notebook: a line per column, a field per checkpoint."""
        board = self.board
        labels = board.labels()
        names = [html.escape(labels[row.checkpoint]) for row in board.rows]
        lines = [
            "<tr><th></th>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
        ]
        for column in board.columns:
            line = f"<th style='text-align:left'>{html.escape(column.name)}</th>"
            for row in board.rows:
                text = ""
                if (cell := board.cell(row, column)) is not None:
                    text = "undefined" if cell.value is None else f"{cell.value:.1f}"
                    if cell.half_width is not None:
                        text += f" ± {cell.half_width:.1f}"
                line += f"<td>{text}</td>"
            lines.append(f"<tr>{line}</tr>")
        return f"<table>{''.join(lines)}</table>"


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
        names = [Path(recipe).stem for recipe in self.words[0].split(",")]
        words = [*names, *self.words[1:]]
        name = re.sub(r"[^\w.-]+", "_", "-".join(words))
        return f"{self.task}-{self.dataset}-{name}"


# The readings where no task is named: minutes on a CPU, from one pass over the images
DEFAULT_TASKS = ("knn", "fewshot", "logreg")


def evaluate(
    checkpoint: Model | Sequence[Model],
    tasks: str | Iterable[str] | None = None,
    *,
    data: str | Path,
    out: str | Path,
    name: str | None = None,
    method: str | None = None,
    epochs: int | None = None,
    encoder: str | None = None,
    seed: int = 0,
    lists: str | Path | None = None,
    engine: str = "auto",
    options: Sequence[str] = (),
    pixels: Pixels | None = None,
    here: bool = False,
) -> Results:
    """Measure one or several of: a Checkpoint, a checkpoint file in any readable format,
    "timm:NAME", a module of timm's, a torch module that holds one ResNet trunk, or any other module
    as a `weights.trunk.ModuleTrunk`. `tasks` are as `parse_task` reads them; without any,
    DEFAULT_TASKS. `data` is ROOT, or the folder of one dataset where the tasks name none.

    The weights are written to OUT/checkpoint.safetensors (those of another or of several to
    OUT/checkpoint-<digest>.safetensors) and each task runs in `OUT/<task>`, so calling again
    continues or recognises what is done. `options` go to every verb, `pixels` are the statistics of
    weights that do not say theirs, `here` measures in this process. Raises what the verbs do.
    """
    out = Path(out)
    root, wanted = place_tasks(tasks, Path(data), out)
    found: dict[str, Checkpoint] = {}
    # A path and a module are no sequences, a text is one model
    several = isinstance(checkpoint, Sequence) and not isinstance(checkpoint, str)
    for each in checkpoint if several else [checkpoint]:  # type: ignore[union-attr]
        one = _checkpoint(each, encoder, pixels).described(name or None, method, epochs)  # type: ignore[arg-type]
        if found.setdefault(one.digest, one) is not one:
            log.warning(
                f"{each}: the same weights as {found[one.digest].name}; measured once"
            )
    # Only this process can build a module that it alone holds
    elsewhere = all(one.family.elsewhere for one in found.values())
    start = _start if elsewhere and not here else _run_here
    files = {
        digest: _saved(one, out, alone=len(found) == 1) for digest, one in found.items()
    }
    lists = lists or (root / "lists" if (root / "lists").is_dir() else None)
    words = functools.partial(
        command_of, data=root, lists=lists, engine=engine, seed=seed, options=options
    )
    results = Results()
    for task in wanted:
        if TASKS[
            task.task
        ].from_scores:  # of what was measured before, in this call or another
            start([TASKS[task.task].verb, str(out)])
            rows, _ = store.read(out)
            rows = [r for r in rows if (r.task, r.dataset) == (task.task, task.dataset)]
            results += [r for r in rows if r.checkpoint in found and r.seed == seed]
            continue
        for fitted, group in _groups(task, list(found.values()), root, seed):
            run = _folder_of(fitted, group, out, files)
            start(words([files[each.digest] for each in group], fitted, run=run))
            rows, problems = store.read(run)
            for problem in problems:
                log.warning(problem)
            results += [row for row in rows if row.seed == seed]
    return results


def _folder_of(
    task: WantedTask, group: Sequence[Checkpoint], out: Path, files: Mapping[str, Path]
) -> Path:
    """OUT/<task> for OUT's own checkpoint, with a mark behind it for any others."""
    if [files[each.digest] for each in group] == [out / FILE]:
        return out / task.folder
    mark = hashlib.sha256("".join(each.digest for each in group).encode()).hexdigest()
    return out / f"{task.folder}-{mark[:8]}"


FILE = "checkpoint.safetensors"


def _saved(checkpoint: Checkpoint, out: Path, *, alone: bool) -> Path:
    """The file below OUT that holds these weights; written where it is not there."""
    first = out / FILE
    if alone and (not first.exists() or header.digest(first) == checkpoint.digest):
        file = first
    else:
        file = out / f"checkpoint-{checkpoint.digest[:12]}.safetensors"
        if not checkpoint.family.lasting(checkpoint.arch) and first.exists():
            raise BadInput(
                f"{out}: holds results of other weights ({FILE}); choose another out; a module"
                " without `identity` is another one in every process"
            )
    if not file.exists():
        checkpoint.save(file)
    elif header.digest(file) != checkpoint.digest:
        raise BadInput(f"{file}: holds other weights than its name says; remove it")
    return file


def place_tasks(
    tasks: str | Iterable[str] | None, data: Path, out: Path
) -> tuple[Path, list[WantedTask]]:
    """Return ROOT and the tasks with their datasets. `data` is ROOT if the tasks name datasets,
    else the folder of one dataset. BadInput if it is no such folder."""
    names = (
        [tasks]
        if isinstance(tasks, str)
        else list(DEFAULT_TASKS if tasks is None else tasks)
    )
    if not names:
        raise BadInput(
            "no tasks given; a task is task/dataset[@recipe], as in linear/cifar10"
        )
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out}: is a file; --out needs a folder")
    if all("/" in text.partition("@")[0] for text in names):
        return data, [parse_task(text) for text in names]
    folder = Path(os.path.abspath(data))  # noqa: PTH100 - links stay as they are named
    # The archive of a dataset stands for the folder that it would unpack to
    ending = folder.suffix.lower()
    if folder.is_file() and ending in itertools.chain(*containers.WHOLE.values()):
        folder = folder.with_suffix("")
    if not folder.is_dir() and containers.whole(folder) is None:
        if why := containers.refused(folder):
            raise BadInput(f"--data {why}")
        what = "is a file" if folder.exists() else "no such folder"
        raise BadInput(
            f"--data {data}: {what}; give the folder with the images, as mine/<class>/"
        )
    root, dataset = folder.parent, folder.name
    if "," in dataset or dataset == "all":
        raise BadInput(
            f"--data {data}: a dataset's name has no comma and is not 'all'; rename it"
        )
    if catalog.row(dataset) is not None and catalog.is_class_folder(folder):
        try:
            catalog.present(dataset, root)
        except BadInput:
            raise BadInput(
                f"--data {data}: has the name of the known dataset {dataset}, and not its files;"
                " rename the folder"
            ) from None
    catalog.present(dataset, root)
    return root, [parse_task(text, dataset) for text in names]


def _groups(
    wanted: WantedTask, checkpoints: list[Checkpoint], root: Path, seed: int
) -> list[tuple[WantedTask, list[Checkpoint]]]:
    """Split a task into runs: checkpoints of one input size together if its verb can, else alone.
    Cheap readings by their default recipe are fitted to the data and the input size."""
    groups: dict[WantedTask, list[Checkpoint]] = {wanted: checkpoints}
    of_its_name = (
        wanted.task in DEFAULT_TASKS and wanted.recipe == TASKS[wanted.task].recipe
    )
    if of_its_name and wanted.dataset != "all":
        recipe = config.read_recipe(config.find_recipe(wanted.recipe, "transfer"))
        fitted = [wanted.recipe, *_fewer(wanted, recipe, root, seed)]
        resize, crop = recipe["geometry"]["resize"], recipe["geometry"]["crop"]
        groups = {}
        for each in checkpoints:
            size = each.family.blank(each.arch, each.stem, each.reading).size
            words = list(fitted)
            if size not in (None, crop):
                words += [
                    f"geometry.resize={round(resize * size / crop)}",
                    f"geometry.crop={size}",
                ]
            groups.setdefault(wanted._replace(recipe=" ".join(words)), []).append(each)
    if TASKS[wanted.task].verb in ("linear", "ood", "analyze"):
        return list(groups.items())
    return [(task, [each]) for task, together in groups.items() for each in together]


def _fewer(
    wanted: WantedTask, recipe: config.Recipe, root: Path, seed: int
) -> list[str]:
    """The changes to a recipe that asks for more neighbours or shots than there are images."""
    images = catalog.read_lists(catalog.find(wanted.dataset), root, seed).both()
    changes = []
    if wanted.task == "knn" and max(recipe["k"]) > len(images):
        few = [k for k in recipe["k"] if k <= len(images)] or [1]
        changes.append(f"k={','.join(map(str, few))}")
    fewest = min(Counter(images.labels).values())
    if wanted.task == "fewshot" and recipe["shots"] > fewest:
        changes.append(f"shots={fewest}")
    return changes


def parse_task(task: str, folder: str = "") -> WantedTask:
    """ "linear/cifar10@lorac" -> ("linear", "cifar10", "lorac"); the recipe may be left out, and the
    dataset where it is `folder`, whose name may have an @ in it. More of them: "linear/all",
    "knn/dtd@knn k=5,20", "semi_1pct/imagenet" (with lists), "mask_rcnn/coco2017"; "ood/imagenet-a"
    uses the heads that "linear/imagenet" left, "calibration" the scores of linear and logreg."""
    what, _, recipe = task.partition("@")
    kind, slash, dataset = what.partition("/")
    if kind not in TASKS:
        raise BadInput(f"task '{task}': unknown task '{kind}'; {nearest(kind, TASKS)}")
    dataset = dataset if slash else folder
    if not dataset:
        raise BadInput(
            f"task '{task}': expected task/dataset[@recipe], as in linear/cifar10"
        )
    return WantedTask(kind, dataset, recipe or TASKS[kind].recipe)


def command_of(
    files: Sequence[Path],
    wanted: WantedTask,
    *,
    data: str | Path,
    run: Path,
    lists: str | Path | None,
    engine: str = "auto",
    seed: int = 0,
    options: Sequence[str] = (),
) -> list[str]:
    """The verb and its arguments that measure one task on checkpoint files; most verbs take one."""
    task, where = TASKS[wanted.task], ["--data", str(data), "--out", str(run), *options]
    if task.detects:
        config = ["--config-file", wanted.recipe, "--engine", engine]
        # A detector's seed is a key of its config, and such keys come after all options.
        key = ["SEED", str(seed)] if seed else []
        return [
            "detect",
            *config,
            "--checkpoint",
            str(files[0]),
            "--resume",
            *where,
            *key,
        ]
    command = [task.verb, *map(str, files)]
    if task.percent is not None:
        command += ["--percent", str(task.percent), "--dataset", wanted.dataset]
        command += ["--lists", str(lists)] if lists is not None else []
    else:
        command += [
            "--datasets" if task.verb in ("linear", "ood") else "--dataset",
            wanted.dataset,
        ]
    command += ["--recipe" if task.verb == "analyze" else "--protocol", *wanted.words]
    return [*command, "--seed", str(seed), *where]


def _checkpoint(
    given: Checkpoint | nn.Module | str | Path,
    encoder: str | None,
    pixels: Pixels | None,
) -> Checkpoint:
    """Turn a Checkpoint, a file or a module into a Checkpoint."""
    import torch

    from backbench.weights import importing
    from backbench.weights.checkpoint import PIXELS_FROM, Checkpoint

    if isinstance(given, Checkpoint):
        found = given
    elif isinstance(given, str | Path):
        found = importing.read(Path(given), encoder=encoder)
    elif isinstance(given, torch.nn.Module):
        found = importing.checkpoint_of(given, pixels) or _of_module(given, encoder)
    else:
        raise BadInput(
            f"expected a Checkpoint, torch module or path, not {type(given).__name__}"
        )
    if pixels is None:
        return found
    provenance = {
        key: value for key, value in found.provenance.items() if key != PIXELS_FROM
    }
    return found.replace(pixels=pixels, provenance=provenance)


def _of_module(module: nn.Module, encoder: str | None) -> Checkpoint:
    """The one trunk that the module's weights hold: read as a file of them would be."""
    import tempfile

    import torch

    from backbench.weights import importing

    kind = type(module)
    source = f"module {kind.__qualname__}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "module.pt"
        torch.save(module.state_dict(), file)
        try:
            found = importing.read(
                file, encoder=encoder, name=kind.__name__, method="module"
            )
        except BadInput as error:
            # The reader names a temporary file, which is gone by now
            said = str(error).replace(str(file), source)
            hint = "a module of another kind is given as backbench.weights.trunk.ModuleTrunk"
            raise BadInput(f"{said}; {hint}") from None
    return found.replace(provenance={**found.provenance, "source": source})


def _run_here(command: Sequence[str]) -> None:
    """Run a verb in this process; its errors are raised."""
    from backbench import cli

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the results are returned
            status = cli.command(command)
    except SystemExit as error:  # the verb has said why
        status = error.code if isinstance(error.code, int) else EXIT_BAD_INPUT
    if status:
        raise Failed(f"{command[0]} ended with status {status}")


def _start(command: Sequence[str]) -> None:
    """Run a verb in its own process; progress goes to our stderr, an error becomes an exception."""
    line = [sys.executable, "-m", "backbench", *command]
    process = subprocess.Popen(
        line,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A signal that ends this process (SIGTERM is no exception here) tells the verb to save and end
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # noqa: PLW1509
    )
    assert process.stderr is not None
    # A verb's last line is its error, if it fails. Whatever ends this process (in a notebook, an
    # interrupt) ends the verb too; the same call continues what it has saved
    last = ""
    try:
        for text in process.stderr:
            last = text.strip() or last
            log.info(text.rstrip())
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status:
        kind = {EXIT_BAD_INPUT: BadInput, EXIT_PREEMPTED: Preempted}.get(status, Failed)
        raise kind(
            last.removeprefix("backbench: ")
            or f"{command[0]} ended with status {status}"
        )
