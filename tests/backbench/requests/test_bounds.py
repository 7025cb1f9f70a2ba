"""The least and the most of each kind of number are accepted, and nothing beyond them."""

import dataclasses
from typing import Any

import pytest

from backbench.errors import BadInput
from backbench.recipes import config
from backbench.requests import bounds

# Kind -> (the least, the most)
KINDS = {
    "Seed": (-(2**63), 2**63 - 1),
    "Count": (1, 10**9),
    "CountOrNone": (0, 10**9),
    "Several": (2, 10**9),
    "Side": (1, 4096),
    "Batch": (1, 2**20),
    "Repeats": (1, 10_000),
    "Workers": (0, 1024),
    "Processes": (1, 4096),
}


def built(kind: str, number: float) -> Any:
    fields = [("number", getattr(bounds, kind))]
    one = dataclasses.make_dataclass("One", fields, frozen=True, kw_only=True)
    return config.build(one, {"number": number}, where="test").number


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers(kind):
    least, most = KINDS[kind]
    for number in (least, least + 1, most):
        assert built(kind, number) == number
    for number in (least - 1, most + 1):
        with pytest.raises(BadInput, match="'number' must be"):
            built(kind, number)


def test_other_numbers_are_finite_and_not_below_zero():
    assert built("NotNegative", 0) == 0 and built("Positive", 1e-9) == 1e-9
    for kind, number in (
        ("NotNegative", -1e-9),
        ("NotNegative", float("inf")),
        ("Positive", 0.0),
        ("Positive", float("inf")),
    ):
        with pytest.raises(BadInput, match="'number' must be"):
            built(kind, number)
