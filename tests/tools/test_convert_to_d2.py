"""python tools/convert_to_d2.py X OUT.pkl, as people run it."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchvision.models import resnet18

from backbench.weights import importing

TOOL = Path(__file__).parents[2] / "tools" / "convert_to_d2.py"


def run(*arguments):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_converts_any_importable_file_and_refuses_others(tmp_path):
    torch.manual_seed(0)
    state = {f"module.encoder_q.{k}": v for k, v in resnet18().state_dict().items()}
    torch.save({"epoch": 200, "state_dict": state}, tmp_path / "moco.pth.tar")
    done = run(tmp_path / "moco.pth.tar", tmp_path / "out.pkl")
    assert done.returncode == 0, done.stderr
    assert "STRIDE_IN_1X1 False" in done.stdout
    content = pickle.loads((tmp_path / "out.pkl").read_bytes())
    assert len(content["model"]) == 120
    original, back = importing.read(tmp_path / "moco.pth.tar"), importing.read(tmp_path / "out.pkl")
    assert (back.digest, back.name, back.epochs) == (original.digest, "moco", 200)

    torch.save({k.replace("layer4", "layer5"): v for k, v in state.items()}, tmp_path / "bad.pth")
    done = run(tmp_path / "bad.pth", tmp_path / "bad.pkl")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "missing: module.encoder_q.layer4.0.conv1.weight" in done.stderr
    assert not (tmp_path / "bad.pkl").exists()
