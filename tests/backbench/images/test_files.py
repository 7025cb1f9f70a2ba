"""Image lists on disk, in memory and in files of their own; decoding."""

import io
import pickle
import tracemalloc

import cv2
import numpy as np
import pytest
from PIL import Image
from support.pictures import picture, write_pictures
from torchvision import datasets

from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.images import file_names
from backbench.images.decoding import decode, decode_array
from backbench.images.folder_walk import refuse_broken_links, subfolders
from backbench.images.image_list import (
    ArrayList,
    ImageList,
    Joined,
    Names,
    ignored,
    scan_folder,
)


@pytest.fixture
def folder(tmp_path):
    modes = (
        ("b/2.png", "RGB"),
        ("a/1.png", "L"),
        ("a/sub/3.png", "RGBA"),
        ("b/10.jpg", "RGB"),
    )
    for name, mode in modes:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (6, 4)).save(path)
    (tmp_path / "data/a/note.txt").write_text("not an image")
    (tmp_path / "data/a/._1.png").write_text("a Mac's shadow file")
    return tmp_path / "data"


def test_scan_is_sorted_and_leaves_other_files_out(folder):
    images = scan_folder(folder)
    assert images.paths == ("a/1.png", "a/sub/3.png", "b/10.jpg", "b/2.png")
    assert images.labels == (0, 0, 1, 1) and images.classes == ("a", "b")
    assert all(images.open(i).mode == "RGB" for i in range(4))
    assert scan_folder(folder, classes=["b", "a"]).labels == (0, 0, 1, 1)
    assert scan_folder(folder, classes=["b"]).paths == ("b/10.jpg", "b/2.png")


def test_what_is_wrong_is_named(folder, tmp_path):
    with pytest.raises(BadInput, match="1 of 2 class folders are missing, 'c' first"):
        scan_folder(folder, classes=["a", "c"])
    (folder / "empty").mkdir()
    with pytest.raises(BadInput, match="empty: class folder without images"):
        scan_folder(folder)
    with pytest.raises(BadInput, match="no such folder; expected images as"):
        scan_folder(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(BadInput, match="no images found"):
        scan_folder(tmp_path / "bare")
    bad = tmp_path / "bad.png"
    bad.write_bytes(Image.new("RGB", (4, 4)).tobytes())
    with pytest.raises(BadInput, match=r"bad.png: corrupt image"):
        decode(bad)
    with pytest.raises(BadInput, match="no such image file"):
        decode(tmp_path / "none.png")
    with pytest.raises(BadInput, match="corrupt image"):  # of no bytes, and not missing
        decode(tmp_path / "none.png", data=b"")
    Image.effect_noise((64, 64), 90).convert("RGB").save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-400])
    with pytest.raises(BadInput, match=r"cut.jpg: corrupt image"):
        decode(tmp_path / "cut.jpg")


def test_subset_and_arrays(folder):
    images = scan_folder(folder)
    part = images.subset([3, 0])
    assert part.paths == ("b/2.png", "a/1.png")
    assert part.labels == (1, 0)
    assert part.file(1) == images.file(0)
    pixels = np.arange(3 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 4, 5, 3)
    rows = ArrayList(folder, ("x/0", "x/1", "x/2"), (0, 1, 0), ("p", "q"), pixels)
    turned = rows.subset([2, 1])
    assert turned.labels == (0, 1)
    assert (np.asarray(turned.open(0)) == pixels[2]).all()


def test_joined_lists_take_each_image_from_its_own_part(tmp_path):
    parts = []
    for name, sides in (("left", (3, 4, 5)), ("right", (6, 7))):
        for side in sides:
            file = tmp_path / name / "kind" / f"{side}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture(side, side).save(file)
        parts.append(scan_folder(tmp_path / name))
    files = sorted(tmp_path.rglob("*.png"), key=lambda file: int(file.stem))
    joined = Joined.of(parts)
    assert joined.root == parts[0].root and joined.classes == ("kind",)
    assert Joined.of(parts, root=tmp_path).root == tmp_path
    turned = joined.subset([4, 0, 3])
    for images, wanted in ((joined, files), (turned, [files[4], files[0], files[3]])):
        assert len(images) == len(wanted)
        for index, (file, stamp) in enumerate(
            zip(wanted, images.stamps(), strict=True)
        ):
            content = file.read_bytes()
            pixels = np.asarray(Image.open(file).convert("RGB"))
            assert np.array_equal(np.asarray(images.open(index)), pixels)
            assert np.array_equal(images.array(index), pixels)
            assert images.read(index) == content
            assert images.ends(index, 8) == content[:8] + content[-8:]
            assert (stamp.size, stamp.inode) == (len(content), file.stat().st_ino)


def test_names_are_a_sequence_in_a_third_of_the_memory(tmp_path):
    """1.28 million images and their labels take 100 MB with their spans (27 bytes each)."""
    last = "b/\u00e9\udcff.png"
    names = Names(["a/1.png", "", last])
    assert names == ("a/1.png", "", last)
    assert tuple(pickle.loads(pickle.dumps(names))) == ("a/1.png", "", last)
    assert names[-1] == last
    assert names[1:] == ("", last)
    assert names.index("") == 1
    assert names.taken([-1, 0, 1]) == (last, "a/1.png", "")
    assert list(Names(["a/1.png", "", "b"])) == ["a/1.png", "", "b"]
    with pytest.raises(IndexError):
        names[3]
    with pytest.raises(IndexError):
        names.taken([3])
    count = 30_000
    tracemalloc.start()
    paths = (f"n{n // 1300:08}/n{n // 1300:08}_{n % 1300}.JPEG" for n in range(count))
    images = ImageList(tmp_path, paths, (7,) * count, ())
    held, _ = tracemalloc.get_traced_memory()
    half = images.subset(range(0, count, 2))
    with_half, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.5e6
    assert with_half - held < 0.78e6
    assert len(half) == count // 2
    assert half.paths[1] == images.paths[2]


def test_decoding_is_pils(tmp_path):
    write_pictures(tmp_path)
    found = catalog.open_split(tmp_path, "shapes", "train")
    for i in range(len(found)):
        assert np.array_equal(found.array(i), np.asarray(found.open(i)))
    gray = tmp_path / "gray.png"
    palette = tmp_path / "palette.png"
    alpha = tmp_path / "alpha.png"
    rotated = tmp_path / "rotated.jpg"
    picture(1).convert("L").save(gray)
    picture(2).convert("P").save(palette)
    picture(3).convert("RGBA").save(alpha)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(4, 40).save(rotated, exif=exif)
    for path in (gray, palette, alpha, rotated):
        pixels = decode_array(path.read_bytes(), path)
        assert np.array_equal(pixels, np.asarray(decode(path)))


def test_a_thumbnails_end_is_not_the_pictures(monkeypatch):
    """Where a JPEG is cut off, some versions of OpenCV fill up what is missing."""
    gray = np.full((64, 64, 3), 128, np.uint8)
    monkeypatch.setattr(cv2, "imdecode", lambda data, flags: gray)
    small, whole = io.BytesIO(), io.BytesIO()
    picture(1, 8).save(small, "JPEG")
    Image.effect_noise((64, 64), 90).convert("RGB").save(
        whole, "JPEG", comment=b" " * 1100 + small.getvalue()
    )
    assert decode_array(whole.getvalue(), "whole.jpg").shape == (64, 64, 3)
    with pytest.raises(BadInput, match=r"cut\.jpg: corrupt image"):
        decode_array(whole.getvalue()[:-1000], "cut.jpg")


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_pixels_do_not_depend_on_who_makes_them_rgb(mode, monkeypatch):
    """Pixels are PIL's with and without OpenCV's own RGB (from 4.11 on); CMYK's up to rounding."""
    files = []
    for settings in (
        {"quality": 90},
        {"subsampling": 0},
        {"subsampling": 1},
        {"progressive": True},
    ):
        for width, height in ((64, 48), (33, 17), (1, 1)):
            noise = np.random.default_rng(0).integers(0, 256, (height, width, 3))
            buffer = io.BytesIO()
            image = Image.fromarray(noise.astype(np.uint8)).convert(mode)
            image.save(buffer, "JPEG", **settings)
            files.append(buffer.getvalue())
    found = [decode_array(data, "x") for data in files]
    monkeypatch.delattr(cv2, "IMREAD_COLOR_RGB", raising=False)
    for data, pixels in zip(files, found):
        assert np.array_equal(pixels, decode_array(data, "x"))
        if mode != "CMYK":
            assert np.array_equal(pixels, np.asarray(decode("x", data=data)))


@pytest.mark.parametrize(
    ("name", "per", "train"), [("cifar10", 10, 50), ("cifar100", 2, 200)]
)
def test_cifar_for_pretraining(trees, name, per, train):
    root = trees(name, per=per)
    found = catalog.open_split(root, name, "train")
    assert len(found) == train and found.classes[1] == "class 1"
    wanted = getattr(datasets, name.upper())(root / name)
    assert list(found.labels) == wanted.targets
    for i in (0, train - 1):
        assert np.array_equal(found.array(i), wanted.data[i])
        assert np.array_equal(np.asarray(found.open(i)), wanted.data[i])
    with pytest.raises(BadInput, match="no split 'val'"):
        catalog.open_split(root, name, "val")
    (file,) = root.glob(f"{name}/*/test*")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadInput, match=f"{file.name}: not readable as a CIFAR batch"):
        catalog.open_split(root, name, "test")


def test_stl10_with_its_unlabelled_part(tmp_path):
    folder = tmp_path / "stl10" / "stl10_binary"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    raw = {}
    for split, count in (("train", 3), ("unlabeled", 5)):
        raw[split] = rng.integers(0, 256, (count, 3, 96, 96), dtype=np.uint8)
        raw[split].tofile(folder / f"{split}_X.bin")
    np.array([1, 10, 3], np.uint8).tofile(folder / "train_y.bin")
    (folder / "class_names.txt").write_text("\n".join("abcdefghij"))
    found = catalog.open_split(tmp_path, "stl10", "train+unlabeled")
    assert found.labels == (0, 9, 2, -1, -1, -1, -1, -1)
    assert found.classes == tuple("abcdefghij")
    # Stored column by column
    assert np.array_equal(found.array(4), raw["unlabeled"][1].transpose(2, 1, 0))
    assert np.array_equal(np.asarray(found.open(1)), raw["train"][1].transpose(2, 1, 0))
    assert found.subset([7, 0]).labels == (-1, 0)
    assert len(catalog.open_split(tmp_path, "stl10", "unlabeled")) == 5
    with pytest.raises(BadInput, match="did you mean 'unlabeled'"):
        catalog.open_split(tmp_path, "stl10", "unlabelled")
    (folder / "unlabeled_X.bin").write_bytes(bytes(1000))
    with pytest.raises(BadInput, match=r"unlabeled_X\.bin: not STL-10's binary file"):
        catalog.open_split(tmp_path, "stl10", "train+unlabeled")
    (folder / "train_y.bin").write_bytes(b"\1")
    with pytest.raises(BadInput, match="3 images of uint8 but 1 labels"):
        catalog.open_split(tmp_path, "stl10", "train")


@pytest.mark.parametrize(
    ("path", "image", "hidden"),
    [
        ("a/b.JPEG", True, False),
        ("a/b.Webp", True, False),
        ("a/b.jpg.txt", False, False),
        ("a/png", False, False),
        ("a/._1.png", False, True),
        (".png", False, True),
        (".ipynb_checkpoints/1.png", True, True),
        ("a/@eaDir/1.png", True, True),
        ("lost+found/1.png", True, True),
        ("./../a/1.png", True, False),
    ],
)
def test_names_say_what_counts(path, image, hidden):
    assert file_names.is_image(path) == image
    assert file_names.passed_over(path) == hidden


def test_a_name_may_have_characters_of_no_width_but_no_tabs():
    assert file_names.unusable_in("\ufeffa\u200db\u00ad/c\u200e.jpg") is None
    assert file_names.unusable_in("a\u200d\tb") == r"'\t'"


def test_missing_images_are_counted(folder):
    images = scan_folder(folder)
    (folder / "a/sub/3.png").unlink()
    (folder / "b/2.png").unlink()
    stamps = images.stamps()
    assert next(stamps).size == (folder / "a/1.png").stat().st_size
    with pytest.raises(BadInput) as refused:
        list(stamps)
    file = folder / "a/sub/3.png"
    assert str(refused.value) == f"{file} is missing (2 of 4 images are)"


def test_several_missing_classes_may_be_a_subset(folder):
    with pytest.raises(BadInput) as refused:
        scan_folder(folder, classes=["a", "d", "c"])
    assert str(refused.value) == (
        f"{folder}: 2 of 3 class folders are missing, 'd' first; is {folder} a subset? Under a"
        " name of its own it is a class folder like any other"
    )
    with pytest.raises(BadInput) as refused:
        scan_folder(folder, classes=["a", "c"])
    missing = f"{folder}: 1 of 2 class folders are missing, 'c' first"
    assert str(refused.value) == missing


def test_a_folder_called_as_an_image_is_listed_with_what_it_holds(folder):
    """Its reader refuses it then by its name, and no picture in it is lost."""
    inside = folder / "a" / "9.png" / "4.png"
    inside.parent.mkdir()
    inside.write_bytes((folder / "b" / "2.png").read_bytes())
    assert list(scan_folder(folder).paths) == [
        "a/1.png",
        "a/9.png",
        "a/9.png/4.png",
        "a/sub/3.png",
        "b/10.jpg",
        "b/2.png",
    ]


def test_of_links_that_lead_nowhere_the_first_by_name_is_named(folder):
    for name in ("c", "a", "e", "b", "d"):
        (folder / "b" / name).symlink_to("nowhere")
    with pytest.raises(BadInput, match="b/a: is a link to nowhere, which is not there"):
        scan_folder(folder)


def test_files_that_are_passed_over_are_listed(folder, tmp_path):
    for name in ("beside.txt", "beside.png", ".hidden", "b/z/deep.csv"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "linked.md").touch()
    (folder / "b" / "link").symlink_to(tmp_path / "away")
    wanted = ["a/note.txt", "b/link/linked.md", "b/z/deep.csv"]
    assert ignored(folder) == [*wanted, "beside.png", "beside.txt"]
    # Images without class folders are unlabelled ones, and count
    (tmp_path / "bare").mkdir()
    for name in ("2.png", "1.jpg", "note.txt"):
        (tmp_path / "bare" / name).touch()
    assert ignored(tmp_path / "bare") == ["note.txt"]
    bare = scan_folder(tmp_path / "bare")
    assert (bare.paths, bare.labels, bare.classes) == (("1.jpg", "2.png"), (-1, -1), ())


def test_folders_are_listed_by_name_also_behind_links(tmp_path):
    for name in ("b", "a", ".hidden", "@eaDir"):
        (tmp_path / name).mkdir()
    (tmp_path / "c.png").touch()
    (tmp_path / "z").symlink_to("a")
    (tmp_path / "loop").symlink_to("loop")
    assert subfolders(tmp_path) == ["a", "b", "z"]
    with pytest.raises(BadInput, match="loop: is a link to loop, which is not there"):
        refuse_broken_links(tmp_path)
