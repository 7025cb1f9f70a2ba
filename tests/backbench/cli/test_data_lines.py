"""What `data` prints of lists and folders, and how SimCLR's lists are fetched."""

import hashlib
import io
import json
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

from backbench.cli import data, program
from backbench.errors import BadInput
from backbench.images.dense import DenseList
from backbench.images.image_list import ImageList
from backbench.images.multilabel import MultiLabelList
from backbench.recipes import config
from backbench.requests.data import DataCheckRequest


def listed(paths, labels, classes):
    return ImageList(Path("x"), paths, tuple(labels), classes)


def test_what_is_odd_about_a_list():
    classes = ("a", "b", "c", "d")
    whole = listed(["1", "2", "3", "4"], range(4), classes)
    assert data._list_problems("train", whole) == []
    odd = listed(["1", "2", "1", "2", "1"], [0, 3, 0, 3, 0], classes)
    assert data._list_problems("val", odd) == [
        "val has no image of 2 classes, 'b' first",
        "val lists 2 images twice, 1 first",
    ]
    fields = (odd.root, odd.paths, odd.labels, odd.classes)
    # What is difficult alone shows no class
    marks = MultiLabelList(*fields, ("0,1", "3?", "", "1", "0"))
    first, _ = data._list_problems("test", marks)
    assert first == "test has no image of 2 classes, 'c' first"
    maps = DenseList(*fields, ("m",) * 5, {})
    assert data._list_problems("test", maps) == ["test lists 2 images twice, 1 first"]


def test_files_that_no_evaluation_looks_at_are_counted_by_kind(tmp_path):
    for name in ("train/a/1.png", "train/a/n.TXT", "train/b/m.txt", "train/b/note"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "test" / "a").mkdir(parents=True)
    (tmp_path / "test" / "a" / "x.csv").touch()
    assert data._ignored(tmp_path) == [
        "train: 3 files are ignored (2 .txt, 1 without a suffix), a/n.TXT first",
        "test: 1 files are ignored (1 .csv), a/x.csv first",
    ]


@pytest.mark.parametrize(
    ("name", "root", "written"),
    [
        ("some/my pets", "data", "'my pets' --data some"),
        ("pictures", "data", "pictures --data ."),
        ("pictures", "pictures", "pictures --data ."),
    ],
)
def test_a_path_in_place_of_a_name_gets_the_command(
    tmp_path, monkeypatch, name, root, written
):
    monkeypatch.chdir(tmp_path)
    for folder in ("some/my pets/cat", "pictures/cat"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(BadInput) as error:
        data._check(DataCheckRequest(name=name, data=Path(root)), [])
    assert f"`backbench data check {written}`" in str(error.value)


def test_files_of_an_undivided_folder_are_counted_too(tmp_path):
    for name in ("a/1.png", "a/2.heic", "b/1.png", "b/2.heic", "labels.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert data._ignored(tmp_path) == [
        "3 files are ignored (1 .csv, 2 .heic), a/2.heic first"
    ]


def test_files_that_tell_of_the_dataset_are_no_problem(tmp_path):
    for name in ("a/1.png", "b/1.png", "README.md", "LICENSE", "backbench-splits.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert data._ignored(tmp_path) == []
    # In a class folder they are what nobody expects
    (tmp_path / "a" / "readme.txt").touch()
    assert data._ignored(tmp_path) == [
        "1 files are ignored (1 .txt), a/readme.txt first"
    ]


def test_images_that_cannot_be_read_are_told_one_by_one(tmp_path):
    for name in ("1.png", "3.png"):
        Image.new("RGB", (4, 6)).save(tmp_path / name)
    (tmp_path / "2.png").write_bytes(b"x")
    images = ImageList(tmp_path, ("1.png", "2.png", "3.png", "4.png"), (0,) * 4, ("a",))
    looks, wrong = data._read_all("x", images)
    assert [look and look.size for look in looks] == [(4, 6), None, (4, 6), None]
    assert len(wrong) == 2
    assert wrong[0].startswith(f"{tmp_path / '2.png'}: corrupt image")
    assert wrong[1] == f"{tmp_path / '4.png'}: no such image file"


@pytest.mark.parametrize(
    ("shared", "refused", "said"),
    [
        ({}, set(), "not written, no test image is a copy of a labelled one"),
        (
            {"b": "x", "a": "y"},
            set(),
            "2 test images that are copies; `backbench rescore RUNS --list {file}` scores without"
            " them",
        ),
        (
            {"b": "x", "a": "y"},
            {"a"},
            "2 test images that are copies, 1 of them byte for byte, which no evaluation takes;"
            " remove those that it lists from test, then measure",
        ),
    ],
)
def test_the_list_of_copies(tmp_path, capsys, shared, refused, said):
    file = tmp_path / "copies.tsv"
    data._write_copies(file, shared, refused)
    assert capsys.readouterr().out == f"{file}: {said.format(file=file)}\n"
    assert file.exists() == bool(shared)
    if shared:
        assert file.read_text() == "a\tcopy\ty\nb\tcopy\tx\n"


def test_boxes_have_no_copies_to_score_without(tmp_path, bad_input):
    folder = tmp_path / "coco" / "annotations"
    folder.mkdir(parents=True)
    about = {"images": [{"file_name": "1.jpg"}], "annotations": [], "categories": []}
    (folder / "captions_val2017.json").write_text(json.dumps(about))
    (tmp_path / "coco" / "val2017").mkdir()
    Image.new("RGB", (4, 6)).save(tmp_path / "coco" / "val2017" / "1.jpg")
    words = ["data", "check", "coco", "--data", str(tmp_path)]
    assert program.main(words) == 0
    file = tmp_path / "copies.tsv"
    status = program.main([*words, "--copies", str(file)])
    said = (
        f"--copies {file}: coco is boxes, and `rescore` scores classes; leave --copies"
    )
    bad_input(status, said)


def test_the_table_of_datasets(tmp_path, capsys):
    for split, count in (("train", 3), ("test", 2)):
        for name in "ab":
            (tmp_path / "mine" / split / name).mkdir(parents=True)
            for n in range(count):
                Image.new("L", (2, 2)).save(
                    tmp_path / "mine" / split / name / f"{n}.png"
                )
    assert program.main(["data", "list", "--data", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "name                  classes     train    val   test  metric         on disk  licence"
    assert lines[0] == head
    cifar = next(line for line in lines if line.startswith("cifar10 "))
    assert cifar.split()[:7] == [
        "cifar10",
        "10",
        "50000",
        "held",
        "10000",
        "top1",
        "missing",
    ]
    after = lines[lines.index(cifar) + 1]
    assert after.startswith(f"{'':<21} get ") and after.endswith(
        f"in {tmp_path / 'cifar10'}"
    )
    # A val that is held out of train is there by now
    mine = next(line for line in lines if line.startswith("mine "))
    assert mine.split() == ["mine", "2", "4", "2", "4", "top1", "found", "your", "own"]
    assert program.main(["data", "list", "--data", str(tmp_path / "x")]) == 0
    said = capsys.readouterr().out
    missing = f"--data {tmp_path / 'x'}: no such folder, so every dataset is missing"
    assert missing in said.splitlines()


@pytest.fixture
def lists(monkeypatch):
    """What the network has of the lists, and what was asked of it."""
    parts = config.read_recipe(config.find_recipe("semisup", "transfer"))["parts"]
    content = {percent: f"list {percent}\n".encode() for percent in parts}
    for percent, part in parts.items():
        digest = hashlib.sha256(content[percent]).hexdigest()
        part["list"] = {"sha256": digest, "lines": int(percent)}
    asked = []

    def urlopen(url, timeout):
        asked.append(url)
        percent = url.rpartition("/")[2].removesuffix("percent.txt")
        if content[percent] is None:
            raise OSError("no network")
        return io.BytesIO(content[percent])

    monkeypatch.setattr(config, "read_recipe", lambda _: {"parts": parts})
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return content, asked


def test_lists_are_fetched_once(lists, tmp_path, capsys):
    content, asked = lists
    words = ["data", "fetch-splits", "--out", str(tmp_path / "lists")]
    assert program.main(words) == 0
    files = {p: tmp_path / "lists" / f"{p}percent.txt" for p in content}
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: {percent} lines" for percent, file in files.items()
    ]
    assert [url.rpartition("/")[2] for url in asked] == [f.name for f in files.values()]
    assert {p: file.read_bytes() for p, file in files.items()} == content
    # One that is there and another that was changed
    asked.clear()
    first, *others = files.values()
    for file in others:
        file.write_text("changed")
    assert program.main(words) == 0
    assert [url.rpartition("/")[2] for url in asked] == [file.name for file in others]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{first}: there already, {next(iter(files))} lines"
    assert {p: file.read_bytes() for p, file in files.items()} == content


def test_a_list_that_is_not_the_published_one_is_not_written(
    lists, tmp_path, bad_input
):
    content, _ = lists
    first, second = content
    content[second] = b"another"
    words = ["data", "fetch-splits", "--out", str(tmp_path)]
    status = program.main(words)
    bad_input(status, "not the published list (sha256 differs); nothing was written")
    assert [file.name for file in tmp_path.iterdir()] == [f"{first}percent.txt"]
    content[second] = None
    file = tmp_path / f"{second}percent.txt"
    said = f"cannot be fetched (no network); copy the file to {file} by other means"
    bad_input(program.main(words), said)
