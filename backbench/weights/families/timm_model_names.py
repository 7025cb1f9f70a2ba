"""Parses the names of timm's models, `timm:NAME` or `timm:NAME,key=value,...`.

The name has what no weight file holds: heads, activation, the norms' eps, the input size, the rule by
which position embeddings are resized. Only names that timm registers are taken.

    timm:convnext_tiny
    timm:vit_small_patch16_224,num_heads=12              MoCo-v3's ViT-S
    timm:vit_base_patch14_dinov2,pos=+0.1                takes any multiple of 14 pixels
    timm:vit_tiny_patch16_224,img_size=32,patch_size=4   for small images
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from backbench.errors import BadInput, nearest
from backbench.weights.family import POSITION_RULES

PREFIX = "timm:"


class TimmName(NamedTuple):
    """The parts of `timm:NAME,key=value,...`."""

    model: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        options = [f"{key}={value}" for key, value in sorted(self.options.items())]
        return PREFIX + ",".join([self.model, *options])


def parse(arch: str) -> TimmName:
    """Take a name apart. BadInput for a model that timm does not register, or an unknown option."""
    import timm

    name, *pairs = arch.removeprefix(PREFIX).split(",")
    if not re.fullmatch(r"\w{1,80}", name) or not timm.is_model(name):
        advice = ""
        if re.fullmatch(r"[\w.-]+", name):
            advice = f"; {nearest(name[:80], timm.list_models())}"
        raise BadInput(f"timm {timm.__version__} has no model '{name[:80]}'{advice}")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in OPTIONS:
            raise BadInput(
                f"'{arch[:120]}': '{pair[:40]}' is none of {', '.join(OPTIONS)}, each as key=value"
            )
        OPTIONS[key](value)  # refuses what is no value of this option
        options[key] = value
    return TimmName(name, options)


def _refused(text: str, expected: str) -> BadInput:
    return BadInput(f"'{text[:40]}' in the trunk's name: expected {expected}")


def _whole(text: str, most: int = 65_536) -> int:
    """Read a whole number. It is bounded: a header may say anything, and building takes time."""
    if not re.fullmatch(r"[1-9]\d{0,5}", text) or int(text) > most:
        raise _refused(text, f"a whole number from 1 to {most}")
    return int(text)


_layers = functools.partial(_whole, most=200)


def _each(number: Callable[[str], int], text: str) -> list[int]:
    """Read a number for each stage: '2-2-6-2'."""
    parts = text.split("-")
    if len(parts) > 8:
        raise _refused(text, "a number for each stage")
    return [number(part) for part in parts]


def _number(text: str) -> float:
    is_number = re.fullmatch(r"\d+(\.\d+)?([eE]-?\d{1,2})?", text)
    if not is_number or not 0 < float(text) < 1e6:
        raise _refused(text, "a number above 0")
    return float(text)


def _of(allowed: tuple[str, ...], text: str) -> str:
    if text not in allowed:
        raise _refused(text, " or ".join(allowed))
    return text


# timm's name of an activation -> the class of its module
ACTIVATIONS = {
    "gelu": "GELU",
    "quick_gelu": "QuickGELU",
    "gelu_tanh": "GELUTanh",
    "relu": "ReLU",
    "silu": "SiLU",
}
# Option -> what reads its value
OPTIONS: dict[str, Callable[[str], object]] = {
    "img_size": _whole,
    "patch_size": _whole,
    "depth": _layers,
    "embed_dim": _whole,
    "num_heads": _whole,
    "mlp_ratio": _number,
    "init_values": _number,  # where LayerScale starts
    "reg_tokens": _whole,
    "depths": functools.partial(_each, _layers),
    "dims": functools.partial(_each, _whole),
    "act_layer": functools.partial(_of, tuple(ACTIVATIONS)),
    "eps": _number,  # the eps of all layer norms
    "pos": functools.partial(_of, POSITION_RULES),
}
# Our own options; the others are keyword arguments of timm's.
OURS = ("eps", "pos")
