"""A dataset's files: all there, none in two splits by name, content or format; hold-outs."""

import hashlib
import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from support.pictures import picture
from support.strangers import door

from backbench.datasets import catalog, splits, walk
from backbench.errors import BadInput
from backbench.images.image_list import ImageList, scan_folder
from backbench.records import clean_test


@pytest.fixture
def three(tmp_path):
    """Three splits of two classes with three files each, no two alike, all of one size."""
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(3):
                file = tmp_path / part / name / f"{i}.png"
                file.write_bytes(f"{part:5} {name}{i}".encode())
    parts = [scan_folder(tmp_path / part) for part in ("train", "val", "test")]
    return splits.Splits(*parts, held_out=False)


def refuse_shared(found):
    walk.refuse_shared("x", Path("data"), found, walk.look("x", found))


def test_a_file_in_two_splits_is_refused_also_through_a_link(three, tmp_path):
    walk.look("x", three)
    with pytest.raises(BadInput, match="is in train and in test"):
        walk.look("x", replace(three, test=three.train))
    link = three.test.file(0)
    link.unlink()
    link.symlink_to(three.train.file(4))
    with pytest.raises(BadInput, match=r"a/0.png is in train and in test"):
        walk.look("x", three)
    (tmp_path / "again").symlink_to(tmp_path / "val")
    with pytest.raises(BadInput, match=r"a/0.png is in val and in test"):
        walk.look("x", replace(three, test=scan_folder(tmp_path / "again")))


def test_images_that_a_deduplicator_has_linked_are_two(three):
    """Official sets hold such pairs; in one's own, their content is refused."""
    copy = three.test.file(0)
    copy.unlink()
    copy.hardlink_to(three.train.file(4))
    walk.look("x", three)
    with pytest.raises(BadInput, match="is also in training data"):
        refuse_shared(three)


def test_a_link_to_a_file_of_no_split_is_a_file_with_its_size(three, tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"0123456789" * 7)
    three.val.file(2).unlink()
    three.val.file(2).symlink_to(tmp_path / "elsewhere")
    assert list(walk.look("x", three).sizes["val"]) == [8, 8, 70, 8, 8, 8]


@pytest.mark.parametrize("instead", [None, "a folder", "a dangling link"])
def test_a_missing_file_is_named(three, instead):
    for index in (1, 3):
        three.test.file(index).unlink()
    if instead == "a folder":
        three.test.file(1).mkdir()
    if instead == "a dangling link":
        three.test.file(1).symlink_to("nowhere")
    with pytest.raises(
        BadInput, match=r"test/a/1.png is missing \(2 of 6 images are\)"
    ):
        walk.look("x", three)


def test_a_copied_test_image_is_found(three):
    refuse_shared(three)
    three.test.file(5).write_bytes(three.val.file(1).read_bytes())
    message = r"the test image b/2.png is also in training data as a/1.png; remove"
    with pytest.raises(BadInput, match=message):
        refuse_shared(three)
    three.test.file(0).write_bytes(three.train.file(3).read_bytes())
    three.test.file(4).write_bytes(three.train.file(3).read_bytes())
    message = (
        r"the test image a/0.png is also in training data as b/0.png and 2 more; remove it"
        r" from one \(`backbench data check x --data data --copies FILE` lists all\)"
    )
    with pytest.raises(BadInput, match=message):
        refuse_shared(three)


@pytest.fixture
def files_read(monkeypatch):
    """The files whose ends were read, in order."""
    read = []
    ends = ImageList.ends

    def noted(images, index):
        read.append(images.file(index))
        return ends(images, index)

    monkeypatch.setattr(ImageList, "ends", noted)
    return read


def test_files_of_one_size_are_read_once_and_only_they(three, files_read):
    three.train.file(0).write_bytes(b"of another size")
    sizes = walk.look("x", three).sizes
    shared = walk.shared_content(three.test, sizes["test"], three.train, sizes["train"])
    assert not shared
    of_test = [three.test.file(i) for i in range(6)]
    of_train = [three.train.file(i) for i in range(1, 6)]
    assert Counter(files_read) == Counter([*of_test, *of_train])


def test_the_same_files_are_compared_once(three, files_read):
    """A second start looks at stamps alone, also where a seed holds out other images for val."""
    everything = splits.concatenate(three.train, three.val)
    held = []
    for seed in (1, 2):
        train, val = splits.hold_out(everything, seed)
        held.append(val)
        found = replace(
            three, train=everything.subset(train), val=everything.subset(val)
        )
        refuse_shared(found)
        assert bool(files_read) == (seed == 1)
        files_read.clear()
    assert held[0] != held[1]
    # Another place, and a write that keeps the size: both set a file's ctime
    three.train.file(2).rename(three.train.file(2).with_name("9.png"))
    found = replace(three, train=scan_folder(three.train.root))
    refuse_shared(found)
    assert files_read
    three.val.file(1).write_bytes(three.test.file(5).read_bytes())
    for _ in range(2):
        with pytest.raises(BadInput, match=r"the test image b/2.png is also"):
            refuse_shared(found)


@pytest.mark.parametrize(
    "change", ["size", "time", "added", "removed", "renamed", "relabelled"]
)
def test_after_every_change_files_are_compared_anew(three, files_read, change):
    refuse_shared(three)
    files_read.clear()
    refuse_shared(three)
    assert not files_read
    file = three.train.file(2)
    if change == "size":
        file.write_bytes(b"longer than it was")
    elif change == "time":
        before = file.stat().st_ctime_ns
        while file.stat().st_ctime_ns == before:  # the clock of files is coarse
            file.write_bytes(file.read_bytes())
    elif change == "added":
        file.with_name("9.png").write_bytes(b"train a9")
    elif change == "removed":
        file.unlink()
    elif change == "renamed":
        file.rename(file.with_name("9.png"))
    else:
        file.rename(three.train.root / "b" / "9.png")
    refuse_shared(replace(three, train=scan_folder(three.train.root)))
    assert files_read


def test_a_cache_that_cannot_be_written_only_costs_time(three, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "file"))
    refuse_shared(three)
    three.test.file(5).write_bytes(three.val.file(1).read_bytes())
    with pytest.raises(BadInput, match="is also in training data"):
        refuse_shared(three)


def test_equal_ends_are_not_yet_equal_files(three):
    for images, middle in ((three.test, b"x"), (three.train, b"y")):
        images.file(0).write_bytes(b"0" * 5000 + middle + b"1" * 5000)
    refuse_shared(three)


def test_every_file_is_asked_once(three, monkeypatch):
    asked = Counter()
    stat = os.stat

    def counted(path, *args, **kwargs):
        asked[str(path)] += 1
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", counted)
    walk.look("x", three)
    for _, images in three.items():
        assert {asked[str(images.file(i))] for i in range(len(images))} == {1}


@pytest.fixture
def root(tmp_path):
    """ROOT/shapes with three splits of two classes; all pictures are different JPEGs."""
    numbers = iter(range(100))
    for split, count in (("train", 8), ("val", 3), ("test", 3)):
        for label in ("a", "b"):
            folder = tmp_path / "shapes" / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                picture(next(numbers), 48).save(folder / f"{i}.jpg", quality=90)
    return tmp_path


def problems(root):
    said = door("data", "check", "shapes", "--data", root)
    lines = [line for line in said.out.splitlines() if "PROBLEM" in line]
    assert said.status == (1 if lines else 0), said.err
    return lines


def test_different_pictures_are_no_copies(root):
    assert not problems(root)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "webp"])
@pytest.mark.parametrize("split", ["test", "val"])
def test_a_training_image_in_another_format(root, split, suffix):
    with Image.open(root / "shapes" / "train" / "a" / "3.jpg") as image:
        image.save(root / "shapes" / split / "b" / f"copy.{suffix}")
    (line,) = problems(root)
    assert "a/3.jpg" in line and f"b/copy.{suffix}" in line
    assert f"train and {split} share 1 images" in line


def test_a_test_image_saved_as_jpeg(root):
    """The original is in test, and what was trained on lost a little."""
    one = picture(200, 48)
    one.save(root / "shapes" / "test" / "a" / "original.png")
    one.save(root / "shapes" / "train" / "b" / "again.jpg", quality=75)
    (line,) = problems(root)
    assert "in another format" in line
    assert "again.jpg" in line and "original.png" in line


def test_the_copies_are_written_as_rescore_reads_them(root, tmp_path):
    file = tmp_path / "copies.tsv"
    words = ("data", "check", "shapes", "--data", root, "--copies", file)
    said = door(*words)
    assert "not written" in said.out and not file.exists()
    with Image.open(root / "shapes" / "train" / "a" / "3.jpg") as image:
        image.save(root / "shapes" / "test" / "a" / "one.png")
        image.save(root / "shapes" / "test" / "b" / "other.webp")
    again = (root / "shapes" / "val" / "b" / "0.jpg").read_bytes()
    (root / "shapes" / "test" / "a" / "third.jpg").write_bytes(again)
    said = door(*words)
    # No run will have the third, so there is nothing to score again
    assert "3 test images that are copies, 1 of them byte for byte" in said.out
    assert "rescore" not in said.out
    assert file.read_text().splitlines() == [
        "a/one.png\tcopy\ta/3.jpg",
        "a/third.jpg\tcopy\tb/0.jpg",
        "b/other.webp\tcopy\ta/3.jpg",
    ]
    assert len(clean_test.read_list(file).flaws) == 3
    # A file that is there is never written over
    held = file.read_bytes()
    said = door(*words)
    assert f"{file}: is there already" in said.err and file.read_bytes() == held
    # Files that differ are measured, and scored again without them
    (root / "shapes" / "test" / "a" / "third.jpg").unlink()
    file.unlink()
    said = door(*words)
    assert (
        f"2 test images that are copies; `backbench rescore RUNS --list {file}`"
        in said.out
    )


def image_list(counts):
    """Make a list of so many images of each class; no file is there."""
    paths = []
    labels = []
    for label, (name, count) in enumerate(counts.items()):
        paths += [f"{name}/{i:03d}.png" for i in range(count)]
        labels += [label] * count
    return ImageList(Path("/data"), tuple(paths), tuple(labels), tuple(counts))


def test_hold_out_is_a_fifth_of_each_class_rounded_half_up():
    images = image_list({"a": 10, "b": 12, "c": 13, "d": 1, "e": 2, "f": 3})
    train, val = splits.hold_out(images)
    counts = [sum(images.labels[i] == label for i in val) for label in range(6)]
    assert counts == [2, 2, 3, 0, 1, 1]
    assert sorted(train + val) == list(range(len(images)))


def test_hold_out_does_not_depend_on_the_order_of_the_files():
    images = image_list({"a": 25, "b": 40})
    order = list(range(65))
    random.Random(3).shuffle(order)
    mixed = images.subset(order)
    for seed in (0, 1):
        one = {images.paths[i] for i in splits.hold_out(images, seed)[1]}
        other = {mixed.paths[i] for i in splits.hold_out(mixed, seed)[1]}
        assert one == other
    assert splits.hold_out(images, 0) != splits.hold_out(images, 1)


def test_hold_out_is_what_it_was():
    """Hold-out files are fixed: a change would silently give everyone another validation set."""
    images = image_list({"a": 10})
    digests = {}
    for i in range(10):
        digests[i] = hashlib.sha256(f"0 a/{i:03d}.png".encode()).digest()
    first_two = sorted(digests, key=digests.get)[:2]
    _, val = splits.hold_out(images)
    assert val == sorted(first_two)


def test_draw_is_without_replacement_and_names_a_small_class():
    images = image_list({"a": 31, "b": 35})
    chosen, rest = splits.draw(images, 30, 0)
    assert len(set(chosen)) == 60
    assert len(rest) == 6
    assert not set(chosen) & set(rest)
    with pytest.raises(BadInput, match="needs 32 images of class 'a', found 31"):
        splits.draw(images, 32, 0)


def test_check_refuses_labels_outside_the_list_an_empty_split_and_other_classes(three):
    splits.check("x", three)
    wrong = replace(three.test, labels=(0, 1, 2, 0, 1, 1))
    message = r"test image a/2.png has label 2; the class list allows 0..1"
    with pytest.raises(BadInput, match=message):
        splits.check("x", replace(three, test=wrong))
    with pytest.raises(BadInput, match="the val split is empty"):
        splits.check("x", replace(three, val=three.val.subset([])))
    with pytest.raises(BadInput, match="and train have different class lists"):
        splits.check("x", replace(three, test=replace(three.test, classes=("a", "c"))))


def test_manifest_and_digest(three, tmp_path):
    splits.write_manifests(tmp_path / "run", "x", three)
    hashes = splits.digests(three)
    text = (tmp_path / "run/manifests/x-test.tsv").read_text()
    assert text.splitlines()[3] == "b/0.png\t1"
    assert hashes["test"] == hashlib.sha256(text.encode()).hexdigest()
    assert hashes["test"] == splits.digest(three.test)


def test_both_keeps_files_of_two_roots(three):
    both = three.both()
    assert len(both) == 12
    assert both.labels == three.train.labels + three.val.labels
    assert both.file(0) == three.train.file(0)
    assert both.file(11) == three.val.file(5)


def test_lists(tmp_path):
    images = image_list({"n04235860": 2, "n04239074": 2})
    file = tmp_path / "1percent.txt"
    data = b"n04235860_14959.JPEG\nn04239074_7724.JPEG\n"
    file.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    names = splits.read_list(file, lines=2, sha256=digest)
    paths = (
        "n04235860/n04235860_14959.JPEG",
        "n04235860/x.JPEG",
        "n04239074/n04239074_7724.JPEG",
        "n04239074/y.JPEG",
    )
    named = replace(images, paths=paths)
    assert splits.select(named, names, where="list") == [0, 2]
    with pytest.raises(BadInput, match="not the published list"):
        splits.read_list(file, lines=2, sha256="0" * 64)
    with pytest.raises(BadInput, match="no such list; `backbench data fetch-splits"):
        splits.read_list(tmp_path / "10percent.txt")
    spaced = tmp_path / "my lists"
    with pytest.raises(BadInput, match=f"--out '{spaced}'` fetches it"):
        splits.read_list(spaced / "10percent.txt")
    with pytest.raises(BadInput, match="label 'n00000001' outside the class list"):
        splits.select(named, {"n00000001_1.JPEG": 1}, where="list")
    with pytest.raises(BadInput, match=r"list:7: .*is not on disk"):
        splits.select(named, {"n04235860_1.JPEG": 7}, where="list")
    file.write_bytes(data + b"\n" + data)
    with pytest.raises(BadInput, match=r"txt:4: .*is listed twice, first in line 1"):
        splits.read_list(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        BadInput, match=r"1percent\.txt: is no text; write an image a line"
    ):
        splits.read_list(file)
    with pytest.raises(BadInput, match="no image of 1 classes, 'n04239074' first"):
        splits.select(named, {"n04235860_14959.JPEG": 1}, where="list")


def test_pictures_that_look_alike_are_compared_by_all_pixels(root):
    first = picture(200, 48)
    other = first.copy()
    other.paste(first.crop((0, 0, 6, 6)).rotate(180), (0, 0))  # which is one block
    first.save(root / "shapes" / "train" / "a" / "first.png")
    other.save(root / "shapes" / "test" / "a" / "other.png")
    assert not problems(root)
    first.save(root / "shapes" / "test" / "a" / "same.png")
    line = problems(root)[0]
    assert "train and test share 1 images: a/first.png is a/same.png" in line


def test_a_class_is_learned_before_it_is_scored(tmp_path, caplog):
    """One that cannot be learned is refused; one that is not scored is a warning and a note."""
    images = image_list({"a": 3, "b": 3, "c": 3})
    rest = images.subset([0, 1, 3, 4])
    only_scored = splits.Splits(rest, images.subset([2]), images.subset([5, 8]), False)
    with pytest.raises(BadInput, match="x: class 'c': has test images, and none in tr"):
        splits.check("x", only_scored)
    splits.check("x", replace(only_scored, val=images.subset([7])))
    # A single image of a folder without a split is trained on
    for name, count in (("a", 3), ("b", 3), ("c", 1)):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for i in range(count):
            picture(10 * ord(name) + i, 20).save(tmp_path / "mine" / name / f"{i}.png")
    line = "class 'c' has no test image, so no number says how well it is recognised"
    found = catalog.load("mine", tmp_path)
    assert line in caplog.text and line in found.notes[-1]
    for name in ("a", "b"):
        (tmp_path / "mine" / name / "2.png").unlink()
    with pytest.raises(
        BadInput, match="mine: 2 images of a class at most; a class nee"
    ):
        catalog.load("mine", tmp_path)


def files_of(folder, contents):
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return ImageList(folder, tuple(contents), (0,) * len(contents), ("a",))


@pytest.mark.parametrize(("at_once", "readers"), [(1, 1), (3, 2), (1000, 8)])
def test_every_shared_file_has_one_partner(tmp_path, monkeypatch, at_once, readers):
    """In the order of the first list; however many files are read at once, and by how many."""
    monkeypatch.setattr(walk, "AT_ONCE", at_once)
    monkeypatch.setattr(walk, "READERS", readers)
    long = b"0" * 5000
    one = {
        "8": b"ab",
        "7": b"xyz",
        "6": b"cd",
        "5": long + b"1" + long,
        "4": b"ab",
        "3": b"only here",
        "2": b"",
    }
    other = {
        "q": b"cd",
        "r": b"ab",
        "s": b"xyy",
        "t": long + b"2" + long,
        "u": long + b"1" + long,
        "v": b"ab",
        "w": b"",
    }
    a, b = files_of(tmp_path / "a", one), files_of(tmp_path / "b", other)

    def sizes(contents):
        return walk.array("q", map(len, contents.values()))

    shared = walk.shared_content(a, sizes(one), b, sizes(other))
    assert shared == [("8", "r"), ("6", "q"), ("5", "u"), ("4", "r"), ("2", "w")]
    nothing = files_of(tmp_path / "c", {})
    assert walk.shared_content(a, sizes(one), nothing, sizes({})) == []


class Clocks:
    """Stands in for `time`: each file takes the processor a second, and the disk as many as said."""

    def __init__(self, waits):
        self.waits = waits
        self.busy = self.passed = 0.0

    def read(self, _entry):
        self.busy += 1
        self.passed += 1 + self.waits.pop(0)
        return threading.current_thread().name.encode()

    def process_time(self):
        return self.busy

    def perf_counter(self):
        return self.passed


@pytest.mark.parametrize(
    ("waits", "alone"), [([0] * 8, 8), ([2] * 8, 1), ([0, 0.5, 0, 9, 0, 0, 0, 0], 4)]
)
def test_threads_read_from_the_first_wait_for_the_disk(monkeypatch, waits, alone):
    clocks = Clocks(waits)
    monkeypatch.setattr(walk, "time", clocks)
    here = hashlib.sha256(threading.current_thread().name.encode()).digest()
    with ThreadPoolExecutor(1) as pool:
        readers = walk.Readers(pool)
        found = readers.digests(range(8), clocks.read)
        assert [digest == here for digest in found] == [True] * alone + [False] * (
            8 - alone
        )
        # And for as long as there is something to read
        clocks.waits = [0] * 8
        found = readers.digests(range(8), clocks.read)
        assert found.count(here) == (8 if alone == 8 else 0)


def test_groups_are_joined_until_there_are_enough(monkeypatch):
    monkeypatch.setattr(walk, "AT_ONCE", 3)
    groups = [[1], [2, 3], [4, 5, 6, 7], [8]]
    assert list(walk._batches(groups)) == [[1, 2, 3], [4, 5, 6, 7], [8]]
    assert list(walk._batches([])) == [[]]


def test_a_test_image_may_be_in_train_and_in_val(three):
    for index, other in ((0, three.val.file(2)), (1, three.train.file(5))):
        three.test.file(index).write_bytes(other.read_bytes())
    three.val.file(4).write_bytes(three.train.file(5).read_bytes())
    found = walk.same_files(three, walk.look("x", three))
    assert found == {"a/1.png": "b/2.png", "a/0.png": "a/2.png"}


def test_what_a_look_tells_of_each_file(three, monkeypatch):
    monkeypatch.setattr(walk, "AT_ONCE", 2)
    three.val.file(1).write_bytes(b"0" * 77)
    looked = walk.look("x", three)
    for name, images in three.items():
        stats = [images.file(i).stat() for i in range(len(images))]
        assert list(looked.sizes[name]) == [about.st_size for about in stats]
        assert list(looked.inodes[name]) == [about.st_ino for about in stats]
        assert list(looked.changed[name]) == [about.st_ctime_ns for about in stats]
