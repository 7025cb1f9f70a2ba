"""Tables of containers: what a table must be, one list of classes, names from names and folders."""

from pathlib import Path

import numpy as np
import pytest

from backbench.containers import class_lists, naming
from backbench.containers.container import (
    Container,
    refuse_misspelled,
    split_of,
    splits_among,
)
from backbench.containers.naming import Rows, class_of_label, shared_length
from backbench.containers.spans import SPAN
from backbench.containers.tables import ANY_SIZE, LARGEST_IMAGE, Table
from backbench.errors import BadInput


def table(*names, labels=None, classes=(), **more):
    labels = labels or [-1] * len(names)
    rows = [
        (name, label, (10 * n, 10, 0, 0, 10, 10))
        for n, (name, label) in enumerate(zip(names, labels))
    ]
    return Table.of(rows, classes, **more)


def test_hidden_images_are_left_out_and_counted():
    made = table("a/1.jpg", ".x/2.jpg", "b/3.jpg", "@eaDir/4.jpg", notes=["first"])
    assert made.names == ["a/1.jpg", "b/3.jpg"]
    assert made.spans["start"].tolist() == [0, 20]
    assert made.notes == ("first", "2 hidden images passed over")
    assert table("a/1.jpg", notes=["first"]).notes == ("first",)


def test_a_table_is_kept_as_it_is(tmp_path):
    made = table("a/1.jpg", "ü/2.jpg", labels=[1, -1], classes=["x", "y"], by_text=True)
    (tmp_path / "kept.npz").write_bytes(made.dumped())
    kept = Table.loaded(tmp_path / "kept.npz", 20)
    assert (kept.names, kept.classes, kept.by_text) == (made.names, ("x", "y"), True)
    assert kept.labels.tolist() == [1, -1] and kept.labelled
    assert kept.spans.tolist() == made.spans.tolist()
    bare = kept.unlabelled()
    assert bare.labels.tolist() == [-1, -1] and not bare.labelled
    assert (bare.classes, bare.by_text, bare.names) == ((), False, made.names)
    nothing = table()
    (tmp_path / "kept.npz").write_bytes(nothing.dumped())
    assert Table.loaded(tmp_path / "kept.npz", 0).names == []


# file, start, stored, codec, inner, size, block: in a file of 100 bytes
@pytest.mark.parametrize(
    "span",
    [
        (0, 0, 100, 0, 0, 100, 100),
        (0, 100, 0, 0, 0, 0, 0),
        (0, 90, 10, 1, 5, 15, 20),
        (0, 90, 10, 6, 0, 10, LARGEST_IMAGE),
    ],
)
def test_a_span_may_end_with_its_file_and_with_its_block(span):
    Table(["a"], np.array([-1]), np.array([span], SPAN)).check(100)


@pytest.mark.parametrize(
    "span",
    [
        (0, 101, 0, 0, 0, 0, 0),
        (0, 91, 10, 0, 0, 10, 10),
        (0, 2**64 - 5, 10, 0, 0, 10, 10),  # whose end wraps around
        (0, 90, 10, 1, 5, 16, 20),
        (0, 90, 10, 1, 2**32 - 5, 10, 20),
        (0, 90, 10, 7, 0, 10, 10),
        (0, 90, 10, 1, 0, 10, LARGEST_IMAGE + 1),
        (1, 90, 10, 0, 0, 10, 10),
        (0, 90, 10, 0, 0, 9, 10),
    ],
)
def test_a_span_that_is_not_inside_its_file_is_refused(span):
    good = (0, 0, 10, 0, 0, 10, 10)
    spans = np.array([good, span], SPAN)
    with pytest.raises(ValueError, match="an image that is not inside the file"):
        Table(["a", "b"], np.array([-1, -1]), spans).check(100)


def test_columns_are_of_one_length_and_type():
    spans = np.zeros(2, SPAN)
    for names, labels, of_spans in (
        (["a"], np.array([-1, -1]), spans),
        (["a", "b"], np.array([-1]), spans),
        (["a", "b"], np.array([-1, -1]), spans[:1]),
        (["a", "b"], np.array([-1, -1]), np.zeros(2, np.int64)),
    ):
        with pytest.raises(ValueError, match="columns of other types or lengths"):
            Table(names, labels, of_spans).check(ANY_SIZE)


@pytest.mark.parametrize(
    ("name", "classes", "says"),
    [
        ("a/1\n.jpg", (), r"holds the control character '\\n'"),
        ("a/1.jpg", ("x\t",), r"holds the control character '\\t'"),
        ("a/1.jpg", ("x/y",), "the class name 'x/y'"),
        ("a/1.jpg", ("..",), r"the class name '\.\.'"),
        ("/a/1.jpg", (), "the name '/a/1.jpg'"),
        ("a/", (), "the name 'a/'"),
        ("a/../1.jpg", (), r"the name 'a/\.\./1\.jpg'"),
        ("ü" * 148 + "x.jpg", (), "the name 'ü"),  # 301 bytes
    ],
)
def test_a_name_that_no_class_folder_has_is_refused(name, classes, says):
    with pytest.raises(ValueError, match=says):
        table("good/1.jpg", name, classes=("good", *classes))


def test_a_name_may_have_300_bytes():
    assert table("ü" * 148 + ".jpg").names == ["ü" * 148 + ".jpg"]


# One list of classes


FILES = (Path("x/1.parquet"), Path("x/2.parquet"), Path("x/3.parquet"))


def test_texts_of_all_files_make_one_sorted_list():
    tables = [
        table("1.jpg", "2.jpg", labels=[0, 1], classes=["b", "c"], by_text=True),
        table("3.jpg"),
        table("4.jpg", "5.jpg", labels=[1, -1], classes=["c", "a"], by_text=True),
    ]
    joined, names = class_lists.joined(FILES, tables)
    assert names == ("a", "b", "c")
    assert [each.labels.tolist() for each in joined] == [[1, 2], [-1], [0, -1]]
    assert joined[0].classes == joined[2].classes == names


def test_numbers_stand_for_one_list_of_classes():
    one = table("1.jpg", labels=[1], classes=["b", "a"])
    without = table("2.jpg")
    joined, names = class_lists.joined(FILES, [without, one, one])
    assert names == ("b", "a") and joined == [without, one, one]
    other = table("3.jpg", labels=[0], classes=["a", "b"])
    with pytest.raises(BadInput) as refused:
        class_lists.joined(FILES, [without, one, other])
    assert str(refused.value) == (
        "x/3.parquet: its classes are not those of 2.parquet beside it; get both from one source"
    )
    text = table("3.jpg", labels=[0], classes=["b", "a"], by_text=True)
    with pytest.raises(BadInput, match="its classes are not those of"):
        class_lists.joined(FILES, [one, text, without])
    assert class_lists.joined(FILES, [without] * 3)[1] == ()


# Folders above the classes


@pytest.mark.parametrize(
    ("names", "own", "kept"),
    [
        (["x/train/a/1", "x/train/b/2"], "", "a/1"),
        (["train/a/1", "train/a/2"], "", "a/1"),
        (["x/Train/a/1", "x/Train/b/1"], "", "a/1"),
        (["training/a/1", "training/b/1"], "", "a/1"),
        (["train/train/1", "train/train/2"], "", "1"),  # down to the last such word
        (["x/a/1", "x/b/1"], "", "x/a/1"),  # `x` may be a class
        (["x/a/1", "x/b/1"], "x", "a/1"),
        (["x/a/1", "x/1"], "x", "x/a/1"),  # an image directly in it: it is a class
        (["x/y/a/1", "x/y/1"], "x", "y/a/1"),
        (["x/train/1", "x/val/2"], "", "train/1"),  # above splits
        (["x/train/1", "x/other/2"], "", "x/train/1"),
        (["a/1", "b/1"], "", "a/1"),
        (["1", "2"], "1", "1"),
        ([], "x", None),
    ],
)
def test_folders_above_the_classes_are_cut_off(names, own, kept):
    begin = shared_length(names, ("train", "training"), own)
    if kept is None:
        assert begin == 0
    else:
        assert names[0][begin:] == kept
        assert begin == 0 or names[0][begin - 1] == "/"


def rows(tables, stems, *, split="train", listed=None, inside=""):
    files = tuple(Path("x") / f"{stem}.tar" for stem in stems)
    return Rows(Container("tar", files, inside), tables, split, listed or {})


def test_a_tar_file_for_each_class_names_it():
    found = rows([table("1.jpg"), table("b/2.jpg", "b/3.jpg")], ["cat", "dog"])
    assert found.names == ["cat/1.jpg", "b/2.jpg", "b/3.jpg"]
    assert [spans["file"].tolist() for spans in found.spans] == [[0], [1, 1]]
    shards = rows([table("1.jpg"), table("2.jpg")], ["own-train-000", "own-train-001"])
    assert shards.names == ["1.jpg", "2.jpg"]
    alone = rows([table("1.jpg")], ["cat"])
    assert alone.names == ["1.jpg"]
    labelled = rows([table("1.jpg", labels=[3]), table("2.jpg")], ["cat", "dog"])
    assert (labelled.names, labelled.labels) == (["1.jpg", "dog/2.jpg"], [3, -1])


def test_a_split_inside_has_its_own_images_and_listed_labels():
    whole = table(
        "p/train/a/1.jpg", "p/val/b/2.jpg", "p/train/b/3.jpg", "p/trains/4.jpg"
    )
    listed = {"b/3.jpg": 5, "p/train/a/1.jpg": 6, "train/a/1.jpg": 7}
    found = rows([whole], ["p"], inside="train", listed={**listed})
    assert found.names == ["a/1.jpg", "b/3.jpg"]
    assert found.spans[0]["start"].tolist() == [0, 20]
    # By the short name, or else by the whole one
    assert found.labels == [6, 5]
    both = {"a/1.jpg": 1, "p/train/a/1.jpg": 2}
    assert rows([whole], ["p"], inside="train", listed=both).labels == [1, -1]


def test_numbers_are_named_by_the_folders_where_these_agree():
    def named(*pairs, stated=(), every=None):
        names, labels = zip(*pairs)
        found = rows([table(*names, labels=list(labels))], ["x"])
        return dict(class_of_label(found, stated, every))

    assert named(("a/1.jpg", 4), ("b/2.jpg", 2), ("a/3.jpg", 4)) == {4: "a", 2: "b"}
    # Two labels in one folder, two folders with one label, an image outside of folders
    by_number = {4: "4", 2: "2"}
    assert named(("a/1.jpg", 4), ("a/2.jpg", 2)) == by_number
    assert named(("a/1.jpg", 4), ("b/2.jpg", 4), ("c/2.jpg", 2)) == by_number
    assert named(("a/1.jpg", 4), ("2.jpg", 2)) == by_number
    assert named(("a/1.jpg", -1), ("b/2.jpg", -1)) == {}
    stated = ["crane", "dog", "crane"]
    assert named(("1.jpg", 1), stated=stated) == {0: "crane 0", 1: "dog", 2: "crane 2"}
    every = ["n1", "n2", "n3"]
    for given in ((), stated):
        assert named(("1.jpg", 1), stated=given, every=every) == dict(enumerate(every))
    synsets = ("n00000003_1.JPEG", 0), ("n00000009_5_n00000002.JPEG", 1)
    some = named(*synsets, stated=["a", "b"], every=every)
    assert some == {0: "n00000002", 1: "n00000003"}


def test_a_damaged_list_of_labels_is_named(tmp_path):
    file = tmp_path / "val_map.txt"
    file.write_text("a.jpg\t3\nb/c.jpg\t0\n")
    assert naming.listed_labels(tmp_path, "val") == {"a.jpg": 3, "b/c.jpg": 0}
    assert naming.listed_labels(tmp_path, "train") == {}
    assert naming.listed_labels(tmp_path, "") == {}
    for text in ("a.jpg\tx\n", "a.jpg\n"):
        file.write_text(text)
        with pytest.raises(BadInput) as refused:
            naming.listed_labels(tmp_path, "val")
        said = f"{file}: a line is name, tab, number of the class ("
        assert str(refused.value).startswith(said)


# Words for splits


def test_splits_have_these_words():
    words = {"Training": "train", "DEV": "val", "validation": "val", "eval": "test"}
    assert {word: split_of(word) for word in words} == words
    assert split_of("trains") is None


@pytest.mark.parametrize(
    ("folders", "beside", "found"),
    [
        (["train", "other"], [], {"train": "train"}),
        (["Testing", "other"], [], {}),
        (["Testing"], [], {"test": "Testing"}),
        (
            ["Training", "Testing", "other"],
            [],
            {"train": "Training", "test": "Testing"},
        ),
        (["Training", "other"], ["test"], {"train": "Training"}),
        (["Valid", "Testing", "other"], [], {}),
        (["Testing", "other"], ["train"], {"test": "Testing"}),
        (["a", "b"], ["train", "test"], {}),
    ],
)
def test_which_folders_are_splits(folders, beside, found):
    assert splits_among(folders, Path("x"), beside) == found


def test_two_folders_of_one_split_are_said():
    with pytest.raises(BadInput) as refused:
        splits_among(["train", "valid", "dev"], Path("x"))
    assert (
        str(refused.value) == "x: 'val' is there twice, as dev and valid; move one away"
    )
    assert splits_among(["valid", "dev", "a"], Path("x")) == {}


@pytest.mark.parametrize(
    "folders",
    [
        ["train_set", "test_set"],
        ["seg_train", "seg_test"],
        ["train2017", "val2017"],
        ["Train set", "x.valid"],
    ],
)
def test_classes_that_look_like_splits_are_refused(folders):
    with pytest.raises(BadInput) as refused:
        refuse_misspelled(folders, Path("x"))
    assert str(refused.value) == (
        f"x: {' and '.join(sorted(folders))} look like splits, and would be read as classes; rename"
        " the folders to train, val and test"
    )


@pytest.mark.parametrize(
    "folders",
    [
        ["seg_train", "seg_test", "seg_pred"],
        ["train_a", "train_b"],
        ["test_1", "val_1"],
        ["trainer", "tests"],
    ],
)
def test_classes_of_other_names_are_classes(folders):
    refuse_misspelled(folders, Path("x"))


def test_parts_of_a_set_are_whole_and_lie_together():
    names = [f"train-{n:05}-of-00003.parquet" for n in range(3)]
    files = tuple(Path("x") / name for name in names)
    Container("parquet", files)
    with pytest.raises(BadInput) as refused:
        Container("parquet", files[:2])
    assert str(refused.value) == (
        f"x/{names[0]}: is one of 3 files, and 2 are there; get all of them, and only them"
    )
    with pytest.raises(BadInput, match="x: holds the same split as y; move one away"):
        Container("parquet", (files[0], files[1], Path("y") / names[2]))
