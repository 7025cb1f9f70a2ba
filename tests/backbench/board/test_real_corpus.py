"""docs/real: trained trunks on photographs, as `benchmarks/real.py` keeps them."""

import csv
import re
from pathlib import Path

import pytest

from backbench.board.board import collect, difference
from backbench.cli import program

ROOT = Path(__file__).parents[3]
REAL = ROOT / "docs" / "real"
AGAIN = (
    "backbench leaderboard docs/real/records --csv docs/real/leaderboard.csv"
    " --html docs/real/leaderboard.html"
)


def table(name: str) -> list[dict[str, str]]:
    with (REAL / name).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def board():
    return collect([REAL / "records"])


def test_every_number_follows_from_what_is_kept(board, capsys):
    assert program.main(["verify", str(REAL / "records")]) == 0
    counts = re.findall(
        r"^ +(\d+) (?:level )?(\d|do not fit)", capsys.readouterr().out, re.M
    )
    found = {what: int(count) for count, what in counts}
    boxes = [
        column.metric
        for column in board.measured_columns()
        for _ in board.measured(column)
        if "_rcnn" in column.task
    ]
    # Resamples of an AP are kept, without the boxes; those of its three sizes are not
    of_sizes = [
        metric for metric in boxes if metric in ("bbox_APs", "bbox_APm", "bbox_APl")
    ]
    assert found["3"] > 200
    assert found["2"] == len(boxes) - len(of_sizes)
    assert found["1"] == len(of_sizes)
    assert found["do not fit"] == 0


def test_the_board_made_again_is_the_same_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["leaderboard", "docs/real/records", "-q"]
    for kind in ("csv", "html"):
        words += [f"--{kind}", str(tmp_path / f"leaderboard.{kind}")]
    assert program.main(words) == 0
    for name in ("leaderboard.csv", "leaderboard.html"):
        made = (tmp_path / name).read_bytes()
        assert made == (REAL / name).read_bytes(), f"{name}: run {AGAIN}"


def test_the_kept_differences_are_those_of_the_records(board):
    columns = {column.name: column for column in board.measured_columns()}
    rows = table("above_random.csv")
    assert len(rows) >= 5 * 5
    for row in rows:
        column = columns[row["column"]]
        cells = {each.name: cell for each, cell in board.measured(column)}
        tested = difference(board, column, cells[row["trunk"]], cells["random"])
        assert f"{tested.value:.2f}" == row["points"]
        assert f"{tested.ci95[0]:.2f}" == row["low"]


def test_numbers_of_other_code_are_those_of_the_records(board):
    """What other code computed is within two pictures of a thousand, and within four for a network
    that nobody trained: all pictures are much alike to it."""
    values = {}
    for column in board.measured_columns():
        short = re.sub(r"[:@].*?(?=/)|@.*", "", column.name)
        for row, cell in board.measured(column):
            values[f"{row.name}, {short}"] = cell.value
    shared = [row for row in table("again.csv") if row["number"] in values]
    assert len(shared) >= 4
    for row in shared:
        assert f"{values[row['number']]:.2f}" == row["against"]
        most = 0.4 if "@random" in row["number"] else 0.2
        assert abs(float(row["again"]) - float(row["against"])) <= most


def test_the_pages_tables_are_of_the_records(board):
    """Each field of the README's and the page's first table is the number of its column."""
    columns = {
        column.name.partition("@")[0]: column for column in board.measured_columns()
    }
    shown = 0
    for page in (ROOT / "README.md", ROOT / "docs" / "real.md"):
        for line in page.read_text().splitlines():
            found = re.search(
                r"^\|.*`((?:knn|fewshot|logreg)/cifar10_\w+/\w+)` *\|", line
            )
            fields = [each.strip() for each in line.split("|")[2:-1]]
            if found is None or len(fields) != 6:
                continue
            column = columns[found[1]]
            cells = {row.name: cell.value for row, cell in board.measured(column)}
            names = ["random", "byol", "mio", "moco-v2", "lorac", "supervised"]
            assert [each.split()[0] for each in fields] == [
                f"{cells[name]:.1f}" for name in names
            ]
            shown += 1
    assert shown >= 6


def test_records_name_no_folder_of_the_machine():
    texts = [file.read_text() for file in REAL.rglob("*.jsonl")]
    assert len(texts) > 4
    assert not [text for text in texts if '"cwd"' in text]
    for text in [*texts, (REAL / "leaderboard.html").read_text()]:
        assert not re.findall(
            r'[" ](?:/|~/|file:)(?:home|root|tmp|work|scratch|data)\b', text
        )
