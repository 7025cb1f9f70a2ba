"""What stands around the steps of heads: their views, epochs, states, rates, and what the rows say of them."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from backbench.datasets.splits import Splits
from backbench.images.image_list import ImageList
from backbench.runs import price
from backbench.runs.state import StopFlag, load_state
from backbench.transfer.devices import Machine
from backbench.transfer.features import batches
from backbench.transfer.features.batches import (
    CropFlip,
    Pictures,
    centred,
    global_batches,
)
from backbench.transfer.features.extractor import FeatureRows
from backbench.transfer.heads import AdamHeads, LinearHeads, TokenHeads, copies
from backbench.transfer.probes import sgd
from backbench.transfer.probes.sgd import (
    FinalHead,
    ProbeTraining,
    SgdProbe,
    chosen_rate,
    rankings,
)
from backbench.transfer.protocol import (
    CropAugment,
    Geometry,
    Length,
    LoadedGeometry,
)
from backbench.transfer.protocols import all_kinds, load_protocol

CPU = torch.device("cpu")
ONE = Machine(CPU, 0, 1, 0)
SMALL = ["length.default.iterations=9", "batch_size=4", "reference_batch=8"]


def gradient_picture(width, height):
    """Red grows to the right, green downwards."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, :, 0] = np.linspace(0, 255, width)
    pixels[:, :, 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


# Views


def test_a_crop_of_all_is_the_resized_image_and_may_be_flipped():
    whole = {"size": 6, "scale": (1.0, 1.0), "ratio": (1.25, 1.25)}
    picture = gradient_picture(50, 40)
    resized = picture.resize((6, 6), Image.Resampling.BILINEAR)
    plain = CropFlip(CropAugment(flip=0.0, **whole), 0)(picture, (0, 0))
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(resized))
    flipped = CropFlip(CropAugment(flip=1.0, **whole), 0)(picture, (0, 0))
    mirrored = ImageOps.mirror(resized)
    np.testing.assert_array_equal(np.asarray(flipped), np.asarray(mirrored))
    cubic = CropAugment(flip=0.0, interpolation="bicubic", **whole)
    resized = picture.resize((6, 6), Image.Resampling.BICUBIC)
    found = CropFlip(cubic, 0)(picture, (0, 0))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(resized))


def test_crops_lie_anywhere_in_a_wide_image_and_half_are_flipped():
    picture = gradient_picture(90, 30)
    view = CropFlip(CropAugment(size=8, scale=(0.1, 0.2)), 3)
    lefts, tops, flips = [], [], 0
    for epoch in range(60):
        red, green = np.asarray(view(picture, (epoch, 0))).astype(int)[..., :2].T
        lefts.append(red.min())
        tops.append(green.min())
        flips += red[0].mean() > red[-1].mean()
    assert min(lefts) < 40 and max(lefts) > 150
    assert min(tops) < 60 and max(tops) > 90
    assert 18 < flips < 42
    # Seed, epoch and image decide a view
    same = np.asarray(view(picture, (1, 2)))
    for other, seed in (((2, 1), 3), ((1, 3), 3), ((1, 2), 4)):
        found = CropFlip(view.augment, seed)(picture, other)
        assert (np.asarray(found) != same).any()


def test_a_picture_is_channels_first_rows_before_columns(tmp_path):
    gradient_picture(50, 40).save(tmp_path / "0.png")
    images = ImageList(tmp_path, ("0.png",), (0,), ("a",))
    pixels, index = Pictures(images, lambda picture, key: picture)[7, 0]
    assert (pixels.shape, pixels.dtype, index) == ((3, 40, 50), torch.uint8, 0)
    assert pixels[0, :, 0].max() == 0 and pixels[0, :, -1].min() == 255
    assert pixels[1, 0].max() == 0 and pixels[1, -1].min() == 255
    # The view of evaluation: the shorter side resized, the centre cropped
    centre, _ = Pictures(images, centred(Geometry(resize=20, crop=10)))[0, 0]
    assert centre.shape == (3, 10, 10)
    assert 90 < centre[0].float().mean() < 165 and centre[0].min() > 60


def test_a_geometry_is_made_by_its_own_numbers():
    """A wide image loses its sides, unless both of its sides are resized."""
    picture = gradient_picture(60, 30)

    def red(**geometry):
        shown = np.asarray(Geometry(crop=10, **geometry).transform()(picture))
        assert shown.shape == (10, 10, 3)
        return shown[5, :, 0].astype(int)

    wide, square = red(resize=10), red(resize=10, square=True)
    assert np.ptp(wide) < 160 < np.ptp(square)
    noise = np.random.default_rng(0).integers(0, 256, (30, 60, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    assert (red(resize=14, interpolation="bicubic") != red(resize=14)).any()
    picture = gradient_picture(60, 30)
    by_torch = LoadedGeometry(loader="opencv", resize=10, crop=10, square=True)
    shown = np.asarray(by_torch.transform()(picture))
    assert shown.shape == (10, 10, 3) and np.ptp(shown[5, :, 0].astype(int)) > 160


# Epochs, states and rates


class HeadsOfGivenLoss:
    """Heads whose losses are given, and whose state is a number."""

    def __init__(self, mark):
        self.mark = mark
        self.loaded = None

    def mean_loss(self, features, labels):
        assert labels.tolist() == [1, 0]
        return features

    def state(self):
        return {"of": self.mark}

    def load(self, state):
        self.loaded = state


class Best(HeadsOfGivenLoss):
    """Keeps what it was asked, and gives up after some epochs."""

    def __init__(self, mark, patient):
        super().__init__(mark)
        self.patient = patient
        self.asked = []

    def update(self, heads, loss, *, epoch, patience):
        assert (heads.mark, patience) == (self.mark, 2)
        self.asked.append((epoch, float(loss)))
        return epoch > self.patient


def a_training(tmp_path, *, watched=None, images=10, tokens=False, **changes):
    p = load_protocol("lorac", all_kinds(), SMALL)
    p = dataclasses.replace(p, **changes)
    val = SimpleNamespace(labels=(1, 0))
    task = SimpleNamespace(
        protocol=p,
        dataset=SimpleNamespace(name="mine"),
        splits=SimpleNamespace(val=val),
        state_file=tmp_path / "x.state",
        run=tmp_path,
        seed=0,
    )
    training = ProbeTraining(
        phase="select",
        task=task,
        trunks=[SimpleNamespace(digest=mark) for mark in "ab"],
        heads=[HeadsOfGivenLoss("a"), HeadsOfGivenLoss("b")],
        rates=[],
        images=ImageList(
            tmp_path, [str(n) for n in range(images)], (0,) * images, ("a",)
        ),
        features=None,
        watched=None,
        machine=ONE,
        stop=StopFlag(),
        tokens=tokens,
    )
    training.watched = watched
    return training


def test_an_epoch_ends_within_the_step_that_completes_it(tmp_path):
    """Ten images in batches of four: epochs end in steps 2, 4, 7 and 9."""
    losses = [torch.tensor(1.5), torch.tensor(2.5)]
    training = a_training(tmp_path, watched=losses, patience=2)
    training.best = [Best("a", 1), Best("b", 3)]
    ended = [step for step in range(10) if training._exhausted(step)]
    assert training.best[0].asked == [(n, 1.5) for n in (1, 2, 3, 4)]
    assert training.best[1].asked == [(n, 2.5) for n in (1, 2, 3, 4)]
    assert ended == [9], "both have given up"
    # Without patience nobody is asked
    training = a_training(tmp_path, watched=losses)
    training.best = [Best("a", 0), Best("b", 0)]
    assert not any(training._exhausted(step) for step in range(10))
    assert training.best[0].asked == []
    training = a_training(tmp_path, patience=2)
    assert not any(training._exhausted(step) for step in range(10))


def test_a_training_is_as_long_as_its_protocol_says(tmp_path):
    training = a_training(tmp_path, images=10)
    assert (training.steps, training.per_epoch) == (9, 2.5)
    assert training.labels.tolist() == [0] * 10 and training.best == []
    # By epochs of these images, or by the dataset's own length
    epochs = {"default": Length(epochs=2), "other": Length(iterations=7)}
    p = a_training(tmp_path, images=10, length=epochs).task.protocol
    assert [p.steps(name, 10) for name in ("mine", "other")] == [5, 7]


def test_a_state_is_of_its_phase_and_of_its_trunks(tmp_path):
    training = a_training(tmp_path)
    assert training._resume() == 0
    training._save(7)
    state = load_state(training.task.state_file)
    assert state == {
        "phase": "select",
        "step": 7,
        "heads": {"a": {"of": "a"}, "b": {"of": "b"}},
        "best": {},
    }
    assert training._resume() == 7
    assert [heads.loaded for heads in training.heads] == [{"of": "a"}, {"of": "b"}]
    # Of two trunks one may be left
    one = a_training(tmp_path)
    one.trunks, one.heads = one.trunks[1:], one.heads[1:]
    assert one._resume() == 7 and one.heads[0].loaded == {"of": "b"}
    other = a_training(tmp_path)
    other.phase = "refit"
    assert other._resume() == 0 and other.heads[0].loaded is None
    more = a_training(tmp_path)
    more.trunks = [*more.trunks, SimpleNamespace(digest="c")]
    assert more._resume() == 0 and more.heads[0].loaded is None
    # The best so far is kept with them
    patient = a_training(tmp_path, watched=[], patience=2)
    patient.best = [Best("a", 1), Best("b", 1)]
    patient._save(3)
    assert patient._resume() == 3
    assert [best.loaded for best in patient.best] == [{"of": "a"}, {"of": "b"}]
    # Another rank writes nothing
    training.task.state_file.unlink()
    training.machine = dataclasses.replace(ONE, rank=1)
    training._save(8)
    assert not training.task.state_file.exists()


def test_a_state_is_due_after_some_minutes_and_of_tokens_at_the_end(tmp_path):
    training = a_training(tmp_path, save_minutes=2.0)
    assert not training._state_is_due(3, 120.0) and training._state_is_due(3, 120.1)
    assert not training._state_is_due(9, 0.0)
    tokens = a_training(tmp_path, save_minutes=2.0, tokens=True)
    assert tokens._state_is_due(9, 0.0) and not tokens._state_is_due(8, 0.0)


class RecordingHeads:
    """Heads that keep what each step gives them, and whose losses are given."""

    def __init__(self, losses):
        self.losses = torch.tensor(losses)
        self.steps = []
        self.loaded = None

    def step(self, features, labels, rates, **settings):
        self.steps.append((features[:, 0].tolist(), labels.tolist(), rates, settings))
        return self.losses + len(self.steps)

    def load(self, state):
        self.loaded = state


def test_a_continued_training_goes_on_in_its_stream_and_shows_its_best_loss(
    tmp_path, capsys
):
    """It stands at step 3 of 60. Every 50 steps, so at 3 and 53, it reads the lowest loss of its
    first trunk's heads: a sum over this rank's half of a batch of four."""
    length = {"default": Length(iterations=60)}
    a_training(tmp_path, length=length)._save(3)
    training = a_training(tmp_path, length=length)
    rows = torch.arange(10.0)[:, None]
    training.features = [FeatureRows((10 * rows,)), FeatureRows((rows[:4], rows[4:]))]
    training.labels = torch.arange(10)
    training.heads = [RecordingHeads([9.0, 5.0]), RecordingHeads([1.0])]
    training.rates = [torch.tensor([4.0, 8.0]), torch.tensor([1.0])]
    training.machine = Machine(CPU, 0, 2, 0)
    training.run()
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("mine select: 60/60 steps ")
    assert line.endswith("  loss 28"), "(5 + 51) * 2 / 4"
    first, second = training.heads
    assert (first.loaded, second.loaded) == ({"of": "a"}, {"of": "b"})
    assert (len(first.steps), len(second.steps)) == (57, 57)
    stream = list(global_batches(0, 10, 4, 3, 60))
    p = training.task.protocol
    settings = {"momentum": p.momentum, "decay": p.weight_decay, "batch": 4}
    for step, batch, one, other in zip(range(3, 60), stream, first.steps, second.steps):
        mine = [index for _, index in batch[:2]]
        assert one[:2] == ([10 * index for index in mine], mine)
        assert other[:2] == (mine, mine)
        factor = p.schedule.factor(step, 60, 2.5)
        torch.testing.assert_close(one[2], factor * torch.tensor([4.0, 8.0]))
        torch.testing.assert_close(other[2], factor * torch.tensor([1.0]))
        assert one[3] == other[3] == settings
    # Another rank says nothing
    training.machine = Machine(CPU, 1, 2, 0)
    training.run()
    assert capsys.readouterr().err == ""


def test_each_head_on_tokens_steps_by_its_own_rate():
    """Three heads, each with a group of weights and one of biases."""
    heads = TokenHeads()
    start = {"weight": torch.zeros(2), "bias": torch.zeros(1)}
    heads.heads = copies(start, 3, CPU)
    heads.norm = None
    groups = []
    for head in heads.heads:
        groups += [{"params": [head["weight"]]}, {"params": [head["bias"]]}]
    heads.optimizer = torch.optim.SGD(groups, lr=0.0)
    for head in heads.heads:
        for parameter in head.values():
            parameter.grad = torch.ones_like(parameter)
    heads.descend(torch.tensor([1.0, 2.0, 4.0]))
    for head, rate in zip(heads.heads, (1.0, 2.0, 4.0)):
        assert head["weight"].tolist() == [-rate] * 2 and head["bias"].tolist() == [
            -rate
        ]
        assert head["weight"].grad is None
    # Copies are of their own
    assert start["weight"].tolist() == [0, 0]
    state = heads.state()
    assert [each["bias"].tolist() for each in state["heads"]] == [[-1], [-2], [-4]]
    other = TokenHeads()
    other.heads, other.norm = copies(start, 3, CPU), None
    groups = [{"params": list(head.values())} for head in other.heads]
    other.optimizer = torch.optim.SGD(groups, lr=0.0)
    with pytest.raises(ValueError, match="parameter group"):
        other.load(state)
    assert [head["bias"].tolist() for head in other.heads] == [[-1], [-2], [-4]]


def test_heads_begin_alike_and_follow_from_the_seed():
    def made(seed, kind=LinearHeads, std=0.5):
        return kind(3, 2, 4, std=std, seed=seed, device=CPU)

    heads = made(0)
    first = heads.weight.view(3, 2, 4)
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2])
    assert not torch.equal(first[0, 0], first[0, 1])
    assert torch.equal(made(0, AdamHeads).weight, heads.weight)
    assert not torch.equal(made(1).weight, heads.weight)
    torch.testing.assert_close(made(0, std=1.0).weight, 2 * heads.weight)
    assert not heads.bias.any() and heads.bias.shape == (6,)
    features = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    heads.weight[2:4] *= 3
    heads.bias[3] = 7.0
    labels = torch.tensor([0, 1, 0, 1, 1])
    logits = heads.logits(features)
    losses = heads.mean_loss(features, labels)
    for n in range(3):
        rows = slice(2 * n, 2 * n + 2)
        expected = features @ heads.weight[rows].T + heads.bias[rows]
        torch.testing.assert_close(logits[:, n], expected)
        loss = torch.nn.functional.cross_entropy(expected, labels)
        torch.testing.assert_close(losses[n], loss)


@pytest.mark.parametrize(
    ("changes", "kind", "with_val"),
    [
        ([], LinearHeads, True),
        (["optimizer=adam", "augment=null"], AdamHeads, True),
        (["patience=2"], LinearHeads, False),
    ],
)
def test_heads_of_each_trunk_train_on_what_may_train(
    monkeypatch, changes, kind, with_val
):
    made = []
    monkeypatch.setattr(sgd, "ProbeTraining", lambda **how: made.append(how) or Done())
    train = ImageList(Path("/d"), ["1", "2"], (0, 1), ("a", "b", "c"))
    splits = Splits(train, train.subset([1]), train.subset([0]), True)
    p = load_protocol("lorac", all_kinds(), [*SMALL, *changes])
    task = SimpleNamespace(
        protocol=p, dataset=SimpleNamespace(name="mine"), splits=splits, seed=0
    )
    extractor = Extracted(lambda images, what: [f"{what} {n}" for n in range(2)])
    extractor.trunks = [SimpleNamespace(dim=4), SimpleNamespace(dim=6)]
    probe = SgdProbe(task, extractor, ONE, StopFlag())
    heads = probe._train("train", [(0.1, 1.0), (2.0,)], with_val=True)
    ((how,), shapes) = made, [each.weight.shape for each in heads]
    assert [type(each) for each in heads] == [kind] * 2
    assert shapes == [(6, 4), (3, 6)], "a head for each rate, three classes each"
    # Declared for eight images, used on four
    used = [rates.tolist() for rates in how["rates"]]
    assert used == [pytest.approx([0.05, 0.5]), pytest.approx([1.0])]
    assert len(how["images"]) == (3 if with_val else 2)
    assert (how["phase"], how["heads"], how["trunks"]) == (
        "train",
        heads,
        extractor.trunks,
    )
    kept = None
    if p.augment is None:
        splits_of = ("train", "val")
        kept = [
            FeatureRows(tuple(f"mine {split} features {n}" for split in splits_of))
            for n in range(2)
        ]
    assert how["features"] == kept
    watched = None
    if p.patience is not None:
        watched = [f"mine val features {n}" for n in range(2)]
    assert how["watched"] == watched


class Done:
    """A training that has nothing left to do."""

    def run(self):
        pass


def test_every_rate_is_scored_by_the_datasets_metric_and_said(caplog):
    caplog.set_level("INFO", "backbench")
    draw = torch.Generator().manual_seed(4)
    labels = (0, 0, 0, 0, 1, 2, 2)
    val = ImageList(None, [str(n) for n in range(7)], labels, tuple("abcdef"))
    train = val.subset(range(5))
    features = {"val": [torch.randn(7, 4, generator=draw) for _ in "xy"]}
    features["train"] = [torch.randn(5, 4, generator=draw) for _ in "xy"]
    asked = []

    def extractor(images, what):
        asked.append(what)
        return features["val" if len(images) == 7 else "train"]

    names = [SimpleNamespace(name=name) for name in ("one", "other")]
    extractor = Extracted(extractor)
    extractor.trunks = [
        SimpleNamespace(digest=digest, checkpoint=name)
        for digest, name in zip("ab", names)
    ]
    p = load_protocol("lorac", all_kinds(), [*SMALL, "lr=0.1,1,10"])
    task = SimpleNamespace(
        protocol=p,
        dataset=SimpleNamespace(name="mine", metric="mean_per_class"),
        splits=Splits(train, val, val, False),
    )
    probe = SgdProbe(task, extractor, ONE, StopFlag())
    candidates = [drawn_heads(), drawn_heads()]
    candidates[1].weight *= -1
    found = probe._scores(candidates, "val")
    assert list(found) == ["a", "b"]
    for digest, heads, rows in zip("ab", candidates, features["val"]):
        for n in range(3):
            own = slice(6 * n, 6 * n + 6)
            best = (rows @ heads.weight[own].T + heads.bias[own]).argmax(1).numpy()
            right = best == labels
            by_class = [right[:4].mean(), right[4:5].mean(), right[5:].mean()]
            assert found[digest][n] == pytest.approx(100 * np.mean(by_class))
    said = []
    for name, digest in (("one", "a"), ("other", "b")):
        each = [f"{lr}: {v:.2f}" for lr, v in zip(("0.1", "1", "10"), found[digest])]
        said.append(f"{name} on mine val, by learning rate: {'  '.join(each)}")
    assert caplog.messages == said
    assert asked == ["mine val features"]
    # Features of each trunk, in the order of train and val
    asked.clear()
    for with_val, count in ((True, 12), (False, 5)):
        tables = probe.features(with_val)
        assert [len(table) for table in tables] == [count] * 2
        for n, table in enumerate(tables):
            parts = [features["train"][n], features["val"][n]][: 1 + with_val]
            assert torch.equal(table.take(torch.arange(count)), torch.cat(parts))
    train_and_val = ["mine train features", "mine val features"]
    assert asked == [*train_and_val, train_and_val[0]]


class Extracted:
    """An extractor whose features are given."""

    def __init__(self, give):
        self.give = give

    def __call__(self, images, what):
        return self.give(images, what)


# How a rate is chosen


class StoodInProbe(SgdProbe):
    """A probe whose trainings, scores and temperatures are given; `done` says what was asked."""

    done: ClassVar[list] = []

    def _train(self, phase, rates, *, with_val):
        self.done.append((phase, [tuple(each) for each in rates], with_val))
        return [f"{phase} {trunk.digest}" for trunk in self.extractor.trunks]

    def _scores(self, candidates, split):
        self.done.append((split, list(candidates)))
        return {"a": [50.0, 70.0, 70.0], "b": [60.0, 50.0, 40.0]}

    def _temperatures(self, heads):
        self.done.append([(each.heads, each.index, each.scores) for each in heads])
        return [1.5, 2.5]


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """probe(overrides, rank): a probe of two trunks on 20 images, and steps that it left out"""
    left_out = []
    monkeypatch.setattr(price, "skip", lambda *what: left_out.append(what))

    def make(*overrides, rank=0):
        StoodInProbe.done.clear()
        left_out.clear()
        p = load_protocol("lorac", all_kinds(), [*SMALL, "lr=0.1,1,10", *overrides])
        task = SimpleNamespace(
            protocol=p,
            dataset=SimpleNamespace(name="mine"),
            splits=SimpleNamespace(train=range(20)),
            state_file=tmp_path / "x.state",
        )
        extractor = SimpleNamespace(trunks=[SimpleNamespace(digest=d) for d in "ab"])
        machine = dataclasses.replace(ONE, rank=rank)
        return StoodInProbe(task, extractor, machine, StopFlag()), left_out

    return make


GRID = [(0.1, 1.0, 10.0)] * 2
SELECTED = [
    ("select", GRID, False),
    ("val", ["select a", "select b"]),
    # The first of two that are best, and its scores are not its own
    [("select a", 1, None), ("select b", 0, None)],
]
REFIT = ("refit", [(1.0,), (0.1,)], True)


def test_the_rate_that_val_chooses_trains_again_from_the_start(probe):
    one, left_out = probe()
    finals = one.chosen_on_val()
    assert one.done == [*SELECTED, REFIT] and left_out == []
    assert finals == [
        FinalHead("refit a", 0, 1.0, [50.0, 70.0, 70.0], 1.5),
        FinalHead("refit b", 0, 0.1, [60.0, 50.0, 40.0], 2.5),
    ]
    assert json.loads(one.choice_file.read_text()) == {
        "scores": {"a": [50.0, 70.0, 70.0], "b": [60.0, 50.0, 40.0]},
        "temperatures": {"a": 1.5, "b": 2.5},
    }
    # A refit that was stopped does not choose again
    again, left_out = probe()
    assert again.chosen_on_val() == finals
    assert again.done == [REFIT] and left_out == [("step", 9)]
    # One whose trunks were not all there does
    kept = json.loads(one.choice_file.read_text())
    del kept["scores"]["b"]
    one.choice_file.write_text(json.dumps(kept))
    again, left_out = probe()
    assert again.chosen_on_val() == finals
    assert again.done == [*SELECTED, REFIT] and left_out == []
    # Another rank writes nothing
    one.choice_file.unlink()
    other, _ = probe(rank=1)
    assert other.chosen_on_val() == finals and not one.choice_file.exists()


def test_one_rate_has_a_temperature_where_val_has_not_trained_it(probe):
    one, _ = probe("lr=1.0")
    heads = [FinalHead("train a", 0, 1.0), FinalHead("train b", 0, 1.0)]
    assert one.one_rate() == heads
    assert one.done == [("train", [(1.0,)] * 2, True)]
    patient, _ = probe("lr=1.0", "patience=2")
    assert [final.temperature for final in patient.one_rate()] == [1.5, 2.5]


def test_a_rate_that_test_chooses_is_scored_as_it_is(probe):
    one, _ = probe("select=test", "protocol=linear-testsel-v1")
    assert one.chosen_on_test() == [
        FinalHead("train a", 1, 1.0, [50.0, 70.0, 70.0]),
        FinalHead("train b", 0, 0.1, [60.0, 50.0, 40.0]),
    ]
    assert one.done == [("train", GRID, True), ("test", ["train a", "train b"])]


# What is said of a head


def drawn_heads():
    heads = LinearHeads(3, 6, 4, std=1.0, seed=0, device=CPU)
    heads.weight.normal_(generator=torch.Generator().manual_seed(1))
    heads.bias.normal_(generator=torch.Generator().manual_seed(2))
    return heads


def test_the_final_head_is_one_of_its_grid():
    heads = drawn_heads()
    final = FinalHead(heads, 1, 0.5, [1.0, 3.0, 2.0])
    features = torch.randn(7, 4, generator=torch.Generator().manual_seed(3))
    expected = features @ heads.weight[6:12].T + heads.bias[6:12]
    torch.testing.assert_close(torch.cat(list(final.logits(features))), expected)
    kept = final.kept
    assert torch.equal(kept.weight, heads.weight[6:12])
    assert torch.equal(kept.bias, heads.bias[6:12])
    assert (kept.temperature, kept.temperature_from) == (None, None)
    twin = dataclasses.replace(final, temperature=2.0).kept
    assert (twin.temperature, twin.temperature_from) == (2.0, "hold-out, twin")
    own = dataclasses.replace(final, temperature=2.0, scores=None).kept
    assert own.temperature_from == "hold-out"
    heads.weight.zero_()
    assert kept.weight.any(), "a copy of its own"
    # Its answers, by two of the heads, on a table in two parts
    heads = drawn_heads()
    table = FeatureRows((features[:3], features[3:]))
    first, last = rankings(heads, table, [0, 2])
    for found, n in ((first, 0), (last, 2)):
        logits = (
            features @ heads.weight[6 * n : 6 * n + 6].T + heads.bias[6 * n : 6 * n + 6]
        )
        assert found.tolist() == logits.argsort(1, descending=True)[:, :5].tolist()


def test_a_row_says_its_rate_and_what_chose_it(caplog):
    p = load_protocol("lorac", all_kinds(), [*SMALL, "lr=0.1,1.0,10"])
    task = SimpleNamespace(protocol=p, dataset=SimpleNamespace(name="mine"))
    trunk = SimpleNamespace(checkpoint=SimpleNamespace(name="vit"))
    final = FinalHead(None, 1, 1.0, [50.0, 60.0, 55.0])
    expected = {
        "lr": 1.0,
        "lr_used": 0.5,
        "reference_batch": 8,
        "batch_size": 4,
        "on": "val",
        "trained_on": "train+val",
        "scores": {"0.1": 50.0, "1": 60.0, "10": 55.0},
        "at_edge": False,
    }
    assert chosen_rate(task, trunk, final) == expected
    edge = FinalHead(None, 2, 10.0, [50.0, 60.0, 65.0])
    assert chosen_rate(task, trunk, edge)["at_edge"] is True
    assert "vit on mine: the best learning rate 10 is the largest of" in caplog.text
    # One rate, of a dataset whose val stays out
    alone = SimpleNamespace(protocol=p, dataset=SimpleNamespace(name="birdsnap"))
    assert chosen_rate(alone, trunk, FinalHead(None, 0, 0.1)) == {
        "lr": 0.1,
        "lr_used": 0.05,
        "reference_batch": 8,
        "batch_size": 4,
        "on": None,
        "trained_on": "train",
    }
    # By rate and weight decay: an edge is one of the rates
    both = load_protocol(
        "attentive_demo", all_kinds(), ["lr=1,10", "weight_decays=0,0.5"]
    )
    task = SimpleNamespace(protocol=both, dataset=SimpleNamespace(name="mine"))
    chosen = chosen_rate(task, trunk, FinalHead(None, 3, 10.0, [1.0, 2.0, 3.0, 4.0]))
    assert chosen["weight_decay"] == 0.5
    names = ["1 wd 0", "1 wd 0.5", "10 wd 0", "10 wd 0.5"]
    assert chosen["scores"] == dict(zip(names, [1.0, 2.0, 3.0, 4.0]))
    assert (chosen["trained_on"], chosen["at_edge"]) == ("train", True)


def test_pixels_are_pinned_for_a_gpu_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(
        batches.loading, "batches", lambda *_, **how: asked.append(how["pin"]) or []
    )
    for device in ("cpu", "cuda"):
        machine = Machine(torch.device(device), rank=0, world=1, workers=0)
        assert list(batches.loader(None, [], machine=machine)) == []
    assert asked == [False, True]
