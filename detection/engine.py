"""What an engine offers: all that the program knows of a detector. Nothing below this line is
torchvision's or Detectron2's.

    engine = TorchvisionEngine(cfg, checkpoint, flip_map=..., task=..., seed=..., device=...)
    engine.stages(x)                        # C2..C5, to prove that the trunk arrived
    engine.start(records, first, last)      # open the stream of batches; again, to open another
    engine.step()                           # one iteration: `first`, then first + 1, ...
    engine.losses()                         # or only the losses of the next batch
    engine.predict(record)                  # one image's detections

An iteration is a pure function of the weights, the optimiser's state, the seed and its number: not
of what ran before it in this process, nor of the number of workers. That is what makes a continued
run equal to one that was never stopped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from backbench.weights.checkpoint import Checkpoint
from detection.data.records import Detection, ImageRecord
from detection.tasks import DetectionTask

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

NAMES = ("torchvision", "detectron2")


class DetectionEngine(ABC):
    """A detector with its trunk loaded, its optimiser and its stream of training images."""

    name: str  # one of NAMES: what its rows are marked with
    model: nn.Module  # the whole network; its state dict is what is saved and scored
    optimizer: torch.optim.Optimizer  # the caller sets its groups' rates before each step

    def __init__(
        self,
        cfg: CfgNode,
        checkpoint: Checkpoint,
        *,
        flip_map: Sequence[int],
        task: DetectionTask,
        seed: int,
        device: torch.device,
    ) -> None:
        """`flip_map` is Split.flip, empty without keypoints; `seed` decides the fresh heads, the
        images and all draws. The engines' own go on from here: they build `model` around the
        checkpoint's trunk, and `optimizer`."""
        self.cfg, self.checkpoint, self.flip_map = cfg, checkpoint, flip_map
        self.task, self.seed, self.device = task, seed, device

    @abstractmethod
    def stages(self, x: Tensor) -> list[Tensor]:
        """C2..C5 of a normalised batch (N, 3, H, W), each (N, C, H/s, W/s); in evaluation mode,
        without gradient."""

    @abstractmethod
    def start(self, records: Sequence[ImageRecord], first: int, last: int) -> None:
        """Open the stream of this rank's batches for iterations `first` to `last` - 1."""

    @abstractmethod
    def losses(self) -> dict[str, Tensor]:
        """The next batch's loss terms, each 0-dim, in training mode; they are minimised as their
        sum."""

    @abstractmethod
    def step(self) -> dict[str, Tensor]:
        """Train on the next batch at the rates that the optimiser holds; its loss terms,
        detached."""

    @abstractmethod
    def predict(self, record: ImageRecord) -> list[Detection]:
        """One image's detections on the image as it is in the file; categories are labels from
        0."""
