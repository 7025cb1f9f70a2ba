"""How fast the leaderboard is: 10^5 results over 10^3 checkpoints to csv, to the page, and in a
browser; and how fast 10^3 results are computed again from kept predictions. Seconds are of one core
(this program does nothing else), the browser's by the clock.

python benchmarks/leaderboard.py [--checkpoints 1000] [--columns 100]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# The project before its tests, whose folders have the names of what they test
sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import describe
from support import boards, browser

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--columns", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        boards.many(root / "runs", args.checkpoints, args.columns)
        start = time.process_time()
        board = collect([root / "runs"])
        read = time.process_time() - start
        # Ranked as if predictions were kept; what follows from none has no rank
        for cell in board.cells.values():
            cell.backed = True
        write_csv(board, root / "leaderboard.csv")
        csv_s = time.process_time() - start
        start = time.process_time()
        sets = overall(board)
        ranks_s = time.process_time() - start
        boards.write_whole_page(board, root / "leaderboard.html", runs=[root / "runs"], sets=sets)
        page_s = time.process_time() - start
        size = (root / "leaderboard.html").stat().st_size / 1e6
        numbers = args.checkpoints * args.columns
        print(f"python benchmarks/leaderboard.py; {describe()}")
        print(f"{numbers} results over {args.checkpoints} checkpoints, {args.columns} columns")
        print(f"read {read:.2f} s, read and written as csv {csv_s:.2f} s (limit 5)")
        print(f"ranked in {ranks_s:.2f} s; ranked and page written in {page_s:.2f} s")
        print(f"page of {size:.1f} MB (limit 20)")
        print(f"{2 * KEPT} results of 10,000 images verified in {verified(root / 'kept'):.2f} s")
        if browser.chromium() is None:
            print("no Chromium here: sorting not measured", file=sys.stderr)
            return
        probe = browser.sort_in_browser(root / "leaderboard.html")
        sort_s, sorted_s = probe["sort_ms"] / 1000, probe["sorted_ms"] / 1000
        print(f"sorted in {sort_s:.2f} s (limit 1), {sorted_s:.2f} s after navigation (limit 2)")
        print(f"in order: {probe['ok']}")


if __name__ == "__main__":
    main()
