"""Gives each random decision a generator of its own, a pure function of the seed and its purpose.
No generator is ever saved, and a run that continues decides like one that was never stopped."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_of(*what: int | str) -> int:
    """Hash the arguments to a 63-bit seed, as in seed_of(seed, "views", epoch, image)."""
    # repr keeps the parts apart: (1, 12) and (11, 2) are different texts. One of the 64 bits goes,
    # because torch takes a signed integer
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*what: int | str) -> torch.Generator:
    """Make a fresh torch generator on the CPU for one decision; see `seed_of`."""
    import torch

    return torch.Generator().manual_seed(seed_of(*what))


def seed_everything(*what: int | str) -> None:
    """Seed Python, numpy and torch on all devices, for an initialisation or one training step."""
    import random

    import numpy
    import torch

    seed = seed_of(*what)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
