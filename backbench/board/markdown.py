"""board.md, the leaderboard as Markdown, and the pieces that all Markdown tables are made of."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from backbench.board.board import (
    BEST,
    ONCE,
    TIED,
    UNSETTLED,
    Board,
    Cell,
    Column,
    joined,
    standing,
    text_of,
)
from backbench.board.overall import Overall, answer
from backbench.tasks import TASKS
from backbench.untrusted import printable

BOLD = "Bold: above every other measured value by a paired test."
RING = "°: best of one training each."
UNFINISHED = "†: not ranked; the fit has not converged, or the page says why."
ITALIC = "Italic: the highest, and those that no test tells from it."

_ESCAPED = str.maketrans(
    {**{char: "\\" + char for char in "\\`*[]"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"}
)


def escaped(text: str, most: int = 400) -> str:
    """`text` on one line, with what Markdown would take for a tag, a link or emphasis escaped."""
    return printable.shown(" ".join(text.split()), most).translate(_ESCAPED)


def from_to(interval: tuple[float, float] | None) -> str:
    """An interval in percent; empty where there is none."""
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def bold(text: str, when: bool = True) -> str:
    """`text` in bold, where `when`."""
    return f"**{text}**" if when else text


def marked(text: str, mark: str | None) -> str:
    """`text` in bold where its mark is best, in italics where it is tied with the highest, with a
    ring where it is best of one training each, with a dagger where it is not ranked."""
    if mark == UNSETTLED:
        return f"{text}†"
    if mark == TIED:
        return f"*{text}*"
    return f"{text}°" if mark == ONCE else bold(text, mark == BEST)


def pipe_table(heads: Mapping[str, str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a pipe table; `heads` are heading -> alignment (`---` or `---:`)."""
    return [pipe_row(list(heads)), pipe_row(list(heads.values())), *map(pipe_row, rows)]


def pipe_row(cells: Sequence[str]) -> str:
    """One line of a pipe table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def board_page(board: Board, sets: Sequence[Overall]) -> str:
    """The answer, the ranks over each set of columns, and the main metrics of every checkpoint."""
    labels, columns = board.labels(), board.main_columns()
    lines = [escaped(answer(board, sets), 2000), ""]
    for overall in sets:
        lines += [*_ranks(overall, labels), ""]
    heads = {"checkpoint": "---"}
    for heading in headings(columns):
        heads[escaped(" ".join(heading))] = "---:"
    body = []
    for row in board.measured_rows:
        cells = [escaped(labels[row.checkpoint])]
        for column in columns:
            mark = standing(board, column).get(row.checkpoint)
            cells.append(_value_and_half_width(board.cell(row, column), mark))
        body.append(cells)
    settled = all(cell.settled for cell in board.cells.values())
    dagger = "" if settled else f" {UNFINISHED}"
    lines += [*pipe_table(heads, body), "", f"{BOLD} {ITALIC} {RING}{dagger} Columns:", ""]
    lines += [f"{n}. `{column.name}`" for n, column in enumerate(columns, 1)]
    return "\n".join(lines) + "\n"


def headings(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """Task, dataset and metric of each column, and its protocol where two have the same."""
    out: list[tuple[str, ...]] = []
    for column in columns:
        dataset = joined(":", column.dataset, column.split)
        out.append((TASKS[column.task].title, dataset, column.metric))
    how = [joined("+", column.protocol, column.engine) for column in columns]
    count = Counter(out)
    return [(*head, by) if count[head] > 1 else head for head, by in zip(out, how)]


def _ranks(overall: Overall, labels: Mapping[str, str]) -> list[str]:
    """The table of one set: rank, its interval, the mean of ranks, and the share of wins."""
    numbers = ["rank", "95% interval", "average rank", "wins %", "columns"]
    rows = []
    for row, place in zip(overall.rows, overall.standing.places, strict=True):
        low, high = place.interval
        ranks = [str(place.rank), f"{low} to {high}", text_of(place.average, ".2f")]
        name = bold(escaped(labels[row.checkpoint]), place.group == 1)
        rows.append([*ranks, f"{place.win_rate:.0f}", str(place.columns), name])
    heads = {**dict.fromkeys(numbers, "---:"), "checkpoint": "---"}
    title = f"Ranks over {overall.title}, {overall.basis}:"
    return [title, "", *pipe_table(heads, rows)]


def _value_and_half_width(cell: Cell | None, mark: str | None) -> str:
    """71.2 ±0.8; an empty cell was not run, an undefined one was and has no value."""
    if cell is None:
        return ""
    if cell.value is None:
        return "undefined"
    half = "" if cell.half_width is None else f" ±{cell.half_width:.1f}"
    return marked(f"{cell.value:.1f}", mark) + half
