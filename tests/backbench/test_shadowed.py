"""Another package named like one of the three programs is said in one line."""

import os
import subprocess
import sys

import pytest

from backbench import plugins

LINEAR = ("linear", "x.pth", "--datasets", "digits", "--data", ".", "--out", "run")


@pytest.mark.parametrize(
    ("name", "words", "status"),
    [
        # A command of a program, two that start them, one that does without, and doctor
        ("transfer", LINEAR, 2),
        pytest.param("detection", ("launch", "status", "--out", "runs"), 2, marks=pytest.mark.slow),
        pytest.param("transfer", ("reproduce",), 2, marks=pytest.mark.slow),
        ("transfer", ("data", "list"), 0),
        pytest.param("detection", ("doctor",), 1, marks=pytest.mark.slow),
    ],
)
def test_a_verb_says_so_and_stops_where_it_needs_the_program(tmp_path, name, words, status):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    # From a folder that is none of ours, whose packages `python -m` would find first
    command = [sys.executable, "-m", "backbench", *words]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd="/")
    assert done.returncode == status
    said = f"'import {name}' gives {tmp_path / name}"
    if words == ("doctor",):
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        for beginning in (f"hidden {name} broken {said}", f"verbs demo, pretrain broken {name}: "):
            assert [line for line in lines if line.startswith(beginning)]
        return
    (line,) = done.stderr.strip().splitlines()
    assert said in line and "uninstall" in line
    assert status or "cifar10" in done.stdout


def test_nothing_is_hidden_here():
    assert plugins.hidden() == {}
