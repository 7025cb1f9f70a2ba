"""What the judge, the claims and the names of printed tables say, number by number."""

import dataclasses

import pytest
from support.records import a_result

from backbench.board.board import Board, Cell, Column, Measurement, Row, fill
from backbench.errors import BadInput
from backbench.published import claims, judge, judging_rules, published
from backbench.published.claims import Claim
from backbench.published.judge import Judged, ListVerdict, compare
from backbench.published.published import Published
from backbench.published.reproduction_lists import PrintedBeside
from backbench.stats import confidence
from backbench.tasks import by_kind
from backbench.transfer.protocols import load_protocol

LORAC_KEY = "lorac:2:lorac:resnet50:200"


@pytest.mark.parametrize(
    ("measured", "word"),
    [(69.0, "within"), (68.9, "outside"), (72.0, "within"), (72.1, "outside")],
)
def test_a_number_is_within_the_tolerance_below_and_above(measured, word):
    assert compare(measured, 70.0, (1.0, 2.0)) == word


def judged_of(**changes):
    row = Row("a" * 64, "mine", "lorac", "resnet50", 200)
    column = Column("linear", "cifar10", "top1", "linear-lorac-v1")
    whole = {
        "row": row,
        "column": column,
        "key": LORAC_KEY,
        "published": 91.8,
        "measured": 90.34567,
        "ci95": (89.98765, 91.0),
        "tolerance": 1.5,
        "hardware": "a CPU",
    }
    return Judged(**whole | changes)


def test_a_verdict_on_the_page_has_every_part():
    assert judged_of().on_page() == {
        "name": "mine",
        "column": "linear/cifar10/top1@linear-lorac-v1",
        "key": LORAC_KEY,
        "measured": 90.3457,
        "published": 91.8,
        "low": 89.9877,
        "high": 91.0,
        "tolerance": 1.5,
        "verdict": "within",
        "said": "within",
        "others": (),
        "hardware": "a CPU",
    }
    bare = judged_of(ci95=None, changed=("beta", "lr"), way="fast").on_page()
    assert (bare["low"], bare["high"]) == (None, None)
    assert (bare["verdict"], bare["said"]) == ("changed", "changed: beta, lr (fast)")
    other = judged_of(
        other_trunk=("arch x instead of y",), by_recipe=False, changed=("lr",)
    )
    assert (other.verdict, other.within) == ("another", False)
    assert other.notes == ("arch x instead of y", "its pretraining recipe is not known")


def test_how_a_trunk_differs_is_said_of_each_of_its_measurements():
    (number,) = (n for n in published.lookup(LORAC_KEY) if n.dataset == "cifar10")
    seeds = [("resnet50", 200), ("resnet18", 200), ("resnet50", 100)]
    rows = [
        a_result(seed=seed, arch=arch, epochs=epochs, provenance={})
        for seed, (arch, epochs) in enumerate(seeds)
    ]
    board = fill(Measurement(row, None) for row in rows)
    (cell,) = board.cells.values()
    assert judge._trunk_differences(board.rows[0], cell, number) == (
        "arch resnet18 instead of resnet50",
        "epochs 100 instead of 200",
    )
    # An average has no measurements: its row says it
    average = dataclasses.replace(cell, parts=[])
    row = dataclasses.replace(board.rows[0], arch="resnet50", epochs=200)
    assert judge._trunk_differences(row, average, number) == ()


def test_what_was_measured_otherwise_or_is_undefined_is_named():
    (number,) = (n for n in published.lookup(LORAC_KEY) if n.dataset == "cifar10")
    wanted = judging_rules.column_of(number)
    name = "linear/cifar10/top1@linear-lorac-v1"
    assert wanted.name == name

    def said(*values, **changes):
        """Of a row with these seeds in one column, like the number's but for some changes."""
        column = dataclasses.replace(wanted, **changes)
        parts = [
            Measurement(a_result(seed=seed, value=value, provenance={}), None)
            for seed, value in enumerate(values)
        ]
        defined = [value for value in values if value is not None]
        cell = Cell(defined[0] if defined else None, parts=parts)
        row = Row("a" * 64, "mine", "lorac", "resnet50", 200)
        unused = dataclasses.replace(wanted, metric="top5")
        board = Board([row], [unused, column], {(row.checkpoint, column): cell})
        return list(judge._undefined_or_unlike(board, row, number))

    assert said(91.0) == said(91.0, 92.0) == []
    assert said(None) == [f"mine: {name} is undefined, {LORAC_KEY} is not"]
    assert said(None, 91.0, None) == [f"mine: {name} is undefined for 2 of 3 seeds"]
    unlike = f"mine: {LORAC_KEY} is of {name}, not of"
    assert said(91.0, split="val") == [
        f"{unlike} linear/cifar10:val/top1@linear-lorac-v1"
    ]
    changed = "linear-lorac-v1~1a2b"
    assert said(None, protocol=changed) == [f"{unlike} linear/cifar10/top1@{changed}"]
    # Other numbers do not answer for it
    for change in (
        {"dataset": "dtd"},
        {"task": "knn"},
        {"protocol": "linear-lorac-v2"},
    ):
        assert said(None, **change) == []


# ---- claims


def number_of(key, value, **more):
    about = {"paper": "LORAC", "table": "2", "model": "x", "task": "linear"}
    about |= {"dataset": "cifar10", "metric": "top1"}
    return Published(key=key, value=value, **about | more)


def test_a_claim_is_told_with_its_gap_and_what_was_measured():
    better = number_of("lorac:2:lorac:resnet50:200:cifar10", 91.8, trained_on="cifar10")
    worse = number_of("lorac:2:moco-m:resnet50:200:variant-a", 91.4)
    told = (
        "linear/cifar10/top1: lorac:resnet50:200 > moco-m:resnet50:200:variant-a by 0.4"
    )
    assert Claim(better, worse, claims.NOT_MEASURED).words == f"{told}: not measured"
    held = Claim(better, worse, claims.HOLDS, 0.714)
    assert held.words == f"{told}, measured +0.71: holds"
    turned = Claim(better, worse, claims.REVERSED, -0.126)
    assert turned.words == f"{told}, measured -0.13: reversed"
    counts = [turned, held, held, dataclasses.replace(held, verdict=claims.ALIKE)]
    assert claims.counted(counts) == (
        "4 claims: 2 hold, 1 reversed, 1 cannot be told apart"
    )
    assert claims.counted([held]) == "1 claims: 1 hold"


def test_a_table_without_a_measured_claim_is_not_on_the_page():
    assert claims.on_page(Board(), []) == []
    assert claims.on_page(Board(), [judged_of()]) == []


# ---- names and rules of printed tables


@pytest.mark.parametrize(
    ("table", "place", "grid"),
    [
        ("1", "Table 1", "lorac_table1"),
        ("Fig.7", "Fig. 7", "lorac_fig7"),
        ("fig.7", "Fig. 7", "lorac_fig7"),
        ("4.1", "Section 4.1", "lorac_sec41"),
        ("0.6", "Table 0.6", "lorac_table06"),
    ],
)
def test_a_table_is_named_by_its_place(table, place, grid):
    assert published.place_in_paper(table) == place
    assert published.grid_name("LORAC", table) == grid


@pytest.mark.parametrize(
    ("note", "variant"),
    [
        ("std 0.3; in text; batch 512 (as printed): x", "batch 512"),
        ("batch 256", "batch 256"),
        ("; (none); standard", "standard"),
        ("std 0.3", None),
        ("", None),
    ],
)
def test_a_variant_is_the_first_statement_that_is_one(note, variant):
    assert published.variant(note) == variant


def test_a_slug_keeps_letters_digits_and_four_signs():
    assert published.slug("  MoCo v2+ (β=0.5)!") == "moco-v2+-=0.5"
    assert published.slug("(!)") == published.slug("") == "-"


def test_printed_errors_and_tables_are_compared_as_they_are_measured():
    def as_measured(**more):
        found = judging_rules.as_measured(number_of("k", 6.9, **more))
        return found.metric, found.value, found.split

    cllr = {"paper": "CLLR", "table": "0.6"}
    assert as_measured(**cllr, metric="test_error_top5") == ("top1", 93.1, None)
    assert as_measured(**cllr, metric="train_error_top5") == (
        "train_top1",
        93.1,
        "train",
    )
    table4 = {"paper": "CLLR", "table": "0.4", "metric": "top5"}
    assert as_measured(**table4) == ("top1", 6.9, None)
    assert as_measured(**table4 | {"paper": "MIO"}) == ("top5", 6.9, None)
    assert as_measured(task="knn") == ("top1_k5", 6.9, None)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, None),
        ({"metric": "top1_std"}, "spread"),
        ({"task": "text"}, "imageless"),
        ({"task": "control"}, "imageless"),
        ({"task": "pretraining"}, "hours"),
        ({"quoted": True}, "quoted"),
        ({"model": "WCoRD (x)"}, "unbuilt"),
        ({"model": "CRCD"}, "unbuilt"),
        ({"model": "ARB loss variant 3"}, "unidentified"),
        # The first reason counts
        ({"model": "CRCD", "quoted": True}, "quoted"),
        ({"task": "text", "metric": "x_std"}, "spread"),
    ],
)
def test_why_a_number_is_not_judged(more, why):
    number = number_of(LORAC_KEY, 1.0, **more)
    assert judging_rules.reason(number) == why
    assert (judging_rules.tolerance(number) is None) == (why is not None)


def test_a_printed_spread_widens_the_tolerance_as_trials_and_trainings_vary():
    key = "cllr:1:cllr-alpha=0-512-d:resnet50:100:stl10"
    score, spread = sorted(published.lookup(key), key=lambda n: len(n.metric))
    assert (score.metric, spread.metric) == ("top1", "top1_std")
    t = confidence.t_quantile(4)
    for trainings in (1, 3, 5):
        by_trials = t * spread.value * (1 / 5 + 1 / trainings) ** 0.5
        found = judging_rules.tolerance(score, trainings)
        assert found == pytest.approx(max(1.5, by_trials), abs=0.006)
    assert judging_rules.tolerance(score) == judging_rules.tolerance(score, 1)


def test_a_page_number_is_of_a_known_task_and_a_shipped_protocol():
    about = {"dataset": "digits", "metric": "top1", "value": 71.0, "source": "page"}
    PrintedBeside(task="linear", protocol="linear_demo", **about)
    with pytest.raises(ValueError, match=r"task 'liner'.*did you mean 'linear'"):
        PrintedBeside(task="liner", protocol="linear_demo", **about)
    with pytest.raises(BadInput, match="linear_dem"):
        PrintedBeside(task="linear", protocol="linear_dem", **about)


def test_a_page_number_without_a_tolerance_is_unlike():
    column = Column("linear", "digits", "top1", "linear-demo-v1")
    row = Row("a" * 64, "mine", "lorac", "resnet50", 200)
    cells = {(row.checkpoint, column): Cell(70.0, (69.0, 71.0))}
    board = Board([row], [column], cells)

    def beside(tolerance=None, **changes):
        number = PrintedBeside(
            task="linear",
            dataset="digits",
            metric="top1",
            value=71.0,
            protocol="linear_demo",
            source="page",
            tolerance=tolerance,
            unlike=changes.get("unlike"),
        )
        return judge._beside(board, number, changes.get("digest", "a" * 64))

    found = beside((1.0, 2.0))
    assert found == ListVerdict(
        column=column.name,
        printed=71.0,
        source="page",
        verdict="within",
        measured=70.0,
        ci95=(69.0, 71.0),
        tolerance=(1.0, 2.0),
    )
    assert beside((0.9, 2.0)).verdict == "outside"
    # The task's own tolerance is of 1.5 points
    assert beside().tolerance == (1.5, 1.5) and beside().verdict == "within"
    unlike = beside((1.0, 2.0), unlike="another crop")
    assert (unlike.verdict, unlike.why) == ("unlike", "another crop")
    assert (unlike.measured, unlike.tolerance) == (70.0, None)
    nothing = beside((1.0, 2.0), digest="b" * 64)
    assert (nothing.verdict, nothing.measured) == ("", None)
    # Measured by a changed recipe only
    changed = dataclasses.replace(column, protocol="linear-demo-v1~1a2b")
    board.cells[row.checkpoint, changed] = board.cells.pop((row.checkpoint, column))
    other = beside((1.0, 2.0))
    assert (other.verdict, other.measured, other.ci95) == ("unlike", 70.0, (69.0, 71.0))
    assert other.why == f"measured as {changed.name}"
    board.cells[row.checkpoint, changed] = Cell(None)
    assert (beside().verdict, beside().why) == ("unlike", "undefined")


@pytest.mark.parametrize("recipe", ["lorac", "lorac_bf16", "cllr_cifar_lphi"])
def test_a_recipe_has_the_name_that_its_rows_have(recipe):
    protocol = load_protocol(recipe, by_kind("linear"), ())
    assert judging_rules.protocol_name(recipe) == protocol.name
