"""Another package named like one of the three programs is said in one line."""

import os
import subprocess
import sys

import pytest

from backbench import plugins

# A command of each kind: of a program, one that starts them, and two that do without
REFUSED = (
    ("linear", "x.pth", "--datasets", "digits", "--data", ".", "--out", "run"),
    pytest.param(("launch", "status", "--out", "runs"), marks=pytest.mark.slow),
    pytest.param(("reproduce",), marks=pytest.mark.slow),
)


@pytest.fixture(
    scope="module", params=["transfer", pytest.param("detection", marks=pytest.mark.slow)]
)
def hidden(request, tmp_path_factory):
    """(the name, its file, an environment in which it comes first)."""
    folder = tmp_path_factory.mktemp("others")
    file = folder / request.param / "__init__.py"
    file.parent.mkdir()
    file.write_text("raise RuntimeError('imported')\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return request.param, file, {**os.environ, "PYTHONPATH": path}


def backbench(env, *words):
    """From a folder that is none of ours, whose packages `python -m` would find first."""
    command = [sys.executable, "-m", "backbench", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd="/")


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: words[0])
def test_a_verb_says_so_and_stops(hidden, words):
    name, file, environment = hidden
    done = backbench(environment, *words)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert f"'import {name}' gives {file.parent}" in line and "uninstall" in line


def test_a_verb_that_does_without_says_so_and_goes_on(hidden, tmp_path):
    name, _, environment = hidden
    done = backbench(environment, "data", "list", "--data", str(tmp_path))
    assert done.returncode == 0 and "cifar10" in done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert f"'import {name}' gives" in line


@pytest.mark.slow
def test_doctor_says_so(hidden):
    name, file, environment = hidden
    done = backbench(environment, "doctor")
    assert done.returncode == 1
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    said = f"'import {name}' gives {file.parent}"
    assert [line for line in lines if line.startswith(f"hidden {name} broken {said}")]
    assert [
        line for line in lines if line.startswith(f"verbs demo, pretrain broken {name}: {said}")
    ]


def test_nothing_is_hidden_here():
    assert plugins.hidden() == {}
