"""What a row says of the code and the machine that made it."""

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest

from backbench.records import origin

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that the package might lie in; nothing is remembered."""
    monkeypatch.setattr(
        origin, "__file__", str(tmp_path / "backbench" / "records" / "x.py")
    )
    (tmp_path / "backbench").mkdir()
    for each in (origin.versions, origin.code_revision, origin.hardware):
        each.cache_clear()
    yield tmp_path
    for each in (origin.versions, origin.code_revision, origin.hardware):
        each.cache_clear()


def git(folder, *words):
    who = ["-c", "user.name=x", "-c", "user.email=x@x.org"]
    command = ["git", "-C", str(folder), *who, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_clone_has_its_commit_and_says_where_files_differ(place):
    git(place, "init", "-q")
    (place / "file").write_text("one")
    git(place, "add", "file")
    git(place, "commit", "-q", "-m", "first")
    head = git(place, "rev-parse", "HEAD")
    assert origin.code_revision() == head
    (place / "file").write_text("two")
    assert origin.code_revision() == head  # of this process, once
    origin.code_revision.cache_clear()
    assert origin.code_revision() == f"{head}+changes"


@pytest.mark.parametrize("built", [COMMIT, f"{COMMIT}+changes"])
def test_a_wheel_has_the_commit_that_it_was_built_of(place, built):
    (place / "backbench" / "commit.txt").write_text(f"{built}\n")
    assert origin.code_revision() == built


@pytest.mark.parametrize("built", [None, "", "main", COMMIT[1:], f"{COMMIT} and more"])
def test_without_a_commit_the_version_serves(place, built):
    if built is not None:
        (place / "backbench" / "commit.txt").write_text(built)
    expected = f"backbench {importlib.metadata.version('backbench')}"
    assert origin.code_revision() == expected


def test_a_folder_that_git_does_not_know_is_no_fault(place):
    (place / ".git").mkdir()
    assert origin.code_revision().startswith("backbench ")


def test_what_is_not_installed_is_left_out(place, monkeypatch):
    def version(package):
        if package in ("backbench", "torchvision"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "9.9"

    monkeypatch.setattr(importlib.metadata, "version", version)
    versions = origin.versions()
    assert versions == {"python": sys.version.split()[0], "torch": "9.9"}
    assert origin.code_revision() == "unknown"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "processor: 0\nmodel name\t: A CPU @ 2: fast\nmodel name: other\n",
            "A CPU @ 2: fast",
        ),
        ("Features: neon\n", "arm"),
        (None, "arm"),
    ],
)
def test_the_cpu_has_a_name(place, monkeypatch, cpuinfo, name):
    def read_text(path):
        assert str(path) == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError
        return cpuinfo

    monkeypatch.setattr(origin.Path, "read_text", read_text)
    monkeypatch.setattr(origin.platform, "processor", lambda: "")
    monkeypatch.setattr(origin.platform, "machine", lambda: "arm")
    monkeypatch.setattr(origin.os, "cpu_count", lambda: 6)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert origin.hardware() == f"6 x {name}"


def test_the_gpus_count_where_torch_sees_them(place, monkeypatch):
    cuda = {"is_available": lambda: True, "device_count": lambda: 4}
    cuda["get_device_name"] = lambda number: f"GPU {number}"
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(**cuda))
    )
    assert origin.hardware() == "4 x GPU 0"
