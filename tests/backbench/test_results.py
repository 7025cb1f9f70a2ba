"""Results: safe to append from many processes, never lost, never silently dropped."""

import dataclasses
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from backbench import results, runlog
from backbench.errors import BadInput
from backbench.results import Result


def a_result(**changes):
    base = {
        "checkpoint": "a" * 64,
        "name": "x",
        "method": "simclr",
        "arch": "resnet18",
        "epochs": 2,
        "task": "linear",
        "dataset": "digits",
        "split": "test",
        "metric": "top1",
        "value": 91.25,
        "ci95": (90.0, 92.5),
        "protocol": "linear-demo-v1",
    }
    return Result(**{**base, **changes})


def test_a_result_comes_back_as_it_was_written(tmp_path):
    rows = [a_result(chosen={"lr": 3.16, "split": "val"}), a_result(value=None, ci95=None, engine="torchvision")]
    results.append(tmp_path, rows)
    read, problems = results.read(tmp_path)
    assert read == rows
    assert not problems
    assert read[1].column == "linear/digits/top1@linear-demo-v1+torchvision"


def test_a_full_disk_leaves_no_part_of_the_rows(tmp_path):
    """Half of them would pass for a finished run. A limit on file sizes stands for the disk."""
    results.append(tmp_path, [a_result()])
    before = (tmp_path / results.FILE).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    more = [a_result(metric=f"top1_k{k}") for k in range(4)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * len(before), hard))
    try:
        with pytest.raises(OSError, match="large"):
            results.append(tmp_path, more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / results.FILE).read_bytes() == before
    results.append(tmp_path, more)
    assert len(results.read(tmp_path)[0]) == 5


def test_not_a_number_is_undefined(tmp_path):
    results.append(tmp_path, [a_result(value=float("nan"), ci95=(float("nan"), 1.0))])
    assert results.read(tmp_path)[0][0].value is None
    assert results.read(tmp_path)[0][0].ci95 is None
    assert "NaN" not in (tmp_path / results.FILE).read_text()


def test_where_a_number_was_made_is_recorded(tmp_path):
    run = runlog.open_run(tmp_path / "run", verb="linear", identity={})
    results.append(run, [a_result()])
    origin = results.read(run)[0][0].origin
    assert {"recorded", "command", "cwd", "code", "versions", "hardware"} <= set(origin)
    assert origin["command"] == json.loads((run / "run.json").read_text())["command"]
    assert origin["versions"]["python"].startswith("3.")


WRITER = """
import sys
from backbench import results
from tests_result import a_result
for i in range(int(sys.argv[3])):
    results.append(sys.argv[1], [a_result(seed=int(sys.argv[2]) * 1000 + i, chosen={"text": "x" * 2000})])
"""


def _write_from(processes: int, each: int, tmp_path: Path) -> list[Result]:
    source = Path(__file__).read_text()
    start, end = source.index("def a_result"), source.index("def test_a_result_comes")
    (tmp_path / "tests_result.py").write_text("from backbench.results import Result\n" + source[start:end])
    (tmp_path / "write.py").write_text(WRITER)
    run = tmp_path / "run"
    command = [sys.executable, str(tmp_path / "write.py"), str(run)]
    writers = [subprocess.Popen([*command, str(n), str(each)], cwd=tmp_path) for n in range(processes)]
    assert [w.wait(timeout=300) for w in writers] == [0] * processes
    read, problems = results.read(run)
    assert not problems
    return read


def test_several_processes_append_to_one_file(tmp_path):
    read = _write_from(4, 50, tmp_path)
    assert sorted(r.seed for r in read) == sorted(n * 1000 + i for n in range(4) for i in range(50))


@pytest.mark.slow
def test_fifty_processes_lose_and_tear_none(tmp_path):
    read = _write_from(50, 200, tmp_path)
    assert sorted(r.seed for r in read) == sorted(n * 1000 + i for n in range(50) for i in range(200))


def test_a_truncated_last_line_is_reported_and_survives(tmp_path):
    results.append(tmp_path, [a_result(seed=1)])
    file = tmp_path / results.FILE
    with file.open("a") as f:
        f.write('{"checkpoint": "bbbb", "na')
    assert "truncated line" in results.read(tmp_path)[1][0]
    results.append(tmp_path, [a_result(seed=2)])
    read, problems = results.read(tmp_path)
    assert [r.seed for r in read] == [1, 2]
    assert problems == [f'{file}:2: truncated line, not counted: {{"checkpoint": "bbbb", "na']
    assert '{"checkpoint": "bbbb", "na\n' in file.read_text()


def test_an_unknown_schema_is_named(tmp_path):
    results.append(tmp_path, [a_result()])
    file = tmp_path / results.FILE
    line = json.loads(file.read_text())
    with file.open("a") as f:
        f.write(json.dumps({**line, "schema": 99}) + "\n")
        f.write(json.dumps({k: v for k, v in line.items() if k != "schema"}) + "\n")
        f.write(json.dumps({**line, "task": "juggling"}) + "\n")
        f.write("[1, 2]\n")
    read, problems = results.read(tmp_path)
    assert len(read) == 1
    assert "schema 99, not counted" in problems[0]
    assert "schema None" in problems[1]
    assert "unknown task 'juggling'" in problems[2]
    assert f"{file}:5" in problems[3]


def test_schema_1_is_migrated(tmp_path):
    old = dataclasses.asdict(a_result())
    del old["origin"]
    (tmp_path / results.FILE).write_text(json.dumps({**old, "schema": 1}) + "\n")
    read, problems = results.read(tmp_path)
    assert not problems
    assert read == [a_result()]
    assert read[0].schema == results.SCHEMA


def test_links_are_followed_once(tmp_path):
    results.append(tmp_path / "disk" / "run", [a_result()])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "loop").symlink_to(tmp_path / "disk")
    assert len(results.read(tmp_path / "runs")[0]) == 1


def test_no_folder_is_a_mistake(tmp_path):
    with pytest.raises(BadInput, match="no such run folder"):
        results.read(tmp_path / "missing")


def test_predictions_are_kept_beside_the_results(tmp_path):
    where = results.keep_predictions(
        tmp_path, "lorac/digits", prediction=np.arange(4), label=np.arange(4), manifest="f" * 64
    )
    assert where == "predictions/lorac_digits.npz"
    with np.load(tmp_path / where) as file:
        assert str(file["manifest"]) == "f" * 64
        assert file["prediction"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="manifest"):
        results.keep_predictions(tmp_path, "x", prediction=np.arange(4))
