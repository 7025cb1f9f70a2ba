"""clean removes only what a finished run no longer needs, and only when told to."""

import json
import os
import time

import pytest
import torch
from support.records import a_result

from backbench.cli import clean, program
from backbench.records import store
from backbench.runs.folder import open_run
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import build_backbone


def a_run(root, verb):
    with open_run(root, verb=verb, identity={}) as run:
        pass
    (run / "state.pt").write_bytes(b"s" * 50_000)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


@pytest.fixture
def runs(tmp_path):
    trunk = build_backbone("resnet18", "imagenet").state_dict()
    done = a_run(tmp_path / "runs" / "done", "pretrain")
    made = Checkpoint(arch="resnet18", method="random", state_dict=trunk)
    made.save(done / "backbone.safetensors")
    torn = a_run(tmp_path / "runs" / "torn", "pretrain")
    (torn / "backbone.safetensors").write_bytes(
        (done / "backbone.safetensors").read_bytes()[:-100]
    )
    a_run(tmp_path / "runs" / "going", "pretrain")
    detector = a_run(tmp_path / "runs" / "nested" / "detector", "detect")
    store.append(detector, [a_result()])
    # May hold the state of its next dataset
    probe = a_run(tmp_path / "runs" / "probe", "linear")
    store.append(probe, store.read(detector)[0])
    old, new = done / ".state.pt.abc.tmp", done / ".state.pt.def.tmp"
    (done / "predictions").mkdir()
    for file in (old, new, done / "predictions" / "p.npz"):
        file.write_bytes(b"t" * 9000)
    os.utime(old, (time.time() - 7200,) * 2)
    return tmp_path / "runs"


def files(root):
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def test_only_listed_until_told(runs, capsys):
    before = files(runs)
    assert program.main(["clean", str(runs)]) == 0
    assert files(runs) == before
    shown = capsys.readouterr().out
    assert "nothing was removed" in shown
    assert "can go" in shown


def test_what_goes_and_what_stays(runs, capsys):
    before = files(runs)
    assert program.main(["clean", str(runs), "--yes"]) == 0
    gone = {"done/state.pt", "done/.state.pt.abc.tmp", "nested/detector/state.pt"}
    assert before - files(runs) == gone
    kept = Checkpoint.load(runs / "done" / "backbone.safetensors").state_dict[
        "bn1.weight"
    ]
    assert torch.equal(kept, torch.ones(64))
    assert program.main(["clean", str(runs), "--yes"]) == 0
    assert "0 B can go" in capsys.readouterr().out


def test_sizes_and_states(runs):
    inside = runs / "done" / "predictions"
    held = {h.run.name: h for h in clean.held([runs, runs / "done", inside])}
    finished = {name for name, each in held.items() if each.finished}
    assert finished == {"detector", "done", "probe"} == held.keys() - {"going", "torn"}
    files = [file for file in held["done"].run.rglob("*") if file.is_file()]
    assert (
        held["done"].size
        == sum(file.stat().st_blocks * 512 for file in files)
        > 40_000_000
    )
    alone = {h.run.name: h.size for h in clean.held([runs])}
    assert alone == {name: h.size for name, h in held.items()}, (
        "a folder named twice counts once"
    )


def test_each_folder_that_is_given_is_looked_through(runs):
    held = clean.held([runs / "done", runs / "nested"])
    assert [each.run.name for each in held] == ["done", "detector"]


def test_a_damaged_run_file_keeps_everything(runs):
    (runs / "done" / "run.json").write_text("{")
    can_go = [file for held in clean.held([runs]) for file, _, _ in held.removable]
    assert runs / "done" / "state.pt" not in can_go
    assert json.loads((runs / "going" / "run.json").read_text())["verb"] == "pretrain"


def test_no_folder(tmp_path, bad_input):
    bad_input(program.main(["clean", str(tmp_path / "nowhere")]), "no such folder")
