"""Printed numbers outside the papers' tables: timm's csv files and public checkpoints' own pages."""

from collections.abc import Iterator
from dataclasses import dataclass

from backbench.board.board import Board, Column
from backbench.papers import judging_rules, timm_scores
from backbench.recipes import config
from backbench.reproduce import selection
from backbench.reproduce.selection import PrintedBeside
from backbench.tasks import TASKS


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


def timm(board: Board) -> PrintedSource:
    """timm's counts of right images; measured are those of a row by the model's own classifier."""
    scores = timm_scores.scores()
    measured = set()
    for cell in board.cells.values():
        for result, _ in cell.parts:
            match result.provenance:
                case {"own_geometry": {"input_size": [*_, int(size)]}, "recipe": {"rule": rule}}:
                    key = (result.name, size, result.dataset)
                    if (
                        result.metric == "top1"
                        and key in scores
                        and scores[key].printed.rule == rule
                    ):
                        measured.add(key)
    judgeable = sum(score.judgeable for score in scores.values())
    return PrintedSource("timm", len(scores), judgeable, len(measured))


def pages(board: Board) -> PrintedSource:
    """The numbers on the pages of the files in the shipped lists."""
    printed = dict.fromkeys(_on_pages())
    judgeable = [
        number
        for _, number in printed
        if number.unlike is None and TASKS[number.task].tolerance_on(number.dataset) is not None
    ]
    there = {(row.name, column) for row in board.measured_rows for column in board.columns
             if board.cell(row, column) is not None}  # fmt: skip
    measured = sum((name, _column(number)) in there for name, number in printed)
    return PrintedSource("pages", len(printed), len(judgeable), measured)


def _on_pages() -> Iterator[tuple[str, PrintedBeside]]:
    """Each number with the name of its file; a file may stand in several lists."""
    for name in config.recipe_names(selection.KIND):
        for checkpoint, about in selection.read_list(name).files.items():
            for number in about.beside:
                yield checkpoint, number


def _column(number: PrintedBeside) -> Column:
    protocol = judging_rules.protocol_name(number.protocol)
    return Column(number.task, number.dataset, number.metric, protocol)
