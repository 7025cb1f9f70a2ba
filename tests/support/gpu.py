"""Where tests of tests/gpu run: the first GPU, or, to try them, BACKBENCH_GPU_TESTS=cpu."""

import os

import pytest
import torch

DEVICE = os.environ.get("BACKBENCH_GPU_TESTS", "cuda")
REAL = DEVICE == "cuda"
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(REAL and not torch.cuda.is_available(), reason="torch finds no GPU"),
]
