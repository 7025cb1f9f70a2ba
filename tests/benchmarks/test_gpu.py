"""benchmarks/gpu.py, which `make gpu` runs where there is a GPU: every line of it on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
TABLES = {"steps": 16, "peers": 8, "losses": 6, "loop": 1, "cores": 5, "probe": 6}


def told(*words):
    """Its exit code and what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, HOME / "benchmarks" / "gpu.py", *words]
    ran = subprocess.run(
        command,
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(1050)
def test_every_table_is_made():
    code, out, err = told("--small")
    assert code == 0, err
    for table in [*TABLES, "detection"]:
        before, _, _ = out.partition(f"\n[{table}: ")
        rows = before.rpartition("\n[")[2].split("\n\n")[-1].splitlines()
        numbers = [
            row for row in rows if row.startswith("  ") and any(map(str.isdigit, row))
        ]
        assert len(numbers) == TABLES.get(table, len(numbers)) > 0, table


@pytest.mark.slow
def test_without_a_gpu_full_sizes_end_in_one_line():
    code, out, err = told()
    assert code == 2 and not out
    assert (
        "torch finds no GPU here; --small runs every line on the CPU"
        in err.splitlines()[-1]
    )
