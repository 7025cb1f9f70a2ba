"""Detectron2's own DefaultTrainer on the same draws: losses, tensors bit by bit, and AP are ours."""

import math

import pytest
import torch
from support.detection_runs import built, run_of_config

from backbench.detection import measure, train_net
from backbench.detection.data.split import training_records
from backbench.runs import seeding
from backbench.runs.state import StopFlag
from backbench.runs.step_metrics import read_metrics

pytest.importorskip(
    "detectron2", reason="Detectron2 is not installed: `make detectron2`"
)

from detectron2.data import build_detection_test_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import DefaultTrainer, HookBase, hooks
from detectron2.evaluation import COCOEvaluator, inference_on_dataset

LENGTH = 20
CONFIGS = [f"tiny_{task}_rcnn_R_18_FPN" for task in ("faster", "mask", "keypoint")]
CONFIGS.append("tiny_faster_rcnn_R_50_C4")
# C4 sends every box through a stage of its trunk
SMALL = (
    *("INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64"),
    *(
        "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION",
        "4",
        "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE",
        "4",
    ),
    *("MODEL.RPN.POST_NMS_TOPK_TEST", "8", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "8"),
    # At the tiny recipe's rate, batches this small end with too large features and no proposal
    *("SOLVER.BASE_LR", "0.0005"),
)


class SameDraws(HookBase):
    """Seeds before an iteration as our loop does; writes down its losses."""

    def __init__(self, seed):
        self.seed, self.losses = seed, []

    def before_step(self):
        seeding.seed_everything(self.seed, "iteration", self.trainer.iter, 0)

    def after_step(self):
        latest = self.trainer.storage.latest()
        self.losses.append({k: v[0] for k, v in latest.items() if k.startswith("loss")})


def upstream(cfg, batches, weights, seed):
    """DefaultTrainer run over these batches from these weights, and its losses."""
    noted = SameDraws(seed)

    class OverTheseBatches(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg):
            return batches

        def build_hooks(self):
            return [noted, hooks.LRScheduler()]

    trainer = OverTheseBatches(cfg)
    trainer.model.load_state_dict(weights)
    trainer.train()
    return trainer.model, noted.losses


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_upstream(tiny_root, tmp_path, monkeypatch, name):
    dataset = "keypoints_scenes_val" if "keypoint" in name else "scenes_val"
    words = ("MODEL.WEIGHTS", "random", "TEST.PRECISE_BN.ENABLED", "False")
    words += (
        "SOLVER.MAX_ITER",
        str(LENGTH),
        "SOLVER.STEPS",
        "(12,)",
        "SOLVER.WARMUP_ITERS",
        "6",
    )
    words += ("DATASETS.TEST", f"('{dataset}',)")
    words += SMALL if "C4" in name else ()
    run = run_of_config(name, tiny_root, tmp_path / "run", words, engine="detectron2")
    run.out.mkdir()
    p, engine = built(run)
    fresh = {k: v.clone() for k, v in engine.model.state_dict().items()}
    # 1. Ours, in our loop
    train_net.train(run, p, engine, 0, StopFlag())
    mine = read_metrics(run.out)
    # 2. The batches that it saw, and Detectron2's trainer over them
    engine.start(training_records(p.train, p.task), 0, LENGTH)
    batches = [next(engine.batches) for _ in range(LENGTH)]
    cfg = engine.cfg.clone()
    cfg.OUTPUT_DIR = str(tmp_path / "upstream")
    model, losses = upstream(cfg, batches, fresh, p.seed)
    # 3. Every loss of every iteration, and every tensor
    assert len(losses) == LENGTH
    for row, theirs in zip(mine, losses, strict=True):
        assert {k: row[k] for k in theirs} == theirs
    state = engine.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(state[key], value), key
    # 4. AP by its evaluator, of what its model finds
    file, folder = str(p.val.file), str(p.val.folder)
    about = {"keypoint_names": list(p.val.keypoints), "keypoint_flip_map": []}
    register_coco_instances(f"ours_{name}", about, file, folder)
    cfg.DATASETS.TRAIN = (f"ours_{name}",)  # whose keypoints its test mapper looks up
    tasks = p.task.aps
    how = {
        "tasks": tasks,
        "distributed": False,
        "output_dir": str(tmp_path / "evaluated"),
    }
    how |= {"use_fast_impl": False, "kpt_oks_sigmas": cfg.TEST.KEYPOINT_OKS_SIGMAS}
    evaluator = COCOEvaluator(f"ours_{name}", **how)
    loader = build_detection_test_loader(cfg, f"ours_{name}", num_workers=0)
    theirs = inference_on_dataset(model, loader, evaluator)
    found = measure.predict(run, p, engine, 0)
    assert found
    for kind in tasks:
        for metric, value in measure._scores(kind, p, found, None).values.items():
            reference = theirs[kind][metric]
            if value is None:
                assert math.isnan(reference) or reference < 0
            else:
                assert value == pytest.approx(reference, abs=1e-6), (kind, metric)
