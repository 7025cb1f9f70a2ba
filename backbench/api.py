"""The suite from Python: a checkpoint or any torch module in, results out. Each task is the verb's own process."""

from __future__ import annotations

import html
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.board.board import Board, Measurement, fill
from backbench.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED, BadInput, Failed, Preempted, nearest
from backbench.results import store
from backbench.results.store import Result
from backbench.runs.folder import log
from backbench.tasks import TASKS
from backbench.weights import header

if TYPE_CHECKING:
    from torch import nn

    from backbench.weights.checkpoint import Checkpoint


class Results(list[Result]):
    """A list of Results that prints as a table; `board` is the same as leaderboard rows and columns."""

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
        board = self.board
        labels = board.labels()
        head = "".join(f"<th>{html.escape(labels[row.checkpoint])}</th>" for row in board.rows)
        lines = []
        for column in board.columns:
            cells = []
            for row in board.rows:
                cell = board.cell(row, column)
                text = (
                    ""
                    if cell is None
                    else "undefined"
                    if cell.value is None
                    else f"{cell.value:.1f}"
                )
                if cell is not None and cell.ci95 is not None:
                    text += f" ± {(cell.ci95[1] - cell.ci95[0]) / 2:.1f}"
                cells.append(f"<td>{text}</td>")
            lines.append(
                f"<tr><th style='text-align:left'>{html.escape(column.name)}</th>{''.join(cells)}</tr>"
            )
        return f"<table><tr><th></th>{head}</tr>{''.join(lines)}</table>"


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
) -> Results:
    """Measure a Checkpoint, a checkpoint file in any readable format, or a torch module that holds one ResNet trunk.

    A task is `task/dataset[@recipe]`: "linear/cifar10", "linear/all", "fewshot/digits@fewshot_demo",
    "semi_1pct/imagenet" (with `lists`), "mask_rcnn/coco2017@demo_mask_rcnn_R_18_FPN". The weights are written to
    OUT/checkpoint.safetensors and each task runs in OUT/<task>, so calling again continues or recognises what is done.
    `options` go to every verb as they stand ("--devices", "2"). Raises what the verbs do: BadInput, Failed, Preempted.
    """
    out = Path(out)
    wanted = [parse_task(task) for task in ([tasks] if isinstance(tasks, str) else tasks)]
    if not wanted:
        raise BadInput("no tasks given; a task is task/dataset[@recipe], as in linear/cifar10")
    file = _save(checkpoint, out, name=name, method=method, epochs=epochs, encoder=encoder)
    found = Results()
    for task, dataset, recipe in wanted:
        run = out / f"{task}-{dataset}-{Path(recipe).stem}"
        command = _command(
            file,
            (task, dataset, recipe),
            seed=seed,
            lists=lists or Path(data) / "lists",
            engine=engine,
        )
        _start(_whole(command, data=data, run=run, options=options, seed=seed))
        measured, problems = store.read(run)
        for problem in problems:
            log.warning(problem)
        found += [r for r in measured if r.seed == seed]
    return found


def parse_task(task: str) -> tuple[str, str, str]:
    """ "linear/cifar10@lorac" -> ("linear", "cifar10", "lorac"); the recipe may be left out."""
    what, _, recipe = task.partition("@")
    kind, slash, dataset = what.partition("/")
    if not slash or not dataset:
        raise BadInput(f"task '{task}': expected task/dataset[@recipe], as in linear/cifar10")
    if kind not in TASKS:
        raise BadInput(f"task '{task}': unknown task '{kind}'; {nearest(kind, TASKS)}")
    return kind, dataset, recipe or TASKS[kind].recipe


def _command(
    file: Path, wanted: tuple[str, str, str], *, seed: int, lists: str | Path, engine: str
) -> list[str]:
    """The verb and its arguments for one task."""
    name, dataset, recipe = wanted
    task = TASKS[name]
    if task.detects:
        return [
            "detect",
            "--config-file",
            recipe,
            "--engine",
            engine,
            "--checkpoint",
            str(file),
            "--resume",
        ]
    command = [task.verb, str(file)]
    if task.percent is not None:
        command += ["--percent", str(task.percent), "--lists", str(lists)]
    else:
        command += ["--datasets" if task.verb == "linear" else "--dataset", dataset]
    command += ["--recipe" if task.verb == "analyze" else "--protocol", recipe]
    return [*command, "--seed", str(seed)]


def _whole(
    command: Sequence[str], *, data: str | Path, run: Path, options: Sequence[str], seed: int
) -> list[str]:
    """The command with its folders and options. A detector's seed is a key of its config, which comes after them."""
    key = ["SEED", str(seed)] if command[0] == "detect" and seed else []
    return [*command, "--data", str(data), "--out", str(run), *options, *key]


def _save(
    checkpoint: Checkpoint | nn.Module | str | Path,
    out: Path,
    *,
    name: str | None,
    method: str | None,
    epochs: int | None,
    encoder: str | None,
) -> Path:
    """OUT/checkpoint.safetensors from whatever was given; one OUT holds one checkpoint."""
    import tempfile

    import torch

    from backbench.weights import importing
    from backbench.weights.checkpoint import Checkpoint

    about = {"name": name, "method": method, "epochs": epochs}
    if isinstance(checkpoint, Checkpoint):
        changes = {k: v for k, v in about.items() if v is not None and k != "name"}
        extra = {"name": name} if name else {}
        found = checkpoint.replace(**changes, provenance={**checkpoint.provenance, **extra})
    elif isinstance(checkpoint, torch.nn.Module):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "module.pt"
            torch.save(checkpoint.state_dict(), file)
            found = importing.read(
                file,
                encoder=encoder,
                name=name or type(checkpoint).__name__,
                method=method or "module",
            )
            found = found if epochs is None else found.replace(epochs=epochs)
            # the file is gone when this returns; what it was is the module
            found = found.replace(
                provenance={**found.provenance, "source": f"module {type(checkpoint).__qualname__}"}
            )
    elif isinstance(checkpoint, str | Path):
        found = importing.read(Path(checkpoint), encoder=encoder, **about)  # type: ignore[arg-type]
    else:
        raise BadInput(
            f"expected a Checkpoint, a torch module or a path, not {type(checkpoint).__name__}"
        )
    path = out / "checkpoint.safetensors"
    if path.exists():
        if header.digest(path) != found.digest:
            raise BadInput(
                f"{out}: holds results of other weights ({path.name}); choose another out"
            )
        return path
    found.save(path)
    return path


def _start(command: Sequence[str]) -> None:
    """One verb in a process of its own; its progress goes to this one's stderr, its error becomes an exception."""
    line = [sys.executable, "-m", "backbench", *command]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
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
