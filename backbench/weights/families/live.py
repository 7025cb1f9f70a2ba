"""Modules that Python gave to this process, `python:NAME`: no other process has them."""

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
    """Trunks by the name of their module's class, and the identity that their user declares for
    the forward pass (`python:NAME:IDENTITY`); weights are copied when a trunk is built.

    No file tells what a live module computes. Without an identity its name ends in a number drawn
    for this very object (`python:NAME~1a2b3c4d`): no other module ever shares its rows, and its
    features are not kept.
    """

    prefix = "python:"
    elsewhere = False
    reads_memory = True

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[str, Trunk] = {}

    def of_module(self, module: nn.Module) -> tuple[str, Pixels] | None:
        """A `Trunk`: where no name builds it, it gets the one of its module's class."""
        from backbench.weights.trunk import Trunk

        if not isinstance(module, Trunk):
            return None
        if printable.control_in(module.identity):
            raise BadInput(
                f"a trunk's identity is a line of text, not {module.identity[:40]!r}"
            )
        own = f":{module.identity}" if module.identity else f"~{secrets.token_hex(4)}"
        arch = self.prefix + type(getattr(module, "model", module)).__name__ + own
        module.arch, module.stem, module.reading = arch, NATIVE, POOLED
        self._live[arch] = module
        self._blanks.clear()  # another trunk may have had this identity
        return arch, Pixels()

    def lasting(self, arch: str) -> bool:
        return ":" in arch.removeprefix(self.prefix)

    def canonical(self, arch: str, stem: str) -> tuple[str, str]:
        stem = native_stem(arch, stem)
        if arch not in self._live:
            given = f"{arch[:80]} is a module that was given from Python"
            raise BadInput(f"{given}; only the program that gives it can use it")
        return arch, stem

    def build(self, arch: str, stem: str, reading: str) -> Trunk:
        refuse_other_readings(arch, reading)
        return copy.deepcopy(self._live[arch])
