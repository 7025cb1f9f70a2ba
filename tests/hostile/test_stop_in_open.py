"""A stop that comes inside an open stays a stop, and a table of anybody's is read in bounds."""

import os
import time

import pytest

from backbench.board import rank_csv
from backbench.errors import BadInput
from backbench.untrusted import opening


def test_a_stop_behind_fdopen_is_no_bad_descriptor(tmp_path, monkeypatch):
    (tmp_path / "results.jsonl").write_text("{}\n")
    real = os.fdopen

    def interrupted(descriptor, mode):
        real(descriptor, mode).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdopen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opening.open_regular(tmp_path / "results.jsonl")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("name,a\nx,1\ny," + "9" * 100_000 + "x\n", "a field of 100001 characters"),
        ("name," + "a" * 200_000 + "\nx,1\ny,2\n", "not read as CSV|a field of"),
        ("name,\x1b[31mok,\x1b[31mok\nx,1,1\ny,2,2\n", "two columns are called"),
        ("name,\x1b[31ma\nx,1\ny,2\nz,1e999\n", "is no number"),
    ],
)
def test_a_hostile_table_is_refused_soon_and_nothing_is_printed_raw(tmp_path, text, match):
    file = tmp_path / "table.csv"
    file.write_text(text)
    start = time.process_time()
    with pytest.raises(BadInput, match=match) as error:
        rank_csv.read(file)
    assert "\x1b" not in str(error.value) and time.process_time() - start < 5
