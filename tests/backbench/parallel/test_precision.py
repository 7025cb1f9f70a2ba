"""A machine without bfloat16 is told so, once."""

import subprocess
import sys

import pytest

CODE = """
from backbench.parallel import precision
print(precision.bf16_is_quick("cpu"), precision.bf16_is_quick("cuda"))
precision.warn_if_slow("cpu"), precision.warn_if_slow("cpu")
"""


@pytest.mark.parametrize("bf16", [True, False])
def test_a_cpu_without_bf16_is_told(bf16, monkeypatch):
    import torch

    if bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bf16")
    if not bf16:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(bf16), "True"]
    assert ran.stderr.count("no bf16 instructions") == (not bf16)
