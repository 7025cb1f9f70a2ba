"""Fifty steps of each paper's method on a GPU against the CPU's file, and against its own."""

import pytest
from support import traces
from support.gpu import DEVICE, REAL, on_gpu

from backbench.parallel import precision

pytestmark = on_gpu


@pytest.fixture(autouse=True)
def exact():
    precision.use("fp32")


@pytest.mark.parametrize("dtype", traces.DTYPES)
@pytest.mark.parametrize("paper", traces.PAPERS)
def test_losses_are_those_of_the_cpu(paper, dtype):
    found = traces.trace(paper, dtype, DEVICE)
    assert traces.far(found, traces.kept("cpu")[paper][dtype]) < traces.TOLERANCE[dtype]


@pytest.mark.skipif(not REAL, reason="the CPU's file is looked at by tests/pretrain/test_traces.py")
def test_losses_are_those_of_the_file():
    if not traces.file_of(DEVICE).exists():
        traces.write(DEVICE)
        pytest.skip(f"{traces.file_of(DEVICE)} is written for the first time: commit it")
    kept = traces.kept(DEVICE)
    for paper in traces.PAPERS:
        for dtype, tolerance in traces.TOLERANCE.items():
            assert traces.far(traces.trace(paper, dtype, DEVICE), kept[paper][dtype]) < tolerance
