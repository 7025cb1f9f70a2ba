"""Offers CMC's pairs of ResNets (arXiv:1906.05849), named `lab:ARCH` or `lab:ARCH,width=0.5`.

Both networks have that width. The first sees L, the second a and b of the picture's CIE L*a*b*, and
their features stand side by side (HobbitLong/CMC: models/resnet.py, MyResNetsCMC; resnet50v1 has
width 0.5, resnet50v2 width 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.weights.families.resnet_tables import ARCHS, WIDTHS
from backbench.weights.family import TrunkFamily, refuse_other_readings

if TYPE_CHECKING:
    from backbench.weights.trunk import Trunk

# The pair takes RGB from 0 to 1, and converts it itself.
PIXELS = Pixels((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


class PairFamily(TrunkFamily):
    """A pair is named by the architecture of its halves and their width."""

    prefix = "lab:"

    def parse(self, arch: str) -> tuple[str, str]:
        """Take a name apart: 'lab:resnet50,width=0.5' -> ('resnet50', '0.5'); no width is '1'."""
        half, _, width = arch.removeprefix(self.prefix).partition(",width=")
        width = width or "1"
        if half not in ARCHS or width not in WIDTHS:
            raise BadInput(
                f"'{arch[:80]}': expected {self.prefix}ARCH,width=W, W one of {', '.join(WIDTHS)};"
                f" {nearest(half[:40].split(',')[0], ARCHS)}"
            )
        return half, width

    def canonical(self, arch: str, stem: str) -> tuple[str, str]:
        half, width = self.parse(arch)
        return f"{self.prefix}{half},width={width}", stem

    def name_in_papers(self, arch: str) -> str:
        """Return the name of its halves."""
        return arch.removeprefix(self.prefix).partition(",")[0]

    def build(self, arch: str, stem: str, reading: str) -> Trunk:
        from backbench.weights.families.pair_trunk import LabPair

        refuse_other_readings(arch, reading)
        half, width = self.parse(arch)
        pair = LabPair(half, stem, WIDTHS[width])
        pair.arch = arch
        return pair

    def default_pixels(self, arch: str) -> Pixels:
        return PIXELS

    def refuse_pixels(self, arch: str, pixels: Pixels) -> None:
        if pixels != PIXELS:
            raise BadInput(
                f"{arch} converts RGB from 0 to 1 itself: its pixels' mean is 0 and their std 1,"
                f" not {pixels.mean} and {pixels.std} (in a recipe: views.mean, views.std)"
            )
