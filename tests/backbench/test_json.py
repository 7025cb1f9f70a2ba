"""`--json`: one document on standard output, all else on standard error."""

import json

import pytest
from support import boards

from backbench import cli


def document(capfd, *words, status=0):
    assert cli.main([str(word) for word in words]) == status
    return json.loads(capfd.readouterr().out)


@pytest.fixture
def runs(tmp_path):
    boards.synthetic(tmp_path / "runs", ["one", "two"], boards.DEMO[:3], gap=30)
    return tmp_path / "runs"


def test_a_probe_prints_its_results(tiny_root, trunk, tmp_path, capfd):
    where = ["--data", tiny_root, "--out", tmp_path / "run", "--json"]
    words = ["linear", trunk, "--datasets", "digits", "--protocol", "knn_demo", *where]
    rows = document(capfd, *words)
    assert {row["metric"] for row in rows} == {"top1_k5", "top1_k20"}
    written = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").open()]
    assert [row["value"] for row in rows] == [row["value"] for row in written]
    assert rows[0].keys() == written[0].keys()
    assert document(capfd, *words) == rows, "a finished run has the same document"


def test_analysis_prints_its_results(tiny_root, trunk, tmp_path, capfd):
    where = ["--data", tiny_root, "--out", tmp_path / "run", "--json"]
    words = ["analyze", trunk, "--dataset", "digits", "--recipe", "analyze_tiny", *where]
    assert {"rankme", "nuclear_norm"} <= {row["metric"] for row in document(capfd, *words)}


def test_the_leaderboard_is_a_document(runs, capfd):
    board = document(capfd, "leaderboard", runs, "--json")
    assert {row["name"] for row in board["rows"]} == {"one", "two"}
    assert board["answer"].endswith(".")
    (cell,) = [
        cell for row in board["rows"] for name, cell in row["cells"].items()
        if row["name"] == "two" and name.startswith("knn/")
    ]  # fmt: skip
    assert cell["mark"] == "best" and cell["ci95"][0] < cell["value"] < cell["ci95"][1]


def test_ranks_are_a_document(runs, tmp_path, capfd):
    cli.main(["leaderboard", str(runs), "--csv", str(tmp_path / "l.csv")])
    capfd.readouterr()
    ranked = document(capfd, "rank", tmp_path / "l.csv", "--json")
    assert {one["name"] for one in ranked["ranks"]} == {"one", "two"}
    assert ranked["answer"].startswith("No clear winner")


@pytest.mark.parametrize(
    ("words", "key", "others"),
    [
        (["paper", "--json"], "status", ["papers", "timm", "testbed", "pages"]),
        (["paper", "lorac:2", "--json"], "state", []),
        (["reproduce", "--json"], "gpu_hours", []),
        (["data", "list", "--json"], "on_disk", []),
    ],
)
def test_lists_are_documents(words, key, others, capfd):
    listed = document(capfd, *words)
    assert len(listed) > 1 + len(others)
    assert [one["source"] for one in listed if key not in one] == others


def test_a_check_of_data_says_its_problems(tiny_root, capfd):
    checked = document(capfd, "data", "check", "digits", "--data", tiny_root, "--json")
    assert checked == {"name": "digits", "problems": []}


def test_an_error_prints_no_document(tmp_path, capfd):
    assert cli.main(["leaderboard", str(tmp_path / "gone"), "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and "gone" in captured.err
