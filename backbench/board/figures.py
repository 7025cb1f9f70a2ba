"""The figures beside the leaderboard: ablations, the early predictor, what `analyze` runs left."""

from __future__ import annotations

import base64
import re
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
    width: int  # points
    height: int


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
            content = file.read_bytes()
            source = "data:image/svg+xml;base64," + base64.b64encode(content).decode()
            width, height = _size(content)
            out.append({"title": title, "src": source, "width": width, "height": height})
    return out


def _size(svg: bytes) -> tuple[int, int]:
    """Of a drawing in points, as its first tag says it; 4 to 3 where it does not."""
    found = re.search(rb'viewBox="0 0 (\d+)[\d.]* (\d+)[\d.]*"', svg[:2000])
    return (int(found[1]) or 4, int(found[2]) or 3) if found else (4, 3)
