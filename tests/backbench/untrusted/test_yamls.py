"""YAML of strangers: what it may hold, and what it may cost."""

import math

import pytest

from backbench.untrusted import yamls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2E5", -2e5),
        ("+1_000.5e+1", 10005.0),
        (".5e1", 5.0),
        ("3.e2", 300.0),
        ("1e", "1e"),
        ("e4", "e4"),
        ("1e4x", "1e4x"),
        ("'1e4'", "1e4"),
        ("0x10", 16),
        ("yes", True),
        ("~", None),
        ("2024-01-31", "2024-01-31"),
        ("{a: [1, 2.5, b], c: {}}", {"a": [1, 2.5, "b"], "c": {}}),
    ],
)
def test_values_are_plain(text, value):
    read = yamls.decode(text)
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    "text", ["!!set {a}", "!!binary aGk=", "!!timestamp 2024-01-31", "!mine a"]
)
def test_other_tags_are_refused(text):
    with pytest.raises(ValueError, match="could not determine a constructor"):
        yamls.decode(text)


@pytest.mark.parametrize(
    "text",
    ["a: 1\nb: 2\na: 3", "x:\n- y: {b: 1, a: 1, b: 2}", "? [1]\n: 2\na: 1\na: 2"],
)
def test_a_key_that_stands_twice_is_named(text):
    key = "b" if "y" in text else "a"
    with pytest.raises(ValueError, match=f"the key '{key}' stands twice in one group"):
        yamls.decode(text)


def test_a_key_is_a_single_value():
    with pytest.raises(ValueError, match="found unhashable key"):
        yamls.decode("? [1]\n: 2")


def test_groups_may_be_merged_more_than_once():
    text = "a: &a {x: 1, y: 1}\nb: &b {z: 3}\nc: {<<: *a, <<: *b, y: 2}"
    assert yamls.decode(text)["c"] == {"x": 1, "y": 2, "z": 3}


def test_whole_numbers_have_128_bits():
    largest = 2**128 - 1
    for text in (str(largest), hex(largest), f"-{largest}"):
        assert abs(yamls.decode(text)) == largest
    with pytest.raises(ValueError, match="a whole number of 129 bits"):
        yamls.decode(str(largest + 1))


def test_a_long_text_stands_in_quotes():
    longest = "7a" * 2048
    assert yamls.decode(longest) == longest
    with pytest.raises(ValueError) as refused:
        yamls.decode(f"{longest}b")
    said = "'7a7a7a7a7a7a7a7a7a7a...' has 4097 characters; quote long texts"
    assert str(refused.value) == said
    assert yamls.decode(f'"{longest}b"') == f"{longest}b"


def test_forty_levels_are_read():
    for begin, end in (("[", "]"), ("{a: ", "}")):
        yamls.decode(begin * 40 + end * 40)
        with pytest.raises(ValueError, match="nested more than 40 levels deep"):
            yamls.decode(begin * 41 + end * 41)
    # Levels end: many groups beside one another are not deep
    assert len(yamls.decode(f"[{'[[]], ' * 41}]")) == 41


# Texts of exactly 20,000 values: a list is one, and so is each 100 characters of a text
FULL = {
    "items": lambda more: f"[{'0,' * (19_999 + more)}]",
    "nested": lambda more: f"[[{'0,' * 9_998}], {{a: [0]}}, {'0,' * (9_996 + more)}]",
    "text": lambda more: f'"{"x" * (1_999_999 + more)}"',
    "aliases of a list": lambda more: (
        f"[&a [{'0,' * 99}], {'*a, ' * 198}{'0,' * (99 + more)}]"
    ),
    "aliases of a text": lambda more: (
        f"[&a '{'x' * 9_950}', {'*a, ' * 198}{'0,' * (99 + more)}]"
    ),
}


@pytest.mark.parametrize("text", FULL.values(), ids=FULL)
def test_twenty_thousand_values_are_read(text):
    yamls._refuse_costly(text(0))
    with pytest.raises(ValueError, match="stands for more than 20000 values"):
        yamls._refuse_costly(text(1))


def test_an_alias_of_what_it_is_in_has_no_end():
    with pytest.raises(ValueError, match="stands for more than 20000 values"):
        yamls.decode("&a [*a]")


@pytest.mark.parametrize("length", [1, 9_000])
def test_a_value_belongs_to_whoever_reads_it(length):
    text = f"{{a: [{'1,' * length}]}}"
    first = yamls.decode(text)
    first["a"].clear()
    assert yamls.decode(text) == {"a": [1] * length}


def test_what_is_written_is_read_back_as_it_was():
    value = {
        "b": 1e-4,
        "a": "1e-4",
        "ü": ["inf", "nan", "-1e5", ".5e1", math.inf, None, True, "true", "2024-01-31"],
        "c": {"d": {"e": [1, 2]}, "f": {}},
    }
    text = yamls.encode(value)
    assert yamls.decode(text) == value
    assert list(yamls.decode(text)) == ["b", "a", "ü", "c"]
    # One key a line, in letters that people read; what others would take for a number is quoted
    assert "ü:\n" in text
    assert "  d:\n    e:\n" in text
    for number in ("inf", "nan"):
        assert f"- '{number}'\n" in text


def test_what_is_no_yaml_is_said_in_one_line():
    with pytest.raises(ValueError) as refused:
        yamls.decode("a: [1\nb: 2")
    said = str(refused.value)
    assert "\n" not in said
    assert "unicode string" not in said
    assert "at line 2, column 2" in said


def test_a_file_has_at_most_half_a_megabyte(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("ü: 1 #" + "-" * (512 * 1024 - 7))
    assert yamls.read(file) == {"ü": 1}
    file.write_text("ü: 1 #" + "-" * (512 * 1024 - 6))
    with pytest.raises(OSError, match="524289 bytes, more than any such file has"):
        yamls.read(file)
