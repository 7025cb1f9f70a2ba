"""One look at a dataset's files: all there, none in two splits, by name or by content."""

import os
from collections import Counter
from dataclasses import replace

import pytest

from backbench.datasets import splits, walk
from backbench.errors import BadInput
from backbench.images.image_list import scan_folder


@pytest.fixture
def three(tmp_path):
    """Three splits of two classes with three files each, no two alike, all of one size."""
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(3):
                (tmp_path / part / name / f"{i}.png").write_bytes(f"{part:5} {name}{i}".encode())
    parts = [scan_folder(tmp_path / part) for part in ("train", "val", "test")]
    return splits.Splits(*parts, held_out=False)


def refuse_shared(found):
    walk.refuse_shared("x", found, walk.look("x", found))


def test_a_file_in_two_splits_is_refused_also_through_a_link(three, tmp_path):
    walk.look("x", three)
    with pytest.raises(BadInput, match="is in train and in test"):
        walk.look("x", replace(three, test=three.train))
    link = three.test.file(0)
    link.unlink()
    link.symlink_to(three.train.file(4))
    with pytest.raises(BadInput, match=r"a/0.png is in train and in test"):
        walk.look("x", three)
    (tmp_path / "again").symlink_to(tmp_path / "val")
    with pytest.raises(BadInput, match=r"a/0.png is in val and in test"):
        walk.look("x", replace(three, test=scan_folder(tmp_path / "again")))


def test_images_that_a_deduplicator_has_linked_are_two(three):
    """Official sets hold such pairs; in one's own, their content is refused."""
    copy = three.test.file(0)
    copy.unlink()
    copy.hardlink_to(three.train.file(4))
    walk.look("x", three)
    with pytest.raises(BadInput, match="is also in training data"):
        refuse_shared(three)


def test_a_link_to_a_file_of_no_split_is_a_file_with_its_size(three, tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"0123456789" * 7)
    three.val.file(2).unlink()
    three.val.file(2).symlink_to(tmp_path / "elsewhere")
    assert list(walk.look("x", three)["val"]) == [8, 8, 70, 8, 8, 8]


@pytest.mark.parametrize("instead", [None, "a folder", "a dangling link"])
def test_a_missing_file_is_named(three, instead):
    for index in (1, 3):
        three.test.file(index).unlink()
    if instead == "a folder":
        three.test.file(1).mkdir()
    if instead == "a dangling link":
        three.test.file(1).symlink_to("nowhere")
    with pytest.raises(BadInput, match=r"test/a/1.png is missing \(2 of 6 images are\)"):
        walk.look("x", three)


def test_a_copied_test_image_is_found(three):
    refuse_shared(three)
    three.test.file(5).write_bytes(three.val.file(1).read_bytes())
    message = r"the test image b/2.png is also in training data as a/1.png; remove"
    with pytest.raises(BadInput, match=message):
        refuse_shared(three)
    three.test.file(0).write_bytes(three.train.file(3).read_bytes())
    three.test.file(4).write_bytes(three.train.file(3).read_bytes())
    message = r"the test image a/0.png is also in training data as b/0.png and 1 more; remove"
    with pytest.raises(BadInput, match=message):
        refuse_shared(three)


def test_files_of_one_size_are_read_once_and_only_they(three, monkeypatch):
    """Of 18 files of one size the ends are read once each, however many partners each has."""
    read = Counter()
    ends = walk._ends

    def counted(images, index):
        read[images.file(index)] += 1
        return ends(images, index)

    monkeypatch.setattr(walk, "_ends", counted)
    three.train.file(0).write_bytes(b"of another size")
    sizes = walk.look("x", three)
    assert not walk.shared_content(three.test, sizes["test"], three.train, sizes["train"])
    wanted = {three.test.file(i) for i in range(6)} | {three.train.file(i) for i in range(1, 6)}
    assert read == Counter(wanted)


def test_equal_ends_are_not_yet_equal_files(three):
    for images, middle in ((three.test, b"x"), (three.train, b"y")):
        images.file(0).write_bytes(b"0" * 5000 + middle + b"1" * 5000)
    refuse_shared(three)


def test_every_file_is_asked_once(three, monkeypatch):
    asked = Counter()
    stat = os.stat

    def counted(path, *args, **kwargs):
        asked[str(path)] += 1
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", counted)
    walk.look("x", three)
    for _, images in three.items():
        assert {asked[str(images.file(i))] for i in range(len(images))} == {1}
