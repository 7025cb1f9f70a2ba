"""Kept predictions are read again only where too many came between."""

import numpy as np
import pytest

from backbench.results import predictions, store


@pytest.fixture
def files(tmp_path):
    """Four files of about 8 KB of arrays each."""
    out = []
    for n in range(4):
        kept = {"prediction": np.full(1000, n), "label": np.zeros(1000, dtype=np.int64)}
        out.append(tmp_path / store.keep_predictions(tmp_path, f"p{n}", manifest="x", **kept))
    return out


def test_as_many_files_are_held_as_the_bytes_allow(files, monkeypatch):
    monkeypatch.setattr(predictions, "_latest", predictions._Latest())
    read = []
    real = predictions._read
    monkeypatch.setattr(predictions, "_read", lambda path: read.append(path) or real(path))
    one = sum(a.nbytes for a in real(files[0]).values()) + predictions._ENTRY
    monkeypatch.setattr(predictions._Latest, "BYTES", 3 * one + 10)
    for place in (0, 1, 2, 0, 1, 2):
        assert (predictions.load(files[place])["prediction"] == place).all()
    assert read == files[:3], "three are held"
    predictions.load(files[0])
    predictions.load(files[3])
    assert predictions._latest.used <= 3 * one + 10
    read.clear()
    for place in (0, 2, 3, 1):
        predictions.load(files[place])
    assert read == [files[1]], "the one that nobody asked for went"
    monkeypatch.setattr(predictions._Latest, "BYTES", 10)
    assert predictions.load(files[0])["prediction"][0] == 0 and predictions._latest.used == 0
    assert predictions.load(files[0].with_name("none.npz")) is None
