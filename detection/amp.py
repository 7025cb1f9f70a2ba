"""Mixed precision, the same in both engines: off, bfloat16, or float16 with a scaled loss.

Forward and backward of a training step run in it; evaluation and the re-estimation of batch norm
do not, as in Detectron2 (engine/train_loop.py::AMPTrainer, and its PreciseBN hook).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.parallel import precision

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}  # SOLVER.AMP.PRECISION
ENABLED, PRECISION = "SOLVER.AMP.ENABLED", "SOLVER.AMP.PRECISION"


class MixedPrecision:
    """Autocast and loss scaling for training steps. `dtype` is None where mixed precision is off;
    the step is then the ordinary one."""

    def __init__(self, cfg: CfgNode, device: torch.device) -> None:
        amp = cfg.SOLVER.AMP
        if amp.PRECISION not in PRECISIONS:
            raise BadInput(f"{PRECISION} {amp.PRECISION}: {' or '.join(PRECISIONS)}")
        self.device = device.type
        self.dtype = PRECISIONS[amp.PRECISION] if amp.ENABLED else None
        if self.dtype is torch.bfloat16:
            precision.warn_if_slow(device.type)
        # bfloat16 reaches as far as float32: only float16's gradients would vanish.
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.dtype is torch.float16)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.dtype)

    def descend(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimiser step on this loss alone; skip it if float16 overflowed."""
        optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
