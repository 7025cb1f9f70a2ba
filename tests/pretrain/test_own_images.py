"""`pretrain METHOD --images FOLDER`: the form, the budget, what is said, and the table at the end."""

import os
import re
import shutil

import pytest
import torch
from support import own_boxes

from backbench.cli import pretrain, program
from backbench.errors import BadInput
from backbench.pretrain import own, train
from backbench.pretrain.recipe import PretrainConfig, overrides_of
from backbench.recipes import config as recipes
from backbench.requests.parsing import parse
from backbench.requests.pretrain import PretrainRequest
from backbench.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("no_curves")

# A trunk that a test can train
NARROW = "arch=resnet18,width=0.25"


@pytest.fixture(scope="module")
def drawn(shapes):
    """A class folder of three classes with 24 pictures in train and 12 in test, of 24 pixels."""
    folder = shapes(count=36) / "shapes"
    for file in sorted(folder.rglob("*.png")):
        if int(file.stem) >= 24:
            test = folder / "test" / file.parent.name / file.name
            test.parent.mkdir(parents=True, exist_ok=True)
            file.rename(test)
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A folder of YOLO's boxes."""
    folder = tmp_path_factory.mktemp("boxes")
    own_boxes.yolo(folder)
    return folder


def linked(source, folder):
    """Give a test a tree of its own, whose files are those of the one that was drawn once."""
    return shutil.copytree(source, folder, copy_function=os.link)


@pytest.fixture
def pictures(drawn, tmp_path):
    return linked(drawn, tmp_path / "cells")


@pytest.fixture
def flat(pictures, tmp_path):
    """The same pictures without classes."""
    folder = tmp_path / "flat"
    folder.mkdir()
    for file in pictures.rglob("*.png"):
        os.link(file, folder / file.name)
    return folder


@pytest.fixture
def folders(pictures, flat, labelled, tmp_path):
    """A folder with pictures in classes, without any, none at all, and three."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").touch()
    (tmp_path / "few").mkdir()
    for file in sorted(flat.iterdir())[:3]:
        os.link(file, tmp_path / "few" / file.name)
    linked(pictures, tmp_path / "root" / "cifar10")
    linked(labelled, tmp_path / "boxes")
    return tmp_path


def request(method, folder, out, *words):
    found = parse(
        ["pretrain", method, "--images", str(folder), "--out", str(out), *words]
    )
    assert isinstance(found, PretrainRequest)
    return found


def resolved(method, folder, out, size, epochs=3):
    """The recipe that a method's form becomes for the pictures of a folder."""
    asked = request(method, folder, out)
    found = own.open_images(folder)
    one = own.request_for(asked, found, size, width=1.0, epochs=epochs)
    return recipes.load(PretrainConfig, one.recipe, overrides_of(one), kind="pretrain")


@pytest.mark.parametrize(
    "text, budget",
    [
        ("10min", own.Budget(seconds=600)),
        ("2h", own.Budget(seconds=7200)),
        ("1.5h", own.Budget(seconds=5400)),
        ("90s", own.Budget(seconds=90)),
        ("1d", own.Budget(seconds=86400)),
        ("epochs=20", own.Budget(epochs=20)),
        ("", own.Budget()),
    ],
)
def test_a_budget_is_a_time_or_a_number_of_epochs(text, budget):
    assert own.parse_budget(text) == budget


@pytest.mark.parametrize("text", ["10", "min", "0min", "-1h", "epochs=0", "epochs=1e3"])
def test_what_is_no_budget_is_refused_with_an_example(text):
    with pytest.raises(BadInput, match=r"--budget .*(10min|1 to)"):
        own.parse_budget(text)


@pytest.mark.parametrize("method", own.FORMS)
@pytest.mark.parametrize("size", [32, 224])
def test_every_method_has_a_form_for_small_and_for_large_pictures(
    method, size, pictures, tmp_path
):
    config = resolved(method, pictures, tmp_path / "run", size)
    images = len(own.open_images(pictures))
    assert max(group.size for group in config.views.per_view) == size
    assert config.epochs == 3 and config.expected == ()
    assert config.batch_size <= images / 4
    assert config.data.dataset == "cells"
    queue = getattr(config.method, "queue", 0)
    assert queue <= images and queue % config.batch_size == 0


def test_the_length_that_is_said_ends_where_the_recipe_does(pictures, tmp_path, caplog):
    """MIO's schedule spans 1000 epochs, of which it trains 250."""
    caplog.set_level("INFO", "backbench")
    asked = request("mio", pictures, tmp_path / "run")
    found = own.open_images(pictures)
    config = recipes.load(
        PretrainConfig,
        "mio/mio_d_cifar10",
        ["batch_size=18", "data.dataset=cells"],
        kind="pretrain",
    )
    assert (config.epochs, config.stop_after_epochs) == (1000, 250)
    pretrain.tell(asked, config, found, "mio")
    steps = 250 * (len(found) // 18)
    assert f"250 epochs, {steps} steps" in caplog.messages[0]


def test_what_a_form_changes_of_its_paper_is_listed(pictures, tmp_path):
    config = resolved("lorac", pictures, tmp_path / "run", 32)
    changes = own.changed(config, "lorac")
    assert "arch resnet50 -> resnet18" in changes
    assert "optim.name lars -> adam" in changes
    assert "views of 3x224 + 5x96 -> 3x32 pixels" in changes
    paper = recipes.load(PretrainConfig, "lorac/lorac_imagenet", kind="pretrain")
    assert own.changed(paper, "lorac") == []


@pytest.mark.parametrize("name", ["1e5", "yes", "inf", "null", "a: b"])
def test_a_folder_may_have_any_name(name, pictures, tmp_path):
    folder = pictures.rename(tmp_path / name)
    config = resolved("simclr", folder, tmp_path / "run", 24)
    assert config.data.dataset == name and config.name == f"simclr-{name}"


def test_steps_are_timed_and_leave_nothing(pictures, tmp_path, caplog):
    asked = request("simclr", pictures, tmp_path / "run", NARROW)
    found = own.open_images(pictures)
    one = own.request_for(asked, found, 24, width=1.0, epochs=1)
    config = recipes.load(
        PretrainConfig, one.recipe, overrides_of(one), kind="pretrain"
    )
    caplog.set_level("INFO", logger="backbench")
    caplog.clear()
    assert train.seconds_per_step(config, one) > 0
    assert not (tmp_path / "run").exists() and not caplog.text


def test_a_run_that_has_begun_goes_on_as_planned(
    pictures, tmp_path, monkeypatch, caplog
):
    out = tmp_path / "run"
    out.mkdir()
    (out / "recipe.yaml").write_text("arch: resnet18,width=0.5\nepochs: 7\n")
    monkeypatch.setattr(train, "seconds_per_step", None)  # nothing is measured again
    asked = request("lorac", pictures, out, "--budget", "10min")
    caplog.set_level("INFO", logger="backbench")
    _, config = pretrain.within_budget(asked, own.open_images(pictures), 32)
    assert (config.arch, config.epochs) == ("resnet18,width=0.5", 7)
    assert "goes on with its 7 epochs" in caplog.text


def test_the_widest_trunk_with_enough_epochs_is_taken(pictures, tmp_path, monkeypatch):
    """An epoch costs a second at a quarter of the width, and four times as much at each doubling."""
    seconds = {"0.25": 1.0, "0.5": 4.0, "": 16.0}

    def per_step(config, request):
        _, _, width = config.arch.partition(",width=")
        images = len(own.open_images(request.images))
        return seconds[width] / (images // config.batch_size)

    monkeypatch.setattr(train, "seconds_per_step", per_step)
    found = own.open_images(pictures)

    def chosen(budget):
        asked = request("lorac", pictures, tmp_path / "run", "--budget", budget)
        _, config = pretrain.within_budget(asked, found, 32)
        return config.arch, config.epochs

    # 80% of a budget is for the training
    assert chosen("60s") == ("resnet18,width=0.25", 48)
    assert chosen("150s") == ("resnet18,width=0.25", 120)
    assert chosen("250s") == ("resnet18,width=0.5", 50)
    assert chosen("1000s") == ("resnet18", 50)
    with pytest.raises(BadInput, match="one epoch of 24 pictures takes"):
        chosen("1s")


def test_a_training_on_own_pictures_ends_with_the_table(
    pictures, tmp_path, capsys, caplog
):
    out = tmp_path / "run"
    words = ["pretrain", "simclr", NARROW, "--images", str(pictures), "--out", str(out)]
    words += ["--budget", "epochs=1", "--name", "mine"]
    assert program.main(words) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    said = caplog.text
    assert (
        "mine: simclr by own/simclr" in said
        and "changed from lorac/simclr_imagenet" in said
    )
    assert re.search(r"knn/cells/.*@knn-own", printed)
    assert re.search(r"^  mine +\d", printed, re.M)
    assert re.search(r"^  random-mine +\d", printed, re.M)
    # The trunk that it is compared with is the one that it began as
    trained = Checkpoint.load(out / "backbone.safetensors")
    untrained = Checkpoint.load(out / "random" / "backbone.safetensors")
    assert trained.arch == untrained.arch
    drawn = train.build(
        recipes.load(PretrainConfig, out / "recipe.yaml", kind="pretrain"),
        own.open_images(pictures),
    )
    weights = drawn.backbone.state_dict()
    assert all(
        torch.equal(weights[key], value) for key, value in untrained.state_dict.items()
    )
    assert any(
        not torch.equal(trained.state_dict[key], value)
        for key, value in untrained.state_dict.items()
    )
    # The same command recognises what is done
    assert program.main(words) == 0
    assert "already finished" in caplog.text


def test_pictures_without_classes_are_trained_on_and_the_next_command_is_named(
    flat, tmp_path, caplog
):
    out = tmp_path / "run"
    words = ["pretrain", "simclr", NARROW, "--images", str(flat), "--out", str(out)]
    assert program.main([*words, "--budget", "epochs=1"]) == 0
    assert "has no classes to be told apart" in caplog.text
    assert f"backbench evaluate {out / 'backbone.safetensors'}" in caplog.text


@pytest.mark.parametrize(
    "words, said",
    [
        (["moco", "--images", "cells"], "did you mean 'moco_m'?"),
        (["lorac", "--images", "nowhere"], "no such folder; give"),
        (["lorac", "--images", "a_file"], "a_file: is a file, no folder; give"),
        (["lorac", "--images", "boxes"], "alone, as boxes/images/train"),
        (["lorac", "--images", "boxes/images"], "alone, as boxes/images/train"),
        (["lorac", "--images", "cells", "--data", "."], "give one of them"),
        (["lorac", "--images", "cells", "--budget", "soon"], "a time as 10min"),
        (["lorac", "--images", "cells", "--size", "0"], "--size 0: from 1 to 4096"),
        (["supervised", "--images", "flat"], "labels"),
        (["tiny_simclr", "--size", "32", "--data", "."], "belongs to --images"),
        (["tiny_simclr"], "give --data ROOT"),
        (
            ["lorac", "--images", "cells", "--budget", "1h", "--devices", "2"],
            "--budget epochs=N",
        ),
        (
            ["lorac", "--images", "cells", "--out", "cells/run"],
            "lies among the pictures",
        ),
        (
            ["lorac", "epochs=3", "--images", "cells", "--budget", "10min"],
            "give one of them",
        ),
        (["lorac", "--images", "cells", "--out", "cells/../a_file"], "is a file"),
        (["lorac", "--images", "empty"], "no images found"),
        (["lorac", "--images", "few"], "3 pictures to train on"),
        # A dataset's name, on somebody's class folder
        (["lorac", "--images", "root/cifar10"], "known dataset cifar10, and not its"),
    ],
)
def test_wrong_words_get_one_line_and_nothing_is_written(
    words, said, folders, monkeypatch, capsys
):
    monkeypatch.chdir(folders)
    before = sorted(folders.rglob("*"))
    out = [] if "--out" in words else ["--out", "run"]
    assert program.main(["pretrain", *words, *out]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert sorted(folders.rglob("*")) == before


@pytest.mark.parametrize("base", ["demo_random", "lorac/lorac_imagenet", "own/simclr"])
def test_a_recipe_of_ones_own_has_a_shipped_one_as_its_base(base, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: {base}\nname: mine\n")
    mine = recipes.load(PretrainConfig, file, kind="pretrain")
    shipped = recipes.load(PretrainConfig, base, kind="pretrain")
    assert mine.name == "mine"
    assert mine.method == shipped.method and mine.arch == shipped.arch
