"""Python's collector is away while many objects are made, and comes back as it was."""

import gc

import pytest

from backbench.runs.garbage import many_objects


def test_the_collector_comes_back_as_it_was():
    assert gc.isenabled()
    with many_objects():
        assert not gc.isenabled()
        with many_objects():
            assert not gc.isenabled()
        # What was off stays off: the outer one is not done
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_comes_back_after_an_error():
    @many_objects()
    def fails():
        assert not gc.isenabled()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fails()
        assert gc.isenabled()
