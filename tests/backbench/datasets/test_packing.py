"""Which images of a split `data pack` writes into which archive."""

import itertools
import tarfile
import zipfile

import pytest
from support.layouts import class_folder

from backbench.datasets import packing


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
