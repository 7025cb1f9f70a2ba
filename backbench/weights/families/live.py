"""Modules that this process was given from Python, named `python:NAME`: no other process has
them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights.family import (
    NATIVE,
    GivenModule,
    TrunkFamily,
    native_stem,
    refuse_other_readings,
)

if TYPE_CHECKING:
    from torch import nn

    from backbench.weights.trunk import Trunk


class LiveFamily(TrunkFamily):
    """Trunks by the name of their module's class; weights are copied when a trunk is built."""

    prefix = "python:"
    elsewhere = False

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[str, Trunk] = {}

    def register(self, name: str, trunk: Trunk) -> str:
        """Make `trunk` known in this process; returns its arch."""
        arch = self.prefix + name
        trunk.arch, trunk.stem = arch, NATIVE
        self._live[arch] = trunk
        # Another trunk may have had this name
        self._blanks.clear()
        self._tensors.clear()
        return arch

    def canonical(self, arch: str, stem: str) -> tuple[str, str]:
        stem = native_stem(arch, stem)
        if arch not in self._live:
            raise BadInput(
                f"{arch[:80]} is a module that was given from Python; only the program that gives"
                " it can use it"
            )
        return arch, stem

    def build(
        self, arch: str, stem: str, reading: str, *, zero_init_residual: bool = False
    ) -> Trunk:
        refuse_other_readings(arch, reading)
        trunk = copy.deepcopy(self._live[arch])
        trunk.arch, trunk.stem, trunk.reading = arch, stem, reading
        return trunk

    def build_blank(self, arch: str, stem: str, reading: str) -> Trunk:
        return self.build(arch, stem, reading).to("meta")

    def of_module(self, module: nn.Module) -> GivenModule | None:
        """A `Trunk` that no name builds: it gets one."""
        from backbench.weights.trunk import Trunk

        if not isinstance(module, Trunk):
            return None
        name = type(getattr(module, "model", module)).__name__
        arch = self.register(name, module)
        return GivenModule(arch, module.state_dict(), Pixels(), name)
