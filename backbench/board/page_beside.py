"""What stands on the page beside the table: pretraining curves and pictures of detections, both
read from run folders."""

from __future__ import annotations

import base64
import io
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from backbench.board.board import Board, joined
from backbench.errors import BadInput
from backbench.images.image_list import readable
from backbench.results.store import Result
from backbench.runs.folder import CHECKPOINT_FILE, METRICS_FILE, PICTURES, RUN_FILE
from backbench.runs.step_metrics import read_metrics
from backbench.tasks import TASKS
from backbench.untrusted import jsons, printable, walking
from backbench.weights import header

CURVE_POINTS, LEAST_POINTS = 300, 3  # a line between two points has no shape
MOST_PICTURES, PICTURE_WIDTH, PICTURES_PER_RUN = 12, 720, 2


class PageMark(TypedDict):
    """What began within a pretraining."""

    x: float  # step
    text: str


class PageCurve(TypedDict):
    name: str
    row: int | None
    x: list[float]  # steps
    y: dict[str, list[float | None]]  # metric -> means
    marks: list[PageMark]


class PagePicture(TypedDict):
    title: str
    note: str
    alt: str
    src: str  # data URI
    width: int  # pixels
    height: int


def curves(board: Board, runs: Iterable[str | Path]) -> list[PageCurve]:
    """RUN/metrics.jsonl of every pretraining below `runs`, thinned to means of CURVE_POINTS bins.

    A pretraining is a run whose run.json says so; where its checkpoint has results, the curve takes
    that row's name.
    """
    labels, places = board.labels(), board.places()
    out: list[PageCurve] = []
    for run in _pretrainings(runs):
        logged = [line for line in read_metrics(run) if math.isfinite(line.get("step", math.nan))]
        if len(logged) < LEAST_POINTS:
            continue
        # A pretraining without results has no row: its checkpoint, or else its folder, names it.
        about = header.about(run / CHECKPOINT_FILE)
        digest = str(about.get("digest"))
        provenance = about.get("provenance")
        own_name = run.name
        if isinstance(provenance, Mapping) and provenance.get("name"):
            own_name = printable.shown(str(provenance["name"]))
        x, y = _thin(logged)
        if y:
            name = labels.get(digest) or str(own_name)
            marks = _marks(run, logged)
            out.append({"name": name, "row": places.get(digest), "x": x, "y": y, "marks": marks})
    return out


def _pretrainings(runs: Iterable[str | Path]) -> list[Path]:
    """The folders below `runs` that hold a pretraining's metrics, each once."""
    files: dict[str, Path] = {}  # real path -> as it was found
    for run in map(Path, runs):
        if run.is_dir():
            for file in walking.files(run):
                if file.name == METRICS_FILE:
                    files[os.path.realpath(file)] = file
    out = []
    for file in sorted(files.values()):
        try:
            about = jsons.read(file.parent / RUN_FILE)
        except (OSError, ValueError):
            continue
        if isinstance(about, dict) and about.get("verb") == "pretrain":
            out.append(file.parent)
    return out


def _thin(
    logged: Sequence[Mapping[str, float]],
) -> tuple[list[float], dict[str, list[float | None]]]:
    """(steps, {metric: means}) of bins of equal size, each at its last step; numbers only, and only
    those that are there more than once."""
    # Means of neighbours keep a curve's shape; every tenth point of it would keep its noise.
    size = math.ceil(len(logged) / CURVE_POINTS)
    bins = [logged[i : i + size] for i in range(0, len(logged), size)]
    names: dict[str, None] = {}  # as a set; a metric may be logged now and then only
    for line in logged:
        names |= dict.fromkeys(line)
    names.pop("step")
    y = {}
    for name in sorted(names):
        means = [_mean(part, name) for part in bins]
        if len(means) - means.count(None) >= LEAST_POINTS:
            y[name] = means
    return [part[-1]["step"] for part in bins], y


def _marks(run: Path, logged: Sequence[Mapping[str, float]]) -> list[PageMark]:
    """Where LORAC's prior begins, as the run's recipe says: at a share of the epochs."""
    try:
        recipe = jsons.read(run / RUN_FILE)["identity"]["recipe"]
        if recipe["method"]["prior"] == "none":  # MoCo-M: no prior ever
            return []
        begins = float(recipe["method"]["prior_from"]) * float(recipe["epochs"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    for before, line in itertools.pairwise(logged):
        if before.get("epoch", math.nan) < begins <= line.get("epoch", math.nan):
            return [{"x": line["step"], "text": "prior on"}]
    return []


def _mean(part: Sequence[Mapping[str, float]], name: str) -> float | None:
    """The mean of a metric over some lines, where it is a number; five digits."""
    values = []
    for line in part:
        value = line.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            values.append(value)
    mean = sum(values) / len(values) if values else math.nan
    return float(f"{mean:.5g}") if math.isfinite(mean) else None


def pictures(board: Board) -> list[PagePicture]:
    """RUN/pictures/* of the detection runs behind the board, as small images inside the page."""
    labels = board.labels()
    runs: dict[Path, Result] = {}  # any result of each: they tell of one checkpoint and one task
    for cell in board.cells.values():
        for result, run in cell.parts:
            if TASKS[result.task].detects:
                runs.setdefault(run, result)
    ordered = sorted(runs.items(), key=lambda item: (item[1].task, item[1].name))
    out: list[PagePicture] = []
    # The first of every run before the second of any.
    for nth in range(PICTURES_PER_RUN):
        for run, result in ordered:
            files = [p for p in (run / PICTURES).glob("*") if p.suffix in (".png", ".jpg")]
            if nth >= len(files) or len(out) >= MOST_PICTURES:
                continue
            file = sorted(files)[nth]
            small = _small_image(file)
            if small is not None:
                name = labels.get(result.checkpoint, result.name)
                out.append(_picture(file, small, result, name))
    return out


class _Small(NamedTuple):
    source: str  # data URI
    width: int
    height: int


def _picture(file: Path, small: _Small, result: Result, name: str) -> PagePicture:
    task = TASKS[result.task].title
    how = joined(" + ", result.protocol, result.engine)
    return {
        "title": name,
        "note": f"{task}, {result.dataset}, {how}",
        "alt": f"{task} of {name} on image {file.stem}: ground truth left, detected right",
        "src": small.source,
        "width": small.width,
        "height": small.height,
    }


def _small_image(file: Path) -> _Small | None:
    """The image, PICTURE_WIDTH wide at most; None where it cannot be read."""
    from PIL import Image

    try:
        with readable(file) as data, Image.open(data, formats=("PNG", "JPEG")) as opened:
            image = opened.convert("RGB")
            width = min(image.width, PICTURE_WIDTH)
            # A strip is cut short rather than refused by WEBP
            height = min(max(1, round(image.height * width / image.width)), 10 * PICTURE_WIDTH)
            image = image.resize((width, height))
            buffer = io.BytesIO()
            image.save(buffer, "WEBP", quality=82)
    except BadInput:
        return None
    source = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
    return _Small(source, width, height)
