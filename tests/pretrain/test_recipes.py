"""Every shipped recipe builds, names published numbers, and makes one step in small."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch

from backbench.cli import program
from backbench.cli.program import main
from backbench.datasets import catalog
from backbench.images.image_list import ImageList
from backbench.parallel import division
from backbench.pretrain import data, monitor, optim
from backbench.pretrain.method import Setup, build_method, method_names
from backbench.pretrain.recipe import PretrainConfig
from backbench.pretrain.train import what_decides
from backbench.published import published
from backbench.recipes import config
from backbench.runs.step_metrics import read_metrics
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint

FOLDER = config.configs_dir() / "pretrain"
NAMES = sorted(config.recipe_names("pretrain"))
IMAGES = {
    "imagenet": 1_281_167,
    "imagenet100": 126_689,
    "stl10": 100_000,
    "digits": 900,
}
# The fast tests make the step of these
CHEAPEST = ("jcl/jcl_imagenet", "mio/mio_d_cifar10_code")
BATCH = 16


@functools.cache
def load(name: str) -> PretrainConfig:
    return config.load(PretrainConfig, name, kind="pretrain")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_recipe_builds(name):
    build(name)


def test_a_recipe_of_each_method_builds():
    first_of = {load(name).method.name: name for name in reversed(NAMES)}
    for name in first_of.values():
        build(name)


def build(name: str) -> None:
    recipe = load(name)
    setup = Setup(
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        views=sum(group.count for group in recipe.views.crops),
        seed=recipe.seed,
        images=IMAGES.get(recipe.data.dataset, 50_000),
        classes=10,
    )
    with torch.device("meta"):
        trunk = build_trunk(
            recipe.arch, recipe.stem, zero_init_residual=recipe.zero_init_residual
        )
        method = build_method(recipe.method, trunk, setup)
    assert method.backbone is not None
    optimizer = optim.of_recipe(recipe, method)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in method.parameters() if p.requires_grad}


def test_expected_numbers_are_published():
    rows = published.rows()
    for recipe in map(load, NAMES):
        for key in recipe.expected:
            found = [row for row in rows if row.key == key]
            assert found, f"{key} is not in published.csv"
            assert {row.arch for row in found} == {
                published.arch_in_tables(recipe.arch)
            }
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
        ("mio/mio_a_cifar100_code", 50_000, 40_000),
        ("mio/mio_best_stl10_code", 5_000, 4_500),
    ],
)
def test_mio_as_released_holds_a_part_out(name, images, trained):
    paths = tuple(f"{i:05}" for i in range(images))
    found = ImageList(Path("cifar"), paths, (0,) * images, ("a", "b"))
    used = data.to_train_on(found, load(name).data.hold_out)
    assert len(used) == len(set(used.paths)) == trained
    assert list(used.paths) == sorted(used.paths) and set(used.paths) <= set(paths)


def smaller(recipe):
    """Overrides that make a step affordable and keep views, sizes, groups, layers and norms."""
    sizes = sorted({crops.size for crops in recipe.views.crops}, reverse=True)
    tiny = dict(zip(sizes, (16, 12)))
    crops = []
    for group in recipe.views.crops:
        crops.append({**dataclasses.asdict(group), "size": tiny[group.size]})
    arch = "resnet18,width=0.25"
    if recipe.arch.startswith("lab:"):
        arch = (
            "lab:resnet18,width=0.5"  # CMC's trunk is a pair of networks, and stays one
        )
    overrides = {
        "views.crops": crops,
        "batch_size": BATCH,
        "arch": arch,
        "log_every": 1,
        # One step
        "epochs": 1 if recipe.epochs else 0,
        "stop_after_epochs": None,
        "optim.warmup_epochs": 0.0,
        **method_overrides("method", dataclasses.asdict(recipe.method)),
    }
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]


def method_overrides(at, method):
    """Overrides of the widths that the method at this key has."""
    overrides = {}
    # As many columns as ARB has groups at most; W-MSE whitens half as many as a slice has images
    columns = 2 * BATCH
    if "size" in method:
        columns = BATCH // 2
    for head in ("head", "predictor"):
        if head in method:
            overrides[f"{at}.{head}.hidden"] = 32
            overrides[f"{at}.{head}.dim"] = columns
    widths = {
        "queue": 2 * BATCH,
        "prototypes": 12,
        "negatives": 8,
        "size": BATCH,
        "hidden": 32,
        "bottleneck": 8,
        "dim": 24,
        "kept": 5,
        "rows": 7,
    }
    for key, value in widths.items():
        if method.get(key):
            overrides[f"{at}.{key}"] = value
    if "inner" in method:
        overrides |= method_overrides(f"{at}.inner", method["inner"])
    return overrides


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
    # Not tested here: reading CIFAR's and STL-10's own files, and the picture of a one-point curve
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
        assert row["step"] == 0
        assert not math.isnan(row["loss"])


@pytest.mark.parametrize("name", CHEAPEST)
def test_cheapest_recipes_step(name, roots, tmp_path, monkeypatch):
    step(name, roots, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHEAPEST])
def test_recipe_steps(name, stepped, roots, tmp_path, monkeypatch):
    if alike(name) not in stepped:
        step(name, roots, tmp_path, monkeypatch)
        stepped.add(alike(name))


# Hosts whose own codes start the last norm of each residual block at zero
ZERO_INIT = (
    "lorac/simclr_imagenet",
    "lorac/byol_imagenet",
    "lorac/barlow_twins_imagenet",
    "jcl/simclr_imagenet",
    "mio/simclr_cifar10",
    "mio/byol_cifar100",
    "mio/simsiam_cifar100",
    "mio/barlow_twins_stl10",
    "cllr/byol_imagenet100_1024",
    "cllr/simsiam_imagenet100_4096",
    "cllr/cllr_nuclear_byol_imagenet100_4096",
    "cllr/cllr_nuclear_simsiam_imagenet100_4096",
    "arb/barlow_twins_imagenet_2048",
)
# Those whose codes take torchvision's default, or have none to start at zero
ORDINARY_INIT = (
    "lorac/moco_v2_imagenet",
    "lorac/lorac_imagenet",
    "lorac/swav_imagenet",
    "jcl/jcl_imagenet",
    "mio/moco_v2_cifar10",
    "mio/mio_a_cifar10",
    "cllr/simclr_cifar10_256_100ep",
    "cllr/hcl_imagenet100_1024",
    "cllr/cmc_imagenet100_1024",
    "cllr/co2_imagenet100_4096",
)


@pytest.mark.parametrize("name", [*ZERO_INIT, *ORDINARY_INIT])
def test_residual_branches_start_as_in_each_methods_own_code(name):
    assert load(name).zero_init_residual == (name in ZERO_INIT)


def test_barlow_twins_biases_move_slower_by_their_rate_or_by_the_loss_never_by_both():
    """Its code scaled the loss by 0.024 until June 2021, and has since taken 0.024 of the rate for
    biases and norms instead (facebookresearch/barlowtwins 046eec3)."""
    official = 0
    for name in NAMES:
        recipe = load(name)
        if recipe.method.name != "barlow_twins" or recipe.optim.lr_1d is None:
            continue
        official += 1
        assert recipe.optim.lr_1d == pytest.approx(0.024 * recipe.optim.lr), name
        assert recipe.method.scale == 1.0, name
    assert official == 1 + 6 + 1 + 3, "LORAC, ARB Table 2 and Fig. 4, MIO"


SMALL_SETS = ("cifar10", "cifar100", "stl10")


@pytest.mark.parametrize("dataset", SMALL_SETS)
def test_byol_beside_mio_blurs_with_a_tenth_of_the_image(dataset):
    """Its code takes 2 int(size / 20) + 1 pixels (deepmind-research, byol/utils/augmentations.py),
    which at 32 pixels is far less than PIL's unlimited kernel."""
    for crops in load(f"mio/byol_{dataset}").views.crops:
        assert crops.blur_kernel == 2 * int(crops.size / 20) + 1


@pytest.mark.parametrize("dataset", SMALL_SETS)
def test_simclr_beside_mio_is_its_readme_s_command_for_cifar10(dataset):
    recipe = load(f"mio/simclr_{dataset}")
    assert (recipe.optim.lr, recipe.optim.weight_decay) == (1.0, 1e-4)
    assert recipe.method.temperature == 0.5
    assert {crops.interpolation for crops in recipe.views.crops} == {"bicubic"}


def test_solo_learns_warm_up_starts_at_the_same_rate_at_every_batch():
    """Its rates scale with the batch, its warmup_start_lr of 3e-5 does not."""
    started = []
    for name in NAMES:
        recipe = load(name)
        if not name.startswith("arb/") or not recipe.optim.warmup_lr:
            continue
        unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        rates = optim.LearningRates(unused, recipe, steps_per_epoch=10)
        assert rates.at(0) == pytest.approx(3e-5), name
        started.append(recipe.batch_size)
    assert (started.count(256), started.count(128)) == (20, 9), "CIFAR, ImageNet-100"


def test_gray_comes_before_the_jitter_in_moco_v1_alone():
    """As in main_moco.py without --aug-plus, whose views none of the others has. A run whose jitter
    comes first is known by what decided it before there was a choice."""
    for name in NAMES:
        recipe = load(name)
        first = {crops.gray_first for crops in recipe.views.crops}
        decided = what_decides(recipe)["views"]["crops"]
        if name == "lorac/moco_v1_imagenet":
            assert first == {True}
            assert all(crops["gray_first"] for crops in decided)
        else:
            assert first == {False}, name
            assert not any("gray_first" in crops for crops in decided), name


@pytest.mark.parametrize("text", ["hello", "7", "[a]"])
def test_a_data_group_that_is_none_is_refused_by_name(text, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: tiny_simclr\ndata: {text}\n")
    words = [
        "pretrain",
        str(file),
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "x"),
    ]
    assert program.main(words) == 2
    assert "'data' must be a group of keys" in capsys.readouterr().err
