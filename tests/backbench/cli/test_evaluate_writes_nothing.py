"""What `evaluate` refuses of models, lists and the machine leaves nothing behind in --out."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import Image

import backbench
from backbench.cli.program import main
from backbench.errors import BadInput
from backbench.evaluation import models


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("trunk") / "mine.pth"
    torch.save(torchvision.models.resnet18().state_dict(), file)
    return file


def picture(file, number):
    file.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.Generator(np.random.PCG64(number))
    pixels = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)


@pytest.fixture
def folder(tmp_path):
    base = tmp_path / "data" / "mine"
    number = 0
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            for place in range(2):
                number += 1
                picture(base / split / label / f"{split}{place}.png", number)
    return base


def emptied(folder):
    for file in folder.iterdir():
        file.unlink()


def of_texts(file):
    """Write a table of four pictures whose labels are empty texts."""
    rows = []
    for number in range(4):
        picture(file.parent / "one.png", 50 + number)
        data = (file.parent / "one.png").read_bytes()
        image = {"bytes": data, "path": f"{number}.png"}
        rows.append({"image": image, "label": ""})
    (file.parent / "one.png").unlink()
    pq.write_table(pa.Table.from_pylist(rows), file)


WRONG = {
    "a class is missing in test": (
        lambda b: shutil.rmtree(b / "test/dog"),
        "different class lists (only in train: dog)",
    ),
    "a class without images": (
        lambda b: emptied(b / "train/dog"),
        "train/dog: class folder without images",
    ),
    "one class": (
        lambda b: [shutil.rmtree(b / split / "dog") for split in ("train", "test")],
        "mine: one class alone, 'cat'",
    ),
    "a test image in train": (
        lambda b: shutil.copy(b / "test/cat/test0.png", b / "train/cat/x.png"),
        "the test image cat/test0.png is also in training data",
    ),
    "a link that leads nowhere": (
        lambda b: (b / "train/cat/x.png").symlink_to("nowhere.png"),
        "x.png is missing",
    ),
    "a name with a newline": (
        lambda b: picture(b / "train/cat/a\nb.png", 0),
        "holds the control character",
    ),
    "no classes in train": (
        lambda b: [shutil.rmtree(b / "train"), picture(b / "train/one.png", 0)],
        "no class folders in",
    ),
    "a table whose labels are empty texts": (
        lambda b: [shutil.rmtree(b / "train"), of_texts(b / "train.parquet")],
        "the table of train states no classes",
    ),
    "a table that is cut off": (
        lambda b: [
            shutil.rmtree(b / "train"),
            (b / "train.parquet").write_bytes(b"PAR1 and nothing else"),
        ],
        "train.parquet: not readable as parquet",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists_are_refused_before_the_weights_are_kept(
    folder, trunk, tmp_path, bad_input, case
):
    spoil, expected = WRONG[case]
    spoil(folder)
    out = tmp_path / "runs"
    words = ["evaluate", str(trunk), "knn", "--data", str(folder), "--out", str(out)]
    said = bad_input(main(words), expected)
    assert len(said.splitlines()) == 1
    assert not out.exists()


def test_each_model_is_kept_once_and_gone_after_a_refusal(tmp_path):
    class Weights:
        def save(self, file):
            file.parent.mkdir(exist_ok=True)
            file.write_text("new")

    out = tmp_path / "runs"
    files = {out / f"{name}.safetensors": Weights() for name in "abc"}
    with pytest.raises(BadInput), models.kept(out, files):
        assert set(out.iterdir()) == set(files)
        raise BadInput("no")
    assert not out.exists()
    out.mkdir()
    (out / "a.safetensors").write_text("old")
    with models.kept(out, files):
        pass
    assert [file.read_text() for file in files] == ["old", "new", "new"]


@pytest.mark.parametrize("task", ["logreg", "finetune"])
def test_from_python_nothing_is_written_either(folder, trunk, tmp_path, task):
    shutil.rmtree(folder / "test/dog")
    with pytest.raises(BadInput, match="different class lists"):
        backbench.evaluate(trunk, task, data=folder, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_gpu_that_is_not_there(folder, trunk, tmp_path, bad_input, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "runs"
    words = ["evaluate", str(trunk), "knn", "--data", str(folder), "--out", str(out)]
    said = bad_input(main([*words, "--accelerator", "cuda"]), "torch finds no GPU")
    assert len(said.splitlines()) == 1
    assert not out.exists()


def test_an_archive_beside_its_folder(folder, trunk, tmp_path, bad_input):
    """The folder was read in the archive's place, whatever the archive held."""
    archive = folder.with_suffix(".zip")
    archive.write_bytes(b"no archive")
    out = tmp_path / "runs"
    words = ["evaluate", str(trunk), "knn", "--data", str(archive), "--out", str(out)]
    bad_input(main(words), f"--data {archive}: {folder} is beside it", "name that one")
    assert not out.exists()


def test_import_writes_a_checkpoint_under_its_own_ending(trunk, tmp_path, bad_input):
    out = tmp_path / "mine.pth"
    status = main(["import", str(trunk), "--out", str(out)])
    bad_input(status, f"--out {out}: a checkpoint is written as safetensors", "mine.sa")
    assert not out.exists()


def test_import_names_a_row_that_nobody_has_published(trunk, tmp_path, bad_input):
    out = tmp_path / "mine.safetensors"
    words = ["import", str(trunk), "--published", "nobody", "--out", str(out)]
    bad_input(main(words), "no published row 'nobody'; keys look like lorac:1:")
    assert not out.exists()


def cut_in_the_middle(file):
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def test_a_picture_that_breaks_while_features_are_computed(
    folder, trunk, tmp_path, bad_input
):
    """All that was said before stays said; the run folder, in which nothing is, goes."""
    cut = folder / "train/dog/train1.png"
    cut_in_the_middle(cut)
    out = tmp_path / "runs"
    words = [
        "evaluate",
        str(trunk),
        "fewshot",
        "--data",
        str(folder),
        "--out",
        str(out),
    ]
    bad_input(main(words), f"{cut}: corrupt image", "copy it again, or take it out")
    assert not out.exists()
    run = tmp_path / "new" / "run"
    words = ["linear", str(trunk), "--datasets", "mine", "--protocol", "knn_own", "k=1"]
    words += ["--data", str(folder.parent), "--out", str(run)]
    bad_input(main(words), f"{cut}: corrupt image")
    assert not run.parent.exists()
