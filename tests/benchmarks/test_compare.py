"""benchmarks/compare.py: what it prints and keeps, what it refuses, and the page that it makes."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HOME = Path(__file__).parents[2]


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """The program on copies of its ratios and its page, with a launcher that submits nothing."""
    monkeypatch.syspath_prepend(HOME / "benchmarks")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else it starts itself again
    import compare
    import machine

    def launcher(quick):
        seconds = {"naive": 3.0, "ours": 1.5, "limit: least": 1.0}
        machine.print_ratios("work", seconds, note="a note")

    monkeypatch.setitem(sys.modules, "commands", SimpleNamespace(launcher=launcher))
    for name, file in (("FILE", compare.FILE), ("PAGE", compare.PAGE)):
        monkeypatch.setattr(compare, name, Path(shutil.copy(file, tmp_path)))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["compare.py", *words])
        compare.main()

    compare.run = run
    return compare


def test_the_page_is_what_the_ratios_say_and_others_machines_keep_theirs(
    compare, capsys
):
    page, before = compare.PAGE.read_text(), compare.read()
    compare.run("launcher")
    out = capsys.readouterr().out
    assert (
        "ours" in out and "2.00x" in out and "limit: least" in out and "a note" in out
    )
    assert compare.PAGE.read_text() == page and compare.read() == before, (
        "nothing is kept"
    )
    compare.run("launcher", "--save")
    with compare.FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    mine = [row for row in rows if row["work"] == "work"]
    assert [(row["way"], row["against"], row["ratio"]) for row in mine] == [
        ("ours", "naive", "2")
    ]
    same = (mine[0]["machine"], "launcher")
    kept = [row for row in before if (row["machine"], row["script"]) != same]
    assert [row for row in rows if row["work"] != "work"] == kept
    assert "| work | ours | naive |" in compare.PAGE.read_text()
    # The page in the repository is made of the repository's ratios
    compare.write_page(before)
    assert compare.PAGE.read_text() == page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loses"], "no such NAME: loses"),
        (["views", "--quick", "--save"], "--quick is not saved"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_refused(compare, capsys, words, said):
    with pytest.raises(SystemExit, match="2"):
        compare.run(*words)
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["losses", "probe", "views", "step", "launcher"])
def test_every_work_runs(name):
    """A benchmark calls what no user does, and nothing else would tell that it has gone."""
    command = [sys.executable, HOME / "benchmarks" / "compare.py", name, "--quick"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    no_slurm = "not measured, no Slurm here" in done.stdout
    assert no_slurm or re.search(r"^  .+ +\d+\.\d+x$", done.stdout, re.MULTILINE)
