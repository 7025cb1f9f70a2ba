"""Lists of images joined, drawn and held out, by hand."""

import hashlib

import pytest

from backbench.datasets import splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList


def a_list(root, per_class, classes=("cat", "dog")):
    """So many images of each class."""
    paths, labels = [], []
    for label, count in enumerate(per_class):
        paths += [f"{classes[label]}/{i}.png" for i in range(count)]
        labels += [label] * count
    return ImageList(root, paths, labels, classes)


def by_hash(images, label, seed):
    """The paths of a class in the order of sha256 of 'seed path'."""
    own = [path for path, each in zip(images.paths, images.labels) if each == label]
    return sorted(
        own, key=lambda path: hashlib.sha256(f"{seed} {path}".encode()).digest()
    )


@pytest.mark.parametrize("seed", [0, 3])
def test_a_drawn_list_has_its_share_of_each_class(tmp_path, seed):
    images = a_list(tmp_path, (40, 25, 3), ("cat", "dog", "emu"))
    drawn = splits.drawn_list(images, 10, seed)
    expected = {*by_hash(images, 0, seed)[:4], *by_hash(images, 1, seed)[:3]}
    expected |= {*by_hash(images, 2, seed)[:2]}  # one to learn from, one to choose by
    assert set(drawn) == expected
    # In the list's order, each with its line
    in_order = [path for path in images.paths if path in drawn]
    assert list(drawn) == in_order
    assert list(drawn.values()) == list(range(1, len(drawn) + 1))


@pytest.mark.parametrize(
    ("counts", "share", "held"),
    [
        ((10, 10), 0.2, (2, 2)),
        ((12, 13), 0.2, (2, 3)),  # 2.4 and 2.6
        ((5, 2), 0.1, (1, 1)),  # one at least
        ((4, 1), 0.5, (2, 0)),  # a single image stays in train
        ((4, 3), 0.99, (3, 2)),  # all but one at most
        ((5, 5), 0.5, (3, 3)),  # half up
    ],
)
def test_what_is_held_out_of_each_class(tmp_path, counts, share, held):
    images = a_list(tmp_path, counts)
    train, val = splits.hold_out(images, 7, share=share)
    assert sorted(train + val) == list(range(len(images)))
    assert train == sorted(train) and val == sorted(val)
    for label in (0, 1):
        chosen = {images.paths[i] for i in val if images.labels[i] == label}
        assert chosen == set(by_hash(images, label, 7)[: held[label]])


def test_an_official_val_is_taken_as_it_is(tmp_path):
    train, val, test = (a_list(tmp_path / name, (3, 3)) for name in ("a", "b", "c"))
    official = splits.with_hold_out(train, test, val, notes=("said",))
    assert (official.train, official.val, official.test) == (train, val, test)
    assert (official.held_out, official.notes) == (False, ("said",))
    held = splits.with_hold_out(train, test, seed=1, notes=("said",))
    assert held.held_out and held.notes == ("said",)
    assert len(held.train) + len(held.val) == 6 and len(held.val) >= 1
    assert held.test == test


def test_joined_lists_lie_below_one_folder(tmp_path):
    a = a_list(tmp_path / "x" / "train", (1, 1))
    b = a_list(tmp_path / "x" / "val", (1, 0))
    whole = splits.concatenate(a, b)
    assert whole.root == tmp_path / "x"
    assert list(whole.paths) == ["train/cat/0.png", "train/dog/0.png", "val/cat/0.png"]
    assert list(whole.labels) == [0, 1, 0]
    assert whole.classes == ("cat", "dog")
    same = splits.concatenate(a, a)
    assert same.root == a.root and list(same.paths) == [*a.paths, *a.paths]
    other = a_list(tmp_path, (1, 1), ("cat", "emu"))
    with pytest.raises(BadInput, match="have different class lists"):
        splits.concatenate(a, other)


def test_a_draw_leaves_the_rest(tmp_path):
    images = a_list(tmp_path, (5, 4))
    drawn, rest = splits.draw(images, 2, 0)
    assert sorted(drawn + rest) == list(range(9))
    assert drawn == sorted(drawn) and rest == sorted(rest)
    for label in (0, 1):
        chosen = {images.paths[i] for i in drawn if images.labels[i] == label}
        assert chosen == set(by_hash(images, label, 0)[:2])
    assert splits.draw(images, 4, 0)[1] == [
        i for i in range(5) if images.paths[i] == by_hash(images, 0, 0)[4]
    ]
    with pytest.raises(BadInput, match="shots needs 5 images of class 'dog'"):
        splits.draw(images, 5, 0, what="shots")


def test_a_digest_is_of_paths_and_labels_in_order(tmp_path):
    images = a_list(tmp_path, (1, 1))
    assert splits.manifest(images) == "cat/0.png\t0\ndog/0.png\t1\n"
    expected = hashlib.sha256(splits.manifest(images).encode()).hexdigest()
    assert splits.digest(images) == expected
    turned = images.subset([1, 0])
    assert splits.digest(turned) != expected
    assert splits.by_path(images) is images
    again = splits.by_path(turned)
    assert (list(again.paths), list(again.labels)) == (list(images.paths), [0, 1])


def test_lists_are_written_where_they_changed(tmp_path):
    parts = splits.Splits(
        *(a_list(tmp_path, (n, 1)) for n in (1, 2, 3)), held_out=False
    )
    splits.write_manifests(tmp_path / "run", "mine", parts)
    files = {file.name: file for file in (tmp_path / "run" / "manifests").iterdir()}
    assert set(files) == {"mine-train.tsv", "mine-val.tsv", "mine-test.tsv"}
    assert files["mine-val.tsv"].read_text() == splits.manifest(parts.val)
    before = {name: file.stat().st_mtime_ns for name, file in files.items()}
    files["mine-test.tsv"].write_text("another")
    splits.write_manifests(tmp_path / "run", "mine", parts)
    assert files["mine-test.tsv"].read_text() == splits.manifest(parts.test)
    assert files["mine-train.tsv"].stat().st_mtime_ns == before["mine-train.tsv"]
