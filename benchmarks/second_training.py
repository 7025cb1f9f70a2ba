"""Train the same trunk many times and count how often the board calls two of the trainings different.

python benchmarks/second_training.py DEMO [--task linear ...] [--trainings K] [--seeded S]
DEMO is a finished `backbench demo --out DEMO`. `benchmarks/second_training.txt` has its last output.

Each training starts from the LORAC trunk with its weights moved by 1e-7, so all are equally good. S
of them train with seeds 1 and 2 too. A board has those seeds of two of them, which tells it how far
trainings differ; its pairs are counted for every choice of the two.
"""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import torch

from backbench.board.board import (
    Board,
    Measurement,
    collect,
    difference,
    fill,
    noise_of,
    predictions,
)
from backbench.cli import program
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.verify.paired_tests import compare
from backbench.weights.checkpoint import Checkpoint

MOVED = 1e-7  # of each weight
METRICS = {"top1": "top-1", "bbox_AP": "box AP", "bbox_AP50": "box AP50"}


def commands(demo: Path) -> dict[str, list[str]]:
    """Task -> its verb and options by the demo's protocols, without a checkpoint."""
    data = ["--data", str(demo / "data")]
    semisup = ["--percent", "10", "--lists", str(demo / "data" / "lists")]
    return {
        "linear": [
            "linear",
            "--datasets",
            "digits",
            "--protocol",
            "linear_demo",
            *data,
        ],
        "semisup": ["semisup", *semisup, "--protocol", "semisup_demo", *data],
        "finetune": [
            "finetune",
            "--dataset",
            "digits",
            "--protocol",
            "finetune_demo",
            *data,
        ],
        "detect": [
            "detect",
            "--config-file",
            "demo_faster_rcnn_frozen",
            "--resume",
            *data,
        ],
    }


def moved_trunks(demo: Path, out: Path, count: int) -> list[Path]:
    """The demo's LORAC trunk so many times, each with other last digits of its weights."""
    whole = Checkpoint.load(demo / "pretrain" / "lorac" / CHECKPOINT_FILE)
    files = []
    for n in range(count):
        generator = torch.Generator().manual_seed(n)
        state = {}
        for name, value in whole.state_dict.items():
            state[name] = value
            if value.is_floating_point():
                state[name] = value * (
                    1 + MOVED * torch.randn(value.shape, generator=generator)
                )
        files.append(out / f"training-{n}.safetensors")
        if not files[-1].exists():
            named = {**whole.provenance, "name": f"training-{n}"}
            replace(whole, state_dict=state, provenance=named).save(files[-1])
    return files


def train(words: list[str], files: list[Path], out: Path, *, seeded: int) -> Board:
    """All trainings of a task; those that are there already are not made again."""
    verb, *options = words
    for n, file in enumerate(files):
        where = ["--out", str(out / str(n) / "s0")]
        if n < seeded:
            where = ["--out", str(out / str(n)), "--seeds", "3"]
        trunk = ["--checkpoint", str(file)] if verb == "detect" else [str(file)]
        status = program.main([verb, *trunk, *options, "-q", *where])
        if status:
            raise SystemExit(status)
    return collect([out])


def called_different(board: Board, metric: str) -> tuple[float, float]:
    """The share of pairs, in percent, and the standard deviation of the trainings by this board."""
    (column,) = (column for column in board.columns if column.metric == metric)
    cells = [cell for _, cell in board.measured(column)]
    tests = [
        difference(board, column, a, b) for a, b in itertools.combinations(cells, 2)
    ]
    share = sum(d is not None and d.real for d in tests) / len(tests)
    return 100 * share, noise_of(board, column).seeds ** 0.5


def report(task: str, board: Board, seeded: int) -> None:
    """One line for each metric: its range over trainings, and the shares of pairs called different."""
    measurements: list[Measurement] = []
    for cell in board.cells.values():
        measurements += cell.parts
    # By name, as they were trained
    digests = [row.checkpoint for row in board.rows][:seeded]
    for column in board.columns:
        if column.metric not in METRICS:
            continue
        cells = [cell for _, cell in board.measured(column)]
        values = [cell.values[0] for cell in cells]
        pairs = itertools.combinations([[predictions(cell)[0]] for cell in cells], 2)
        alone = [compare(a, b, column.metric) for a, b in pairs]
        by_images = sum(d is not None and d.real for d in alone) / len(alone)
        seen = []
        for two in itertools.combinations(digests, 2):
            kept = [
                m
                for m in measurements
                if m.result.seed == 0 or m.result.checkpoint in two
            ]
            seen.append(called_different(fill(kept), column.metric))
        by_board = sum(share for share, _ in seen) / len(seen)
        deviation = sum(deviation for _, deviation in seen) / len(seen)
        print(
            f"{task:10}{METRICS[column.metric]:10}{f'{min(values):.1f} to {max(values):.1f}':>16}"
            f"{100 * by_images:12.0f}%{by_board:12.0f}%{deviation:12.2f}{len(seen):10}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/second_training"))
    parser.add_argument("--trainings", type=int, default=8)
    parser.add_argument("--seeded", type=int, default=2)
    parser.add_argument(
        "--task", nargs="+", default=["linear", "semisup", "finetune", "detect"]
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = moved_trunks(args.demo, args.out, args.trainings)
    print(
        f"{args.trainings} trainings of one trunk, weights moved by {MOVED:g}; pairs of them called"
    )
    print("different: by a test over images alone, and with the trainings' noise\n")
    heads = ["first seed", "images", "the board", "deviation", "boards"]
    print(
        f"{'':20}{heads[0]:>16}{heads[1]:>13}{heads[2]:>13}{heads[3]:>12}{heads[4]:>10}"
    )
    for task in args.task:
        board = train(
            commands(args.demo)[task], files, args.out / task, seeded=args.seeded
        )
        report(task, board, args.seeded)


if __name__ == "__main__":
    main()
