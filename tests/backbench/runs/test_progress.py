"""What a run shows of its progress and its price, by a clock that the test moves."""

import functools
import json
import logging
import math
import time

import pytest

from backbench.runs import price, run_progress, terminal
from backbench.runs.folder import PROGRESS_FILE
from backbench.runs.run_progress import Progress, read_progress, seconds
from backbench.runs.step_metrics import Metrics, read_metrics


class HandClock:
    """Stands still but where the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    moved = HandClock()
    monkeypatch.setattr(time, "monotonic", moved)
    monkeypatch.setattr(time, "time", lambda: moved.now + 5000)
    monkeypatch.setattr(price, "_run", price._Announced())
    level = terminal.log.level
    terminal.log.setLevel(logging.INFO)
    yield moved
    terminal.log.setLevel(level)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9.94, "9.9 s"),
        (10, "0:10"),
        (59.6, "1:00"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (36061, "10:01:01"),
        (math.inf, "?"),
    ],
)
def test_a_time_is_spelled_by_its_size(value, text):
    assert seconds(value) == text


def test_a_log_has_a_line_every_ten_seconds_and_at_the_end(clock, capsys):
    progress = Progress(None, 30, "walking", done=10)
    assert progress.eta == math.inf
    lines = []
    # The first line comes at once; then 10 seconds must have passed
    for move, count in (
        (4.0, 2),
        (10.0, 2),
        (0.125, 4),
        (9.875, 2),
        (0.125, 2),
        (0.5, 8),
    ):
        clock.now += move
        progress.advance(count, loss=0.123456, lr=2, of="x")
        lines.append(capsys.readouterr().err)
    info = "  loss 0.1235  lr 2  of x\n"
    assert lines == [
        f"walking: 12/30 steps  0.5/s  ETA 0:36{info}",
        "",
        f"walking: 18/30 steps  0.566/s  ETA 0:21{info}",
        "",
        "",
        f"walking: 30/30 steps  0.812/s  took 0:25{info}",
    ]
    assert progress.eta == 0.0
    assert Progress(None, 5, "x", done=5).eta == 0.0


def test_short_work_and_quiet_commands_show_no_line(clock, capsys):
    looking = Progress(None, 4, "looking", unit="file", after=3.0)
    clock.now += 2.875
    looking.advance()
    clock.now += 0.125
    looking.advance(2)
    assert capsys.readouterr().err == "looking: 3/4 files  1/s  ETA 1.0 s\n"
    terminal.log.setLevel(logging.WARNING)
    looking.advance()
    assert capsys.readouterr().err == ""


def test_a_terminal_has_one_line_that_is_written_over(clock, capsys, monkeypatch):
    progress = Progress(None, 3, "x")
    progress._tty = True
    monkeypatch.setenv("COLUMNS", "21")
    for move in (1.0, 0.125, 0.25):
        clock.now += move
        progress.advance()
    assert capsys.readouterr().err.split("\r\x1b[K") == [
        "",
        "x: 1/3 steps  1/s  E",
        "x: 3/3 steps  2.18/s\n",
    ]


def test_a_note_of_the_progress_is_written_once_a_second(clock, tmp_path, monkeypatch):
    run = tmp_path / "run"
    progress = Progress(run, 10, "walking", unit="mile", done=2)

    def noted(move, count):
        clock.now += move
        progress.advance(count)
        note = read_progress(run)
        return note["done"], note["eta_s"], note["time"]

    assert noted(2.0, 1) == (3, 14.0, 6002.0)
    assert noted(1.0, 1) == (3, 14.0, 6002.0)
    assert noted(0.5, 1) == (5, 5.8, 6003.5)
    # The last step is always written
    assert noted(0.125, 5) == (10, 0.0, 6003.625)
    assert json.loads((run / PROGRESS_FILE).read_text()) == {
        "what": "walking",
        "done": 10,
        "total": 10,
        "unit": "mile",
        "eta_s": 0.0,
        "time": 6003.625,
    }

    # A full disk ends no run
    def full(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_progress.atomic, "write_json", full)
    clock.now += 2
    progress.advance()


NOTE = {"what": "x", "done": 3, "total": 9, "unit": "step", "eta_s": 4, "time": 5}


@pytest.mark.parametrize(
    ("change", "makes_sense"),
    [
        ({}, True),
        ({"eta_s": None}, True),
        ({"eta_s": math.inf}, True),
        ({"eta_s": math.nan}, False),
        ({"done": 0, "total": 0}, True),
        ({"done": -1}, False),
        ({"total": -1}, False),
        ({"done": 1 << 62}, False),
        ({"total": 1 << 62}, False),
        ({"done": (1 << 62) - 1, "total": (1 << 62) - 1}, True),
        ({"done": "many"}, False),
        ({"time": math.inf}, False),
        ({"time": None}, False),
    ],
)
def test_a_note_that_makes_no_sense_is_none(tmp_path, change, makes_sense):
    (tmp_path / PROGRESS_FILE).write_text(json.dumps(NOTE | change))
    found = read_progress(tmp_path)
    assert (found is not None) == makes_sense
    if makes_sense:
        assert found == NOTE | change
    for key in NOTE:
        rest = {name: value for name, value in NOTE.items() if name != key}
        (tmp_path / PROGRESS_FILE).write_text(json.dumps(rest))
        assert read_progress(tmp_path) is None
    assert read_progress(tmp_path / "none") is None


def test_names_in_a_note_are_printable(tmp_path):
    odd = NOTE | {"what": "a\x1bb", "unit": "c\nd"}
    (tmp_path / PROGRESS_FILE).write_text(json.dumps(odd))
    found = read_progress(tmp_path)
    assert (found["what"], found["unit"]) == ("a\\x1bb", "c\\nd")


# ---- metrics


def test_rows_of_metrics_are_read_between_lines_that_are_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n[1]\n{"step": "x"}\n{"loss": 3.0}\n'
        '{"step": NaN}\n\n{"step": 4, "loss": 1.0}\n{"step": 5, "lo'
    )
    rows = [{"step": 1, "loss": 2.0}, {"loss": 3.0}, {"step": 4, "loss": 1.0}]
    assert read_metrics(tmp_path) == rows
    # Steps from the fourth on are made again; a row without a step is older than all
    metrics = Metrics(tmp_path, from_step=4)
    assert read_metrics(tmp_path) == rows[:2]
    metrics.write(4, loss=0.5)
    metrics.write(5, loss=0.25, lr=0.1)
    assert read_metrics(tmp_path)[2:] == [
        {"step": 4, "loss": 0.5},
        {"step": 5, "loss": 0.25, "lr": 0.1},
    ]
    assert read_metrics(tmp_path / "none") == []


# ---- prices


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.2, "1 second"),
        (1.4, "1 second"),
        (59.4, "59 seconds"),
        (60, "1 minute"),
        (89, "1 minute"),
        (95, "2 minutes"),
        (3599, "60 minutes"),
        (3600, "1.0 hours"),
        (35_900, "10.0 hours"),
        (36_000, "10 hours"),
        (172_799, "48 hours"),
        (172_800, "2.0 days"),
        (863_000, "10.0 days"),
        (864_000, "10 days"),
        (1e8 * 1.5, "1,736 days"),
    ],
)
def test_a_price_is_spelled_in_the_unit_of_its_size(value, text):
    assert price.spelled(value) == text


def said_of(caplog, action):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="backbench"):
        action()
    return [record.getMessage() for record in caplog.records]


def test_what_will_be_done_is_announced_by_its_units(clock, caplog):
    work = {"checkpoint": 1, "step": 30_000, "fit": 0}
    said = said_of(caplog, lambda: price.announce("probe", "by x", "", work=work))
    assert said == ["probe: by x; 1 checkpoint, 30,000 steps"]
    assert said_of(caplog, lambda: price.announce("probe", work={})) == ["probe: "]


@pytest.mark.parametrize(
    ("pace", "units", "said"),
    [
        # The first unit starts the machine up; then ten units and five seconds
        (0.5, 11, "about 8 minutes here for 989 more steps, at 2 a second"),
        (0.4, 14, "about 7 minutes here for 986 more steps, at 2.5 a second"),
        (3.0, 9, None),
        # Slow units are believed after half a minute
        (20.0, 3, "about 5.5 hours here for 997 more steps, at 0.05 a second; less"),
        (30.0, 1, "about 8.3 hours here for 999 more steps, at 0.0333 a second; less"),
        # What takes more than an hour has a cheaper way
        (3.63, 10, "about 60 minutes here for 990 more steps, at 0.275 a second"),
        (3.64, 10, "about 1.0 hours here for 990 more steps, at 0.275 a second; less"),
    ],
)
def test_a_price_is_said_once_it_is_known(clock, caplog, pace, units, said):
    price.announce("probe", work={"step": 1010}, cheaper="less")
    meter = price.Meter("step", 10)
    heard = []
    for _ in range(units):
        clock.now += pace
        heard += said_of(caplog, lambda: meter.count(1))
    assert heard == ([] if said is None else [said])
    # Once is enough
    if said is not None:
        clock.now += 100
        assert said_of(caplog, lambda: meter.count(1)) == []


def test_what_is_done_within_a_minute_has_no_price(clock, caplog):
    for left, spoken in ((119, False), (120, True)):
        price.announce("probe", work={"step": left + 11})
        short = price.Meter("step", 0)
        heard = []
        for _ in range(11):
            clock.now += 0.5
            heard += said_of(caplog, functools.partial(short.count, 1))
        assert bool(heard) == spoken
    # Nor has what nobody announced
    price.announce("probe", work={"fit": 10**6})
    meter = price.Meter("step", 0)
    clock.now += 100
    assert said_of(caplog, lambda: meter.count(5)) == []
    price.skip("fit", 10)
    price.skip("step", 10)
    assert price._run.left == {"fit": 10**6 - 10}
