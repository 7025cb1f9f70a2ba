"""kill -9 at a random step and while the state is written, SIGTERM, SIGUSR2, another number of
loader workers: the run that was put together ends with the digest of the one that was left alone.
In real processes."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from backbench.errors import EXIT_PREEMPTED
from backbench.weights.checkpoint import Checkpoint

HEAD = "head: {hidden: 32, dim: 16}"
METHODS = {
    "lorac": f"{{name: lorac, queue: 64, {HEAD}, prior_from: 0.5, beta: 2.0}}",
    "jcl": f"{{name: jcl, queue: 64, {HEAD}}}",
    "mio": f"{{name: mio, {HEAD}, l2_weight: 1.0}}",
    "arb": f"{{name: arb, {HEAD}, groups: 2}}",
    "cllr": f"{{name: cllr, rows: 16, inner: {{name: simclr, {HEAD}}}}}",
    "simclr": f"{{name: simclr, {HEAD}}}",
}
RECIPE = """
name: tiny
arch: resnet18
method: {method}
data: {{dataset: shapes, workers: 0}}
views: {{crops: [{{count: {views}, size: 16}}]}}
optim: {{name: sgd, lr: 0.02}}
epochs: 6
batch_size: 8
log_every: 1
save_minutes: 0.0
"""


@pytest.fixture(scope="module")
def root(shapes):
    root = shapes()
    for name, method in METHODS.items():
        views = 3 if name in ("lorac", "jcl") else 2
        (root / f"{name}.yaml").write_text(RECIPE.format(method=method, views=views))
    return root


def start(root, out, name, *options):
    command = [sys.executable, "-m", "backbench", "pretrain", str(root / f"{name}.yaml")]
    command += ["--data", str(root), "--out", str(out), "--accelerator", "cpu", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process):
    said = process.communicate(timeout=500)[1]
    return process.returncode, said


def rows(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(condition, process):
    """Poll until `condition()`; its value. Fails when the process ends before."""
    while not (value := condition()):
        if process.poll() is not None:
            pytest.fail(f"the run ended before it could be interrupted: {finish(process)}")
        time.sleep(0.001)
    return value


def digest(out):
    return Checkpoint.load(out / "backbone.safetensors").digest


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_killed_and_continued_equals_left_alone(root, tmp_path, name):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    alone = start(root, whole, name)

    process = start(root, parts, name)  # kill -9 at a random step
    step = random.Random(name).randint(2, 5)
    wait_for(lambda: rows(parts) >= step, process)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL

    process = start(root, parts, name, "--workers", "2")  # kill -9 while the state is half written
    before = rows(parts)
    wait_for(lambda: rows(parts) > before and list(parts.glob(".state.pt.*.tmp")), process)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert (parts / "state.pt").exists()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        process = start(root, parts, name, "--workers", str(number % 2))
        before = rows(parts)
        wait_for(lambda: rows(parts) > before, process)  # noqa: B023 - used at once
        asked = time.monotonic()
        process.send_signal(number)
        status, said = finish(process)
        assert time.monotonic() - asked < 60
        if status == 0:
            break  # the last step was already being made
        assert status == EXIT_PREEMPTED, said
        assert "state saved" in said

    process = start(root, parts, name)
    status, said = finish(process)
    assert status == 0, said
    assert finish(alone)[0] == 0
    assert digest(parts) == digest(whole)
    left = {p.name for p in parts.iterdir()}
    assert left == {p.name for p in whole.iterdir()}  # no old states, no temporary files
    assert sum(name.startswith("state") for name in left) == 1
