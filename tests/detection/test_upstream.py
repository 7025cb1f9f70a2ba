"""Compares our loop with Detectron2's own DefaultTrainer on the same draws: losses and tensors bit by
bit, and AP."""

import math

import pytest
import torch
from support.detection_runs import built, overrides, run_of_config

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
SCHEDULE = {
    "MODEL.WEIGHTS": "random",
    "TEST.PRECISE_BN.ENABLED": False,
    "SOLVER.MAX_ITER": LENGTH,
    "SOLVER.STEPS": "(12,)",
    "SOLVER.WARMUP_ITERS": 6,
}
# C4 sends every box through a stage of its trunk, so there are few boxes here, and small images.
SMALL = {
    "INPUT.MIN_SIZE_TRAIN": "(64,)",
    "INPUT.MIN_SIZE_TEST": 64,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 4,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 4,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 8,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 8,
    # At the tiny recipe's rate, batches as small as these make features too large for a proposal.
    "SOLVER.BASE_LR": 0.0005,
}


class SameDraws(HookBase):
    """Seeds before an iteration as our loop does, and keeps the losses."""

    def __init__(self, seed):
        self.seed = seed
        self.losses = []

    def before_step(self):
        seeding.seed_everything(self.seed, "iteration", self.trainer.iter, 0)

    def after_step(self):
        latest = self.trainer.storage.latest()
        self.losses.append({k: v[0] for k, v in latest.items() if k.startswith("loss")})


def upstream(cfg, batches, weights, seed):
    """Run DefaultTrainer over these batches from these weights; return its model and its losses."""
    draws = SameDraws(seed)

    class OverTheseBatches(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg):
            return batches

        def build_hooks(self):
            return [draws, hooks.LRScheduler()]

    trainer = OverTheseBatches(cfg)
    trainer.model.load_state_dict(weights)
    trainer.train()
    return trainer.model, draws.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "tiny_faster_rcnn_R_18_FPN",
        "tiny_mask_rcnn_R_18_FPN",
        "tiny_keypoint_rcnn_R_18_FPN",
        "tiny_faster_rcnn_R_50_C4",
    ],
)
def test_equals_upstream(tiny_root, tmp_path, monkeypatch, name):
    dataset = "keypoints_scenes_val" if "keypoint" in name else "scenes_val"
    values = {**SCHEDULE, "DATASETS.TEST": f"('{dataset}',)"}
    if "C4" in name:
        values |= SMALL
    words = overrides(values)
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
    registered = f"ours_{name}"
    about = {"keypoint_names": list(p.val.keypoints), "keypoint_flip_map": []}
    register_coco_instances(registered, about, str(p.val.file), str(p.val.folder))
    # Its mapper looks up the keypoints of the training set, in testing, too.
    cfg.DATASETS.TRAIN = (registered,)
    evaluator = COCOEvaluator(
        registered,
        tasks=p.task.aps,
        distributed=False,
        output_dir=str(tmp_path / "evaluated"),
        use_fast_impl=False,
        kpt_oks_sigmas=cfg.TEST.KEYPOINT_OKS_SIGMAS,
    )
    loader = build_detection_test_loader(cfg, registered, num_workers=0)
    theirs = inference_on_dataset(model, loader, evaluator)
    found = measure.predict(run, p, engine, 0)
    assert found
    for kind in p.task.aps:
        for metric, value in measure._scores(kind, p, found, None).values.items():
            reference = theirs[kind][metric]
            if value is None:
                assert math.isnan(reference) or reference < 0
            else:
                assert value == pytest.approx(reference, abs=1e-6), (kind, metric)
