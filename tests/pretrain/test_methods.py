"""What methods refuse, what options change, the state they keep, and fifty steps of each."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_pretraining, traces
from support.methods import CASES, TinyTrunk, train, train_on_pretended_gpu
from support.methods import build as small_build
from support.pretended_gpu import CUDA, OnGpu, PretendedGpu
from torch import nn

from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.images import preprocess
from backbench.images.crops import Crops
from backbench.parallel import batchnorm
from backbench.pretrain import data, optim
from backbench.pretrain.method import Batch, Method, Setup, build_method, choose_config
from backbench.pretrain.methods import lorac
from backbench.pretrain.methods._heads import build_head
from backbench.pretrain.methods._momentum import Queue
from backbench.pretrain.methods.cllr import alive, kept_projection
from backbench.pretrain.monitor import RecentTerms, warn_if_collapsed
from backbench.pretrain.recipe import Optim, ViewsConfig
from backbench.recipes import config as recipes
from backbench.runs import seeding

HEAD = {"hidden": 12, "dim": 6}
KEYS = {"head": HEAD, "queue": 32, "momentum": 0.9}
CLLR = {"name": "cllr", "inner": {"name": "simclr"}}
SMALL_DINO = {"hidden": 12, "bottleneck": 6, "dim": 9}
BATCH = 16


class WatchedTrunk(TinyTrunk):
    arch = "tiny"

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[int, ...]] = []
        self.register_forward_pre_hook(
            lambda _, inputs: self.passes.append(tuple(inputs[0].shape))
        )


def build(views: int, classes: int = 5, **settings: Any) -> Method:
    torch.manual_seed(0)
    config = recipes.build(choose_config(settings), settings, where="test")
    setup = Setup(batch_size=BATCH, views=views, seed=0, images=40, classes=classes)
    return build_method(config, WatchedTrunk(), setup)


# What a recipe that leaves it out trains with: the values of each method's own paper
OF_THE_PAPERS = {
    "arb": {"ridge": 1e-4, "groups": 1, "align": "base", "loss": "eq8"},
    "barlow_twins": {"off_diagonal_weight": 0.005, "scale": 1},
    "byol": {"momentum": 0.996, "final_momentum": 1},
    "cllr": {"weight": 0.1, "alpha": 10, "norm": "nuclear", "rows": None, "kept": None},
    "co2": {"consistency": 0.3, "consistency_temperature": 0.04},
    "dcl": {"temperature": 0.5, "tau_plus": 0.1, "beta": 0},
    "dino": {
        "hidden": 2048,
        "bottleneck": 256,
        "dim": 65536,
        "student_temperature": 0.1,
        "teacher_temperature": 0.04,
        "center_momentum": 0.9,
        "momentum": 0.996,
        "teachers": 2,
        "freeze_epochs": 1,
    },
    "jcl": {"lam": 4, "ramp": True},
    "lorac": {
        "keys": 2,
        "prior": "laplace",
        "beta": 4,
        "sigma2": 2,
        "margin": 3,
        "prior_from": 0.5,
        "drop_tau": False,
        "swap_queues": False,
    },
    "hcl": {"temperature": 0.5, "tau_plus": 0.1, "beta": 1},
    "moco": {"temperature": 0.2, "queue": 65536, "momentum": 0.999},
    "ressl": {"temperature": 0.1, "key_temperature": 0.04},
    "simclr": {"temperature": 0.1},
    "swav": {
        "prototypes": 3000,
        "temperature": 0.1,
        "epsilon": 0.05,
        "iterations": 3,
        "assigned": 2,
        "freeze_epochs": 1,
        "queue": 0,
        "queue_from": 15,
    },
    "vicreg": {"invariance": 25, "variance": 25, "covariance": 1},
}


@pytest.mark.parametrize("name", OF_THE_PAPERS)
def test_what_a_recipe_leaves_out_is_as_in_the_paper(name):
    settings = CLLR if name == "cllr" else {"name": name}
    config = recipes.build(choose_config(settings), settings, where="test")
    for key, printed in OF_THE_PAPERS[name].items():
        assert getattr(config, key) == printed, key


# The widths of the linear maps behind a ResNet-50, and whether a norm follows each (`a` with
# affine parameters), as each method's own paper or code has them
HEADS_OF_THE_PAPERS = {
    "arb": "2048a 2048a 2048",
    "barlow_twins": "2048a 2048a 2048",
    "byol": "4096a 256+",
    "cmc": "128+",
    "hcl": "512a 128+",
    "lorac": "2048+ 128+",
    "mio": "2048a 2048a 128a",
    "moco": "2048+ 128+",
    "simclr": "2048a 128a",
    "simsiam": "2048a 2048a 2048n",
    "swav": "2048a 128+",
    "vicreg": "8192a 8192a 8192",
    "w_mse": "1024a 64+",
}
PREDICTORS_OF_THE_PAPERS = {"byol": "4096a 256+", "simsiam": "512a 2048+"}


def widths(head):
    said = []
    with torch.device("meta"):  # the widest would take gigabytes
        layers = build_head(head, 2048)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            said.append(str(layer.out_features) + "+" * (layer.bias is not None))
        elif isinstance(layer, nn.BatchNorm1d):
            said[-1] += "a" if layer.affine else "n"
    return " ".join(said)


@pytest.mark.parametrize("name", HEADS_OF_THE_PAPERS)
def test_heads_are_as_wide_as_in_the_paper(name):
    settings = {"name": name}
    config = recipes.build(choose_config(settings), settings, where="test")
    assert widths(config.head) == HEADS_OF_THE_PAPERS[name]
    if name in PREDICTORS_OF_THE_PAPERS:
        assert widths(config.predictor) == PREDICTORS_OF_THE_PAPERS[name]


def batch(sizes: list[int], epoch: int = 0, step: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch(
        views=[torch.randn(BATCH, 3, s, s, generator=generator) for s in sizes],
        labels=torch.arange(BATCH) % 5,
        index=torch.arange(BATCH),
        step=step,
        epoch=epoch,
        epochs=4,
        progress=epoch / 4,
    )


@pytest.mark.parametrize(
    ("settings", "views", "message"),
    [
        ({"name": "moco", **KEYS}, 3, "takes 2 views"),
        ({"name": "moco", **KEYS, "queue": 30}, 2, "no multiple of the batch size"),
        ({"name": "moco", **KEYS, "queue": 0}, 2, "no multiple of the batch size"),
        ({"name": "moco", **KEYS, "groups": 5}, 2, "groups do not divide"),
        ({"name": "moco", **KEYS, "groups": 0}, 2, "groups do not divide"),
        (
            {"name": "moco", **KEYS, "queue_per_view": True},
            2,
            "set method.symmetric too",
        ),
        ({"name": "lorac", **KEYS}, 2, "2 keys need more views"),
        ({"name": "jcl", **KEYS}, 1, "at least one key view"),
        ({"name": "simclr", "head": HEAD}, 1, "takes 2 views"),
        ({"name": "arb", "head": HEAD, "groups": 4}, 2, "groups do not divide 6"),
        ({"name": "arb", "head": HEAD, "groups": 0}, 2, "groups do not divide 6"),
        ({"name": "w_mse", "head": HEAD, "size": 8}, 2, "whitens slices of 8"),
        ({"name": "w_mse", "head": HEAD, "size": 0}, 2, "whitens slices of 0"),
        ({"name": "cmc", "head": HEAD}, 2, "takes one view"),
        ({"name": "cmc", "head": HEAD}, 1, "set arch to lab:resnet50,width=0.5"),
        ({"name": "supervised"}, 2, "takes one view"),
        ({"name": "co2", **KEYS, "symmetric": True}, 2, "not symmetric"),
        ({"name": "ressl", **KEYS, "symmetric": True}, 2, "not symmetric"),
        ({"name": "cllr", "inner": {"name": "swav"}}, 2, "cllr works on"),
        ({**CLLR, "kept": 9}, 2, "set method.kept from 1 to 8"),
        ({**CLLR, "reconstruction": "released"}, 2, "must be none"),
        (
            {"name": "simclr", "head": {"layers": 0}},
            2,
            "must be greater than or equal to 1, not 0",
        ),
        (
            {"name": "moco_m", **KEYS, "keys": 1, "released_pairs": True},
            3,
            "for two keys, not 1; set method.keys=2",
        ),
        (
            {"name": "simclr", "head": {"hidden": -3}},
            2,
            "hidden. must be greater than or equal to 1",
        ),
        (
            {"name": "simclr", "temperature": 0},
            2,
            "temperature. must be greater than 0",
        ),
        (
            {"name": "swav", "prototypes": 0},
            2,
            "prototypes. must be greater than or equal to 1",
        ),
        ({"name": "hcl", "tau_plus": 1}, 2, "tau_plus. must be less than 1"),
    ],
)
def test_refusals_are_one_line(settings, views, message):
    with pytest.raises(BadInput, match=message) as caught:
        build(views, **settings)
    assert "\n" not in str(caught.value)


def test_multi_crop_makes_one_pass_per_resolution_and_14_pairs():
    """8 query passes in two batches, 2 key passes in one; 2 x 7 pairs."""
    method = build(8, name="lorac", **KEYS, prior_from=0.0)
    method.backbone.passes.clear()
    method(batch([12] * 3 + [8] * 5))
    queries = [(3 * BATCH, 3, 12, 12), (5 * BATCH, 3, 8, 8)]
    keys = [(2 * BATCH, 3, 12, 12)]
    # The key encoder, a copy, reports to the same list
    assert method.backbone.passes == queries + keys


def test_multi_crop_pairs_and_rows(monkeypatch):
    calls = []
    real = lorac.lorac_loss

    def recorded(queries, key, queue, **more):
        calls.append(
            SimpleNamespace(queries=queries, key=key, queue=queue.data_ptr(), **more)
        )
        return real(queries, key, queue, **more)

    monkeypatch.setattr(lorac, "lorac_loss", recorded)
    method = build(8, name="lorac", **KEYS, prior_from=0.5)
    queues = [queue.data_ptr() for queue in method.queue.keys]
    for epoch, prior in ((0, "none"), (2, "laplace")):
        calls.clear()
        method(batch([12] * 3 + [8] * 5, epoch=epoch))
        first, second = calls
        assert len(first.queries) == len(second.queries) == 7
        # The rows are three large queries and two keys
        assert first.rows.shape == (5, BATCH, 6)
        assert torch.equal(first.rows, second.rows)
        assert torch.equal(first.rows[3], first.key)
        assert torch.equal(first.rows[4], second.key)
        # Key 0 meets queries 1 to 7, key 1 meets query 0 and queries 2 to 7
        assert torch.equal(first.queries[0], second.rows[1])
        assert torch.equal(second.queries[0], first.rows[0])
        assert first.prior == second.prior == prior
        assert [first.queue, second.queue] == queues
    released = build(
        8, name="lorac", **KEYS, prior_from=0.5, drop_tau=True, swap_queues=True
    )
    for epoch, temperature in ((0, 0.2), (2, 1.0)):
        calls.clear()
        released(batch([12] * 3 + [8] * 5, epoch=epoch))
        assert {call.temperature for call in calls} == {temperature}
        assert calls[0].queue == released.queue.keys[1].data_ptr()


def released_loss(queries, keys, queues, met, *, temperature, large=0, product=0.0):
    """The loss of the released code of LORAC and MoCo-M, image by image. `met` has for each of its
    two terms (the key, the crops that it meets, the queue).

    With `large` crops in Q the prior is on: it has no temperature, and `product` is the code's
    --lorac_beta.
    """
    total = torch.zeros((), dtype=torch.float64)
    images = queries.shape[1]
    for key, crops, queue in met:
        for i in range(images):
            shift = 0.0
            if large:
                matrix = torch.cat([queries[:large, i], keys[:, i]])
                shift = torch.linalg.svdvals(matrix).sum() / product
            for crop in crops:
                positive = (queries[crop, i] @ keys[key, i] - shift) / temperature
                negatives = queues[queue] @ queries[crop, i] / temperature
                logits = torch.cat([positive.view(1), negatives])
                one = torch.logsumexp(logits, 0) - positive
                total = total + one / (len(crops) * images * len(met))
    return total


OTHERS = [(0, [1, 2, 3, 4], 1), (1, [0, 2, 3, 4], 0)]  # main_lorac.py: queue[1 - key]
NEVER_CROP_1 = [(1, [0, 2, 3, 4], 1), (0, [0, 2, 3, 4], 0)]  # main_moco_m.py:275


@pytest.mark.parametrize(
    ("case", "epoch", "expected"),
    [
        ("lorac as released", 0, {"met": OTHERS, "temperature": 0.2}),
        (
            "lorac as released",
            3,
            {"met": OTHERS, "temperature": 1.0, "large": 3, "product": 15.0},
        ),
        ("moco_m as released", 3, {"met": NEVER_CROP_1, "temperature": 0.2}),
    ],
)
def test_released_losses_and_their_gradients_are_those_of_the_code(
    case, epoch, expected
):
    settings = {**CASES[case], "beta": 3.0, "prior_from": 0.5}
    method, sizes = small_build(settings)
    given = batch(sizes, epoch=epoch)
    given = replace(given, views=[view.double() for view in given.views])
    own = [p for p in method.parameters() if p.requires_grad]

    def code():
        """Images of one size pass together, as in the code."""
        parts = []
        for same in (given.views[:3], given.views[3:]):
            z = method.network(torch.cat(same)).view(len(same), BATCH, -1)
            parts.append(z / z.norm(dim=2, keepdim=True))
        keys = method.keys(given.views[:2], given.step).transpose(0, 1)
        return released_loss(torch.cat(parts), keys, method.queue.keys, **expected)

    values, gradients = [], []
    for loss in (code(), method(given)["loss"]):
        gradients.append(torch.autograd.grad(loss, own))
        values.append(float(loss.detach()))
    assert values[1] == pytest.approx(values[0], rel=1e-12)
    for ours, theirs in zip(gradients[1], gradients[0]):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    if case.startswith("lorac"):
        file = recipes.find_recipe("lorac/lorac_imagenet_code", "pretrain")
        shipped = recipes.read_recipe(file)["method"]
        assert shipped["drop_tau"] and shipped["swap_queues"]
        assert shipped["beta"] * 5 == 15  # --lorac_beta of the README, with five rows


def test_moco_m_is_lorac_without_prior():
    views = batch([8] * 4, epoch=3)
    moco_m = build(4, name="moco_m", **KEYS)
    none = build(4, name="lorac", **KEYS, prior="none")
    infinite = build(4, name="lorac", **KEYS, beta=math.inf)
    losses = [float(method(views)["loss"]) for method in (moco_m, none, infinite)]
    assert losses[0] == losses[1] == losses[2]


def test_queue_holds_the_last_keys_in_order_and_wraps():
    queue = Queue(6, 2, batch_size=2, seed=0, names=["a", "b"])
    for i in range(4):
        queue.enqueue(torch.tensor([float(i), i + 10]).view(1, 2, 1).expand(2, 2, 2))
    assert queue.keys[0, :, 0].tolist() == [3, 3, 1, 1, 2, 2]
    assert queue.keys[1, :, 1].tolist() == [13, 13, 11, 11, 12, 12]
    assert int(queue.position) == 2


def test_loss_uses_the_queue_from_before_the_step_and_the_step_fills_it():
    method = build(2, name="moco", **KEYS)
    before = method.queue.keys[0].clone()
    method(batch([8, 8]))
    assert torch.equal(method.queue.keys[0], before)
    method.after_step(0.1)
    assert not torch.equal(method.queue.keys[0, :BATCH], before[:BATCH])
    assert torch.equal(method.queue.keys[0, BATCH:], before[BATCH:])
    assert torch.allclose(method.queue.keys.norm(dim=2), torch.ones(1, 32))


def test_key_encoder_is_the_moving_average_of_the_parameters_only():
    method = build(2, name="moco", **KEYS)
    key = method.key_encoder.encoder[0][0].weight
    old = key.clone()
    with torch.no_grad():
        method.backbone[0].weight.add_(1.0)
    statistics = method.key_encoder.encoder[0][1].running_mean.clone()
    method.after_step(0.1)
    torch.testing.assert_close(key, 0.9 * old + 0.1 * (old + 1.0))
    assert torch.equal(method.key_encoder.encoder[0][1].running_mean, statistics)
    assert not key.requires_grad


def test_a_queue_for_each_view_holds_that_views_negatives():
    """Against a loop: a view's query meets the other view's key and that view's earlier keys."""
    case = {
        **CASES["moco two queues"],
        "groups": 1,
        "query_batchnorm": "sync",
        "temperature": 0.3,
    }
    method, _ = small_build(case)
    given = batch([8, 8])
    views = [view.double() for view in given.views]
    before = method.queue.keys.clone()
    loss = method(replace(given, views=views))["loss"]
    loss.backward()
    found = [p.grad.clone() for p in method.projector.parameters()]
    again, _ = small_build(case)
    k = []
    with torch.no_grad():
        for view in views:
            k.append(nn.functional.normalize(again.key_encoder.encoder(view), dim=1))
    total = 0.0
    for query, key in ((0, 1), (1, 0)):
        q = nn.functional.normalize(again.network(views[query]), dim=1)
        for i in range(BATCH):
            scores = torch.cat([q[i] @ k[key][i, :, None], before[key] @ q[i]]) / 0.3
            total += (scores.logsumexp(0) - scores[0]) / (2 * BATCH)
    assert float(loss) == pytest.approx(float(total), rel=1e-9)
    total.backward()
    for have, p in zip(found, again.projector.parameters()):
        torch.testing.assert_close(have, p.grad, rtol=1e-8, atol=1e-10)
    method.after_step(0.1)
    for view in (0, 1):
        torch.testing.assert_close(method.queue.keys[view, :BATCH], k[view])
        assert torch.equal(method.queue.keys[view, BATCH:], before[view, BATCH:])


def test_keys_that_are_not_shuffled_share_their_queries_batch_norm():
    """In groups of 8, key i is normalised with its neighbours: against a pass of each group."""
    method, _ = small_build(CASES["ressl not shuffled"])
    view = batch([8]).views[0].double()
    keys = method.keys([view], 0)[:, 0]
    for have, half in zip(keys.chunk(2), view.chunk(2)):
        other, _ = small_build({**CASES["ressl not shuffled"], "groups": 1})
        torch.testing.assert_close(have, other.keys([half], 0)[:, 0])
    shuffled, _ = small_build(CASES["ressl"])
    assert not torch.allclose(shuffled.keys([view], 0)[:, 0], keys)


def test_queries_have_the_statistics_of_a_papers_gpu_or_of_all():
    for statistics, groups in (("local", {4}), ("sync", set())):
        moco = {"name": "moco", "groups": 4, "query_batchnorm": statistics}
        method = build(2, **KEYS | moco)
        assert method.sync_batchnorm is (statistics == "sync")
        assert batchnorm.groups_of(method.projector) == groups
        # Keys have a GPU's in any case
        assert batchnorm.groups_of(method.key_encoder) == {4}
    assert not build(2, **KEYS, name="moco", groups=4).sync_batchnorm


def test_jcl_queue_holds_the_mean_keys_unnormalised_and_lambda_ramps():
    method = build(5, name="jcl", **KEYS)
    terms = method(batch([8] * 5, epoch=1))
    assert float(terms["lambda"]) == pytest.approx(4.0 * 2 / 4)
    method.after_step(0.1)
    norms = method.queue.keys[0, :BATCH].norm(dim=1)
    assert float(norms.max()) < 1 + 1e-6
    assert float(norms.min()) < 1 - 1e-6


def test_accumulated_micro_batches_fill_the_queue_as_the_whole_batch_does():
    method = build(2, name="moco", **KEYS, groups=2)
    whole = batch([8, 8])
    for i in range(2):
        part = [v.chunk(2)[i] for v in whole.views]
        method(replace(whole, views=part, index=torch.arange(8)))
    method.after_step(0.1)
    assert int(method.queue.position) == BATCH


def test_cllr_projection_gets_the_regularizers_gradient():
    method = build(
        2, name="cllr", inner={"name": "simclr", "head": HEAD}, alpha=0.5, rows=4
    )
    terms = method(batch([8, 8]))
    terms["loss"].backward()
    assert method.projection.grad.abs().max() > 0
    total = float(terms["contrastive"] + 0.1 * terms["regularizer"])
    assert float(terms["loss"]) == pytest.approx(total, rel=1e-5)
    assert float(terms["rank_L"]) == pytest.approx(4.0, rel=1e-4)
    assert "cllr.projection" in method.heads()


def test_cllr_keeps_columns_of_L():
    """L phi of the kept columns has the lengths and angles of L phi without the others."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, 8, generator=generator, dtype=torch.float64) * 0.01
    matrix[:, [1, 4, 6]] *= 100
    matrix[:, 6] = matrix[:, 1]  # long, but no new direction
    phi = torch.randn(20, 8, generator=generator, dtype=torch.float64)
    out = phi @ kept_projection(matrix, 3).T
    assert out.shape == (20, 3)
    used = (kept_projection(matrix, 3).norm(dim=0) > 0).nonzero().flatten().tolist()
    assert len(used) == 3
    assert 4 in used
    assert len({1, 6} & set(used)) == 1
    cut = torch.zeros_like(matrix)
    cut[:, used] = matrix[:, used]
    torch.testing.assert_close(out @ out.T, (phi @ cut.T) @ (phi @ cut.T).T)
    whole = phi @ kept_projection(matrix, 8).T
    torch.testing.assert_close(whole @ whole.T, (phi @ matrix.T) @ (phi @ matrix.T).T)


def test_cllr_says_how_much_of_L_is_left():
    phi = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    half = torch.diag(torch.tensor([1.0] * 4 + [0.0] * 4))
    in_half = float(phi[:, :4].square().sum() / phi.square().sum())
    for projection, rank, kept in (
        (torch.eye(8), 8, 1.0),
        (0 * half, 0, 0.0),
        (half, 4, in_half),
    ):
        told = alive(phi, projection, scaled=False)
        assert float(told["rank_L"]) == pytest.approx(rank, abs=1e-6)
        assert float(told["kept_L"]) == pytest.approx(kept, abs=1e-6)
    scaled = alive(phi, 5 * torch.eye(8), scaled=True)
    assert float(scaled["kept_L"]) == pytest.approx(1.0)


def test_what_becomes_of_L_is_said(caplog):
    for row, said in (
        ({"rank_L": 1.01, "kept_L": 0.4}, "collapses"),  # nuclear at alpha 10
        ({"rank_L": 60.0, "kept_L": 0.001}, "collapses"),  # l2,1: L is 0
        (
            {"rank_L": 2040.0, "kept_L": -3.8},
            "explodes",
        ),  # at a rate that it does not bear
        ({"rank_L": 1.0, "kept_L": -6.7e15}, "explodes"),
        ({"rank_L": 60.0, "kept_L": 0.9}, None),
        ({}, None),
    ):
        caplog.clear()
        warn_if_collapsed(row, 100)
        assert len(caplog.records) == (1 if said else 0)
        assert said is None or f"CLLR's L {said}" in caplog.text


def test_cllr_as_released_starts_at_randn_and_passes_views_one_by_one():
    inner = {"name": "simclr", "head": HEAD, "together": False}
    released = {
        "norm": "none",
        "reconstruction": "released",
        "start": "randn",
        "rows": 4,
    }
    method = build(2, name="cllr", inner=inner, **released)
    assert method.projection.shape == (4, 8)
    assert not torch.allclose(
        method.projection @ method.projection.T, torch.eye(4), atol=0.1
    )
    method.backbone.passes.clear()
    given = batch([8, 8])
    terms = method(given)
    assert method.backbone.passes == [(BATCH, 3, 8, 8)] * 2
    assert 0 < float(terms["kept_L"]) < 1
    # The distance of unit features from what L gives back of them, view by view
    distance = 0.0
    for view in given.views:
        phi = method.backbone(view).detach()
        rebuilt = phi @ method.projection.detach().T @ method.projection.detach()
        apart = nn.functional.normalize(phi) - nn.functional.normalize(rebuilt)
        distance += float(apart.norm()) / BATCH
    assert float(terms["regularizer"]) == pytest.approx(distance, rel=1e-5)
    total = float(terms["contrastive"]) + 0.1 * distance
    assert float(terms["loss"].detach()) == pytest.approx(total, rel=1e-5)
    assert method.heads()["lphi.0.weight"].shape == (4, 8)


@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_dinos_teacher_warms_up_as_in_its_code(warmup):
    """main_dino.py and solo-learn: linspace over the warm-up's epochs, both ends included."""
    method = build(
        2,
        name="dino",
        **SMALL_DINO,
        warmup_teacher_temperature=0.04,
        teacher_temperature=0.07,
        warmup_epochs=warmup,
    )
    code = [*np.linspace(0.04, 0.07, warmup), *[0.07] * (10 - warmup)]
    ours = [method.teacher_temperature(epoch) for epoch in range(10)]
    assert ours == pytest.approx(code, rel=1e-12)


@pytest.mark.parametrize(
    ("one_by_one", "passes"),
    [
        ({"name": "swav", "head": HEAD, "prototypes": 10}, [BATCH] * 2),
        ({"name": "dino", **SMALL_DINO}, [BATCH] * 4),
        ({"name": "simclr", "head": HEAD}, [BATCH] * 2),
    ],
)
def test_views_one_by_one_have_statistics_of_their_own(one_by_one, passes):
    """As solo-learn passes them, the teacher's too; together, two views are one batch."""
    whole = build(2, **one_by_one)
    apart = build(2, **one_by_one, together=False)
    assert whole.state_dict().keys() == apart.state_dict().keys()
    for method, sizes in ((whole, [2 * BATCH] * (len(passes) // 2)), (apart, passes)):
        method.backbone.passes.clear()
        method(batch([8, 8]))
        assert [shape[0] for shape in method.backbone.passes] == sizes
    of_whole = float(whole(batch([8, 8]))["loss"].detach())
    of_apart = float(apart(batch([8, 8]))["loss"].detach())
    assert of_whole != of_apart


def test_cmc_finds_each_sense_in_the_memory_of_the_other():
    """Against a loop: the positive is the image's other sense, negatives are drawn from it."""
    method, _ = small_build({**CASES["cmc"], "temperature": 0.2, "momentum": 0.25})
    given = batch([8])
    given = replace(
        given, views=[given.views[0].double()], index=torch.arange(BATCH) + 3
    )
    memory = method.memory.clone()
    with torch.no_grad():
        phi = method.backbone(given.views[0])
        senses = [method.projector(phi[:, :8]), method.colour_projector(phi[:, 8:])]
    z = [sense / sense.norm(dim=1, keepdim=True) for sense in senses]
    drawn = torch.randint(40, (7,), generator=seeding.generator(0, "negatives", 0))
    total = 0.0
    for own, other in ((0, 1), (1, 0)):
        for i in range(BATCH):
            keys = [memory[other, i + 3], *(memory[other, int(n)] for n in drawn)]
            scores = [float(z[own][i] @ k) / 0.2 for k in keys]
            total += (math.log(sum(map(math.exp, scores))) - scores[0]) / BATCH
    assert float(method(given)["loss"]) == pytest.approx(total, rel=1e-9)
    method.after_step(0.5)
    for sense in (0, 1):
        moved = 0.25 * memory[sense, 3] + 0.75 * z[sense][0]
        torch.testing.assert_close(method.memory[sense, 3], moved / moved.norm())
        assert torch.equal(method.memory[sense, 0], memory[sense, 0])


def test_supervised_needs_labels():
    method = build(1, name="supervised")
    with pytest.raises(BadInput, match="needs labels"):
        method(replace(batch([8]), labels=None))
    with pytest.raises(BadInput, match="at least two classes"):
        build(1, classes=0, name="supervised")


def test_random_learns_nothing():
    method = build(2, name="random")
    method(batch([8, 8]))["loss"].backward()
    assert all(float(p.grad.abs().max()) == 0 for p in method.parameters())


@pytest.mark.parametrize("dtype", traces.DTYPES)
@pytest.mark.parametrize("paper", traces.TRACED)
def test_losses_are_those_of_the_file(paper, dtype):
    found = traces.trace(paper, dtype)
    assert traces.far(found, traces.kept("cpu")[paper][dtype]) < traces.TOLERANCE[dtype]


@pytest.fixture
def gpu():
    with PretendedGpu() as gpu:
        yield gpu
    preprocess._statistics.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_no_step_waits(name):
    expected = train(CASES[name])
    got, waits = train_on_pretended_gpu(CASES[name])
    assert not waits, "\n".join(waits)
    for key, value in expected.items():
        assert isinstance(got[key], OnGpu), key
        torch.testing.assert_close(got[key].host, value, rtol=1e-7, atol=1e-9, msg=key)


@pytest.mark.parametrize("pipeline", ["reference", "fast"])
def test_views_are_finished_without_a_wait(pipeline, shapes, gpu):
    """With `fast` colour and blur are the device's."""
    views = ViewsConfig(pipeline=pipeline, crops=(Crops(count=2, size=16),))
    recipe = tiny_pretraining.config(views=views)
    found = catalog.open_split(shapes(8), "shapes", "train")
    batches = data.ViewBatches(
        found, recipe, cache_bytes=0, device_colour=pipeline == "fast"
    )
    loaded = batches.__getitems__([(0, i) for i in range(8)])
    made = []
    for device in (torch.device("cpu"), CUDA, CUDA):
        gpu.take()
        form = data.InputFormat(device, torch.float32, torch.channels_last)
        made.append(data.finish_views(loaded, recipe.views, form))
    assert not gpu.take()  # of the second batch: constants are sent once
    for here, there in zip(made[0], made[1]):
        torch.testing.assert_close(there.host, here)


@pytest.mark.parametrize("name", ["sgd", "lars", "adamw"])
def test_optimisers_do_not_wait(name, gpu):
    torch.manual_seed(0)
    here = nn.Linear(4, 3)
    there = nn.Linear(4, 3)
    there.load_state_dict(here.state_dict())
    there.to("cuda")
    weights = []
    for module, device in ((here, "cpu"), (there, "cuda")):
        settings = Optim(
            name=name, lr=0.1, weight_decay=1e-2, decay_1d=False, adapt_1d=False
        )
        optimizer = optim.of_recipe(tiny_pretraining.config(optim=settings), module)
        x = torch.ones(2, 4).to(device)
        for _ in range(2):
            gpu.take()
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        weights.append(module.weight)
    assert not gpu.take()
    torch.testing.assert_close(weights[1].host, weights[0])


def test_terms_are_kept_without_a_wait(gpu):
    """Those of a method that makes one on the CPU, too, as JCL its lambda."""
    recent = RecentTerms()
    on_gpu = torch.tensor([1.0, 3.0]).to("cuda", non_blocking=True)
    for loss in on_gpu:
        recent.add([{"loss": loss, "lambda": torch.tensor(4.0)}], CUDA)
    assert not gpu.take()
    assert recent.mean() == {"loss": 2.0, "lambda": 4.0}
    assert gpu.take()  # a row is read
