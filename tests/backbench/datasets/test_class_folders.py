"""Class folders of one's own: with and without splits, and what is said of other folders."""

import json

import pytest
from PIL import Image

from backbench.datasets import catalog, splits
from backbench.errors import BadInput


def touch(base, *names):
    for name in names:
        file = base / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def images(base, *classes, per=5):
    touch(base, *(f"{name}/{n}.png" for name in classes for n in range(per)))


def read(root, seed=0):
    return catalog.class_folder("own").read(root, seed)


@pytest.fixture
def base(tmp_path):
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def test_without_test_val_is_scored_and_a_fifth_of_train_chooses(tmp_path, base):
    images(base / "train", "a", "b", per=10)
    images(base / "validation", "a", "b", per=3)
    found = read(tmp_path)
    assert [len(part) for _, part in found.items()] == [16, 4, 6]
    assert found.test.root == base / "val", "whatever its folder is called"
    assert found.held_out
    note = f"{base} has no test folder: val is scored, and a fifth of train chooses"
    assert found.notes == (note,)
    assert read(tmp_path, 1).val.paths != found.val.paths
    # With all three splits each is what it is called
    images(base / "test", "a", "b", per=1)
    whole = read(tmp_path)
    assert [len(part) for _, part in whole.items()] == [20, 6, 2]
    assert (whole.held_out, whole.notes) == (False, ())
    # And without val a fifth of train is held out
    for file in sorted((base / "validation").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    (base / "validation").rmdir()
    assert [len(part) for _, part in read(tmp_path).items()] == [16, 4, 2]


def test_without_splits_the_test_list_is_one_for_all_seeds(tmp_path, base):
    images(base, "a", "b", per=10)
    first, second = read(tmp_path), read(tmp_path, 1)
    assert [len(part) for _, part in first.items()] == [12, 4, 4]
    assert first.test.paths == second.test.paths
    assert first.val.paths != second.val.paths
    assert first.held_out and first.notes == (
        f"{base} has no train and test folders: a fifth of each class (4 of 20 images) is drawn for"
        " test, by sha256 of '0 <path>'",
    )


def test_a_split_that_is_given_for_its_dataset_is_said(tmp_path):
    images(tmp_path / "own" / "train", "a", "b", per=10)
    alone = catalog.class_folder("train").read(tmp_path / "own", 0)
    assert len(alone.notes) == 1
    images(tmp_path / "own" / "test", "a", "b", per=2)
    beside = catalog.class_folder("train").read(tmp_path / "own", 0)
    assert beside.notes[1] == (
        f"{tmp_path / 'own' / 'train'} lies beside test; if they are splits of one dataset, give"
        f" {tmp_path / 'own'} instead"
    )
    assert [len(part) for _, part in beside.items()] == [12, 4, 4]


def test_a_class_needs_three_images(tmp_path, base):
    images(base, "a", "b", per=2)
    with pytest.raises(BadInput) as error:
        read(tmp_path)
    assert str(error.value) == (
        f"{base}: 2 images of a class at most; a class needs three, as train, val and test are drawn"
        " from them"
    )
    images(base, "b", per=3)
    assert [len(part) for _, part in read(tmp_path).items()] == [2, 1, 2]


EXPECTED = "; expected {0}/{{train,val,test}}/<class>/<image> or {0}/<class>/<image>"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["readme.md"], "no class folders in it"),
        (["a/0.png"], "one class folder alone, 'a'"),
        (
            ["a/0.png", "2.PNG", "1.jpg"],
            "2 images lie in no class folder (1.jpg first)",
        ),
        (
            ["1.jpg", "y.RAR", "x.7z"],
            "holds the archive x.7z, which must be unpacked there",
        ),
        (["x.7z", "x.tar.gz"], "a compressed tar can only be read from its beginning;"),
    ],
)
def test_what_is_there_instead_of_classes_is_said(tmp_path, base, files, says):
    touch(base, *files)
    with pytest.raises(BadInput) as error:
        read(tmp_path)
    said = str(error.value)
    assert said.startswith(f"{base}: {says}") and said.endswith(EXPECTED.format(base))


@pytest.mark.parametrize(
    ("files", "below"),
    [
        (["a/b/0.png", "a/c/0.png"], "a"),
        (["a/d/b/0.png", "a/d/c/0.png", "readme.md"], "a/d"),
        (["a/train/b/0.png", "a/test/b/0.png"], None),  # told as a dataset, below
        (["a/d/train/b/0.png", "a/d/test/b/0.png"], "a/d"),
        (["a/b/0.png"], None),
        (["a/b/0.png", "a/c/x.txt"], None),
    ],
)
def test_of_a_folder_too_high_up_the_folder_of_classes_is_told(
    tmp_path, base, files, below
):
    touch(base, *files)
    with pytest.raises(BadInput) as error:
        read(tmp_path)
    meant = f"; did you mean {base / below}?" if below else None
    assert ("did you mean" in str(error.value)) == bool(below)
    assert below is None or f"'a'{meant}; expected" in str(error.value)


def test_boxes_one_folder_down_are_told(tmp_path, base):
    """As a clone of BCCD is: code beside the folder of boxes."""
    touch(base, "code/x.py", "BCCD/JPEGImages/0.jpg", "BCCD/Annotations/0.xml")
    with pytest.raises(BadInput) as error:
        read(tmp_path)
    hint = f"its folder BCCD holds boxes; name {base / 'BCCD'}"
    assert str(error.value).endswith(f"; if boxes are meant: {hint}")


@pytest.mark.parametrize("split", ["", "train/"])
def test_pictures_below_the_classes_are_told(tmp_path, base, split):
    """As in animal/dog/1.png beside animal/frog/1.png: a hierarchy, or a folder too high up."""
    images(base / split, "animal/dog", "animal/frog", "vehicle/ship", per=4)
    if split:
        images(base / "test", "animal", "vehicle", per=1)
    (said,) = [note for note in read(tmp_path).notes if "all pictures lie" in note]
    where = base / split if split else base
    assert said.startswith(f"{where}: all pictures lie in folders below the class")
    assert "as animal/dog," in said and "if the 3 folders below are" in said
    # A picture of a class itself, or one folder for each class, is a layout like any other
    images(base / split, "animal", per=1)
    assert not any("all pictures" in note for note in read(tmp_path).notes)


def test_one_folder_below_each_class_is_not_told(tmp_path, base):
    images(base, "dog/images", "frog/images", per=4)
    assert not any("all pictures" in note for note in read(tmp_path).notes)


def test_other_pictures_are_told_once(tmp_path, base, caplog):
    images(base, "a", "b", per=4)
    touch(base, "b/2.HEIC", "b/1.gif", "a/notes.txt", "a/.hidden.gif")
    read(tmp_path)
    read(tmp_path)
    (said,) = [
        r.getMessage() for r in caplog.records if "passed over" in r.getMessage()
    ]
    assert said.startswith(f"{base}: 2 pictures are passed over, b/1.gif first; a list")


def test_a_val_that_is_scored_is_called_by_its_folder(tmp_path, base):
    images(base / "train", "dog", "frog", per=4)
    images(base / "val", "hund", "frosch", per=4)
    with pytest.raises(BadInput) as error:
        splits.check("own", read(tmp_path))
    assert str(error.value).startswith(
        f"own: test ({base / 'val'}) and train have different class lists"
    )


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["train/a/0.png"], "{0}: no folder 'test' or 'val' beside 'train'"),
        (["test/a/0.png"], "{0}: no folder 'train' beside 'test'"),
        (["val/a/0.png", "test/a/0.png"], "{0}: no folder 'train' beside 'val'"),
        (["train/0.png", "Test/0.png"], "{0}: no class folders in {0}/Test"),
        (
            [
                f"{name}/{split}/a/0.png"
                for name in "fedcba"
                for split in ("train", "test")
            ],
            "{0}: holds datasets (a, b, c, d, e), no classes; name one of them, as {0}/a",
        ),
    ],
)
def test_folders_that_are_no_classes_are_said(tmp_path, base, files, says):
    touch(base, *files)
    with pytest.raises(BadInput) as error:
        read(tmp_path)
    assert str(error.value).startswith(says.format(base))


def test_a_folder_that_is_not_there_is_said_with_the_nearest_name(tmp_path, base):
    images(base, "a", "b")
    for name in ("owm", "cifar11"):
        with pytest.raises(BadInput) as error:
            catalog.class_folder(name).read(tmp_path, 0)
        near = {"owm": "own", "cifar11": "cifar10"}[name]
        missing = tmp_path / name
        assert str(error.value).startswith(
            f"{missing}: no such folder; expected {missing}/train/<class>/<image>, or a known"
            f" dataset: did you mean '{near}'"
        )
    with pytest.raises(
        BadInput, match=r"gone: no such folder; it holds one folder per"
    ):
        catalog.class_folder("own").read(tmp_path / "gone", 0)


def test_folders_of_ones_own_are_listed_with_what_is_wrong(tmp_path):
    images(tmp_path / "whole", "a", "b")
    images(tmp_path / "half" / "train", "a", "b")
    images(tmp_path / "coco", "a", "b")
    images(tmp_path / "cifar10", "a", "b")
    touch(tmp_path, "notes/x/a.txt", "notes/y/b.png", "single/a/1.png", ".hidden.zip")
    found = catalog.own_folders(tmp_path)
    assert list(found) == ["half", "whole"] and found["whole"] == ""
    assert "no folder 'test' or 'val' beside 'train'" in found["half"]
    assert catalog.own_folders(tmp_path / "gone") == {}
    assert catalog.all_hold_images(tmp_path / "whole")
    assert not catalog.all_hold_images(tmp_path / "notes")


def test_a_class_folder_under_a_known_name_is_renamed(tmp_path):
    """It is known by several folders, or by splits; another one says what it lacks."""
    folder = tmp_path / "dtd"
    images(folder, "a")
    assert not catalog.is_class_folder(folder)
    catalog.refuse_taken_name(folder, "--data dtd")
    images(folder, "b")
    assert catalog.is_class_folder(folder)
    with pytest.raises(BadInput) as error:
        catalog.refuse_taken_name(folder, "--data dtd")
    assert str(error.value) == (
        "--data dtd: has the name of the known dataset dtd, and not its files; rename the folder"
    )
    images(tmp_path / "mine", "a", "b")
    catalog.refuse_taken_name(tmp_path / "mine", "--data mine")
    images(tmp_path / "split" / "train", "a")
    assert catalog.is_class_folder(tmp_path / "split")
    assert not catalog.is_class_folder(tmp_path / "gone")


# What reading it says


@pytest.fixture
def pictured(tmp_path):
    """Twelve unlike pictures of two classes, and four to test."""
    for n in range(16):
        split = "train" if n < 12 else "test"
        file = tmp_path / "own" / split / "ab"[n % 2] / f"{n}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3 + n, 2), (n, 10 * n, 0)).save(file)
    return tmp_path


def test_a_note_is_said_once_in_a_process(pictured, caplog):
    caplog.set_level("INFO", "backbench")
    (pictured / "own" / "test").rename(pictured / "own" / "val")
    for _ in range(2):
        found = catalog.load("own", pictured)
    note = f"{pictured / 'own'} has no test folder: val is scored, and a fifth of train chooses"
    assert found.notes == (note,)
    assert caplog.messages == [f"own: {note}"]


def test_a_record_is_of_one_seed_and_damage_to_it_is_said(pictured):
    found = catalog.load("own", pictured, seed=3)
    file = catalog.record_file("own", pictured)
    assert file == pictured / "own" / "backbench-splits.json"
    about = {"seed": 3, "splits": catalog.record_of(found)}
    file.write_text(json.dumps(about))
    assert len(catalog.load("own", pictured, seed=3).train) == 10
    about["splits"]["val"] = about["splits"]["val"] | {"images": 7}
    file.write_text(json.dumps(about))
    with pytest.raises(BadInput) as error:
        catalog.load("own", pictured, seed=3)
    assert str(error.value) == (
        f"own: the val split is not the recorded one (2 images, 7 in {file}); restore the data, or"
        " record it again with `backbench data check --record`"
    )
    assert len(catalog.load("own", pictured, seed=4).train) == 10
    for text in ("{", "[]", '{"seed": 3}', '{"seed": 3, "splits": {"train": {}}}'):
        file.write_text(text)
        with pytest.raises(BadInput) as error:
            catalog.load("own", pictured, seed=3)
        said = str(error.value)
        assert said.startswith(f"{file}: damaged (")
        assert said.endswith("); remove it, or record it anew") and "\n" not in said


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            FileNotFoundError(2, "x", "/a/b.txt"),
            "/a/b.txt is missing; unpack the archive",
        ),
        (
            FileNotFoundError("gone"),
            "base: not in the layout of this data set (FileNotFo",
        ),
        (
            KeyError("a\nb " + "x" * 200),
            f"base: not in the layout of this data set (KeyError: 'a\\nb {'x' * 134}",
        ),
        (
            ZeroDivisionError("by 0"),
            "base: not in the layout of this data set (ZeroDiv",
        ),
        (RecursionError("deep"), "base: not in the layout of this data set (Recursion"),
    ],
)
def test_what_a_reader_did_not_expect_names_the_folder(error, says):
    with pytest.raises(BadInput) as refused, catalog._refusing_other_layouts("base"):
        raise error
    assert str(refused.value).startswith(says)
    ours = BadInput("as it is")
    with pytest.raises(BadInput) as refused, catalog._refusing_other_layouts("base"):
        raise ours
    assert refused.value is ours
