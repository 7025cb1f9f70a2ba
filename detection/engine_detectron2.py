"""The reference: Detectron2's model, mapper, data loader, optimiser and trainer, with an exact resume around them.

Only this file imports detectron2, which is on no package index (`make detectron2` installs it). What is ours here:
strict loading (Detectron2 only logs what did not match), the order of images, one seed per iteration and per image, and
the loop that calls its trainer, so that a killed run continues as if it had not been. Its evaluator's own function
turns predictions into COCO's format; AP comes from evaluate.py, for both engines.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.runs import distributed, seeding
from backbench.weights import exporting
from backbench.weights.checkpoint import Checkpoint
from detection import config, evaluate
from detection.data import coco

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script and pkg_resources
        from detectron2.config import get_cfg
        from detectron2.data import DatasetMapper, build_detection_train_loader
        from detectron2.data.detection_utils import build_augmentation
        from detectron2.engine import SimpleTrainer, create_ddp_model
        from detectron2.evaluation.coco_evaluation import instances_to_coco_json
        from detectron2.evaluation.pascal_voc_evaluation import voc_eval
        from detectron2.layers import get_norm
        from detectron2.modeling import build_model
        from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
        from detectron2.solver import build_optimizer
        from detectron2.structures import BoxMode
        from detectron2.utils.events import EventStorage
except ImportError as error:
    raise BadInput(
        f"--engine detectron2: it is not usable here ({error}); `make detectron2` installs it, "
        "--engine torchvision needs nothing"
    ) from None


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """The C4 head of MoCo (arXiv:1911.05722): batch norm after res5, for trunks that are finetuned with norm."""

    @classmethod
    def _build_res5_block(cls, cfg: Any) -> tuple[nn.Sequential, int]:
        blocks, channels = super()._build_res5_block(cfg)
        blocks.add_module("norm", get_norm(cfg.MODEL.RESNETS.NORM, channels))
        return blocks, channels


def read_config(given: config.Given) -> Any:
    """Detectron2's defaults with the given values over them; an unknown key is refused by name."""
    cfg = get_cfg()
    config.merge(cfg, given)
    if cfg.MODEL.META_ARCHITECTURE != "GeneralizedRCNN":
        raise BadInput(
            f"{given.path}: MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE}: only GeneralizedRCNN"
        )
    return cfg


class Stream(torch.utils.data.Dataset[dict[str, Any]]):
    """position * len + record -> the record with a seed for its augmentation, a function of its position in the run."""

    def __init__(self, records: Sequence[Mapping[str, Any]], seed: int) -> None:
        self.records, self.seed = records, seed

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: int) -> dict[str, Any]:
        position, index = divmod(key, len(self))
        record = self.records[index]
        objects = [{**a, "bbox_mode": BoxMode(a["bbox_mode"])} for a in record["annotations"]]
        return {
            **record,
            "annotations": objects,
            "seed": seeding.seed_of(self.seed, "augment", position),
        }


class Seeded:
    """Detectron2's mapper, whose augmentations draw from the global generators, after seeding them for this image."""

    def __init__(self, mapper: DatasetMapper) -> None:
        self.mapper = mapper

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        seed = record["seed"]
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self.mapper(record)


class Flat(torch.utils.data.Sampler[int]):
    """One rank's images in order, batch after batch, as Stream's keys: Detectron2's loader takes whole numbers."""

    def __init__(self, slots: coco.Slots, records: int) -> None:
        self.slots, self.records = slots, records

    def __iter__(self) -> Any:
        for batch in self.slots:
            for iteration, slot, index in batch:
                yield (iteration * self.slots.order.batch + slot) * self.records + index

    def __len__(self) -> int:
        return len(self.slots) * (self.slots.order.batch // self.slots.world)


class Trainer(SimpleTrainer):
    """Detectron2's trainer; the losses are kept for our metrics instead of gathered into its storage."""

    losses: dict[str, Tensor]

    def _write_metrics(
        self, loss_dict: dict[str, Tensor], data_time: float, prefix: str = "", iter: Any = None
    ) -> None:
        self.losses = {k: v.detach() for k, v in loss_dict.items()}


def voc_scores(split: coco.Split, predictions: Sequence[Mapping[str, Any]]) -> evaluate.Scores:
    """VOC's AP by Detectron2's evaluator: 11-point for 2007; AP is the mean over thresholds 0.5 to 0.95."""
    lines: dict[int, list[str]] = {}
    for p in predictions:
        x, y, w, h = p["bbox"]
        text = f"{p['image_id']} {p['score']:.3f} {x + 1:.1f} {y + 1:.1f} {x + w:.1f} {y + h:.1f}"
        lines.setdefault(p["category_id"], []).append(text)
    annotations = str(split.folder.parent / "Annotations" / "{}.xml")
    aps = np.zeros((10, len(split.categories)))
    with tempfile.TemporaryDirectory() as folder:
        for label, name in enumerate(split.categories):
            if label not in lines:
                continue  # nothing found: AP 0
            Path(folder, f"{name}.txt").write_text("\n".join(lines[label]))
            for t in range(10):
                found, images = f"{folder}/{{}}.txt", str(split.file)
                elevens = "2007" in split.name
                with np.errstate(invalid="ignore"):
                    aps[t, label] = (
                        100 * voc_eval(found, annotations, images, name, 0.5 + 0.05 * t, elevens)[2]
                    )
    values = {"AP": float(aps.mean()), "AP50": float(aps[0].mean()), "AP75": float(aps[5].mean())}
    per_category = {
        name: float(aps[:, label].mean()) for label, name in enumerate(split.categories)
    }
    if not predictions:
        return evaluate.Scores("bbox", dict.fromkeys(values), {}, dict.fromkeys(per_category), {})
    return evaluate.Scores("bbox", values, {}, per_category, {})


class Engine:
    """What train_net's loop asks of an engine."""

    name = "detectron2"

    def __init__(
        self,
        cfg: Any,
        checkpoint: Checkpoint,
        *,
        flip_map: Sequence[int],
        task: str,
        seed: int,
        device: torch.device,
    ) -> None:
        cfg = cfg.clone()
        cfg.MODEL.DEVICE = str(device)
        cfg.MODEL.WEIGHTS = ""
        if (
            device.type == "cpu"
        ):  # torch's SyncBatchNorm has no CPU path; Detectron2's own has, and is equal
            for node in (cfg.MODEL.RESNETS, cfg.MODEL.FPN):
                node.NORM = "naiveSyncBN" if node.NORM == "SyncBN" else node.NORM
        self.cfg, self.task, self.seed, self.device, self.flip_map = (
            cfg,
            task,
            seed,
            device,
            flip_map,
        )
        seeding.seed_everything(seed, "detector")
        self.model = build_model(cfg)
        self.c4 = not hasattr(self.model.backbone, "bottom_up")
        self._load(checkpoint)
        self.optimizer = build_optimizer(cfg, self.model)
        self.parallel: nn.Module = self.model

    def _load(self, checkpoint: Checkpoint) -> None:
        """Every tensor of the trunk to its place, or BadInput: nothing is matched by likeness."""
        own = self.model.state_dict()
        trunk = "backbone." if self.c4 else "backbone.bottom_up."
        for name, tensor in exporting.to_detectron2(checkpoint.state_dict).items():
            key = f"roi_heads.{name}" if self.c4 and name.startswith("res5") else trunk + name
            if key not in own and name.endswith("num_batches_tracked"):
                continue  # frozen batch norm does not count
            if key not in own or own[key].shape != tensor.shape:
                raise BadInput(
                    f"detectron2: no place for {name} {tuple(tensor.shape)} in the model ({key})"
                )
            own[key] = tensor
        self.model.load_state_dict(own)

    def start(self, records: Sequence[Mapping[str, Any]], first: int, last: int) -> None:
        """Open the stream of batches at iteration `first`: Detectron2's loader and mapper over our order."""
        cfg = self.cfg
        mapper = DatasetMapper(
            is_train=True,
            augmentations=build_augmentation(cfg, is_train=True),
            image_format=cfg.INPUT.FORMAT,
            use_instance_mask=cfg.MODEL.MASK_ON,
            instance_mask_format=cfg.INPUT.MASK_FORMAT,
            use_keypoint=cfg.MODEL.KEYPOINT_ON,
            keypoint_hflip_indices=np.array(self.flip_map) if self.flip_map else None,
        )
        batch, grouped = cfg.SOLVER.IMS_PER_BATCH, cfg.DATALOADER.ASPECT_RATIO_GROUPING
        order = coco.Order(records, batch, self.seed, grouped=grouped)
        slots = coco.Slots(
            order, first=first, last=last, rank=distributed.rank(), world=distributed.world_size()
        )
        loader = build_detection_train_loader(
            Stream(records, self.seed),
            mapper=Seeded(mapper),
            sampler=Flat(slots, len(records)),
            total_batch_size=batch,
            aspect_ratio_grouping=False,  # the order is grouped already, and knows its position
            num_workers=cfg.DATALOADER.NUM_WORKERS,
        )
        if self.parallel is self.model:
            self.parallel = create_ddp_model(self.model, broadcast_buffers=False)
        self.trainer = Trainer(self.parallel, loader, self.optimizer)
        self.batches = self.trainer._data_loader_iter
        self.iteration = first

    def losses(self) -> dict[str, Tensor]:
        """The next batch's losses, in training mode."""
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
        """C2..C5 of a normalised batch, in evaluation mode; C5 of a C4 model is its head's res5."""
        self.model.eval()
        bottom = self.model.backbone if self.c4 else self.model.backbone.bottom_up
        x = bottom.stem(x.to(self.device))
        maps = []
        for name in bottom.stage_names:
            x = getattr(bottom, name)(x)
            maps.append(x)
        if self.c4:
            for name, block in self.model.roi_heads.res5.named_children():
                x = x if name == "norm" else block(x)
            maps.append(x)
        return maps

    @torch.no_grad()
    def predict(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One image's detections in COCO's format, labels contiguous from 0."""
        self.model.eval()
        mapper = DatasetMapper(
            is_train=False,
            augmentations=build_augmentation(self.cfg, is_train=False),
            image_format=self.cfg.INPUT.FORMAT,
        )
        found = self.model([mapper(dict(record))])[0]["instances"].to("cpu")
        return instances_to_coco_json(found, record["image_id"])
