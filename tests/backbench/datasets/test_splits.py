"""Lists of images joined, drawn and held out, by hand."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from backbench.datasets import catalog, splits
from backbench.errors import BadInput
from backbench.images.dense import DenseList
from backbench.images.image_list import ArrayList, ImageList, Joined
from backbench.images.multilabel import MultiLabelList


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


def test_joined_lists_keep_what_their_images_have(tmp_path):
    a, b = a_list(tmp_path / "x" / "a", (1, 1)), a_list(tmp_path / "x" / "b", (1, 0))

    def fields(images):
        return (images.root, images.paths, images.labels, images.classes)

    # 1. Rows of arrays
    rows = [
        ArrayList(*fields(part), np.full((len(part), 2, 3, 3), n, np.uint8))
        for n, part in enumerate((a, b), 1)
    ]
    whole = splits.concatenate(*rows)
    assert [whole.array(i)[0, 0, 0] for i in range(3)] == [1, 1, 2]
    assert (whole.labels, list(whole.paths)) == ([0, 1, 0], [*a.paths, *b.paths])
    # 2. Label maps, below one root
    maps = [
        DenseList(*fields(part), tuple(f"{path}.map" for path in part.paths), {0: 0})
        for part in (a, b)
    ]
    whole = splits.concatenate(*maps)
    assert whole.maps == maps[0].maps + maps[1].maps
    assert list(whole.paths) == [*a.paths, *b.paths] and len(whole.labels) == 3
    # 3. Several classes an image
    several = [
        MultiLabelList(*fields(part), tuple(map(str, range(n, n + len(part)))))
        for n, part in enumerate((a, b))
    ]
    whole = splits.concatenate(*several)
    assert whole.marks == ("0", "1", "1") and whole.root == tmp_path / "x"
    assert list(whole.paths) == ["a/cat/0.png", "a/dog/0.png", "b/cat/0.png"]
    # 4. Unlike lists
    mixed = splits.concatenate(a, rows[1])
    assert type(mixed) is Joined
    assert list(mixed.paths) == list(whole.paths) and mixed.root == tmp_path / "x"


def test_labelled_is_of_train_and_val_together(tmp_path):
    whole = a_list(tmp_path, (3, 3))
    digests = set()
    for held in ([0], [5, 1]):
        kept = [i for i in range(6) if i not in held]
        parts = splits.Splits(
            whole.subset(kept), whole.subset(held), whole, held_out=True
        )
        digests.add(parts.labelled)
    lines = sorted(
        f"{path}\t{label}\n" for path, label in zip(whole.paths, whole.labels)
    )
    assert digests == {hashlib.sha256("".join(lines).encode()).hexdigest()}


@pytest.mark.parametrize("kind", ["maps", "marks"])
def test_a_manifest_has_an_images_map_or_mark(tmp_path, kind):
    part = a_list(tmp_path, (1, 1))
    about = (part.root, part.paths, part.labels, part.classes)
    images = (
        DenseList(*about, ("m/0.png", "m/1.png"), {})
        if kind == "maps"
        else MultiLabelList(*about, ("0,1?", ""))
    )
    last = ("m/0.png", "m/1.png") if kind == "maps" else ("0,1?", "")
    wanted = f"cat/0.png\t{last[0]}\ndog/0.png\t{last[1]}\n"
    assert splits.manifest(images) == wanted


@pytest.fixture
def three(tmp_path):
    parts = [a_list(tmp_path / name, (2, 2)) for name in ("train", "val", "test")]
    for part in parts:
        part.root.mkdir()
    return splits.Splits(
        *(replace(p, labels=tuple(p.labels)) for p in parts), held_out=False
    )


def refused(found):
    with pytest.raises(BadInput) as error:
        splits.check("x", found)
    return str(error.value)


def test_what_is_wrong_with_splits_is_said_whole(three, tmp_path):
    splits.check("x", three)
    empty = three.val.subset([])
    assert refused(replace(three, val=empty)) == (
        f"x: the val split is empty ({tmp_path / 'val'}); where val is held out of train, a class"
        " needs two images there"
    )
    assert refused(replace(three, test=three.test.subset([]))) == (
        f"x: the test split is empty ({tmp_path / 'test'}); put images there"
    )
    one = replace(three.train, classes=("cat",), labels=(0,) * 4)
    assert refused(replace(three, train=one)) == (
        f"x: one class alone, 'cat' ({tmp_path / 'train'}); a reading tells classes apart: give it"
        " two or more"
    )
    bare = replace(three.train, classes=(), labels=(-1,) * 4)
    assert refused(replace(three, train=bare)) == (
        f"x: no class folders in {tmp_path / 'train'}; sort the images as"
        f" {tmp_path / 'train'}/<class>/<image>"
    )
    table = replace(bare, root=tmp_path / "none")
    assert refused(replace(three, train=table)) == (
        f"x: the table of train states no classes ({tmp_path / 'none'}); write a column `label` of"
        " numbers or names, or paths as class/file"
    )
    for label in (-1, 2):
        wrong = replace(three.val, labels=(0, 1, label, 0))
        assert refused(replace(three, val=wrong)) == (
            f"x: val image dog/0.png has label {label}; the class list allows 0..1"
        )


def test_unlike_class_lists_are_told_apart(three):
    def said(classes):
        count = len(classes)
        other = replace(three.test, classes=classes, labels=(0, count - 1, 0, 0))
        why = refused(replace(three, test=other)).partition("class lists (")[2]
        return why.partition(")")[0]

    assert said(("dog", "cat")) == "in another order"
    assert said(("cat", "emu")) == "only in test: emu; only in train: dog"
    many = tuple(sorted(("cat", "dog", *"abcdef")))
    assert said(many) == "only in test: a, b, c, d, e and 1 more"
    assert (
        said(tuple(sorted(("cat", "dog", *"abcde")))) == "only in test: a, b, c, d, e"
    )
    assert said(("dog",)) == "only in train: cat"


def test_a_class_that_is_tested_is_learned(three, tmp_path):
    images = a_list(tmp_path, (1, 1, 1), ("ant", "cat", "dog"))
    images = replace(images, labels=tuple(images.labels))
    only = splits.Splits(images.subset([0]), images.subset([0]), images, held_out=True)
    assert splits.unlearned(only) == ["cat", "dog"]
    assert splits.unscored(only) == []
    assert refused(only) == (
        f"x: class 'cat' and 1 more: has test images, and none in train to learn from ({tmp_path});"
        " add some, or remove the class"
    )
    by_val = replace(only, val=images.subset([2]))
    assert refused(by_val).startswith("x: class 'cat': has test images")
    turned = splits.Splits(
        images, images.subset([2]), images.subset([0]), held_out=True
    )
    assert splits.unscored(turned) == ["cat", "dog"]
    splits.check("x", turned)
    tested = splits.InImageNet(((1,), (2,), (3,)))
    alone = splits.Splits(
        images.subset([]), images.subset([]), images, False, imagenet=tested
    )
    splits.check("x", alone)
    assert splits.unlearned(alone) == []
    with pytest.raises(
        BadInput, match=r"^x: has no train images; `backbench ood` tests"
    ):
        splits.refuse_untrainable("x", alone)
    splits.refuse_untrainable("x", turned)


def test_sizes_are_compared_with_the_rows(three):
    sized = catalog.Dataset(name="x", classes=2, sizes=(4, 4, 4), read=None)
    assert catalog.odd_sizes(sized, three) == []
    # What was held out belongs to the official train
    held = replace(three, held_out=True)
    assert catalog.odd_sizes(sized, held) == ["train has 8 images, not 4"]
    assert catalog.odd_sizes(replace(sized, sizes=(8, None, None)), held) == []
    other = replace(sized, classes=3, sizes=(None, 5, 3))
    assert catalog.odd_sizes(other, three) == [
        "val has 4 images, not 5",
        "test has 4 images, not 3",
        "2 classes, not 3",
    ]


def test_names_of_datasets_are_listed_once():
    assert catalog.names("b, a,,b ") == ["b", "a"]
    assert catalog.names("all") == list(catalog.TWELVE)
    with pytest.raises(BadInput, match=r"^--datasets ' , ': give names, or `all`$"):
        catalog.names(" , ")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "cifar10",
            {"multilabel": True},
            "cifar10: has no images of several classes; take one",
        ),
        (
            "voc2007",
            {},
            "voc2007: its images show several classes each, this reading takes",
        ),
        (
            "cifar10",
            {"dense": True},
            "cifar10: has images of classes, this reading takes",
        ),
    ],
)
def test_a_reading_is_told_which_labels_a_set_has(tmp_path, name, options, says):
    with pytest.raises(BadInput) as error:
        catalog.load(name, tmp_path, **options)
    assert str(error.value).startswith(says)


def test_a_list_has_its_images_in_its_order(tmp_path):
    images = a_list(tmp_path, (2, 2))
    names = {"dog/1.png": 4, "cat/0.png": 7}
    assert splits.select(images, names, where="list") == [3, 0]
    for name, what in (
        ("dog/9.png", "is not on disk"),
        ("emu/1.png", "has a label 'emu' outside the class list"),
    ):
        with pytest.raises(BadInput) as error:
            splits.select(images, {"cat/0.png": 1, name: 2}, where="list")
        assert str(error.value) == (
            f"list:2: '{name}' {what} (looked for {tmp_path / name}); a line is class/file.jpg"
        )
    with pytest.raises(BadInput) as error:
        splits.select(images, {"dog/0.png": 1}, where="list")
    assert str(error.value) == (
        "list: no image of 1 classes, 'cat' first; nothing can be learnt of them: list one of each"
    )


def test_a_list_of_lines(tmp_path):
    file = tmp_path / "10percent.txt"
    file.write_bytes("\ufeffa/1.jpg \n\n\tb/2.jpg\n".encode())
    assert splits.read_list(file) == {"a/1.jpg": 1, "b/2.jpg": 3}
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert splits.read_list(file, lines=2, sha256=digest) == {
        "a/1.jpg": 1,
        "b/2.jpg": 3,
    }
    with pytest.raises(BadInput, match=r"\(sha256 or length 2 instead of 3\)"):
        splits.read_list(file, lines=3, sha256=digest)
    file.write_bytes(b" \n")
    with pytest.raises(BadInput, match=f"^{file}: the list is empty; write an image"):
        splits.read_list(file)
