"""Declares a pretraining recipe. Defaults are the field's customs; recipes hold papers' numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from backbench.errors import BadInput
from backbench.images.crops import Crops
from backbench.images.preprocess import IMAGENET_MEAN, IMAGENET_STD, Pixels
from backbench.pretrain.method_config import AnyMethodConfig, check_name
from backbench.recipes import config, fast
from backbench.requests.bounds import (
    MOST_EPOCHS,
    Batch,
    Count,
    CountOrNone,
    NotNegative,
    Seed,
    Workers,
)
from backbench.requests.pretrain import PretrainRequest

BelowOne = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class ViewsConfig:
    """How an image is made into views."""

    # fast: OpenCV, and on a GPU colour and blur there; reference: torchvision
    pipeline: Literal["fast", "reference"] = "fast"
    crops: Annotated[tuple[Crops, ...], Field(min_length=1)] = (Crops(),)
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        _ = self.pixels  # mean and std are checked where they are made

    @property
    def per_view(self) -> tuple[Crops, ...]:
        """The crop group of each view, in the order of the views: a group of three comes thrice."""
        return tuple(group for group in self.crops for _ in range(group.count))

    @property
    def pixels(self) -> Pixels:
        return Pixels(self.mean, self.std)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The images of ROOT/<dataset>/<split>: a class folder, or a dataset of backbench/datasets."""

    dataset: str
    split: str = "train"
    # false: refuse the run and name the file; true: leave the image out and say so
    skip_corrupt: bool = False
    workers: Workers = 8
    # This share of the images is not trained on; it is the same one for all recipes and seeds
    hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.0


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimiser and its schedule. The peak of the rate is lr * batch_size / reference_batch, or
    `lr` itself where reference_batch is null."""

    name: Literal["sgd", "adam", "adamw", "lars"] = "sgd"
    lr: NotNegative
    reference_batch: Batch | None = None
    final_lr: float = 0.0
    # A peak of their own for biases and norm weights (Barlow Twins, ARB)
    lr_1d: NotNegative | None = None
    # Parts of the method whose rate stays at the peak (SimSiam's predictor)
    constant_lr: tuple[str, ...] = ()
    momentum: NotNegative = 0.9
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    weight_decay: NotNegative = 1e-4
    decay_1d: bool = True  # weight decay on biases and norms
    adapt_1d: bool = True  # LARS scaling on biases and norms
    trust: float = 0.001  # LARS
    clip: bool = False  # LARS: a layer's rate is at most lr (solo-learn)
    schedule: Literal["cosine", "cosine_epoch", "step", "constant"] = "cosine"
    milestones: tuple[float, ...] = ()  # epochs, for `step`
    gamma: float = 0.1
    warmup_epochs: NotNegative = 0.0
    warmup_lr: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        # Both are given as rates, but used as shares of the peak, also of lr_1d
        if self.lr == 0 and (self.warmup_lr or self.final_lr):
            raise ValueError(
                f"lr is 0, the highest rate there is: warmup_lr {self.warmup_lr:g} and"
                f" final_lr {self.final_lr:g} must be 0 too"
            )


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A pretraining recipe, configs/pretrain/*.yaml."""

    name: str  # the row's name on the leaderboard
    arch: str = "resnet50"
    stem: str = "imagenet"
    zero_init_residual: bool = False
    method: AnyMethodConfig
    views: ViewsConfig = ViewsConfig()
    data: Data
    optim: Optim
    epochs: Annotated[int, Field(ge=0, le=MOST_EPOCHS)]
    batch_size: Batch  # global: all ranks and accumulation steps together
    accumulate: Batch = 1
    seed: Seed = 0
    # tf32: a GPU's quick float32; fp64: to compare runs without float32's rounding
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    channels_last: bool = True
    compile: bool | Literal["cuda"] = False  # cuda: on a GPU only
    save_minutes: float = 5.0
    knn_every: CountOrNone = 0  # epochs between kNN scores; 0: none
    log_every: Count = 10  # steps between rows of metrics.jsonl
    # The schedule spans `epochs`, but the run ends here (MIO: 250 of 1000)
    stop_after_epochs: Count | None = None
    # Dataset -> the protocol under configs/transfer that `--protocol own` stands for; it has no
    # influence on the training
    probe: dict[str, str] = field(default_factory=dict, hash=False)
    # Published rows that it must reproduce, such as lorac:1:lorac:resnet50:200
    expected: tuple[str, ...] = ()

    @property
    def trained_epochs(self) -> int:
        """The epochs after which the run ends."""
        return min(self.epochs, self.stop_after_epochs or self.epochs)

    def compiles_on(self, device: str) -> bool:
        """Tell if torch.compile is used on this kind of device, cpu or cuda."""
        return self.compile is True or self.compile == device


@dataclass(frozen=True, kw_only=True)
class _AnyMethod(PretrainConfig):
    """A recipe whose method's keys are not looked at."""

    method: Any


def overrides_of(request: PretrainRequest) -> Sequence[str]:
    """List what the command line changes of its recipe: keys by hand, over those of --fast."""
    if not request.fast:
        return request.overrides
    path = config.find_recipe(request.recipe, "pretrain")
    return fast.overrides(config.read_recipe(path), request.overrides, str(path))


def check(request: PretrainRequest) -> None:
    """Raise BadInput for a bad pretraining recipe. The method's own keys are not looked at, as that
    would need torch."""
    path = config.find_recipe(request.recipe, "pretrain")
    overrides = overrides_of(request)
    data = config.apply_overrides(config.read_recipe(path), overrides)
    if "method" in data:
        try:
            check_name(data["method"])
        except BadInput as error:
            raise BadInput(f"{path}: method: {error}") from None
    config.build(_AnyMethod, data, where=str(path), overrides=overrides)
