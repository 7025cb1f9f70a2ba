"""Offers the trunks that installed packages add by an entry point (`plugins`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from backbench import plugins
from backbench.images.preprocess import Pixels
from backbench.weights.families.resnet_tables import ARCHS
from backbench.weights.family import TrunkFamily, native_stem, refuse_other_readings
from backbench.weights.readings import POOLED

if TYPE_CHECKING:
    from backbench.weights.trunk import InstalledTrunk, Trunk


class InstalledFamily(TrunkFamily):
    """Trunks of plugins have the names of their packages' entry points."""

    reads_memory = True  # a stranger's constructor may read the elements that it draws

    def owns(self, arch: str) -> bool:
        # A package may not take one of the names that are backbench's own
        return arch in plugins.names(plugins.TRUNKS, ARCHS)

    def suggestions(self) -> Collection[str]:
        return plugins.installed(plugins.TRUNKS)

    def canonical(self, arch: str, stem: str) -> tuple[str, str]:
        return arch, native_stem(arch, stem)

    def default_pixels(self, arch: str) -> Pixels:
        return _row(arch).pixels

    def build(self, arch: str, stem: str, reading: str) -> Trunk:
        refuse_other_readings(arch, reading)
        trunk = _row(arch).build()
        trunk.arch = arch
        trunk.stem = stem
        trunk.reading = POOLED
        return trunk


def _row(arch: str) -> InstalledTrunk:
    from backbench.weights.trunk import InstalledTrunk

    return plugins.load(plugins.TRUNKS, arch, InstalledTrunk)
