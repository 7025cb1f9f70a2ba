"""The suite from Python: `evaluate` measures checkpoints and torch modules in this process."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.board.board import Board, Measurement, fill
from backbench.evaluation import models, plan, wanted
from backbench.evaluation.measure import measure, refuse
from backbench.records.store import Result
from backbench.requests.places import Accelerator

if TYPE_CHECKING:
    from backbench.evaluation.models import Model
    from backbench.images.preprocess import Pixels


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
        """Return the board on its side, for a notebook: a line per column, a field per
        checkpoint."""
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
    accelerator: Accelerator = "auto",
    workers: int | None = None,
    pixels: Pixels | None = None,
    size: int | None = None,
) -> Results:
    """Measure one or several of: a Checkpoint, a checkpoint file in any readable format,
    "timm:NAME", a module of timm's, a torch module that holds one ResNet trunk, or any other module
    as a `weights.trunk.ModuleTrunk`. `tasks` are as `wanted.parse_task` reads them; without any,
    `wanted.DEFAULT_TASKS`. `data` is ROOT, or the folder of one dataset where the tasks name none.

    The weights are written to OUT/checkpoint.safetensors (those of another or of several to
    OUT/checkpoint-<digest>.safetensors) and each task runs in `OUT/<task>`, so calling again
    continues or recognises what is done. `pixels` are the statistics of weights that do not say
    theirs. `size` reads all models at one size, in pixels. Raises what the verbs do; a signal that
    ends the process saves first.
    """
    out = Path(out)
    # 1. What is wanted, before any weights are read
    root, tasks_there = wanted.place_tasks(tasks, Path(data), out, size=size)
    plan.refuse_recipes(tasks_there)
    plan.refuse_places(tasks_there, accelerator, workers)
    wanted.refuse_boxes(root, tasks_there)
    # 2. The models, each read once
    found = models.read_models(
        checkpoint,
        name=name,
        method=method,
        epochs=epochs,
        encoder=encoder,
        pixels=pixels,
    )
    alone = len(found) == 1
    files = {models.file_in(out, one, alone=alone): one for one in found}
    # 3. The runs, and their numbers; a refusal before the first takes the weights away again
    if lists is None and (root / "lists").is_dir():
        lists = root / "lists"
    planned = plan.make_plan(
        tasks_there,
        files,
        root=root,
        out=out,
        seed=seed,
        lists=None if lists is None else Path(lists),
        engine=engine,
        accelerator=accelerator,
        workers=workers,
    )
    with models.kept(out, files):
        refuse(planned)
        return Results(measure(planned))
