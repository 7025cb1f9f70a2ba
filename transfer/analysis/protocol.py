"""Declares the recipe of `backbench analyze`, and reads it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from backbench.errors import BadInput
from backbench.images.crops import Crops
from backbench.recipes import config
from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.bounds import Batch, Count, Positive, Repeats, Several
from backbench.transfer.protocol import Geometry


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """A recipe of `backbench analyze`; {space} in the protocol's name becomes trunk or projector."""

    protocol: str = "analyze-{space}-v1"
    split: Literal["train", "val", "test"] = "test"
    images: Several | None = None  # a seeded choice of so many; null: all
    augmentations: Annotated[Repeats, Ge(2)] = 32
    crops: Crops
    geometry: Geometry
    # The number of images whose plain features are kept. Distances between images and the probes
    # are measured on these.
    sample: Several = 4096
    batch: Batch = 4  # images at a time, each with all its views
    neighbours: Count = 20
    temperature: Positive = 0.07
    shots: Count = 2
    draws: Repeats = 20
    l2: float = 0.01
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        if "{space}" not in self.protocol:
            raise ValueError(
                f"protocol '{self.protocol}' needs {{space}} in it,"
                " so that spaces do not share a column"
            )
        if self.crops.size != self.geometry.crop:
            raise ValueError(
                f"crops.size {self.crops.size} and geometry.crop {self.geometry.crop} must be equal"
            )

    def name(self, space: str) -> str:
        """Return the protocol's name in the rows of a space."""
        return self.protocol.replace("{space}", space)


def load_analysis(name: str, augmentations: int | None) -> AnalyzeConfig:
    """Load the recipe; a changed number of augmentations becomes part of the protocol's name."""
    plain = config.read_recipe(config.find_recipe(name, "transfer"))
    if "kind" in plain:
        raise BadInput(
            f"--recipe {name}: is a probe's, for `backbench linear --protocol {name}`; recipes of"
            " `analyze` have its keys (configs/transfer/analyze.yaml)"
        )
    recipe = config.load(AnalyzeConfig, name, kind="transfer")
    if augmentations is None or augmentations == recipe.augmentations:
        return recipe
    data = config.to_dict(recipe)
    data["augmentations"] = augmentations
    data["protocol"] = recipe.protocol.replace(
        "{space}", f"{{space}}-{augmentations}views"
    )
    return config.build(AnalyzeConfig, data, where="--augmentations")


def check_analysis(request: AnalyzeRequest) -> None:
    """Raise BadInput for a wrong recipe of `analyze`, before torch is imported."""
    load_analysis(request.recipe, request.augmentations)
