"""Images are the same wherever they lie: names, labels, bytes, digests, hold-outs."""

import gzip
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.containers import (
    LAYOUTS,
    add,
    images_of,
    packed,
    scan_here,
)
from support.layouts import Trees, picture
from support.strangers import Calls

from backbench.cli.program import main
from backbench.containers import (
    finding,
    parquet_pages,
    reading,
    scan_parquet_arrow_lmdb,
    spans,
    table_cache,
    tables,
)
from backbench.containers.spans import SpanList
from backbench.datasets import catalog, packing, splits
from backbench.errors import BadInput
from backbench.images import contents


@pytest.fixture
def root(trees):
    return trees("classes")


# One layout of each kind of table has the reader's own process
SCANNED_IN_ITS_PROCESS = ("parquet of 2023", "arrow", "lmdb")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_container_gives_the_class_folders_list(root, layout, monkeypatch):
    if layout not in SCANNED_IN_ITS_PROCESS:
        scan_here(monkeypatch)
    there = packed(root, "classes", layout)
    for seed in range(5):
        a = catalog.load("classes", root, seed=seed)
        b = catalog.load("classes", there, seed=seed)
        assert splits.digests(a) == splits.digests(b)
    assert isinstance(b.test, SpanList)
    assert contents.whole(a.test) == contents.whole(b.test)
    for (_, one), (_, two) in zip(a.items(), b.items()):
        assert contents.named(one).digest == contents.named(two).digest
        for i in range(len(one)):
            assert one.read(i) == two.read(i)
        assert (one.array(0) == two.array(0)).all()
        assert one.open(1).tobytes() == two.open(1).tobytes()
    both = a.both()
    other = b.both()
    assert splits.digest(both) == splits.digest(other)
    assert both.read(7) == other.read(7)
    assert contents.named(both).digest == contents.named(other).digest


@pytest.mark.parametrize("layout", ["tar", "deflated"])
def test_a_test_image_that_is_in_train_is_seen_in_containers(root, layout, capsys):
    base = root / "classes"
    first = next((base / "train" / "circle").iterdir())
    (base / "test" / "circle" / "again.png").write_bytes(first.read_bytes())
    there = packed(root, "classes", layout)
    with pytest.raises(BadInput, match=r"circle/again.png is also in training data"):
        catalog.load("classes", there)
    assert main(["data", "check", "classes", "--data", str(there)]) == 1
    assert "train and test share 1 images" in capsys.readouterr().out


def test_train_and_test_may_be_of_two_kinds(root):
    there = packed(root, "classes", "tar")
    (there / "classes" / "test.tar").unlink()
    LAYOUTS["zip"](root / "classes" / "test", there / "classes", "test")
    before = catalog.load("classes", root)
    after = catalog.load("classes", there)
    assert splits.digests(before) == splits.digests(after)


def test_the_descriptors_are_few_and_a_wide_set_is_read_under_a_small_limit(tmp_path):
    base = tmp_path / "own" / "train"
    base.mkdir(parents=True)
    for n in range(300):
        picture(tmp_path / "x.png", n, size=(4, 4))
        with tarfile.open(base / f"class{n}.tar", "w") as out:
            out.add(tmp_path / "x.png", "x.png")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        images = catalog.open_split(tmp_path, "own", "train")
        assert len({images.read(i) for i in range(300)}) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(Path("/proc/self/fd").iterdir())) < spans.OPEN_CONTAINERS + 60


def test_a_container_is_looked_into_once(root, monkeypatch):
    there = packed(root, "classes", "wds")
    first = catalog.load("classes", there)
    monkeypatch.setattr("backbench.containers.scan_tar_zip._members", None)
    assert splits.digests(catalog.load("classes", there)) == splits.digests(first)
    for part in (table_cache.cache_folder() / "containers").glob("*.npz"):
        part.write_bytes(part.read_bytes()[:-100])  # a torn one is made again
    monkeypatch.undo()
    assert splits.digests(catalog.load("classes", there)) == splits.digests(first)


def test_an_archive_of_all_splits_is_divided_once_and_again_when_it_is_another(
    root, monkeypatch
):
    there = packed(root, "classes", "whole")
    catalog.load("classes", there)
    loaded = tables.Table.loaded
    calls = []

    def counted(file, size):
        calls.append(file)
        return loaded(file, size)

    monkeypatch.setattr(tables.Table, "loaded", counted)
    catalog.load("classes", there)
    assert len(calls) == 3  # one for each split
    file = there / "classes" / "all.zip"
    file.unlink()
    zipped(file, "a/1.jpg", "b/2.jpg")
    assert finding.find(there / "classes", "train") is None


@pytest.mark.parametrize("how", ["touched", "cut", "replaced", "grown"])
def test_a_container_that_changes_under_a_run_is_named(root, how):
    there = packed(root, "classes", "tar")
    images = reading.read_split(there / "classes", "train")
    file = there / "classes" / "train.tar"
    before = contents.named(images)
    if how == "replaced":
        other = file.with_suffix(".new")
        other.write_bytes(file.read_bytes())
        other.replace(file)
    elif how == "grown":
        with file.open("ab") as end:
            end.write(bytes(10240))
    elif how == "cut":
        os.truncate(file, 2000)
    else:
        os.utime(file)
    assert list(before.changed) != [s.changed for s in images.stamps()]
    spans._open_container.cache_clear()  # as a worker of another process
    with pytest.raises(BadInput, match=r"train\.tar: has changed since"):
        images.read(0)


CENTRAL_HEADER = b"PK\x01\x02"  # of a member, in a zip file's directory
LOCAL_HEADER = b"PK\x03\x04"  # of a member, before its bytes


def zipped(file, *members, changes=()):
    """Write a zip file. `changes` are (header, place in it, value) of single bytes."""
    with zipfile.ZipFile(file, "w") as out:
        for name in members:
            out.writestr(name, f"not much of an image: {name:40}")
    data = bytearray(file.read_bytes())
    for header, place, value in changes:
        data[data.index(header) + place] = value
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        pytest.param(
            ["../x/1.jpg", "a/2.jpg"], [], r"the name '\.\./x/1\.jpg'", id="above"
        ),
        pytest.param(["/x/1.jpg", "a/2.jpg"], [], "the name '/x/1.jpg'", id="absolute"),
        pytest.param([f"{'x' * 400}/1.jpg"], [], "the name 'xxx", id="long"),
        pytest.param(
            ["a/1.jpg"], [(CENTRAL_HEADER, 8, 1)], "is encrypted", id="encrypted"
        ),
        pytest.param(
            ["a/1.jpg"],
            [(CENTRAL_HEADER, 10, 12)],
            "compression method 12",
            id="method",
        ),
        pytest.param(["a/1.jpg"], [(LOCAL_HEADER, 30, 65)], "disagree", id="apart"),
    ],
)
def test_a_zip_that_lies_is_refused(tmp_path, names, changes, said):
    (tmp_path / "own").mkdir()
    zipped(tmp_path / "own" / "train.zip", *names, changes=changes)
    message = rf"train\.zip: not readable as a zip file \(.*{said}"
    with pytest.raises(BadInput, match=message):
        catalog.open_split(tmp_path, "own", "train")


SYNSETS = ("n01440764", "n01443537", "n02105855")


@pytest.mark.parametrize(
    ("name", "label", "wanted"),
    [
        # What a container calls an image, the label that it states (-1: none), and the image's name
        # in the class folder (None: refused)
        ("n01440764_10026.JPEG", -1, "n01440764/n01440764_10026.JPEG"),
        ("n02105855_2933_n02105855.JPEG", 2, "n02105855/n02105855_2933.JPEG"),
        ("n01443537/n01443537_7.JPEG", 1, "n01443537/n01443537_7.JPEG"),
        ("n01443537/n01443537_7.jpg", -1, "n01443537/n01443537_7.JPEG"),
        ("n01440764_10026.jpeg", 0, "n01440764/n01440764_10026.JPEG"),
        (
            "ILSVRC2012_val_00000293_n01440764.JPEG",
            0,
            "n01440764/ILSVRC2012_val_00000293.JPEG",
        ),
        (
            "ILSVRC2012_val_00000293_n01440764.JPEG",
            -1,
            "n01440764/ILSVRC2012_val_00000293.JPEG",
        ),
        ("ILSVRC2012_val_00000293.JPEG", 1, "n01443537/ILSVRC2012_val_00000293.JPEG"),
        ("ILSVRC2012_val_00000293.jpg", 2, "n02105855/ILSVRC2012_val_00000293.JPEG"),
        (
            "n02105855/ILSVRC2012_val_00000293.JPEG",
            -1,
            "n02105855/ILSVRC2012_val_00000293.JPEG",
        ),
        (
            "ILSVRC/Data/CLS-LOC/train/n01440764/n01440764_18.JPEG",
            -1,
            "n01440764/n01440764_18.JPEG",
        ),
        ("./train/n01440764/n01440764_18.JPEG", -1, "n01440764/n01440764_18.JPEG"),
        ("00001234.jpg", 1, "n01443537/00001234.jpg"),
        ("n01440764_10026.JPEG", 1, None),
        ("n01440764/00001234.jpg", 1, None),
        ("ILSVRC2012_val_00000293_n01440764.JPEG", 2, None),
        ("n01440764_1.JPEG", 7, None),
        ("n01440764_10026_n01440764.JPEG", -1, "n01440764/n01440764_10026.JPEG"),
        ("n01440764/n01440764_18_n01440764.JPEG", 0, "n01440764/n01440764_18.JPEG"),
        ("n01440764/a/n01440764_18.JPEG", -1, "n01440764/a/n01440764_18.JPEG"),
        ("n02105855/n02105855_2933.jpg", 2, "n02105855/n02105855_2933.JPEG"),
        ("n02105855_2933.png", -1, "n02105855/n02105855_2933.JPEG"),
        ("training/n01443537/n01443537_5.JPEG", -1, "n01443537/n01443537_5.JPEG"),
        ("data/train/n02105855/n02105855_5.JPEG", 2, "n02105855/n02105855_5.JPEG"),
        (
            "x/ILSVRC/Data/CLS-LOC/train/n01440764/n01440764_18.JPEG",
            -1,
            "n01440764/n01440764_18.JPEG",
        ),
        ("train/n01440764_18.JPEG", 0, "n01440764/n01440764_18.JPEG"),
        ("ILSVRC2012_val_00050000.JPEG", 0, "n01440764/ILSVRC2012_val_00050000.JPEG"),
        ("ILSVRC2012_val_00000001.jpeg", 1, "n01443537/ILSVRC2012_val_00000001.JPEG"),
        ("val_00000001.JPEG", 2, "n02105855/val_00000001.JPEG"),
        ("0000000.png", 0, "n01440764/0000000.png"),
        ("s0000000.webp", 2, "n02105855/s0000000.webp"),
        ("n01443537/00001234.jpg", -1, "n01443537/00001234.jpg"),
        ("n01443537/00001234.jpg", 1, "n01443537/00001234.jpg"),
        ("a/b/00001234.jpg", 1, "n01443537/a/b/00001234.jpg"),
        ("n02105855_2933_n02105855.JPEG", 0, None),
        ("n01443537/n01443537_7.JPEG", 2, None),
        ("n02105855/ILSVRC2012_val_00000293.JPEG", 1, None),
        ("ILSVRC2012_val_00000293_n02105855.JPEG", 0, None),
        ("n02105855/00001234.jpg", 0, None),
        ("00001234.jpg", 3, None),
        ("n01440764/n01440764_18.JPEG", 999, None),
    ],
)
def test_imagenets_names_and_orders(tmp_path, name, label, wanted):
    """Other orders of the classes are refused, other names of one image are one name."""
    above = name.partition("n0")[0]
    prefix = above if "train" in above else ""
    with tarfile.open(tmp_path / "train.tar", "w") as out:
        # One image of each class beside it, in the folder where it is
        for synset in SYNSETS:
            add(out, f"{prefix}{synset}_0.JPEG", b"an image")
        add(out, name, b"an image")
        if label >= 0:
            add(out, f"{name.rpartition('.')[0]}.cls", str(label).encode())
    how = {"classes": SYNSETS, "every": SYNSETS}
    if wanted is None:
        with pytest.raises(BadInput, match=r"train\.tar: .* has label \d"):
            reading.read_split(tmp_path, "train", **how)
        return
    found = reading.read_split(tmp_path, "train", **how)
    label_of = dict(zip(found.paths, found.labels))
    assert label_of[wanted] == SYNSETS.index(wanted.partition("/")[0])


def test_places_in_its_tar_files(trees):
    root = trees("places365")
    before = catalog.load("places365", root)
    base = root / "places365"
    files = {"data_256_standard": "train_256_places365standard", "val_256": "val_256"}
    for folder, file in files.items():
        with tarfile.open(base / f"{file}.tar", "w") as out:
            out.add(base / folder, folder.removesuffix("_standard"))
        (base / folder).rename(root / f"no {folder}")
    after = catalog.load("places365", root)
    assert splits.digests(before) == splits.digests(after)
    assert len(after.test.read(0)) > 100
    (root / "no data_256_standard" / "a" / "airfield" / "00000001.jpg").unlink()
    with tarfile.open(base / "train_256_places365standard.tar", "w") as out:
        out.add(root / "no data_256_standard", "data_256")
    with pytest.raises(
        BadInput, match=r"1 of 9 images are missing, first a/airfield/00000001"
    ):
        catalog.load("places365", root)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """ROOT with ImageNet's thousand class folders; read it, do not write to it."""
    with pytest.MonkeyPatch.context() as patch:
        return Trees(tmp_path_factory.mktemp("imagenet"), patch)("imagenet")


def test_imagenet_and_its_100_classes_from_the_archives(imagenet, tmp_path):
    root = imagenet
    there = packed(root, "imagenet", "tar_of_tars", tmp_path)
    base = there / "imagenet"
    (base / "ILSVRC2012_img_val.tar").unlink()
    LAYOUTS["zip"](root / "imagenet" / "val", base, "val")
    for name in ("imagenet", "imagenet100"):
        before = catalog.load(name, root)
        after = catalog.load(name, there)
        assert splits.digests(before) == splits.digests(after)
    LAYOUTS["tar"](root / "imagenet" / "train", base, "train")
    with pytest.raises(
        BadInput, match=r"'train' is there twice, .*train\.tar and .*_train\.tar"
    ):
        catalog.load("imagenet", there)
    (base / "train.tar").unlink()
    (base / "ILSVRC2012_img_train.tar").rename(base / "ILSVRC2012_img_train.tar.gz")
    with pytest.raises(
        BadInput, match=r"a compressed tar can only be read from its beginning"
    ):
        catalog.load("imagenet", there)


def test_flat_images_with_a_map_as_swin_has_them(imagenet, tmp_path):
    root = imagenet
    base = tmp_path / "flat" / "imagenet"
    base.mkdir(parents=True)
    lines = []
    with zipfile.ZipFile(base / "val.zip", "w") as out:
        for n, file in enumerate(sorted((root / "imagenet" / "val").glob("*/*"))):
            out.write(file, f"ILSVRC2012_val_{n:08}.JPEG")
            lines.append(f"ILSVRC2012_val_{n:08}.JPEG\t{n}\n")
    with pytest.raises(
        BadInput, match=r"val\.zip: states no labels; put val_map\.txt beside it"
    ):
        catalog.open_split(tmp_path / "flat", "imagenet", "val")
    (base / "val_map.txt").write_text("".join(lines))
    found = catalog.open_split(tmp_path / "flat", "imagenet", "val")
    assert found.labels == tuple(range(1000))
    assert found.paths[3] == f"{found.classes[3]}/ILSVRC2012_val_00000003.JPEG"


def parquet(file, rows, names=None, kind=None):
    """Write rows of (bytes, path, label) as the Hub has them, with the `names` of the classes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = None
    if names:
        features = {"label": {"_type": "ClassLabel", "names": names}}
        text = json.dumps({"info": {"features": features}})
        metadata = {b"huggingface": text.encode()}
    image = kind or pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", image), ("label", pa.int64())], metadata=metadata)
    table = []
    for data, path, label in rows:
        table.append({"image": {"bytes": data, "path": path}, "label": label})
    pq.write_table(pa.Table.from_pylist(table, schema=schema), file)


HUB = [
    (b"2", "n02105855_9_n02105855.JPEG", 2),
    (b"1", "n01443537_5_n01443537.JPEG", 1),
    (b"0", "n01440764_7_n01440764.JPEG", 0),
]


@pytest.mark.usefixtures("scanned_here")
def test_the_hubs_imagenet(tmp_path):
    """Names of classes say nothing there: two are called crane; the position is the synset."""
    file = tmp_path / "train.parquet"
    how = {"classes": SYNSETS, "every": SYNSETS}
    parquet(file, HUB, ["crane", "crane", "tench"])
    found = reading.read_split(tmp_path, "train", **how)
    assert found.paths == tuple(f"{s}/{s}_{n}.JPEG" for s, n in zip(SYNSETS, (7, 5, 9)))
    assert [found.read(i) for i in range(3)] == [b"0", b"1", b"2"]
    parquet(file, [(b, p, 2 - label) for b, p, label in HUB], ["a", "b", "c"])
    with pytest.raises(BadInput, match="another order than the labels'"):
        reading.read_split(tmp_path, "train", **how)
    parquet(file, [(b, p, label) for b, p, label in HUB[:2]], ["a", "b"])
    with pytest.raises(BadInput, match="has label 2"):
        reading.read_split(tmp_path, "train", **how)
    parquet(file, [(b, None, label) for b, _, label in HUB], ["owl", "ant", "cat"])
    # Without the files' names it is another list; classes of one's own are sorted by name
    own = reading.read_split(tmp_path, "train")
    assert own.classes == ("ant", "cat", "owl")
    assert own.paths[0] == "ant/train-0000001.jpg"


@pytest.mark.usefixtures("scanned_here")
@pytest.mark.parametrize(
    ("stated", "classes"),
    [
        (["crane", "crane"], ("crane 0", "crane 1")),  # as ImageNet's two
        (["/a/abbey", "owl"], ("_a_abbey", "owl")),
        (None, ("0", "1099511627776")),
    ],
)
def test_classes_that_are_no_folders_of_their_own(tmp_path, stated, classes):
    last = 1 if stated else 1 << 40
    rows = [(b"x", "1.jpg", 0), (b"y", "2.jpg", last)]
    parquet(tmp_path / "train.parquet", rows, stated)
    found = reading.read_split(tmp_path, "train")
    assert found.classes == classes
    assert found.paths == (f"{classes[0]}/1.jpg", f"{classes[1]}/2.jpg")


@pytest.mark.usefixtures("scanned_here")
def test_packing_writes_nothing_outside_of_its_folder(tmp_path):
    for split in ("train", "test"):
        file = tmp_path / "own" / f"{split}.parquet"
        file.parent.mkdir(exist_ok=True)
        parquet(file, [(b"x", "1.jpg", 0), (b"y", "2.jpg", 1)], ["..", "owl"])
    with pytest.raises(BadInput, match=r"train\.parquet: .*the class name '\.\.'"):
        packing.pack("own", tmp_path, "folder", tmp_path / "out" / "own")
    with pytest.raises(ValueError, match=r"the class name '\.\./x'"):
        tables.Table.of([], ["../x"])
    assert not list(tmp_path.rglob("*.jpg"))


def test_a_split_that_is_not_whole_or_there_twice_is_refused(tmp_path, capsys):
    rows = [(b"x", "1.jpg", 0), (b"y", "2.jpg", 1)]
    for name in ("part/data/train-00000-of-00003", "two/a/train/0", "two/b/train/0"):
        file = tmp_path / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet(file, rows)
    with pytest.raises(
        BadInput, match=r"of-00003\.parquet: is one of 3 files, and 1 are there"
    ):
        reading.read_split(tmp_path / "part", "train")
    with pytest.raises(
        BadInput, match=r"two/a/train: holds the same split as .*two/b/train; move"
    ):
        reading.read_split(tmp_path / "two", "train")
    zipped(tmp_path / "own.zip", "train/a/1.jpg", "val/a/1.jpg", "valid/a/1.jpg")
    with pytest.raises(
        BadInput, match=r"own\.zip: 'val' is there twice, as val and valid"
    ):
        finding.find(tmp_path / "own", "val")
    assert main(["data", "list", "--data", str(tmp_path)]) == 0
    assert "own.zip: 'val' is there twice, as val and valid" in capsys.readouterr().out


@pytest.mark.usefixtures("scanned_here")
@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("large", [False, True])
def test_images_may_be_a_plain_column_of_bytes(tmp_path, form, large):
    """As other writers than the Hub's have them; a column called image comes before others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    binary = pa.large_binary() if large else pa.binary()
    schema = pa.schema(
        [("a thumbnail", binary), ("image", binary), ("cls", pa.int64())]
    )
    rows = []
    for number in range(3):
        image = f"image {number}".encode()
        rows.append({"a thumbnail": b"small", "image": image, "cls": 2 - number})
    table = pa.Table.from_pylist(rows, schema=schema)
    if form == "parquet":
        pq.write_table(table, tmp_path / "train.parquet")
    else:
        with pa.ipc.new_stream(tmp_path / "own-train.arrow", schema) as out:
            out.write_table(table)
    found = reading.read_split(tmp_path, "train")
    assert found.classes == ("0", "1", "2")
    assert found.labels == (0, 1, 2)
    assert [found.read(i) for i in range(3)] == [b"image 2", b"image 1", b"image 0"]


def test_parquet_without_the_images_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "train.parquet"
    parquet(file, [(None, "/home/me/cat/1.jpg", 0), (b"x", "2.jpg", 0)])
    with pytest.raises(BadInput, match=r"train\.parquet: .*the images are not in it"):
        reading.read_split(tmp_path, "train")
    import pyarrow as pa

    parquet(file, [(b"x", "1.jpg", 0)], kind=pa.struct([("path", pa.string())]))
    with pytest.raises(BadInput, match="no column of images"):
        reading.read_split(tmp_path, "train")
    missing = tmp_path / "no packages" / "pyarrow.py"
    missing.parent.mkdir()
    missing.write_text("raise ImportError('x')")
    monkeypatch.setenv("PYTHONPATH", str(missing.parent), prepend=os.pathsep)
    with pytest.raises(BadInput, match=r"pip install 'backbench\[containers\]'"):
        reading.read_split(tmp_path, "train")


@pytest.mark.usefixtures("scanned_here")
def test_snappy_costs_the_blocks_of_an_image(tmp_path):
    """An image of 5 kB on a page of 1 MB; of pixels that repeat across blocks the page is read."""
    draw = np.random.default_rng(0)
    images = [draw.bytes(5000) for _ in range(200)]
    rows = [(data, f"{i}.jpg", 0) for i, data in enumerate(images)]
    parquet(tmp_path / "train.parquet", rows)
    found = reading.read_split(tmp_path, "train")
    assert {found.read(i) for i in range(200)} == set(images)
    assert found.spans["stored"].mean() < 1.2 * (1 << 16) + 5000
    bitmaps = [(bytes(3000) + data, f"{i}.bmp", 0) for i, data in enumerate(images)]
    parquet(tmp_path / "val.parquet", bitmaps)
    other = reading.read_split(tmp_path, "val")
    assert len({other.read(i) for i in range(200)}) == 200


def times_of(folder):
    """When each file below a folder was written."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.mark.usefixtures("scanned_here")
@pytest.mark.parametrize("layout", ["folder", "parquet of 2023", "deflated"])
def test_packing_and_unpacking_keep_list_and_bytes(
    root, tmp_path, bad_input, monkeypatch, layout
):
    monkeypatch.setattr(packing, "LARGEST_FILE", 3000)
    there = root if layout == "folder" else packed(root, "classes", layout)
    before = catalog.load("classes", there)
    for step, kind in enumerate(("tar", "zip", "folder")):
        out = tmp_path / f"step {step}" / "classes"
        words = ["data", "pack", "classes", "--to", kind, "--out", out, "--data", there]
        assert main([str(word) for word in words]) == 0
        files = times_of(out)
        assert len(files) > 4
        first = min(files)
        first.unlink()  # killed before it was there
        assert main([str(word) for word in words]) == 0
        again = times_of(out)
        assert again.keys() == files.keys()
        assert {p for p in files if again[p] != files[p]} <= {first}
        there = out.parent
        after = catalog.load("classes", there)
        assert splits.digests(after) == splits.digests(before)
        assert contents.whole(after.train) == contents.whole(before.train)
    (there / "classes" / "train" / "circle" / "odd.png").write_bytes(b"x")
    bad_input(
        main([str(word) for word in words]), "'train' has other images than the source"
    )


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_an_older_state_of_the_images_is_not_taken_for_packed(root, tmp_path, kind):
    out = tmp_path / "out" / "classes"
    packing.pack("classes", root, kind, out)
    first = next((root / "classes" / "train" / "circle").iterdir())
    picture(first, 77, size=(9, 9))
    if kind == "zip":
        with pytest.raises(
            BadInput, match=r"'train' has other images than the source; empty"
        ):
            packing.pack("classes", root, kind, out)
        return
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    packing.pack("classes", root, kind, out)
    assert (out / "train" / "circle" / first.name).read_bytes() == first.read_bytes()


@pytest.mark.usefixtures("scanned_here")
def test_a_copy_that_lost_its_names_gets_them_by_contents(root, tmp_path, capsys):
    """folder2lmdb: numbers, and pickled pairs. Without names it is another list."""
    import lmdb

    before = catalog.load("classes", root)
    base = tmp_path / "numbered" / "classes"
    base.mkdir(parents=True)
    for split in ("train", "val", "test"):
        file = str(base / f"{split}.lmdb")
        rows = list(images_of(root / "classes" / split))
        with (
            lmdb.open(file, map_size=1 << 24, subdir=False) as env,
            env.begin(write=True) as out,
        ):
            for n, (_, label, data) in enumerate(rows):
                out.put(
                    str(n).encode(), pickle.dumps((data, label), protocol=3 + n % 2)
                )
            out.put(b"__len__", pickle.dumps(len(rows)))
    numbered = catalog.load("classes", base.parent)
    assert numbered.test.labels == before.test.labels
    assert splits.digests(numbered) != splits.digests(before)
    assert main(["data", "check", "classes", "--record", "--data", str(root)]) == 0
    listed = root / "classes" / "contents.tsv.gz"
    (base / "names.tsv.gz").write_bytes(listed.read_bytes())
    for _ in range(2):  # the second time from the cache
        named = catalog.load("classes", base.parent)
        assert splits.digests(named) == splits.digests(before)
    lines = gzip.decompress(listed.read_bytes()).splitlines(keepends=True)
    (base / "names.tsv.gz").write_bytes(gzip.compress(b"".join(lines[1:])))
    with pytest.raises(
        BadInput, match=r"names\.tsv\.gz: 1 of 8 images of 'test' are not in it"
    ):
        catalog.load("classes", base.parent)
    (base / "names.tsv.gz").write_bytes(listed.read_bytes()[:50])
    with pytest.raises(
        BadInput, match=r"names\.tsv\.gz: not as `data check --record` writes it"
    ):
        catalog.load("classes", base.parent)


@pytest.mark.parametrize(
    "value", [Calls(os.mkdir, "executed"), (b"x",), (b"x", "0"), ("x", 0)]
)
def test_pickled_values_execute_nothing(tmp_path, monkeypatch, value):
    import lmdb

    monkeypatch.chdir(tmp_path)
    with (
        lmdb.open(str(tmp_path / "train.lmdb"), subdir=False) as env,
        env.begin(write=True) as out,
    ):
        out.put(b"0", pickle.dumps(value))
    said = r"train\.lmdb: not readable as lmdb \(.*(refused|not \(bytes)"
    with pytest.raises(BadInput, match=said):
        reading.read_split(tmp_path, "train")
    assert not (tmp_path / "executed").exists()


JOB = """
import pathlib, sys
from backbench.containers import reading, scan_tar_zip
from backbench.datasets import splits
members = scan_tar_zip._members
seen = []
def counted(raw, file, *more):
    seen.append(file)
    return members(raw, file, *more)
scan_tar_zip._members = counted
images = reading.read_split(pathlib.Path(sys.argv[1]), "train")
print(len(seen), splits.digest(images))
"""


def tarred(file, names, size=1):
    with tarfile.open(file, "w") as out:
        for name in names:
            add(out, name, bytes(size))


@pytest.mark.slow
def test_jobs_that_start_together_look_once_and_kills_leave_no_half_index(
    tmp_path, monkeypatch
):
    (tmp_path / "own").mkdir()
    for shard in range(12):  # they take some time to look into
        names = [f"{'ab'[n % 2]}/{shard:03}{n:04}.jpg" for n in range(150)]
        tarred(tmp_path / "own" / f"own-train-{shard:04}.tar", names)
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "jobs"))
    command = [sys.executable, "-c", JOB, str(tmp_path / "own")]
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    said = [job.communicate()[0].split() for job in jobs]
    assert sum(int(count) for count, _ in said) == 12
    digests = {digest for _, digest in said}
    assert len(digests) == 1
    draw = random.Random(0)
    for turn in range(40):
        if turn % 5 == 0:
            monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / f"killed {turn}"))
        job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(0.6 + draw.random())
        job.kill()
        job.communicate()
        if turn % 5 == 4:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True
            )
            assert done.stdout.split()[1] in digests


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "train.tar.gz",
            "a compressed tar can only be read from its beginning; unpack it",
        ),
        (
            "own-train.tfrecord-00000-of-00064",
            "TFRecord is not read; use the tar files",
        ),
        ("train.beton", "FFCV holds other pixels than the images"),
        ("train.h5", "HDF5 has no convention for images"),
    ],
)
def test_what_is_not_read_says_why_and_what_to_do(tmp_path, bad_input, name, said):
    (tmp_path / "own").mkdir()
    file = tmp_path / "own" / name
    file.write_bytes(b"x")
    bad_input(main(["data", "check", "own", "--data", str(tmp_path)]), said)
    words = [
        "evaluate",
        "timm:resnet18",
        "--data",
        str(file),
        "--out",
        str(tmp_path / "out"),
    ]
    bad_input(main(words), said)
    with pytest.raises(BadInput, match=said):
        catalog.open_split(tmp_path, "own", "train")


def test_a_file_that_is_cut_while_it_is_read_is_a_short_read(root):
    there = packed(root, "classes", "tar")
    images = reading.read_split(there / "classes", "train")
    images.read(0)
    os.truncate(there / "classes" / "train.tar", 2000)
    with pytest.raises(BadInput, match=r"train\.tar ends in the middle of this image"):
        images.read(len(images) - 1)


def test_snappys_blocks_are_used_only_where_they_stand_alone():
    """A literal of 64 KiB, then another, or a copy of what lies 8 bytes back (in the first block)."""
    block = b"\xf4\xff\xff" + bytes(1 << 16)
    size = b"\x88\x80\x04"  # 65,544
    alone = size + block + b"\x1c" + bytes(8)
    joined = size + block + b"\x1e\x08\x00"
    assert parquet_pages.snappy_blocks(alone) == ([3, 3 + len(block)], 65544)
    assert parquet_pages.snappy_blocks(joined) == ([3], 65544)
    # The second literal crosses the border; a third one ends at the next border
    parts = [b"\xf4\xfb\xff" + bytes(65532), b"\x2c" + bytes(12)]
    parts += [b"\xf4\xf7\xff" + bytes(65528), b"\x1c" + bytes(8)]
    crossing = b"\x88\x80\x08" + b"".join(parts)  # 131,080
    assert parquet_pages.snappy_blocks(crossing) == ([3], 131080)
    with pytest.raises(ValueError, match="of another length than it says"):
        parquet_pages.snappy_blocks(alone[:-1])


def test_parquets_numbers_are_runs_and_packed_groups():
    """A run's head is twice its length; a packed group's, of eight numbers, is odd."""
    run = b"\x0a\x07"  # five times 7
    group = b"\x03" + sum(n << 3 * n for n in range(8)).to_bytes(3, "little")
    assert parquet_pages.hybrid(run, 3, 5) == [7] * 5
    assert parquet_pages.hybrid(group, 3, 8) == list(range(8))
    assert parquet_pages.hybrid(run + group, 3, 11) == [7] * 5 + list(range(6))
    for early in (b"\x03", group[:2], b"\x00\x07"):
        with pytest.raises(ValueError, match="a page that ends too early"):
            parquet_pages.hybrid(early, 3, 8)


def test_folders_in_an_archive_that_are_no_classes(tmp_path):
    names = ["unlabeled/1.jpg", "preview.jpg"]
    for split in ("train", "test"):
        for name in "ab":
            names += [f"{split}/{name}/{n}.jpg" for n in range(3)]
    zipped(tmp_path / "own.zip", *names)
    assert finding.splits_of(tmp_path / "own") == ["train", "test"]
    train = reading.read_split(tmp_path / "own", "train")
    test = reading.read_split(tmp_path / "own", "test")
    # Equal names and sizes in one file
    assert contents.whole(train) != contents.whole(test)
    zipped(tmp_path / "renamed.zip", "pictures/a/1.jpg", "pictures/b/2.jpg")
    around = r"renamed\.zip: one class alone, 'pictures'; if .* call the file pictures\.zip; the"
    with pytest.raises(BadInput, match=around):
        catalog.load("renamed", tmp_path)
    for folder in "ab":
        for n in range(3):
            names.append(f"pictures/{folder}/{n}.jpg")
    zipped(tmp_path / "pictures.zip", *(n for n in names if n.startswith("pictures")))
    assert len(catalog.load("pictures", tmp_path).train.classes) == 2
    zipped(tmp_path / "alone.zip", "cat/1.jpg", "cat/2.jpg", "cat/3.jpg")
    with pytest.raises(BadInput, match=r"alone\.zip: one class alone, 'cat'; the cl"):
        catalog.load("alone", tmp_path)


def test_a_tar_file_cut_between_two_members_or_with_one_name_twice_is_refused(tmp_path):
    tarred(tmp_path / "train.tar", [f"a/{n}.jpg" for n in range(3)], size=512)
    os.truncate(tmp_path / "train.tar", 2 * 1024)
    with pytest.raises(BadInput, match=r"train\.tar: the tar file is cut short"):
        reading.read_split(tmp_path, "train")
    tarred(tmp_path / "train.tar", ["a/1.jpg", "a/1.jpg"])
    with pytest.raises(BadInput, match=r"train\.tar: a/1\.jpg is there twice"):
        reading.read_split(tmp_path, "train")


def test_a_deflated_image_of_another_length_than_stated_is_damaged(tmp_path):
    with zipfile.ZipFile(tmp_path / "train.zip", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("a/1.jpg", bytes(100))
    data = bytearray((tmp_path / "train.zip").read_bytes())
    data[data.index(b"PK\x01\x02") + 24] = 101  # the unpacked size in the directory
    (tmp_path / "train.zip").write_bytes(bytes(data))
    images = reading.read_split(tmp_path, "train")
    with pytest.raises(BadInput, match=r"a/1\.jpg: damaged in .*100 bytes, not 101"):
        images.read(0)


def test_a_kept_table_must_fit_its_container(tmp_path):
    table = tables.Table.of([("a/1.jpg", -1, (10, 10, 0, 0, 10, 10))])
    (tmp_path / "kept.npz").write_bytes(table.dumped())
    assert tables.Table.loaded(tmp_path / "kept.npz", 20).names == ["a/1.jpg"]
    with pytest.raises(ValueError, match="an image that is not inside the file"):
        tables.Table.loaded(tmp_path / "kept.npz", 19)


def test_spans_of_parquet_are_compared_with_its_own_reader(tmp_path, monkeypatch):
    parquet(tmp_path / "train.parquet", [(b"x", "1.jpg", 0), (b"y", "2.jpg", 0)])
    spans_of = scan_parquet_arrow_lmdb.spans_of
    monkeypatch.setattr(
        scan_parquet_arrow_lmdb, "spans_of", lambda *a: list(spans_of(*a))[::-1]
    )
    with pytest.raises(ValueError, match="has other bytes than pyarrow reads"):
        scan_parquet_arrow_lmdb.scan_parquet(tmp_path / "train.parquet")


def test_members_of_a_zip_that_overlap_are_refused(tmp_path):
    """A member inside another one: a few bytes that would unpack to any number."""
    inside = zipfile.ZipInfo("a/2.jpg")
    inside.file_size = inside.compress_size = 9
    inside.CRC = 0
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as out:
        out.writestr("a/1.jpg", inside.FileHeader() + b"not much!")
        inside.header_offset = 30 + len("a/1.jpg")
        out.filelist.append(inside)
    with pytest.raises(BadInput, match=r"train\.zip: .*two members share byte"):
        reading.read_split(tmp_path, "train")


@pytest.mark.usefixtures("scanned_here")
def test_arrow_without_the_images_is_refused(tmp_path):
    import pyarrow as pa

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"image": {"bytes": data, "path": "1.jpg"}} for data in (b"x", None)]
    table = pa.Table.from_pylist(rows, schema=pa.schema([("image", image)]))
    with pa.ipc.new_stream(tmp_path / "own-train.arrow", table.schema) as out:
        out.write_table(table)
    with pytest.raises(BadInput, match=r"own-train\.arrow: .*the images are not in it"):
        reading.read_split(tmp_path, "train")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_files_that_all_hold_one_folder_have_no_classes(root, tmp_path, kind):
    """Each file is a class by its name; `images` in all of them would make one class of all."""
    for split in ("train", "test"):
        for folder in sorted((root / "classes" / split).iterdir()):
            file = tmp_path / "one" / split / f"{folder.name}.{kind}"
            file.parent.mkdir(parents=True, exist_ok=True)
            if kind == "tar":
                with tarfile.open(file, "w") as archive:
                    archive.add(folder, "images")
            else:
                with zipfile.ZipFile(file, "w") as archive:
                    for picture in sorted(folder.iterdir()):
                        archive.write(picture, f"images/{picture.name}")
    said = rf" {kind} files holds the one folder 'images'.* out of a {kind} file that"
    with pytest.raises(BadInput, match=said):
        catalog.load("one", tmp_path)


@pytest.mark.parametrize("kind", ["tar", "zip", "folder"])
def test_an_undivided_class_folder_is_packed(root, tmp_path, kind):
    out = tmp_path / "out" / "train"
    words = [
        "data",
        "pack",
        "train",
        "--to",
        kind,
        "--out",
        out,
        "--data",
        root / "classes",
    ]
    assert main([str(word) for word in words]) == 0
    before = catalog.load("train", root / "classes")
    after = catalog.load("train", out.parent)
    assert splits.digests(after) == splits.digests(before)
