"""Which images of a split `data pack` writes into which archive."""

import itertools
import tarfile
import zipfile

import pytest
from support.layouts import class_folder

from backbench.datasets import packing
from backbench.errors import BadInput


@pytest.fixture
def alike(tmp_path):
    """A dataset whose files have 1,000 bytes each: five for train, five for test."""
    root = tmp_path / "data"
    class_folder(root / "own", classes=("cat",), per=5)
    for file in (root / "own").rglob("*.jpg"):
        data = file.read_bytes()
        # What stands behind a JPEG's end is no part of the picture
        file.write_bytes(data + bytes(1000 - len(data)))
    return root


def names_in(file):
    if file.suffix == ".zip":
        return zipfile.ZipFile(file).namelist()
    with tarfile.open(file) as tar:
        return tar.getnames()


@pytest.mark.parametrize(
    ("kind", "largest", "counts"),
    [
        ("tar", 500, [1, 1, 1, 1, 1]),
        ("tar", 1999, [1, 1, 1, 1, 1]),
        ("tar", 2000, [2, 2, 1]),
        ("zip", 3999, [3, 2]),
        ("zip", 5000, [5]),
    ],
)
def test_an_archive_is_as_large_as_it_may_be(alike, monkeypatch, kind, largest, counts):
    monkeypatch.setattr(packing, "LARGEST_FILE", largest)
    out = alike.parent / "out" / "own"
    packing.pack("own", alike, kind, out)
    for split in ("train", "test"):
        files = sorted(out.glob(f"{split}-*.{kind}"))
        assert [file.name for file in files] == [
            f"{split}-{number:05}.{kind}" for number in range(len(counts))
        ]
        names = [names_in(file) for file in files]
        assert [len(each) for each in names] == counts
        # In the order of the list, each once
        listed = list(itertools.chain.from_iterable(names))
        assert listed == [f"cat/{number:03d}.jpg" for number in range(5)]


@pytest.mark.parametrize(
    ("name", "files", "says"),
    [
        (
            "cifar10",
            ["cifar-10-batches-py/batches.meta"],
            "neither class folders nor con",
        ),
        ("own", ["cat/1.jpg"], "one class folder alone, 'cat'; expected"),
        ("gone", [], "no such folder; expected"),
    ],
)
def test_what_has_no_class_folders_is_not_packed(tmp_path, name, files, says):
    for file in files:
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).touch()
    with pytest.raises(BadInput, match=f"^{tmp_path / name}: {says}"):
        packing.pack(name, tmp_path, "tar", tmp_path.parent / "out")


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_an_undivided_dataset_is_packed_once_and_goes_on(alike, capsys, kind):
    out = alike.parent / "out" / "pets"
    (alike / "own" / "test" / "cat").rename(alike / "own" / "dog")
    (alike / "own" / "train" / "cat").rename(alike / "own" / "cat")
    for split in ("train", "test"):
        (alike / "own" / split).rmdir()
    packing.pack("own", alike, kind, out)
    said = f"own images: 10 images in {out}, the same list"
    assert capsys.readouterr().out.splitlines() == [said]
    files = sorted(p.relative_to(out).as_posix() for p in out.rglob("*.*"))
    if kind == "zip":
        assert files == ["images-00000.zip"]
    else:
        assert files == [
            f"{name}/{n:03d}.jpg" for name in ("cat", "dog") for n in range(5)
        ]
    # What is there is not written again
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.*")}
    packing.pack("own", alike, kind, out)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.*")} == before


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ("zip", "tar", "test-00000.zip"),
        ("tar", "folder", "test-00000.tar"),
        ("folder", "zip", "test"),
    ],
)
def test_nothing_is_written_beside_another_form(alike, first, second, named):
    """Each split would be there twice, and the folder could not be read any more."""
    out = alike.parent / "out" / "own"
    packing.pack("own", alike, first, out)
    before = sorted(out.rglob("*"))
    with pytest.raises(BadInput, match=f"holds '{named}', and '{second}'"):
        packing.pack("own", alike, second, out)
    assert sorted(out.rglob("*")) == before
    packing.pack("own", alike, first, out)
