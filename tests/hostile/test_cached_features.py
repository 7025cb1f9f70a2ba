"""Features of one data set are never used for another whose files look the same from outside."""

import os

import numpy as np
import pytest
from PIL import Image
from support.strangers import door

from backbench.results import store

DARK, BRIGHT = 60, 200


def data_set(root, *, crossed):
    """ROOT/own: class a dark and b bright; where `crossed`, the test images are the other way
    round. Names, sizes and times are the same in both."""
    rng = np.random.default_rng(int(crossed))
    for split, count in (("train", 12), ("val", 6), ("test", 6)):
        levels = (BRIGHT, DARK) if crossed and split == "test" else (DARK, BRIGHT)
        for name, level in zip("ab", levels):
            for i in range(count):
                file = root / "own" / split / name / f"{i}.bmp"
                file.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(level - 40, level + 40, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(file)
                os.utime(file, ns=(10**18, 10**18))
    return root


def value(trunk, root, out):
    how = ("--datasets", "own", "--protocol", "knn_demo", "--workers", "0")
    said = door("linear", trunk, *how, "--data", root, "--out", out)
    assert said.status == 0, said.err
    return [number.value for number in store.read(out)[0] if number.metric == "top1_k20"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["elsewhere", "in place"])
def test_files_that_look_the_same_from_outside(tmp_path, trunk, where, monkeypatch):
    monkeypatch.setattr("support.strangers.PATIENCE_S", 60.0)  # it measures twice
    first = data_set(tmp_path / "data", crossed=False)
    assert value(trunk, first, tmp_path / "one") == [100.0]
    root = first if where == "in place" else tmp_path / "other"
    other = data_set(root, crossed=True)
    assert value(trunk, other, tmp_path / "two") == [0.0]
