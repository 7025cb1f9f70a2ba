"""doctor says what is here and what that allows; a broken or missing part is named, not raised."""

import json
import os
import subprocess
import sys

import pytest

from backbench import cli
from backbench.verbs import doctor


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.15.0+cu130", ">=2.11,<2.16", True),
        ("2.16.0", ">=2.11,<2.16", False),
        ("2.9.1", ">=2.11", False),
        ("0.1.9", ">=0.1.7,<0.1.10", True),
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
    assert doctor.packages()["packaging"]["state"] == "missing"


def test_doctor_here(tiny_root, capsys):
    assert cli.main(["doctor", "--data", str(tiny_root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"]["state"] == "ok"
    assert found["devices"]["ops"] is True
    assert {"digits", "scenes"} <= set(found["data"]["there"])
    assert "imagenet" in found["data"]["not_there"]
    assert found["data"]["lists"] == ["10percent.txt", "1percent.txt"]
    assert found["allows"]["pretrain"]["state"] == "ok"
    doctor._print(found)
    shown = capsys.readouterr().out
    for verb in found["allows"]:
        assert verb in shown


def test_missing_things_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.slurm() == {"state": "missing", "why": "no sbatch on PATH"}
    found = {
        "packages": {"torch": {"state": "ok"}, "hotcoco": {"state": "missing"}},
        "devices": {"state": "ok", "gpus": []},
        "data": doctor.datasets(tmp_path),
        "detectron2": {"state": "missing", "why": "not built"},
        "slurm": {"state": "missing", "why": "no sbatch on PATH"},
    }
    allowed = doctor.allows(found)
    assert {about["state"] for about in allowed.values()} == {"missing"}
    assert allowed["demo"]["why"] == "not installed: hotcoco"
    del found["packages"]["hotcoco"]
    allowed = doctor.allows(found)
    assert allowed["demo"]["state"] == "ok"
    assert allowed["detect (detectron2)"] == {"state": "missing", "why": "not built"}
    assert allowed["detect (torchvision)"]["state"] == "missing"


def test_a_slurm_that_does_not_answer_is_broken(tmp_path, monkeypatch):
    for name, text in (
        ("sbatch", "exit 0"),
        ("sinfo", "echo 'slurm_load_partitions: no controller' >&2; exit 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = doctor.slurm()
    assert found["state"] == "broken"
    assert "no controller" in found["why"]


def test_doctor_leaves_torch_to_a_process_of_its_own():
    code = "import sys; from backbench.verbs import doctor; doctor.packages(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
