"""Image lists on disk and in memory."""

import pickle
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from backbench.errors import BadInput
from backbench.images.image_list import ArrayList, ImageList, Names, decode, scan_folder


@pytest.fixture
def folder(tmp_path):
    modes = (("b/2.png", "RGB"), ("a/1.png", "L"), ("a/sub/3.png", "RGBA"), ("b/10.jpg", "RGB"))
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


def test_a_truncated_picture_is_corrupt(folder):
    file = folder / "b/10.jpg"
    Image.effect_noise((64, 64), 90).convert("RGB").save(file)
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(BadInput, match="corrupt image"):
        decode(file)


def test_subset_and_arrays(folder):
    images = scan_folder(folder)
    part = images.subset([3, 0])
    assert part.paths == ("b/2.png", "a/1.png") and part.labels == (1, 0)
    assert part.file(1) == images.file(0)
    pixels = np.arange(3 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 4, 5, 3)
    rows = ArrayList(folder, ("x/0", "x/1", "x/2"), (0, 1, 0), ("p", "q"), pixels)
    turned = rows.subset([2, 1])
    assert (np.asarray(turned.open(0)) == pixels[2]).all() and turned.labels == (0, 1)


def test_names_are_a_sequence_in_a_third_of_the_memory(tmp_path):
    """1.28 million images and their labels take 100 MB with their spans (27 bytes each)."""
    names = Names(["a/1.png", "", "b/\u00e9\udcff.png"])
    assert (
        names == ("a/1.png", "", "b/\u00e9\udcff.png") == tuple(pickle.loads(pickle.dumps(names)))
    )
    assert (names[-1], names[1:], names.index("")) == ("b/\u00e9\udcff.png", tuple(names)[1:], 1)
    with pytest.raises(IndexError):
        names[3]
    tracemalloc.start()
    paths = (f"n{n // 1300:08}/n{n // 1300:08}_{n % 1300}.JPEG" for n in range(100_000))
    images = ImageList(tmp_path, paths, (7,) * 100_000, ())
    held, _ = tracemalloc.get_traced_memory()
    half = images.subset(range(0, 100_000, 2))
    assert held < 5e6 and tracemalloc.get_traced_memory()[0] - held < 2.6e6
    tracemalloc.stop()
    assert half.paths[1] == images.paths[2] and len(half) == 50_000
