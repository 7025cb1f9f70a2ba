"""Decides what float32 means on a GPU, and asks a CPU whether it computes in bfloat16."""

import functools
from typing import Literal

from backbench.runs.terminal import log

# Of a protocol: fp32 to the last digit; tf32, convolutions and products of operands that are rounded
# to ten bits, which on an A100 and its successors is several times as fast; bf16 autocast
Precision = Literal["fp32", "tf32", "bf16"]


def use(precision: Precision) -> None:
    """Set it for the whole process, from here on. Left alone, torch runs convolutions in TF32 where
    a GPU has it: features then move by 4e-4 to 8e-4 of their size, under the name of fp32."""
    import torch

    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def bf16_is_quick(device: str) -> bool:
    """True for a GPU, and a CPU with AVX-512 BF16 or AMX; another is 6x slower than in float32."""
    import torch

    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache  # one line a process
def warn_if_slow(device: str) -> None:
    """For who is about to compute in bfloat16 on this kind of device."""
    if not bf16_is_quick(device):
        log.warning("this CPU has no bf16 instructions: bf16 is slower than fp32 here")
