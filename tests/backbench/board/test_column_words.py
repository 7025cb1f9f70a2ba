"""Columns in a sentence: as short as tells them apart, by name or by their number."""

import pytest

from backbench.board.board import Column
from backbench.board.column_words import as_places, short_names


def test_a_column_is_named_by_as_much_as_tells_it_from_the_others():
    columns = [
        Column("fewshot", "birds", "top1", "v1"),
        Column("knn", "birds", "top1_k20", "v1"),
        Column("knn", "birds", "top1_k20", "v1", split="val"),
        Column("linear", "birds", "top1", "v1"),
        Column("linear", "birds", "top1", "v1", "other"),
        Column("linear", "boats", "top1", "v2", "other", "val"),
    ]
    assert list(short_names(columns).values()) == [
        "Few labels",
        "Nearest neighbours on birds",
        "Nearest neighbours on birds:val",
        "Linear probe on birds by v1",
        "Linear probe on birds by v1+other",
        "Linear probe on boats:val",
    ]
    assert list(short_names(columns[:2]).values()) == [
        "Few labels",
        "Nearest neighbours",
    ]


NAMES = [
    "Linear probe on birds",
    "Linear probe on boats",
    "Few labels",
    "Mask R-CNN",
    "x",
]
COLUMNS = [Column("linear", name, "top1", "v1") for name in NAMES]
NAMED = dict(zip(COLUMNS, NAMES))
SOME = "2 of 5 measured"


@pytest.mark.parametrize(
    ("some", "of", "remarks", "said"),
    [
        ([2], 1, {}, "Few labels"),
        ([0, 3], 5, {}, "Linear probe on birds and Mask R-CNN"),
        (
            [0, 1, 2, 3],
            5,
            {},
            "Linear probe on birds and boats, and Few labels, and Mask R-CNN",
        ),
        ([0, 1], 5, {}, "Linear probe on birds and boats"),
        # Many, or all of several, are counted
        ([0, 1, 2, 3, 4], 6, {}, "5 measurements"),
        ([0, 1, 2], 3, {}, "each of the 3 measurements"),
        (
            [0, 1, 2],
            3,
            dict.fromkeys([0, 1, 2], SOME),
            "each of the 3 measurements (in each a rival has no number)",
        ),
        (
            [0, 1, 2, 3, 4],
            6,
            {1: SOME, 4: "1 of 5 measured"},
            "5 measurements (in 2 of them a rival has no number)",
        ),
        # Neighbours share a remark
        (
            [0, 1, 2, 3],
            5,
            {0: SOME, 1: SOME, 3: SOME},
            f"Linear probe on birds and boats ({SOME}), Few labels and Mask R-CNN ({SOME})",
        ),
        ([2], 1, {2: SOME}, f"Few labels ({SOME})"),
    ],
)
def test_columns_are_named_or_counted(some, of, remarks, said):
    chosen = [COLUMNS[index] for index in some]
    everything = [*COLUMNS, Column("knn", "more", "top1", "v1")][:of]
    about = {COLUMNS[index]: remark for index, remark in remarks.items()}
    assert as_places(chosen, everything, NAMED, about) == said
