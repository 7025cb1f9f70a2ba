"""Offers modules that a Python program gives, as `python:NAME`; no other process has them."""

from __future__ import annotations

import copy
import secrets
from typing import TYPE_CHECKING

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.untrusted import printable
from backbench.weights.family import (
    NATIVE,
    TrunkFamily,
    native_stem,
    refuse_other_readings,
)
from backbench.weights.readings import POOLED

if TYPE_CHECKING:
    from torch import nn

    from backbench.weights.trunk import Trunk


class LiveFamily(TrunkFamily):
    """Live trunks are named by their module's class, and by the identity that their user declares
    for the forward pass (`python:NAME:IDENTITY`). Building one copies its weights.

    No file tells what a live module computes. Without an identity its name ends in a number that is
    drawn for this very object (`python:NAME~1a2b3c4d`): no other module ever shares its rows, and
    its features are not kept.
    """

    prefix = "python:"
    elsewhere = False
    reads_memory = True

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[str, Trunk] = {}

    def of_module(self, module: nn.Module) -> tuple[str, Pixels] | None:
        """Give a `Trunk` the name of its module's class, and return it; None for other modules."""
        from backbench.weights.trunk import Trunk

        if not isinstance(module, Trunk):
            return None
        if printable.control_in(module.identity):
            raise BadInput(
                f"a trunk's identity is a line of text, not {module.identity[:40]!r}"
            )
        arch = self.prefix + type(getattr(module, "model", module)).__name__
        if module.identity:
            arch += f":{module.identity}"
        else:
            arch += f"~{secrets.token_hex(4)}"
        module.arch = arch
        module.stem = NATIVE
        module.reading = POOLED
        self._live[arch] = module
        # Another trunk may have had this identity before.
        self._blanks.clear()
        return arch, Pixels()

    def lasting(self, arch: str) -> bool:
        return ":" in arch.removeprefix(self.prefix)

    def canonical(self, arch: str, stem: str) -> tuple[str, str]:
        stem = native_stem(arch, stem)
        if arch not in self._live:
            raise BadInput(
                f"{arch[:80]} is a module that was given from Python; only the program that gives it"
                " can use it"
            )
        return arch, stem

    def build(self, arch: str, stem: str, reading: str) -> Trunk:
        refuse_other_readings(arch, reading)
        return copy.deepcopy(self._live[arch])
