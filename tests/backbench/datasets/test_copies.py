"""Copies between two splits: by all pixels, or by looks where a lossy format changed those."""

import numpy as np
import pytest
from PIL import Image

from backbench.datasets import copies
from backbench.images.image_list import ImageList


def noise(seed, width=20, height=28):
    """A picture of noise, higher than wide."""
    rng = np.random.default_rng(seed)
    return rng.integers(30, 220, (height, width, 3), dtype=np.uint8)


def listed(folder, pictures):
    """name -> pixels, or the bytes of a file that is no picture"""
    folder.mkdir()
    for name, pixels in pictures.items():
        if isinstance(pixels, bytes):
            (folder / name).write_bytes(pixels)
        else:
            Image.fromarray(pixels).save(folder / name)
    return ImageList(folder, tuple(pictures), (0,) * len(pictures), ("a",))


def looks(images):
    return [copies.look_at(images.open(i)) for i in range(len(images))]


def test_a_look_is_the_mean_colours_of_blocks():
    pixels = noise(0, width=24, height=16)
    look = copies.look_at(Image.fromarray(pixels))
    assert look.size == (24, 16)
    blocks = np.frombuffer(look.blocks, np.uint8).reshape(8, 8, 3)
    means = pixels.reshape(8, 2, 8, 3, 3).astype(float).mean((1, 3))
    assert np.abs(blocks - means).max() <= 1


def test_equal_pixels_have_equal_contents_whatever_their_names(tmp_path):
    one, other = noise(1), noise(2)
    # All blocks of the third are those of the first, and its pixels are not
    swapped = one.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    a = listed(tmp_path / "a", {"1.png": one, "2.png": other, "3.bmp": swapped})
    b = listed(tmp_path / "b", {"x.bmp": other, "y.png": noise(3), "z.png": one})
    looks_a, looks_b = looks(a), looks(b)
    looks_a[2] = looks_a[0]
    found = copies.contents({"train": (a, looks_a), "test": (b, looks_b)})
    assert set(found) == {"train", "test"}
    assert set(found["train"]) == {"1.png", "2.png", "3.bmp"}
    same = {
        (own, theirs)
        for own, value in found["train"].items()
        for theirs, their_value in found["test"].items()
        if value == their_value
    }
    assert same == {("1.png", "z.png"), ("2.png", "x.bmp")}
    assert found["train"]["3.bmp"] != found["train"]["1.png"]


def test_images_without_a_look_and_those_that_are_gone_are_left_out(tmp_path):
    one = noise(1)
    a = listed(tmp_path / "a", {"1.png": one, "2.png": one, "3.png": one})
    all_looks = looks(a)
    all_looks[0] = None
    a.file(1).unlink()
    found = copies.contents({"train": (a, all_looks)})
    assert set(found["train"]) == {"3.png"}


def test_an_image_whose_look_no_other_has_is_not_read_again(tmp_path):
    a = listed(tmp_path / "a", {"1.png": noise(1), "2.png": noise(2)})
    all_looks = looks(a)
    for index in (0, 1):
        a.file(index).unlink()
    assert set(copies.contents({"train": (a, all_looks)})["train"]) == {
        "1.png",
        "2.png",
    }


def moved(pixels, by=(1, 0, 0)):
    return (pixels.astype(int) + by).astype(np.uint8)


def pairs(a, b, looks_a=None, looks_b=None):
    return copies.rewritten(a, looks_a or looks(a), b, looks_b or looks(b))


def test_every_rewritten_picture_is_found_with_its_first_partner(tmp_path):
    first, second = noise(1), noise(2)
    a = listed(
        tmp_path / "a",
        {"0.bmp": noise(9), "1.png": first, "2.PNG": second, "3.png": first},
    )
    b = listed(
        tmp_path / "b",
        {"p.bmp": noise(8), "q.tif": moved(second), "r.bmp": moved(first)},
    )
    assert pairs(a, b) == [("1.png", "r.bmp"), ("2.PNG", "q.tif"), ("3.png", "r.bmp")]
    # Images that could not be read have no look, and the others keep their places
    looks_a, looks_b = looks(a), looks(b)
    looks_a[1] = looks_b[0] = None
    assert pairs(a, b, looks_a, looks_b) == [("2.PNG", "q.tif"), ("3.png", "r.bmp")]
    nothing = [None] * len(b)
    assert copies.rewritten(a, looks_a, b, nothing) == []
    assert copies.rewritten(b, nothing, a, looks_a) == []


def test_one_format_or_another_size_is_no_rewriting(tmp_path):
    one = noise(1)
    a = listed(tmp_path / "a", {"1.png": one, "2.jpg": noise(5)})
    same_format = listed(tmp_path / "b", {"1.PNG": moved(one)})
    assert pairs(a, same_format) == []
    turned = listed(tmp_path / "c", {"1.bmp": np.rot90(one).copy()})
    assert pairs(a, turned) == []
    # .jpeg is .jpg
    alike = listed(tmp_path / "d", {"2.jpeg": moved(np.asarray(a.open(1)))})
    assert pairs(a, alike) == []


def test_equal_pixels_are_no_rewriting(tmp_path):
    one = noise(1)
    a = listed(tmp_path / "a", {"1.png": one})
    b = listed(tmp_path / "b", {"1.bmp": one, "2.bmp": moved(one)})
    assert pairs(a, b) == [("1.png", "2.bmp")]


def alternating(pixels, by):
    """Every other pixel by so much more, and the others by so much less: blocks keep their means."""
    sign = np.indices(pixels.shape[:2]).sum(0) % 2 * 2 - 1
    return moved(pixels, by * sign[..., None])


def one_block(pixels, by):
    """A block that is so much lighter, and another one that is so much darker."""
    out = pixels.astype(int)
    out[:6, :4] += by
    out[-6:, -4:] -= by
    return out.astype(np.uint8)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: moved(x, (1, 1, 0)), True),  # in the mean colour by at most 1.5
        (lambda x: moved(x, (1, 1, 1)), False),  # which is 1.73
        (lambda x: alternating(x, 6), True),  # in all pixels by at most 6
        (lambda x: alternating(x, 7), False),
        (lambda x: one_block(x, 5), True),  # in a block's gray by at most 6
        (lambda x: one_block(x, 7), False),
    ],
)
def test_how_far_a_rewritten_picture_may_be(tmp_path, change, found):
    one = noise(1, width=32, height=48)  # a block is 4 x 6 pixels
    a = listed(tmp_path / "a", {"1.png": one})
    b = listed(tmp_path / "b", {"1.bmp": change(one)})
    assert bool(pairs(a, b)) == found
