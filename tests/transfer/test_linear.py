"""The one-pass probe equals separate runs, on several processes and after any interruption."""

import csv
import itertools
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import train_heads
from support.interruptions import Killed, kill, until_done
from support.layouts import SMALL
from support.records import rows_of
from support.slurm_cluster import free_ports
from torch import nn

from backbench.board.board import collect
from backbench.cli.program import main
from backbench.datasets import catalog
from backbench.errors import BadInput, Failed, Preempted
from backbench.images.preprocess import Pixels, to_input
from backbench.recipes import config
from backbench.records import store
from backbench.runs import seeding
from backbench.runs.state import StopFlag
from backbench.transfer import keeping
from backbench.transfer.devices import Machine, read_checkpoints
from backbench.transfer.features.batches import (
    CropFlip,
    equal_shares,
    global_batches,
    rank_batches,
)
from backbench.transfer.features.frozen import FrozenTrunk
from backbench.transfer.heads import AdamHeads, BestHeads, LinearHeads
from backbench.transfer.probes.sgd import ProbeTraining
from backbench.transfer.protocols import all_kinds, load_protocol
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import build_backbone

ONE = Machine(torch.device("cpu"), 0, 1, 0)
RATES = train_heads.RATES


def plain_batches(root, trunk):
    """Features and labels of each step of a run, by an unfolded trunk in eval()."""
    protocol = train_heads.PROTOCOL
    images = catalog.load("classes", root).train
    checkpoint = Checkpoint.load(trunk)
    backbone = checkpoint.backbone().eval()
    view = CropFlip(protocol.augment, 0)
    total = protocol.length["default"].iterations
    found = []
    for batch in global_batches(0, len(images), protocol.batch_size, 0, total):
        crops = [view(images.open(i), (epoch, i)) for epoch, i in batch]
        pixels = torch.stack([to_input(crop, checkpoint.pixels) for crop in crops])
        with torch.no_grad():
            features = backbone(pixels)
        found.append((features, torch.tensor([images.labels[i] for _, i in batch])))
    return found


def separate_run(batches, lr):
    """One rate by itself, with torch's own modules, on three classes."""
    protocol = train_heads.PROTOCOL
    head = nn.Linear(128, 3)
    generator = seeding.generator(0, "head", 3, 128)
    start = torch.empty(3, 128).normal_(0, 0.01, generator=generator)
    with torch.no_grad():
        head.weight.copy_(start)
        head.bias.zero_()
    how = {"momentum": 0.9, "weight_decay": protocol.weight_decay}
    optimizer = torch.optim.SGD(head.parameters(), lr=0.0, **how)
    for step, (features, labels) in enumerate(batches):
        loss = F.cross_entropy(head(features), labels)
        optimizer.zero_grad()
        loss.backward()
        factor = 0.5 * (1 + np.cos(np.pi * step / len(batches)))
        scaled = lr * protocol.batch_size / protocol.reference_batch
        optimizer.param_groups[0]["lr"] = scaled * factor
        optimizer.step()
    return head.weight.detach(), head.bias.detach()


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_one_pass_over_seven_rates_is_seven_separate_runs(trees, trunk, tmp_path):
    root = trees("classes", classes=("a", "b", "c"))
    heads = train_heads.train(root, trunk, tmp_path, RATES, ONE)
    weights = heads.weight.view(7, 3, 128)
    batches = plain_batches(root, trunk)
    for i, lr in enumerate(RATES):
        weight, bias = separate_run(batches, lr)
        assert relative(weights[i], weight) < 1e-5, f"rate {lr}"
        assert relative(heads.bias.view(7, 3)[i], bias) < 1e-4, f"rate {lr}"
    assert relative(weights[0], weights[6]) > 0.5, "the rates differ"


@pytest.mark.parametrize(
    ("kind", "decay"), [(LinearHeads, 0.0), (LinearHeads, 0.2), (AdamHeads, 0.2)]
)
def test_a_step_is_torchs(kind, decay):
    """Two heads at two rates, 12 steps and a restored state, against torch's optimizer on each."""
    heads = kind(2, 3, 5, std=0.1, seed=0, device=torch.device("cpu"))
    alone = []
    for lr in (0.01, 0.1):
        head = torch.nn.Linear(5, 3)
        weight = heads.weight[:3].clone()
        head.load_state_dict({"weight": weight, "bias": torch.zeros(3)})
        how = {"lr": lr, "weight_decay": decay}
        if kind is AdamHeads:
            optimizer = torch.optim.Adam(head.parameters(), **how)
        else:
            optimizer = torch.optim.SGD(head.parameters(), momentum=0.9, **how)
        alone.append((head, optimizer))
    rates = torch.tensor([0.01, 0.1])
    draws = torch.Generator().manual_seed(1)
    for step in range(12):
        features = torch.randn(6, 5, generator=draws)
        labels = torch.arange(6) % 3
        for head, optimizer in alone:
            optimizer.zero_grad()
            F.cross_entropy(head(features), labels).backward()
            optimizer.step()
        heads.step(features, labels, rates, momentum=0.9, decay=decay, batch=6)
        if step == 5:
            state = heads.state()
            heads = kind(2, 3, 5, std=1, seed=9, device=torch.device("cpu"))
            heads.load(state)
    for place, (head, _) in enumerate(alone):
        rows = slice(3 * place, 3 * place + 3)
        assert relative(heads.weight[rows], head.weight.detach()) < 1e-5
        assert relative(heads.bias[rows], head.bias.detach()) < 1e-5


def test_a_confident_head_has_no_subnormal_gradient():
    """A class of probability 5e-42 would make each product on a CPU many times slower."""
    heads = LinearHeads(1, 2, 4, std=0.1, seed=0, device=torch.device("cpu"))
    heads.weight.zero_()
    heads.bias.copy_(torch.tensor([0.0, -95.0]))
    features = torch.full((3, 4), 0.5)
    labels = torch.zeros(3, dtype=torch.int64)
    losses = heads.step(
        features, labels, torch.ones(1), momentum=0.9, decay=0.0, batch=3
    )
    assert losses.tolist() == [0.0]
    moved = heads.weight_momentum[1].abs()
    assert (moved >= torch.finfo(torch.float32).tiny).all()
    assert (moved < 1e-29).all()


def test_two_processes_give_the_weights_of_one_and_hear_each_others_signals(
    trees, trunk, tmp_path
):
    root = trees("classes", classes=("a", "b", "c"))
    out = tmp_path / "two"
    out.mkdir()
    words = (root, trunk, out, free_ports()[0])
    # A Python of its own would import torch for each rank
    ranks = torch.multiprocessing.start_processes(
        train_heads.one_of_two, words, nprocs=2, join=False, start_method="fork"
    )
    one = train_heads.train(root, trunk, tmp_path, RATES, ONE)
    while not ranks.join(timeout=300):
        pass
    zero = torch.load(out / "0.pt", weights_only=True)
    other = torch.load(out / "1.pt", weights_only=True)
    for i, lr in enumerate(RATES):
        rows = slice(3 * i, 3 * i + 3)
        error = relative(zero["heads"]["weight"][rows], one.weight[rows])
        assert error < 1e-5, f"rate {lr}"
    assert torch.equal(zero["heads"]["weight"], other["heads"]["weight"])
    assert zero["heard"] == [None, "a signal", None, None]
    assert other["heard"] == [None, "SIGTERM"]


def test_a_head_that_gave_up_stays_as_it_was_best():
    """Patience 2: the second head is best in epoch 1; its loss in epoch 4 comes too late."""
    heads = LinearHeads(2, 3, 4, std=0.1, seed=0, device=torch.device("cpu"))
    best = BestHeads(heads)
    losses = {1: (3.0, 1.0), 2: (2.0, 1.5), 3: (2.5, 1.5), 4: (1.0, 0.5), 5: (1.5, 0.5)}
    given_up = []
    for epoch, loss in losses.items():
        heads.weight.fill_(epoch)
        given_up.append(best.update(heads, torch.tensor(loss), epoch=epoch, patience=2))
    assert best.epoch.tolist() == [4, 1]
    assert best.loss.tolist() == [1.0, 1.0]
    best.restore(heads)
    assert heads.weight[:3].unique().tolist() == [4]
    assert heads.weight[3:].unique().tolist() == [1]
    assert not any(given_up)
    worse = torch.tensor([9.0, 9.0])
    assert best.update(heads, worse, epoch=7, patience=2), "both gave up"


def test_a_head_is_kept_as_it_first_was_best():
    heads = LinearHeads(1, 3, 4, std=0.1, seed=0, device=torch.device("cpu"))
    best = BestHeads(heads)
    for epoch in (1, 2):
        heads.weight.fill_(epoch)
        best.update(heads, torch.zeros(1), epoch=epoch, patience=9)
    best.restore(heads)
    assert (best.epoch.tolist(), heads.weight.unique().tolist()) == ([1], [1])


def test_batches_are_permutations_in_a_row_and_shares_cover_them():
    stream = [item for batch in global_batches(0, 10, 4, 0, 5) for item in batch]
    assert [epoch for epoch, _ in stream] == [0] * 10 + [1] * 10
    assert sorted(i for epoch, i in stream if epoch == 0) == list(range(10))
    whole = list(global_batches(0, 10, 4, 0, 5))
    assert list(global_batches(0, 10, 4, 3, 5)) == whole[3:]
    shares = []
    for rank in range(3):
        machine = Machine(ONE.device, rank, 3, 0)
        shares.append(list(rank_batches(0, 10, 4, 0, 5, machine=machine)))
    together = [item for parts in zip(*shares) for part in parts for item in part]
    assert together == stream


def test_equal_shares_are_the_images_in_order_behind_one_another():
    ranks = [equal_shares(4, 15, 5, rank, 3) for rank in range(3)]
    sizes = {len(share) for share in ranks[0][:-1] + ranks[1][:-1]}
    assert sizes == {2}, "all are equally long, as gathering needs"
    batches = []
    for shares in zip(*ranks):
        batches.append([index for share in shares for _, index in share])
    first, second, third = batches
    assert first[:5] == [4, 5, 6, 7, 8]
    assert second[:5] == [9, 10, 11, 12, 13]
    assert third[:1] == [14]


def test_views_depend_on_epoch_and_image_only(trees):
    images = catalog.load("classes", trees("classes")).train
    view = CropFlip(train_heads.PROTOCOL.augment, 0)
    once = np.asarray(view(images.open(0), (0, 0)))
    again = np.asarray(view(images.open(0), (0, 0)))
    next_epoch = np.asarray(view(images.open(0), (1, 0)))
    assert (once == again).all()
    assert (once != next_epoch).any()


def protocol_file(folder, name="live", **changes):
    recipe = {
        "kind": "sgd",
        "protocol": "linear-live-demo-v1",
        "lr": [0.1, 1.0, 10.0],
        "batch_size": 8,
        "reference_batch": 8,
        "length": {"default": {"iterations": 10}},
        "augment": {"size": 32, "scale": [0.5, 1.0], "flip": 0.5},
        "save_minutes": 0.0,
        "geometry": {"resize": 32, "crop": 32},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({**recipe, **changes}))  # JSON is YAML
    return file


def command(root, trunks, out, protocol, *more):
    args = ["linear", *trunks, "--datasets", "classes", "--data", root, "--out", out]
    return [*map(str, args), "--protocol", str(protocol), "--workers", "0", *more]


@pytest.mark.slow
def test_killed_after_any_save_ends_with_the_same_rows(
    trees, two_trunks, tmp_path, decoder
):
    root = trees("classes")
    file = protocol_file(tmp_path)
    assert main(command(root, two_trunks, tmp_path / "whole", file)) == 0
    expected = rows_of(tmp_path / "whole")
    assert len(expected) == 2 and expected[0].chosen["on"] == "val"
    # Ten steps of 8 images choose, ten train again; val's and test's features are in the cache.
    # Each step saves the state, and each death comes before the first image of the next one.
    decoder.paths.clear()
    decoder.at = dict.fromkeys((3 * 8 + 1, 8 * 8 + 1, 12 * 8 + 1, 17 * 8 + 1), kill)
    killed = command(root, two_trunks, tmp_path / "killed", file)
    assert until_done(lambda: main(killed), deaths=4) == 0
    assert len(decoder.paths) == 20 * 8, "a continued run repeats no step"
    assert rows_of(tmp_path / "killed") == expected
    assert main(killed) == 0, "a finished run recognises its results"
    assert len(rows_of(tmp_path / "killed")) == 2
    assert len(decoder.paths) == 20 * 8


def test_killed_behind_its_rows_a_protocol_keeps_its_choice(
    trees, trunk, tmp_path, monkeypatch
):
    root = trees("classes")
    files = []
    for name, rates in (("up", [1e-9, 1.0]), ("down", [1.0, 1e-9])):
        file = protocol_file(
            tmp_path,
            name,
            protocol=f"linear-{name}-v1",
            lr=rates,
            length={"default": {"iterations": 5}},
        )
        files.append(str(file))
    both = ",".join(files)
    assert main(command(root, [trunk], tmp_path / "whole", both)) == 0
    killed = command(root, [trunk], tmp_path / "killed", both)
    write = keeping.write

    def write_and_die(*args):
        write(*args)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(keeping, "write", write_and_die)
        main(killed)
    assert main(killed) == 0
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    up, down = rows_of(tmp_path / "whole")
    assert up.chosen["lr"] == down.chosen["lr"] == 1.0


def test_signal_saves_and_the_same_command_continues(trees, trunk, tmp_path):
    root = trees("classes")
    stop = StopFlag()
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted, match="stopped by SIGTERM at step 1 of 15"):
        train_heads.train(root, trunk, tmp_path, RATES, ONE, stop=stop)
    continued = train_heads.train(root, trunk, tmp_path, RATES, ONE)
    whole = train_heads.train(root, trunk, tmp_path / "b", RATES, ONE)
    assert torch.equal(continued.weight, whole.weight)


def test_rows_carry_what_was_chosen_and_how(trees, trunk, tmp_path, caplog):
    root = trees("classes")
    out = tmp_path / "run"
    file = protocol_file(tmp_path, lr=[0.1, 1.0], reference_batch=256)
    assert main(command(root, [trunk], out, file)) == 0
    (row,) = rows_of(out)
    assert row.task == "linear"
    assert row.column == "linear/classes/top1@linear-live-demo-v1"
    assert row.ci95[0] <= row.value <= row.ci95[1]
    chosen = row.chosen
    assert set(chosen["scores"]) == {"0.1", "1"} and chosen["on"] == "val"
    assert chosen["lr_used"] == pytest.approx(chosen["lr"] * 8 / 256)
    assert chosen["at_edge"] is True
    scores = set(chosen["scores"].values())
    warned = "of the grid; a better one may lie outside it" in caplog.text
    assert warned == (len(scores) == 2 and max(scores) < 100)
    used = "learning rates as used 0.003125, 0.03125 (declared for 256 images, times 8/256)"
    assert used in caplog.text
    kept = np.load(out / row.provenance["predictions"])
    assert str(kept["manifest"]) == row.provenance["manifests"]["test"]
    assert kept["prediction"].shape == (8,)
    right = kept["prediction"] == kept["label"]
    assert 100 * right.mean() == pytest.approx(row.value)
    table = list(csv.DictReader((out / row.provenance["per_class"]).open()))
    assert [r["class"] for r in table] == ["circle", "square"]
    assert sum(int(r["right"]) for r in table) == round(row.value * 8 / 100)
    assert (out / row.provenance["confusion"]).read_bytes().startswith(b"\x89PNG")
    assert (out / "manifests" / "classes-test.tsv").read_text().count("\n") == 8


def test_checkpoints_together_get_the_rows_they_get_alone(trees, two_trunks, tmp_path):
    root = trees("classes")
    file = protocol_file(tmp_path)
    assert main(command(root, two_trunks, tmp_path / "both", file)) == 0
    assert main(command(root, two_trunks[1:], tmp_path / "alone", file)) == 0
    together = rows_of(tmp_path / "both")
    assert [r.name for r in together] == ["random1", "random2"]
    assert rows_of(tmp_path / "alone") == together[1:]


def test_other_test_images_under_the_same_names_stand_apart(
    tiny_root, two_trunks, tmp_path
):
    data = shutil.copytree(tiny_root, tmp_path / "data")

    def measure(trunk, name):
        words = ["linear", str(trunk), "--datasets", "digits", "--protocol", "knn_demo"]
        words += ["--data", str(data), "--out", str(tmp_path / "runs" / name)]
        assert main([*words, "--workers", "0"]) == 0

    measure(two_trunks[0], "a")
    # Each test image becomes the next one.
    first, *files = sorted((data / "digits" / "test").rglob("*.png"))
    kept = first.read_bytes()
    for one, other in itertools.pairwise([first, *files]):
        one.write_bytes(other.read_bytes())
    files[-1].write_bytes(kept)
    measure(two_trunks[1], "b")
    board = collect([tmp_path / "runs"])
    names = {column.name for column in board.columns if column.metric == "top1_k5"}
    assert not board.problems and len(names) == 2
    assert len([name for name in names if ":test~images-" in name]) == 1
    levels = set()
    for cell in board.cells.values():
        levels |= {part.result.origin["verified"] for part in cell.parts}
    assert levels == {3}, "the run holds its lists"


def test_another_run_in_the_folder_is_refused(trees, two_trunks, tmp_path, bad_input):
    root = trees("classes")
    file = protocol_file(tmp_path)
    assert main(command(root, two_trunks[:1], tmp_path / "run", file)) == 0
    other = main(command(root, two_trunks, tmp_path / "run", file))
    bad_input(other, "another run's state (differs in checkpoints")


def test_overlap_of_train_and_test_is_refused_unwritten(
    trees, trunk, tmp_path, bad_input
):
    root = trees("classes")
    folder = root / "classes"
    copied = (folder / "train/square/001.png").read_bytes()
    (folder / "test/square/x.png").write_bytes(copied)
    status = main(command(root, [trunk], tmp_path / "run", protocol_file(tmp_path)))
    refused = "test image square/x.png is also in training data as square/001.png"
    bad_input(status, refused)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lr", [[1.0], [0.1, 1.0]], ids=["one rate", "chosen on val"])
def test_a_dataset_of_train_only_keeps_val_out_of_its_head(
    trees, trunk, tmp_path, lr, monkeypatch
):
    """Birdsnap's in LORAC Table 2: val chooses the rate and trains nothing."""
    root = trees("classes")
    trained = []  # the number of images of each training of a run
    monkeypatch.setattr(
        ProbeTraining, "run", lambda self: trained.append(len(self.images))
    )

    def measure(train_only):
        trained.clear()
        file = protocol_file(tmp_path, lr=lr, train_only=[train_only])
        assert main(command(root, [trunk], tmp_path / train_only, file)) == 0
        (row,) = rows_of(tmp_path / train_only)
        chooses = len(lr) > 1
        assert ("scores" in row.chosen) == chooses
        assert row.chosen["on"] == ("val" if chooses else None)
        return row.chosen["trained_on"]

    train = len(list((root / "classes" / "train").rglob("*.png")))
    val = len(list((root / "classes" / "val").rglob("*.png")))
    to_choose = [train] if len(lr) > 1 else []
    assert measure("classes") == "train"
    assert trained == [*to_choose, train]
    assert measure("others") == "train+val"
    assert trained == [*to_choose, train + val]


def test_train_score_is_a_row_of_the_split_that_trained(trees, trunk, tmp_path):
    """With Adam; a head that is trained long reads its own images better than a short one."""
    root = trees("classes")
    scores = []
    for iterations in (1, 200):
        out = tmp_path / f"{iterations}"
        file = protocol_file(
            tmp_path,
            length={"default": {"iterations": iterations}},
            lr=[0.001],
            optimizer="adam",
            train_score=True,
            augment=None,
        )
        assert main(command(root, [trunk], out, file)) == 0
        test, trained = rows_of(out)
        assert (test.split, test.metric) == ("test", "top1")
        assert (trained.split, trained.metric) == ("train", "train_top1")
        assert trained.ci95[0] <= trained.value <= trained.ci95[1]
        scores.append(trained.value)
        assert main(command(root, [trunk], out, file)) == 0
        assert len(rows_of(out)) == 2, "a finished run recognises both rows"
    assert scores[1] == 100 > scores[0]


def test_selecting_on_test_needs_a_name_that_says_so(trees, trunk, tmp_path, bad_input):
    root = trees("classes")
    file = protocol_file(tmp_path, select="test")
    status = main(command(root, [trunk], tmp_path / "run", file))
    bad_input(status, "select: test needs a protocol name that says so")
    file = protocol_file(tmp_path, select="test", protocol="linear-testsel-demo-v1")
    assert main(command(root, [trunk], tmp_path / "run", file)) == 0
    assert rows_of(tmp_path / "run")[0].chosen["on"] == "test"


def test_early_stop_keeps_the_best_epoch(trees, trunk, tmp_path):
    """MIO's: a hopeless rate makes val worse at once, and the first epoch's weights stay."""
    root = trees("classes")
    file = protocol_file(
        tmp_path,
        lr=[50.0],
        patience=2,
        length={"default": {"epochs": 40}},
        batch_size=4,
    )
    assert main(command(root, [trunk], tmp_path / "run", file)) == 0
    (row,) = rows_of(tmp_path / "run")
    assert row.chosen["trained_on"] == "train"
    done = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert done["what"].startswith("classes"), done
    left = list((tmp_path / "run" / "state").iterdir())
    assert not left, "nothing is left to continue"


def test_features_once_or_live_learn_the_same_task(trees, trunk, tmp_path):
    root = trees("classes", sizes=(("train", 12), ("val", 4), ("test", 10)))
    for name, how in (("live", {}), ("once", {"augment": None})):
        file = protocol_file(
            tmp_path, name, length={"default": {"iterations": 20}}, **how
        )
        assert main(command(root, [trunk], tmp_path / name, file)) == 0
        assert rows_of(tmp_path / name)[0].value == 100.0, "bright and dark pictures"


def test_a_trunk_that_moves_is_a_failure(trunk):
    frozen = FrozenTrunk.build(Checkpoint.load(trunk), device=torch.device("cpu"))
    frozen.verify()
    frozen.module.layer4[0].conv1.weight.data[0] += 1e-3
    with pytest.raises(Failed, match="the frozen trunk of 'random0' has changed"):
        frozen.verify()


@pytest.mark.parametrize("protocol", ["logreg", "knn", "fewshot"])
def test_probes_on_cached_features(trees, two_trunks, tmp_path, protocol):
    root = trees("classes", sizes=(("train", 12), ("val", 4), ("test", 10)))
    keys = {"logreg": {"l2": [1e-3, 1e2, 4]}, "knn": {"k": [1, 5]}}
    keys["fewshot"] = {"draws": 4}
    recipe = {"kind": protocol, "protocol": f"{protocol}-demo-v1", **keys[protocol]}
    file = tmp_path / f"{protocol}.yaml"
    file.write_text(json.dumps({**recipe, "geometry": {"resize": 32, "crop": 32}}))
    for _ in range(2):
        assert main(command(root, two_trunks, tmp_path / "run", file)) == 0
    rows = rows_of(tmp_path / "run")
    assert {r.task for r in rows} == {protocol} and all(r.value == 100.0 for r in rows)
    metrics = ["top1_k1", "top1_k5"] * 2 if protocol == "knn" else ["top1"] * 2
    assert [r.metric for r in rows] == metrics
    if protocol == "knn":
        # With a row lost the run is not done, and it gets that one again.
        assert store.complete(tmp_path / "run")
        results = tmp_path / "run" / "results.jsonl"
        lines = results.read_text().splitlines(keepends=True)
        results.write_text("".join(lines[:1] + lines[2:]))
        assert not store.complete(tmp_path / "run")
        assert main(command(root, two_trunks, tmp_path / "run", file)) == 0
        assert rows_of(tmp_path / "run") == [rows[0], *rows[2:], rows[1]]
        assert store.complete(tmp_path / "run")
    if protocol == "fewshot":
        kept = np.load(tmp_path / "run" / rows[0].provenance["predictions"])
        assert kept["values"].tolist() == rows[0].provenance["draws"]
        assert len(kept["values"]) == 4
    if protocol == "logreg":
        assert len(rows[0].chosen["scores"]) == 4 and rows[0].chosen["converged"]


@pytest.mark.slow
def test_two_processes_share_the_features_and_one_goes_on_alone(
    trees, two_trunks, tmp_path
):
    root = trees("classes")
    file = tmp_path / "knn.yaml"
    recipe = {
        "kind": "knn",
        "protocol": "knn-demo-v1",
        "k": [1, 5],
        "geometry": {"resize": 32, "crop": 32},
        "feature_batch": 5,
    }
    file.write_text(json.dumps(recipe))
    for run in ("first", "cached", "cached"):
        two = command(root, two_trunks, tmp_path / run, file, "--devices", "2")
        line = [sys.executable, "-m", "backbench", *two, "--accelerator", "cpu"]
        assert subprocess.run(line, check=False).returncode == 0
    assert main(command(root, two_trunks, tmp_path / "one", file)) == 0
    expected = rows_of(tmp_path / "one")
    assert len(expected) == 4
    assert rows_of(tmp_path / "first") == rows_of(tmp_path / "cached") == expected


def test_more_neighbours_than_images_is_refused(trees, trunk, tmp_path, bad_input):
    root = trees("classes")
    file = tmp_path / "knn.yaml"
    geometry = {"resize": 32, "crop": 32}
    recipe = {"kind": "knn", "protocol": "x-demo-v1", "geometry": geometry}
    file.write_text(json.dumps(recipe))
    said = "k = 200 neighbours of 18 images; write k=5 behind the protocol"
    bad_input(main(command(root, [trunk], tmp_path / "run", file)), said)
    assert not (tmp_path / "run").exists()


def test_one_set_of_weights_with_two_stems_or_pixel_statistics_is_two_checkpoints(
    tmp_path, trunk
):
    other = tmp_path / "other.safetensors"
    Checkpoint.load(trunk).replace(provenance={"name": "copy"}).save(other)
    assert len(read_checkpoints([trunk, other])) == 1
    first = tmp_path / "conv3.safetensors"
    state = build_backbone("resnet18", "conv3", width=0.25).state_dict()
    about = {"arch": SMALL, "stem": "conv3", "method": "random"}
    small = Checkpoint(**about, state_dict=state)
    small.save(first)
    small.replace(stem="conv3_p0").save(other)
    assert len(read_checkpoints([first, other])) == 2
    plain = Checkpoint.load(trunk)
    plain.replace(pixels=Pixels(std=(0.02, 0.02, 0.02))).save(other)
    one, two = read_checkpoints([trunk, other])
    assert one.digest == plain.replace(pixels=Pixels()).digest != two.digest
    bgr = plain.replace(pixels=Pixels(order="BGR"))
    assert bgr.digest not in (one.digest, two.digest)


def test_every_shipped_protocol_loads_and_has_its_own_name():
    names = {}
    for recipe in config.recipe_names("transfer"):
        if recipe.startswith("analyze"):
            continue
        protocol = load_protocol(recipe, all_kinds())
        other = names.get(protocol.name)
        assert other is None, f"{recipe} and {other} share a name"
        # These are named by their head's protocol and by the rule of a set.
        if protocol.kind == "ood":
            continue
        # Behind the version may stand the precision, and CLLR's L phi in the trunk's place.
        # MIO's probe flipped its images in version 1, which its authors' does not.
        version = "-v2" if recipe.startswith("mio_") else "-v1"
        bare = protocol.name.removesuffix("-bf16").removesuffix("-lphi")
        assert bare.endswith(version), recipe
        names[protocol.name] = recipe
    wanted = ("linear-lorac", "logreg", "knn", "fewshot", "semisup", "linear-demo")
    assert {f"{name}-v1" for name in wanted} <= set(names)
    assert "linear-lorac-v1-bf16" in names


def test_mio_probes_crop_their_images_and_never_flip_them():
    """Its Section 3.3 names no augmentation; its released code has RandomResizedCrop alone."""
    for recipe in config.recipe_names("transfer"):
        if recipe.startswith("mio_"):
            augment = load_protocol(recipe, ["sgd"]).augment
            assert (augment.flip, augment.scale) == (0.0, (0.8, 1.0)), recipe


def test_rates_fall_at_their_milestones_or_after_each_epoch():
    schedule = load_protocol("imagenet_moco", ["sgd"]).schedule
    factors = []
    for epoch in (59, 60, 79, 80):
        factors.append(schedule.factor(epoch * 5005, 100 * 5005, 5005))
    assert factors == pytest.approx([1, 0.1, 0.1, 0.01])
    by_epoch = load_protocol("mio_cifar", ["sgd"]).schedule
    assert by_epoch.factor(3 * 1250, 125000, 1250) == pytest.approx(0.98**3)


def test_protocol_mistakes_are_named(tmp_path):
    said = "a protocol of kind 'finetune'; this command runs sgd"
    with pytest.raises(BadInput, match=said):
        load_protocol("semisup", ["sgd"])
    with pytest.raises(BadInput, match=r"no recipe 'lorak'.*did you mean 'lorac'"):
        load_protocol("lorak", ["sgd"])
    file = protocol_file(tmp_path, length={"default": {"iterations": 3, "epochs": 2}})
    with pytest.raises(BadInput, match="give either epochs or iterations"):
        load_protocol(str(file), ["sgd"])


UNKNOWN = """
import sys
from backbench.transfer.protocols import load_protocol
try:
    load_protocol('lorak', ['sgd'])
except Exception as error:
    print(type(error).__name__, 'torch' in sys.modules)
"""


def test_an_unknown_recipe_is_refused_before_torch_is_imported():
    line = [sys.executable, "-c", UNKNOWN]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["BadInput", "False"]
