"""The commands that a board proposes: what would connect two groups, or settle a column.

They are the commands that measured the numbers here, for other checkpoints or more seeds. Where
none was recorded they are made from the column, with ROOT in place of the folder of the data.
"""

import contextlib
import dataclasses
import functools
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backbench.board.board import Board, Column, Row
from backbench.datasets.boxes.box_folders import KNOWN_BOXES
from backbench.errors import BadInput
from backbench.recipes import config
from backbench.records.result_line import Result
from backbench.requests.detect import DetectRequest
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.measuring import measuring_request
from backbench.requests.options import Request
from backbench.requests.parsing import parse
from backbench.requests.places import ProtocolsAsked
from backbench.runs.folder import CHECKPOINT_FILE, kept_checkpoint
from backbench.tasks import TASKS
from backbench.untrusted import printable

ROOT = Path("ROOT")  # where nobody recorded the folder of the data
OUT = Path("runs")
ANY_RUN = OUT / "x"  # stands for a run's folder; only the folder above it is used


def measuring(
    board: Board,
    column: Column,
    rows: Sequence[Row],
    *,
    seeds: int = 1,
    also: Sequence[Column] = (),
) -> str:
    """Return the command that measures `rows` in a column, and in others of its task and protocol.
    A verb that takes one checkpoint measures the first of them."""
    files = [_file_of(board, row) for row in rows]
    request: Any = _recorded(board, column)
    if isinstance(request, EvaluateRequest) and seeds == 1:
        known = [file for file in _models(request) if file not in files]
        tasks = [word for word in request.words if _is_task(word)]
        words = [str(file) for file in [*known, *files]]
        request = dataclasses.replace(request, words=(*words, *tasks))
        return _spelled(request)
    changes: dict[str, Any] = {}
    names = _fields(request)
    if not names & {"checkpoint", "checkpoints"}:
        request = _from_column(column, files, request)
        names = _fields(request)
    if "checkpoints" in names:
        changes["checkpoints"] = tuple(files)
    else:
        changes["checkpoint"] = files[0]
    if "datasets" in names:
        datasets = dict.fromkeys(one.dataset for one in (column, *also))
        changes["datasets"] = ",".join(datasets)
    if seeds > 1:
        changes["seeds"] = seeds
        changes["seed"] = type(request).seed  # the first one
    folder = _folder(rows)
    if seeds > 1:
        # Each checkpoint's seeds have a folder of their own, unless one command trains all of them
        folder = "seeds" if "checkpoints" in names else f"seeds-{folder}"
    if isinstance(request, DetectRequest):
        changes["opts"] = _without_folder(request.opts)
        changes["resume"] = False
    changes["out"] = (request.out or ANY_RUN).parent / f"{folder}-{column.task}"
    return _spelled(dataclasses.replace(request, **changes))


def takes_several(column: Column) -> bool:
    """Return True if one command measures several checkpoints, and datasets, in this column."""
    return TASKS[column.task].verb in ("linear", "ood")


def _spelled(request: Request) -> str:
    return shlex.join(["backbench", *request.argv()])


def _folder(rows: Sequence[Row]) -> str:
    """Return a folder's name for the runs of these rows."""
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in rows[0].name)
    return name.strip(".-") or rows[0].checkpoint[:12]


def _fields(request: Request | None) -> set[str]:
    if request is None:
        return set()
    return {field.name for field in dataclasses.fields(request)}


def _without_folder(opts: Sequence[str]) -> tuple[str, ...]:
    """Return a detector's changes without its run folder, which `--out` names."""
    if "OUTPUT_DIR" not in opts:
        return tuple(opts)
    at = list(opts).index("OUTPUT_DIR")
    return (*opts[:at], *opts[at + 2 :])


# ---- what was recorded


def _recorded(board: Board, column: Column) -> Request | None:
    """Return the request that measured the newest number of a column; None where none can be
    read."""
    measurements = []
    for row in board.measured_rows:
        cell = board.cell(row, column)
        if cell is not None:
            measurements += cell.parts
    for result, _ in sorted(measurements, key=lambda part: -part.recorded):
        request = _request_of(result)
        if request is None or not _models(request):
            continue
        if request.verb in (TASKS[column.task].verb, EvaluateRequest.verb):
            return request
    return None


def _request_of(result: Result) -> Request | None:
    command = result.facts.get("command") or result.origin.get("command")
    if not command:
        return None
    if isinstance(command, list):
        command = shlex.join(command)
    return _parsed(command)


@functools.lru_cache(maxsize=1024)  # the numbers of a run share their command
def _parsed(command: str) -> Request | None:
    """Return the request of a recorded command; None for a command of another program or
    release."""
    silent = contextlib.redirect_stderr(io.StringIO())
    with silent, contextlib.suppress(SystemExit, ProtocolsAsked, BadInput, ValueError):
        return parse(printable.of_command(command)[1:])
    return None


def _is_task(word: str) -> bool:
    return word.partition("@")[0].partition("/")[0] in TASKS


def _models(request: Any) -> list[Path]:
    """Return the checkpoints that a request names."""
    names = _fields(request)
    if "checkpoints" in names:
        return list(request.checkpoints)
    if "checkpoint" in names:
        return [request.checkpoint] if request.checkpoint is not None else []
    if isinstance(request, EvaluateRequest):
        return [Path(word) for word in request.words if not _is_task(word)]
    return []


def _file_of(board: Board, row: Row) -> Path:
    """Return the file of a row's checkpoint, by the commands that measured it; else
    NAME.safetensors."""
    kept: Path | None = None
    for (checkpoint, _), cell in board.cells.items():
        if checkpoint != row.checkpoint:
            continue
        for result, _ in cell.parts:
            request = _request_of(result)
            models = _models(request) if request else []
            for model in models:
                # A pretraining's file is RUN/backbone.safetensors
                if row.name in (str(model), model.stem, model.parent.name):
                    return model
            if len(models) == 1:
                # Published records have no folders, and every pretraining writes CHECKPOINT_FILE:
                # without its folder that name does not say which checkpoint it is
                is_shared_name = models[0].name == CHECKPOINT_FILE
                has_folder = models[0].parent.name != ""
                if has_folder or not is_shared_name:
                    return models[0]
            # A file's name need not be its checkpoint's; `evaluate` keeps a copy of each
            if isinstance(request, EvaluateRequest):
                kept = kept_checkpoint(request.out, row.checkpoint)
    if kept is not None:
        return kept
    return Path(f"{_folder([row])}.safetensors")


# ---- what the column says


def _from_column(
    column: Column, files: Sequence[Path], request: Request | None
) -> Request:
    """Return a request for a column whose numbers were recorded without one, or by `evaluate`."""
    task = TASKS[column.task]
    data = ROOT
    out = ANY_RUN
    if isinstance(request, EvaluateRequest):
        is_dataset = request.data.name == column.dataset
        data = request.data.parent if is_dataset else request.data
        out = request.out / ANY_RUN.name
    recipe = _recipe_of(column.protocol)
    dataset: str | None = column.dataset
    if task.detects:
        is_own = dataset not in KNOWN_BOXES
        recipe = _config_of(column.task, column.protocol)
        recipe = recipe or (f"{column.task}_own" if is_own else None)
        dataset = dataset if is_own else None
    return measuring_request(
        task.verb,
        files,
        data=data,
        out=out,
        dataset=dataset,
        recipe=recipe or task.recipe,
        percent=task.percent,
    )


@functools.cache
def _config_of(task: str, protocol: str) -> str | None:
    """Return the name of the shipped config that trains a detector by a protocol."""
    for name in config.recipe_names("detection"):
        text = config.find_recipe(name, "detection").read_text()
        if f"{task}_" in name and text.startswith(
            f"{config.STATES_PROTOCOL}{protocol}\n"
        ):
            return name
    return None


@functools.cache
def _recipe_of(protocol: str) -> str | None:
    """Return the name of the shipped recipe of a protocol."""
    for name in config.recipe_names("transfer"):
        recipe = config.read_recipe(config.find_recipe(name, "transfer"))
        if recipe.get("protocol") == protocol.partition("~")[0]:
            return name
    return None
