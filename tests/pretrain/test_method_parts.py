"""Heads, queues and averages of the methods, and losses of some against loops over images."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.methods import TinyTrunk
from torch import nn

from backbench.errors import BadInput
from backbench.pretrain.method import Batch, Method, Setup, build_method, choose_config
from backbench.pretrain.methods import _momentum
from backbench.pretrain.methods._heads import Head, build_head, forward_crops
from backbench.recipes import config as recipes

BATCH = 6
HEAD = {"hidden": 12, "dim": 4}


def build(views: int, **settings: Any) -> Method:
    torch.manual_seed(0)
    config = recipes.build(choose_config(settings), settings, where="test")
    setup = Setup(batch_size=BATCH, views=views, seed=0, images=40, classes=3)
    return build_method(config, TinyTrunk(), setup).double()


def batch(sizes: list[int], *, epoch: int = 0, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    views = [
        torch.randn(BATCH, 3, size, size, generator=generator, dtype=torch.float64)
        for size in sizes
    ]
    index = torch.arange(BATCH)
    return Batch(
        views=views,
        labels=index % 3,
        index=index,
        step=4 * epoch,
        epoch=epoch,
        epochs=20,
        progress=epoch / 20,
    )


# ---- Averages and queues


def test_a_momentum_rises_by_half_a_cosine():
    found = [_momentum.momentum_at(p, 0.9, 1.0) for p in (0, 1 / 3, 0.5, 2 / 3, 1)]
    assert found == pytest.approx([0.9, 0.925, 0.95, 0.975, 1.0])
    assert _momentum.momentum_at(0.5, 0.25, 0.75) == pytest.approx(0.5)


def test_an_average_moves_by_what_its_momentum_leaves():
    averages = [torch.tensor([1.0, 2]), torch.tensor([[4.0]])]
    source = [nn.Parameter(torch.tensor([5.0, 0])), nn.Parameter(torch.tensor([[8.0]]))]
    _momentum.momentum_update(averages, source, 0.75)
    assert [each.tolist() for each in averages] == [[2, 1.5], [[5]]]
    assert not averages[0].requires_grad


def test_a_copy_is_frozen_and_its_source_is_not():
    module = nn.Linear(2, 2)
    copy = _momentum.momentum_copy(module)
    assert not any(p.requires_grad for p in copy.parameters())
    assert all(p.requires_grad for p in module.parameters())
    assert copy.weight is not module.weight and torch.equal(copy.weight, module.weight)


def queue_of(length, *, batch_size=2, seed=0, names=("a", "b")):
    return _momentum.Queue(length, 5, batch_size=batch_size, seed=seed, names=names)


def test_queues_start_at_directions_of_their_names_and_seed():
    queue = queue_of(8)
    assert queue.keys.shape == (2, 8, 5)
    torch.testing.assert_close(queue.keys.norm(dim=2), torch.ones(2, 8))
    assert not torch.equal(queue.keys[0], queue.keys[1])
    assert torch.equal(queue_of(8, names=("b",)).keys[0], queue.keys[1])
    assert not torch.equal(queue_of(8, seed=1).keys, queue.keys)
    assert int(queue.position) == 0


def test_a_batch_that_reaches_the_end_of_a_queue_goes_on_at_its_beginning():
    queue = queue_of(6)
    for number in (1, 2):
        keys = torch.full((4, 2, 5), float(number))
        keys[:, 1] *= 10
        keys[3] += 0.5
        queue.enqueue(keys)
    assert queue.keys[0, :, 0].tolist() == [2, 2.5, 1, 1.5, 2, 2]
    assert queue.keys[1, :, 4].tolist() == [20, 20.5, 10, 10.5, 20, 20]
    assert int(queue.position) == 2


@pytest.mark.parametrize(("length", "size"), [(0, 2), (-4, 2), (5, 2), (3, 6)])
def test_a_queue_is_filled_by_whole_batches(length, size):
    with pytest.raises(BadInput) as error:
        queue_of(length, batch_size=size)
    assert str(error.value) == (
        f"a queue of {length} keys is no multiple of the batch size {size}; change either"
    )


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({}, 6),
        ({"symmetric": True}, 12),
        ({"symmetric": True, "queue_per_view": True}, 6),
    ],
)
def test_a_queue_takes_the_keys_of_both_views_or_has_one_of_each(settings, added):
    moco = {"name": "moco", "head": HEAD, "momentum": 0.9, "groups": 1, **settings}
    build(2, queue=3 * added, **moco)
    with pytest.raises(BadInput, match=f"no multiple of the batch size {added};"):
        build(2, queue=3 * added + 3, **moco)


# ---- Heads


def layers(**settings):
    """Name the layers of a head of inputs of width 7."""
    said = []
    for layer in build_head(Head(dim=3, **settings), 7):
        if isinstance(layer, nn.Linear):
            bias = "" if layer.bias is None else "+"
            said.append(f"{layer.in_features}-{layer.out_features}{bias}")
        elif isinstance(layer, nn.BatchNorm1d):
            said.append(f"bn{layer.num_features}{'a' if layer.affine else ''}")
        else:
            said.append(type(layer).__name__.lower())
    return said


def test_a_linear_map_before_a_norm_has_no_bias():
    assert layers() == ["7-7", "bn7a", "relu", "7-3+"]
    assert layers(hidden=5, batchnorm=False) == ["7-5+", "relu", "5-3+"]
    three = ["7-5", "bn5a", "relu", "5-5", "bn5a", "relu"]
    assert layers(hidden=5, layers=3) == [*three, "5-3+"]
    assert layers(hidden=5, layers=3, last_bias=False) == [*three, "5-3"]
    last = {"hidden": 5, "layers": 3, "last_batchnorm": True}
    assert layers(**last) == [*three, "5-3", "bn3a"]
    assert layers(**last, last_affine=False) == [*three, "5-3", "bn3"]
    assert layers(layers=1) == ["7-3+"]


def test_neighbours_of_equal_size_pass_together():
    passes = []

    def network(images):
        passes.append(tuple(images.shape))
        return images.mean((2, 3))

    sizes = [8, 8, 4, 8, 4, 4]
    views = batch(sizes).views
    right = [view.mean((2, 3)) for view in views]
    outputs = forward_crops(network, views)
    assert [shape[0] // BATCH for shape in passes] == [2, 1, 1, 2]
    assert all(map(torch.equal, outputs, right))
    assert len(outputs) == 6
    passes.clear()
    outputs = forward_crops(network, views, together=False)
    assert [shape[0] for shape in passes] == [BATCH] * 6
    assert all(map(torch.equal, outputs, right))


# ---- Losses against loops


def cross_entropy(p, logits):
    return float(-(p * (logits - logits.logsumexp(0))).sum())


def loop_codes(scores, epsilon, iterations):
    """Sinkhorn-Knopp's, with all sums written out."""
    codes = [[math.exp(float(s) / epsilon) for s in row] for row in scores]
    for _ in range(iterations):
        for k in range(len(codes[0])):
            whole = sum(row[k] for row in codes)
            for row in codes:
                row[k] /= whole
        codes = [[value / sum(row) for value in row] for row in codes]
    return torch.tensor(codes, dtype=torch.float64)


SWAV = {"name": "swav", "head": HEAD, "prototypes": 5, "temperature": 0.3}
SWAV |= {"epsilon": 0.5, "iterations": 2, "queue": 12, "queue_from": 3}


@pytest.mark.parametrize("assigned", [1, 2, 3])
@pytest.mark.parametrize("epoch", [2, 3])
def test_every_other_view_predicts_the_codes_of_an_assigned_one(assigned, epoch):
    """From epoch 3 on the queue joins the assignment, and is assigned nothing."""
    method = build(3, **SWAV, assigned=assigned)
    given = batch([8, 8, 6], epoch=epoch)
    queue = method.queue.keys.clone()
    loss = float(method(given)["loss"].detach())
    # In the same batches
    outputs = forward_crops(method.network, given.views)
    z = [F.normalize(output.detach(), dim=1) for output in outputs]
    weight = method.prototypes.detach()
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(5).double())
    total = 0.0
    for a in range(assigned):
        rows = z[a]
        if epoch == 3:
            rows = torch.cat([z[a], queue[a]])
        codes = loop_codes(rows @ weight.T, 0.5, 2)[:BATCH]
        for v in range(3):
            if v != a:
                logits = z[v] @ weight.T / 0.3
                terms = [cross_entropy(codes[i], logits[i]) for i in range(BATCH)]
                total += sum(terms) / (BATCH * assigned * 2)
    assert loss == pytest.approx(total, rel=1e-6)
    # The step fills the queue of each assigned view
    assert torch.equal(method.queue.keys, queue)
    method.after_step(0.1)
    assert method.queue.keys.shape == (assigned, 12, 4)
    for a in range(assigned):
        torch.testing.assert_close(method.queue.keys[a, :BATCH], z[a])
        assert torch.equal(method.queue.keys[a, BATCH:], queue[a, BATCH:])


def test_prototypes_stand_still_at_first_and_have_length_one_after_a_step():
    method = build(2, **SWAV, freeze_epochs=2)
    for epoch, moves in ((1, False), (2, True)):
        method.zero_grad()
        method(batch([8, 8], epoch=epoch))["loss"].backward()
        assert bool(method.prototypes.grad.any()) is moves
        assert method.projector[0].weight.grad.any()
    with torch.no_grad():
        method.prototypes.mul_(3)
    method.after_step(0.5)
    lengths = method.prototypes.detach().norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(5).double())


DINO = {"name": "dino", "hidden": 12, "bottleneck": 6, "dim": 9, "momentum": 0.8}
DINO |= {"student_temperature": 0.2, "teacher_temperature": 0.1}
DINO |= {"warmup_teacher_temperature": 0.1, "center_momentum": 0.75}


@pytest.mark.parametrize("teachers", [1, 2])
def test_every_view_learns_from_the_teachers_other_views(teachers):
    method = build(3, **DINO, teachers=teachers)
    given = batch([8, 8, 6], epoch=1)
    method.center.copy_(torch.linspace(-0.1, 0.1, 9))
    center = method.center.clone()
    loss = float(method(given)["loss"].detach())
    with torch.no_grad():
        seen = torch.stack(forward_crops(method.teacher, given.views[:teachers]))
        features = torch.cat(forward_crops(method.backbone, given.views))
        student = method.projector(features).unflatten(0, (3, -1))
    total, pairs = 0.0, 0
    for t in range(teachers):
        for s in range(3):
            if s != t:
                pairs += 1
                for i in range(BATCH):
                    p = ((seen[t, i] - center) / 0.1).softmax(0)
                    total += cross_entropy(p, student[s, i] / 0.2) / BATCH
    assert loss == pytest.approx(total / pairs, rel=1e-6)
    # The centre and the teacher move after the step
    assert torch.equal(method.center, center)
    teacher = [p.clone() for p in method.teacher.parameters()]
    own = [*method.backbone.parameters(), *method.projector.parameters()]
    with torch.no_grad():
        for p in own:
            p.add_(1.0)
    method.after_step(0.5)
    mean = seen.mean((0, 1))
    torch.testing.assert_close(method.center, 0.75 * center + 0.25 * mean)
    # Halfway from 0.8 to 1
    for before, after, p in zip(teacher, method.teacher.parameters(), own, strict=True):
        torch.testing.assert_close(after, 0.9 * before + 0.1 * p)
    moved = method.center.clone()
    method.after_step(1.0)
    assert torch.equal(method.center, moved)


def test_dinos_last_layer_stands_still_at_first():
    method = build(2, **DINO, freeze_epochs=2)
    for epoch, moves in ((1, False), (2, True)):
        method.zero_grad()
        method(batch([8, 8], epoch=epoch))["loss"].backward()
        assert bool(method.projector.last.grad.any()) is moves
        assert method.projector.layers[0].weight.grad.any()


def test_dinos_head_has_gelus_and_norms_where_they_are_asked_for():
    def kinds(batchnorm):
        layers = build(2, **DINO, batchnorm=batchnorm).projector.layers
        return [type(layer).__name__ for layer in layers]

    assert kinds(False) == ["Linear", "GELU", "Linear", "GELU", "Linear"]
    assert kinds(True) == ["Linear", "BatchNorm1d", "GELU"] * 2 + ["Linear"]
    head = build(2, **DINO).projector
    scores = head(torch.randn(7, 8, dtype=torch.float64))
    # Cosines, of nine outputs
    assert scores.shape == (7, 9)
    assert float(scores.detach().abs().max()) < 1
    assert all(not m.bias.any() for m in head.layers if isinstance(m, nn.Linear))


def test_supervised_says_its_accuracy_and_keeps_its_head():
    method = build(1, name="supervised")
    given = batch([8])
    logits = method.classifier(method.backbone(given.views[0])).detach()
    right = [float(logits[i, label]) for i, label in enumerate(given.labels.tolist())]
    wrong = replace(given, labels=logits.argmax(1))
    wrong.labels[:2] = (wrong.labels[:2] + 1) % 3
    assert float(method(wrong)["accuracy"]) == pytest.approx(4 / 6)
    sums = logits.logsumexp(1).tolist()
    loss = sum(s - r for s, r in zip(sums, right, strict=True)) / BATCH
    assert float(method(given)["loss"].detach()) == pytest.approx(loss, rel=1e-6)
    heads = method.heads()
    assert {name: tuple(x.shape) for name, x in heads.items()} == {
        "fc.weight": (3, 8),
        "fc.bias": (3,),
    }


def test_simsiams_spread_is_one_for_an_even_cloud():
    method = build(2, name="simsiam", head=HEAD, predictor=HEAD)
    given = batch([8, 8])
    terms = method(given)
    z = F.normalize(method.projector(method.backbone(given.views[0])), dim=1).detach()
    spread = float(z.std(0).mean()) * 2  # the root of 4
    assert float(terms["spread"]) == pytest.approx(spread, rel=1e-5)
