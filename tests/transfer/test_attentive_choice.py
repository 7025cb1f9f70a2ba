"""Heads on tokens of several protocols in one pass: whose columns are whose, and what test is asked."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList
from backbench.runs.state import StopFlag
from backbench.transfer import keeping
from backbench.transfer.devices import Machine
from backbench.transfer.probes import attentive
from backbench.transfer.probes.attentive import HeadsOfProtocols, TokenLogits
from backbench.transfer.protocol import Geometry
from backbench.transfer.protocols import all_kinds, load_protocol

ONE = Machine(torch.device("cpu"), 0, 1, 0)
DEMO = load_protocol("attentive_demo", all_kinds())


def images(labels, root=Path("/d")):
    paths = tuple(f"{i}.png" for i in range(len(labels)))
    return ImageList(root, paths, tuple(labels), ("a", "b", "c"))


OFFICIAL = Splits(images([0, 1, 2] * 10), images([0, 1, 2, 2]), images([0, 1]), False)


def test_what_is_held_out_chooses_and_one_rate_holds_nothing_out():
    held = dataclasses.replace(OFFICIAL, held_out=True)
    train, val = attentive._parts(OFFICIAL, DEMO)
    assert (train, val) == (OFFICIAL.train, OFFICIAL.val)
    single = dataclasses.replace(DEMO, lr=(0.1,))
    for splits in (OFFICIAL, held):
        train, val = attentive._parts(splits, single)
        assert len(train) == 34 and val is None
    # A tenth of each class of train and val together; a grid may be one of decays
    decays = dataclasses.replace(single, weight_decays=(0.0, 1.0))
    for p in (DEMO, decays):
        train, val = attentive._parts(held, p)
        assert (len(train), len(val)) == (31, 3)
        assert sorted(val.labels) == [0, 1, 2]
    fewer = dataclasses.replace(DEMO, holdout=0.25)
    train, val = attentive._parts(held, fewer)
    assert (len(train), len(val)) == (25, 9)


@pytest.fixture
def measured(monkeypatch):
    """measured(scores, protocols): the rows by given scores, and the heads that test was asked of."""
    asked = SimpleNamespace(picked=None, trained=None)

    def train(tasks, trunks, heads, listed, **_):
        asked.trained = len(listed)

    def answers(stream, test, picked):
        asked.picked = picked
        ranking = torch.tensor([[0], [1]])
        return [
            [(ranking + 10 * n + k, None) for k in range(len(own))]
            for n, own in enumerate(picked)
        ]

    monkeypatch.setattr(attentive, "train_on_tokens", train)
    monkeypatch.setattr(attentive, "_answers", answers)
    monkeypatch.setattr(keeping, "keep_trained", lambda *_: {"head": "kept"})
    monkeypatch.setattr(
        keeping, "write", lambda task, found: [(task, one) for one in found]
    )

    def measure(scores, protocols, splits=OFFICIAL):
        monkeypatch.setattr(attentive, "_held_out_scores", lambda *_: scores)
        tasks = []
        for p in protocols:
            task = SimpleNamespace(
                protocol=p,
                splits=splits,
                dataset=SimpleNamespace(name="mine", metric="top1"),
                seed=0,
                run=None,
            )
            tasks.append(task)
        trunks = []
        for mark in "xy":
            module = SimpleNamespace(token_dim=64, strides=(8, 16))
            point = SimpleNamespace(name=mark, digest=mark)
            trunk = SimpleNamespace(
                module=module,
                checkpoint=point,
                state=f"state {mark}",
                verify=lambda: None,
            )
            trunks.append(trunk)
        extractor = SimpleNamespace(trunks=trunks)
        rows = attentive.measure_several(tasks, extractor, ONE, StopFlag())
        return rows, asked

    return measure


def test_each_protocol_chooses_among_its_own_columns(measured):
    """Three rates of one, and two rates by two decays of the other; two trunks."""
    one = dataclasses.replace(DEMO, lr=(0.1, 0.2, 0.4))
    other = dataclasses.replace(
        DEMO, protocol="other-v1", pool="mean", lr=(1.0, 2.0), weight_decays=(0.0, 0.5)
    )
    scores = [
        [1.0, 9.0, 2.0, 3.0, 4.0, 5.0, 8.0],
        [7.0, 1.0, 2.0, 3.0, 6.0, 5.0, 4.0],
    ]
    (of_one, of_other), asked = measured(scores, [one, other])
    assert asked.picked == [[1, 3 + 3], [0, 3 + 1]]
    assert asked.trained == 30
    chosen = [row.chosen["lr"] for _, row in of_one]
    assert chosen == [0.2, 0.1]
    assert [list(row.chosen["scores"].values()) for _, row in of_one] == [
        each[:3] for each in scores
    ]
    both = [(row.chosen["lr"], row.chosen["weight_decay"]) for _, row in of_other]
    assert both == [(2.0, 0.5), (1.0, 0.5)]
    assert [list(row.chosen["scores"].values()) for _, row in of_other] == [
        each[3:] for each in scores
    ]
    for k, rows in enumerate((of_one, of_other)):
        for n, (task, row) in enumerate(rows):
            assert task.protocol == (one, other)[k]
            assert row.checkpoint.name == "xy"[n]
            assert row.ranking.tolist() == [[10 * n + k], [10 * n + k + 1]]
            assert row.provenance == {
                "head": "kept",
                "trunk_sha256": f"state {'xy'[n]}",
                "tokens": (16,),
                "held_out": 4,
            }


def test_protocols_of_one_rate_have_a_column_each(measured):
    one = dataclasses.replace(DEMO, lr=(0.1,))
    other = dataclasses.replace(DEMO, protocol="other-v1", lr=(0.3,))
    (of_one, of_other), asked = measured(None, [one, other])
    assert asked.picked == [[0, 1], [0, 1]] and asked.trained == 34
    for rows, lr in ((of_one, 0.1), (of_other, 0.3)):
        for _, row in rows:
            assert (row.chosen["lr"], row.chosen["on"]) == (lr, None)
            assert row.provenance["held_out"] == 0


def test_a_batch_norm_needs_equal_shares(monkeypatch):
    """Of several protocols one is enough, and heads without a norm need none."""
    three = dataclasses.replace(ONE, world=3)
    ep = load_protocol("attentive_ep", all_kinds(), ["batch_size=4"])
    mean = dataclasses.replace(DEMO, batch_size=4)
    tasks = [SimpleNamespace(protocol=p) for p in (mean, ep)]
    extractor = SimpleNamespace(trunks=[])
    said = "--devices: 3 do not divide a batch of 4 images"
    with pytest.raises(BadInput, match=said):
        attentive.measure_several(tasks, extractor, three, StopFlag())

    def goes_on(*_):
        raise KeyError

    monkeypatch.setattr(attentive, "_parts", goes_on)
    for task in tasks:
        task.splits = None
    with pytest.raises(KeyError):
        attentive.measure_several(tasks[:1], extractor, three, StopFlag())
    two = dataclasses.replace(ONE, world=2)
    with pytest.raises(KeyError):
        attentive.measure_several(tasks, extractor, two, StopFlag())


# What a stream of logits becomes


class Stream:
    """Logits (n, H, C) of two trunks on five images, in batches of two."""

    trunks = ("x", "y")

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.logits = [torch.randn(5, h, 3, generator=generator) for h in (3, 2)]

    def __call__(self, listed):
        assert len(listed) == 5
        for first in (0, 2, 4):
            yield first, [each[first : first + 2] for each in self.logits]


def test_held_out_scores_are_of_every_head_by_the_datasets_metric():
    stream = Stream()
    label = np.array([0, 1, 1, 1, 2])
    for metric in ("top1", "mean_per_class"):
        task = SimpleNamespace(dataset=SimpleNamespace(metric=metric))
        found = attentive._held_out_scores(task, stream, images(label.tolist()))
        for scores, logits in zip(found, stream.logits, strict=True):
            expected = []
            for head in range(logits.shape[1]):
                right = logits[:, head].argmax(1).numpy() == label
                means = [right[label == c].mean() for c in range(3)]
                share = right.mean() if metric == "top1" else np.mean(means)
                expected.append(100 * share)
            assert scores == pytest.approx(expected)
    assert len({*found[0], *found[1]}) > 1


def test_answers_are_those_of_the_picked_heads_in_the_order_of_images():
    stream = Stream()
    labels = [0, 1, 1, 1, 2]
    found = attentive._answers(stream, images(labels), [[2, 0], [1]])
    assert [len(of_trunk) for of_trunk in found] == [2, 1]
    for of_trunk, logits, picked in zip(found, stream.logits, [[2, 0], [1]]):
        for (ranking, scores), index in zip(of_trunk, picked):
            z = logits[:, index]
            assert ranking.tolist() == z.argsort(1, descending=True).tolist()
            assert scores["label"].tolist() == labels
            own = z - z.amax(1, keepdim=True)
            expected = own[torch.arange(5), torch.tensor(labels)]
            np.testing.assert_allclose(scores["label_logit"], expected, atol=1e-6)
    # One that has diverged on some images has no scores, and the others have theirs
    stream.logits[0][4, 2] = torch.nan
    ((broken, whole), _) = attentive._answers(stream, images(labels), [[2, 0], [1]])
    assert broken[1] is None and whole[1] is not None
    assert broken[0][4].tolist() == [-1] * 3 and (broken[0][:4] >= 0).all()


class Sums:
    """Heads whose scores are the sums of their maps, times one and two."""

    count = 2

    def __init__(self, scale):
        self.scale = scale

    def scores(self, maps):
        total = self.scale * maps.sum((1, 2, 3))
        return torch.stack([total, 2 * total], 1)[:, :, None]


def test_logits_come_batch_by_batch_in_the_order_of_images(tmp_path, monkeypatch):
    levels = [10, 60, 30, 90, 50]
    for n, level in enumerate(levels):
        Image.new("RGB", (12, 9), (level,) * 3).save(tmp_path / f"{n}.png")
    given = []

    def forward(trunks, pixels, *, tokens):
        assert tokens
        given.append(tuple(pixels.shape))
        return [pixels[:, :1].float().mean((2, 3))[:, None, None] for _ in trunks]

    monkeypatch.setattr(attentive, "forward_all", forward)
    p = dataclasses.replace(DEMO, feature_batch=2, geometry=Geometry(resize=9, crop=8))
    task = SimpleNamespace(
        protocol=p, run=tmp_path, dataset=SimpleNamespace(name="mine")
    )
    heads = [
        HeadsOfProtocols({"one": Sums(1.0), "two": Sums(10.0)}),
        HeadsOfProtocols({"one": Sums(-1.0)}),
    ]
    stop = StopFlag()
    stream = TokenLogits(task, ["x", "y"], heads, ONE, stop)
    listed = images([0] * 5, tmp_path)
    firsts = []
    found = [[], []]
    for first, of_trunks in stream(listed):
        firsts.append(first)
        for logits, out in zip(of_trunks, found):
            out.append(logits)
    assert firsts == [0, 2, 4]
    assert [size[2:] for size in given] == [(8, 8)] * 3
    level = torch.tensor(levels).float()[:, None]
    one, other = (torch.cat(out)[:, :, 0] for out in found)
    torch.testing.assert_close(one, level * torch.tensor([1.0, 2, 10, 20]))
    torch.testing.assert_close(other, level * torch.tensor([-1.0, -2]))
    stop.requested = "SIGTERM"
    with pytest.raises(Exception, match="stopped by SIGTERM at mine tokens"):
        list(stream(listed))


def test_heads_of_protocols_step_by_their_own_rates():
    class Stepped:
        def __init__(self, count):
            self.count = count

        def step(self, tokens, labels, rates, *, batch):
            self.seen = (tokens, labels, rates.tolist(), batch)
            return 10 * rates

        def state(self):
            return {"count": self.count}

        def load(self, state):
            self.loaded = state

    parts = {"one": Stepped(2), "two": Stepped(1)}
    heads = HeadsOfProtocols(parts)
    rates = torch.tensor([1.0, 2.0, 3.0])
    losses = heads.step("tokens", "labels", rates, batch=4, momentum=0.9, decay=0.0)
    assert losses.tolist() == [10, 20, 30]
    assert parts["one"].seen == ("tokens", "labels", [1.0, 2.0], 4)
    assert parts["two"].seen == ("tokens", "labels", [3.0], 4)
    state = heads.state()
    assert state == {"one": {"count": 2}, "two": {"count": 1}}
    heads.load(state)
    assert parts["two"].loaded == {"count": 1}
