"""Declares evaluation protocols: one dataclass for each kind of recipe in configs/transfer. Each
has a versioned name; a number under another name is another column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from backbench.errors import BadInput, nearest
from backbench.images.crops import Crops
from backbench.images.preprocess import eval_geometry
from backbench.parallel.precision import Precision
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.records import protocol_fingerprints
from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.requests.probe import LinearRequest, OodRequest
from backbench.runs.terminal import log
from backbench.tasks import TASKS, by_kind

if TYPE_CHECKING:
    from PIL import Image


# What values may be; `config.build` refuses others by the key's name
Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
Positive = Annotated[float, Field(gt=0, lt=math.inf)]
NotNegative = Annotated[float, Field(ge=0, lt=math.inf)]
Rates = Annotated[tuple[NotNegative, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Brings the shorter side (both, if `square`) to `resize`, then takes the centre `crop`."""

    resize: Count = 256
    crop: Count = 224
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    square: bool = False

    def transform(self) -> Callable[[Image.Image], Image.Image]:
        """The same as a function of PIL images."""
        return eval_geometry(
            resize=self.resize,
            crop=self.crop,
            interpolation=self.interpolation,
            square=self.square,
        )


@dataclass(frozen=True, kw_only=True)
class ModelGeometry(Geometry):
    """The way in which timm evaluates a model: input_size, crop_pct, crop_mode, interpolation."""

    evaluation: dict[str, Any]

    def transform(self) -> Callable[[Image.Image], Image.Image]:
        from backbench.weights.families import timm_classifier

        return timm_classifier.view(self.evaluation)


@dataclass(frozen=True, kw_only=True)
class TrimmedGeometry(Geometry):
    """`trim` pixels are cut from each side, then the image is brought to size as `of` does."""

    trim: int
    of: Geometry

    def transform(self) -> Callable[[Image.Image], Image.Image]:
        cut, inner = self.trim, self.of.transform()
        return lambda x: inner(x.crop((cut, cut, x.width - cut, x.height - cut)))


@dataclass(frozen=True, kw_only=True)
class CropAugment:
    """RandomResizedCrop and horizontal flip, with torchvision's parameters."""

    size: Count = 224
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


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a training is, in one of two units."""

    epochs: Positive | None = None
    iterations: Count | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.iterations is None):
            raise ValueError("give either epochs or iterations")

    def steps(self, images: int, batch: int) -> int:
        """Optimiser steps for `images` training images."""
        # An epoch has images / batch steps, also when that is broken: no image is left out.
        if self.iterations is not None:
            return self.iterations
        assert self.epochs is not None
        return max(1, round(self.epochs * images / batch))


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """The factor on the peak rate, by step: `cosine` half a cosine to 0; `step` x `gamma` at each
    of `milestones`; `epoch_decay` x `gamma` after each epoch; `dinov3` as its segmentation code
    (eval/segmentation/schedulers.py, _compute_lr_momentum)."""

    name: Literal["cosine", "step", "epoch_decay", "constant", "dinov3"] = "cosine"
    milestones: tuple[float, ...] = ()  # shares of the run
    gamma: float = 0.1
    # Share in which the rate rises: from 0 to the schedule's start, or into dinov3's falling line
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def factor(self, step: int, total: int, steps_per_epoch: float) -> float:
        """At `step`, counted from 0, of `total`; an epoch may have a broken number of steps."""
        rising = round(self.warmup * total)
        if self.name == "dinov3":
            if step < rising:
                return (1 - (1 - step / rising) * (1 - 1e-6)) * (1 - step / total)
            return 0.5 * (1 + math.cos(math.pi * (step + 1) / total))
        if step < rising:
            return (step + 1) / rising
        step, total = step - rising, total - rising
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
    protocol: Annotated[
        str, Field(min_length=1)
    ]  # its name, with a version; stands in every row
    geometry: Geometry = Geometry()
    precision: Precision = "fp32"
    feature_batch: Count = 256
    # A head that the checkpoint has kept (lphi: CLLR's L), whose output is the feature; null: the
    # trunk's
    head: str | None = None

    @property
    def name(self) -> str:
        # Features in bfloat16 differ by 2%, so their numbers are another column; TF32 is said too.
        name = self.protocol + (
            "" if self.precision == "fp32" else f"-{self.precision}"
        )
        return name + (f"-{self.head}" if self.head else "")

    @property
    def space(self) -> str:
        """The space that its heads read."""
        return self.head or "trunk"


@dataclass(frozen=True, kw_only=True)
class ScaledRates(Protocol):
    """Base of protocols that train by SGD; rates are declared for a batch of `reference_batch`."""

    reference_batch: Count = 256
    batch_size: Count = 256
    momentum: NotNegative = 0.9
    weight_decay: NotNegative = 0.0

    def used(self, lr: float) -> float:
        """The rate that `lr`, declared for `reference_batch`, becomes with `batch_size` images."""
        return lr * self.batch_size / self.reference_batch


@dataclass(frozen=True, kw_only=True)
class Sgd(ScaledRates):
    """Linear heads trained by SGD on a frozen trunk, all rates of `lr` in one pass; without
    `augment` on features computed once. With one rate nothing is chosen or held out, unless
    `patience` (epochs without a better validation loss) stops the training early."""

    lr: Rates
    # adam: torch's, whose first beta is `momentum`
    optimizer: Literal["sgd", "adam", "adamw", "lars"] = "sgd"
    schedule: RateSchedule = RateSchedule()
    length: dict[str, Length]  # by dataset, and `default`
    augment: CropAugment | None = CropAugment()
    init_std: float = 0.01
    patience: int | None = None
    train_only: tuple[
        str, ...
    ] = ()  # datasets whose val stays out of the final head's training
    # test: the best on the reported split, only under a protocol of that name
    select: Literal["val", "test"] = "val"
    # also top-1 on the images that were trained on, centre crops, as a row of the split `train`
    train_score: bool = False
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        if self.select == "test" and "testsel" not in self.protocol:
            raise ValueError(
                "select: test needs a protocol name that says so, as in linear-lorac-testsel-v1"
            )
        if "default" not in self.length:
            raise ValueError("length needs a `default`")
        if self.optimizer in ("adamw", "lars") and self.kind == "sgd":
            raise ValueError(
                "optimizers adamw and lars are for maps and tokens; take sgd or adam"
            )
        if self.train_score and (
            len(self.lr) > 1 or self.patience is not None or self.train_only
        ):
            raise ValueError(
                "train_score needs one rate, no patience and no train_only: all labels train"
            )

    @property
    def grid(self) -> list[tuple[float, float]]:
        """The rate, as declared, and the weight decay of each head."""
        return [(lr, self.weight_decay) for lr in self.lr]

    def trains_on_val(self, dataset: str) -> bool:
        """True where the final heads train on train + val, False where on train alone."""
        return self.patience is None and dataset not in self.train_only

    def steps(self, dataset: str, images: int) -> int:
        """Optimiser steps of one training on so many images of a dataset."""
        length = self.length.get(dataset, self.length["default"])
        return length.steps(images, self.batch_size)


@dataclass(frozen=True, kw_only=True)
class TokenProbe(Sgd):
    """Base of protocols whose heads train on a frozen trunk's tokens, all rates in one pass. One
    rate trains on all of train; of a grid a held-out part chooses. The head is scored as it is."""

    optimizer: Literal["sgd", "adam", "adamw", "lars"] = "adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.optimizer not in ("adamw", "lars")
            or self.patience is not None
            or self.head
        ):
            raise ValueError(
                "heads on tokens have `optimizer: adamw` or lars, no patience, no head"
            )
        if self.select != "val" or self.train_score or self.train_only:
            raise ValueError(
                "heads on tokens have no select, train_score or train_only"
            )

    def trains_on_val(self, dataset: str) -> bool:
        return len(self.grid) == 1


@dataclass(frozen=True, kw_only=True)
class Attentive(TokenProbe):
    """Learned queries over the tokens (`pool: mean`: their mean), and a linear layer. An official
    val chooses the rate, or `holdout` of train."""

    pool: Literal["capi", "ep", "mean"] = "capi"
    beta2: Annotated[float, Field(ge=0, lt=1)] = (
        0.95  # AdamW's; `momentum` is its first
    )
    weight_decays: tuple[
        NotNegative, ...
    ] = ()  # each with each rate, instead of `weight_decay`
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment is None:
            raise ValueError("attentive heads train on views: give `augment`")

    @property
    def space(self) -> str:
        return "tokens"

    @property
    def grid(self) -> list[tuple[float, float]]:
        decays = self.weight_decays or (self.weight_decay,)
        return [(lr, decay) for lr in self.lr for decay in decays]

    def stream(self) -> str:
        """Name all that decides which tokens a step sees; protocols of one stream share a pass."""
        alone = {"protocol", "pool", "optimizer", "lr", "weight_decay", "weight_decays"}
        alone |= {"momentum", "beta2"}
        keys = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in alone
        }
        return repr((len(self.grid) > 1, keys))


@dataclass(frozen=True, kw_only=True)
class Seg(TokenProbe):
    """A batch norm and a 1 x 1 convolution on the last map. `geometry` has an image's shorter side,
    and the side of a training crop and test window; `stride` is from one window to the next."""

    augment: CropAugment | None = None  # pairs are cut by the keys below
    stride: Count
    sides: dict[str, Count] = field(
        default_factory=dict
    )  # datasets with another shorter side
    scale: tuple[Positive, Positive] = (0.5, 2.0)  # of the shorter side in training
    most_of_a_class: Annotated[float, Field(gt=0, le=1)] = (
        0.75  # of a crop's labelled pixels
    )
    hue: NotNegative = 0.1  # turns
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the map's channels
    output_stride: Literal[8, 16, 32] = 16  # of a ResNet, by dilation
    # The sum of the pixels' losses is divided by the number of all pixels, or of the labelled ones
    average: Literal["all", "labelled"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "adamw" or self.augment is not None:
            raise ValueError("segmentation has `optimizer: adamw`, and no `augment`")
        smallest = min([self.geometry.resize, *self.sides.values()])
        if not self.stride <= self.geometry.crop <= smallest:
            raise ValueError(
                "geometry.crop may be at most resize, stride at most geometry.crop"
            )

    def side(self, dataset: str) -> int:
        """The shorter side, in pixels, of that dataset's images."""
        return self.sides.get(dataset, self.geometry.resize)


Distance = Literal["cosine", "l2"]


@dataclass(frozen=True, kw_only=True)
class SegKnn(Protocol):
    """Each pixel has the most frequent label of the neighbours of its patch; the held-out part of
    train chooses how many these are, and by which distance."""

    k: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 3, 10, 30)
    distances: Annotated[tuple[Distance, ...], Field(min_length=1)] = ("cosine", "l2")
    output_stride: Literal[8, 16, 32] = 16  # of a ResNet, by dilation

    def __post_init__(self) -> None:
        g = self.geometry
        if not g.square or g.resize != g.crop or self.head:
            raise ValueError(
                "whole images are read: geometry.square, resize as crop, no head"
            )


@dataclass(frozen=True, kw_only=True)
class Knn(Protocol):
    """Weighted k-nearest neighbours by cosine similarity, weights exp(similarity / temperature)."""

    k: Annotated[tuple[Count, ...], Field(min_length=1)] = (5, 20, 200)
    temperature: Positive = 0.07


@dataclass(frozen=True, kw_only=True)
class FewShot(Protocol):
    """Logistic regression on `shots` labels per class, many draws of them."""

    shots: Count = 2
    draws: Count = 20
    l2: NotNegative = 0.01  # as in LogReg, on features of unit length
    max_iterations: Count = 500
    tolerance: Positive = 1e-6


@dataclass(frozen=True, kw_only=True)
class ClassRetrieval(Protocol):
    """The other test images of a query's class, found by cosine similarity."""


@dataclass(frozen=True, kw_only=True)
class KMeansClusters(Protocol):
    """k-means on test features of unit length, held to the classes."""

    restarts: Count = 10  # the one of least inertia counts
    iterations: Count = 300
    tolerance: NotNegative = 1e-4  # scikit-learn's, on the movement of the centres


@dataclass(frozen=True, kw_only=True)
class LogReg(Protocol):
    """Multinomial logistic regression by L-BFGS, a path of penalties from the strongest down.
    Minimised: sum of cross-entropies + l2 / 2 ||W||^2, the bias unpenalised."""

    l2: tuple[float, float, int] = (
        1e-6,
        1e5,
        45,
    )  # smallest, largest, how many, log-spaced
    max_iterations: Count = 1000
    tolerance: Positive = 1e-5  # on the largest gradient entry of the mean objective
    chunk: Count = 65536  # rows of features in working memory at a time

    def __post_init__(self) -> None:
        low, high, count = self.l2
        if not 0 < low <= high < math.inf or count < 1:
            raise ValueError(
                f"l2 is the smallest and the largest penalty, above 0, and how many, not {self.l2}"
            )

    @property
    def penalties(self) -> list[float]:
        """Strongest first, evenly spaced in their logarithms."""
        low, high, count = math.log10(self.l2[0]), math.log10(self.l2[1]), self.l2[2]
        if count == 1:
            return [self.l2[1]]
        return [10 ** (high - (high - low) * i / (count - 1)) for i in range(count)]


OWN_HEAD = "own"  # the classifier that a timm model came with
RULES = ("all", "subset", "any", "official")


@dataclass(frozen=True, kw_only=True)
class Ood(Protocol):
    """ImageNet's classifiers on other pictures; nothing is trained or chosen."""

    of: str = OWN_HEAD  # or the protocol whose kept heads are used
    reads: Literal["trunk", "tokens"] = "trunk"  # what those heads read
    rule: str | None = None  # of RULES; null: each that a set has
    # Of the model's own head, whose geometry is the model's: the larger size that some are tested at
    test_size: bool = True

    @property
    def name(self) -> str:
        # Heads on bfloat16 features have that in their protocol's name already
        plain = self.precision == "fp32" or self.of.endswith(f"-{self.precision}")
        size = "" if self.test_size else "-train-size"
        return f"{self.of}{'' if plain else f'-{self.precision}'}{size}-{self.rule}"

    @property
    def space(self) -> str:
        return self.reads


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
class Finetune(ScaledRates):
    """All layers trained by SGD or AdamW, a grid over the head's rate."""

    dataset: str | None = None  # which one `backbench semisup` is about
    head_lr: Rates
    schedule: RateSchedule = RateSchedule(name="step", milestones=(0.6, 0.8), gamma=0.2)
    parts: dict[str, Part] = field(
        default_factory=dict
    )  # by percent of the labels: "1", "100"
    augment: CropAugment = CropAugment()
    init_std: float = 0.01
    save_minutes: float = 5.0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's
    # The rate of each layer of the trunk is that of the next one times this (BEiT, arXiv:2106.08254)
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    warmup: Annotated[float, Field(ge=0, lt=1)] = (
        0.0  # share in which the rates rise from 0
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
    images: Several | None = None  # a seeded choice of so many; null: all
    augmentations: Several = 32
    crops: Crops
    geometry: Geometry
    # Images whose plain features are kept, for distances between images and the probes
    sample: Several = 4096
    batch: Count = 4  # images at a time, each with all its views
    neighbours: Count = 20
    temperature: Positive = 0.07
    shots: Count = 2
    draws: Count = 20
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
        return self.protocol.replace("{space}", space)


P = TypeVar("P", bound=Protocol)
# `kind:` -> what its yaml files in configs/transfer are read into
PROTOCOLS: dict[str, type[Protocol]] = {
    "sgd": Sgd,
    "seg": Seg,
    "seg_knn": SegKnn,
    "attentive": Attentive,
    "logreg": LogReg,
    "knn": Knn,
    "fewshot": FewShot,
    "class_retrieval": ClassRetrieval,
    "cluster": KMeansClusters,
    "ood": Ood,
    "finetune": Finetune,
}


def of_verb(verb: str) -> dict[str, type[Protocol]]:
    """Those that a verb of the command line measures by."""
    return {kind: PROTOCOLS[kind] for kind in by_kind(verb)}


def listing(verb: str) -> list[str]:
    """A line for each shipped protocol of a verb: its name, and what it is."""
    lines = []
    for name in config.recipe_names("transfer"):
        path = config.find_recipe(name, "transfer")
        recipe = config.read_recipe(path)
        fits = recipe.get("kind") in of_verb(verb)
        if fits and recipe["kind"] == "finetune":
            fits = ("100" in recipe["parts"]) == (verb == "finetune")
        if fits:
            lines.append(
                f"{name:<22} {config.first_sentence(path) or recipe['protocol']}"
            )
    return lines


def check(
    request: LinearRequest | OodRequest | SemisupRequest | FinetuneRequest,
) -> None:
    """BadInput for the protocol of `linear`, `semisup` or `finetune`, before torch is imported."""
    if request.protocol == OWN:  # that one is in the checkpoint
        if request.overrides:
            raise BadInput(
                f"'{request.overrides[0]}' after --protocol own: each checkpoint has another; name one"
            )
        return
    # Several names only where the verb measures several
    names = (
        request.protocol.split(",") if request.verb == "linear" else [request.protocol]
    )
    found: set[tuple[str, str]] = set()
    for name in names:
        protocol = load_protocol(name, of_verb(request.verb), request.overrides)
        if (protocol.kind, protocol.name) in found:
            raise BadInput(
                f"--protocol {request.protocol}: {name} gives rows named {protocol.name}, as one"
                " before it does; leave one out, or give them a `protocol` of their own"
            )
        found.add((protocol.kind, protocol.name))
        if changed := changes(protocol):
            log.info(f"--protocol {name}: {changed}")
        task = TASKS[by_kind(request.verb)[protocol.kind]]
        if request.seeds > 1 and not task.trains:
            raise BadInput(
                f"--seeds {request.seeds}: {name} trains nothing by chance, all seeds would give"
                " one number; leave --seeds out"
            )


def changes(protocol: Protocol) -> str:
    """List the keys in which a protocol differs from the shipped one of its name; empty where it is
    that one, or has a name of its own."""
    known = protocol_fingerprints.shipped()
    bound = known["fingerprints"].get(protocol.protocol, {})
    recipe = config.to_dict(protocol)
    own = protocol_fingerprints.fingerprint_of(recipe, protocol.kind, known["defaults"])
    if bound.get(protocol.kind, own) == own:
        return ""
    for name in config.recipe_names("transfer"):
        data = config.read_recipe(config.find_recipe(name, "transfer"))
        if (data.get("protocol"), data.get("kind")) == (
            protocol.protocol,
            protocol.kind,
        ):
            break
    shipped = config.to_dict(config.build(PROTOCOLS[protocol.kind], data, where=name))
    before, now = (protocol_fingerprints.leaves(each) for each in (shipped, recipe))
    parts = []
    for key in {**now, **before}:
        if now.get(key) != before.get(key) and key not in protocol_fingerprints.FREE:
            parts.append(f"{key} {now.get(key)} instead of {before.get(key)}")
    mark = f"{protocol.name}~{own[: protocol_fingerprints.DIGITS]}"
    return f"{', '.join(parts)} of the shipped {name}; its columns are named {mark}"


def load_protocol(
    name: str, recipes: Mapping[str, type[P]], overrides: Sequence[str] = ()
) -> P:
    """Load a protocol, of one of the kinds `recipes`, by path or by its name under
    configs/transfer, with `key=value` over it; a list may be written k=5,20."""
    path = config.find_recipe(name, "transfer")
    data = config.read_recipe(path)
    kind = str(data.get("kind"))
    every = dict.fromkeys(task.kind for task in TASKS.values() if task.kind is not None)
    if kind not in every:
        raise BadInput(f"{path}: kind '{kind}'; {nearest(kind, every)}")
    if kind not in recipes:
        runs = ", ".join(recipes)
        raise BadInput(f"{path}: a protocol of kind '{kind}'; this command runs {runs}")
    protocol = config.build(recipes[kind], data, where=str(path))
    if not overrides:
        return protocol
    before, written = protocol_fingerprints.leaves(config.to_dict(protocol)), []
    for text in overrides:
        key, _, value = text.partition("=")
        bare = isinstance(before.get(key), list) and not value.startswith(("[", "null"))
        written.append(f"{key}=[{value}]" if bare else text)
    where = f"--protocol {name} {' '.join(overrides)}"
    return config.build(
        recipes[kind], config.apply_overrides(data, written), where=where
    )


def load_analysis(name: str, augmentations: int | None) -> AnalyzeConfig:
    """Load the recipe; a changed number of augmentations becomes part of the protocol's name."""
    recipe = config.load(AnalyzeConfig, name, kind="transfer")
    if augmentations is None or augmentations == recipe.augmentations:
        return recipe
    data = config.to_dict(recipe) | {"augmentations": augmentations}
    data["protocol"] = recipe.protocol.replace(
        "{space}", f"{{space}}-{augmentations}views"
    )
    return config.build(AnalyzeConfig, data, where="--augmentations")


def check_analysis(request: AnalyzeRequest) -> None:
    """BadInput for the recipe of `analyze`, before torch is imported."""
    load_analysis(request.recipe, request.augmentations)
