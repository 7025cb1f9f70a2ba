"""What every trunk offers to pretraining, probes, finetuning and detection."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Trunk(nn.Module, ABC):
    """An image encoder without a head.

    `arch` and `stem` name it in recipes and checkpoints; its state dict holds these names and
    nothing else. `feature_dim` is the width of what `forward` gives.
    """

    arch: str
    stem: str
    feature_dim: int

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W), normalised -> features (N, feature_dim)."""

    @abstractmethod
    def stages(self, x: Tensor) -> list[Tensor]:
        """Images (N, 3, H, W) -> the maps C2..C5 at strides 4, 8, 16 and 32, each (N, C, h, w)."""

    def fuse(self) -> None:
        """Merge, in place, what is one map in eval(): for trunks that only give features."""
