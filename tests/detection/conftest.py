"""A trunk that tests of detection share."""

import functools

import pytest

from backbench.detection import backbones


@pytest.fixture(scope="module")
def one_trunk():
    """Draw the random trunk once for all tests of a file: what they are about is in the data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbones, "read_trunk", functools.cache(backbones.read_trunk))
        yield
