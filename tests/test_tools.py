"""The scripts of tools/ that pack, convert and try; what they start is a stand-in."""

import importlib.util
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from backbench.cli import program

ROOT = Path(__file__).parent.parent


def script(name):
    """Load a script: there is no package of them."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


try_wheel = script("try_wheel")
dist = script("dist")


class Shell:
    """Stands for `subprocess.run`: keeps the commands, and answers as `answer` says."""

    def __init__(self, monkeypatch) -> None:
        self.commands: list[list[str]] = []
        self.folders: list[Path | None] = []
        self.answer = lambda words: (0, "", "")
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command, *, cwd=None, check=False, **_):
        words = [str(word) for word in command]
        self.commands.append(words)
        self.folders.append(cwd)
        status, out, err = self.answer(words)
        if check and status:
            raise subprocess.CalledProcessError(status, words)
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)


@pytest.fixture
def shell(monkeypatch):
    return Shell(monkeypatch)


# try_wheel


def trying(monkeypatch, shell, *words, uv="/bin/uv"):
    """Run try_wheel.py; what a command of the wheel's sees of the folder goes to `seen`."""
    seen = []

    def answer(command):
        if "install" in command:
            env = Path(shell.commands[0][-1])
            packages = env / "lib" / "python3.11" / "site-packages"
            for name in ("a", "b", "c"):
                (packages / f"{name}.dist-info").mkdir(parents=True)
            (packages / "a.so").write_bytes(bytes(3_000_000))
        if shell.folders[-1] is not None:
            folder = Path(shell.folders[-1])
            seen.append({file.parent.name for file in folder.glob("*/__init__.py")})
            for package in seen[-1]:
                text = (folder / package / "__init__.py").read_text()
                assert text.startswith("raise ImportError")
        return 0, "backbench 9.9\n" if "--version" in command else "", ""

    shell.answer = answer
    monkeypatch.setattr(try_wheel.shutil, "which", lambda name: uv)
    monkeypatch.setattr(sys, "argv", ["try_wheel.py", *words])
    assert try_wheel.main() == 0
    return seen


def test_a_wheel_is_installed_and_used_beside_somebody_elses_code(
    monkeypatch, shell, capsys
):
    seen = trying(monkeypatch, shell, "x.whl", "torch==2.11.*", "--python", "3.13")
    make, install, *used = shell.commands
    env = make[-1]
    assert make[:2] == ["/bin/uv", "venv"]
    assert make[make.index("--python") + 1] == "3.13"
    assert install[:3] == ["/bin/uv", "pip", "install"]
    assert install[install.index("--python") + 1] == f"{env}/bin/python"
    assert install[-2:] == [str(Path("x.whl").resolve()), "torch==2.11.*"]
    out = capsys.readouterr().out
    assert "3 packages, 3 MB, " in out
    # What is typed is the installed program's, in a folder with packages of others
    assert all(words[0].startswith(f"{env}/bin/") for words in used)
    assert {"pretrain", "transfer", "detection", "configs", "tools"} <= seen[0]
    typed = [" ".join(words[1:]) for words in used]
    assert "--version" in typed and "doctor" in typed
    assert any(words.startswith("-m backbench evaluate") for words in typed)
    assert any(words.startswith("-m backbench launch run grid.yaml") for words in typed)
    assert not any("demo" in words for words in typed)
    assert "backbench 9.9" in out
    assert not Path(env).exists()


def test_without_uv_this_pythons_venv_is_taken(monkeypatch, shell):
    trying(monkeypatch, shell, "x.whl", uv=None)
    make, install, *_ = shell.commands
    assert make[:3] == [sys.executable, "-m", "venv"]
    assert install[:4] == [f"{make[-1]}/bin/python", "-m", "pip", "install"]


def test_the_demo_is_tried_where_it_is_asked_for(monkeypatch, shell):
    trying(monkeypatch, shell, "x.whl", "--demo")
    assert "demo --size tiny" in " ".join(shell.commands[-1])


def test_the_first_command_that_fails_ends_the_trial(tmp_path, shell):
    shell.answer = lambda words: (
        (3, "", " no such thing\n") if "doctor" in words else (0, "", "")
    )
    with pytest.raises(SystemExit, match="exit status 3: no such thing"):
        try_wheel.use(tmp_path / "bin" / "python", tmp_path, demo=True)
    assert shell.commands[-1][-1] == "doctor"


def test_the_grid_and_the_programs_that_are_typed_are_right(tmp_path, monkeypatch):
    compile(try_wheel.API, "api", "exec")
    monkeypatch.chdir(tmp_path)
    exec(compile(try_wheel.IMAGES, "images", "exec"), {})
    assert len(list(tmp_path.glob("mine/*/*.png"))) == 40
    words = ["launch", "run", "grid.yaml", "--out", "grid", "--cluster", "local"]
    (tmp_path / "grid.yaml").write_text(try_wheel.GRID)
    assert program.main([*words, "--dry-run"]) == 0


# dist


def source_archive(path):
    """An sdist as setuptools leaves it: one folder with the package in it."""
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("backbench-9.9/backbench/__init__.py")
        archive.addfile(info, io.BytesIO(b""))


@pytest.mark.parametrize(
    ("git", "kept"),
    [((0, 0), "abc123\n"), ((0, 1), "abc123+changes\n"), ((128, 0), None)],
    ids=["a commit", "changes", "no repository"],
)
def test_the_wheel_is_built_from_the_sdist_and_keeps_the_commit(
    tmp_path, shell, git, kept
):
    found = []

    def answer(words):
        if "rev-parse" in words:
            return git[0], "abc123\n", ""
        if "diff" in words:
            return git[1], "", ""
        if "build_sdist" in words:
            assert shell.folders[-1] == ROOT
            source_archive(Path(words[-1]) / "backbench-9.9.tar.gz")
            return 0, "running sdist\nbackbench-9.9.tar.gz\n", ""
        source = Path(shell.folders[-1])
        file = source / "backbench" / "commit.txt"
        found.append(file.read_text() if file.exists() else None)
        with zipfile.ZipFile(Path(words[-1]) / "backbench-9.9.whl", "w"):
            pass
        return 0, "backbench-9.9.whl\n", ""

    shell.answer = answer
    made = dist.main(tmp_path / "new" / "dist")
    assert [file.name for file in made] == ["backbench-9.9.tar.gz", "backbench-9.9.whl"]
    assert all(file.is_file() for file in made)
    assert found == [kept]


def test_a_build_that_fails_says_why(tmp_path, shell):
    shell.answer = lambda words: (1, "", "no pyproject.toml\n")
    says = f"build_wheel of {tmp_path} failed: no pyproject.toml"
    with pytest.raises(SystemExit, match=says):
        dist.build("build_wheel", tmp_path, tmp_path)


# convert_to_d2, index_architectures


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_a_conversion_is_an_export(monkeypatch, debug):
    given = []
    monkeypatch.setattr(program, "main", lambda words: given.append(words) or 7)
    words = ["convert_to_d2.py", "a.safetensors", "b.pkl", *debug]
    monkeypatch.setattr(sys, "argv", words)
    assert script("convert_to_d2").main() == 7
    as_d2 = ["--format", "detectron2", "--out", "b.pkl"]
    assert given == [["export", "a.safetensors", *as_d2, *debug]]


def test_the_index_has_what_can_be_built(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", sys.path[:])
    index = script("index_architectures")
    written = []

    def of_timm(name):
        if name == "needs_more":
            raise RuntimeError("no memory")
        return f"timm {name}"

    ours = index.architectures
    monkeypatch.setattr(ours, "of_timm", of_timm)
    monkeypatch.setattr(ours, "of_torchvision", lambda name: f"torchvision {name}")
    monkeypatch.setattr(ours, "write", written.extend)
    names = ["vit_b", "needs_more", "resnet18"]
    monkeypatch.setattr(index.timm, "list_models", lambda: names)
    index.main()
    of_timm = [row for row in written if row.startswith("timm ")]
    assert of_timm == ["timm resnet18", "timm vit_b"]
    assert "torchvision resnet50" in written
    said = capsys.readouterr()
    assert "left out: timm's needs_more: RuntimeError('no memory')" in said.err
    assert f"{len(written)} networks" in said.out


# bind_protocols, protocols_page


def test_a_name_is_bound_to_one_protocol_for_each_kind_of_number(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    bind = script("bind_protocols")
    knn = {"kind": "knn", "protocol": "mine-v1", "k": [5]}
    analysis = {"protocol": "mine-v1", "batch_size": 8}
    recipes = [
        bind.Recipe("mine-v1", "one", "knn", knn),
        bind.Recipe("mine-v1", "two", "analyze", analysis),
        bind.Recipe("mine-v1", "one", "knn", knn),
    ]
    monkeypatch.setattr(bind, "_probes", lambda: ({}, recipes))
    monkeypatch.setattr(bind, "_detectors", lambda: ({}, []))
    monkeypatch.setattr(bind, "_pretraining", dict)
    monkeypatch.setattr(bind.config, "recipe_names", lambda kind: [])
    (of_name,) = bind.bound()["fingerprints"].values()
    assert len(of_name) == len(set(of_name.values())) == 2
    recipes.append(bind.Recipe("mine-v1", "three", "knn", {**knn, "k": [20]}))
    with pytest.raises(SystemExit) as refused:
        bind.bound()
    assert str(refused.value) == ("one and three are both called mine-v1; rename one")


def test_a_kind_of_protocol_without_a_heading_has_no_page(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    page = script("protocols_page")
    monkeypatch.setattr(page, "_recipes", lambda folder: [("knn", ({}, ""))])
    monkeypatch.delitem(page.KINDS, "knn")
    path = ROOT / "configs" / "transfer" / "knn.yaml"
    with pytest.raises(SystemExit) as refused:
        page.text()
    assert str(refused.value) == (
        f"{path}: kind 'knn' has no heading; give it one in KINDS"
        " (tools/protocols_page.py)"
    )
