"""Optimisers and schedules against plain restatements of their papers."""

import inspect

import pytest
import torch
from support import tiny_pretraining
from torch import nn

from backbench.errors import BadInput
from backbench.pretrain import optim
from backbench.pretrain.recipe import Data, Optim
from backbench.weights import archs


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )


def gradients(module, step):
    torch.manual_seed(100 + step)
    for p in module.parameters():
        p.grad = torch.randn_like(p) * 0.1


def larc_sgd(params, buffers, *, lr, momentum, weight_decay, trust, clip, vectors):
    """LARC around torch's SGD, one tensor at a time; LORAC's code runs it with clip=False. Without
    `vectors`, tensors of one dimension are neither scaled nor decayed."""
    for p, buffer in zip(params, buffers):
        size, slope = p.norm(), p.grad.norm()
        g = p.grad
        if size != 0 and slope != 0 and (vectors or p.ndim > 1):
            rate = trust * size / (slope + weight_decay * size + 1e-8)
            if clip:
                rate = min(rate / lr, 1)
            g = (g + weight_decay * p) * rate
        buffer.mul_(momentum).add_(g)
        p.sub_(lr * buffer)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize(
    ("lr", "trust", "clip", "vectors"),
    [
        (1.8, 0.001, False, True),
        (0.01, 0.02, True, True),
        (1.8, 0.02, True, False),
    ],
)
def test_lars_is_larc(fused, lr, trust, clip, vectors):
    """The batch norm bias starts at 0: its first step is raw, as the paper's code does it."""
    module, other = network(), network()
    given = Optim(lr=lr, weight_decay=1e-2, decay_1d=vectors, adapt_1d=vectors)
    groups = optim.parameter_groups(module, given)
    optimizer = optim.LARS(groups, lr, trust=trust, clip=clip, fused=fused)
    params = [p.data for p in other.parameters()]
    buffers = [torch.zeros_like(p) for p in params]
    for step in range(5):
        gradients(module, step)
        gradients(other, step)
        for p, full in zip(params, other.parameters()):
            p.grad = full.grad
        optimizer.step()
        larc_sgd(
            params,
            buffers,
            lr=lr,
            momentum=0.9,
            weight_decay=1e-2,
            trust=trust,
            clip=clip,
            vectors=vectors,
        )
        for have, want in zip(module.parameters(), other.parameters()):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_lars_without_adaptation_is_torchs_sgd(fused):
    """A group without any gradient is passed over, and so is a tensor without one."""
    module, other = network(), network()
    settings = {"weight_decay": 1e-2, "adapt": False}
    groups = [
        {"params": [module[0].weight, module[0].bias], **settings},
        {"params": [p for layer in module[1:] for p in layer.parameters()], **settings},
    ]
    optimizer = optim.LARS(groups, 0.3, momentum=0.8, fused=fused)
    theirs = torch.optim.SGD(other.parameters(), 0.3, momentum=0.8, weight_decay=1e-2)
    for step in range(3):
        for each in (module, other):
            gradients(each, step)
            each[0].weight.grad = each[0].bias.grad = each[4].bias.grad = None
        optimizer.step()
        theirs.step()
    for have, want in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)
    assert torch.equal(module[0].weight, network()[0].weight)
    assert not torch.equal(module[4].weight, network()[4].weight)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_lars_at_rest_fills_its_buffer_at_the_limit_of_its_rate(fused):
    """In a warm-up from 0: nothing moves, and the layer's rate is at most the rate."""
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    p.grad = torch.tensor([0.5, 0.25])
    group = {"params": [p], "weight_decay": 0.1, "adapt": True}
    optimizer = optim.LARS([group], 0.0, clip=True, trust=0.02, fused=fused)
    optimizer.step()
    assert p.tolist() == [3, 4]
    buffer = optimizer.state[p]["momentum_buffer"]
    torch.testing.assert_close(buffer, torch.tensor([0.8, 0.65]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_torchs_optimisers_have_the_recipes_settings(name, kind):
    given = Optim(
        name=name, lr=0.2, momentum=0.7, betas=(0.8, 0.95), reference_batch=256
    )
    for precision, fused in (("fp32", True), ("fp16", False)):
        config = tiny_pretraining.config(
            optim=given, batch_size=512, precision=precision
        )
        optimizer = optim.of_recipe(config, network())
        assert type(optimizer) is kind
        (group,) = optimizer.param_groups
        assert group["lr"] == pytest.approx(0.4)
        assert group["fused"] is fused
        if name == "sgd":
            assert group["momentum"] == 0.7
        else:
            assert group["betas"] == (0.8, 0.95)


def test_lars_has_the_recipes_settings():
    given = Optim(name="lars", lr=0.2, momentum=0.7, trust=0.02, clip=True)
    optimizer = optim.of_recipe(tiny_pretraining.config(optim=given), network())
    assert type(optimizer) is optim.LARS
    (group,) = optimizer.param_groups
    named = {key: group[key] for key in ("lr", "momentum", "trust", "clip", "adapt")}
    assert named == {
        "lr": 0.2,
        "momentum": 0.7,
        "trust": 0.02,
        "clip": True,
        "adapt": True,
    }


def test_parameter_groups_split_vectors_only_when_they_differ():
    module = network()
    frozen = module[4].weight.requires_grad_(False)
    (all_in_one,) = optim.parameter_groups(module, Optim(lr=1.0))
    assert len(all_in_one["params"]) == 5
    assert not any(p is frozen for p in all_in_one["params"])
    settings = Optim(lr=1.0, decay_1d=False, adapt_1d=False, lr_1d=0.0048)
    matrices, vectors = optim.parameter_groups(module, settings)
    assert {p.ndim for p in matrices["params"]} == {4}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert vectors["weight_decay"] == 0.0
    assert vectors["adapt"] is False
    assert vectors["peak"] == 0.0048
    assert matrices["weight_decay"] == 1e-4


def rates_of(module, **settings):
    """LearningRates of a recipe of 20 epochs of 10 steps, batches of 512."""
    config = tiny_pretraining.config(optim=Optim(**settings), epochs=20, batch_size=512)
    return optim.LearningRates(optim.of_recipe(config, module), config, 10)


def test_a_group_with_its_own_peak_follows_the_same_curve():
    rates = rates_of(
        network(), lr=0.2, lr_1d=0.0048, reference_batch=256, final_lr=0.02
    )
    for step, share in ((0, 1.0), (100, 0.55), (200, 0.1)):
        assert rates.set(step) == rates.at(step) == pytest.approx(0.4 * share)
        have = [group["lr"] for group in rates.optimizer.param_groups]
        assert have == pytest.approx([0.4 * share, 0.0096 * share])


@pytest.mark.parametrize("inside", [False, True], ids=["simsiam", "cllr on simsiam"])
def test_a_part_of_constant_rate_keeps_its_peak(inside):
    """SimSiam's --fix-pred-lr: the predictor has the peak in every step, inside CLLR, too."""
    module = nn.ModuleDict({"backbone": nn.Linear(3, 2), "predictor": nn.Linear(2, 2)})
    if inside:
        module = nn.ModuleDict({"inner": module})
    rates = rates_of(
        module,
        lr=0.05,
        reference_batch=256,
        constant_lr=("predictor",),
        momentum=0.0,
        weight_decay=0.0,
        warmup_epochs=2,
    )
    for step, share in ((0, 0.0), (10, 0.5), (20, 1.0), (110, 0.5), (200, 0.0)):
        assert rates.set(step) == pytest.approx(0.1 * share)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        gradients(module, step)
        rates.optimizer.step()
        for name, p in module.named_parameters():
            rate = 0.1 if "predictor" in name else 0.1 * share
            torch.testing.assert_close(p.detach(), before[name] - rate * p.grad)
    with pytest.raises(
        BadInput, match="has no part 'predictr'; did you mean 'predictor'"
    ):
        rates_of(module, lr=0.05, constant_lr=("predictr",))


def test_biases_alone_are_trained_where_the_peak_is_zero():
    """With `lr: 0`, `lr_1d` must not be divided by the peak."""
    module = network()
    rates = rates_of(module, lr=0.0, lr_1d=0.1, warmup_epochs=2)
    before = [p.clone() for p in module.parameters()]
    gradients(module, 0)
    assert rates.set(10) == 0.0
    used = [group["lr"] for group in rates.optimizer.param_groups]
    assert used == [0.0, pytest.approx(0.05)]
    rates.optimizer.step()
    for p, old in zip(module.parameters(), before):
        assert torch.equal(p, old) == (p.ndim > 1)
    with pytest.raises(ValueError, match=r"lr is 0, .* final_lr 0\.1 must be 0 too"):
        rates_of(module, lr=0.0, final_lr=0.1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "cosine", "final_lr": 0.01}, {0: 1.0, 100: 0.505, 199: 0.01006}),
        ({"warmup_epochs": 2, "warmup_lr": 0.1}, {0: 0.1, 10: 0.55, 20: 1.0, 110: 0.5}),
        ({"schedule": "cosine_epoch"}, {0: 1.0, 9: 1.0, 10: 0.99384, 109: 0.5}),
        (
            {"schedule": "step", "milestones": (12, 16)},
            {0: 1, 119: 1, 120: 0.1, 160: 0.01},
        ),
        ({"schedule": "constant"}, {0: 1.0, 199: 1.0}),
        # Behind the end the rate stays, and a warm-up may take the whole run
        ({"final_lr": 0.01}, {200: 0.01, 260: 0.01}),
        ({"warmup_epochs": 20}, {50: 0.25, 199: 0.995, 200: 1.0}),
        (
            {"schedule": "cosine_epoch", "warmup_epochs": 2},
            {9: 0.0, 10: 0.5, 19: 0.5, 20: 1.0},
        ),
        (
            {"schedule": "step", "milestones": (0.5, 12), "gamma": 0.2},
            {4: 1, 5: 0.2, 120: 0.04},
        ),
    ],
)
def test_the_course_of_the_rates(settings, expected):
    rates = rates_of(network(), lr=1.0, **settings)
    assert {step: rates.share(step) for step in expected} == pytest.approx(
        expected, abs=1e-5
    )


def test_a_trunks_tokens_and_positions_go_with_the_biases():
    """The trunk says which they are, wherever it stands in the method."""
    arch = "timm:vit_tiny_patch16_224,depth=1,embed_dim=24,img_size=32,num_heads=2,patch_size=8"
    method = nn.ModuleDict(
        {"backbone": archs.build_trunk(arch), "head": nn.Linear(24, 3)}
    )
    groups = optim.parameter_groups(
        method, Optim(lr=1.0, weight_decay=0.1, decay_1d=False)
    )
    decay = {}
    for group in groups:
        for p in group["params"]:
            decay[id(p)] = group["weight_decay"]
    found = {name: decay[id(p)] for name, p in method.named_parameters()}
    assert len(found) == len(decay)
    spared = {name for name, value in found.items() if value == 0.0}
    tokens = {"backbone.model.cls_token", "backbone.model.pos_embed"}
    assert {*tokens, "head.bias"} <= spared
    assert found["head.weight"] == 0.1
    assert found["backbone.model.blocks.0.attn.qkv.weight"] == 0.1


def test_what_a_recipe_leaves_out_is_the_fields_custom():
    left_out = Optim(lr=1.0)
    adam = inspect.signature(torch.optim.Adam).parameters
    assert left_out.betas == adam["betas"].default
    rates = (left_out.name, left_out.schedule, left_out.gamma, left_out.reference_batch)
    assert rates == ("sgd", "cosine", 0.1, None)
    ends = (left_out.warmup_epochs, left_out.warmup_lr, left_out.final_lr)
    assert ends == (0, 0, 0)
    assert (left_out.momentum, left_out.weight_decay) == (0.9, 1e-4)
    assert (left_out.trust, left_out.clip, left_out.clip_norm) == (0.001, False, None)
    assert left_out.decay_1d and left_out.adapt_1d and left_out.lr_1d is None
    plain = tiny_pretraining.config(data=Data(dataset="shapes"))
    assert (plain.arch, plain.stem, plain.zero_init_residual) == (
        "resnet50",
        "imagenet",
        False,
    )
    assert (plain.accumulate, plain.seed, plain.precision) == (1, 0, "fp32")
    assert (plain.channels_last, plain.compile) == (True, False)
    assert (plain.save_minutes, plain.log_every, plain.knn_every) == (5, 10, 0)
    assert (plain.stop_after_epochs, plain.views.pipeline) == (None, "fast")
    data = plain.data
    assert (data.split, data.workers, data.hold_out, data.skip_corrupt) == (
        "train",
        8,
        0,
        False,
    )
