"""Whether a demo's own numbers lie where those of other demos lay."""

from pathlib import Path

import pytest

from backbench.cli import demo_ranges
from backbench.cli.demo import CHECKPOINTS
from backbench.records import store

RECORDS = Path(__file__).parents[3] / "docs" / "demo" / "records"
LINEAR = "linear/digits/top1"


@pytest.fixture(scope="module")
def demo():
    """The results of a whole demo."""
    results, problems = store.read(RECORDS)
    assert not problems
    return results


def test_every_pretrained_trunk_has_a_range_in_every_compared_column():
    ranges = demo_ranges.read()
    assert all(each.least <= each.median <= each.most for each in ranges)
    assert all(0 <= each.above <= each.runs for each in ranges)
    for task in demo_ranges.COMPARED:
        found = {each.trunk for each in ranges if each.column.startswith(task)}
        assert found == set(CHECKPOINTS) - {"random"}


def test_points_are_those_above_the_random_trunk(demo):
    points = demo_ranges.above_random(demo)
    of_linear = {r.name: r.value for r in demo if r.column.startswith(LINEAR)}
    expected = of_linear["lorac-demo"] - of_linear["random-demo"]
    assert points[LINEAR, "lorac"] == expected
    assert (LINEAR, "random") not in points


def test_what_lies_outside_is_named_with_its_range(demo):
    narrow = demo_ranges.Range("Some CPU", LINEAR, "lorac", 20, 20, 40.0, 41.0, 42.0)
    wide = demo_ranges.Range("Some CPU", LINEAR, "simclr", 20, 20, -99.0, 1.0, 99.0)
    lines = demo_ranges.told(demo, [narrow, wide])
    assert lines[0] == (
        "1 of 2 differences to the random trunk lie where 20 demos on Some CPU had them;"
        " outside:"
    )
    assert lines[1].startswith("  lorac in linear/digits/top1: +")
    assert lines[1].endswith("points, there +40.0 to +42.0")
    assert "compares nothing" in lines[2]


def test_detection_is_not_held_against_a_range(demo):
    column = "faster_rcnn/scenes:val/bbox_AP"
    of_boxes = demo_ranges.Range("Some CPU", column, "lorac", 20, 19, 0.0, 0.0, 0.0)
    assert demo_ranges.told(demo, [of_boxes]) == []


def test_ranges_are_read_as_they_were_written(tmp_path, monkeypatch):
    ranges = demo_ranges.read()
    monkeypatch.setattr(demo_ranges, "FILE", tmp_path / "ranges.csv")
    demo_ranges.write(ranges)
    assert demo_ranges.read() == ranges
