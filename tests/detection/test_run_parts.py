"""A run's folder, its schedule and its trunk's limits, by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from backbench.detection import backbones
from backbench.detection.dialect import Given
from backbench.detection.rcnn.detector import Detector
from backbench.detection.run import DetectionRun, SolverSchedule, count_in_epochs
from backbench.errors import BadInput


def a_run(**more):
    keys = {"given": None, "cfg": None, "task": None, "engine": "torchvision"}
    paths = {"checkpoint": None, "root": Path("data"), "out": Path("out")}
    return DetectionRun(**keys, **paths, **more)


def test_the_first_task_or_machine_writes_the_folder():
    assert a_run().leads
    assert not a_run(machine=1).leads
    assert a_run(machine=1, task_rank=0).leads
    assert not a_run(machine=0, task_rank=1).leads


def test_a_detector_lies_in_the_folder_of_its_training():
    assert a_run().final == Path("out/model_final.pth")
    assert a_run(trained=Path("first")).final == Path("first/model_final.pth")


# ---- The schedule


def a_config(*, precise=False, eval_period=4, **solver):
    keys = {"STEPS": (60, 80), "MAX_ITER": 100, "GAMMA": 0.1, "WARMUP_ITERS": 10}
    keys |= {"WARMUP_FACTOR": 0.2, "WARMUP_METHOD": "linear", "BASE_LR": 0.5}
    keys |= {"LR_SCHEDULER_NAME": "WarmupMultiStepLR", "BASE_LR_END": 0.05}
    keys |= {"CHECKPOINT_PERIOD": 7, "EPOCHS": 0.0, "IMS_PER_BATCH": 4}
    bn = SimpleNamespace(ENABLED=precise, NUM_ITER=30)
    return SimpleNamespace(
        SOLVER=SimpleNamespace(**keys | solver),
        TEST=SimpleNamespace(EVAL_PERIOD=eval_period, PRECISE_BN=bn),
    )


COSINE = {"LR_SCHEDULER_NAME": "WarmupCosineLR"}


@pytest.mark.parametrize(
    ("solver", "factors"),
    [
        ({}, {0: 0.2, 5: 0.6, 10: 1, 59: 1, 60: 0.1, 79: 0.1, 80: 0.01, 99: 0.01}),
        # Steps at the end or behind it are never reached
        ({"STEPS": (60, 100, 120)}, {59: 1, 60: 0.1, 99: 0.1}),
        # A step inside the warm-up has been taken at its end
        ({"STEPS": (5,)}, {0: 0.2, 5: 0.15, 9: 0.11, 10: 0.1}),
        ({"WARMUP_METHOD": "constant"}, {0: 0.2, 9: 0.2, 10: 1}),
        ({"WARMUP_ITERS": 0}, {0: 1}),
        # A warm-up that is longer than the run never ends
        ({"WARMUP_ITERS": 300, "STEPS": ()}, {0: 0.2, 50: 0.6, 75: 0.8}),
        (
            COSINE,
            {
                0: 0.2,
                10: 0.1 + 0.45 * (1 + math.cos(math.pi / 10)),
                50: 0.55,
                75: 0.1 + 0.45 * (1 - math.sqrt(0.5)),
            },
        ),
    ],
)
def test_the_course_of_the_rate(solver, factors):
    schedule = SolverSchedule.of(a_config(**solver))
    found = {step: schedule.factor_at(step) for step in factors}
    assert found == pytest.approx(factors)


def test_a_schedule_has_the_configs_numbers():
    schedule = SolverSchedule.of(a_config())
    assert (schedule.iterations, schedule.save_every) == (100, 7)
    assert (schedule.score_every, schedule.precise_bn) == (4, None)
    assert SolverSchedule.of(a_config(precise=True)).precise_bn == 30
    scored = [step for step in range(1, 13) if schedule.scores_after(step)]
    assert scored == [4, 8, 12]
    never = SolverSchedule.of(a_config(eval_period=0))
    assert not any(never.scores_after(step) for step in range(1, 13))
    always = SolverSchedule.of(a_config(eval_period=1))
    assert all(always.scores_after(step) for step in range(1, 13))


@pytest.mark.parametrize(
    ("solver", "said"),
    [
        (
            {"LR_SCHEDULER_NAME": "x"},
            "LR_SCHEDULER_NAME x: WarmupMultiStepLR or Warmup",
        ),
        ({"WARMUP_METHOD": "x"}, "SOLVER.WARMUP_METHOD x: linear or constant"),
        ({"STEPS": (80, 60)}, r"STEPS \[80, 60\], MAX_ITER 100: no schedule \("),
    ],
)
def test_what_makes_no_schedule_is_named(solver, said):
    with pytest.raises(BadInput, match=said):
        SolverSchedule.of(a_config(**solver))


@pytest.mark.parametrize(
    ("epochs", "images", "expected"),
    [
        (0.0, 1000, (100, (60, 80), 10)),
        (2.0, 100, (50, (30, 40), 5)),
        (2.0, 101, (51, (31, 41), 5)),
        (12.0, 100, (300, (180, 240), 30)),
        (0.01, 10, (1, (1, 1), 0)),
    ],
)
def test_epochs_are_iterations_with_the_schedules_shares(epochs, images, expected):
    cfg = a_config(EPOCHS=epochs)
    count_in_epochs(cfg, images)
    made = cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS
    assert made == expected


# ---- The trunk


@pytest.mark.parametrize(
    ("least", "most", "sides"),
    [
        (800, 1333, (800, 1088)),
        (100, 1000, (128, 160)),
        (800, 1000, (768, 1024)),
        (96, 128, (96, 128)),
    ],
)
def test_a_four_by_three_image_is_padded_to_32(least, most, sides):
    sizes = SimpleNamespace(MIN_SIZE_TEST=least, MAX_SIZE_TEST=most)
    assert backbones.padded_test_size(SimpleNamespace(INPUT=sizes)) == sides


PIXELS = SimpleNamespace(order="RGB", mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


def refused_pixels(**values):
    names = {"order": "INPUT.FORMAT", "mean": "MODEL.PIXEL_MEAN"}
    names["std"] = "MODEL.PIXEL_STD"
    given = Given(Path("a.yaml"), {names[key]: v for key, v in values.items()})
    try:
        backbones.refuse_pixels(given, SimpleNamespace(pixels=PIXELS, name="mine"))
    except BadInput as error:
        return str(error)
    return ""


def test_stated_pixels_are_the_checkpoints_up_to_rounding():
    assert refused_pixels() == ""
    assert (
        refused_pixels(order="RGB", mean=[102, 127.5, 153], std=(51, 63.75, 76.5)) == ""
    )
    assert refused_pixels(mean=[102.009, 127.491, 153.009]) == ""
    assert refused_pixels(order="BGR") == (
        "a.yaml: INPUT.FORMAT is BGR but mine was trained on RGB images"
    )
    for mean in ([102, 127.5, 153.011], [101.989, 127.5, 153], [102, 127.5]):
        assert refused_pixels(mean=mean) == (
            f"a.yaml: MODEL.PIXEL_MEAN is {mean} but mine was trained with [102.0, 127.5, 153.0];"
            " leave it out"
        )
    assert refused_pixels(mean=[102, 127.5, 153], std=[51, 63, 76.5]).startswith(
        "a.yaml: MODEL.PIXEL_STD is [51, 63, 76.5] but"
    )


def refused_trunk(*, arch="", norm="LN", backbone=backbones.SIMPLE, drop=0.0, **solver):
    keys = {"OPTIMIZER": "ADAMW", "LAYER_DECAY": 0.7} | solver
    model = SimpleNamespace(
        TRUNK=SimpleNamespace(ARCH=arch, DROP_PATH=drop),
        BACKBONE=SimpleNamespace(NAME=backbone),
        FPN=SimpleNamespace(NORM=norm),
    )
    cfg = SimpleNamespace(MODEL=model, SOLVER=SimpleNamespace(**keys))
    checkpoint = SimpleNamespace(arch="resnet18", name="mine")
    try:
        backbones._refuse_trunk(cfg, Given(Path("a.yaml"), {}), checkpoint)
    except BadInput as error:
        return str(error)
    return ""


def test_settings_of_a_trunk_have_limits():
    fine = [{"LAYER_DECAY": 1}, {"drop": 0.99}, {"OPTIMIZER": "SGD"}]
    fine += [{"arch": "resnet18"}, {"backbone": backbones.FPN, "norm": ""}, {}]
    assert [refused_trunk(**each) for each in fine] == [""] * len(fine)
    for decay in (0, 1.01, -0.5):
        said = refused_trunk(LAYER_DECAY=decay)
        assert said.endswith(f"LAYER_DECAY must be above 0 and at most 1, not {decay}")
    for drop in (1, -0.1):
        said = refused_trunk(drop=drop)
        assert said.endswith(f"DROP_PATH must be from 0 to below 1, not {drop}")
    assert refused_trunk(OPTIMIZER="x") == "a.yaml: SOLVER.OPTIMIZER x: SGD or ADAMW"
    assert refused_trunk(norm="").endswith("the simple feature pyramid needs one, LN")
    assert refused_trunk(arch="resnet50") == (
        "a.yaml: MODEL.TRUNK.ARCH is resnet50 but mine is resnet18; it is for MODEL.WEIGHTS"
        " random, leave it out"
    )


def refused_keys(backbone, **stated):
    """Refuse keys beside a trunk of a Swin's shape; what comes after them is not looked at."""
    given = Given(Path("a.yaml"), stated)
    cfg = SimpleNamespace(
        MODEL=SimpleNamespace(BACKBONE=SimpleNamespace(NAME=backbone))
    )
    trunk = SimpleNamespace(strides=(4, 8), arch="x", stem="y")
    with pytest.raises(BadInput) as error:
        backbones.refuse(cfg, given, SimpleNamespace(name="mine"), trunk)
    return str(error.value)


@pytest.mark.parametrize(
    ("backbone", "key", "idle", "other"),
    [
        (backbones.FPN, "SOLVER.NESTEROV", (False,), True),
        (backbones.FPN, "SOLVER.BIAS_LR_FACTOR", (1.0,), 2.0),
        (backbones.FPN, "SOLVER.WEIGHT_DECAY_BIAS", (None,), 0.0),
        (backbones.FPN, "MODEL.BACKBONE.FREEZE_AT", (0,), 2),
        (backbones.SIMPLE, "MODEL.RESNETS.NORM", ("SyncBN", "BN"), "FrozenBN"),
        (backbones.SIMPLE, "MODEL.RESNETS.STRIDE_IN_1X1", (False,), True),
        (
            backbones.SIMPLE,
            "MODEL.FPN.IN_FEATURES",
            (["res2", "res3", "res4", "res5"], ("res2", "res3", "res4", "res5")),
            ["res4"],
        ),
        (backbones.RESNET_FPN, "MODEL.TRUNK.FROZEN", (False,), True),
        (backbones.RESNET_FPN, "MODEL.TRUNK.DROP_PATH", (0.0,), 0.1),
        (backbones.RESNET_FPN, "MODEL.TRUNK.MAP_NORM", (False,), True),
        (backbones.RESNET_FPN, "SOLVER.OPTIMIZER", ("SGD",), "ADAMW"),
        (backbones.RESNET_FPN, "SOLVER.LAYER_DECAY", (1.0,), 0.5),
    ],
)
def test_keys_that_decide_nothing_keep_their_idle_values(backbone, key, idle, other):
    for value in idle:
        assert "has maps of stride 4, 8:" in refused_keys(backbone, **{key: value})
    said = refused_keys(backbone, **{key: other})
    start = f"a.yaml: {key} {other!r} would decide nothing with MODEL.BACKBONE.NAME"
    assert said.startswith(f"{start} {backbone}; it must be {idle[0]!r}")


class FourMaps(nn.Module):
    """A trunk whose maps are the image at four strides; the first is the largest by far."""

    strides = (4, 8, 16, 32)

    def stages(self, x):
        scale = (-100.0, 2.0, 1.0, 1.0)
        maps = []
        for stride, factor in zip(self.strides, scale, strict=True):
            made = torch.ones(2, 1, *(side // stride for side in x.shape[-2:]))
            maps.append(factor * made)
        return maps


def checked(change):
    """Compare the trunk's maps with those of a detector that `change` has changed."""
    engine = SimpleNamespace(name="torchvision", device="cpu")
    asked = []

    def stages(x):
        asked.append(tuple(x.shape))
        maps = [m.double() for m in FourMaps().stages(x)]
        change(maps)
        return maps

    engine.stages = stages
    worst = backbones.check_features(
        SimpleNamespace(name="mine"), FourMaps(), engine, (64, 96)
    )
    assert asked == [(2, 3, 64, 96)]
    return worst


def test_maps_may_differ_by_a_hundred_thousandth_of_their_largest_value():
    def moved(place, by):
        return lambda maps: maps[place][1, 0, 0, 0].add_(by)

    assert checked(lambda maps: None) == 0
    assert checked(moved(0, -0.9e-3)) == pytest.approx(0.9e-5, rel=1e-3)
    assert checked(moved(1, 0.8e-5)) == pytest.approx(0.4e-5, rel=1e-3)

    def two(maps):
        maps[1] += 1.6e-5
        maps[3] -= 0.2e-5

    assert checked(two) == pytest.approx(0.8e-5, rel=1e-3)
    for place, by, name, said in (
        (0, 1.1e-3, "C2", "1.1e-05"),
        (2, -1.1e-5, "C4", "1.1e-05"),
        (3, math.nan, "C5", "nan"),
    ):
        with pytest.raises(BadInput) as error:
            checked(moved(place, by))
        assert str(error.value) == (
            f"torchvision: the loaded {name} is off from mine's by {said} of its size; weights or"
            " stride did not arrive, nothing was trained"
        )

    def cut(maps):
        maps[1] = maps[1][:, :, :-1]

    with pytest.raises(BadInput) as error:
        checked(cut)
    assert str(error.value) == (
        "torchvision: C3 of the detector is (2, 1, 7, 12), the checkpoint's (2, 1, 8, 12)"
    )


def test_stochastic_depth_rises_from_the_first_block_to_the_last():
    class DroppingBlock(nn.Module):
        def __init__(self, *names):
            super().__init__()
            for name in names:
                setattr(self, name, nn.Identity())

    both = ("drop_path1", "drop_path2")
    trunk = nn.Sequential(
        DroppingBlock(*both),
        DroppingBlock(),
        DroppingBlock("drop_path"),
        DroppingBlock(*both),
    )
    backbones.set_drop_paths(trunk, 0.4)
    paths = [m for m in trunk.modules() if isinstance(m, backbones.DropPath)]
    assert [path.drop_prob for path in paths] == pytest.approx([0.2, 0.4, 0.4])
    assert type(trunk[0].drop_path1) is type(trunk[0].drop_path2) is nn.Identity
    none = nn.Sequential(DroppingBlock())
    none.arch = "resnet18"
    with pytest.raises(BadInput) as error:
        backbones.set_drop_paths(none, 0.4)
    said = "MODEL.TRUNK.DROP_PATH 0.4: resnet18 has no paths to drop; say 0.0"
    assert str(error.value) == said


def test_a_dropped_branch_is_zero_and_the_others_make_up_for_it():
    path = backbones.DropPath(0.25)
    x = torch.ones(400, 2, 3)
    path.eval()
    assert torch.equal(path(x), x)
    path.train()
    torch.manual_seed(0)
    rows = path(x).flatten(1)
    assert rows.unique().tolist() == [0, pytest.approx(4 / 3)]
    assert (rows == rows[:, :1]).all()
    assert 60 < (rows[:, 0] == 0).sum() < 140
    # Each image's own generator decides, whatever else is drawn

    def generators():
        return [torch.Generator().manual_seed(n) for n in range(400)]

    path.generators = generators()
    first = path(x)
    torch.manual_seed(9)
    path.generators = generators()[::-1]
    assert torch.equal(path(x).flip(0), first)


class TwoBlocks(nn.Module):
    """A trunk of two layers with a token that does not decay."""

    strides = widths = (16,)

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 2))
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def depths(self):
        return {"token": 0, "first.weight": 1, "first.bias": 1} | dict.fromkeys(
            ("second.weight", "second.bias"), 2
        )

    def undecayed(self):
        return {"token"}


def grouped(body, *, backbone=backbones.SIMPLE, optimizer="ADAMW", **solver):
    keys = {"BASE_LR": 0.5, "LAYER_DECAY": 0.5, "BIAS_LR_FACTOR": 1.0}
    keys |= {"WEIGHT_DECAY": 0.1, "WEIGHT_DECAY_NORM": 0.0, "MOMENTUM": 0.8}
    cfg = SimpleNamespace(
        MODEL=SimpleNamespace(BACKBONE=SimpleNamespace(NAME=backbone)),
        SOLVER=SimpleNamespace(OPTIMIZER=optimizer, **keys | solver),
    )
    model = nn.Sequential(body.trunk, nn.LayerNorm(2), nn.Linear(2, 3))
    return model, backbones.optimizer(model, body, cfg)


def table_of(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    table = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            table[names[id(parameter)]] = (group["lr"], group["weight_decay"])
    return table


def test_rates_fall_towards_the_first_layer_and_vectors_do_not_decay():
    body = SimpleNamespace(trunk=TwoBlocks(), frozen=False)
    model, optimizer = grouped(body)
    assert table_of(model, optimizer) == {
        "0.token": (0.0625, 0.0),
        "0.first.weight": (0.125, 0.1),
        "0.first.bias": (0.125, 0.0),
        "0.second.weight": (0.25, 0.1),
        "0.second.bias": (0.25, 0.0),
        "1.weight": (0.5, 0.0),
        "1.bias": (0.5, 0.0),
        "2.weight": (0.5, 0.1),
        "2.bias": (0.5, 0.0),
    }
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.8, 0.999)
    # The heads' own come last
    assert optimizer.param_groups[-1]["lr"] == optimizer.defaults["lr"] == 0.5


def test_detectron2s_backbones_have_a_rate_for_biases_and_decay_them():
    body = SimpleNamespace(trunk=TwoBlocks(), frozen=True)
    body.trunk.first.requires_grad_(False)
    model, optimizer = grouped(
        body, backbone=backbones.RESNET_FPN, optimizer="SGD", BIAS_LR_FACTOR=2.0
    )
    assert table_of(model, optimizer) == {
        "0.token": (0.5, 0.1),
        "0.second.weight": (0.5, 0.1),
        "0.second.bias": (1.0, 0.1),
        "1.weight": (0.5, 0.0),
        "1.bias": (1.0, 0.0),
        "2.weight": (0.5, 0.1),
        "2.bias": (1.0, 0.1),
    }
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["momentum"] == 0.8


def test_every_part_that_draws_has_a_name_for_its_generators():
    paths = [backbones.DropPath(rate) for rate in (0.1, 0.2, 0.3)]
    detector = SimpleNamespace(
        rpn=SimpleNamespace(fg_bg_sampler="of anchors"),
        roi_heads=SimpleNamespace(fg_bg_sampler="of proposals"),
        modules=lambda: [nn.Linear(2, 2), *paths],
    )
    assert Detector.samplers(detector) == {
        "rpn": "of anchors",
        "roi": "of proposals",
        "drop path 0": paths[0],
        "drop path 1": paths[1],
        "drop path 2": paths[2],
    }
