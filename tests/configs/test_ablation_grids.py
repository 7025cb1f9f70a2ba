"""The papers' ablations in configs/grids: every point can be built, every grid has its figure."""

import csv
import dataclasses
import functools
import itertools
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from backbench.board import ablation
from backbench.board.board import Measurement, collect, fill
from backbench.datasets import embedded
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.pretrain.method import Setup, build_method
from backbench.pretrain.recipe import PretrainConfig
from backbench.published import published
from backbench.recipes import config, own_probe
from backbench.records import store
from backbench.records.store import Result
from backbench.tasks import by_kind
from backbench.transfer.analysis.protocol import load_analysis
from backbench.transfer.protocols import load_protocol
from backbench.weights.families.resnet_trunk import build_backbone

FILES = sorted((config.configs_dir() / "grids").glob("*.yaml"))
GRIDS = [p.stem for p in FILES if "vary:" in p.read_text()]
POINTS = {  # of each ablation: distinct points, and what the paper varies
    "lorac_fig3": [(6, ("beta",))],
    "lorac_fig4b": [(14, ("M",))],
    "jcl_fig2a": [(6, ("keys",))],
    "jcl_fig2b": [(8, ("lam",))],
    "mio_fig9": [(8, ("arch", "l2_weight"))],
    "arb_fig6": [(6, ("ridge",)), (12, ("groups", "shuffle"))],
    "arb_fig4": [(16, ("dim",))],
    "cllr_table01": [(20, ("alpha", "weight"))],
    "ablate_tiny": [(9, ("beta", "temperature"))],
}


@functools.cache
def pretrainings(name: str) -> dict[PretrainConfig, int]:
    """The recipes of the grid's pretraining jobs, by their commands, and their counts of seeds."""
    here = Path(__file__).parent
    grid = dataclasses.replace(read_grid(name), evaluate=())
    found = Expansion(grid, here, where=name, data=here)
    commands = [
        j.argv[1 : j.argv.index("--data")] for j in found.jobs if j.verb == "pretrain"
    ]
    seeds = Counter(
        tuple(w for w in words if not w.startswith("seed=")) for words in commands
    )
    return {
        config.load(PretrainConfig, w[0], w[1:], kind="pretrain"): n
        for w, n in seeds.items()
    }


@pytest.mark.parametrize("name", GRIDS)
def test_every_point_is_a_recipe_and_the_grid_is_an_ablation(name) -> None:
    recipes = pretrainings(name)
    assert set(recipes.values()) <= {1, 2, 3, 5}, "every point has its seeds"
    varied = [recipe for recipe in recipes if re.search(r" \w+=", recipe.name)]
    for recipe in varied:
        for key in recipe.expected:
            numbers = published.lookup(key)
            assert {n.epochs for n in numbers} <= {
                recipe.stop_after_epochs or recipe.epochs,
                None,
            }
            assert {n.trained_on for n in numbers} == {recipe.data.dataset}
    same = {
        "method": "m",
        "epochs": 1,
        "task": "linear",
        "dataset": "d",
        "split": "test",
    }
    same |= {"metric": "top1", "protocol": "p"}
    rows = []
    for i, r in enumerate(varied):
        rows.append(
            Result(checkpoint=f"{i}", name=r.name, arch=r.arch, value=50.0 + i, **same)
        )
    found = ablation.find(fill(Measurement(row, Path("runs")) for row in rows))
    assert found and sum(len(a.points) for a in found) == len(varied)
    if name in POINTS:
        assert sorted((len(a.points), a.keys) for a in found) == POINTS[name]


@pytest.mark.parametrize("name", [p.stem for p in FILES])
def test_what_a_grid_measures_with_is_there(name) -> None:
    for entry in read_grid(name).evaluate:
        if isinstance(entry, str):
            continue
        if entry["verb"] == "analyze":
            load_analysis(entry["args"][1], None)
        elif entry["protocol"] != own_probe.OWN:
            load_protocol(entry["protocol"], by_kind("linear"))


def test_what_the_papers_vary_is_what_changes() -> None:
    betas = {r.method.beta for r in pretrainings("lorac_fig3")}
    assert betas == {0.5, 1, 2, 4, 8, math.inf}
    for recipe in pretrainings("lorac_fig4b"):
        (crops,) = recipe.views.crops
        views = int(recipe.name.rpartition("M=")[2])
        assert (crops.count, crops.size, recipe.method.keys) == (views, 224, 1)
    assert {r.epochs for r in pretrainings("arb_fig5")} == {16, 32, 64, 128, 256}
    assert {r.stop_after_epochs for r in pretrainings("mio_sec41")} == {100}
    assert {r.stop_after_epochs for r in pretrainings("arb_fig7")} == set(
        range(10, 101, 10)
    )
    fig4 = {
        r.method.head.dim: r.method
        for r in pretrainings("arb_fig4")
        if r.method.name == "arb"
    }
    wide = {512: 2, 1024: 4, 2048: 8, 4096: 16}
    wanted = dict.fromkeys((32, 64, 128, 256), 1) | wide
    assert {d: method.groups for d, method in fig4.items()} == wanted
    ridges = {r.method.ridge for r in pretrainings("arb_fig6")}
    assert {1e-6, 1e-4, 0.1} < ridges
    both = {
        r.method.inner.name
        for r in pretrainings("cllr_table03")
        if r.method.name == "cllr"
    }
    assert both == {"simclr", "dcl"}


@pytest.mark.parametrize("name", [g for g in GRIDS if "arb" in g or "lorac" in g])
def test_the_methods_accept_the_points(name, monkeypatch) -> None:
    """A point that its method would refuse fails here and not on the cluster."""
    points = set()
    for recipe in pretrainings(name):
        views = sum(crops.count for crops in recipe.views.crops)
        points.add((recipe.method, recipe.batch_size, views))
    # Without numbers in them: filling wide layers takes longer than all the rest, and so does drawing
    # queues of 65,536 keys
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.empty(shape))
    with torch.device("meta"):
        trunk = build_backbone("resnet18")
        for method, batch_size, views in points:
            build_method(
                method,
                trunk,
                Setup(batch_size, views, seed=0, images=1000, classes=100),
            )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_keys_nine_points_two_seeds_end_to_end(tmp_path) -> None:
    """ablate_tiny through `launch run --cluster local`, to the figure of its results."""
    root = embedded.build(tmp_path / "data", size="tiny")
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "backbench"]
    launch = ["launch", "run", "ablate_tiny", "--cluster", "local"]
    where = ["--data", str(root), "--out", str(runs)]
    subprocess.run([*command, *launch, *where], check=True, timeout=1500)
    rows = [
        r
        for r in store.read(runs)[0]
        if r.task == "analyze" and r.metric == "nuclear_norm"
    ]
    points = Counter(r.name for r in rows if "projector" in r.protocol)
    betas, temperatures = ("0.5", "2.0", "inf"), ("0.1", "0.2", "0.5")
    pairs = itertools.product(betas, temperatures)
    expected = {f"lorac-tiny beta={b} temperature={t}" for b, t in pairs}
    assert points == dict.fromkeys(expected, 2)
    figures = tmp_path / "figures"
    board = ["leaderboard", str(runs), "--figures", str(figures)]
    page = tmp_path / "page.html"
    subprocess.run([*command, *board, "--html", str(page)], check=True, timeout=300)
    stem = "ablation-lorac-tiny-beta-and-temperature"
    assert {p.name for p in figures.iterdir()} == {
        f"{stem}.{s}" for s in ("svg", "png", "csv")
    }
    with (figures / f"{stem}.csv").open() as file:
        lines = [
            r
            for r in csv.DictReader(file)
            if r["column"].startswith("knn/digits/top1_k5")
        ]
    assert len(lines) == 9 and {line["seeds"] for line in lines} == {"2"}
    digests = {r.checkpoint for r in rows}
    assert len(digests) == 18 and len(collect([runs]).rows) == 18
    assert "lorac-tiny: beta and temperature" in page.read_text()
