"""Rows and what is kept beside them: their values, their words, their tables and pictures."""

import csv
import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image
from support.records import a_result

from backbench.datasets import catalog
from backbench.images.preprocess import Pixels
from backbench.runs.forward_clock import clock
from backbench.stats import confidence
from backbench.transfer import drawing, head_scores, keeping, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.protocols import all_kinds, load_protocol
from backbench.weights import archs
from backbench.weights.checkpoint import PIXELS_FROM, Checkpoint
from backbench.weights.kept_heads import KeptHead

VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"
SMALL = ["geometry.resize=32", "geometry.crop=32"]


@pytest.fixture
def point():
    state = archs.build_trunk(VIT).state_dict()
    about = {"name": "vit", PIXELS_FROM: "nobody says"}
    return Checkpoint(
        arch=VIT, method="random", epochs=3, state_dict=state, provenance=about
    )


@pytest.fixture
def task(trees, tmp_path, point):
    root = trees("classes", classes=("a", "b", "c"), sizes=(("train", 5), ("test", 2)))
    return Assignment(
        run=tmp_path / "run",
        task="knn",
        dataset=catalog.find("classes"),
        splits=catalog.load("classes", root),
        protocol=load_protocol("knn", all_kinds(), SMALL),
        seed=4,
        checkpoints=(point,),
    )


# Rows


def test_a_row_says_all_that_repeats_it(task, point, monkeypatch):
    monkeypatch.setattr(clock, "rate", {point.digest: 12.5}.get)
    row = keeping.row(
        task,
        point,
        metric="top1",
        value=50.0,
        ci95=(40.0, 60.0),
        chosen={"k": 5},
        provenance={"more": 1},
    )
    assert (row.checkpoint, row.name, row.method) == (point.digest, "vit", "random")
    assert (row.arch, row.epochs, row.seed) == (point.trunk, 3, 4)
    assert (row.task, row.dataset, row.split) == ("knn", "classes", "test")
    assert (row.metric, row.value, row.ci95) == ("top1", 50.0, (40.0, 60.0))
    assert (row.protocol, dict(row.chosen)) == ("knn-v1", {"k": 5})
    assert row.origin == {"images_per_second": 12.5}
    about = row.provenance
    assert about["recipe"]["geometry"]["crop"] == 32
    assert about["manifests"] == task.hashes
    assert about["images"] == {"train": 12, "val": 3, "test": 6}
    assert about["labelled"] == task.splits.labelled
    assert about["val"] == "held out of train"
    assert about["image_contents"] == task.test_contents
    assert about["notes"] == list(task.splits.notes)
    assert about["trunk"]["side"] == 32
    assert about["pixels"]["mean"] == Pixels().mean
    assert about["pixels"]["from"] == "nobody says"
    assert about["size"] == {"measured": 32, "trained": 32, "from": "its architecture"}
    assert about["more"] == 1
    assert not {"labelled_from", "in_path_order"} & set(about)


def test_a_row_says_who_chose_the_labels_and_that_val_is_official(task, point):
    splits = dataclasses.replace(
        task.splits, held_out=False, drawn_labels=True, notes=("of a list",)
    )
    bare = dataclasses.replace(point, provenance={})
    row = keeping.row(
        dataclasses.replace(task, splits=splits),
        bare,
        split="train",
        metric="train_top1",
        value=1.0,
        ci95=None,
        chosen=None,
        provenance={"val": "of my own"},
    )
    assert (row.split, row.chosen, row.origin) == ("train", None, {})
    assert row.provenance["labelled_from"] == "the seed's draw of train"
    assert row.provenance["notes"] == ["of a list"]
    assert row.provenance["val"] == "of my own", "what a probe says counts"
    assert row.provenance["pixels"]["from"] == "the checkpoint"
    official = dataclasses.replace(splits, drawn_labels=False)
    row = keeping.row(
        dataclasses.replace(task, splits=official),
        bare,
        metric="top1",
        value=1.0,
        ci95=None,
        chosen=None,
        provenance={},
    )
    assert row.provenance["val"] == "official"


def test_a_line_is_printed_for_each_number(capsys):
    about = {"name": "x", "task": "knn", "dataset": "digits", "metric": "top1"}
    about |= {"protocol": "p-v1", "value": 7.126, "ci95": (5.0, 9.256)}
    rows = [
        a_result(**about),
        a_result(**{**about, "value": None, "ci95": None}),
        a_result(**about, chosen={"lr": 0.5, "on": "val", "l2": None}),
        a_result(**about, chosen={"l2": 1e-05, "on": None}),
        a_result(**about, chosen={"k": 20}),
        a_result(**about, chosen={"reading": "block 3 cls", "l2": 2, "on": "val"}),
    ]
    keeping.show(rows)
    start = f"{'x':<16} {'knn':<10} {'digits':<12} {'top1':<16} "
    number = f"{start}  7.13% [5.00, 9.26]  p-v1"
    assert capsys.readouterr().out.splitlines() == [
        number,
        f"{start}undefined  p-v1",
        f"{number}  lr 0.5 chosen on val",
        f"{number}  l2 1e-05",
        f"{number}  k 20",
        f"{number}  block 3 cls  l2 2 chosen on val",
    ]


def test_rows_that_cannot_be_read_are_left_out(tmp_path):
    assert keeping.recorded(tmp_path) == []
    row = a_result()
    keeping.store.append(tmp_path, [row])
    file = tmp_path / "results.jsonl"
    file.write_text("no row\n" + file.read_text() + "{}\n")
    (found,) = keeping.recorded(tmp_path)
    assert found.column == row.column


# Files


def test_predictions_their_table_and_their_confusion_are_kept(task, point):
    """Six test images of three classes in turn; the fourth has no answer."""
    label = np.array(task.splits.test.labels)
    second = (label + 1) % 3
    ranking = torch.tensor(np.stack([label, second, (label + 2) % 3], 1))
    ranking[0] = ranking[0].roll(1)
    ranking[3] = -1
    one = keeping.CheckpointPredictions(
        checkpoint=point, ranking=ranking, provenance={"k": 5}, suffix="_k5"
    )
    top5 = dataclasses.replace(task.dataset, top5=True)
    task = dataclasses.replace(task, dataset=top5)
    rows = keeping.write(task, [one])
    assert [row.metric for row in rows] == ["top1_k5", "top5_k5"]
    right = np.array([0, 1, 1, 0, 1, 1], bool)
    hits5 = np.array([1, 1, 1, 0, 1, 1], bool)
    assert [row.value for row in rows] == pytest.approx([100 * 4 / 6, 100 * 5 / 6])
    assert rows[0].ci95 == pytest.approx(confidence.of_hits(right))
    assert rows[1].ci95 == pytest.approx(confidence.of_hits(hits5))
    stem = f"knn-classes-knn-v1_k5-s4-{point.digest[:12]}"
    for row in rows:
        assert row.provenance["k"] == 5
        assert row.provenance["predictions"] == f"predictions/{stem}.npz"
        assert row.provenance["per_class"] == f"per_class/{stem}.csv"
        assert row.provenance["confusion"] == f"confusion/{stem}.png"
    kept = np.load(task.run / rows[0].provenance["predictions"])
    assert kept["prediction"].tolist() == ranking[:, 0].tolist()
    assert kept["label"].tolist() == label.tolist()
    assert kept["hits5"].tolist() == hits5.tolist()
    assert str(kept["manifest"]) == task.hashes["test"]
    assert keeping.recorded(task.run) and (task.run / f"confusion/{stem}.png").exists()
    table = list(csv.reader((task.run / f"per_class/{stem}.csv").open()))
    assert table == [
        ["class", "images", "right", "accuracy"],
        ["a", "2", "1", "50.00"],
        ["b", "2", "1", "50.00"],
        ["c", "2", "2", "100.00"],
    ]
    # Without a suffix and without the best five, there is one of each
    plain = dataclasses.replace(one, suffix="")
    task = dataclasses.replace(task, dataset=dataclasses.replace(top5, top5=False))
    (row,) = keeping.write(task, [plain])
    assert row.metric == "top1"
    kept = np.load(task.run / row.provenance["predictions"])
    assert "hits5" not in kept


def test_numbers_of_their_own_are_kept_with_the_labels(task, point):
    values = {"nmi": (40.0, {"starts": [40.0, 30.0]}), "ari": (20.0, {})}
    rows = keeping.write_plain(
        task,
        point,
        values,
        {"cluster": np.arange(6)},
        ci95=(10.0, 50.0),
        chosen={"converged": False},
        suffix="_x",
    )
    assert [(row.metric, row.value) for row in rows] == [
        ("nmi_x", 40.0),
        ("ari_x", 20.0),
    ]
    assert {row.ci95 for row in rows} == {(10.0, 50.0)}
    assert rows[0].provenance["starts"] == [40.0, 30.0]
    assert "starts" not in rows[1].provenance
    assert all(dict(row.chosen) == {"converged": False} for row in rows)
    (file,) = {row.provenance["predictions"] for row in rows}
    kept = np.load(task.run / file)
    assert "knn-v1_x" in file
    assert kept["label"].tolist() == list(task.splits.test.labels)
    assert kept["cluster"].tolist() == list(range(6))
    assert len(keeping.recorded(task.run)) == 2


def test_what_is_said_of_a_head(task, point):
    head = KeptHead(torch.ones(3, 4), torch.zeros(3), 2.0, "hold-out")
    logits = [torch.randn(6, 3, generator=torch.Generator().manual_seed(0))]
    scores = head_scores.compact(logits, task.splits.test.labels, 2.0)
    assert keeping.keep_said(task, point, "own", None) == {"head_sha256": "own"}
    bare = dataclasses.replace(head, temperature=None, temperature_from=None)
    assert keeping.keep_said(task, point, bare, None) == {"head_sha256": bare.digest}
    said = keeping.keep_said(task, point, head, scores)
    assert said == {
        "head_sha256": head.digest,
        "temperature_from": "hold-out",
        "scores": f"scores/{task.stem(point)}.npz",
    }
    kept = np.load(task.run / said["scores"])
    assert str(kept["head"]) == head.digest
    assert str(kept["manifest"]) == task.hashes["test"]
    assert str(kept["checkpoint"]) == point.digest
    file = keeping.keep_scores(task, point, "own", scores, "val")
    assert file == f"scores/{task.stem(point)}-val.npz"
    assert str(np.load(task.run / file)["manifest"]) == task.hashes["val"]


def test_a_diverged_head_is_not_kept(task, point):
    head = KeptHead(torch.full((3, 4), torch.nan), torch.zeros(3))
    said = keeping.keep_trained(task, point, head, None, {"on": "val"})
    assert said == {"head_sha256": head.digest}
    assert not (task.run / "heads.safetensors").exists()


# Scores


def test_the_best_five_of_few_classes_and_of_no_number():
    logits = torch.tensor(
        [[1.0, 3.0, 2.0], [torch.nan, 9.0, 0.0], [5.0, torch.inf, 0.0]]
    )
    assert scoring.rank_classes(logits).tolist() == [[1, 2, 0], [-1] * 3, [-1] * 3]
    many = torch.arange(7.0).roll(2)[None]
    assert scoring.rank_classes(many).tolist() == [[1, 0, 6, 5, 4]]
    assert scoring.rank_classes(torch.ones(1, 1)).tolist() == [[0]]


def test_rankings_have_three_scores_with_their_intervals():
    label = np.array([0, 0, 0, 0, 1, 1])
    ranking = np.array([[0, 1], [0, 1], [0, 1], [1, 0], [2, 1], [1, 0]])
    first = np.array([1, 1, 1, 0, 0, 1], bool)

    def score(metric):
        return scoring.score_ranking(metric, ranking, label, 3)

    value, ci95 = score("top1")
    assert value == pytest.approx(100 * 4 / 6)
    assert ci95 == confidence.of_hits(first)
    value, ci95 = score("top5")
    assert value == 100 and ci95 == confidence.of_hits(np.ones(6, bool))
    value, ci95 = score("mean_per_class")
    assert value == pytest.approx(100 * (3 / 4 + 1 / 2) / 2)
    assert ci95 == confidence.of_hits(first, label)
    assert ci95 != confidence.of_hits(first)


def test_scores_of_consecutive_images_are_joined():
    parts = [
        {"x": np.array([1, 2]), "y": np.array([3.0, 4.0])},
        {"x": np.array([5]), "y": np.array([6.0])},
    ]
    found = head_scores.joined(parts)
    assert {name: each.tolist() for name, each in found.items()} == {
        "x": [1, 2, 5],
        "y": [3.0, 4.0, 6.0],
    }
    assert head_scores.joined([parts[0], None, parts[1]]) is None


def test_compact_scores_are_those_of_each_image_whatever_the_chunks():
    """Their first class is the smaller of two equal ones."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 30, generator=generator)
    logits[2, 4] = logits[2, 9] = 8.0
    labels = [3, 29, 9, 0, 1, 2, 2]
    whole = head_scores.compact([logits], labels, 2.0)
    parts = head_scores.compact(logits.split(3), labels, 2.0)
    for name, each in whole.items():
        np.testing.assert_allclose(each, parts[name], rtol=1e-6)
    assert whole["classes"][2, :2].tolist() == [4, 9]
    assert (whole["classes"].dtype, whole["logits"].dtype) == (np.uint16, np.float32)
    z = logits.double() - logits.double().amax(1, keepdim=True)
    order = z.sort(dim=1, descending=True, stable=True)
    width = whole["classes"].shape[1]
    assert 5 <= width < 30
    np.testing.assert_array_equal(whole["classes"], order.indices[:, :width])
    np.testing.assert_allclose(whole["logits"], order.values[:, :width], atol=1e-6)
    for t, suffix in ((1, ""), (2, "_t")):
        p = torch.softmax(z / t, 1)
        log_sum = torch.logsumexp(z / t, 1)
        np.testing.assert_allclose(whole[f"logsumexp{suffix}"], log_sum, rtol=1e-6)
        np.testing.assert_allclose(
            whole[f"square{suffix}"], p.square().sum(1), rtol=1e-6
        )
    np.testing.assert_allclose(
        whole["label_logit"], z[torch.arange(7), torch.tensor(labels)], atol=1e-6
    )
    assert whole["label"].tolist() == labels and float(whole["temperature"]) == 2
    bare = head_scores.compact([logits], labels, None)
    assert set(whole) - set(bare) == {"temperature", "logsumexp_t", "square_t"}


# Tables and pictures


def test_a_class_without_images_has_no_accuracy():
    label, prediction = np.array([0, 0, 0, 2]), np.array([0, 1, 0, 1])
    text = drawing.per_class_table(prediction, label, ("=a", "b", "c"))
    assert list(csv.reader(io.StringIO(text))) == [
        ["class", "images", "right", "accuracy"],
        ["'=a", "3", "2", "66.67"],
        ["b", "0", "0", ""],
        ["c", "1", "0", "0.00"],
    ]
    assert "\r" not in text


def drawn(matrix, names=None):
    names = names or [f"name {n}" for n in range(len(matrix))]
    png = drawing.confusion_picture(np.asarray(matrix), names, "title")
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


DARK, BRIGHT = (68, 1, 84), (253, 231, 36)


def near(pixel, color):
    return np.abs(pixel - np.asarray(color)).max() <= 3


def test_rows_of_a_confusion_are_true_classes_and_columns_predicted_ones():
    """Cells of 48 pixels, behind a margin of 130 at the left and of 30 above."""
    picture = drawn([[4, 0, 0], [3, 1, 0], [0, 0, 0]])
    assert picture.shape == (30 + 3 * 48 + 130, 420 + 10, 3)

    def corner(row, column):
        return picture[30 + 48 * row + 3, 130 + 48 * column + 3]

    assert near(corner(0, 0), BRIGHT)
    for row, column in ((0, 1), (0, 2), (1, 2), (2, 0), (2, 2)):
        assert near(corner(row, column), DARK), (row, column)
    assert corner(1, 0)[1] > corner(1, 1)[1] > DARK[1]  # three quarters, and a quarter

    # Counts stand in the cells that have some: black where it is bright
    def inner(row, column):
        top, left = 30 + 48 * row + 8, 130 + 48 * column + 8
        return picture[top : top + 32, left : left + 32]

    assert inner(0, 0).sum(2).min() < 60 and inner(1, 0).sum(2).min() < 60
    assert inner(1, 1).sum(2).max() > 700
    assert np.ptp(inner(0, 1), axis=(0, 1)).max() == 0
    # Names at the left of their row, and below their column
    for n in range(3):
        beside = picture[30 + 48 * n + 8 : 30 + 48 * n + 40, :124]
        below = picture[30 + 144 + 6 :, 130 + 48 * n + 8 : 130 + 48 * n + 40]
        assert beside.min() < 60 and below.min() < 60
    assert picture[:30, 130:].min() < 60, "the title"
    assert picture[:, 300:][30:].min() == 255, "nothing is at the right"


def test_many_classes_have_small_cells_without_counts_or_names():
    twenty, more = drawn(np.eye(20)), drawn(np.eye(21))
    cells = twenty[30 : 30 + 20 * 40, 130 : 130 + 20 * 40]
    assert cells.shape[0] == 800 and cells[:40, :40].sum(2).min() < 60
    side = 800 // 21
    assert more.shape == (30 + 21 * side + 130, 130 + 21 * side + 10, 3)
    assert near(more[30 + side // 2, 130 + side // 2], BRIGHT)
    assert np.ptp(more[31 : 29 + side, 131 : 129 + side], axis=(0, 1)).max() == 0
    # Up to sixty have names
    sixty, crowd = drawn(np.eye(60)), drawn(np.eye(61))
    assert sixty.shape[1] == 130 + 60 * 13 + 10 and sixty[30:100, :120].min() < 60
    assert crowd.shape == (30 + 61 * 13 + 20, 20 + 61 * 13 + 10, 3)
    assert crowd[30:, :20].min() == 255
    # A thousand classes have cells of a pixel
    assert drawn(np.eye(1000, dtype=int)).shape == (30 + 1000 + 20, 20 + 1000 + 10, 3)
