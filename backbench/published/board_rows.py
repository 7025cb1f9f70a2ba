"""The papers' rows as rows of a board, for `backbench leaderboard --published`."""

from backbench.board.board import PUBLISHED, Board, Cell, Row, in_order
from backbench.published import judging_rules, published
from backbench.published.judging_rules import column_of


def add_published(board: Board) -> None:
    """Add the papers' rows below the measured ones.

    A printed number shares its column with measured ones if it was measured by the same protocol.
    """
    columns = set(board.columns)
    rows: dict[str, Row] = {}
    for number in published.rows():
        if judging_rules.reason(number) in judging_rules.NO_SCORES:
            continue
        column = column_of(number)
        columns.add(column)
        if number.key not in rows:
            rows[number.key] = Row(
                checkpoint=number.key,
                name=f"{number.model} ({number.paper} Table {number.table})",
                method=number.model,
                arch=number.arch,
                epochs=number.epochs,
                source=PUBLISHED,
            )
        value = judging_rules.as_measured(number).value
        board.cells[number.key, column] = Cell(value, note=number.note)
    board.rows.extend(rows.values())
    board.columns = in_order(columns)
