"""Results: safe to append from many processes, never lost, never silently dropped."""

import errno
import fcntl
import json
import multiprocessing
import os
import re
import resource
from unittest import mock

import numpy as np
import pytest
from support import records
from support.records import a_result

from backbench.errors import BadInput
from backbench.records import predictions, store
from backbench.runs.folder import open_run
from backbench.untrusted import jsons


def test_a_result_comes_back_as_it_was_written(tmp_path):
    rows = [a_result(chosen={"lr": 3.16, "split": "val"})]
    rows.append(a_result(value=None, ci95=None, engine="torchvision"))
    store.append(tmp_path, rows)
    read, problems = store.read(tmp_path)
    assert read == rows
    assert not problems
    assert read[1].column == "linear/digits/top1@linear-demo-v1+torchvision"


def test_a_full_disk_leaves_no_part_of_the_rows(tmp_path):
    """Half of them would pass for a finished run. A limit on file sizes stands for the disk."""
    store.append(tmp_path, [a_result()])
    before = (tmp_path / "results.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    more = [a_result(metric=f"top1_k{k}") for k in range(4)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * len(before), hard))
    try:
        with pytest.raises(OSError, match="large"):
            store.append(tmp_path, more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "results.jsonl").read_bytes() == before
    store.append(tmp_path, more)
    assert len(store.read(tmp_path)[0]) == 5


def test_a_run_is_complete_when_it_has_what_it_owes(tmp_path):
    assert not store.complete(tmp_path)
    rows = [a_result(metric=f"top1_k{k}") for k in range(3)]
    store.append(tmp_path, rows[:1])
    assert store.complete(tmp_path), "nothing was noted"
    store.owe(tmp_path, 3)
    assert not store.complete(tmp_path)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"torn": \n{"other": "line"}\n[1]\n')
    store.append(tmp_path, rows[:1])  # twice the same number is one number
    assert not store.complete(tmp_path)
    store.append(tmp_path, rows, skip_known=True)
    assert store.complete(tmp_path)
    store.append(tmp_path, rows, skip_known=True)
    metrics = [r.metric for r in store.read(tmp_path)[0]]
    assert metrics == ["top1_k0", "top1_k0", "top1_k1", "top1_k2"]


@pytest.mark.parametrize(
    "line", ["[" * 200_000, '{"checkpoint": ["x"], "dataset": "d"}', '"x"', "\xff", "{"]
)
def test_a_line_that_is_no_number_counts_for_none(tmp_path, line):
    (tmp_path / "results.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    assert store.numbers(tmp_path) == set()
    assert not store.complete(tmp_path)
    store.append(tmp_path, [a_result()], skip_known=True)
    assert len(store.numbers(tmp_path)) == 1
    assert store.complete(tmp_path)


def test_a_fifo_in_the_place_of_results_is_none(tmp_path):
    for name in ("results.jsonl", "owed.json"):
        os.mkfifo(tmp_path / name)
    assert store.numbers(tmp_path) == set()
    assert store.owed(tmp_path) is None
    assert not store.complete(tmp_path)


def test_a_file_of_weights_is_no_results_file(tmp_path):
    """Each of its lines would be one that cannot be read."""
    file = tmp_path / "trunk.pth"
    file.write_bytes(b"PK\3\4\0\0" + b"\n" * 100)
    with pytest.raises(BadInput, match=r"trunk.pth: is no results file; give a run f"):
        store.files_below(file)
    file.write_text("damaged\n")
    assert store.files_below(file) == [file]


def test_two_writers_of_the_same_numbers_write_each_once(tmp_path):
    rows = [a_result(metric=f"top1_k{k}") for k in range(20)]
    child = os.fork()
    if not child:
        for row in reversed(rows):
            store.append(tmp_path, [row], skip_known=True)
        os._exit(0)
    for row in rows:
        store.append(tmp_path, [row], skip_known=True)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(store.read(tmp_path)[0]) == len(store.numbers(tmp_path)) == 20


def test_numbers_are_kept_on_a_file_system_without_locks(tmp_path, monkeypatch):
    none = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "lockf", none)
    store.append(tmp_path, [a_result()])
    assert len(store.numbers(tmp_path)) == 1


def test_not_a_number_is_undefined(tmp_path):
    store.append(tmp_path, [a_result(value=float("nan"), ci95=(float("nan"), 1.0))])
    assert store.read(tmp_path)[0][0].value is None
    assert store.read(tmp_path)[0][0].ci95 is None
    assert "NaN" not in (tmp_path / "results.jsonl").read_text()


def test_where_a_number_was_made_is_recorded(tmp_path):
    with open_run(tmp_path / "run", verb="linear", identity={}) as run:
        store.append(run, [a_result()])
    origin = store.read(run)[0][0].origin
    assert {"recorded", "command", "cwd", "code", "versions", "hardware"} <= set(origin)
    assert origin["command"] == json.loads((run / "run.json").read_text())["command"]
    assert origin["versions"]["python"].startswith("3.")


@pytest.mark.parametrize(
    ("processes", "each"), [(4, 50), pytest.param(50, 200, marks=pytest.mark.slow)]
)
def test_processes_that_append_to_one_file_lose_and_tear_none(
    tmp_path, processes, each
):
    run = tmp_path / "run"
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(processes)
    writers = []
    for number in range(processes):
        words = (run, number, each, together)
        writers.append(fork.Process(target=records.append_many, args=words))
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=300)
    assert [writer.exitcode for writer in writers] == [0] * processes
    read, problems = store.read(run)
    assert not problems
    wanted = [n * 1000 + i for n in range(processes) for i in range(each)]
    assert sorted(r.seed for r in read) == wanted


def test_a_truncated_last_line_is_reported_and_survives(tmp_path):
    store.append(tmp_path, [a_result(seed=1)])
    file = tmp_path / "results.jsonl"
    with file.open("a") as f:
        f.write('{"checkpoint": "bbbb", "na')
    assert "truncated line" in store.read(tmp_path)[1][0]
    store.append(tmp_path, [a_result(seed=2)])
    read, problems = store.read(tmp_path)
    assert [r.seed for r in read] == [1, 2]
    assert problems == [
        f'{file}:2: truncated line, not counted: {{"checkpoint": "bbbb", "na'
    ]
    assert '{"checkpoint": "bbbb", "na\n' in file.read_text()


def test_an_unknown_schema_is_named(tmp_path):
    store.append(tmp_path, [a_result()])
    file = tmp_path / "results.jsonl"
    line = json.loads(file.read_text())
    with file.open("a") as f:
        f.write(json.dumps({**line, "schema": 99}) + "\n")
        f.write(json.dumps({k: v for k, v in line.items() if k != "schema"}) + "\n")
        f.write(json.dumps({**line, "task": "juggling"}) + "\n")
        f.write("[1, 2]\n")
    read, problems = store.read(tmp_path)
    assert len(read) == 1
    assert "schema 99, not counted" in problems[0]
    assert "schema None" in problems[1]
    assert "unknown task 'juggling'" in problems[2]
    assert f"{file}:5" in problems[3]


def test_links_are_followed_once(tmp_path):
    store.append(tmp_path / "disk" / "run", [a_result()])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "loop").symlink_to(tmp_path / "disk")
    assert len(store.read(tmp_path / "runs")[0]) == 1


def test_predictions_are_kept_beside_the_results(tmp_path):
    where = predictions.keep(
        tmp_path,
        "lorac/digits",
        prediction=np.arange(4),
        label=np.arange(4),
        manifest="f" * 64,
    )
    assert where == "predictions/lorac_digits.npz"
    with np.load(tmp_path / where) as file:
        assert str(file["manifest"]) == "f" * 64
        assert file["prediction"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="manifest"):
        predictions.keep(tmp_path, "x", prediction=np.arange(4))


LINES = [
    b'{"a": [1, -2.5e-7, 1E3, null, true], "\\u00e9": "\xc3\xa9", "a": -0.0}\n',
    b" NaN ",
    b"1e999",
    b"9" * 40,
    b"-" + b"1" * 40,
    b"0.1234567890123456789012345678901234567890123",
    b"[" * 60 + b"]" * 60,
    b"\xef\xbb\xbf1",  # a byte order mark
]
BAD = [
    b'{"a": 1',
    b"[1,]",
    b"01",
    b'"\xff"',
    b"[" * 61 + b"]" * 61,
    b"8" * 41,
]
BAD += [b'{"deep": ' + b"[" * 100_000, b'"a\nb"', b"-NaN", b"9" * 5000, b""]


def test_lines_read_fast_are_the_lines_read_slowly():
    for line in LINES:
        assert repr(jsons.decode_line(line)) == repr(jsons.decode(line)), line
    for line in BAD:
        with pytest.raises(ValueError) as slow:
            jsons.decode(line)
        with pytest.raises(type(slow.value), match=f"^{re.escape(str(slow.value))}$"):
            jsons.decode_line(line)
