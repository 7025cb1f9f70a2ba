"""Tells a vision transformer of another size, patch or depth than timm's by the shapes of its tensors.

`lookalikes` knows timm's networks as timm builds them. Small pictures are often read by a ViT that timm
builds with options alone: `timm:vit_tiny_patch16_224,img_size=32,patch_size=4`.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from backbench.errors import BadInput
from backbench.weights.families.timm_model_names import PREFIX
from backbench.weights.family import (
    NATIVE,
    Shape,
    Tables,
    TrunkFamily,
    channels_advice,
)
from backbench.weights.tensor_names import is_counter

_POSITIONS = "pos_embed"
_PATCHES = "patch_embed.proj.weight"
_BLOCK = re.compile(r"blocks\.(\d{1,3})\.")
# Width -> timm's model, of 12 or 24 blocks; no file tells the number of heads of another width
_MODELS = {
    192: "vit_tiny_patch16_224",
    384: "vit_small_patch16_224",
    768: "vit_base_patch16_224",
    1024: "vit_large_patch16_224",
}


class Described(NamedTuple):
    """What a file's shapes tell of a transformer: timm's model with its options."""

    shapes: Mapping[str, Shape]  # of the names below the prefix
    model: str
    options: Mapping[str, str]
    channels: int

    def arch(self, heads: str = "") -> str:
        """Return the name that timm's model has with these options, and with so many heads."""
        options = dict(self.options)
        if heads:
            options["num_heads"] = heads
        pairs = [f"{key}={value}" for key, value in sorted(options.items())]
        return PREFIX + ",".join([self.model, *pairs])


def advice(family: TrunkFamily, tables: Tables) -> str:
    """Say by which options timm's model has a file's tensors, and what to type; empty for none."""
    for tensors in tables.values():
        for key in tensors:
            # The names of timm's
            if key == _PATCHES or key.endswith(f".{_PATCHES}"):
                described = _described(tensors, key.removesuffix(_PATCHES))
                if described is not None and _fits(family, described):
                    return _words(described)
    return ""


def _described(tensors: Mapping[str, Tensor], prefix: str) -> Described | None:
    """Read a transformer's size off the shapes of its tensors; None where it is no such one."""
    shapes = {
        key.removeprefix(prefix): tuple(tensor.shape)
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }
    patches = shapes[_PATCHES]
    positions = shapes.get(_POSITIONS, ())
    hidden = shapes.get("blocks.0.mlp.fc1.weight", ())
    if len(patches) != 4 or len(positions) != 3 or len(hidden) != 2:
        return None
    # 1. A square of patches, and one row for the class token
    width, channels, patch, _ = patches
    side = math.isqrt(max(positions[1] - 1, 0))
    if side == 0 or side**2 != positions[1] - 1 or patch == 0 or width == 0:
        return None
    # 2. The options that differ from those of timm's model
    blocks = {int(match[1]) for key in shapes if (match := _BLOCK.match(key))}
    usual = {
        "depth": 24 if width == 1024 else 12,
        "embed_dim": width if width in _MODELS else 192,
        "img_size": 224,
        "mlp_ratio": 4,
        "patch_size": 16,
    }
    there = {
        "depth": len(blocks),
        "embed_dim": width,
        "img_size": side * patch,
        "mlp_ratio": hidden[0] / width,
        "patch_size": patch,
    }
    options = {key: f"{there[key]:g}" for key in usual if there[key] != usual[key]}
    # 3. The channels are looked at by `_words` alone
    shapes[_PATCHES] = (width, 3, *patches[2:])
    model = _MODELS.get(width, _MODELS[192])
    return Described(shapes, model, options, channels)


def _fits(family: TrunkFamily, described: Described) -> bool:
    """Return True if timm's model with these options has just these tensors, but for heads."""
    # The number of heads leaves no trace in the shapes; one divides any width.
    heads = "1" if "embed_dim" in described.options else ""
    try:
        arch, stem = family.canonical(described.arch(heads), NATIVE)
        wanted = family.tensors(arch, stem)
    except BadInput:
        return False
    for key, tensor in wanted.items():
        if not is_counter(key) and described.shapes.get(key) != tuple(tensor.shape):
            return False
    inside = [key for key in described.shapes if key.startswith("blocks.")]
    return all(key in wanted for key in inside)


def _words(described: Described) -> str:
    if described.channels != 3:
        return channels_advice(described.channels)
    heads = "N" if "embed_dim" in described.options else ""
    arch = described.arch(heads)
    told = "with N heads, as it was trained"
    if not heads:
        told = "num_heads=N says another number of heads than timm's"
    return (
        f"by shapes it is timm's {described.model} with other options; import it with"
        f" `backbench import FILE --arch {arch} --out X.safetensors` ({told})"
    )
