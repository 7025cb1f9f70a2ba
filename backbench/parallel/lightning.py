"""Lightning's Fabric, imported without torchmetrics.

Lightning imports that package, where it is there, to look at its version. With torchvision and
scipy.signal, which come along, that is a third of the start of `backbench pretrain`."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def _as_if_missing(package: str) -> Iterator[None]:
    """Let an import of a package fail inside, unless it has been imported before."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # by which Python knows it as missing
    try:
        yield
    finally:
        del sys.modules[package]


with _as_if_missing("torchmetrics"):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.precision.amp import MixedPrecision
    from lightning_fabric.strategies import DDPStrategy

__all__ = ["DDPStrategy", "Fabric", "MixedPrecision"]
