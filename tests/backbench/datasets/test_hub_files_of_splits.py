"""Which of the Hub's files hold which split, and how their classes are counted; nothing is read."""

from dataclasses import replace
from pathlib import Path

import pytest

from backbench.datasets import hub_tables
from backbench.datasets.row import Dataset, HubTables
from backbench.errors import BadInput

LAYOUT = HubTables(labels=("label",), path="{class}/{file}")


def a_row(layout=LAYOUT, *, sizes=(10, None, 5), classes=3):
    return Dataset(
        name="x",
        classes=classes,
        sizes=sizes,
        read=None,
        get="its archives",
        parquet=layout,
    )


def files_of(base, names, layout=LAYOUT, **about):
    for name in names:
        file = base / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    found = hub_tables._files_of(a_row(layout, **about), layout, base)
    return {
        split: [
            file.relative_to(base).as_posix().removesuffix(".parquet") for file in files
        ]
        for split, files in found.items()
    }


WITH_VAL = {"sizes": (10, 5, 5)}


@pytest.mark.parametrize(
    ("names", "about", "wanted"),
    [
        (
            ["data/train-1", "data/train-0", "data/test-0"],
            {},
            {"train": ["data/train-0", "data/train-1"], "test": ["data/test-0"]},
        ),
        (["x-train", "x-test"], {}, {"train": ["x-train"], "test": ["x-test"]}),
        (
            ["default/train/0000", "default/test/0000"],
            {},
            {"train": ["default/train/0000"], "test": ["default/test/0000"]},
        ),
        (
            ["train/0000", "test/0000"],
            {},
            {"train": ["train/0000"], "test": ["test/0000"]},
        ),
        # What is called validation is the test split where the set has no val
        (
            ["train-0", "validation-0"],
            {},
            {"train": ["train-0"], "test": ["validation-0"]},
        ),
        (
            ["train-0", "valid-0", "eval-0"],
            WITH_VAL,
            {"train": ["train-0"], "val": ["valid-0"], "test": ["eval-0"]},
        ),
        (
            ["fine/train-0", "fine/test-0", "coarse/train-0", "coarse/test-0"],
            {"layout": replace(LAYOUT, config="fine")},
            {"train": ["fine/train-0"], "test": ["fine/test-0"]},
        ),
        (
            ["data/train-0"],
            {"layout": replace(LAYOUT, whole=True)},
            {"train": ["data/train-0"]},
        ),
        (
            ["data/train-1", "data/test-0", "data/train-0"],
            {"layout": replace(LAYOUT, order="listed")},
            {"train": ["data/test-0", "data/train-0", "data/train-1"]},
        ),
        (
            [".cache/train-0", "train-0", "test-0"],
            {},
            {"train": ["train-0"], "test": ["test-0"]},
        ),
    ],
)
def test_a_splits_files_are_known_by_their_names(tmp_path, names, about, wanted):
    assert files_of(tmp_path, names, **about) == wanted


@pytest.mark.parametrize(
    ("names", "about", "says"),
    [
        (
            ["data/part-0"],
            {},
            "{base}/data/part-0.parquet: its name tells no split; call it train-part-0.parquet or"
            " test-part-0.parquet",
        ),
        (
            ["a/train-0", "data/train-0", "b/train-0"],
            {},
            "{base}: holds the configurations data and a and b; keep the one of x",
        ),
        (
            ["coarse/train-0"],
            {"layout": replace(LAYOUT, config="fine")},
            "{base}/coarse: another configuration than fine, which x is; get that one",
        ),
        (
            ["train-0"],
            {},
            "{base}: no Parquet files of the split 'test' beside train; get them, too",
        ),
        (
            ["train-0", "test-0"],
            WITH_VAL,
            "{base}: no Parquet files of the split 'val' beside test, train; get them, too",
        ),
        (
            ["train-0", "test-0", "valid-0"],
            {},
            "{base}/valid-0.parquet: x has no split 'val'; another division of it: get its archives",
        ),
        (
            ["train-0", "test-0"],
            {"layout": replace(LAYOUT, whole=True)},
            "{base}/test-0.parquet: x has no split 'test'; another division of it: get its"
            " archives",
        ),
    ],
)
def test_other_files_are_said(tmp_path, names, about, says):
    with pytest.raises(BadInput) as refused:
        files_of(tmp_path, names, **about)
    assert str(refused.value) == says.format(base=tmp_path)


def test_a_configuration_may_stand_without_its_name(tmp_path):
    layout = replace(LAYOUT, config="fine")
    found = files_of(tmp_path, ["default/train-0", "default/test-0"], layout)
    assert set(found) == {"train", "test"}


@pytest.mark.parametrize(
    ("names", "order", "places"),
    [
        # Folders of numbers are sorted as numbers, whatever else is said
        (("1", "10", "2"), "stated", {0: 0, 2: 1, 1: 2}),
        # By letters, without regard to case, blanks and hyphens
        (("b c", "B-a", "a_d"), "names", {2: 0, 1: 1, 0: 2}),
        # By bytes: capitals come first
        (("b", "a", "C"), "text", {2: 0, 1: 1, 0: 2}),
        (("b", "a", "C"), "stated", {0: 0, 1: 1, 2: 2}),
        ((), "names", {0: 0, 1: 1, 2: 2}),
    ],
)
def test_classes_are_counted_as_the_archives_do(names, order, places):
    layout = replace(LAYOUT, order=order)
    found = hub_tables._places(a_row(layout), layout, Path("x.parquet"), names)
    assert found == places


def test_another_number_of_classes_is_another_configuration():
    with pytest.raises(BadInput) as refused:
        hub_tables._places(a_row(), LAYOUT, Path("x.parquet"), ("a", "b", "c", "d"))
    assert str(refused.value) == (
        "x.parquet: 4 classes (a, b, c), and x has 3: another configuration"
    )
    any_number = a_row(classes=None)
    assert hub_tables._places(any_number, LAYOUT, Path("x"), ("b", "a")) == {1: 0, 0: 1}


def test_only_a_list_of_all_splits_counts_its_parts_by_split():
    files = [Path(f"{word}-{n}.parquet") for word in ("train", "test") for n in (0, 1)]
    assert hub_tables._groups(LAYOUT, files, Path()) == [tuple(files)]
    listed = replace(LAYOUT, order="listed")
    assert hub_tables._groups(listed, files, Path()) == [
        tuple(files[:2]),
        tuple(files[2:]),
    ]


def test_a_set_in_two_layouts_is_refused(tmp_path):
    base = tmp_path / "x"
    row = replace(a_row(), needs=("images", "list.txt"))
    (base / "data").mkdir(parents=True)
    (base / "data" / "train-0.parquet").touch()
    (base / "list.txt").touch()
    with pytest.raises(BadInput) as refused:
        hub_tables.read(row, base, 0)
    assert str(refused.value) == (
        f"{base}: x is there twice, as list.txt and as data/train-0.parquet; move one away"
    )
    # Where ROOT itself is the owner's folder, tables below it are of other sets
    asked = []
    plain = replace(
        row, name="other", read=lambda folder, seed: asked.append((folder, seed))
    )
    hub_tables.read(plain, base, 3)
    assert asked == [(base, 3)]
    assert hub_tables.described(plain, base) == ""
    (base / "data" / "test-0.parquet").touch()
    (base / "data" / "train-1.parquet").touch()
    said = "train: parquet, 2 files; test: parquet, 1 files"
    assert hub_tables.described(row, base) == said
    with pytest.raises(BadInput, match=f"{base}: no split 'val'; it has train, test"):
        hub_tables.read_split(row, base, "val")
