"""Name -> trunk: our ResNets, CMC's pairs of them (`lab:ARCH`), any timm model (`timm:NAME`), those
of installed packages, and those that this process was handed from Python (`python:NAME`)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backbench import plugins
from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.weights import lab_trunk, readings, resnet, timm_trunk
from backbench.weights.trunk import InstalledTrunk, Trunk

NATIVE = "native"  # the stem of a trunk that has but one
LIVE = "python:"
_live: dict[str, Trunk] = {}


def register(name: str, trunk: Trunk) -> str:
    """`trunk` under `python:NAME`, in this process only; its weights are copied when it is used."""
    arch = LIVE + name
    trunk.arch, trunk.stem = arch, NATIVE
    _live[arch] = trunk
    _tensors.cache_clear()
    return arch


def is_resnet(arch: str) -> bool:
    return arch in resnet.ARCHS


def canonical(arch: str, stem: str) -> tuple[str, str]:
    """The one way to write a trunk's name and stem. BadInput for a trunk that does not exist."""
    if is_resnet(arch):
        return arch, stem
    if arch.startswith(lab_trunk.PREFIX):
        return lab_trunk.canonical(arch), stem
    if stem not in (NATIVE, "imagenet"):  # which recipes say where they say nothing
        raise BadInput(f"{arch[:80]} has no stem '{stem[:40]}'; leave out stem")
    if arch.startswith(timm_trunk.PREFIX):
        return str(timm_trunk.parse(arch)), NATIVE
    _builder(arch)
    return arch, NATIVE


def with_options(arch: str, options: Mapping[str, str]) -> str:
    """A timm trunk's name with other options. BadInput for a trunk that has none."""
    if not arch.startswith(timm_trunk.PREFIX):
        raise BadInput(f"{arch} takes images of any size; leave out --pos")
    name = timm_trunk.parse(arch)
    return str(timm_trunk.parse(str(name._replace(options={**name.options, **options}))))


def build_trunk(
    arch: str, stem: str = "imagenet", reading: str = "", *, zero_init_residual: bool = False
) -> Trunk:
    """A trunk with fresh weights, read by `reading` (empty: as its architecture is by default)."""
    arch, stem = canonical(arch, stem)
    reading = reading or default_reading(arch)
    if is_resnet(arch):
        _refuse_reading(arch, reading)
        return resnet.build_backbone(arch, stem, zero_init_residual=zero_init_residual)
    if arch.startswith(timm_trunk.PREFIX):
        return timm_trunk.build(arch, reading)
    _refuse_reading(arch, reading)
    if arch.startswith(lab_trunk.PREFIX):
        return lab_trunk.LabPair(arch, stem)
    trunk = _builder(arch)()
    trunk.arch, trunk.stem, trunk.reading = arch, stem, reading
    return trunk


def default_reading(arch: str) -> str:
    """How the features of this trunk are read where nobody says otherwise."""
    if arch.startswith(timm_trunk.PREFIX):
        return timm_trunk.default_reading(arch)
    return readings.POOLED


def default_pixels(arch: str) -> Pixels:
    """The statistics of the pixels that it takes where no file says otherwise."""
    if arch.startswith(timm_trunk.PREFIX):
        return timm_trunk.pixels_of(arch)
    if arch.startswith(lab_trunk.PREFIX):
        return lab_trunk.PIXELS
    if arch in plugins.installed(plugins.TRUNKS):
        return plugins.load(plugins.TRUNKS, arch, InstalledTrunk).pixels
    return Pixels()


def tensors(arch: str, stem: str = "imagenet") -> Mapping[str, Tensor]:
    """Every tensor of a trunk's state dict, without its elements: name -> shape and dtype."""
    return _tensors(*canonical(arch, stem))


@functools.cache
def _tensors(arch: str, stem: str) -> Mapping[str, Tensor]:
    if is_resnet(arch) or arch.startswith((timm_trunk.PREFIX, lab_trunk.PREFIX)):
        with torch.device("meta"):
            return build_trunk(arch, stem).state_dict()
    held = build_trunk(arch, stem).state_dict()
    return {name: tensor.to("meta") for name, tensor in held.items()}


def refuse_pixels(arch: str, pixels: Pixels) -> None:
    """BadInput for a trunk that converts the pixels itself and is given others than it can."""
    if arch.startswith(lab_trunk.PREFIX) and pixels != lab_trunk.PIXELS:
        raise BadInput(
            f"{arch} converts RGB from 0 to 1 itself: its pixels' mean is 0 and their std 1, not "
            f"{pixels.mean} and {pixels.std} (in a recipe: views.mean, views.std)"
        )


def _refuse_reading(arch: str, reading: str) -> None:
    if reading != readings.POOLED:
        raise BadInput(f"{arch} is read by '{readings.POOLED}' alone, not by '{reading[:40]}'")


def _builder(arch: str) -> Callable[[], Trunk]:
    """Of a trunk that is neither a ResNet nor timm's."""
    if arch in _live:
        return functools.partial(copy.deepcopy, _live[arch])
    if arch.startswith(LIVE):
        raise BadInput(
            f"{arch[:80]} is a module that was given from Python; only the program that gives it can use it"
        )
    if arch in plugins.names(plugins.TRUNKS, resnet.ARCHS):
        return plugins.load(plugins.TRUNKS, arch, InstalledTrunk).build
    known = [*resnet.ARCHS, *plugins.installed(plugins.TRUNKS)]
    raise BadInput(
        f"unknown architecture '{arch[:80]}'; {nearest(arch[:80], known)}, or timm:NAME for a model of timm"
    )
