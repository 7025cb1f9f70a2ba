"""Which files are a dataset's container, by their names alone."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from backbench.containers import finding, scan_parquet_arrow_lmdb
from backbench.errors import BadInput


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


def touch(base, *names):
    for name in names:
        file = base / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def found(base, split="train"):
    container = finding.find(base, split)
    if container is None:
        return None
    return container.kind, [str(file.relative_to(base)) for file in container.files]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tar", ["train.tar"]),
        ("tar", ["train/0.tar", "train/1.tar"]),
        ("tar", ["ILSVRC2012_img_train.tar"]),
        ("tar", ["train-000.tar", "train-001.tar"]),
        ("tar", ["imagenet-train-000.tar"]),
        ("zip", ["train.zip"]),
        ("zip", ["train/a.zip"]),
        ("parquet", ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]),
        ("parquet", ["data/train-00000-of-00001.parquet"]),
        ("parquet", ["default/train/0000.parquet"]),
        ("arrow", ["train.arrow"]),
        ("arrow", ["train/data-00000-of-00001.arrow"]),
        ("lmdb", ["train.lmdb"]),
        ("lmdb", ["train.lmdb/data.mdb"]),
        ("lmdb", ["train_lmdb/data.mdb"]),
        ("tar", ["Train.tar"]),
    ],
)
def test_a_split_has_the_files_that_its_name_is_in(base, kind, names):
    touch(base, *names, "notes.txt", ".train.tar", "cache-train.arrow")
    assert found(base) == (kind, names)
    assert found(base, "test") is None


def test_validation_is_another_word_for_val(base):
    touch(base, "validation.tar", "train.tar")
    assert found(base, "val") == ("tar", ["validation.tar"])


def test_a_class_folder_wins_over_the_archives_that_it_was_unpacked_from(base):
    touch(base, "train/cat/a.png", "train/dog/a.png", "train/cat.tar", "train/dog.tar")
    assert found(base) is None
    touch(base, "ILSVRC2012_img_train.tar")
    assert found(base) is None


@pytest.mark.parametrize("other", ["train.tar", "train.zip", "train/bird.tar"])
def test_a_class_folder_beside_other_archives_is_there_twice(base, other):
    touch(base, "train/cat/a.png", other)
    with pytest.raises(BadInput, match=r"'train' is there twice, .*; move one"):
        finding.find(base, "train")


def test_two_containers_of_a_split_are_there_twice(base):
    touch(base, "train.tar", "train.zip")
    with pytest.raises(BadInput) as error:
        finding.find(base, "train")
    assert f"{base / 'train.tar'} and {base / 'train.zip'}; move one away" in str(
        error.value
    )


@pytest.mark.parametrize("name", ["a.tar", "b.ZIP", "0.parquet", "x.arrow", "data.mdb"])
def test_files_alone_are_a_whole_dataset(base, name):
    touch(base, name, "readme.md")
    assert [file.name for file in finding.whole(base).files] == [name]
    touch(base, "folder/a.png")
    assert finding.whole(base) is None


@pytest.mark.parametrize("ending", [".zip", ".tar", ".parquet"])
def test_an_archive_of_the_datasets_name_is_a_whole_dataset(base, ending):
    file = base.with_name(f"mine{ending}")
    file.touch()
    assert finding.whole(base).files == (file,)
    base.rmdir()
    assert finding.whole(base).files == (file,)
    other = base.with_name("mine.arrow")
    other.touch()
    with pytest.raises(
        BadInput, match=r"the dataset is there twice, .* and .*; move one away"
    ):
        finding.whole(base)


def test_a_folder_of_that_name_or_a_hidden_file_is_no_archive(base):
    base.with_name("mine.zip").mkdir()
    touch(base, ".hidden.zip")
    assert finding.whole(base) is None
    assert finding.described(base) == ""


def test_what_is_there_is_described(base):
    touch(base, "train/0.tar", "train/1.tar", "test.zip")
    said = finding.described(base)
    assert "train: tar, 2 files" in said and "test: zip, 1 files" in said
    assert "; " in said
    whole = base.parent / "other"
    whole.mkdir()
    for name in ("cat", "dog"):
        with tarfile.open(whole / f"{name}.tar", "w") as archive:
            info = tarfile.TarInfo(f"{name}/a.png")
            info.size = 3
            archive.addfile(info, io.BytesIO(b"png"))
    assert finding.described(whole) == "cat.tar: tar, 2 files"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "train.tar.gz",
            "a compressed tar can only be read from its beginning; unpack it",
        ),
        ("train.tgz", "a compressed tar"),
        ("train.beton", "FFCV holds other pixels"),
        ("train.tfrecord-00000-of-00001", "TFRecord is not read"),
        ("train.H5", "HDF5 has no convention for images"),
    ],
)
def test_what_is_not_read_is_said(base, name, why):
    touch(base, name)
    assert finding.refusal(base, "train").startswith(f"{base / name}: {why}")
    assert finding.refused(base / name).startswith(f"{base / name}: {why}")
    assert finding.refused(base / "train.tar") is None


def test_what_is_not_read_counts_beside_the_folder_by_its_name_alone(base):
    touch(base.parent, "others.tar.gz")
    assert finding.refusal(base, "train") is None
    touch(base.parent, "mine.tar.gz")
    assert "mine.tar.gz" in finding.refusal(base, "train")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("cat/a.png", "cat/a.png"),
        ("./cat/a.png", "cat/a.png"),
        ("/home/x/cat/a.png", "a.png"),  # of the machine that wrote it
        ("", "part-0000007.jpg"),
        (None, "part-0000007.jpg"),
        (3, "part-0000007.jpg"),
    ],
)
def test_a_tables_image_has_the_name_that_its_row_keeps(path, name):
    file = Path("data/part.parquet")
    assert scan_parquet_arrow_lmdb._name_of(path, 7, file) == name


def test_a_folder_of_many_images_is_listed_once_however_many_patterns(
    base, monkeypatch
):
    touch(base, *(f"{number}.jpg" for number in range(300)))
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda path: listed.append(path) or scandir(path)
    )
    assert finding.splits_of(base) == []
    assert finding.described(base) == ""
    assert finding.find(base, "train") is None
    assert listed == [base, base, base]


def test_parquet_of_a_split_lies_in_the_one_folder_that_has_it(base):
    touch(base, "a/train/0000.parquet", "b/test/0000.parquet", "c/other/0000.parquet")
    assert found(base) == ("parquet", ["a/train/0000.parquet"])
    assert found(base, "test") == ("parquet", ["b/test/0000.parquet"])
    touch(base, "c/train/0000.parquet")
    with pytest.raises(BadInput, match="holds the same split as"):
        finding.find(base, "train")
