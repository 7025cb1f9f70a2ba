"""Every key of Detectron2's config changes what runs, is refused by name, or decides nothing."""

from pathlib import Path

import pytest
import torch
from support.detection_runs import built, run_of_config

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
    """Some other value of the same type."""
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
        case _:
            return [another(value[0]), *value[1:]] if value else ["other"]


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
        assert (
            protocol(dialect.read("mask_rcnn_R_50_FPN_1x", [key, value]))
            == "detection-1x-v1"
        )
    with pytest.raises(BadInput, match="VERSION 1"):
        other = dialect.read("mask_rcnn_R_50_FPN_1x", ["VERSION", "1"])
        engine_detectron2.Detectron2Engine.read_config(other)


# Where the general other value says nothing: another, and what must be set for the key to matter
CLIP = ("SOLVER.CLIP_GRADIENTS.ENABLED", "True")
COSINE = ("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.MAX_ITER", "9")
TRUNK = ("MODEL.TRUNK.ARCH", "timm:test_convnext")
CASCADE = ("MODEL.ROI_HEADS.NAME", "CascadeROIHeads")
CASCADE += ("MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "True")
WEIGHTS = "((10.0,10.0,5.0,5.0),(20.0,20.0,10.0,10.0),(3.0,3.0,1.0,1.0))"
TOPK = [
    f"MODEL.RPN.{a}_NMS_TOPK_{b}" for a in ("PRE", "POST") for b in ("TRAIN", "TEST")
]
SAMPLERS = ("MODEL.RPN", "MODEL.ROI_HEADS")
SPECIAL = dict.fromkeys(TOPK, ("5",))
SPECIAL |= {f"{sampler}.POSITIVE_FRACTION": ("0.1",) for sampler in SAMPLERS}
SPECIAL |= {f"{sampler}.BATCH_SIZE_PER_IMAGE": ("8",) for sampler in SAMPLERS}
SIDES = ("MAX_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TEST")
SPECIAL |= {f"INPUT.{side}": ("64",) for side in SIDES}
SPECIAL |= {f"MODEL.{part}.NORM": ("BN",) for part in ("RESNETS", "FPN")}
SPECIAL |= {
    "MODEL.RPN.BOUNDARY_THRESH": ("0",),
    "MODEL.RPN.IOU_LABELS": ("[0, 0, 1]",),
    "MODEL.RPN.NMS_THRESH": ("0.1",),
    "MODEL.ROI_HEADS.NMS_THRESH_TEST": ("0.01",),
    "MODEL.PROPOSAL_GENERATOR.MIN_SIZE": ("40",),
    "MODEL.ROI_BOX_HEAD.CONV_DIM": ("8", "MODEL.ROI_BOX_HEAD.NUM_CONV", "1"),
    "MODEL.ROI_BOX_HEAD.NORM": ("GN", "MODEL.ROI_BOX_HEAD.NUM_CONV", "1"),
    "MODEL.ROI_BOX_CASCADE_HEAD.IOUS": ("(0.3, 0.6, 0.7)", *CASCADE),
    "MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS": (WEIGHTS, *CASCADE),
    "MODEL.FPN.FUSE_TYPE": ("avg",),
    "INPUT.MIN_SIZE_TRAIN": ("(96,)",),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("range", "INPUT.MIN_SIZE_TRAIN", "(64,128)"),
    "INPUT.RANDOM_FLIP": ("vertical",),
    "INPUT.MASK_FORMAT": ("bitmask",),
    "DATASETS.TRAIN": ("('scenes_train_6',)",),
    "DATASETS.TEST": ("('scenes_val_3',)",),
    "SOLVER.BASE_LR_END": ("0.01", *COSINE),
    "SOLVER.STEPS": ("(1,)",),
    "SOLVER.WARMUP_ITERS": ("2",),
    "SOLVER.IMS_PER_BATCH": ("4",),
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": ("0.0001", *CLIP),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": (
        "norm",
        *CLIP,
        "SOLVER.CLIP_GRADIENTS.CLIP_VALUE",
        "1e-4",
    ),
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": (
        *("1.0", *CLIP, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm"),
        *("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "1e-4"),
    ),
    "SOLVER.CLIP_GRADIENTS.ENABLED": (
        "True",
        "SOLVER.CLIP_GRADIENTS.CLIP_VALUE",
        "1e-4",
    ),
    "SOLVER.AMP.ENABLED": ("True", "SOLVER.AMP.PRECISION", "bf16"),
    "SOLVER.AMP.PRECISION": ("bf16", "SOLVER.AMP.ENABLED", "True"),
    "TEST.DETECTIONS_PER_IMAGE": ("3",),
    "MODEL.TRUNK.ARCH": ("timm:test_convnext2", *TRUNK),
    "MODEL.TRUNK.FROZEN": ("True", *TRUNK),
    "MODEL.TRUNK.DROP_PATH": ("0.5", *TRUNK),
    "MODEL.TRUNK.MAP_NORM": ("False", *TRUNK),
    "SOLVER.OPTIMIZER": ("SGD", *TRUNK),
    "SOLVER.LAYER_DECAY": ("0.5", *TRUNK),
}


def base_of(key):
    if "KEYPOINT" in key:
        return "tiny_keypoint_rcnn_R_18_FPN"
    if key in dialect.OURS or key == "MODEL.TRUNK.ARCH":
        return "tiny_faster_rcnn_ConvNeXt_FPN"
    return "tiny_mask_rcnn_R_18_FPN"


def signature(name, root, out, words, monkeypatch):
    """The network, two steps of it, every iteration's rate, an image's detections."""
    orders = []
    real = engine.ImageOrder

    def order(records, batch, seed, **how):
        orders.append((batch, how["grouped"]))
        return real(records, batch, seed, **how)

    monkeypatch.setattr(engine, "ImageOrder", order)
    # A trunk whose statistics fit its images, so that nothing saturates
    run = run_of_config(
        name, root, out, ("MODEL.WEIGHTS", "random", *words), engine="detectron2"
    )
    p, made = built(run)
    made.model.train()
    records = training_records(p.train, p.task)
    made.start(records, 0, 2)
    torch.manual_seed(0)
    losses = [sorted((k, float(v)) for k, v in made.step().items()) for _ in range(2)]
    weights = sum(float(v.double().sum()) for v in made.model.state_dict().values())
    groups = [
        {k: v for k, v in g.items() if k != "params"}
        for g in made.optimizer.param_groups
    ]
    s = p.schedule
    rates = [s.factor_at(i) for i in range(s.iterations)]
    found = made.predict(p.val.records[0])
    shown = [(d["category_id"], d["score"], *d["bbox"]) for d in found]
    points = [d.get("keypoints") for d in found]
    data = (p.train.fingerprint, p.val.fingerprint, orders)
    rest = (rates, s.precise_bn, str(made.model), str(made.amp.dtype))
    return repr(
        (losses, weights, groups, shown, points, data, rest, scores_of_near_points(p))
    )


def scores_of_near_points(p):
    """The score of the objects' own keypoints, three pixels aside: a trunk of two steps finds none."""
    if "keypoints" not in p.task.aps:
        return None
    found = []
    for record in p.val.records:
        for one in record["annotations"]:
            points = [v + 3 * (i % 3 == 0) for i, v in enumerate(one["keypoints"])]
            where = {
                "image_id": record["image_id"],
                "category_id": p.val.ids[one["category_id"]],
            }
            found.append(
                {**where, "bbox": one["bbox"], "score": 0.9, "keypoints": points}
            )
    sigmas = p.cfg.TEST.KEYPOINT_OKS_SIGMAS
    return evaluate.score(p.val, found, "keypoints", sigmas, manifest=None).values


def tried(*run):
    """The signature, or what was said instead: a value that is not liked has been read."""
    try:
        return signature(*run)
    except Exception as error:  # Detectron2 says it with any
        return repr(error)


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("key", HONOURED)
def test_honoured(tiny_root, tmp_path, monkeypatch, known, key):
    name = base_of(key)
    value = dialect.read(name, []).get(key, LEAVES[key])
    new, *context = SPECIAL.get(key, (str(another(value)),))
    words = (name, *context)
    if words not in known:
        known[words] = tried(name, tiny_root, tmp_path / "a", context, monkeypatch)
    changed = tried(name, tiny_root, tmp_path / "b", (*context, key, new), monkeypatch)
    assert changed != known[words], f"{key} {new} changes nothing"
