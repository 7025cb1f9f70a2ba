"""Every container gives the rows of the folder, from the same cached features."""

import dataclasses
import json
import random
import subprocess
import sys

import pytest
from support.containers import LAYOUTS, packed, scan_here
from support.layouts import SMALL as SMALL_TRUNK
from support.tiny_pretraining import digest, recipe

from backbench.cli.program import main
from backbench.datasets import catalog, splits
from backbench.pretrain import monitor
from backbench.records import store
from backbench.runs.folder import RESULTS_FILE, cache_folder

SMALL = {"resize": 32, "crop": 32}
AUGMENT = {"size": 32, "scale": [0.5, 1.0], "flip": 0.5}
TRAINED = {"geometry": SMALL, "augment": AUGMENT, "batch_size": 4, "reference_batch": 4}


def tuned(part):
    parts = {part: {"length": {"iterations": 3}, "head_over_trunk": 1}}
    return {"kind": "finetune", "head_lr": [0.1], "parts": parts, **TRAINED}


RECIPES = {
    "knn": {"kind": "knn", "k": [1, 3], "geometry": SMALL},
    "fewshot": {"kind": "fewshot", "shots": 2, "draws": 3, "geometry": SMALL},
    "linear": {
        "kind": "sgd",
        "lr": [1.0],
        "length": {"default": {"iterations": 4}},
        **TRAINED,
    },
    "finetune": tuned("100"),
    "semisup": tuned("10"),
    "analyze": {
        "base": "analyze_demo",
        "images": 6,
        "split": "train",
        "augmentations": 2,
    },
}
WORDS = {"finetune": ["finetune", "--dataset"], "analyze": ["analyze", "--dataset"]}
WORDS["semisup"] = ["semisup", "--percent", "10", "--dataset"]
FAST = ("tar", "wds", "deflated", "parquet of 2023", "arrow")


def words_of(verb, root, trunk, folder, out):
    file = folder / f"{verb}.yaml"
    words = [*WORDS.get(verb, ["linear", "--datasets"]), "classes", trunk]
    recipe = dict(RECIPES[verb])
    if verb == "analyze":
        words += ["--recipe", file]
    else:
        recipe["protocol"] = f"{verb}-container-demo-v1"
        words += ["--protocol", file]
    file.write_text(json.dumps(recipe))
    words += ["--data", root, "--out", out, "--workers", "0"]
    return [str(word) for word in words]


def rows_of(verb, root, trunk, folder):
    out = folder / f"{verb} of {root.name}"
    assert main(words_of(verb, root, trunk, folder, out)) == 0
    return rows_in(out, root)


def rows_in(out, root):
    """The rows of a run, without what says that its images lay in a container."""
    found, problems = store.read(out / RESULTS_FILE)
    assert found and not problems
    rows = []
    for row in found:
        provenance = dict(row.provenance)
        container = provenance.pop("container", None)
        assert (container is not None) == (root.name != "data")
        rows.append(dataclasses.replace(row, origin={}, provenance=provenance))
    return rows


@pytest.mark.parametrize(
    "verb",
    [
        "linear",
        pytest.param("knn", marks=pytest.mark.slow),
        pytest.param("fewshot", marks=pytest.mark.slow),
        pytest.param("finetune", marks=pytest.mark.slow),
        pytest.param("semisup", marks=pytest.mark.slow),
        pytest.param("analyze", marks=pytest.mark.slow),
    ],
)
def test_rows_do_not_tell_the_container(trees, trunk, tmp_path, verb, monkeypatch):
    scan_here(monkeypatch)
    same_rows(trees("classes"), trunk, tmp_path, verb, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("verb", RECIPES)
def test_rows_of_all_containers(trees, trunk, tmp_path, verb):
    same_rows(trees("classes"), trunk, tmp_path, verb, LAYOUTS)


def same_rows(root, trunk, tmp_path, verb, layouts):
    wanted = rows_of(verb, root, trunk, tmp_path)
    features = sorted((cache_folder() / "features").glob("*.npy"))
    for layout in layouts:
        found = rows_of(verb, packed(root, "classes", layout), trunk, tmp_path)
        assert found == wanted, layout
    assert sorted((cache_folder() / "features").glob("*.npy")) == features


def test_pretraining_gives_the_same_weights(trees, tmp_path, monkeypatch):
    # Drawing takes longer than the training
    monkeypatch.setattr(monitor, "plot_curves", lambda run, name: None)
    scan_here(monkeypatch)
    root = trees("classes")
    data = {"dataset": "classes", "workers": 0}
    file = tmp_path / "tiny.yaml"
    file.write_text(recipe(arch=SMALL_TRUNK, data=data, epochs=1))
    digests = set()
    deflated = packed(root, "classes", "deflated")
    lmdb = packed(root, "classes", "lmdb")
    for where in (root, deflated, lmdb):
        out = tmp_path / f"pretrained on {where.name}"
        words = ["pretrain", file, "--data", where, "--out", out]
        words += ["--accelerator", "cpu"]
        assert main([str(word) for word in words]) == 0
        digests.add(digest(out))
    assert len(digests) == 1


def killed_and_run(words, kills=10):
    """Kill the command so many times after up to seven seconds, then let it end."""
    command = [sys.executable, "-m", "backbench", *words]
    draw = random.Random(0)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for _ in range(kills):
        job = subprocess.Popen(command, **quiet)
        try:
            job.wait(draw.uniform(0.5, 7))
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
    subprocess.run(command, check=True, **quiet)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_of_a_run_and_of_packing_change_nothing(
    trees, trunk, tmp_path, monkeypatch
):
    root = packed(trees("classes"), "classes", "parquet of 2023")
    wanted = rows_of("linear", root, trunk, tmp_path)
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "cold"))
    killed_and_run(words_of("linear", root, trunk, tmp_path, tmp_path / "killed"))
    assert rows_in(tmp_path / "killed", root) == wanted
    out = tmp_path / "out" / "classes"
    words = ["data", "pack", "classes", "--to", "tar"]
    killed_and_run([*words, "--out", str(out), "--data", str(root)])
    before = catalog.load("classes", root)
    after = catalog.load("classes", out.parent)
    assert splits.digests(before) == splits.digests(after)
    assert [path.suffix for path in out.iterdir()] == [".tar"] * 3
