"""Heads and scores that runs keep, what they are bound to; a checkpoint's own head."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.interruptions import kill, until_done
from support.layouts import Trees, trunk_file

from backbench.cli.program import main
from backbench.datasets import catalog
from backbench.errors import EXIT_FAILED, BadInput
from backbench.recipes import config
from backbench.records import kept_scores, store
from backbench.transfer import keeping, logreg
from backbench.transfer.features.batches import Pictures, centred
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.probes.attentive import Attentive
from backbench.transfer.probes.logreg import LogReg
from backbench.transfer.probes.sgd import Sgd
from backbench.transfer.protocol import Geometry
from backbench.weights import kept_heads
from backbench.weights.checkpoint import Checkpoint

GEOMETRY = {"resize": 32, "crop": 32}
RECIPES = {
    "sgd": {
        "lr": [0.1, 1.0],
        "length": {"default": {"iterations": 8}},
        "augment": None,
        "batch_size": 8,
    },
    "logreg": {"l2": [0.01, 1.0, 2]},
    "attentive": {
        "lr": [0.001, 0.01],
        "length": {"default": {"iterations": 8}},
        "augment": {"size": 32},
        "batch_size": 8,
    },
}
KINDS = {"sgd": Sgd, "logreg": LogReg, "attentive": Attentive}


def measure(kind, root, trunk, out, **changes):
    """The exit status of a probe by the recipe of a kind, with what the test changes."""
    file = out.parent / f"{out.name}.yaml"
    recipe = {"kind": kind, "protocol": f"{kind}-mine-v1", "geometry": GEOMETRY}
    file.write_text(json.dumps({**recipe, **RECIPES[kind], **changes}))
    words = ["linear", str(trunk), "--datasets", "classes", "--protocol", str(file)]
    words += ["--data", str(root), "--out", str(out)]
    return main([*words, "--accelerator", "cpu", "--workers", "0"])


@pytest.fixture(scope="module", params=RECIPES)
def whole(request, tmp_path_factory):
    """A folder with the data, a trunk and a run of this kind, each of which a test copies."""
    base = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKBENCH_CACHE", str(base / "cache"))
        sizes = (("train", 8), ("val", 5), ("test", 6))
        trees = Trees(base / "data", patch)
        root = trees("classes", classes=("a", "b", "c"), sizes=sizes)
        trunk = trunk_file(base / "trunk.safetensors")
        assert measure(request.param, root, trunk, base / request.param) == 0
    return base / request.param


@pytest.fixture
def run(whole, tmp_path):
    shutil.copytree(whole.parent / "data", tmp_path / "data")
    return shutil.copytree(whole, tmp_path / whole.name)


def test_the_kept_head_and_scores_are_those_of_the_run(run, trunk, tmp_path):
    (row,) = store.read_file(run / "results.jsonl")
    arrays = kept_scores.load(run / row.facts["scores"])
    splits = catalog.load("classes", tmp_path / "data")
    checkpoint = Checkpoint.load(trunk)
    head = kept_heads.load(run, bound(checkpoint, run), 128, 3)
    # 1. The head on features of the test images, computed apart from the run
    frozen = FrozenTrunk.build(checkpoint, device=torch.device("cpu"))
    pictures = Pictures(splits.test, centred(Geometry(**GEOMETRY)))
    pixels = torch.stack([pictures[0, i][0] for i in range(len(splits.test))])
    tokens = run.name == "attentive"
    (features,) = forward_all([frozen], pixels, tokens=tokens)
    logits = head.logits(features.flatten(1, 2) if tokens else features).double()
    assert (logits.argmax(1).numpy() == arrays["classes"][:, 0]).all()
    predicted = np.load(run / row.facts["predictions"])["prediction"]
    assert (predicted == arrays["classes"][:, 0]).all()
    labels = torch.tensor(splits.test.labels)
    nll = float(torch.nn.functional.cross_entropy(logits, labels))
    assert kept_scores.value(arrays, "nll")[0] == pytest.approx(nll, rel=1e-4)
    assert row.facts["head_sha256"] == str(arrays["head"]) == head.digest
    # 2. Heads on tokens have no temperature: the logits of ImageNet's hold-out, of ten heads, would
    #    be too many.
    if tokens:
        assert head.temperature is None
        assert not list((run / "scores").glob("*-val.npz"))
        return
    # 3. A head that saw the hold-out has the temperature of its twin that did not.
    assert head.temperature_from == "hold-out, twin"
    assert row.provenance["temperature_from"] == "hold-out, twin"
    (of_val,) = (run / "scores").glob("*-val.npz")
    held = kept_scores.load(of_val)
    assert str(held["manifest"]) == row.facts["manifests"]["val"]
    assert float(held["temperature"]) == head.temperature
    assert float(arrays["temperature"]) == head.temperature
    right = held["classes"][:, 0] == held["label"]
    assert 100 * right.mean() == pytest.approx(max(row.chosen["scores"].values()))
    assert str(held["head"]) != head.digest


def bound(checkpoint, run, classes=("a", "b", "c"), **changes):
    """All that the head of a run is bound to."""
    recipe = json.loads((run / "run.json").read_text())["identity"]["recipe"]
    built = config.build(KINDS[run.name], recipe, where="test")
    task = "linear" if run.name == "sgd" else run.name
    protocol = keeping.print_of(task, built, "val")
    right = keeping.bound_to(
        checkpoint,
        protocol,
        reads=built,
        geometry=built.geometry,
        classes=classes,
        seed=0,
    )
    return {**right, **changes}


def test_a_wrong_pairing_is_refused(run, trunk, tmp_path):
    checkpoint = Checkpoint.load(trunk)
    right = bound(checkpoint, run)
    kept_heads.load(run, right, 128, 3)
    # 1. Another thing that a head is bound to
    geometry = right["geometry"]
    others = {"resize": 33, "crop": 31, "interpolation": "bicubic", "square": True}
    moved = {}
    for name, tensor in checkpoint.state_dict.items():
        moved[name] = tensor + 1e-7 if tensor.is_floating_point() else tensor
    other_weights = checkpoint.replace(state_dict=moved)
    grey = dataclasses.replace(checkpoint.pixels, mean=(0.5, 0.5, 0.5))
    other_pixels = checkpoint.replace(pixels=grey)
    wrong = [
        {"checkpoint": other_weights.digest},
        {"checkpoint": other_pixels.digest},
        {"trunk": "resnet18 c4"},
        {"trunk": "resnet34"},
        *({"geometry": {**geometry, key: value}} for key, value in others.items()),
        {"precision": "bf16"},
        {"space": "lphi"},
        {"space": "trunk" if run.name == "attentive" else "tokens"},
        {"seed": 1},
        {"protocol": f"{run.name}-mine-v1"},
        {"protocol": right["protocol"].replace("mine", "yours")},
        {"protocol": right["protocol"][:-1] + "x"},
        {"classes": kept_heads.classes_digest(("a", "c", "b"))},
        {"classes": kept_heads.classes_digest(("a", "b"))},
        {"classes": kept_heads.classes_digest(("a", "b", "c", "d"))},
    ]
    for changes in wrong:
        with pytest.raises(BadInput, match=f"another {next(iter(changes))}"):
            kept_heads.load(run, {**right, **changes}, 128, 3)
    # 2. Tensors that are not those that the file speaks of
    file = run / "heads.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        names = list(opened.keys())
        tensors = {name: opened.get_tensor(name) for name in names}
    (weight,) = [key for key in tensors if key.endswith("/weight")]
    whole = tensors[weight]
    damaged = [
        {weight: whole * 1.0001},
        {weight: whole.half()},
        {weight: whole[:2]},
        {weight: whole[:, :7]},
        {weight: whole * torch.nan},
    ]
    for key, shape in (("query", (8, 128)), ("value", (128, 128))):
        name = weight.replace("weight", key)
        damaged.append({name: torch.ones(shape)})
        damaged.append({name: torch.ones(7, 128)})
        damaged.append({name: torch.zeros(0, 128)})
    for changes in damaged:
        changed = {k: v.contiguous() for k, v in {**tensors, **changes}.items()}
        save_file(changed, file, metadata)
        with pytest.raises(BadInput, match=r"damaged|float32"):
            kept_heads.load(run, right, 128, 3)
    # 3. Tensors that the file does speak of, which no head can have
    (name,) = (key for key in metadata if metadata[key].startswith("{"))
    bias = tensors[f"{name}/bias"]
    for query, value in (
        (torch.ones(9, 128), torch.ones(128, 128)),
        (torch.ones(8, 128), torch.ones(7, 128)),
        (torch.ones(()), torch.ones(128, 128)),
        (torch.ones(8, 128), None),
    ):
        odd = kept_heads.KeptHead(whole, bias, query=query, value=value)
        about = json.loads(metadata[name])
        kept = {**about, "head": odd.digest}
        layers = {f"{name}/{key}": tensor for key, tensor in odd.tensors.items()}
        save_file({**tensors, **layers}, file, {**metadata, name: json.dumps(kept)})
        with pytest.raises(BadInput, match="damaged"):
            kept_heads.load(run, right, 128, 3)
    # 4. Files that are broken as a whole
    for broken in ("{}", "[]", "no json"):
        save_file(tensors, file, dict.fromkeys(metadata, broken))
        with pytest.raises(BadInput, match=r"heads\.safetensors"):
            kept_heads.load(run, right, 128, 3)
    file.write_bytes(b"no safetensors")
    with pytest.raises(BadInput, match=r"no readable heads"):
        kept_heads.load(run, right, 128, 3)
    with pytest.raises(BadInput, match=r"no heads\.safetensors in it"):
        kept_heads.load(tmp_path / "nowhere", right, 128, 3)
    assert len(wrong) + len(damaged) >= 20


def test_old_runs_are_calibrated_verified_and_merged(run, tmp_path, capsys):
    results = run / "results.jsonl"
    before = results.read_text()
    # 1. Calibration appends rows, once.
    assert main(["calibrate", str(run)]) == 0
    rows = [r for r in store.read_file(results) if r.task == "calibration"]
    suffixes = ("",) if run.name == "attentive" else ("", "_t")
    wanted = {m + t for m in kept_scores.METRICS for t in suffixes}
    assert {r.metric for r in rows} == wanted
    after = results.read_text()
    assert after.startswith(before)
    assert main(["calibrate", str(run)]) == 0
    assert results.read_text() == after
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0
    assert f" {1 + 6 * len(suffixes)} level 3" in capsys.readouterr().out
    # 2. The board says which end is better, and a merged folder is verified as well.
    assert main(["leaderboard", str(run), "--html", str(tmp_path / "p.html")]) == 0
    assert "less is better" in (tmp_path / "p.html").read_text()
    assert main(["merge", f"lab={run}", "--out", str(tmp_path / "all")]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "all")]) == 0
    assert " 0 level 1" in capsys.readouterr().out
    # 3. Forgeries: a smaller number; scores of another head, of another list, of other labels
    lowered = after.replace(f'"value": {rows[0].value!r}', '"value": 0.01')
    results.write_text(lowered)
    assert main(["verify", str(run)]) == EXIT_FAILED
    results.write_text(after)
    scores = run / rows[0].facts["scores"]
    whole = dict(np.load(scores))
    wrong = [{key: "0" * 64} for key in ("checkpoint", "head", "manifest")]
    wrong += [
        {"label": whole["label"][::-1]},
        {"label_logit": whole["label_logit"] - 1},
    ]
    for changes in wrong:
        np.savez(scores, **{**whole, **changes})
        assert main(["verify", str(run)]) == EXIT_FAILED, changes
    # 4. What is no file of scores proves nothing.
    for changes in (
        {"more": 1},
        {"square": whole["square"].astype(str)},
        {"logits": np.zeros(3)},
    ):
        np.savez(scores, **{**whole, **changes})
        assert kept_scores.load(scores) is None


def test_a_run_without_scores_says_what_keeps_them(trees, trunk, tmp_path, bad_input):
    root = trees("classes")
    recipe = {"kind": "knn", "protocol": "k", "k": [1], "geometry": GEOMETRY}
    file = tmp_path / "k.yaml"
    file.write_text(json.dumps(recipe))
    words = ["linear", str(trunk), "--datasets", "classes", "--protocol", str(file)]
    words += ["--data", str(root), "--out", str(tmp_path / "knn"), "--workers", "0"]
    assert main(words) == 0
    bad_input(main(["calibrate", str(tmp_path / "knn")]), "no run with scores")


@pytest.mark.parametrize("kind", RECIPES)
def test_a_kill_changes_neither_head_nor_scores(kind, trees, trunk, tmp_path, decoder):
    sizes = (("train", 8), ("val", 5), ("test", 6))
    root = trees("classes", classes=("a", "b", "c"), sizes=sizes)
    assert measure(kind, root, trunk, tmp_path / "whole") == 0
    shutil.rmtree(tmp_path / "cache")
    decoded = len(decoder.paths)
    decoder.at = {2 * decoded: kill}  # the last test image
    until_done(lambda: measure(kind, root, trunk, tmp_path / "killed"), 1)
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    names = sorted(path.name for path in (whole / "scores").iterdir())
    assert names == sorted(path.name for path in (killed / "scores").iterdir())
    assert len(names) == (1 if kind == "attentive" else 2)
    for name in names:
        a = dict(np.load(whole / "scores" / name))
        b = dict(np.load(killed / "scores" / name))
        assert all((a[key] == b[key]).all() for key in a)
    one = whole / "heads.safetensors"
    other = killed / "heads.safetensors"
    with safe_open(one, framework="pt") as a, safe_open(other, framework="pt") as b:
        assert a.metadata() == b.metadata()
        for key in a.keys():  # noqa: SIM118 - it is no dict
            assert torch.equal(a.get_tensor(key), b.get_tensor(key))


def test_a_fixed_recipe_without_hold_out_has_no_temperature(trees, trunk, tmp_path):
    root = trees("classes")
    assert measure("sgd", root, trunk, tmp_path / "run", lr=[0.1]) == 0
    (row,) = store.read_file(tmp_path / "run" / "results.jsonl")
    arrays = kept_scores.load(tmp_path / "run" / row.facts["scores"])
    assert kept_scores.names(arrays) == list(kept_scores.METRICS)
    assert not list((tmp_path / "run" / "scores").glob("*-val.npz"))
    # Where val trains nothing, it fits the temperature of the head itself.
    changes = {"lr": [0.1], "train_only": ["classes"]}
    assert measure("sgd", root, trunk, tmp_path / "own", **changes) == 0
    (row,) = store.read_file(tmp_path / "own" / "results.jsonl")
    assert row.provenance["temperature_from"] == "hold-out"


def test_a_head_is_kept_whatever_its_layout_in_memory(tmp_path):
    """A fit on features of unlike scales, with more images than features, leaves the weights in
    column order."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(60, 8, generator=generator) * torch.logspace(-2, 2, 8)
    fitted = logreg.fit([(mixed, torch.arange(60) % 3)], classes=3, l2=0.1)
    head = kept_heads.KeptHead(fitted.weight.clone(), fitted.bias.clone())
    assert not head.weight.is_contiguous()
    about = {"checkpoint": "0" * 64, "protocol": "logreg-mine-v1"}
    kept_heads.keep(tmp_path / kept_heads.HEADS_FILE, "head", head, about)
    assert torch.equal(kept_heads.load(tmp_path, about, 8, 3).weight, head.weight)


@pytest.fixture
def cllr(tmp_path):
    """A checkpoint with the head `lphi`, which is blind to all but three directions of phi."""
    head = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    return trunk_file(tmp_path / "cllr.safetensors", heads={"lphi.0.weight": head})


def probe(trunk, root, tmp_path, **protocol):
    """The exit status of a kNN probe, and its run's folder."""
    name = "lphi" if "head" in protocol else "phi"
    out = tmp_path / name
    file = tmp_path / f"{name}.yaml"
    recipe = {"kind": "knn", "protocol": "knn-v1", "k": [1], "geometry": GEOMETRY}
    file.write_text(json.dumps({**recipe, **protocol}))
    words = ["linear", str(trunk), "--datasets", "classes", "--protocol", str(file)]
    words += ["--data", str(root), "--out", str(out)]
    status = main([*words, "--accelerator", "cpu", "--workers", "0"])
    return status, out


def test_phi_and_l_phi_are_columns_apart(cllr, trees, tmp_path, monkeypatch):
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "cache"))
    root = trees("classes", classes=("a", "b"))
    rows = []
    for protocol in ({}, {"head": "lphi"}):
        status, out = probe(cllr, root, tmp_path, **protocol)
        assert status == 0
        rows += store.read_file(out / "results.jsonl")
    assert [row.protocol for row in rows] == ["knn-v1", "knn-v1-lphi"]
    assert rows[0].checkpoint == rows[1].checkpoint
    # Neither took the other's features out of the cache.
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 2 * 3


def test_features_are_the_heads_output(cllr):
    checkpoint = Checkpoint.load(cllr)
    cpu = torch.device("cpu")
    phi = FrozenTrunk.build(checkpoint, device=cpu)
    l_phi = FrozenTrunk.build(checkpoint, device=cpu, head="lphi")
    images = torch.randn(2, 3, 32, 32)
    assert l_phi.dim == 3
    expected = phi(images) @ checkpoint.heads["lphi.0.weight"].T
    torch.testing.assert_close(l_phi(images), expected)


def test_a_checkpoint_without_the_head_is_refused(trees, tmp_path, bad_input):
    plain = trunk_file(tmp_path / "plain.safetensors")
    status, out = probe(plain, trees("classes"), tmp_path, head="lphi")
    bad_input(status, "'random0' has no head 'lphi' (it keeps: none)")
    assert not out.exists()
