"""Attentive probes: folded heads are attention, each head is as if alone, the whole command."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from support.interruptions import Killed, kill
from support.layouts import Trees, trunk_file

from backbench.cli.program import main
from backbench.errors import BadInput
from backbench.recipes import config
from backbench.records import store
from backbench.transfer.devices import Machine
from backbench.transfer.probes import attentive
from backbench.transfer.probes.attentive import Lars, QueryPoolHeads
from backbench.transfer.protocols import all_kinds, load_protocol
from backbench.verify import verification

ONE = Machine(torch.device("cpu"), 0, 1, 0)
CAPI = load_protocol("attentive_demo", all_kinds())
EP = load_protocol("attentive_ep", all_kinds())
EP = dataclasses.replace(EP, lr=(0.1, 0.5), batch_size=8, reference_batch=8)
MEAN = load_protocol("attentive_mean_demo", all_kinds())
POOLS = pytest.mark.parametrize("p", [CAPI, EP], ids=["capi", "ep"])


def heads(p, dim=128, seed=0):
    made = QueryPoolHeads(p, 5, dim, seed=seed, machine=ONE)
    for head in made.heads:
        for parameter in head.values():
            parameter.data = parameter.data.double()
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    if made.norm is not None:
        made.norm.double()
    return made


def attention(p, head, x):
    """The published head on tokens (N, T, D), by torch's own attention over all keys and values."""
    n, tokens, dim = x.shape
    queries = dim // 64 if p.pool == "capi" else 32
    own = dim // queries
    values = (x @ head["value"].T).view(n, tokens, queries, own).transpose(1, 2)
    if p.pool == "capi":
        # A bias of the keys (3.0) changes nothing.
        keys = (x @ head["key"].T + 3.0).view(n, tokens, queries, own).transpose(1, 2)
        query = head["query"].view(1, queries, 1, own).expand(n, -1, -1, -1)
        values = values + head["value_bias"].view(queries, 1, own)
        pooled = F.scaled_dot_product_attention(query, keys, values).reshape(n, dim)
    else:
        query = head["query"].view(1, queries, 1, dim).expand(n, -1, -1, -1)
        keys = x[:, None].expand(-1, queries, -1, -1)
        pooled = F.scaled_dot_product_attention(query, keys, values).reshape(n, dim)
        pooled = F.batch_norm(pooled, None, None, training=True, eps=1e-6)
    return pooled @ head["weight"].T + head["bias"]


@POOLS
def test_the_folded_heads_are_attention_in_value_and_gradient(p):
    torch.manual_seed(0)
    ours = heads(p)
    x = torch.randn(6, 7, 128, dtype=torch.float64)
    folded = ours.logits(x)
    for index, head in enumerate(ours.heads):
        direct = attention(p, head, x)
        torch.testing.assert_close(folded[:, index], direct, rtol=0, atol=1e-6)
        weight = torch.randn_like(direct)
        leaves = list(head.values())
        wanted = torch.autograd.grad((direct * weight).sum(), leaves)
        score = (folded[:, index] * weight).sum()
        found = torch.autograd.grad(score, leaves, retain_graph=True)
        for name, a, b in zip(head, found, wanted):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)


def batches(steps, dim=64, n=8):
    """Yield maps (n, 2, 3, dim) and labels of five classes, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        maps = torch.randn(n, 2, 3, dim, generator=generator)
        yield maps, torch.randint(0, 5, (n,), generator=generator)


def trained(p, lrs, steps=200, **changes):
    """The heads of a protocol after `steps` of its schedule on `batches`."""
    p = dataclasses.replace(p, lr=lrs, **changes)
    made = QueryPoolHeads(p, 5, 64, seed=0, machine=ONE)
    rates = torch.tensor([lr for lr, _ in p.grid])
    for step, (maps, labels) in enumerate(batches(steps)):
        made.step(maps, labels, rates * p.schedule.factor(step, steps, 1.0), batch=8)
    return made


@POOLS
def test_each_head_is_what_it_would_be_alone(p, monkeypatch):
    lrs = p.lr[:2]
    alone = [trained(p, (lr,), 20).heads[0] for lr in lrs]
    monkeypatch.setattr("backbench.transfer.probes.attentive.PIECE", 500)
    for together, single in zip(trained(p, lrs, 20).heads, alone):
        for name, parameter in together.items():
            torch.testing.assert_close(
                parameter, single[name], rtol=0, atol=1e-5, msg=name
            )


def test_heads_of_several_weight_decays_are_what_they_would_be_alone():
    """CAPI's grid: 10 rates by 3 decays; here 2 of the rates, a decay that shows, in one pass."""
    assert len(load_protocol("attentive_full", all_kinds()).grid) == 30
    together = trained(CAPI, CAPI.lr[1:], 20, weight_decays=(0.001, 0.05, 1.0))
    for head, (lr, decay) in zip(together.heads, together.p.grid, strict=True):
        single = trained(CAPI, (lr,), 20, weight_decay=decay).heads[0]
        for name, parameter in head.items():
            torch.testing.assert_close(
                parameter, single[name], rtol=0, atol=1e-5, msg=name
            )
    last = together.heads[-3:]  # of one rate
    assert (last[0]["key"] - last[1]["key"]).abs().max() > 1e-4


def test_a_head_is_trained_as_torchs_adamw_trains_attention():
    lr = CAPI.lr[-1]
    head = {}
    for name, each in trained(CAPI, (lr,), steps=0).heads[0].items():
        head[name] = each.detach().clone().requires_grad_()
    decays = [each for name, each in head.items() if "bias" not in name]
    biases = [each for name, each in head.items() if "bias" in name]
    groups = [{"params": decays}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=(0.9, 0.95), weight_decay=CAPI.weight_decay
    )
    for step, (maps, labels) in enumerate(batches(200)):
        for group in optimizer.param_groups:
            group["lr"] = lr * CAPI.schedule.factor(step, 200, 1.0)
        optimizer.zero_grad()
        F.cross_entropy(attention(CAPI, head, maps.flatten(1, 2)), labels).backward()
        optimizer.step()
    for name, parameter in trained(CAPI, (lr,)).heads[0].items():
        torch.testing.assert_close(parameter, head[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("p", [CAPI, EP, MEAN], ids=["capi", "ep", "mean"])
def test_a_kept_head_says_what_the_head_says(p):
    """Its keys, biases and batch norm are folded into queries, values and a linear layer."""
    made = trained(p, (0.003, 0.03), steps=20)
    maps, _ = next(batches(1))
    for head in made.heads:
        for name in head.keys() & {"value_bias", "bias"}:
            head[name].data.normal_()
    for index in range(2):
        kept = made.kept(index)
        assert set(kept.tensors) <= {"weight", "bias", "query", "value"}
        logits = kept.logits(maps.flatten(1, 2))
        expected = made.scores(maps)[:, index]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@POOLS
def test_an_image_is_scored_alone_as_among_others(p):
    made = trained(p, p.lr[:2], steps=3)
    maps, _ = next(batches(1))
    torch.testing.assert_close(made.scores(maps)[:1], made.scores(maps[:1]))


def test_lars_is_its_formula():
    draw = np.random.default_rng(0)
    values = {"matrix": draw.normal(size=(3, 4)), "bias": draw.normal(size=4)}
    tensors = {}
    for name, value in values.items():
        tensors[name] = torch.tensor(value, requires_grad=True)
    optimizer = Lars([{"params": list(tensors.values()), "lr": 0.5}], momentum=0.9)
    mean = {name: 0 * value for name, value in values.items()}
    for _ in range(5):
        for name, value in values.items():
            g = draw.normal(size=value.shape)
            tensors[name].grad = torch.tensor(g)
            if name == "matrix":
                g = g * 0.001 * np.linalg.norm(value) / np.linalg.norm(g)
            mean[name] = 0.9 * mean[name] + g
            values[name] = value - 0.5 * mean[name]
        optimizer.step()
    for name, value in values.items():
        np.testing.assert_allclose(tensors[name].detach().numpy(), value, atol=1e-12)


def test_tokens_that_do_not_divide_are_refused():
    with pytest.raises(BadInput, match="tokens of 100 numbers"):
        QueryPoolHeads(CAPI, 5, 100, seed=0, machine=ONE)


def command(root, out, *more, protocol="attentive_demo"):
    files = [str(root / f"{seed}.safetensors") for seed in range(2)]
    for seed, file in enumerate(files):
        if not Path(file).exists():
            trunk_file(file, seed)
    words = ["--datasets", "classes", "--protocol", protocol, *more, "save_minutes=0"]
    words += ["--data", str(root), "--out", str(out)]
    words += ["--workers", "0", "--accelerator", "cpu"]
    return main(["linear", *files, *words])


SHORT = ("batch_size=4", "reference_batch=4", "length.default.iterations=4")


@pytest.mark.parametrize(
    ("protocol", "at"),
    [pytest.param("attentive_demo", 9, marks=pytest.mark.slow), ("attentive_ep", 18)],
)
def test_a_killed_run_continues_to_the_same_numbers(
    tmp_path, monkeypatch, decoder, protocol, at
):
    root = Trees(tmp_path, monkeypatch)("classes", sizes=(("train", 10), ("test", 4)))
    changes = [*SHORT, "augment.size=32", "geometry.resize=32", "geometry.crop=32"]
    if protocol == "attentive_ep":
        changes.append("length.default.epochs=null")
    assert command(root, root / "whole", *changes, protocol=protocol) == 0
    decoder.at[len(decoder.paths) + at] = kill
    with pytest.raises(Killed):
        command(root, root / "killed", *changes, protocol=protocol)
    assert command(root, root / "killed", *changes, protocol=protocol) == 0
    one = list(store.read(root / "whole")[0])
    other = list(store.read(root / "killed")[0])
    assert one == other
    assert len(one) == 2 and {r.task for r in one} == {"attentive"}
    # A grid holds out one image of ten in each of the two classes.
    held = 2 if protocol == "attentive_demo" else 0
    assert {r.provenance["held_out"] for r in one} == {held}
    assert all(not verdict.why for verdict in verification.of_run(one, root / "whole"))


def test_rate_and_weight_decay_are_chosen_together(tmp_path, monkeypatch):
    """`verify` reads the choice, and refuses another one."""
    root = Trees(tmp_path, monkeypatch)("classes", sizes=(("train", 20), ("test", 4)))
    grid = ("length.default.iterations=20", "lr=0.003,0.01", "weight_decays=0.0,30.0")
    assert command(root, root / "run", *SHORT, *grid) == 0
    rows = list(store.read(root / "run")[0])
    names = ["0.003 wd 0", "0.003 wd 30", "0.01 wd 0", "0.01 wd 30"]
    for row in rows:
        scores = row.chosen["scores"]
        assert list(scores) == names
        best = max(names, key=scores.get)
        assert f"{row.chosen['lr']:g} wd {row.chosen['weight_decay']:g}" == best
    assert all(not verdict.why for verdict in verification.of_run(rows, root / "run"))
    other = 30.0 if rows[0].chosen["weight_decay"] == 0.0 else 0.0
    chosen = {**rows[0].chosen, "weight_decay": other}
    forged = dataclasses.replace(rows[0], chosen=chosen)
    (verdict,) = verification.of_run([forged], root / "run")
    assert "not the best of its scores" in verdict.why


@pytest.mark.slow
def test_protocols_of_one_stream_are_measured_in_one_pass(
    tmp_path, monkeypatch, decoder, caplog
):
    """Each as alone, killed or not; a protocol of another stream has a pass of its own."""
    root = Trees(tmp_path, monkeypatch)("classes", sizes=(("train", 10), ("test", 4)))
    flipped = root / "flipped.yaml"  # another view of the images, so another stream
    flipped.write_text(
        "base: attentive_demo\nprotocol: flipped-v1\naugment: {flip: 0.5}\n"
    )
    names = [
        "attentive_demo",
        "attentive_q32_demo",
        "attentive_mean_demo",
        str(flipped),
    ]
    alone = []
    seen = []
    for n, name in enumerate(names):
        before = len(decoder.paths)
        assert command(root, root / f"alone{n}", *SHORT, protocol=name) == 0
        alone += store.read(root / f"alone{n}")[0]
        seen.append(len(decoder.paths) - before)
    price = [line for line in caplog.messages if line.startswith("linear on")]
    assert [line.rpartition("; ")[2] for line in price] == ["4 steps, 10 images"] * 4
    before = len(decoder.paths)
    assert command(root, root / "all", *SHORT, protocol=",".join(names)) == 0
    assert seen == [seen[0]] * 4
    assert len(decoder.paths) - before == 2 * seen[0], "there are two passes"
    price = [line for line in caplog.messages if line.startswith("linear on")]
    assert len(price) == 5
    assert price[4].endswith("; 8 steps, 20 images"), "the price is that of both passes"
    decoder.at[len(decoder.paths) + 9] = kill
    with pytest.raises(Killed):
        command(root, root / "killed", *SHORT, protocol=",".join(names))
    assert command(root, root / "killed", *SHORT, protocol=",".join(names)) == 0
    for run in ("all", "killed"):
        together = store.read(root / run)[0]
        assert len(together) == 8
        assert together == alone
        for row, single in zip(together, alone):
            assert row.chosen == single.chosen


def test_protocols_of_one_rate_share_a_pass(tmp_path, monkeypatch, decoder):
    root = Trees(tmp_path, monkeypatch)("classes", sizes=(("train", 10), ("test", 4)))
    faster = root / "faster.yaml"
    faster.write_text("base: attentive_ep\nprotocol: faster-v1\nlr: [0.5]\n")
    changes = [*SHORT, "length.default.epochs=null"]
    changes += ["augment.size=32", "geometry.resize=32", "geometry.crop=32"]
    alone = []
    seen = []
    for n, name in enumerate(("attentive_ep", str(faster))):
        before = len(decoder.paths)
        assert command(root, root / f"alone{n}", *changes, protocol=name) == 0
        alone += store.read(root / f"alone{n}")[0]
        seen.append(len(decoder.paths) - before)
    before = len(decoder.paths)
    both = f"attentive_ep,{faster}"
    assert command(root, root / "both", *changes, protocol=both) == 0
    assert store.read(root / "both")[0] == alone
    assert len(decoder.paths) - before == seen[0] == seen[1]


def test_the_mean_of_tokens_is_read_by_a_linear_layer():
    ours = heads(MEAN)
    x = torch.randn(4, 9, 128, dtype=torch.float64)
    assert ours.count == 4 and ours.norm is None
    for n, head in enumerate(ours.heads):
        expected = x.mean(1) @ head["weight"].T + head["bias"]
        torch.testing.assert_close(ours.logits(x)[:, n], expected)


def test_two_protocols_that_name_their_rows_alike_are_refused(tmp_path, bad_input):
    own = tmp_path / "own.yaml"
    text = config.read_recipe(config.find_recipe("attentive_demo", "transfer"))
    own.write_text(yaml.safe_dump(text))
    for again in ("attentive_demo", str(own)):
        names = f"attentive_mean_demo,attentive_demo,{again}"
        said = f"{again} gives rows named attentive-demo-v1, as one before"
        bad_input(command(tmp_path, tmp_path / "run", protocol=names), said)


def test_a_protocol_of_other_keys_is_refused(tmp_path, bad_input):
    (tmp_path / "0.safetensors").write_bytes(b"")
    (tmp_path / "1.safetensors").write_bytes(b"")
    bad_input(command(tmp_path, tmp_path / "run", "augment=null"), "give `augment`")


@pytest.mark.parametrize("pool", ["capi", "ep", "mean"])
def test_heads_begin_with_their_codes_spread(pool):
    """0.02 where it is normal, and torch's own of a linear layer: uniform within 1 / sqrt(dim)."""
    start = attentive._start(pool, 500, 100, torch.Generator().manual_seed(0))
    assert float(start["weight"].mean()) == pytest.approx(0, abs=0.003)
    if pool == "ep":
        assert float(start["query"].std()) == pytest.approx(0.02, rel=0.05)
        assert float(start["weight"].std()) == pytest.approx(0.1 / 3**0.5, rel=0.02)
        assert 0.099 < float(start["weight"].abs().max()) <= 0.1
        assert float(start["bias"].abs().max()) > 0.05
    else:
        assert float(start["weight"].std()) == pytest.approx(0.02, rel=0.02)
        assert not start["bias"].any()
    assert ("value_bias" in start) == (pool == "capi")
