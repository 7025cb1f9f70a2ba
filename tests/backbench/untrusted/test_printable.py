"""Texts of strangers: which characters are refused, and how the others are printed."""

import shlex

import pytest

from backbench.untrusted import printable


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("", None),
        ("plain, ü, 図", None),
        ("a\u00a0b", None),  # a space that Python does not print is none of these
        ("a\u00a0b\x1b[0m\n", r"'\x1b'"),  # the first of them is named
        ("two\nlines", r"'\n'"),
        ("turned\u202e", r"'\u202e'"),
        ("zero\u200bwidth", r"'\u200b'"),
        ("line\u2028end", r"'\u2028'"),
        ("paragraph\u2029end", r"'\u2029'"),
        ("half\udc80", r"'\udc80'"),
    ],
)
def test_the_first_control_character_is_found(text, character):
    assert printable.control_in(text) == character


def test_some_control_characters_may_be_allowed():
    assert printable.control_in("a\tb\nc", allowed="\t\n") is None
    assert printable.control_in("a\tb\nc", allowed="\t") == r"'\n'"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("a\nb", ("", r"'\n'")),
        ({"a": 1, "b": {"c": ["x", ("y", "z\x07")]}}, ("b.c[1][1]", r"'\x07'")),
        (["x", {"a": "y\n"}], ("[1].a", r"'\n'")),
        ({"a": {"b\n": "c\x07"}}, (r"'b\n'", r"'\n'")),
        ({1: ["\n"]}, ("1[0]", r"'\n'")),
        ({"a": [1, None, 2.5, True], "b": ("c", {"d": "e"})}, None),
    ],
)
def test_plain_values_are_searched_to_their_leaves(value, found):
    assert printable.control_below(value) == found


def test_what_is_allowed_in_texts_is_not_allowed_in_keys():
    texts = {"a": ["b\n", {"c": "d\n"}]}
    assert printable.control_below(texts, allowed="\n") is None
    assert printable.control_below({"a\n": "b"}, allowed="\n") == (r"'a\n'", r"'\n'")


def test_a_text_is_shown_in_one_line_of_bounded_length():
    assert printable.shown("x" * 200) == "x" * 200
    assert printable.shown("x" * 201) == "x" * 200 + "..."
    assert printable.shown("abcd", 4) == "abcd"
    assert printable.shown("abcde", 4) == "abcd..."
    assert printable.shown("ü\x1b[1m\nend") == r"ü\x1b[1m\nend"
    assert printable.shown("a\nbcd", 2) == r"a\n..."


@pytest.mark.parametrize(
    "line",
    [
        "backbench linear --data data",
        " linear\t --data  data\n",
        "",
        "'one word' two",
        '"one word" two',
        r"one\ word two",
    ],
)
def test_a_command_is_split_as_a_shell_does(line):
    assert printable.of_command(line) == shlex.split(line)


def test_half_a_quotation_is_no_command():
    with pytest.raises(ValueError, match="No closing quotation"):
        printable.of_command("linear 'data")


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd", "'+cmd"),
        ("-x", "'-x"),
        ("@sum", "'@sum"),
        ("\tx", "'\tx"),
        ("\rx", "'\rx"),
        ("-", "'-"),
        ("-5.5", "-5.5"),
        ("+2.E3", "+2.E3"),
        ("-.5e1", "-.5e1"),
        ("-5 + 1", "'-5 + 1"),
        ("a=b", "a=b"),
        ("", ""),
        ("a\udc80", r"a\udc80"),
        ("=\udc80", r"'=\udc80"),
        (-5, -5),
        (None, None),
    ],
)
def test_a_spreadsheet_takes_no_text_for_a_formula(value, cell):
    assert printable.spreadsheet(value) == cell


def test_dividers_of_a_columns_name_are_escaped_in_its_parts():
    assert printable.part("a%b/c@d+e:f`g h-i_j") == "a%25b%2Fc%40d%2Be%3Af%60g h-i_j"
