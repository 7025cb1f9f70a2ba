"""Reads every layer of a trunk in several ways, in one pass: its class token, the mean and the maximum
over its places.

A way to read a layer is a cell. One feature holds all cells, one after the other, behind the trunk's
own feature, and each cell is a range of its columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from backbench.errors import BadInput, Failed
from backbench.weights.trunk import LayerOutputs, Trunk

# Part of an entry's name in the cache: another one where the same cells would hold other numbers
NAME = "class token, mean and maximum of each layer"
# Features computed in another order of additions differ by less than this part of the largest number
_ALIKE = 1e-4


@dataclass(frozen=True)
class LayerCell:
    """A layer and a pooling, and where its feature lies."""

    layer: str  # block 12, stage 4; "" of a feature that no layer alone gives
    pooling: str  # cls | mean | cls+mean | max; "usual" where there is no layer
    columns: slice

    @property
    def name(self) -> str:
        return f"{self.layer} {self.pooling}".strip()


@dataclass(frozen=True)
class LayerCells:
    """The cells of a trunk."""

    usual: LayerCell  # what `forward` gives
    others: tuple[LayerCell, ...]  # the layer nearest to the image first
    dim: int  # of all columns

    @staticmethod
    def of(module: Trunk, picture: Tensor) -> "LayerCells":
        """Find the cells of a trunk by a look at one picture (1, 3, H, W)."""
        if not module.strides:
            raise BadInput(
                f"{module.arch} gives no maps of its layers, so none can be chosen;"
                " read it by logreg"
            )
        outputs = module.layers(picture)
        usual = LayerCell("", "usual", slice(0, outputs.feature.shape[1]))
        others = []
        everything = read(outputs)
        feature = everything[:, usual.columns]
        if not _alike(feature, module(picture)):
            raise Failed(
                f"{module.arch}: the pass over its layers gives another feature"
            )
        for cell in _layout(outputs):
            # The usual feature is mostly that of a cell, which then names it
            values = everything[:, cell.columns]
            if _alike(values, feature) and not usual.layer:
                usual = LayerCell(cell.layer, cell.pooling, usual.columns)
            else:
                others.append(cell)
        return LayerCells(usual, tuple(others), everything.shape[1])

    @property
    def in_order(self) -> list[LayerCell]:
        """All cells; of equal scores the first counts, so the usual one and the last layers lead."""
        return [self.usual, *reversed(self.others)]


def read(outputs: LayerOutputs) -> Tensor:
    """Return the feature that holds all cells: (N, dim)."""
    parts = [outputs.feature]
    for place, layer in enumerate(outputs.maps):
        if outputs.class_tokens:
            parts.append(outputs.class_tokens[place])
        parts += [layer.mean((2, 3)), layer.amax((2, 3))]
    return torch.cat([part.float() for part in parts], dim=1)


def _layout(outputs: LayerOutputs) -> Iterator[LayerCell]:
    """Yield the cells of `read`."""
    begin = outputs.feature.shape[1]
    for place, layer in enumerate(outputs.maps):
        name = f"{outputs.what} {place + 1}"
        width = layer.shape[1]
        if outputs.class_tokens:
            yield LayerCell(name, "cls", slice(begin, begin + width))
            yield LayerCell(name, "cls+mean", slice(begin, begin + 2 * width))
            begin += width
        yield LayerCell(name, "mean", slice(begin, begin + width))
        yield LayerCell(name, "max", slice(begin + width, begin + 2 * width))
        begin += 2 * width


def _alike(a: Tensor, b: Tensor) -> bool:
    """Return True for equal features, but for the order of sums."""
    if a.shape != b.shape:
        return False
    largest = float(b.abs().max())
    return float((a - b).abs().max()) <= _ALIKE * largest
