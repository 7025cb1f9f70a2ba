"""The house: who may import whom, and the facts that live in one file only."""

import ast
import functools
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest

from backbench.records import protocol_fingerprints
from backbench.weights.archs import FAMILIES

ROOT = Path(__file__).parent.parent
PROGRAMS = ("pretrain", "transfer", "detection")
FOLDERS = ("backbench", *PROGRAMS, "tools", "benchmarks")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

# The one rule: a room imports only its own storey and those before it.
STOREYS = (
    ("errors", "tasks", "recipes", "plugins", "untrusted", "requests"),
    ("runs", "parallel", "images", "containers", "stats"),
    ("weights", "records", "verify", "datasets", "knn", "charts"),
    ("board",),
    ("launch",),
    ("published",),
    ("evaluation", "cli", "__main__"),  # the doors: they stand above the programs, too
)
DOORS = STOREYS[-1]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in PROGRAMS:  # which backbench/ has as links
        parts = ("backbench", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def is_script(node: ast.stmt) -> bool:
    """True for `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def is_frozen(decorator: ast.expr) -> bool | None:
    """Say whether a data class's decorator freezes it; None for another decorator."""
    call = decorator if isinstance(decorator, ast.Call) else None
    name = ast.unparse(call.func if call else decorator)
    if name.rpartition(".")[2] != "dataclass":
        return None
    flags = (
        {each.arg: ast.unparse(each.value) for each in call.keywords} if call else {}
    )
    return flags.get("frozen") == "True"


def imports_of(node: ast.AST, path: Path) -> set[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    assert not node.level, f"{path}: relative import; write it out"
    below = {f"{node.module}.{alias.name}" for alias in node.names}
    # `from package import module` names the module, `from module import name` does too
    return {name for name in below if name in MODULES} or {str(node.module)}


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """What the tests ask of one file's syntax tree."""

    imports: frozenset[str]  # every module, at any depth, lazily or not
    texts: frozenset[object]  # its constants
    names: frozenset[str]
    classes: frozenset[str]
    changeable: frozenset[str]  # its data classes that are not frozen


@functools.cache
def facts(path: Path) -> SourceFacts:
    """A file is parsed once, however many tests ask."""
    imports, texts, names, classes, changeable = (set() for _ in range(5))
    for statement in ast.parse(path.read_text()).body:
        script = is_script(statement)
        for node in ast.walk(statement):
            if isinstance(node, ast.Constant):
                texts.add(node.value)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.ClassDef):
                classes.add(node.name)
                if False in map(is_frozen, node.decorator_list):
                    changeable.add(node.name)
            elif not script:  # what a file does as a script is no import of the module
                imports |= imports_of(node, path)
    return SourceFacts(
        imports=frozenset(imports),
        texts=frozenset(texts),
        names=frozenset(names),
        classes=frozenset(classes),
        changeable=frozenset(changeable),
    )


@functools.cache
def graph() -> dict[str, set[str]]:
    """The modules of the house that each module imports."""
    return {
        name: set(facts(path).imports & MODULES.keys() - {name})
        for name, path in MODULES.items()
    }


def program(name: str) -> str | None:
    """The program that a module belongs to, if any."""
    parts = name.split(".")
    return (
        parts[1]
        if parts[0] == "backbench" and parts[1:2] and parts[1] in PROGRAMS
        else None
    )


def storey(name: str) -> int | None:
    """Of a module of backbench; None for the package itself, whose lazy names are everybody's."""
    parts = name.split(".")
    if parts[0] != "backbench" or len(parts) == 1 or program(name):
        return None
    return next(number for number, rooms in enumerate(STOREYS) if parts[1] in rooms)


@pytest.mark.parametrize("name", [name for name in MODULES if storey(name) is not None])
def test_imports_point_to_earlier_storeys(name):
    own = storey(name)
    later = [other for other in graph()[name] if (storey(other) or 0) > own]
    assert not later


@pytest.mark.parametrize("name", MODULES)
def test_programs_are_apart(name):
    own = program(name)
    programs = {program(other) for other in graph()[name]} - {None}
    if own is not None:
        assert programs <= {own}, "the three programs never import one another"
    elif storey(name) is not None and name.split(".")[1] not in DOORS:
        assert not programs, "only doors import the three programs"
    assert not {other.split(".")[0] for other in facts(MODULES[name]).imports} & {
        "tests",
        "tools",
    }


def test_nobody_imports_a_door_but_doors():
    for name, others in graph().items():
        if name.startswith(("benchmarks.", "tools.")) or name == "backbench":
            continue  # they time and run the commands
        if storey(name) == len(STOREYS) - 1:
            continue
        doors = {other for other in others if storey(other) == len(STOREYS) - 1}
        assert not doors, f"{name} imports {doors}"


def test_statistics_know_nothing_of_vision():
    """backbench/stats is arithmetic on arrays: it imports itself, and errors at most."""
    for name, others in graph().items():
        if name.startswith("backbench.stats"):
            allowed = ("backbench.stats", "backbench.errors")
            foreign = {o for o in others if not o.startswith(allowed)}
            assert not foreign, f"{name} imports {foreign}"


def test_no_circle_of_files():
    """Depth first: a module met again while it is still open closes a circle."""
    done: set[str] = set()

    def visit(name: str, open_: tuple[str, ...]) -> None:
        assert name not in open_, " -> ".join((*open_[open_.index(name) :], name))
        if name not in done:
            for other in sorted(graph()[name]):
                visit(other, (*open_, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def users(pattern: str) -> set[str]:
    """Files whose text matches."""
    found = [path for path in SOURCES if re.search(pattern, path.read_text())]
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("submitit", ("backbench/launch/slurm.py", "backbench/launch/slurm_task.py")),
        ("detectron2", ("detection/engine_detectron2", "detection/voc_ap.py")),
        ("hotcoco", ("detection/evaluate.py",)),
        ("safetensors", ("backbench/weights",)),
    ],
)
def test_package_has_few_homes(package, homes):
    for path in SOURCES:
        if package in {name.split(".")[0] for name in facts(path).imports}:
            where = path.relative_to(ROOT).as_posix()
            assert where.startswith((*homes, "benchmarks/")), (
                f"{where} imports {package}"
            )


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        # Pixel statistics
        (r"\b0\.485\b|\b123\.675\b", "backbench/images/preprocess.py"),
        # What a task is called: no Python file
        (r'"Keypoint R-CNN"', "backbench/tasks.toml"),
        (r'"results\.jsonl"', "backbench/runs/folder.py"),  # the names of a run's files
        (r'"backbone\.safetensors"', "backbench/runs/folder.py"),
        # The header of a safetensors file
        (r'"__metadata__"', "backbench/weights/header.py"),
        (r'"sun397"', "backbench/datasets"),  # the twelve datasets
        # A folder that the system cannot make
        (r"mkdir\(.*exist_ok", ("backbench/runs/failures.py", "tools/", "benchmarks/")),
        # Its stop
        (r"class StopFlag|class Agreement", ("backbench/runs", "backbench/parallel")),
    ],
)
def test_a_fact_has_one_home(pattern, home):
    assert all(file.startswith(home) for file in users(pattern)), users(pattern)


def test_no_file_but_its_own_asks_for_a_kind_of_trunk():
    """The prefix of a family's names, and its classes, stand in backbench/weights/families."""
    prefixes = {family.prefix for family in FAMILIES} - {""}
    classes = {type(family).__name__ for family in FAMILIES}
    for path in SOURCES:
        where = path.relative_to(ROOT).as_posix()
        if where.startswith(("backbench/weights/families/", "benchmarks/")):
            continue
        found = facts(path)
        assert not found.texts & prefixes, f"{where} asks for a prefix"
        assert where == "backbench/weights/archs.py" or not found.names & classes, where


def test_names_of_protocols_are_bound_to_their_recipes():
    """backbench/records/protocol_fingerprints.py: rows under a shipped name are held to what is bound here."""
    tool = runpy.run_path(str(ROOT / "tools" / "bind_protocols.py"))
    now = tool["text_of"](tool["bound"]())
    assert protocol_fingerprints.FILE.read_text() == now, (
        "a recipe in configs/ or a default is not what backbench/records/shipped.json binds: "
        "run `python tools/bind_protocols.py` and commit the file; a protocol that measures "
        "something else than before needs another name"
    )


def test_class_names_are_unique():
    """`Config` and `Method` are a convention: one each in every method's file."""
    homes: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        for found in facts(path).classes:
            if not found.startswith("_"):
                homes.setdefault(found, set()).add(name)
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert not twice.keys() - {"Config", "Method"}, twice


# The data classes that are filled or changed as they are used. All others are values: whoever holds
# one may keep it, share it and use it as a key.
STATE = {
    *(
        "Ablation",
        "Attempt",
        "Board",
        "Cell",
        "GridRun",
        "Heads",
        "Held",
        "ListVerdict",
    ),
    *(
        "Objective",
        "Plan",
        "ProbeTraining",
        "ResumableSteps",
        "SavedState",
        "SlurmTask",
    ),
    *("Training", "TriedRates", "Windows", "_Announced"),
}


def test_data_classes_are_values_but_for_those_that_hold_state():
    found = set()
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] not in ("tools", "benchmarks"):
            found |= facts(path).changeable
    assert found == STATE


def test_no_loose_loading_and_no_junk_drawer():
    for path in SOURCES:
        assert "strict=" + "False" not in path.read_text(), path
        assert path.name not in ("utils.py", "helpers.py", "misc.py"), path


def test_the_ground_floor_stays_small():
    assert len(list((ROOT / "backbench").glob("*.py"))) <= 14


def test_every_room_is_packaged():
    listed = (ROOT / "pyproject.toml").read_text()
    for path in SOURCES:
        package = module_name(path.parent / "__init__.py")
        if package.split(".")[0] not in ("tools", "benchmarks"):
            assert f'"{package}"' in listed, (
                f"{package} is missing under [tool.setuptools]"
            )


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    tops = "|".join((*FOLDERS, "configs", "docs", "tests"))
    named = re.findall(rf"`((?:{tops})/[\w./-]*)`", (ROOT / page).read_text())
    missing = []
    for name in named:
        # A room may be named without its .py, a recipe without its .yaml; NAME stands for any
        there = any(
            (ROOT / f"{name}{suffix}").exists() for suffix in ("", ".py", ".yaml")
        )
        if not there and "NAME" not in name:
            missing.append(name)
    assert not missing
