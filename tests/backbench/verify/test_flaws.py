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


def test_any_of_a_trunks_datasets_may_hold_the_test_images_of_the_split():
    row = a_result(dataset="cifar10", chosen={"converged": True})

    def of(*trained_on, split="test", dataset="cifar10"):
        about = {**row.provenance, "trained_on": list(trained_on)}
        return dataclasses.replace(row, provenance=about, split=split, dataset=dataset)

    seen = "its trunk was trained on {}: it has seen the test images"
    assert flaws.flaw(of("cifar10:val", "places365:test", "imagenet:test")) == ""
    assert flaws.flaw(of("places365", "cifar10:test")) == seen.format("cifar10:test")
    assert flaws.flaw(of("cifar10:val", split="val")) == seen.format("cifar10:val")
    assert flaws.flaw(of("cifar10:test", split="val")) == ""
    # Only what may hold them is remarked, by the first that does
    may_hold = "its trunk was trained on {}, which may hold these test images ({})"
    assert flaws.remark(of("places365", "tiny_images:train")) == may_hold.format(
        "tiny_images:train", "the datasets' page"
    )
    both = of("cifar10", "imagenet22k", "imagenet", dataset="stl10")
    assert flaws.remark(both) == may_hold.format("imagenet22k", "the dataset's page")
    assert flaws.remark(of("imagenet")) == flaws.remark(row) == ""


def test_a_stopped_fit_says_its_gradient_where_it_is_known():
    for gradient, known in (
        (2.5e-3, ": its gradient is 2.5e-03"),
        (None, ""),
        ("x", ""),
    ):
        chosen = {"converged": False, "gradient": gradient}
        assert flaws.flaw(a_result(chosen=chosen)) == (
            f"the fit has not converged{known}, and more iterations would move this number"
        )
        # Of a path of penalties it may be the fit of one that was not chosen
        assert flaws.flaw(a_result(chosen={**chosen, "scores": {"1": 70.0}})) == (
            f"a fit has not converged{known}, and more iterations may move this number or"
            " choose another fit"
        )
    assert flaws.flaw(a_result(chosen=None)) == ""
