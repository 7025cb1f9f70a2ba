"""Decides what float32 means on a GPU, and asks a CPU whether it computes in bfloat16."""

import functools
from typing import Literal

from backbench.runs.terminal import log

# How a protocol computes. fp32 is exact to the last digit. tf32 rounds the operands of convolutions
# and matrix products to ten bits, which is several times as fast on an A100 and its successors. bf16
# is autocast
Precision = Literal["fp32", "tf32", "bf16"]


def use(precision: Precision) -> None:
    """Set the precision of the whole process, from here on.

    Left alone, torch runs convolutions in TF32 where a GPU has it: features then move by 4e-4 to
    8e-4 of their size, under the name of fp32."""
    import torch

    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def bf16_is_quick(device: str) -> bool:
    """Return True if bf16 is no slower than float32: on a GPU, and on a CPU with AVX-512 BF16 or AMX.

    Any other CPU is 6 times slower in it."""
    import torch

    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache  # a process says it once
def warn_if_slow(device: str) -> None:
    """Warn before a computation in bfloat16 on a kind of device that is slow in it."""
    if not bf16_is_quick(device):
        log.warning("this CPU has no bf16 instructions: bf16 is slower than fp32 here")
