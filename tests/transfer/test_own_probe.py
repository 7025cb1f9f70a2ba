"""`--protocol own`: each checkpoint by its recipe's probe, or its method's."""

import dataclasses

import pytest

from backbench import Checkpoint
from backbench.cli import main
from backbench.errors import BadInput
from backbench.recipes import own_probe
from backbench.results import store


def test_a_recipe_says_its_probe_and_of_others_the_method_tells():
    jcl = {"method": {"name": "jcl"}, "data": {"dataset": "imagenet100"}}
    assert own_probe.of_recipe(jcl, "imagenet100") == "imagenet100_jcl"
    assert own_probe.of_recipe({**jcl, "probe": {"imagenet100": "mine"}}, "imagenet100") == "mine"
    assert own_probe.of_checkpoint("x", "moco", {}, "imagenet") == "imagenet_moco"
    assert own_probe.of_checkpoint("x", "lorac", {}, "imagenet") == "imagenet_lorac"
    assert own_probe.of_checkpoint("x", "unknown", {}, "imagenet") == "imagenet_grid"
    assert own_probe.of_checkpoint("x", "moco", {"recipe": jcl}, "imagenet100") == "imagenet100_jcl"
    with pytest.raises(BadInput, match="x: neither its recipe nor its method 'moco' has a probe"):
        own_probe.of_checkpoint("x", "moco", {}, "cars")


def own(trunk, path, protocol, name):
    """The trunk's file as one whose recipe probes `classes` by the file `protocol`."""
    known = Checkpoint.load(trunk)
    recipe = {"probe": {"classes": str(protocol)}, "data": {"dataset": "imagenet"}}
    about = {"trained_on": ["stl10:test"]} if name == "second" else {}
    state = {key: value + 0.01 if value.is_floating_point() else value
             for key, value in known.state_dict.items()} if name == "second" else known.state_dict  # fmt: skip
    changed = known.replace(state_dict=state, provenance={"name": name, "recipe": recipe, **about})
    changed.save(path)
    return path


def test_one_command_measures_each_by_its_own(trees, trunk, tmp_path, capsys):
    root = trees("classes")
    fast = tmp_path / "fast.yaml"
    fast.write_text(
        "{kind: knn, protocol: knn-fast-demo-v1, k: [1], geometry: {resize: 32, crop: 32}}"
    )
    slow = tmp_path / "slow.yaml"
    slow.write_text(
        "{kind: sgd, protocol: linear-slow-demo-v1, lr: [0.1], length: {default: {iterations: 2}},"
        " batch_size: 4, augment: null, geometry: {resize: 32, crop: 32}}"
    )
    files = [
        own(trunk, tmp_path / "first.safetensors", fast, "first"),
        own(trunk, tmp_path / "second.safetensors", slow, "second"),
    ]
    out = tmp_path / "run"
    command = ["linear", *map(str, files), "--datasets", "classes", "--protocol", "own"]
    command += ["--data", str(root), "--out", str(out), "--workers", "0"]
    assert main(command) == 0
    rows, _ = store.read(out)
    found = {(r.name, r.task, r.protocol) for r in rows}
    first = ("first", "knn", "knn-fast-demo-v1")
    assert found == {first, ("second", "linear", "linear-slow-demo-v1")}
    for row in rows:
        probe = fast if row.name == "first" else slow
        recipe = {"data.dataset": "imagenet", "probe.classes": str(probe)}
        assert row.provenance["pretraining"] == recipe
        # What a file says of its images goes before its recipe
        seen = ["imagenet"] if row.name == "first" else ["stl10:test"]
        assert row.provenance["trained_on"] == seen
    assert main(command) == 0 and len(store.read(out)[0]) == len(rows), "the same run continued"
    slow.write_text(slow.read_text().replace("0.1", "0.2"))
    assert main(command) == 2 and "recipe" in capsys.readouterr().err


def test_a_recipes_probe_decides_no_training():
    from backbench.recipes import config
    from pretrain.recipe import PretrainConfig
    from pretrain.train import what_decides

    recipe = config.load(PretrainConfig, "lorac/lorac_imagenet", kind="pretrain")
    assert recipe.probe == {"imagenet": "imagenet_lorac"}
    assert what_decides(recipe) == what_decides(dataclasses.replace(recipe, probe={}))
