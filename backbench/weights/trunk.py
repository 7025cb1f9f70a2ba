"""The interface of a trunk: pretraining, probes, finetuning and detection all use it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels


class Trunk(nn.Module, ABC):
    """An image encoder without a head. `arch` and `stem` name it in recipes and checkpoints; its
    state dict holds these names and nothing else. `reading` is the part of its output that is the
    feature (`readings`), `feature_dim` that feature's width. `strides` and `widths` describe the
    maps of `stages` (empty: none). `size` is the only image side that it takes, in pixels (None:
    any); both sides must be multiples of `divisor`."""

    arch: str
    stem: str
    feature_dim: int
    reading: str = "pooled"
    strides: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    size: int | None = None
    # The side of the images on which it was trained, where its library says so
    trained_size: int | None = None
    divisor: int = 1
    # The user's own name for what a trunk that no file tells computes: its forward function
    identity: str = ""
    # How its maps lie in memory where it is fastest: channels last pays for convolutions
    memory_format: torch.memory_format = torch.contiguous_format

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W), normalised -> features (N, feature_dim)."""

    @abstractmethod
    def stages(self, x: Tensor) -> list[Tensor]:
        """Map images (N, 3, H, W) to maps (N, widths[i], H / strides[i], W / strides[i]): C2..C5 at
        strides 4, 8, 16, 32, or the one grid of patch tokens of a plain vision transformer."""

    def tokens(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> (N, h, w, C): the last map, a token for each of its places."""
        return self.stages(x)[-1].permute(0, 2, 3, 1)

    @property
    def token_dim(self) -> int:
        """The width of a token."""
        return self.widths[-1] if self.widths else self.feature_dim

    def multiply_adds(self, side: int) -> int | None:
        """Return those of the features of a `side` x `side` image. None: they are counted in a
        forward pass without elements, for which torch loads its compiler (a second)."""
        return None

    def zero_residuals(self) -> None:
        """Let each residual block begin as the identity, if the trunk knows how."""

    def fuse(self) -> None:
        """Merge, in place, what is one map in eval(): for trunks that only give features."""

    def dilate(self, stride: int) -> None:
        """Give the last map, in place, a stride of at most `stride`, if the trunk can: dilation for
        strides, which adds places and changes none."""

    def depths(self) -> dict[str, int]:
        """Return parameter -> its layer, counted from the input, for rates that decay with depth
        (BEiT, arXiv:2106.08254, appendix)."""
        raise BadInput(f"{self.arch} does not say which layers its parameters are of")

    def undecayed(self) -> set[str]:
        """Return the parameters that weight decay skips by convention: norms, biases, scales,
        tokens and position embeddings."""
        return {
            name for name, parameter in self.named_parameters() if parameter.ndim <= 1
        }

    def refuse_size(self, height: int, width: int) -> None:
        """BadInput for images that it does not take."""
        if self.size is not None and (height, width) != (self.size, self.size):
            sides = f"{self.size} x {self.size} pixels, not {height} x {width}"
            raise BadInput(f"{self.arch} takes images of {sides}; {self.other_sizes()}")
        if height % self.divisor or width % self.divisor:
            sides = f"multiples of {self.divisor}, not {height} x {width}"
            raise BadInput(f"{self.arch} takes images whose sides are {sides}")

    def other_sizes(self) -> str:
        """Advice to a user who has images of another size."""
        return "use a protocol of that size"


class WrappedTrunk(Trunk):
    """A trunk around somebody else's module, whose state dict has that module's names."""

    model: Any  # nn.Module alone would know none of its attributes

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)


_INSIDE = "model."


def _without_prefix(
    module: nn.Module, state: dict[str, object], prefix: str, _: object
) -> None:
    """model.blocks.0 -> blocks.0, in a state dict that is being made."""
    for key in [k for k in state if k.startswith(prefix + _INSIDE)]:
        state[prefix + key[len(prefix + _INSIDE) :]] = state.pop(key)


def _with_prefix(
    module: nn.Module, state: dict[str, object], prefix: str, *others: object
) -> None:
    """blocks.0 -> model.blocks.0, in a state dict that is being loaded."""
    for key in [k for k in state if k.startswith(prefix)]:
        state[prefix + _INSIDE + key[len(prefix) :]] = state.pop(key)


class ModuleTrunk(WrappedTrunk):
    """Any torch module as a trunk. `features(module, images)` gives (N, feature_dim), by default
    the module's output; `stages` gives its maps, if any, with their `strides` and `widths`.
    `identity` names all that it computes beside its weights ("mean of the last two layers, v1").
    Only under it are features kept and do numbers share a row, also across processes."""

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
        identity: str = "",
    ) -> None:
        super().__init__(module)
        self.identity = identity
        self.feature_dim, self.size, self.divisor = feature_dim, size, divisor
        self.strides, self.widths = tuple(strides), tuple(widths)
        self._features, self._stages = features, stages
        if len(self.strides) != len(self.widths) or bool(self.strides) != (
            stages is not None
        ):
            raise BadInput(
                "a trunk's `stages` come with one stride and one width for each map"
            )

    def forward(self, x: Tensor) -> Tensor:
        given = (
            self.model(x) if self._features is None else self._features(self.model, x)
        )
        if given.ndim != 2 or given.shape[1] != self.feature_dim:
            shapes = f"{tuple(given.shape)} for {len(x)} images, not ({len(x)}, {self.feature_dim})"
            raise BadInput(
                f"{self.arch} gives features {shapes}; say how to read it by `features`"
            )
        return given

    def stages(self, x: Tensor) -> list[Tensor]:
        if self._stages is None:
            raise BadInput(f"{self.arch} has no maps: detection needs `stages`")
        return self._stages(self.model, x)


@dataclass(frozen=True, kw_only=True)
class InstalledTrunk:
    """A plugin's trunk: `build` draws fresh weights; `pixels` are those it was trained with."""

    name: str
    build: Callable[[], Trunk]
    pixels: Pixels = field(default_factory=Pixels)
    about: Mapping[str, str] = field(default_factory=dict)
