"""Signals at random times, to the process and to its group, over all verbs that run for long: each
run ends with 75, by Ctrl-C or killed, never by a fault of backbench, and the numbers that were put
together are those of the run that was left alone.

BACKBENCH_SIGNALS is how many in all; they are drawn from a seed."""

import contextlib
import os
import random
import signal
import time

import pytest
from support.weather import VERBS, command, warm

from backbench.results import store
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.weights.checkpoint import Checkpoint

SIGNALS = int(os.environ.get("BACKBENCH_SIGNALS", "200"))
SENT = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGKILL")


def numbers(out):
    """What a run was for; its rows once each."""
    if (out / CHECKPOINT_FILE).exists():
        return Checkpoint.load(out / CHECKPOINT_FILE).digest
    rows, problems = store.read(out)
    assert not problems
    values = {(row.checkpoint, row.column): row.value for row in rows}
    assert len(values) == len(rows), "a row was appended twice"
    return values


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
            run = runs.start(command(verb, tiny_root, trunk, out), BACKBENCH_CACHE=cache)
            time.sleep(draw.uniform(0, 0.7 * took))
            name, to_all = draw.choice(SENT), draw.random() < 0.5
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if to_all else os.kill)(run.pid, signal.Signals[name])
            status, said = run.wait()
            where = f"{verb}, {name} to {'the group' if to_all else 'the process'}: {said[-1000:]}"
            assert "fault of backbench" not in said, where
            # Behind the end of a run a Ctrl-C meets the interpreter, which says where it stood
            assert "Traceback" not in said or name == "SIGINT", where
            # Killed it may be by any of them: before the handlers are there, and behind the end
            ends = (75, 0, -signal.Signals[name], 130 if name == "SIGINT" else 75)
            assert status in ends, f"{status}: {where}"
            if status == 0:
                assert numbers(out) == expected
                finished += 1
            sent += status != 0  # the others came too late
        # 3. What is left, in peace
        status, said = runs(command(verb, tiny_root, trunk, tmp_path / f"parts-{finished}"))
        assert status == 0, said
        assert numbers(tmp_path / f"parts-{finished}") == expected
    print(f"{verb}: {sent} signals, {finished + 1} runs put together")
