"""Projection and prediction heads, and a network on views of several sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backbench.requests.bounds import Count


@dataclass(frozen=True, kw_only=True)
class Head:
    """Has `layers` linear maps with ReLU between them. One before a batch norm has no bias."""

    layers: Count = 2
    hidden: Count | None = None  # null: the input's width
    dim: Count = 128
    batchnorm: bool = True  # after every hidden layer
    last_batchnorm: bool = False  # after the last layer as well
    last_affine: bool = True  # whether that last norm has affine parameters
    last_bias: bool = True  # of the last linear map, where no norm follows it


MOCO_HEAD = Head(batchnorm=False)  # MoCo v2, JCL, LORAC
SIMCLR_HEAD = Head(last_batchnorm=True)
BYOL_HEAD = Head(hidden=4096, dim=256)  # projector and predictor
SIMSIAM_HEAD = Head(
    layers=3, hidden=2048, dim=2048, last_batchnorm=True, last_affine=False
)
SIMSIAM_PREDICTOR = Head(hidden=512, dim=2048)
SWAV_HEAD = Head(hidden=2048)
VICREG_HEAD = Head(layers=3, hidden=8192, dim=8192, last_bias=False)
WMSE_HEAD = Head(hidden=1024, dim=64)
HCL_HEAD = Head(hidden=512)  # DCL, HCL and CLLR's released code
CMC_HEAD = Head(layers=1)
MIO_HEAD = Head(layers=3, hidden=2048, last_batchnorm=True)
# Barlow Twins, ARB
BARLOW_HEAD = Head(layers=3, hidden=2048, dim=2048, last_bias=False)


def build_head(config: Head, width: int) -> nn.Sequential:
    """Build a network (N, width) -> (N, config.dim)."""
    hidden = config.hidden or width
    modules: list[nn.Module] = []
    for _ in range(config.layers - 1):
        modules.append(nn.Linear(width, hidden, bias=not config.batchnorm))
        if config.batchnorm:
            modules.append(nn.BatchNorm1d(hidden))
        modules.append(nn.ReLU())
        width = hidden
    bias = config.last_bias and not config.last_batchnorm
    modules.append(nn.Linear(width, config.dim, bias=bias))
    if config.last_batchnorm:
        modules.append(nn.BatchNorm1d(config.dim, affine=config.last_affine))
    return nn.Sequential(*modules)


def forward_crops(
    network: Callable[[Tensor], Tensor], views: Sequence[Tensor], together: bool = True
) -> list[Tensor]:
    """Pass V views (n, 3, h, w) through the network -> V outputs (n, d). Where `together` is true,
    neighbours of equal size share one forward pass, and so batch norm's statistics."""
    if not together:
        return [network(view) for view in views]
    out: list[Tensor] = []
    start = 0
    for stop in range(1, len(views) + 1):
        if stop == len(views) or views[stop].shape != views[start].shape:
            out += network(torch.cat(list(views[start:stop]))).chunk(stop - start)
            start = stop
    return out
