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

from backbench.errors import BadInput
from backbench.untrusted import yamls

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
    of_lock = Counter(
        (one["name"], SpecifierSet(one.get("specifier", ""))) for one in own_lines
    )
    assert of_lock == Counter((normal(one.name), one.specifier) for one in wanted())
    versions = {one["name"]: one.get("version") for one in locked["package"]}
    for requirement in wanted():
        assert Version(versions[normal(requirement.name)]) in requirement.specifier


def test_pip_gets_the_versions_that_uv_does(locked):
    """constraints.txt is the lock in pip's words: `make lock` writes both."""
    lines = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    of_pip = {
        (normal(one.name), str(one.specifier).removeprefix("==")) for one in lines
    }
    of_uv = {
        (one["name"], one["version"]) for one in locked["package"] if "version" in one
    }
    assert of_pip == {pair for pair in of_uv if pair[0] != "backbench"}


def test_the_version_has_one_home():
    import backbench

    number = PROJECT["project"]["version"]
    assert backbench.__version__ == version("backbench") == number
    elsewhere = [
        path
        for path in ("CITATION.cff", "README.md", "tools/backbench.def")
        if number in (ROOT / path).read_text()
    ]
    assert not elsewhere


RELEASE = runpy.run_path(str(ROOT / "tools" / "release.py"))["notes"]
CHANGES = """# Changelog

## 0.2.0 (2026-12-01)

- Second

## 0.1.0 (2026-11-01)

- First
"""


@pytest.fixture
def released(tmp_path):
    """A repository whose parts agree on version 0.2.0."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    return tmp_path


def test_the_notes_of_a_release_are_its_part_of_the_changelog(released):
    assert RELEASE("v0.2.0", released) == "- Second"


@pytest.mark.parametrize(
    ("change", "tag", "why"),
    [
        (("", ""), "v0.3.0", "v0.3.0: pyproject.toml has version 0.2.0"),
        (("", ""), "0.2.0", "the tag of that is v0.2.0"),
        (("2026-12-01", "unreleased"), "v0.2.0", r"\(unreleased\)` has no date"),
        (("## 0.2.0", "## 0.2.1"), "v0.2.0", "begin it with `## 0.2.0"),
        (("- Second", ""), "v0.2.0", "nothing stands below"),
    ],
)
def test_a_release_whose_parts_disagree_is_refused(released, change, tag, why):
    (released / "CHANGELOG.md").write_text(CHANGES.replace(*change))
    with pytest.raises(SystemExit, match=why):
        RELEASE(tag, released)


def test_the_check_prints_the_notes_and_succeeds(monkeypatch, capsys):
    tool = runpy.run_path(str(ROOT / "tools" / "release.py"))
    monkeypatch.setitem(tool["main"].__globals__, "notes", "notes of {}".format)
    monkeypatch.setattr(sys, "argv", ["release.py", "check", "v0.2.0"])
    assert tool["main"]() == 0
    assert capsys.readouterr().out == "notes of v0.2.0\n"


def test_this_changelog_begins_with_this_version():
    """Then a release adds only its date."""
    text = (ROOT / "CHANGELOG.md").read_text()
    version, _ = re.findall(r"^## (\S+) \((.+)\)$", text, re.MULTILINE)[0]
    assert version == PROJECT["project"]["version"]


def test_every_python_that_is_named_is_tried_before_a_release():
    workflow = yamls.decode((ROOT / ".github/workflows/release.yml").read_text())
    tried = {
        one["python"]
        for one in workflow["jobs"]["try"]["strategy"]["matrix"]["include"]
    }
    prefix = "Programming Language :: Python :: "
    named = [one.removeprefix(prefix) for one in PROJECT["project"]["classifiers"]]
    assert tried == {one for one in named if re.fullmatch(r"3\.\d+", one)}
    assert all(
        python in SpecifierSet(PROJECT["project"]["requires-python"])
        for python in tried
    )
    for job in ("github", "pypi"):
        assert workflow["jobs"][job]["needs"] == "try"


# --- the wheel, from another folder -------------------------------------------------------------
@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """(a foreign folder, its Python): the wheel of the sdist alone, without the checkout."""
    place = tmp_path_factory.mktemp("elsewhere")
    build = runpy.run_path(str(ROOT / "tools" / "dist.py"))["main"]
    sdist, wheel = build(place / "dist")
    venv.create(place / "env", with_pip=False, symlinks=True)
    (packages,) = (place / "env" / "lib").glob("*/site-packages")
    here = Path(pytest.__file__).parents[1]
    # Its own .pth files are not followed
    (packages / "base.pth").write_text(f"{here}\n")
    python = place / "env" / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
    ]
    subprocess.run(
        [*install, "--no-deps", "--no-index", str(wheel)], check=True, cwd=place
    )
    assert sdist.name.startswith("backbench-") and sdist.suffixes[-2:] == [
        ".tar",
        ".gz",
    ]
    return place, python


def told(installed, *words, timeout=600):
    place, python = installed
    command = [python.parent / "backbench", *words]
    how = {"capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run(command, cwd=place, check=False, **how)
    assert done.returncode == 0, f"{words}: {done.stderr[-2000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installed_wheel_finds_itself(installed):
    place, python = installed
    code = (
        "import importlib.util, backbench, backbench.pretrain, backbench.transfer, backbench.detection as d;"
        "print(backbench.__file__, d.__file__);"
        "print([n for n in ('pretrain', 'transfer', 'detection') if importlib.util.find_spec(n)])"
    )
    command = [python, "-c", code]
    found = subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=True
    )
    assert found.stdout.count(str(place / "env")) == 2, found.stdout
    assert found.stdout.splitlines()[-1] == "[]", "only backbench is at the top"
    assert "VERB" in told(installed, "--help")
    assert "14 checkpoints" in told(installed, "reproduce")
    assert "LORAC Table 2" in told(installed, "paper")
    assert f"backbench {version('backbench')}" in told(installed, "doctor")
    if (ROOT / ".git").exists():
        assert re.search(r"\([0-9a-f]{40}(\+changes)?\)$", told(installed, "--version"))


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


TOOLS = ROOT / "tools"


def of_apptainer():
    """(files copied, parts installed, environment)."""
    text = (TOOLS / "backbench.def").read_text()
    section = dict(
        re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL)
    )
    files = {line.split()[0] for line in section["files"].strip().splitlines()}
    parts = re.findall(r"install\.sh ([a-z2 ]+)", section["post"])
    return files, parts, set(re.findall(r"export (\w+=\S+)", section["environment"]))


def of_containerfile():
    text = (TOOLS / "Containerfile").read_text().replace("\\\n", " ")
    files = set()
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *named, where = line.split()
        assert where.startswith("/usr/local/src/backbench/source/")
        files |= set(named)
    parts = re.findall(r"install\.sh ([a-z2 ]+)", text.partition("RUN ")[2])
    (environment,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    return files, parts, set(environment.split())


def test_both_images_are_the_same():
    apptainer, containerfile = of_apptainer(), of_containerfile()
    assert apptainer[0] == containerfile[0]
    assert [part.split() for part in apptainer[1]] == [
        ["system", "suite"],
        ["detectron2"],
    ]
    assert [part.split() for part in containerfile[1]] == [
        ["system", "suite"],
        ["detectron2"],
    ]
    assert apptainer[2] == containerfile[2]


def test_an_image_holds_all_that_is_installed():
    """Every folder that pyproject.toml packages, and every file that its build reads."""
    files, _, _ = of_containerfile()
    project = (ROOT / "pyproject.toml").read_text()
    listed, *_ = re.findall(r"^packages = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)
    packages = set(listed.split('"')[1::2])
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
        cwd=pip.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_from_another_folder(pip):
    assert install(pip, "suite", "detectron2").returncode == 0
    suite, tools, detectron2 = (pip.parent / "pip.said").read_text().splitlines()
    assert suite == f"-c {ROOT}/constraints.txt {ROOT}" and "setuptools<81" in tools
    assert detectron2.endswith(
        f"--no-build-isolation -r {ROOT}/detection/detectron2.txt"
    )


def test_detectron2_is_built_at_one_commit():
    lines = (ROOT / "detection" / "detectron2.txt").read_text().splitlines()
    (named,) = [line for line in lines if not line.startswith("#")]
    assert re.fullmatch(r"detectron2 @ git\+https://\S+@[0-9a-f]{40}", named)


def test_without_a_clone_a_module_builds_detectron2(tmp_path, monkeypatch, capfd):
    """What the hints name: it installs the file that the wheel carries."""
    from backbench.detection import build_detectron2

    for tool in ("git", "g++", "uv"):
        (tmp_path / tool).write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(build_detectron2.importlib.util, "find_spec", lambda name: None)
    assert build_detectron2.main() == 0
    tools, detectron2 = capfd.readouterr().out.splitlines()
    assert tools == f"pip install --python {sys.executable} setuptools<81 wheel ninja"
    assert detectron2.endswith(
        f"--no-build-isolation -r {build_detectron2.REQUIREMENT}"
    )
    assert build_detectron2.REQUIREMENT.is_file()
    (tmp_path / "uv").unlink()
    with pytest.raises(BadInput, match=r"has no pip.* -m ensurepip` installs pip"):
        build_detectron2.main()


def test_a_part_that_there_is_not(pip):
    done = install(pip, "detectron3")
    assert done.returncode == 2 and "no part 'detectron3'" in done.stderr
    assert not (pip.parent / "pip.said").exists()
