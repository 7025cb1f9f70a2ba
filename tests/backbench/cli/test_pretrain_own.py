"""`pretrain` on pictures of one's own: what is trained and compared, and what is told before."""

import dataclasses
import logging
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from backbench.cli import evaluate, pretrain
from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.pretrain import own, recipe, train
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.options import Outcome
from backbench.requests.pretrain import PretrainRequest

IMAGES = Path("/x/cells")
RUN = Path("/x/run")


def a_request(**more):
    about = {"recipe": "simclr", "images": IMAGES, "out": RUN, **more}
    return PretrainRequest(**about)


class OwnSteps(list):
    """What a training on own pictures does, in order; the trainings are stand-ins."""

    classes = True


@pytest.fixture
def steps(monkeypatch):
    done = OwnSteps()
    found = ["a picture"] * 64
    config = SimpleNamespace(name="its recipe")

    def within_budget(request, pictures, size):
        done.append(("budget", request, pictures, size))
        return dataclasses.replace(request, recipe="own/simclr", name="wanted"), config

    def measure(request):
        done.append(("evaluate", request))
        return Outcome(status=0, document=["rows"])

    monkeypatch.setattr(own, "open_images", lambda folder: found)
    monkeypatch.setattr(own, "usual_size", lambda pictures: 32)
    monkeypatch.setattr(own, "untrained", lambda config: (f"name={config.name}",))
    monkeypatch.setattr(pretrain, "within_budget", within_budget)
    monkeypatch.setattr(pretrain, "tell", lambda *words: done.append(("tell", *words)))
    monkeypatch.setattr(train, "run", lambda request: done.append(("train", request)))
    monkeypatch.setattr(evaluate, "run", measure)
    monkeypatch.setattr(catalog, "is_class_folder", lambda folder: done.classes)
    return done


@pytest.mark.parametrize(("given", "size"), [(None, 32), (64, 64)])
def test_a_trunk_is_compared_with_the_one_that_it_began_as(steps, given, size):
    request = a_request(size=given, accelerator="cpu", workers=2)
    outcome = pretrain.run(request)
    assert outcome.document == ["rows"]
    budget, told, first, second, measured = steps
    assert budget == ("budget", request, ["a picture"] * 64, size)
    trained = dataclasses.replace(request, recipe="own/simclr", name="wanted")
    assert told == ("tell", trained, told[2], ["a picture"] * 64, "simclr")
    assert told[2].name == "its recipe"
    assert first == ("train", trained)
    random = {"recipe": "own/random", "overrides": ("name=its recipe",)}
    out = RUN / "random"
    assert second == ("train", dataclasses.replace(trained, **random, out=out))
    files = (RUN / "backbone.safetensors", out / "backbone.safetensors")
    assert measured == (
        "evaluate",
        EvaluateRequest(
            words=tuple(map(str, files)),
            data=IMAGES,
            out=RUN / "evaluation",
            accelerator="cpu",
            workers=2,
        ),
    )


def test_without_classes_the_command_for_others_is_told(steps, caplog):
    caplog.set_level(logging.INFO, "backbench")
    steps.classes = False
    assert pretrain.run(a_request()) is None
    assert [step[0] for step in steps] == ["budget", "tell", "train", "train"]
    (said,) = caplog.messages
    assert said == (
        "/x/cells: has no classes to be told apart; measure on pictures that have some:"
        " backbench evaluate /x/run/backbone.safetensors /x/run/random/backbone.safetensors"
        " --data FOLDER --out /x/run/evaluation"
    )


def test_a_told_command_quotes_its_folders(steps, caplog):
    caplog.set_level(logging.INFO, "backbench")
    steps.classes = False
    pretrain.run(a_request(out=Path("/x/my run")))
    _, _, command = caplog.messages[0].partition(": backbench ")
    assert shlex.split(command) == [
        "evaluate",
        "/x/my run/backbone.safetensors",
        "/x/my run/random/backbone.safetensors",
        "--data",
        "FOLDER",
        "--out",
        "/x/my run/evaluation",
    ]


def test_a_recipe_on_its_dataset_is_trained_alone(steps):
    request = a_request(images=None, data=Path("/x"))
    assert pretrain.run(request) is None
    assert steps == [("train", request)]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"size": 32}, "--size 32: belongs to --images FOLDER; of a recipe, change a"),
        (
            {"budget": "1h"},
            "--budget 1h: belongs to --images FOLDER; of a recipe, chan",
        ),
        ({"name": "x"}, "--name x: belongs to --images FOLDER; of a recipe, change a"),
        (
            {"recipe": "simclr"},
            "simclr: a method, which trains on pictures of your own; add --images FOLDER",
        ),
        (
            {"data": None},
            "give --data ROOT, the folder with one folder per dataset; or",
        ),
    ],
)
def test_what_a_recipe_does_not_take_is_refused(monkeypatch, more, said):
    looked = []
    monkeypatch.setattr(recipe, "check", looked.append)
    plain = a_request(images=None, data=Path("/x"), recipe="own/simclr")
    pretrain.check(plain)
    assert looked == [plain]
    with pytest.raises(BadInput) as refused:
        pretrain.check(dataclasses.replace(plain, **more))
    assert str(refused.value).startswith(said)


def test_own_pictures_are_looked_at_in_place_of_a_recipe(monkeypatch):
    looked = []
    monkeypatch.setattr(own, "check", looked.append)
    monkeypatch.setattr(recipe, "check", None)
    request = a_request(size=32, budget="1h", name="x")
    pretrain.check(request)
    assert looked == [request]


@pytest.mark.parametrize("changes", [[], ["lr 1 -> 2", "arch a -> b"]])
def test_the_training_is_told_with_what_it_changes(monkeypatch, caplog, changes):
    caplog.set_level(logging.INFO, "backbench")
    monkeypatch.setattr(own, "changed", lambda config, method: changes)
    groups = [SimpleNamespace(size=size) for size in (96, 224, 64)]
    config = SimpleNamespace(
        name="mine",
        arch="resnet18",
        views=SimpleNamespace(per_view=groups),
        trained_epochs=7,
        batch_size=25,
    )
    request = a_request(recipe="own/simclr")
    pretrain.tell(request, config, range(99), "simclr")
    said = (
        "mine: simclr by own/simclr, resnet18 at 224 pixels, on 99 pictures of /x/cells;"
        " 7 epochs, 21 steps"
    )
    more = ["changed from lorac/simclr_imagenet: lr 1 -> 2; arch a -> b"]
    assert caplog.messages == [said, *(more if changes else [])]
