"""CMC's pairs of ResNets (arXiv:1906.05849), named `lab:ARCH` or `lab:ARCH,width=0.5`.

Two networks of that width, the first on L, the second on a and b of the picture's CIE L*a*b*, their
features side by side (HobbitLong/CMC: models/resnet.py, MyResNetsCMC; resnet50v1 has width 0.5,
resnet50v2 width 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.weights.families.resnet_tables import ARCHS, WIDTHS
from backbench.weights.family import TrunkFamily, refuse_other_readings

if TYPE_CHECKING:
    from backbench.weights.trunk import Trunk

# The pair takes RGB from 0 to 1 and converts it itself
PIXELS = Pixels((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


class PairFamily(TrunkFamily):
    """A pair by the architecture of its halves and their width."""

    prefix = "lab:"

    def parse(self, arch: str) -> tuple[str, str]:
        """'lab:resnet50,width=0.5' -> ('resnet50', '0.5'); without a width, '1'."""
        half, _, width = arch.removeprefix(self.prefix).partition(",width=")
        if half not in ARCHS or (width or "1") not in WIDTHS:
            form = f"{self.prefix}ARCH,width=W, W one of {', '.join(WIDTHS)}"
            known = nearest(half[:40].split(",")[0], ARCHS)
            raise BadInput(f"'{arch[:80]}': expected {form}; {known}")
        return half, width or "1"

    def canonical(self, arch: str, stem: str) -> tuple[str, str]:
        half, width = self.parse(arch)
        return f"{self.prefix}{half},width={width}", stem

    def name_in_papers(self, arch: str) -> str:
        """The name of its halves."""
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
