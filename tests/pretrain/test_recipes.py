"""Every shipped recipe is read, its method and optimiser built (on the meta device: shapes without
numbers), and the published numbers that it names exist."""

import functools
import re
from pathlib import Path

import pytest
import torch

from backbench.images.image_list import ImageList
from backbench.papers import published
from backbench.parallel import division
from backbench.recipes import config
from backbench.weights.archs import build_trunk
from pretrain import data, optim
from pretrain.method import Setup, build_method, method_names
from pretrain.recipe import PretrainConfig

FOLDER = config.configs_dir() / "pretrain"
NAMES = config.recipe_names("pretrain")
IMAGES = {"imagenet": 1_281_167, "imagenet100": 126_689, "stl10": 100_000, "digits": 900}


@functools.cache
def load(name: str) -> PretrainConfig:
    return config.load(PretrainConfig, name, kind="pretrain")


def representative(name: str) -> bool:
    """The first recipe of each method."""
    return name == next(n for n in NAMES if load(n).method.name == load(name).method.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_recipe_builds(name):
    build(name)


def test_a_recipe_of_each_method_builds():
    for name in filter(representative, NAMES):
        build(name)


def build(name: str) -> None:
    recipe = load(name)
    views = sum(group.count for group in recipe.views.crops)
    images = IMAGES.get(recipe.data.dataset, 50_000)
    sizes = {"batch_size": recipe.batch_size, "accumulate": recipe.accumulate, "views": views}
    setup = Setup(**sizes, seed=recipe.seed, images=images, classes=10)
    with torch.device("meta"):
        trunk = build_trunk(recipe.arch, recipe.stem, zero_init_residual=recipe.zero_init_residual)
        method = build_method(recipe.method, trunk, setup)
    assert method.backbone is not None
    optimizer = optim.of_recipe(recipe, method)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in method.parameters() if p.requires_grad}


def test_expected_numbers_are_published():
    for name in NAMES:
        check_expected(load(name))


def check_expected(recipe: PretrainConfig) -> None:
    rows = published.rows()
    for key in recipe.expected:
        found = [row for row in rows if row.key == key]
        assert found, f"{key} is not in published.csv"
        assert {row.arch for row in found} == {published.arch_in_tables(recipe.arch)}
        trained = recipe.stop_after_epochs or recipe.epochs
        assert {row.epochs for row in found} <= {trained, None}, key
    assert len(set(recipe.expected)) == len(recipe.expected)


def test_names_on_the_leaderboard_are_unique():
    names = [load(name).name for name in NAMES]
    assert not {n for n in names if names.count(n) > 1}


def test_every_method_has_a_recipe():
    used = {load(name).method.name for name in NAMES}
    assert set(method_names()) - used == set()


def test_every_number_has_a_source():
    """Each group of numbers of a paper's recipe stands in a file that says where it is from."""
    number = r"^\s+(weight|alpha|beta|lam|lr|temperature|queue|momentum|weight_decay): "
    whole_file = r"^\s*# .*(every number|torchvision|solo-learn)"
    for path in FOLDER.rglob("*.yaml"):
        if path.name == "_digits.yaml":  # ours, of no paper
            continue
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            if re.search(number, line) and "#" not in line:
                assert re.search(whole_file, "\n".join(lines[:i]), re.M), (path, line)


@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16, 32])
def test_every_recipe_runs_on_so_many_processes(processes):
    """And none has batch norm whose groups are the processes, so that its numbers are the same."""
    for name in NAMES:
        recipe = load(name)
        division.check_batch(recipe.batch_size, processes, recipe.accumulate)
        method = getattr(recipe.method, "inner", recipe.method)
        if method.name != "arb" and hasattr(method, "groups"):
            assert method.groups is not None, name
            division.check_nesting(method.groups, processes)


@pytest.mark.parametrize(
    ("name", "images", "trained"),
    [
        ("mio/mio_d_cifar10", 50_000, 50_000),
        ("mio/mio_d_cifar10_code", 50_000, 40_000),
        ("mio/mio_a_cifar100_code", 50_000, 40_000),
        ("mio/mio_best_stl10", 5_000, 5_000),
        ("mio/mio_best_stl10_code", 5_000, 4_500),
    ],
)
def test_mio_as_released_holds_a_part_out(name, images, trained):
    paths = tuple(f"{i:05}" for i in range(images))
    found = ImageList(Path("cifar"), paths, (0,) * images, ("a", "b"))
    used = data.to_train_on(found, load(name).data.hold_out)
    assert len(used) == len(set(used.paths)) == trained
    assert list(used.paths) == sorted(used.paths) and set(used.paths) <= set(paths)
