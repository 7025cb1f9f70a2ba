"""Folders as people have them, and the tar and zip files of them: one list of images, or a refusal."""

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.layouts import picture

from backbench.cli.program import main
from backbench.containers import reading
from backbench.datasets import catalog, splits
from backbench.errors import BadInput


def tree(base, folders=("train", "test"), classes=("cat", "dog"), per=4):
    """Write BASE/<folder>/<class>/<number>.png, other pictures in each folder."""
    for number, folder in enumerate(folders):
        for label, name in enumerate(classes):
            for i in range(per):
                seed = 100 * number + 10 * label + i
                picture(base / folder / name / f"{i}.png", seed)


@pytest.fixture
def own(tmp_path):
    tree(tmp_path / "folder" / "own")
    return tmp_path / "folder" / "own"


def lists(base):
    """Return the paths and labels of a dataset's splits, and what draws from two of them go by."""
    found = catalog.load(base.name, base.parent)
    digests = splits.digests(found)
    digests["both"] = splits.digest(found.both())
    # The images are there under these names
    assert found.both().read(0)
    assert found.test.read(len(found.test) - 1)
    return digests


def as_tar(base):
    file = base.parent.parent / "tar" / f"{base.name}.tar"
    file.parent.mkdir()
    with tarfile.open(file, "w") as out:
        out.add(base, ".")
    return file.with_suffix("")


def as_zip(base):
    file = base.parent.parent / "zip" / f"{base.name}.zip"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as out:
        for folder, _, names in os.walk(base):
            for name in names:
                path = Path(folder, name)
                out.write(path, path.relative_to(base))
    return file.with_suffix("")


def as_shards(base):
    there = base.parent.parent / "shards" / base.name
    there.mkdir(parents=True)
    for split in ("train", "test"):
        with tarfile.open(there / f"{split}-0000.tar", "w") as out:
            out.add(base / split, ".")
    return there


HIDDEN = (
    "train/.ipynb_checkpoints/0.png",
    "train/cat/.thumbnails/0.png",
    "train/cat/more/.ipynb_checkpoints/0.png",
    "train/@eaDir/0.png/SYNOPHOTO_THUMB_XL.jpg",
    "test/cat/@eaDir/0.png",
    "test/.git/0.png",
    "__MACOSX/train/cat/0.png",
    "#recycle/cat/0.png",
)


@pytest.mark.parametrize("packed", [None, as_tar, as_zip, as_shards])
def test_hidden_folders_are_no_classes(own, packed):
    plain = lists(own)
    for number, name in enumerate(HIDDEN):
        picture(own / name, 900 + number)
    (own / "train" / "cat" / "Thumbs.db").write_text("no image")
    (own / "train" / ".DS_Store").write_text("no image")
    assert lists(packed(own) if packed else own) == plain


def test_a_container_of_hidden_images_says_so(tmp_path):
    file = tmp_path / "own.tar"
    picture(tmp_path / "1.png", 1)
    with tarfile.open(file, "w") as out:
        out.add(tmp_path / "1.png", ".mine/cat/1.png")
    with pytest.raises(BadInput, match=r"no images in 1 files \(1 hidden members"):
        reading.read_split(tmp_path / "own", "")
    with tarfile.open(file, "w"):
        pass
    with pytest.raises(BadInput, match=r"no images in 1 files$"):
        reading.read_split(tmp_path / "own", "")


# Links


def test_a_linked_folder_is_followed_once(own, tmp_path):
    plain = catalog.load("own", own.parent)
    for i in range(2):
        picture(tmp_path / "more" / f"{i}.png", 900 + i)
    cat = own / "train" / "cat"
    (cat / "z_more").symlink_to(tmp_path / "more")
    (cat / "a_more").symlink_to(tmp_path / "more")
    (cat / "loop").symlink_to(".")
    found = catalog.load("own", own.parent)
    linked = [path for path in found.both().paths if "more" in path]
    assert sorted(linked) == ["cat/a_more/0.png", "cat/a_more/1.png"]
    assert len(found.both()) == len(plain.both()) + 2


def test_images_in_real_folders_keep_their_names_beside_links(own):
    cat = own / "train" / "cat"
    picture(cat / "z_real" / "0.png", 900)
    plain = lists(own)
    (cat / "a_link").symlink_to("z_real")
    assert lists(own) == plain


@pytest.mark.parametrize(
    ("link", "target", "why"),
    [
        ("train/cat/more", "/nowhere/at/all", "is a link to /nowhere/at/all"),
        ("train/eel", "/nowhere/at/all", "is a link to /nowhere/at/all"),
        ("val", "/nowhere/at/all", "is a link to /nowhere/at/all"),
        ("train/cat/itself", "itself", "is a link to itself"),
        ("train/puppy", "dog", "folder of the class 'dog'"),
        ("train/cat/more", "../dog", "folder of the class 'dog'"),
        ("train/cat/up", "..", "folder of the class 'dog'"),
        ("train/cat/more", "../../test/cat", "is in train and in test"),
    ],
)
def test_a_link_that_cannot_be_followed_is_refused(own, link, target, why):
    (own / link).symlink_to(target)
    with pytest.raises(BadInput, match=why):
        lists(own)
    with pytest.raises(BadInput, match=r"is a link to .*, which is no image in it"):
        lists(as_tar(own))


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_two_names_of_one_image_are_two_images_in_a_tar_too(own, link):
    cat = own / "train" / "cat"
    source = cat / "0.png" if link is os.link else "0.png"
    link(source, cat / "a_copy.png")
    found = catalog.load("own", own.parent)
    assert "cat/a_copy.png" in found.both().paths
    plain = splits.digest(found.both())
    for there in (as_tar(own), as_shards(own)):
        packed = catalog.load("own", there.parent)
        assert splits.digest(packed.both()) == plain
        assert packed.both().read(0) == found.both().read(0)


def test_hard_links_may_lie_in_train_and_in_the_val_that_is_drawn(own):
    for i in range(8):
        os.link(own / "train" / "cat" / "0.png", own / "train" / "cat" / f"copy{i}.png")
    assert lists(as_tar(own)) == lists(own)


def test_a_link_in_a_zip_is_refused(own, tmp_path):
    there = as_zip(own)
    with zipfile.ZipFile(there.with_suffix(".zip"), "a") as out:
        info = zipfile.ZipInfo("train/cat/more")
        info.external_attr = 0o120777 << 16
        out.writestr(info, "/elsewhere")
    with pytest.raises(BadInput, match="train/cat/more is a link"):
        lists(there)


# Splits


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Train", "Test"),
        ("TRAIN", "val"),
        ("training", "testing"),
        ("training", "validation"),
        ("Training", "Valid"),
        ("train", "dev"),
        ("train", "Evaluation"),
    ],
)
@pytest.mark.parametrize("packed", [None, as_tar, as_zip])
def test_splits_are_read_however_they_are_spelled(own, train, test, packed):
    plain = lists(own)
    (own / "train").rename(own / "renamed")
    (own / "renamed").rename(own / train)
    (own / "test").rename(own / test)
    assert lists(packed(own) if packed else own) == plain


@pytest.mark.parametrize("word", ["valid", "Validation", "dev"])
@pytest.mark.parametrize("packed", [None, as_tar, as_zip])
def test_val_of_any_spelling_chooses_and_is_called_val(tmp_path, word, packed):
    tree(tmp_path / "plain" / "own", ("train", "val", "test"))
    tree(tmp_path / "folder" / "own", ("train", word, "test"))
    own = tmp_path / "folder" / "own"
    assert lists(packed(own) if packed else own) == lists(tmp_path / "plain" / "own")


@pytest.mark.parametrize("packed", [None, as_tar, as_zip])
def test_a_split_that_is_there_twice_is_refused(own, packed):
    shutil.copytree(own / "test", own / "Testing")
    with pytest.raises(BadInput, match="'test' is there twice, as Testing and test"):
        lists(packed(own) if packed else own)


@pytest.mark.parametrize(
    "names", [("trainset", "testset"), ("seg_train", "seg_test"), ("train-1", "test-1")]
)
@pytest.mark.parametrize("packed", [None, as_tar, as_zip])
def test_folders_that_look_like_splits_are_no_classes(tmp_path, names, packed):
    own = tmp_path / "folder" / "own"
    tree(own, names)
    with pytest.raises(BadInput, match=f"{names[1]} and {names[0]} look like splits"):
        lists(packed(own) if packed else own)


@pytest.mark.parametrize(
    "classes",
    [("Test", "Control"), ("train", "bus"), ("training", "resting"), ("val", "var")],
)
@pytest.mark.parametrize("packed", [None, as_tar, as_zip])
def test_classes_may_have_the_words_of_splits(tmp_path, classes, packed):
    own = tmp_path / "folder" / "own"
    tree(own, ("",), classes)
    there = packed(own) if packed else own
    found = catalog.load("own", there.parent)
    assert found.test.classes == tuple(sorted(classes))


# Names


@pytest.mark.parametrize("name", ["new\nline", "ta\tb", "c\rr", "a\u2028b", "a\x1b[m"])
@pytest.mark.parametrize("packed", [None, as_tar, as_zip])
def test_names_that_break_lists_are_refused(own, name, packed):
    picture(own / "train" / name / "0.png", 900)
    picture(own / "test" / name / "0.png", 901)
    with pytest.raises(BadInput, match="holds the control character"):
        lists(packed(own) if packed else own)


def test_a_datasets_own_name_is_printable(own):
    own.rename(own.with_name("new\nline"))
    with pytest.raises(BadInput, match="a dataset's name has no control character"):
        lists(own.with_name("new\nline"))


def test_a_name_that_is_no_text_is_refused(own):
    picture(own / "train" / "cat" / os.fsdecode(b"caf\xe9.png"), 900)
    with pytest.raises(BadInput, match=r"control character '\\udce9'; rename it"):
        lists(own)


@pytest.mark.parametrize(
    "name", ['it\'s "q"', " blanks ", "a,b", "=1", "a\\b", "\u200eW", "م\u200cخ"]
)
@pytest.mark.parametrize("packed", [as_tar, as_zip, as_shards])
def test_odd_names_give_one_list(own, name, packed):
    picture(own / "train" / name / f"{name}.PNG", 900)
    picture(own / "test" / name / f"{name}.JPG", 901)
    assert lists(packed(own)) == lists(own)


# Runs


@pytest.mark.parametrize("packed", [None, as_tar, as_zip])
def test_a_run_among_images_is_named(tmp_path, packed):
    own = tmp_path / "folder" / "own"
    tree(own, ("",))
    picture(own / "runs" / "knn" / "confusion" / "own.png", 900)
    (own / "runs" / "knn" / "results.jsonl").write_text("{}\n")
    with pytest.raises(BadInput, match=r"results.jsonl: is the file of a run"):
        lists(packed(own) if packed else own)


def words(verb, data, out):
    """Return the words of a command that would measure ROOT/pets7 and write to `out`."""
    model = "timm:resnet18@random"
    where = ["--data", str(data), "--out", str(out)]
    if verb == "evaluate":
        where[1] = str(data / "pets7")
        return ["evaluate", model, *where]
    if verb == "evaluate of ROOT":
        return ["evaluate", model, "knn/pets7", *where]
    if verb == "linear":
        return ["linear", model, "--datasets", "pets7", "--protocol", "knn", *where]
    if verb == "semisup":
        return ["semisup", model, "--percent", "10", "--dataset", "pets7", *where]
    if verb == "pretrain":
        recipe = "mio/barlow_twins_stl10"
        return ["pretrain", recipe, "data.dataset=pets7", *where]
    if verb == "data pack":
        return ["data", "pack", "pets7", "--to", "tar", *where]
    return [verb, model, "--dataset", "pets7", *where]


VERBS = (
    "evaluate",
    "evaluate of ROOT",
    "linear",
    "finetune",
    "semisup",
    "analyze",
    "pretrain",
    "data pack",
)


@pytest.fixture
def root(tmp_path):
    tree(tmp_path / "data" / "pets7", ("",))
    return tmp_path / "data"


@pytest.mark.parametrize("place", ["", "runs", "cat/a/b/c"])
@pytest.mark.parametrize("verb", VERBS)
def test_runs_inside_a_dataset_are_refused_before_they_are_written(
    root, capsys, verb, place
):
    before = sorted(root.rglob("*"))
    assert main(words(verb, root, root / "pets7" / place)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "lies in the dataset" in said or "is --data itself" in said
    assert sorted(root.rglob("*")) == before


def test_a_link_into_the_dataset_is_seen(root, capsys):
    (root / "link").symlink_to("pets7/dog")
    assert main(words("linear", root, root / "link" / "runs")) == 2
    assert "lies in the dataset" in capsys.readouterr().err


def test_a_dataset_that_a_link_leads_to_is_seen(root, tmp_path, capsys):
    (root / "pets7").rename(tmp_path / "elsewhere")
    (root / "pets7").symlink_to(tmp_path / "elsewhere")
    assert main(words("linear", root, tmp_path / "elsewhere" / "runs")) == 2
    assert "lies in the dataset" in capsys.readouterr().err


def test_the_cache_must_not_lie_in_the_dataset(root, monkeypatch, capsys):
    monkeypatch.setenv("BACKBENCH_CACHE", str(root / "pets7" / "cache"))
    assert main(words("evaluate", root, root / "runs")) == 2
    assert "BACKBENCH_CACHE=" in capsys.readouterr().err
    assert not (root / "pets7" / "cache").exists()


def test_the_launcher_refuses_runs_inside_a_dataset(root, tmp_path, capsys):
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        '{"checkpoints": ["timm:resnet18@random"], "evaluate":'
        ' [{"verb": "linear", "protocol": "knn", "datasets": ["pets7"]}]}'
    )
    out = root / "pets7" / "runs"
    command = ["launch", "run", str(grid), "--data", str(root), "--out", str(out)]
    assert main(command) == 2
    assert "lies in the dataset" in capsys.readouterr().err
    assert not out.exists()


def test_runs_may_lie_beside_the_datasets(root, capsys):
    (root / "runs" / "knn").mkdir(parents=True)
    (root / "runs" / "knn" / "run.json").write_text("{}")
    picture(root / "runs" / "knn" / "confusion.png", 900)
    # The protocol's 200 neighbours are more than the images: this is said after the places
    assert main(words("linear", root, root / "runs" / "knn2")) == 2
    assert "neighbours of" in capsys.readouterr().err
