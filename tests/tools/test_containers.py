"""Both container files: the same script over the same files, with the same environment."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
SOURCE = "/usr/local/src/backbench/source/"


def of_apptainer():
    """(files copied, parts installed, environment)."""
    text = (TOOLS / "backbench.def").read_text()
    section = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL))
    files = {line.split()[0] for line in section["files"].strip().splitlines()}
    parts = re.findall(r"install\.sh ([a-z2 ]+)", section["post"])
    return files, parts, set(re.findall(r"export (\w+=\S+)", section["environment"]))


def of_containerfile():
    text = (TOOLS / "Containerfile").read_text().replace("\\\n", " ")
    files = set()
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *named, where = line.split()
        assert where.startswith(SOURCE)
        files |= set(named)
    parts = re.findall(r"install\.sh ([a-z2 ]+)", text.partition("RUN ")[2])
    (environment,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    return files, parts, set(environment.split())


def test_both_images_are_the_same():
    apptainer, containerfile = of_apptainer(), of_containerfile()
    assert apptainer[0] == containerfile[0]
    assert [part.split() for part in apptainer[1]] == [["system", "suite"], ["detectron2"]]
    assert [part.split() for part in containerfile[1]] == [["system", "suite"], ["detectron2"]]
    assert apptainer[2] == containerfile[2]


def test_an_image_holds_all_that_is_installed():
    """Every folder that pyproject.toml packages, and every file that its build reads."""
    files, _, _ = of_containerfile()
    project = (ROOT / "pyproject.toml").read_text()
    packages = set(
        re.findall(r"^packages = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)[0].split('"')[1::2]
    )
    assert {name.split(".")[0] for name in packages} | {"configs"} <= files
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= files
    assert all((ROOT / file).exists() for file in files)


@pytest.fixture
def pip(tmp_path):
    """A stand-in that writes down what it was told to install."""
    (tmp_path / "pip").write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> "$0.said"\n')
    (tmp_path / "pip").chmod(0o755)
    return tmp_path / "pip"


def install(pip, *parts):
    return subprocess.run(
        ["sh", str(TOOLS / "install.sh"), *parts],
        env={"PIP": str(pip), "PATH": "/usr/bin:/bin"},
        cwd=pip.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_script_from_another_folder(pip):
    assert install(pip, "suite", "detectron2").returncode == 0
    suite, tools, detectron2 = (pip.parent / "pip.said").read_text().splitlines()
    assert suite == f"-c {ROOT}/constraints.txt {ROOT}" and "setuptools<81" in tools
    assert re.search(
        r"--no-build-isolation detectron2 @ git\+https://\S+@[0-9a-f]{40}$", detectron2
    )


def test_a_part_that_there_is_not(pip):
    done = install(pip, "detectron3")
    assert done.returncode == 2 and "no part 'detectron3'" in done.stderr
    assert not (pip.parent / "pip.said").exists()
