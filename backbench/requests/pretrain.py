"""`backbench pretrain`: a backbone is trained by a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from backbench.recipes import fast
from backbench.requests.options import argument, option
from backbench.requests.places import RunRequest


@dataclass(frozen=True, kw_only=True)
class PretrainRequest(RunRequest):
    """Train a backbone by a recipe."""

    verb: ClassVar[str] = "pretrain"
    recipe: str = argument("RECIPE", "a YAML file, or a name under configs/pretrain")
    overrides: tuple[str, ...] = argument(
        "a.b=c", "changes to the recipe", several="*", default=()
    )
    fast: bool = option(
        f"{' '.join(fast.spelled())}; given by hand wins (docs/fast.md)", default=False
    )
