"""The best layer: every cell comes from one pass, val chooses, and scikit-learn agrees."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from support.extraction import CPU, checkpoint
from support.layouts import trunk_file
from support.records import a_result, rows_of

from backbench.cli.program import main
from backbench.datasets import catalog
from backbench.errors import BadInput, Failed
from backbench.images.preprocess import eval_geometry, to_input
from backbench.records import layers, predictions
from backbench.records.store import RESULTS_FILE
from backbench.stats import paired_differences
from backbench.transfer import logreg
from backbench.transfer.features import layer_cells
from backbench.transfer.features.frozen import FrozenTrunk
from backbench.transfer.features.layer_cells import LayerCell, LayerCells
from backbench.transfer.probes import layers as layers_probe
from backbench.verify import verification
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.timm_trunk import TimmTrunk
from backbench.weights.trunk import LayerOutputs, ModuleTrunk

NORMAL = ("mean", "max")


def by_name(cells):
    return {cell.name: cell for cell in cells.in_order}


def random_pictures(count, side):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_cells_of_a_resnet_are_its_stages_pooled():
    frozen = FrozenTrunk.build(checkpoint(), device=CPU).with_layers(64)
    x = random_pictures(4, 64)
    found = frozen(x)
    cells = by_name(frozen.of_layers)
    names = {f"stage {stage} {pooling}" for stage in range(1, 5) for pooling in NORMAL}
    assert set(cells) == names
    assert frozen.of_layers.usual.name == "stage 4 mean"
    assert found.shape == (4, frozen.dim)
    # With the modules of an unfolded trunk, one after the other
    plain = checkpoint().backbone().eval()
    y = plain.maxpool(plain.relu(plain.bn1(plain.conv1(x))))
    for stage in range(1, 5):
        y = getattr(plain, f"layer{stage}")(y)
        for pooling, pooled in (("mean", y.mean((2, 3))), ("max", y.amax((2, 3)))):
            mine = found[:, cells[f"stage {stage} {pooling}"].columns]
            torch.testing.assert_close(mine, pooled, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("reading", ["cls", "mean", "cls@4+mean"])
def test_cells_of_a_transformer_are_its_normed_blocks(reading):
    torch.manual_seed(0)
    trunk = TimmTrunk("timm:vit_tiny_patch16_224,img_size=32", reading).eval()
    trunk.requires_grad_(False)
    x = random_pictures(3, 32)
    cells = LayerCells.of(trunk, x[:1])
    found = layer_cells.read(trunk.layers(x))
    torch.testing.assert_close(found[:, cells.usual.columns], trunk(x))
    usual = {"cls@4+mean": "usual"}.get(reading, f"block 12 {reading}")
    assert cells.usual.name == usual
    assert len(cells.in_order) == 12 * 4 + (usual == "usual")
    # The blocks' own outputs, caught on their way
    caught = []
    for block in trunk.model.blocks:
        block.register_forward_hook(lambda *of: caught.append(of[-1]))
    trunk(x)
    named = by_name(cells)
    for place, tokens in enumerate(caught[:12], 1):
        normed = F.layer_norm(
            tokens, (192,), trunk.model.norm.weight, trunk.model.norm.bias, 1e-6
        )
        cls = normed[:, 0]
        mean = normed[:, 1:].mean(1)
        expected = {
            "cls": cls,
            "mean": mean,
            "cls+mean": torch.cat([cls, mean], 1),
            "max": normed[:, 1:].amax(1),
        }
        for pooling, value in expected.items():
            cell = named[f"block {place} {pooling}"]
            mine = found[:, cell.columns]
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "what", "layers_"),
    [
        ("efficientnet_lite0", "stage", 4),
        ("convnext_atto", "stage", 4),
        ("xcit_nano_12_p16_224", "block", 12),
    ],
)
def test_other_models_of_timm_have_their_own_feature_beside_the_layers(
    model, what, layers_
):
    trunk = TimmTrunk(f"timm:{model}", "pooled").eval().requires_grad_(False)
    x = random_pictures(2, trunk.size or 64)
    cells = LayerCells.of(trunk, x[:1])
    assert cells.usual.name == "usual"
    expected = {f"{what} {n} {p}" for n in range(1, layers_ + 1) for p in NORMAL}
    assert {cell.name for cell in cells.others} == expected
    found = layer_cells.read(trunk.layers(x))
    torch.testing.assert_close(found[:, : trunk.feature_dim], trunk(x))


def test_a_trunk_without_maps_is_refused():
    trunk = ModuleTrunk(torch.nn.Flatten(), feature_dim=48)
    trunk.arch = "flat"
    with pytest.raises(BadInput, match="flat gives no maps of its layers"):
        LayerCells.of(trunk, torch.rand(1, 3, 4, 4))


@pytest.fixture
def noisy(trees):
    """Pictures of two classes whose colours differ a little."""
    root = trees("classes", sizes=(("train", 24), ("val", 12), ("test", 20)))
    rng = np.random.default_rng(0)
    for file in sorted(root.rglob("*.png")):
        with Image.open(file) as picture:
            size = picture.size[::-1]
        shift = 24 * (file.parent.name == "circle")
        pixels = rng.integers(0, 220, (*size, 3)) + rng.integers(0, 12) + shift
        Image.fromarray(pixels.astype(np.uint8)).save(file)
    return root


def command(root, trunks, out, **keys):
    recipe = {"kind": "layers", "protocol": "x-v1", "l2": [1, 0.01], **keys}
    recipe["geometry"] = {"resize": 32, "crop": 32}
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(recipe))
    line = ["linear", *map(str, trunks), "--datasets", "classes", "--data", str(root)]
    line += ["--workers", "0"]
    return [*line, "--out", str(out), "--protocol", str(file), "--accelerator", "cpu"]


@torch.no_grad()
def pooled_by_hand(trunk, images):
    """Features of every cell, by the plain trunk, picture by picture."""
    point = Checkpoint.load(trunk)
    plain = point.backbone().eval()
    geometry = eval_geometry(resize=32, crop=32)
    found = {}
    for index in range(len(images)):
        x = to_input(geometry(images.open(index)), point.pixels)[None]
        for stage, y in enumerate(plain.stages(x), 1):
            found.setdefault(f"stage {stage} mean", []).append(y.mean((2, 3))[0])
            found.setdefault(f"stage {stage} max", []).append(y.amax((2, 3))[0])
    return {name: torch.stack(rows).double().numpy() for name, rows in found.items()}


def by_sklearn(train, labels, test, l2):
    scale = StandardScaler().fit(train)
    root = train.shape[1] ** 0.5
    head = LogisticRegression(C=1 / l2, max_iter=5000, tol=1e-8)
    head.fit(scale.transform(train) / root, labels)
    return head.predict(scale.transform(test) / root)


def test_each_head_is_that_of_scikit_learn_alone(noisy, tmp_path, capsys):
    trunk = trunk_file(tmp_path / "trunk.safetensors", arch="resnet18")
    out = tmp_path / "run"
    assert main(command(noisy, [trunk], out)) == 0
    said = capsys.readouterr().out
    assert "layers of classes: " in said and "% on val" in said
    best, usual = rows_of(out)
    assert (best.metric, usual.metric) == ("top1", "top1_usual")
    splits = catalog.load("classes", noisy)
    features = [pooled_by_hand(trunk, images) for _, images in splits.items()]
    labels = [np.array(images.labels) for _, images in splits.items()]
    # 1. The grid on val: the best of the penalties of each cell
    scores = best.chosen["scores"]
    for name in features[0]:
        of_cell = []
        for l2 in (1, 0.01):
            predicted = by_sklearn(features[0][name], labels[0], features[1][name], l2)
            of_cell.append(100 * (predicted == labels[1]).mean())
        # A picture on the edge may fall to either side
        assert scores[name] == pytest.approx(max(of_cell), abs=100 / len(labels[1]))
    assert scores[best.chosen["reading"]] == max(scores.values())
    assert best.chosen["usual_reading"] == "stage 4 mean"
    assert len(set(scores.values())) > 1
    # 2. Test, by the chosen and by the usual reading, fitted on train and val
    for row, name in ((best, best.chosen["reading"]), (usual, "stage 4 mean")):
        both = np.concatenate([features[0][name], features[1][name]])
        l2 = row.chosen["l2"]
        predicted = by_sklearn(both, np.concatenate(labels[:2]), features[2][name], l2)
        with np.load(out / row.provenance["predictions"]) as kept:
            assert (kept["prediction"] != predicted).sum() <= 1
    assert {v.level for v in verification.of_run([best, usual], out)} == {
        verification.FROM_LIST
    }
    # Two penalties of each of eight cells
    note = json.loads((out / "progress.json").read_text())
    assert (note["what"], note["unit"]) == ("random0 layers of classes", "fit")
    assert note["done"] == note["total"] == 16
    # 3. What was chosen must be the best on val
    forged = dict(best.chosen, reading=min(scores, key=scores.__getitem__))
    lines = (out / RESULTS_FILE).read_text().splitlines()
    changed = [json.loads(line) for line in lines]
    for line in changed:
        if line["metric"] == "top1":
            line["chosen"] = forged
    (out / RESULTS_FILE).write_text(
        "".join(json.dumps(line) + "\n" for line in changed)
    )
    assert main(["verify", str(out)]) == 1
    assert "is not the best of its scores" in capsys.readouterr().out


def test_a_layers_scores_follow_from_each_penalty():
    """Few images of unequal classes: a large penalty knows the largest class, a small one learns the
    noise, and a hundredfold penalty moves a score by more than 20 of the 300 images."""
    rng = np.random.default_rng(0)
    splits = []
    for count in (60, 300):
        label = rng.choice(3, count, p=[0.5, 0.3, 0.2])
        feature = rng.normal(size=(count, 24))
        feature[:, :3] += 1.5 * np.eye(3)[label]
        splits.append((feature.astype(np.float32), label))
    (on_train, train), (on_val, val) = splits
    penalties = (10, 1, 0.01)
    task = SimpleNamespace(
        protocol=SimpleNamespace(l2=penalties, chunk=64),
        dataset=SimpleNamespace(metric="top1"),
        splits=SimpleNamespace(train=SimpleNamespace(classes=("a", "b", "c"))),
    )
    fit = functools.partial(
        logreg.fit,
        classes=3,
        device=torch.device("cpu"),
        chunk=64,
        max_iterations=5000,
        tolerance=1e-6,
    )
    parts = []
    for feature, label in splits:
        columns = np.concatenate([np.zeros((len(label), 2)), feature], 1)
        held = (torch.from_numpy(columns).float(), torch.from_numpy(label))
        parts.append(layers_probe.LabelledSplit(*held))
    cell = LayerCell("stage 1", "mean", slice(2, 26))
    scores = layers_probe._path(task, cell, *parts, fit)
    wanted = []
    for l2 in penalties:
        predicted = by_sklearn(on_train, train, on_val, l2)
        wanted.append(100 * (predicted == val).mean())
    assert scores == pytest.approx(wanted, abs=100 / len(val))
    assert min(abs(np.diff(wanted))) > 20 * 100 / len(val)


def test_a_stopped_run_goes_on_and_a_head_is_refused(
    noisy, trunk, tmp_path, bad_input, monkeypatch
):
    from backbench.transfer.probes import layers as probe

    whole = tmp_path / "whole"
    assert main(command(noisy, [trunk], whole)) == 0
    fitted = []
    path = probe._path

    def few(task, cell, *others):
        if len(fitted) == 3:
            raise KeyboardInterrupt
        fitted.append(cell.name)
        return path(task, cell, *others)

    out = tmp_path / "run"
    monkeypatch.setattr(probe, "_path", few)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        raise SystemExit(main(command(noisy, [trunk], out)))
    monkeypatch.setattr(
        probe,
        "_path",
        lambda task, cell, *o: fitted.append(cell.name) or path(task, cell, *o),
    )
    assert main(command(noisy, [trunk], out)) == 0
    assert len(fitted) == len(set(fitted)) == 8, "no cell is fitted twice"
    for row, other in zip(rows_of(out), rows_of(whole)):
        assert (row.metric, row.value, row.chosen) == (
            other.metric,
            other.value,
            other.chosen,
        )
    status = main(command(noisy, [trunk], tmp_path / "headed", head="projector"))
    bad_input(status, "reads the layers of the trunk; leave out head")


def two_rows(folder, best, usual, scores):
    """The two rows of a checkpoint with such shares of right images."""
    label = np.arange(400) % 4
    rows = []
    reading = max(scores, key=scores.__getitem__)
    chosen = {"reading": reading, "usual_reading": "block 2 cls", "scores": scores}
    for suffix, share, how in (("", best, chosen), ("_usual", usual, {"l2": 1})):
        right = np.arange(400) < round(share * 400)
        prediction = np.where(right, label, label + 1)
        kept = predictions.keep(
            folder, f"x{suffix}", manifest="m", label=label, prediction=prediction
        )
        row = a_result(
            name="vit",
            task="layers",
            dataset="mine",
            metric="top1" + suffix,
            value=100 * share,
            chosen=how,
            provenance={"predictions": kept},
        )
        rows.append((row, folder))
    return rows


def test_the_gain_is_told_with_its_interval_and_the_grid(tmp_path):
    scores = {"block 2 cls": 50.0, "block 1 cls": 70.0, "block 1 max": 20.0}
    told, heads, first, second = layers.sayings(two_rows(tmp_path, 0.8, 0.6, scores))
    step = np.repeat([0.0, 1.0, 0.0], [240, 80, 80])
    low, high = paired_differences.of_images(step).ci95
    assert told == (
        "layers of mine: vit is read best by block 1 cls: 80.00%,"
        f" +20.00 [{low:.2f}, {high:.2f}] against the usual block 2 cls"
    )
    assert heads.split() == ["%", "on", "val", "cls", "max"]
    assert first.split() == ["block", "1", "70.0", "20.0"]
    assert second.split()[:3] == ["block", "2", "50.0"]


def test_a_trunk_that_is_read_best_as_usual_has_no_gain(tmp_path):
    scores = {"block 2 cls": 50.0, "block 1 cls": 40.0}
    told = layers.sayings(two_rows(tmp_path, 0.6, 0.6, scores))[0]
    assert told == "layers of mine: vit is read best by the usual block 2 cls: 60.00%"
    assert layers.sayings([]) == []


def test_nothing_is_told_of_a_choice_that_a_row_does_not_hold(tmp_path):
    scores = {"block 2 cls": 50.0, "block 1 cls": 70.0}
    (best, run), usual = two_rows(tmp_path, 0.8, 0.6, scores)
    for changes in ({"chosen": None}, {"chosen": {"scores": 3}}, {"value": None}):
        changed = dataclasses.replace(best, **changes)
        assert layers.sayings([(changed, run), usual]) == []


class Layered:
    """A trunk whose layers give what they are told to."""

    arch = "layered"
    strides = (4, 8)

    def __init__(self, feature, maps, class_tokens=(), forward=None):
        self.outputs = LayerOutputs(feature, maps, list(class_tokens), "block")
        self.forward = feature if forward is None else forward

    def layers(self, picture):
        return self.outputs

    def __call__(self, picture):
        return self.forward


def test_where_the_cells_of_a_feature_lie():
    """Of two cells that are equal to the feature, the first one names it."""
    first = torch.tensor([[1.0, 2.0]])
    small = first[:, :, None, None]  # one place: its mean is its maximum
    large = torch.arange(12.0).view(1, 3, 2, 2)
    cells = LayerCells.of(Layered(first, [small, large]), None)
    assert (cells.usual.name, cells.usual.columns) == ("block 1 mean", slice(0, 2))
    found = [(cell.name, cell.columns) for cell in cells.others]
    assert found == [
        ("block 1 max", slice(4, 6)),
        ("block 2 mean", slice(6, 9)),
        ("block 2 max", slice(9, 12)),
    ]
    assert cells.dim == 12
    names = [cell.name for cell in cells.in_order]
    assert names == ["block 1 mean", "block 2 max", "block 2 mean", "block 1 max"]
    everything = layer_cells.read(Layered(first, [small, large]).outputs)
    assert everything.tolist() == [[1, 2, 1, 2, 1, 2, 1.5, 5.5, 9.5, 3, 7, 11]]
    # With a class token, which leads its layer and may be joined with the mean
    token = torch.tensor([[5.0, 7.0]])
    trunk = Layered(torch.tensor([[9.0, 9.0, 9.0]]), [small], [token])
    cells = LayerCells.of(trunk, None)
    assert cells.usual.name == "usual"
    found = [(cell.name, cell.columns) for cell in cells.others]
    assert found == [
        ("block 1 cls", slice(3, 5)),
        ("block 1 cls+mean", slice(3, 7)),
        ("block 1 mean", slice(5, 7)),
        ("block 1 max", slice(7, 9)),
    ]
    assert layer_cells.read(trunk.outputs).tolist() == [[9, 9, 9, 5, 7, 1, 2, 1, 2]]


def test_a_pass_over_the_layers_must_give_the_trunks_own_feature():
    """But for the order of sums."""
    feature = torch.tensor([[1.0, -200.0]])
    maps = [torch.zeros(1, 2, 1, 1)]
    LayerCells.of(Layered(feature, maps, forward=feature + 0.01), None)
    for other in (feature + 0.03, feature[:, :1]):
        said = "layered: the pass over its layers gives another feature"
        with pytest.raises(Failed, match=said):
            LayerCells.of(Layered(feature, maps, forward=other), None)
