"""Tests trunks of any kind under both engines: that they arrive whole, are trained, or are refused;
and the name of a run's protocol."""

import dataclasses

import pytest
import timm
import torch
from support.detection_runs import (
    ENGINES,
    built,
    near_its_checkpoint,
    needs_detectron2,
    overrides,
    rates_and_decays,
    run_of_config,
)

from backbench.detection import backbones, dialect, train_net
from backbench.detection.evaluate import AP_KINDS
from backbench.detection.protocol import STATED, protocol
from backbench.detection.task_rows import DETECTION_TASKS, task_of
from backbench.errors import BadInput
from backbench.images.preprocess import IMAGENET_MEAN, IMAGENET_STD
from backbench.recipes import config as recipes
from backbench.tasks import DETECTION
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint

FPN = "tiny_faster_rcnn_ConvNeXt_FPN"
SIMPLE = "tiny_faster_rcnn_ViT_SFP"
SMALL = "timm:vit_tiny_patch16_224,depth=2,embed_dim=32,num_heads=2,init_values=1,reg_tokens=2"
VIT = f"{SMALL},img_size=64,pos=aa"
VIT14 = f"{SMALL},img_size=56,patch_size=14,pos=aa"
CONVNEXT = "timm:test_convnext"
TINY = "tiny_faster_rcnn_R_18_FPN"


def spread(arch, seed=0):
    """Make a checkpoint in which every tensor matters, as scales, tokens and biases begin near 0."""
    draw = torch.Generator().manual_seed(seed)
    trunk = archs.build_trunk(arch)
    with torch.no_grad():
        for value in trunk.parameters():
            scale = 0.3 if value.dim() < 2 else 0.03
            value.add_(torch.randn(value.shape, generator=draw) * scale)
    return Checkpoint(arch=arch, method="test", state_dict=trunk.state_dict())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function from a trunk's name to its file, which is made once."""
    folder = tmp_path_factory.mktemp("trunks")
    known = {}

    def file(arch):
        if arch not in known:
            known[arch] = folder / f"{len(known)}.safetensors"
            spread(arch).save(known[arch])
        return known[arch]

    return file


def run_of(tiny_root, out, checkpoints, arch, *words, name=None, engine="torchvision"):
    name = name or (FPN if arch == CONVNEXT else SIMPLE)
    return run_of_config(
        name, tiny_root, out, words, engine=engine, checkpoint=checkpoints(arch)
    )


def body_of(engine):
    return next(m for m in engine.model.modules() if isinstance(m, backbones.TrunkMaps))


def of_timm(arch, state, x):
    """Compute the maps that timm's own model gives."""
    name, *options = arch.removeprefix("timm:").split(",")
    if arch == CONVNEXT:
        # timm's pyramids are `features_only`; their names differ, and they have no head.
        model = timm.create_model(name, features_only=True).eval()
        renamed = {}
        for key, value in state.items():
            if not key.startswith("head."):
                key_of_timm = key.replace("stages.", "stages_").replace(
                    "stem.", "stem_"
                )
                renamed[key_of_timm] = value
        model.load_state_dict(renamed)
        return model(x)
    # With a dynamic size, timm's transformers resize position embeddings as by our rule `aa`.
    keywords = {"num_classes": 0, "dynamic_img_size": True}
    for option in options:
        key, value = option.split("=")
        if key != "pos":
            keywords[key] = int(value)
    model = timm.create_model(name, **keywords).eval()
    model.load_state_dict(dict(state))
    patch, _ = model.patch_embed.patch_size
    height, width = x.shape[-2] // patch, x.shape[-1] // patch
    patches = model.forward_features(x)[:, model.num_prefix_tokens :]
    return [patches.transpose(1, 2).reshape(len(x), -1, height, width)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("arch", [CONVNEXT, VIT, VIT14])
def test_the_trunk_arrives_whole(tiny_root, tmp_path, checkpoints, engine, arch):
    """Its maps at detection's size are timm's own, and a tensor that did not arrive is found."""
    run = run_of(tiny_root, tmp_path, checkpoints, arch, engine=engine)
    p, built_engine = built(run)
    assert near_its_checkpoint(p, built_engine) <= backbones.TOLERANCE
    # 1. The maps are timm's. For patch 14, 96 x 128 pixels are scaled to 84 x 112.
    x = torch.randn(1, 3, 96, 128, generator=torch.Generator().manual_seed(1))
    seen = x
    if arch == VIT14:
        seen = torch.nn.functional.interpolate(
            x, size=(84, 112), mode="bilinear", antialias=True
        )
    with torch.no_grad():
        reference = of_timm(arch, p.checkpoint.state_dict, seen)
    found = built_engine.stages(x)
    sides = [(6, 8)]
    if arch == CONVNEXT:
        sides = [(24, 32), (12, 16), (6, 8), (3, 4)]
    assert [tuple(m.shape[-2:]) for m in found] == sides
    for mine, theirs in zip(found, reference, strict=True):
        assert float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-5
    # 2. The check finds a parameter that is zero, of kinds that other wrappers drop in silence.
    trunk = body_of(built_engine).trunk
    last = {name.split(".")[-1]: value for name, value in trunk.named_parameters()}
    for name in ("gamma", "reg_token", "pos_embed", "cls_token"):
        if name not in last:
            continue
        value = last[name]
        kept = value.detach().clone()
        with torch.no_grad():
            value.zero_()
        with pytest.raises(BadInput, match="is off from"):
            near_its_checkpoint(p, built_engine)
        with torch.no_grad():
            value.copy_(kept)


@pytest.mark.parametrize("patch", [8, 14, 16])
def test_a_place_of_the_image_is_its_place_on_the_map(patch):
    """Every patch size gives a map of stride 16 in pixels of boxes."""
    arch = f"{SMALL},img_size={4 * patch},patch_size={patch},pos=size"
    trunk = spread(arch).backbone().eval()
    for row, column in ((0, 0), (2, 5), (3, 7)):
        x = torch.zeros(2, 3, 64, 128)
        x[1, :, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = 3.0
        with torch.no_grad():
            (found,) = trunk.stages(backbones.scaled(x, trunk))
        assert found.shape[-2:] == (4, 8)
        changed = (found[1] - found[0]).square().sum(0)
        assert divmod(int(changed.argmax()), 8) == (row, column)


@pytest.mark.parametrize("engine", ENGINES)
def test_rates_and_decay_by_layer(tiny_root, tmp_path, checkpoints, engine):
    """As in ViTDet, each layer has 0.75 of the next one's rate, and no norm, bias, scale, token or
    position embedding decays."""
    run = run_of(tiny_root, tmp_path, checkpoints, VIT, engine=engine)
    p, e = built(run)
    rates = {}
    heads = set()
    for name, (rate, decay) in rates_and_decays(e).items():
        relative = rate / p.cfg.SOLVER.BASE_LR
        if ".trunk." in name:
            rates[name.split("trunk.model.")[1]] = (relative, decay)
        else:
            heads.add((relative, decay))
    assert rates["patch_embed.proj.weight"] == (pytest.approx(0.75**3), 0.05)
    for name in ("pos_embed", "cls_token", "reg_token"):
        assert rates[name] == (pytest.approx(0.75**3), 0.0)
    assert rates["blocks.0.attn.qkv.weight"] == (pytest.approx(0.75**2), 0.05)
    assert rates["blocks.0.ls1.gamma"] == (pytest.approx(0.75**2), 0.0)
    assert rates["blocks.1.mlp.fc1.weight"] == (pytest.approx(0.75), 0.05)
    assert rates["norm.weight"] == (pytest.approx(0.75), 0.0)
    assert heads == {(1.0, 0.05), (1.0, 0.0)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_or_trained(tiny_root, tmp_path, checkpoints, engine, frozen):
    words = ("MODEL.TRUNK.FROZEN", str(frozen), "SOLVER.WARMUP_ITERS", "0")
    run = run_of(tiny_root, tmp_path, checkpoints, CONVNEXT, *words, engine=engine)
    p, e = built(run)
    before = {name: value.clone() for name, value in e.model.state_dict().items()}
    e.start(p.train.records, 0, 1)
    e.model.train()
    e.step()
    for name, value in e.model.state_dict().items():
        if ".trunk." in name:
            moved = not torch.equal(value, before[name])
            # No map depends on the head's norm.
            assert moved != (frozen or ".head.norm." in name), name
    body = body_of(e)
    assert body.training
    assert body.trunk.training != frozen


@dataclasses.dataclass(frozen=True)
class HeadCase:
    """A task with a head of its own, on a trunk of ours."""

    task: str
    field: str  # of its detections
    arch: str
    backbone: str
    norm: str


HEAD_CASES = [
    HeadCase("mask", "segmentation", CONVNEXT, backbones.FPN, ""),
    HeadCase("keypoint", "keypoints", VIT, backbones.SIMPLE, "LN"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", HEAD_CASES, ids=lambda case: case.task)
def test_masks_and_keypoints_too(tiny_root, tmp_path, checkpoints, engine, case):
    words = overrides(
        {
            "MODEL.BACKBONE.NAME": case.backbone,
            "MODEL.FPN.NORM": case.norm,
            "SOLVER.OPTIMIZER": "ADAMW",
            "SOLVER.WARMUP_ITERS": 0,
            "SOLVER.BASE_LR": 0.0001,
            "TEST.PRECISE_BN.ENABLED": False,
        }
    )
    name = f"tiny_{case.task}_rcnn_R_18_FPN"
    run = run_of(
        tiny_root, tmp_path, checkpoints, case.arch, *words, name=name, engine=engine
    )
    p, e = built(run)
    assert near_its_checkpoint(p, e) <= backbones.TOLERANCE
    before = {key: value.clone() for key, value in e.model.named_parameters()}
    e.start(p.train.records, 0, 1)
    e.model.train()
    losses = e.step()
    assert f"loss_{case.task}" in losses
    assert all(value.isfinite() for value in losses.values())
    for key, value in e.model.named_parameters():
        assert value.isfinite().all()
        assert torch.equal(value, before[key]) != value.requires_grad, key
    e.model.eval()
    found = e.predict(p.val.records[0])
    assert found
    assert all(case.field in d for d in found)


def test_stochastic_depth_in_training_alone(tiny_root, tmp_path, checkpoints):
    words = ("MODEL.TRUNK.DROP_PATH", "0.5")
    _, e = built(run_of(tiny_root, tmp_path, checkpoints, VIT, *words))
    body = e.model.backbone.body
    blocks = body.trunk.model.blocks
    assert [getattr(b.drop_path2, "drop_prob", 0.0) for b in blocks] == [0.0, 0.5]
    x = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(body.eval().stages(x)[0], body.eval().stages(x)[0])
        assert not torch.equal(body.train().stages(x)[0], body.train().stages(x)[0])


@pytest.mark.parametrize(
    ("arch", "name", "words"),
    [
        (f"{SMALL},img_size=64", SIMPLE, "64 x 64 pixels alone.*pos=RULE"),
        (VIT, FPN, "is plain: .* must be build_trunk_simple_fpn_backbone"),
        (VIT, TINY, "is plain: .* must be build_trunk_simple_fpn_backbone"),
        (CONVNEXT, SIMPLE, "is hierarchical: .* must be build_trunk_fpn_backbone"),
    ],
)
def test_a_trunk_of_another_kind_is_refused(
    tiny_root, tmp_path, checkpoints, *, arch, name, words
):
    run = run_of(tiny_root, tmp_path, checkpoints, arch, name=name)
    with pytest.raises(BadInput, match=words) as caught:
        train_net.prepare(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("MODEL.TRUNK.ARCH", CONVNEXT, "ARCH is timm:test_convnext but"),
        ("SOLVER.BIAS_LR_FACTOR", "2.0", "BIAS_LR_FACTOR 2.0 would decide nothing"),
        ("MODEL.RESNETS.NORM", "", "RESNETS.NORM is ''"),
        ("SOLVER.OPTIMIZER", "ADAM", "OPTIMIZER ADAM: SGD or ADAMW"),
        ("SOLVER.LAYER_DECAY", "0.0", "LAYER_DECAY must be above 0"),
        ("MODEL.FPN.NORM", "", "the simple feature pyramid needs one"),
    ],
)
def test_a_value_that_does_not_go_with_a_plain_trunk_is_refused(
    tiny_root, tmp_path, checkpoints, *, key, value, words
):
    with pytest.raises(BadInput, match=words) as caught:
        run = run_of(tiny_root, tmp_path, checkpoints, VIT, key, value, name=SIMPLE)
        train_net.prepare(run)
    assert "\n" not in str(caught.value)


def test_other_refusals(tiny_root, tmp_path):
    random = ("MODEL.WEIGHTS", "random")
    with pytest.raises(BadInput, match=r"say MODEL.TRUNK.ARCH"):
        train_net.prepare(run_of_config(SIMPLE, tiny_root, tmp_path, random))
    with pytest.raises(BadInput, match=r"LAYER_DECAY 0.5 would decide nothing"):
        given = (*random, "SOLVER.LAYER_DECAY", "0.5")
        train_net.prepare(run_of_config(TINY, tiny_root, tmp_path, given))
    # Positions that rotate need no rule
    rotating = archs.build_trunk("timm:vit_small_patch16_dinov3_qkvb,depth=1")
    backbones.refuse_shape(rotating, backbones.SIMPLE)


@needs_detectron2
def test_detectron2_pads_what_a_transformer_sees(tiny_root, tmp_path, checkpoints):
    """Its own simple pyramid does not, and then makes levels of odd sizes."""
    run = run_of(tiny_root, tmp_path, checkpoints, VIT14, engine="detectron2")
    _, e = built(run)
    image = torch.zeros(3, 100, 70, dtype=torch.uint8)
    images = e.model.preprocess_image([{"image": image}])
    assert images.tensor.shape == (1, 3, 128, 96)
    with torch.no_grad():
        levels = e.model.backbone(images.tensor)
    sides = [tuple(level.shape[-2:]) for level in levels.values()]
    assert sides == [(32, 24), (16, 12), (8, 6), (4, 3), (2, 2)]


def test_protocol_names():
    def name(recipe, *opts):
        return protocol(dialect.read(recipe, opts))

    assert name("faster_rcnn_R_50_FPN_1x") == "detection-1x-v1"
    words = ("SEED", "3", "SOLVER.CHECKPOINT_PERIOD", "7")
    assert name("keypoint_rcnn_R_50_FPN_1x", *words) == "detection-1x-v1"
    assert name("demo_mask_rcnn_R_18_FPN") == "detection-demo-v1"
    assert name(TINY) == "detection-tiny-v1"
    # Another trunk is another row; a frozen trunk has a name that says so.
    vit = "mask_rcnn_ViT_B_SFP_1x"
    assert name(vit, "MODEL.TRUNK.ARCH", "timm:test_vit") == "detection-vit-b-1x-v1"
    frozen = ("MODEL.TRUNK.FROZEN", "True")
    assert name(vit, *frozen) == "detection-vit-b-1x-frozen-v1"
    # So has mixed precision.
    on = ("SOLVER.AMP.ENABLED", "True")
    off = ("SOLVER.AMP.ENABLED", "False")
    assert name("mask_rcnn_R_50_FPN_1x", *on) == "detection-1x-fp16-v1"
    assert name("mask_rcnn_R_50_FPN_1x", *off) == "detection-1x-v1"
    bf16 = ("SOLVER.AMP.PRECISION", "bf16")
    assert name(vit, *frozen, *on, *bf16) == "detection-vit-b-1x-frozen-bf16-v1"
    # Any other value is another protocol.
    assert "1x" not in name(vit, "MODEL.TRUNK.DROP_PATH", "0.1")
    assert "1x" not in name(vit, "MODEL.TRUNK.MAP_NORM", "True")
    assert "1x" not in name(vit, "SOLVER.LAYER_DECAY", "0.9")
    assert "1x" not in name(vit, "SOLVER.OPTIMIZER", "SGD")
    assert "1x" not in name(vit, "MODEL.BACKBONE.NAME", "build_trunk_fpn_backbone")
    changed = name("mask_rcnn_R_50_FPN_1x", "SOLVER.BASE_LR", "0.01")
    assert changed.startswith("detection-") and "1x" not in changed
    assert name("mask_rcnn_R_50_FPN_1x", "MODEL.FPN.NORM", "BN") != changed


CONFIGS = sorted((recipes.configs_dir() / dialect.KIND).glob("[!_]*.yaml"))


def test_every_shipped_config_has_the_name_that_it_states():
    for path in CONFIGS:
        stated = f"{STATED}{protocol(dialect.read(path.stem, []))}"
        assert stated in path.read_text().splitlines(), path.stem


def test_detectron2_by_itself_reads_the_right_pixels():
    """Each shipped config of its own trunks, read by Detectron2 alone, has RGB images and ImageNet's
    statistics."""
    pytest.importorskip(
        "detectron2", reason="Detectron2 is not installed: `make detectron2`"
    )
    from detectron2.config import get_cfg

    mean = pytest.approx([255 * v for v in IMAGENET_MEAN], abs=0.01)
    std = pytest.approx([255 * v for v in IMAGENET_STD], abs=0.01)
    for path in CONFIGS:
        if "_R_" not in path.stem:
            continue
        cfg = get_cfg()
        cfg.merge_from_file(str(path))
        assert cfg.INPUT.FORMAT == "RGB"
        assert mean == cfg.MODEL.PIXEL_MEAN
        assert std == cfg.MODEL.PIXEL_STD


def test_every_detection_task_has_its_row_and_its_switch():
    assert tuple(DETECTION_TASKS) == DETECTION
    for name, task in DETECTION_TASKS.items():
        assert task.name == name
        assert task_of(dialect.read(f"{name}_R_50_FPN_1x", [])).name == name
        assert set(task.aps) <= set(AP_KINDS)
    given = dialect.read("mask_rcnn_R_50_FPN_1x", ["MODEL.KEYPOINT_ON", "True"])
    with pytest.raises(BadInput, match="MASK_ON and KEYPOINT_ON together; choose one"):
        task_of(given)
