"""One batch in one process and in several: the same weights; kill -9 and signals at any step."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import tiny_pretraining
from support.tiny_pretraining import HEAD, SIMCLR, crops, digest, recipe

from backbench.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED
from backbench.runs.step_metrics import read_metrics
from backbench.weights.checkpoint import Checkpoint

STEADY = {"name": "sgd", "lr": 0.001, "weight_decay": 0.0}
MOCO = tiny_pretraining.MOCO.replace("}}", "}, groups: 2}")


@pytest.fixture(scope="module")
def root(shapes):
    root = shapes(16, "ab", 32)
    views = tiny_pretraining.crops(32, blur_p=0.0)
    # The whole trunk: steps that take a while, as signals come between them
    about = {"arch": "resnet18", "views": views, "optim": STEADY}
    (root / "tiny.yaml").write_text(tiny_pretraining.recipe(**about))
    return root


def start(root, out, processes, *overrides):
    words = (*overrides, "--devices", str(processes))
    return tiny_pretraining.start(root, out, "tiny.yaml", *words)


def pretrain(root, out, processes, *overrides):
    return finish(start(root, out, processes, *overrides))


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
    # In float32 a fresh ResNet-18's rounding at 32 pixels grows to 1% within four steps
    for n in (1, 2):
        status, said = pretrain(
            root, tmp_path / str(n), n, "precision=fp64", *overrides
        )
        assert status == 0, said
    assert apart(tmp_path / "1", tmp_path / "2") < 1e-5
    one, two = ([row["loss"] for row in read_metrics(tmp_path / n)] for n in "12")
    # Losses stand there as they are: the first are of the same weights
    assert one[0] == pytest.approx(two[0], rel=1e-12)
    assert one == pytest.approx(two, rel=1e-6)


def stopped_after_a_row(process, out):
    """A signal as soon as the metrics have a row; what the process said on its way out."""
    while len(read_metrics(out)) < 1:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    status, said = finish(process)
    assert status == EXIT_PREEMPTED, said
    return said


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_and_they_continue_exactly(root, tmp_path):
    assert pretrain(root, tmp_path / "whole", 2)[0] == 0
    out = tmp_path / "parts"
    said = stopped_after_a_row(start(root, out, 2), out)
    assert said.count("state saved") == 1
    assert pretrain(root, out, 2)[0] == 0
    assert tiny_pretraining.digest(tmp_path / "whole") == tiny_pretraining.digest(out)


@pytest.mark.slow
def test_a_killed_first_process_takes_the_others_along(root, tmp_path):
    """Even one that hangs, as in a collective on a GPU: its memory is free for the next attempt."""
    process = start(root, tmp_path, 2)
    while len(read_metrics(tmp_path)) < 1:
        assert process.poll() is None
        time.sleep(0.002)
    (child,) = (
        Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    )
    os.kill(int(child), signal.SIGSTOP)
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    about = Path(f"/proc/{child}/stat")
    while about.exists() and about.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_processes(root, tmp_path):
    # Four images to a group: with two, on 1x1 maps, rounding grows a thousandfold in a step
    same = ("precision=fp64", "accumulate=2", "batch_size=16", "epochs=4", MOCO)
    assert pretrain(root, tmp_path / "whole", 1, *same)[0] == 0
    out = tmp_path / "parts"
    stopped_after_a_row(start(root, out, 2, *same), out)
    status, said = pretrain(root, out, 4, *same)
    assert status == 0 and "continuing at step" in said, said
    assert apart(tmp_path / "whole", out) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(960)  # eight processes on two busy cores
def test_the_tutorials_command_for_eight_gpus(shapes, tmp_path):
    """On 32 tiny images: a group of the keys' batch norm spans two of the eight processes."""
    words = "backbench pretrain lorac/lorac_imagenet --data ROOT --out runs/lorac --devices 8"
    assert words in (Path(__file__).parents[2] / "docs" / "index.md").read_text()
    root = shapes(32, "ab", 40)
    (root / "shapes").rename(root / "imagenet")
    crops = "views.crops=[{count: 3, size: 32}, {count: 5, size: 24}]"
    tiny = [
        "arch=resnet18",
        crops,
        "batch_size=16",
        "method.queue=64",
        "epochs=2",
        "log_every=1",
    ]
    words = words.replace("ROOT", str(root)).replace("runs/", f"{tmp_path}/")
    command = [sys.executable, "-m", *words.split(), *tiny, "--accelerator", "cpu"]
    done = subprocess.run(
        [*command, "--workers", "0"],
        check=False,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # The last epoch's steps have the prior; with it the loss is higher
    assert [row["step"] for row in read_metrics(tmp_path / "lorac")] == [0, 1, 2, 3]
    assert Checkpoint.load(tmp_path / "lorac" / "backbone.safetensors").epochs == 2


@pytest.mark.slow
def test_an_unreadable_image_on_the_second_process_is_told_by_the_first(root, tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(root, copy)
    for image in (copy / "shapes" / "train" / "b").iterdir():
        image.write_bytes(b"no image")
    status, said = pretrain(copy, tmp_path / "run", 2)
    assert status == EXIT_BAD_INPUT, said
    assert said.count("corrupt image") == 1
    assert "Traceback" not in said


METHODS = {
    "lorac": {
        "name": "lorac",
        "queue": 64,
        "head": HEAD,
        "prior_from": 0.5,
        "beta": 2.0,
    },
    "jcl": {"name": "jcl", "queue": 64, "head": HEAD},
    "mio": {"name": "mio", "head": HEAD, "l2_weight": 1.0},
    "arb": {"name": "arb", "head": HEAD, "groups": 2},
    "cllr": {"name": "cllr", "rows": 16, "inner": SIMCLR},
    "simclr": SIMCLR,
}
LONGER = {"optim": {"name": "sgd", "lr": 0.02}, "epochs": 6, "save_minutes": 0.0}


@pytest.fixture(scope="module")
def recipes(shapes):
    root = shapes()
    for name, method in METHODS.items():
        views = crops(count=3 if name in ("lorac", "jcl") else 2)
        (root / f"{name}.yaml").write_text(
            recipe(arch="resnet18", method=method, views=views, **LONGER)
        )
    return root


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
            pytest.fail(
                f"the run ended before it could be interrupted: {finish(process)}"
            )
        time.sleep(0.001)
    return value


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_killed_and_continued_equals_left_alone(recipes, tmp_path, name):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    alone = tiny_pretraining.start(recipes, whole, f"{name}.yaml")
    # kill -9 at a random step
    process = tiny_pretraining.start(recipes, parts, f"{name}.yaml")
    step = random.Random(name).randint(2, 5)
    wait_for(lambda: rows(parts) >= step, process)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    # kill -9 while the state is half written
    process = tiny_pretraining.start(recipes, parts, f"{name}.yaml", "--workers", "2")
    before = rows(parts)
    wait_for(
        lambda: rows(parts) > before and list(parts.glob(".state.pt.*.tmp")), process
    )
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert (parts / "state.pt").exists()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        workers = ("--workers", str(number % 2))
        process = tiny_pretraining.start(recipes, parts, f"{name}.yaml", *workers)
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
    process = tiny_pretraining.start(recipes, parts, f"{name}.yaml")
    status, said = finish(process)
    assert status == 0, said
    assert finish(alone)[0] == 0
    assert digest(parts) == digest(whole)
    # No old states and no temporary files are left
    left = {p.name for p in parts.iterdir()}
    assert left == {p.name for p in whole.iterdir()}
    assert [name for name in left if name.startswith("state")] == ["state.pt"]
