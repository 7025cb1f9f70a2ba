"""Fixtures that the tests of probes, finetuning and analysis share."""

import numpy as np
import pytest
from PIL import Image
from support.interruptions import WatchedDecoder
from support.layouts import trunk_file

from backbench.images import image_list
from backbench.images.image_list import scan_folder
from backbench.records import store
from backbench.transfer.features.cache import FeatureCache
from backbench.verify import verification


@pytest.fixture
def decoder(monkeypatch):
    watched = WatchedDecoder(image_list.decode)
    monkeypatch.setattr(image_list, "decode", watched)
    return watched


@pytest.fixture
def images(tmp_path):
    draw = np.random.Generator(np.random.PCG64(0))
    for label in "ab":
        for i in range(5):
            file = tmp_path / "data" / label / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (50, 45, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
    return scan_folder(tmp_path / "data")


@pytest.fixture(scope="session")
def made(tiny_root, tmp_path_factory):
    """The demo's data, tiny, and two random trunks."""
    base = tmp_path_factory.mktemp("made")
    trunks = [trunk_file(base / f"{seed}.safetensors", seed) for seed in range(2)]
    return tiny_root, trunks


@pytest.fixture(scope="module")
def whole(request, made, tmp_path_factory):
    """A whole run of a dense probe, by the `command` of the test's own file."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert request.module.command(made, out) == 0
    return out


@pytest.fixture
def dense_rows(whole):
    """The rows of that run: three metrics of two trunks, each with the files that it follows from."""
    rows = list(store.read(whole)[0])
    assert sorted({r.metric for r in rows}) == ["macc", "miou", "pixel_acc"]
    assert len(rows) == 6
    verdicts = verification.of_run(rows, whole)
    assert {v.level for v in verdicts} == {verification.FROM_KEPT}
    for r in rows:
        assert (whole / r.provenance["picture"]).stat().st_size > 1000
        assert (r.ci95 is None) == (r.metric == "macc")
    return rows


@pytest.fixture
def cache(tmp_path):
    return FeatureCache(tmp_path / "cache", 10_000_000)
