"""A pretraining method is a module that turns a batch of views into a loss.

One file each in pretrain/methods, or a module that an installed package adds (see
backbench/plugins.py). It holds the loss as a pure function, a frozen `Config(MethodConfig)` and a
`Method(method.Method)`.

The rules. `FirstStep` (first_step.py) holds every method to those that a machine can see, in the
first step of a run; the others are kept by whoever writes the method.

1. Built.      The constructor takes (config, backbone, setup) and refuses what it cannot do with
               BadInput. `self.backbone` is the trunk that is handed on.
2. Returned.   `forward(batch)` returns {"loss": a 0-dim float with gradient, **others to log:
               0-dim, without gradient}, the same names at every step.
3. Gradients.  Every parameter that requires a gradient gets one in every step; zero will do. DDP
               waits for each of them. What stands still for a while takes part as
               `p.detach() + 0.0 * p`; what is never trained (a momentum encoder) requires none.
4. Ranks.      The loss is that of the global batch, equal on all ranks, and the method alone sees
               to it: a mean over this rank's samples goes through `distributed.mean_over_ranks`
               before it is returned, a loss over gathered samples is equal already. The loss
               functions know of no ranks, the loop of no losses. Whatever crosses ranks goes through
               backbench/parallel/distributed.py, in the same order on all of them.
5. State.      What one step leaves for the next is a parameter or a buffer, which is what state.pt
               holds; anything else is lost when a run continues. What `forward` hands to
               `after_step` may lie in an attribute, and is gone when `after_step` returns.
6. Chance.     Random numbers come from `seeding.generator(setup.seed, what for, batch.step)`: alike
               on all ranks, and alike when a run continues.
7. Steps.      `forward` is called once for each micro-batch of a step and changes nothing that
               another `forward` of that step sees; queues move in `after_step`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.pretrain.method_config import (
    AnyMethodConfig,
    MethodConfig,
    choose_config,
    method_module,
    method_names,
)
from backbench.weights.trunk import Trunk

# What a method's file, or an installed package's, imports from here
__all__ = [
    "AnyMethodConfig",
    "Batch",
    "Method",
    "MethodConfig",
    "Setup",
    "build_method",
    "choose_config",
    "method_names",
]


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch, or of a micro-batch of it."""

    views: Sequence[Tensor]  # V of (N, 3, h, w), in the order of the crop groups
    labels: Tensor | None  # (N,)
    index: Tensor  # (N,) positions in the dataset
    step: int  # of the optimiser, from 0
    epoch: int  # from 0
    epochs: int  # of the whole schedule
    progress: float  # step / total steps, in [0, 1)


@dataclass(frozen=True)
class Setup:
    """Tells a method about its run."""

    batch_size: int  # global: over all ranks, and all micro-batches of a step
    views: int  # of each image
    seed: int  # the recipe's
    images: int  # in the dataset
    classes: int  # in the dataset; 0 where it has images without labels
    accumulate: int = 1  # micro-batches of a step

    @property
    def images_at_once(self) -> int:
        """The images of one `forward`, over all ranks."""
        return self.batch_size // self.accumulate


class Method(nn.Module):
    """The base of all methods. The loop wraps the whole of it in DDP. The rules are above."""

    backbone: nn.Module
    # How many views of each image it takes; None where its constructor looks at their number
    views: int | None = None
    # The query encoder's batch norm spans ranks, unless the method's paper keeps it local
    sync_batchnorm = True
    # True where the loss is a mean over samples that do not meet, so that the losses of
    # micro-batches add up to that of the batch
    accumulates = False

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return {"loss": 0-dim with gradient, over all ranks, **detached terms to log}."""
        raise AssertionError("a method overrides forward")

    def after_step(self, progress: float) -> None:
        """Move averages and queues after each optimiser step. `progress` is in (0, 1]."""

    def heads(self) -> dict[str, Tensor]:
        """Return what the Checkpoint keeps beside the trunk, by default `projector`, if any."""
        projector = getattr(self, "projector", None)
        if projector is None:
            return {}
        return {f"projector.{name}": x for name, x in projector.state_dict().items()}


def build_method(config: MethodConfig, backbone: Trunk, setup: Setup) -> Method:
    """Build the method that `config` names. Raise BadInput where the views do not fit it."""
    method: type[Method] = method_module(config.name).Method
    if method.views not in (None, setup.views):
        views = f"{method.views} views"
        if method.views == 1:
            views = "one view"
        raise BadInput(
            f"{config.name} takes {views} of each image, not {setup.views}; change views.crops"
        )
    return method(config, backbone, setup)
