"""kill -9 at a random step and while the state is written, SIGTERM, SIGUSR2, another number of
loader workers: the digest is that of a run left alone. In real processes."""

import random
import signal
import time

import pytest
from support.tiny_pretraining import HEAD, SIMCLR, crops, digest, recipe, start

from backbench.errors import EXIT_PREEMPTED

METHODS = {
    "lorac": {"name": "lorac", "queue": 64, "head": HEAD, "prior_from": 0.5, "beta": 2.0},
    "jcl": {"name": "jcl", "queue": 64, "head": HEAD},
    "mio": {"name": "mio", "head": HEAD, "l2_weight": 1.0},
    "arb": {"name": "arb", "head": HEAD, "groups": 2},
    "cllr": {"name": "cllr", "rows": 16, "inner": SIMCLR},
    "simclr": SIMCLR,
}
LONGER = {"optim": {"name": "sgd", "lr": 0.02}, "epochs": 6, "save_minutes": 0.0}


@pytest.fixture(scope="module")
def root(shapes):
    root = shapes()
    for name, method in METHODS.items():
        views = crops(count=3 if name in ("lorac", "jcl") else 2)
        (root / f"{name}.yaml").write_text(recipe(method=method, views=views, **LONGER))
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
            pytest.fail(f"the run ended before it could be interrupted: {finish(process)}")
        time.sleep(0.001)
    return value


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_killed_and_continued_equals_left_alone(root, tmp_path, name):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    alone = start(root, whole, f"{name}.yaml")

    process = start(root, parts, f"{name}.yaml")  # kill -9 at a random step
    step = random.Random(name).randint(2, 5)
    wait_for(lambda: rows(parts) >= step, process)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL

    process = start(
        root, parts, f"{name}.yaml", "--workers", "2"
    )  # kill -9 while the state is half written
    before = rows(parts)
    wait_for(lambda: rows(parts) > before and list(parts.glob(".state.pt.*.tmp")), process)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert (parts / "state.pt").exists()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        process = start(root, parts, f"{name}.yaml", "--workers", str(number % 2))
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

    process = start(root, parts, f"{name}.yaml")
    status, said = finish(process)
    assert status == 0, said
    assert finish(alone)[0] == 0
    assert digest(parts) == digest(whole)
    left = {p.name for p in parts.iterdir()}
    assert left == {p.name for p in whole.iterdir()}  # no old states, no temporary files
    assert sum(name.startswith("state") for name in left) == 1
