"""Who leads: in one sentence on the terminal, in Markdown and on the page; and of any CSV."""

import csv

import numpy as np
import pytest
from scipy.optimize import fsolve
from scipy.special import expit
from support import boards, small_boards

from backbench.board import rank_csv
from backbench.board.board import collect
from backbench.board.overall import answer, column_sets, overall
from backbench.cli import program
from backbench.errors import BadInput
from backbench.requests.runs import RankRequest
from backbench.stats import rank_intervals


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("board")
    boards.synthetic(root, ["random", "moco", "lorac"], boards.PAPER, gap=6, images=300)
    return root


def test_two_sentences_say_who_leads_and_where(runs, tmp_path, capsys):
    where = ["--latex", str(tmp_path), "--markdown", str(tmp_path)]
    assert program.main(["leaderboard", str(runs), *where, "-q"]) == 0
    out = capsys.readouterr().out
    said = out.splitlines()[0]
    alone = (
        "lorac leads alone over all 18 measurements: rank 1 of 3 with 95% confidence"
    )
    assert said.startswith(alone)
    assert (
        "LORAC's twelve too" in said and "over 2 of 3 measurements of detection" in said
    )
    assert said.count(".") == 2 and said.endswith(".")
    assert "[rank] over all 18 measurements" in out
    rows = [line.split() for line in out.splitlines()[-3:]]
    ranked = [(row[0], row[1], row[2]) for row in rows]
    assert ranked == [
        ("lorac", "1", "(1)"),
        ("moco", "2", "(2)"),
        ("random", "3", "(3)"),
    ]
    text = (tmp_path / "board.md").read_text()
    tex = (tmp_path / "board.tex").read_text()
    assert text.splitlines()[0] == said
    assert "| 1 | 1 to 1 | 1.00 |" in text and "**lorac** |" in text
    board = collect([runs])
    column = board.main_columns()[0]
    (cell,) = (board.cell(row, column) for row in board.rows if row.name == "lorac")
    of_md = next(line for line in text.splitlines() if line.startswith("| lorac |"))
    of_tex = next(line for line in tex.splitlines() if line.startswith("lorac &"))
    assert of_md.count("|") - 2 == of_tex.count("&") == len(board.main_columns()) == 19
    assert f"{cell.value:.1f}" in of_md and f"±{cell.half_width:.1f}" in of_md
    assert f"{cell.value:.1f}" in of_tex and rf"$\pm${cell.half_width:.1f}" in of_tex
    assert f"% column 1: {column.name}\n" in tex
    assert ("Bold: above every other" in tex) == ("textbf" in of_tex)


def test_equals_are_said_to_be(tmp_path):
    boards.synthetic(
        tmp_path, ["one", "two"], boards.DEMO[:4], gap=0, images=200, seeds=3
    )
    board = collect([tmp_path])
    sets = overall(board)
    assert [of.name for of in sets] == ["all columns"]
    assert answer(board, sets) == (
        "No clear winner: one and two cannot be told apart over all 4 measurements."
        " None is best on any single measurement by a paired test."
    )
    assert sets[0].standing.over == "images" and sets[0].standing.tested


def test_nobody_leads_by_a_few_images(tmp_path, monkeypatch):
    """Of nine test images one trunk gets six right, and the other three of those."""
    monkeypatch.setattr(small_boards, "IMAGES", 9)
    knn = boards.DEMO[1]
    board = small_boards.board_of(
        tmp_path, {"a": {knn: 100 * 6 / 9}, "b": {knn: 100 * 3 / 9}}
    )
    (of,) = overall(board)
    assert of.standing.tested and not of.is_decided
    assert answer(board, [of]).startswith("No clear winner: a and b cannot be told")


def test_sets_have_one_main_column_for_each_setting(runs, tmp_path):
    """Another protocol has fewer numbers; one of the twelve was measured on another list, too."""
    others = [(*boards.PAPER[2][:3], "linear-other-v1", None), boards.PAPER[3]]
    boards.synthetic(tmp_path, ["moco", "lorac"], others, images=200)
    sets = column_sets(collect([runs, tmp_path]))
    assert list(sets) == ["all columns", "LORAC's twelve", "detection"]
    assert [c.metric for c in sets["detection"]] == [
        "bbox_AP",
        "segm_AP",
        "keypoints_AP",
    ]
    of_twelve = {(c.protocol, c.split) for c in sets["LORAC's twelve"]}
    assert (
        of_twelve == {("linear-lorac-v1", None)} and len(sets["LORAC's twelve"]) == 12
    )
    assert not [c for c in sets["all columns"] if c.metric in ("top5", "average")]


def test_a_single_measurement_of_detection_is_no_set_of_its_own(tmp_path):
    boards.synthetic(
        tmp_path, ["one", "two"], [*boards.DEMO[:2], boards.DEMO[5]], images=50
    )
    board = collect([tmp_path])
    assert "bbox_AP" in [column.metric for column in board.main_columns()]
    assert list(column_sets(board)) == ["all columns"]


def test_one_checkpoint_or_none_in_common(tmp_path):
    boards.synthetic(tmp_path / "a", ["one"], boards.DEMO[:1], images=50)
    board = collect([tmp_path])
    assert "alone" in answer(board, overall(board))
    boards.synthetic(tmp_path / "b", ["two"], boards.DEMO[1:2], images=50)
    board = collect([tmp_path])
    assert "No two checkpoints share a measurement" in answer(board, overall(board))


def test_a_csv_of_somebody_else(tmp_path, capsys):
    file = tmp_path / "x.csv"
    out = tmp_path / "ranks.csv"
    lines = [
        "model,size,a,b,c,d,e,f,g,loss",
        "good,1M,90,80 ± 0.2,70%,60,50,40,30,1",
        "equal,2M,90,80,70,60,50,40,30,1",
        "bad,3M,20,19,18,-,18.5,20,19.2,9",
    ]
    file.write_text("\n".join(lines) + "\n")
    args = ["rank", str(file), "--lower", "loss", "--csv", str(out), "-q"]
    assert program.main(args) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "equal and good lead the 3 over all 8 columns and cannot be told apart,"
        " with 95% confidence for other columns like these 8."
    )
    with out.open(newline="") as found:
        rows = {row["name"]: row for row in csv.DictReader(found)}
    assert rows["good"]["rank"] == rows["equal"]["rank"] == "1", (
        "exact ties share a rank"
    )
    bad = rows["bad"]
    assert (bad["rank_low"], bad["rank_high"], bad["columns"]) == ("3", "3", "7")


def test_our_own_csv_is_ranked_by_main_columns(runs, tmp_path, capsys):
    file = tmp_path / "l.csv"
    assert (
        program.main(
            ["leaderboard", str(runs), "--csv", str(file), "--published", "-q"]
        )
        == 0
    )
    capsys.readouterr()
    assert program.main(["rank", str(file), "-q"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("lorac leads alone over all 18 columns: rank 1 of 3")
    assert "for other datasets like these 14" in said[0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("x,1,\ny,,2\n", "No two rows share a column: nothing here can be compared."),
        ("x,1,3\ny,2,2\n", "No clear winner: x and y cannot be told apart over all 2"),
    ],
)
def test_a_csv_that_tells_nothing_apart_says_so(tmp_path, capsys, lines, said):
    file = tmp_path / "table.csv"
    file.write_text(f"name,a,b\n{lines}")
    assert program.main(["rank", str(file), "-q"]) == 0
    assert capsys.readouterr().out.startswith(said)


def test_rows_of_a_csv_without_a_common_column_are_ranked_apart(tmp_path, capsys):
    file = tmp_path / "x.csv"
    columns = "abcdefgh"
    lines = [f"name,{','.join(columns)},alone"]
    lines += [
        "good" + ",90" * 8 + ",",
        "bad" + ",10" * 8 + ",",
        "other" + "," * 8 + ",50",
    ]
    file.write_text("\n".join(lines) + "\n")
    out = tmp_path / "ranks.csv"
    assert program.main(["rank", str(file), "--csv", str(out), "-q"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said == (
        "good leads alone over 8 of 9 columns: rank 1 of 2 with 95% confidence, for other"
        " columns like these 8. Never measured together: {good, bad} and other; a number of"
        " each in one column connects them."
    )
    with out.open(newline="") as found:
        parts = {
            row["name"]: (row["part"], row["rank"]) for row in csv.DictReader(found)
        }
    assert parts == {"good": ("1", "1"), "bad": ("1", "2"), "other": ("2", "1")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,a\nx,1\n", "two rows at least"),
        ("name,a\nx,1\ny,2,3\n", "3 fields, the heading has 2"),
        ("name,a,a\nx,1,2\ny,2,3\n", "two columns are called 'a'"),
        ("name,a\nx,one\ny,two\n", "no column of numbers"),
        ("a,b\n1,2\n3,4\n", "no column of names"),
        ("name,a\nx,1\ny,2\nz,?!\n", "'?!' in column 'a' is no number"),
        ("name,a\nx,1\ny,1e999\n", "is no number"),
        (
            "name,linear/a/top1@x\nx,250\ny,50\n",
            "250' in column 'linear/a/top1@x' is no percentage",
        ),
        (
            "name,linear/a/top1@x\nx,50\ny,-5\n",
            "-5' in column 'linear/a/top1@x' is no percentage",
        ),
        (
            "name,cost,calibration/a/ece@x,analyze/a/rankme@x\nx,1,2,3\ny,2,3,4\n",
            "no column of numbers",
        ),
        (
            "name,source,a\n\nx,published,1\ny,measured,2\nz,measured,1e999\n",
            "x.csv:5: ",
        ),
    ],
)
def test_what_cannot_be_ranked_is_said(tmp_path, text, said):
    file = tmp_path / "x.csv"
    file.write_text(text)
    with pytest.raises(BadInput, match=said.replace("?", r"\?")) as caught:
        rank_csv.read(file)
    assert "\n" not in str(caught.value)


def test_what_a_folder_of_runs_has_no_use_for_is_refused(tmp_path):
    with pytest.raises(BadInput, match="--name and --lower are for a CSV"):
        program.main(["--debug", "rank", str(tmp_path), "--lower", "loss"])


def test_very_many_are_not_ranked(tmp_path, capsys, monkeypatch):
    """All pairs are compared: a hundred thousand rows would fill any memory."""
    file = tmp_path / "x.csv"
    lines = [f"m{n},{n}" for n in range(rank_intervals.MOST_ROWS + 1)]
    file.write_text("\n".join(["name,a", *lines]))
    assert program.main(["rank", str(file)]) == 2
    most = rank_intervals.MOST_ROWS
    assert f"{most + 1} rows; at most {most}" in capsys.readouterr().err
    boards.synthetic(tmp_path / "runs", ["one", "two"], boards.DEMO[:1], images=50)
    monkeypatch.setattr(rank_intervals, "MOST_ROWS", 1)
    board = collect([tmp_path / "runs"])
    assert overall(board) == []
    assert answer(board, []) == "2 checkpoints are too many to rank: at most 1 are."


def test_a_column_that_is_half_numbers_is_named(tmp_path, caplog):
    caplog.set_level("WARNING", logger="backbench")
    file = tmp_path / "odd.csv"
    file.write_text("name,a,b\nx,1,2\ny,3,zwei\n")
    assert rank_csv.read(file).columns == ["a"]
    assert "column 'b' is not ranked: 'zwei' is no number" in caplog.text
    with pytest.raises(BadInput, match=r"nothere\.csv: no such file$"):
        rank_csv.read(tmp_path / "nothere.csv")


# ---- a CSV, field by field


def csv_of(tmp_path, *lines):
    file = tmp_path / "table.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_ranking_is_printed_group_by_group(tmp_path, capsys):
    file = csv_of(
        tmp_path,
        "name,a,b,c,d,e,f,alone",
        "bad,1,2,3,4,5,6,",
        "good,2,3,4,5,6,7,",
        "zebra,,,,,,,3",
        "even,2,3,4,5,6,7,",
    )
    outcome = rank_csv.run(RankRequest(file=file))

    # Each wins and loses as the model expects: six ties of equals, six wins over the last, and a tie
    # with the imagined row of strength 1
    def unbalanced(log_strengths):
        high, low = log_strengths
        of_high = 6 * 0.5 + 6 * expit(high - low) + expit(high) - 9.5
        return of_high, 12 * expit(low - high) + expit(low) - 0.5

    high, low = fsolve(unbalanced, (1.0, -1.0))
    wins = 50 * (0.5 + expit(high - low))
    losses = 100 * expit(low - high)
    said = (
        "even and good lead the 3 over 6 of 7 columns and cannot be told apart, with 95%"
        " confidence for other columns like these 6. Never measured together: {even, good,"
        " bad} and zebra; a number of each in one column connects them."
    )
    head = "  rank       95%  average  wins %  columns  name"
    assert capsys.readouterr().out.splitlines() == [
        said,
        head,
        f"     1       1-2     1.50    {wins:.1f}        6  even",
        f"     1       1-2     1.50    {wins:.1f}        6  good",
        f"     3       3-3     3.00     {losses:.1f}        6  bad",
        head,
        "     1       1-1     1.00     0.0        1  zebra",
    ]
    assert outcome.document["answer"] == said
    assert outcome.document["ranks"][2:] == [
        {
            "rank": 3,
            "rank_low": 3,
            "rank_high": 3,
            "average_rank": "3.00",
            "win_rate": f"{losses:.1f}",
            "columns": 6,
            "group": 2,
            "part": 1,
            "name": "bad",
        },
        {
            "rank": 1,
            "rank_low": 1,
            "rank_high": 1,
            "average_rank": "1.00",
            "win_rate": "0.0",
            "columns": 1,
            "group": 1,
            "part": 2,
            "name": "zebra",
        },
    ]


def test_fifty_rows_are_printed_and_the_others_counted(tmp_path, capsys, monkeypatch):
    file = csv_of(tmp_path, "name,a", *(f"m{n:02},{n}" for n in range(53)))
    rank_csv.run(RankRequest(file=file, csv=tmp_path / "out" / "ranks.csv"))
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + 1 + 50 + 1
    assert shown[2].endswith("  m52") and shown[-2].endswith("  m03")
    assert shown[-1] == "... and 3 more; --csv F writes all"
    written = (tmp_path / "out" / "ranks.csv").read_text().splitlines()
    assert written[0] == ",".join(rank_csv.HEAD) and len(written) == 54
    monkeypatch.setattr(rank_csv, "SHOWN", 53)
    rank_csv.run(RankRequest(file=file))
    assert capsys.readouterr().out.splitlines()[-1].endswith("  m00")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["x,1", "y,2"],
            "No clear winner: y and x cannot be told apart over the one column; that takes 6"
            " columns at least, of as many datasets.",
        ),
        (
            ["no aug,9,9,9,9,9,9", "y,1,1,1,1,1,1"],
            "no aug leads alone over all 6 columns: rank 1 of 2 with 95% confidence, for"
            " other columns like these 6.",
        ),
        (
            [
                f"{name}{',' * n}{n}{',' * (6 - n)}"
                for n, name in enumerate("abcdef", 1)
            ],
            "No two rows share a column: nothing here can be compared. Never measured"
            " together: a, b, c, d and 2 other groups; a number of each in one column"
            " connects them.",
        ),
        (
            [f"{name}{',' * n}{n}{',' * (5 - n)}" for n, name in enumerate("vwxyz", 1)],
            "No two rows share a column: nothing here can be compared. Never measured"
            " together: v, w, x, y and 1 other group; a number of each in one column"
            " connects them.",
        ),
        (
            ["x,1,,,,", "y,2,,,,", "v,,,4,7,", "w,,,3,6,", "u,,,2,5,"],
            "No clear winner: v, w and u cannot be told apart over 2 of 3 columns; that takes"
            " 6 columns at least, of as many datasets; no clear winner: y and x cannot be"
            " told apart over 1 of 3 columns; that takes 6 columns at least, of as many"
            " datasets. Never measured together: {v, w, u} and {y, x}; a number of each in"
            " one column connects them.",
        ),
    ],
)
def test_the_answer_names_each_group_and_what_it_lacks(tmp_path, lines, said):
    columns = lines[0].count(",")
    head = ",".join(["name", *"abcdef"[:columns]])
    table = rank_csv.read(csv_of(tmp_path, head, *lines))
    assert rank_csv.answer(rank_csv.of_table(table), table) == said


def test_fields_are_read_as_people_write_them(tmp_path, caplog):
    caplog.set_level("WARNING", logger="backbench")
    file = csv_of(
        tmp_path,
        " model ,checkpoint, top ,loss,half,note",
        "x,7,91.2 ± 0.3,.5,1,fine",
        "y,8,+80.5 %,1e-1,2,fine",
        "",
        "z,9,70. (0.2),-2.5E1,two,fine",
        "v,9,60 +/- 1,N/A,three,fine",
        "w,9,50+-2,—,?,",
    )
    table = rank_csv.read(file, lower=["loss"])
    assert table.names == ["x", "y", "z", "v", "w"]
    assert table.columns == table.datasets == ["checkpoint", "top", "loss"]
    assert table.values[:, 1].tolist() == [91.2, 80.5, 70.0, 60.0, 50.0]
    # Less is better of a loss
    lost = table.values[:, 2].tolist()
    assert lost[:3] == [-0.5, -0.1, 25.0] and np.isnan(lost[3:]).all()
    # Half of the fields must be numbers, and one more
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ["column 'half' is not ranked: 'two' is no number"]
    # A column of numbers may name the rows
    named = rank_csv.read(file, name="checkpoint")
    assert named.names == ["7", "8", "9", "9", "9"]
    assert named.columns == ["top", "loss"]


def test_of_our_own_table_main_columns_of_measured_rows_are_ranked(tmp_path):
    file = csv_of(
        tmp_path,
        "checkpoint,name,source,params,linear/a/top1@x,linear/a/top5@x,linear/a/top1@y,"
        "knn/b:val/top1_k20@z+e,linear/average/average@x,calibration/a/ece@x",
        "c1,one,measured,5,0,90,3,100,3,4",
        "c2,two,published,5,60,90,3,4,3,4",
        "c3,three,measured,5,70,90,3,4,3,4",
    )
    table = rank_csv.read(file)
    assert table.names == ["one", "three"]
    columns = ["linear/a/top1@x", "linear/a/top1@y", "knn/b:val/top1_k20@z+e"]
    assert table.columns == columns
    assert table.datasets == ["a", "a", "b:val"]
    assert table.values.tolist() == [[0, 3, 100], [70, 3, 4]]
    (group,) = rank_csv.of_table(table)
    assert group.title == "all 3 columns"
    assert group.basis == "for other images like these 3"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x,1\ny," + "7" * 1001, "a field of 1001 characters; at most 1000 are read"),
        ("x,1", "2 lines; ranking takes a heading and two rows at least"),
        ("x,1\ny,2,3", ":3: 3 fields, the heading has 2"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path, line, said):
    file = csv_of(tmp_path, "name,a", *line.split("\n"))
    with pytest.raises(BadInput) as refused:
        rank_csv.read(file)
    assert str(refused.value).startswith(str(file)) and said in str(refused.value)


def test_a_column_that_is_asked_for_must_be_there(tmp_path):
    file = csv_of(tmp_path, "name,loss", "x,1", "y,1." + "7" * 998)
    for words in ({"lower": ["name", "los"]}, {"name": "los"}):
        with pytest.raises(BadInput, match="no column 'los'; did you mean 'loss'"):
            rank_csv.read(file, **words)
    assert rank_csv.read(file).names == ["x", "y"]
    file.write_bytes(b"name,a\n\xff,1\nx,2\n")
    with pytest.raises(BadInput, match=r"not read as CSV: .*; give a file of text"):
        rank_csv.read(file)


def test_a_folder_of_one_checkpoint_has_nothing_to_rank(tmp_path):
    knn = ("knn", "digits", "top1_k20", "knn-demo-v1", None)
    small_boards.write(tmp_path / "runs", {"a": {knn: 80.0}})
    with pytest.raises(BadInput) as refused:
        rank_csv.of_runs(tmp_path / "runs")
    assert str(refused.value) == (
        f"{tmp_path / 'runs'}: no column where two checkpoints have numbers that can be"
        " ranked; a is alone here: nothing to compare it with."
    )


def test_published_rows_of_a_table_are_left_out_with_a_word(tmp_path, caplog):
    file = csv_of(tmp_path, "name,source,a", "x,published,1", "y,measured,2", "z,,3")
    table = rank_csv.read(file)
    assert list(table.names) == ["y", "z"]
    assert "'published' are not ranked (1 of 3)" in caplog.text
