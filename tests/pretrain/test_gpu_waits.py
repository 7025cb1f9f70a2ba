"""Every method on a GPU that is only pretended: nothing mixes the places, the numbers are the CPU's,
and between two rows of the log no step waits for the device."""

import pytest
import torch
from support.methods import CASES, train
from support.pretended_gpu import OnGpu, PretendedGpu

# What torch offers only with a look whether it has succeeded, once a step: (operation, how often)
DECOMPOSED: dict[str, int] = {}


@pytest.mark.parametrize("name", CASES)
def test_no_step_waits(name):
    expected = train(CASES[name])
    waits: list[str] = []
    with PretendedGpu() as gpu:
        got = train(CASES[name], gpu, waits)
    assert not waits, "\n".join(waits)
    for key, value in expected.items():
        assert isinstance(got[key], OnGpu), key
        torch.testing.assert_close(got[key].host, value, rtol=1e-7, atol=1e-9, msg=key)
