"""Which rows can be compared, and what a verdict says of rows that were, or were not, measured together."""

import numpy as np
import pytest

from backbench.board import groups, verdict
from backbench.board.verdict import RankedGroup
from backbench.stats.rank_intervals import Ranking, RankPlace

NAN = np.nan


def table(rows, *columns):
    """Values (rows, columns): each column is known by the rows that have a number there."""
    values = np.full((rows, len(columns)), NAN)
    for number, there in enumerate(columns):
        values[list(there), number] = 50.0
    return values


def test_rows_are_connected_by_chains_of_columns():
    # 0 - 9 - 2 - 7 is a chain of three columns; 6 has no number
    values = table(10, (2, 7), (0, 9), (9, 2), (1, 3), (5,), (4, 8), (4, 8))
    assert groups.connected(values) == [[0, 2, 7, 9], [4, 8], [1, 3], [5]]
    assert groups.connected(values[[6]]) == []
    met = groups.meetings(values[[0, 9, 2]])
    assert met.tolist() == [
        [True, True, False],
        [True, True, True],
        [False, True, True],
    ]


def group(names, leaders, apart=(), *, interval=(1, 1), tested=True):
    """A group in the order of its names, of which some lead; pairs of `apart` never met."""
    places = []
    for name in names:
        number = 1 if name in leaders else 2
        places.append(RankPlace(number, interval, None, 50.0, 3, number))
    met = np.ones((len(names), len(names)), bool)
    for one, other in apart:
        a, b = names.index(one), names.index(other)
        met[a, b] = met[b, a] = False
    return RankedGroup(
        names=list(names),
        title="all 3 columns",
        basis="for other columns like these 3",
        standing=Ranking(places, "columns", 3, np.zeros(met.shape, bool), tested),
        met=met,
    )


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (
            group("abc", "a"),
            "a leads alone over all 3 columns: rank 1 of 3 with 95% confidence, for other"
            " columns like these 3",
        ),
        (
            group("abc", "b", [("b", "c")], interval=(1, 2)),
            "b leads alone over all 3 columns: rank 1 to 2 of 3 with 95% confidence, for"
            " other columns like these 3; b was never measured with c",
        ),
        (
            group("abcd", "ac"),
            "a and c lead the 4 over all 3 columns and cannot be told apart, with 95%"
            " confidence for other columns like these 3",
        ),
        (
            group("abcd", "abc", [("b", "c"), ("a", "d")]),
            "a, b and c lead the 4 over all 3 columns and were not all measured together,"
            " with 95% confidence for other columns like these 3; a was never measured with d",
        ),
        # The first leader names the other one, and the rows behind both
        (
            group("abcd", "abc", [("b", "c"), ("b", "d")]),
            "a, b and c lead the 4 over all 3 columns and were not all measured together,"
            " with 95% confidence for other columns like these 3; b was never measured with"
            " c and d",
        ),
        (
            group("abc", "ab", [("a", "b"), ("a", "c")]),
            "a and b lead the 3 over all 3 columns and were never measured together, with"
            " 95% confidence for other columns like these 3",
        ),
        (
            group("abc", "abc"),
            "no clear winner: a, b and c cannot be told apart over all 3 columns",
        ),
        (
            group("abc", "abc", [("a", "c")]),
            "no clear winner among a, b and c over all 3 columns; a was never measured with c",
        ),
        (
            group("abcde", "abcde", tested=False),
            "no verdict on the 5 checkpoints over all 3 columns: too little was measured,"
            " trained again or kept to test them",
        ),
        (
            group("abcdefg", "abcdef"),
            "a, b, c, d and 2 others lead the 7 over all 3 columns and cannot be told apart,"
            " with 95% confidence for other columns like these 3",
        ),
    ],
)
def test_a_verdict_says_who_leads_and_who_never_met(of, says):
    assert of.clause() == says
    assert of.is_decided == ("alone" in says)
    assert of.begins_with_name == (says[:3] != "no ")


def test_an_interval_of_ranks_is_one_number_where_its_ends_are():
    assert group("ab", "a").interval(1, "-") == "1"
    assert group("ab", "a", interval=(2, 4)).interval(0, "-") == "2-4"


@pytest.mark.parametrize(
    ("names", "some", "everybody", "in_braces"),
    [
        ("a", "a", "a", "a"),
        ("ab", "a and b", "a and b", "{a, b}"),
        ("abc", "a, b and c", "a, b and c", "{a, b, c}"),
        ("abcd", "a, b, c and d", "a, b, c and d", "{a and 3 others}"),
        ("abcde", "a, b, c, d and 1 other", "the 5 checkpoints", "{a and 4 others}"),
        ("abcdef", "a, b, c, d and 2 others", "the 6 checkpoints", "{a and 5 others}"),
    ],
)
def test_names_in_a_sentence(names, some, everybody, in_braces):
    assert verdict.some(list(names)) == some
    assert verdict.everybody(list(names)) == everybody
    assert verdict.in_braces(list(names)) == in_braces
