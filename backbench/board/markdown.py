"""The pieces that all Markdown tables are made of."""

from collections.abc import Iterable, Mapping, Sequence

from backbench.untrusted import printable

_ESCAPED = str.maketrans(
    {**{char: "\\" + char for char in "\\`*[]"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"}
)


def escaped(text: str, most: int = 400) -> str:
    """`text` on one line, with what Markdown would take for a tag, a link or emphasis escaped."""
    return printable.shown(" ".join(text.split()), most).translate(_ESCAPED)


def from_to(interval: tuple[float, float] | None) -> str:
    """An interval in percent; empty where there is none."""
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def pipe_table(heads: Mapping[str, str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a pipe table; `heads` are heading -> alignment (`---` or `---:`)."""
    lines = []
    for cells in (list(heads), list(heads.values()), *rows):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
