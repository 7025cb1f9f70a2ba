"""Every shipped recipe, through the command line: built, one step made, its checkpoint read. Smaller
networks and pictures than it says; method, views, optimiser and schedule are the recipe's own. Those
that are then the same to the last setting, but for names and for which pictures, make one step."""

import dataclasses
import functools
import json

import pytest

from backbench.cli import main
from backbench.recipes import config
from backbench.runs.step_metrics import read_metrics
from backbench.weights.checkpoint import Checkpoint
from pretrain.recipe import PretrainConfig

NAMES = sorted(config.recipe_names("pretrain"))
CHEAPEST = ("jcl/jcl_imagenet", "mio/mio_d_cifar10_code")  # for the fast tests
BATCH = 16


@functools.cache
def load(name):
    return config.load(PretrainConfig, name, kind="pretrain")


def smaller(recipe):
    """Overrides that make a step affordable, and keep what the recipe has: how many views of how
    many sizes, groups where they fit the batch, layers and norms."""
    sizes = sorted({crops.size for crops in recipe.views.crops}, reverse=True)
    tiny = dict(zip(sizes, (16, 12)))
    crops = [{**dataclasses.asdict(c), "size": tiny[c.size]} for c in recipe.views.crops]
    # CMC's trunk is a pair of networks, and stays one
    arch = "lab:resnet18,width=0.5" if recipe.arch.startswith("lab:") else "resnet18"
    out = {"views.crops": crops, "batch_size": BATCH, "arch": arch, "log_every": 1}
    # One step: the loop's own end, the schedule's length stays
    out |= {"epochs": recipe.epochs and 1, "stop_after_epochs": None, "optim.warmup_epochs": 0.0}
    out |= method_overrides("method", dataclasses.asdict(recipe.method))
    return [f"{key}={json.dumps(value)}" for key, value in out.items()]


def method_overrides(at, method):
    out = {}
    # As many columns as ARB has groups at most; W-MSE whitens half as many as a slice has images
    columns = BATCH // 2 if "size" in method else 2 * BATCH
    for head in ("head", "predictor"):
        if head in method:
            out |= {f"{at}.{head}.hidden": 32, f"{at}.{head}.dim": columns}
    for key, value in {
        "queue": 2 * BATCH,
        "prototypes": 12,
        "negatives": 8,
        "size": BATCH,
        "hidden": 32,
        "bottleneck": 8,
        "dim": 24,
        "kept": 5,
        "rows": 7,
    }.items():
        if method.get(key):
            out[f"{at}.{key}"] = value
    if "inner" in method:
        out |= method_overrides(f"{at}.inner", method["inner"])
    return out


def alike(name):
    """A fingerprint of all that decides the reduced step, which recipes for several sets share."""
    reduced = config.load(PretrainConfig, name, smaller(load(name)), kind="pretrain")
    recipe = dataclasses.asdict(reduced)
    for key in ("name", "expected", "probe"):
        del recipe[key]
    for key in ("dataset", "split"):
        del recipe["data"][key]
    return config.fingerprint(recipe)


@pytest.fixture(scope="module")
def stepped():
    """What `alike` says of those whose step was made in this process."""
    return set()


@pytest.fixture(scope="module")
def roots(shapes):
    """roots(dataset, split) -> a ROOT where the dataset has 20 pictures, a fifth more than a batch."""
    pictures = shapes(BATCH + 4, "ab", 32)

    @functools.cache
    def root(dataset, split):
        folder = pictures / f"{dataset}-{split}"
        (folder / dataset).mkdir(parents=True)
        (folder / dataset / split).symlink_to(pictures / "shapes" / "train")
        return folder

    return root


def step(name, roots, tmp_path, monkeypatch):
    recipe = load(name)
    from backbench.datasets import catalog
    from pretrain import monitor

    # CIFAR and STL-10 lie in files of their own; what is read is not what is tested here, nor is
    # the picture of a curve of one point, which takes longer than the step
    monkeypatch.setattr(catalog, "row", lambda name: None)
    monkeypatch.setattr(monitor, "plot_curves", lambda *_: None)
    root = roots(recipe.data.dataset, recipe.data.split)
    out = tmp_path / "run"
    words = ["pretrain", name, *smaller(recipe), "--data", str(root), "--out", str(out)]
    assert main([*words, "--accelerator", "cpu", "--workers", "0"]) == 0
    checkpoint = Checkpoint.load(out / "backbone.safetensors")
    assert checkpoint.method == recipe.method.name
    if recipe.epochs:
        (row,) = read_metrics(out)
        assert row["step"] == 0 and row["loss"] == row["loss"]


@pytest.mark.parametrize("name", CHEAPEST)
def test_cheapest_recipes_step(name, roots, tmp_path, monkeypatch):
    step(name, roots, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHEAPEST])
def test_recipe_steps(name, stepped, roots, tmp_path, monkeypatch):
    if alike(name) not in stepped:
        step(name, roots, tmp_path, monkeypatch)
        stepped.add(alike(name))
