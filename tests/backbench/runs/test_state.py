"""Atomic files, verified state, signals, seeds."""

import os
import signal
import threading
import time

import pytest
import torch

from backbench.errors import STOP_SIGNALS, BadInput, Preempted, Stopped
from backbench.runs import atomic, seeding, state
from backbench.runs.state import StopFlag, load_state, save_state, signals_blocked


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    atomic.write_text(path, "old")
    with pytest.raises(RuntimeError), atomic.atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_leftovers_of_killed_writers_go(tmp_path):
    atomic.write_text(tmp_path / "state.pt", "x")
    (tmp_path / ".state.pt.abc.tmp").write_text("half")
    atomic.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_state_comes_back_bit_for_bit(tmp_path):
    tensor = torch.randn(3, 5).to(memory_format=torch.contiguous_format)
    nested = {"t": tensor, "half": tensor.half()}
    state = {"step": 7, "nested": nested, "list": [{"loss": torch.tensor(1.5)}]}
    save_state(tmp_path / "s.pt", state)
    back = load_state(tmp_path / "s.pt")
    assert back["step"] == 7
    assert torch.equal(back["nested"]["t"], tensor)
    assert back["nested"]["half"].dtype == torch.float16
    assert float(back["list"][0]["loss"]) == 1.5


@pytest.mark.parametrize("where", ["start", "middle", "end"])
def test_damaged_state_is_refused_and_named(tmp_path, where):
    path = tmp_path / "s.pt"
    save_state(path, {"x": torch.arange(1000.0)})
    data = bytearray(path.read_bytes())
    at = {"start": 3, "middle": len(data) // 2, "end": len(data) - 1}[where]
    data[at] ^= 1
    for damaged in (data, data[: len(data) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"s\.pt.*remove it"):
            load_state(path)


def test_state_runs_no_code_when_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    save_state(tmp_path / "s.pt", {"x": Evil()})
    with pytest.raises(BadInput) as refused:
        load_state(tmp_path / "s.pt")
    assert str(refused.value) == (
        f"{tmp_path / 's.pt'}: another version wrote this state; remove it to start over"
    )
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_signals_raise_the_flag_and_nothing_else(name):
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.01)
        assert stop.requested == name
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_waits_until_a_loader_is_made():
    """Also where another thread receives it: the handler would run in this one."""
    over = threading.Event()
    other = threading.Thread(target=over.wait, daemon=True)
    other.start()
    with StopFlag() as stop:
        with signals_blocked():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            assert stop.requested is None
        assert stop.requested == "SIGTERM"
    with StopFlag() as stop, pytest.raises(RuntimeError), signals_blocked():
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("no worker can be forked")
    assert stop.requested == "SIGTERM", "it is not lost with the loader"
    over.set()
    other.join()


def handlers():
    return [signal.getsignal(getattr(signal, name)) for name in STOP_SIGNALS]


@pytest.mark.parametrize("listening", [StopFlag, state.stops_at_once])
def test_all_handlers_are_as_they_were_afterwards(listening):
    before = handlers()
    assert len(before) > 2
    with listening():
        (within,) = set(handlers())
        assert within not in before
    assert handlers() == before


def test_all_signals_that_came_meanwhile_are_handled_at_the_end():
    came = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = {n: signal.signal(n, lambda n, _: came.append(n)) for n in numbers}
    try:
        with state.signals_blocked():
            for number in numbers:
                signal.raise_signal(number)
            assert came == []
        assert sorted(came) == list(numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_second_interrupt_ends_at_once_and_other_signals_do_not():
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == "SIGINT"
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_wait_within_a_step_ends_so_long_after_the_signal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(state.time, "monotonic", lambda: now[0])
    with StopFlag() as outer, StopFlag() as inner:
        state.stop_if_asked_for(0.0)
        inner.end_here("between two fits")
        signal.raise_signal(signal.SIGUSR1)
        said = "stopped by SIGUSR1 between two fits; the same command continues"
        with pytest.raises(Preempted, match=f"^{said}$"):
            inner.end_here("between two fits")
        now[0] = 105.75
        state.stop_if_asked_for(6.0)
        now[0] = 106.0
        with pytest.raises(Stopped, match="SIGUSR1"):
            state.stop_if_asked_for(6.0)
        assert outer.requested is None
    state.stop_if_asked_for(0.0)


def test_a_stop_outside_of_loops_is_raised_and_noted():
    with state.stops_at_once() as raised:
        for name in ("SIGTERM", "SIGUSR2"):
            with pytest.raises(Stopped, match=name):
                signal.raise_signal(getattr(signal, name))
        assert raised == ["SIGTERM", "SIGUSR2"]


def test_seeds_depend_on_every_part_and_on_nothing_else():
    assert seeding.seed_of(0, "views", 1, 2) == seeding.seed_of(0, "views", 1, 2)
    parts = [
        (0, "views", 1, 2),
        (1, "views", 1, 2),
        (0, "order", 1, 2),
        (0, "views", 2, 2),
        (0, "views", 12),
    ]
    assert len({seeding.seed_of(*p) for p in parts}) == len(parts)
    a, b = (torch.rand(3, generator=seeding.generator(0, "x")) for _ in range(2))
    assert torch.equal(a, b)
    seeding.seed_everything(3, "step", 4)
    c = torch.rand(2)
    seeding.seed_everything(3, "step", 4)
    assert torch.equal(c, torch.rand(2))
