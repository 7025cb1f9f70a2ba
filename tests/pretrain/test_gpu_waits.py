"""Every method on a pretended GPU: the CPU's numbers, and no step between two rows waits for it."""

import pytest
import torch
from support import tiny_pretraining
from support.methods import CASES, train, train_on_pretended_gpu
from support.pretended_gpu import CUDA, OnGpu, PretendedGpu
from torch import nn

from backbench.datasets import catalog
from backbench.images import preprocess
from backbench.images.crops import Crops
from pretrain import data, optim
from pretrain.monitor import RecentTerms
from pretrain.recipe import Optim, ViewsConfig

CPU = torch.device("cpu")


@pytest.fixture
def gpu():
    with PretendedGpu() as gpu:
        yield gpu
    preprocess._statistics.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_no_step_waits(name):
    expected = train(CASES[name])
    got, waits = train_on_pretended_gpu(CASES[name])
    assert not waits, "\n".join(waits)
    for key, value in expected.items():
        assert isinstance(got[key], OnGpu), key
        torch.testing.assert_close(got[key].host, value, rtol=1e-7, atol=1e-9, msg=key)


@pytest.mark.parametrize("pipeline", ["reference", "fast"])
def test_views_are_finished_without_a_wait(pipeline, shapes, gpu):
    """With `fast` colour and blur are the device's."""
    views = ViewsConfig(pipeline=pipeline, crops=(Crops(count=2, size=16),))
    recipe = tiny_pretraining.config(views=views)
    found = catalog.open_split(shapes(8), "shapes", "train")
    batches = data.ViewBatches(found, recipe, cache_bytes=0, device_colour=pipeline == "fast")
    loaded = batches.__getitems__([(0, i) for i in range(8)])
    made = []
    for device in (CPU, CUDA, CUDA):
        gpu.take()
        form = data.InputFormat(device, torch.float32, torch.channels_last)
        made.append(data.finish_views(loaded, recipe.views, form))
    assert not gpu.take()  # of the second batch: constants are sent once
    for here, there in zip(made[0], made[1]):
        torch.testing.assert_close(there.host, here)


@pytest.mark.parametrize("name", ["sgd", "lars", "adamw"])
def test_optimisers_do_not_wait(name, gpu):
    torch.manual_seed(0)
    here, there = nn.Linear(4, 3), nn.Linear(4, 3)
    there.load_state_dict(here.state_dict())
    there.to("cuda")
    weights = []
    for module, device in ((here, "cpu"), (there, "cuda")):
        settings = Optim(name=name, lr=0.1, weight_decay=1e-2, decay_1d=False, adapt_1d=False)
        optimizer = optim.of_recipe(tiny_pretraining.config(optim=settings), module)
        x = torch.ones(2, 4).to(device)
        for _ in range(2):
            gpu.take()
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        weights.append(module.weight)
    assert not gpu.take()
    torch.testing.assert_close(weights[1].host, weights[0])


def test_terms_are_kept_without_a_wait(gpu):
    """Those of a method that makes one on the CPU, too, as JCL its lambda."""
    recent = RecentTerms()
    on_gpu = torch.tensor([1.0, 3.0]).to("cuda", non_blocking=True)
    for loss in on_gpu:
        recent.add([{"loss": loss, "lambda": torch.tensor(4.0)}], CUDA)
    assert not gpu.take()
    assert recent.mean() == {"loss": 2.0, "lambda": 4.0}
    assert gpu.take()  # a row is read
