"""The one writer of tables with printed numbers: LaTeX and Markdown.

    lorac_table1.tex, .md ...   the papers' tables (paper_tables.py), measured rows below printed ones
    board.tex, .md              the board's own table
    reproduction.md             the verdicts of a leaderboard
    RUNS/reproduce/<list>.md    the verdicts of a reproduction list

Only measured values are ever bold, and only if a paired test puts them above every other measured
value of their column.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from backbench.board import overall
from backbench.board.board import (
    BEST,
    ONCE,
    TIED,
    UNSETTLED,
    Board,
    Column,
    joined,
    standing,
    text_of,
)
from backbench.board.export import escaped, from_to, pipe_table
from backbench.board.overall import Overall
from backbench.published import paper_tables, published
from backbench.published.judge import (
    ANOTHER,
    MISSING,
    NO_FILE,
    OUTSIDE,
    UNLIKE,
    WITHIN,
    Judged,
    ListVerdict,
)
from backbench.published.paper_tables import Columns, PaperTable, TableLine
from backbench.published.reproduction_lists import ReproductionList
from backbench.runs import atomic
from backbench.tasks import TASKS
from backbench.untrusted import printable

# ---- the two formats

BOLD = "Bold: above every other measured value by a paired test."
ITALIC = "Italic: the highest, and those that no test tells from it."
RING = "°: best of one training each."
UNFINISHED = "†: not ranked; the fit has not converged, or the page says why."

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{char: "\\" + char for char in "&%$#_{}"},
    }
)


def _latex(text: str) -> str:
    """Return `text` on one line, with what LaTeX would take for a command escaped."""
    line = printable.shown(" ".join(text.split()), 400).translate(_LATEX)
    # After the end of a line, LaTeX would read these as an option of that line end.
    return f"{{}}{line}" if line.startswith(("[", "*")) else line


def _commands_in(sentence: str) -> Iterator[tuple[str, bool]]:
    """Return the pieces of an answer, and whether each is a command (between backticks there)."""
    pieces = printable.shown(" ".join(sentence.split()), 4000).split("`")
    if len(pieces) % 2 == 0:
        # A checkpoint's name has a backtick: nobody knows which pieces are commands
        pieces = ["'".join(pieces)]
    for number, piece in enumerate(pieces):
        yield piece, number % 2 == 1


def _latex_sentence(sentence: str) -> str:
    """Write the answer for LaTeX, which would join the two dashes before an option."""
    words = []
    for piece, is_command in _commands_in(sentence):
        line = piece.translate(_LATEX)
        if is_command:
            unjoined = line.replace("--", "-{}-")
            line = rf"\texttt{{{unjoined}}}"
        words.append(line)
    return "".join(words)


def _markdown_sentence(sentence: str) -> str:
    """Return the answer for Markdown, where a command stays as it is."""
    words = []
    for piece, is_command in _commands_in(sentence):
        if is_command:
            words.append(f"`{piece}`")
            continue
        # `escaped` strips the blanks beside a command
        before = " " if piece.startswith(" ") else ""
        after = " " if piece.endswith(" ") else ""
        words.append(f"{before}{escaped(piece, 4000)}{after}")
    return "".join(words)


class Form(NamedTuple):
    """How one of the two formats writes the cells of a table."""

    escaped: Callable[[str], str]
    marks: Mapping[str | None, str]  # of board.standing; others are written without one
    half: str  # half of a 95% interval, behind its value
    missing: str  # nothing was measured or printed
    undefined: str  # measured, without a value

    def number(self, value: float | None, mark: str | None) -> str:
        text = text_of(value, ".1f", missing=self.missing)
        return self.marks.get(mark, "{}").format(text)


LATEX = Form(
    escaped=_latex,
    marks={
        BEST: r"\textbf{{{}}}",
        TIED: r"\textit{{{}}}",
        ONCE: r"{}$^\circ$",
        UNSETTLED: r"{}$^\dagger$",
    },
    half=r" {{\scriptsize$\pm${:.1f}}}",
    missing="--",
    undefined="--",
)
MARKDOWN = Form(
    escaped=escaped,
    marks={BEST: "**{}**", TIED: "*{}*", ONCE: "{}°", UNSETTLED: "{}†"},
    half=" ±{:.1f}",
    missing="",
    undefined="undefined",
)


def _latex_table(
    *,
    comments: Sequence[str],
    caption: str,
    label: str,
    form: str,
    heads: Sequence[str],
    body: Sequence[str],
) -> str:
    """Return a booktabs table; `form` has a letter for each column, as \\begin{tabular} takes
    it."""
    lines = [
        *comments,
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{{form}}}",
        r"\toprule",
        *heads,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _legend(marks: Container[str | None]) -> str:
    """Return the meaning of each mark that a LaTeX table has."""
    meanings = {
        BEST: BOLD,
        TIED: ITALIC,
        ONCE: RING.replace("°", r"$^\circ$"),
        UNSETTLED: UNFINISHED.replace("†", r"$^\dagger$"),
    }
    return "".join(f" {words}" for mark, words in meanings.items() if mark in marks)


# ---- files


def write(
    board: Board,
    judged: Sequence[Judged],
    sets: Sequence[Overall] = (),
    *,
    latex: Path | None,
    markdown: Path | None,
) -> None:
    """Write the tables of a leaderboard into the folders `latex` and `markdown`, if given.

    A table of a paper is written once for every set of protocols that measured some of it.
    """
    for table in paper_tables.tables():
        # A table of which nothing was measured is written too, with the paper's rows alone.
        for n, columns in enumerate(paper_tables.protocol_sets(board, table) or [()]):
            # The first set has the table's own name, the others add their protocol to it.
            name = table.name
            if n > 0:
                first = next(column for column in columns if column is not None)
                name += "_" + published.slug(joined("-", first.protocol, first.engine))
            lines = paper_tables.measured_lines(board, columns)
            if latex:
                text = paper_table_to_latex(table, columns, lines)
                atomic.write_text(latex / f"{name}.tex", text)
            if markdown:
                text = paper_table_to_markdown(table, columns, lines)
                atomic.write_text(markdown / f"{name}.md", text)
    if latex:
        atomic.write_text(latex / "board.tex", board_to_latex(board, sets))
    if markdown:
        atomic.write_text(markdown / "board.md", board_page(board, sets))
        atomic.write_text(markdown / "reproduction.md", reproduction_page(judged))


# ---- the papers' tables


def paper_table_to_latex(
    table: PaperTable, columns: Columns, measured: Sequence[TableLine]
) -> str:
    """Return a booktabs table. Needs \\usepackage{booktabs}."""
    caption = rf"{_latex(table.caption)}, in \%."
    if measured:
        caption += f" Measured by {_latex(paper_tables.protocols_of(columns))}."
    caption += _legend({mark for line in measured for mark in line.marks})

    heads = []
    # Columns of one group are neighbours, so a heading spans as many columns as bear its name.
    groups = Counter(column.group for column in table.columns)
    if any(groups):
        above = []
        for group, count in groups.items():
            above.append(rf"\multicolumn{{{count}}}{{c}}{{{_latex(group)}}}")
        heads.append(" & & " + _ampersands(above))
    names = [_latex(column.heading) for column in table.columns]
    heads.append(_ampersands(["Model", "Epochs", *names]))

    width = len(table.columns)
    across = rf"\multicolumn{{{2 + width}}}{{l}}"
    place = table.where.replace(" ", ", ", 1)  # LORAC, Table 1
    body = [rf"{across}{{\emph{{Published}} ({place})}} \\"]
    for line in paper_tables.published_lines(table):
        body.append(_ampersands([*_who(line, LATEX), *_numbers(line, LATEX)]))
    body += [r"\midrule", rf"{across}{{\emph{{Measured}}}} \\"]
    for line in measured:
        body.append(_ampersands([*_who(line, LATEX), *_numbers(line, LATEX)]))
    if not measured:
        body.append(rf"{across}{{nothing measured yet}} \\")
    return _latex_table(
        comments=[f"% {table.where}; made by backbench leaderboard --latex"],
        caption=caption,
        label=table.name,
        form="ll" + "c" * width,
        heads=heads,
        body=body,
    )


def paper_table_to_markdown(
    table: PaperTable, columns: Columns, measured: Sequence[TableLine]
) -> str:
    """Return a pipe table with the same lines."""
    heads = {"Model": "---", "Epochs": "---:", "Source": "---"}
    for column in table.columns:
        heads[joined(": ", column.group, column.heading)] = "---:"
    rows = []
    for line in [*paper_tables.published_lines(table), *measured]:
        rows.append([*_who(line, MARKDOWN), line.row.source, *_numbers(line, MARKDOWN)])
    note = "Nothing measured yet."
    if measured:
        protocols = escaped(paper_tables.protocols_of(columns))
        note = f"Measured by {protocols}. {BOLD} {ITALIC} {RING}"
        if any(UNSETTLED in line.marks for line in measured):
            note += f" {UNFINISHED}"
    title = f"**{table.caption}**, in %. Layout of {table.where}."
    return "\n".join([title, "", *pipe_table(heads, rows), "", note]) + "\n"


def _who(line: TableLine, form: Form) -> list[str]:
    """Return the name and the epochs of a line."""
    epochs = text_of(line.row.epochs, "d", missing=form.missing)
    return [form.escaped(line.row.name), epochs]


def _numbers(line: TableLine, form: Form) -> list[str]:
    return [form.number(*cell) for cell in zip(line.values, line.marks, strict=True)]


# ---- the board's own table: a row for each checkpoint, a column for each main metric


def board_to_latex(board: Board, sets: Sequence[Overall] = ()) -> str:
    """Return the table with the 95% intervals' halves and the page's marks, below the answer. Needs
    \\usepackage{booktabs}."""
    columns = board.main_columns()
    heads = ["Checkpoint"]
    for heading in headings(columns):
        *words, protocol = map(_latex, heading)
        lines_of_head = r"\\".join([*words, rf"\scriptsize {protocol}"])
        heads.append(rf"\shortstack{{{lines_of_head}}}")
    comments = ["% made by backbench leaderboard --latex"]
    comments += [f"% column {n}: {column.name}" for n, column in enumerate(columns, 1)]
    used = {mark for column in columns for mark in standing(board, column).values()}
    said = _latex_sentence(overall.answer(board, sets))
    intervals = rf"{said} Measured values in \%, with half of their 95\% intervals."
    return _latex_table(
        comments=comments,
        caption=intervals + _legend(used),
        label="board",
        form="l" + "c" * len(columns),
        heads=[_ampersands(heads)],
        body=[_ampersands(cells) for cells in _board_cells(board, columns, LATEX)],
    )


def board_page(board: Board, sets: Sequence[Overall]) -> str:
    """Return the answer, the ranks over each set of columns, and the same table."""
    columns = board.main_columns()
    labels = board.labels()
    # 1. The answer, and a table of ranks for each set
    lines = [_markdown_sentence(overall.answer(board, sets)), ""]
    numbers = ["rank", "95% interval", "average rank", "wins %", "columns"]
    heads = {**dict.fromkeys(numbers, "---:"), "checkpoint": "---"}
    for of in sets:
        ranks = []
        for row, place in zip(of.rows, of.standing.places, strict=True):
            low, high = place.interval
            name = escaped(labels[row.checkpoint])
            ranks.append(
                [
                    str(place.rank),
                    f"{low} to {high}",
                    text_of(place.average, ".2f"),
                    f"{place.win_rate:.0f}",
                    str(place.columns),
                    f"**{name}**" if place.group == 1 else name,
                ]
            )
        lines += [f"Ranks over {of.title}, {of.basis}:", ""]
        lines += [*pipe_table(heads, ranks), ""]
    # 2. The values
    heads = {"checkpoint": "---"}
    for words in headings(columns):
        heads[escaped(" ".join(words))] = "---:"
    lines += [*pipe_table(heads, _board_cells(board, columns, MARKDOWN)), ""]
    # 3. The meaning of the marks and the columns' names
    settled = all(cell.settled for cell in board.cells.values())
    dagger = "" if settled else f" {UNFINISHED}"
    lines += [f"{BOLD} {ITALIC} {RING}{dagger} Columns:", ""]
    lines += [f"{n}. `{column.name}`" for n, column in enumerate(columns, 1)]
    return "\n".join(lines) + "\n"


def headings(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """Return task, dataset, metric and protocol of each column: k = 5 at 32 pixels and k = 20 at 224
    are other measurements, whatever stands beside them."""
    out: list[tuple[str, ...]] = []
    for column in columns:
        dataset = joined(":", column.dataset, column.split)
        protocol = joined("+", column.protocol, column.engine)
        out.append((TASKS[column.task].title, dataset, column.metric, protocol))
    return out


def _board_cells(
    board: Board, columns: Sequence[Column], form: Form
) -> Iterator[list[str]]:
    """Return each measured row: its name, and 71.2 ±0.8 for each column."""
    labels = board.labels()
    for row in board.measured_rows:
        cells = [form.escaped(labels[row.checkpoint])]
        for column in columns:
            cell = board.cell(row, column)
            if cell is None:
                cells.append("")
            elif cell.value is None:
                cells.append(form.undefined)
            else:
                mark = standing(board, column).get(row.checkpoint)
                text = form.number(cell.value, mark)
                if cell.half_width is not None:
                    text += form.half.format(cell.half_width)
                cells.append(text)
        yield cells


# ---- verdicts


def reproduction_page(judged: Sequence[Judged]) -> str:
    """Return every measured number that was judged against a published one, with verdict and
    hardware."""
    if not judged:
        return (
            "No checkpoint here names a published row by a protocol that was run: "
            "nothing was judged.\n"
        )
    heads = (
        "checkpoint",
        "column",
        "published row",
        "published",
        "measured",
        "95% interval",
        "tolerance",
        "verdict",
        "hardware",
    )
    rows = []
    for one in judged:
        allowed = (one.tolerance, one.tolerance)
        verdict = one.verdict_and_way
        rows.append(
            [
                escaped(one.row.name),
                escaped(one.column.name),
                escaped(one.key),
                *_compared(one.published, one.measured, one.ci95, allowed),
                verdict if one.within else f"**{verdict}**",
                escaped(one.hardware),
            ]
        )
    return "\n".join(pipe_table(dict.fromkeys(heads, "---"), rows)) + "\n"


def list_page(listed: ReproductionList, verdicts: Sequence[ListVerdict]) -> str:
    """Return every printed number of a reproduction list with its verdict, below a count of the
    verdicts."""
    count = Counter(one.verdict for one in verdicts)
    order = (WITHIN, OUTSIDE, ANOTHER, UNLIKE, MISSING, NO_FILE)
    counts = [f"{count[word]} {word}" for word in order if count[word]]
    summary = f"{len(verdicts)} printed numbers: {', '.join(counts) or 'none'}."
    heads = (
        "checkpoint",
        "column",
        "printed",
        "measured",
        "95% interval",
        "tolerance",
        "verdict",
        "printed in",
        "why",
    )
    rows = []
    for one in verdicts:
        cells = (
            one.checkpoint,
            one.column,
            *_compared(one.printed, one.measured, one.ci95, one.tolerance),
            one.verdict,
            one.source,
            one.why,
        )
        # The page is printed on a terminal, too, so nothing is escaped for Markdown.
        rows.append([printable.shown(cell, 300) for cell in cells])
    table = pipe_table(dict.fromkeys(heads, "---"), rows)
    title = f"# {listed.name}: {listed.title}"
    return "\n".join([title, "", summary, "", *table]) + "\n"


def _compared(
    printed: float,
    measured: float | None,
    ci95: tuple[float, float] | None,
    tolerance: tuple[float, float] | None,
) -> list[str]:
    """Return the cells that both tables of verdicts share: printed, measured, interval,
    tolerance."""
    allowed = ""
    if tolerance is not None:
        below, above = tolerance
        allowed = f"{above:g}" if below == above else f"-{below:g} +{above:g}"
    return [f"{printed:g}", text_of(measured, ".2f"), from_to(ci95), allowed]
