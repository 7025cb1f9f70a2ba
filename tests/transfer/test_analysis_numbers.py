"""The numbers of `analyze` from features: which images they are over, how they are told and printed."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from support.layouts import SMALL
from support.records import a_result

from backbench.images.image_list import ImageList, scan_folder
from backbench.stats import confidence
from backbench.transfer.analysis import analyze
from backbench.transfer.analysis import statistics as stats
from backbench.transfer.analysis.analyze import AnalyzedViews, Number, Space
from backbench.transfer.analysis.protocol import AnalyzeConfig, load_analysis
from backbench.transfer.devices import Machine
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.probes import fewshot
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint

DEMO = load_analysis("analyze_demo", None)


def listed(labels, classes=("a", "b", "c")):
    """A list of files that nobody reads."""
    paths = tuple(f"{i}.png" for i in range(len(labels)))
    return ImageList(Path("/d"), paths, tuple(labels), classes)


def grouped(labels, dim=6, spread=1.0, seed=0):
    """Features around a centre for each label, as likely right as wrong at a spread of 1."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(3, dim))
    features = centres[np.asarray(labels)] + spread * draw.normal(
        size=(len(labels), dim)
    )
    return torch.tensor(features, dtype=torch.float32)


# Which images


def test_every_other_image_of_a_class_is_in_the_first_half():
    labels = [2, 0, -1, 0, 2, 0, 2, 1, -1]
    assert analyze.halves(labels) == ([0, 1, 5, 6, 7], [3, 4])
    assert analyze.halves([-1, -1]) == ([], [])


def test_so_many_images_are_chosen_by_the_seed_in_their_order():
    images = listed([0] * 12)
    for count in (None, 12, 13):
        assert analyze.choose_images(images, count, 0) is images
    chosen = analyze.choose_images(images, 5, 0)
    places = [int(path.removesuffix(".png")) for path in chosen.paths]
    assert len(set(places)) == 5 and places == sorted(places)
    assert list(analyze.choose_images(images, 5, 0).paths) == list(chosen.paths)
    assert list(analyze.choose_images(images, 5, 1).paths) != list(chosen.paths)


def test_views_of_an_image_follow_from_the_seed_and_its_path(tmp_path):
    draw = np.random.default_rng(0)
    for label in "ab":
        for number in range(2):
            file = tmp_path / label / f"{number}.png"
            file.parent.mkdir(exist_ok=True)
            pixels = draw.integers(0, 256, (40, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
    images = scan_folder(tmp_path)
    recipe = dataclasses.replace(DEMO, augmentations=3)
    views = AnalyzedViews(images, recipe, 0)
    found, index = views[2]
    assert (found.shape, found.dtype, index) == ((4, 3, 32, 32), torch.uint8, 2)
    # The first is the plain one, with the channels first
    plain = np.asarray(recipe.geometry.transform()(images.open(2)))
    np.testing.assert_array_equal(found[0].permute(1, 2, 0).numpy(), plain)
    assert len({view.numpy().tobytes() for view in found}) == 4
    # The same image elsewhere in a list has the same views, and another seed gives others
    again, place = AnalyzedViews(images.subset([3, 2]), recipe, 0)[1]
    assert torch.equal(again, found) and place == 1
    other, _ = AnalyzedViews(images, recipe, 1)[2]
    assert torch.equal(other[0], found[0]) and not torch.equal(other[1:], found[1:])


def test_views_reach_all_of_a_wide_image(tmp_path):
    """The red of a column is its place, from left to right."""
    red = np.linspace(0, 255, 90).astype(np.uint8)
    pixels = np.zeros((30, 90, 3), np.uint8)
    pixels[:, :, 0] = red
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    plain = {"jitter_p": 0.0, "gray_p": 0.0, "blur_p": 0.0, "flip": 0.0}
    crops = dataclasses.replace(DEMO.crops, **plain)
    recipe = dataclasses.replace(DEMO, augmentations=12, crops=crops)
    images = ImageList(tmp_path, ("a/0.png",), (0,), ("a",))
    found, _ = AnalyzedViews(images, recipe, 0)[0]
    shown = found[1:, 0].float().mean(1)  # of each view's columns
    assert (shown.diff(dim=1) >= -1).all()
    assert shown[:, 0].min() < 60 and shown[:, -1].max() > 195
    assert found[1:, 1:].max() == 0


def test_a_space_keeps_the_plain_features_of_the_sample_alone():
    recipe = dataclasses.replace(DEMO, augmentations=4)
    space = Space(None, "trunk", 3, recipe, sample=2)
    features = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0))
    space.add(features, torch.tensor([1, -1, 0]))
    torch.testing.assert_close(space.sample, features[[2, 0], 0])
    # The plain view alone is in the spectra, the others alone in the statistics of views
    assert space.moments.count == 3
    torch.testing.assert_close(space.moments.sum, features[:, 0].double().sum(0))
    means = features[:, 1:].double().mean(1)
    torch.testing.assert_close(space.groups.means.sum, means.sum(0))
    units = torch.nn.functional.normalize(features[:, 1:].double(), dim=2)
    cosine = units.mean(1).square().sum(1).mean()
    assert space.views.mean("view_cosine")[0] == pytest.approx(float(cosine))
    # Four views spread over three directions at most
    highest = {name: each.high for name, each in space.views.histograms.items()}
    assert highest["nuclear_norm"] == pytest.approx(12**0.5)
    assert highest["covariance_diagonal"] == pytest.approx(1 / 3)
    # All of it is what a stopped pass goes on from
    other = Space(None, "trunk", 3, recipe, sample=2)
    for mine, theirs in zip(other.tensors(), space.tensors(), strict=True):
        mine.copy_(theirs)
    assert other.moments.count == 3 and torch.equal(other.sample, space.sample)
    assert other.views.mean("alignment") == space.views.mean("alignment")
    assert other.groups.lidar() == space.groups.lidar()


# Probes on the sample


def test_neighbours_are_scikit_learns_of_each_half_in_the_other():
    labels = [0, 1, 1, -1, 2, 0, 1, 2, 0, 1, 2, 2, 0, 1, -1, 2, 1, 0, 2]
    images = listed(labels)
    sample = grouped(labels)
    recipe = dataclasses.replace(DEMO, neighbours=3, temperature=0.2)

    def weight(distance):
        return np.exp((1 - distance) / 0.2)

    a, b = analyze.halves(labels)
    y = np.asarray(labels)
    hits = []
    for bank, queries in ((a, b), (b, a)):
        search = KNeighborsClassifier(3, weights=weight, metric="cosine")
        search.fit(sample[bank].numpy(), y[bank])
        hits += (search.predict(sample[queries].numpy()) == y[queries]).tolist()
    assert 0 < sum(hits) < len(hits) == 17
    found = analyze.neighbours(sample, images, recipe)
    assert found == Number(
        "knn",
        pytest.approx(100 * np.mean(hits)),
        confidence.of_hits(np.asarray(hits)),
        "k 3, each half of 17 images by the other",
    )
    # No half has more neighbours than images
    many = analyze.neighbours(
        sample, images, dataclasses.replace(recipe, neighbours=50)
    )
    assert many.about.startswith(f"k {min(len(a), len(b))}, ")


def test_without_two_halves_there_are_no_neighbours():
    for labels in ([-1, -1, -1], [0, 1, 2]):
        sample = torch.randn(3, 4)
        assert analyze.neighbours(sample, listed(labels), DEMO) is None


def test_few_labels_are_scikit_learns_on_the_classes_that_have_enough():
    """Class c has one image in the bank's half, and is in neither."""
    labels = [0, 1, 0, 1, 1, 0, 0, 1, 2, 2, 0, 1, 1, 0, -1, 0, 1]
    images = listed(labels)
    sample = grouped(labels, spread=1.5)
    recipe = dataclasses.replace(DEMO, shots=2, draws=4, l2=2.0)
    a, b = ([i for i in half if labels[i] != 2] for half in analyze.halves(labels))
    y = np.asarray(labels)
    unit = torch.nn.functional.normalize(sample.double(), dim=1).numpy()
    hits = []
    for drawn in fewshot.draws(images.subset(a), shots=2, count=4, seed=7):
        chosen = np.asarray(a)[drawn]
        head = LogisticRegression(C=1 / 2.0, tol=1e-8, max_iter=5000)
        hits.append(head.fit(unit[chosen], y[chosen]).predict(unit[b]) == y[b])
    assert 0 < np.mean(hits) < 1
    found = analyze.few_labels(sample, images, recipe, 7)
    assert found == Number(
        "fewshot",
        pytest.approx(100 * np.mean(hits)),
        pytest.approx(confidence.of_draws(np.stack(hits))),
        "2 labels of 2 classes, 4 draws, 6 test images",
    )


def test_one_class_with_enough_labels_is_no_test_of_few():
    # Class b has no image to test, and class c only one in the bank
    labels = [0, 0, 0, 0, 2, 2, 1]
    recipe = dataclasses.replace(DEMO, shots=2)
    assert analyze.few_labels(grouped(labels), listed(labels), recipe, 0) is None
    # With one shot, two classes are enough
    recipe = dataclasses.replace(DEMO, shots=1)
    found = analyze.few_labels(grouped(labels), listed(labels), recipe, 0)
    assert found.about.startswith("1 labels of 2 classes, ")


# The numbers of a space


def filled_space(dim=24, views=4, images=60):
    recipe = dataclasses.replace(DEMO, augmentations=views, neighbours=3, draws=2)
    labels = [i % 3 for i in range(images)]
    plain = grouped(labels, dim)
    around = torch.randn(images, views, dim, generator=torch.Generator().manual_seed(1))
    features = torch.cat([plain[:, None], plain[:, None] + 0.3 * around], 1)
    space = Space(None, "projector", dim, recipe, sample=images)
    space.add(features, torch.arange(images))
    return space, listed(labels), recipe


def test_the_numbers_of_a_space_by_its_features(monkeypatch):
    monkeypatch.setattr(stats, "ALPHA_RANKS", (1, 4))
    space, images, recipe = filled_space()
    numbers, curves = analyze.summarise(space, images, recipe, 0)
    found = {n.metric: n for n in numbers}
    assert list(found) == [
        "nuclear_norm",
        "view_cosine",
        "covariance_diagonal_e4",
        "alignment",
        "uniformity",
        "within_class_distance",
        "between_class_distance",
        "class_overlap",
        "min_max_contrast",
        "rankme",
        "effective_rank",
        "live_directions",
        "collapse",
        "lidar",
        "alpha_req_1_4",
        "knn",
        "fewshot",
    ]
    # 1. Over the views
    mean, (low, high) = space.views.mean("covariance_diagonal")
    small = found["covariance_diagonal_e4"]
    assert small.value == pytest.approx(1e4 * mean)
    assert small.ci95 == pytest.approx((1e4 * low, 1e4 * high))
    assert small.about == "in units of 1e-4"
    value, ci95 = space.views.mean("alignment")
    assert (found["alignment"].value, found["alignment"].ci95) == (value, ci95)
    # 2. Over pairs of the sample
    pairs = stats.pairs(space.sample, torch.tensor(images.labels))
    assert found["uniformity"].value == pairs.uniformity
    assert found["within_class_distance"].value == pairs.within_mean
    assert found["between_class_distance"].value == pairs.between_mean
    assert pairs.within_mean < pairs.between_mean
    assert found["class_overlap"].value == pytest.approx(100 * pairs.overlap)
    assert curves["within"] == pairs.within.to_json()
    assert curves["between"] == pairs.between.to_json()
    # 3. Of the spectra, by numpy
    plain = space.sample.double().numpy()
    variances = np.linalg.eigvalsh(np.cov(plain.T, bias=True))[::-1]
    np.testing.assert_allclose(
        curves["spectrum"], variances / variances.sum(), rtol=1e-6
    )
    for metric, values in (
        ("rankme", np.linalg.svd(plain, compute_uv=False)),
        ("effective_rank", variances**0.5),
    ):
        p = values / values.sum()
        assert found[metric].value == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    slope, _ = np.polyfit(np.log([1, 2, 3, 4]), np.log(variances[:4]), 1)
    assert found["alpha_req_1_4"].value == pytest.approx(-slope)
    assert (found["live_directions"].value, found["collapse"].value) == (100, 0)
    assert found["live_directions"].about == "percent of 24"
    assert found["lidar"].about == "n 60 images, q 4 views, D 24"
    # 4. The contrast in all dimensions, beside that of noise
    assert curves["min_max"]["dims"] == [2, 4, 8, 16, 24]
    assert found["min_max_contrast"].value == curves["min_max"]["contrast"][-1]
    noise = torch.randn(60, 24, generator=torch.Generator().manual_seed(3))
    expected = stats.min_max(noise, torch.arange(24))["contrast"][-1]
    of_noise = curves["min_max_gaussian"]["contrast"][-1]
    assert of_noise == pytest.approx(expected, rel=0.1)
    assert of_noise != found["min_max_contrast"].value
    assert set(curves["histograms"]) == set(stats.PER_IMAGE)
    # 5. What is said of them
    said = {name: number.about for name, number in found.items()}
    assert said["class_overlap"] == "shared area of the two histograms, percent"
    assert said["min_max_contrast"] == "(D_max - D_min) / D_min, mean over anchors"
    assert said["collapse"] == "0 none, 1 dimensional, 2 complete"
    assert said["uniformity"] == said["rankme"] == ""


def test_views_of_one_image_have_a_mean_and_no_interval():
    views = stats.ViewStatistics(3, 4)
    views.add(torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)))
    numbers = analyze._view_numbers(views)
    assert [number.ci95 for number in numbers] == [None] * 4
    assert all(number.value > 0 for number in numbers)


def test_what_has_no_labels_has_no_probe():
    space, images, recipe = filled_space(images=6)
    unlabelled = dataclasses.replace(images, labels=(-1,) * 6)
    numbers, _ = analyze.summarise(space, unlabelled, recipe, 0)
    assert not {"knn", "fewshot"} & {n.metric for n in numbers}
    # Three images of each class: a half has two, the other one
    numbers, _ = analyze.summarise(space, images, recipe, 0)
    assert {"knn"} == {"knn", "fewshot"} & {n.metric for n in numbers}


def test_few_images_have_as_many_live_directions_as_they_can():
    """Of three images, two directions at most; both live."""
    recipe = dataclasses.replace(DEMO, augmentations=2)
    space = Space(None, "trunk", 7, recipe, sample=3)
    features = torch.randn(3, 3, 7, generator=torch.Generator().manual_seed(0))
    space.add(features, torch.arange(3))
    numbers, _ = analyze.summarise(space, listed([0, 1, 2]), recipe, 0)
    found = {n.metric: n for n in numbers}
    assert found["live_directions"].value == 100
    assert found["live_directions"].about == "percent of 2"


def test_a_row_of_a_space_says_all_of_it():
    recipe = AnalyzeConfig(
        protocol="mine-{space}-v1",
        split="val",
        crops=DEMO.crops,
        geometry=DEMO.geometry,
    )
    point = SimpleNamespace(
        digest="d" * 64, name="x", method="simclr", trunk="resnet18 c4", epochs=7
    )
    space = Space(point, "projector", 5, recipe, sample=1)
    number = Number("knn", 61.5, (50.0, 70.0), "k 3")
    made = analyze.row(
        space, number, about={"images": 9}, recipe=recipe, dataset="digits", seed=4
    )
    assert (made.checkpoint, made.name, made.method) == ("d" * 64, "x", "simclr")
    assert (made.arch, made.epochs) == ("resnet18 c4", 7)
    assert (made.task, made.dataset, made.split) == ("analyze", "digits", "val")
    assert (made.metric, made.value, made.ci95) == ("knn", 61.5, (50.0, 70.0))
    assert (made.protocol, made.seed) == ("mine-projector-v1", 4)
    assert made.provenance == {"images": 9, "about": "k 3"}
    bare = analyze.row(
        space,
        Number("rankme", None),
        about={"images": 9},
        recipe=recipe,
        dataset="digits",
        seed=4,
    )
    assert (bare.value, bare.provenance) == (None, {"images": 9})


# What is printed


def test_two_checkpoints_of_one_name_are_told_apart():
    points = [
        SimpleNamespace(name=name, digest=digit * 64)
        for name, digit in (("vit", "a"), ("resnet", "b"), ("vit", "c"))
    ]
    assert analyze.unique_names(points) == {
        "a" * 64: "vit aaaaaa",
        "b" * 64: "resnet",
        "c" * 64: "vit cccccc",
    }


def test_the_table_has_a_line_for_each_metric_and_a_column_for_each_checkpoint(
    capsys, tmp_path
):
    about = {"task": "analyze", "ci95": None, "provenance": {}}
    one = {"checkpoint": "a" * 64, "name": "a name longer than sixteen", **about}
    other = {"checkpoint": "b" * 64, "name": "other", **about}
    trunk, projector = {"protocol": "trunk-v1"}, {"protocol": "projector-v1"}
    rows = [
        a_result(metric="knn", value=12.3456, **one, **trunk),
        a_result(metric="lidar", value=None, **one, **trunk),
        a_result(metric="knn", value=0.00012345, **one, **projector),
        a_result(metric="knn", value=98.0, **other, **trunk),
        a_result(metric="lidar", value=3.0, **other, **trunk),
    ]
    analyze.show(rows, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["trunk-v1", "a", "name", "longer", "th", "other"],
        ["knn", "12.35", "98"],
        ["lidar", "undefined", "3"],
        ["projector-v1", "a", "name", "longer", "th", "other"],
        ["knn", "0.0001234"],
        ["pictures:", str(tmp_path / "pictures")],
    ]
    # Numbers stand below their checkpoint's name, and metrics below their space
    assert {len(lines[n]) for n in (0, 1, 2, 3)} == {28 + 2 * 18}
    assert lines[1].startswith("  knn ") and lines[4].endswith("0.0001234" + 18 * " ")


# The recipe


def test_a_recipe_of_one_name_or_of_two_sizes_is_refused():
    with pytest.raises(ValueError, match=r"protocol 'mine' needs \{space\} in it"):
        dataclasses.replace(DEMO, protocol="mine")
    geometry = dataclasses.replace(DEMO.geometry, crop=40)
    with pytest.raises(ValueError, match=r"crops.size 32 and geometry.crop 40 must"):
        dataclasses.replace(DEMO, geometry=geometry)


def test_as_many_views_as_the_recipe_has_are_its_own_column():
    same = load_analysis("analyze_demo", DEMO.augmentations)
    assert same == DEMO


def test_a_checkpoint_is_measured_in_its_trunk_and_in_the_projector_it_kept():
    weight = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    state = build_trunk("resnet18").state_dict()
    plain = Checkpoint(arch="resnet18", method="random", state_dict=state)
    headed = plain.replace(heads={"projector.0.weight": weight})
    recipe = dataclasses.replace(DEMO, augmentations=2)
    here = torch.device("cpu")
    (trunk,) = analyze.AnalyzedCheckpoint(plain, recipe, 2, here).spaces
    assert (trunk.name, trunk.dim, trunk.sample.shape) == ("trunk", 512, (2, 512))
    analyzed = analyze.AnalyzedCheckpoint(headed, recipe, 2, here)
    trunk, projector = analyzed.spaces
    assert (projector.name, projector.dim) == ("projector", 4)
    features = torch.randn(6, 512, generator=torch.Generator().manual_seed(1))
    analyzed.add(features, 2, torch.tensor([1, 0]))
    torch.testing.assert_close(trunk.sample, features[[3, 0]])
    torch.testing.assert_close(projector.sample, features[[3, 0]] @ weight.T)


def test_that_a_trunk_has_collapsed_is_no_bad_input_here():
    state = build_trunk("resnet18").state_dict()
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    point = Checkpoint(arch="resnet18", method="random", state_dict=zeros)
    recipe = dataclasses.replace(DEMO, augmentations=2)
    analyzed = analyze.AnalyzedCheckpoint(point, recipe, 2, torch.device("cpu"))
    pixels = torch.arange(2, dtype=torch.uint8)[:, None, None, None] + torch.zeros(
        2, 3, 32, 32, dtype=torch.uint8
    )
    (features,) = forward_all([analyzed.trunk], pixels)
    assert not features.any()


def test_one_pass_keeps_a_sample_and_its_sums_can_be_read_again(tmp_path, images):
    """Ten images in batches of four; a pass that was whole decodes none of them again."""
    state = build_trunk(SMALL).state_dict()
    point = Checkpoint(arch=SMALL, method="random", state_dict=state)
    recipe = dataclasses.replace(DEMO, augmentations=2, sample=6, batch=4)
    machine = Machine(torch.device("cpu"), 0, 1, 0)
    how = {"out": tmp_path / "run", "seed": 0, "machine": machine}
    (tmp_path / "run" / "state").mkdir(parents=True)
    (space,), sample = analyze.accumulate([point], images, recipe, **how)
    assert space.moments.count == 10 and space.groups.around.count == 20
    assert len(sample) == 6 and list(sample.paths) == sorted(sample.paths)
    plain = [AnalyzedViews(sample, recipe, 0)[i][0][0] for i in range(6)]
    trunk = FrozenTrunk.build(point, device=machine.device)
    (features,) = forward_all([trunk], torch.stack(plain))
    torch.testing.assert_close(space.sample, features, rtol=1e-4, atol=1e-4)
    unread = dataclasses.replace(images, root=Path("/nowhere"))
    (again,), same = analyze.accumulate([point], unread, recipe, **how)
    assert list(same.paths) == list(sample.paths)
    for one, other in zip(space.tensors(), again.tensors(), strict=True):
        assert torch.equal(one, other)
    other = dataclasses.replace(recipe, sample=50)
    _, everything = analyze.accumulate([], images, other, **{**how, "out": tmp_path})
    assert list(everything.paths) == list(images.paths)
