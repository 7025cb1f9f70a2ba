"""benchmarks/compare.py: what it prints and keeps, what it refuses, and the page that it makes."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).parents[2]


def compare(*words, home=HOME):
    """Its exit code and what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOME)}
    command = [sys.executable, str(home / "benchmarks" / "compare.py"), *words]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    return ran.returncode, ran.stdout, ran.stderr


def test_the_page_is_what_the_ratios_say_and_others_machines_keep_theirs(tmp_path):
    for name in ("benchmarks", "docs"):
        shutil.copytree(HOME / name, tmp_path / name, ignore=shutil.ignore_patterns("demo"))
    # A script of one line in place of the one that submits ten thousand jobs
    (tmp_path / "benchmarks" / "commands.py").write_text(
        "from machine import print_ratios\n"
        "def launcher(quick):\n"
        "    print_ratios('work', {'naive': 3.0, 'ours': 1.5, 'limit: least': 1.0}, note='a note')\n"
    )
    page = tmp_path / "docs" / "benchmarks.md"
    code, out, err = compare("launcher", home=tmp_path)
    assert code == 0, err
    assert "ours" in out and "2.00x" in out and "limit: least" in out and "a note" in out
    assert page.read_text() == (HOME / "docs" / "benchmarks.md").read_text(), "nothing is kept"
    assert compare("launcher", "--save", home=tmp_path)[0] == 0
    with (tmp_path / "benchmarks" / "ratios.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (HOME / "benchmarks" / "ratios.csv").open(newline="") as file:
        before = list(csv.DictReader(file))
    mine = [row for row in rows if row["work"] == "work"]
    assert [(row["way"], row["against"], row["ratio"]) for row in mine] == [("ours", "naive", "2")]
    same = (mine[0]["machine"], "launcher")
    kept = [row for row in before if (row["machine"], row["script"]) != same]
    assert [row for row in rows if row["work"] != "work"] == kept
    assert "| work | ours | naive |" in page.read_text()
    # The page in the repository is made of the repository's ratios
    shutil.copy(HOME / "benchmarks" / "ratios.csv", tmp_path / "benchmarks")
    made = "import compare; compare.write_page(compare.read())"
    subprocess.run([sys.executable, "-c", made], cwd=tmp_path / "benchmarks", check=True)
    assert page.read_text() == (HOME / "docs" / "benchmarks.md").read_text()


def test_an_unknown_name_and_quick_figures_that_would_be_kept_are_refused():
    code, _, err = compare("loses")
    assert code == 2 and "no such NAME: loses" in err.splitlines()[-1]
    code, _, err = compare("views", "--quick", "--save")
    assert code == 2 and "--quick is not saved" in err.splitlines()[-1]
