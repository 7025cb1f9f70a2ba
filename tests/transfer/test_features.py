"""Frozen trunks are exact, and the cache gives back what was asked for or refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from backbench.errors import BadInput, Preempted
from backbench.images.files import scan_folder
from backbench.images.preprocess import CIFAR_MEAN, CIFAR_STD, Pixels, eval_geometry, to_input
from backbench.runs.state import StopFlag
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.resnet import build_backbone
from transfer import features
from transfer.features import Extractor, Frozen, Store

CPU = torch.device("cpu")
GEOMETRY = {"resize": 40, "crop": 32, "interpolation": "bilinear", "square": False}


def checkpoint(seed=0, arch="resnet18", **about):
    torch.manual_seed(seed)
    trunk = build_backbone(arch).train()
    with torch.no_grad():
        for _ in range(2):
            trunk(torch.randn(8, 3, 32, 32))
        for name, value in trunk.named_parameters():
            if "bn" in name or "downsample.1" in name:
                value.add_(0.2 * torch.randn_like(value))
    return Checkpoint(arch=arch, method="random", state_dict=trunk.state_dict(), **about)


@pytest.fixture
def images(tmp_path):
    draw = np.random.Generator(np.random.PCG64(0))
    for label in "ab":
        for i in range(5):
            file = tmp_path / "data" / label / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (50, 45, 3), dtype=np.uint8)).save(file)
    return scan_folder(tmp_path / "data")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache", 10_000_000)


def extractor(store, *checkpoints, **changes):
    trunks = [
        Frozen.build(c, device=CPU, precision=changes.pop("precision", "fp32")) for c in checkpoints
    ]
    return Extractor(
        trunks=trunks, geometry=changes.pop("geometry", GEOMETRY), store=store, batch=4, **changes
    )


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_folded_channels_last_is_the_trunk(arch):
    point = checkpoint(arch=arch)
    x = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        expected = point.backbone().eval()(x)
    found = Frozen.build(point, device=CPU)(x)
    assert not [
        m
        for m in Frozen.build(point, device=CPU).module.modules()
        if isinstance(m, torch.nn.BatchNorm2d)
    ]
    assert float((found - expected).norm() / expected.norm()) < 5e-6


def test_bf16_is_near_and_marked(images, store):
    point = checkpoint()
    exact = extractor(store, point)(images)[0]
    rough = extractor(store, point, precision="bf16")(images)[0]
    error = float((rough - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1, "another entry of the cache, not the same numbers"


def test_features_are_those_of_the_plain_trunk(images, store):
    points = [checkpoint(0), checkpoint(1, pixels=Pixels(CIFAR_MEAN, CIFAR_STD, "BGR"))]
    found = extractor(store, *points)(images)
    geometry = eval_geometry(**GEOMETRY)
    for point, rows in zip(points, found):
        pixels = torch.stack(
            [to_input(geometry(images.open(i)), point.pixels) for i in range(len(images))]
        )
        with torch.no_grad():
            expected = point.backbone().eval()(pixels)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)


def test_workers_change_nothing(images, tmp_path):
    a = extractor(Store(tmp_path / "a", 10**8), checkpoint())(images)[0]
    b = extractor(Store(tmp_path / "b", 10**8), checkpoint(), workers=2)(images)[0]
    assert torch.equal(a, b)


def test_second_time_comes_from_the_cache(images, store, monkeypatch):
    first = extractor(store, checkpoint())(images)[0]
    monkeypatch.setattr(features, "forward_all", None)
    assert torch.equal(extractor(store, checkpoint())(images)[0], first)
    with pytest.raises(TypeError):  # the forward is really needed for what is not there
        extractor(store, checkpoint(1))(images)


def test_all_that_matters_is_in_the_key(images, store):
    import os

    base = Frozen.build(checkpoint(), device=CPU)
    of = features.fingerprint(images)
    keys = {store.path(features.describe(base, of, GEOMETRY))}
    other = [
        features.describe(Frozen.build(checkpoint(1), device=CPU), of, GEOMETRY),
        features.describe(
            Frozen.build(checkpoint(pixels=Pixels(std=(0.228, 0.224, 0.225))), device=CPU),
            of,
            GEOMETRY,
        ),
        features.describe(Frozen.build(checkpoint(), device=CPU, precision="bf16"), of, GEOMETRY),
        features.describe(base, of, {**GEOMETRY, "interpolation": "bicubic"}),
        features.describe(base, of, {**GEOMETRY, "resize": 41}),
        features.describe(base, features.fingerprint(images.subset(range(9))), GEOMETRY),
    ]
    os.utime(images.file(0), ns=(1, 1))
    other.append(features.describe(base, features.fingerprint(images), GEOMETRY))
    keys |= {store.path(description) for description in other}
    assert len(keys) == 8


def test_another_preprocessing_under_this_name_is_refused(images, store):
    make = extractor(store, checkpoint())
    make(images)
    (about,) = store.folder.glob("*.json")
    text = json.loads(about.read_text())
    text["description"]["geometry"]["interpolation"] = "bicubic"
    about.write_text(json.dumps(text))
    with pytest.raises(
        BadInput, match="features of another geometry than asked for; remove the file"
    ):
        make(images)


def test_damaged_rows_are_refused(images, store):
    make = extractor(store, checkpoint())
    make(images)
    (rows,) = store.folder.glob("*.npy")
    data = bytearray(rows.read_bytes())
    data[-5] ^= 1
    rows.write_bytes(data)
    with pytest.raises(BadInput, match="the cached features are damaged; remove the file"):
        make(images)


def test_the_cache_stays_within_its_limit(images, tmp_path):
    small = Store(tmp_path / "small", 2 * (10 * 512 * 4 + 200))
    for seed in range(4):
        extractor(small, checkpoint(seed))(images)
        assert sum(p.stat().st_size for p in small.folder.glob("*.npy")) <= small.limit
    assert len(list(small.folder.glob("*.npy"))) == 2
    with pytest.raises(BadInput, match="set BACKBENCH_CACHE_GB"):
        extractor(Store(tmp_path / "tiny", 1000), checkpoint())(images)


def test_stopped_at_a_batch_and_continued(images, store, monkeypatch):
    stop = StopFlag()
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted, match="stopped by SIGTERM after 4 of 10 images"):
        extractor(store, checkpoint(), stop=stop)(images)
    seen = []
    forward = features.forward_all
    monkeypatch.setattr(
        features, "forward_all", lambda trunks, x: seen.append(len(x)) or forward(trunks, x)
    )
    continued = extractor(store, checkpoint())(images)[0]
    assert seen == [4, 2], "the first batch is not computed again"
    whole = extractor(Store(store.folder.parent / "other", 10**8), checkpoint())(images)[0]
    assert torch.equal(continued, whole)
    assert not list(Path(store.folder).glob("*.part"))
