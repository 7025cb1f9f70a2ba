"""ImageNet's heads on other pictures: the sets' labels, the rules, kept heads and timm's own."""

import dataclasses
import importlib.resources
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from support.layouts import picture
from support.timm_fixtures import put_in_hub
from timm.data import (
    create_dataset,
    create_loader,
    create_transform,
    resolve_data_config,
)
from torchmetrics.functional.classification import multiclass_accuracy
from torchvision.transforms import v2

import backbench
from backbench.cli.program import main
from backbench.datasets import catalog
from backbench.datasets.readers import class_list
from backbench.datasets.splits import InImageNet
from backbench.errors import EXIT_FAILED, BadInput
from backbench.images.preprocess import Pixels, to_input
from backbench.published import reproduction_lists
from backbench.records import kept_scores, store
from backbench.transfer import keeping
from backbench.transfer.features.extractor import FeatureRows
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.probes import ood as ood_probe
from backbench.transfer.probes.ood import Ood, Ruled, TrimmedGeometry
from backbench.transfer.protocol import Geometry
from backbench.weights import importing, kept_heads
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families import timm_classifier
from backbench.weights.kept_heads import KeptHead

# Leaves pixels as they are
UNCHANGED = Pixels(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
SLOW = pytest.mark.slow
GEOMETRY = {"resize": 24, "crop": 20}


def ood(model, name, root, out, protocol, *more):
    """The exit status of the command on one model and one set."""
    words = ["ood", model, "--datasets", name, "--data", root, "--out", out]
    return main([*map(str, words), "--workers", "0", "--protocol", protocol, *more])


def info(name):
    return (importlib.resources.files("timm.data") / "_info" / name).read_text()


# --- the sets ---
def test_labels_of_a_and_r_are_timms_lists():
    for short in "ar":
        indices = list(map(int, info(f"imagenet_{short}_indices.txt").split()))
        names = [class_list("imagenet")[i] for i in indices]
        assert names == class_list(f"imagenet_{short}")


@pytest.mark.parametrize(
    ("name", "classes", "images"),
    [
        ("imagenet-a", 200, 200),
        ("imagenet-r", 200, 200),
        ("imagenet-sketch", 1000, 1000),
    ],
)
def test_labels_are_places_in_imagenet(trees, name, classes, images):
    found = catalog.load(name, trees(name))
    assert [len(each) for _, each in found.items()] == [0, 0, images]
    assert len(found.test.classes) == len(found.imagenet.ids) == classes
    for path, label in zip(found.test.paths, found.test.labels):
        (place,) = found.imagenet.ids[label]
        assert class_list("imagenet")[place] == path.split("/")[0]


def test_v2s_folders_are_numbers_and_no_texts(trees):
    found = catalog.load("imagenet-v2-matched", trees("imagenet-v2-matched"))
    assert len(found.test) == 10_000
    for path, label in zip(found.test.paths, found.test.labels):
        assert found.imagenet.ids[label] == (int(path.split("/")[0]),)
    # Sorted as texts, the second folder would be 10.
    assert found.test.labels[10:20] == (1,) * 10
    folder = trees.root / "imagenet-v2-matched/imagenetv2-matched-frequency-format-val"
    for i in range(10):
        (folder / "7" / f"{i:040}.jpeg").write_bytes(b"an older unpacking has 20")
    with pytest.raises(BadInput, match=r"/7: 20 images, not 10; an older unpacking"):
        catalog.load("imagenet-v2-matched", trees.root)
    (folder / "7").rename(folder / "n01440764")
    with pytest.raises(BadInput, match="class folders are missing, '7' first"):
        catalog.load("imagenet-v2-matched", trees.root)


def test_real_goes_by_the_number_of_the_file(trees):
    root = trees("imagenet-real")
    labels = json.loads(info("imagenet_real_labels.json"))
    found = catalog.load("imagenet-real", root)
    known = [n for n in (1, 2, 3, 293, 50000) if labels[n - 1]]
    numbers = [int(path[-13:-5]) for path in found.test.paths]
    assert sorted(numbers) == known
    assert numbers != known, "the folders are in another order"
    for number, answers in zip(numbers, found.imagenet.answers, strict=True):
        assert list(answers) == labels[number - 1]
    (file, *_) = (root / "imagenet/val").rglob("*_00000001.JPEG")
    for name in (f"n01440764/{file.name}", "ILSVRC2012_val_00000000.JPEG"):
        other = root / "imagenet/val" / name
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(file.read_bytes())
        said = "JPEG: no image of val, or a second copy of one"
        with pytest.raises(BadInput, match=said):
            catalog.load("imagenet-real", root)
        other.unlink()


def test_objectnets_list_is_in_ilsvrcs_order(trees):
    found = catalog.load("objectnet", trees("objectnet"))
    assert found.test.classes == ("alarm_clock", "bib", "mug") and len(found.test) == 6
    assert found.imagenet.ids == ((409, 530), (443,), (504,))


def test_what_is_damaged_is_refused_in_one_line(
    trees, trunk, tmp_path, bad_input, capsys
):
    root = trees("imagenet-a")
    words = [str(trunk), "--data", str(root), "--out", str(tmp_path / "o")]
    words += ["--datasets", "imagenet-a"]
    own = ["ood", *words, "--protocol", "ood_own"]
    bad_input(main(["linear", *words]), "`backbench ood` tests ImageNet's heads on it")
    status = main(["ood", *words, "--protocol", "ood", "rule=any"])
    bad_input(status, "no rule 'any'; write rule=subset or rule=all")
    bad_input(main(["ood", *words]), "no heads.safetensors in it")
    bad_input(main(own), "has no head of its own that is known")
    bad_input(main([*own, "--seed", "1"]), "has one own head; leave it out")
    assert not (tmp_path / "o").exists()
    assert main(["data", "check", "imagenet-a", "--data", str(root)]) == 1
    assert "imagenet-a: 1 problems" in capsys.readouterr().out  # 200 images, not 7500


# --- the rules ---
def random_set(seed):
    """Logits with ties over 1000 classes, and a set whose classes have one, two or several ids."""
    draw = np.random.default_rng(seed)
    n = 20
    classes = int(draw.integers(6, 30))
    logits = draw.normal(0, 1, (n, 1000))
    if seed % 2:
        logits = np.round(2 * logits)
    ids = draw.permutation(1000)[: 2 * classes].reshape(classes, 2).tolist()
    ids = [tuple(each[: 1 + seed % 2]) for each in ids]
    label = draw.integers(0, classes, n)
    for i in range(0, n, 2):  # half of the images nearly right
        logits[i, ids[label[i]][0]] += 6
    return logits, ids, label


@pytest.mark.parametrize(
    ("first", "sets"), [(0, 100), pytest.param(100, 900, marks=SLOW)]
)
def test_rules_are_numpys(first, sets):
    for seed in range(first, first + sets):
        logits, ids, label = random_set(seed)
        place = {each: c for c, several in enumerate(ids) for each in several}
        answers = [(*ids[c], (int(c) * 7 + 1) % 1000) for c in label]
        # The highest first, and of equal ones the first
        highest = np.argsort(-logits, axis=1, kind="stable")[:, :5].tolist()
        for rule in ("all", "subset", "any", "official"):
            of = InImageNet(tuple(ids), tuple(answers) if rule == "any" else None)
            ruled = Ruled(rule, tuple(map(int, label)), of)
            blocks = []
            for begin in (0, 7, 14):
                some = torch.tensor(logits[begin : begin + 7])
                blocks.append(ruled.ranking(some, begin))
            ranking = torch.cat(blocks)
            for i, z in enumerate(logits):
                if rule == "subset":
                    scores = [max(z[k] for k in several) for several in ids]
                    best = sorted(range(len(ids)), key=lambda c: (-scores[c], c))[:5]
                    hits = [c == label[i] for c in best]
                else:
                    best = highest[i]
                    right = answers[i] if rule == "any" else ids[label[i]]
                    hits = [c in right for c in best]
                    if rule != "any":
                        assert ranking[i].tolist() == [place.get(c, -1) for c in best]
                assert (ranking[i] == int(label[i])).tolist() == hits, (seed, rule)


def test_the_subset_rule_is_torchmetrics_on_the_restricted_logits():
    draw = torch.Generator().manual_seed(0)
    indices = list(map(int, info("imagenet_a_indices.txt").split()))
    logits = torch.randn(300, 1000, generator=draw)
    label = torch.arange(300) % 200
    logits[torch.arange(0, 300, 2), torch.tensor(indices)[label[::2]]] += 3
    of = InImageNet(tuple((i,) for i in indices))
    ruled = Ruled("subset", tuple(label.tolist()), of)
    ranking = ruled.ranking(logits, 0)
    for k in (1, 5):
        ours = (ranking[:, :k] == label[:, None]).any(1).double().mean()
        how = {"num_classes": 200, "top_k": k, "average": "micro"}
        theirs = multiclass_accuracy(logits[:, indices], label, **how)
        assert float(ours) == pytest.approx(float(theirs), abs=1e-6)


def test_what_a_rule_compares_and_means():
    """Of three classes, the second one has two of ImageNet's."""
    of = InImageNet(((7,), (3, 900), (0,)))
    columns = {}
    for rule in ("subset", "all", "any", "official"):
        columns[rule] = Ruled(rule, (1, 1, 2, 0), of).columns
    assert columns == {
        "subset": [1, 1, 2, 0],
        "all": [3, 3, 0, 7],
        "any": None,
        "official": None,
    }
    meaning = Ruled("all", (), of).meaning
    assert len(meaning) == 1000 and (meaning >= 0).sum() == 4
    assert meaning[[7, 3, 900, 0]].tolist() == [0, 1, 1, 2]
    logits = torch.zeros(2, 1000)
    logits[0, 900], logits[0, 3], logits[1, 7] = 5.0, 2.0, 4.0
    logits[0, 500] = 9.0
    scores = Ruled("subset", (0, 0), of).scores(logits)
    assert scores.tolist() == [[0, 5, 0], [4, 0, 0]]
    assert Ruled("all", (0, 0), of).scores(logits) is logits
    # The best of 1000 may be none of the set's classes; a diverged head has no answer
    ranking = Ruled("all", (0, 0), of).ranking(logits, 0)
    assert ranking[0].tolist()[:3] == [-1, 1, 1]
    logits[1, 999] = torch.nan
    assert Ruled("all", (0, 0), of).ranking(logits, 0)[1].tolist() == [-1] * 5


def test_pixels_are_cut_from_each_side_of_a_wide_image():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 31, 3), dtype=np.uint8)
    shown = []

    def inner(image):
        shown.append(np.asarray(image))
        return image

    of = SimpleNamespace(transform=lambda: inner)
    cut = TrimmedGeometry(trim=3, of=of).transform()
    assert cut(Image.fromarray(pixels)).size == (25, 14)
    np.testing.assert_array_equal(shown[0], pixels[3:-3, 3:-3])


def test_a_set_that_is_none_and_a_rule_that_it_has_not():
    p = Ood(kind="ood", protocol="ood", rule="official")
    of = SimpleNamespace(imagenet=None)
    with pytest.raises(BadInput) as error:
        ood_probe.refuse(p, "cifar10", of)
    said = str(error.value)
    assert said.startswith("cifar10: no set for ImageNet's classifiers; there are ")
    named = said.rpartition("there are ")[2].split(", ")
    assert {"imagenet-a", "imagenet-real", "objectnet"} <= set(named)
    assert not {"cifar10", "imagenet"} & set(named)
    of = SimpleNamespace(imagenet=InImageNet(((1,),)))
    said = "imagenet-a: has no rule 'official'; write rule=subset or rule=all"
    with pytest.raises(BadInput) as error:
        ood_probe.refuse(p, "imagenet-a", of)
    assert str(error.value) == said
    ood_probe.refuse(p, "objectnet", of)


# --- kept heads ---
def keep_head(trunk, run, weight=None):
    """Keep a head of 1000 classes as `linear` on ImageNet would; drawn, if no weight is given."""
    checkpoint = Checkpoint.load(trunk)
    draw = torch.Generator().manual_seed(5)
    drawn = torch.randn(1000, 128, generator=draw) * 0.1
    bias = torch.randn(1000, generator=draw)
    if weight is None:
        weight = drawn
    head = KeptHead(weight, bias, 2.0, "hold-out, twin")
    reads = Ood(kind="ood", protocol="ood", geometry=Geometry(**GEOMETRY))
    bound = keeping.bound_to(
        checkpoint,
        "linear-grid-v1",
        reads=reads,
        geometry=reads.geometry,
        classes=class_list("imagenet"),
        seed=0,
    )
    run.mkdir(parents=True, exist_ok=True)
    kept_heads.keep(run / "heads.safetensors", "linear/imagenet/x", head, bound)
    return checkpoint, head


def recipe(tmp_path, **changes):
    file = tmp_path / "ood_mine.yaml"
    about = {
        "kind": "ood",
        "protocol": "ood",
        "of": "linear-grid-v1",
        "geometry": GEOMETRY,
    }
    file.write_text(json.dumps({**about, **changes}))
    return str(file)


def features_of(checkpoint, images, trim=0, **how):
    """The features of images without `trim` pixels at each side, computed apart from a run."""
    frozen = FrozenTrunk.build(checkpoint, device=torch.device("cpu"))
    view = Geometry(**GEOMETRY).transform()
    pixels = []
    for i in range(len(images)):
        opened = images.open(i)
        inside = opened.crop((trim, trim, opened.width - trim, opened.height - trim))
        pixels.append(255 * to_input(view(inside), UNCHANGED))
    (features,) = forward_all(
        [frozen], torch.stack(pixels).round().to(torch.uint8), **how
    )
    return features


@pytest.mark.parametrize("name", ["imagenet-a", "imagenet-real", "objectnet"])
def test_a_kept_head_answers(name, trees, trunk, tmp_path, capsys):
    root = trees(name)
    checkpoint, head = keep_head(trunk, tmp_path / "runs" / "linear")
    out = tmp_path / "runs" / "ood"
    assert ood(trunk, name, root, out, recipe(tmp_path)) == 0
    rows = [r for r in store.read_file(out / "results.jsonl") if r.metric == "top1"]
    rules = [r.protocol.removeprefix("linear-grid-v1-") for r in rows]
    assert rules == list(catalog.DATASETS[name].rules)
    found = catalog.load(name, root)
    features = features_of(checkpoint, found.test, trim=2 if name == "objectnet" else 0)
    logits = features @ head.weight.T + head.bias
    for row in rows:
        rule = row.protocol.rpartition("-")[2]
        ruled = Ruled(rule, found.test.labels, found.imagenet)
        hits = ruled.ranking(logits, 0) == torch.tensor(found.test.labels)[:, None]
        right = {"top1": int(hits[:, 0].sum()), "top5": int(hits.any(1).sum())}
        assert row.provenance["right"] == right
        assert row.value == pytest.approx(100 * right["top1"] / len(found.test))
        assert ("scores" in row.provenance) == (rule in ("all", "subset"))
    assert main(["verify", str(out)]) == 0
    if "scores" in rows[0].provenance:
        assert main(["calibrate", str(out)]) == 0
        arrays = kept_scores.load(out / rows[0].facts["scores"])
        assert float(arrays["temperature"]) == 2  # of ImageNet's hold-out
        ruled = Ruled("subset", found.test.labels, found.imagenet)
        z = ruled.scores(logits).double()
        columns = torch.tensor(ruled.columns)
        nll = float(torch.nn.functional.cross_entropy(z / 2, columns))
        assert kept_scores.value(arrays, "nll_t")[0] == pytest.approx(nll, rel=1e-4)
        assert main(["verify", str(out)]) == 0
    capsys.readouterr()
    assert main(["leaderboard", str(out), "--csv", str(tmp_path / "l.csv")]) == 0
    head_line = (tmp_path / "l.csv").read_text().splitlines()[0]
    assert f"ood/{name}" in head_line


def test_a_kept_head_of_tokens_answers(trees, trunk, tmp_path, bad_input):
    root = trees("imagenet-a")
    checkpoint = Checkpoint.load(trunk)
    draw = torch.Generator().manual_seed(5)
    head = KeptHead(
        weight=0.1 * torch.randn(1000, 128, generator=draw),
        bias=0.1 * torch.randn(1000, generator=draw),
        query=0.1 * torch.randn(8, 128, generator=draw),
        value=0.1 * torch.randn(128, 128, generator=draw),
    )
    reads = Ood(
        kind="ood", protocol="ood", reads="tokens", geometry=Geometry(**GEOMETRY)
    )
    bound = keeping.bound_to(
        checkpoint,
        "attentive-v1",
        reads=reads,
        geometry=reads.geometry,
        classes=class_list("imagenet"),
        seed=0,
    )
    run = tmp_path / "runs" / "linear"
    run.mkdir(parents=True)
    kept_heads.keep(run / "heads.safetensors", "attentive/imagenet/x", head, bound)
    out = tmp_path / "runs" / "ood"
    what = (trunk, "imagenet-a", root, out)
    # 1. It reads tokens, and pooled features have as many numbers.
    of_trunk = recipe(tmp_path, of="attentive-v1")
    bad_input(ood(*what, of_trunk), "has another space")
    # 2. Its answers are those that its formula gives, computed apart from the run.
    assert ood(*what, recipe(tmp_path, of="attentive-v1", reads="tokens")) == 0
    found = catalog.load("imagenet-a", root)
    tokens = features_of(checkpoint, found.test, tokens=True).flatten(1, 2)
    values = tokens @ head.value.T
    weights = (tokens @ head.query.T).softmax(1)  # (n, T, Q)
    slices = []
    for j in range(8):
        own = values[:, :, 64 * j : 64 * j + 64]
        slices.append(weights[:, :, j][:, None] @ own)
    logits = torch.cat(slices, 2)[:, 0] @ head.weight.T + head.bias
    rows = [r for r in store.read_file(out / "results.jsonl") if r.metric == "top1"]
    assert {r.protocol for r in rows} == {"attentive-v1-subset", "attentive-v1-all"}
    for row in rows:
        rule = row.protocol.rpartition("-")[2]
        best = Ruled(rule, found.test.labels, found.imagenet).ranking(logits, 0)[:, 0]
        hits = best == torch.tensor(found.test.labels)
        assert row.provenance["right"]["top1"] == int(hits.sum())
        predicted = np.load(out / row.facts["predictions"])["prediction"]
        assert (predicted == best.numpy()).mean() > 0.99
        assert row.facts["head_sha256"] == head.digest
    assert main(["verify", str(out)]) == 0


def test_a_run_goes_on_with_its_own_heads_alone(
    trees, trunk, tmp_path, bad_input, capsys
):
    root = trees("imagenet-a")
    out = tmp_path / "runs" / "ood"
    _, head = keep_head(trunk, tmp_path / "runs" / "linear")
    line = (trunk, "imagenet-a", root, out, recipe(tmp_path))
    assert ood(*line) == 0
    before = (out / "results.jsonl").read_text()
    # Trained again, all that a head is bound to is the same, and its numbers are others.
    keep_head(trunk, tmp_path / "again", weight=-head.weight)
    bad_input(ood(*line, "--heads", str(tmp_path / "again")), "differs in heads")
    assert ood(*line) == 0
    assert (out / "results.jsonl").read_text() == before
    # Two rules have one head, and files of scores that were exchanged give no number.
    of_all, subset = sorted((out / "scores").glob("*.npz"))
    kept = subset.read_bytes()
    subset.write_bytes(of_all.read_bytes())
    assert main(["calibrate", str(out)]) == 0
    rows = [
        r for r in store.read_file(out / "results.jsonl") if r.task == "calibration"
    ]
    assert {r.protocol for r in rows} == {"linear-grid-v1-all"}
    of_all.write_bytes(kept)
    assert main(["verify", str(out)]) == EXIT_FAILED
    assert "are another protocol's" in capsys.readouterr().out


def test_of_two_heads_that_fit_none_is_taken(trees, trunk, tmp_path, bad_input):
    root = trees("imagenet-a")
    for n in range(2):
        keep_head(trunk, tmp_path / "runs" / str(n), torch.full((1000, 128), 0.1 * n))
    line = (trunk, "imagenet-a", root, tmp_path / "runs" / "o", recipe(tmp_path))
    bad_input(ood(*line), "2 heads fit")
    bad_input(ood(*line, "geometry.crop=16"), "has another geometry; needed")
    bad_input(ood(*line, "precision=bf16"), "has another precision; needed")


def test_evaluate_takes_the_heads_that_lie_in_its_folder(trees, trunk, tmp_path):
    root = trees("imagenet-a")
    out = tmp_path / "runs"
    keep_head(trunk, out / "linear")
    task = f"ood/imagenet-a@{recipe(tmp_path)} rule=subset"
    tasks = [task, "calibration/imagenet-a"]
    found = backbench.evaluate(trunk, tasks, data=root, out=out)
    assert {r.task for r in found} == {"ood", "calibration"}
    assert {r.protocol for r in found} == {"linear-grid-v1-subset"}


# --- timm's own heads ---


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Put a model with random weights into the Hub's local cache."""

    def put(name):
        torch.manual_seed(3)
        model = timm.create_model(name).eval()
        put_in_hub(monkeypatch, tmp_path / "hub", name, model.state_dict())
        return model

    return put


@pytest.mark.parametrize(
    "name",
    [
        "resnet18.tv_in1k",  # a ResNet, a trunk here under its own name
        "deit_tiny_distilled_patch16_224.fb_in1k",  # the mean of two heads
        "convnextv2_nano.fcmae_ft_in22k_in1k_384",  # squash, and a head with a norm
        "mobilenetv1_100.ra4_e3600_r224_in1k",  # a larger size for tests
        "test_convnext.r160_in1k",  # a ConvNeXt
    ],
)
def test_an_own_head_is_timms_whole_model(name, hub, trees, tmp_path):
    model = hub(name)
    root = trees("imagenet-real", numbers=(2, 50000))
    # The door keeps the head in a checkpoint of ours, as `evaluate` does.
    checkpoint = importing.read(f"timm:{name}")
    file = tmp_path / "own.safetensors"
    checkpoint.save(file)
    out = tmp_path / "ood"
    assert ood(file, "imagenet-real", root, out, "ood_own") == 0
    (top1, _) = store.read_file(out / "results.jsonl")
    config = resolve_data_config({}, model=model, use_test_size=True)
    said = top1.provenance["own_geometry"]
    for key in ("crop_pct", "crop_mode", "interpolation"):
        assert said[key] == config[key]
    assert list(said["input_size"]) == list(config["input_size"])
    assert top1.provenance["size"]["measured"] == config["input_size"][-1]
    assert top1.provenance["trunk"]["side"] == config["input_size"][-1]
    # timm's own pass over the same images
    images = catalog.load("imagenet-real", root).test
    transform = create_transform(**config, is_training=False)
    pixels = [transform(images.open(i)) for i in range(len(images))]
    with torch.no_grad():
        theirs = model(torch.stack(pixels))
    (rows,) = [np.load(f) for f in (tmp_path / "cache").rglob("*.npy")]
    near = 1e-6 * float(theirs.abs().max()) + 1e-6
    np.testing.assert_allclose(rows, theirs.numpy(), atol=near)
    assert top1.column == "ood/imagenet-real/top1@own-any"
    assert checkpoint.pixels == Pixels(tuple(config["mean"]), tuple(config["std"]))


def test_a_classifier_that_came_with_a_strangers_file_is_scored(trees, tmp_path):
    """Nothing names these weights: the size and crop are those of timm's model, the pixels the
    file's, and the row has the classifier's digest."""
    torch.manual_seed(4)
    model = timm.create_model("test_convnext").eval()
    torch.save(model.state_dict(), tmp_path / "x.pth")
    file = tmp_path / "x.safetensors"
    words = ["--arch", "timm:test_convnext", "--pixels", "imagenet"]
    assert main(["import", str(tmp_path / "x.pth"), *words, "--out", str(file)]) == 0
    root = trees("imagenet-real")
    out = tmp_path / "ood"
    assert ood(file, "imagenet-real", root, out, "ood_own") == 0
    (top1, _) = store.read_file(out / "results.jsonl")
    _, head = timm_classifier.classifier(importing.read(file))
    assert top1.provenance["head_sha256"] == head.digest
    pixels = Pixels()
    config = resolve_data_config({"mean": pixels.mean, "std": pixels.std}, model=model)
    transform = create_transform(**config, is_training=False)
    images = catalog.load("imagenet-real", root).test
    shown = torch.stack([transform(images.open(i)) for i in range(len(images))])
    with torch.no_grad():
        theirs = model(shown)
    (rows,) = [np.load(f) for f in (tmp_path / "cache").rglob("*.npy")]
    near = 1e-5 * float(theirs.abs().max())
    np.testing.assert_allclose(rows, theirs.numpy(), atol=near)


def test_a_published_head_beside_its_trunk_is_scored(trees, tmp_path, monkeypatch):
    """SwAV's two files, merged by the words of the list: the usual cut of ImageNet's probes."""
    torch.manual_seed(2)
    model = torchvision.models.resnet18().eval()
    root = trees("imagenet-real")
    trunk = {"module.prototypes.weight": torch.ones(2)}
    own = {}
    for key, tensor in model.state_dict().items():
        if key.startswith("fc."):
            own[f"module.linear.{key[3:]}"] = tensor
        else:
            trunk[f"module.{key}"] = tensor
    monkeypatch.chdir(tmp_path)
    torch.save(trunk, "swav_800ep_pretrain.pth.tar")
    torch.save({"epoch": 100, "state_dict": own}, "swav_800ep_eval_linear.pth.tar")
    about = reproduction_lists.read_list("heads").files["resnet50_swav"]
    exec(about.by_hand.partition('python -c "')[2].rpartition('"')[0])
    assert ood(about.file, "imagenet-real", root, "o", "ood_own") == 0
    cut = v2.Compose([v2.Resize(256), v2.CenterCrop(224), v2.PILToTensor()])
    images = catalog.load("imagenet-real", root).test
    pixels = torch.stack([cut(images.open(i)) for i in range(len(images))]) / 255
    mean = torch.tensor(Pixels().mean)[:, None, None]
    std = torch.tensor(Pixels().std)[:, None, None]
    with torch.no_grad():
        theirs = model((pixels - mean) / std)
    (rows,) = [np.load(f) for f in Path("cache").rglob("*.npy")]
    np.testing.assert_allclose(rows, theirs, atol=1e-5 * float(theirs.abs().max()))
    (top1, _) = store.read_file(Path("o/results.jsonl"))
    assert top1.column == "ood/imagenet-real/top1@own-any"
    said = {"crop_pct": 0.875, "interpolation": "bilinear", "crop_mode": "center"}
    assert said.items() <= top1.provenance["own_geometry"].items()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("imagenet-v2-matched", marks=SLOW),
        "imagenet-a",
        "imagenet-r",
        "imagenet-sketch",
    ],
)
def test_a_count_is_that_of_timms_validation(name, hub, trees, tmp_path, monkeypatch):
    """Eight images of each set as timm's validate.py reads them; half have the model's answer."""
    # 1. Eight images of the set, in folders as timm reads them
    model = hub("test_resnet.r160_in1k")
    root = trees(name)
    whole = catalog.load(name, root)
    paths = whole.test.paths[:: len(whole.test) // 8][:8]
    for seed, path in enumerate(paths):
        (whole.test.root / path).unlink()  # it may be a link to another picture
        picture(whole.test.root / path, seed, size=(60 + 9 * seed, 80))
        link = tmp_path / "folders" / Path(path).parent.name / Path(path).name
        link.parent.mkdir(parents=True)
        link.symlink_to(whole.test.root / path)
    # 2. timm's logits of them
    config = resolve_data_config({}, model=model, use_test_size=True)
    keys = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    about = {key: config[key] for key in keys}
    dataset = create_dataset("", root=str(tmp_path / "folders"))
    loader = create_loader(
        dataset,
        batch_size=3,
        use_prefetcher=False,
        num_workers=0,
        pin_memory=False,
        device=torch.device("cpu"),
        **about,
    )
    with torch.no_grad():
        logits = torch.cat([model(images) for images, _ in loader])
    by_file = dict(zip(dataset.filenames(basename=True), logits, strict=True))
    theirs = torch.stack([by_file[Path(path).name] for path in paths])
    # 3. The same images in our run, labelled so that half of the answers are right
    answers = theirs[:, [ids[0] for ids in whole.imagenet.ids]].argmax(1)
    labels = (answers + torch.arange(8) % 2) % len(whole.imagenet.ids)
    test = dataclasses.replace(whole.test, paths=paths, labels=tuple(labels.tolist()))
    labelled = dataclasses.replace(whole, test=test)
    monkeypatch.setattr(catalog, "load", lambda *_, **__: labelled)
    rule = "subset" if len(whole.imagenet.ids) == 200 else "all"
    how = ("ood_own", f"rule={rule}")
    assert ood("timm:test_resnet.r160_in1k", name, root, tmp_path / "o", *how) == 0
    (rows,) = [np.load(f) for f in (tmp_path / "cache").rglob("*.npy")]
    np.testing.assert_allclose(rows, theirs, atol=1e-6 * float(theirs.abs().max()))
    (top1, _) = store.read_file(tmp_path / "o" / "results.jsonl")
    assert top1.provenance["right"]["top1"] == 4
    assert len(theirs.unique(dim=0)) == 8
    # 4. A head in another order of classes has another count, and other pixels are refused.
    own = importing.read("timm:test_resnet.r160_in1k")
    file = tmp_path / "own.safetensors"
    rolled = {key: tensor.roll(7, 0) for key, tensor in own.heads.items()}
    own.replace(heads=rolled).save(file)
    assert ood(file, name, root, tmp_path / "rolled", *how) == 0
    (top1, _) = store.read_file(tmp_path / "rolled" / "results.jsonl")
    assert top1.provenance["right"]["top1"] != 4
    said = r"has other pixels than timm's test_resnet\.r160_in1k"
    with pytest.raises(BadInput, match=said):
        timm_classifier.classifier(own.replace(pixels=Pixels((0.5,) * 3)))


def test_a_head_that_is_not_imagenets_is_refused(hub, trees, tmp_path, bad_input):
    names = timm.list_pretrained("convnext_nano*")
    name = next(n for n in names if timm.get_pretrained_cfg(n).num_classes == 11821)
    hub(name)
    root = trees("imagenet-real")
    status = ood(f"timm:{name}", "imagenet-real", root, tmp_path / "o", "ood_own")
    bad_input(status, "its own head has 11821 classes")


@SLOW
def test_reproduce_holds_cached_models_to_timms_counts(
    hub, trees, tmp_path, bad_input, capsys
):
    """`reproduce timm-a` measures what lies in the Hub's cache, and its bundle holds together."""
    root = trees("imagenet-a")
    out = str(tmp_path / "runs")
    words = ["reproduce", "timm-a", "--data", str(root), "--out", out]
    bad_input(main(words), "cache on this machine holds none")
    hub("resnet18.tv_in1k")
    status = main([*words, "--models", "resnet18.tv_in1"])
    bad_input(status, "did you mean 'resnet18.tv_in1k'")
    assert main(words) == 0
    table = (tmp_path / "runs/reproduce/timm-a.md").read_text()
    assert "1 printed numbers: 1 unlike." in table
    assert "ood/imagenet-a/top1@own-subset, 224 pixels | 1.12 |" in table
    assert "200 images, printed of 7,500" in table
    bundle = tmp_path / "runs/reproduce/timm-a.zip"
    assert main(["reproduce", "--check", str(bundle)]) == 0
    capsys.readouterr()
    assert main(["paper", "all", str(tmp_path / "runs")]) == 0
    (count,) = re.findall(r"^timm: .* (\d+) measured", capsys.readouterr().out, re.M)
    assert count == "1"


def test_answers_of_each_part_of_the_features_are_its_own_images():
    """The best five classes of image i are 10 i to 10 i + 4, and one of ten is right."""
    right = [0, 4, 4, 0, 2, 5, 0]
    logits = torch.zeros(7, 1000)
    for i in range(7):
        logits[i, 10 * i : 10 * i + 5] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    answers = tuple((10 * i + n, 999 - i) for i, n in enumerate(right))
    labels = (1, 0, 1, 0, 1, 0, 1)
    ruled = Ruled("any", labels, InImageNet(((900,), (901,)), answers))
    # Parts of two, four and one
    features = FeatureRows((logits[:2], logits[2:6], logits[6:]))
    trunk = SimpleNamespace(
        device=torch.device("cpu"),
        of_tokens=None,
        checkpoint="a checkpoint",
        own_head="abc",
        state="def",
    )
    found = ood_probe._predictions(SimpleNamespace(), ruled, trunk, None, features)
    hits = found.ranking == torch.tensor(labels)[:, None]
    assert hits.nonzero().tolist() == [[i, n] for i, n in enumerate(right) if n < 5]
    assert found.checkpoint == "a checkpoint"
    assert found.provenance == {
        "head_sha256": "abc",
        "trunk_sha256": "def",
        "right": {"top1": 3, "top5": 6},
    }
