"""The same rows from every container, and the folder's features."""

import dataclasses
import json

import pytest
from support.containers import LAYOUTS, packed

from backbench.cli import main
from backbench.results import store
from backbench.runs.folder import RESULTS_FILE, cache_folder

SMALL = {"resize": 32, "crop": 32}
AUGMENT = {"size": 32, "scale": [0.5, 1.0], "flip": 0.5}
TRAINED = {"geometry": SMALL, "augment": AUGMENT, "batch_size": 4, "reference_batch": 4}
RECIPES = {
    "knn": {"kind": "knn", "k": [1, 3], "geometry": SMALL},
    "fewshot": {"kind": "fewshot", "shots": 2, "draws": 3, "geometry": SMALL},
    "linear": {"kind": "sgd", "lr": [1.0], "length": {"default": {"iterations": 4}}, **TRAINED},
    "finetune": {
        "kind": "finetune",
        "head_lr": [0.1],
        "parts": {"100": {"length": {"iterations": 3}, "head_over_trunk": 1}},
        **TRAINED,
    },
}
FAST = ("tar", "wds", "deflated", "parquet of 2023", "arrow")


def rows_of(verb, root, trunk, folder):
    file = folder / f"{verb}.yaml"
    file.write_text(json.dumps({"protocol": f"{verb}-container-demo-v1", **RECIPES[verb]}))
    out = folder / f"{verb} of {root.name}"
    name = "--dataset" if verb == "finetune" else "--datasets"
    words = ["finetune" if verb == "finetune" else "linear", trunk, name, "classes"]
    words += ["--protocol", file, "--workers", "0", "--data", root, "--out", out]
    assert main([str(word) for word in words]) == 0
    found, problems = store.read(out / RESULTS_FILE)
    assert found and not problems
    for row in found:
        assert ("container" in row.provenance) == (root.name != "data")
    without = [{k: v for k, v in row.provenance.items() if k != "container"} for row in found]
    return [dataclasses.replace(r, origin={}, provenance=p) for r, p in zip(found, without)]


@pytest.mark.parametrize("verb", RECIPES)
def test_rows_do_not_tell_the_container(trees, trunk, tmp_path, verb):
    same_rows(trees("classes"), trunk, tmp_path, verb, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("verb", RECIPES)
def test_rows_of_all_containers(trees, trunk, tmp_path, verb):
    same_rows(trees("classes"), trunk, tmp_path, verb, LAYOUTS)


def same_rows(root, trunk, tmp_path, verb, layouts):
    wanted = rows_of(verb, root, trunk, tmp_path)
    features = sorted((cache_folder() / "features").glob("*.npy"))
    for layout in layouts:
        assert rows_of(verb, packed(root, "classes", layout), trunk, tmp_path) == wanted, layout
    assert sorted((cache_folder() / "features").glob("*.npy")) == features
