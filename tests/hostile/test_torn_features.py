"""An entry of the feature cache that a crash or a stranger cut: named, and made anew."""

import os

import numpy as np
import pytest
from PIL import Image
from support.strangers import door

from backbench.results import store
from transfer.feature_cache import FeatureCache, PartFiles

ABOUT = {"checkpoint": "a"}


def made(cache, value):
    """The entry of ABOUT, all `value`."""
    seen = np.zeros((3, 3), np.int64)
    parts = PartFiles(cache, [ABOUT], [4], 3, keep=[], seen=seen, still=lambda _: True)
    parts.rows[0][:] = value
    parts.finish()


TORN = {
    "empty": b"",
    "cut": b'{"description": {"check',
    "zeros": bytes(300),
    "list": b"[1]",
    "deep": b"[" * 100000,
    "types": b'{"description": 5, "shape": [3, 4], "sha256": "x"}',
    "shape": b'{"description": {}, "shape": "x", "sha256": "x"}',
    "keys": b"{}",
}


@pytest.mark.parametrize("case", TORN)
def test_a_torn_entry_is_named_and_made_anew(tmp_path, caplog, case):
    cache = FeatureCache(tmp_path / "features", 10**6)
    with cache.try_lock([ABOUT]):
        made(cache, 1)
        about = cache.path(ABOUT).with_suffix(".json")
        about.write_bytes(TORN[case])
        assert cache.open(ABOUT) is None
        assert f"{about}: torn; its features are made anew" in caplog.text
        made(cache, 2)
        assert cache.open(ABOUT).sum() == 24


def test_an_entry_without_rows_is_none(tmp_path):
    cache = FeatureCache(tmp_path / "features", 10**6)
    with cache.try_lock([ABOUT]):
        made(cache, 1)
        cache.path(ABOUT).unlink()
        assert cache.open(ABOUT) is None


@pytest.mark.parametrize("case", [b"", b"[1]", b'{"rows": 2}', b'{"rows": [], "parts": 1}'])
def test_a_torn_marker_vouches_for_nothing(tmp_path, case):
    cache = FeatureCache(tmp_path / "features", 10**6)
    with cache.try_lock([ABOUT]):
        cache.path(ABOUT).with_suffix(".rows.json").write_bytes(case)
        made(cache, 1)
        assert cache.open(ABOUT).sum() == 12


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
