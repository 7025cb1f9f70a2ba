"""What a person watches during pretraining: are the features alive, and what are they worth so far?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backbench.runlog import log

COLLAPSED_STD = 1e-3
COLLAPSED_RANK = 1.5


class Features:
    """Keeps the last features (N, d) that left the backbone in training, for `statistics`."""

    def __init__(self, backbone: nn.Module) -> None:
        self.last: Tensor | None = None
        backbone.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if module.training:
            self.last = output.detach()

    def statistics(self) -> dict[str, float]:
        return feature_statistics(self.last) if self.last is not None and len(self.last) > 1 else {}


@torch.no_grad()
def feature_statistics(features: Tensor) -> dict[str, float]:
    """(N, d) -> feature_std: per-dimension standard deviation of the unit features, times sqrt(d), so that isotropic
    features have 1 and equal ones 0; effective_rank: exp of the entropy of the normalised singular values of the
    centred features (Roy and Vetterli, 2007), at most min(N - 1, d)."""
    z = torch.nn.functional.normalize(features.double(), dim=1)
    centred = z - z.mean(0)
    std = centred.square().mean(0).sqrt().mean() * z.shape[1] ** 0.5
    gram = centred @ centred.T if len(z) <= z.shape[1] else centred.T @ centred
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    p = singular / singular.sum().clamp(min=1e-300)
    entropy = -torch.special.xlogy(p, p).sum()
    return {"feature_std": float(std), "effective_rank": float(entropy.exp())}


def warn_if_collapsed(row: dict[str, float], step: int) -> None:
    """Say so when all images get nearly the same features, or features along one line only."""
    std, rank = row.get("feature_std"), row.get("effective_rank")
    if std is not None and rank is not None and (std < COLLAPSED_STD or rank < COLLAPSED_RANK):
        log.warning("step %d: the representation collapses (feature std %.2g, effective rank %.3g)", step, std, rank)
