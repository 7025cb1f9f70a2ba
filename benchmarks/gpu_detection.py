"""Seconds of a training iteration of Faster, Mask and Keypoint R-CNN at 800 pixels: both engines
beside plain Detectron2's. A part of gpu.py. The images are the embedded scenes, enlarged to the
recipes' sizes; each engine decodes and resizes its own, so its loader workers take part.
detectors.txt has Mask R-CNN on a CPU, evaluated images and pasted masks."""

import gc
import importlib.util
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_steps import Scale
from machine import Work

from backbench.datasets import embedded
from backbench.runs import seeding
from detection import dialect, train_net
from detection.data.split import training_records
from detection.engine import DetectionEngine
from detection.run import Prepared

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
    data = (*data, "SOLVER.IMS_PER_BATCH", str(IMAGES), "MODEL.ROI_HEADS.NUM_CLASSES", classes)
    if points:
        sigmas = "[0.107, 0.107, 0.107, 0.107, 0.107]"
        points_of = ("MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", "5")
        data = (*data, *points_of, "TEST.KEYPOINT_OKS_SIGMAS", sigmas)
    return f"{task}_rcnn_R_50_FPN_1x", data


def built(
    root: Path, engine: str, name: str, words: tuple[str, ...], device: str
) -> tuple[Prepared, DetectionEngine]:
    run = train_net.new_run(dialect.read(name, words), engine=engine, root=root, out=root / "run")
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
        objects = [{**a, "bbox_mode": BoxMode(a["bbox_mode"])} for a in record["annotations"]]
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
                # Its recipe has masks; its trainer computes in float32
                if "detectron2" in engines and task == "mask" and not bf16:
                    timed["plain Detectron2"] = plain_detectron2(p, network)
                for way, each in scale.least(timed).items():
                    precision = "bf16" if bf16 else "fp32"
                    print(f"  {task:10}{precision:6}{way:26}{each:9.4f}", flush=True)
                del timed, network
                gc.collect()
