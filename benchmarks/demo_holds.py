"""Which of the demo's comparisons hold, however it is run.

    python benchmarks/demo_holds.py --out runs/holds [--runs 20] [--at-once 2] [--keep MACHINE]

Every run has another seed in all steps (of pretraining, of few-label draws, of heads), one or two
threads, and every weight of a fresh trunk moved by about 1e-7 of itself. Runs that --out holds are
not repeated, so another machine's, or those under ONEDNN_MAX_CPU_ISA=AVX2
ATEN_CPU_CAPABILITY=avx2, can be added. What is not in at least 19 of 20 is not drawn in the README.
The last output is kept beside this script in demo_holds.txt. With --keep the ranges go into
backbench/cli/demo_ranges.csv, under the name of the machine: `backbench demo` is held against them.
"""

import argparse
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from backbench.board.board import (
    Board,
    Cell,
    Column,
    Row,
    collect,
    difference,
    standing,
)
from backbench.cli import demo, demo_ranges, verbs
from backbench.datasets import embedded

MOVED = 1e-7  # of a weight: less than a float32 in two can tell
THREADS = (1, 1, 1, 2)  # of the runs, in turn
CONTROL = "random"
PREFIXES = (
    "linear/digits/top1@",
    "knn/digits/top1_k20@",
    "fewshot/digits/top1@",
    "semi_10pct/digits/top1@",
    "faster_rcnn/scenes:val/bbox_AP@",
    "mask_rcnn/scenes:val/segm_AP@",
    "keypoint_rcnn/scenes:val/keypoints_AP@",
)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--runs", type=int, default=20)
    p.add_argument("--at-once", type=int, default=2)
    p.add_argument("--keep", metavar="MACHINE")
    p.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one is not None:
        raise SystemExit(run_one(args.out, args.one))
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(partial(start, args.out), range(args.runs)))
    finished = [file.parent for file in sorted(args.out.glob("run-*/done"))]
    numbers = [int(folder.name.removeprefix("run-")) for folder in finished]
    boards = [collect([folder]) for folder in finished]
    show(boards, {threads_of(number) for number in numbers})
    if args.keep:
        keep_ranges(boards, args.keep)


def threads_of(number: int) -> int:
    return THREADS[number % len(THREADS)]


def start(out: Path, number: int) -> None:
    """Make one run in a process of its own, unless it is there."""
    if (out / f"run-{number:02}" / "done").exists():
        return
    env = {**os.environ, "OMP_NUM_THREADS": str(threads_of(number))}
    command = [sys.executable, __file__, "--out", str(out), "--one", str(number)]
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"run-{number:02}.log").open("w") as log:
        subprocess.run(command, env=env, stdout=log, stderr=log, check=True)


def run_one(out: Path, number: int) -> int:
    """Run all steps of the demo in this process, with another seed and moved weights."""
    import torch

    from backbench.runs import seeding
    from backbench.weights import archs

    build = archs.build_trunk

    def moved(*args: object, **kwargs: object) -> object:
        trunk = build(*args, **kwargs)
        generator = seeding.generator(number, "moved")
        with torch.no_grad():
            for parameter in trunk.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + MOVED * noise)
        return trunk

    archs.build_trunk = moved
    folder = out / f"run-{number:02}"
    embedded.build(folder / "data")
    for step in demo.demo_steps(folder, "full").values():
        seed = {"pretrain": [f"seed={number}"], "detect": ["SEED", str(number)]}
        words = [*step.argv, *seed.get(step.verb, ["--seed", str(number)])]
        if exit_code := demo.run_chain(words, verbs.command):
            return exit_code
    (folder / "done").touch()
    return 0


def show(boards: list[Board], threads: set[int]) -> None:
    """Print for each comparison in how many runs it holds."""
    parts = [
        part for board in boards for cell in board.cells.values() for part in cell.parts
    ]
    processors = {str((result.origin or {})["hardware"]) for result, _ in parts}
    print(
        f"{len(boards)} runs of the demo on {' and '.join(sorted(processors))}, each with"
    )
    counts = " or ".join(map(str, sorted(threads)))
    print(
        f"another seed, in {counts} thread(s), and fresh weights moved by about 1e-7 of themselves\n"
    )
    print(f"{'':80}{'runs':>8}{'by a paired test':>18}   points: least, median, most")
    for prefix in PREFIXES:
        runs = [against_control(board, prefix) for board in boards]
        if len(runs[0]) > 1:
            least = [min(points for points, _ in run.values()) for run in runs]
            print(_comparison("every pretrained", prefix, least))
        for name in runs[0]:
            points = [run[name][0] for run in runs]
            print(_comparison(name, prefix, points, sum(run[name][1] for run in runs)))
    for title, bold in (("highest of the row", False), ("bold on the page", True)):
        print(f"\n{title:80}runs")
        for prefix in PREFIXES:
            best = [leader(board, prefix, bold=bold) for board in boards]
            counts = [
                f"{name} {best.count(name)}"
                for name in demo.CHECKPOINTS
                if name in best
            ]
            print(f"{prefix.removesuffix('@'):80}{', '.join(counts) or 'none'}")


def keep_ranges(boards: list[Board], machine: str) -> None:
    """Write how far each trunk stood above the random one, in place of this machine's last rows."""
    ranges = [each for each in demo_ranges.read() if each.machine != machine]
    for prefix in PREFIXES:
        runs = [against_control(board, prefix) for board in boards]
        for name in runs[0]:
            points = [run[name][0] for run in runs]
            one = demo_ranges.Range(
                machine=machine,
                column=prefix.removesuffix("@"),
                trunk=name,
                runs=len(points),
                above=sum(value > 0 for value in points),
                least=round(min(points), 1),
                median=round(statistics.median(points), 1),
                most=round(max(points), 1),
            )
            ranges.append(one)
    demo_ranges.write(ranges)


def _comparison(
    name: str, prefix: str, points: list[float], shown: int | None = None
) -> str:
    title = f"{name} above random in column {prefix.removesuffix('@')}"
    above = f"{sum(value > 0 for value in points)} of {len(points)}"
    by_test = "" if shown is None else f"{shown} of {len(points)}"
    spread = f"{min(points):8.1f}{statistics.median(points):8.1f}{max(points):8.1f}"
    return f"{title:80}{above:>8}{by_test:>18}   {spread}"


def measured(board: Board, prefix: str) -> tuple[Column, dict[str, tuple[Row, Cell]]]:
    """The column of this prefix, and its cells by the demo's names, the best first."""
    column = next(column for column in board.columns if column.name.startswith(prefix))
    cells = {}
    for row, cell in board.measured(column):
        cells[row.name.removesuffix("-demo").replace("-", "_")] = (row, cell)
    return column, cells


def against_control(board: Board, prefix: str) -> dict[str, tuple[float, bool]]:
    """Each pretrained checkpoint's points above the random trunk's, and if a test says so."""
    column, cells = measured(board, prefix)
    _, control = cells.pop(CONTROL)
    found = {}
    for name in demo.CHECKPOINTS:
        if name in cells:
            _, its = cells[name]
            tested = difference(board, column, its, control)
            above = tested is not None and tested.real and tested.value > 0
            found[name] = (its.values[0] - control.values[0], above)
    return found


def leader(board: Board, prefix: str, *, bold: bool) -> str | None:
    """The highest of a column, or the one that is bold there."""
    column, cells = measured(board, prefix)
    marks = standing(board, column)
    for name, (row, _) in cells.items():
        if not bold or marks.get(row.checkpoint) == "best":
            return name
    return None


if __name__ == "__main__":
    main()
