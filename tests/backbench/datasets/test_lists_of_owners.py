"""Owners' lists of VOC's classes, label maps and SUN's partitions: several images, odd values."""

import pytest

from backbench.datasets import readers
from backbench.errors import BadInput
from backbench.images.dense import IGNORED


def written(base, files):
    for name, text in files.items():
        file = base / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


MAIN = "VOCdevkit/VOC2007/ImageSets/Main"


def of_voc(base, split, said):
    """Write a list for each class; `said` has class -> what it says of the images 1, 2 and 3."""
    for name in readers.VOC07_CLASSES:
        values = said.get(name, (-1, -1, -1))
        lines = [f"{n:06} {value:>2}\n" for n, value in enumerate(values, 1)]
        written(base, {f"{MAIN}/{name}_{split}.txt": "".join(lines)})


def test_vocs_lists_say_which_classes_an_image_shows(tmp_path):
    of_voc(tmp_path, "train", {"aeroplane": (1, -1, 0), "tvmonitor": (1, 0, 1)})
    of_voc(tmp_path, "val", {"bicycle": (0, 0, 1)})
    of_voc(tmp_path, "test", {})
    found = readers.voc2007(tmp_path, 0)
    assert found.train.marks == ("0,19", "19?", "0?,19")
    assert found.val.marks == ("1?", "1?", "1")
    assert found.test.marks == ("", "", "")
    assert list(found.train.paths) == [f"JPEGImages/00000{n}.jpg" for n in (1, 2, 3)]
    assert found.train.classes == readers.VOC07_CLASSES
    assert not found.held_out and found.train.labels == (0, 0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("000001  1\n000002  2\n000003 -1\n", "'2' of image 000002 is not 1, 0 or -1"),
        (
            "000001  1\n000002 -1\n",
            "lists other images than aeroplane_train.txt; unpack",
        ),
    ],
)
def test_a_damaged_list_of_vocs_is_named(tmp_path, change, says):
    for split in ("train", "val", "test"):
        of_voc(tmp_path, split, {})
    file = tmp_path / MAIN / "cow_train.txt"
    file.write_text(change)
    with pytest.raises(BadInput) as refused:
        readers.voc2007(tmp_path, 0)
    assert str(refused.value).startswith(f"{file}: {says}")


SEGMENTATION = "VOCdevkit/VOC2012/ImageSets/Segmentation"


def of_maps(base, train, test, maps="SegmentationClass", name="train"):
    files = {
        f"{SEGMENTATION}/{name}.txt": "\n".join(train),
        f"{SEGMENTATION}/val.txt": "\n".join(test),
    }
    files |= {f"VOCdevkit/VOC2012/{maps}/{stem}.png": "" for stem in train}
    files |= {f"VOCdevkit/VOC2012/SegmentationClass/{stem}.png": "" for stem in test}
    written(base, files)


def test_a_tenth_of_the_label_maps_is_held_out(tmp_path):
    train, test = [f"t{n:02}" for n in range(20)], ["v1", "v2"]
    of_maps(tmp_path, train, test)
    found = readers.voc2012(tmp_path, 0)
    assert [len(part) for _, part in found.items()] == [18, 2, 2]
    both = sorted(
        zip((*found.train.paths, *found.val.paths), found.train.maps + found.val.maps)
    )
    assert both == [
        (f"JPEGImages/{s}.jpg", f"SegmentationClass/{s}.png") for s in train
    ]
    assert found.test.maps == tuple(f"SegmentationClass/{stem}.png" for stem in test)
    assert found.test.values == {**{n: n for n in range(21)}, 255: IGNORED}
    assert found.test.classes == ("background", *map(str, range(1, 21)))
    of_maps(tmp_path, train, test, "SegmentationClassAug", "trainaug")
    augmented = readers.voc2012aug(tmp_path, 0)
    assert set(augmented.train.maps) <= {f"SegmentationClassAug/{s}.png" for s in train}
    assert augmented.test.maps == found.test.maps


def test_label_maps_that_are_missing_or_shared_are_counted(tmp_path):
    of_maps(tmp_path, ["a", "b", "c"], ["v"])
    folder = tmp_path / "VOCdevkit" / "VOC2012"
    for stem in "bc":
        (folder / "SegmentationClass" / f"{stem}.png").unlink()
    with pytest.raises(BadInput) as refused:
        readers.voc2012(tmp_path, 0)
    first = folder / "SegmentationClass" / "b.png"
    assert str(refused.value) == f"{first} is missing (2 label maps are)"
    of_maps(tmp_path, ["c", "b", "a"], ["b", "c"])
    with pytest.raises(BadInput) as refused:
        readers.voc2012(tmp_path, 0)
    assert str(refused.value) == (
        f"{folder}: 2 images of train are test images, JPEGImages/b.jpg first; take them out of"
        " the list of train"
    )
    of_maps(tmp_path, ["../a"], ["v"])
    with pytest.raises(
        BadInput, match=r"its lists name JPEGImages/\.\./a\.jpg, outside"
    ):
        readers.voc2012(tmp_path, 0)


@pytest.mark.parametrize("where", ["Partitions", "SUN397"])
def test_suns_classes_are_in_the_order_of_their_list(tmp_path, where):
    lines = {
        "SUN397/ClassName.txt": "/b/bay\n\n/a/apse/indoor \n",
        f"{where}/Training_01.txt": "".join(
            f"/a/apse/indoor/{n}.jpg\n" for n in range(5)
        ),
        f"{where}/Testing_01.txt": "/b/bay/1.jpg\n/a/apse/indoor/9.jpg\n",
    }
    written(tmp_path, lines)
    found = readers.sun397(tmp_path, 0)
    assert found.test.classes == ("/b/bay", "/a/apse/indoor")
    assert found.test.labels == (0, 1)
    assert list(found.test.paths) == ["b/bay/1.jpg", "a/apse/indoor/9.jpg"]
    assert (len(found.train), len(found.val)) == (4, 1)
    assert set(found.train.labels) == {1}
    (tmp_path / where / "Testing_01.txt").write_text("/b/bay/1.jpg\n/c/1.jpg\n")
    with pytest.raises(BadInput, match=r"Testing_01\.txt: /c/1\.jpg is of no class in"):
        readers.sun397(tmp_path, 0)
    (tmp_path / where / "Testing_01.txt").unlink()
    with pytest.raises(
        BadInput, match=r"Testing_01\.txt is missing; get SUN's Partiti"
    ):
        readers.sun397(tmp_path, 0)


def test_owners_texts_are_printable(tmp_path):
    file = tmp_path / "list.txt"
    file.write_text(" a b \n\n\tc\r\n")
    assert readers._lines(file) == ["a b", "c"]
    file.write_text("a\x1b")
    with pytest.raises(
        BadInput, match=rf"^{file}: holds the control character '\\x1b'$"
    ):
        readers._lines(file)
    file.write_bytes(b"\xff")
    with pytest.raises(BadInput, match=f"^{file}: not readable as a text"):
        readers._lines(file)


def test_places_outside_of_a_set_are_refused(tmp_path):
    readers._refuse_outside(tmp_path, ["a/b.jpg", "a..b/c.jpg", "..a/b"])
    for path in ("/a/b.jpg", "a/../b.jpg", ".."):
        with pytest.raises(
            BadInput, match=f"^{tmp_path}: its lists name .*, outside of it"
        ):
            readers._refuse_outside(tmp_path, ["a", path])
