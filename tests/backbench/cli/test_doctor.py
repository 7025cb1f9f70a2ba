"""doctor says what is here and what that allows; a broken or missing part is named, not raised."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.layouts import class_folder

from backbench.cli import doctor, program
from backbench.cli.doctor import BROKEN, MISSING, OK, OUTSIDE, Finding


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.15.0+cu130", ">=2.11,<2.16", True),
        ("2.16.0", ">=2.11,<2.16", False),
        ("0.1.10", ">=0.1.7,<0.1.10", False),
        ("0.1.5.post20221221", ">=0.1.5.post20221221", True),
        ("3.0", "", True),
        ("2.11.0a0+eb1f9c3", ">=2.11,<2.16", True),
        ("2.15.0-custom", ">=2.11", True),
        ("2.15.0.nv25.1", ">=2.11,<2.15", False),
    ],
)
def test_version_ranges(version, wanted, fits):
    assert doctor.within(version, wanted) is fits


def test_packages_without_the_one_that_reads_ranges(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert [(one.name, one.state) for one in doctor.packages()] == [
        ("packaging", MISSING)
    ]


def test_packages_are_held_to_the_ranges_that_are_stated(monkeypatch):
    stated = [
        "numpy>=1.26",
        "absent<3,>=2",
        "tomli>=2; python_version < '3'",
        "wandb>=1; extra == 'log'",
        "old>=2; python_version >= '3'",
    ]
    there = {"numpy": "1.26.4", "old": "1.9", "tomli": "1", "wandb": "0"}

    def version(name):
        if name not in there:
            raise doctor.importlib.metadata.PackageNotFoundError
        return there[name]

    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: stated)
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert doctor.packages() == [
        Finding("package", "absent", MISSING, "not installed; <3,>=2"),
        Finding("package", "numpy", OK, "1.26.4"),
        Finding("package", "old", OUTSIDE, "1.9; tested with >=2"),
    ]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: None)
    assert doctor.packages() == []


@pytest.mark.parametrize(
    ("threads", "said"),
    [("2", "2"), (None, "not set (with several processes on few cores: 1)")],
)
def test_the_machine_is_told_with_what_it_has(monkeypatch, threads, said):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 7 << 17}
    disk = SimpleNamespace(total=9 << 30, free=(5 << 30) + 1)
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 4, 5})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: disk)
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(doctor.store, "hardware", lambda: "8 x CPU")
    if threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    has = "Linux, 3 cores, 3 GiB, 5 GiB of disk free"
    about = f"{has}, OMP_NUM_THREADS {said}"
    assert doctor.machine() == Finding("machine", "8 x CPU", OK, about)


def test_lists_and_datasets_are_looked_for_below_the_root(tmp_path):
    none = "none; `backbench data fetch-splits` fetches ImageNet's"
    assert doctor.lists(tmp_path) == Finding("lists", "semisup", MISSING, none)
    (tmp_path / "lists").mkdir()
    for name in ("1percent.txt", "10percent.txt", "notes.txt"):
        (tmp_path / "lists" / name).touch()
    there = Finding("lists", "semisup", OK, "10percent.txt, 1percent.txt")
    assert doctor.lists(tmp_path) == there
    # A folder of a known dataset that holds nothing is said, and one that is not there is not
    (tmp_path / "dtd").mkdir()
    class_folder(tmp_path / "mine", classes="ab", per=3)
    found = doctor.datasets(tmp_path)
    assert [(one.kind, one.name, one.state) for one in found] == [
        ("data", "dtd", BROKEN),
        ("data", "mine", OK),
    ]
    assert found[0].about.startswith("get ") and found[1].about == ""


def test_a_report_is_a_line_for_each_part(tmp_path, quick, monkeypatch, capsys):
    known = doctor.plugins.installed
    trunks = {"my_trunk": None}

    def installed(group):
        return trunks if group == doctor.plugins.TRUNKS else known(group)

    monkeypatch.setattr(doctor.plugins, "installed", installed)
    monkeypatch.setattr(doctor.archs, "FAMILIES", [])
    monkeypatch.setattr(
        doctor, "slurm", lambda: Finding("cluster", "slurm", OK, "main 2")
    )
    monkeypatch.setattr(
        doctor, "packages", lambda: [Finding("package", "numpy", OK, "1")]
    )
    assert program.main(["doctor", "--data", str(tmp_path)]) == 0
    head, machine, *lines = capsys.readouterr().out.splitlines()
    python = doctor.platform.python_version()
    version = doctor.importlib.metadata.version("backbench")
    assert (
        head == f"backbench {version} ({doctor.store.code_revision()}), Python {python}"
    )
    assert machine.startswith("machine  ") and " ok       " in machine
    assert lines[:5] == [
        "package  numpy                     ok       1",
        "device   torch                     ok       the CPU",
        "engine   detectron2                missing  not built",
        "cluster  slurm                     ok       main 2",
        "lists    semisup                   missing  none; `backbench data fetch-splits`"
        " fetches ImageNet's",
    ]
    assert lines[6:8] == [
        "trunk    my_trunk                  ok       installed",
        "verbs    demo, pretrain            ok",
    ]
    assert lines[-2] == ""


@pytest.fixture
def quick():
    """Without the processes that import torch and Detectron2, which take seconds."""
    torch = Finding("device", "torch", OK, "the CPU")
    engine = Finding("engine", "detectron2", MISSING, "not built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "libraries", lambda: (torch, engine))
        yield


def states(capsys, root, status=0):
    """Name -> (state, what is said of it)."""
    assert program.main(["doctor", "--data", str(root), "--json"]) == status
    rows = json.loads(capsys.readouterr().out)
    return {row["name"]: (row["state"], row["about"]) for row in rows}


def test_doctor_here(tiny_root, capsys):
    seen = states(capsys, tiny_root)
    for name in ("torch", "digits", "coco", "demo, pretrain", "detect (torchvision)"):
        assert seen[name][0] == OK, name
    assert seen["semisup"] == (OK, "10percent.txt, 1percent.txt")


@pytest.mark.parametrize("gpus", ["", "H200 (139 GiB), H200 (139 GiB)"])
@pytest.mark.parametrize("fails", ["nothing", "torch", "detectron2"])
def test_torch_and_detectron2_are_asked_together_and_apart_where_one_fails(
    gpus, fails, monkeypatch
):
    asked = []

    def answer(kind, name, *command):
        words = []
        for library in ("torch", "detectron2"):
            if f"import {library}," in command[-1]:
                words.append(library)
        asked.append(words)
        if fails in words:
            return Finding(kind, name, BROKEN, f"no {fails}")
        said = {"torch": gpus, "detectron2": "0.6"}
        mark = ["<detectron2>"] if len(words) == 2 else []
        told = [said[words[0]], *mark, *(said[word] for word in words[1:])]
        return Finding(kind, name, OK, ", ".join(filter(None, told)))

    monkeypatch.setattr(doctor, "_asked", answer)
    monkeypatch.setattr(doctor, "_has_detectron2", lambda: True)
    torch, engine = doctor.libraries()
    told = (torch.state, engine.state)
    assert told == tuple(
        BROKEN if fails == name else OK for name in ("torch", "detectron2")
    )
    if torch.state == OK:
        assert torch.about == gpus or (not gpus and "the CPU" in torch.about)
    if engine.state == OK:
        assert engine.about == "0.6"
    apart = [["torch"], ["detectron2"]] if fails != "nothing" else []
    assert asked == [["torch", "detectron2"], *apart]


def test_what_is_missing_is_named(tmp_path, quick, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = states(capsys, tmp_path)
    assert seen["slurm"] == (MISSING, "no sbatch on PATH")
    assert seen["launch --cluster slurm"] == (MISSING, "slurm: no sbatch on PATH")
    assert seen["detect (detectron2)"] == (MISSING, "detectron2: not built")
    assert (
        seen["linear, finetune, semisup"][0]
        == seen["detect (torchvision)"][0]
        == MISSING
    )
    assert seen["demo, pretrain"][0] == OK
    monkeypatch.setattr(
        doctor, "packages", lambda: [Finding("package", "x", MISSING, "pip it")]
    )
    seen = states(capsys, tmp_path, status=1)
    assert (
        seen["demo, pretrain"] == seen["detect (torchvision)"] == (MISSING, "x: pip it")
    )


def test_nothing_is_there_that_linear_refuses(trees, quick, capsys):
    root = trees("cifar10")
    class_folder(root / "mine", classes="ab", per=3)
    (root / "half" / "train" / "a").mkdir(parents=True)
    (root / "pets").mkdir()
    (root / "pets" / "images.tar.gz").write_bytes(b"")
    trees.monkeypatch.undo()  # the checksums of the tiny archive
    seen = states(capsys, root)
    assert seen["mine"][0] == OK and seen["linear, finetune, semisup"][0] == OK
    assert (
        seen["cifar10"][0] == BROKEN
        and "not as they were published" in seen["cifar10"][1]
    )
    assert seen["pets"][0] == BROKEN and "get images.tar.gz" in seen["pets"][1]
    assert seen["half"][0] == BROKEN and "no folder 'test' or 'val'" in seen["half"][1]


def test_a_slurm_that_does_not_answer_is_broken(tmp_path, monkeypatch):
    said = "echo 'slurm_load_partitions: no controller' >&2; exit 1"
    for name, text in (("sbatch", "exit 0"), ("sinfo", said)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = doctor.slurm()
    assert found.state == BROKEN and "no controller" in found.about


def test_doctor_leaves_torch_to_a_process_of_its_own():
    code = "import sys; from backbench.cli import doctor; doctor.packages(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def last_line(capsys, root):
    program.main(["doctor", "--data", str(root)])
    return capsys.readouterr().out.splitlines()[-1]


def test_it_ends_on_what_to_type(tmp_path, quick, monkeypatch, capsys):
    line = last_line(capsys, tmp_path)
    assert line.startswith("type     backbench demo --size tiny; or, with images")
    class_folder(tmp_path / "my pets", classes="ab", per=3)
    line = last_line(capsys, tmp_path)
    assert f"--data '{tmp_path}/my pets' --out runs" in line
    missing = Finding("package", "x", MISSING, "not installed")
    monkeypatch.setattr(doctor, "packages", lambda: [missing])
    assert last_line(capsys, tmp_path) == f"type     {sys.executable} -m pip install x"


def test_apples_gpu_is_said_not_to_be_used(monkeypatch):
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(doctor, "_asked", lambda *_: Finding("device", "torch", OK))
    assert "mps) is not used" in doctor.device().about
