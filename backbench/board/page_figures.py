"""The page's figures come from run folders: curves, pictures, ablations, `analyze`."""

import base64
import io
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from backbench.board import ablation, page_readings
from backbench.board.board import Board, joined
from backbench.board.page_records import (
    CurveMark,
    PageCurve,
    PageFigure,
    PageFigures,
    PagePicture,
)
from backbench.errors import BadInput
from backbench.images.decoding import decode
from backbench.records.result_line import Result
from backbench.runs.folder import CHECKPOINT_FILE, METRICS_FILE, PICTURES, RUN_FILE
from backbench.runs.step_metrics import read_metrics
from backbench.tasks import TASKS
from backbench.untrusted import jsons, printable, walking
from backbench.weights import header

CURVE_POINTS = 300
LEAST_POINTS = 3  # a line between two points has no shape
MOST_PICTURES = 12
PICTURES_PER_RUN = 2
PICTURE_WIDTH = 720
MOST_ANALYSES = 8  # runs whose figures stand on the page
OVERVIEWS = {  # file in RUN/pictures -> what it shows
    "kept-overview": "where the loss works",
    "trunk-overview": "trunk",
    "training": "training",
}

# What somebody else's file may raise when it is not what its name says
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)


def collect_figures(board: Board, runs: Iterable[str | Path]) -> PageFigures:
    """Everything that stands on the page beside the table; curves are looked for below `runs`."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = [*ablation.write(board, Path(folder)), *_analyses(board)]
        figures = [_figure(title, file) for title, file in drawn]
    return PageFigures(
        curves=_curves(board, runs),
        pictures=_pictures(board),
        figures=figures,
        layers=page_readings.layers_of(board),
        errors=page_readings.errors_of(board),
        label_curves=page_readings.label_curves_of(board),
    )


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


# ---- figures of ablations and analyses


def _figure(title: str, file: Path) -> PageFigure:
    content = file.read_bytes()
    # Width and height in points, as the drawing's first tag states them
    box = re.search(rb'viewBox="0 0 (\d+)[\d.]* (\d+)[\d.]*"', content[:2000])
    width, height = (int(box[1]), int(box[2])) if box else (0, 0)
    return PageFigure(
        title=title,
        src=_data_uri("svg+xml", content),
        width=width or 4,
        height=height or 3,
    )


def _analyses(board: Board) -> list[tuple[str, Path]]:
    """Return (title, svg) of the overviews and training curves of the board's `analyze` runs."""
    runs: dict[Path, None] = {}  # a set in the order of the cells
    for cell in board.cells.values():
        for result, run in cell.parts:
            if result.task == "analyze":
                runs[run] = None
    figures = []
    for run in list(runs)[:MOST_ANALYSES]:
        # The page goes without the figures of a run whose file is damaged, rather than fail.
        try:
            about = jsons.read(run / "analysis.json")
            names = dict.fromkeys(space["name"] for space in about["spaces"])
            title = f"Features on {about['dataset']}: {', '.join(names)}"
        except _UNREADABLE:
            continue
        for name, note in OVERVIEWS.items():
            file = run / PICTURES / f"{name}.svg"
            if file.is_file():
                figures.append((f"{title} ({note})", file))
    return figures


# ---- pretraining curves


def _curves(board: Board, runs: Iterable[str | Path]) -> list[PageCurve]:
    """RUN/metrics.jsonl of every pretraining below `runs`, thinned to means of CURVE_POINTS bins.

    A curve is named after its row, else after its checkpoint, else after its folder.
    """
    labels = board.labels()
    row_index = board.row_index()
    files: dict[str, Path] = {}  # real path -> the path by which it was reached
    for folder in map(Path, runs):
        if not folder.is_dir():
            continue
        for file in walking.files(folder):
            if file.name == METRICS_FILE:
                files[os.path.realpath(file)] = file
    curves = []
    for file in sorted(files.values()):
        run = file.parent
        if not _is_pretraining(run):
            continue
        logged = [
            line
            for line in read_metrics(run)
            if math.isfinite(line.get("step", math.nan))
        ]
        if len(logged) < LEAST_POINTS:
            continue
        about = header.about(run / CHECKPOINT_FILE)
        digest = str(about.get("digest"))
        provenance = about.get("provenance")
        own_name = provenance.get("name") if isinstance(provenance, Mapping) else None
        x, y = _thin(logged)
        if not y:
            continue
        curve = PageCurve(
            name=labels.get(digest) or printable.shown(str(own_name or run.name)),
            row=row_index.get(digest),
            x=x,
            y=y,
            marks=_marks(run, logged),
        )
        curves.append(curve)
    return curves


def _is_pretraining(run: Path) -> bool:
    try:
        return bool(jsons.read(run / RUN_FILE)["verb"] == "pretrain")
    except _UNREADABLE:
        return False


def _thin(
    logged: Sequence[Mapping[str, float]],
) -> tuple[list[float], dict[str, list[float | None]]]:
    """(steps, {metric: means}) of bins of equal size; only metrics of LEAST_POINTS means."""
    # Means of neighbours keep a curve's shape; every tenth point of it would keep its noise.
    size = math.ceil(len(logged) / CURVE_POINTS)
    bins = [logged[i : i + size] for i in range(0, len(logged), size)]
    y = {}
    names = set().union(*logged) - {"step"}
    for name in sorted(names):
        # A metric may be logged now and then only: some bins have no mean.
        means = [_mean(part, name) for part in bins]
        if len(means) - means.count(None) >= LEAST_POINTS:
            y[name] = means
    return [part[-1]["step"] for part in bins], y


def _mean(part: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the mean of a metric over some lines, to five digits; None where no line has a
    number."""
    values = [line[name] for line in part if isinstance(line.get(name), int | float)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    mean = sum(finite) / len(finite)
    return float(f"{mean:.5g}") if math.isfinite(mean) else None


def _marks(run: Path, logged: Sequence[Mapping[str, float]]) -> list[CurveMark]:
    """Return the step at which LORAC's prior begins: its recipe gives it as a share of the
    epochs."""
    try:
        recipe = jsons.read(run / RUN_FILE)["identity"]["recipe"]
        if recipe["method"]["prior"] == "none":  # MoCo-M: no prior ever
            return []
        begins = float(recipe["method"]["prior_from"]) * float(recipe["epochs"])
    except _UNREADABLE:
        return []
    for before, line in itertools.pairwise(logged):
        if before.get("epoch", math.nan) < begins <= line.get("epoch", math.nan):
            return [CurveMark(x=line["step"], text="prior on")]
    return []


# ---- pictures of detections and of label maps


class _SmallImage(NamedTuple):
    src: str
    width: int
    height: int


def _pictures(board: Board) -> list[PagePicture]:
    """RUN/pictures/* of detection runs and the pictures of label maps, as small images."""
    labels = board.labels()
    # A detector's run has a folder of pictures, of one checkpoint and one task; a run of label
    # maps names one picture for each.
    places: dict[Path, Result] = {}  # folder, or picture -> any result of it
    for cell in board.cells.values():
        for result, run in cell.parts:
            picture = result.facts.get("picture")
            if TASKS[result.task].detects:
                places.setdefault(run / PICTURES, result)
            elif picture is not None:
                places.setdefault(run / picture, result)
    ordered = sorted(places.items(), key=lambda item: (item[1].task, item[1].name))
    pictures: list[PagePicture] = []
    # The first of every run before the second of any.
    for nth in range(PICTURES_PER_RUN):
        for place, result in ordered:
            there = [place] if place.is_file() else place.glob("*")
            files = sorted(p for p in there if p.suffix in (".png", ".jpg"))
            if nth >= len(files) or len(pictures) >= MOST_PICTURES:
                continue
            small = _small_image(files[nth])
            if small is None:
                continue
            name = labels.get(result.checkpoint, result.name)
            task = TASKS[result.task].title
            how = joined(" + ", result.protocol, result.engine)
            shown = PagePicture(
                title=name,
                note=f"{task}, {result.dataset}, {how}",
                alt=f"{task} of {name} on image {files[nth].stem}:"
                " ground truth left, detected right",
                src=small.src,
                width=small.width,
                height=small.height,
            )
            pictures.append(shown)
    return pictures


def _small_image(file: Path) -> _SmallImage | None:
    """Return the image as a data URI, at most PICTURE_WIDTH wide; None where it cannot be read."""
    try:
        image = decode(file)
    except BadInput:
        return None
    width = min(image.width, PICTURE_WIDTH)
    height = max(1, round(image.height * width / image.width))
    # WEBP refuses very high images; such a strip is squeezed instead.
    height = min(height, 10 * PICTURE_WIDTH)
    image = image.resize((width, height))
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=82)
    return _SmallImage(_data_uri("webp", buffer.getvalue()), width, height)
