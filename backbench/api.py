"""The suite from Python: it takes a checkpoint or any torch module and returns results.

Each task runs as a verb in a process of its own. A trunk that only this process holds
(`ModuleTrunk`) is measured here.
"""

from __future__ import annotations

import html
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backbench.board.board import Board, Measurement, fill
from backbench.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED, BadInput, Failed, Preempted, nearest
from backbench.parallel.parent import die_with_parent
from backbench.results import store
from backbench.results.store import Result
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.weights import header

if TYPE_CHECKING:
    from torch import nn

    from backbench.images.preprocess import Pixels
    from backbench.weights.checkpoint import Checkpoint


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
        lines = ["<tr><th></th>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
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
    """A task to measure, `task/dataset[@recipe]`."""

    task: str
    dataset: str
    recipe: str

    @property
    def folder(self) -> str:
        return f"{self.task}-{self.dataset}-{Path(self.recipe).stem}"


def evaluate(
    checkpoint: Checkpoint | nn.Module | str | Path,
    tasks: str | Iterable[str],
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
) -> Results:
    """Measure a Checkpoint, a checkpoint file in any readable format, a module of timm's, a torch
    module that holds one ResNet trunk, or any other module as a `weights.trunk.ModuleTrunk`.

    A task is `task/dataset[@recipe]`: "linear/cifar10", "linear/all",
    "fewshot/digits@fewshot_demo", "semi_1pct/imagenet" (with `lists`),
    "mask_rcnn/coco2017@demo_mask_rcnn_R_18_FPN". The weights are written to
    OUT/checkpoint.safetensors and each task runs in `OUT/<task>`, so calling again continues or
    recognises what is done. `options` go to every verb as they stand ("--devices", "2"). `pixels`
    are the statistics that a module takes; files and Checkpoints say them themselves. Raises what
    the verbs do: BadInput, Failed, Preempted.
    """

    out = Path(out)
    names = [tasks] if isinstance(tasks, str) else tasks
    wanted = [parse_task(task) for task in names]
    if not wanted:
        raise BadInput("no tasks given; a task is task/dataset[@recipe], as in linear/cifar10")
    found = _checkpoint(checkpoint, encoder, pixels)
    found = found.replace(
        method=found.method if method is None else method,
        epochs=found.epochs if epochs is None else epochs,
        provenance={**found.provenance, **({"name": name} if name else {})},
    )
    # The tasks' folders below OUT are recognised by the digest: one OUT, one set of weights
    file = out / "checkpoint.safetensors"
    if not file.exists():
        found.save(file)
    elif header.digest(file) != found.digest:
        why = ""
        if not found.family.lasting(found.arch):
            why = "; a module without `identity` is another one in every process"
        raise BadInput(
            f"{out}: holds results of other weights ({file.name}); choose another out{why}"
        )
    # Only this process can build a module that it alone holds
    start = _start if found.family.elsewhere else _run_here
    lists = lists or Path(data) / "lists"
    results = Results()
    for one in wanted:
        run = out / one.folder
        command = command_of(
            file, one, data=data, run=run, lists=lists, engine=engine, seed=seed, options=options
        )
        start(command)
        measured, problems = store.read(run)
        for problem in problems:
            log.warning(problem)
        results += [result for result in measured if result.seed == seed]
    return results


def parse_task(task: str) -> WantedTask:
    """ "linear/cifar10@lorac" -> ("linear", "cifar10", "lorac"); the recipe may be left out."""
    what, _, recipe = task.partition("@")
    kind, slash, dataset = what.partition("/")
    if not slash or not dataset:
        raise BadInput(f"task '{task}': expected task/dataset[@recipe], as in linear/cifar10")
    if kind not in TASKS:
        raise BadInput(f"task '{task}': unknown task '{kind}'; {nearest(kind, TASKS)}")
    return WantedTask(kind, dataset, recipe or TASKS[kind].recipe)


def command_of(
    file: Path,
    wanted: WantedTask,
    *,
    data: str | Path,
    run: Path,
    lists: str | Path,
    engine: str = "auto",
    seed: int = 0,
    options: Sequence[str] = (),
) -> list[str]:
    """The verb and its arguments that measure one task on a checkpoint file."""
    task, where = TASKS[wanted.task], ["--data", str(data), "--out", str(run), *options]
    if task.detects:
        config = ["--config-file", wanted.recipe, "--engine", engine]
        # A detector's seed is a key of its config, and such keys come after all options.
        key = ["SEED", str(seed)] if seed else []
        return ["detect", *config, "--checkpoint", str(file), "--resume", *where, *key]
    command = [task.verb, str(file)]
    if task.percent is not None:
        command += ["--percent", str(task.percent), "--lists", str(lists)]
    else:
        command += ["--datasets" if task.verb == "linear" else "--dataset", wanted.dataset]
    command += ["--recipe" if task.verb == "analyze" else "--protocol", wanted.recipe]
    return [*command, "--seed", str(seed), *where]


def _checkpoint(
    given: Checkpoint | nn.Module | str | Path, encoder: str | None, pixels: Pixels | None
) -> Checkpoint:
    """Turn a Checkpoint, a file or a module into a Checkpoint."""
    import torch

    from backbench.weights import importing, modules
    from backbench.weights.checkpoint import Checkpoint

    if isinstance(given, Checkpoint):
        return given
    if isinstance(given, str | Path):
        return importing.read(Path(given), encoder=encoder)
    if not isinstance(given, torch.nn.Module):
        raise BadInput(
            f"expected a Checkpoint, a torch module or a path, not {type(given).__name__}"
        )
    return modules.checkpoint_of(given, pixels) or _of_module(given, encoder)


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
            found = importing.read(file, encoder=encoder, name=kind.__name__, method="module")
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
        status = cli.command(command)
    except SystemExit as error:  # the verb has said why
        status = error.code if isinstance(error.code, int) else EXIT_BAD_INPUT
    if status:
        raise Failed(f"{command[0]} ended with status {status}")


def _start(command: Sequence[str]) -> None:
    """Run a verb in a process of its own; its progress goes to this one's stderr, its error becomes
    an exception."""
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
        raise kind(last.removeprefix("backbench: ") or f"{command[0]} ended with status {status}")
