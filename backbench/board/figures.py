"""The figures beside the leaderboard: ablations, the early predictor, what `analyze` runs left."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import TypedDict

from backbench.board import ablation, predictor
from backbench.board.board import Board
from backbench.runs.folder import PICTURES
from backbench.untrusted import jsons

ANALYSES = 8  # runs whose figures stand on the page
OVERVIEWS = {  # file in RUN/pictures -> what it shows
    "kept-overview": "where the loss works",
    "trunk-overview": "trunk",
    "training": "training",
}


class PageFigure(TypedDict):
    title: str
    src: str  # data URI


def write(board: Board, folder: Path) -> list[tuple[str, Path]]:
    """Ablations and the predictor as svg, png and csv into `folder`; (title, svg) of each."""
    out = ablation.write(board, folder)
    table = predictor.correlations(board)
    if table:
        predictor.write_csv(table, folder / "predictor.csv")
        file = predictor.draw(table, folder / "predictor")
        if file is not None:
            out.append(("Which cheap score predicts what", file))
    return out


def analyses(board: Board) -> list[tuple[str, Path]]:
    """(title, svg) of the overviews and training curves in the folders of the `analyze` runs behind
    the board."""
    runs: dict[Path, None] = {}  # as a set, in the board's order
    for cell in board.cells.values():
        for result, run in cell.parts:
            if result.task == "analyze":
                runs[run] = None
    out = []
    for run in list(runs)[:ANALYSES]:
        # Whatever else lies in such a file, the page goes without its figures rather than fail.
        try:
            about = jsons.read(run / "analysis.json")
            names = dict.fromkeys(space["name"] for space in about["spaces"])
            what = f"Features on {about['dataset']}: {', '.join(names)}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for name, note in OVERVIEWS.items():
            file = run / PICTURES / f"{name}.svg"
            if file.is_file():
                out.append((f"{what} ({note})", file))
    return out


def for_page(board: Board) -> list[PageFigure]:
    """Every figure as a data URI, for the self-contained page."""
    out: list[PageFigure] = []
    with tempfile.TemporaryDirectory() as folder:
        for title, file in (*write(board, Path(folder)), *analyses(board)):
            data = base64.b64encode(file.read_bytes()).decode()
            out.append({"title": title, "src": "data:image/svg+xml;base64," + data})
    return out
