"""`backbench leaderboard`: read the runs, write the files that were asked for, print the table."""

import time
from collections import Counter

from backbench.board import export, overall
from backbench.board.board import Board, Column, collect, compare_rows, text_of
from backbench.board.overall import Overall
from backbench.board.verdict import some
from backbench.errors import EXIT_FAILED, BadInput
from backbench.published.board_rows import add_published
from backbench.published.expected_rows import expected_keys
from backbench.published.judge import Judged, judge, not_judged
from backbench.requests.options import Outcome
from backbench.requests.runs import LeaderboardRequest
from backbench.runs.folder import RESULTS_FILE
from backbench.runs.garbage import many_objects
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.untrusted import printable

ROWS = 30  # of the table on standard output
# The statistics of `analyze` in that table; the csv and the page have all fifteen
STATISTICS = ("nuclear_norm", "rankme", "ece", "nll_t")


@many_objects()
def run(request: LeaderboardRequest) -> Outcome:
    """Return 1 if --check finds a number outside its tolerance, one not judged, or none at all."""
    start = time.perf_counter()
    # 1. The board, and the verdicts on published numbers: these are about measured rows, so they
    #    are made before the papers' rows join the board.
    board = collect(request.runs)
    if not board.rows and not board.problems:
        where = ", ".join(map(str, request.runs))
        raise BadInput(
            f"{where}: no {RESULTS_FILE} below; run an evaluation with --out there"
        )
    expected = expected_keys(board, request.runs)
    judged = judge(board, expected)
    unjudged = not_judged(board, expected) if request.check else []
    if request.published:
        add_published(board)
    # 2. What whoever reads the board should know.
    for problem in board.problems:
        log.warning(printable.shown(problem, 1000))
    labels = board.labels()
    unbacked: Counter[str] = Counter()
    for (checkpoint, column), cell in board.cells.items():
        if TASKS[column.task].ranked and not cell.backed:
            unbacked[labels[checkpoint]] += 1
    if unbacked:
        whose = some([f"{name} ({count})" for name, count in unbacked.most_common()])
        log.info(
            f"{unbacked.total()} numbers have nothing kept that they follow from, and never"
            f" lead: those of {printable.shown(whose, 1000)}"
        )
    # 3. The files, the table, the verdicts.
    sets = overall.overall(board)
    sentences = overall.sentences(board, sets)
    answer = " ".join(sentences)
    _write(board, judged, sets, sentences, request)
    document = export.document(board, answer, judged)
    print(printable.shown(answer, 4000))
    _print(board, sets)
    for verdict in judged:
        log.info(_words_of(verdict))
    log.debug(f"took {time.perf_counter() - start:.1f} s")
    if not request.check:
        return Outcome(document=document)
    from backbench.published import catalogue

    for one in catalogue.sources(board, judged):
        print(one.words)
    return Outcome(status=_checked(judged, unjudged), document=document)


def _words_of(judged: Judged) -> str:
    """Return a verdict in one line; it is in capitals where a number is not within its
    tolerance."""
    word = judged.verdict_and_way
    if not judged.within:
        word = word.replace(judged.verdict, judged.verdict.upper(), 1)
    if judged.changed:
        word += ";"
    measured = f"{judged.measured:.2f}"
    if judged.ci95 is not None:
        low, high = judged.ci95
        measured += f" [{low:.1f}, {high:.1f}]"
    said = (
        f"{word} {judged.tolerance:g} of {judged.key}: {judged.row.name}"
        f" {judged.column.name} {measured}, published {judged.published:g}"
    )
    return "; ".join([said, *judged.notes])


def _checked(judged: list[Judged], unjudged: list[str]) -> int:
    """Print the outcome of --check in one line, after what could not be judged; the exit status."""
    for reason in unjudged:
        print(f"NOT JUDGED {reason}")
    count = Counter(verdict.verdict for verdict in judged)
    line = f"{len(judged)} published numbers judged, {count['outside']} outside their tolerance"
    more = Counter(
        {
            "of another trunk than was printed": count["another"],
            "by a changed recipe": count["changed"],
        }
    )
    more.update(
        f"not to the letter ({verdict.way})" for verdict in judged if verdict.way
    )
    more["could not be judged"] = len(unjudged)
    for what, times in more.items():
        if times:
            line += f", {times} {what}"
    if not judged:
        line += ": a check that judges nothing fails"
    print(line)
    wrong = count["outside"] or count["another"] or count["changed"]
    failed = wrong or unjudged or not judged
    return EXIT_FAILED if failed else 0


def _write(
    board: Board,
    judged: list[Judged],
    sets: list[Overall],
    sentences: list[str],
    request: LeaderboardRequest,
) -> None:
    """Write every file that the command asks for; modules for other files are not imported."""
    if request.csv:
        export.write_csv(board, request.csv)
        log.info(f"wrote {request.csv}: a row per checkpoint")
    if request.tidy:
        export.write_tidy(board, request.tidy)
        log.info(f"wrote {request.tidy}: a row per number")
    if request.html:
        from backbench.board.page import write_page
        from backbench.board.page_figures import collect_figures
        from backbench.published import catalogue, claims

        by_source = []
        if judged:
            by_source = [one.words for one in catalogue.sources(board, judged)]
        write_page(
            board,
            request.html,
            pairs=compare_rows(board),
            figures=collect_figures(board, request.runs),
            answer=sentences,
            sets=sets,
            judged=[verdict.on_page() for verdict in judged],
            claims=[*by_source, *claims.on_page(board, judged)],
        )
        log.info(f"wrote {request.html}: the page")
    if request.latex or request.markdown:
        from backbench.published import tables

        tables.write(
            board, judged, sets, latex=request.latex, markdown=request.markdown
        )
        for folder in (request.latex, request.markdown):
            if folder:
                log.info(
                    f"wrote {folder}: the board's own table (board) and the papers'"
                )
    if request.figures:
        from backbench.board import ablation

        drawn = ablation.write(board, request.figures)
        for title, file in drawn:
            log.info(f"wrote {file}: {title}")
        if not drawn:
            log.info(
                f"nothing for {request.figures}:"
                " an ablation needs a recipe with one value changed"
            )


def _printed_columns(board: Board) -> list[Column]:
    """Return the first metric of each family that was measured, and the chosen statistics of
    features."""
    columns: dict[tuple[object, ...], Column] = {}
    for c in board.measured_columns():
        if TASKS[c.task].ranked:
            family = c.family
        elif c.metric in STATISTICS:
            family = c.metric  # a statistic stands for itself
        else:
            continue
        what = (c.task, c.dataset, c.protocol, c.engine, c.split, family)
        columns.setdefault(what, c)
    return list(columns.values())


def _print(board: Board, sets: list[Overall]) -> None:
    """Print a line per checkpoint, the best rank first, a column per dataset's first metric."""
    labels = board.labels()
    columns = _printed_columns(board)
    rows = board.measured_rows
    ranked = overall.first_of_groups(sets)
    # The rows of each group come by their rank over its widest set, then the others by name.
    by_rank = [row for of in ranked for row in of.rows]
    rows = list(dict.fromkeys([*by_rank, *rows]))
    width = max((len(labels[row.checkpoint]) for row in rows), default=4)
    # Names of columns are too long for a heading: a number stands there, and is explained above.
    head = " " * width
    for of in ranked:
        among = ""
        if len(ranked) > 1:
            among = f" among {some(of.names)}"
        print(f"[rank] over {of.title}{among}, with its 95% interval")
    if ranked:
        head += f"{'[rank]':>12}"
    for n, column in enumerate(columns, 1):
        print(f"[{n}] {column.name}")
        head += f"[{n}]".rjust(8)
    print(head)
    for row in rows[:ROWS]:
        line = f"{labels[row.checkpoint]:<{width}}"
        if ranked:
            # A row is in one group at most
            line += f"{''.join(of.rank_of(row) for of in ranked):>12}"
        for column in columns:
            cell = board.cell(row, column)
            value = "" if cell is None else text_of(cell.value, ".1f", missing="-")
            line += f"{value:>8}"
        print(line)
    if len(rows) > ROWS:
        print(f"... and {len(rows) - ROWS} more")
