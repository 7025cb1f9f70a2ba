"""`backbench leaderboard`: reads the runs, writes the files that were asked for, prints the table."""

import time
from collections import Counter

from backbench.board import export, overall
from backbench.board.board import Board, Column, collect, compare_rows, text_of
from backbench.board.overall import Overall
from backbench.errors import EXIT_FAILED, BadInput
from backbench.published import judge as gate
from backbench.published.judge import Judged
from backbench.requests.options import Outcome
from backbench.requests.runs import LeaderboardRequest
from backbench.runs.folder import RESULTS_FILE
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.untrusted import printable

ROWS = 30  # of the table on standard output
# The statistics of `analyze` in that table; the csv and the page have all fifteen
STATISTICS = ("nuclear_norm", "rankme", "ece", "nll_t")


def run(request: LeaderboardRequest) -> Outcome:
    """Return 1 if --check finds a number outside its tolerance, one not judged, or none at all."""
    start = time.perf_counter()
    board = collect(request.runs)
    if not board.rows and not board.problems:
        where = ", ".join(map(str, request.runs))
        raise BadInput(
            f"{where}: no {RESULTS_FILE} below; run an evaluation with --out there"
        )
    # Judged before the papers' rows join the board: verdicts are about measured rows.
    expected = gate.expected_keys(board, request.runs)
    judged = gate.judge(board, expected)
    unjudged = gate.not_judged(board, expected) if request.check else []
    if request.published:
        gate.add_published(board)
    for problem in board.problems:
        log.warning(printable.shown(problem, 1000))
    ranked = [
        cell for (_, column), cell in board.cells.items() if TASKS[column.task].ranked
    ]
    if unbacked := sum(not cell.backed for cell in ranked):
        log.info(
            f"{unbacked} numbers have nothing kept that they follow from: they never lead"
        )
    sets = overall.overall(board)
    answer = overall.answer(board, sets)
    _write(board, judged, sets, answer, request)
    document = export.document(board, answer, judged)
    print(printable.shown(answer, 2000))
    _print(board, sets)
    for j in judged:
        word = j.verdict_and_way
        word = word if j.within else word.replace(j.verdict, j.verdict.upper(), 1)
        interval = "" if j.ci95 is None else f" [{j.ci95[0]:.1f}, {j.ci95[1]:.1f}]"
        said = f"{word}{';' * bool(j.changed)} {j.tolerance:g} of {j.key}: {j.row.name}"
        numbers = f"{j.measured:.2f}{interval}, published {j.published:g}"
        log.info("; ".join([f"{said} {j.column.name} {numbers}", *j.notes]))
    log.debug(f"took {time.perf_counter() - start:.1f} s")
    if not request.check:
        return Outcome(document=document)
    from backbench.published import catalogue

    for one in catalogue.sources(board, judged):
        print(one.words)
    return Outcome(status=_checked(judged, unjudged), document=document)


def _checked(judged: list[Judged], unjudged: list[str]) -> int:
    """Prints the outcome of --check in one line, after what could not be judged; the exit status."""
    for reason in unjudged:
        print(f"NOT JUDGED {reason}")
    count = Counter(verdict.verdict for verdict in judged)
    line = f"{len(judged)} published numbers judged, {count['outside']} outside their tolerance"
    more = Counter({"of another trunk than was printed": count["another"]})
    more["by a changed recipe"] = count["changed"]
    more.update(
        f"not to the letter ({verdict.way})" for verdict in judged if verdict.way
    )
    more["could not be judged"] = len(unjudged)
    for what, times in more.items():
        line += f", {times} {what}" if times else ""
    print(line if judged else f"{line}: a check that judges nothing fails")
    wrong = count["outside"] or count["another"] or count["changed"]
    return EXIT_FAILED if wrong or unjudged or not judged else 0


def _write(
    board: Board,
    judged: list[Judged],
    sets: list[Overall],
    answer: str,
    request: LeaderboardRequest,
) -> None:
    """Writes every file that the command asks for; modules for other files are not imported."""
    tables = (
        (request.csv, export.write_csv, "checkpoint"),
        (request.tidy, export.write_tidy, "number"),
    )
    for file, write, each in tables:
        if file:
            write(board, file)
            log.info(f"wrote {file}: a row per {each}")
    if request.html:
        from backbench.board.page import write_page
        from backbench.board.page_figures import collect_figures
        from backbench.published import catalogue, claims

        by_source = (
            [one.words for one in catalogue.sources(board, judged)] if judged else []
        )
        write_page(
            board,
            request.html,
            pairs=compare_rows(board),
            figures=collect_figures(board, request.runs),
            answer=answer,
            sets=sets,
            judged=[verdict.on_page() for verdict in judged],
            claims=[*by_source, *claims.on_page(board, judged)],
        )
        log.info(f"wrote {request.html}: the page")
    if request.latex or request.markdown:
        from backbench.published import paper_tables

        paper_tables.write(
            board, judged, sets, latex=request.latex, markdown=request.markdown
        )
        for folder in filter(None, (request.latex, request.markdown)):
            log.info(f"wrote {folder}: the board's own table (board) and the papers'")
    if request.figures:
        from backbench.board.page_figures import write_figures

        drawn = write_figures(board, request.figures)
        for title, file in drawn:
            log.info(f"wrote {file}: {title}")
        if not drawn:
            log.info(
                f"nothing for {request.figures}: an ablation needs a recipe with one value changed,"
                " the early predictor cheap and dear scores of the same checkpoints"
            )


def _print(board: Board, sets: list[Overall]) -> None:
    """Prints a line per checkpoint, the best rank first, a column per dataset's first metric."""
    rows, labels = board.measured_rows, board.labels()
    # The first metric of each family that was measured
    columns: dict[tuple[object, ...], Column] = {}
    for column in board.measured_columns():
        c, ranked = column, TASKS[column.task].ranked  # a statistic stands for itself
        if ranked or c.metric in STATISTICS:
            family = c.family if ranked else c.metric
            what = (c.task, c.dataset, c.protocol, c.engine, c.split, family)
            columns.setdefault(what, column)
    if sets:  # those of the widest set by their rank, then the others by name
        rows = list(dict.fromkeys([*sets[0].rows, *rows]))
    width = max((len(labels[row.checkpoint]) for row in rows), default=4)
    # Names of columns are too long for a heading: a number stands there, and is explained above.
    head = " " * width
    if sets:
        print(f"[rank] over {sets[0].title}, with its 95% interval")
        head += f"{'[rank]':>12}"
    for n, column in enumerate(columns.values(), 1):
        print(f"[{n}] {column.name}")
        head += f"{f'[{n}]':>8}"
    print(head)
    for row in rows[:ROWS]:
        line = f"{labels[row.checkpoint]:<{width}}"
        if sets:
            line += f"{sets[0].rank_of(row):>12}"
        for column in columns.values():
            cell = board.cell(row, column)
            value = "" if cell is None else text_of(cell.value, ".1f", missing="-")
            line += f"{value:>8}"
        print(line)
    if len(rows) > ROWS:
        print(f"... and {len(rows) - ROWS} more")
