"""Offers torchvision's ResNets under their own names, `resnet18` to `resnet152`, and narrower or wider
ones of our own recipes, `resnet18,width=0.25`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.weights.families.resnet_tables import ARCHS, FORMATS, STEMS, WIDTHS
from backbench.weights.family import (
    Tables,
    Tree,
    TrunkFamily,
    TrunkInFile,
    TrunkMetadata,
    refuse_other_readings,
)

if TYPE_CHECKING:
    from backbench.weights.trunk import Trunk


class ResNetFamily(TrunkFamily):
    """A ResNet's file tells everything but the padding of a 3x3 first convolution."""

    tensors_say_all = True
    formats = FORMATS

    def owns(self, arch: str) -> bool:
        name, comma, width = arch.partition(",width=")
        return name in ARCHS and (not comma or width in WIDTHS)

    def suggestions(self) -> Collection[str]:
        return ARCHS

    def canonical(self, arch: str, stem: str) -> tuple[str, str]:
        return arch, stem

    def dialect(self, arch: str) -> str:
        return "torchvision"

    def build(self, arch: str, stem: str, reading: str) -> Trunk:
        from backbench.weights.families.resnet_trunk import build_backbone

        refuse_other_readings(arch, reading)
        name, _, width = arch.partition(",width=")
        trunk = build_backbone(name, stem, width=WIDTHS[width or "1"])
        trunk.arch = arch
        return trunk

    def find(
        self, tables: Tables, tree: Tree, path: Path, metadata: TrunkMetadata
    ) -> list[TrunkInFile]:
        from backbench.weights.families import resnet_names

        return list(resnet_names.find_trunks(tables, metadata))

    def loaded_by(self, arch: str, stem: str, library: str) -> str | None:
        if "," in arch:
            return None  # no other library has a ResNet of another width
        padding = STEMS[stem]
        if library == "detectron2":
            if padding is not None:
                return None  # its stem is fixed
            depth = arch.removeprefix("resnet")
            return f"MODEL.RESNETS.DEPTH {depth} MODEL.RESNETS.STRIDE_IN_1X1 False"
        calls = "fc = Identity()"
        if library == "timm":
            calls = f"timm.create_model('{arch}', num_classes=0)"
        if padding is not None:
            calls += (
                f" with conv1 = Conv2d(3, 64, 3, padding={padding}, bias=False) and"
                " maxpool = Identity()"
            )
        return calls
