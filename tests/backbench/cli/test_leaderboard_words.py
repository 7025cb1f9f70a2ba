"""What `leaderboard` prints: its verdicts, the outcome of --check, and the table."""

from types import SimpleNamespace

import pytest
from support.records import a_result

from backbench.board.board import Board, Cell, Column, Row
from backbench.cli import leaderboard
from backbench.errors import BadInput
from backbench.published.judge import Judged
from backbench.records import store
from backbench.requests.runs import LeaderboardRequest

PROBE = Column("linear", "stl10", "top1", "linear-v1")


def judged(**changes):
    about = {
        "row": Row("a" * 64, "mine", "cllr", "resnet50", 100),
        "column": PROBE,
        "key": "cllr:1:x",
        "published": 56.5,
        "measured": 58.257,
        "ci95": (57.04, 59.46),
        "tolerance": 2.5,
        "hardware": "any",
    }
    return Judged(**{**about, **changes})


# Verdicts


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({}, "within 2.5", "58.26 [57.0, 59.5], published 56.5"),
        (
            {"measured": 53.0, "ci95": None, "tolerance": 3.0, "way": "fast"},
            "OUTSIDE (fast) 3",
            "53.00, published 56.5",
        ),
        (
            {"changed": ("beta", "lr"), "ci95": None},
            "CHANGED: beta, lr; 2.5",
            "58.26, published 56.5",
        ),
        (
            {"other_trunk": ("resnet18",), "by_recipe": False, "published": 56.0},
            "ANOTHER 2.5",
            "58.26 [57.0, 59.5], published 56; resnet18;"
            " its pretraining recipe is not known",
        ),
    ],
)
def test_a_verdict_is_a_line_with_both_numbers(changes, begins, ends):
    line = leaderboard._words_of(judged(**changes))
    assert line == f"{begins} of cllr:1:x: mine {PROBE.name} {ends}"


@pytest.mark.parametrize(
    ("verdicts", "status", "rest"),
    [
        ([{}], 0, ", 0 outside their tolerance"),
        (
            [{}, {"way": "fast"}, {"way": "fast"}, {"way": "short"}],
            0,
            ", 0 outside their tolerance, 2 not to the letter (fast),"
            " 1 not to the letter (short)",
        ),
        ([{}, {"measured": 50.0}], 1, ", 1 outside their tolerance"),
        (
            [{"changed": ("beta",)}],
            1,
            ", 0 outside their tolerance, 1 by a changed recipe",
        ),
        (
            2 * [{"other_trunk": ("resnet18",)}],
            1,
            ", 0 outside their tolerance, 2 of another trunk than was printed",
        ),
        ([], 1, ", 0 outside their tolerance: a check that judges nothing fails"),
    ],
)
def test_a_check_counts_its_verdicts_and_fails_by_any_but_within(
    verdicts, status, rest, capsys
):
    found = [judged(**changes) for changes in verdicts]
    assert leaderboard._checked(found, []) == status
    said = f"{len(found)} published numbers judged{rest}\n"
    assert capsys.readouterr().out == said


def test_a_check_fails_by_what_it_could_not_judge(capsys):
    assert leaderboard._checked([judged()], ["a: no recipe", "b: no row"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "NOT JUDGED a: no recipe",
        "NOT JUDGED b: no row",
        "1 published numbers judged, 0 outside their tolerance, 2 could not be judged",
    ]


# The table


def a_board(count, *columns):
    rows = []
    for number in range(count):
        rows.append(Row(f"{number:064}", f"net-{number:02}", "m", "resnet18", 1))
    return Board(rows=rows, columns=list(columns))


def test_a_table_has_one_column_of_each_family_and_the_chosen_statistics(capsys):
    columns = [
        Column("knn", "digits", "top1_k5", "knn-v1"),
        Column("knn", "digits", "top1_k20", "knn-v1"),
        Column("knn", "digits", "top1_k5", "knn-v2"),
        PROBE,
        Column("analyze", "digits", "rankme", "analyze-v1"),
        Column("analyze", "digits", "alpha", "analyze-v1"),
        Column("analyze", "digits", "nuclear_norm", "analyze-v1"),
    ]
    board = a_board(2, *columns)
    printed = Row("cllr:1:x", "printed", "cllr", "resnet50", 100, source="cllr")
    board.rows.append(printed)
    first, second, _ = board.rows
    for number, column in enumerate(columns):
        board.cells[first.checkpoint, column] = Cell(10.0 * number + 1.26)
    board.cells[second.checkpoint, PROBE] = Cell(None)
    board.cells[printed.checkpoint, PROBE] = Cell(99.0)
    leaderboard._print(board, [])
    shown = [columns[place] for place in (0, 2, 3, 4, 6)]
    assert capsys.readouterr().out.splitlines() == [
        *(f"[{number}] {column.name}" for number, column in enumerate(shown, 1)),
        "           [1]     [2]     [3]     [4]     [5]",
        "net-00     1.3    21.3    31.3    41.3    61.3",
        "net-01                       -                ",
    ]


@pytest.mark.parametrize(("count", "more"), [(30, []), (32, ["... and 2 more"])])
def test_a_table_ends_after_thirty_rows(count, more, capsys):
    leaderboard._print(a_board(count), [])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.strip() == ""
    assert lines == [*(f"net-{number:02}" for number in range(30)), *more]


def ranked(title, rows):
    """A set of columns by which these rows have their ranks."""
    places = {row: f"{place} (1-{len(rows)})" for place, row in enumerate(rows, 1)}
    return SimpleNamespace(
        title=title,
        rows=rows,
        names=[row.name for row in rows],
        rank_of=lambda row: places.get(row, ""),
    )


def test_ranked_rows_come_first_by_group_and_rank(capsys):
    board = a_board(6)
    rows = board.rows
    widest = ranked("all 9 measurements", [rows[4], rows[1]])
    narrower = ranked("detection", [rows[1], rows[4]])
    other = ranked("all 2 measurements", [rows[5], rows[2]])
    leaderboard._print(board, [widest, narrower, other])
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "[rank] over all 9 measurements among net-04 and net-01, with its 95% interval",
        "[rank] over all 2 measurements among net-05 and net-02, with its 95% interval",
        "            [rank]",
        "net-04     1 (1-2)",
        "net-01     2 (1-2)",
        "net-05     1 (1-2)",
        "net-02     2 (1-2)",
        "net-00            ",
        "net-03            ",
    ]
    # A single group need not be named
    leaderboard._print(board, [widest])
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "[rank] over all 9 measurements, with its 95% interval"


# What whoever reads the board should know


def test_numbers_with_nothing_kept_are_counted_by_their_checkpoints(tmp_path, caplog):
    caplog.set_level("INFO", "backbench")
    other = {"checkpoint": "b" * 64, "name": "other"}
    rows = [
        a_result(name="one", provenance={}),
        a_result(**other, provenance={}),
        a_result(**other, dataset="dtd", provenance={}),
        # A statistic never leads, whatever is kept
        a_result(name="one", task="analyze", metric="rankme", provenance={}),
    ]
    store.append(tmp_path / "runs", rows)
    leaderboard.run(LeaderboardRequest(runs=(tmp_path / "runs",)))
    told = [text for text in caplog.messages if "never lead" in text]
    assert told == [
        "3 numbers have nothing kept that they follow from, and never lead: those of"
        " other (2) and one (1)"
    ]


def test_a_board_of_nothing_is_refused(tmp_path):
    folders = (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        folder.mkdir()
    with pytest.raises(BadInput) as refused:
        leaderboard.run(LeaderboardRequest(runs=folders))
    assert str(refused.value) == (
        f"{folders[0]}, {folders[1]}: no results.jsonl below; run an evaluation with"
        " --out there"
    )
