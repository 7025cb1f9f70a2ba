"""Neighbours: votes and segmentation agree with loops and scikit-learn; the whole command."""

import dataclasses
import math
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler
from support.interruptions import Killed, kill
from support.layouts import Trees

from backbench.cli.program import main
from backbench.datasets import catalog
from backbench.images.dense import IGNORED
from backbench.knn import knn_scores, nearest
from backbench.records import store
from backbench.stats import dense_counts
from backbench.transfer.devices import Machine
from backbench.transfer.features.batches import Pictures, centred
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.probes import seg_knn as probe_seg_knn
from backbench.transfer.probes.seg_knn import Neighbours
from backbench.transfer.protocols import all_kinds, load_protocol
from backbench.verify import verification
from backbench.weights.checkpoint import Checkpoint

ONE = Machine(torch.device("cpu"), 0, 1, 0)
DEMO = load_protocol("seg_knn_demo", all_kinds())
WAYS = [(k, by) for k in (1, 3, 10) for by in ("cosine", "l2")]


def seen(tmp_path, grid, train, classes=3):
    """Neighbours on maps of a grid, standardised by the features of `train`."""
    p = dataclasses.replace(DEMO, k=(1, 3, 10), feature_batch=3)
    task = SimpleNamespace(
        protocol=p,
        run=tmp_path,
        dataset=SimpleNamespace(name="x"),
        splits=SimpleNamespace(train=SimpleNamespace(classes=tuple(range(classes)))),
    )
    return Neighbours(task, grid, train, ONE, None)


def by_hand(bank, labels, queries, k, by):
    """The labels (T, P) of queries (T, D) by patches (M, D) with labels (M, P), pixel by pixel."""
    usable = []
    most = []
    for at, own in enumerate(labels):
        of_patch = Counter(own.tolist())
        common = min(of_patch, key=lambda label: (-of_patch[label], label))
        if common != IGNORED:
            usable.append(at)
            most.append(common)
    bank, labels = bank[usable], labels[usable]
    classes = np.arange(labels[labels != IGNORED].max() + 1)
    out = np.zeros((len(queries), labels.shape[1]), np.uint8)
    for row, query in enumerate(queries):
        distances = np.linalg.norm(query - bank, axis=1)
        if by == "cosine":
            lengths = np.linalg.norm(query) * np.linalg.norm(bank, axis=1)
            distances = 1 - bank @ query / lengths
        near = np.argsort(distances, kind="stable")[:k]
        votes = (labels[near] == classes[:, None, None]).sum(1)  # (C, P)
        # Of labels with equal votes the smallest, and without a vote that of the nearest patch
        out[row] = np.where(votes.any(0), votes.argmax(0), most[near[0]])
    return out


def cut(maps, height, width):
    """Label maps (n, S, S) -> patches (n T, P), by slicing."""
    down, across = maps.shape[1] // height, maps.shape[2] // width
    patches = []
    for one in maps:
        for y in range(height):
            for x in range(width):
                block = one[y * down : (y + 1) * down, x * across : (x + 1) * across]
                patches.append(block.ravel())
    return np.stack(patches)


@pytest.mark.parametrize("seed", range(10))
def test_every_pixel_is_as_a_loop_has_it(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(probe_seg_knn, "PIECE", 60)
    draw = np.random.default_rng(seed)
    height, width, dim = (2, 4, 5)
    # 1. Features and label maps of 7 images of train, 3 of val and 4 of test
    features = []
    for n in (7, 3, 4):
        values = draw.normal(2, 3, (n, height * width * dim))
        features.append(torch.tensor(values, dtype=torch.float32))
    features[0][:, ::5] = 7.0  # a number that never changes
    maps = [draw.integers(0, 3, (n, 8, 8), dtype=np.uint8) for n in (7, 3, 4)]
    for each in maps:
        each[draw.random(each.shape) < 0.4] = IGNORED
        each[:, :4, :2] = IGNORED
    one = seen(tmp_path, (height, width, dim), features[0])
    # 2. The same by hand, with neighbours in train, then in train and val
    scaler = StandardScaler().fit(features[0].reshape(-1, dim).double().numpy())
    train, val, test = (
        scaler.transform(f.reshape(-1, dim).double().numpy()) for f in features
    )
    both = np.concatenate((train, val))
    both_maps = np.concatenate((maps[0], maps[1]))
    truth = cut(maps[2], height, width).reshape(4, -1)
    for parts, bank, labels in ((1, train, maps[0]), (2, both, both_maps)):
        one.learn(features[:parts], torch.tensor(labels))
        counted, shown = one.count(features[2], torch.tensor(maps[2]), WAYS)
        patches = cut(labels, height, width)
        for counts, (k, by) in zip(counted, WAYS):
            expected = by_hand(bank, patches, test, k, by).reshape(4, -1)
            assert set(expected.ravel()) <= {0, 1, 2}
            for image in range(4):
                again = dense_counts.count(expected[image], truth[image], 3)
                np.testing.assert_array_equal(counts[image], again)
        first = by_hand(bank, patches, test, *WAYS[0]).reshape(4, -1)
        for image, best in shown.items():
            found = cut(best[None], height, width).ravel()
            np.testing.assert_array_equal(found, first[image])
        assert len(shown) == 4


def test_both_distances_are_sklearns():
    draw = torch.Generator().manual_seed(0)
    bank = torch.randn(200, 6, generator=draw) * 3
    queries = torch.randn(40, 6, generator=draw)
    for by, metric in (("cosine", "cosine"), ("l2", "euclidean")):
        _, index = nearest(queries, bank.split(33), most=9, rows=7, distance=by)
        search = NearestNeighbors(n_neighbors=9, metric=metric)
        search.fit(bank.double().numpy())
        expected = search.kneighbors(queries.double().numpy(), return_distance=False)
        np.testing.assert_array_equal(index.numpy(), expected)


def command(made, out, *more, datasets="scenes"):
    root, trunks = made
    words = ["linear", *map(str, trunks), "--datasets", datasets]
    words += ["--protocol", "seg_knn_demo", *more]
    words += ["--data", str(root), "--out", str(out)]
    return main([*words, "--workers", "0", "--accelerator", "cpu"])


def test_the_command_is_sklearns_search_over_tokens(made, whole):
    """From image files to kept counts, computed apart from the run, with what the row has chosen."""
    root, trunks = made
    splits = catalog.load("scenes", root, dense=True)
    rows = [r for r in store.read(whole)[0] if r.metric == "miou"]
    for trunk, row in zip(trunks, rows):
        frozen = FrozenTrunk.build(Checkpoint.load(trunk), device=torch.device("cpu"))
        frozen.module.dilate(16)
        # 1. Tokens and label maps of train, val and test
        tokens = []
        labels = []
        for _, images in splits.items():
            pictures = Pictures(images, centred(DEMO.geometry))
            pixels = torch.stack([pictures[0, i][0] for i in range(len(images))])
            (maps,) = forward_all([frozen], pixels, tokens=True)
            assert maps.shape[1:3] == (8, 8)
            tokens.append(maps.flatten(0, 2).numpy())
            # The maps are of 128 pixels, as they are read.
            own = [images.label_map(i) for i in range(len(images))]
            labels.append(cut(np.stack(own), 8, 8))
        # 2. The answers by the row's own choice, and their counts
        scaler = StandardScaler().fit(tokens[0].astype(np.float64))
        train, val, test = (
            scaler.transform(each.astype(np.float64)) for each in tokens
        )
        bank = np.concatenate((train, val))
        known = np.concatenate(labels[:2])
        k, by = row.chosen["k"], row.chosen["distance"]
        best = by_hand(bank, known, test, k, by).reshape(len(splits.test), -1)
        kept = np.load(whole / row.facts["predictions"])
        for n, truth in enumerate(labels[2].reshape(len(splits.test), -1)):
            again = dense_counts.count(best[n], truth, 11)
            for name, counts in zip(dense_counts.NAMES, again):
                differ = abs(kept[name][n].astype(int) - counts).sum()
                assert differ <= 8, "of 16,384 pixels"
        scores = row.chosen["scores"]
        names = [f"{k} {by}" for k in (1, 3, 10, 30) for by in ("cosine", "l2")]
        assert set(scores) == set(names)
        assert f"{k} {by}" == max(names, key=scores.get)


def test_the_number_of_neighbours_is_chosen_on_the_held_out_part(
    made, tmp_path, monkeypatch
):
    looked = []
    real = Neighbours.count

    def count(self, features, maps, ways):
        looked.append((sum(map(len, self.features)), len(maps), len(ways)))
        return real(self, features, maps, ways)

    monkeypatch.setattr(Neighbours, "count", count)
    assert command(made, tmp_path / "run", "k=1,3") == 0
    splits = catalog.load("scenes", made[0], dense=True)
    train, val, test = len(splits.train), len(splits.val), len(splits.test)
    assert looked == [(train, val, 4), (train + val, test, 1)] * 2
    # One way has nothing to choose.
    looked.clear()
    assert command(made, tmp_path / "one", "k=3", "distances=l2") == 0
    assert looked == [(train + val, test, 1)] * 2
    (chosen,) = {tuple(r.chosen.items()) for r in store.read(tmp_path / "one")[0]}
    assert dict(chosen) == {
        "on": None,
        "k": 3,
        "distance": "l2",
        "trained_on": "train+val",
    }


def test_its_rows_are_verified_and_a_forged_choice_is_not(whole, dense_rows, tmp_path):
    assert {r.task for r in dense_rows} == {"seg_knn"}
    row = dense_rows[0]
    other = "l2" if row.chosen["distance"] == "cosine" else "cosine"
    scores = {**row.chosen["scores"], f"{row.chosen['k']} {other}": 0.0}
    chosen = {**row.chosen, "scores": scores, "distance": other}
    forged = dataclasses.replace(row, chosen=chosen)
    (verdict,) = verification.of_run([forged], whole)
    assert "not the best of its scores" in verdict.why
    page = tmp_path / "page.html"
    assert main(["leaderboard", str(whole), "--html", str(page)]) == 0
    assert "Segmentation by neighbours" in page.read_text()
    tokens = list((whole / "state").rglob("*.npy"))
    assert not tokens, "they go when the rows are there"


# In the features, and in the label maps
@pytest.mark.parametrize(
    "at",
    [
        5,
        pytest.param(14, marks=pytest.mark.slow),
        pytest.param(20, marks=pytest.mark.slow),
        30,
    ],
)
def test_a_killed_run_continues_to_the_same_numbers(made, whole, tmp_path, decoder, at):
    out = tmp_path / "killed"
    decoder.at[len(decoder.paths) + at] = kill
    with pytest.raises(Killed):
        command(made, out)
    assert command(made, out) == 0
    said = []
    for run in (whole, out):
        rows = store.read(run)[0]
        said.append([(r.metric, r.value, r.ci95, r.chosen) for r in rows])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["geometry.square=false"], "whole images are read"),
        (["geometry.crop=64"], "resize as crop"),
        (["distances=l1"], "distances"),
        (["k=0"], "k"),
        (
            ["geometry.resize=100", "geometry.crop=100"],
            "7 x 7 tokens do not divide 100 pixels",
        ),
        (["k=1,5000"], "k = 5000 neighbours of"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    made, tmp_path, bad_input, words, says
):
    said = bad_input(command(made, tmp_path / "run", *words), says)
    assert says in said.strip().splitlines()[-1] and "Traceback" not in said


def test_wrong_layouts_are_one_line(made, tmp_path, monkeypatch, bad_input):
    root = Trees(tmp_path, monkeypatch)("classes")
    trunks = made[1]
    status = command((root, trunks), tmp_path / "run", datasets="classes")
    bad_input(status, "images of classes")
    shutil.copytree(made[0] / "scenes", tmp_path / "broken" / "scenes")
    (file, *_) = sorted((tmp_path / "broken/scenes/maps/train2017").glob("*.png"))
    Image.open(file).crop((0, 0, 60, 128)).save(file)
    said = bad_input(command((tmp_path / "broken", trunks), tmp_path / "other"))
    assert "60 x 128 pixels, its image" in said.strip().splitlines()[-1]


def votes_by_hand(queries, bank, labels, *, classes, k, temperature):
    """Each class's weighted votes of the k nearest by cosine, one by one."""
    out = torch.zeros(len(queries), classes, dtype=torch.float64)
    for i, q in enumerate(queries.double()):
        scores = [float(q @ b / (q.norm() * b.norm())) for b in bank.double()]
        similarity = list(zip(scores, map(int, labels)))
        for s, y in sorted(similarity, reverse=True)[:k]:
            out[i, y] += math.exp((s - 1) / temperature)
    return out


@pytest.mark.parametrize("columns", [7, 65536])
def test_votes_are_those_of_a_loop(columns):
    torch.manual_seed(0)
    bank = torch.randn(50, 8)
    labels = torch.randint(0, 4, (50,))
    queries = torch.randn(9, 8)
    found = knn_scores(
        queries,
        (bank[:30], bank[30:]),
        labels,
        classes=4,
        k=(1, 5, 20),
        temperature=0.07,
        rows=4,
        columns=columns,
    )
    for k in (1, 5, 20):
        expected = votes_by_hand(
            queries, bank, labels, classes=4, k=k, temperature=0.07
        )
        torch.testing.assert_close(found[k].double(), expected, rtol=1e-4, atol=1e-9)


def test_scale_of_the_features_does_not_matter_and_k_is_limited():
    torch.manual_seed(0)
    bank = torch.randn(20, 8)
    labels = torch.arange(20) % 3
    a = knn_scores(bank * 100, bank, labels, classes=3, k=(5,))[5]
    b = knn_scores(bank, bank * 1e-3, labels, classes=3, k=(5,))[5]
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)
    with pytest.raises(ValueError, match="k = 21 neighbours of 20 images"):
        knn_scores(bank, bank, labels, classes=3, k=(21,))


def test_votes_are_added_exactly():
    """To the last digit of float32, so that the order, which on a GPU is any, cannot matter."""
    torch.manual_seed(0)
    # The bank lies along the axes, so that a similarity is one of the query's entries.
    bank = torch.eye(8).repeat(50, 1)
    labels = torch.arange(400) % 3
    queries = torch.nn.functional.normalize(torch.randn(50, 8))
    found = knn_scores(queries, bank, labels, classes=3, k=(400,))[400]
    near = torch.nn.functional.normalize(queries) @ bank.T
    votes = ((near - 1).double() / 0.07).exp()
    for label in range(3):
        exact = [math.fsum(row) for row in votes[:, labels == label].tolist()]
        expected = torch.tensor(exact, dtype=torch.float64).float()
        assert torch.equal(found[:, label], expected)


@pytest.mark.parametrize(
    ("k", "distances", "images"),
    [((1,), ("l2",), 4), ((1,), ("cosine", "l2"), 7), ((1, 3), ("l2",), 7)],
)
def test_the_held_out_part_is_answered_where_there_is_a_choice(k, distances, images):
    p = dataclasses.replace(DEMO, k=k, distances=distances)
    splits = {"train": range(5), "val": range(3), "test": range(4)}
    work = probe_seg_knn.PROBE.work(
        p, "", SimpleNamespace(items=splits.items, **splits), 2
    )
    assert work == {"image": 12, "map": 12, "answer": 2 * images}
