"""The page's figures come from run folders: curves, pictures, ablations, predictor, `analyze`."""

import base64
import io
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from backbench.board import ablation, predictor
from backbench.board.board import Board, joined
from backbench.errors import BadInput
from backbench.images.decoding import readable
from backbench.records.result_line import Result
from backbench.runs.folder import CHECKPOINT_FILE, METRICS_FILE, PICTURES, RUN_FILE
from backbench.runs.step_metrics import read_metrics
from backbench.tasks import TASKS
from backbench.untrusted import jsons, printable, walking
from backbench.weights import header

CURVE_POINTS, LEAST_POINTS = 300, 3  # a line between two points has no shape
MOST_PICTURES, PICTURE_WIDTH, PICTURES_PER_RUN = 12, 720, 2
MOST_ANALYSES = 8  # runs whose figures stand on the page
OVERVIEWS = {  # file in RUN/pictures -> what it shows
    "kept-overview": "where the loss works",
    "trunk-overview": "trunk",
    "training": "training",
}


Record = dict[str, object]  # its keys are those that page_*.js read


def collect_figures(
    board: Board, runs: Iterable[str | Path]
) -> dict[str, Sequence[Record]]:
    """Everything that stands on the page beside the table; curves are looked for below `runs`."""
    figures: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        for title, file in (*write_figures(board, Path(folder)), *_analyses(board)):
            content = file.read_bytes()
            source = "data:image/svg+xml;base64," + base64.b64encode(content).decode()
            # Width and height in points, as the drawing's first tag states them; else 4 to 3
            box = re.search(rb'viewBox="0 0 (\d+)[\d.]* (\d+)[\d.]*"', content[:2000])
            width, height = (int(box[1]) or 4, int(box[2]) or 3) if box else (4, 3)
            figures.append(
                {"title": title, "src": source, "width": width, "height": height}
            )
    return {
        "curves": _curves(board, runs),
        "pictures": _pictures(board),
        "figures": figures,
    }


# ---- ablations, the predictor, analyses


def write_figures(board: Board, folder: Path) -> list[tuple[str, Path]]:
    """Write ablations and the predictor as svg, png and csv into `folder`; (title, svg) of each."""
    written = ablation.write(board, folder)
    table = predictor.correlations(board)
    if table:
        predictor.write_csv(table, folder / "predictor.csv")
        file = predictor.draw(table, folder / "predictor")
        if file is not None:
            written.append(("Which cheap score predicts what", file))
    return written


def _analyses(board: Board) -> list[tuple[str, Path]]:
    """(title, svg) of the overviews and training curves of the board's `analyze` runs."""
    parts = itertools.chain(*(cell.parts for cell in board.cells.values()))
    runs = dict.fromkeys(
        run for result, run in parts if result.task == "analyze"
    )  # a set in order
    figures = []
    for run in list(runs)[:MOST_ANALYSES]:
        # Whatever else lies in such a file, the page goes without its figures rather than fail.
        try:
            about = jsons.read(run / "analysis.json")
            names = dict.fromkeys(space["name"] for space in about["spaces"])
            title = f"Features on {about['dataset']}: {', '.join(names)}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for name, note in OVERVIEWS.items():
            file = run / PICTURES / f"{name}.svg"
            if file.is_file():
                figures.append((f"{title} ({note})", file))
    return figures


# ---- pretraining curves


def _curves(board: Board, runs: Iterable[str | Path]) -> list[Record]:
    """RUN/metrics.jsonl of every pretraining below `runs`, thinned to means of CURVE_POINTS bins. A
    curve is named after its row, else after its checkpoint, else after its folder."""
    labels, row_index = board.labels(), board.row_index()
    curves: list[Record] = []
    files: dict[str, Path] = {}  # real path -> the path by which it was reached
    for below in filter(Path.is_dir, map(Path, runs)):
        found = [file for file in walking.files(below) if file.name == METRICS_FILE]
        files |= {os.path.realpath(file): file for file in found}
    for run in (file.parent for file in sorted(files.values())):
        try:
            is_pretraining = jsons.read(run / RUN_FILE)["verb"] == "pretrain"
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not is_pretraining:
            continue
        logged = [
            line
            for line in read_metrics(run)
            if math.isfinite(line.get("step", math.nan))
        ]
        if len(logged) < LEAST_POINTS:
            continue
        about = header.about(run / CHECKPOINT_FILE)
        digest, provenance = str(about.get("digest")), about.get("provenance")
        own = provenance.get("name") if isinstance(provenance, Mapping) else None
        name = labels.get(digest) or printable.shown(str(own or run.name))
        x, y = _thin(logged)
        if y:
            curve = {"name": name, "row": row_index.get(digest), "x": x, "y": y}
            curves.append(curve | {"marks": _marks(run, logged)})
    return curves


def _thin(
    logged: Sequence[Mapping[str, float]],
) -> tuple[list[float], dict[str, list[float | None]]]:
    """(steps, {metric: means}) of bins of equal size; only metrics of LEAST_POINTS means."""
    # Means of neighbours keep a curve's shape; every tenth point of it would keep its noise.
    size = math.ceil(len(logged) / CURVE_POINTS)
    bins = [logged[i : i + size] for i in range(0, len(logged), size)]
    y = {}
    # A metric may be logged now and then only
    for name in sorted(set().union(*logged) - {"step"}):
        means = [_mean(part, name) for part in bins]
        if len(means) - means.count(None) >= LEAST_POINTS:
            y[name] = means
    return [part[-1]["step"] for part in bins], y


def _mean(part: Sequence[Mapping[str, float]], name: str) -> float | None:
    """The mean of a metric over some lines, to five digits; None where no line has a number."""
    values = [line[name] for line in part if isinstance(line.get(name), int | float)]
    finite = list(filter(math.isfinite, values))
    mean = sum(finite) / len(finite) if finite else math.nan
    return float(f"{mean:.5g}") if math.isfinite(mean) else None


def _marks(run: Path, logged: Sequence[Mapping[str, float]]) -> list[Record]:
    """The step at which LORAC's prior begins: its recipe gives it as a share of the epochs."""
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


# ---- pictures of detections and of label maps


def _pictures(board: Board) -> list[Record]:
    """RUN/pictures/* of detection runs and the pictures of label maps, as small images."""
    labels = board.labels()
    # A detector's run has pictures of one checkpoint and one task
    runs: dict[Path, Result] = {}  # folder, or picture -> any result of it
    for cell in board.cells.values():
        for result, run in cell.parts:
            if TASKS[result.task].detects:
                runs.setdefault(run / PICTURES, result)
            elif (picture := result.facts.get("picture")) is not None:
                runs.setdefault(run / picture, result)
    ordered = sorted(runs.items(), key=lambda item: (item[1].task, item[1].name))
    pictures: list[Record] = []
    # The first of every run before the second of any.
    for nth in range(PICTURES_PER_RUN):
        for place, result in ordered:
            there = [place] if place.is_file() else place.glob("*")
            files = [p for p in there if p.suffix in (".png", ".jpg")]
            if nth >= len(files) or len(pictures) >= MOST_PICTURES:
                continue
            file = sorted(files)[nth]
            small = _small_image(file)
            if small is None:
                continue
            name, task = (
                labels.get(result.checkpoint, result.name),
                TASKS[result.task].title,
            )
            how = joined(" + ", result.protocol, result.engine)
            alt = f"{task} of {name} on image {file.stem}: ground truth left, detected right"
            about = {
                "title": name,
                "note": f"{task}, {result.dataset}, {how}",
                "alt": alt,
            }
            pictures.append(about | small)
    return pictures


def _small_image(file: Path) -> Record | None:
    """The image as a data URI, at most PICTURE_WIDTH wide; None where it cannot be read."""
    from PIL import Image

    try:
        with (
            readable(file) as data,
            Image.open(data, formats=("PNG", "JPEG")) as opened,
        ):
            image = opened.convert("RGB")
            width = min(image.width, PICTURE_WIDTH)
            # WEBP refuses very high images; such a strip is squeezed instead.
            height = min(
                max(1, round(image.height * width / image.width)), 10 * PICTURE_WIDTH
            )
            image = image.resize((width, height))
            buffer = io.BytesIO()
            image.save(buffer, "WEBP", quality=82)
    except BadInput:
        return None
    source = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"src": source, "width": width, "height": height}
