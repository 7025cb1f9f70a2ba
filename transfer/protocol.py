"""Declares what all evaluation protocols share. A protocol says how a number is measured: it is a
frozen dataclass that a recipe under configs/transfer is read into. Its name has a version, and a
number under another name stands in another column. The protocol of each reading stands in the
reading's own file, `transfer/probes/NAME.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval
from pydantic import Field

from backbench.images.loaders import Loader, geometry_by
from backbench.images.preprocess import eval_geometry
from backbench.parallel.precision import Precision
from backbench.recipes.config import ChosenBy
from backbench.requests.bounds import (
    MOST_EPOCHS,
    Batch,
    Count,
    NotNegative,
    Side,
)

if TYPE_CHECKING:
    from PIL import Image


REFERENCE_SIZE = (
    224  # pixels: the trunk for which a recipe with `of: trunk` gives its sides
)

Rates = Annotated[tuple[NotNegative, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Brings the shorter side (both, if `square`) to `resize`, then takes the centre `crop`."""

    resize: Side = 256
    crop: Side = 224
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    square: bool = False

    def transform(self) -> Callable[[Image.Image], Image.Image]:
        """Return the function of PIL images that does this."""
        return eval_geometry(
            resize=self.resize,
            crop=self.crop,
            interpolation=self.interpolation,
            square=self.square,
        )


@dataclass(frozen=True, kw_only=True)
class TrunkGeometry(Geometry):
    """A geometry at each trunk's own size: `resize` and `crop` are those of a trunk that was trained
    at 224 pixels, and both grow with the size. So trunks of several sizes share a column. A number
    in place of "trunk" is one size for all, in pixels."""

    of: Literal["trunk"] | Side

    def size(self, own: int) -> int:
        """Return the size at which a trunk is read whose own size is `own`, in pixels."""
        return own if self.of == "trunk" else self.of

    def at(self, size: int) -> Geometry:
        """Return the geometry of a trunk that was trained at `size` pixels."""
        return Geometry(
            resize=round(self.resize * size / REFERENCE_SIZE),
            crop=round(self.crop * size / REFERENCE_SIZE),
            interpolation=self.interpolation,
            square=self.square,
        )


@dataclass(frozen=True, kw_only=True)
class LoadedGeometry(Geometry):
    """A geometry as another loader than ours does it."""

    loader: Loader

    def transform(self) -> Callable[[Image.Image], Image.Image]:
        return geometry_by(
            self.loader,
            resize=self.resize,
            crop=self.crop,
            interpolation=self.interpolation,
            square=self.square,
        )


def choose_geometry(data: object) -> type[Geometry]:
    """Return the class that a recipe's `geometry` is read into."""
    return TrunkGeometry if isinstance(data, dict) and "of" in data else Geometry


# The type of a recipe's `geometry`
AnyGeometry = Annotated[Geometry, ChosenBy(choose_geometry)]


@dataclass(frozen=True, kw_only=True)
class CropAugment:
    """RandomResizedCrop and horizontal flip, with torchvision's parameters."""

    size: Side = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 1.3333333333333333)
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5  # its probability
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        if (
            not 0 < self.scale[0] <= self.scale[1]
            or not 0 < self.ratio[0] <= self.ratio[1]
        ):
            raise ValueError(
                f"scale {self.scale} and ratio {self.ratio} must be positive and increasing"
            )

    def at(self, size: int) -> CropAugment:
        """Return the views of a trunk that was trained at `size` pixels; these are one of 224's."""
        return replace(self, size=round(self.size * size / REFERENCE_SIZE))


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a training is, in one of two units."""

    epochs: Annotated[float, Interval(gt=0, le=MOST_EPOCHS)] | None = None
    iterations: Count | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.iterations is None):
            raise ValueError("give either epochs or iterations")

    def steps(self, images: int, batch: int) -> int:
        """Return the number of optimiser steps for `images` training images."""
        if self.iterations is not None:
            return self.iterations
        assert self.epochs is not None
        # An epoch has images / batch steps, which need not be a whole number: batches lie across
        # the ends of epochs, so no image is left out.
        return max(1, round(self.epochs * images / batch))


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """The factor on the peak rate, by step. `cosine` is half a cosine that ends at 0; `step`
    multiplies by `gamma` at each of `milestones`; `epoch_decay` multiplies by `gamma` after each
    epoch; `dinov3` is that of DINOv3's segmentation code (eval/segmentation/schedulers.py,
    _compute_lr_momentum)."""

    name: Literal["cosine", "step", "epoch_decay", "constant", "dinov3"] = "cosine"
    milestones: tuple[float, ...] = ()  # shares of the run
    gamma: float = 0.1
    # The share of the run in which the rate rises from 0. It rises to where the schedule starts;
    # that of dinov3 rises into a line that falls already.
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def factor(self, step: int, total: int, steps_per_epoch: float) -> float:
        """Return the factor at `step`, counted from 0, of `total` steps. An epoch need not have a
        whole number of steps."""
        rising = round(self.warmup * total)
        if self.name == "dinov3":
            # There the cosine runs over all steps, those of the warm-up included.
            if step < rising:
                return (1 - (1 - step / rising) * (1 - 1e-6)) * (1 - step / total)
            return 0.5 * (1 + math.cos(math.pi * (step + 1) / total))
        if step < rising:
            return (step + 1) / rising
        step -= rising
        total -= rising
        if self.name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * step / total))
        if self.name == "step":
            passed = sum(step >= round(share * total) for share in self.milestones)
            return self.gamma**passed
        if self.name == "epoch_decay":
            epochs_done = int(step / steps_per_epoch)
            return self.gamma**epochs_done
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The fields that all protocols have."""

    kind: str
    # The protocol's name, with a version; it stands in every row.
    protocol: Annotated[str, Field(min_length=1)]
    geometry: AnyGeometry = Geometry()
    precision: Precision = "fp32"
    feature_batch: Batch = 256
    # The name of a head that checkpoints keep, as `lphi`, which is CLLR's L. The feature is then
    # the output of that head, and without one the output of the trunk.
    head: str | None = None

    @property
    def name(self) -> str:
        """The protocol's name, with its precision and head where these are not the usual ones."""
        name = self.protocol
        # Features in bfloat16 differ by 2%, so numbers on them are another column. TF32 is marked
        # in the same way.
        if self.precision != "fp32":
            name += f"-{self.precision}"
        if self.head:
            name += f"-{self.head}"
        return name

    @property
    def recipe(self) -> str:
        """The name of its kind's shipped recipe: that of folders of one's own where it reads each
        trunk at its own size."""
        own = isinstance(self.geometry, TrunkGeometry)
        return f"{self.kind}_own" if own else self.kind

    @property
    def space(self) -> str:
        """The space that its heads read."""
        return self.head or "trunk"


@dataclass(frozen=True, kw_only=True)
class ScaledRates(Protocol):
    """Base of protocols that train by SGD; rates are declared for a batch of `reference_batch`."""

    reference_batch: Batch = 256
    batch_size: Batch = 256
    momentum: NotNegative = 0.9
    weight_decay: NotNegative = 0.0

    def used(self, lr: float) -> float:
        """Return the rate that `lr`, declared for `reference_batch`, is with `batch_size`."""
        return lr * self.batch_size / self.reference_batch
