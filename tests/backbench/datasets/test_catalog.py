"""Every reader, label maps too, on true layouts; what is wrong is named; the embedded data."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from support.strangers import door, refused
from torchvision.datasets import ImageFolder

import backbench.datasets
from backbench.cli.program import main
from backbench.datasets import catalog, embedded, readers, splits
from backbench.datasets.catalog import DATASETS, TWELVE
from backbench.errors import BadInput
from backbench.images import contents
from backbench.images.dense import IGNORED


def test_the_twelve_are_the_papers_in_its_order():
    assert tuple(sorted(TWELVE)) == TWELVE and len(TWELVE) == 12


# name -> (classes, train, val, test) of its tree in support/layouts.py
TREES = {
    "aircraft": (3, 6, 6, 6),
    "birdsnap": (3, 3, 15, 15),
    "caltech101": (3, 72, 18, 6),
    "cars": (2, 4, 2, 6),
    "cifar10": (10, 24, 6, 6),
    "cifar100": (100, 100, 100, 200),
    "dtd": (3, 6, 6, 6),
    "flowers": (102, 6, 6, 6),
    "food": (2, 4, 2, 6),
    "pets": (2, 4, 2, 6),
    "places365": (3, 6, 3, 9),
    "places205": (3, 6, 3, 6),
    "inat18": (3, 6, 3, 6),
    "sun397": (3, 6, 3, 9),
    "stl10": (10, 10, 10, 20),
}


@pytest.mark.parametrize("name", TREES)
def test_reader_on_its_true_layout(trees, name):
    found = catalog.load(name, trees(name))
    classes, *counts = TREES[name]
    assert len(found.train.classes) == classes
    assert [len(images) for _, images in found.items()] == counts
    assert found.held_out == (DATASETS[name].sizes[1] is None)
    for _, images in found.items():
        assert set(images.labels) <= set(range(classes))
        picture = images.open(len(images) - 1)
        assert picture.mode == "RGB" and min(picture.size) >= 8
    again = catalog.load(name, trees.root)
    assert again.train.paths == found.train.paths, "the same files give the same split"


def test_root_of_torchvision_may_be_root_itself(trees):
    """torchvision users have ROOT/food-101, not ROOT/food/food-101; both are found."""
    root = trees("food")
    (root / "food" / "food-101").rename(root / "food-101")
    assert len(catalog.load("food", root).test) == 6


def test_two_archives_in_root_are_told_apart(trees):
    root = trees("cifar10")
    trees("cifar100")
    (root / "cifar10" / "cifar-10-batches-py").rename(root / "cifar-10-batches-py")
    (root / "cifar100" / "cifar-100-python").rename(root / "cifar-100-python")
    assert len(catalog.load("cifar10", root).test.classes) == 10
    assert len(catalog.load("cifar100", root).test.classes) == 100


def test_labels_follow_the_official_lists(trees):
    found = catalog.load("aircraft", trees("aircraft"))
    assert found.train.classes == ("707-320", "A330 200", "An-12")
    sun = catalog.load("sun397", trees("sun397")).test
    assert sun.classes[1] == "/a/apse/indoor"
    assert sun.paths[sun.labels.index(1)].startswith("a/apse/indoor/")


def test_inaturalists_classes_are_the_numbers_of_its_categories(trees):
    found = catalog.load("inat18", trees("inat18"))
    assert found.test.classes == ("0", "2", "10")
    for images in (found.train, found.test):
        for path, label in zip(images.paths, images.labels):
            assert images.classes[label] == path.split("/")[2]


def test_places365_is_read_at_256_pixels_or_else_large(trees):
    root = trees("places365")
    base = root / "places365"
    small = catalog.load("places365", root)
    assert "256-pixel images" in small.notes
    for folder, large in (("data_256", "data_large"), ("val_256", "val_large")):
        end = "_standard" if folder.startswith("data") else ""
        shutil.copytree(base / f"{folder}{end}", base / f"{large}{end}")
    assert catalog.load("places365", root).train.paths == small.train.paths
    shutil.rmtree(base / "data_256_standard")
    found = catalog.load("places365", root)
    assert "large images" in found.notes
    assert [path.partition("/")[0] for path in found.test.paths] == ["val_large"] * 9
    shutil.rmtree(base / "data_large_standard")
    with pytest.raises(BadInput) as error:
        catalog.load("places365", root)
    assert str(error.value) == (
        f"{base}: no data_256_standard or data_large_standard; get train_256_places365standard.tar"
    )


def test_places205_has_its_images_in_either_folder(trees):
    root = trees("places205")
    before = catalog.load("places205", root)
    assert before.test.classes[1] == "a/apartment_building/outdoor"
    for path, label in zip(before.test.paths, before.test.labels):
        assert path.startswith(f"{before.test.classes[label]}/")
    base = root / "places205"
    (base / "data/vision/torralba/deeplearning/images256").rename(base / "images256")
    assert catalog.load("places205", root).test.paths == before.test.paths


def test_birdsnap_ids_come_from_the_species_list(trees):
    """Not from which folders exist, nor from the alphabet: species 3 is Abert's Towhee."""
    found = catalog.load("birdsnap", trees("birdsnap"))
    assert found.train.classes == (
        "Acadian_Flycatcher",
        "Zebra_Finch",
        "Abert's_Towhee",
    )
    for path, label in zip(found.test.paths, found.test.labels):
        assert found.train.classes[label] == path.split("/")[0]
    assert "coverage 33 of 39 listed images (84.6%)" in found.notes
    assert sorted(found.test.labels) == [0] * 5 + [1] * 5 + [2] * 5


def test_caltech_has_the_background_class_and_30_per_class(trees):
    found = catalog.load("caltech101", trees("caltech101"))
    assert found.train.classes[0] == "BACKGROUND_Google"
    for label in range(3):
        assert found.both().labels.count(label) == 30
    with pytest.raises(BadInput, match="needs 30 images of class 'Leopards', found 2"):
        trees.caltech101(trees.root / "caltech101", classes=("Leopards",), per=2)
        catalog.load("caltech101", trees.root)


@pytest.mark.parametrize("name", ["birdsnap", "caltech101", "classes", "dtd", "pets"])
def test_all_seeds_are_scored_on_one_list(trees, name):
    """Only what is held out of train is the seed's."""
    root = trees(name)
    first = catalog.load(name, root, seed=0)
    second = catalog.load(name, root, seed=1)
    assert splits.digest(first.test) == splits.digest(second.test)
    assert first.labelled == second.labelled
    drawn = splits.digest(first.val) != splits.digest(second.val)
    assert drawn == first.held_out


def test_imagenet_and_its_100_classes(trees):
    root = trees("imagenet")
    (root / "imagenet" / "train" / "n99999999").mkdir()
    found = catalog.load("imagenet", root)
    names = list(found.train.classes)
    assert len(names) == 1000 and names == sorted(names)
    assert [len(images) for _, images in found.items()] == [1000, 1000, 1000]
    hundred = catalog.load("imagenet100", root)
    assert len(hundred.test) == 100 and "n02869837" in hundred.test.classes
    with pytest.raises(
        BadInput, match=r"nowhere/imagenet/train is missing; get ILSVRC2012"
    ):
        catalog.load("imagenet", root / "nowhere")


def test_imagenet_without_a_class_or_with_flat_val(trees):
    root = trees("imagenet", classes=["n01440764", "n01443537"])
    said = r"998 of 1000 class folders are missing, 'n01484850' first; is .* a subset\?"
    with pytest.raises(BadInput, match=said):
        catalog.load("imagenet", root)
    flat = root / "imagenet" / "val"
    for folder in list(flat.iterdir()):
        for file in folder.iterdir():
            file.rename(flat / file.name)
        folder.rmdir()
    with pytest.raises(BadInput, match=r"no class folders; sort them as val/<synset>"):
        catalog.load("imagenet", root)


def test_shipped_class_lists():
    thousand = readers.class_list("imagenet")
    hundred = readers.class_list("imagenet100")
    assert len(set(thousand)) == 1000 and thousand == sorted(thousand)
    assert len(set(hundred)) == 100 and set(hundred) <= set(thousand)


def test_a_short_dataset_says_so_in_its_notes(trees):
    found = catalog.load("dtd", trees("dtd"))
    assert "train has 6 images, not 1880" in found.notes
    assert "3 classes, not 47" in found.notes


def test_unknown_name_lists_the_known(tmp_path):
    with pytest.raises(BadInput, match=r"did you mean 'caltech101'\?"):
        catalog.load("caltec101", tmp_path)


def test_the_table_of_datasets_is_cheap_to_import():
    """The leaderboard and the launcher take it, and start in a fraction of a second."""
    code = "import sys, backbench.datasets.catalog; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"torch", "torchvision", "numpy", "PIL", "scipy", "pydantic"}
    assert not heavy & set(done.stdout.split())


def test_check_finds_nothing_wrong_then_what_is_wrong(trees, capsys):
    root = trees("classes")
    args = ["data", "check", "classes", "--data", str(root)]
    assert main(args) == 0
    assert "all right" in capsys.readouterr().out
    train = root / "classes/train"
    test = root / "classes/test"
    (test / "circle/copy.png").write_bytes((train / "circle/000.png").read_bytes())
    (train / "square/again.png").write_bytes((train / "square/001.png").read_bytes())
    (train / "circle/bad.png").write_bytes(b"\x89PNG nothing")
    assert main(args) == 1
    out = capsys.readouterr().out
    assert "PROBLEM: train and test share 1 images" in out
    assert "PROBLEM: train holds 1 copies" in out
    assert re.search(r"PROBLEM: train: unreadable .*bad.png", out)


def test_record_is_compared_by_every_later_use(trees, capsys):
    root = trees("classes")
    assert main(["data", "check", "classes", "--data", str(root), "--record"]) == 0
    record = json.loads((root / "classes" / "backbench-splits.json").read_text())
    parts = record["splits"]
    assert parts["train"]["images"] == 12 and len(parts["test"]["sha256"]) == 64
    catalog.load("classes", root)
    (root / "classes/test/circle/000.png").unlink()
    with pytest.raises(
        BadInput, match=r"the test split is not the recorded one \(7 images, 8 in"
    ):
        catalog.load("classes", root)


def test_list_says_what_is_there(trees, capsys):
    assert main(["data", "list", "--data", str(trees("pets"))]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"pets +37 +3680 +held +3669 +mean_per_class +found +CC BY-SA 4.0", out
    )
    assert re.search(r"cars .* missing", out)
    assert "cars_{train,test}.tgz" in out


def test_a_layout_that_nobody_foresaw_is_a_line_in_every_verb(trees, capsys):
    root = trees("birdsnap")
    trees("pets")  # beside it
    species = root / "birdsnap" / "birdsnap" / "species.txt"
    species.write_text(species.read_text().replace("\n3\t", "\nx\t"))
    (root / "imagenet").mkdir()
    (root / "imagenet" / "val").mkdir()
    (root / "imagenet" / "train").write_text("")
    trees("caltech101")
    (root / "caltech101" / "data").mkdir()
    (root / "caltech101" / "data" / "train-00000-of-00002.parquet").write_bytes(b"")
    assert main(["data", "list", "--data", str(root)]) == 0
    out = capsys.readouterr().out
    assert "caltech101 is there twice" in out
    for name in ("birdsnap", "imagenet"):
        assert re.search(rf"^{name} .* unusable", out, re.MULTILINE)
        assert f"{root / name}: not in the layout of this data set" in out
        assert main(["data", "check", name, "--data", str(root)]) == 2
        assert "not in the layout of this data set" in capsys.readouterr().err
    assert re.search(r"^pets .* found", out, re.MULTILINE)


@pytest.mark.parametrize("name", ["aircraft", "cars", "dtd", "food", "pets"])
def test_a_list_that_torchvision_cannot_read_is_refused_in_a_short_line(trees, name):
    root = trees(name)
    check = ("data", "check", name, "--data", root)
    files = [f for f in root.rglob("*.*") if f.suffix in (".txt", ".mat", ".json")]
    assert files
    for file in files:
        whole = file.read_bytes()
        file.write_text("1 " + "x" * 10_000)
        said = door(*check)
        refused(said, "not in the layout that torchvision reads")
        assert len(said.last) < 1000
        file.unlink()
        os.mkfifo(file)
        refused(door(*check), f"{file}: not a regular file")
        file.unlink()
        file.write_bytes(whole)


def test_a_record_without_its_numbers_is_no_fault_of_ours(trees):
    root = trees("classes")
    record = {"seed": 0, "splits": {key: {} for key in ("train", "val", "test")}}
    (root / "classes" / "backbench-splits.json").write_text(json.dumps(record))
    with pytest.raises(BadInput, match="the train split is not the recorded one"):
        catalog.load("classes", root)


def test_the_table_is_what_the_package_offers():
    assert backbench.datasets.DATASETS is catalog.DATASETS
    row = backbench.datasets.DATASETS["birdsnap"]
    assert (row.classes, row.sizes, row.metric) == (500, (35447, 2500, 2500), "top1")


# Data set -> sizes of the made tree, and what the values of its first map become
KNOWN = {
    "voc2012": ((4, 1), {0, 15, IGNORED}),
    "voc2012aug": ((5, 1), {0, 20}),
    "ade20k": ((4, 2), {IGNORED, 0, 149}),
    "cityscapes": ((4, 2), {IGNORED, 0, 18}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_layouts_are_read_as_their_owners_unpack_them(trees, name, capsys):
    root = trees(name)
    found = catalog.load(name, root, dense=True)
    (train, test), values = KNOWN[name]
    assert len(found.train) + len(found.val) == train
    assert len(found.test) == test
    assert len(found.val) == 1 and found.held_out
    picture, labels = found.train.pair(0)
    assert set(np.unique(labels)) == values
    assert labels.shape == picture.size[::-1]
    # The sets are smaller than published
    assert main(["data", "check", name, "--data", str(root)]) == 1
    said = capsys.readouterr().out
    problems = [line for line in said.splitlines() if "PROBLEM" in line]
    assert len(problems) == 2 and all("images, not" in line for line in problems)
    with pytest.raises(BadInput, match="seg_linear"):
        catalog.load(name, root)


def test_every_value_of_a_map_means_what_the_owners_say(trees):
    values = {
        name: catalog.load(name, trees(name), dense=True).train.values for name in KNOWN
    }
    voc = {**{v: v for v in range(21)}, 255: IGNORED}
    assert values["voc2012"] == values["voc2012aug"] == voc
    # 0 is ignored: subtracting 1 would give 255 in uint8 alone, and turn a 255 into 254
    assert values["ade20k"] == {0: IGNORED, **{v: v - 1 for v in range(1, 151)}}
    scored = [v for v, label in values["cityscapes"].items() if label != IGNORED]
    assert sorted(values["cityscapes"]) == list(range(34)) and len(scored) == 19
    assert [values["cityscapes"][v] for v in scored] == list(range(19))


def test_another_map_is_other_data_and_one_of_another_size_a_problem(trees, capsys):
    root = trees("ade20k")
    images = catalog.load("ade20k", root, dense=True).test
    whole = contents.whole(images)
    sample = contents.sample(images)
    file = images.root / images.maps[0]
    Image.fromarray(np.asarray(Image.open(file)) // 2).save(file)
    assert contents.whole(images) != whole
    assert contents.sample(images) != sample
    Image.open(file).resize((10, 8)).save(file)
    assert main(["data", "check", "ade20k", "--data", str(root)]) == 1
    assert f"PROBLEM: test: {file}: 10 x 8 pixels" in capsys.readouterr().out


def test_classes_of_images_are_no_label_maps(trees):
    said = r"classes: has images of classes.*voc2012, voc2012aug, ade20k"
    with pytest.raises(BadInput, match=said):
        catalog.load("classes", trees("classes"), dense=True)


@pytest.fixture(scope="module")
def full_root(tmp_path_factory):
    return embedded.build(tmp_path_factory.mktemp("full"))


def test_digits_are_a_class_folder_with_disjoint_splits(full_root):
    seen: dict[bytes, str] = {}
    sizes = {}
    for split in ("train", "val", "test"):
        folder = ImageFolder(full_root / "digits" / split)
        assert folder.classes == [str(d) for d in range(10)]
        sizes[split] = len(folder)
        for path, _ in folder.samples:
            image = Image.open(path)
            assert image.mode == "RGB" and image.size == (32, 32)
            other = seen.setdefault(image.tobytes(), split)
            assert other == split, f"{path} is in {other}, too"
    assert sum(sizes.values()) == 1797
    assert sizes["test"] >= 700


def test_lists_are_nested_labelled_parts_of_train(full_root):
    one = (full_root / "lists" / "1percent.txt").read_text().split()
    ten = (full_root / "lists" / "10percent.txt").read_text().split()
    assert set(one) < set(ten)
    assert {line.split("/")[0] for line in one} == {str(d) for d in range(10)}
    assert all((full_root / "digits" / "train" / line).is_file() for line in ten)


@pytest.mark.parametrize("part", ["train2017", "val2017"])
def test_scenes_are_coco(full_root, part):
    annotations = full_root / "scenes" / "annotations"
    coco = COCO(annotations / f"instances_{part}.json")
    people = COCO(annotations / f"person_keypoints_{part}.json")
    assert len(coco.getCatIds()) == 10 and len(people.getCatIds()) == 1
    hidden = 0
    for annotation in people.loadAnns(people.getAnnIds()):
        info = coco.imgs[annotation["image_id"]]
        mask = coco.annToMask(coco.anns[annotation["id"]])
        x, y, w, h = (round(v) for v in annotation["bbox"])
        assert mask.shape == (info["height"], info["width"])
        outside = mask.copy()
        outside[y : y + h, x : x + w] = 0
        assert not outside.any(), "the mask stays in its box"
        # x, y and visibility of top, bottom, left, right, centre
        points = np.array(annotation["keypoints"]).reshape(5, 3)
        assert (points[:, :2] >= 0).all()
        assert (points[:, :2] < embedded.SCENE_SIZE).all()
        assert points[0, 1] <= points[4, 1] <= points[1, 1]
        assert points[2, 0] <= points[4, 0] <= points[3, 0]
        assert annotation["num_keypoints"] == 5
        hidden += int((points[:, 2] == 1).sum())
    assert hidden > 0, "some keypoints are occluded"
    images = {i["file_name"] for i in coco.imgs.values()}
    assert images == {p.name for p in (full_root / "scenes" / part).iterdir()}


def test_building_again_changes_nothing_and_another_size_replaces(tmp_path):
    def times_of(folder):
        return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}

    root = embedded.build(tmp_path, size="tiny")
    before = times_of(root)
    embedded.build(tmp_path, size="tiny")
    assert before == times_of(root)
    again = embedded.build(tmp_path / "other", size="tiny")
    for path in before:
        assert (again / path.relative_to(root)).read_bytes() == path.read_bytes()
    scenes = json.loads(
        (root / "scenes/annotations/instances_val2017.json").read_text()
    )
    assert len(scenes["images"]) == 4
