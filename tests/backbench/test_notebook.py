"""The notebook runs from top to bottom, as a user would run it, and ends with the table."""

import csv
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent.parent / "notebooks" / "module_to_table.ipynb"


@pytest.mark.slow
def test_the_notebook_goes_from_a_module_to_the_table(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("BACKBENCH_NOTEBOOK", str(tmp_path / "work"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=550, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    with (tmp_path / "work" / "leaderboard.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["name"] for r in rows] == ["first", "second"]
    values = [float(r[column]) for r in rows for column in r if "/" in column]
    assert len(values) == 4  # two checkpoints, k 5 and 20
    assert all(0 < v <= 100 for v in values)
    assert (tmp_path / "work" / "leaderboard.html").stat().st_size > 20_000
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    printed = "".join(out.get("text", "") for out in outputs)
    assert "difference" in printed
    assert any("text/html" in out.get("data", {}) for out in outputs)
