"""Parameters, multiply-adds and speed of trunks on the board, and rows that say nonsense of them."""

import csv

import pytest
from support.records import a_result

from backbench.board import export, page
from backbench.board.board import collect
from backbench.records import store
from backbench.records.trunk_costs import TrunkCost

R18 = {"reading": "pooled", "parameters": 11_176_512, "side": 224, "gflops": 1.8186}
VIT = {"reading": "cls", "parameters": 21_665_664, "side": 224, "gflops": 4.5985}


def row(checkpoint, trunk, *, dataset="cifar10", speed=None, recorded=1.0, **more):
    origin = {"hardware": "2 x CPU", "recorded": recorded}
    if speed is not None:
        origin["images_per_second"] = speed
    provenance = {} if trunk is None else {"trunk": trunk}
    return a_result(
        checkpoint=checkpoint * 64,
        name=f"trunk {checkpoint}",
        dataset=dataset,
        provenance=provenance,
        origin=origin,
        **more,
    )


@pytest.fixture
def runs(tmp_path):
    rows = [
        row("a", R18, dataset="dtd", speed=20.0, recorded=2.0),
        row("a", R18, dataset="pets", speed=25.0, recorded=3.0),
        row("a", R18, dataset="food", recorded=4.0),  # its features came from the cache
        row("a", {**R18, "side": 32, "gflops": 0.037}, speed=900.0, recorded=9.0),
        row("b", VIT, speed=10.5),
        row("c", None),
    ]
    store.append(tmp_path, rows)
    return tmp_path


def test_the_table_has_what_each_trunk_costs(runs):
    board = collect([runs])
    export.write_csv(board, runs / "leaderboard.csv")
    rows = {r["name"]: r for r in csv.DictReader((runs / "leaderboard.csv").open())}
    a, b, c = rows["trunk a"], rows["trunk b"], rows["trunk c"]
    # At the largest size, the last speed that was measured there
    assert (a["parameters"], a["side"], a["gflops"]) == ("11176512", "224", "1.8186")
    assert (a["images_per_second"], a["hardware"]) == ("25.0", "2 x CPU")
    assert (b["parameters"], b["images_per_second"]) == ("21665664", "10.5")
    assert {
        c[name] for name in ("parameters", "side", "gflops", "images_per_second")
    } == {""}
    # The page says it where trunks are compared
    texts = {one.name: one.cost for one in page._rows(board)}
    assert texts["trunk a"] == "11.2M parameters · 1.8 GFLOPs at 224 px · 25 images/s"
    assert texts["trunk c"] == ""


@pytest.mark.parametrize(
    ("speed", "gflops", "shown"),
    [
        (1260.4, 123.4, "120 GFLOPs at 224 px · 1260 images/s"),
        (35.25, 0.0051, "0.0051 GFLOPs at 224 px · 35.2 images/s"),
        (0.034, 999.9, "1000 GFLOPs at 224 px · 0.034 images/s"),
    ],
)
def test_costs_are_plain_numbers(speed, gflops, shown):
    cost = TrunkCost(11_000_000, 224, gflops, speed)
    assert cost.text == f"11.0M parameters · {shown}"


def test_every_number_has_the_speed_of_its_own_run(runs):
    export.write_tidy(collect([runs]), runs / "results.csv")
    lines = list(csv.DictReader((runs / "results.csv").open()))
    found = {(r["name"], r["dataset"]): r["images_per_second"] for r in lines}
    assert found["trunk a", "cifar10"] == "900.0" and found["trunk a", "food"] == ""


def test_what_a_detector_says_counts_where_nothing_else_does(tmp_path):
    below = {"parameters": 11_176_512, "sides": [1088, 800], "gflops": 33.1}
    rows = [row("a", R18, speed=20.0), row("a", below, dataset="coco", speed=2.0)]
    rows.append(row("b", {**below, "parameters": 5}, dataset="coco", speed=3.0))
    store.append(tmp_path, rows)
    board = collect([tmp_path])
    export.write_tidy(board, tmp_path / "results.csv")
    lines = list(csv.DictReader((tmp_path / "results.csv").open()))
    found = {
        (r["name"], r["dataset"]): (r["side"], r["images_per_second"]) for r in lines
    }
    assert (
        found["trunk a", "coco"] == ("800", "2.0")
        and found["trunk a", "cifar10"][0] == "224"
    )
    texts = {digest[0]: cost.text for digest, cost in board.costs.items()}
    assert texts["a"] == "11.2M parameters · 1.8 GFLOPs at 224 px · 20 images/s"
    assert texts["b"] == "0.0M parameters · 33 GFLOPs at 800 px · 3 images/s"


@pytest.mark.parametrize(
    "trunk",
    [
        "resnet",
        [1],
        {"parameters": "many", "side": 224},
        {"parameters": 5, "side": 0},
        {"parameters": -1, "side": 3},
        {"parameters": True, "side": 3},
        {"parameters": 5, "side": 224, "gflops": float("nan")},
        {"parameters": 5, "side": 224, "gflops": "=1+1"},
        {"parameters": 5, "sides": [8, "="]},
        {"parameters": 5, "sides": [True, 9]},
        {"parameters": 5, "sides": "224"},
    ],
)
def test_a_line_with_nonsense_about_its_trunk_is_named_and_left_out(tmp_path, trunk):
    store.append(tmp_path, [row("a", trunk), row("b", VIT)])
    board = collect([tmp_path])
    assert [one.name for one in board.measured_rows] == ["trunk b"]
    assert "'provenance.trunk" in board.problems[0]


def test_a_trunk_without_a_size_has_no_cost_and_without_costs_no_column_has_them(
    tmp_path,
):
    store.append(
        tmp_path / "a", [row("a", {"parameters": 5, "sides": []}), row("c", None)]
    )
    board = collect([tmp_path])
    assert len(board.measured_rows) == 2 and not board.costs
    export.write_csv(board, tmp_path / "leaderboard.csv")
    assert "parameters" not in (tmp_path / "leaderboard.csv").read_text()
    store.append(tmp_path / "b", [row("b", VIT)])
    assert set(collect([tmp_path]).costs) == {"b" * 64}


def test_the_page_says_at_which_size_a_trunk_was_trained(tmp_path):
    known, unknown = a_result(checkpoint="a" * 64), a_result(checkpoint="b" * 64)
    known.provenance["size"] = {"measured": 64, "trained": 32, "from": "its recipe"}
    unknown.provenance["size"] = {"measured": 224, "trained": None, "from": "nobody"}
    store.append(tmp_path, [known, unknown])
    board = collect([tmp_path])
    assert [one.trained for one in page._rows(board)] == [32, None]


@pytest.mark.parametrize("trained", [0, True, "32", 32.5])
def test_a_line_with_nonsense_about_its_size_is_named_and_left_out(tmp_path, trained):
    row_a = a_result(checkpoint="a" * 64)
    row_a.provenance["size"] = {"measured": 32, "trained": trained}
    store.append(tmp_path, [row_a, a_result(checkpoint="b" * 64)])
    board = collect([tmp_path])
    assert len(board.measured_rows) == 1 and "'provenance.size" in board.problems[0]
