"""Evaluation protocols as typed values: one dataclass for each kind of recipe in configs/transfer.

Each has a versioned name; a number under another name is another column.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from backbench.errors import BadInput, nearest
from backbench.images.crops import Crops
from backbench.images.preprocess import eval_geometry
from backbench.parallel.precision import Precision
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.tasks import TASKS, by_kind

if TYPE_CHECKING:
    from PIL import Image


def at_least(least: float, **values: float) -> None:
    """ValueError that names a value below `least`, or one that is not finite."""
    for name, value in values.items():
        if not least <= value < math.inf:
            raise ValueError(f"{name} must be a number from {least:g} on, not {value:g}")


def above_zero(**values: float) -> None:
    """ValueError that names a value that is not above 0, or not finite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a number above 0, not {value:g}")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Evaluation brings an image's shorter side (both, if `square`) to `resize`, then takes the
    centre `crop`."""

    resize: int = 256
    crop: int = 224
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    square: bool = False

    def __post_init__(self) -> None:
        at_least(1, resize=self.resize, crop=self.crop)

    def transform(self) -> Callable[[Image.Image], Image.Image]:
        """The same as a function of PIL images."""
        return eval_geometry(
            resize=self.resize,
            crop=self.crop,
            interpolation=self.interpolation,
            square=self.square,
        )


@dataclass(frozen=True, kw_only=True)
class CropAugment:
    """RandomResizedCrop and horizontal flip, with torchvision's parameters."""

    size: int = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 1.3333333333333333)
    flip: float = 0.5

    def __post_init__(self) -> None:
        at_least(1, size=self.size)
        if not 0 < self.scale[0] <= self.scale[1] or not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(
                f"scale {self.scale} and ratio {self.ratio} must be positive and increasing"
            )
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is a probability, from 0 to 1, not {self.flip}")


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a training is, in one of two units."""

    epochs: float | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.iterations is None):
            raise ValueError("give either epochs or iterations")
        if self.epochs is not None:
            above_zero(epochs=self.epochs)
        if self.iterations is not None:
            at_least(1, iterations=self.iterations)

    def steps(self, images: int, batch: int) -> int:
        """Optimiser steps for `images` training images."""
        # An epoch has images / batch steps, also when that is broken: no image is left out.
        if self.iterations is not None:
            return self.iterations
        assert self.epochs is not None
        return max(1, round(self.epochs * images / batch))


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """The factor on the peak rate, in steps.

    cosine: half a cosine to 0; step: x `gamma` at each of `milestones`; epoch_decay: x `gamma`
    after each epoch.
    """

    name: Literal["cosine", "step", "epoch_decay", "constant"] = "cosine"
    milestones: tuple[float, ...] = ()  # shares of the run
    gamma: float = 0.1

    def factor(self, step: int, total: int, steps_per_epoch: float) -> float:
        """At `step`, counted from 0, of `total`; an epoch may have a broken number of steps."""
        if self.name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * step / total))
        if self.name == "step":
            passed = sum(step >= round(share * total) for share in self.milestones)
            return self.gamma**passed
        if self.name == "epoch_decay":
            return self.gamma ** int(step / steps_per_epoch)
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The fields that all protocols have."""

    kind: str
    protocol: str  # its name, with a version; stands in every row
    geometry: Geometry = Geometry()
    precision: Precision = "fp32"
    feature_batch: int = 256
    # A head that the checkpoint has kept (lphi: CLLR's L), whose output is the feature; null: the
    # trunk's
    head: str | None = None

    def __post_init__(self) -> None:
        if not self.protocol:
            raise ValueError("protocol is empty; it is the name that stands in every row")
        at_least(1, feature_batch=self.feature_batch)

    @property
    def name(self) -> str:
        # Features in bfloat16 differ by 2%, so their numbers are another column; TF32 is said too.
        name = self.protocol + ("" if self.precision == "fp32" else f"-{self.precision}")
        return name + (f"-{self.head}" if self.head else "")


class ScaledRates:
    """Base of protocols that train by SGD; rates are declared for a batch of `reference_batch`."""

    batch_size: int
    reference_batch: int
    momentum: float
    weight_decay: float

    def check_rates(self, name: str, rates: tuple[float, ...]) -> None:
        if not rates:
            raise ValueError(f"{name} needs at least one rate")
        for rate in rates:
            at_least(0, **{name: rate})
        at_least(1, batch_size=self.batch_size, reference_batch=self.reference_batch)
        at_least(0, momentum=self.momentum, weight_decay=self.weight_decay)

    def used(self, lr: float) -> float:
        """The rate that `lr`, declared for `reference_batch`, becomes with `batch_size` images."""
        return lr * self.batch_size / self.reference_batch


@dataclass(frozen=True, kw_only=True)
class Sgd(ScaledRates, Protocol):
    """Linear heads trained by SGD on a frozen trunk, all rates of `lr` in one pass.

    Without `augment` the heads train on features computed once. With one rate nothing is chosen and
    nothing held out, unless `patience` (epochs without a better validation loss) stops the training
    early.
    """

    lr: tuple[float, ...]
    # adam: torch's, whose first beta is `momentum`
    optimizer: Literal["sgd", "adam"] = "sgd"
    reference_batch: int = 256
    batch_size: int = 256
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: RateSchedule = RateSchedule()
    length: dict[str, Length]  # by dataset, and `default`
    augment: CropAugment | None = CropAugment()
    init_std: float = 0.01
    patience: int | None = None
    # test: the best on the reported split, only under a protocol of that name
    select: Literal["val", "test"] = "val"
    # also top-1 on the images that were trained on, centre crops, as a row of the split `train`
    train_score: bool = False
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_rates("lr", self.lr)
        if self.select == "test" and "testsel" not in self.protocol:
            raise ValueError(
                "select: test needs a protocol name that says so, as in linear-lorac-testsel-v1"
            )
        if "default" not in self.length:
            raise ValueError("length needs a `default`")
        if self.train_score and (len(self.lr) > 1 or self.patience is not None):
            raise ValueError("train_score needs one rate and no patience: all labels train")


@dataclass(frozen=True, kw_only=True)
class Knn(Protocol):
    """Weighted k-nearest neighbours by cosine similarity, weights exp(similarity / temperature)."""

    k: tuple[int, ...] = (5, 20, 200)
    temperature: float = 0.07

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.k:
            raise ValueError("k needs at least one number of neighbours")
        at_least(1, k=min(self.k))
        above_zero(temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class FewShot(Protocol):
    """Logistic regression on `shots` labels per class, many draws of them."""

    shots: int = 2
    draws: int = 20
    l2: float = 0.01  # as in LogReg, on features of unit length
    max_iterations: int = 500
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, shots=self.shots, draws=self.draws, max_iterations=self.max_iterations)
        at_least(0, l2=self.l2)
        above_zero(tolerance=self.tolerance)


@dataclass(frozen=True, kw_only=True)
class LogReg(Protocol):
    """Multinomial logistic regression by L-BFGS, a path of penalties from the strongest down.

    Minimised: sum of cross-entropies + l2 / 2 ||W||^2, the bias unpenalised.
    """

    l2: tuple[float, float, int] = (1e-6, 1e5, 45)  # smallest, largest, how many, log-spaced
    max_iterations: int = 1000
    tolerance: float = 1e-5  # on the largest gradient entry of the mean objective
    chunk: int = 65536  # rows of features in working memory at a time

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high, count = self.l2
        if not 0 < low <= high < math.inf or count < 1:
            raise ValueError(
                f"l2 is the smallest and the largest penalty, above 0, and how many, not {self.l2}"
            )
        at_least(1, max_iterations=self.max_iterations, chunk=self.chunk)
        above_zero(tolerance=self.tolerance)

    @property
    def penalties(self) -> list[float]:
        """Strongest first, evenly spaced in their logarithms."""
        low, high, count = math.log10(self.l2[0]), math.log10(self.l2[1]), self.l2[2]
        if count == 1:
            return [self.l2[1]]
        return [10 ** (high - (high - low) * i / (count - 1)) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class ListFile:
    """A list of labelled images: how many lines it has and its sha256."""

    lines: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """How the whole network trains on one part of the labels."""

    length: Length
    head_over_trunk: float = 1.0  # how many times the trunk's rate the head's is
    list: ListFile | None = None  # what the list must be; null: any list


@dataclass(frozen=True, kw_only=True)
class Finetune(ScaledRates, Protocol):
    """All layers trained by SGD or AdamW, a grid over the head's rate."""

    dataset: str | None = None  # which one `backbench semisup` is about
    head_lr: tuple[float, ...]
    reference_batch: int = 256
    batch_size: int = 256
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: RateSchedule = RateSchedule(name="step", milestones=(0.6, 0.8), gamma=0.2)
    parts: dict[str, Part] = field(default_factory=dict)  # by percent of the labels: "1", "100"
    augment: CropAugment = CropAugment()
    init_std: float = 0.01
    save_minutes: float = 5.0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's
    # The rate of each layer of the trunk is that of the next one times this (BEiT, arXiv:2106.08254)
    layer_decay: float = 1.0
    warmup: float = 0.0  # share of the run in which the rates rise from 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_rates("head_lr", self.head_lr)
        if not 0 < self.layer_decay <= 1 or not 0 <= self.warmup < 1:
            raise ValueError(
                f"layer_decay is a factor up to 1, warmup a share below 1, not {self.layer_decay:g}, "
                f"{self.warmup:g}"
            )

    def factor(self, step: int, steps: int, steps_per_epoch: float) -> float:
        """On the peak rates, at `step` of `steps`: the warm-up, then the schedule over the rest."""
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        return self.schedule.factor(step - rising, steps - rising, steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """A recipe of `backbench analyze`; {space} in the protocol's name becomes trunk or projector."""

    protocol: str = "analyze-{space}-v1"
    split: Literal["train", "val", "test"] = "test"
    images: int | None = None  # a seeded choice of so many; null: all
    augmentations: int = 32
    crops: Crops
    geometry: Geometry
    # Images whose plain features are kept, for distances between images and the probes
    sample: int = 4096
    batch: int = 4  # images at a time, each with all its views
    neighbours: int = 20
    temperature: float = 0.07
    shots: int = 2
    draws: int = 20
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
        if self.augmentations < 2 or self.sample < 2 or self.batch < 1:
            raise ValueError("augmentations and sample must be at least 2, batch at least 1")
        at_least(1, neighbours=self.neighbours, shots=self.shots, draws=self.draws)
        if self.images is not None:
            at_least(2, images=self.images)
        above_zero(temperature=self.temperature)

    def name(self, space: str) -> str:
        return self.protocol.replace("{space}", space)


# `kind:` -> what its yaml files in configs/transfer are read into
PROTOCOLS: dict[str, type[Protocol]] = {
    "sgd": Sgd,
    "logreg": LogReg,
    "knn": Knn,
    "fewshot": FewShot,
    "finetune": Finetune,
}


def of_verb(verb: str) -> dict[str, type[Protocol]]:
    """Those that a verb of the command line measures by."""
    return {kind: PROTOCOLS[kind] for kind in by_kind(verb)}


def check(args: argparse.Namespace) -> None:
    """BadInput for the protocol of `linear`, `semisup` or `finetune`, before torch is imported."""
    if args.protocol != OWN:  # that one is in the checkpoint
        load_protocol(args.protocol, of_verb(args.verb))


def load_protocol(name: str, recipes: Mapping[str, type[Protocol]]) -> Protocol:
    """A protocol by path or by its name under configs/transfer, of one of the kinds `recipes`."""
    path = config.find_recipe(name, "transfer")
    data = config.read_recipe(path)
    kind = str(data.get("kind"))
    every = dict.fromkeys(task.kind for task in TASKS.values() if task.kind is not None)
    if kind not in every:
        raise BadInput(f"{path}: kind '{kind}'; {nearest(kind, every)}")
    if kind not in recipes:
        runs = ", ".join(recipes)
        raise BadInput(f"{path}: a protocol of kind '{kind}'; this command runs {runs}")
    return config.build(recipes[kind], data, where=str(path))


def load_analysis(name: str, augmentations: int | None) -> AnalyzeConfig:
    """The recipe; another number of augmentations than its own becomes part of the protocol's
    name."""
    recipe = config.load(AnalyzeConfig, name, kind="transfer")
    if augmentations is None or augmentations == recipe.augmentations:
        return recipe
    data = config.to_dict(recipe) | {"augmentations": augmentations}
    data["protocol"] = recipe.protocol.replace("{space}", f"{{space}}-{augmentations}views")
    return config.build(AnalyzeConfig, data, where="--augmentations")


def check_analysis(args: argparse.Namespace) -> None:
    """BadInput for the recipe of `analyze`, before torch is imported."""
    load_analysis(args.recipe, args.augmentations)
