"""Known datasets from the Hub's Parquet files: the lists of the owner's archives, or a refusal."""

import io
import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.containers import scan_here

from backbench.cli.program import main
from backbench.datasets import catalog, hub_tables, splits
from backbench.errors import BadInput
from backbench.images import contents

# name -> (folder and word of its train and test files, columns of image and label)
HUB = {
    "pets": ("data/train", "data/test", "image", "label"),
    "food": ("data/train", "data/validation", "image", "label"),
    "dtd": ("partition_1/train", "partition_1/test", "image", "label"),
    "flowers": ("default/train", "default/test", "image", "label"),
    "cars": ("train", "test", "image", "label"),
    "aircraft": ("data/train", "data/test", "image", "variant"),
    "cifar10": ("plain_text/train", "plain_text/test", "img", "label"),
    "cifar100": ("cifar100/train", "cifar100/test", "img", "fine_label"),
    "caltech101": ("data/train", None, "image", "label"),
    "stl10": ("data/train", "data/test", "image", "label"),
}


@pytest.fixture(autouse=True)
def scanned_here(monkeypatch):
    scan_here(monkeypatch)


def rows_of(images, order, *, again=False):
    """Return (bytes, name, label) of each image; `again` encodes its picture once more."""
    rows = []
    for index in order:
        array = not images.paths[index].endswith(".jpg")
        data = images.read(index)
        if array or again:
            buffer = io.BytesIO()
            kind = "PNG" if array and not again else "JPEG"
            images.open(index).save(buffer, kind, quality=60)
            data = buffer.getvalue()
        name = None if array else images.paths[index].rpartition("/")[2]
        rows.append((data, name, images.labels[index]))
    return rows


def table(file, rows, classes, *, image="image", label="label", more=()):
    """Write rows as the library `datasets` does, the names of the classes in the schema."""
    features = {column: {"_type": "ClassLabel", "names": ["0"]} for column in more}
    features[label] = {"_type": "ClassLabel", "names": list(classes)}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = [(image, struct), *((column, pa.int64()) for column in more)]
    schema = pa.schema([*columns, (label, pa.int64())], metadata=about)
    held = []
    for data, name, number in rows:
        row = {image: {"bytes": data, "path": name}, label: number}
        held.append(row | dict.fromkeys(more, 0))
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(held, schema=schema), file)


def official(found):
    """Return the official splits of a dataset: what was held out is back in train."""
    if not found.held_out:
        return dict(found.items())
    return {"train": found.both(), "test": found.test}


def shrink(monkeypatch, name, found):
    """Give the row of a dataset the sizes of the small one."""
    parts = official(found)
    sizes = (len(parts["train"]), None, len(parts["test"]))
    if "val" in parts:
        sizes = (sizes[0], len(parts["val"]), sizes[2])
    row = replace(catalog.DATASETS[name], sizes=sizes, classes=len(found.train.classes))
    monkeypatch.setitem(catalog.DATASETS, name, row)


def class_names(name, found):
    if name == "food":
        return [each.replace(" ", "_") for each in found.train.classes]
    if name == "cifar100":  # whose true classes are in the order of the alphabet
        return [f"class {label:02}" for label in range(100)]
    return found.train.classes


def original_order(parts, split):
    """Return the places of a split's images by their paths: held-out ones came to the end."""
    images = parts[split]
    return sorted(range(len(images)), key=images.paths.__getitem__)


def as_hub(name, found, base, *, backwards=False, again=False, whole=False):
    """Write a dataset as the Hub has it."""
    train, test, image, label = HUB[name]
    parts = official(found)
    more = ("coarse_label",) if name == "cifar100" else ()
    more = ("family",) if name == "aircraft" else more
    rows = {
        split: rows_of(parts[split], original_order(parts, split), again=again)
        for split in parts
    }
    if test is None:
        rows = {"train": rows["train"] + rows["test"]}
    for split, held in rows.items():
        word = {"train": train, "test": test}.get(split)
        word = word or train.replace("train", "validation")
        ordered = held[::-1] if backwards else held
        half = len(held) // 2
        for part, piece in enumerate((ordered[:half], ordered[half:])):
            file = base / f"{word}-{part:05}-of-00002.parquet"
            table(
                file,
                piece,
                class_names(name, found),
                image=image,
                label=label,
                more=more,
            )


@pytest.fixture
def both(trees, tmp_path, monkeypatch):
    """both(name) makes a dataset in two layouts, and returns their roots."""

    def make(name, **options):
        root = trees(name)
        found = catalog.load(name, root)
        shrink(monkeypatch, name, found)
        as_hub(name, found, tmp_path / "hub" / name, **options)
        return root, tmp_path / "hub"

    return make


def in_path_order(found):
    return {name: splits.digest(splits.by_path(part)) for name, part in found.items()}


@pytest.mark.parametrize("name", HUB)
def test_the_hubs_files_give_the_lists_and_pictures_of_the_archives(both, name):
    root, hub = both(name)
    own = catalog.load(name, root)
    theirs = catalog.load(name, hub)
    assert in_path_order(theirs) == in_path_order(own)
    assert theirs.labelled == own.labelled
    for (_, ours), (_, others) in zip(own.items(), theirs.items()):
        assert contents.whole(splits.by_path(ours)) == contents.whole(
            splits.by_path(others)
        )


@pytest.mark.parametrize("name", ["pets", "flowers"])
def test_the_order_of_rows_decides_nothing_and_other_bytes_are_told(both, name, capsys):
    root, hub = both(name, backwards=True)
    own = catalog.load(name, root)
    theirs = catalog.load(name, hub)
    assert in_path_order(theirs) == in_path_order(own)
    # `data list` and `data check` say where it lies
    assert main(["data", "list", "--data", str(hub)]) == 0
    assert "found: train: parquet, 2 files" in capsys.readouterr().out
    main(["data", "check", name, "--data", str(hub)])
    assert hub_tables.NOTE in capsys.readouterr().out
    # The same pictures, encoded once more
    shutil.rmtree(hub / name)
    as_hub(name, own, hub / name, again=True)
    encoded = catalog.load(name, hub)
    assert in_path_order(encoded) == in_path_order(own), "the names are the same"
    held = contents.whole(splits.by_path(own.test))
    assert contents.whole(splits.by_path(encoded.test)) != held


@pytest.mark.parametrize("name", ["pets", "cifar10"])
def test_pretraining_reads_a_split_of_the_hubs_files(both, name):
    root, hub = both(name)
    own = catalog.load(name, root)
    train = catalog.open_split(hub, name, "train")
    assert len(train) == len(own.train) + len(own.val)
    with pytest.raises(BadInput, match="no split 'unlabeled'"):
        catalog.open_split(hub, name, "unlabeled")


# Birdsnap: one undivided table whose labels are names, and the owner's lists beside it


def as_birdsnap(root, base, *, column="label", divided="", numbers=False):
    """Write Birdsnap's pictures as the Hub has them, each file with a species of its own."""
    owner = root / "birdsnap" / "birdsnap"
    species = [
        line.split("\t") for line in (owner / "species.txt").read_text().splitlines()
    ]
    names = [row[3] if column == "label" else row[1] for row in species[1:]]
    base.mkdir(parents=True)
    for file in ("species.txt", "images.txt"):
        shutil.copy(owner / file, base / file)
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    metadata = None
    if numbers:
        feature = {"_type": "ClassLabel", "names": names}
        about = {"info": {"features": {column: feature}}}
        metadata = {b"huggingface": json.dumps(about).encode()}
    kind = pa.int64() if numbers else pa.string()
    schema = pa.schema([("image", struct), (column, kind)], metadata=metadata)
    for number, row in enumerate(species[1:]):
        held = []
        for file in sorted((owner / "images" / row[3]).iterdir(), reverse=True):
            image = {"bytes": file.read_bytes(), "path": file.name}
            held.append({"image": image, column: number if numbers else names[number]})
        name = f"train-{number:05}-of-00003.parquet"
        if divided:
            name = divided.format(("train", "test", "val")[number])
        file = base / name if "/" in name else base / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(held, schema=schema), file)
    return base.parent


@pytest.fixture
def birds(trees, tmp_path, monkeypatch):
    """birds(**options) makes Birdsnap in two layouts, and returns their roots."""

    def make(**options):
        root = trees("birdsnap")
        row = replace(catalog.DATASETS["birdsnap"], sizes=(3, 15, 15), classes=3)
        monkeypatch.setitem(catalog.DATASETS, "birdsnap", row)
        return root, as_birdsnap(root, tmp_path / "hub" / "birdsnap", **options)

    return make


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"column": "common", "numbers": True},
        {"column": "common", "divided": "{}-00000-of-00001.parquet"},
        {"divided": "birdsnap-{}-00000-of-00001.parquet"},
        # As the Hub converts a repository
        {"divided": "default/{}/0000.parquet"},
        {"divided": "default/{}/0000.parquet", "column": "common", "numbers": True},
    ],
)
def test_birdsnap_is_drawn_as_from_the_archive(birds, options, capsys):
    root, hub = birds(**options)
    own = catalog.load("birdsnap", root)
    theirs = catalog.load("birdsnap", hub)
    assert in_path_order(theirs) == in_path_order(own)
    for (_, ours), (_, others) in zip(own.items(), theirs.items()):
        assert others.classes == ours.classes
        assert contents.whole(splits.by_path(ours)) == contents.whole(
            splits.by_path(others)
        )
    assert theirs.notes == (*own.notes, hub_tables.NOTE)
    assert main(["data", "list", "--data", str(hub)]) == 0
    assert "found: train: parquet, 3 files" in capsys.readouterr().out


def test_birdsnap_needs_no_list_of_images(birds):
    root, hub = birds()
    (hub / "birdsnap" / "images.txt").unlink()
    theirs = catalog.load("birdsnap", hub)
    assert in_path_order(theirs) == in_path_order(catalog.load("birdsnap", root))
    assert theirs.notes == (hub_tables.NOTE,)


def test_birdsnap_needs_the_list_of_species(birds, bad_input):
    _, hub = birds()
    (hub / "birdsnap" / "species.txt").unlink()
    status = main(["data", "check", "birdsnap", "--data", str(hub)])
    bad_input(status, "species.txt is missing: the order of the classes is in it")


def test_birdsnap_with_a_species_that_is_not_listed(birds, bad_input):
    _, hub = birds()
    file = hub / "birdsnap" / "species.txt"
    file.write_text(file.read_text().replace("Zebra_Finch", "Zebra"))
    status = main(["data", "check", "birdsnap", "--data", str(hub)])
    bad_input(status, "lists no species 'Zebra_Finch', which the tables have")


def test_birdsnap_without_a_species_pictures(birds, bad_input):
    _, hub = birds()
    data = hub / "birdsnap" / "data"
    shutil.copy(
        data / "train-00000-of-00003.parquet", data / "train-00001-of-00003.parquet"
    )
    status = main(["data", "check", "birdsnap", "--data", str(hub)])
    bad_input(status, "no image of 1 species, 'Zebra_Finch' first")


def test_birdsnap_in_both_layouts_is_refused(birds, bad_input):
    root, hub = birds()
    shutil.copytree(root / "birdsnap" / "birdsnap" / "images", hub / "birdsnap/images")
    status = main(["data", "check", "birdsnap", "--data", str(hub)])
    bad_input(status, "birdsnap is there twice, as images and as data/train-00000")
    shutil.copytree(hub / "birdsnap" / "data", root / "birdsnap" / "data")
    status = main(["data", "check", "birdsnap", "--data", str(root)])
    bad_input(status, "birdsnap is there twice")


def test_files_that_count_other_classes_are_refused(pets, bad_input):
    """The first file's names would be given to the second one's numbers."""
    word = "data/train-0000{}-of-00002"
    test = "data/test-00000-of-00001"
    base = pets({word.format(0): TRAIN, word.format(1): TRAIN, test: TEST})
    rows = [(picture(1), "cat_9.jpg", 0)]
    classes = ("Birman", "abyssinian", "american_bulldog")
    table(base / "data" / "train-00001-of-00002.parquet", rows, classes)
    status = main(["data", "check", "pets", "--data", str(base.parent)])
    bad_input(status, "its classes are not those of train-00000-of-00002.parquet")


def test_labels_may_be_names_where_names_tell_their_order(pets, tmp_path, bad_input):
    base = pets(USUAL)
    numbered = catalog.load("pets", base.parent)
    for file in base.rglob("*.parquet"):
        rows = pq.read_table(file)
        texts = pa.array([PETS[label] for label in rows["label"].to_pylist()])
        pq.write_table(rows.set_column(1, "label", texts), file)
    named = catalog.load("pets", base.parent)
    assert in_path_order(named) == in_path_order(numbered)
    # The owner's numbers of flowers are in no order of names
    shutil.copytree(base, tmp_path / "hub" / "cars")
    status = main(["data", "check", "cars", "--data", str(tmp_path / "hub")])
    bad_input(
        status, "its labels are names, and cars's classes are counted by the owner's"
    )


def test_images_may_be_named_by_a_column_of_their_own(pets):
    """timm's pets have no paths; `image_id` has the names of the archives."""
    base = pets(USUAL)
    held = catalog.load("pets", base.parent).test
    for file in base.rglob("*.parquet"):
        rows = pq.read_table(file)
        images = rows["image"].to_pylist()
        names = [row["path"].removesuffix(".jpg") for row in images]
        bare = pa.array([{**row, "path": None} for row in images], rows["image"].type)
        rows = rows.set_column(0, "image", bare).append_column("image_id", [names])
        pq.write_table(rows, file)
    assert catalog.load("pets", base.parent).test.paths == held.paths


def test_batches_are_put_in_the_order_of_their_numbers():
    """The Hub's CIFAR-10 begins with batch 4, as the archive does."""
    labels = []
    for number in (4, 3, 2, 5, 1):
        labels += [*hub_tables.BATCHES[number - 1], number, number]
    order = hub_tables.archive_order(labels)
    assert sorted(order) == list(range(110))
    assert [labels[row] for row in order][20::22] == [1, 2, 3, 4, 5]
    # No batches: the rows stay as they are
    assert list(hub_tables.archive_order(labels[1:])) == list(range(109))


def test_the_hubs_pictures_are_put_in_the_order_of_the_batches(tmp_path, monkeypatch):
    """Batch 4 comes first in the Hub's file; torchvision, and so the list, begins with batch 1."""
    # 1. Twenty pictures of each batch; a picture's red is its number among the owner's
    owners = [label for batch in hub_tables.BATCHES for label in batch]
    base = tmp_path / "cifar10"
    begins = [60, 0, 20, 40, 80]
    rows = []
    for begin in begins:
        for number in range(begin, begin + 20):
            rows.append((picture(number), None, owners[number]))
    columns = {"image": "img", "label": "label"}
    classes = [str(label) for label in range(10)]
    table(base / "plain_text" / "train.parquet", rows, classes, **columns)
    tests = [(picture(number), None, number % 10) for number in (7, 3, 5)]
    table(base / "plain_text" / "test.parquet", tests, classes, **columns)
    row = replace(catalog.DATASETS["cifar10"], sizes=(100, None, 3))
    monkeypatch.setitem(catalog.DATASETS, "cifar10", row)
    # 2. They are read in the owner's order, the test pictures in the file's own
    train = catalog.open_split(tmp_path, "cifar10", "train")
    assert [int(train.array(n)[0, 0, 0]) for n in range(100)] == list(range(100))
    assert list(train.labels) == owners
    test = catalog.open_split(tmp_path, "cifar10", "test")
    assert [int(test.array(n)[0, 0, 0]) for n in range(3)] == [7, 3, 5]


def picture(red):
    """Return a small PNG of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


PETS = ("abyssinian", "american_bulldog", "Birman")


@pytest.fixture
def pets(tmp_path, monkeypatch):
    """pets(file=rows, ...) writes tables of three classes; returns ROOT/pets."""
    row = replace(catalog.DATASETS["pets"], sizes=(6, None, 3), classes=3)
    monkeypatch.setitem(catalog.DATASETS, "pets", row)
    base = tmp_path / "root" / "pets"

    def write(files, *, classes=PETS, **columns):
        count = 0
        for word, labels in files.items():
            rows = []
            for label in labels:
                count += 1
                buffer = io.BytesIO()
                color = (count, 2 * count, 3 * count)
                Image.new("RGB", (8, 8), color).save(buffer, "PNG")
                rows.append((buffer.getvalue(), f"cat_{count}.jpg", label))
            table(base / f"{word}.parquet", rows, classes, **columns)
        return base

    return write


TRAIN, TEST = [0, 1, 2, 0, 1, 2], [0, 1, 2]
USUAL = {"data/train-00000-of-00001": TRAIN, "data/test-00000-of-00001": TEST}


def test_labels_are_counted_as_the_archives_do(pets):
    """A table that counts its classes as text sorts capitals first."""
    base = pets(USUAL, classes=("Birman", "abyssinian", "american_bulldog"))
    test = catalog.load("pets", base.parent).test
    assert test.classes == ("abyssinian", "american_bulldog", "Birman")
    assert test.labels == (2, 0, 1)
    numbers = pets(USUAL, classes=("1", "10", "2"))
    assert catalog.load("pets", numbers.parent).test.labels == (0, 2, 1)
    # Without names, the numbers are the owner's, and the row says so
    unnamed = catalog.load("pets", pets(USUAL, classes=()).parent)
    assert unnamed.test.labels == (0, 1, 2)
    assert "name no classes" in unnamed.notes[1]


WRONG = {
    "a split is missing": ({"data/train": TRAIN}, {}, "no Parquet files of the split"),
    "another count": (
        {"data/train": TRAIN[:4], "data/test": TEST},
        {},
        "4 images of 'train', and pets has 6",
    ),
    "another label": (
        {"data/train": [*TRAIN[:5], 3], "data/test": TEST},
        {},
        "row 5 has label 3; pets allows 0..2",
    ),
    "other classes": (USUAL, {"classes": ("cat", "dog")}, "2 classes (cat, dog), and"),
    "no labels": (USUAL, {"label": "species"}, "its columns are image, species"),
    "two configurations": (
        {"a/train": TRAIN, "b/train": TRAIN, "a/test": TEST, "b/test": TEST},
        {},
        "holds the configurations a and b",
    ),
    "no split in its name": ({**USUAL, "data/index": TEST}, {}, "tells no split"),
    "a split more": (
        {**USUAL, "data/validation": TEST},
        {},
        "pets has no split 'val'",
    ),
    "twice": (
        {**USUAL, "train": TRAIN},
        {},
        "holds the same split as",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_other_files_are_refused_in_one_line(pets, what, bad_input):
    files, columns, said = WRONG[what]
    base = pets(files, **columns)
    status = main(["data", "check", "pets", "--data", str(base.parent)])
    bad_input(status, str(base), said)


def test_a_table_without_images_names_its_columns(pets, bad_input):
    base = pets(USUAL)
    for file in base.rglob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(["image"]), file)
    status = main(["data", "check", "pets", "--data", str(base.parent)])
    bad_input(status, "no column of images", "its columns are label")


def test_another_partition_is_refused(tmp_path, bad_input):
    file = tmp_path / "dtd" / "partition_2" / "train-00000-of-00001.parquet"
    table(file, [], ("banded",))
    status = main(["data", "check", "dtd", "--data", str(tmp_path)])
    bad_input(status, "another configuration than partition_1")


def test_two_layouts_beside_each_other_are_refused(both, bad_input):
    root, hub = both("pets")
    shutil.copytree(hub / "pets" / "data", root / "pets" / "data")
    status = main(["data", "check", "pets", "--data", str(root)])
    bad_input(status, "pets is there twice", "move one away")
    # The owner's folder in ROOT itself, and tables in ROOT/pets and ROOT/mine
    (root / "pets" / "oxford-iiit-pet").rename(root / "oxford-iiit-pet")
    status = main(["data", "check", "pets", "--data", str(root)])
    bad_input(status, "pets is there twice", "move one away")
    (root / "pets").rename(root / "mine")
    assert len(catalog.load("pets", root).test) == 6
