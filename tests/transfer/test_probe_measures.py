"""Probes on features that are given: what goes to the rows where answers are wrong or fits unfinished."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from backbench.datasets.splits import Splits
from backbench.errors import BadInput, Preempted
from backbench.images.image_list import ImageList
from backbench.runs.state import StopFlag
from backbench.stats import confidence
from backbench.stats.partitions import agreement
from backbench.transfer import keeping, logreg
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import FeatureRows
from backbench.transfer.features.layer_cells import LayerCell
from backbench.transfer.probes import (
    class_retrieval,
    cluster,
    fewshot,
    knn,
    label_curve,
    multilabel,
    svm,
)
from backbench.transfer.probes import logreg as probe_logreg
from backbench.transfer.probes.fewshot import FewShot
from backbench.transfer.probes.label_curve import LabelCurve
from backbench.transfer.probes.layers import CellScale, LabelledSplit
from backbench.transfer.probes.logreg import LogReg
from backbench.transfer.probes.ood import Ood
from backbench.transfer.probes.svm import ClassHead, Svm

ONE = Machine(torch.device("cpu"), 0, 1, 0)


def images(labels, classes=("a", "b", "c")):
    """A list of files that nobody reads."""
    paths = tuple(f"{i}.png" for i in range(len(labels)))
    return ImageList(Path("/d"), paths, tuple(labels), classes)


def grouped(labels, seed=0, dim=5):
    """Features around a centre for each label, some of them nearer to another."""
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(9).normal(size=(3, dim))
    features = centres[np.asarray(labels)] + draw.normal(size=(len(labels), dim))
    return torch.tensor(features, dtype=torch.float32)


SPLITS = Splits(
    images([0, 1, 2] * 6),
    images([0, 0, 1, 1, 2, 2]),
    images([0, 1, 2, 2] * 5),
    held_out=False,
)


class GivenTrunk:
    """A trunk whose features are given."""

    def __init__(self, mark):
        self.checkpoint = SimpleNamespace(name=f"model {mark}", digest=mark * 64)
        self.digest = mark * 64
        self.verified = 0

    def verify(self):
        self.verified += 1


class GivenFeatures:
    """An extractor of two trunks, by given features of each split."""

    def __init__(self, splits=SPLITS):
        self.trunks = [GivenTrunk("x"), GivenTrunk("y")]
        self.features = []
        for n, (_, part) in enumerate(splits.items()):
            seeds = (3 * n, 100 + 3 * n)
            self.features.append([grouped(part.labels, seed) for seed in seeds])

    def of_splits(self, splits, name):
        assert name == "mine"
        return tuple(self.features)

    def __call__(self, listed, what):
        assert what == "mine test features"
        return self.features[2]


@pytest.fixture
def written(monkeypatch):
    """What is written as rows, by checkpoint."""
    found = []

    def write_plain(task, checkpoint, values, arrays, **more):
        found.append(
            SimpleNamespace(point=checkpoint, values=values, arrays=arrays, **more)
        )
        return [len(found)]

    monkeypatch.setattr(keeping, "write_plain", write_plain)
    return found


def assigned(tmp_path, p, *, metric="top1", splits=SPLITS, seed=0):
    return SimpleNamespace(
        run=tmp_path,
        protocol=p,
        splits=splits,
        dataset=SimpleNamespace(name="mine", metric=metric, metrics=(metric,)),
        seed=seed,
        state_file=tmp_path / "x.state",
    )


def progress(run):
    note = json.loads((run / "progress.json").read_text())
    return note["what"], note["unit"], note["done"], note["total"]


# Few labels


@pytest.mark.parametrize("metric", ["top1", "mean_per_class"])
def test_few_labels_are_scikit_learns_in_every_draw(tmp_path, written, metric):
    p = FewShot(kind="fewshot", protocol="x-v1", shots=2, draws=3, l2=0.5)
    given = GivenFeatures()
    task = assigned(tmp_path, p, metric=metric, seed=5)
    assert fewshot.measure(task, given, ONE, StopFlag()) == [1, 2]
    both = SPLITS.both()
    y = np.asarray(both.labels)
    label = np.asarray(SPLITS.test.labels)
    drawn = fewshot.draws(both, shots=2, count=3, seed=5)
    for n, row in enumerate(written):
        train, val, test = (
            torch.nn.functional.normalize(part[n].double(), dim=1).numpy()
            for part in given.features
        )
        bank = np.concatenate([train, val])
        predicted = []
        for indices in drawn:
            head = LogisticRegression(C=2, tol=1e-9, max_iter=5000)
            predicted.append(head.fit(bank[indices], y[indices]).predict(test))
        hits = np.stack(predicted) == label
        scores = [100 * each.mean() for each in hits]
        if metric == "mean_per_class":
            scores = [
                100 * np.mean([each[label == c].mean() for c in range(3)])
                for each in hits
            ]
        value, about = row.values[metric]
        assert about == {
            "draws": pytest.approx(scores),
            "shots": 2,
            "labelled_from": "train+val",
        }
        assert value == pytest.approx(np.mean(scores)) and 0 < value < 100
        np.testing.assert_array_equal(row.arrays["prediction"], np.stack(predicted))
        assert row.arrays["prediction"].dtype == np.int32
        assert row.arrays["values"].tolist() == about["draws"]
        by_class = label if metric == "mean_per_class" else None
        assert row.ci95 == pytest.approx(confidence.of_draws(hits, by_class))
        assert row.chosen is None and row.point is given.trunks[n].checkpoint
    assert len(written) == 2


def test_each_draw_has_a_seed_of_its_own():
    found = {
        fewshot.seed_of_draw(seed, draw) for seed in range(3) for draw in range(100)
    }
    assert len(found) == 300
    assert fewshot.seed_of_draw(0, 7) == 7 and fewshot.seed_of_draw(2, 0) == 2_000_006


@pytest.mark.parametrize(
    ("probe", "p"),
    [
        (fewshot, FewShot(kind="fewshot", protocol="x-v1", draws=2, max_iterations=1)),
        (
            label_curve,
            LabelCurve(
                kind="label_curve",
                protocol="x-v1",
                labels=(2,),
                draws=2,
                max_iterations=1,
            ),
        ),
    ],
)
def test_fits_of_few_labels_that_did_not_converge_are_said(tmp_path, written, probe, p):
    probe.measure(assigned(tmp_path, p), GivenFeatures(), ONE, StopFlag())
    for row in written:
        assert row.chosen["converged"] is False
        assert row.chosen["gradient"] > p.tolerance


def test_a_signal_ends_few_labels_between_two_draws():
    stop = StopFlag()
    stop.requested = "SIGTERM"
    p = FewShot(kind="fewshot", protocol="x-v1")
    features = grouped([0, 1])
    with pytest.raises(Exception, match="stopped by SIGTERM between two draws"):
        fewshot.predictions(
            FeatureRows((features,)),
            [0, 1],
            features,
            [[0, 1]],
            classes=2,
            p=p,
            stop=stop,
        )


def test_the_points_of_a_curve_have_their_draws_and_their_labels(tmp_path, written):
    p = LabelCurve(kind="label_curve", protocol="x-v1", labels=(1, 3), draws=2)
    label_curve.measure(assigned(tmp_path, p), GivenFeatures(), ONE, StopFlag())
    assert [(row.point.name[-1], row.suffix) for row in written] == [
        (mark, suffix)
        for mark in "xy"
        for suffix in ("_labels1", "_labels3", "_labels_all")
    ]
    for row in written:
        value, about = row.values["top1"]
        prediction = row.arrays["prediction"]
        right = prediction == np.asarray(SPLITS.test.labels)
        assert value == pytest.approx(100 * right.mean())
        assert about["labelled_from"] == "train+val"
        if row.suffix == "_labels_all":
            # Eight of each class, as all have equally many; one fit, and no draws
            assert about["labels_per_class"] == 8 and prediction.shape == (20,)
            assert "draws" not in about and "values" not in row.arrays
        else:
            assert about["labels_per_class"] == int(row.suffix[-1])
            assert prediction.shape == (2, 20)
            assert row.arrays["values"].tolist() == about["draws"]
            assert about["draws"] == pytest.approx((100 * right.mean(1)).tolist())
    # Two draws of two points and one of all, of two trunks
    assert progress(tmp_path) == ("mine curve", "fit", 10, 10)


def test_a_curve_grows_from_point_to_point():
    for wrong in ((2, 1), (1, 1), (1, 2, 2)):
        with pytest.raises(ValueError, match="labels must grow from point to point"):
            LabelCurve(kind="label_curve", protocol="x", labels=wrong)
    p = LabelCurve(kind="label_curve", protocol="x", labels=(1, 7))
    assert p.points == [1, 7, None]


# What needs no labels to train


def test_clusters_are_scored_by_the_start_of_least_inertia(tmp_path, written):
    p = cluster.KMeansClusters(kind="cluster", protocol="x-v1", restarts=5)
    given = GivenFeatures()
    cluster.measure(assigned(tmp_path, p, seed=3), given, ONE, StopFlag())
    label = np.asarray(SPLITS.test.labels)
    for row, features, trunk in zip(
        written, given.features[2], given.trunks, strict=True
    ):
        starts = cluster.clusterings(features, 3, p, 3, StopFlag())
        by_start = [agreement(label, clusters) for _, clusters in starts]
        assert list(row.values) == ["nmi", "ari", "cluster_acc"]
        for metric, (value, about) in row.values.items():
            assert about == {"starts": [one[metric] for one in by_start]}
            assert value == by_start[0][metric] and 0 < value < 100
        np.testing.assert_array_equal(row.arrays["cluster"], starts[0][1])
        assert trunk.verified == 1
    # Another seed has other starts; the same has the same
    first = given.features[2][0]
    same = [inertia for inertia, _ in cluster.clusterings(first, 3, p, 3, StopFlag())]
    other = [inertia for inertia, _ in cluster.clusterings(first, 3, p, 4, StopFlag())]
    assert len(same) == 5 and same != other


def test_an_image_that_is_alone_in_its_class_is_no_query(tmp_path, written):
    splits = dataclasses.replace(SPLITS, test=images([0, 1, 1, 0, 2, 1]))
    given = GivenFeatures(splits)
    p = class_retrieval.ClassRetrieval(kind="class_retrieval", protocol="x-v1")
    task = assigned(tmp_path, p, splits=splits)
    assert class_retrieval.measure(task, given, ONE, StopFlag()) == [1, 2]
    labels = torch.tensor(splits.test.labels)
    for row, features, trunk in zip(written, given.features[2], given.trunks):
        assert list(row.values) == ["r1", "map_r"]
        for metric, of_queries in zip(
            ("r1", "map_r"), class_retrieval.retrieve(features, labels)
        ):
            scores = of_queries.numpy()
            assert np.isnan(scores).tolist() == [False] * 4 + [True, False]
            value, about = row.values[metric]
            assert about == {"queries": 5}
            assert value == pytest.approx(100 * np.nanmean(scores)) and 0 < value < 100
            np.testing.assert_array_equal(row.arrays[f"queries_{metric}"], scores)
        assert trunk.verified == 1


# Penalties


@pytest.mark.parametrize(
    ("l2", "penalties"),
    [
        ((0.01, 100, 3), [100, 1, 0.01]),
        ((0.01, 100, 1), [100]),
        ((5, 5, 2), [5, 5]),
        ((1, 1000, 4), [1000, 100, 10, 1]),
    ],
)
def test_penalties_are_even_in_their_logarithms_the_strongest_first(l2, penalties):
    p = LogReg(kind="logreg", protocol="x-v1", l2=l2)
    assert p.penalties == pytest.approx(penalties)


@pytest.mark.parametrize(
    "l2",
    [(0, 1, 3), (2, 1, 3), (1, math.inf, 3), (-1, 1, 3), (math.nan, 1, 3), (1, 2, 0)],
)
def test_penalties_that_are_none_are_refused(l2):
    with pytest.raises(ValueError, match="l2 is the smallest and the largest penalty"):
        LogReg(kind="logreg", protocol="x-v1", l2=l2)


def test_of_equal_scores_the_stronger_penalty_is_kept(tmp_path):
    task = assigned(tmp_path, LogReg(kind="logreg", protocol="x-v1"))
    path = {"scores": [], "gradients": [], "best": -1.0}
    label = np.array([0, 1, 2, 2])
    for n, predicted in enumerate(([0, 1, 1, 1], [0, 1, 2, 0], [1, 1, 2, 2], [0] * 4)):
        fit = logreg.Fit(
            torch.full((3, 2), n), torch.full((3,), -n), 0.0, 1, True, 0.1 * n
        )
        score = probe_logreg._record(task, path, fit, np.array(predicted), label)
        assert score == 100 * np.mean(np.array(predicted) == label)
    assert path["scores"] == [50, 75, 75, 25]
    assert path["gradients"] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert path["best"] == 75
    # The last fit is where the next one begins, the best where the refit does
    found = [int(path[name].max()) for name in ("weight", "best_weight")]
    assert found == [3, 1]
    assert [int(path[name].max()) for name in ("bias", "best_bias")] == [-3, -1]


def test_what_was_chosen_says_each_penalty_and_the_largest_gradient(tmp_path, caplog):
    p = LogReg(kind="logreg", protocol="x-v1", l2=(1, 100, 3), max_iterations=7)
    task = assigned(tmp_path, p)
    point = SimpleNamespace(name="vit")
    path = {"scores": [50.0, 75.0, 75.0], "gradients": [1e-6, 1e-5, 1e-7]}
    final = logreg.Fit(torch.ones(1), torch.ones(1), 0.0, 1, True, 2e-6)
    chosen = probe_logreg._choice(task, point, path, 10.0, final)
    assert chosen == {
        "l2": 10.0,
        "on": "val",
        "trained_on": "train+val",
        "scores": {"100": 50.0, "10": 75.0, "1": 75.0},
        "at_edge": False,
        "converged": True,
        "gradient": 1e-5,
    }
    assert caplog.text == ""
    final = dataclasses.replace(final, gradient=3e-5)
    chosen = probe_logreg._choice(task, point, path, 10.0, final)
    assert (chosen["converged"], chosen["gradient"]) == (False, 3e-5)
    assert (
        "vit on mine: not converged within 7 iterations (gradient 3.0e-05, tolerance 1e-05);"
        " the row says so and never leads; `backbench linear ... --protocol logreg"
        " max_iterations=70` may help" in caplog.text
    )


def test_a_kept_fit_names_whose_temperature_it_has():
    fit = logreg.Fit(torch.ones(3, 2).double(), torch.ones(3).double(), 0.0, 1, True)
    head = probe_logreg._kept(fit, 2.0)
    assert (head.temperature, head.temperature_from) == (2.0, "hold-out, twin")
    assert head.weight.dtype == head.bias.dtype == torch.float32
    bare = probe_logreg._kept(fit, None)
    assert (bare.temperature, bare.temperature_from) == (None, None)


# Scales of layers


@pytest.mark.parametrize("chunk", [4, 100])
def test_a_cell_is_standardised_over_all_parts(chunk):
    x = grouped([0, 1, 2] * 5, dim=6) * 3 + 2
    x[:, 3] = 7.0  # the same everywhere
    parts = [
        LabelledSplit(x[:9], torch.zeros(9)),
        LabelledSplit(x[9:], torch.zeros(6)),
    ]
    cell = LayerCell("block 1", "cls", slice(2, 6))
    scale = CellScale.of(cell, parts, chunk)
    expected = StandardScaler().fit_transform(x[:, 2:6].double().numpy()) / 2
    np.testing.assert_allclose(scale(x).numpy(), expected, atol=1e-6)
    assert not scale(x)[:, 1].any()
    # By the scale of the images that are fitted, whatever else is read
    part = CellScale.of(cell, parts[:1], chunk)
    scaler = StandardScaler().fit(x[:9, 2:6].double().numpy())
    features, labels = part.labelled(parts[1])
    expected = scaler.transform(x[9:, 2:6].double().numpy()) / 2
    np.testing.assert_allclose(features.numpy(), expected, atol=1e-5)
    assert labels is parts[1].labels


# Several classes of an image


def test_a_class_without_a_fit_has_no_score():
    fit = logreg.Fit(
        torch.tensor([[1.0, 0.0], [0.0, 3.0]]),
        torch.tensor([0.5, 0.0]),
        0,
        1,
        True,
        0.25,
    )
    heads = multilabel.Heads([None, fit, dataclasses.replace(fit, gradient=0.125)])
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    shown = [3 * 2 - 1.5, 3 * 4 - 3.5, 3 * 6 - 5.5]
    expected = np.stack([np.zeros(3), shown, shown], 1)
    np.testing.assert_allclose(heads.scores(features, 2), expected)
    assert heads.gradient == 0.25
    assert multilabel.Heads([None]).gradient == 0.0


@pytest.mark.parametrize("shown", [[True] * 4, [False] * 4])
def test_a_class_of_all_images_or_of_none_has_no_svm(shown):
    p = Svm(kind="svm", protocol="x-v1", costs=(1.0,))
    x = np.eye(4)
    head = svm._head(p, x, np.array(shown), np.ones((7, 4)), StopFlag())
    assert (head.cost, head.converged) == (None, True)
    assert math.isnan(head.fold_ap) and head.scores.tolist() == [0] * 7


def test_the_costs_of_fitted_classes_alone_are_said(tmp_path):
    p = Svm(kind="svm", protocol="x-v1", costs=(1.0,), folds=5)
    task = assigned(tmp_path, p)
    heads = [
        ClassHead(10.0, 80.0, np.zeros(1), True),
        ClassHead(None, float("nan"), np.zeros(1), False),
        ClassHead(0.1, 60.0, np.zeros(1), True),
    ]
    assert svm._chosen(task, heads) == {
        "costs": {"a": 10.0, "c": 0.1},
        "on": "5 folds of train+val",
        "trained_on": "train+val",
        "fold_map": 70.0,
        "converged": True,
    }
    unfinished = [*heads[:2], heads[2]._replace(converged=False)]
    assert svm._chosen(task, unfinished)["converged"] is False


def test_a_head_of_liblinear_has_the_protocols_numbers():
    p = Svm(
        kind="svm",
        protocol="x-v1",
        costs=(1.0,),
        positive_weight=3.0,
        tolerance=0.5,
        max_iterations=9,
    )
    head = p.head_at(7.0)
    assert (head.C, head.tol, head.max_iter, head.random_state) == (7.0, 0.5, 9, 0)
    assert head.class_weight == {True: 3.0, False: 1.0}


def test_features_have_unit_length_but_for_a_trace():
    x = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    found = svm._unit_length(x)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, np.array([[3, 4], [0, 0]]) / 5.00001, rtol=1e-9)


# ImageNet's classifiers elsewhere


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "own-all"),
        ({"rule": "any"}, "own-any"),
        ({"precision": "bf16"}, "own-bf16-all"),
        ({"of": "linear-v1-bf16", "precision": "bf16"}, "linear-v1-bf16-all"),
        ({"test_size": False}, "own-train-size-all"),
        ({"precision": "tf32", "test_size": False}, "own-tf32-train-size-all"),
    ],
)
def test_a_column_names_whose_heads_and_how_they_are_read(changes, name):
    about = {"kind": "ood", "protocol": "ood", "rule": "all"}
    p = Ood(**{**about, **changes})
    assert p.name == name
    assert (
        p.space == "trunk" and dataclasses.replace(p, reads="tokens").space == "tokens"
    )


# The machine


def test_a_machine_of_one_process():
    stop = StopFlag()
    assert ONE.stopping(None) is None and ONE.stopping(stop) is None
    ONE.preempt(stop, "while waiting")
    stop.requested = "SIGUSR1"
    assert ONE.stopping(stop) == "SIGUSR1"
    said = "stopped by SIGUSR1 while waiting; the same command continues"
    with pytest.raises(Exception, match=said):
        ONE.preempt(stop, "while waiting")
    assert ONE.main and not dataclasses.replace(ONE, rank=1).main
    assert ONE.alone() == ONE


def test_a_batch_that_cannot_be_read_is_bad_input():
    from backbench.parallel.loading import Unreadable

    assert ONE.readable((1, 2)) == (1, 2)
    with pytest.raises(BadInput, match="cut short"):
        ONE.readable(Unreadable("x.png: cut short"))


# Runs that were stopped


@pytest.fixture
def predicted(monkeypatch):
    """What is written of each checkpoint's predictions; heads and scores are not kept."""
    found = []

    def write(task, measured):
        found[:] = measured
        return measured

    monkeypatch.setattr(keeping, "write", write)
    monkeypatch.setattr(keeping, "keep_scores", lambda *_: "")
    monkeypatch.setattr(keeping, "keep_trained", lambda *_: {})
    return found


def test_a_path_of_penalties_is_scikit_learns_and_goes_on_where_it_was_stopped(
    tmp_path, predicted, monkeypatch
):
    p = LogReg(kind="logreg", protocol="x-v1", l2=(1, 16, 3), tolerance=1e-6)
    given = GivenFeatures()
    fitted = []
    stop = StopFlag()
    plain = logreg.fit

    def fit(parts, *, l2, **more):
        done = plain(parts, l2=l2, **more)
        fitted.append((sum(len(y) for _, y in parts), round(l2, 6)))
        if len(fitted) == 2:
            stop.requested = "SIGTERM"
        return done

    monkeypatch.setattr(logreg, "fit", fit)
    task = assigned(tmp_path, p)
    with pytest.raises(Preempted, match="stopped by SIGTERM after l2 4;"):
        probe_logreg.measure(task, given, ONE, stop)
    stop.requested = None
    probe_logreg.measure(task, given, ONE, stop)
    assert progress(tmp_path) == ("mine logreg", "fit", 3, 3)
    on_train = [(18, 16), (18, 4), (18, 1)]
    first, second = predicted
    again = [(24, round(one.chosen["l2"], 6)) for one in (first, second)]
    assert fitted == [*on_train, again[0], *on_train, again[1]]
    y = [np.asarray(part.labels) for _, part in SPLITS.items()]
    for n, one in enumerate((first, second)):
        train, val, test = (part[n].double().numpy() for part in given.features)
        by_val = {}
        for l2 in (16, 4, 1):
            head = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=5000)
            by_val[f"{l2:g}"] = 100 * head.fit(train, y[0]).score(val, y[1])
        assert one.chosen["scores"] == pytest.approx(by_val)
        best = max(by_val, key=by_val.get)
        assert f"{one.chosen['l2']:g}" == best
        head = LogisticRegression(C=1 / float(best), tol=1e-8, max_iter=5000)
        head.fit(np.concatenate([train, val]), np.concatenate(y[:2]))
        order = head.decision_function(test).argsort(1)[:, ::-1]
        np.testing.assert_array_equal(one.ranking.numpy(), order)
        assert one.chosen["converged"] and one.checkpoint is given.trunks[n].checkpoint
    # The whole path at once says the same
    task.state_file.unlink()
    stopped = [(dict(one.chosen), one.ranking.tolist()) for one in predicted]
    probe_logreg.measure(task, given, ONE, StopFlag())
    assert stopped == [(dict(one.chosen), one.ranking.tolist()) for one in predicted]


def test_svms_go_on_behind_the_last_class_that_was_saved(tmp_path, monkeypatch):
    """Real heads of three classes; the fourth fit of six is the second trunk's first."""
    draw = np.random.default_rng(0)
    tables = {}
    for split, count in (("train", 18), ("val", 6), ("test", 20)):
        rows = draw.integers(0, 2, (count, 3))
        tables[split] = SimpleNamespace(table=rows.copy, classes=("a", "b", "c"))
    splits = SimpleNamespace(items=tables.items, **tables)
    p = Svm(kind="svm", protocol="x-v1", costs=(0.01,), folds=2, tolerance=0.01)
    task = assigned(tmp_path, p, metric="map", splits=splits)
    task.hashes = {"test": "manifest"}
    fitted = []
    kept = []
    dying = SimpleNamespace(at=None)
    plain = svm._head

    def head(p, x, shown, of, stop):
        if len(fitted) == dying.at:
            raise KeyboardInterrupt
        fitted.append(shown.tolist())
        return plain(p, x, shown, of, stop)

    monkeypatch.setattr(svm, "_head", head)
    monkeypatch.setattr(svm.label_tables, "kept", lambda *given: given)
    monkeypatch.setattr(
        keeping, "write_tables", lambda *given: kept.append(given[1:]) or [1]
    )
    assert svm.measure(task, GivenFeatures(), ONE, StopFlag()) == [1, 1]
    whole = fitted.copy()
    shown = np.concatenate([tables["train"].table(), tables["val"].table()]) == 1
    assert whole == [*shown.T.tolist(), *shown.T.tolist()]
    for place in (2, 4):
        dying.at = place
        task.state_file.unlink()
        fitted.clear()
        with pytest.raises(KeyboardInterrupt):
            svm.measure(task, GivenFeatures(), ONE, StopFlag())
        dying.at = None
        del kept[2:]
        assert svm.measure(task, GivenFeatures(), ONE, StopFlag()) == [1, 1]
        assert fitted == whole, "no class is fitted twice"
        # One cost in two folds, and on all, of three classes
        assert progress(tmp_path) == ("model y heads of mine", "fit", 9, 9)
        for before, now in zip(kept[:2], kept[2:], strict=True):
            assert now[0].name == before[0].name and now[2] == before[2]
            np.testing.assert_array_equal(now[1][0], before[1][0])


# Neighbours


def test_each_number_of_neighbours_is_a_row_of_scikit_learns_votes(tmp_path, predicted):
    p = knn.Knn(kind="knn", protocol="x-v1", k=(5, 1), temperature=0.3)
    given = GivenFeatures()
    stop = StopFlag()
    knn.measure(assigned(tmp_path, p), given, ONE, stop)
    assert [(one.checkpoint.name[-1], one.suffix) for one in predicted] == [
        ("x", "_k5"),
        ("x", "_k1"),
        ("y", "_k5"),
        ("y", "_k1"),
    ]
    y = [np.asarray(part.labels) for _, part in SPLITS.items()]
    for place, one in enumerate(predicted):
        train, val, test = (part[place // 2].numpy() for part in given.features)
        k = (5, 1)[place % 2]
        search = KNeighborsClassifier(
            k, weights=lambda d: np.exp((1 - d) / 0.3), metric="cosine"
        )
        search.fit(np.concatenate([train, val]), np.concatenate(y[:2]))
        expected = search.predict(test)
        assert one.ranking[:, 0].tolist() == expected.tolist()
        assert 0 < (expected == y[2]).mean() < 1
        assert one.provenance == {"k": k, "temperature": 0.3, "bank": "train+val"}
        assert one.chosen is None
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted, match="stopped by SIGTERM between two checkpoints"):
        knn.measure(assigned(tmp_path, p), given, ONE, stop)
