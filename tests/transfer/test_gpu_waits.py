"""Evaluation on a pretended GPU: the numbers are the CPU's, and no batch waits for the GPU."""

import math

import pytest
import torch
from support.extraction import CPU, GEOMETRY, checkpoint
from support.pretended_gpu import CUDA, OnGpu, PretendedGpu

from backbench.datasets import catalog
from backbench.images import preprocess
from backbench.images.preprocess import CIFAR_MEAN, CIFAR_STD, Pixels
from backbench.transfer import logreg
from backbench.transfer.devices import Machine
from backbench.transfer.features.cache import FeatureCache
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.finetune import Network
from backbench.transfer.finetune_protocol import Finetune
from backbench.transfer.heads import AdamHeads, LinearHeads
from backbench.transfer.probes.knn import Knn


@pytest.fixture
def gpu():
    with PretendedGpu() as gpu:
        yield gpu
    preprocess._statistics.cache_clear()


def pixels(seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 3, 32, 32)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


def test_features_are_the_cpus_and_no_later_batch_waits(gpu):
    points = [checkpoint(0), checkpoint(1, pixels=Pixels(CIFAR_MEAN, CIFAR_STD, "BGR"))]
    here = [FrozenTrunk.build(point, device=CPU) for point in points]
    there = [FrozenTrunk.build(point, device=CUDA) for point in points]
    for seed in range(2):
        gpu.take()
        found = forward_all(there, pixels(seed).to("cuda", non_blocking=True))
        waits = gpu.take()
        for a, b in zip(found, forward_all(here, pixels(seed))):
            assert isinstance(a, OnGpu)
            torch.testing.assert_close(a.host, b, rtol=1e-4, atol=1e-4)
    assert not waits  # of the second batch: constants are sent once


@pytest.mark.parametrize("kind", [LinearHeads, AdamHeads])
@pytest.mark.parametrize("decay", [0.0, 1e-4])
def test_heads_train_as_on_the_cpu_without_a_wait(gpu, kind, decay):
    heads = [kind(3, 5, 8, std=0.01, seed=0, device=device) for device in (CPU, CUDA)]
    rates = torch.tensor([0.1, 1.0, 10.0])
    on_gpu = rates.to("cuda")
    gpu.take()
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=generator)
        y = torch.randint(5, (16,), generator=generator)
        settings = {"momentum": 0.9, "decay": decay, "batch": 16}
        losses = heads[0].step(x, y, rates, **settings)
        x = x.to("cuda", non_blocking=True)
        y = y.to("cuda", non_blocking=True)
        found = heads[1].step(x, y, on_gpu, **settings)
        torch.testing.assert_close(found.host, losses)
    assert not gpu.take()
    torch.testing.assert_close(heads[1].weight.host, heads[0].weight)


def test_finetuning_is_as_on_the_cpu_and_a_step_waits_for_nothing(gpu):
    protocol = Finetune(kind="finetune", protocol="x", head_lr=(0.1,), parts={})
    on_cpu = Network(checkpoint(0), 5, protocol, 0, Machine(CPU, 0, 1, workers=0))
    on_gpu = Network(checkpoint(0), 5, protocol, 0, Machine(CUDA, 0, 1, workers=0))
    expected = on_cpu(pixels(0)).detach()
    found = on_gpu(pixels(0).to("cuda", non_blocking=True)).detach()
    gpu.take()
    on_gpu(pixels(1).to("cuda", non_blocking=True)).square().mean().backward()
    assert not gpu.take()
    torch.testing.assert_close(found.host, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_extraction_copies_a_batch_down_while_the_next_one_is_made(
    gpu, tiny_root, tmp_path
):
    found = catalog.open_split(tiny_root, "digits", "val")
    rows = []
    size = 8
    for number, device in enumerate((CPU, CUDA)):
        extract = Extractor(
            trunks=[FrozenTrunk.build(checkpoint(0), device=device)],
            geometry=GEOMETRY,
            cache=FeatureCache(tmp_path / str(number), limit=1 << 30),
            machine=Machine(device, rank=0, world=1, workers=0),
            batch=size,
        )
        gpu.take()
        rows.append(extract(found)[0])
    waits = gpu.take()
    batches = math.ceil(len(found) / size)
    # What is waited for: what rank 0 says, before and after, and constants of the first batch.
    assert len(waits) <= 10 < batches, "\n".join(waits)
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("room", [1 << 30, 1 << 9])
def test_logistic_regression_sends_its_features_once(gpu, monkeypatch, room):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room, room))
    x = torch.randn(40, 6)
    y = torch.arange(40) % 3
    blocks = 3  # of `chunk` rows
    here = logreg.fit([(x, y)], classes=3, l2=1.0, device=CPU, chunk=16)
    points = []
    plain = logreg.Objective.__call__

    def counted(self, flat):
        points.append(1)
        return plain(self, flat)

    monkeypatch.setattr(logreg.Objective, "__call__", counted)
    gpu.take()
    there = logreg.fit([(x, y)], classes=3, l2=1.0, device=CUDA, chunk=16)
    waits = gpu.take()
    # Every evaluation sends its point. Features are sent once in each precision, beside a few
    # constants, or to every evaluation where they do not fit.
    beside = sum("copy up" in wait for wait in waits) - len(points)
    assert len(points) > here.iterations / 2
    if room > 1 << 20:
        assert beside <= 8 * blocks + 10, "\n".join(waits)
    else:
        assert beside >= 2 * blocks * (len(points) - 2)
    torch.testing.assert_close(there.weight.host, here.weight, rtol=1e-3, atol=1e-4)


def test_fp32_is_fp32_and_tf32_is_said():
    torch.backends.cudnn.allow_tf32 = True  # as torch starts
    FrozenTrunk.build(checkpoint(0), device=CPU)
    assert not torch.backends.cudnn.allow_tf32
    FrozenTrunk.build(checkpoint(0), device=CPU, precision="tf32")
    assert torch.backends.cudnn.allow_tf32
    FrozenTrunk.build(checkpoint(0), device=CPU)
    protocol = Knn(kind="knn", protocol="knn-x-v1", precision="tf32")
    assert protocol.name == "knn-x-v1-tf32"
