"""What a training decides beside its steps: what is due, what is waited for, what names a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import tiny_pretraining

from backbench.errors import BadInput
from backbench.images.crops import Crops
from backbench.parallel import loading
from backbench.pretrain import train
from backbench.pretrain.recipe import Data, ViewsConfig
from backbench.pretrain.train import Training


def test_a_state_is_due_after_minutes_at_long_epochs_and_at_the_end():
    config = tiny_pretraining.config(save_minutes=2.0)
    training = SimpleNamespace(steps_per_epoch=5, last=12, config=config)

    def due(done, age):
        return Training.state_is_due(training, done, age)

    assert due(12, 0)
    assert not due(7, 120)
    assert due(7, 120.1)
    assert not due(10, 30)
    assert due(10, 30.1)
    assert not due(9, 30.1) and not due(11, 30.1)


@pytest.mark.parametrize(
    ("every", "scored"),
    [(0, []), (1, [5, 10, 15, 20, 25]), (2, [10, 20, 25]), (9, [25])],
)
def test_a_knn_score_is_due_every_so_many_epochs_and_at_the_end(
    monkeypatch, every, scored
):
    written = []
    asked = []

    def knn(found, views, device, workers):
        asked.append((found, device, workers))
        return lambda backbone, stop: (backbone, stop)

    monkeypatch.setattr(train.monitor, "KnnScore", knn)
    training = SimpleNamespace(
        config=tiny_pretraining.config(knn_every=every),
        steps_per_epoch=5,
        last=25,
        first=0,
        found="pictures",
        workers=3,
        method=SimpleNamespace(backbone="trunk"),
        fabric=SimpleNamespace(global_rank=0, device="cpu"),
        record=SimpleNamespace(
            has_knn=True,
            paused=torch.no_grad,
            knn=lambda score, **place: written.append((score, place)),
        ),
    )
    for done in range(0, 26, 5):
        Training.score_neighbours(training, done, "stop")
    assert written == [
        (("trunk", "stop"), {"done": done, "epoch": done // 5 - 1}) for done in scored
    ]
    assert asked == [("pictures", "cpu", 3)] * len(scored)
    # A run that continues there has the score, unless it was stopped before; one rank scores
    written.clear()
    training.first = 25
    Training.score_neighbours(training, 25, None)
    training.record.has_knn = False
    training.fabric.global_rank = 1
    Training.score_neighbours(training, 25, None)
    assert written == []
    training.fabric.global_rank = 0
    Training.score_neighbours(training, 25, None)
    assert len(written) == bool(scored)


def test_a_cpus_losses_are_read_in_every_step_and_a_gpus_with_the_rows():
    read = []

    def first_not_finite():
        read.append("read")

    def agreed(bad):
        return (bad,)

    training = SimpleNamespace(
        recent=SimpleNamespace(first_not_finite=first_not_finite),
        agree=SimpleNamespace(any=agreed),
        fabric=SimpleNamespace(device=torch.device("cpu")),
    )
    Training.refuse_not_finite(training, 3, False)
    assert len(read) == 1
    training.fabric.device = torch.device("cuda")
    Training.refuse_not_finite(training, 3, False)
    assert len(read) == 1
    Training.refuse_not_finite(training, 3, True)
    assert len(read) == 2
    # A rank that found nothing ends with the one that did
    training.agree.any = lambda bad: (True,)
    training.loss_failure = lambda bad, step: BadInput(f"{bad} {step}")
    with pytest.raises(BadInput, match="None 3"):
        Training.refuse_not_finite(training, 3, True)


@pytest.mark.parametrize(
    ("asked", "cores", "workers"), [(0, 4, 0), (9, 4, 9), (None, 4, 4), (None, 8, 6)]
)
def test_workers_are_those_asked_for_or_at_most_one_a_core(
    monkeypatch, asked, cores, workers
):
    monkeypatch.setattr(loading, "cores", lambda devices: cores * devices // 2)
    config = tiny_pretraining.config(data=Data(dataset="shapes", workers=6))
    request = SimpleNamespace(workers=asked, devices=2)
    assert train.loader_workers(config, request) == workers


def test_images_make_at_least_one_batch():
    config = tiny_pretraining.config(batch_size=8)

    class SomePictures(list):
        root = Path("here")

    train.refuse_too_few(config, SomePictures(range(8)))
    with pytest.raises(BadInput) as error:
        train.refuse_too_few(config, SomePictures(range(7)))
    assert str(error.value) == (
        "here: 7 images are fewer than one batch of 8; set batch_size to at most 7"
    )
    # Without a step there is no batch
    train.refuse_too_few(tiny_pretraining.config(epochs=0), SomePictures())


def test_images_are_a_dataset_of_root_or_a_folder_of_ones_own(monkeypatch):
    monkeypatch.setattr(train.own, "open_images", lambda folder: ("own", folder))
    monkeypatch.setattr(train.catalog, "open_split", lambda *where: where)
    config = tiny_pretraining.config(data=Data(dataset="shapes", split="val"))

    def images_of(images, data):
        return train.images_of(SimpleNamespace(images=images, data=data), config)

    assert images_of("pictures", "root") == ("own", "pictures")
    assert images_of(None, "root") == ("root", "shapes", "val")
    with pytest.raises(
        BadInput, match=r"^give --data ROOT, the folder with one folder per"
    ):
        images_of(None, None)


def test_how_a_run_is_fed_and_watched_does_not_name_it():
    crops = (Crops(size=16), Crops(size=16, gray_first=True))
    plain = tiny_pretraining.config(views=ViewsConfig(crops=crops))
    named = train.what_decides(plain)
    watched = {"save_minutes": 9.0, "log_every": 3, "knn_every": 2}
    watched |= {"probe": {"a": "b"}, "expected": ("x",)}
    watched["data"] = Data(dataset="shapes", workers=5)
    other = tiny_pretraining.config(views=ViewsConfig(crops=crops), **watched)
    assert train.what_decides(other) == named
    assert not {"save_minutes", "log_every", "knn_every", "probe", "expected"} & set(
        named
    )
    assert "workers" not in named["data"]
    # Where colours turn gray is named where it is not as it always was
    first, second = named["views"]["crops"]
    assert "gray_first" not in first
    assert second["gray_first"] is True
    for change in ({"batch_size": 16}, {"seed": 1}, {"data": Data(dataset="other")}):
        assert train.what_decides(tiny_pretraining.config(**change)) != named


def test_the_origin_of_a_checkpoint_is_told():
    config = tiny_pretraining.config(expected=("lorac:1:lorac:resnet50:200",))
    found = SimpleNamespace(
        paths=("a", "b", "c"), labels=(0, 1, 1), classes=("x", "y"), array=no_image
    )
    listed = type("Listed", (SimpleNamespace,), {"__len__": lambda self: 3})
    about = train.provenance(config, listed(**vars(found)), 4, torch.device("cpu"))
    assert about["name"] == "test"
    assert about["processes"] == 4
    assert about["expected"] == ["lorac:1:lorac:resnet50:200"]
    assert about["recipe"]["batch_size"] == 8
    fingerprint = about["data"].pop("fingerprint")
    assert about["data"] == {
        "dataset": "shapes",
        "split": "train",
        "images": 3,
        "classes": 2,
    }
    assert len(fingerprint) == 12 and int(fingerprint, 16)
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"].keys() == {"backbench", "torch", "torchvision", "python"}
    assert about["device"]


def no_image(index):
    raise BadInput("no image")
