"""`backbench leaderboard`: reads the runs, writes what was asked for, prints the table."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from backbench.board import export, overall
from backbench.board.board import Board, Column, Row, add_published, collect, text_of
from backbench.board.judge import Judged, expected_keys, judge, not_judged, not_measured
from backbench.board.overall import Overall
from backbench.errors import EXIT_FAILED, BadInput
from backbench.runs.folder import RESULTS_FILE
from backbench.runs.terminal import log
from backbench.untrusted import printable

ROWS = 30  # of the table on standard output
# Of a space's fifteen; the csv and the page have the others
STATISTICS = (
    "nuclear_norm",
    "rankme",
)


def run(args: argparse.Namespace) -> int:
    """The verb `leaderboard`. Exit status 1 where --check finds a number outside its
    tolerance, one that cannot be judged, or none at all."""
    start = time.perf_counter()
    board = collect(args.runs)
    if not board.rows and not board.problems:
        where = ", ".join(map(str, args.runs))
        raise BadInput(f"{where}: no {RESULTS_FILE} below; run an evaluation with --out there")
    # Judged before the papers' rows join the board: they are read from where they are kept.
    expected = expected_keys(board, args.runs)
    judged = judge(board, expected)
    unjudged = not_judged(board, expected) if args.check else []
    if args.published:
        add_published(board)
    for problem in board.problems:
        log.warning(printable.shown(problem, 1000))
    sets = overall.overall(board)
    said = overall.answer(board, sets)
    _write(board, judged, sets, args)
    print(printable.shown(said, 2000))
    _print(board, sets)
    for verdict in judged:
        log.info(_said(verdict))
    log.debug(f"took {time.perf_counter() - start:.1f} s")
    if not args.check:
        return 0
    for line in not_measured(board, expected):
        print(f"NOT MEASURED {line}")
    return _checked(judged, unjudged)


def _checked(judged: list[Judged], unjudged: list[str]) -> int:
    """The verdict of --check in one line, after what could not be judged."""
    for line in unjudged:
        print(f"NOT JUDGED {line}")
    outside = sum(verdict.verdict == "outside" for verdict in judged)
    others = sum(verdict.verdict == "another" for verdict in judged)
    said = f"{len(judged)} published numbers judged, {outside} outside their tolerance"
    if others:
        said += f", {others} of another trunk than was printed"
    for way, count in Counter(verdict.way for verdict in judged if verdict.way).items():
        said += f", {count} not to the letter ({way})"
    if unjudged:
        said += f", {len(unjudged)} could not be judged"
    if not judged:
        said += ": a check that judges nothing fails"
    print(said)
    return EXIT_FAILED if outside or others or unjudged or not judged else 0


def _write(
    board: Board, judged: list[Judged], sets: list[Overall], args: argparse.Namespace
) -> None:
    """Every file that the command asks for; what it does not ask for is not imported."""
    if args.csv:
        export.write_csv(board, args.csv)
        log.info(f"wrote {args.csv}: a row per checkpoint")
    if args.tidy:
        export.write_tidy(board, args.tidy)
        log.info(f"wrote {args.tidy}: a row per number")
    if args.html:
        from backbench.board.page import write_page

        write_page(board, args.html, runs=args.runs, judged=judged, sets=sets)
        log.info(f"wrote {args.html}: the page")
    if args.latex or args.markdown:
        from backbench.board import latex_tables

        latex_tables.write(board, judged, sets, latex=args.latex, markdown=args.markdown)
        for folder in (args.latex, args.markdown):
            if folder:
                log.info(f"wrote {folder}: the papers' tables")
    if args.figures:
        from backbench.board import figures

        drawn = figures.write(board, args.figures)
        for title, file in drawn:
            log.info(f"wrote {file}: {title}")
        if not drawn:
            log.info(
                f"nothing for {args.figures}: an ablation needs a recipe with one value changed,"
                " the early predictor cheap and dear scores of the same checkpoints"
            )


def _said(verdict: Judged) -> str:
    word = verdict.said
    if not verdict.within:
        word = word.replace(verdict.verdict, verdict.verdict.upper(), 1)
    interval = ""
    if verdict.ci95 is not None:
        interval = f" [{verdict.ci95[0]:.1f}, {verdict.ci95[1]:.1f}]"
    return (
        f"{word} {verdict.tolerance:g} of {verdict.key}: {verdict.row.name} {verdict.column.name} "
        f"{verdict.measured:.2f}{interval}, published {verdict.published:g}"
        + "".join(f"; {other}" for other in verdict.others)
    )


def _print(board: Board, sets: list[Overall]) -> None:
    """The table on standard output: a line per checkpoint, the best rank first, a column per
    dataset's first metric."""
    rows, columns, labels = _ordered(board, sets), _shown(board), board.labels()
    wide = max((len(labels[row.checkpoint]) for row in rows), default=4)
    # Names of columns are too long for a heading: a number stands there, and for what, above.
    head = " " * wide
    if sets:
        print(f"[rank] over {sets[0].title}, with its 95% interval")
        head += f"{'[rank]':>12}"
    for n, column in enumerate(columns, 1):
        print(f"[{n}] {column.name}")
        head += f"{f'[{n}]':>8}"
    print(head)
    for row in rows[:ROWS]:
        line = f"{labels[row.checkpoint]:<{wide}}"
        if sets:
            line += f"{sets[0].rank_of(row):>12}"
        for column in columns:
            cell = board.cell(row, column)
            value = "" if cell is None else text_of(cell.value, ".1f", missing="-")
            line += f"{value:>8}"
        print(line)
    if len(rows) > ROWS:
        print(f"... and {len(rows) - ROWS} more")


def _ordered(board: Board, sets: list[Overall]) -> list[Row]:
    """The measured rows, those of the widest set by their rank, then the others by name."""
    if not sets:
        return board.measured_rows
    ranked = {row.checkpoint for row in sets[0].rows}
    return [*sets[0].rows, *(r for r in board.measured_rows if r.checkpoint not in ranked)]


def _shown(board: Board) -> list[Column]:
    """The columns of the printed table: the first metric of each family that was measured."""
    shown: dict[tuple[object, ...], Column] = {}
    for column in board.measured_columns():
        family = column.family
        if column.task == "analyze":  # its statistics stand each for itself
            if column.metric not in STATISTICS:
                continue
            family = column.metric
        what = (column.task, column.dataset, column.protocol, column.engine, column.split, family)
        shown.setdefault(what, column)
    return list(shown.values())
