"""Fixtures that the tests of probes, finetuning and analysis share."""

import numpy as np
import pytest
from PIL import Image
from support.interruptions import WatchedDecoder
from support.layouts import trunk_file

from backbench.datasets import embedded
from backbench.images import image_list
from backbench.images.image_list import scan_folder
from transfer.feature_cache import FeatureCache


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
            Image.fromarray(draw.integers(0, 256, (50, 45, 3), dtype=np.uint8)).save(file)
    return scan_folder(tmp_path / "data")


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The demo's data, tiny, and two random trunks."""
    root = embedded.build(tmp_path_factory.mktemp("made"), "tiny")
    return root, [trunk_file(root / f"{seed}.safetensors", seed) for seed in range(2)]


@pytest.fixture
def cache(tmp_path):
    return FeatureCache(tmp_path / "cache", 10_000_000)
