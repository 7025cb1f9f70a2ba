"""What a run says before it starts, its price, the protocols that there are, `--protocol own`."""

import dataclasses
import json
import re
import shutil

import pytest
from support.layouts import SMALL, trunk_file

from backbench import Checkpoint
from backbench.cli import program
from backbench.errors import BadInput
from backbench.pretrain import monitor
from backbench.pretrain.recipe import PretrainConfig
from backbench.pretrain.train import what_decides
from backbench.recipes import config, own_probe
from backbench.records import store
from backbench.runs import price
from backbench.transfer.analysis import pictures

TINY = {"resize": 32, "crop": 32}
SGD = {
    "kind": "sgd",
    "protocol": "sgd-test-v1",
    "lr": [0.1, 1.0],
    "augment": None,
    "batch_size": 16,
    "length": {"default": {"iterations": 30}},
    "geometry": TINY,
}
KNN = {
    "kind": "knn",
    "protocol": "knn-test-v1",
    "k": [5, 20],
    "feature_batch": 8,
    "geometry": TINY,
}
TUNED = {
    "kind": "finetune",
    "protocol": "tuned-test-v1",
    "head_lr": [0.03, 0.1],
    "batch_size": 4,
    "augment": {"size": 32},
    "geometry": TINY,
    "parts": {"100": {"length": {"iterations": 3}}},
}


@pytest.fixture
def timed_at_once(monkeypatch):
    """Every run is long and dear, and a rate is believed after two steps."""
    for name in ("LEAST_TOLD_SECONDS", "DEAR_SECONDS", "LEAST_TIMED_SECONDS"):
        monkeypatch.setattr(price, name, -1.0)
    monkeypatch.setattr(price, "LEAST_UNITS", 1)


@pytest.fixture
def says(tiny_root, tmp_path, caplog, monkeypatch):
    """The lines that a command logs, on the tiny data."""
    # Drawing takes longer than what is measured.
    monkeypatch.setattr(pictures, "draw", lambda *_: [])
    monkeypatch.setattr(monitor, "plot_curves", lambda *_: None)
    files = {"TRUNK": tmp_path / "trunk.safetensors"}
    for recipe in (SGD, KNN, TUNED):
        file = tmp_path / f"{recipe['protocol']}.yaml"
        file.write_text(json.dumps(recipe))
        files[recipe["protocol"]] = file

    def run(*words):
        # A detector's backbone has all channels.
        arch = "resnet18" if words[0] == "detect" else SMALL
        trunk_file(files["TRUNK"], arch=arch)
        words = [str(files.get(word, word)) for word in words]
        where = ["--data", str(tiny_root), "--out", str(tmp_path / words[0])]
        if words[0] != "detect":
            where += ["--workers", "0"]
        # A detector's changes to its config come last.
        at = len(words)
        if "SOLVER.MAX_ITER" in words:
            at = words.index("SOLVER.MAX_ITER")
        assert program.main([*words[:at], *where, *words[at:]]) == 0
        return [record.getMessage() for record in caplog.records]

    return run


def test_a_probe_says_its_plan_and_its_price(says, timed_at_once):
    said = says("linear", "TRUNK", "--datasets", "digits", "--protocol", "sgd-test-v1")
    (plan,) = [line for line in said if line.startswith("linear on digits: ")]
    about = r"linear on digits: sgd-test-v1 \(best of 2 learning rates by val, 16 images a step\)"
    steps = r" 1 checkpoint; 60 steps, [\d,]+ images"
    assert re.fullmatch(f"{about};{steps}", plan)
    # Both trainings are one price: 60 steps less those that were timed.
    (priced,) = [line for line in said if "more steps" in line]
    assert said.index(priced) > said.index(plan)
    pattern = r"about \d+ (?:second|minute)s? here for (\d+) more steps, at [\d.e+]+ a second; "
    left = re.match(pattern, priced)
    assert left and 50 < int(left[1]) < 60
    assert "`--protocol fewshot`" in priced


def test_a_single_rate_is_not_called_the_best_of_one(says):
    said = says(
        *("linear", "TRUNK", "--datasets", "digits", "--protocol", "sgd-test-v1"),
        "lr=[0.1]",
    )
    (plan,) = [line for line in said if line.startswith("linear on digits: ")]
    assert "(16 images a step)" in plan


def test_what_is_there_already_costs_nothing(says, timed_at_once, caplog):
    words = ["linear", "TRUNK", "--datasets", "digits", "--protocol", "knn-test-v1"]
    said = says(*words)
    assert any("k = 5, 20" in line and "images" in line for line in said)
    assert any("more images" in line and "a GPU" in line for line in said)
    caplog.clear()
    assert not any("about" in line for line in says(*words))


def test_a_short_run_has_a_plan_and_no_price(says):
    few = ("--protocol", "fewshot_demo", "draws=3")
    said = says("linear", "TRUNK", "--datasets", "digits", *few)
    assert any("3 draws of 2 labels per class" in line for line in said)
    assert not any(line.startswith("about") for line in said)


@pytest.mark.parametrize(
    ("words", "plan", "cheaper"),
    [
        (
            "finetune TRUNK --dataset digits --protocol tuned-test-v1",
            r"finetune on digits: tuned-test-v1 \(all layers, 3 trainings, 4 images a step\);.*; 9 steps",
            "linear --protocol logreg",
        ),
        (
            "analyze TRUNK --dataset digits --recipe analyze_tiny",
            r"analyze on digits: analyze_tiny \(\d+ views of each image\); 1 checkpoint; \d+ images",
            "--augmentations",
        ),
        (
            "pretrain demo_simclr epochs=2",
            r"pretrain .*: 2 epochs, \d+ images a step; \d+ steps",
            "--fast",
        ),
        (
            "detect --checkpoint TRUNK --config-file tiny_faster_rcnn_R_18_FPN"
            " SOLVER.MAX_ITER 4 SOLVER.STEPS (3,)"
            " SOLVER.CHECKPOINT_PERIOD 4 TEST.PRECISE_BN.NUM_ITER 1",
            r"faster_rcnn by \w+: \d+ images to train on, \d+ a step; 4 iterations, \d+ images",
            "SOLVER.MAX_ITER",
        ),
    ],
    ids=["finetune", "analyze", "pretrain", "detect"],
)
@pytest.mark.usefixtures("timed_at_once")
def test_every_verb_says_its_plan_and_its_price(says, words, plan, cheaper):
    said = says(*words.split())
    assert any(re.fullmatch(plan, line) for line in said), said
    assert any(line.startswith("about ") and cheaper in line for line in said), said


def test_a_price_is_spelled_for_people():
    assert price.spelled(0.2) == "1 second"
    assert price.spelled(10.4) == "10 seconds"
    assert price.spelled(90) == "2 minutes"
    assert price.spelled(5400) == "1.5 hours"
    assert price.spelled(47 * 3600) == "47 hours"
    assert price.spelled(84 * 3600) == "3.5 days"
    assert price.spelled(2667 * 3600) == "111 days"


@pytest.mark.parametrize(
    ("verb", "default", "listed", "others"),
    [
        ("linear", "lorac", {"lorac", "knn", "logreg", "fewshot"}, "finetune"),
        ("finetune", "finetune", {"finetune", "finetune_vit"}, "semisup"),
        ("semisup", "semisup", {"semisup", "semisup_demo"}, "finetune"),
    ],
)
def test_the_protocols_are_listed(capsys, verb, default, listed, others):
    assert program.main([verb, "--protocol", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert listed <= names.keys()
    assert others not in names
    assert all(names.values())
    with pytest.raises(SystemExit):
        program.main([verb, "--help"])
    assert f"(default: {default})" in " ".join(capsys.readouterr().out.split())


def test_a_recipe_says_its_probe_and_of_others_the_method_tells():
    jcl = {"method": {"name": "jcl"}, "data": {"dataset": "imagenet100"}}
    assert own_probe.of_recipe(jcl, "imagenet100") == "imagenet100_jcl"
    with_probe = {**jcl, "probe": {"imagenet100": "mine"}}
    assert own_probe.of_recipe(with_probe, "imagenet100") == "mine"
    assert own_probe.of_checkpoint("x", "moco", {}, "imagenet") == "imagenet_moco"
    assert own_probe.of_checkpoint("x", "lorac", {}, "imagenet") == "imagenet_lorac"
    assert own_probe.of_checkpoint("x", "unknown", {}, "imagenet") == "imagenet_grid"
    found = own_probe.of_checkpoint("x", "moco", {"recipe": jcl}, "imagenet100")
    assert found == "imagenet100_jcl"
    said = "x: neither its recipe nor its method 'moco' has a probe"
    with pytest.raises(BadInput, match=said):
        own_probe.of_checkpoint("x", "moco", {}, "cars")


def own(trunk, path, protocol, name):
    """Save the trunk as one whose recipe probes `classes` by `protocol`. The `second` has other
    weights, and says itself what it was trained on."""
    known = Checkpoint.load(trunk)
    recipe = {"probe": {"classes": protocol}, "data": {"dataset": "imagenet"}}
    about = {"name": name, "recipe": recipe}
    state = dict(known.state_dict)
    if name == "second":
        about["trained_on"] = ["stl10:test"]
        for key, value in state.items():
            if value.is_floating_point():
                state[key] = value + 0.01
    known.replace(state_dict=state, provenance=about).save(path)
    return path


def test_one_command_measures_each_by_its_own(
    trees, trunk, tmp_path, monkeypatch, capsys
):
    root = trees("classes")
    shipped = shutil.copytree(config.configs_dir(), tmp_path / "configs")
    monkeypatch.setattr(config, "configs_dir", lambda: shipped)
    fast = shipped / "transfer" / "fast.yaml"
    geometry = "geometry: {resize: 32, crop: 32}"
    fast.write_text(f"{{kind: knn, protocol: knn-fast-demo-v1, k: [1], {geometry}}}")
    slow = shipped / "transfer" / "slow.yaml"
    about = "kind: sgd, protocol: linear-slow-demo-v1, lr: [0.1], batch_size: 4, augment: null"
    slow.write_text(f"{{{about}, length: {{default: {{iterations: 2}}}}, {geometry}}}")
    probes = {"first": "fast", "second": "slow"}
    files = [own(trunk, tmp_path / f"{n}.safetensors", probes[n], n) for n in probes]
    out = tmp_path / "run"
    command = ["linear", *map(str, files), "--datasets", "classes", "--protocol", "own"]
    command += ["--data", str(root), "--out", str(out), "--workers", "0"]
    assert program.main(command) == 0
    rows, _ = store.read(out)
    found = {(r.name, r.task, r.protocol) for r in rows}
    first = ("first", "knn", "knn-fast-demo-v1")
    assert found == {first, ("second", "linear", "linear-slow-demo-v1")}
    for row in rows:
        recipe = {"data.dataset": "imagenet", "probe.classes": probes[row.name]}
        assert row.provenance["pretraining"] == recipe
        # What a file says of its images counts more than its recipe.
        seen = ["imagenet"] if row.name == "first" else ["stl10:test"]
        assert row.provenance["trained_on"] == seen
    assert program.main(command) == 0
    assert len(store.read(out)[0]) == len(rows), "the same run continued"
    slow.write_text(slow.read_text().replace("0.1", "0.2"))
    assert program.main(command) == 2
    assert "recipe" in capsys.readouterr().err


def test_a_recipes_probe_decides_no_training():
    recipe = config.load(PretrainConfig, "lorac/lorac_imagenet", kind="pretrain")
    assert recipe.probe == {"imagenet": "imagenet_lorac"}
    assert what_decides(recipe) == what_decides(dataclasses.replace(recipe, probe={}))
