"""The import direction, and the facts that may live in one file only."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = ("pretrain", "transfer", "detection")
SOURCES = [
    p for folder in ("backbench", *PROGRAMS, "tools") for p in sorted((ROOT / folder).rglob("*.py"))
]


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at any depth, lazily or not."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import; write it out"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    top = path.relative_to(ROOT).parts[0]
    roots = {name.split(".")[0] for name in imported(path)}
    programs = roots & set(PROGRAMS)
    if top == "backbench":
        assert not programs, "backbench imports none of the three programs"
    elif top in PROGRAMS:
        assert programs <= {top}, "the three programs never import one another"
    assert not roots & {"tests", "tools"}
    if path.relative_to(ROOT).as_posix() not in ("backbench/__main__.py", "tools/convert_to_d2.py"):
        assert "backbench.cli" not in imported(path) or path.name == "train_net.py", (
            "nobody imports the command line"
        )


@pytest.mark.parametrize(
    ("package", "home"),
    [("submitit", "backbench/launch/verb.py"), ("detectron2", "detection/engine_detectron2.py")],
)
def test_package_has_one_importer(package, home):
    users = {
        p.relative_to(ROOT).as_posix()
        for p in SOURCES
        if package in {name.split(".")[0] for name in imported(p)}
    }
    assert users <= {home}


def test_pixel_statistics_have_one_home():
    users = {
        p.relative_to(ROOT).as_posix()
        for p in SOURCES
        if re.search(r"\b0\.485\b|\b123\.675\b", p.read_text())
    }
    assert users <= {"backbench/images/preprocess.py"}


def test_no_loose_loading_and_no_junk_drawer():
    for path in SOURCES:
        assert "strict=" + "False" not in path.read_text(), path
        assert path.name not in ("utils.py", "helpers.py", "misc.py"), path
