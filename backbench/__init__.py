"""backbench: what is a self-supervised ResNet-50 worth?

    import backbench
    results = backbench.evaluate(model, ["linear/cifar10", "fewshot/cifar10"], data="data", out="runs/mine")

`import backbench` itself loads nothing; each name below loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backbench.board.board import collect
    from backbench.evaluation.api import Results, evaluate
    from backbench.images.preprocess import Pixels
    from backbench.records.store import Result
    from backbench.weights.checkpoint import Checkpoint
    from backbench.weights.importing import read as load
    from backbench.weights.trunk import ModuleTrunk

_NAMES = {
    "evaluate": ("backbench.evaluation.api", "evaluate"),
    "Results": ("backbench.evaluation.api", "Results"),
    "Checkpoint": ("backbench.weights.checkpoint", "Checkpoint"),
    "Result": ("backbench.records.store", "Result"),
    # Reads a Checkpoint file or any published format
    "load": ("backbench.weights.importing", "read"),
    # Wraps any torch module, to be evaluated
    "ModuleTrunk": ("backbench.weights.trunk", "ModuleTrunk"),
    "Pixels": ("backbench.images.preprocess", "Pixels"),
    # Run folders -> the board that the leaderboard is written from
    "collect": ("backbench.board.board", "collect"),
}
__all__ = ["Checkpoint", "ModuleTrunk", "Pixels", "Result", "Results", "collect"]
__all__ += ["evaluate", "load"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("backbench")
    if name not in _NAMES:
        raise AttributeError(f"module 'backbench' has no attribute '{name}'")
    module, attribute = _NAMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, "__version__"})
