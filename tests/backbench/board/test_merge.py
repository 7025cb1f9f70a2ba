"""Records of several labs in one board: one row, both origins; what does not fit is named."""

import pytest
from support import boards, records

from backbench.board.board import collect
from backbench.board.merge import agree
from backbench.cli import program
from backbench.errors import BadInput
from backbench.records import store

KIND = boards.DEMO[:1]


@pytest.fixture
def labs(tmp_path):
    """The same trunk measured by both labs on the same images, and one trunk of each lab's own."""
    boards.synthetic(tmp_path / "north", ["shared", "mine"], KIND, images=200, gap=3)
    boards.synthetic(tmp_path / "south", ["shared", "theirs"], KIND, images=200, gap=3)
    return tmp_path


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ((70.0, (69, 71)), (70.9, (70.5, 71.5)), True),
        # It is enough that one of the intervals holds the other's value
        ((70.0, (69, 71)), (70.9, (70.8, 71.0)), True),
        ((70.0, (69.5, 70.5)), (70.9, (70.5, 71.5)), False),
        ((70.0, None), (70.9, None), False),
        ((70.0, None), (70.0, None), True),
        ((None, None), (None, None), True),
        ((None, None), (70.0, (69, 71)), False),
    ],
)
def test_two_labs_numbers_agree_within_an_interval(one, other, alike):
    rows = [records.a_result(value=value, ci95=ci95) for value, ci95 in (one, other)]
    assert agree(*rows) == agree(*reversed(rows)) == alike


def merge(tmp_path, capsys, caplog, *folders):
    caplog.clear()
    args = [*map(str, folders), "--out", str(tmp_path / "C")]
    with caplog.at_level("WARNING", logger="backbench"):
        assert program.main(["merge", *args]) == 0
    return capsys.readouterr().out, [r.getMessage() for r in caplog.records]


def change(folder, name, **changes):
    """Edit the lines of one checkpoint in place."""
    records.edit_lines(
        folder, lambda line: line.update(changes if line["name"] == name else {})
    )


def test_one_row_with_both_origins(labs, capsys, caplog):
    said, problems = merge(
        labs, capsys, caplog, labs / "north", f"south={labs / 'south'}"
    )
    assert "4 records of 2 labs: 3 numbers, 1 of them measured more than once" in said
    assert problems == []
    board = collect([labs / "C"])
    assert sorted(row.name for row in board.rows) == ["mine", "shared", "theirs"]
    assert board.problems == []
    shared = next(row for row in board.rows if row.name == "shared")
    assert sorted(board.labs[shared.checkpoint]) == ["north", "south"]
    (part,) = board.cell(shared, board.columns[0]).parts
    (other,) = part.result.origin["also"]
    assert {part.result.origin["lab"], other["lab"]} == {"north", "south"}
    assert other["value"] == pytest.approx(part.result.value) and other["command"]
    # The predictions came along, so trunks of both labs are tested against each other
    page = labs / "l.html"
    assert (
        program.main(["leaderboard", str(labs / "C"), "--html", str(page), "-q"]) == 0
    )
    assert '"labs":[["north"],' in page.read_text().replace(" ", "")
    assert '"paired":["images","images","images"]' in page.read_text()


def test_single_files_are_all_kept(labs, capsys, caplog):
    files = [f"lab{n}={file}" for n, file in enumerate(store.files_below(labs))]
    merge(labs, capsys, caplog, *files)
    assert sorted(row.name for row in collect([labs / "C"]).rows) == [
        "mine",
        "shared",
        "theirs",
    ]


def test_a_changed_record_is_named(labs, capsys, caplog):
    change(labs / "south", "theirs", value=99.0)
    said, problems = merge(labs, capsys, caplog, labs / "north", labs / "south")
    (line,) = problems
    assert "theirs: linear/digits/top1" in line and "is left out" in line
    assert "it says 99.0, its predictions give" in line
    assert "3 records" in said
    assert {row.name for row in collect([labs / "C"]).rows} == {"shared", "mine"}


def test_labs_that_disagree_are_named(labs, capsys, caplog):
    for file in (labs / "south").rglob("*.npz"):
        file.unlink()  # nothing to compute it again from
    change(labs / "south", "shared", value=99.0, ci95=[98.0, 99.9])
    _, problems = merge(labs, capsys, caplog, labs / "north", labs / "south")
    (line,) = problems
    assert (
        line.startswith("shared: linear/digits/top1")
        and "do not hold one another" in line
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint": "abc"}, "checkpoint 'abc' is no digest"),
        ({"provenance": {"manifests": {"test": "f" * 64}}}, "a column apart"),
        ({"protocol": "linear-other-v1"}, "a column apart"),
    ],
)
def test_digests_and_prints_that_do_not_fit_are_named(
    labs, capsys, caplog, changes, said
):
    change(labs / "south", "theirs", **changes)
    _, problems = merge(labs, capsys, caplog, labs / "north", labs / "south")
    assert any(said in line for line in problems), problems


def test_predictions_of_another_list(labs, capsys, caplog):
    def name_another(line):
        line["provenance"]["manifest"] = "e" * 64
        line["provenance"]["manifests"]["test"] = "e" * 64

    records.edit_lines(labs / "south", name_another)
    _, problems = merge(labs, capsys, caplog, labs / "north", labs / "south")
    assert problems
    assert all("its predictions are of list" in line for line in problems)


def test_what_cannot_be_merged(labs):
    folder = str(labs / "north")
    with pytest.raises(BadInput, match="two folders are called"):
        program.main(["--debug", "merge", folder, folder, "--out", str(labs / "C")])
