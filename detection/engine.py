"""Defines an engine's interface: all that the program knows of a detector.

An iteration is a pure function of the weights, the optimiser's state, the seed and the iteration's
number. It does not depend on what ran before it, or on the number of workers, so a continued run
equals one that was never stopped. The caller seeds torch's and numpy's global generators before each
step.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset

from backbench.detection.data.dataset_dicts import Detection, ImageRecord
from backbench.detection.data.order import ImageOrder, Slots
from backbench.detection.dialect import AMP_PRECISION, Given
from backbench.detection.run import Prepared
from backbench.errors import BadInput
from backbench.parallel import distributed, loading, precision
from backbench.parallel.loading import Unreadable
from backbench.runs import seeding
from backbench.runs.forward_clock import ForwardClock

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode


PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}  # SOLVER.AMP.PRECISION


class MixedPrecision:
    """Autocast and loss scaling for the training steps of both engines.

    It is off (`dtype` is None), bfloat16, or float16 with a scaled loss. Evaluation and the
    re-estimation of batch norm run without it, as in Detectron2 (engine/train_loop.py::AMPTrainer,
    and its PreciseBN hook).
    """

    def __init__(self, cfg: CfgNode, device: torch.device) -> None:
        amp = cfg.SOLVER.AMP
        if amp.PRECISION not in PRECISIONS:
            raise BadInput(
                f"{AMP_PRECISION} {amp.PRECISION}: {' or '.join(PRECISIONS)}"
            )
        self.device = device.type
        self.dtype = PRECISIONS[amp.PRECISION] if amp.ENABLED else None
        if self.dtype is torch.bfloat16:
            precision.warn_if_slow(device.type)
        # bfloat16 has float32's range, so only float16's small gradients would vanish.
        self.scaler = torch.amp.GradScaler(
            self.device, enabled=self.dtype is torch.float16
        )

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.dtype)

    def descend(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimiser step on this loss alone; skip it if float16 overflowed."""
        optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()


class DetectionEngine(ABC):
    """A detector with its trunk loaded, its optimiser and its stream of training images."""

    name: str  # in commands and results
    # The whole network; its state dict is what is saved and scored.
    model: nn.Module
    # The caller sets its groups' rates before each step.
    optimizer: torch.optim.Optimizer
    # For `step`; its scaler is saved with the optimiser.
    amp: MixedPrecision
    # `model`, or DDP around it where several ranks train
    parallel: nn.Module

    def __init__(self, p: Prepared, device: torch.device) -> None:
        self.cfg = p.cfg
        self.checkpoint = p.checkpoint
        self.flip_map = p.train.flip
        self.task = p.task
        self.seed = p.seed
        self.device = device
        # The heads' fresh weights are drawn next.
        seeding.seed_everything(p.seed, "detector")
        self.model = self.build()
        self.optimizer = self.build_optimizer()
        self.amp = MixedPrecision(p.cfg, device)
        self.parallel = self.model
        self._clock = ForwardClock()

    @staticmethod
    @abstractmethod
    def read_config(given: Given) -> CfgNode:
        """Put the given values over the engine's defaults. Raises BadInput for an unknown key or
        value."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the network on its device, with the checkpoint's trunk and fresh heads."""

    @abstractmethod
    def build_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimiser of `model` that the config's SOLVER asks for."""

    @abstractmethod
    def stages(self, x: Tensor) -> list[Tensor]:
        """Compute the trunk's maps of a batch (N, 3, H, W), each (N, C, H / stride, W / stride).

        This is in evaluation mode and without a gradient.
        """

    @abstractmethod
    def start(self, records: Sequence[ImageRecord], first: int, last: int) -> None:
        """Open the stream of this rank's batches for iterations `first` to `last` - 1."""

    def slots(self, records: Sequence[ImageRecord], first: int, last: int) -> Slots:
        """Return this rank's places in the order of images."""
        order = ImageOrder(
            records,
            self.cfg.SOLVER.IMS_PER_BATCH,
            self.seed,
            grouped=self.cfg.DATALOADER.ASPECT_RATIO_GROUPING,
        )
        return Slots(
            order,
            first=first,
            last=last,
            rank=distributed.rank(),
            world=distributed.world_size(),
        )

    def spread(self) -> None:
        """Put DDP around the network where several ranks train; they must have joined by now.

        Buffers are not broadcast, because those of batch norm are equal on all ranks.
        """
        if distributed.world_size() > 1 and self.parallel is self.model:
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.parallel = nn.parallel.DistributedDataParallel(
                self.model, device_ids=ids, broadcast_buffers=False
            )

    @abstractmethod
    def losses(self) -> dict[str, Tensor]:
        """Return the loss terms of the next batch, 0-dim, whose sum is the loss.

        The model must be in training mode.
        """

    @abstractmethod
    def step(self) -> dict[str, Tensor]:
        """Train on the next batch at the optimiser's rates. Returns the loss terms, detached."""

    @abstractmethod
    def read(self, record: ImageRecord) -> Any:
        """Read one image for `detect`. Raises BadInput if it is unreadable or has another size than
        stated."""

    @abstractmethod
    def detect(self, image: Any, record: ImageRecord) -> list[Detection]:
        """Detect objects in what `read` made of the record: in pixels of the file, labels from 0."""

    def predict(self, record: ImageRecord) -> list[Detection]:
        """Read one image and return its detections."""
        return self.detect(self.read(record), record)

    def predictions(
        self, records: Sequence[ImageRecord], *, workers: int
    ) -> Iterator[list[Detection]]:
        """Yield the detections of each record; `workers` read ahead while the network works."""
        indices = [[i] for i in range(len(records))]
        images = loading.batches(
            ToDetect(self, records), indices, workers=workers, collate=list
        )
        for record, image in zip(records, images, strict=True):
            if isinstance(image, Unreadable):
                raise BadInput(image.error)
            # `detect` returns lists, so a GPU has finished by then and the clock need not wait for
            # it.
            with self._clock.around(self.checkpoint.digest, 1, torch.device("cpu")):
                detections = self.detect(image[0], record)
            yield detections

    @property
    def images_per_second(self) -> float | None:
        """The speed of the whole detector, image by image, over the last images of this process."""
        return self._clock.rate(self.checkpoint.digest)


class ToDetect(Dataset[Any]):
    """Reads images for an engine's `detect`."""

    def __init__(self, engine: DetectionEngine, records: Sequence[ImageRecord]) -> None:
        self.engine = engine
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.engine.read(self.records[index])


@torch.no_grad()
def reestimate_batch_norm(
    engine: DetectionEngine, records: Sequence[ImageRecord], *, batches: int, after: int
) -> None:
    """Replace batch norm's running statistics by true averages at the final weights.

    They are over as many training batches as `batches` says, those of the iterations from `after`
    on. This is Detectron2's PreciseBN hook. fvcore's own function knows no batch norm but torch's,
    and takes one rank's samples for those of all.
    """
    engine.model.train()
    averages = []
    for layer in engine.model.modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            averages.append(AverageStatistics(layer))
    if not averages:
        return
    engine.start(records, after, after + batches)
    for iteration in range(after, after + batches):
        seeding.seed_everything(engine.seed, "precise batch norm", iteration)
        engine.losses()
    for average in averages:
        average.finish()


class AverageStatistics:
    """Computes the mean and variance of all that a batch norm layer sees in several batches of all
    ranks: fvcore/nn/precise_bn.py::_PopulationVarianceEstimator, from sums instead of averages."""

    def __init__(self, layer: _BatchNorm) -> None:
        assert layer.running_mean is not None
        self.layer = layer
        # For each channel: the number of samples, their sum, and the sum of their squares
        self.sums = layer.running_mean.new_zeros(
            3, layer.num_features, dtype=torch.float64
        )
        self.hook = layer.register_forward_pre_hook(self.add)

    def add(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach().float().transpose(0, 1).flatten(1)
        self.sums[0] += x.shape[1]
        self.sums[1] += x.sum(1, dtype=torch.float64)
        self.sums[2] += x.square().sum(1, dtype=torch.float64)

    def finish(self) -> None:
        self.hook.remove()
        count, total, square = distributed.sum_over_ranks(self.sums)
        if count[0] == 0:
            # Some trunks have layers that no map of a detector uses.
            return
        mean = total / count
        assert self.layer.running_mean is not None
        assert self.layer.running_var is not None
        self.layer.running_mean.copy_(mean)
        self.layer.running_var.copy_(square / count - mean.square())
