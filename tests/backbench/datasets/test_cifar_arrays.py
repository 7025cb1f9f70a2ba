"""CIFAR's and STL-10's arrays: parts that do not fit are said in a line."""

import numpy as np
import pytest

from backbench.datasets import cifar_stl10
from backbench.errors import BadInput


def listed(tmp_path, *, dtype="uint8", labels=(0, 1, -1), classes=("cat", "dog")):
    pixels = np.zeros((3, 32, 32, 3), dtype)
    return cifar_stl10._array_list(
        tmp_path / "x", "train", pixels, list(labels), list(classes)
    )


def test_images_are_named_by_split_and_place(tmp_path):
    images = listed(tmp_path)
    assert list(images.paths) == ["train/00000", "train/00001", "train/00002"]
    assert list(images.labels) == [0, 1, -1]
    assert images.classes == ("cat", "dog")
    assert images.root == tmp_path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "float32"}, "3 images of float32 but 3 labels in 'train'"),
        ({"labels": (0, 1)}, "3 images of uint8 but 2 labels in 'train'"),
        ({"classes": ("cat", 3)}, "a class name that is no text"),
        ({"labels": (0, 1, 2)}, "label 2, and 2 classes have names"),
        ({"labels": (0, 1, -2)}, "label -2, and 2 classes have names"),
    ],
)
def test_parts_that_do_not_fit_are_said(tmp_path, change, says):
    with pytest.raises(BadInput, match=says):
        listed(tmp_path, **change)
