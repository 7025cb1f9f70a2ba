"""Where the tests of tests/gpu run: on the first GPU. BACKBENCH_GPU_TESTS=cpu runs them on the CPU,
which shows that they would run, and nothing else."""

import os

import pytest
import torch

DEVICE = os.environ.get("BACKBENCH_GPU_TESTS", "cuda")
REAL = DEVICE == "cuda"
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(REAL and not torch.cuda.is_available(), reason="torch finds no GPU"),
]
