"""Runs the reference, Detectron2's model, mapper, loader, optimiser and trainer, with exact resume.

This file and engine_detectron2_backbones.py import detectron2, which is on no package index (`make
detectron2` installs it); voc_ap.py uses its VOC evaluator. Four things are ours: strict loading
(Detectron2 only logs what did not match), the order of images, one seed per iteration and per image,
and the loop that calls its trainer. With them a killed run continues as if it had not been killed.
Of Detectron2's evaluation only the conversion to COCO's format is used; AP comes from evaluate.py,
for both engines.
"""

import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from backbench.detection import detectron2_keys, dialect
from backbench.detection.data.dataset_dicts import Detection, ImageRecord
from backbench.detection.data.images import load_image
from backbench.detection.data.order import Slots
from backbench.detection.engine import DetectionEngine, MixedPrecision
from backbench.errors import BadInput
from backbench.parallel import distributed, loading
from backbench.runs import seeding
from backbench.runs.state import signals_blocked

try:
    with warnings.catch_warnings():
        # torch.jit.script and pkg_resources, which it uses, are deprecated.
        warnings.simplefilter("ignore")
        from detectron2.config import CfgNode, get_cfg
        from detectron2.data import DatasetMapper, build_detection_train_loader
        from detectron2.data.detection_utils import build_augmentation
        from detectron2.data.transforms import AugInput
        from detectron2.engine import SimpleTrainer
        from detectron2.evaluation.coco_evaluation import instances_to_coco_json
        from detectron2.layers import NaiveSyncBatchNorm, get_norm
        from detectron2.modeling import build_model
        from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
        from detectron2.structures import BoxMode
        from detectron2.utils.events import EventStorage

        # This import registers our backbones, too.
        from backbench.detection.engine_detectron2_backbones import trunk_of
except ImportError as error:
    raise BadInput(
        f"--engine detectron2: it is not usable here ({error}); "
        "`python -m backbench.detection.build_detectron2` installs it, --engine torchvision needs nothing"
    ) from None


# What Detectron2's models take of an image: image, instances, height, ...
ModelInput: TypeAlias = dict[str, object]


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """MoCo's C4 head (arXiv:1911.05722), with batch norm after res5 for trunks that are finetuned."""

    @classmethod
    def _build_res5_block(cls, cfg: CfgNode) -> tuple[nn.Sequential, int]:
        blocks, channels = super()._build_res5_block(cfg)
        blocks.add_module("norm", get_norm(cfg.MODEL.RESNETS.NORM, channels))
        return blocks, channels


def defaults() -> CfgNode:
    """Return Detectron2's default config with our keys added."""
    cfg = get_cfg()
    cfg.SOLVER.EPOCHS = dialect.DEFAULTS[dialect.EPOCHS]
    cfg.SOLVER.AMP.PRECISION = dialect.DEFAULTS[dialect.AMP_PRECISION]
    cfg.MODEL.TRUNK = CfgNode({"ARCH": ""})
    for key, value in dialect.OURS.items():
        *groups, last = key.split(".")
        node = cfg
        for group in groups:
            node = node[group]
        node[last] = value
    return cfg


class FlatSlots(torch.utils.data.Sampler[tuple[int, int, int]]):
    """Yields one rank's keys of SeededImages one by one; Detectron2's loader makes the batches."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        for batch in self.slots:
            yield from batch


def standard_dict(record: ImageRecord) -> dict[str, object]:
    """Return the record as the mapper wants it, with BoxMode's enumeration for its number."""
    objects = []
    for annotation in record["annotations"]:
        objects.append({**annotation, "bbox_mode": BoxMode(annotation["bbox_mode"])})
    return {**record, "annotations": objects}


class PixelMapper(DatasetMapper):
    """Detectron2's mapper with the suite's reading of an image in place of its own.

    Its own clips gray of 16 bits to white, and turns a TIFF that Pillow has turned already. Of an
    image of 8 bits both read the same pixels, turned as EXIF says."""

    def __call__(self, record: ImageRecord) -> ModelInput:
        """Make the model's input of a record. Raises BadInput if its image cannot be read."""
        # This is DatasetMapper.__call__, without segmentation maps and precomputed proposals,
        # which a record does not have.
        made = copy.deepcopy(standard_dict(record))
        pixels = np.asarray(load_image(record))
        if self.image_format == "BGR":
            pixels = pixels[:, :, ::-1]
        augmented = AugInput(pixels)
        transforms = self.augmentations(augmented)
        image = augmented.image
        made["image"] = torch.as_tensor(np.ascontiguousarray(image.transpose(2, 0, 1)))
        if self.is_train:
            self._transform_annotations(made, transforms, image.shape[:2])
        else:
            made.pop("annotations")
        return made


class SeededImages(torch.utils.data.Dataset[ModelInput]):
    """Makes the model's input for a key of order.Slots, (iteration, slot, record).

    The mapper's augmentations draw from the global generators, which are seeded for each image.
    """

    def __init__(
        self,
        records: Sequence[ImageRecord],
        mapper: PixelMapper,
        *,
        batch: int,
        seed: int,
    ) -> None:
        self.records = records
        self.mapper = mapper
        self.batch = batch
        self.seed = seed

    def __getitem__(self, key: tuple[int, int, int]) -> ModelInput:
        iteration, slot, index = key
        seed = seeding.seed_of(self.seed, "augment", iteration * self.batch + slot)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self.mapper(self.records[index])


def training_mapper(cfg: CfgNode, flip_map: Sequence[int]) -> PixelMapper:
    """Build the mapper as DatasetMapper.from_config does, except that the partners of mirrored
    keypoints are given instead of looked up in Detectron2's registry of datasets."""
    return PixelMapper(
        is_train=True,
        augmentations=build_augmentation(cfg, is_train=True),
        image_format=cfg.INPUT.FORMAT,
        use_instance_mask=cfg.MODEL.MASK_ON,
        instance_mask_format=cfg.INPUT.MASK_FORMAT,
        use_keypoint=cfg.MODEL.KEYPOINT_ON,
        keypoint_hflip_indices=np.array(flip_map) if flip_map else None,
    )


class LossKeepingTrainer(SimpleTrainer):
    """Detectron2's trainer, which keeps the losses for our metrics instead of writing its own."""

    losses: dict[str, Tensor]
    amp: MixedPrecision

    def run_step(self) -> None:
        if self.amp.dtype is None:
            super().run_step()
            return
        # This is the step of AMPTrainer, which insists on CUDA, and on a scaler even for bfloat16.
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
    """Computes the statistics of a bfloat16 batch over several processes in float32.

    Detectron2 itself does so only for float16, torch's SyncBatchNorm for both. In bfloat16, with its
    8 bits, nothing would be left of the difference E[x^2] - E[x]^2.
    """

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
            raise BadInput(
                f"{given.path}: MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE}: "
                "only GeneralizedRCNN"
            )
        return cfg

    def build(self) -> nn.Module:
        # What only Detectron2 needs is changed in a copy, because the caller's config is the run's.
        self.cfg = self.cfg.clone()
        self.cfg.MODEL.DEVICE = str(self.device)
        self.cfg.MODEL.WEIGHTS = ""
        self.cfg.MODEL.TRUNK.ARCH = self.checkpoint.arch
        # torch's SyncBatchNorm has no CPU path. Detectron2's own has one, and is equal.
        if self.device.type == "cpu":
            for node in (self.cfg.MODEL.RESNETS, self.cfg.MODEL.FPN):
                if node.NORM == "SyncBN":
                    node.NORM = "naiveSyncBN"
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
        """Load every tensor of the trunk into the model. Raises BadInput if one has no place."""
        # The model's own heads and FPN stay in the state, so load_state_dict can be strict.
        state = model.state_dict()
        for key, tensor in self.trunk.named(self.checkpoint.state_dict).items():
            if key not in state and key.endswith("num_batches_tracked"):
                continue  # frozen batch norm does not count batches
            if key not in state or state[key].shape != tensor.shape:
                raise BadInput(
                    f"detectron2: the model has no place for {key} {tuple(tensor.shape)} "
                    f"of {self.checkpoint.name}"
                )
            state[key] = tensor
        model.load_state_dict(state)

    def start(self, records: Sequence[ImageRecord], first: int, last: int) -> None:
        """Open Detectron2's loader and mapper over our order of images."""
        batch = self.cfg.SOLVER.IMS_PER_BATCH
        mapper = training_mapper(self.cfg, self.flip_map)
        cores = loading.cores(distributed.world_size())
        workers = min(self.cfg.DATALOADER.NUM_WORKERS, cores)
        loading.refuse_to_start_by_half(workers)
        images = SeededImages(records, mapper, batch=batch, seed=self.seed)
        loader = build_detection_train_loader(
            loading.Reporting(images),
            mapper=None,  # SeededImages applies it
            sampler=FlatSlots(self.slots(records, first, last)),
            total_batch_size=batch,
            aspect_ratio_grouping=False,  # our order is grouped already
            num_workers=workers,
            collate_fn=loading.HandingOver(list, workers),
            multiprocessing_context=loading.forked(workers),
        )
        self.spread()
        self.trainer = LossKeepingTrainer(self.parallel, loader, self.optimizer)
        self.trainer.amp = self.amp
        # Reading the trainer's iterator for the first time starts the loader's workers. We then put
        # a watched one in its place.
        with signals_blocked():
            batches = loading.WatchedBatches(self.trainer._data_loader_iter)
        self.batches: Iterator[list[ModelInput]] = batches
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
        """Read an image at the size of testing."""
        mapper = PixelMapper(
            is_train=False,
            augmentations=build_augmentation(self.cfg, is_train=False),
            image_format=self.cfg.INPUT.FORMAT,
        )
        return mapper(record)

    @torch.no_grad()
    def detect(self, image: ModelInput, record: ImageRecord) -> list[Detection]:
        self.model.eval()
        instances = self.model([image])[0]["instances"].to("cpu")
        # Boxes become x, y, width, height; keypoints go half a pixel back.
        return instances_to_coco_json(instances, record["image_id"])
