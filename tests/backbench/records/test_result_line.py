"""What one line of results may hold: the longest name, the largest number, and nothing beyond."""

import dataclasses
import json
import math

import pytest
from support.records import a_result

from backbench.errors import BadInput
from backbench.records import result_line, store
from backbench.records.result_line import LARGEST, parse, parse_line
from backbench.untrusted import jsons

LINE = json.loads(json.dumps(dataclasses.asdict(a_result(provenance={}))))


def changed(key, value):
    """The line with another value at a key, as provenance.size.measured."""
    line = json.loads(json.dumps(LINE))
    *groups, last = key.split(".")
    group = line
    for name in groups:
        group = group.setdefault(name, {})
    group[last] = value
    return line


# Key -> values that are allowed, and values just beyond them
BOUNDS = {
    "checkpoint": (["x" * 120, ""], ["x" * 121, 3, "a\x1b", "a\u2028"]),
    "name": (["x" * 300], ["x" * 301, None]),
    "protocol": (["x" * 120], ["x" * 121]),
    "engine": (["x" * 60, None], ["x" * 61, 3]),
    "epochs": ([0, 2**63 - 1, None], [-1, 2**63, 1.5, True]),
    "seed": ([-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, "1"]),
    "value": ([LARGEST, -LARGEST, None, float("nan")], [LARGEST * 1.001, "1", True]),
    "ci95": ([[1.0, 2], None], [[1.0], [1.0, 2.0, 3.0], [1.0, None], 3]),
    "chosen": ([{"any": [1]}, None], [[1], "x"]),
    "schema": ([1], [2, "1", None, True]),
    "provenance.trained_on": ([["a", "b:test"]], ["a", [3], ["x" * 121]]),
    "provenance.trunk.parameters": ([0, 10**12 - 1], [-1, 10**12, 1.0]),
    "provenance.trunk.side": ([1, 10**6 - 1], [0, 10**6]),
    "provenance.trunk.sides": ([[1, 10**6 - 1], []], [[0], [10**6], 5]),
    "provenance.trunk.gflops": ([0.0, None], [-0.1, "1"]),
    "provenance.size.measured": ([1, 10**6 - 1], [0, 10**6, None]),
    "provenance.size.trained": ([1, None, 10**6 - 1], [0, 10**6]),
    "provenance.predictions": (
        ["predictions/a.npz", "x" * 300],
        ["../a.npz", "a/../../b", "/a.npz", "x" * 301, None],
    ),
    "provenance.command": (
        ["backbench x 'a b'", ["backbench", "x"], "", None],
        ["backbench 'x", [3], 3, "a\nb"],
    ),
    "provenance.images": ([{"test": None}, {"test": 3}, 7], [{"test": "3"}, "7"]),
    "provenance.anything": ([[1, {"a": None}]], []),
    "origin.recorded": ([0.0, 5, -1.0], ["now", LARGEST * 1.001]),
    "origin.code": (["x" * 4096], ["x" * 4097]),
    "origin.also": ([[{"lab": "x"}], []], [{"lab": "x"}, ["x"]]),
    "mine": ([], [1, None]),
}


@pytest.mark.parametrize("key", BOUNDS)
def test_a_key_takes_what_its_type_allows_and_nothing_beyond(key):
    allowed, refused = BOUNDS[key]
    for value in allowed:
        found = parse(changed(key, value))
        if key == "value":
            assert found.value == value or math.isnan(value)
        elif "." not in key:
            kept = getattr(found, key)
            assert kept == (tuple(value) if isinstance(value, list) else value)
    for value in refused:
        with pytest.raises(BadInput) as caught:
            parse(changed(key, value))
        said = str(caught.value)
        assert "\n" not in said and "\x1b" not in said
        assert key.split(".")[0] in said, said


def test_a_line_says_what_is_wrong_with_which_key():
    def refused(line):
        with pytest.raises(BadInput) as caught:
            parse(line)
        return str(caught.value)

    assert refused([1]) == "a list, not a result"
    assert refused(changed("schema", 2)) == (
        "result of schema 2, not counted; this version reads 1"
    )
    assert refused(changed("name", "a\x1bb")) == (
        "'name' is 'a\\x1bb': it holds a control character"
    )
    assert refused(changed("seed", "1")) == (
        "'seed' is '1': Input should be a valid integer"
    )
    outside = refused(changed("provenance.scores", "../x"))
    assert outside.startswith("'provenance.scores' is '../x': ")
    assert outside.endswith("it lies outside of the run folder")
    assert "it is no command line (" in refused(changed("provenance.command", "a 'b"))
    nobody = refused(changed("task", "linnear"))
    assert nobody.endswith("result with unknown task 'linnear'; did you mean 'linear'?")
    missing = {key: value for key, value in LINE.items() if key != "metric"}
    assert refused(missing).startswith("'metric' is ")


def test_what_is_not_finite_is_undefined():
    for odd in (float("nan"), float("inf"), -float("inf")):
        assert parse(changed("value", odd)).value is None
        assert dataclasses.replace(a_result(provenance={}), value=odd).value is None
        half = dataclasses.replace(a_result(provenance={}), ci95=(1.0, odd))
        assert half.ci95 is None and half.value == 91.25


def test_a_column_is_named_by_the_parts_of_its_line():
    row = a_result(provenance={}, dataset="a/b", protocol="v+1", engine="e@f")
    assert row.column == "linear/a%2Fb/top1@v%2B1+e%40f"
    assert a_result(provenance={}).column == "linear/digits/top1@linear-demo-v1"
    other = dataclasses.replace(row, origin={"recorded": 1.0})
    assert other == row and dataclasses.replace(row, seed=1) != row


# Values of any type, in place of that of any key
ODD = [None, True, 0, 1.0, 10**39, float("nan"), "", "x" * 200, "\ud800", "\u202e", []]
ODD += [
    [1, 2.0],
    ["a"],
    {},
    {"schema": 1, "seed": 0},
    "/etc",
    '"schema": 1, "seed": 0}',
]


def written(line):
    """The line in bytes, its keys in the order of `store.append`."""
    return json.dumps(line, sort_keys=True).encode() + b"\n"


def outcome(read, line):
    """The result with the types of its values; or why it is none."""
    try:
        return repr(read(line))
    except BadInput as error:
        return str(error)


@pytest.mark.parametrize("key", [*LINE, *BOUNDS])
def test_a_line_in_bytes_is_read_as_its_dict_is(key):
    allowed, refused = BOUNDS.get(key, ([], []))
    for value in [*allowed, *refused, *ODD]:
        line = changed(key, value)
        # What JSON holds of it: lists for tuples
        data = json.loads(json.dumps(line))
        assert outcome(parse_line, written(line)) == outcome(parse, data), value


def test_a_schema_must_stand_in_the_line_itself():
    below = changed("provenance.more", {"schema": 1, "seed": 0})
    del below["schema"]
    last = changed("chosen", {"x": LINE["schema"]})
    del last["schema"]
    for line in (below, last, changed("schema", True), changed("schema", 1.0)):
        for content in (written(line), json.dumps(line).encode()):
            with pytest.raises(BadInput, match="not counted; this version reads 1"):
                parse_line(content)


def test_a_line_is_bounded_in_depth_and_digits():
    deep = []
    for _ in range(jsons.DEEPEST):
        deep = [deep]
    for value, why in ((10**jsons.MOST_DIGITS, "41 digits"), (deep, "60 levels deep")):
        with pytest.raises(ValueError, match=why):
            parse_line(written(changed("provenance.more", value)))


def test_lines_of_this_suite_are_read_without_a_dict(tmp_path, monkeypatch):
    row = a_result(provenance={"recipe": {"epochs": [1]}, "trained_on": ["a"]})
    store.append(tmp_path, [row])
    lines = (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True)
    other = json.dumps(json.loads(lines[0])).encode().replace(b'"schema": 1, ', b"")
    other = other.rstrip(b"}") + b', "schema": 1}'
    asked = []
    monkeypatch.setattr(result_line, "parse", asked.append)
    assert parse_line(lines[0]) == row and asked == []
    parse_line(other)
    assert asked[0]["name"] == "x"
