"""What finetuning makes of its rates, whatever they train: which one is chosen, kept, trained again, and
what the row says of it. The trainings themselves are those of test_finetune.py."""

import dataclasses

import numpy as np
import pytest
import torch

from backbench.datasets import catalog, splits
from backbench.errors import BadInput
from backbench.records import store
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.runs import price
from backbench.runs.state import StopFlag
from backbench.stats import training_noise
from backbench.transfer import finetune
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features import batches
from backbench.transfer.finetune import Finetuning
from backbench.transfer.finetune_protocol import Finetune, Part
from backbench.transfer.protocol import CropAugment, Geometry, Length
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint

ONE = Machine(torch.device("cpu"), 0, 1, 0)
VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"
PART = Part(length=Length(iterations=7), head_over_trunk=20)
PROTOCOL = Finetune(
    kind="finetune",
    protocol="tuned-x-v1",
    head_lr=(0.1, 0.2, 0.4),
    batch_size=4,
    reference_batch=8,
    parts={"10": PART, "100": PART},
    augment=CropAugment(size=32),
    geometry=Geometry(resize=32, crop=32),
)
SIZES = (("train", 6), ("val", 2), ("test", 4))


@pytest.fixture
def point():
    state = archs.build_trunk(VIT).state_dict()
    return Checkpoint(arch=VIT, method="random", state_dict=state)


@pytest.fixture
def assigned(trees, tmp_path, point):
    """assigned(...): a task on two classes of pictures, 12 to train, 4 to choose, 8 to test."""
    root = trees("classes", sizes=SIZES)

    def make(task="semi_10pct", metric="top1", held_out=False, **changes):
        found = catalog.load("classes", root)
        return Assignment(
            run=tmp_path / "run",
            task=task,
            dataset=dataclasses.replace(catalog.find("classes"), metric=metric),
            splits=dataclasses.replace(found, held_out=held_out),
            protocol=dataclasses.replace(PROTOCOL, **changes),
            seed=0,
            checkpoints=(point,),
        )

    return make


class StoodInTrainings:
    """In the place of trainings: each leaves its rate in the head's bias, and a network answers by
    that. `wrong` has the numbers of val's images that a rate gets wrong; all of test are right but
    the first."""

    def __init__(self, monkeypatch, wrong):
        self.wrong = wrong
        self.made = []
        self.dies_at = None
        self.tested = []
        monkeypatch.setattr(Finetuning, "train", self.train)
        monkeypatch.setattr(Finetuning, "predict", self.predict)

    def train(self, network, images, lr, what):
        if lr == self.dies_at:
            self.dies_at = None
            raise KeyboardInterrupt
        self.made.append((what, lr, len(images)))
        with torch.no_grad():
            network.module[1].bias.fill_(lr)

    def predict(self, network, images):
        lr = round(float(network.module[1].bias[0].detach()), 6)
        label = torch.tensor(images.labels)
        ranking = torch.stack([label, 1 - label], 1)
        wrong = [0]
        if len(images) == 8:
            self.tested.append(lr)
        else:
            wrong = self.wrong[lr]
        ranking[wrong] = ranking[wrong].flip(1)
        return ranking


@pytest.fixture
def trainings(monkeypatch):
    return lambda wrong=None: StoodInTrainings(monkeypatch, wrong)


# Of three rates the second is best, and the third as good
WRONG = {0.1: [0, 1], 0.2: [3], 0.4: [0]}
HITS = np.array([[0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]], bool)


def test_with_an_official_val_the_best_network_is_tested_as_it_is(
    assigned, trainings, caplog
):
    caplog.set_level("INFO", "backbench")
    done = trainings(WRONG)
    task = assigned()
    (row,) = finetune.finetune(task, PART, ONE)
    of_rates = ((1, 0.1), (2, 0.2), (3, 0.4))
    assert done.made == [(f"rate {n} of 3", lr, 12) for n, lr in of_rates]
    assert done.tested == [0.2], "the first of the two that are best"
    assert dict(row.chosen) == {
        "lr": 0.2,
        "lr_used": pytest.approx(0.1),
        "trunk_lr_used": pytest.approx(0.005),
        "reference_batch": 8,
        "batch_size": 4,
        "on": "val",
        "trained_on": "train",
        "scores": {"0.1": 50.0, "0.2": 75.0, "0.4": 75.0},
        "at_edge": False,
        "choice_noise": training_noise.of_choice(HITS) ** 0.5,
    }
    assert (row.task, row.metric, row.value) == ("semi_10pct", "top1", 87.5)
    said = caplog.messages
    assert (
        "classes semi_10pct: head/trunk rates as used 0.05/0.0025, 0.1/0.005, 0.2/0.01"
        " (declared for 8 images, times 4/8)" in said
    )
    assert (
        "semi_10pct on classes: tuned-x-v1 (all layers, 3 trainings, 4 images a step);"
        " 12 + 4 labelled images, 8 to test; 21 steps" in said
    )
    assert f"{row.name}: head rate 0.2: val 75.00" in said
    assert not list((task.run / "state").iterdir())
    # What is done is not done again
    (again,) = finetune.finetune(task, PART, ONE)
    assert (again.column, again.value) == (row.column, row.value)
    assert len(done.made) == 3


@pytest.mark.parametrize("dies_at", [0.1, 0.4])
def test_a_grid_goes_on_at_the_rate_that_was_not_done(
    assigned, trainings, caplog, dies_at
):
    caplog.set_level("INFO", "backbench")
    done = trainings(WRONG)
    done.dies_at = dies_at
    with pytest.raises(KeyboardInterrupt):
        finetune.finetune(assigned(), PART, ONE)
    caplog.clear()
    (row,) = finetune.finetune(assigned(), PART, ONE)
    assert [lr for _, lr, _ in done.made] == [0.1, 0.2, 0.4]
    assert done.tested == [0.2], "whose weights were kept meanwhile"
    assert row.chosen["scores"] == {"0.1": 50.0, "0.2": 75.0, "0.4": 75.0}
    assert row.chosen["choice_noise"] == training_noise.of_choice(HITS) ** 0.5
    left = {0.1: "3 trainings", 0.4: "1 training"}[dies_at]
    (plan,) = [line for line in caplog.messages if line.startswith("semi_10pct on")]
    assert f"(all layers, {left}, 4 images a step)" in plan


@pytest.mark.parametrize(
    ("task", "held_out"), [("semi_10pct", True), ("finetune", False)]
)
def test_where_val_may_train_the_best_rate_trains_again(
    assigned, trainings, caplog, task, held_out
):
    caplog.set_level("INFO", "backbench")
    done = trainings({0.1: [0, 1, 2], 0.2: [3, 2], 0.4: [0]})
    (row,) = finetune.finetune(assigned(task=task, held_out=held_out), PART, ONE)
    assert [images for _, _, images in done.made] == [12, 12, 12, 16]
    assert done.made[-1] == ("final", 0.4, 16)
    assert done.tested == [0.4]
    assert (row.chosen["trained_on"], row.chosen["on"]) == ("train+val", "val")
    assert row.chosen["at_edge"] is True
    assert "the best head rate 0.4 is the largest of the grid" in caplog.text
    (plan,) = [line for line in caplog.messages if line.startswith(f"{task} on")]
    assert "4 trainings" in plan and plan.endswith("; 28 steps")


def test_one_rate_has_nothing_to_choose(assigned, trainings, caplog):
    caplog.set_level("INFO", "backbench")
    done = trainings()
    (row,) = finetune.finetune(assigned(task="finetune", head_lr=(0.2,)), PART, ONE)
    assert done.made == [("final", 0.2, 16)]
    assert row.chosen["on"] is None and row.chosen["scores"] == {}
    assert "choice_noise" not in row.chosen and row.chosen["at_edge"] is False
    (plan,) = [line for line in caplog.messages if line.startswith("finetune on")]
    assert "1 training," in plan and plan.endswith("; 7 steps")


def test_one_rate_beside_an_official_val_trains_once_and_is_scored(
    assigned, trainings, caplog
):
    caplog.set_level("INFO", "backbench")
    done = trainings({0.2: [1]})
    (row,) = finetune.finetune(assigned(head_lr=(0.2,)), PART, ONE)
    assert done.made == [("rate 1 of 1", 0.2, 12)]
    assert row.chosen["scores"] == {"0.2": 75.0}
    (plan,) = [line for line in caplog.messages if line.startswith("semi_10pct on")]
    assert "1 training," in plan and plan.endswith("; 7 steps")


def test_a_choice_by_mean_per_class_is_as_noisy_as_means_of_classes(
    assigned, trainings, trees
):
    """With three of one class and one of the other, a mistake costs a sixth or a half."""
    task = assigned(metric="mean_per_class")
    val = task.splits.val
    (rare,) = [i for i, label in enumerate(val.labels) if label == 1][:1]
    kept = [i for i, label in enumerate(val.labels) if label == 0] + [rare]
    more = dataclasses.replace(task.splits, val=val.subset([kept[0], *kept]))
    trainings({0.1: [3], 0.2: [0], 0.4: [0, 1]})
    (row,) = finetune.finetune(dataclasses.replace(task, splits=more), PART, ONE)
    assert row.chosen["scores"] == pytest.approx(
        {"0.1": 50.0, "0.2": 100 * 5 / 6, "0.4": 100 * 2 / 3}
    )
    hits = np.array([[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]], bool)
    noise = training_noise.of_choice(hits, np.array([0, 0, 0, 1])) ** 0.5
    assert row.chosen["choice_noise"] == noise


# The answers of a network


class Bright:
    """A network whose first class is the brighter, the more the brighter the picture is."""

    def __init__(self, spoilt=False):
        self.module = torch.nn.Identity()
        self.spoilt = spoilt
        self.sizes = []

    def __call__(self, pixels):
        self.sizes.append(tuple(pixels.shape))
        level = pixels.float().mean((1, 2, 3)) - 125
        return torch.stack([level, -level], 1) * (torch.nan if self.spoilt else 1)


def test_answers_come_in_order_over_several_batches(assigned, caplog, monkeypatch):
    task = assigned(feature_batch=3, geometry=Geometry(resize=20, crop=16))
    work = Finetuning(task, PART, ONE, StopFlag())
    network = Bright()
    ranking = work.predict(network, task.splits.test)
    levels = []
    for index in range(8):
        levels.append(np.asarray(task.splits.test.open(index)).mean())
    assert ranking[:, 0].tolist() == [int(level < 125) for level in levels]
    assert len(set(ranking[:, 0].tolist())) == 2
    assert [size[2:] for size in network.sizes] == [(16, 16)] * 3
    assert not network.module.training
    assert caplog.text == ""
    # Two processes share a batch of one image, too, and its copy is no answer
    twice = dataclasses.replace(ONE, world=2)
    monkeypatch.setattr(
        finetune.distributed,
        "gather_without_gradient",
        lambda mine: torch.cat([mine, mine]),
    )
    shared = Finetuning(task, PART, twice, StopFlag())
    seven = task.splits.test.subset(range(7))
    assert len(shared.predict(Bright(), seven)) == 7
    # A diverged one has no answer, and that is said
    assert work.predict(Bright(spoilt=True), task.splits.test).unique().tolist() == [-1]
    assert "the network's scores are not finite; this rate diverged" in caplog.text


class Constant:
    """A network that gives every image the same logits, which train."""

    def __init__(self):
        self.module = torch.nn.Module()
        self.logits = torch.nn.Parameter(torch.tensor([1.0, 0.0]))
        group = {"params": [self.logits], "of": "trunk", "scale": 0.5}
        self.optimizer = torch.optim.SGD([group], lr=0.0, momentum=0.9)

    def __call__(self, pixels):
        return self.logits.expand(len(pixels), 2)

    def sum_gradients(self, machine):
        pass


def test_a_training_takes_its_share_of_each_batch_and_shows_its_loss(assigned, capsys):
    """By hand, on rank 0 of two: the loss of every twentieth step, so of step 20, is shown."""
    task = assigned()
    part = Part(length=Length(iterations=23), head_over_trunk=5)
    work = Finetuning(task, part, dataclasses.replace(ONE, world=2), StopFlag())
    network = Constant()
    images = task.splits.train
    work.train(network, images, 0.4, "rate 3 of 3")
    line = capsys.readouterr().err.splitlines()[-1]
    assert network.module.training

    logits = np.array([1.0, 0.0])
    mean = np.zeros(2)
    shown = []
    stream = batches.global_batches(0, len(images), 4, 0, 23)
    for step, batch in enumerate(stream):
        p = np.exp(logits) / np.exp(logits).sum()
        labels = [images.labels[index] for _, index in batch[:2]]
        shown.append(2 * sum(-np.log(p[label]) for label in labels) / 4)
        gradient = (2 * p - np.bincount(labels, minlength=2)) / 4
        mean = 0.9 * mean + gradient
        # The rate is declared for 8 images, the trunk's is a fifth of it, the group's half of that
        rate = 0.4 * 4 / 8 / 5 / 2
        logits = logits - rate * PROTOCOL.factor(step, 23, len(images) / 4) * mean
    np.testing.assert_allclose(network.logits.detach(), logits, rtol=1e-5)
    assert line.startswith("semi_10pct rate 3 of 3: 23/23 steps ")
    assert line.endswith(f"  loss {shown[20]:.4g}")
    assert f"{shown[0]:.4g}" != f"{shown[20]:.4g}" != f"{shown[22]:.4g}"


@pytest.mark.parametrize(("kind", "says"), [("cpu", True), ("cuda", False)])
def test_on_a_cpu_what_costs_less_is_said(assigned, monkeypatch, kind, says):
    told = []
    monkeypatch.setattr(
        price, "announce", lambda *parts, **more: told.append((parts, more))
    )
    machine = dataclasses.replace(ONE, device=torch.device(kind))
    Finetuning(assigned("finetune"), PART, machine, StopFlag()).announce()
    ((parts, more),) = told
    assert parts == (
        "finetune on classes",
        "tuned-x-v1 (all layers, 4 trainings, 4 images a step)",
        "12 + 4 labelled images, 8 to test",
    )
    assert more == {
        "work": {"step": 28},
        "cheaper": "`backbench linear --protocol logreg` trains a head alone and costs less"
        if says
        else "",
    }


def test_gradients_of_all_processes_are_added_once(point, monkeypatch):
    network = finetune.Network(point, 2, PROTOCOL, 0, ONE)
    shapes = {}
    for number, each in enumerate(network.module.parameters()):
        each.grad = torch.full_like(each, number)
        shapes[number] = each.shape
    unused = next(iter(network.module.parameters()))
    unused.grad = None
    summed = []

    def all_reduce(flat):
        summed.append(len(flat))
        flat.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    network.sum_gradients(ONE)
    assert summed == []
    network.sum_gradients(dataclasses.replace(ONE, world=2))
    parameters = list(network.module.parameters())
    assert summed == [sum(each.numel() for each in parameters[1:])]
    for number, each in enumerate(parameters[1:], 1):
        assert each.grad.shape == shapes[number]
        assert (each.grad == 2 * number).all()
    assert parameters[0].grad is None


def test_processes_that_do_not_divide_a_batch_are_refused(assigned):
    task = assigned()
    three = dataclasses.replace(ONE, world=3)
    work = Finetuning(task, PART, three, StopFlag())
    with pytest.raises(
        BadInput, match="a batch of 4 images on 3 processes: use a number"
    ):
        work.train(None, task.splits.train, 0.1, "x")


# What a command asks for


def request(kind, root, tmp_path, protocol="semisup", **changes):
    about = {"data": root, "out": tmp_path / "o", "checkpoint": tmp_path / "x"}
    if kind is SemisupRequest:
        about["percent"] = 10
    else:
        about["dataset"] = "classes"
    return kind(**{**about, "protocol": protocol, "accelerator": "cpu", **changes})


@pytest.fixture
def handed_on(monkeypatch):
    """The tasks and parts that a command would train."""
    seen = []

    def tuned(task, part, machine):
        seen.append((task, part))
        return []

    monkeypatch.setattr(finetune, "finetune", tuned)
    return seen


def test_a_protocol_without_the_part_is_refused(trees, tmp_path):
    root = trees("classes")
    with pytest.raises(
        BadInput, match="--protocol semisup: has no part for all labels"
    ):
        finetune.run(request(FinetuneRequest, root, tmp_path))
    given = request(SemisupRequest, root, tmp_path, "finetune", dataset="classes")
    with pytest.raises(
        BadInput, match="--protocol finetune: has no part for 10%; use a"
    ):
        finetune.run_semisup(given)


def test_without_a_list_the_seed_draws_one(trees, tmp_path, point, handed_on, caplog):
    """Of train and val where val is a hold-out, and of train alone beside an official val."""
    caplog.set_level("INFO", "backbench")
    root = trees("classes", sizes=(("train", 30), ("test", 4)))
    trees.classes(root / "divided", sizes=(("train", 30), ("val", 9), ("test", 4)))
    small = ("geometry.crop=32", "geometry.resize=32")
    for name in ("classes", "divided"):
        how = {"dataset": name, "seed": 3, "overrides": small, "out": tmp_path / name}
        finetune.run_semisup(request(SemisupRequest, root, tmp_path, **how), point)
    (task, part), (divided, _) = handed_on
    assert (task.task, task.seed) == ("semi_10pct", 3)
    assert task.splits.drawn_labels and task.splits.held_out
    assert "classes: no --lists, so 6 of 60 labels are drawn" in caplog.messages
    whole = catalog.load("classes", root, seed=3).both()
    drawn = splits.drawn_list(whole, 10, 3)
    assert {*task.splits.train.paths, *task.splits.val.paths} == set(drawn)
    note = "6 labelled images from a list of 10% that seed 3 draws"
    assert task.splits.notes[-1] == note
    # The published list is of ImageNet, and of no other dataset
    assert part.list is None and task.protocol.parts["10"].list is None
    assert task.protocol.parts["1"].list is not None
    assert task.protocol.dataset == "classes"
    assert store.owed(tmp_path / "classes") == 1
    # An official val chooses, with all of its labels
    assert "divided: no --lists, so 6 of 60 labels are drawn" in caplog.messages
    assert (len(divided.splits.train), len(divided.splits.val)) == (6, 18)
    assert not divided.splits.held_out


def test_a_list_that_is_given_is_taken_as_it_is(trees, tmp_path, point, handed_on):
    root = trees("classes", sizes=SIZES)
    lists = tmp_path / "lists"
    lists.mkdir()
    names = ["square/003.png", "circle/000.png", "square/001.png"]
    (lists / "10percent.txt").write_text("".join(f"{name}\n" for name in names))
    how = {"dataset": "classes", "overrides": ("geometry.crop=32",), "lists": lists}
    how["overrides"] += ("geometry.resize=32",)
    finetune.run_semisup(request(SemisupRequest, root, tmp_path, **how), point)
    ((task, part),) = handed_on
    assert list(task.splits.train.paths) == names
    assert len(task.splits.val) == 4 and not task.splits.drawn_labels
    assert task.splits.notes[-1] == "3 labelled images from 10percent.txt"
    assert part.list is None and part.head_over_trunk == 20


def test_finetuning_trains_on_the_seeds_own_part_of_the_images(
    trees, tmp_path, point, handed_on, caplog
):
    """A folder without a val has a part held out by the seed; each trunk is read at its own size."""
    caplog.set_level("INFO", "backbench")
    root = trees("classes", sizes=(("train", 15), ("test", 4)))
    for seed in (0, 3):
        how = {"protocol": "finetune_own", "seed": seed, "out": tmp_path / f"o{seed}"}
        finetune.run(request(FinetuneRequest, root, tmp_path, **how), point)
    (first, part), (task, _) = handed_on
    assert (task.task, task.dataset.name, task.seed) == ("finetune", "classes", 3)
    expected = catalog.load("classes", root, seed=3)
    assert list(task.splits.val.paths) == list(expected.val.paths)
    assert list(first.splits.val.paths) != list(task.splits.val.paths)
    assert part == task.protocol.parts["100"]
    assert (task.own_size, task.geometry.crop) == (32, 32)
    assert task.run == tmp_path / "o3" and task.checkpoints == (point,)
    said = f"{point.name}: read at 32 pixels, its own size (its architecture)"
    assert caplog.messages.count(said) == 2
    assert (tmp_path / "o3" / "manifests" / "classes-val.tsv").exists()
    # Another seed is another run
    how = {"protocol": "finetune_own", "seed": 4, "out": tmp_path / "o3"}
    with pytest.raises(BadInput, match="another run's state"):
        finetune.run(request(FinetuneRequest, root, tmp_path, **how), point)


def test_a_list_of_the_protocols_own_dataset_must_be_given(tmp_path):
    given = request(SemisupRequest, tmp_path, tmp_path)
    said = (
        "--protocol semisup: measures on a published list of imagenet; give --lists DIR"
    )
    with pytest.raises(BadInput, match=said):
        finetune.run_semisup(given)
    with pytest.raises(BadInput, match="--protocol finetune: names no dataset; use a"):
        finetune.run_semisup(request(SemisupRequest, tmp_path, tmp_path, "finetune"))
