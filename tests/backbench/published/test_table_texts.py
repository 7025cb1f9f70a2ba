"""Tables of a small board and of verdicts, line by line, in Markdown and LaTeX."""

import dataclasses

import numpy as np
import pytest
from support.records import a_result

from backbench.board import overall
from backbench.board.board import (
    BEST,
    ONCE,
    TIED,
    UNSETTLED,
    Column,
    Measurement,
    Row,
    fill,
)
from backbench.board.overall import Overall
from backbench.published import tables
from backbench.published.judge import Judged, ListVerdict
from backbench.published.reproduction_lists import ReproductionList
from backbench.stats.rank_intervals import Ranking, RankPlace

HELD = {"image_contents": None, "pixels": {}}
KNN = {"task": "knn", "metric": "top1_k20", "protocol": "knn-demo-v1"}


@pytest.fixture
def board():
    """Three checkpoints, of which one has an undefined number and one has only one column."""
    rows = [
        a_result(name="a*b", checkpoint="a" * 64, value=71.25, ci95=(70.0, 71.5)),
        a_result(name="b_c", checkpoint="b" * 64, value=80.04, ci95=None),
        a_result(name="b_c", checkpoint="b" * 64, value=None, ci95=None, **KNN),
        a_result(name="d", checkpoint="d" * 64, value=60.0, ci95=(50.0, 74.0), **KNN),
    ]
    rows = [dataclasses.replace(row, provenance=HELD) for row in rows]
    found = fill(Measurement(row, None) for row in rows)
    linear, knn = found.columns
    found.standings[linear] = {"b" * 64: BEST, "a" * 64: TIED}
    found.standings[knn] = {"d" * 64: ONCE}
    return found


@pytest.fixture
def ranked(board):
    places = [
        RankPlace(1, (1, 2), 1.5, 75.4, 2, 1),
        RankPlace(2, (1, 2), None, 24.6, 1, 2),
    ]
    above = np.zeros((2, 2), bool)
    return Overall(
        name="all columns",
        columns=list(board.columns),
        rows=[board.rows[1], board.rows[0]],
        names=["b_c", "a*b"],
        title="all 2 measurements",
        basis="for these measurements on other images",
        standing=Ranking(places, "images", 2, above, True),
        met=np.ones((2, 2), bool),
        group=0,
    )


MARKS = (
    "Bold: above every other measured value by a paired test. Italic: the highest, and"
    " those that no test tells from it. °: best of one training each."
)
UNFINISHED = "†: not ranked; the fit has not converged, or the page says why."


def test_the_boards_page_has_its_ranks_values_marks_and_columns(board, ranked):
    text = tables.board_page(board, [ranked])
    first, _, *lines = text.splitlines()
    assert first == tables._markdown_sentence(overall.answer(board, [ranked]))
    assert lines == [
        "Ranks over all 2 measurements, for these measurements on other images:",
        "",
        "| rank | 95% interval | average rank | wins % | columns | checkpoint |",
        "| ---: | ---: | ---: | ---: | ---: | --- |",
        "| 1 | 1 to 2 | 1.50 | 75 | 2 | **b_c** |",
        "| 2 | 1 to 2 |  | 25 | 1 | a\\*b |",
        "",
        "| checkpoint | Linear probe digits top1 linear-demo-v1~unknown |"
        " Nearest neighbours digits top1_k20 knn-demo-v1~unknown |",
        "| --- | ---: | ---: |",
        "| a\\*b | *71.2* ±0.8 |  |",
        "| b_c | **80.0** | undefined |",
        "| d |  | 60.0° ±12.0 |",
        "",
        f"{MARKS} Columns:",
        "",
        "1. `linear/digits/top1@linear-demo-v1~unknown`",
        "2. `knn/digits/top1_k20@knn-demo-v1~unknown`",
    ]
    knn = board.columns[1]
    board.cells["d" * 64, knn].why_unsettled = "it is so"
    board.standings[knn] = {"d" * 64: UNSETTLED}
    text = tables.board_page(board, [])
    assert f"{MARKS} {UNFINISHED} Columns:" in text
    assert "| d |  | 60.0† ±12.0 |" in text and "Ranks over" not in text


def test_the_boards_latex_has_the_same_cells_and_the_marks_that_it_uses(board):
    board.standings[board.columns[1]] = {"d" * 64: UNSETTLED}
    lines = tables.board_to_latex(board).splitlines()
    caption = lines.pop(5)
    assert lines == [
        "% made by backbench leaderboard --latex",
        "% column 1: linear/digits/top1@linear-demo-v1~unknown",
        "% column 2: knn/digits/top1_k20@knn-demo-v1~unknown",
        r"\begin{table}[t]",
        r"\centering",
        r"\label{tab:board}",
        r"\begin{tabular}{lcc}",
        r"\toprule",
        r"Checkpoint & \shortstack{Linear probe\\digits\\top1\\\scriptsize"
        r" linear-demo-v1\textasciitilde{}unknown} & \shortstack{Nearest neighbours\\digits\\"
        r"top1\_k20\\\scriptsize knn-demo-v1\textasciitilde{}unknown} \\",
        r"\midrule",
        r"a*b & \textit{71.2} {\scriptsize$\pm$0.8} &  \\",
        r"b\_c & \textbf{80.0} & -- \\",
        r"d &  & 60.0$^\dagger$ {\scriptsize$\pm$12.0} \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    assert caption.startswith(r"\caption{")
    assert caption.endswith(
        r" Measured values in \%, with half of their 95\% intervals."
        " Bold: above every other measured value by a paired test."
        " Italic: the highest, and those that no test tells from it."
        r" $^\dagger$: not ranked; the fit has not converged, or the page says why.}"
    )


def test_a_sentence_keeps_its_commands_and_escapes_its_names():
    said = "a_b  and c* lead; `backbench x --seeds 3 a_b` settles it: 5%."
    assert tables._markdown_sentence(said) == (
        "a_b and c\\* lead; `backbench x --seeds 3 a_b` settles it: 5%."
    )
    assert tables._latex_sentence(said) == (
        r"a\_b and c* lead; \texttt{backbench x -{}-seeds 3 a\_b} settles it: 5\%."
    )
    # A name with a backtick: nobody knows what is a command
    odd = "x` leads; `y` settles it"
    assert tables._markdown_sentence(odd) == "x' leads; 'y' settles it"
    assert tables._latex_sentence(odd) == "x' leads; 'y' settles it"


def test_latex_takes_no_line_for_an_option():
    assert tables._latex("[a]") == "{}[a]" and tables._latex("*a") == "{}*a"
    assert tables._latex("a  [b]\n&c") == r"a [b] \&c"


def test_verdicts_of_a_leaderboard_stand_in_a_table():
    column = Column("mask_rcnn", "coco2017", "segm_AP", "v1", "detectron2", "val")
    one = Judged(
        Row("a" * 64, "mine|x", "m", "r", 1),
        column,
        "lorac:4:x",
        published=36.5,
        measured=36.123,
        ci95=(35.0, 37.456),
        tolerance=0.5,
        hardware="8 x <GPU>",
    )
    other = dataclasses.replace(
        one, measured=30.0, ci95=None, tolerance=1.25, way="fast", changed=()
    )
    assert tables.reproduction_page([one, other]).splitlines() == [
        "| checkpoint | column | published row | published | measured | 95% interval |"
        " tolerance | verdict | hardware |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| mine\\|x | mask_rcnn/coco2017:val/segm_AP@v1+detectron2 | lorac:4:x | 36.5 |"
        " 36.12 | 35.00 to 37.46 | 0.5 | within | 8 x &lt;GPU&gt; |",
        "| mine\\|x | mask_rcnn/coco2017:val/segm_AP@v1+detectron2 | lorac:4:x | 36.5 |"
        " 30.00 |  | 1.25 | **outside (fast)** | 8 x &lt;GPU&gt; |",
    ]
    assert tables.reproduction_page([]) == (
        "No checkpoint here names a published row by a protocol that was run: nothing was"
        " judged.\n"
    )


def test_verdicts_of_a_list_are_counted_above_their_table():
    listed = ReproductionList(
        name="mine", title="Some of them", estimate="none", checkpoints={"x": {}}
    )
    within = ListVerdict(
        checkpoint="x",
        column="linear/a/top1@v1",
        printed=70.0,
        source="page",
        verdict="within",
        measured=70.5,
        ci95=(70.0, 71.0),
        tolerance=(1.0, 1.0),
    )
    missing = dataclasses.replace(
        within, verdict="not measured", measured=None, ci95=None, tolerance=(0.5, 2.0)
    )
    unlike = dataclasses.replace(
        within, verdict="unlike", tolerance=None, why="another crop\x1b"
    )
    found = tables.list_page(listed, [missing, within, unlike, within]).splitlines()
    assert found == [
        "# mine: Some of them",
        "",
        "4 printed numbers: 2 within, 1 unlike, 1 not measured.",
        "",
        "| checkpoint | column | printed | measured | 95% interval | tolerance | verdict |"
        " printed in | why |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| x | linear/a/top1@v1 | 70 |  |  | -0.5 +2 | not measured | page |  |",
        "| x | linear/a/top1@v1 | 70 | 70.50 | 70.00 to 71.00 | 1 | within | page |  |",
        "| x | linear/a/top1@v1 | 70 | 70.50 | 70.00 to 71.00 |  | unlike | page |"
        " another crop\\x1b |",
        "| x | linear/a/top1@v1 | 70 | 70.50 | 70.00 to 71.00 | 1 | within | page |  |",
    ]
    assert tables.list_page(listed, []).splitlines()[2] == "0 printed numbers: none."
