"""Splits are pure functions of paths and seed; checks refuse by name."""

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import pytest

from backbench.datasets import splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList


def image_list(counts, root="/data"):
    paths = [f"{name}/{i:03d}.png" for name, n in counts.items() for i in range(n)]
    labels = [label for label, n in enumerate(counts.values()) for _ in range(n)]
    return ImageList(Path(root), tuple(paths), tuple(labels), tuple(counts))


def test_hold_out_is_a_fifth_of_each_class_rounded_half_up():
    images = image_list({"a": 10, "b": 12, "c": 13, "d": 1, "e": 2, "f": 3})
    train, val = splits.hold_out(images)
    counts = [sum(images.labels[i] == label for i in val) for label in range(6)]
    assert counts == [2, 2, 3, 0, 1, 1]
    assert sorted(train + val) == list(range(len(images)))


def test_hold_out_does_not_depend_on_the_order_of_the_files():
    images = image_list({"a": 25, "b": 40})
    order = list(range(65))
    random.Random(3).shuffle(order)
    mixed = images.subset(order)
    for seed in (0, 1):
        one = {images.paths[i] for i in splits.hold_out(images, seed)[1]}
        other = {mixed.paths[i] for i in splits.hold_out(mixed, seed)[1]}
        assert one == other
    assert splits.hold_out(images, 0) != splits.hold_out(images, 1)


def test_hold_out_is_what_it_was():
    """The first hold-out files, fixed: a change here would silently give everyone another
    validation set."""
    images = image_list({"a": 10})
    expected = sorted(
        range(10), key=lambda i: hashlib.sha256(f"0 a/{i:03d}.png".encode()).digest()
    )[:2]
    assert splits.hold_out(images)[1] == sorted(expected)


def test_draw_is_without_replacement_and_names_a_small_class():
    images = image_list({"a": 31, "b": 35})
    chosen, rest = splits.draw(images, 30, 0)
    assert len(set(chosen)) == 60 and len(rest) == 6 and not set(chosen) & set(rest)
    with pytest.raises(BadInput, match="needs 32 images of class 'a', found 31"):
        splits.draw(images, 32, 0)


def make(tmp_path, part, counts, base=0):
    images = image_list(counts, tmp_path / part)
    for i, path in enumerate(images.paths):
        file = images.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"{part} {base + i}".encode())
    return images


def three(tmp_path):
    counts = {"a": 3, "b": 3}
    parts = (make(tmp_path, part, counts) for part in ("train", "val", "test"))
    return splits.Splits(*parts, False)


def test_check_refuses_labels_outside_the_list(tmp_path):
    found = three(tmp_path)
    splits.check("x", found)
    wrong = replace(found.test, labels=(0, 1, 2, 0, 1, 1))
    message = r"test image a/002.png has label 2; the class list allows 0..1"
    with pytest.raises(BadInput, match=message):
        splits.check("x", replace(found, test=wrong))


def test_check_refuses_an_empty_split_and_other_classes(tmp_path):
    found = three(tmp_path)
    with pytest.raises(BadInput, match="the val split is empty"):
        splits.check("x", replace(found, val=found.val.subset([])))
    with pytest.raises(BadInput, match="test and train have different class lists"):
        splits.check("x", replace(found, test=replace(found.test, classes=("a", "c"))))


def test_manifest_and_digest(tmp_path):
    found = three(tmp_path)
    splits.write_manifests(tmp_path / "run", "x", found)
    hashes = splits.digests(found)
    text = (tmp_path / "run/manifests/x-test.tsv").read_text()
    assert text.splitlines()[3] == "b/000.png\t1"
    assert hashes["test"] == hashlib.sha256(text.encode()).hexdigest() == splits.digest(found.test)


def test_both_keeps_files_of_two_roots(tmp_path):
    found = three(tmp_path)
    both = found.both()
    assert len(both) == 12 and both.labels == found.train.labels + found.val.labels
    assert both.file(0) == found.train.file(0) and both.file(11) == found.val.file(5)


def test_lists(tmp_path):
    images = make(tmp_path, "train", {"n04235860": 2, "n04239074": 2})
    file = tmp_path / "1percent.txt"
    data = b"n04235860_14959.JPEG\nn04239074_7724.JPEG\n"
    file.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    names = splits.read_list(file, lines=2, sha256=digest)
    first, second = ("n04235860/n04235860_14959.JPEG", "n04239074/n04239074_7724.JPEG")
    paths = (first, "n04235860/x.JPEG", second, "n04239074/y.JPEG")
    named = replace(images, paths=paths)
    assert splits.select(named, names, where="list") == [0, 2]
    with pytest.raises(BadInput, match="not the published list"):
        splits.read_list(file, lines=2, sha256="0" * 64)
    with pytest.raises(BadInput, match="no such list; `backbench data fetch-splits"):
        splits.read_list(tmp_path / "10percent.txt")
    with pytest.raises(BadInput, match="label 'n00000001' outside the class list"):
        splits.select(named, {"n00000001_1.JPEG": 1}, where="list")
    with pytest.raises(BadInput, match=r"list:7: .*is not on disk"):
        splits.select(named, {"n04235860_1.JPEG": 7}, where="list")
    file.write_bytes(data + b"\n" + data)
    with pytest.raises(BadInput, match=r"txt:4: .*is listed twice, first in line 1"):
        splits.read_list(file)
