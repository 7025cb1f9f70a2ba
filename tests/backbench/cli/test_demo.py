"""The demo, run as its user runs it: once through, again, and killed in every step."""

import contextlib
import csv
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from backbench.board.export import command_again
from backbench.cli import demo
from backbench.records import store

pytestmark = pytest.mark.slow
SIGNALS = (
    signal.SIGKILL,
    signal.SIGKILL,
    signal.SIGINT,
    signal.SIGKILL,
    signal.SIGTERM,
)
TINY = ("demo", "--size", "tiny", "--out")


def start(out: Path, output: int = subprocess.PIPE) -> subprocess.Popen:
    command = [sys.executable, "-m", "backbench", *TINY, str(out)]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()  # where it took too long
    assert process.returncode == 0, output[-3000:]
    return output


def board(out: Path) -> list[dict[str, str]]:
    with (out / "leaderboard.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        # A speed is a time of this run, and stands only where the features were not from the cache
        del row["images_per_second"], row["hardware"]
    return rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "whole"
    finish(start(out))
    return out


def test_fills_the_table(whole):
    rows = board(whole)
    assert sorted(row["name"] for row in rows) and len(rows) == len(demo.CHECKPOINTS)
    assert len({row["checkpoint"] for row in rows}) == len(rows), (
        "five different trunks"
    )
    columns = set(rows[0])
    expected = [
        "linear/digits/",
        "fewshot/digits/",
        "knn/digits/",
        "semi_10pct/digits/",
    ]
    expected += ["calibration/digits/nll@", "calibration/digits/ece_t@"]
    for measured in ("faster_rcnn/scenes:val/bbox", "mask_rcnn/scenes:val/segm"):
        expected += [f"{measured}_{ap}@" for ap in ("AP", "AP50", "AP75")]
    expected += [
        f"keypoint_rcnn/scenes:val/keypoints_{ap}@" for ap in ("AP", "AP50", "AP75")
    ]
    for start_of in expected:
        named = [c for c in columns if c.startswith(start_of)]
        assert named, f"no column {start_of}; there are {sorted(columns)}"
        assert any(row[named[0]] for row in rows), f"{named[0]} is empty"
        small = ("-demo-v1", "-tiny-v1", "-tiny-frozen-v1")
        assert all(
            c.split("@")[1].removesuffix("+torchvision").endswith(small) for c in named
        )
    page = (whole / "leaderboard.html").read_text()
    assert (
        "<table" in page
        and 'src="http' not in page
        and 'href="http://fonts' not in page
    )


def test_again_skips_everything_in_seconds_and_makes_the_table(whole):
    rows = board(whole)
    (whole / "leaderboard.csv").unlink()
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("results.jsonl")}
    began = time.monotonic()
    output = finish(start(whole))
    assert "19 finished steps recognised and skipped" in output
    assert time.monotonic() - began < 20
    assert before == {p: p.stat().st_mtime_ns for p in whole.rglob("results.jsonl")}
    assert board(whole) == rows


@pytest.mark.timeout(1800)
def test_killed_in_every_step_ends_with_the_same_numbers(whole, tmp_path):
    """The machine fails in each step, or the demo is killed or stopped; then one whole run."""
    out = tmp_path / "killed"
    pending = list(demo.demo_steps(out, "tiny"))
    killed: list[str] = []
    for attempt in range(3 * len(pending)):
        before = _commands(out)
        process = start(out, subprocess.DEVNULL)
        victim = None
        while victim is None and process.poll() is None:
            time.sleep(0.1)
            begun = _commands(out) - before
            victim = next((name for name in pending if begun[name]), None)
        if victim is None:
            assert process.returncode == 0
            break
        # As it begins, while it runs, while it writes
        time.sleep((0.3, 1.0, 2.5)[attempt % 3])
        number = SIGNALS[attempt % len(SIGNALS)]
        process.send_signal(number)
        # Every second kill is of the jobs, too, which would go on without the demo
        if number == signal.SIGKILL and attempt % 2:
            for running in _mentioning(str(out)):
                os.kill(int(running.parent.name), signal.SIGKILL)
        process.wait()  # not for its jobs, which the next demo finds running
        pending.remove(victim)
        killed.append(victim)
    finish(start(out))
    assert len(killed) >= 10, killed
    for row, expected in zip(board(out), board(whole), strict=True):
        assert {k: v for k, v in row.items() if v != expected[k]} == {}
        assert row.keys() == expected.keys()


def _commands(out: Path) -> Counter[str]:
    """How often each step's command was begun, by the logs of the jobs."""
    names: Counter[str] = Counter()
    for file in (out / ".launch" / "logs").glob("*.log"):
        for line in file.read_text().splitlines():
            if line.startswith("$ backbench "):
                folder = line.partition(" --out ")[2].split()[0]
                names[str(Path(folder).relative_to(out))] += 1
    return names


def _mentioning(text: str) -> list[Path]:
    """The processes whose command line holds `text`, without this one."""
    out = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            if text in file.read_text() and file.parent.name != str(os.getpid()):
                out.append(file)
    return out


def test_a_rows_command_measures_the_same_value(whole, tmp_path):
    for part in ("semisup/lorac", "detection/random/faster"):
        rows, _ = store.read(whole / part)
        command = command_again(rows[0], out=str(tmp_path / part))
        assert command is not None and command.startswith("backbench ")
        arguments = shlex.split(command)[1:]
        cwd = (rows[0].origin or {})["cwd"]
        command = [sys.executable, "-m", "backbench", *arguments]
        subprocess.run(command, cwd=cwd, check=True, capture_output=True)
        repeated, _ = store.read(tmp_path / part)
        assert {(r.column, r.value) for r in repeated} == {
            (r.column, r.value) for r in rows
        }
