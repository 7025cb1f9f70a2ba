"""A lab's own package, really installed, serves; strangers' packages stand in no way."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import backbench
from backbench import plugins, tasks
from backbench.cli import program
from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.tasks import TASKS
from backbench.transfer.probes.kind import probe_of
from backbench.weights import archs
from backbench.weights.families.resnet_trunk import build_backbone
from backbench.weights.formats import all_formats

LAB = Path(__file__).parent / "example_lab"
RECIPE = """
name: from the lab
arch: squares
method: {name: spread, push: 0.25}
views: {crops: [{count: 2, size: 16}]}
data: {dataset: stripes, workers: 0}
optim: {name: sgd, lr: 0.05}
epochs: 1
batch_size: 20
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder into which pip has installed the lab's package."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "lab"
    # A build writes beside its source, so it gets a copy
    shutil.copytree(LAB, source)
    install = [sys.executable, "-m", "pip", "install", "-q"]
    offline = ["--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*install, *offline, "--target", str(folder), str(source)], check=True
    )
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """ROOT with the lab's dataset: stripes that run across or down."""
    root = tmp_path_factory.mktemp("data")
    folder = root / "stripes" / "images"
    folder.mkdir(parents=True)
    for split, count in (("train", 40), ("test", 20)):
        lines = []
        for i in range(count):
            pixels = np.zeros((24, 24, 3), np.uint8)
            if i % 2 == 0:
                label = "across"
                pixels[i % 3 :: 3] = 255
            else:
                label = "down"
                pixels[:, i % 3 :: 3] = 255
            Image.fromarray(pixels).save(folder / f"{split}{i}.png")
            lines.append(f"{split}{i}.png {label}")
        (root / "stripes" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return root


# Runs commands one after the other in one process, so that torch starts once; a line before each
# says which it is
COMMANDS = """
import json, sys
from backbench.cli import program
for words in json.loads(sys.argv[1]):
    print("$", *words, flush=True)
    if program.main(words):
        sys.exit(f"failed: {words}")
"""


@pytest.mark.slow
def test_all_five_in_one_life(site, data, tmp_path):
    """The lab's trunk, by its own method and from its own file, is probed on the lab's dataset, by
    the lab's reading too."""
    # 1. A recipe with the lab's method, and a file in the lab's format
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    foreign = tmp_path / "lab.pth"
    content = {"done": 7}
    for name, tensor in build_backbone("resnet18").state_dict().items():
        content[f"net.trunk.{name}"] = tensor
    torch.save(content, foreign)
    # 2. The commands
    run = tmp_path / "pretrained"
    trunk = run / "backbone.safetensors"
    imported = tmp_path / "imported.safetensors"
    reading = site / "example_lab" / "nearest_mean.yaml"
    probed = ["linear", trunk, imported, "--datasets", "stripes", "--data", data]
    commands = [
        ["pretrain", recipe, "--data", data, "--out", run],
        ["import", foreign, "--out", imported],
        [*probed, "--protocol", "knn_demo", "--out", tmp_path / "probe"],
        [*probed, "--protocol", reading, "--out", tmp_path / "means"],
        ["leaderboard", tmp_path, "--csv", tmp_path / "board.csv"],
        ["data", "list", "--data", data],
    ]
    text = json.dumps([[str(word) for word in words] for words in commands])
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, text],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # 3. What they said and measured
    _, _, brought, _, means, _, listed = done.stdout.split("$ ")
    assert "method spread" in brought and "epochs 7" in brought
    assert "format example lab" in brought
    lines = (tmp_path / "probe" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["method"] for row in rows} == {"spread"}
    assert {row["dataset"] for row in rows} == {"stripes"}
    assert {row["arch"] for row in rows} == {"squares", "resnet18"}
    assert "stripes" in listed
    assert means.count("lab-nearest-mean-v1") == 2  # a row for each of the two trunks
    columns = (tmp_path / "board.csv").read_text().splitlines()[0]
    assert "nearest_mean/stripes/top1@lab-nearest-mean-v1" in columns


@pytest.mark.parametrize("name", ["spread", "example_lab.spread", "os", "../spread"])
def test_a_recipe_names_what_is_installed_and_never_a_module(
    data, tmp_path, capsys, name
):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("name: spread", f"name: {name}"))
    words = ["pretrain", recipe, "--data", data, "--out", tmp_path / "run"]
    assert program.main([str(word) for word in words]) == 2
    said = capsys.readouterr().err
    assert f"unknown method '{name}'" in said
    assert len(said.splitlines()) == 1
    with pytest.raises(BadInput, match="unknown architecture 'squares'"):
        archs.build_trunk("squares")


def point(
    tmp_path: Path, group: str, name: str, value: str, package: str = "odd"
) -> None:
    """Write a package's metadata, as an installer leaves it."""
    info = tmp_path / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder on the path; what was known of installed packages is looked up again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.installed.cache_clear()
    yield tmp_path
    plugins.installed.cache_clear()


def test_a_shipped_name_cannot_be_taken(path):
    point(path, plugins.METHODS, "simclr", "odd.simclr")
    with pytest.raises(
        BadInput, match=r"odd 1\.0 calls something 'simclr'.*as backbench does"
    ):
        plugins.names(plugins.METHODS, ["simclr", "moco"])


def test_two_packages_with_one_name(path):
    point(path, plugins.METHODS, "mine", "odd.a")
    point(path, plugins.METHODS, "mine", "even.b", package="even")
    with pytest.raises(BadInput, match=r"'mine'.*comes from .*; uninstall one"):
        plugins.installed(plugins.METHODS)


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        ("nowhere_at_all:ROW", str, "cannot be loaded: ModuleNotFoundError"),
        ("os:sep", Path, " is str, not Path"),
        ("odd_rows:ROW", SimpleNamespace, " calls itself 'yours'"),
    ],
)
def test_what_cannot_be_used_names_its_package(path, value, kind, says):
    (path / "odd_rows.py").write_text(
        "import types; ROW = types.SimpleNamespace(name='yours')"
    )
    point(path, plugins.FORMATS, "mine", value)
    with pytest.raises(BadInput, match=rf"odd 1\.0: 'mine'.*{says}"):
        plugins.load(plugins.FORMATS, "mine", kind)


def test_a_broken_package_stands_in_nobody_elses_way(path, tmp_path, capsys, caplog):
    point(path, plugins.DATASETS, "mine", "nowhere_at_all:ROW")
    point(path, plugins.FORMATS, "mine", "nowhere_at_all:ROW", package="even")
    assert catalog.find("digits").name == "digits"
    assert program.main(["data", "list", "--data", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "odd 1.0: 'mine'" in shown and "stl10" in shown
    assert "torchvision" in all_formats() and "mine" not in all_formats()
    assert "even 1.0: 'mine'" in caplog.text
    with pytest.raises(BadInput, match=r"odd 1\.0: 'mine'.*cannot be loaded"):
        catalog.find("mine")


TASK = """
[nearest]
title = "Nearest"
verb = "linear"
recipe = "nearest.yaml"
kind = "nearest"
"""


def test_a_package_brings_the_row_of_its_task_without_being_imported(path):
    (path / "odd").mkdir()
    (path / "odd" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (path / "odd" / "tasks.toml").write_text(TASK)
    point(path, plugins.PROBES, "nearest", "odd.nearest:PROBE")
    (row,) = tasks.installed(TASKS).values()
    assert (row.name, row.title, row.kind) == ("nearest", "Nearest", "nearest")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (TASK.replace("[nearest]", "[knn]"), "there is a task 'knn' already"),
        (TASK.replace("kind =", "kin ="), "unexpected keyword argument 'kin'"),
        (TASK.replace('"nearest"', '"farthest"'), "no row of kind 'nearest'"),
        ("[nearest", "'nearest' has no task: Expected"),
        (None, "No such file"),
    ],
)
def test_a_task_that_cannot_be_used_is_named_and_left_out(path, caplog, rows, says):
    (path / "odd").mkdir()
    (path / "odd" / "__init__.py").write_text("")
    if rows is not None:
        (path / "odd" / "tasks.toml").write_text(rows)
    point(path, plugins.PROBES, "nearest", "odd.nearest:PROBE")
    assert tasks.installed(TASKS) == {}
    assert "odd 1.0" in caplog.text and says in caplog.text


def test_a_reading_must_be_a_probe_under_a_name_of_its_own(path):
    (path / "odd_readings.py").write_text("PROBE = 'no probe'\n")
    point(path, plugins.PROBES, "nearest", "odd_readings:PROBE")
    with pytest.raises(BadInput, match=r"odd 1\.0: 'nearest'.* is str, not Probe"):
        probe_of("nearest")
    with pytest.raises(BadInput, match="no probe 'nearst'; did you mean 'nearest'"):
        probe_of("nearst")
    point(path, plugins.PROBES, "knn", "odd_readings:PROBE", package="even")
    plugins.installed.cache_clear()
    with pytest.raises(BadInput, match=r"even 1\.0 calls something 'knn'"):
        probe_of("nearest")


OTHERS = ("pretrain", "transfer", "detection", "configs", "tools", "tests")


@pytest.fixture
def beside_others(tmp_path):
    """Where Python looks beside somebody else's packages of our folders' names."""
    for name in OTHERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    # Our checkout stands behind the folder, as an installed package does
    return [str(tmp_path), str(Path(backbench.__file__).parents[1])]


# `python -m backbench` in that folder. What a warm Python has of ours already is imported anew
BESIDE = """
import json, runpy, sys
path, others, *words = sys.argv[1:]
names = ["backbench", *json.loads(others)]
for name in [name for name in sys.modules if name.partition(".")[0] in names]:
    del sys.modules[name]
sys.path[:0] = json.loads(path)
sys.argv = ["backbench", *words]
runpy.run_module("backbench", run_name="__main__", alter_sys=True)
"""


def test_a_reading_runs_beside_packages_of_the_same_names(
    beside_others, tiny_root, trunk, python, tmp_path
):
    places = (json.dumps(beside_others), json.dumps(OTHERS))
    words = ("linear", trunk, "--datasets", "digits", "--protocol", "knn_demo")
    data = ("--data", tiny_root, "--out", tmp_path / "run")
    status, out, err = python.run(BESIDE, *places, *words, *data)
    assert status == 0, err
    assert "knn-demo-v1" in out


@pytest.mark.parametrize("name", ["pretrain", "transfer", "detection"])
def test_python_finds_our_programs_below_backbench(beside_others, name):
    done = subprocess.run(
        [sys.executable, "-c", f"import backbench.{name} as m; print(m.__file__)"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(beside_others)},
        cwd=beside_others[0],
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve().parent.name == name
