"""How much memory three works need, and what ten times the work adds: features of 200,000 images, a
leaderboard of 10^5 results, a grid of 20,000 jobs.

    python benchmarks/memory.py [--only extraction,board,jobs]

Each size runs in a process of its own; what counts is the most anonymous memory that it held beyond
what stood at its start (Linux), so files that are mapped do not count. Features are extracted by the
suite's loop from PNG files of 16 x 16 pixels, 2,048 numbers each, by a trunk that only averages: the
loop, its cache and its hashes are what is looked at. The last output is kept in memory.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from machine import describe
from PIL import Image
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# The project before its tests, whose folders have the names of what they test
sys.path.insert(0, str(Path(__file__).parent.parent))

from launcher import write_grid
from probe import checkpoint
from support import boards

from backbench import cli
from backbench.board.board import collect
from backbench.board.export import write_csv
from backbench.images.image_list import scan_folder
from transfer.devices import Machine
from transfer.feature_cache import FeatureCache
from transfer.features import Extractor
from transfer.frozen import FrozenTrunk
from transfer.protocols import Geometry

CPU = torch.device("cpu")
LINKS = 30_000  # of one file: some file systems have no more than 65,000


class Averages(nn.Module):
    """The mean colour, over and over."""

    feature_dim = 2048
    memory_format = torch.channels_last

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)).repeat(1, -(-self.feature_dim // 3))[:, : self.feature_dim]


def pictures(folder: Path, count: int) -> None:
    draw = np.random.Generator(np.random.PCG64(0))
    (folder / "a").mkdir(parents=True)
    for i in range(count):
        file = folder / "a" / f"{i:06}.png"
        if i % LINKS == 0:
            first = file
            Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file)
        else:
            os.link(first, file)


def extraction(root: Path, count: int) -> Callable[[], object]:
    pictures(root / "data", count)
    trunk = FrozenTrunk(checkpoint("resnet18"), Averages(), CPU, "fp32", "")  # type: ignore[arg-type]
    extract = Extractor(
        trunks=[trunk],
        geometry=Geometry(resize=16, crop=16),
        cache=FeatureCache(root / "cache", 1 << 40),
        machine=Machine(CPU, rank=0, world=1, workers=0),
    )
    return lambda: extract(scan_folder(root / "data"))


def board(root: Path, count: int) -> Callable[[], object]:
    columns = 100
    boards.many(root / "runs", count // columns, columns)

    def work() -> None:
        found = collect([root / "runs"])
        write_csv(found, root / "leaderboard.csv")
        boards.write_whole_page(found, root / "leaderboard.html", runs=[root / "runs"])

    return work


def jobs(root: Path, count: int) -> Callable[[], object]:
    grid = write_grid(root, count)
    words = ("--cluster", "local", "--out", str(root / "runs"), "--dry-run")
    return lambda: cli.main(["launch", "run", str(grid), *words])


WORKS = {"extraction": (extraction, 200_000), "board": (board, 100_000), "jobs": (jobs, 20_000)}


def anonymous() -> float:
    """MiB of this process that no file stands behind."""
    text = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", text)[0]) / 1024


def watched(name: str, count: int) -> tuple[float, float]:
    """Seconds of the processor, and the most MiB beyond the start, seen every 20 ms."""
    make, _ = WORKS[name]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = make(Path(folder), count)
        before, seen, over = anonymous(), 0.0, threading.Event()

        def look() -> None:
            nonlocal seen
            while not over.wait(0.02):
                seen = max(seen, anonymous() - before)

        watcher = threading.Thread(target=look)
        watcher.start()
        began = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            code = work()
        assert not isinstance(code, int) or not code, f"{name} ended with {code}"
        took = time.process_time() - began
        over.set()
        watcher.join()
    return took, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", default=",".join(WORKS))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(*watched(args.one[0], int(args.one[1])))
        return
    print(describe())
    for name in args.only.split(","):
        _, full = WORKS[name]
        found = {}
        for count in (full // 10, full):
            command = [sys.executable, __file__, "--one", name, str(count)]
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            took, found[count] = map(float, ran.stdout.split()[-2:])
            print(f"  {name:12}{count:9} {took:8.1f} s {found[count]:8.0f} MiB", flush=True)
        more = 1024 * (found[full] - found[full // 10]) / (full - full // 10)
        print(f"  {name:12}{'':9} {more:8.2f} KiB more for each one more", flush=True)


if __name__ == "__main__":
    main()
