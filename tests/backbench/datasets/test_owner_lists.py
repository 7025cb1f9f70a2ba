"""The lists of Places205, iNaturalist and Birdsnap by hand; no image is opened."""

import json

import pytest

from backbench.datasets import readers
from backbench.errors import BadInput


@pytest.fixture
def places(tmp_path):
    """places(train, val): the two lists of Places205, a line each."""
    base = tmp_path / "places205"
    lists = base / "trainvalsplit_places205"
    lists.mkdir(parents=True)
    (base / "data" / "vision" / "torralba" / "deeplearning" / "images256").mkdir(
        parents=True
    )
    (base / "images256").mkdir()

    def read(train, val):
        (lists / "train_places205.csv").write_text("\n".join(train) + "\n")
        (lists / "val_places205.csv").write_text("\n".join(val) + "\n")
        return readers.places205(base, 0)

    return read


TRAIN = ["b/bar/1.jpg 1", "a/abbey/1.jpg 0", "a/abbey/2.jpg 0", "b/bar/2 3.jpg 1"]
VAL = ["a/abbey/9.jpg 0", "b/bar/9.jpg 1"]


def test_places_classes_are_the_folders_by_their_numbers(places):
    found = places(TRAIN, VAL)
    assert found.train.classes == ("a/abbey", "b/bar")
    assert sorted([*found.train.paths, *found.val.paths]) == sorted(
        line.rpartition(" ")[0] for line in TRAIN
    )
    assert list(found.test.paths) == ["a/abbey/9.jpg", "b/bar/9.jpg"]
    assert list(found.test.labels) == [0, 1]
    assert found.held_out


@pytest.mark.parametrize(
    ("train", "val", "says"),
    [
        (
            [*TRAIN, "c"],
            VAL,
            "train_places205.csv: 'c' is no path and number of a class",
        ),
        ([*TRAIN, " 1"], VAL, "'1' is no path and number"),
        ([*TRAIN, "c/1.jpg 12345"], VAL, "'c/1.jpg 12345' is no path and number"),
        ([*TRAIN, "c/1.jpg 3"], VAL, "no image of class 2, but of class 3; get"),
        (
            TRAIN,
            ["b/bar/9.jpg 0"],
            "val_places205.csv: b/bar/9.jpg is of class 0, a/abbey; get",
        ),
        (
            TRAIN,
            ["c/9.jpg 7"],
            "val_places205.csv: c/9.jpg is of class 7, which train has not",
        ),
        (
            [*TRAIN, "b/bar/3.jpg 0"],
            VAL,
            "train_places205.csv: b/bar/3.jpg is of class 0",
        ),
    ],
)
def test_a_damaged_list_of_places_is_said(places, train, val, says):
    with pytest.raises(BadInput) as error:
        places(train, val)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def naturalist(tmp_path):
    def read(train, val):
        for split, about in (("train", train), ("val", val)):
            (tmp_path / f"{split}2018.json").write_text(json.dumps(about))
        return readers.inat18(tmp_path, 0)

    return read


def listed(*images, categories=(30, 7)):
    """(name, category) of each image."""
    rows = [{"id": n, "file_name": name} for n, (name, _) in enumerate(images)]
    of = [{"image_id": n, "category_id": kind} for n, (_, kind) in enumerate(images)]
    names = [{"id": number} for number in categories]
    return {"images": rows, "annotations": of, "categories": names}


SOME = listed(("x/1.jpg", 30), ("x/2.jpg", 7), ("x/3.jpg", 7), ("x/4.jpg", 30))


def test_naturalists_classes_are_the_numbers_in_order(naturalist):
    found = naturalist(SOME, listed(("y/1.jpg", 30)))
    assert found.test.classes == ("7", "30")
    assert list(found.test.labels) == [1]
    labels = dict(zip(found.train.paths, found.train.labels, strict=True))
    labels |= dict(zip(found.val.paths, found.val.labels, strict=True))
    assert labels == {"x/1.jpg": 1, "x/2.jpg": 0, "x/3.jpg": 0, "x/4.jpg": 1}


@pytest.mark.parametrize(
    ("val", "says"),
    [
        ({}, "val2018.json: no list of images with a category each"),
        ([], "val2018.json: no list of images"),
        (listed(("y/1.jpg", 8)), "val2018.json: no list of images"),
        (
            listed(("y/1.jpg", 7), categories=(7,)),
            "val2018.json: has other categories than train",
        ),
        (listed(("../1.jpg", 7)), "outside of"),
    ],
)
def test_a_damaged_list_of_naturalist_is_said(naturalist, val, says):
    with pytest.raises(BadInput) as error:
        naturalist(SOME, val)
    assert says in str(error.value)


@pytest.fixture
def birds(tmp_path):
    """birds(counts, **changes): Birdsnap with so many images of each species."""
    folder = tmp_path / "birdsnap"

    def read(counts, *, header="path\tspecies_id", inside="images", more=()):
        images = folder / inside
        species = ["id\tcommon\tdir", "12\tWren\twren", "3\tOwl\towl"]
        rows = [header]
        for (number, name), count in zip(
            ((12, "wren"), (3, "owl")), counts, strict=True
        ):
            (images / name).mkdir(parents=True, exist_ok=True)
            for n in range(count):
                (images / name / f"{n:02}.jpg").write_bytes(b"x")
                rows.append(f"{name}/{n:02}.jpg\t{number}")
        (images / "wren" / "empty.jpg").touch()  # a failed download
        rows += ["wren/empty.jpg\t12", "wren/gone.jpg\t12", *more]
        (folder / "species.txt").write_text("\n".join(species))
        (folder / "images.txt").write_text("\n".join(rows))
        return readers.birdsnap(tmp_path, 0)

    return read


@pytest.mark.parametrize("inside", ["images", "download/images"])
def test_five_birds_of_each_species_are_val_and_five_test(birds, inside):
    found = birds((13, 11), inside=inside)
    assert found.train.classes == ("owl", "wren")  # by their ids
    counts = {}
    for name, images in found.items():
        counts[name] = [list(images.labels).count(label) for label in (0, 1)]
    assert counts == {"train": [1, 3], "val": [5, 5], "test": [5, 5]}
    paths = [*found.train.paths, *found.val.paths, *found.test.paths]
    assert len(set(paths)) == 24
    assert found.notes == ("coverage 24 of 26 listed images (92.3%)",)


@pytest.mark.parametrize(
    ("counts", "given", "says"),
    [
        ((13, 10), {}, "species 'owl' has 10 images; 5 + 5 and training need 11"),
        ((13, 0), {}, "no image of 1 species, 'owl' first"),
        (
            (13, 11),
            {"header": "path\tkind"},
            "expected tab-separated columns path, species_id",
        ),
        (
            (13, 11),
            {"more": ("owl/00.jpg\t99",)},
            "images.txt: owl/00.jpg is of a species that",
        ),
    ],
)
def test_birds_that_do_not_fit_are_said(birds, counts, given, says):
    with pytest.raises(BadInput) as error:
        birds(counts, **given)
    assert says in str(error.value)


def test_without_a_folder_of_birds_the_way_to_them_is_said(tmp_path, birds):
    birds((13, 11))
    (tmp_path / "birdsnap" / "images").rename(tmp_path / "birdsnap" / "other")
    with pytest.raises(
        BadInput, match="no folder 'images'; run the dataset's own get_birdsnap"
    ):
        readers.birdsnap(tmp_path, 0)
    (tmp_path / "birdsnap" / "images.txt").write_text("")
    with pytest.raises(BadInput, match="expected tab-separated columns"):
        readers.birdsnap(tmp_path, 0)
