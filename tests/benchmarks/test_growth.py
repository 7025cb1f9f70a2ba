"""The page of growth says of each kind of work what ten times of it cost."""

import math
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]


@pytest.fixture
def growth(tmp_path, monkeypatch):
    """The program, which writes its page and drawing into the test's folder."""
    monkeypatch.syspath_prepend(HOME / "benchmarks")
    import growth

    monkeypatch.setattr(growth, "PAGE", tmp_path / "growth.md")
    monkeypatch.setattr(growth, "DRAWING", tmp_path / "growth.svg")
    return growth


def points(*pairs):
    return {size: {"seconds": seconds, "megabytes": 7.0} for size, seconds in pairs}


def test_the_exponent_is_that_of_the_two_largest_sizes(growth):
    assert growth.exponent(points((10, 5.0))) is None
    assert growth.exponent(points((10, 5.0), (100, 1.0), (1000, 10.0))) == 1
    squared = growth.exponent(points((200, 4.0), (100, 1.0)))
    assert math.isclose(squared, 2)


def test_the_page_names_what_grows_faster_than_its_work(growth, tmp_path):
    found = {
        "listing": points((1000, 0.1), (10_000, 1.0)),
        "jobs": points((100, 0.1), (1000, 10.0)),
    }
    growth.write_page(found)
    growth.draw_all(found)
    page = (tmp_path / "growth.md").read_text()
    assert "| Expand a grid | 1,000 jobs | 10.00 | 7 | 2.00 |" in page
    assert "| List a class folder | 10,000 images | 1.00 | 7 | 1.00 |" in page
    assert "their work: expand a grid (2.00)." in page
    assert (tmp_path / "growth.svg").read_text().count("CPU s") == 2


def test_the_turn_with_the_fewest_seconds_stands(growth, tmp_path, monkeypatch):
    turns = iter([points((10, 3.0))[10], points((10, 2.0))[10]])
    monkeypatch.setattr(growth, "measure_once", lambda *_: next(turns))
    assert growth.measure("jobs", 10, tmp_path)["seconds"] == 2
    assert next(turns, None) is None


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("results", 100),
        ("jobs", 10),
        pytest.param("readings", 2, marks=pytest.mark.slow),
    ],
)
def test_work_is_as_large_as_it_says(growth, name, size, tmp_path):
    done = growth.WORKS[name].make(tmp_path, size)()
    if name == "jobs":
        assert len(done.jobs) == size
    elif name == "readings":
        assert len({row.checkpoint for row in done}) == size
        assert {row.task for row in done} == {"knn", "fewshot", "logreg"}
    else:
        assert len(done.rows) * len(done.columns) == size


def test_what_was_measured_is_kept(growth, tmp_path):
    file = tmp_path / "growth.jsonl"
    assert growth.kept_points(file) == {}
    file.write_text('{"work": "jobs", "size": 10, "seconds": 0.5, "megabytes": 1.0}\n')
    assert growth.kept_points(file)["jobs"][10]["seconds"] == 0.5
