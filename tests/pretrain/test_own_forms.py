"""The form in which a method trains on one's own pictures: sizes, batches, budgets, lengths."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from support import tiny_pretraining

from backbench.cli import pretrain
from backbench.errors import BadInput
from backbench.images.crops import Crops
from backbench.pretrain import own, train
from backbench.pretrain.recipe import ViewsConfig
from backbench.requests.pretrain import PretrainRequest


class Pictures:
    """So many pictures of these sides, in turn."""

    def __init__(self, count, *sides):
        self.count = count
        self.sides = sides or (32,)
        self.opened = 0

    def __len__(self):
        return self.count

    def open(self, index):
        self.opened += 1
        side = self.sides[index % len(self.sides)]
        return Image.new("RGB", (side, side + 50))


@pytest.mark.parametrize(
    ("sides", "size"),
    [((32,), 32), ((96,), 96), ((97,), 224), ((500,), 224), ((30, 40, 500), 40)],
)
def test_small_pictures_keep_their_size(sides, size):
    found = Pictures(3000, *sides)
    assert own.usual_size(found) == size
    assert found.opened <= 70  # a few say it
    for count, opened in ((64, 64), (127, 127), (128, 64), (640, 64)):
        found = Pictures(count, *sides)
        own.usual_size(found)
        assert found.opened == opened


def request(method="lorac", **more):
    return PretrainRequest(
        recipe=method, images=Path("/x/mine"), out=Path("/x/run"), **more
    )


def changes(count, size=32, *, method="lorac", width=1.0, epochs=0, **more):
    one = own.request_for(
        request(method, **more), Pictures(count), size, width=width, epochs=epochs
    )
    found = dict(text.partition("=")[::2] for text in one.overrides)
    return one.recipe, found


def test_small_pictures_take_the_small_form_and_others_the_papers():
    assert changes(3000, 96)[0] == "own/lorac"
    assert changes(3000, 97)[0] == "lorac/lorac_imagenet"
    assert own.widths(96) == (0.25, 0.5, 1.0)
    assert own.widths(97) == (1.0,)


@pytest.mark.parametrize(
    ("count", "batch"), [(16, 4), (31, 4), (63, 8), (64, 16), (100_000, 128)]
)
def test_a_batch_is_a_power_of_two_of_at_most_a_fourth(count, batch):
    _, found = changes(count)
    assert found["batch_size"] == str(batch)
    # A queue holds at most half of the pictures, in whole batches
    queue = int(found["method.queue"])
    assert queue % batch == 0
    assert queue <= max(count // 2, batch)


def test_the_run_is_named_after_its_method_and_pictures():
    _, found = changes(100)
    assert found["name"] == '"lorac-mine"'
    assert found["data.dataset"] == '"mine"'
    assert changes(100, method="moco_m")[1]["name"] == '"moco-m-mine"'
    assert changes(100, name="ours")[1]["name"] == '"ours"'


def test_a_width_and_a_length_are_changes_of_the_form():
    _, plain = changes(100)
    assert "arch" not in plain and "epochs" not in plain
    _, found = changes(100, width=0.25, epochs=20)
    assert found["arch"].endswith(',width=0.25"')
    assert (found["epochs"], found["stop_after_epochs"]) == ("20", "null")
    assert float(found["optim.warmup_epochs"]) <= 2
    # What the user says comes last, and so counts
    one = own.request_for(
        request(overrides=("epochs=3",)), Pictures(100), 32, width=1.0, epochs=20
    )
    assert one.overrides[-1] == "epochs=3"


def test_crops_shrink_in_proportion():
    groups = [{"size": 200, "count": 2}, {"size": 50, "count": 6}]
    plain = {"views": {"crops": groups}}
    assert own._crops(plain, 200) == []
    (override,) = own._crops(plain, 96)
    assert (
        override == 'views.crops=[{"size": 96, "count": 2}, {"size": 24, "count": 6}]'
    )


def test_a_run_that_has_begun_keeps_its_form(tmp_path):
    assert own.kept_form(tmp_path) is None
    (tmp_path / "recipe.yaml").write_text("arch: resnet18,width=0.25\nepochs: 30\n")
    assert own.kept_form(tmp_path) == (0.25, 30)
    (tmp_path / "recipe.yaml").write_text("arch: resnet18\nepochs: 7\n")
    assert own.kept_form(tmp_path) == (1.0, 7)


# Budgets of time


@pytest.fixture
def budget(monkeypatch, caplog):
    """budget(seconds, *per_step): the width and the epochs that are chosen for 1,024 pictures."""
    caplog.set_level(logging.INFO, "backbench")

    def chosen(text, *per_step):
        asked = []

        def request_for(request, found, size, *, width, epochs):
            asked.append((width, epochs))
            return SimpleNamespace(recipe="x", width=width)

        def seconds_per_step(config, one):
            return dict(zip(own.WIDTHS, per_step, strict=False))[one.width]

        config = SimpleNamespace(batch_size=256, arch="resnet18")
        monkeypatch.setattr(own, "request_for", request_for)
        monkeypatch.setattr(own, "kept_form", lambda out: None)
        monkeypatch.setattr(train, "seconds_per_step", seconds_per_step)
        monkeypatch.setattr("backbench.pretrain.recipe.overrides_of", lambda one: [])
        monkeypatch.setattr("backbench.recipes.config.load", lambda *_, **__: config)
        pretrain.within_budget(request(budget=text), Pictures(1024), 32)
        return asked[-1]

    return chosen


@pytest.mark.parametrize(
    ("per_step", "chosen"),
    [
        # 1,000 s, of which four fifths train: 4 steps an epoch
        ((1.0, 4.0, 9.0), (0.5, 50)),  # 200 of the narrowest
        ((10.0, 40.0, 90.0), (0.25, 20)),
        ((1.0, 1.5, 4.9), (1.0, 40)),
        ((1.0, 1.5, 5.1), (0.5, 133)),  # 39 of the widest are too few
        (
            (1.0, 1.7, 4.9),
            (0.5, 117),
        ),  # less than thrice enough: it is not asked further
        ((1.6, 2.0, 5.1), (0.5, 100)),
        ((1.7, 2.0, 5.1), (0.25, 117)),
    ],
)
def test_the_widest_trunk_with_enough_epochs_is_taken(budget, per_step, chosen):
    assert budget("1000s", *per_step) == chosen


def test_a_budget_below_an_epoch_is_refused(budget):
    with pytest.raises(
        BadInput, match=r"--budget 100s: one epoch of 1024 pictures takes .* here"
    ):
        budget("100s", 21.0, 22.0, 23.0)
    assert budget("100s", 19.0, 22.0, 23.0) == (0.25, 1)


def test_a_budget_of_epochs_is_taken_as_it_is(budget):
    assert budget("epochs=7") == (1.0, 7)
    assert budget("") == (1.0, 0)


def test_steps_are_not_timed_where_there_is_no_batch(monkeypatch):
    config = SimpleNamespace(batch_size=64, epochs=3)

    class Few(list):
        root = "mine"

    found = Few([1] * 63)
    monkeypatch.setattr(train, "images_of", lambda *_: found)
    monkeypatch.setattr(train, "launch", lambda *_: pytest.fail("it started"))
    with pytest.raises(
        BadInput, match="mine: 63 images are fewer than one batch of 64"
    ):
        train.seconds_per_step(config, request())


# The whole of a form

PLAIN = {
    "arch": "resnet50",
    "batch_size": 1024,
    "method": {"queue": 1000, "groups": 8},
    "optim": {"warmup_epochs": 10},
    "views": {"crops": [{"size": 224, "count": 2}, {"size": 96, "count": 6}]},
}


@pytest.mark.parametrize(
    ("count", "batch", "queue", "groups"),
    [
        (16, 4, 8, 1),
        (400, 64, 192, 8),
        (511, 64, 192, 8),
        (2000, 256, 768, 8),
        (4000, 256, 1000, 8),
        (9, 2, 4, 1),
        (64, 16, 32, 2),
    ],
)
def test_a_form_changes_these_keys_and_no_others(
    monkeypatch, count, batch, queue, groups
):
    monkeypatch.setattr(own.recipes, "find_recipe", lambda name, kind: (name, kind))
    monkeypatch.setattr(own.recipes, "read_recipe", lambda path: PLAIN)
    asked = request("lorac", overrides=("seed=3",))
    same = (
        'name="lorac-mine"',
        'data.dataset="mine"',
        "data.split=train",
        "expected=[]",
        f"batch_size={batch}",
        f"method.queue={queue}",
        f"method.groups={groups}",
    )
    one = own.request_for(asked, Pictures(count), 224, width=1.0, epochs=0)
    assert one.overrides == (*same, "seed=3")
    one = own.request_for(asked, Pictures(count), 32, width=0.5, epochs=30)
    assert one.overrides == (
        *same,
        'arch="resnet50,width=0.5"',
        "epochs=30",
        "stop_after_epochs=null",
        "optim.warmup_epochs=3",
        'views.crops=[{"size": 32, "count": 2}, {"size": 14, "count": 6}]',
        "seed=3",
    )
    one = own.request_for(asked, Pictures(count), 2, width=1.0, epochs=500)
    assert one.overrides[-3:] == (
        "optim.warmup_epochs=10",
        'views.crops=[{"size": 2, "count": 2}, {"size": 1, "count": 6}]',
        "seed=3",
    )


def test_budgets_are_bounded():
    assert own.parse_budget("") == own.Budget()
    for text, seconds in (("90s", 90), ("1.5min", 90), ("0.25h", 900), ("2d", 172800)):
        assert own.parse_budget(text) == own.Budget(seconds=seconds)
    for epochs in (1, own.MOST_EPOCHS):
        assert own.parse_budget(f"epochs={epochs}") == own.Budget(epochs=epochs)
    for epochs in (0, own.MOST_EPOCHS + 1):
        with pytest.raises(BadInput) as error:
            own.parse_budget(f"epochs={epochs}")
        said = f"--budget epochs={epochs}: from 1 to {own.MOST_EPOCHS} epochs"
        assert str(error.value) == said
    for text in ("0h", "0.000s", "10", "x" * 50):
        with pytest.raises(BadInput) as error:
            own.parse_budget(text)
        assert str(error.value) == (
            f"--budget {text[:40]}: a time as 10min, 2h or 1d, or a length as epochs=20"
        )


def test_the_untrained_trunk_is_the_one_that_the_training_begins_with():
    crops = (Crops(size=32, count=1),)
    config = tiny_pretraining.config(
        arch="resnet18,width=0.5",
        stem="cifar",
        zero_init_residual=True,
        seed=7,
        batch_size=16,
        views=ViewsConfig(crops=crops),
    )
    *keys, views = own.untrained(config)
    assert keys == [
        'name="random-test"',
        'arch="resnet18,width=0.5"',
        "stem=cifar",
        "zero_init_residual=true",
        "seed=7",
        'data.dataset="shapes"',
        "batch_size=16",
    ]
    given = json.loads(views.removeprefix("views="))
    assert [(group["size"], group["count"]) for group in given["crops"]] == [(32, 1)]


# Options that go together


def test_times_are_for_one_process_and_one_length_is_given(tmp_path):
    pictures = tmp_path / "mine"
    pictures.mkdir()

    def check(budget="", **more):
        own.check(
            PretrainRequest(
                recipe="lorac",
                images=pictures,
                out=tmp_path / "run",
                budget=budget,
                **more,
            )
        )

    check("10min")
    check("epochs=5", devices=2)
    check(devices=2, nodes=2)
    check(overrides=("epochs=3",))
    check("10min", overrides=("seed=3",))
    for more in ({"devices": 2}, {"nodes": 2}):
        with pytest.raises(BadInput, match=r"^--budget 10min: several processes would"):
            check("10min", **more)
    with pytest.raises(BadInput, match=r"^--budget 10min and epochs=3: both say how"):
        check("10min", overrides=("seed=3", "epochs=3"))
    for out in (pictures, pictures / "a" / "run"):
        with pytest.raises(BadInput, match="lies among the pictures of"):
            own.check(PretrainRequest(recipe="lorac", images=pictures, out=out))
    own.check(
        PretrainRequest(recipe="lorac", images=pictures, out=tmp_path / "mine_run")
    )


def test_sixteen_pictures_are_the_fewest(tmp_path):
    for number in range(16):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    assert len(own.open_images(tmp_path)) == 16
    (tmp_path / "3.png").unlink()
    with pytest.raises(BadInput) as error:
        own.open_images(tmp_path)
    assert str(error.value) == (
        f"--images {tmp_path}: 15 pictures to train on; 16 are needed, and hundreds before anything"
        " is learnt"
    )
