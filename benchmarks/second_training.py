"""Train the same trunk many times and count how often the board calls two of the trainings different.

python benchmarks/second_training.py DEMO [--task linear ...] [--trainings K]
DEMO is a finished `backbench demo --out DEMO`. `benchmarks/second_training.txt` has its last output.

Each training starts from the LORAC trunk with its weights moved by 1e-7, so all are equally good. Two
of them train with seeds 1 and 2 too, which tells the board how far trainings differ.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backbench import cli
from backbench.board.board import Board, collect, difference, noise_of, noise_words, predictions
from backbench.results.paired_tests import compare
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.weights.checkpoint import Checkpoint

MOVED = 1e-7  # of each weight
AGAIN = 2  # trainings that have two more seeds
METRICS = {"top1": "top-1", "bbox_AP": "box AP", "bbox_AP50": "box AP50"}


def commands(demo: Path) -> dict[str, list[str]]:
    """Task -> its verb and options, without a checkpoint."""
    data = ["--data", str(demo / "data")]
    semisup = ["--percent", "10", "--lists", str(demo / "data" / "lists")]
    config = "demo_faster_rcnn_R_18_FPN"
    return {
        "linear": ["linear", "--datasets", "digits", "--protocol", "linear_demo", *data],
        "semisup": ["semisup", *semisup, "--protocol", "semisup_demo", *data],
        "finetune": ["finetune", "--dataset", "digits", "--protocol", "finetune_demo", *data],
        "detect": ["detect", "--config-file", config, "--resume", *data],
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
                state[name] = value * (1 + MOVED * torch.randn(value.shape, generator=generator))
        files.append(out / f"training-{n}.safetensors")
        if not files[-1].exists():
            named = {**whole.provenance, "name": f"training-{n}"}
            replace(whole, state_dict=state, provenance=named).save(files[-1])
    return files


def train(words: list[str], files: list[Path], out: Path) -> Board:
    """All trainings of a task; those that are there already are not made again."""
    for n, file in enumerate(files):
        seeds = ["--seeds", "3"] if n < AGAIN else []
        run = out / str(n) if seeds else out / str(n) / "s0"
        verb, *options = words
        trunk = ["--checkpoint", str(file)] if verb == "detect" else [str(file)]
        status = cli.main([verb, *trunk, *options, "-q", "--out", str(run), *seeds])
        if status:
            raise SystemExit(status)
    return collect([out])


def report(task: str, board: Board) -> None:
    """One line for each metric: its range over trainings, and the share of pairs called different."""
    for column in board.columns:
        if column.metric not in METRICS:
            continue
        cells = [cell for _, cell in board.measured(column)]
        first = [predictions(cell)[0] for cell in cells]
        values = [cell.values[0] for cell in cells]
        pairs = list(itertools.combinations(range(len(cells)), 2))
        alone = [compare([first[a]], [first[b]], column.metric) for a, b in pairs]
        tested = [difference(board, column, cells[a], cells[b]) for a, b in pairs]
        by_images = sum(d is not None and d.real for d in alone)
        by_rule = sum(d is not None and d.real for d in tested)
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(
            f"{task:10}{METRICS[column.metric]:10}{spread:>16}{100 * by_images / len(pairs):12.0f}%"
            f"{100 * by_rule / len(pairs):12.0f}%   {noise_words(noise_of(board, column))}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/second_training"))
    parser.add_argument("--trainings", type=int, default=8)
    parser.add_argument("--task", nargs="+", default=["linear", "semisup", "finetune", "detect"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = moved_trunks(args.demo, args.out, args.trainings)
    print(
        f"{args.trainings} trainings of one trunk, weights moved by {MOVED:g}; pairs of them called"
    )
    print("different: by a test over images alone, and with the trainings' noise\n")
    print(f"{'':20}{'first seed':>16}{'images':>13}{'the board':>13}   a second training moves it")
    for task in args.task:
        report(task, train(commands(args.demo)[task], files, args.out / task))


if __name__ == "__main__":
    main()
