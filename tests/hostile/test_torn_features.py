"""An entry of the feature cache that a crash or a stranger cut: named, and made anew."""

import numpy as np
import pytest

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
