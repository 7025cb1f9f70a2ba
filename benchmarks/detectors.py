"""Seconds of a training iteration and of an evaluated image: both engines of the suite beside plain
Detectron2 and plain torchvision, in one process on the CPU; and masks pasted on images.

    python benchmarks/detectors.py

Mask R-CNN with a ResNet-18, an FPN and heads of the papers' widths, the demo's few proposals, the
same two scenes of 128 pixels, float32; plain Detectron2 from the suite's weights. Plain torchvision
trains batch norm as the others do. Rounds alternate A B C D. Seconds are of the processor, the
least of all rounds, so that what else the machine does counts little; the figures that count are
the ratios. The last output is kept beside this script in detectors.txt.
"""

from __future__ import annotations

import resource
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import Work, describe, least
from torch import Tensor

from backbench.datasets import embedded
from backbench.runs import seeding
from detection import dialect, train_net
from detection.data.images import load_image, targets, to_uint8
from detection.data.masks import paste
from detection.data.split import training_records
from detection.engine import DetectionEngine
from detection.run import Prepared

NAME = "demo_mask_rcnn_R_18_FPN"
WORDS = (
    *("MODEL.WEIGHTS", "random", "SOLVER.IMS_PER_BATCH", "2"),
    *("MODEL.FPN.OUT_CHANNELS", "256", "MODEL.ROI_BOX_HEAD.FC_DIM", "1024"),
    *("MODEL.ROI_MASK_HEAD.NUM_CONV", "4", "MODEL.ROI_MASK_HEAD.CONV_DIM", "256"),
    *("DATASETS.TRAIN", "('scenes_train_2',)"),
)
RATE = 1e-4  # of learning: weights that hardly move, so that all rounds do the same
VAL_IMAGES = 5000  # of COCO
ROUNDS = 5
STEPS = 1000  # how many batches an engine's stream is opened for
# Surely inside in the middle of a box, surely outside at its corners
BLOB = (
    0.35 - torch.linspace(-1, 1, 28).square()[:, None] / 2 - torch.linspace(-1, 1, 28).square() / 2
)
Timed = Mapping[str, Work]
Pair = tuple[Work, Work]  # an iteration, and an image


def built(
    root: Path, engine: str, *, name: str = NAME, words: Sequence[str] = WORDS, device: str = "cpu"
) -> tuple[Prepared, DetectionEngine]:
    given = dialect.read(name, tuple(words))
    run = train_net.new_run(given, engine=engine, root=root, out=root / "run")
    p = train_net.prepare(run)
    network = train_net.build_engine(run, p, torch.device(device))
    for group in network.optimizer.param_groups:
        group["lr"] = RATE
    network.start(training_records(p.train, p.task), 0, STEPS)
    return p, network


def plain_torchvision(p: Prepared) -> Pair:
    """torchvision's own MaskRCNN of the same sizes, an iteration and an image."""
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops import MultiScaleRoIAlign

    m = p.cfg.MODEL
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=torch.nn.BatchNorm2d
    )
    sizes = tuple(tuple(level) for level in m.ANCHOR_GENERATOR.SIZES)
    model = MaskRCNN(
        backbone,
        num_classes=m.ROI_HEADS.NUM_CLASSES + 1,
        min_size=128,
        max_size=256,
        rpn_anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes)),
        rpn_pre_nms_top_n_train=m.RPN.PRE_NMS_TOPK_TRAIN,
        rpn_pre_nms_top_n_test=m.RPN.PRE_NMS_TOPK_TEST,
        rpn_post_nms_top_n_train=m.RPN.POST_NMS_TOPK_TRAIN,
        rpn_post_nms_top_n_test=m.RPN.POST_NMS_TOPK_TEST,
        box_batch_size_per_image=m.ROI_HEADS.BATCH_SIZE_PER_IMAGE,
        box_detections_per_img=p.cfg.TEST.DETECTIONS_PER_IMAGE,
        box_score_thresh=0.0,
        box_roi_pool=MultiScaleRoIAlign(["0", "1", "2", "3"], 7, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    records = training_records(p.train, p.task)

    def iteration() -> None:
        model.train()
        images, objects = [], []
        for record in records:
            images.append(to_uint8(load_image(record)) / 255)
            target = targets(record, 128, 128, mirrored=False, flip_map=[], task=p.task)
            masks = [polygons_to_bitmap(polygons) for polygons in target["polygons"]]
            objects.append({**target, "masks": torch.stack(masks)})
        optimizer.zero_grad()
        sum(model(images, objects).values()).backward()
        optimizer.step()

    def image() -> None:
        model.eval()
        with torch.no_grad():
            model([to_uint8(load_image(records[0])) / 255])

    return iteration, image


def polygons_to_bitmap(polygons: list[np.ndarray]) -> torch.Tensor:
    from pycocotools import mask

    parts = mask.frPyObjects([list(p) for p in polygons], 128, 128)
    return torch.from_numpy(mask.decode(mask.merge(parts)))


def plain_detectron2(p: Prepared, network: DetectionEngine) -> Pair:
    """Detectron2's model, mapper and trainer without anything of the suite."""
    from detectron2.data import DatasetMapper
    from detectron2.data.detection_utils import build_augmentation
    from detectron2.engine import SimpleTrainer
    from detectron2.modeling import build_model
    from detectron2.solver import build_optimizer
    from detectron2.structures import BoxMode
    from detectron2.utils.events import EventStorage

    cfg = network.cfg.clone()
    cfg.SOLVER.BASE_LR = RATE
    model = build_model(cfg)
    model.load_state_dict(network.model.state_dict())
    mapper = DatasetMapper(
        is_train=True,
        augmentations=build_augmentation(cfg, is_train=True),
        image_format="RGB",
        use_instance_mask=True,
    )
    testing = DatasetMapper(
        is_train=False, augmentations=build_augmentation(cfg, is_train=False), image_format="RGB"
    )
    rows = []
    for record in training_records(p.train, p.task):
        objects = [{**a, "bbox_mode": BoxMode(a["bbox_mode"])} for a in record["annotations"]]
        rows.append({**record, "annotations": objects})

    def batches():
        while True:
            yield [mapper(dict(row)) for row in rows]

    trainer = SimpleTrainer(model, batches(), build_optimizer(cfg, model))

    def iteration() -> None:
        model.train()
        with EventStorage(0):
            trainer.run_step()

    def image() -> None:
        model.eval()
        with torch.no_grad():
            model([testing(dict(rows[0]))])

    return iteration, image


def ours(p: Prepared, network: DetectionEngine) -> Pair:
    record = training_records(p.train, p.task)[0]

    def iteration() -> None:
        network.model.train()
        seeding.seed_everything(0, "iteration", 0, 0)  # as the loop does before each
        network.step()

    return iteration, lambda: network.predict(record)


def pasting(images: int = 200) -> None:
    """100 masks on each of `images` images of 640 x 480, in processor seconds and MiB."""
    from detectron2.layers.mask_ops import paste_masks_in_image
    from detectron2.structures import Boxes
    from pycocotools import mask

    def theirs(masks: Tensor, boxes: Tensor) -> list[Any]:
        bitmaps = paste_masks_in_image(masks, Boxes(boxes), (480, 640))
        # as instances_to_coco_json has it
        rles = [mask.encode(np.asfortranarray(b[:, :, None], "uint8"))[0] for b in bitmaps.numpy()]
        return [{**rle, "counts": rle["counts"].decode()} for rle in rles]

    def mine(masks: Tensor, boxes: Tensor) -> list[Any]:
        return list(paste(masks, boxes, 480, 640))

    print(f"100 masks onto each of {images} images of 640 x 480, sides of 16 to 400")
    ways = {"backbench": mine, "plain Detectron2": theirs}
    seconds, more, stored = (dict.fromkeys(ways, 0.0) for _ in range(3))
    other = 0  # codes
    for seed in range(images):
        drawn = drawn_masks(seed)
        codes = {}
        for name, action in ways.items():
            peak, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
            found = action(*drawn)
            seconds[name] += time.process_time() - begin
            more[name] += (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
            stored[name] += sum(len(rle["counts"]) for rle in found) / 2**20
            codes[name] = [rle["counts"] for rle in found]
        other += sum(a != b for a, b in zip(*codes.values(), strict=True))
    for name in ways:
        each = seconds[name] / images
        print(
            f"  {name:24} {each:.4f} s an image, peak {more[name]:+.0f} MiB, kept "
            f"{stored[name]:.1f} MiB; {VAL_IMAGES} images would take "
            f"{each * VAL_IMAGES / 60:.0f} min, {stored[name] / images * VAL_IMAGES:.0f} MiB"
        )
    ratio = seconds["plain Detectron2"] / seconds["backbench"]
    print(f"  {ratio:.2f} times as fast; {other} of {100 * images} codes differ")


def drawn_masks(seed: int) -> tuple[Tensor, Tensor]:
    """Round blobs of 28 x 28 probabilities and their boxes (100, 4)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(100, 1, 28, 28, generator=generator)
    masks = torch.nn.functional.avg_pool2d(noise, 7, 1, 3)[:, 0] + BLOB
    sides = 16 * 25 ** torch.rand(100, 2, generator=generator)
    corners = torch.rand(100, 2, generator=generator) * (torch.tensor([640.0, 480.0]) - sides)
    return masks.clamp(0, 1), torch.cat([corners, corners + sides], 1)


def table(title: str, timed: Timed) -> None:
    """The least of alternating rounds, and each as a ratio to the plain ones."""
    seconds = least(timed, ROUNDS)
    print(title)
    for name, value in seconds.items():
        print(f"  {name:24} {value:.4f} s", end="")
        for base, other in seconds.items():
            if base.startswith("plain") and base != name:
                print(f"   {value / other:.2f} of {base}", end="")
        print()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        root = embedded.build(Path(folder), size="tiny")
        both = {name: built(root, name) for name in ("torchvision", "detectron2")}
        pairs = {f"backbench, {name}": ours(*both[name]) for name in both}
        pairs["plain torchvision"] = plain_torchvision(both["torchvision"][0])
        pairs["plain Detectron2"] = plain_detectron2(*both["detectron2"])
        table("an iteration of two images", {k: v[0] for k, v in pairs.items()})
        table("an evaluated image", {k: v[1] for k, v in pairs.items()})
    pasting()


if __name__ == "__main__":
    main()
