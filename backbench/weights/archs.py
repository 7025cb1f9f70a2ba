"""Lists the families of trunks, and finds the family of a trunk's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.weights import hub_files
from backbench.weights.families.installed import InstalledFamily
from backbench.weights.families.live import LiveFamily
from backbench.weights.families.pair import PairFamily
from backbench.weights.families.resnet import ResNetFamily
from backbench.weights.families.timm_models import TimmFamily
from backbench.weights.family import (
    NamedWeights,
    Tables,
    TrunkFamily,
    TrunkMetadata,
)

if TYPE_CHECKING:
    from torch import Tensor

    from backbench.weights.trunk import Trunk

# A file belongs to the first family, in this order, that finds a trunk in it.
FAMILIES: tuple[TrunkFamily, ...] = (
    ResNetFamily(),
    PairFamily(),
    TimmFamily(),
    LiveFamily(),
    InstalledFamily(),
)


def family_of(arch: str) -> TrunkFamily:
    """Return the family of a trunk's name. BadInput for a name that no family has."""
    for family in FAMILIES:
        if family.owns(arch):
            return family
    meant = meant_by(arch[:200])
    if meant:
        raise BadInput(f"unknown architecture '{arch[:80]}'; did you mean '{meant}'?")
    known: list[str] = []
    for family in FAMILIES:
        known += family.suggestions()
    kinds = ", ".join(
        f"{family.prefix}NAME" for family in FAMILIES if family.named_for_files
    )
    raise BadInput(
        f"unknown architecture '{arch[:80]}'; {nearest(arch[:80], known)}, or {kinds}"
    )


def canonical(arch: str, stem: str = "imagenet") -> tuple[str, str]:
    """Return the one way to write a trunk's name and stem. BadInput for an unknown trunk."""
    return family_of(arch).canonical(arch, stem)


def build_trunk(
    arch: str,
    stem: str = "imagenet",
    reading: str = "",
    *,
    zero_init_residual: bool = False,
) -> Trunk:
    """Build a trunk with fresh weights, read by `reading` (empty: its default)."""
    family = family_of(arch)
    trunk = family.build(*family.canonical(arch, stem), reading)
    if zero_init_residual:
        trunk.zero_residuals()
    return trunk


def default_pixels(arch: str) -> Pixels:
    """Return the statistics of the pixels that a trunk takes where no file says otherwise."""
    return family_of(arch).default_pixels(arch)


def tensors(arch: str, stem: str = "imagenet") -> Mapping[str, Tensor]:
    """Return every tensor of a trunk's state dict, without its elements."""
    family = family_of(arch)
    return family.tensors(*family.canonical(arch, stem))


def is_name(text: object) -> bool:
    """Return True for a text that names weights, as `timm:NAME` does, and not for a file's path."""
    prefixes = [family.prefix for family in FAMILIES if family.named_for_files]
    return str(text).startswith((hub_files.PREFIX, *prefixes))


def named_weights(text: object, metadata: TrunkMetadata) -> NamedWeights | None:
    """Return the weights that a name stands for; None for the path of a file."""
    for family in FAMILIES:
        named = family.named_weights(str(text), metadata)
        if named is not None:
            return named
    return None


def meant_by(word: str) -> str:
    """Return the name of weights that a word is the end of, as resnet18@random; empty for none."""
    for family in FAMILIES:
        name = family.meant_by(word)
        if name:
            return name
    return ""


def advice(tables: Tables) -> str:
    """Say which trunks have the tensors of a file that nothing recognises; empty for none."""
    for family in FAMILIES:
        told = family.advice(tables)
        if told:
            return told
    return ""
