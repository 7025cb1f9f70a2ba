"""What is written, shown and warned of while a pretraining runs, against numbers by hand."""

import logging
import math
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import tiny_pretraining
from torch import nn

from backbench import charts
from backbench.errors import BadInput
from backbench.images.crops import Crops
from backbench.images.image_list import ArrayList
from backbench.pretrain import monitor
from backbench.pretrain.recipe import ViewsConfig
from backbench.runs.step_metrics import Metrics, read_metrics

CPU = torch.device("cpu")


def terms(**values):
    return {name: torch.tensor(float(value)) for name, value in values.items()}


# ---- Terms


def test_terms_are_means_over_micro_batches_and_then_over_steps():
    recent = monitor.RecentTerms()
    recent.add([terms(loss=1, rank=4), terms(loss=5, rank=8)], CPU)
    recent.add([terms(loss=6, rank=1)], CPU)
    recent.add([terms(loss=0, rank=2)], CPU)
    assert len(recent) == 3
    assert [float(row["loss"]) for row in recent.rows] == [3, 6, 0]
    assert recent.mean() == {"loss": 3, "rank": 3}
    assert recent.first_not_finite() is None
    recent.rows[1]["loss"] = torch.tensor(math.inf)
    recent.rows[2]["loss"] = torch.tensor(math.nan)
    assert recent.first_not_finite() == 1


# ---- Rows


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(monitor, "time", clock)
    return clock


NO_FEATURES = SimpleNamespace(statistics=dict)


def steps(record, clock, recent, *, count, first, row_due, features=NO_FEATURES):
    """Make `count` steps of 3 seconds, of which one is spent waiting."""
    for done in range(first + 1, first + count + 1):
        with record.waiting():
            clock.now += 1
        clock.now += 2
        recent.add([terms(loss=done)], CPU)
        record.step(
            recent, features, done=done, epoch=7, lr=0.25, row_due=row_due(done)
        )


def test_a_row_is_the_mean_since_the_last_with_its_speed(clock, tmp_path):
    record = monitor.RunLog(
        tmp_path, tiny_pretraining.config(batch_size=6), rank=0, step=0, last=9
    )
    recent = monitor.RecentTerms()
    features = SimpleNamespace(statistics=lambda: {"feature_std": 0.5})
    with record.paused():
        clock.now += 1000
    steps(
        record,
        clock,
        recent,
        count=4,
        first=0,
        row_due=lambda done: done in (2, 4),
        features=features,
    )
    first, second = read_metrics(tmp_path)
    # Linux counts in KiB; this process may have grown since
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert first.pop("memory_gib") == pytest.approx(used, rel=0.1)
    assert first == {
        "step": 1,
        "epoch": 7,
        "lr": 0.25,
        "loss": 1.5,
        "feature_std": 0.5,
        "images_per_s": 2 * 6 / 6,
        "waiting": pytest.approx(1 / 3),
    }
    assert (second["step"], second["loss"]) == (3, 3.5)
    assert (second["images_per_s"], second["waiting"]) == (2, pytest.approx(1 / 3))
    assert record.shown == {
        "loss": 3.5,
        "lr": 0.25,
        "img/s": 2,
        "waiting": pytest.approx(1 / 3),
    }
    assert len(recent) == 0
    # Terms without a row stay
    steps(record, clock, recent, count=2, first=4, row_due=lambda _: False)
    assert len(recent) == 2
    assert len(read_metrics(tmp_path)) == 2


@pytest.mark.parametrize(("there", "peak"), [(True, 3 << 29), (True, 0), (False, 1)])
def test_memory_is_a_gpus_where_one_is_used(clock, tmp_path, monkeypatch, there, peak):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    monkeypatch.setattr(
        monitor.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=5 << 19)
    )
    record = monitor.RunLog(tmp_path, tiny_pretraining.config(), 0, 0, 9)
    steps(record, clock, monitor.RecentTerms(), count=1, first=0, row_due=bool)
    (row,) = read_metrics(tmp_path)
    assert row["memory_gib"] == (1.5 if there and peak else 2.5)


def test_a_collapse_is_told_with_the_step_that_the_row_ends_with(
    clock, tmp_path, caplog
):
    record = monitor.RunLog(tmp_path, tiny_pretraining.config(), 0, 0, 9)
    equal = SimpleNamespace(
        statistics=lambda: {"feature_std": 0.0, "effective_rank": 1.0}
    )
    recent = monitor.RecentTerms()
    steps(record, clock, recent, count=1, first=4, row_due=bool, features=equal)
    assert "step 5: the representation collapses" in caplog.text


def test_other_ranks_write_nothing_and_forget_as_the_first(clock, tmp_path):
    record = monitor.RunLog(tmp_path, tiny_pretraining.config(), 1, 0, 9)
    recent = monitor.RecentTerms()
    steps(record, clock, recent, count=2, first=0, row_due=lambda done: done == 2)
    record.knn(50.0, done=2, epoch=0)
    assert len(recent) == 0
    assert record.shown == {} and record.progress is None
    assert not list(tmp_path.iterdir())


def test_a_score_is_a_row_of_its_own_step(tmp_path, caplog):
    caplog.set_level(logging.INFO, "backbench")
    record = monitor.RunLog(tmp_path, tiny_pretraining.config(), 0, 0, 9)
    record.knn(None, done=4, epoch=1)
    assert read_metrics(tmp_path) == []
    record.knn(51.25, done=6, epoch=2)
    assert read_metrics(tmp_path) == [{"step": 5, "epoch": 2, "knn": 51.25}]
    assert "epoch 3: kNN 51.25%" in caplog.text


def test_a_run_that_continues_knows_whether_it_has_its_score(tmp_path):
    config = tiny_pretraining.config()
    metrics = Metrics(tmp_path)
    metrics.write(3, knn=40.0)
    metrics.write(5, loss=1.0)
    metrics.write(6, knn=50.0)
    # Rows of steps that are made again go first, so the latest step is asked first
    for step, known in ((7, True), (6, False), (5, False), (4, True)):
        record = monitor.RunLog(tmp_path, config, 0, step, 9)
        assert record.has_knn is known
        assert all(row["step"] < step for row in read_metrics(tmp_path))
        assert record.progress.done == step


def test_each_image_that_was_left_out_is_told_once(tmp_path, caplog):
    record = monitor.RunLog(tmp_path, tiny_pretraining.config(), 0, 0, 9)
    caplog.clear()  # the price
    parts = [SimpleNamespace(skipped=each) for each in (("a", "b"), ("a", "c"))]
    record.warn_of_skipped(parts)
    record.warn_of_skipped(parts[1:])
    said = [line.getMessage() for line in caplog.records]
    assert said == ["left out: a", "left out: b", "left out: c"]


@pytest.mark.parametrize(
    ("gpu", "quick", "cheaper"),
    [
        (False, True, "`--fast` or `epochs=N` costs less"),
        (False, False, "`--fast precision=fp32` or `epochs=N` costs less"),
        (True, True, ""),
    ],
)
def test_the_work_is_announced(monkeypatch, gpu, quick, cheaper):
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(monitor, "bf16_is_quick", lambda device: quick)
    monkeypatch.setattr(
        monitor.price, "announce", lambda *words, **more: said.append((words, more))
    )
    monitor.announce(tiny_pretraining.config(epochs=3, batch_size=32), 1200)
    words = ("pretrain test", "3 epochs, 32 images a step")
    assert said == [(words, {"work": {"step": 1200}, "cheaper": cheaper})]


# ---- Features


def test_the_spread_of_features_by_hand():
    """On the axes: of length 1, whatever they are; eigenvalues 6 and 2 of three pairs and one."""
    lengths = torch.tensor([[1.0], [2], [3], [4], [0.5], [7], [9], [1]])
    axes = torch.tensor([[1.0, 0], [-1, 0]]).repeat(4, 1)
    axes[6:] = torch.tensor([[0.0, 1], [0, -1]])
    found = monitor.feature_statistics(lengths * axes)
    mean = (math.sqrt(6 / 8) + math.sqrt(2 / 8)) / 2
    assert found["feature_std"] == pytest.approx(mean * math.sqrt(2))
    p = math.sqrt(6) / (math.sqrt(6) + math.sqrt(2))
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert found["effective_rank"] == pytest.approx(math.exp(entropy))
    # More dimensions than features, in which nothing varies
    wide = torch.cat([lengths * axes, torch.zeros(8, 14)], 1)
    found = monitor.feature_statistics(wide)
    assert found["feature_std"] == pytest.approx(
        mean * math.sqrt(2) * math.sqrt(2 / 16)
    )
    assert found["effective_rank"] == pytest.approx(math.exp(entropy))
    wide[3, 5] = torch.nan
    found = monitor.feature_statistics(wide)
    assert found.keys() == {"feature_std", "effective_rank"}
    assert all(math.isnan(value) for value in found.values())
    # However near they are
    angle = 1e-4
    near = torch.tensor([[1.0, 0]] * 4, dtype=torch.float64)
    near[:2, 1], near[2:, 1] = math.tan(angle), -math.tan(angle)
    assert monitor.feature_statistics(near) == {
        "feature_std": pytest.approx(math.sin(angle) / 2 * math.sqrt(2)),
        "effective_rank": pytest.approx(1),
    }
    equal = monitor.feature_statistics(torch.ones(4, 3))
    assert equal == {"feature_std": 0, "effective_rank": pytest.approx(1)}


def test_features_are_those_of_the_last_pass_in_training():
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data.copy_(torch.eye(2))
    features = monitor.Features(layer)
    assert features.statistics() == {}
    layer(torch.eye(2)[:1])
    assert features.statistics() == {}
    axes = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    layer(axes)
    spread = {"feature_std": pytest.approx(1), "effective_rank": pytest.approx(2)}
    assert features.statistics() == spread
    layer.eval()
    layer(torch.ones(4, 2))
    assert features.statistics() == spread
    assert not features.last.requires_grad
    layer.train()
    layer(axes[:2])
    assert features.statistics()["effective_rank"] == pytest.approx(1)


def test_a_collapse_begins_below_its_limits(caplog):
    limits = {"feature_std": monitor.COLLAPSED_STD, "effective_rank": 1.5}
    monitor.warn_if_collapsed(limits, 3)
    monitor.warn_if_collapsed({"feature_std": 0.0}, 3)
    monitor.warn_if_collapsed({"rank_L": 1.5, "kept_L": 0.01}, 3)
    assert caplog.text == ""
    rows = [
        limits | {"feature_std": 0.0009},
        limits | {"effective_rank": 1.4},
        {"rank_L": 1.4, "kept_L": 0.5},
        {"rank_L": 9.0, "kept_L": 0.009},
        {"rank_L": 0.0, "kept_L": 0.0},
        {"rank_L": 9.0, "kept_L": -0.5},
    ]
    for step, row in enumerate(rows):
        monitor.warn_if_collapsed(row, step)
    collapses = "the representation collapses (feature std"
    small = "method.alpha is too large for these features"
    assert [line.getMessage() for line in caplog.records] == [
        f"step 0: {collapses} 0.0009, effective rank 1.5)",
        f"step 1: {collapses} 0.001, effective rank 1.4)",
        f"step 2: CLLR's L collapses (effective rank 1.4, gives 0.5 of phi back); {small}",
        f"step 3: CLLR's L collapses (effective rank 9, gives 0.009 of phi back); {small}",
        f"step 4: CLLR's L collapses (effective rank 0, gives 0 of phi back); {small}",
        "step 5: CLLR's L explodes (gives -0.5 of phi back); optim.lr or method.weight is too"
        " large for these features",
    ]


# ---- The kNN score

RED, GREEN = (230, 20, 20), (20, 230, 20)


class MeanColour(nn.Module):
    """Its features are an image's mean colour. It notes how it is called."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.calls = []

    def forward(self, images):
        self.calls.append((tuple(images.shape), self.training))
        return self.scale * images.mean((2, 3))


def coloured(colours, labels, classes=("r", "g")):
    pixels = np.empty((len(colours), 16, 16, 3), np.uint8)
    pixels[:] = np.array(colours, np.uint8)[:, None, None]
    names = tuple(map(str, range(len(colours))))
    return ArrayList(Path("here"), names, tuple(labels), classes, pixels)


def scorer(found, size=16):
    """The first view's size is the images'."""
    crops = (Crops(size=size, count=1), Crops(size=8, count=1))
    return monitor.KnnScore(found, ViewsConfig(crops=crops), CPU)


def test_every_second_labelled_image_is_classified_by_the_others():
    """Of eight images one has no label. The bank is 0, 2, 5 and 7; the queries are 1, 4 and 6, of
    which 4 shows what its label does not say."""
    colours = [RED, RED, GREEN, GREEN, GREEN, RED, GREEN, GREEN]
    labels = [0, 0, 1, -1, 0, 0, 1, 1]
    score = scorer(coloured(colours, labels))
    assert score.chosen == [0, 1, 2, 4, 5, 6, 7]
    backbone = MeanColour()
    assert score(backbone) == pytest.approx(100 * 2 / 3)
    assert backbone.calls == [((7, 3, 16, 16), False)]
    assert backbone.training
    backbone.eval()
    assert score(backbone) == pytest.approx(100 * 2 / 3)
    assert not backbone.training


def test_four_images_of_two_classes_are_the_least():
    colours = [RED, RED, GREEN, GREEN]
    backbone = MeanColour()
    # The bank is 0 and 2, so the surer of two neighbours is right for both queries
    assert scorer(coloured(colours, [0, 0, 1, 1]))(backbone) == 100
    assert scorer(coloured(colours, [0, 0, 1, -1]))(backbone) is None
    assert scorer(coloured(colours, [0] * 4, classes=("r",)))(backbone) is None
    assert scorer(coloured(colours, [-1] * 4))(backbone) is None


class Brightness(nn.Module):
    """Its features lie on an arc, in the order of their brightness."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.01))

    def forward(self, images):
        level = images.mean((1, 2, 3))
        return torch.stack([torch.ones_like(level), self.scale * level], 1)


def test_twenty_neighbours_vote():
    """The nearest are ten of the right class, and ten of the twelve others: a tie, but for nearness."""
    bank = [(n, 0) for n in range(10)] + [(20 + n, 1) for n in range(12)]
    rows = [row for each in bank for row in (each, (0, 0))]
    colours = [(level,) * 3 for level, _ in rows]
    score = scorer(coloured(colours, [label for _, label in rows]))
    assert score(Brightness()) == 100


def test_images_that_cannot_be_read_are_left_out(monkeypatch):
    colours = [RED, GREEN, RED, RED, GREEN, GREEN]
    found = coloured(colours, [0, 1, 0, 0, 1, 1])
    gone = set()
    real = ArrayList.open

    def opened(self, index):
        if index in gone:
            raise BadInput("gone")
        return real(self, index)

    monkeypatch.setattr(ArrayList, "open", opened)
    gone.add(1)
    backbone = MeanColour()
    # Left are 0, 2, 3, 4, 5: two queries, 2 and 4, and the bank 0, 3 and 5
    assert scorer(found)(backbone) == 100
    assert backbone.calls[0][0] == (5, 3, 16, 16)
    gone.update((2, 4))
    assert scorer(found)(backbone) is None


def test_many_images_are_taken_evenly_in_batches(monkeypatch):
    monkeypatch.setattr(monitor, "KNN_IMAGES", 300)
    count = 602
    found = coloured([RED] * 300 + [GREEN] * 302, [0] * 300 + [1] * 302)
    score = scorer(found)
    assert score.chosen == list(range(0, count, 3))
    monkeypatch.setattr(monitor, "KNN_IMAGES", 301)
    score = scorer(found)
    assert score.chosen == list(range(0, count, 2))
    backbone = MeanColour()
    assert score(backbone) == 100
    assert [shape[0] for shape, _ in backbone.calls] == [256, 45]
    stop = SimpleNamespace(requested=None)
    assert score(backbone, stop) == 100
    stop.requested = "SIGTERM"
    assert score(backbone, stop) is None


@pytest.mark.parametrize(
    ("count", "every"), [(10_000, 1), (10_001, 2), (20_000, 2), (20_001, 3)]
)
def test_at_most_ten_thousand_images_are_scored(count, every):
    found = ArrayList(Path("here"), ("",) * count, (0, -1) * count, ("r", "g"), None)
    assert scorer(found).chosen == list(range(0, 2 * count, 2 * every))


@pytest.mark.parametrize(
    ("size", "resized"), [(224, 256), (64, 64), (65, 74), (96, 110)]
)
def test_small_images_are_taken_whole(monkeypatch, size, resized):
    given = []
    monkeypatch.setattr(monitor, "eval_geometry", lambda **sides: given.append(sides))
    scorer(coloured([RED], [0]), size)
    assert given == [{"resize": resized, "crop": size}]


# ---- Curves


def test_each_number_has_a_panel_of_its_steps(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(charts, "save", lambda *about: saved.append(about))
    monitor.plot_curves(tmp_path, "mine")
    assert saved == []
    metrics = Metrics(tmp_path)
    for step in range(30):
        metrics.write(step, often=1.0)
        if step:
            metrics.write(step, seldom=1.0)
    monitor.plot_curves(tmp_path, "mine")
    markers = [ax.lines[0].get_marker() for ax in saved.pop()[0].axes]
    assert markers == ["", "."]
    (tmp_path / "metrics.jsonl").unlink()
    metrics = Metrics(tmp_path)
    metrics.write(9, epoch=0, loss=3.0, feature_std=0.5)
    metrics.write(11, epoch=0, knn=40.0)
    metrics.write(19, epoch=1, loss=2.0, feature_std=0.25)
    monitor.plot_curves(tmp_path, "mine")
    ((figure, file),) = saved
    assert file == tmp_path / "curves"
    assert figure.get_suptitle() == "mine"
    drawn = {}
    for ax in figure.axes:
        (line,) = ax.lines
        assert ax.get_xlabel() == "step"
        assert line.get_marker() == "."
        drawn[ax.get_title()] = line.get_xydata().tolist()
    assert drawn == {
        "loss": [[10, 3], [20, 2]],
        "feature std": [[10, 0.5], [20, 0.25]],
        "knn": [[12, 40]],
    }
