"""Recipes, protocols and configs by strangers are plain values, read as fast as they are long."""

import os

import pytest
from support.strangers import door, refused

from backbench.recipes import config

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n"
for before, name in zip("abcdefg", "bcdefgh"):
    BOMB += f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
DEEP = "a: " + "[" * 3000 + "]" * 3000
LONG = "a: 1" + ":1" * 200_000  # a number in base 60


def read_as(kind, path, tmp_path):
    """The command that reads a file of this kind."""
    out = ("--out", tmp_path / "run")
    if kind == "recipe":
        return door("pretrain", path, "--data", tmp_path, *out)
    if kind == "grid":
        return door("launch", "run", path, "--cluster", "local", "--dry-run", *out)
    how = ("--config-file", path, "--engine", "torchvision")
    return door("detect", *how, "--data", tmp_path, *out)


@pytest.mark.parametrize("kind", ["recipe", "grid", "config"])
@pytest.mark.parametrize("text", [BOMB, DEEP, LONG], ids=["bomb", "deep", "long"])
def test_yaml_that_costs_more_than_its_length(tmp_path, kind, text):
    assert len(BOMB) < 500
    path = tmp_path / "x.yaml"
    path.write_text(text)
    refused(read_as(kind, path, tmp_path), path)


def test_a_recipe_reads_no_environment(tmp_path, monkeypatch):
    """What other readers of YAML resolve (`${oc.env:NAME}`) is text here."""
    monkeypatch.setenv("SECRET", "hunter2")
    path = tmp_path / "x.yaml"
    path.write_text('name: "${oc.env:SECRET}"\n')
    assert config.read_yaml(path) == {"name": "${oc.env:SECRET}"}


@pytest.mark.parametrize("kind", ["recipe", "grid", "config"])
def test_control_characters(tmp_path, kind):
    path = tmp_path / "x.yaml"
    path.write_text('name: "a\\nb"\nepochs: 1\n')
    refused(read_as(kind, path, tmp_path), "name", "control character")


@pytest.mark.parametrize("kind", ["recipe", "config"])
def test_bases_of_bases(tmp_path, kind):
    key, end = {"recipe": ("base", ""), "config": ("_BASE_", ".yaml")}[kind]
    for i in range(24):
        (tmp_path / f"b{i}.yaml").write_text(f"{key}: [b{i + 1}{end}, b{i + 1}{end}]\n")
    (tmp_path / "b24.yaml").write_text("nothing: 1\n")
    refused(read_as(kind, tmp_path / "b0.yaml", tmp_path), "b0.yaml", "nothing")


NUMBERS = {"digits": "1" * 400, "hex": "0x" + "f" * 4000}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", ["recipe", "override", "config"])
def test_whole_numbers_that_are_no_float(tmp_path, kind, number):
    path = tmp_path / "x.yaml"
    if kind == "override":
        where = ("--data", tmp_path, "--out", tmp_path / "run")
        said = door("pretrain", "tiny_simclr", f"optim.lr={NUMBERS[number]}", *where)
        return refused(said, "a whole number of")
    if kind == "recipe":
        base = config.find_recipe("tiny_simclr", "pretrain").with_suffix("")
        path.write_text(f"base: {base}\noptim: {{lr: {NUMBERS[number]}}}\n")
    else:
        path.write_text(f"SOLVER: {{BASE_LR: {NUMBERS[number]}}}\n")
    return refused(read_as(kind, path, tmp_path), path, "a whole number of")


@pytest.mark.parametrize("base", ["/dev/zero", "fifo"])
def test_base_that_is_no_file(tmp_path, base):
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / "x.yaml"
    path.write_text(f"_BASE_: {base}\n")
    refused(read_as("config", path, tmp_path), base)
