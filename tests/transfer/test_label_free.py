"""Retrieval, clustering and the statistics of `analyze` agree with loops; their commands."""

import dataclasses
import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from support.layouts import trunk_file

from backbench.cli.program import main
from backbench.records import store
from backbench.runs.state import StopFlag
from backbench.stats.partitions import agreement
from backbench.transfer.analysis import statistics as fs
from backbench.transfer.probes.class_retrieval import retrieve
from backbench.transfer.probes.cluster import KMeansClusters, clusterings
from backbench.verify import verification


def loop_retrieval(features, labels):
    """Return (nearest, average precision) of each image by the definition; nan if it is no query."""
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


def test_retrieval_is_the_loop_on_300_random_cases():
    draw = np.random.default_rng(0)
    for case in range(300):
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


def loop_agreement(label, cluster):
    """NMI, ARI and the accuracy of the best match of two lists, by their definitions, in percent."""
    n = len(label)
    classes = sorted(set(label))
    clusters = sorted(set(cluster))
    # 1. NMI
    count = {(a, b): 0 for a in classes for b in clusters}
    for pair in zip(label, cluster):
        count[pair] += 1
    mutual = 0.0
    for (a, b), both in count.items():
        if both:
            independent = label.count(a) * cluster.count(b) / n
            mutual += both / n * math.log(both / independent)
    mean_entropy = 0.0
    for values in (label, cluster):
        for value in set(values):
            share = values.count(value) / n
            mean_entropy -= share * math.log(share) / 2
    nmi = mutual / mean_entropy if mean_entropy else 1.0
    # 2. ARI, by the pairs of images that are together in both, in the classes, in the clusters
    pairs = list(itertools.combinations(range(n), 2))
    same = [(label[i] == label[j], cluster[i] == cluster[j]) for i, j in pairs]
    both = sum(map(all, same))
    of_label, of_cluster = map(sum, zip(*same))
    expected = of_label * of_cluster / len(pairs)
    most = (of_label + of_cluster) / 2
    ari = 1.0 if most == expected else (both - expected) / (most - expected)
    # 3. The accuracy, by every way to give clusters to classes
    small, large = sorted((classes, clusters), key=len)
    best = 0
    for chosen in itertools.permutations(large, len(small)):
        given = zip(small, chosen)
        best = max(best, sum(count.get((a, b), count.get((b, a), 0)) for a, b in given))
    return {"nmi": 100 * nmi, "ari": 100 * ari, "cluster_acc": 100 * best / n}


def test_agreement_is_the_loop_on_100_random_cases():
    draw = np.random.default_rng(0)
    for _ in range(100):
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
    of_any_length = features * torch.rand(120, 1, generator=generator)
    starts = clusterings(of_any_length, 6, p, 0, StopFlag())
    inertias = [inertia for inertia, _ in starts]
    assert len(set(inertias)) > 1
    assert inertias == sorted(inertias)
    # Each row of unit length is with its nearest mean.
    unit = torch.nn.functional.normalize(features, dim=1).double().numpy()
    for inertia, cluster in starts:
        means = np.stack([unit[cluster == k].mean(0) for k in range(6)])
        squared = ((unit[:, None] - means[None]) ** 2).sum(2)
        assert (squared.argmin(1) == cluster).all()
        assert inertia == pytest.approx(squared.min(1).sum(), rel=1e-5)
    again = clusterings(features, 6, p, 0, StopFlag())
    assert [inertia for inertia, _ in again] == pytest.approx(inertias, rel=1e-5)


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
        around = torch.randn(n, q, d, generator=generator, dtype=torch.float64)
        means = torch.randn(n, 1, d, generator=generator, dtype=torch.float64)
        views = 0.3 * around + means
        found = lidar(views)
        assert found == pytest.approx(loop_lidar(views.numpy()), rel=1e-9)
        square = torch.randn(d, d, generator=generator).double()
        turned = views @ torch.linalg.qr(square).Q
        assert lidar(turned) == pytest.approx(found)
        order = torch.randperm(n, generator=generator)
        assert lidar(views[order]) == pytest.approx(found)
        assert found <= min(n - 1, d) + 1e-9
    assert math.isnan(lidar(views[:1]))


def test_alpha_req_is_the_power_of_a_power_law():
    rank = torch.arange(1, 101, dtype=torch.float64)
    for power in (0.5, 1.0, 1.7):
        spectrum = 3 * rank**-power
        # Outside of the ranks of the fit
        spectrum[:10] = 100.0
        spectrum[50:] = 1e-9
        assert fs.alpha_req(spectrum) == pytest.approx(power, abs=1e-9)
    draw = np.random.default_rng(0)
    for _ in range(100):
        spectrum = np.sort(draw.exponential(size=60))[::-1].copy()
        slope, _ = np.polyfit(np.log(np.arange(11, 51)), np.log(spectrum[10:50]), 1)
        assert fs.alpha_req(torch.tensor(spectrum)) == pytest.approx(-slope, abs=1e-9)
    assert math.isnan(fs.alpha_req(rank[:49]))
    assert math.isnan(fs.alpha_req(0 * rank))


def probe(kind, root, trunks, out, **changes):
    geometry = {"resize": 32, "crop": 32}
    recipe = {"kind": kind, "protocol": "mine", "geometry": geometry, **changes}
    file = root / f"{kind}.yaml"
    file.write_text(json.dumps(recipe))
    words = ["linear", *map(str, trunks), "--datasets", "classes", "--data", str(root)]
    words += ["--protocol", str(file), "--out", str(out), "--workers", "0"]
    return main(words)


@pytest.mark.parametrize("kind", ["class_retrieval", "cluster"])
def test_a_run_has_rows_of_its_test_images_alone(trees, two_trunks, tmp_path, kind):
    root = trees("classes", sizes=(("train", 4), ("val", 2), ("test", 10)))
    for _ in range(2):  # the second time it is done
        assert probe(kind, root, two_trunks, tmp_path / "run") == 0
    rows, problems = store.read(tmp_path / "run")
    assert not problems and {r.task for r in rows} == {kind}
    metrics = {
        "class_retrieval": ["r1", "map_r"],
        "cluster": ["nmi", "ari", "cluster_acc"],
    }[kind]
    assert [r.metric for r in rows] == metrics * 2
    assert all(r.value == pytest.approx(100) for r in rows)  # bright and dark pictures
    kept = np.load(tmp_path / "run" / rows[0].provenance["predictions"])
    assert len(kept["label"]) == 20
    notes = (tmp_path / "cache" / "features").glob("*.json")
    names = {json.loads(file.read_text())["description"]["images"] for file in notes}
    assert len(names) == 1, "neither train nor val was read"
    verdicts = verification.of_run(rows, tmp_path / "run")
    assert {(v.level, v.why) for v in verdicts} == {(verification.FROM_LIST, "")}
    forged = [dataclasses.replace(r, value=r.value - 1) for r in rows]
    assert all("give" in v.why for v in verification.of_run(forged, tmp_path / "run"))
    more = {"images": {**rows[0].provenance["images"], "test": 10_000}}
    forged = [dataclasses.replace(r, provenance={**r.provenance, **more}) for r in rows]
    verdicts = verification.of_run(forged, tmp_path / "run")
    assert all("its list has 10000" in v.why for v in verdicts)
    # A file without any query gives no value at all.
    if kind == "class_retrieval":
        half = shutil.copytree(tmp_path / "run", tmp_path / "half")
        halves = {f"queries_{metric}": np.full(20, 0.5) for metric in metrics}
        for file in {half / row.provenance["predictions"] for row in rows}:
            np.savez(file, **{**np.load(file), **halves})
        other = [dataclasses.replace(r, value=50.0) for r in rows]
        assert not any(v.why for v in verification.of_run(other, half))
        assert all("give 50.0000" in v.why for v in verification.of_run(rows, half))
        empty = shutil.copytree(tmp_path / "run", tmp_path / "empty")
        none = {f"queries_{metric}": np.full(20, np.nan) for metric in metrics}
        for file in {empty / row.provenance["predictions"] for row in rows}:
            np.savez(file, **{**np.load(file), **none, "label": np.arange(20)})
        assert all("no query" in v.why for v in verification.of_run(rows, empty))
    page = tmp_path / "page.html"
    assert main(["leaderboard", str(tmp_path / "run"), "--html", str(page)]) == 0


def test_what_has_nothing_to_find_is_refused(trees, tmp_path, bad_input):
    trunk = trunk_file(tmp_path / "0.safetensors", 0)
    root = trees("classes", sizes=(("train", 4), ("val", 2), ("test", 1)))
    status = probe("class_retrieval", root, [trunk], tmp_path / "run")
    bad_input(status, "no class has two test images")


def _rows(x: torch.Tensor) -> list[np.ndarray]:
    return [r / np.linalg.norm(r) for r in x.double().numpy()]


def test_statistics_of_views_equal_loops() -> None:
    x = torch.randn(5, 8, 12, generator=torch.Generator().manual_seed(0))
    wide = fs.ViewStatistics(8, 12)
    for part in x.split(2):
        wide.add(part)
    # 1. Each statistic of the 8 views of each of 5 images
    loops = {name: [] for name in fs.PER_IMAGE}
    for image in x:
        rows = _rows(image)
        q = np.stack(rows)
        squares = np.linalg.eigvalsh(q @ q.T).clip(0)
        loops["nuclear_norm"].append(sum(math.sqrt(v) for v in squares))
        cosines = [float(a @ b) for a in rows for b in rows]
        loops["view_cosine"].append(sum(cosines) / 64)
        mean = sum(rows) / 8
        squares = [(row[k] - mean[k]) ** 2 for row in rows for k in range(12)]
        loops["covariance_diagonal"].append(sum(squares) / (8 * 12))
        pairs = [math.dist(a, b) ** 2 for a, b in itertools.permutations(rows, 2)]
        loops["alignment"].append(sum(pairs) / len(pairs))
    # 2. Their mean, interval and histogram
    for name, loop in loops.items():
        mean, ci95 = wide.mean(name)
        assert mean == pytest.approx(np.mean(loop), rel=1e-9), name
        half = 1.959964 * np.std(loop, ddof=1) / math.sqrt(5)
        assert ci95 is not None, name
        assert ci95[1] - mean == pytest.approx(half, rel=1e-6), name
        histogram = wide.histograms[name]
        width = (histogram.high - histogram.low) / fs.BINS
        bins = [int((v - histogram.low) / width) for v in loop]
        expected = np.bincount(bins, minlength=fs.BINS)
        assert histogram.counts.tolist() == expected.tolist(), name


def test_pairs_equal_loops() -> None:
    x = torch.randn(23, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([i % 3 for i in range(22)] + [-1])
    found = fs.pairs(x, labels, chunk=7)  # several chunks, the last one short
    rows = _rows(x)
    within = []
    between = []
    potential = []
    for i, j in itertools.combinations(range(23), 2):
        distance = math.dist(rows[i], rows[j])
        potential.append(math.exp(-2 * distance**2))
        if labels[i] < 0 or labels[j] < 0:
            continue
        if labels[i] == labels[j]:
            within.append(distance)
        else:
            between.append(distance)
    assert found.within_mean == pytest.approx(np.mean(within), rel=1e-9)
    assert found.between_mean == pytest.approx(np.mean(between), rel=1e-9)
    assert found.uniformity == pytest.approx(math.log(np.mean(potential)), rel=1e-9)
    binned = [[int(v / 2 * fs.BINS) for v in values] for values in (within, between)]
    counts = [np.bincount(places, minlength=fs.BINS) for places in binned]
    assert found.within.counts.tolist() == counts[0].tolist()
    shared = sum(min(a / len(within), b / len(between)) for a, b in zip(*counts))
    assert found.overlap == pytest.approx(shared, abs=1e-6)


def test_min_max_equals_loops() -> None:
    x = torch.randn(11, 20, generator=torch.Generator().manual_seed(2))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    found = fs.min_max(x, order, chunk=4)
    assert found["dims"] == [2, 4, 8, 16, 20]
    rows = [row[order.numpy()] for row in _rows(x)]
    for i, h in enumerate(found["dims"]):
        contrast = []
        for a in range(11):
            others = [row for b, row in enumerate(rows) if b != a]
            distances = [math.dist(rows[a][:h], row[:h]) for row in others]
            contrast.append((max(distances) - min(distances)) / min(distances))
        assert found["contrast"][i] == pytest.approx(np.mean(contrast), rel=1e-7)


def test_spectra_equal_loops() -> None:
    x = torch.randn(30, 7, generator=torch.Generator().manual_seed(4)) + 3.0
    moments = fs.Moments(7)
    for part in x.split(4):
        moments.add(part)
    data = x.double().numpy()
    mean = data.sum(0) / 30
    covariance = np.zeros((7, 7))
    for i, j in np.ndindex(7, 7):
        covariance[i, j] = sum((r[i] - mean[i]) * (r[j] - mean[j]) for r in data) / 30
    expected = np.linalg.eigvalsh(covariance)[::-1]
    np.testing.assert_allclose(moments.spectrum().numpy(), expected, rtol=1e-9)
    singular = np.linalg.svd(data, compute_uv=False)
    np.testing.assert_allclose(moments.singular_values().numpy(), singular, rtol=1e-8)
    p = singular / sum(singular)
    rank = math.exp(-sum(v * math.log(v) for v in p))
    assert fs.entropy_rank(moments.singular_values()) == pytest.approx(rank, rel=1e-8)


def test_equal_features_have_collapsed() -> None:
    same = torch.ones(6, 32, 16)
    views = fs.ViewStatistics(32, 16)
    views.add(same)
    # Their rank is 1, which gives the least value of 32 unit rows.
    assert views.mean("nuclear_norm")[0] == pytest.approx(math.sqrt(32))
    assert views.mean("view_cosine")[0] == pytest.approx(1.0)
    assert views.mean("covariance_diagonal")[0] == pytest.approx(0.0, abs=1e-15)
    moments = fs.Moments(16)
    moments.add(same[:, 0])
    assert fs.collapse(moments).kind == fs.COMPLETE
    assert fs.entropy_rank(moments.singular_values()) == pytest.approx(1.0, abs=1e-6)
    assert math.isnan(fs.entropy_rank(moments.spectrum()))
    found = fs.pairs(same[:, 0], torch.tensor([0, 0, 0, 1, 1, 1]))
    assert found.within_mean == found.between_mean == 0.0
    assert found.overlap == pytest.approx(1.0)
    assert found.uniformity == pytest.approx(0.0, abs=1e-12)
    assert set(fs.min_max(same[:, 0], torch.arange(16))["contrast"]) == {None}


def test_isotropic_gaussians_fill_all_directions_alike() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4096, 64, generator=generator)
    moments = fs.Moments(64)
    moments.add(x)
    assert fs.entropy_rank(moments.singular_values()) > 63.5  # all 64 directions alike
    assert fs.collapse(moments) == fs.Collapse(64, 64, fs.FULL)
    # On the sphere E ||u - v||^2 = 2, and E exp(-2 ||u - v||^2) is about e^(-4 + 8/d)
    found = fs.pairs(x[:1024], torch.arange(1024) % 10)
    assert found.uniformity == pytest.approx(-4 + 8 / 64, abs=0.02)
    assert found.between_mean == pytest.approx(math.sqrt(2), abs=0.01)
    assert found.overlap > 0.85  # labels say nothing here
    views = fs.ViewStatistics(32, 64)
    views.add(x[:2048].view(64, 32, 64))
    # Of the 32 x 32 pairs only the 32 of a view with itself are alike.
    assert views.mean("view_cosine")[0] == pytest.approx(1 / 32, abs=0.01)
    assert views.mean("alignment")[0] == pytest.approx(2.0, abs=0.02)
    # Theorem 1: the contrast vanishes as the dimension grows.
    noise = torch.randn(512, 2048, generator=generator)
    curve = fs.min_max(noise, torch.arange(2048))["contrast"]
    assert sorted(curve, reverse=True) == curve
    assert curve[-1] < 0.12


@pytest.mark.parametrize("rank", [1, 3, 20])
def test_features_of_rank_r_have_r_live_directions(rank: int) -> None:
    generator = torch.Generator().manual_seed(6)
    basis = torch.linalg.qr(torch.randn(64, rank, generator=generator).double()).Q
    x = torch.randn(2000, rank, generator=generator).double() @ basis.T
    moments = fs.Moments(64)
    moments.add(x)
    found = fs.collapse(moments)
    assert found.live == rank and found.kind == fs.DIMENSIONAL
    assert rank * 0.95 < fs.entropy_rank(moments.singular_values()) <= rank + 1e-6
    views = fs.ViewStatistics(32, 64)
    views.add(x[:64].view(2, 32, 64))
    assert views.mean("nuclear_norm")[0] <= math.sqrt(32 * min(rank, 32)) + 1e-9


# The edges of the statistics


def test_a_histogram_counts_what_lies_beyond_its_range_at_its_ends() -> None:
    histogram = fs.Histogram(1.0, 3.0)
    width = 2.0 / fs.BINS
    values = [0.0, 1.0, 1.0 + 1.5 * width, 3.0 - 0.5 * width, 3.0, 9.0]
    histogram.add(torch.tensor(values, dtype=torch.float64))
    expected = torch.zeros(fs.BINS, dtype=torch.int64)
    expected[0], expected[1], expected[-1] = 2, 1, 3
    assert torch.equal(histogram.counts, expected)
    assert math.isnan(histogram.overlap(fs.Histogram(1.0, 3.0)))
    assert math.isnan(fs.Histogram(1.0, 3.0).overlap(histogram))
    half = fs.Histogram(1.0, 3.0)
    half.add(torch.tensor([1.0, 2.0]))
    assert histogram.overlap(half) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("first", "last", "merged"),
    [
        (103, 1099, 4),
        (0, 1999, 10),
        (7, 7, 1),
        (10, 408, 1),
        (10, 409, 2),
        (11, 411, 2),
    ],
)
def test_the_occupied_part_of_a_histogram_becomes_about_200_bars(
    first: int, last: int, merged: int
) -> None:
    histogram = fs.Histogram(1.0, 5.0)
    histogram.counts[first] = 3
    histogram.counts[last] += 2
    shown = histogram.to_json()
    width = 4.0 / fs.BINS
    assert shown["width"] == pytest.approx(merged * width)
    # Its bars are whole from the start of the range on
    begin = first // merged
    assert shown["low"] == pytest.approx(1.0 + begin * merged * width)
    bars = [0] * (last // merged - begin + 1)
    bars[0] += 3
    bars[-1] += 2
    assert shown["counts"] == bars


def test_an_empty_histogram_is_the_whole_range() -> None:
    shown = fs.Histogram(0.0, 2.0).to_json(bars=4)
    assert shown == {"low": 0.0, "width": pytest.approx(0.5), "counts": [0] * 4}


def test_what_is_no_number_is_none() -> None:
    found = [fs.finite(value) for value in (1.5, 0.0, math.nan, math.inf, None)]
    assert found == [1.5, 0.0, None, None, None]
    rows = fs.unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    torch.testing.assert_close(rows, torch.tensor([[0.6, 0.8], [0, 0]]).double())


def test_too_few_views_have_no_mean_or_no_interval() -> None:
    views = fs.ViewStatistics(3, 4)
    value, ci95 = views.mean("alignment")
    assert math.isnan(value) and ci95 is None
    views.add(torch.eye(3, 4)[None])
    # Three views at right angles
    value, ci95 = views.mean("alignment")
    assert value == pytest.approx(2.0) and ci95 is None
    assert views.mean("nuclear_norm")[0] == pytest.approx(3.0)
    views.add(torch.eye(3, 4)[None])
    _, ci95 = views.mean("alignment")
    assert ci95 == pytest.approx((2.0, 2.0))


def spread(*deviations: float) -> fs.Moments:
    """The moments of features that vary independently by such deviations, about 3."""
    moments = fs.Moments(len(deviations))
    both = torch.cat([torch.eye(len(deviations)), -torch.eye(len(deviations))]).double()
    moments.add(3.0 + both * torch.tensor(deviations, dtype=torch.float64))
    return moments


def test_half_of_the_possible_directions_are_no_collapse() -> None:
    assert fs.collapse(spread(1, 1, 0, 0)) == fs.Collapse(2, 4, fs.FULL)
    assert fs.collapse(spread(1, 1, 0, 0, 0)) == fs.Collapse(2, 5, fs.DIMENSIONAL)
    # A direction lives above a hundred-thousandth of the largest variance
    found = fs.collapse(spread(1, 0.0032, 0.0031, 0))
    assert (found.live, found.kind) == (2, fs.FULL)
    nothing = fs.Moments(3)
    nothing.add(torch.zeros(7, 3))
    assert fs.collapse(nothing) == fs.Collapse(0, 3, fs.COMPLETE)
    # What hardly differs beside what all images share
    assert fs.collapse(spread(0.003, 0.003)).kind == fs.COMPLETE
    assert fs.collapse(spread(0.01, 0.01)).kind == fs.FULL
    two = fs.Moments(5)
    two.add(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)))
    assert fs.collapse(two) == fs.Collapse(1, 1, fs.FULL)


def test_the_rank_of_equal_values_is_their_number() -> None:
    assert fs.entropy_rank(torch.tensor([2.0, 2.0, 0.0, 2.0])) == pytest.approx(3)
    assert math.isnan(fs.entropy_rank(torch.zeros(3)))
    assert math.isnan(fs.entropy_rank(torch.tensor([math.nan, 1.0])))


def test_pairs_that_there_are_not_have_no_distance() -> None:
    one = fs.pairs(torch.ones(1, 3), torch.tensor([0]))
    unlabelled = fs.pairs(torch.eye(3), torch.tensor([-1, -1, -1]))
    for found in (one, unlabelled):
        assert math.isnan(found.within_mean) and math.isnan(found.between_mean)
        assert math.isnan(found.overlap)
    assert math.isnan(one.uniformity)
    # All pairs count for uniformity, whoever they are: at a squared distance of 2
    assert unlabelled.uniformity == pytest.approx(-4.0)
    apart = fs.pairs(torch.eye(3), torch.tensor([0, 1, 2]))
    assert math.isnan(apart.within_mean)
    assert apart.between_mean == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("dim", "dims"), [(1, [1]), (2, [2]), (3, [2, 3]), (4, [2, 4]), (9, [2, 4, 8, 9])]
)
def test_dimensions_of_the_contrast_double(dim: int, dims: list[int]) -> None:
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(0))
    assert fs.min_max(x, torch.arange(dim))["dims"] == dims


def test_an_anchor_with_a_copy_has_no_contrast() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    x[3] = 2 * x[0]  # the same direction
    found = fs.min_max(x, torch.arange(4), chunk=2)["contrast"][-1]
    rows = _rows(x)
    contrast = []
    for a in (1, 2, 4, 5):
        distances = [math.dist(rows[a], row) for b, row in enumerate(rows) if b != a]
        contrast.append((max(distances) - min(distances)) / min(distances))
    assert found == pytest.approx(np.mean(contrast))
