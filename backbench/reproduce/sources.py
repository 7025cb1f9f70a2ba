"""Printed numbers outside the papers' tables: csv files of timm and of the ImageNet testbed, and
public checkpoints' own pages."""

from dataclasses import dataclass

from backbench.board.board import Board
from backbench.papers import timm_scores
from backbench.recipes import config
from backbench.reproduce import selection
from backbench.reproduce.selection import PrintedBeside


@dataclass(frozen=True)
class PrintedSource:
    """One source of printed numbers: how many there are, can be judged, and are measured."""

    name: str
    printed: int
    judgeable: int
    measured: int

    @property
    def words(self) -> str:
        """timm: 9,336 printed, 9,000 judgeable, 2 measured."""
        return f"{self.name}: {self.printed:,} printed, {self.judgeable:,} judgeable, {self.measured:,} measured"


def own_heads(board: Board) -> list[PrintedSource]:
    """The counts of right images; measured are those of a row by the model's own classifier."""
    measured = set()
    for cell in board.cells.values():
        for result, _ in cell.parts:
            match result.provenance:
                case {
                    "own_geometry": {"input_size": [*_, int(size)]},
                    "recipe": {"rule": str(rule)},
                }:
                    if result.metric == "top1":
                        measured.add((result.name, size, result.dataset, rule))
    return [
        PrintedSource(
            name,
            len(scores),
            sum(not score.unlike for score in scores.values()),
            sum((*key, score.printed.rule) in measured for key, score in scores.items()),
        )
        for name, scores in (("timm", timm_scores.scores()), ("testbed", timm_scores.testbed()))
    ]


def pages(board: Board) -> PrintedSource:
    """The numbers on the pages of the files in the shipped lists."""
    # With the name of its file, once: a file may stand in several lists
    printed: dict[tuple[str, PrintedBeside], None] = {}
    for name in config.recipe_names(selection.KIND):
        for checkpoint, about in selection.read_list(name).files.items():
            printed |= dict.fromkeys((checkpoint, number) for number in about.beside)
    judgeable = [number for _, number in printed if number.allowed is not None]
    there = {(row.name, column) for row in board.measured_rows for column in board.columns
             if board.cell(row, column) is not None}  # fmt: skip
    measured = sum((name, number.column) in there for name, number in printed)
    return PrintedSource("pages", len(printed), len(judgeable), measured)
