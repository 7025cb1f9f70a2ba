"""A reading is the part of a trunk's output that is the feature; every result row names its
reading. Convolutional trunks have `pooled` alone.

    pooled       the network's own pooling: the mean of the last map, normed where it has a norm
    cls          the class token after the last norm
    mean         the mean of the patch tokens after the last norm
    cls+mean     both, one after the other (DINOv2, DINOv3)
    cls@4        the class tokens of the last four layers, each normed (DINO's linear probe)
    cls@4+mean   these, then the mean of the last layer's patches (DINOv2's linear probe)
    map          attention pooling by the trunk's own learned query (SigLIP)
"""

import re
from typing import NamedTuple

from backbench.errors import BadInput

POOLED, MAP = "pooled", "map"
_TOKENS = re.compile(r"(?:(cls)(?:@([1-9]\d?))?)?(?:(?:^|\+)(mean))?")


class TokenReading(NamedTuple):
    """A feature of class tokens of the last `layers` layers, then the patches' mean if `mean`."""

    layers: int
    mean: bool


def tokens(reading: str) -> TokenReading:
    """Parse a reading of tokens: 'cls@4+mean' is (4, True). BadInput for any other text."""
    parts = _TOKENS.fullmatch(reading)
    if not reading or parts is None:
        raise BadInput(
            f"reading '{reading[:40]}': expected cls, mean, cls+mean, cls@N, cls@N+mean, map or pooled"
        )
    layers = int(parts[2] or 1) if parts[1] else 0
    return TokenReading(layers, parts[3] is not None)
