"""What is looked at before a training: each image once, and each way to score once."""

import logging
from types import SimpleNamespace

import pytest

from backbench.detection import lint


@pytest.fixture
def looked(monkeypatch, caplog):
    """looked(turned, **p): what `lint.files` looked at; so many images of train are turned."""
    caplog.set_level(logging.INFO, "backbench")

    def files(turned=0, *, val="mine", aps=("bbox", "segm")):
        done = []

        def check_files(records):
            done.append(("images", len(records)))
            each = [SimpleNamespace(turned=i < turned) for i in range(len(records))]
            return each if records == train.records else [SimpleNamespace(turned=False)]

        def rehearse(split, kind, sigmas):
            done.append((split.name, kind, sigmas))

        train = SimpleNamespace(name="mine", folder="mine/train", records=[1, 2, 3])
        scored = SimpleNamespace(name=val, folder="mine/val", records=[4])
        test = SimpleNamespace(KEYPOINT_OKS_SIGMAS=[0.1])
        monkeypatch.setattr(lint, "training_records", lambda split, task: split.records)
        monkeypatch.setattr(lint.images, "check_files", check_files)
        monkeypatch.setattr(
            lint, "check_shared_images", lambda *_: done.append("shared")
        )
        monkeypatch.setattr(lint.evaluate, "rehearse", rehearse)
        monkeypatch.setattr(lint.voc_ap, "rehearse", lambda split: done.append("voc"))
        task = SimpleNamespace(aps=aps)
        cfg = SimpleNamespace(TEST=test)
        lint.files(SimpleNamespace(train=train, val=scored, task=task, cfg=cfg))
        return done

    return files


def test_every_image_and_every_score_is_tried(looked, caplog):
    pictures = [("images", 3), ("images", 1), "shared"]
    assert looked() == [*pictures, ("mine", "bbox", [0.1]), ("mine", "segm", [0.1])]
    assert "checking 3 + 1 images" in caplog.text
    assert "EXIF" not in caplog.text


def test_vocs_own_score_is_tried_for_vocs_own_sets(looked):
    done = looked(val="voc_2007_test", aps=("bbox",))
    assert done[-1] == "voc"
    assert not any("bbox" in each for each in done)


def test_turned_images_are_told(looked, caplog):
    looked(2)
    said = "mine/train: 2 of 3 images have an EXIF orientation; they are read as shown"
    assert said in caplog.text
    assert "mine/val" not in caplog.text
