"""What is shown of the log's levels, and how a signal ends a process that has nothing to save."""

import logging
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from backbench.errors import EXIT_PREEMPTED, STOP_SIGNALS, Stopped
from backbench.runs import stopping, terminal
from backbench.runs.terminal import log


@pytest.fixture(autouse=True)
def level():
    """The level of the log comes back."""
    before = log.level
    yield
    log.setLevel(before)


@pytest.mark.parametrize(
    ("verbosity", "level"),
    [
        (-1, logging.WARNING),
        (0, logging.INFO),
        (1, logging.DEBUG),
        (2, logging.DEBUG),
    ],
)
def test_a_verbosity_is_a_level_of_our_log(verbosity, level):
    terminal.setup_logging(verbosity)
    assert log.level == level
    terminal.setup_logging()
    assert log.level == logging.INFO


def test_while_something_is_tried_out_only_warnings_are_shown(caplog):
    log.setLevel(logging.DEBUG)
    with pytest.raises(ZeroDivisionError), terminal.quiet():
        log.info("kept to itself")
        log.warning("shown")
        raise ZeroDivisionError
    log.debug("shown again")
    assert caplog.messages == ["shown", "shown again"]


# Stop signals


class Left(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch):
    """What is written by a process that ends, and its exit status."""
    found = []

    def leave(status):
        found.append(status)
        raise Left

    monkeypatch.setattr(os, "write", lambda *words: found.append(words))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    numbers = [getattr(signal, name) for name in STOP_SIGNALS]
    before = {number: signal.getsignal(number) for number in numbers}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def line(name):
    return 2, f"backbench: stopped by {name}; the same command continues\n".encode()


def test_every_stop_signal_ends_the_process_plainly(ends):
    stopping.listen()
    heard = [signal.getsignal(getattr(signal, name)) for name in STOP_SIGNALS]
    assert heard == [stopping._leave] * len(STOP_SIGNALS)
    for name in STOP_SIGNALS:
        ends.clear()
        with pytest.raises(Left):
            signal.raise_signal(getattr(signal, name))
        assert ends == [line(name), EXIT_PREEMPTED]
    assert sys.unraisablehook is stopping._unraisable


@pytest.mark.parametrize(
    ("error", "name"),
    [(Stopped("SIGTERM"), "SIGTERM"), (KeyboardInterrupt(), "SIGINT")],
)
def test_a_signal_that_comes_in_a_destructor_ends_it_too(ends, error, name):
    with pytest.raises(Left):
        stopping._unraisable(SimpleNamespace(exc_type=type(error), exc_value=error))
    assert ends == [line(name), EXIT_PREEMPTED]


def test_other_errors_of_a_destructor_are_pythons_affair(ends, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "__unraisablehook__", told.append)
    what = SimpleNamespace(exc_type=ValueError, exc_value=ValueError("SIGTERM"))
    stopping._unraisable(what)
    assert (told, ends) == ([what], [])
