"""Finetuning: the lists, two rates, the choice, the refit, and that no kill changes a number."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from support import train_network
from support.interruptions import kill, terminate, until_done
from support.layouts import trunk_file
from support.records import rows_of
from support.slurm_cluster import free_ports

from backbench.cli.program import main
from backbench.datasets import catalog
from backbench.recipes import config
from backbench.records import store
from backbench.runs.state import load_state
from backbench.stats import training_noise
from backbench.transfer import finetune
from backbench.transfer.devices import Machine
from backbench.transfer.finetune import Network
from backbench.transfer.protocols import load_protocol
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint

ONE = Machine(torch.device("cpu"), 0, 1, 0)


def protocol_file(folder, **changes):
    recipe = {
        "kind": "finetune",
        "protocol": "semisup-test-demo-v1",
        "dataset": "classes",
        "head_lr": [0.03, 0.1],
        "batch_size": 4,
        "reference_batch": 4,
        "save_minutes": 0.0,
        "parts": {
            "10": {"length": {"iterations": 5}, "head_over_trunk": 20},
            "100": {"length": {"iterations": 4}, "head_over_trunk": 1},
        },
        "augment": {"size": 32, "scale": [0.5, 1.0], "flip": 0.5},
        "geometry": {"resize": 32, "crop": 32},
    }
    file = folder / "semi.yaml"
    file.write_text(json.dumps({**recipe, **changes}))
    return file


def listed(folder):
    folder.mkdir(exist_ok=True)
    names = ("circle/000", "circle/001", "circle/002", "square/001", "square/004")
    (folder / "10percent.txt").write_text("".join(f"{n}.png\n" for n in names))
    return folder


def semisup_on(root, lists, trunk, out):
    words = ["semisup", trunk, "--percent", "10", "--lists", lists]
    words += ["--data", root, "--out", out]
    return [str(word) for word in words]


def finetune_on(root, dataset, trunk, out, protocol):
    words = ["finetune", trunk, "--dataset", dataset, "--data", root, "--out", out]
    words += ["--protocol", protocol, "--workers", "0"]
    return [str(word) for word in words]


def semisup(root, trunk, out, tmp_path, **changes):
    words = semisup_on(root, listed(tmp_path / "lists"), trunk, out)
    protocol = protocol_file(tmp_path, **changes)
    return [*words, "--protocol", str(protocol), "--workers", "0"]


def test_another_list_than_the_published_is_refused(trees, trunk, tmp_path, bad_input):
    root = trees("classes")
    lists = listed(tmp_path / "lists")
    status = main(semisup_on(root, lists, trunk, tmp_path / "run"))
    bad_input(status, "not the published list")
    assert not (tmp_path / "run").exists()


def test_lists_use_their_own_labels_only(trees):
    root = trees("classes")
    names = ["circle/000.png", "square/001.png"]
    lines = {name: line for line, name in enumerate(names, 1)}
    with_val = catalog.load("classes", root)
    found = finetune.labelled_part(with_val, lines, "10percent.txt", 0)
    assert found.train.paths == tuple(names)
    assert len(found.val) == 6
    assert not found.held_out
    trees.classes(root / "noval", sizes=(("train", 10), ("test", 2)))
    everything = {f"{c}/{i:03d}.png": i for c in ("circle", "square") for i in range(5)}
    without_val = catalog.load("noval", root)
    held = finetune.labelled_part(without_val, everything, "10percent.txt", 0)
    assert held.held_out
    assert len(held.train) == 8 and len(held.val) == 2
    together = {*held.train.paths, *held.val.paths}
    assert together == set(everything), "together they are the list"


def test_two_rates_and_every_layer_trains(trees, trunk, tmp_path):
    """The trunk's step is the head's rate / head_over_trunk: its change is so much smaller."""
    root = trees("classes")
    start = Checkpoint.load(trunk).backbone().state_dict()
    moved = []
    heads = []
    for ratio in (1.0, 10.0):
        run = tmp_path / str(ratio)
        network = train_network.train(root, trunk, run, ONE, iterations=1, ratio=ratio)
        moved.append({n: v - start[n] for n, v in network[0].named_parameters()})
        heads.append(network[1].weight)
    for name, change in moved[0].items():
        assert change.abs().max() > 0, name
        torch.testing.assert_close(moved[1][name] * 10, change, rtol=1e-2, atol=2e-6)
    assert torch.equal(heads[0], heads[1]), "the ratio is the trunk's"


def test_training_is_torchs_sgd(trees, trunk, tmp_path):
    root = trees("classes")
    network = train_network.train(root, trunk, tmp_path, ONE, iterations=3, ratio=20.0)
    weight = train_network.plain(root, trunk, iterations=3, ratio=20.0)
    assert float((network[1].weight.detach() - weight).norm() / weight.norm()) < 1e-5


@pytest.mark.slow
def test_two_processes_give_the_weights_of_one(trees, trunk, tmp_path):
    root = trees("classes")
    port = free_ports()[0]
    out = tmp_path / "two" / "network.pt"
    out.parent.mkdir()
    command = [sys.executable, train_network.__file__, str(root), str(trunk), str(out)]
    ranks = []
    for rank in range(2):
        ranks.append(subprocess.Popen([*command, str(rank), "2", str(port)]))
    double = train_network.DoubleNetwork
    alone = train_network.train(
        root, trunk, tmp_path / "one", ONE, iterations=3, kind=double
    )
    one = alone.state_dict()
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    two = torch.load(out, weights_only=True)
    for name, value in one.items():
        if value.is_floating_point():
            size = value.norm().clamp(min=1e-3)
            assert float((two[name] - value).norm() / size) < 1e-5, name


@pytest.mark.slow
def test_killed_after_any_save_ends_with_the_same_rows(trees, trunk, tmp_path, decoder):
    root = trees("classes")
    assert main(semisup(root, trunk, tmp_path / "whole", tmp_path)) == 0
    (expected,) = rows_of(tmp_path / "whole")
    assert expected.task == "semi_10pct" and expected.chosen["on"] == "val"
    assert expected.chosen["choice_noise"] == 0  # both rates say the same of each image
    used = expected.chosen["lr_used"]
    assert expected.chosen["trunk_lr_used"] == pytest.approx(used / 20)
    # Each rate reads five steps of 4 images and the 6 of val; the 8 of test come last. It dies
    # before the third step, between the last step and val, and before the second rate's fourth step.
    whole = len(decoder.paths)
    rate = 5 * 4 + 6
    assert whole == 2 * rate + 8
    decoder.paths.clear()
    decoder.at = dict.fromkeys((2 * 4 + 1, 5 * 4 + 1, rate + 3 * 4 + 1), kill)
    killed = semisup(root, trunk, tmp_path / "killed", tmp_path)
    assert until_done(lambda: main(killed), deaths=3) == 0
    assert len(decoder.paths) == whole, "a continued run repeats no step"
    assert rows_of(tmp_path / "killed") == [expected]
    assert main(killed) == 0
    assert len(decoder.paths) == whole
    assert len(rows_of(tmp_path / "killed")) == 1
    assert not list((tmp_path / "killed" / "state").iterdir())


def test_a_stop_in_mid_training_saves_that_step_and_continues_there(
    trees, trunk, tmp_path, decoder, capsys
):
    """No state is due for an hour, so it is the stop that saves."""
    root = trees("classes")
    how = {"head_lr": [0.03], "save_minutes": 60.0}
    assert main(semisup(root, trunk, tmp_path / "whole", tmp_path, **how)) == 0
    (expected,) = rows_of(tmp_path / "whole")
    images = len(decoder.paths)
    decoder.paths.clear()
    decoder.at = {2 * 4 + 1: terminate}  # before the third step of four images
    stopped = semisup(root, trunk, tmp_path / "stopped", tmp_path, **how)
    assert main(stopped) == 75
    assert "the same command continues" in capsys.readouterr().err
    state = load_state(tmp_path / "stopped" / "state" / "training.state")
    assert state["step"] == 3
    assert not rows_of(tmp_path / "stopped")
    assert main(stopped) == 0
    assert len(decoder.paths) == images, "no step is repeated"
    assert rows_of(tmp_path / "stopped") == [expected]
    assert not list((tmp_path / "stopped" / "state").iterdir())


@pytest.mark.slow
def test_seeds_are_runs_of_their_own_and_continue(
    trees, trunk, tmp_path, decoder, bad_input
):
    root = trees("classes")
    out = tmp_path / "run"
    words = [*semisup(root, trunk, out, tmp_path, head_lr=[0.03]), "--seeds", "3"]
    decoder.at[40] = kill  # in the second of them
    assert until_done(lambda: main(words), deaths=1) == 0
    seen = len(decoder.paths)
    rows = {file.parent.name: rows_of(file.parent) for file in store.files_below(out)}
    seeds = {name: [row.seed for row in of] for name, of in rows.items()}
    assert seeds == {"s0": [0], "s1": [1], "s2": [2]}
    assert main(words) == 0 and len(decoder.paths) == seen, "nothing is left to do"
    alone = [*semisup(root, trunk, out / "s1", tmp_path, head_lr=[0.03]), "--seed", "1"]
    assert main(alone) == 0 and len(decoder.paths) == seen, "the same run as by --seed"
    bad_input(main([*words[:-1], "0"]), "--seeds 0: from 1 to 1000")


def test_seeds_of_what_is_not_trained_are_refused(trunk, tmp_path, bad_input):
    words = ["linear", str(trunk), "--datasets", "digits", "--data", str(tmp_path)]
    words += ["--out", str(tmp_path / "run"), "--protocol", "knn", "--seeds", "3"]
    bad_input(main(words), "--seeds 3: knn trains nothing by chance")


@pytest.mark.slow
def test_hold_out_is_refitted_on_the_whole_list(trees, trunk, tmp_path):
    root = trees("classes", sizes=(("train", 6), ("test", 4)))
    assert main(semisup(root, trunk, tmp_path / "run", tmp_path)) == 0
    (row,) = rows_of(tmp_path / "run")
    assert row.chosen["trained_on"] == "train+val"
    assert row.provenance["images"] == {"train": 3, "val": 2, "test": 8}
    assert "5 labelled images from 10percent.txt" in row.provenance["notes"]


@pytest.mark.slow
def test_finetune_verb_learns(trees, tmp_path, monkeypatch):
    trunk = trunk_file(tmp_path / "trunk.safetensors", arch="resnet18")
    root = trees("classes", sizes=(("train", 12), ("val", 4), ("test", 10)))
    parts = {"100": {"length": {"iterations": 12}, "head_over_trunk": 1}}
    changes = {"parts": parts, "batch_size": 8}
    file = protocol_file(tmp_path, head_lr=[0.002, 0.003], **changes)
    predict = finetune.Finetuning.predict
    hits = []

    def noted(self, network, images):
        ranking = predict(self, network, images)
        if not hits:
            # The first rate gets two of the eight wrong: the choice is right, and not beyond doubt
            ranking[:2] = ranking[:2].flip(1)
        hits.append(ranking[:, 0].numpy() == images.labels)
        return ranking

    monkeypatch.setattr(finetune.Finetuning, "predict", noted)
    assert main(finetune_on(root, "classes", trunk, tmp_path / "run", file)) == 0
    (row,) = rows_of(tmp_path / "run")
    assert row.task == "finetune" and row.value >= 90.0 and row.ci95[1] <= 100
    noise = training_noise.of_choice(np.stack(hits[:2])) ** 0.5
    assert row.chosen["choice_noise"] == noise > 0
    kept = np.load(tmp_path / "run" / row.provenance["predictions"])
    assert len(kept["prediction"]) == 20


def test_a_protocol_of_another_verb_is_refused(trees, trunk, tmp_path, bad_input):
    root = trees("classes")
    lists = listed(tmp_path / "lists")
    words = semisup_on(root, lists, trunk, tmp_path / "run")
    said = "names no dataset; use a semi-supervised protocol"
    bad_input(main([*words, "--protocol", "finetune"]), said)


VIT = "timm:vit_tiny_patch16_224,depth=3,embed_dim=24,img_size=32,num_heads=2,patch_size=8"


def of_arch(arch):
    trunk = archs.build_trunk(arch)
    return Checkpoint(arch=arch, method="random", state_dict=trunk.state_dict())


@pytest.mark.parametrize("arch", [VIT, "timm:test_convnext", "resnet18"])
def test_each_layer_has_its_share_of_the_rate_and_norms_no_decay(arch):
    """BEiT: rate x decay^(layers above); tokens, positions, norms and biases are not decayed."""
    p = load_protocol("finetune_vit_demo", ["finetune"])
    network = Network(of_arch(arch), 10, p, 0, ONE)
    trunk, head = network.module[0], network.module[1]
    rate = {}
    for g in network.optimizer.param_groups:
        rate |= {id(x): (g["scale"], g["weight_decay"]) for x in g["params"]}
    assert len(rate) == sum(1 for _ in network.module.parameters())
    assert rate[id(head.weight)] == (1.0, 0.05) and rate[id(head.bias)] == (1.0, 0.0)
    depths = trunk.depths()
    deepest = max(depths.values())
    for name, parameter in trunk.named_parameters():
        scale, decay = rate[id(parameter)]
        assert scale == pytest.approx(0.65 ** (deepest + 1 - depths[name])), name
        matrix = parameter.ndim > 1 and not name.endswith(("pos_embed", "cls_token"))
        assert decay == (0.05 if matrix else 0.0), name
    if arch == VIT:  # stem, three blocks; the last norm goes with the last block
        assert deepest == 3
        parts = ("cls_token", "blocks.0.norm1.weight", "norm.weight")
        assert [depths[f"model.{part}"] for part in parts] == [0, 1, 3]


def test_the_rates_rise_then_follow_the_schedule():
    p = load_protocol("finetune_vit", ["finetune"])
    shares = [p.factor(step, 100, 10.0) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5] == 1.0 and shares[-1] < 0.001
    assert shares[5 + 95 // 2] == pytest.approx(0.5, abs=0.02)
    old = load_protocol("finetune", ["finetune"])
    assert old.factor(0, 100, 10.0) == 1.0
    assert old.factor(50, 100, 10.0) == pytest.approx(0.5)


@pytest.mark.parametrize("arch", [VIT, "timm:test_convnext"])
def test_a_trunk_of_any_kind_is_finetuned(tiny_root, tmp_path, arch):
    trunk = tmp_path / "trunk.safetensors"
    of_arch(arch).save(trunk)
    length = {"epochs": None, "iterations": 4}
    changes = {
        "base": str(config.configs_dir() / "transfer" / "finetune_vit_demo"),
        "protocol": "vit-test-v1",
        "parts": {"100": {"length": length, "head_over_trunk": 1}},
    }
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps(changes))
    assert main(finetune_on(tiny_root, "digits", trunk, tmp_path / "run", own)) == 0
    (row,) = [r for r in rows_of(tmp_path / "run") if r.metric == "top1"]
    assert row.value is not None and row.arch.startswith("timm:")
    assert row.chosen["trunk_lr_used"] == row.chosen["lr_used"]


@pytest.mark.parametrize(("world", "synced"), [(1, False), (2, True)])
def test_processes_share_the_statistics_of_a_batch(world, synced):
    """Each has a part of it: with its own statistics the number would depend on their count."""
    checkpoint = of_arch("resnet18")
    p = load_protocol("semisup_demo", ["finetune"])
    machine = Machine(torch.device("cpu"), 0, world, 0)
    network = Network(checkpoint, 10, p, 0, machine)
    kinds = {type(module) for module in network.module.modules()}
    assert (torch.nn.BatchNorm2d not in kinds) == synced


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)]
)
def test_a_network_computes_in_the_precision_of_its_protocol(
    monkeypatch, precision, dtype
):
    used = []
    monkeypatch.setattr(finetune.precision, "use", used.append)
    p = dataclasses.replace(
        load_protocol("semisup_demo", ["finetune"]), precision=precision
    )
    network = Network(of_arch("resnet18"), 10, p, 0, ONE)
    seen = []
    network.module.register_forward_hook(
        lambda module, given, out: seen.append(out.dtype)
    )
    with torch.no_grad():
        logits = network(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert (logits.shape, logits.dtype) == ((2, 10), torch.float32)
    assert seen == [dtype or torch.float32]
    assert used == [precision]
