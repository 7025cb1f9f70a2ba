"""The leaderboard of 10^5 results over 10^3 checkpoints: to csv and to the page; and 10^3 results
computed again from kept predictions. Against limits in seconds on a core of its own; a test sorts the
page in a browser.
"""

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# The project before its tests, whose folders have the names of what they test
sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import print_ratios
from support import boards

from backbench.board.board import collect, read_verified
from backbench.board.export import write_csv
from backbench.board.overall import overall
from backbench.results import store

KEPT = 500  # checkpoints in two columns of 10,000 images whose predictions are kept
COLUMNS = [
    ("linear", "cifar10", "top1", "linear-lorac-v1", None),
    ("linear", "aircraft", "mean_per_class", "linear-lorac-v1", None),
]


def verified(runs: Path) -> float:
    """Seconds that it takes to compute 2 * KEPT results again."""
    names = [f"trunk-{n}" for n in range(KEPT)]
    boards.synthetic(runs, names, COLUMNS, images=10_000, gap=0.05)
    files, problems = store.files_below(runs), []
    start = time.process_time()
    read_verified(files, problems)
    assert not problems
    return time.process_time() - start


def run(quick: bool) -> None:
    checkpoints, columns = (100, 20) if quick else (1000, 100)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        boards.many(root / "runs", checkpoints, columns)
        marks = [time.process_time()]
        board = collect([root / "runs"])
        # Ranked as if predictions were kept; what follows from none has no rank
        for cell in board.cells.values():
            cell.backed = True
        write_csv(board, root / "leaderboard.csv")
        marks.append(time.process_time())
        page, sets = root / "leaderboard.html", overall(board)
        boards.write_whole_page(board, page, runs=[root / "runs"], sets=sets)
        marks.append(time.process_time())
        took = [after - before for before, after in pairwise(marks)]
        size = f"page of {page.stat().st_size / 1e6:.1f} MB (limit 20)"
        results = f"{checkpoints * columns} results"
        beside_limit(f"{results} read and written as csv", took[0], 5)
        beside_limit(f"{results} ranked and written as a page", took[1], 10, size)
        beside_limit("1000 results of 10,000 images verified", verified(root / "kept"), 60)


def beside_limit(title: str, seconds: float, limit: float, note: str = "") -> None:
    print_ratios(title, {f"limit, {limit:g} s": limit, "ours": seconds}, note=note)
