"""Records of several labs in one board: one row, both origins; what does not fit is named."""

import dataclasses
from pathlib import Path

import pytest
from support import boards, records

from backbench.board import merge as merging
from backbench.board.board import Measurement, collect
from backbench.board.merge import Lab, LabRecord, agree
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


def test_folders_that_cannot_be_merged_are_named(labs):
    def refused(*words):
        with pytest.raises(BadInput) as caught:
            program.main(["--debug", "merge", *map(str, words)])
        return str(caught.value)

    north = labs / "north"
    (labs / "full").mkdir()
    (labs / "full" / "x").touch()
    for out in (labs / "full", labs / "full" / "x"):
        said = f"{out}: is there already; --out needs a new folder"
        assert refused(north, "--out", out) == said
    inside = north / "deep" / "C"
    assert refused(labs / "south", north, "--out", inside) == (
        f"{inside}: lies in a folder that is merged; choose another --out"
    )
    assert refused(f".x={north}", "--out", labs / "C") == (
        "'.x' is no lab's name; give NAME=FOLDER"
    )
    assert refused(f"a={north}", f"a={labs}", "--out", labs / "C") == (
        "two folders are called 'a'; give NAME=FOLDER"
    )
    (labs / "empty").mkdir()
    none = f"no results.jsonl with a record that fits below {labs / 'empty'}"
    assert refused(labs / "empty", "--out", labs / "C") == none
    (labs / "empty" / "results.jsonl").write_text("{}\n")
    assert refused(labs / "empty", "--out", labs / "C").startswith(f"{none}; ")
    assert not (labs / "C").exists()


def test_labs_are_named_by_their_folders_or_as_the_user_says():
    found = merging._labs(["north=/a/b=c", "/x/south/", "a.b-c_1=."])
    assert found == [
        Lab("north", Path("/a/b=c")),
        Lab("south", Path("/x/south/")),
        Lab("a.b-c_1", Path()),
    ]
    assert merging._labs([f"{'x' * 61}=y"])
    for name in ("x" * 62, "", ".a", "a b", "a/b"):
        with pytest.raises(BadInput, match="is no lab's name"):
            merging._labs([f"{name}=y"])


def measured_by(lab, value, recorded, ci95=None, **more):
    origin = {"recorded": recorded, "verified": 3, "code": "c", "cwd": "/home"}
    row = records.a_result(
        name="x", value=value, ci95=ci95, provenance={}, origin=origin | more
    )
    run = Path("runs") / lab
    return LabRecord(lab, Measurement(row, run), Path(lab) / "run")


def test_the_newest_number_names_all_others_but_copies():
    same = [
        measured_by("south", 70.5, 3.0, (69.0, 72.0), also=[{"lab": "east"}]),
        measured_by("north", 70.0, 1.0, (69.5, 71.0), hardware="h", command="b x"),
        # A copy of the newest line, and another lab's equal number
        measured_by("south", 70.5, 2.5, (69.0, 72.0)),
        measured_by("west", 70.5, 2.0, (69.0, 72.0)),
        # Neither interval holds the other's value
        measured_by("north", 60.0, 1.5, (59.0, 61.0)),
    ]
    problems = []
    found = merging._newest(same, problems)
    assert (found.lab, found.below) == ("south", Path("south/run"))
    result, run = found.measurement
    assert (result.value, run) == (70.5, Path("runs/south"))
    assert result.origin == {
        "recorded": 3.0,
        "code": "c",
        "cwd": "/home",
        "lab": "south",
        "also": [
            {"lab": "east"},
            {
                "lab": "north",
                "value": 70.0,
                "ci95": (69.5, 71.0),
                "recorded": 1.0,
                "code": "c",
                "hardware": "h",
                "command": "b x",
            },
            {
                "lab": "north",
                "value": 60.0,
                "ci95": (59.0, 61.0),
                "recorded": 1.5,
                "code": "c",
            },
            {
                "lab": "west",
                "value": 70.5,
                "ci95": (69.0, 72.0),
                "recorded": 2.0,
                "code": "c",
            },
        ],
    }
    assert problems == [
        "x: linear/digits/top1@linear-demo-v1: north measured 60.0, south 70.5; their"
        " intervals do not hold one another. south's counts"
    ]
    alone = merging._newest(same[1:2], problems).measurement.result.origin
    assert "also" not in alone and alone["lab"] == "north"


def test_a_column_apart_is_named_once_for_each_lab():
    given = [
        measured_by("north", 70.0, 1.0),
        measured_by("north", 71.0, 1.0),
        measured_by("south", 70.0, 2.0),
    ]
    other = dataclasses.replace(given[1].measurement.result, seed=1)
    given[1] = given[1]._replace(measurement=Measurement(other, Path("runs")))
    problems = []
    found = merging._newest_of_each(given, problems)
    assert [(one.lab, one.measurement.result.seed) for one in found] == [
        ("south", 0),
        ("north", 1),
    ]
    column = "linear/digits/top1@linear-demo-v1~unknown"
    why = "its recipe or its lists are not the usual ones of that name; a column apart"
    assert problems == [f"north: {column}: {why}", f"south: {column}: {why}"]
