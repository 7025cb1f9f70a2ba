"""What does not follow from what was kept is named and does not stand, whoever reads it."""

import json

import pytest
from support import forgeries
from support.forgeries import FORGERIES, IMPOSSIBLE, RECORDS

from backbench.board.board import collect, read_verified, standing
from backbench.cli import program
from backbench.verify import verification

EDITS = {
    **FORGERIES,
    **{f"impossible: {name}": edit for name, edit in IMPOSSIBLE.items()},
}
COMMANDS = {
    "verify": ("verify", "{runs}"),
    "leaderboard": ("leaderboard", "{runs}"),
    "merge": ("merge", "all={runs}", "--out", "{out}"),
    "rank": ("rank", "{runs}"),
    "paper": ("paper", "lorac:2", "{runs}"),
}


def forged(name, root):
    """A corpus with this one edit; the run that has it."""
    kind, edit = EDITS[name]
    record = forgeries.copied(kind, root)
    edit(record)
    record.save()
    return record.run


def test_there_are_enough():
    assert len(FORGERIES) >= 60 and len(IMPOSSIBLE) >= 10


@pytest.mark.parametrize("name", EDITS)
def test_a_forgery_is_named(name, tmp_path):
    run = forged(name, tmp_path)
    problems = []
    stand = read_verified([run / "results.jsonl"], problems)
    assert problems and all("is left out: " in problem for problem in problems), (
        problems
    )
    assert not [p for p in problems if "cannot be computed again" in p], problems
    lines = (run / "results.jsonl").read_text().splitlines()
    assert len(stand) + len(problems) == len(lines)


@pytest.fixture(scope="module")
def all_forged(tmp_path_factory):
    """A corpus for each forgery, in one folder, beside the demo's own records."""
    root = tmp_path_factory.mktemp("forged")
    (root / "demo").symlink_to(RECORDS)
    for number, name in enumerate(EDITS):
        forged(name, root / f"n{number:03}")
    return root


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_them_all(command, all_forged, tmp_path, capsys, caplog):
    given = [
        word.format(runs=all_forged, out=tmp_path / "C") for word in COMMANDS[command]
    ]
    with caplog.at_level("WARNING", logger="backbench"):
        status = program.main(given)
    assert status == (1 if command == "verify" else 0)
    said = capsys.readouterr().out + "\n".join(r.getMessage() for r in caplog.records)
    missing = [name for n, name in enumerate(EDITS) if f"/n{n:03}/" not in said]
    assert not missing


def test_the_demo_stands(capsys):
    assert program.main(["verify", str(RECORDS)]) == 0
    said = capsys.readouterr().out
    assert "25 level 3" in said and "30 level 2" in said and "0 do not fit" in said


def test_without_the_list_labels_are_believed_and_the_level_says_so(
    tmp_path, monkeypatch
):
    record = forgeries.copied("linear", tmp_path)
    monkeypatch.setattr(verification, "_lists", {})
    for file in (tmp_path / "lists").iterdir():
        file.unlink()
    forgeries.labels_of_predictions(record)
    record.save()
    (stands, *_) = read_verified([record.run / "results.jsonl"], [])
    assert stands.result.value == 100 and stands.result.origin["verified"] == 2


def test_what_nothing_backs_never_leads(tmp_path):
    record = forgeries.copied("linear", tmp_path)
    lines = [
        json.loads(t) for t in (record.run / "results.jsonl").read_text().splitlines()
    ]
    best = {
        **lines[0],
        "checkpoint": "7" * 64,
        "name": "best",
        "value": 100.0,
        "ci95": None,
    }
    del best["provenance"]["predictions"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.jsonl").write_text(json.dumps(best) + "\n")
    board = collect([tmp_path])
    (column,) = board.columns
    marks = standing(board, column)
    assert marks["7" * 64] == "unbacked" and len(marks) > 1
    assert board.measured(column)[0][0].name == "best"


def test_merge_keeps_each_list_once_and_what_it_wrote_is_verified(tmp_path, capsys):
    assert (
        program.main(
            ["merge", f"lab={RECORDS}", "--out", str(tmp_path / "C"), "--public"]
        )
        == 0
    )
    (kept,) = (tmp_path / "C" / "lists").iterdir()
    assert kept.read_bytes() == (RECORDS / "lists" / kept.name).read_bytes()
    assert program.main(["verify", str(tmp_path / "C")]) == 0
    assert "25 level 3" in capsys.readouterr().out
    assert (
        '"verified"' not in (tmp_path / "C/lab/backbench/knn/results.jsonl").read_text()
    )


def test_a_list_is_read_within_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_LARGEST_LIST", 1000)
    monkeypatch.setattr(verification, "_lists", {})
    record = forgeries.copied("knn", tmp_path)
    (stands, *_) = read_verified([record.run / "results.jsonl"], [])
    assert stands.result.origin["verified"] == verification.FROM_KEPT


@pytest.mark.parametrize(
    "edit",
    [
        forgeries.put("chosen", "reference_batch", to=0),
        forgeries.put("chosen", "scores", to={"1": "a", "b": None}),
        forgeries.put("chosen", "lr", to="x"),
        forgeries.put("provenance", "recipe", "lr", to=["x", None]),
        forgeries.put(
            "provenance", "recipe", to={"kind": "logreg", "l2": [1e-6, 1e5, 10**12]}
        ),
        forgeries.put("provenance", "draws", to=["x"]),
        forgeries.arrays(lambda a: {"label": a["label"] + 10**17}),
    ],
)
def test_a_record_of_odd_values_is_named_and_costs_nothing(edit, tmp_path):
    record = forgeries.copied("linear", tmp_path)
    if "l2" not in record.line["chosen"]:
        record.line["chosen"]["l2"] = 1.0
    edit(record)
    record.save()
    problems = []
    read_verified([record.run / "results.jsonl"], problems)
    assert len(problems) == 1, problems
