"""Fifty steps of each paper's method lose what they lost when the file was written."""

import pytest
from support import traces


@pytest.mark.parametrize("dtype", traces.DTYPES)
@pytest.mark.parametrize("paper", traces.PAPERS)
def test_losses_are_those_of_the_file(paper, dtype):
    found = traces.trace(paper, dtype)
    assert traces.far(found, traces.kept("cpu")[paper][dtype]) < traces.TOLERANCE[dtype]
