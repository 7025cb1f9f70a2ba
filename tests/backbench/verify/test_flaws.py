"""A number is named and not ranked where an erratum touches it or the trunk saw the test images."""

import dataclasses

import pytest
from support import boards
from support.records import a_result

from backbench.board.board import collect, standing
from backbench.records import store
from backbench.verify import flaws

KIND = ("knn", "stl10", "top1_k20", "knn-v1", None)


@pytest.mark.parametrize("entry", [e for kept in flaws.errata().values() for e in kept])
def test_an_erratum_names_rows_that_lack_what_its_mending_added(entry):
    part, _, key = entry["lacks"].partition(".")
    row = a_result(task=entry["tasks"][0], chosen={"converged": True})
    assert flaws.flaw(row) == ""
    without = {k: v for k, v in getattr(row, part).items() if k != key}
    assert flaws.flaw(dataclasses.replace(row, **{part: without})).startswith(
        entry["id"]
    )
    assert len(entry["what"]) > 20 and set(entry) <= {"id", "what", "tasks", "lacks"}


@pytest.mark.parametrize(
    ("trained_on", "mark", "words"),
    [
        (["imagenet"], "best", "may hold these test images"),
        (["stl10"], "best", ""),
        (["places365", "stl10:test"], "unsettled", "has seen the test images"),
    ],
)
def test_a_trunk_that_has_seen_the_test_images_is_marked(
    tmp_path, trained_on, mark, words
):
    boards.synthetic(tmp_path, ["one", "two"], [KIND], gap=15)
    for file in store.files_below(tmp_path):
        rows, _ = store.read(file)
        if rows[0].name == "two":
            about = {**rows[0].provenance, "trained_on": trained_on}
            file.unlink()
            store.append(file.parent, [dataclasses.replace(rows[0], provenance=about)])
    board = collect([tmp_path])
    two = next(row for row in board.rows if row.name == "two")
    assert standing(board, board.columns[0])[two.checkpoint] == mark
    note = board.cell(two, board.columns[0]).note
    assert words in note and bool(note) == bool(words)


@pytest.mark.parametrize(
    "dataset", ["imagenet-real", "imagenet-val-a", "imagenet100", "imagenet"]
)
def test_imagenets_test_images_are_known_under_other_names(dataset):
    row = a_result(
        task="ood", dataset=dataset, chosen={}, provenance={"trained_on": ["imagenet"]}
    )
    assert flaws.flaw(row) == ""
    seen = dataclasses.replace(row, provenance={"trained_on": ["imagenet:test"]})
    assert "imagenet:test: it has seen the test images" in flaws.flaw(seen)
    other = dataclasses.replace(seen, dataset="imagenet-sketch")
    assert flaws.flaw(other) == ""
    own = dataclasses.replace(row, provenance={"trained_on": [f"{dataset}:test"]})
    assert "has seen the test images" in flaws.flaw(own)
