"""How a command ends: its status and its one line, whatever it raised."""

import logging
import signal

import pytest

from backbench.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    BadInput,
    Failed,
    Preempted,
    Stopped,
)
from backbench.runs import terminal
from backbench.runs.ending import guarded


@pytest.fixture(autouse=True)
def level():
    """The level of the log is the process's own."""
    before = terminal.log.level
    yield
    terminal.log.setLevel(before)


def raising(error):
    def action():
        raise error

    return action


SELF = "(this is a fault of backbench: --debug shows where)"
GOES_ON = "the same command continues"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (BadInput("a\n  b"), EXIT_BAD_INPUT, "a b"),
        (Failed("lost"), EXIT_FAILED, "lost"),
        (Preempted("stopped"), EXIT_PREEMPTED, "stopped"),
        (Stopped("SIGUSR1"), EXIT_PREEMPTED, f"stopped by SIGUSR1; {GOES_ON}"),
        (KeyboardInterrupt(), EXIT_PREEMPTED, f"stopped by SIGINT; {GOES_ON}"),
        (ValueError("odd\nvalue"), EXIT_FAILED, f"ValueError: odd value {SELF}"),
        (
            OSError(30, "x", "/d"),
            EXIT_BAD_INPUT,
            "/d: the disk is read-only; choose a place that can be written to",
        ),
        (SystemExit("why"), EXIT_FAILED, f"SystemExit: why {SELF}"),
    ],
)
def test_an_error_is_a_status_and_a_line(capsys, error, status, line):
    assert guarded(raising(error)) == status
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"backbench: {line}\n")


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (3, 3)])
def test_a_verb_that_exits_by_itself_has_said_why(capsys, code, status):
    assert guarded(raising(SystemExit(code))) == status
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (5, 5)])
def test_a_verbs_status_is_the_commands(returned, status):
    assert guarded(lambda: returned) == status


def test_a_debugged_error_is_raised_but_no_signal(capsys):
    with pytest.raises(BadInput, match="odd"):
        guarded(raising(BadInput("odd")), debug=True)
    assert guarded(raising(Stopped("SIGTERM")), debug=True) == EXIT_PREEMPTED
    assert guarded(raising(SystemExit(4)), debug=True) == 4


def test_a_signal_that_a_library_took_for_its_own_error_is_a_stop(capsys):
    def action():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Stopped:
            raise RuntimeError("a library failed") from None

    before = signal.getsignal(signal.SIGTERM)
    assert guarded(action) == EXIT_PREEMPTED
    assert capsys.readouterr().err == f"backbench: stopped by SIGTERM; {GOES_ON}\n"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("verbosity", "level"),
    [(-1, logging.WARNING), (0, logging.INFO), (1, logging.DEBUG), (2, logging.DEBUG)],
)
def test_how_much_is_told(verbosity, level):
    guarded(lambda: None, verbosity=verbosity)
    assert terminal.log.level == level
    with terminal.quiet():
        assert terminal.log.level == logging.WARNING
    assert terminal.log.level == level


def test_a_line_begins_below_one_that_is_written_over(capsys):
    terminal.show_live("half of it", last=False)
    assert guarded(raising(Failed("lost"))) == EXIT_FAILED
    assert capsys.readouterr().err == "\r\x1b[Khalf of it\nbackbench: lost\n"
    terminal.show_live("all of it", last=True)
    terminal.end_live_line()
    assert capsys.readouterr().err == "\r\x1b[Kall of it\n"
