"""Runs the reference, Detectron2's model, mapper, loader, optimiser and trainer, with exact resume.

This file and engine_detectron2_backbones.py import detectron2, which is on no package index (`make
detectron2` installs it); voc_ap.py uses its VOC evaluator. What is ours: strict loading (Detectron2
only logs what did not match), the order of images, one seed per iteration and per image, and the
loop that calls its trainer, so that a killed run continues as if it had not been. Its evaluator
only turns predictions into COCO's format; AP comes from evaluate.py, for both engines.
"""

import io
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from backbench.containers.spans import PREFIX, plain_name, read_spelled
from backbench.detection import detectron2_keys, dialect
from backbench.detection.data.dataset_dicts import Detection, ImageRecord
from backbench.detection.data.order import Slots
from backbench.detection.engine import DetectionEngine, MixedPrecision
from backbench.errors import BadInput
from backbench.parallel import distributed, loading
from backbench.runs import seeding
from backbench.runs.state import signals_blocked

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script and pkg_resources
        from detectron2.config import CfgNode, get_cfg
        from detectron2.data import DatasetMapper, build_detection_train_loader
        from detectron2.data.detection_utils import (
            SizeMismatchError,
            build_augmentation,
        )
        from detectron2.engine import SimpleTrainer
        from detectron2.evaluation.coco_evaluation import instances_to_coco_json
        from detectron2.layers import NaiveSyncBatchNorm, get_norm
        from detectron2.modeling import build_model
        from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
        from detectron2.structures import BoxMode
        from detectron2.utils.events import EventStorage
        from detectron2.utils.file_io import PathHandler, PathManager

        from backbench.detection.engine_detectron2_backbones import (
            trunk_of,
        )  # which registers ours
except ImportError as error:
    raise BadInput(
        f"--engine detectron2: it is not usable here ({error}); `make detectron2` installs it, "
        "--engine torchvision needs nothing"
    ) from None


class SpanHandler(PathHandler):
    """Detectron2's mapper opens images through PathManager: those in containers, too."""

    def _get_supported_prefixes(self) -> list[str]:
        return [PREFIX]

    def _open(
        self, path: str, mode: str = "r", buffering: int = -1, **_: object
    ) -> io.BytesIO:
        return io.BytesIO(read_spelled(path) or b"")


PathManager.register_handler(SpanHandler(), allow_override=True)

ModelInput: TypeAlias = dict[
    str, object
]  # image, instances, ...: what Detectron2's models take


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """The C4 head of MoCo (arXiv:1911.05722): batch norm after res5, for finetuned trunks."""

    @classmethod
    def _build_res5_block(cls, cfg: CfgNode) -> tuple[nn.Sequential, int]:
        blocks, channels = super()._build_res5_block(cfg)
        blocks.add_module("norm", get_norm(cfg.MODEL.RESNETS.NORM, channels))
        return blocks, channels


def defaults() -> CfgNode:
    """Detectron2's, and the keys that are ours."""
    cfg = get_cfg()
    cfg.SOLVER.AMP.PRECISION = dialect.DEFAULTS[dialect.AMP_PRECISION]
    cfg.MODEL.TRUNK = CfgNode({"ARCH": ""})
    for key, value in dialect.OURS.items():
        group, last = key.rsplit(".", 1)
        node = cfg
        for part in group.split("."):
            node = node[part]
        node[last] = value
    return cfg


class FlatSlots(torch.utils.data.Sampler[tuple[int, int, int]]):
    """One rank's keys of SeededImages: Detectron2's loader makes batches of single images."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        for batch in self.slots:
            yield from batch


class SeededImages(torch.utils.data.Dataset[ModelInput]):
    """(iteration, slot, record), a key of order.Slots -> the image as the model takes it. The
    mapper's augmentations draw from the global generators, which are seeded for this image."""

    def __init__(
        self,
        records: Sequence[ImageRecord],
        mapper: DatasetMapper,
        *,
        batch: int,
        seed: int,
    ) -> None:
        self.records, self.mapper, self.batch, self.seed = records, mapper, batch, seed

    def __getitem__(self, key: tuple[int, int, int]) -> ModelInput:
        iteration, slot, index = key
        seed = seeding.seed_of(self.seed, "augment", iteration * self.batch + slot)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return mapped(self.mapper, self.records[index])


def mapped(mapper: DatasetMapper, record: ImageRecord) -> ModelInput:
    """Apply the mapper to a record. Raises BadInput if its image cannot be read."""
    try:
        return mapper(standard_dict(record))
    except (OSError, SyntaxError, SizeMismatchError) as error:
        cause = " ".join(str(error).split())[:160]
        raise BadInput(f"{plain_name(record['file_name'])}: {cause}") from None


def standard_dict(record: ImageRecord) -> dict[str, object]:
    """The record as the mapper wants it: with the enumeration BoxMode itself, not its number."""
    objects = [
        {**a, "bbox_mode": BoxMode(a["bbox_mode"])} for a in record["annotations"]
    ]
    return {**record, "annotations": objects}


def training_mapper(cfg: CfgNode, flip_map: Sequence[int]) -> DatasetMapper:
    """DatasetMapper.from_config, but for the keypoints' flip, which it looks up in a registry."""
    return DatasetMapper(
        is_train=True,
        augmentations=build_augmentation(cfg, is_train=True),
        image_format=cfg.INPUT.FORMAT,
        use_instance_mask=cfg.MODEL.MASK_ON,
        instance_mask_format=cfg.INPUT.MASK_FORMAT,
        use_keypoint=cfg.MODEL.KEYPOINT_ON,
        keypoint_hflip_indices=np.array(flip_map) if flip_map else None,
    )


class LossKeepingTrainer(SimpleTrainer):
    """Detectron2's trainer; losses are kept for our metrics, not gathered into its storage."""

    losses: dict[str, Tensor]
    amp: MixedPrecision

    def run_step(self) -> None:
        if self.amp.dtype is None:
            super().run_step()
            return
        # AMPTrainer's own step, which insists on CUDA and on a scaler for bfloat16, too
        data = next(self._data_loader_iter)
        with self.amp.autocast():
            losses = self.model(data)
        self.amp.descend(sum(losses.values()), self.optimizer)
        self._write_metrics(losses, 0.0)

    def _write_metrics(
        self,
        loss_dict: dict[str, Tensor],
        data_time: float,
        prefix: str = "",
        iter: int | None = None,
    ) -> None:
        self.losses = {k: v.detach() for k, v in loss_dict.items()}


class WideSyncBatchNorm(NaiveSyncBatchNorm):
    """Sums a bfloat16 batch's statistics over several processes in float32, as Detectron2 by itself
    does for float16 and torch's SyncBatchNorm for both: of E[x^2] - E[x]^2, 8 bits leave nothing."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype is not torch.bfloat16 or distributed.world_size() == 1:
            return super().forward(input)
        return super().forward(input.float()).bfloat16()


class Detectron2Engine(DetectionEngine):
    name = "detectron2"

    @staticmethod
    def read_config(given: dialect.Given) -> CfgNode:
        cfg = defaults()
        detectron2_keys.check(given, dialect.flat(cfg))
        dialect.merge(cfg, given)
        if cfg.MODEL.META_ARCHITECTURE != "GeneralizedRCNN":
            kind = cfg.MODEL.META_ARCHITECTURE
            raise BadInput(
                f"{given.path}: MODEL.META_ARCHITECTURE {kind}: only GeneralizedRCNN"
            )
        return cfg

    def build(self) -> nn.Module:
        # Changes that only Detectron2 needs are made in a copy: the caller's config is the run's
        self.cfg = self.cfg.clone()
        self.cfg.MODEL.DEVICE = str(self.device)
        self.cfg.MODEL.WEIGHTS = ""
        self.cfg.MODEL.TRUNK.ARCH = self.checkpoint.arch
        # torch's SyncBatchNorm has no CPU path; Detectron2's own has, and is equal.
        if self.device.type == "cpu":
            for node in (self.cfg.MODEL.RESNETS, self.cfg.MODEL.FPN):
                node.NORM = "naiveSyncBN" if node.NORM == "SyncBN" else node.NORM
        model = build_model(self.cfg)
        for module in model.modules():
            if type(module) is NaiveSyncBatchNorm:
                module.__class__ = WideSyncBatchNorm
        self.trunk = trunk_of(model)
        self._load(model)
        return model

    def build_optimizer(self) -> torch.optim.Optimizer:
        return self.trunk.optimizer(self.cfg)

    def _load(self, model: nn.Module) -> None:
        """Put every tensor of the trunk in its place, or raise BadInput; nothing is guessed."""
        # The model's own heads and FPN stay; load_state_dict below is strict about all of it.
        state = model.state_dict()
        for key, tensor in self.trunk.named(self.checkpoint.state_dict).items():
            if key not in state and key.endswith("num_batches_tracked"):
                continue  # frozen batch norm does not count
            if key not in state or state[key].shape != tensor.shape:
                left = f"{key} {tuple(tensor.shape)} of {self.checkpoint.name}"
                raise BadInput(f"detectron2: the model has no place for {left}")
            state[key] = tensor
        model.load_state_dict(state)

    def start(self, records: Sequence[ImageRecord], first: int, last: int) -> None:
        """Detectron2's loader and mapper over our order."""
        cfg, batch = self.cfg, self.cfg.SOLVER.IMS_PER_BATCH
        mapper = training_mapper(cfg, self.flip_map)
        loader = build_detection_train_loader(
            SeededImages(records, mapper, batch=batch, seed=self.seed),
            mapper=None,  # SeededImages has it
            sampler=FlatSlots(self.slots(records, first, last)),
            total_batch_size=batch,
            aspect_ratio_grouping=False,  # the order is grouped already, and knows its position
            num_workers=min(
                cfg.DATALOADER.NUM_WORKERS, loading.cores(distributed.world_size())
            ),
        )
        self.spread()
        self.trainer = LossKeepingTrainer(self.parallel, loader, self.optimizer)
        self.trainer.amp = self.amp
        with signals_blocked():  # its workers start here
            self.batches: Iterator[list[ModelInput]] = loading.WatchedBatches(
                self.trainer._data_loader_iter
            )
        self.trainer._data_loader_iter_obj = self.batches
        self.iteration = first

    def losses(self) -> dict[str, Tensor]:
        with EventStorage(self.iteration):
            return self.parallel(next(self.batches))

    def step(self) -> dict[str, Tensor]:
        self.parallel.train()
        with EventStorage(self.iteration):
            self.trainer.run_step()
        self.iteration += 1
        return self.trainer.losses

    @torch.no_grad()
    def stages(self, x: Tensor) -> list[Tensor]:
        self.model.eval()
        return self.trunk.stages(x.to(self.device))

    def read(self, record: ImageRecord) -> ModelInput:
        """The record through Detectron2's mapper, at the size of testing."""
        mapper = DatasetMapper(
            is_train=False,
            augmentations=build_augmentation(self.cfg, is_train=False),
            image_format=self.cfg.INPUT.FORMAT,
        )
        return mapped(mapper, record)

    @torch.no_grad()
    def detect(self, image: ModelInput, record: ImageRecord) -> list[Detection]:
        self.model.eval()
        instances = self.model([image])[0]["instances"].to("cpu")
        # Boxes become x, y, w, h; keypoints go half a pixel back.
        return instances_to_coco_json(instances, record["image_id"])
