"""Grids as files: what is refused, and that the shipped ones read."""

import pytest
import yaml

from backbench.launch.grid import evaluations, read_grid
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
        ("{evaluate: [table3], lists: nowhere}", "nowhere/1percent.txt: no such file"),
        ("checkpoints: [gone.safetensors]", "gone.safetensors: no such file or folder"),
        ("checkpoints: [gone/*.safetensors]", "'gone/*.safetensors' matches no file"),
        (
            "checkpoints: [DATA]",
            "no run.json; a folder must be a run of `backbench pretrain`",
        ),
        ("checkpoints: []", "names neither checkpoints nor recipes"),
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
