"""One global batch in one process and in two or four: the same weights, one story told once."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from backbench.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED
from backbench.runs.folder import read_metrics
from backbench.weights.checkpoint import Checkpoint

RECIPE = """
name: tiny
arch: resnet18
method: {name: simclr, head: {hidden: 32, dim: 16}}
data: {dataset: shapes, workers: 0}
views: {crops: [{count: 2, size: 32, blur_p: 0.0}]}
optim: {name: sgd, lr: 0.001, weight_decay: 0.0}
epochs: 2
batch_size: 8
log_every: 1
"""
MOCO = "method={name: moco, queue: 64, head: {hidden: 32, dim: 16, batchnorm: false}, groups: 2}"


@pytest.fixture(scope="module")
def root(shapes):
    root = shapes(16, "ab", 32)
    (root / "tiny.yaml").write_text(RECIPE)
    return root


def start(root, out, processes, *overrides):
    command = [sys.executable, "-m", "backbench", "pretrain", str(root / "tiny.yaml"), *overrides]
    command += [
        "--data",
        str(root),
        "--out",
        str(out),
        "--accelerator",
        "cpu",
        "--devices",
        str(processes),
    ]
    return subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )


def pretrain(root, out, processes, *overrides):
    process = start(root, out, processes, *overrides)
    said = process.communicate(timeout=500)[1]
    return process.returncode, said


def apart(a, b):
    """Relative difference of two checkpoints' weights, as one vector."""
    a, b = (Checkpoint.load(x / "backbone.safetensors").state_dict for x in (a, b))
    floats = [k for k in a if a[k].is_floating_point()]
    x, y = (torch.cat([s[k].flatten().double() for k in floats]) for s in (a, b))
    return float((x - y).norm() / x.norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [[], [MOCO]], ids=["synchronised batch norm", "batch norm in groups"]
)
def test_two_processes_make_the_weights_of_one(root, tmp_path, overrides):
    # In float32 the rounding of a fresh ResNet-18 at 32 pixels (1x1 maps, batch 8) grows to 1%
    # within four steps
    for processes in (1, 2):
        status, said = pretrain(
            root, tmp_path / str(processes), processes, "precision=fp64", *overrides
        )
        assert status == 0, said
    assert apart(tmp_path / "1", tmp_path / "2") < 1e-5
    one, two = ([row["loss"] for row in read_metrics(tmp_path / n)] for n in "12")
    assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_and_they_continue_exactly(root, tmp_path):
    assert pretrain(root, tmp_path / "whole", 2)[0] == 0
    out = tmp_path / "parts"
    process = start(root, out, 2)
    while len(read_metrics(out)) < 1:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=500)[1]
    assert process.returncode == EXIT_PREEMPTED, said
    assert said.count("state saved") == 1
    status, said = pretrain(root, out, 1)
    assert status == EXIT_BAD_INPUT
    assert "processes (2 there, 1 now)" in said
    assert pretrain(root, out, 2)[0] == 0
    digests = {
        Checkpoint.load(x / "backbone.safetensors").digest for x in (tmp_path / "whole", out)
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_an_unreadable_image_on_the_second_process_is_told_by_the_first(root, tmp_path):
    import shutil

    copy = tmp_path / "data"
    shutil.copytree(root / "shapes", copy / "shapes")
    for image in (copy / "shapes" / "train" / "b").iterdir():
        image.write_bytes(b"no image")
    command = [
        sys.executable,
        "-m",
        "backbench",
        "pretrain",
        str(root / "tiny.yaml"),
        "--data",
        str(copy),
    ]
    command += ["--out", str(tmp_path / "run"), "--accelerator", "cpu", "--devices", "2"]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == EXIT_BAD_INPUT, done.stderr
    assert done.stderr.count("corrupt image") == 1
    assert "Traceback" not in done.stderr
