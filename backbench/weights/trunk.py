"""Defines the interface of a trunk, which pretraining, probes, finetuning and detection all use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels


class LayerOutputs(NamedTuple):
    """What a trunk and its layers give for images (N, 3, H, W), the layer nearest to them first."""

    feature: Tensor  # (N, feature_dim): what `forward` gives
    maps: Sequence[Tensor]  # (N, C, h, w) of each layer
    class_tokens: Sequence[Tensor]  # (N, C) of each layer; empty without a class token
    what: str  # a layer is: block | stage


class Trunk(nn.Module, ABC):
    """A trunk is an image encoder without a head. Its state dict has the names that a checkpoint of
    its `arch` has, and nothing else."""

    arch: str  # with `stem`, its name in recipes and checkpoints
    stem: str
    feature_dim: int  # the width of a feature
    reading: str = "pooled"  # the part of its output that is the feature (`readings`)
    # Of the maps that `stages` returns; empty if there are none
    strides: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    size: int | None = None  # the only side of an image that it takes, in pixels
    # The side of the images on which it was trained, where its library says so
    trained_size: int | None = None
    divisor: int = 1  # both sides of an image must be multiples of it
    # The user's own name for the forward function of a trunk that no file describes
    identity: str = ""
    # The layout of its maps in memory with which it is fastest; channels last pays for convolutions
    memory_format: torch.memory_format = torch.contiguous_format

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Map normalised images (N, 3, H, W) to features (N, feature_dim)."""

    @abstractmethod
    def stages(self, x: Tensor) -> list[Tensor]:
        """Map images (N, 3, H, W) to maps (N, widths[i], H / strides[i], W / strides[i]): C2..C5 at
        strides 4, 8, 16, 32, or the one grid of patch tokens of a plain vision transformer."""

    def layers(self, x: Tensor) -> LayerOutputs:
        """Map images (N, 3, H, W) to the feature and to what each layer gives. A trunk that knows how
        does both in one pass."""
        return LayerOutputs(self(x), self.stages(x), [], "stage")

    def tokens(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to tokens (N, h, w, C), one for each place of the last map."""
        return self.stages(x)[-1].permute(0, 2, 3, 1)

    @property
    def token_dim(self) -> int:
        """The width of a token."""
        return self.widths[-1] if self.widths else self.feature_dim

    def multiply_adds(self, side: int) -> int | None:
        """Return how many multiply-adds the features of a `side` x `side` image take.

        For None they are counted in a forward pass without elements. That works for any trunk, but
        torch loads its compiler for it, which takes a second.
        """
        return None

    def zero_residuals(self) -> None:
        """Let each residual block begin as the identity, if the trunk knows how."""

    def fuse(self) -> None:
        """Merge modules in place that are one linear map in eval(), such as a convolution and its
        norm. The trunk can then only give features."""

    def dilate(self, stride: int) -> None:
        """Give the last map, in place, a stride of at most `stride`, if the trunk can.

        Strides are replaced by dilation, which adds places to the map and keeps the others.
        """

    def depths(self) -> dict[str, int]:
        """Return parameter -> its layer, counted from the input, for learning rates that decay with
        depth (BEiT, arXiv:2106.08254, appendix)."""
        raise BadInput(f"{self.arch} does not say which layers its parameters are of")

    def undecayed(self) -> set[str]:
        """Return the parameters that weight decay skips by convention: norms, biases, scales,
        tokens and position embeddings."""
        return {
            name for name, parameter in self.named_parameters() if parameter.ndim <= 1
        }

    def refuse_size(self, height: int, width: int) -> None:
        """Raise BadInput for images of a size that it does not take."""
        if self.size is not None and (height, width) != (self.size, self.size):
            raise BadInput(
                f"{self.arch} takes images of {self.size} x {self.size} pixels, not"
                f" {height} x {width}; {self.other_sizes()}"
            )
        if height % self.divisor or width % self.divisor:
            raise BadInput(
                f"{self.arch} takes images whose sides are multiples of {self.divisor}, not"
                f" {height} x {width}"
            )

    def other_sizes(self) -> str:
        """Advise a user who has images of another size."""
        return "use a protocol of that size"


class WrappedTrunk(Trunk):
    """A trunk around somebody else's module. Its state dict has that module's names."""

    model: Any  # nn.Module alone would know none of its attributes

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)


# What the attribute `model` adds to the names of a wrapped trunk. `prefix` below is what modules
# around the trunk add.
_INSIDE = "model."


def _without_prefix(
    module: nn.Module, state: dict[str, object], prefix: str, _: object
) -> None:
    """Rename model.blocks.0 to blocks.0, in a state dict that is being made."""
    for key in list(state):
        if key.startswith(prefix + _INSIDE):
            state[prefix + key.removeprefix(prefix + _INSIDE)] = state.pop(key)


def _with_prefix(
    module: nn.Module, state: dict[str, object], prefix: str, *others: object
) -> None:
    """Rename blocks.0 to model.blocks.0, in a state dict that is being loaded."""
    for key in list(state):
        if key.startswith(prefix):
            state[prefix + _INSIDE + key.removeprefix(prefix)] = state.pop(key)


class ModuleTrunk(WrappedTrunk):
    """Any torch module as a trunk.

    `features(module, images)` gives features (N, feature_dim); by default they are the module's
    output. `stages(module, images)` gives its maps, if any, with their `strides` and `widths`.
    `identity` names everything that it computes beside its weights ("mean of the last two layers,
    v1"). Without it, features are not kept, and no numbers of two modules share a row.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        feature_dim: int,
        features: Callable[[Any, Tensor], Tensor] | None = None,
        stages: Callable[[Any, Tensor], list[Tensor]] | None = None,
        strides: tuple[int, ...] = (),
        widths: tuple[int, ...] = (),
        size: int | None = None,
        divisor: int = 1,
        identity: str | None = "",
    ) -> None:
        super().__init__(module)
        # Until it is evaluated, which gives it a longer name
        self.arch = type(module).__name__
        self.identity = identity or ""
        self.feature_dim = feature_dim
        self.size = size
        self.divisor = divisor
        self.strides = tuple(strides)
        self.widths = tuple(widths)
        self._features = features
        self._stages = stages
        has_maps = stages is not None
        if len(self.strides) != len(self.widths) or bool(self.strides) != has_maps:
            raise BadInput(
                "a trunk's `stages` come with one stride and one width for each map"
            )

    def forward(self, x: Tensor) -> Tensor:
        if self._features is None:
            features = self.model(x)
        else:
            features = self._features(self.model, x)
        if not isinstance(features, Tensor):
            raise BadInput(
                f"{self.arch} gives features as a {type(features).__name__}, not as a tensor; say"
                " which part of it to read by `features`"
            )
        if features.ndim != 2 or features.shape[1] != self.feature_dim:
            raise BadInput(
                f"{self.arch} gives features {tuple(features.shape)} for {len(x)} images, not"
                f" ({len(x)}, {self.feature_dim}); say how to read it by `features`"
            )
        return features

    def stages(self, x: Tensor) -> list[Tensor]:
        if self._stages is None:
            raise BadInput(f"{self.arch} has no maps: detection needs `stages`")
        return self._stages(self.model, x)


@dataclass(frozen=True, kw_only=True)
class InstalledTrunk:
    """A plugin offers a trunk by one of these."""

    name: str
    build: Callable[[], Trunk]  # draws fresh weights
    pixels: Pixels = field(default_factory=Pixels)  # those that it was trained with
    about: Mapping[str, str] = field(default_factory=dict)
