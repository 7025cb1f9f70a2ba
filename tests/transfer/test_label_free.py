"""Retrieval within classes, clustering, LiDAR and alpha-ReQ against loops, and their commands."""

import dataclasses
import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from support.layouts import trunk_file

from backbench.cli import main
from backbench.errors import EXIT_BAD_INPUT
from backbench.results import store, verification
from backbench.runs.state import StopFlag
from backbench.stats.partitions import agreement
from transfer import feature_statistics as fs
from transfer.probe_class_retrieval import retrieve
from transfer.probe_cluster import clusterings
from transfer.protocols import KMeansClusters

# Retrieval within classes


def loop_retrieval(features, labels):
    """(nearest, average precision) of each image that is a query, else nan, by the definition."""
    unit = [row / np.linalg.norm(row) for row in features]
    nearest, average = [], []
    for i, own in enumerate(labels):
        others = [j for j in range(len(labels)) if j != i]
        ranked = sorted(others, key=lambda j: (-float(unit[i] @ unit[j]), j))
        right = [labels[j] == own for j in ranked]
        total = sum(right)
        if not total:
            nearest.append(math.nan)
            average.append(math.nan)
            continue
        precisions = [sum(right[: k + 1]) / (k + 1) for k in range(total) if right[k]]
        nearest.append(float(right[0]))
        average.append(sum(precisions) / total)
    return nearest, average


def test_retrieval_is_the_loop_on_1000_random_cases():
    draw = np.random.default_rng(0)
    for case in range(1000):
        labels = draw.integers(0, draw.integers(1, 6), draw.integers(2, 14))
        if len(set(labels)) == len(labels):
            continue
        if case % 2:
            features = draw.normal(size=(len(labels), 5))
        else:  # axes: every similarity is 0 or 1, and nearly all are ties
            features = np.eye(4)[draw.integers(0, 4, len(labels))] * 3
        found = retrieve(torch.tensor(features), torch.tensor(labels), rows=4)
        for ours, loop in zip(found, loop_retrieval(features, labels)):
            np.testing.assert_allclose(ours.numpy(), loop, rtol=0, atol=1e-9)


# Clustering


def loop_agreement(label, cluster):
    n, classes, clusters = len(label), sorted(set(label)), sorted(set(cluster))
    count = {(a, b): 0 for a in classes for b in clusters}
    for pair in zip(label, cluster):
        count[pair] += 1
    mutual = 0.0
    for (a, b), both in count.items():
        if both:
            mutual += both / n * math.log(n * both / (label.count(a) * cluster.count(b)))
    entropy = 0.0
    for values in (label, cluster):
        entropy -= sum(values.count(v) / n * math.log(values.count(v) / n) for v in set(values)) / 2
    nmi = mutual / entropy if entropy else 1.0
    # Pairs of images that are together in both, in the classes, in the clusters
    pairs = list(itertools.combinations(range(n), 2))
    same = [(label[i] == label[j], cluster[i] == cluster[j]) for i, j in pairs]
    both, of_label, of_cluster = (sum(map(f, same)) for f in (all, min_first, min_second))
    expected = of_label * of_cluster / len(pairs)
    most = (of_label + of_cluster) / 2
    ari = 1.0 if most == expected else (both - expected) / (most - expected)
    # Every way to give clusters to classes
    small, large = sorted((classes, clusters), key=len)
    best = 0
    for chosen in itertools.permutations(large, len(small)):
        given = zip(small, chosen)
        best = max(best, sum(count.get((a, b), count.get((b, a), 0)) for a, b in given))
    return {"nmi": 100 * nmi, "ari": 100 * ari, "cluster_acc": 100 * best / n}


def min_first(pair):
    return pair[0]


def min_second(pair):
    return pair[1]


def test_agreement_is_the_loop_on_1000_random_cases():
    draw = np.random.default_rng(0)
    for _ in range(1000):
        n = int(draw.integers(2, 15))
        label = draw.integers(0, draw.integers(1, 5), n)
        cluster = draw.integers(10, 10 + draw.integers(1, 5), n)
        wanted = loop_agreement(label.tolist(), cluster.tolist())
        assert agreement(label, cluster) == pytest.approx(wanted, abs=1e-9)


def test_the_start_of_least_inertia_counts_whatever_labels_say():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 8, generator=generator)
    features = centres.repeat(20, 1) + 0.4 * torch.randn(120, 8, generator=generator)
    p = KMeansClusters(kind="cluster", protocol="test", restarts=8)
    starts = clusterings(features * torch.rand(120, 1, generator=generator), 6, p, 0, StopFlag())
    assert len({inertia for inertia, _ in starts}) > 1
    unit = torch.nn.functional.normalize(features, dim=1).double().numpy()
    for inertia, cluster in starts:  # length says nothing; each row is with its nearest mean
        means = np.stack([unit[cluster == k].mean(0) for k in range(6)])
        squared = ((unit[:, None] - means[None]) ** 2).sum(2)
        assert (squared.argmin(1) == cluster).all()
        assert inertia == pytest.approx(squared.min(1).sum(), rel=1e-5)
    assert [inertia for inertia, _ in starts] == sorted(inertia for inertia, _ in starts)
    again = clusterings(features, 6, p, 0, StopFlag())
    assert [one for one, _ in again] == pytest.approx([one for one, _ in starts], rel=1e-5)


# LiDAR and alpha-ReQ


def lidar(views):
    groups = fs.Groups(views.shape[2])
    for part in views.split(3):
        groups.add(part)
    return groups.lidar()


def loop_lidar(views):
    n, q, d = views.shape
    means = [sum(image) / q for image in views]
    mean = sum(means) / n
    between = sum(np.outer(m - mean, m - mean) for m in means) / (n - 1)
    within = 1e-4 * np.eye(d)
    for image, m in zip(views, means):
        within += sum(np.outer(x - m, x - m) for x in image) / (n * (q - 1))
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    values = np.linalg.eigvalsh(root @ between @ root).clip(0)
    p = values[values > 1e-12 * values.max()] / values.sum()
    return math.exp(-(p * np.log(p)).sum())


def test_lidar_is_the_loop_in_any_order_of_images_and_rotation():
    generator = torch.Generator().manual_seed(0)
    for n, q, d in ((20, 4, 5), (7, 3, 6), (5, 2, 9), (2, 5, 4)):
        views = torch.randn(n, q, d, generator=generator, dtype=torch.float64)
        views = views * 0.3 + torch.randn(n, 1, d, generator=generator, dtype=torch.float64)
        found = lidar(views)
        assert found == pytest.approx(loop_lidar(views.numpy()), rel=1e-9)
        turned = views @ torch.linalg.qr(torch.randn(d, d, generator=generator).double()).Q
        order = torch.randperm(n, generator=generator)
        assert lidar(turned) == pytest.approx(lidar(views[order])) == pytest.approx(found)
        assert found <= min(n - 1, d) + 1e-9
    assert math.isnan(lidar(views[:1]))


def test_alpha_req_is_the_power_of_a_power_law():
    rank = torch.arange(1, 101, dtype=torch.float64)
    for power in (0.5, 1.0, 1.7):
        spectrum = 3 * rank**-power
        spectrum[:10], spectrum[50:] = 100.0, 1e-9  # outside of the ranks of the fit
        assert fs.alpha_req(spectrum) == pytest.approx(power, abs=1e-9)
    draw = np.random.default_rng(0)
    for _ in range(100):
        spectrum = np.sort(draw.exponential(size=60))[::-1].copy()
        slope, _ = np.polyfit(np.log(np.arange(11, 51)), np.log(spectrum[10:50]), 1)
        assert fs.alpha_req(torch.tensor(spectrum)) == pytest.approx(-slope, abs=1e-9)
    assert math.isnan(fs.alpha_req(rank[:49])) and math.isnan(fs.alpha_req(0 * rank))


# The commands


def probe(kind, root, trunks, out, **changes):
    recipe = {"kind": kind, "protocol": "mine", "geometry": {"resize": 32, "crop": 32}, **changes}
    (root / f"{kind}.yaml").write_text(json.dumps(recipe))
    words = ["linear", *map(str, trunks), "--datasets", "classes", "--data", str(root)]
    words += ["--protocol", str(root / f"{kind}.yaml"), "--out", str(out), "--workers", "0"]
    return main(words)


@pytest.mark.parametrize("kind", ["class_retrieval", "cluster"])
def test_a_run_has_rows_of_its_test_images_alone(trees, two_trunks, tmp_path, kind, capsys):
    root = trees("classes", sizes=(("train", 4), ("val", 2), ("test", 10)))
    for _ in range(2):  # the second time it is done
        assert probe(kind, root, two_trunks, tmp_path / "run") == 0
    rows, problems = store.read(tmp_path / "run")
    assert not problems and {r.task for r in rows} == {kind}
    metrics = ["r1", "map_r"] if kind == "class_retrieval" else ["nmi", "ari", "cluster_acc"]
    assert [r.metric for r in rows] == metrics * 2
    assert all(r.value == pytest.approx(100) for r in rows)  # bright and dark pictures
    kept = np.load(tmp_path / "run" / rows[0].provenance["predictions"])
    assert len(kept["label"]) == 20
    names = {json.loads(file.read_text())["description"]["images"] for file in cached(tmp_path)}
    assert len(names) == 1, "neither train nor val was read"
    verdicts = verification.of_run(rows, tmp_path / "run")
    assert {(v.level, v.why) for v in verdicts} == {(verification.FROM_LIST, "")}
    forged = [dataclasses.replace(r, value=r.value - 1) for r in rows]
    assert all("give" in v.why for v in verification.of_run(forged, tmp_path / "run"))
    more = {"images": {**rows[0].provenance["images"], "test": 10_000}}
    forged = [dataclasses.replace(r, provenance={**r.provenance, **more}) for r in rows]
    assert all("its list has 10000" in v.why for v in verification.of_run(forged, tmp_path / "run"))
    if kind == "class_retrieval":  # a file without any query gives no value at all
        empty = shutil.copytree(tmp_path / "run", tmp_path / "empty")
        none = {f"queries_{metric}": np.full(20, np.nan) for metric in metrics}
        for file in {empty / row.provenance["predictions"] for row in rows}:
            np.savez(file, **{**np.load(file), **none, "label": np.arange(20)})
        assert all("no query" in v.why for v in verification.of_run(rows, empty))
    page = tmp_path / "page.html"
    assert main(["leaderboard", str(tmp_path / "run"), "--html", str(page)]) == 0


def cached(folder):
    return (folder / "cache" / "features").glob("*.json")


def test_what_has_nothing_to_find_is_refused(trees, tmp_path, capsys):
    trunk = trunk_file(tmp_path / "0.safetensors", 0)
    root = trees("classes", sizes=(("train", 4), ("val", 2), ("test", 1)))
    assert probe("class_retrieval", root, [trunk], tmp_path / "run") == EXIT_BAD_INPUT
    assert "no class has two test images" in capsys.readouterr().err
