"""Bad input to the commands: exit 2, one line that names the culprit, no traceback, no output."""

import json
import shutil
from types import SimpleNamespace

import pytest

from backbench import cli
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import build_backbone


@pytest.fixture
def backbench(capsys):
    """A command in this process: what it returned and what it said."""

    def command(*arguments):
        status = cli.main([*map(str, arguments)])
        return SimpleNamespace(returncode=status, stderr=capsys.readouterr().err)

    return command


def refused(done, *words):
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert str(word) in last, f"'{word}' is not in: {last}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "random.safetensors"
    trunk = build_backbone("resnet18")
    Checkpoint(arch="resnet18", method="random", state_dict=trunk.state_dict()).save(path)
    return path


@pytest.fixture
def pretrain(backbench):
    def command(root, out, *overrides):
        return backbench("pretrain", "tiny_simclr", *overrides, "--data", root, "--out", out)

    return command


def test_missing_and_empty_image_folder(pretrain, tmp_path):
    refused(pretrain(tmp_path / "nowhere", tmp_path / "run"), tmp_path / "nowhere")
    (tmp_path / "data" / "digits" / "train" / "0").mkdir(parents=True)
    refused(pretrain(tmp_path / "data", tmp_path / "run"), tmp_path / "data" / "digits" / "train")
    assert not list(tmp_path.glob("run/*.safetensors"))


def test_corrupt_image_is_named_and_skipped_only_when_asked(pretrain, tiny_root, tmp_path, caplog):
    shutil.copytree(tiny_root / "digits", tmp_path / "digits")
    victim = next(iter(sorted((tmp_path / "digits" / "train").rglob("*.png"))))
    victim.write_bytes(victim.read_bytes()[:40])
    refused(pretrain(tmp_path, tmp_path / "run"), victim)
    assert not (tmp_path / "run" / "backbone.safetensors").exists()
    done = pretrain(tmp_path, tmp_path / "skipped", "data.skip_corrupt=true", "epochs=1")
    assert done.returncode == 0, done.stderr
    assert str(victim) in caplog.text


def test_out_that_holds_another_run(pretrain, tiny_root, tmp_path):
    assert pretrain(tiny_root, tmp_path / "run", "epochs=1").returncode == 0
    before = (tmp_path / "run" / "backbone.safetensors").read_bytes()
    refused(pretrain(tiny_root, tmp_path / "run", "epochs=1", "seed=7"), tmp_path / "run", "seed")
    assert (tmp_path / "run" / "backbone.safetensors").read_bytes() == before


def test_checkpoint_that_is_a_text_file(backbench, tiny_root, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not weights\n")
    common = ("--data", tiny_root, "--out", tmp_path / "run")
    refused(
        backbench("linear", text, "--datasets", "digits", "--protocol", "knn_demo", *common), text
    )
    refused(backbench("export", text, "--format", "detectron2", "--out", tmp_path / "x.pkl"), text)
    refused(backbench("inspect", text), text)
    assert not (tmp_path / "x.pkl").exists()


def test_coco_json_whose_images_are_missing(backbench, tiny_root, tmp_path, checkpoint):
    shutil.copytree(tiny_root / "scenes", tmp_path / "scenes")
    victim = tmp_path / "scenes" / "train2017" / "000000000002.jpg"
    victim.unlink()
    command = ("detect", "--config-file", "tiny_faster_rcnn_R_18_FPN")
    command += ("--engine", "torchvision", "--data", tmp_path)
    refused(backbench(*command, "--checkpoint", checkpoint, "--out", tmp_path / "run"), victim.name)
    annotations = tmp_path / "scenes" / "annotations" / "instances_train2017.json"
    annotations.write_text(json.dumps({"images": []}))
    refused(
        backbench(*command, "--checkpoint", checkpoint, "--out", tmp_path / "run2"), annotations
    )
