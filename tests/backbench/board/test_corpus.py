"""docs/demo: the demo's records as a lab would publish them, and the board made from them."""

import json
import re
from pathlib import Path

import pytest

from backbench.board.board import collect
from backbench.board.merge import without_folders
from backbench.cli import program

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


COLUMNS = {
    "linear probe, top-1": "linear/digits/top1@linear-demo-v1",
    "kNN (k = 20), top-1": "knn/digits/top1_k20@knn-demo-v1",
    "2 labels per class, 20 draws": "fewshot/digits/top1@fewshot-demo-v1",
    "10% of the labels, finetuned": "semi_10pct/digits/top1@semisup-demo-v1",
    "Faster R-CNN, box AP": "faster_rcnn/scenes:val/bbox_AP@detection-demo-frozen-v1+torchvision",
    "Mask R-CNN, mask AP": "mask_rcnn/scenes:val/segm_AP@detection-demo-frozen-v1+torchvision",
    "Keypoint R-CNN, keypoint AP": "keypoint_rcnn/scenes:val/keypoints_AP"
    "@detection-demo-frozen-v1+torchvision",
}


def test_the_readmes_table_is_of_these_records_and_of_perturbed_runs(made):
    """Line by line; a plus is a number above the random trunk's in at least 19 of 20 runs."""
    board = collect([ROOT / "docs" / "demo" / "records"])
    rows = {row.name.removesuffix("-demo"): row for row in board.rows}
    by_name = {column.name: column for column in board.columns}
    kept = (ROOT / "benchmarks" / "demo_holds.txt").read_text()
    counts = re.findall(
        r"^(\w+) above random in column (\S+) +(\d+) of (\d+) ", kept, re.M
    )
    held = {
        (name, column): (int(above), int(runs)) for name, column, above, runs in counts
    }
    readme = (ROOT / "README.md").read_text()
    lines = [line.strip("|").split("|") for line in readme.splitlines()]
    table = {
        cells[0].strip(): [t.strip() for t in cells[1:]]
        for cells in lines
        if len(cells) == 6
    }
    for title, column in COLUMNS.items():
        for name, said in zip(table["percent"], table[title]):
            cell = board.cell(rows[name], by_name[column])
            shown = "-" if cell is None or cell.value is None else f"{cell.value:.1f}"
            if name != "random" and shown != "-":
                above, runs = held[name.replace("-", "_"), column.partition("@")[0]]
                assert f"{runs} runs" in readme
                shown += " +" if above >= 0.95 * runs else ""
            assert said == shown, f"{title}, {name}"


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
