"""Tests that every key of Detectron2's config changes what runs, is refused, or decides nothing."""

from pathlib import Path

import pytest
import torch
from support.detection_runs import built, overrides, run_of_config

from backbench.detection import detectron2_keys, dialect, engine, evaluate
from backbench.detection.data.split import training_records
from backbench.detection.protocol import NEUTRAL, protocol
from backbench.errors import BadInput

pytest.importorskip(
    "detectron2", reason="Detectron2 is not installed: `make detectron2`"
)

from backbench.detection import engine_detectron2

LEAVES = dialect.flat(engine_detectron2.defaults())
HONOURED = sorted(detectron2_keys.HONOURED)
REFUSED = sorted(set(LEAVES) - detectron2_keys.HONOURED - NEUTRAL)


def another(value):
    """Return some other value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.5
        case str():
            return "other"
        case None:
            return 0.5
        case [first, *rest]:
            return [another(first), *rest]
        case _:  # an empty list
            return ["other"]


def test_every_key_is_in_one_table():
    assert set(LEAVES) >= NEUTRAL | set(HONOURED)
    assert not NEUTRAL & set(HONOURED)


@pytest.mark.parametrize("key", REFUSED)
def test_refused_by_name(key):
    path = dialect.read("mask_rcnn_R_50_FPN_1x", []).path
    given = dialect.Given(path, {key: another(LEAVES[key])})
    with pytest.raises(BadInput, match=f"{key} .* would decide nothing here"):
        engine_detectron2.Detectron2Engine.read_config(given)
    same = dialect.Given(given.path, {key: LEAVES[key]})
    engine_detectron2.Detectron2Engine.read_config(same)


def test_a_newer_detectron2s_key_is_refused():
    given = dialect.Given(Path("a.yaml"), {"MODEL.RPN.NEWER": 2})
    detectron2_keys.check(given, {"MODEL.RPN.NEWER": 2})
    with pytest.raises(
        BadInput, match=r"RPN.NEWER 2 would decide nothing here; leave it at 1"
    ):
        detectron2_keys.check(given, {"MODEL.RPN.NEWER": 1})


def test_neutral_keys_name_no_protocol():
    for key in sorted(NEUTRAL - {"VERSION"}):
        value = "cpu" if key == "MODEL.DEVICE" else str(another(LEAVES[key]))
        given = dialect.read("mask_rcnn_R_50_FPN_1x", [key, value])
        assert protocol(given) == "detection-1x-v1"
    with pytest.raises(BadInput, match="VERSION 1"):
        other = dialect.read("mask_rcnn_R_50_FPN_1x", ["VERSION", "1"])
        engine_detectron2.Detectron2Engine.read_config(other)


# Keys to which `another` value makes no difference -> a value that does
VALUES = {
    "MODEL.RESNETS.NORM": "BN",
    "MODEL.TRUNK.ARCH": "timm:test_convnext2",
    "MODEL.TRUNK.FROZEN": "True",
    "MODEL.TRUNK.DROP_PATH": "0.5",
    "MODEL.TRUNK.MAP_NORM": "False",
    "MODEL.FPN.NORM": "BN",
    "MODEL.FPN.FUSE_TYPE": "avg",
    "SOLVER.EPOCHS": "2",
    "MODEL.PROPOSAL_GENERATOR.MIN_SIZE": "40",
    "MODEL.RPN.BOUNDARY_THRESH": "0",
    "MODEL.RPN.IOU_LABELS": "[0, 0, 1]",
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": "8",
    "MODEL.RPN.POSITIVE_FRACTION": "0.1",
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": "5",
    "MODEL.RPN.PRE_NMS_TOPK_TEST": "5",
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": "5",
    "MODEL.RPN.POST_NMS_TOPK_TEST": "5",
    "MODEL.RPN.NMS_THRESH": "0.1",
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": "8",
    "MODEL.ROI_HEADS.POSITIVE_FRACTION": "0.1",
    "MODEL.ROI_HEADS.NMS_THRESH_TEST": "0.01",
    "MODEL.ROI_BOX_HEAD.CONV_DIM": "8",
    "MODEL.ROI_BOX_HEAD.NORM": "GN",
    "MODEL.ROI_BOX_CASCADE_HEAD.IOUS": "(0.3, 0.6, 0.7)",
    "MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS": (
        "((10.0,10.0,5.0,5.0),(20.0,20.0,10.0,10.0),(3.0,3.0,1.0,1.0))"
    ),
    "INPUT.MIN_SIZE_TRAIN": "(96,)",
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": "range",
    "INPUT.MAX_SIZE_TRAIN": "64",
    "INPUT.MIN_SIZE_TEST": "64",
    "INPUT.MAX_SIZE_TEST": "64",
    "INPUT.RANDOM_FLIP": "vertical",
    "INPUT.MASK_FORMAT": "bitmask",
    "DATASETS.TRAIN": "('scenes_train_6',)",
    "DATASETS.TEST": "('scenes_val_3',)",
    "SOLVER.BASE_LR_END": "0.01",
    "SOLVER.STEPS": "(1,)",
    "SOLVER.WARMUP_ITERS": "2",
    "SOLVER.IMS_PER_BATCH": "4",
    "SOLVER.OPTIMIZER": "SGD",
    "SOLVER.LAYER_DECAY": "0.5",
    "SOLVER.CLIP_GRADIENTS.ENABLED": "True",
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "norm",
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": "0.0001",
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": "1.0",
    "SOLVER.AMP.ENABLED": "True",
    "SOLVER.AMP.PRECISION": "bf16",
    "TEST.DETECTIONS_PER_IMAGE": "3",
}
CASCADE = {
    "MODEL.ROI_HEADS.NAME": "CascadeROIHeads",
    "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG": True,
}
ONE_CONVOLUTION = {"MODEL.ROI_BOX_HEAD.NUM_CONV": 1}
TRUNK = {"MODEL.TRUNK.ARCH": "timm:test_convnext"}
# Keys that matter only beside others -> those others
CONTEXTS = {
    "MODEL.TRUNK.ARCH": TRUNK,
    "MODEL.TRUNK.FROZEN": TRUNK,
    "MODEL.TRUNK.DROP_PATH": TRUNK,
    "MODEL.TRUNK.MAP_NORM": TRUNK,
    "SOLVER.OPTIMIZER": TRUNK,
    "SOLVER.LAYER_DECAY": TRUNK,
    "MODEL.ROI_BOX_HEAD.CONV_DIM": ONE_CONVOLUTION,
    "MODEL.ROI_BOX_HEAD.NORM": ONE_CONVOLUTION,
    "MODEL.ROI_BOX_CASCADE_HEAD.IOUS": CASCADE,
    "MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS": CASCADE,
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": {"INPUT.MIN_SIZE_TRAIN": "(64,128)"},
    "SOLVER.BASE_LR_END": {
        "SOLVER.LR_SCHEDULER_NAME": "WarmupCosineLR",
        "SOLVER.MAX_ITER": 9,
    },
    "SOLVER.CLIP_GRADIENTS.ENABLED": {"SOLVER.CLIP_GRADIENTS.CLIP_VALUE": "1e-4"},
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": {"SOLVER.CLIP_GRADIENTS.ENABLED": True},
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": {
        "SOLVER.CLIP_GRADIENTS.ENABLED": True,
        "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": "1e-4",
    },
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": {
        "SOLVER.CLIP_GRADIENTS.ENABLED": True,
        "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "norm",
        "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": "1e-4",
    },
    "SOLVER.AMP.ENABLED": {"SOLVER.AMP.PRECISION": "bf16"},
    "SOLVER.AMP.PRECISION": {"SOLVER.AMP.ENABLED": True},
}


def base_of(key):
    if "KEYPOINT" in key:
        return "tiny_keypoint_rcnn_R_18_FPN"
    if key in dialect.OURS or key == "MODEL.TRUNK.ARCH":
        return "tiny_faster_rcnn_ConvNeXt_FPN"
    return "tiny_mask_rcnn_R_18_FPN"


def signature(name, root, out, words, monkeypatch):
    """Describe everything that a key may change: data, network, two steps of it, all rates, what it
    finds in an image, and its scores."""
    orders = []
    real = engine.ImageOrder

    def order(records, batch, seed, **how):
        orders.append((batch, how["grouped"]))
        return real(records, batch, seed, **how)

    monkeypatch.setattr(engine, "ImageOrder", order)
    # A random trunk's statistics fit its images, so nothing saturates.
    run = run_of_config(
        name, root, out, ("MODEL.WEIGHTS", "random", *words), engine="detectron2"
    )
    p, made = built(run)
    made.model.train()
    records = training_records(p.train, p.task)
    made.start(records, 0, 2)
    torch.manual_seed(0)
    losses = []
    for _ in range(2):
        losses.append(sorted((k, float(v)) for k, v in made.step().items()))
    weights = sum(float(v.double().sum()) for v in made.model.state_dict().values())
    groups = []
    for group in made.optimizer.param_groups:
        groups.append({k: v for k, v in group.items() if k != "params"})
    iterations = range(p.schedule.iterations)
    rates = [p.schedule.factor_at(iteration) for iteration in iterations]
    found = made.predict(p.val.records[0])
    described = (
        p.train.fingerprint,
        p.val.fingerprint,
        orders,
        str(made.model),
        str(made.amp.dtype),
        losses,
        weights,
        groups,
        rates,
        p.schedule.precise_bn,
        [(d["category_id"], d["score"], *d["bbox"]) for d in found],
        [d.get("keypoints") for d in found],
        scores_of_near_points(p),
    )
    return repr(described)


def scores_of_near_points(p):
    """Score the objects' own keypoints, moved by three pixels: a trunk of two steps finds none."""
    if "keypoints" not in p.task.aps:
        return None
    found = []
    for record in p.val.records:
        for annotation in record["annotations"]:
            points = list(annotation["keypoints"])
            for x in range(0, len(points), 3):
                points[x] += 3
            detection = {
                "image_id": record["image_id"],
                "category_id": p.val.ids[annotation["category_id"]],
                "bbox": annotation["bbox"],
                "score": 0.9,
                "keypoints": points,
            }
            found.append(detection)
    sigmas = p.cfg.TEST.KEYPOINT_OKS_SIGMAS
    return evaluate.score(p.val, found, "keypoints", sigmas, manifest=None).values


def tried(*run):
    """Return the signature, or the error instead: a value that is refused has been read, too."""
    try:
        return signature(*run)
    except Exception as error:  # Detectron2 raises errors of all kinds
        return repr(error)


@pytest.fixture(scope="module")
def known():
    """(config, context) -> its signature, which several keys are compared with"""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("key", HONOURED)
def test_honoured(tiny_root, tmp_path, monkeypatch, known, key):
    name = base_of(key)
    value = dialect.read(name, []).get(key, LEAVES[key])
    new = VALUES.get(key, str(another(value)))
    context = overrides(CONTEXTS.get(key, {}))
    words = (name, *context)
    if words not in known:
        known[words] = tried(name, tiny_root, tmp_path / "a", context, monkeypatch)
    changed = tried(name, tiny_root, tmp_path / "b", (*context, key, new), monkeypatch)
    assert changed != known[words], f"{key} {new} changes nothing"
