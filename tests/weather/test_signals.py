"""BACKBENCH_SIGNALS random signals over all long verbs: exit 75 or death, then the same numbers."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.weather import VERBS, command, numbers, warm

from backbench.errors import STOP_SIGNALS, BadInput
from backbench.runs.ending import guarded

SIGNALS = int(os.environ.get("BACKBENCH_SIGNALS", "200"))
HOME = Path(__file__).parents[2]
SENT = (*STOP_SIGNALS, "SIGKILL")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", VERBS)
def test_any_signal_at_any_time(verb, tiny_root, trunk, tmp_path):
    draw = random.Random(verb)
    wanted = SIGNALS // len(VERBS) + 1
    with warm(tmp_path / "warm") as runs:
        # 1. Left alone
        began = time.monotonic()
        status, said = runs(command(verb, tiny_root, trunk, tmp_path / "alone"))
        took = time.monotonic() - began
        assert status == 0, said
        expected = numbers(tmp_path / "alone")
        # 2. Never left alone; a run that ends all the same is compared, and another one begun
        sent = finished = tries = 0
        while sent < wanted and tries < 3 * wanted:
            tries += 1
            out = tmp_path / f"parts-{finished}"
            cache = str(tmp_path / f"cache-{finished}")
            run = runs.start(
                command(verb, tiny_root, trunk, out), BACKBENCH_CACHE=cache
            )
            time.sleep(draw.uniform(0, 0.7 * took))
            name, to_all = draw.choice(SENT), draw.random() < 0.5
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if to_all else os.kill)(run.pid, signal.Signals[name])
            status, said = run.wait()
            where = f"{verb}, {name} to {'the group' if to_all else 'the process'}: {said[-1000:]}"
            assert "fault of backbench" not in said and "Traceback" not in said, where
            # 0: it was through. Killed it may be by nothing but what cannot be heard
            assert status in ((0, -9) if name == "SIGKILL" else (0, 75)), (
                f"{status}: {where}"
            )
            if status == 0:
                assert numbers(out) == expected
                finished += 1
            sent += status != 0  # the others came too late
        # 3. What is left, in peace
        status, said = runs(
            command(verb, tiny_root, trunk, tmp_path / f"parts-{finished}")
        )
        assert status == 0, said
        assert numbers(tmp_path / f"parts-{finished}") == expected
    print(f"{verb}: {sent} signals, {finished + 1} runs put together")


# Before a verb and behind it: a process of its own
def listening(process):
    """Wait until Python is through with its own start and the first line of backbench has run."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = next(
            line for line in status.read_text().splitlines() if "SigCgt" in line
        )
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.002)


@pytest.mark.parametrize("name", STOP_SIGNALS)
@pytest.mark.parametrize("program", ["-m backbench detect", "detection/train_net.py"])
def test_a_signal_during_the_imports(name, program, tmp_path):
    command = [
        sys.executable,
        *program.split(),
        "--config-file",
        "tiny_faster_rcnn_R_18_FPN",
    ]
    command = [*command, "--out", tmp_path]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=HOME)
    listening(process)
    time.sleep(random.Random(name + program).uniform(0, 0.3))
    process.send_signal(signal.Signals[name])
    said = process.communicate()[1]
    assert process.returncode == 75, said
    assert said == f"backbench: stopped by {name}; the same command continues\n"


SELF = "import atexit, os, signal\nfrom backbench.__main__ import listen, program\n"
BEHIND = "atexit.register(os.kill, os.getpid(), signal.{name})\nraise SystemExit(program({words}))"
IN_A_DESTRUCTOR = """
from backbench.runs.state import stops_at_once
class Last:
    def __del__(self): signal.raise_signal(signal.{name})
listen()
with stops_at_once(): Last()
print("went on")
"""


@pytest.mark.parametrize("name", STOP_SIGNALS)
@pytest.mark.parametrize(("words", "status"), [(["data", "list"], 0), (["lienar"], 2)])
def test_a_signal_behind_the_end_is_not_heard(name, words, status):
    code = SELF + BEHIND.format(name=name, words=words)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr and "stopped by" not in done.stderr


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_a_signal_in_a_destructor_is_not_lost(name):
    code = SELF + IN_A_DESTRUCTOR.format(name=name)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (75, ""), done.stderr
    assert done.stderr == f"backbench: stopped by {name}; the same command continues\n"


@pytest.mark.parametrize("name", STOP_SIGNALS)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_signal_outside_the_loops(name, hidden, capsys):
    """Compiled code may make another error of it, as torch.tensor and safetensors do."""

    def reading():
        try:
            signal.raise_signal(getattr(signal, name))
        except BaseException:
            if hidden:
                raise BadInput("x.safetensors: damaged") from None
            raise

    assert guarded(reading) == 75
    assert (
        capsys.readouterr().err
        == f"backbench: stopped by {name}; the same command continues\n"
    )
