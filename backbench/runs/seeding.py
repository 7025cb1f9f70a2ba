"""Each random decision has its own generator, a pure function of the seed and its purpose. None is
ever saved, so a run that continues decides as one that was never stopped."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_of(*what: int | str) -> int:
    """A 63-bit seed, a pure function of its arguments: seed_of(seed, "views", epoch, image)."""
    # repr keeps the parts apart: (1, 12) and (11, 2) are different texts. One of 64 bits is
    # dropped: torch takes a signed integer
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*what: int | str) -> torch.Generator:
    """A fresh CPU torch generator for one decision; see `seed_of`."""
    import torch

    return torch.Generator().manual_seed(seed_of(*what))


def seed_everything(*what: int | str) -> None:
    """Seed python, numpy and torch (all devices): for initialisation, or one training step."""
    import random

    import numpy
    import torch

    seed = seed_of(*what)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
