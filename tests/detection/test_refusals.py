"""Tests that inputs that would give a wrong number are refused, or handled as COCO's tools do."""

import inspect
import json
import shutil

import pytest
import torch
from support.detection_runs import built, near_its_checkpoint, run_of_config

from backbench.detection import backbones, dialect, engine_torchvision, train_net
from backbench.detection.data import images
from backbench.detection.data.split import training_records
from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import build_backbone

pytestmark = pytest.mark.usefixtures("one_trunk")

FASTER = "tiny_faster_rcnn_R_18_FPN"


@pytest.fixture(scope="module")
def trunk():
    torch.manual_seed(0)
    state = build_backbone("resnet18").state_dict()
    return Checkpoint(arch="resnet18", method="test", state_dict=state)


@pytest.fixture(scope="module")
def trunk_file(trunk, tmp_path_factory):
    file = tmp_path_factory.mktemp("trunk") / "x.safetensors"
    trunk.save(file)
    return file


@pytest.fixture
def data(tiny_root, tmp_path):
    """A private copy of the scenes, to be damaged."""
    shutil.copytree(tiny_root / "scenes", tmp_path / "data" / "scenes")
    return tmp_path / "data"


def prepare(data, tmp_path, checkpoint=None, *opts, name=FASTER, world=1):
    """Prepare a run of a checkpoint or its file, or of random weights."""
    file = checkpoint
    if checkpoint is None:
        opts = ("MODEL.WEIGHTS", "random", *opts)
    elif isinstance(checkpoint, Checkpoint):
        file = tmp_path / "x.safetensors"
        checkpoint.save(file)
    out = tmp_path / "run"
    run = run_of_config(name, data, out, opts, checkpoint=file, world=world)
    return train_net.prepare(run)


def edit(data, change, kind="instances", part="val"):
    """Change the content of an annotation file."""
    file = data / "scenes" / "annotations" / f"{kind}_{part}2017.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("opts", "words"),
    [
        (("MODEL.RESNETS.STRIDE_IN_1X1", "True"), "STRIDE_IN_1X1"),
        (("INPUT.FORMAT", "BGR"), "INPUT.FORMAT is BGR"),
        (("MODEL.PIXEL_MEAN", "[103.53,116.28,123.675]"), "PIXEL_MEAN"),
        (("MODEL.PIXEL_STD", "[1.0,1.0,1.0]"), "PIXEL_STD"),
        (("MODEL.RESNETS.DEPTH", "50"), "DEPTH is 50 but .* resnet18"),
        (("MODEL.ROI_HEADS.NUM_CLASSES", "80"), "10 categories.*NUM_CLASSES is 80"),
        (("MODEL.BACKBONE.FREEZE_AT", "2"), "FREEZE_AT is 2"),
        (("MODEL.ROI_BOX_HEAD.NORM", "SyncBN"), "ROI_BOX_HEAD.NORM"),
        (
            ("MODEL.RPN.NMS_TRESH", "0.5"),
            "NMS_TRESH'; did you mean 'MODEL.RPN.NMS_THRESH'",
        ),
        (("SOLVER.BASE_LR", "fast"), 'BASE_LR fast: must be a number, as "0.02"'),
        (("INPUT.MIN_SIZE_TRAIN", "64"), r'TRAIN 64: must be a list, as "\['),
        (("SOLVER.BASE_LR=0.1",), "write .* behind a space, SOLVER.BASE_LR 0.1"),
        (("SOLVER.BASE_LR=1", "SEED=2"), "write .* space, SOLVER.BASE_LR 1$"),
        (("SEED", "1", "--resume"), "--resume. stands behind .* flags go before"),
        (("SOLVER.BASE_LR",), "'SOLVER.BASE_LR' has no value"),
        (("DATASETS.TRAIN", "('scenes_trian',)"), "did you mean 'scenes_train'"),
        (("DATASETS.TEST", "('scenes_train',)"), "share 12 images"),
    ],
)
def test_config_against_checkpoint_and_data(
    tiny_root, tmp_path, trunk_file, opts, words
):
    with pytest.raises(BadInput, match=words):
        prepare(tiny_root, tmp_path, trunk_file, *opts)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("SOLVER.CHECKPOINT_PERIOD", "0", "at least 1"),
        ("DATALOADER.NUM_WORKERS", "-1", "at least 0"),
        ("INPUT.MIN_SIZE_TRAIN", "()", "at least 1"),
        ("INPUT.MIN_SIZE_TRAIN", "(64, 0)", "at least 1"),
        ("INPUT.MIN_SIZE_TEST", "0", "at least 1"),
        ("INPUT.MIN_SIZE_TRAIN", "(64, 1000000)", "at most 20000"),
        ("SOLVER.IMS_PER_BATCH", "1000000000", "at most 1048576"),
        ("DATALOADER.NUM_WORKERS", "100000", "at most 1024"),
        ("SEED", "99999999999999999999", "at most 9223372036854775807"),
        ("SEED", "-2", "at least -1"),
        ("SOLVER.BASE_LR", "0.0", "above 0"),
        ("MODEL.RPN.IOU_THRESHOLDS", "(0.7,)", "2 overlaps"),
        ("MODEL.RPN.IOU_THRESHOLDS", "(0.7, 0.3)", "2 overlaps"),
        ("MODEL.ROI_HEADS.IOU_THRESHOLDS", "()", "1 or more overlaps"),
        ("MODEL.RPN.BATCH_SIZE_PER_IMAGE", "0", "at least 1"),
        ("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "0", "at least"),
        ("MODEL.PIXEL_MEAN", "123.7", "PIXEL_MEAN"),
        ("MODEL.DEVICE", "gpu", "auto, cpu or cuda"),
        ("MODEL.DEVICE", "cuda:1", "auto, cpu or cuda"),
    ],
)
def test_values_that_no_detector_can_have(tiny_root, tmp_path, key, value, wanted):
    with pytest.raises(BadInput) as refused:
        prepare(tiny_root, tmp_path, None, key, value)
    assert key in str(refused.value)
    assert wanted in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("MODEL.FPN.NORM", "''", "FPN.NORM '': the protocol has SyncBN"),
        ("MODEL.RESNETS.NORM", "BN", "RESNETS.NORM 'BN': the protocol has SyncBN"),
        ("TEST.PRECISE_BN.ENABLED", "False", "TEST.PRECISE_BN off"),
    ],
)
def test_departures_from_the_protocol_are_said(
    tiny_root, tmp_path, caplog, *, key, value, words
):
    prepare(tiny_root, tmp_path)
    assert words not in caplog.text
    prepare(tiny_root, tmp_path, None, key, value)
    assert words in caplog.text


def test_statistics_come_from_the_checkpoint(tiny_root, tmp_path, trunk):
    pixels = Pixels((0.4, 0.5, 0.6), (0.2, 0.3, 0.4), "BGR")
    p = prepare(tiny_root, tmp_path, trunk.replace(pixels=pixels))
    assert p.cfg.INPUT.FORMAT == "BGR"
    assert pytest.approx([102, 127.5, 153]) == p.cfg.MODEL.PIXEL_MEAN


def test_weights_must_be_named(tiny_root, tmp_path):
    with pytest.raises(BadInput, match="no weights: give --checkpoint"):
        train_net.prepare(run_of_config(FASTER, tiny_root, tmp_path, ()))
    with pytest.raises(BadInput, match="downloads nothing"):
        backbones.read_trunk(
            None, "detectron2://ImageNetPretrained/MSRA/R-50.pkl", "resnet50", 0
        )
    with pytest.raises(BadInput, match="give one"):
        backbones.read_trunk(tmp_path / "x", "y.pkl", "resnet18", 0)
    draw = inspect.unwrap(backbones.read_trunk)  # anew each time
    drawn = draw(None, "random", "resnet18", 0)
    again = draw(None, "random", "resnet18", 0)
    assert drawn.digest == again.digest


def test_a_small_image_stem_and_a_batch_that_does_not_divide(
    tiny_root, tmp_path, trunk_file
):
    with pytest.raises(BadInput, match="does not divide into 3"):
        prepare(tiny_root, tmp_path, trunk_file, world=3)
    state = build_backbone("resnet18", "conv3").state_dict()
    small = Checkpoint(arch="resnet18", stem="conv3", method="t", state_dict=state)
    with pytest.raises(BadInput, match=r"conv3 stem.*maps of stride 1, 2, 4, 8"):
        prepare(tiny_root, tmp_path, small)


def test_feature_check(tiny_root, tmp_path, trunk, trunk_file):
    run = run_of_config(FASTER, tiny_root, tmp_path, (), checkpoint=trunk_file)
    p, engine = built(run)
    assert near_its_checkpoint(p, engine) <= 1e-6
    body = engine.model.backbone.body.trunk
    with torch.no_grad():
        body.layer3[0].conv1.weight.mul_(1.01)
    with pytest.raises(BadInput, match="the loaded C4 is off"):
        near_its_checkpoint(p, engine)
    body.load_state_dict(trunk.state_dict)
    with torch.no_grad():
        body.conv1.weight.copy_(body.conv1.weight.flip(1))
    with pytest.raises(BadInput, match="the loaded C2 is off"):
        near_its_checkpoint(p, engine)


def test_files_that_are_not_there_or_not_json(data, tmp_path, trunk_file):
    file = data / "scenes" / "annotations" / "instances_val2017.json"
    file.write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        prepare(data, tmp_path, trunk_file)
    file.unlink()
    with pytest.raises(BadInput, match="no such file; COCO is ROOT/coco"):
        prepare(data, tmp_path, trunk_file)


def test_keypoint_files_without_keypoints(data, tmp_path, trunk_file):
    name = "tiny_keypoint_rcnn_R_18_FPN"

    def without_keypoints(content):
        for annotation in content["annotations"]:
            annotation.pop("keypoints")

    def without_names(content):
        content["categories"][0].pop("keypoints")

    edit(data, without_keypoints, "person_keypoints", "train")
    with pytest.raises(BadInput, match="no annotation has keypoints"):
        prepare(data, tmp_path, trunk_file, name=name)
    edit(data, without_names, "person_keypoints", "train")
    with pytest.raises(
        BadInput, match="'digit' has no 'keypoints' list; write their names"
    ):
        prepare(data, tmp_path, trunk_file, name=name)


def test_as_many_sigmas_as_keypoints(tiny_root, tmp_path, trunk_file):
    sigmas = ("TEST.KEYPOINT_OKS_SIGMAS", "[0.1]")
    with pytest.raises(BadInput, match="OKS_SIGMAS"):
        prepare(
            tiny_root, tmp_path, trunk_file, *sigmas, name="tiny_keypoint_rcnn_R_18_FPN"
        )


def degenerate(content):
    """Put crowds, empty and outside boxes, outlines of two points and empty images into a file."""
    annotations = content["annotations"]
    for annotation in annotations:
        if annotation["image_id"] == 1:
            annotation["iscrowd"] = 1
    second = [a for a in annotations if a["image_id"] == 2]
    second[0]["bbox"] = [5.0, 5.0, 0.0, 10.0]
    second[1]["bbox"] = [500.0, 500.0, 10.0, 10.0]
    second[2]["segmentation"] = [[1, 1, 2, 2]]
    content["annotations"] = [a for a in annotations if a["image_id"] not in (3, 4)]


@pytest.mark.parametrize("task", ["faster", "mask", "keypoint"])
def test_degenerate_objects_are_handled_as_by_coco_tools(
    data, tmp_path, trunk_file, task
):
    kind = "person_keypoints" if task == "keypoint" else "instances"
    edit(data, degenerate, kind, "train")
    p = prepare(data, tmp_path, trunk_file, name=f"tiny_{task}_rcnn_R_18_FPN")
    kept = {r["image_id"] for r in training_records(p.train, p.task)}
    assert not kept & {1, 3, 4}
    assert 2 in kept
    record = next(r for r in p.train.records if r["image_id"] == 2)
    target = images.targets(
        record, 128, 128, mirrored=False, flip_map=p.train.flip, task=p.task
    )
    boxes = target["boxes"]
    assert ((boxes[:, 2:] - boxes[:, :2]) > 0).all()
    assert len(boxes) == len(record["annotations"]) - 2
    beside, empty, *rest = p.train.notes
    assert "1 of 41 boxes do not touch their image" in beside
    assert "1 of 41 boxes have no width or no height" in empty
    # Only masks need outlines, so only their task leaves an object out.
    assert len(rest) == (1 if task == "mask" else 0)


@pytest.mark.parametrize("task", ["faster", "mask", "keypoint"])
def test_a_batch_without_any_object_trains(tiny_root, tmp_path, task):
    """Losses are finite and every parameter gets a gradient, so that no rank waits."""
    p, engine = built(run_of_config(f"tiny_{task}_rcnn_R_18_FPN", tiny_root, tmp_path))
    record = {**p.train.records[0], "annotations": []}
    target = images.targets(
        record, 128, 128, mirrored=False, flip_map=p.train.flip, task=p.task
    )
    image = images.to_uint8(images.load_image(record))
    engine.model.train()
    losses = engine.model([image] * 2, [target] * 2)
    total = sum(losses.values())
    total.backward()
    assert torch.isfinite(total)
    assert all(q.grad is not None for q in engine.model.parameters())


def test_a_config_of_other_heads_names_the_engine_that_has_them():
    given = dialect.read("mask_rcnn_R_50_C4_1x", [])
    with pytest.raises(BadInput, match=r"build_resnet_backbone.*--engine detectron2"):
        engine_torchvision.TorchvisionEngine.read_config(given)


def test_a_config_must_state_what_the_engine_reads(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("MODEL:\n  MASK_ON: True\n")
    with pytest.raises(BadInput, match=r"does not state .*_BASE_"):
        dialect.embedded(dialect.read(str(file), []))
