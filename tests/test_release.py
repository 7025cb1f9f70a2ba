"""What is released: one version, locked versions, and a wheel that works from another folder."""

import re
import runpy
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PUBLIC = {"pypi.org", "files.pythonhosted.org", "download.pytorch.org"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def locked():
    return tomllib.loads((ROOT / "uv.lock").read_text())


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted():
    """Everything that the project asks for, with all of its extras."""
    project = PROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for texts in lists for text in texts]


def test_the_lock_names_public_addresses_only():
    hosts = set(re.findall(r"\b[a-z+]+://([^/\"\s]+)", (ROOT / "uv.lock").read_text()))
    assert hosts and hosts <= PUBLIC


def test_the_lock_is_of_these_dependencies(locked):
    """A dependency that was added or moved without `make lock`."""
    (own,) = [one for one in locked["package"] if one["name"] == "backbench"]
    own_lines = own["metadata"]["requires-dist"]
    of_lock = Counter((one["name"], SpecifierSet(one.get("specifier", ""))) for one in own_lines)
    assert of_lock == Counter((normal(one.name), one.specifier) for one in wanted())
    versions = {one["name"]: one.get("version") for one in locked["package"]}
    for requirement in wanted():
        assert Version(versions[normal(requirement.name)]) in requirement.specifier


def test_pip_gets_the_versions_that_uv_does(locked):
    """constraints.txt is the lock in pip's words: `make lock` writes both."""
    lines = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
    of_pip = {(normal(one.name), str(one.specifier).removeprefix("==")) for one in lines}
    of_uv = {(one["name"], one["version"]) for one in locked["package"] if "version" in one}
    assert of_pip == {pair for pair in of_uv if pair[0] != "backbench"}


def test_the_version_has_one_home():
    import backbench

    number = PROJECT["project"]["version"]
    assert backbench.__version__ == version("backbench") == number
    elsewhere = [path for path in ("CITATION.cff", "README.md", "tools/backbench.def")
                 if number in (ROOT / path).read_text()]  # fmt: skip
    assert not elsewhere


# --- the wheel, from another folder -------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """(a folder that is none of ours, its environment's Python): the wheel, which was built of the
    sdist alone, over the packages that are here. The suite's own checkout is not on its path."""
    place = tmp_path_factory.mktemp("elsewhere")
    build = runpy.run_path(str(ROOT / "tools" / "dist.py"))["main"]
    sdist, wheel = build(place / "dist")
    venv.create(place / "env", with_pip=False, symlinks=True)
    (packages,) = (place / "env" / "lib").glob("*/site-packages")
    here = Path(pytest.__file__).parents[1]
    (packages / "base.pth").write_text(f"{here}\n")  # its own .pth files are not followed
    python = place / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True, cwd=place)
    assert sdist.name.startswith("backbench-") and sdist.suffixes[-2:] == [".tar", ".gz"]
    return place, python


def told(installed, *words, timeout=600):
    place, python = installed
    done = subprocess.run(
        [python.parent / "backbench", *words],
        cwd=place, capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}: {done.stderr[-2000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installed_wheel_finds_itself(installed):
    place, python = installed
    code = "import backbench, pretrain, transfer, detection as d; print(backbench.__file__, d.__file__)"
    found = subprocess.run(
        [python, "-c", code], cwd=place, capture_output=True, text=True, check=True
    )
    assert found.stdout.count(str(place / "env")) == 2, found.stdout
    assert "VERB" in told(installed, "--help")
    assert "14 checkpoints" in told(installed, "reproduce")
    assert "LORAC Table 2" in told(installed, "paper")
    assert f"backbench {version('backbench')}" in told(installed, "doctor")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_wheel_measures(installed):
    """The demo, and on what it leaves one probe and one launch."""
    told(installed, "demo", "--size", "tiny", "--out", "demo", timeout=1200)
    data = ("--data", "demo/data")
    trunk = "demo/pretrain/lorac/backbone.safetensors"
    probe = ("linear", trunk, "--datasets", "digits", "--protocol", "knn_demo", *data)
    told(installed, *probe, "--out", "probe", "--workers", "0")
    grid = ("launch", "run", "demo", "checkpoints=[demo/pretrain/random]", *data)
    told(installed, *grid, "--out", "grid", "--cluster", "local")
    said = told(installed, "leaderboard", "probe", "grid", "--csv", "table.csv")
    assert "wrote table.csv" in said
    place, _ = installed
    assert (place / "table.csv").read_text().count("\n") == 3
