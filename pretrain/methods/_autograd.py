"""Connects the loss kernels with autograd.

Three losses (the queue's log-sum-exp, the nuclear norm, MIO's pairs) know their gradient once they
know their value: forward computes it along the way and saves it, and backward only scales it by
what comes from above. Nothing of the intermediate size, (N, K) or (2N, 2N), outlives forward.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GradientContext(Protocol):
    """The `ctx` of a torch.autograd.Function whose forward saves its own gradient."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
