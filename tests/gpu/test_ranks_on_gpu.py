"""Two ranks that share a real GPU equal one process on it, in loss, gradients and state."""

import pytest
import torch
from support import gpu_ranks
from support.gpu import DEVICE, on_gpu
from support.methods import CASES, train

from backbench.parallel import precision

# One process has the ranks, however many run the tests
pytestmark = [*on_gpu, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return gpu_ranks.all_cases(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(made, name):
    precision.use("fp32")
    expected = train(CASES[name], device=DEVICE)
    for rank in made:
        assert rank[name].keys() == expected.keys()
        for key, value in expected.items():
            found = rank[name][key]
            torch.testing.assert_close(found, value.cpu(), rtol=1e-7, atol=1e-8, msg=key)
