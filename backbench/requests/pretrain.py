"""`backbench pretrain`: a backbone is trained by a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from backbench.recipes import fast
from backbench.requests.bounds import MOST_SIDE
from backbench.requests.options import argument, option
from backbench.requests.places import RunRequest


@dataclass(frozen=True, kw_only=True)
class PretrainRequest(RunRequest):
    """Train a backbone by a recipe, or on your own pictures by the name of a method."""

    verb: ClassVar[str] = "pretrain"
    recipe: str = argument(
        "RECIPE",
        "a YAML file, or a name under configs/pretrain; with --images a method: lorac, moco_v2,"
        " moco_m, simclr, byol, barlow_twins, arb, mio, cllr, supervised",
    )
    overrides: tuple[str, ...] = argument(
        "a.b=c", "changes to the recipe", several="*", default=()
    )
    images: Path | None = option(
        "pictures of your own to train on, as FOLDER/<class>/ or without classes; ends with"
        " `evaluate`'s table against the random trunk",
        "FOLDER",
        default=None,
    )
    size: int | None = option(
        "of the views, in pixels (default: that of small pictures, else 224)",
        "N",
        default=None,
        least=1,
        most=MOST_SIDE,
    )
    budget: str = option(
        "how long: 10min, 2h, 1d or epochs=N (default: as the form's recipe)",
        "TIME",
        default="",
    )
    name: str = option("the row's name on the board", "NAME", default="")
    fast: bool = option(
        f"{' '.join(fast.spelled())}; given by hand wins (docs/fast.md)", default=False
    )
    # The last of these, so that jobs are spelled as they were. Beside --images it is not needed
    data: Path | None = option(  # type: ignore[assignment]
        "folder with one folder per dataset", "ROOT", default=None
    )
