"""Grids as files: what is refused, and that the shipped ones read."""

import dataclasses

import pytest
import yaml

from backbench.errors import BadInput
from backbench.launch.grid import (
    Evaluation,
    Grid,
    Sweep,
    evaluations,
    read_grid,
    sweeps,
)
from backbench.recipes import config


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("evaluate: [tabel2]", "unknown evaluation 'tabel2'; did you mean 'table2'"),
        (
            "evaluate: [{verb: lineer, datasets: [d]}]",
            "'verb' is 'lineer'; did you mean 'linear'",
        ),
        (
            "evaluate: [{verb: linear, dataset: [d]}]",
            "key 'dataset'; did you mean 'datasets'",
        ),
        ("evaluate: [{verb: linear}]", "'linear' needs 'datasets'"),
        (
            "evaluate: [{verb: semisup, percent: 1, config: x}]",
            "'semisup' takes no 'config'",
        ),
        (
            "evaluate: [{verb: linear, datasets: [d], protocol: lorca}]",
            "no recipe 'lorca'",
        ),
        ("evaluate: [{verb: detect, config: mask_rcnn}]", "no recipe 'mask_rcnn'"),
        ("evaluate: [{verb: detect}]", "'detect' needs 'config' or 'datasets'"),
        ("evaluate: [table3]", "semisup needs `lists: DIR`"),
        (
            "evaluate: [{verb: semisup, percent: 10, protocol: semisup_own}]",
            "semisup by 'semisup_own' needs `datasets`",
        ),
        ("{evaluate: [table3], lists: nowhere}", "nowhere/1percent.txt: no such file"),
        ("checkpoints: [gone.safetensors]", "gone.safetensors: no such file or folder"),
        ("checkpoints: [gone/*.safetensors]", "'gone/*.safetensors' matches no file"),
        (
            "checkpoints: [DATA]",
            "no run.json; a folder must be a run of `backbench pretrain`",
        ),
        ("evaluate: [3]", "evaluate[0] is 3; a name (imagenet, table2, table3, table4"),
        (
            "evaluate: [{verb: linear, datasets: [d], args: [--seed, SEED], seeds: [1]}]",
            "seeds stand in `seeds` or in args (SEED), not in both",
        ),
        (
            "evaluate: [{verb: linear, datasets: [d], args: [SEED], again: 1}]",
            "seeds stand in `seeds` or in args (SEED), not in both",
        ),
        ("checkpoints: []", "names neither checkpoints nor recipes"),
        ("evaluate: []", "says of no checkpoint what to `evaluate`"),
        ("recipes: [mocov2]", "no recipe 'mocov2'"),
        (
            "recipes: [{recipe: demo_random, vary: {epochs: 3}}]",
            "vary.epochs must be a list of values, not 3",
        ),
        (
            "recipes: [{recipe: demo_random, vary: {batch: {16: 16}}}]",
            "vary.batch must map each of its values to the keys it changes",
        ),
        ("data: /nowhere", "data folder /nowhere is not there"),
        ("name: a b", "name 'a b' may hold letters"),
        ("evaluat: []", "unknown key 'evaluat'; did you mean 'evaluate'"),
    ],
)
def test_bad_grids_are_refused_before_anything_runs(lab, bad_input, content, says):
    usual = {"checkpoints": [lab.checkpoints("a")], "evaluate": lab.linear("d1")}
    grid = lab.grid(**usual | yaml.safe_load(content.replace("DATA", str(lab.data))))
    ways = [[]]
    if "matches no file" not in says:  # a dry run shows what --watch would wait for
        ways.append(["--dry-run"])
    for more in ways:
        message = bad_input(lab.run(grid, lab.cluster("local"), "runs", *more), says)
        assert len(message.strip().splitlines()) == 1, message
        assert not (lab.root / "runs").exists()


def test_shipped_grids_read(lab):
    for percent in (1, 10):
        (lab.data / f"{percent}percent.txt").touch()
    for path in sorted((config.configs_dir() / "grids").glob("*.yaml")):
        grid = read_grid(path, [f"lists={lab.data}"])
        assert evaluations(grid, str(path)) or grid.recipes, path


def test_named_tables_and_datasets_are_written_out_once():
    grid = Grid(
        name="x",
        evaluate=(
            "imagenet",
            {"verb": "linear", "datasets": "aircraft", "protocol": "lorac", "seeds": 3},
            {"verb": "linear", "datasets": ["dtd", "all"], "protocol": "lorac"},
            "imagenet",
            {"verb": "finetune", "datasets": ["b", "a"], "pretrained_on": ["x"]},
        ),
        pack=7,
        again=3,
    )
    found = evaluations(grid, "x.yaml")
    own, knn, aircraft, *twelve, b, a = found
    assert own == Evaluation(
        verb="linear", datasets=("imagenet",), protocol="own", pack=7, again=3
    )
    assert knn == Evaluation(
        verb="linear", datasets=("imagenet",), protocol="knn", pack=7
    )
    assert (aircraft.datasets, aircraft.seeds) == (("aircraft",), (3,))
    assert len({one.datasets for one in twelve}) == len(twelve) == 12
    assert all((one.pack, one.again, one.seeds) == (1, 0, (0,)) for one in twelve)
    assert (b.datasets, a.datasets) == (("b",), ("a",))
    assert b.pretrained_on == ("x",)


def test_tables_three_and_four_have_the_grids_words(tmp_path):
    for percent in (1, 10):
        (tmp_path / f"{percent}percent.txt").touch()
    grid = Grid(
        name="x",
        evaluate=("table3", "table4"),
        lists=str(tmp_path),
        engine="torchvision",
        again=3,
    )
    one, ten, *detection = evaluations(grid, "x.yaml")
    assert one == Evaluation(verb="semisup", percent=1, lists=str(tmp_path), again=3)
    assert (ten.percent, ten.lists) == (10, str(tmp_path))
    assert {(each.verb, each.engine, each.again) for each in detection} == {
        ("detect", "torchvision", 3)
    }
    assert len({each.config for each in detection}) == len(detection)
    (tmp_path / "1percent.txt").unlink()
    with pytest.raises(BadInput, match=f"semisup: {tmp_path}/1percent.txt: no such"):
        evaluations(grid, "x.yaml")


def test_a_part_of_the_labels_of_ones_own_folder_needs_no_list(tmp_path):
    (tmp_path / "10percent.txt").touch()
    part = {"verb": "semisup", "percent": 10}
    grid = Grid(
        name="x",
        lists=str(tmp_path),
        evaluate=(
            {**part, "protocol": "semisup_own", "datasets": ["mine", "yours"]},
            {**part, "datasets": ["imagenet"]},
            {**part, "protocol": "semisup_tiny"},
        ),
    )
    mine, yours, published, digits = evaluations(grid, "x.yaml")
    assert (mine.datasets, yours.datasets) == (("mine",), ("yours",))
    # The grid's lists are of ImageNet, or of the dataset that a protocol names
    assert (mine.lists, yours.lists) == (None, None)
    assert (published.lists, digits.lists) == (str(tmp_path), str(tmp_path))
    without = dataclasses.replace(grid, lists=None, evaluate=grid.evaluate[::2])
    assert [one.lists for one in evaluations(without, "x.yaml")] == [None] * 3


def test_a_sweep_has_its_own_words_or_the_grids():
    entries = ("simclr", {"recipe": "moco", "seeds": [7], "fast": False})
    found = list(sweeps(Grid(name="x", recipes=entries, seeds=(1, 2), fast=True), "x"))
    assert [(one.recipe, one.seeds, one.fast) for one in found] == [
        ("simclr", (1, 2), True),
        ("moco", (7,), False),
    ]


def test_a_sweep_combines_each_value_with_each():
    sweep = Sweep(
        recipe="simclr",
        vary={"optim.lr": [0.1, 0.2], "batch": {16: {"a": 1, "b": 2}, 32: {"a": 3}}},
        expected=("row:{lr:g}:{batch}", "row"),
    )
    points = list(sweep.points())
    assert [point.changes for point in points] == [
        {"optim.lr": 0.1, "a": 1, "b": 2},
        {"optim.lr": 0.1, "a": 3},
        {"optim.lr": 0.2, "a": 1, "b": 2},
        {"optim.lr": 0.2, "a": 3},
    ]
    assert points[1].labels == {"lr": 0.1, "batch": 32}
    assert points[1].in_folder == {"lr": 0.1}
    assert sweep.expected_rows(points[1]) == ["row:0.1:32", "row"]
    assert Sweep(recipe="simclr").expected_rows(points[0]) == []
    (alone,) = Sweep(recipe="simclr").points()
    assert (alone.changes, alone.labels, alone.in_folder) == ({}, {}, {})


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("row:{rate}", "'rate'; in braces may stand lr, batch"),
        ("row:{0}", "in braces may stand lr, batch"),
        ("row:{lr:d}", "in braces may stand lr, batch"),
        ("row:{lr.x}", "in braces may stand lr, batch"),
        ("row:{", "in braces may stand lr, batch"),
    ],
)
def test_an_expected_row_that_names_no_label_is_said(template, says):
    vary = {"optim.lr": [0.1], "batch": {16: {}}}
    sweep = Sweep(recipe="simclr", vary=vary, expected=("row", template))
    (point,) = sweep.points()
    with pytest.raises(BadInput) as refused:
        sweep.expected_rows(point)
    assert f"expected '{template}': " in str(refused.value)
    assert says in str(refused.value)
    bare = Sweep(recipe="simclr", expected=(template,))
    with pytest.raises(BadInput, match="in braces may stand nothing here"):
        bare.expected_rows(*bare.points())
