"""docs/demo: the demo's records as a lab would publish them, and the board made from them."""

import json
import re
from pathlib import Path

import pytest

from backbench.cli import demo_ranges, program
from backbench.records.public_lines import without_folders

ROOT = Path(__file__).parents[3]
AGAIN = (
    "backbench leaderboard docs/demo/records --csv docs/demo/leaderboard.csv"
    " --html docs/demo/leaderboard.html"
)


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = {"csv": tmp_path / "leaderboard.csv", "html": tmp_path / "leaderboard.html"}
    args = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    assert program.main(["leaderboard", "docs/demo/records", *args, "-q"]) == 0
    return tmp_path


def test_the_board_made_again_is_the_same_byte_for_byte(made):
    for name in ("leaderboard.csv", "leaderboard.html"):
        kept = ROOT / "docs" / "demo" / name
        assert (made / name).read_bytes() == kept.read_bytes(), f"{name}: run {AGAIN}"


# The lines of the README's table, by the columns that they show
TITLES = {
    "linear/digits/top1": "linear probe, top-1",
    "knn/digits/top1_k20": "kNN (k = 20), top-1",
    "fewshot/digits/top1": "2 labels per class, 20 draws",
    "semi_10pct/digits/top1": "10% of the labels, finetuned",
}


def test_the_readmes_table_is_of_twenty_runs():
    """Line by line: the median of the points above the random trunk, and their range. A plus means
    above it in at least 19 of 20 runs. What is kept for the demo is the same."""
    kept = (ROOT / "benchmarks" / "demo_holds.txt").read_text()
    found = re.findall(
        r"^(\w+) above random in column (\S+) +(\d+) of (\d+) +\d+ of \d+"
        r" +(\S+) +(\S+) +(\S+)$",
        kept,
        re.M,
    )
    ranges = {(each.trunk, each.column): each for each in demo_ranges.read()}
    assert len(ranges) == len(found)
    readme = (ROOT / "README.md").read_text()
    lines = [line.strip("|").split("|") for line in readme.splitlines()]
    table = {
        cells[0].strip(): [text.strip() for text in cells[1:]]
        for cells in lines
        if len(cells) == 5
    }
    names = table["points above the random trunk"]
    shown = 0
    for trunk, column, above, runs, least, median, most in found:
        its = ranges[trunk, column]
        assert (its.above, its.runs) == (int(above), int(runs))
        kept_values = (its.least, its.median, its.most)
        assert kept_values == (float(least), float(median), float(most))
        title = TITLES.get(column)
        if title is None:
            continue
        text = f"{median} ({least} to {most})"
        if int(above) >= 0.95 * int(runs):
            text += " +"
        assert table[title][names.index(trunk.replace("_", "-"))] == text
        assert f"{runs} runs" in readme
        shown += 1
    assert shown == 4 * len(TITLES)


def test_records_to_publish_name_no_folder_of_the_machine():
    texts = [file.read_text() for file in (ROOT / "docs" / "demo").rglob("*.jsonl")]
    assert len(texts) > 10
    assert not [text for text in texts if '"cwd"' in text]
    for text in [*texts, (ROOT / "docs" / "demo" / "leaderboard.html").read_text()]:
        assert not re.findall(
            r'[" ](?:/|~/|file:)(?:home|root|tmp|work|scratch|data)\b', text
        )


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a --data /scratch/me/x --out runs/y", "a --data x --out runs/y"),
        ("a --out='/home/me/my runs/y' b=/z/q.pth", "a --out=y b=q.pth"),
        (
            "a ~/k/x.pth ~me/y ./b/c ../d https://e.f/g h/i:j",
            "a x.pth y ./b/c ../d https://e.f/g h/i:j",
        ),
        ("a '/an end/is missing", "a 'an end/is missing"),
        (["a", "/b/c", "--d=/e/f"], ["a", "c", "--d=f"]),
    ],
)
def test_commands_keep_the_names_of_paths(given, shown):
    record = {"origin": {"command": given, "cwd": "/home/me", "code": "abc"}}
    assert without_folders(record) == {"origin": {"command": shown, "code": "abc"}}


def test_paths_are_cut_wherever_they_stand():
    record = {
        "value": 71.25,
        "ci95": (70.0, 72.5),
        "engine": None,
        "provenance": {
            "notes": ["90 images from /data/me/10percent.txt, 1/2 of them"],
            "k": 5,
        },
        "origin": {"also": [{"cwd": "/x", "command": "a /b/c"}], "lab": "north"},
        "dataset": "/data/me/flowers",
        "config": "C:\\Users\\me\\c.yaml",
    }
    assert json.loads(json.dumps(without_folders(record))) == {
        "value": 71.25,
        "ci95": [70.0, 72.5],
        "engine": None,
        "provenance": {"notes": ["90 images from 10percent.txt, 1/2 of them"], "k": 5},
        "origin": {"also": [{"command": "a c"}], "lab": "north"},
        "dataset": "flowers",
        "config": "c.yaml",
    }
