"""Lists what there is of ResNets: architectures, stems, and published formats (resnet_formats.toml)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.errors import BadInput, nearest
from backbench.weights.family import Shape, Tables, TrunkInFile, format_row
from backbench.weights.tensor_names import unwrapped

if TYPE_CHECKING:
    from torch import Tensor

# Name -> torchvision's kind of block, and how many each stage has
ARCHS = {
    "resnet18": ("BasicBlock", (2, 2, 2, 2)),
    "resnet34": ("BasicBlock", (3, 4, 6, 3)),
    "resnet50": ("Bottleneck", (3, 4, 6, 3)),
    "resnet101": ("Bottleneck", (3, 4, 23, 3)),
    "resnet152": ("Bottleneck", (3, 8, 36, 3)),
}
# What multiplies the channels of all stages, but not the stem's: `resnet18,width=0.25`
WIDTHS = {"0.125": 0.125, "0.25": 0.25, "0.5": 0.5, "1": 1.0, "2": 2.0}
# Stem -> the padding of its 3x3 convolution, with stride 1 and no max-pool, for small images. Papers
# differ: 1 is SimCLR's (appendix B.9), 0 is what MIO's released code has, 2 what ARB's has.
STEMS = {"imagenet": None, "conv3": 1, "conv3_p0": 0, "conv3_p2": 2}
SMALL_CONV1 = (64, 3, 3, 3)  # the shape of a conv3 stem's convolution


def check_stem(stem: str) -> None:
    """Raise BadInput for a stem that no ResNet here has."""
    if stem not in STEMS:
        raise BadInput(f"unknown stem '{stem}'; {nearest(stem, STEMS)}")


# --- formats ---


def _queue_per_crop(tables: Tables, trunks: list[TrunkInFile]) -> bool:
    """Return True for LORAC and MoCo-M, which keep one queue for each assigned crop: (2, d, K),
    where MoCo has (d, K)."""
    for tensors in tables.values():
        for key, tensor in tensors.items():
            if unwrapped(key) == "queue" and tensor.dim() == 3:
                return True
    return False


def _small_stem(tables: Tables, trunks: list[TrunkInFile]) -> bool:
    """Return True where the conv1 of every trunk is 3x3."""
    return all(
        conv1_shape(trunk.keys, tables[trunk.table]) == SMALL_CONV1 for trunk in trunks
    )


def conv1_shape(keys: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Shape:
    """Return the shape of a trunk's first convolution; empty where the file lacks it."""
    tensor = tensors.get(keys.get("conv1.weight", ""))
    return () if tensor is None else tuple(tensor.shape)


_TESTS = {"queue_per_crop": _queue_per_crop, "small_stem": _small_stem}
_ROWS = tomllib.loads(Path(__file__).with_name("resnet_formats.toml").read_text())
FORMATS = tuple(format_row(name, row, _TESTS) for name, row in _ROWS.items())
