"""The figures beside the leaderboard: ablation curves, the early predictor, and those that `analyze` runs have left."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path

from backbench.board import ablation, predictor
from backbench.board.board import Board

ANALYSES = 8  # runs whose figures stand on the page


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
    """(title, svg) of the overviews and training curves in the folders of the `analyze` runs behind the board."""
    runs = dict.fromkeys(
        run for cell in board.cells.values() for r, run in cell.parts if r.task == "analyze"
    )
    out = []
    for run in list(runs)[:ANALYSES]:
        try:
            about = json.loads((run / "analysis.json").read_text())
            what = f"Features on {about['dataset']}: {', '.join(dict.fromkeys(s['name'] for s in about['spaces']))}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for name, note in (
            ("kept-overview", "where the loss works"),
            ("trunk-overview", "trunk"),
            ("training", "training"),
        ):
            if (file := run / "pictures" / f"{name}.svg").is_file():
                out.append((f"{what} ({note})", file))
    return out


def for_page(board: Board) -> list[dict[str, str]]:
    """Every figure as a data URI, for the self-contained page."""
    with tempfile.TemporaryDirectory() as folder:
        found = [*write(board, Path(folder)), *analyses(board)]
        return [
            {
                "title": title,
                "src": "data:image/svg+xml;base64," + base64.b64encode(file.read_bytes()).decode(),
            }
            for title, file in found
        ]
