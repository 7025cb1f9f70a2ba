"""Images that are not a folder of files, opened by the catalog's names, and decoding."""

import io

import numpy as np
import pytest
from PIL import Image
from support.pictures import picture, write_pictures

from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.images.image_list import decode, decode_array


@pytest.fixture
def root(tmp_path):
    write_pictures(tmp_path)
    return tmp_path


@pytest.fixture
def found(root):
    return catalog.open_split(root, "shapes", "train")


def test_decoding_is_pils(root, found):
    for i in range(len(found)):
        assert np.array_equal(found.array(i), np.asarray(found.open(i)))
    gray, palette, alpha = (root / name for name in ("g.png", "p.png", "a.png"))
    picture(1).convert("L").save(gray)
    picture(2).convert("P").save(palette)
    picture(3).convert("RGBA").save(alpha)
    rotated = root / "r.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(4, 40).save(rotated, exif=exif)
    for path in (gray, palette, alpha, rotated):
        assert np.array_equal(decode_array(path.read_bytes(), path), np.asarray(decode(path)))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_pixels_do_not_depend_on_who_makes_them_rgb(mode, monkeypatch):
    """libjpeg where OpenCV can ask it (from 4.11 on), OpenCV where it cannot: PIL's pixels. Of CMYK,
    which no set of photographs is in, PIL's differ by rounding."""
    import cv2

    how = [{"quality": 90}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}]
    files = []
    for settings in how:
        for size in ((64, 48), (33, 17), (1, 1)):
            noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3))
            buffer = io.BytesIO()
            image = Image.fromarray(noise.astype(np.uint8)).convert(mode)
            image.save(buffer, "JPEG", **settings)
            files.append(buffer.getvalue())
    found = [decode_array(data, "x") for data in files]
    monkeypatch.delattr(cv2, "IMREAD_COLOR_RGB", raising=False)
    for data, pixels in zip(files, found):
        assert np.array_equal(pixels, decode_array(data, "x"))
        assert mode == "CMYK" or np.array_equal(pixels, np.asarray(decode("x", data=data)))


@pytest.mark.parametrize(("name", "per", "train"), [("cifar10", 10, 50), ("cifar100", 2, 200)])
def test_cifar_for_pretraining(trees, name, per, train):
    """The same pixels and labels as torchvision's own reader gives."""
    from torchvision import datasets

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


def test_stl10_with_its_unlabelled_part(tmp_path):
    folder = tmp_path / "stl10" / "stl10_binary"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    raw = {
        s: rng.integers(0, 256, (n, 3, 96, 96), dtype=np.uint8)
        for s, n in (("train", 3), ("unlabeled", 5))
    }
    for split, pixels in raw.items():
        pixels.tofile(folder / f"{split}_X.bin")
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
