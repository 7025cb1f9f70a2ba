"""Seconds of a training iteration of Faster, Mask and Keypoint R-CNN at 800 pixels: both engines
beside plain Detectron2 and torchvision. A part of gpu.py. The images are the embedded scenes,
enlarged to the recipes' sizes; each engine decodes and resizes its own, so its loader workers take
part; plain torchvision is given tensors. detectors.txt has Mask R-CNN on a CPU."""

import gc
import importlib.util
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_steps import Scale
from machine import Work
from torch import nn

from backbench.datasets import embedded
from backbench.detection import dialect, train_net
from backbench.detection.data.split import training_records
from backbench.detection.engine import DetectionEngine
from backbench.detection.run import Prepared
from backbench.runs import seeding

TASKS = ("faster", "mask", "keypoint")
IMAGES = 4  # of an iteration
RATE = 1e-4  # of learning: weights that hardly move, so that all rounds do the same
STEPS = 1000  # how many batches an engine's stream is opened for
AMP = ("SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bf16")


def recipe(task: str, *, small: bool) -> tuple[str, tuple[str, ...]]:
    """The recipe, and what changes in it: the data that are at hand, random weights."""
    points = "keypoints_" * (task == "keypoint")
    data = ("DATASETS.TRAIN", f"('{points}scenes_train_2',)", "MODEL.WEIGHTS", "random")
    data = (*data, "DATASETS.TEST", f"('{points}scenes_val_2',)")
    if small:
        return f"tiny_{task}_rcnn_R_18_FPN", data
    classes = "1" if points else "10"
    data = (
        *data,
        "SOLVER.IMS_PER_BATCH",
        str(IMAGES),
        "MODEL.ROI_HEADS.NUM_CLASSES",
        classes,
    )
    if points:
        sigmas = "[0.107, 0.107, 0.107, 0.107, 0.107]"
        points_of = ("MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", "5")
        data = (*data, *points_of, "TEST.KEYPOINT_OKS_SIGMAS", sigmas)
    return f"{task}_rcnn_R_50_FPN_1x", data


def built(
    root: Path, engine: str, name: str, words: tuple[str, ...], device: str
) -> tuple[Prepared, DetectionEngine]:
    run = train_net.new_run(
        dialect.read(name, words), engine=engine, root=root, out=root / "run"
    )
    p = train_net.prepare(run)
    network = train_net.build_engine(run, p, torch.device(device))
    for group in network.optimizer.param_groups:
        group["lr"] = RATE
    network.start(training_records(p.train, p.task), 0, STEPS)
    return p, network


def ours(network: DetectionEngine) -> Work:
    def iteration() -> None:
        network.model.train()
        seeding.seed_everything(0, "iteration", 0, 0)  # as the loop does before each
        network.step()

    return iteration


def plain_detectron2(p: Prepared, network: DetectionEngine) -> Work:
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
    rows = []
    for record in training_records(p.train, p.task):
        objects = [
            {**a, "bbox_mode": BoxMode(a["bbox_mode"])} for a in record["annotations"]
        ]
        rows.append({**record, "annotations": objects})

    def batches() -> Iterator[list[dict]]:
        while True:
            yield [mapper(dict(row)) for row in rows]

    trainer = SimpleTrainer(model, batches(), build_optimizer(cfg, model))

    def iteration() -> None:
        model.train()
        with EventStorage(0):
            trainer.run_step()

    return iteration


def plain_torchvision(task: str, device: str, *, bf16: bool, small: bool) -> Work:
    """torchvision's own detector on images of one size that are there already."""
    from torchvision.models import detection as theirs

    make = {
        "faster": theirs.fasterrcnn_resnet50_fpn,
        "mask": theirs.maskrcnn_resnet50_fpn,
        "keypoint": theirs.keypointrcnn_resnet50_fpn,
    }[task]
    side = 64 if small else 800
    count = 1 if small else IMAGES
    model = make(
        weights=None,
        weights_backbone=None,
        num_classes=2 if task == "keypoint" else 11,
        trainable_backbone_layers=5,
        norm_layer=nn.BatchNorm2d,  # trained, as in the papers' recipes
        min_size=side,
        max_size=side,
        box_batch_size_per_image=16 if small else 512,
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    images = [torch.rand(3, side, side, device=device) for _ in range(count)]
    box = (
        torch.tensor([[0.1, 0.1, 0.6, 0.6], [0.4, 0.3, 0.9, 0.8]], device=device) * side
    )
    target = {"boxes": box, "labels": torch.ones(2, dtype=torch.int64, device=device)}
    if task == "mask":
        target["masks"] = torch.ones(2, side, side, dtype=torch.uint8, device=device)
    if task == "keypoint":
        middle = (box[:, None, :2] + box[:, None, 2:]) / 2
        seen = torch.ones(2, 17, 1, device=device)
        target["keypoints"] = torch.cat([middle.expand(2, 17, 2), seen], 2)

    def iteration() -> None:
        model.train()
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            losses = model(images, [dict(target) for _ in images])
        torch.stack([loss.float() for loss in losses.values()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return iteration


def table(scale: Scale) -> None:
    warnings.simplefilter("ignore")
    engines = ["torchvision"]
    print(f"\ndetection, iterations of {IMAGES} images: seconds")
    if importlib.util.find_spec("detectron2") is not None:
        engines.append("detectron2")
    else:
        print("  Detectron2 is not installed: `make detectron2`")
    with tempfile.TemporaryDirectory() as folder:
        root = embedded.build(Path(folder), size="tiny")
        for task in TASKS:
            for bf16 in (False, True):
                name, words = recipe(task, small=scale.small)
                words += AMP if bf16 else ()
                timed = {}
                for engine in engines:
                    p, network = built(root, engine, name, words, scale.device)
                    timed[f"backbench, {engine}"] = ours(network)
                if not (scale.small and bf16):
                    plain = plain_torchvision(
                        task, scale.device, bf16=bf16, small=scale.small
                    )
                    timed["plain torchvision"] = plain
                # Its recipe has masks; its trainer computes in float32
                if "detectron2" in engines and task == "mask" and not bf16:
                    timed["plain Detectron2"] = plain_detectron2(p, network)
                for way, each in scale.least(timed).items():
                    precision = "bf16" if bf16 else "fp32"
                    print(f"  {task:10}{precision:6}{way:26}{each:9.4f}", flush=True)
                del timed, network
                gc.collect()
