"""Decides what float32 means on a GPU."""

from typing import Literal

# Of a protocol: fp32 to the last digit; tf32, convolutions and products of operands that are rounded
# to ten bits, which on an A100 and its successors is several times as fast; bf16 autocast
Precision = Literal["fp32", "tf32", "bf16"]


def use(precision: Precision) -> None:
    """For the whole process, from here on. Left alone, torch runs convolutions in TF32 wherever a
    GPU has it: features then move by 4e-4 to 8e-4 of their size, under the name of fp32."""
    import torch

    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
