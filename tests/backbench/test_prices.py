"""What `--help` says of the cost of readings."""

import re
from pathlib import Path

import pytest

from backbench.cli import program
from backbench.datasets.splits import Splits
from backbench.images.multilabel import MultiLabelList
from backbench.tasks import TASKS
from backbench.transfer import protocols
from backbench.transfer.probes.kind import probe_of

DOCS = Path(__file__).parents[2] / "docs" / "datasets.md"
PRICED = [name for name, task in TASKS.items() if task.price]


@pytest.mark.parametrize("verb", ["linear", "evaluate"])
def test_help_says_what_each_reading_costs(capsys, verb):
    with pytest.raises(SystemExit) as ended:
        program.main([verb, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name in ("knn", "logreg", "label_curve", "layers", "multilabel", "loaders"):
        words = " ".join(said.partition(f"\n  {name}: ")[2].split())
        assert words.startswith(TASKS[name].price)
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("name", PRICED)
def test_times_are_those_of_the_docs(name):
    """One section has all their numbers."""
    number = r"\b\d[\d,.]*\b"
    numbers = set(re.findall(number, TASKS[name].priced))
    for section in DOCS.read_text().split("\n## "):
        if numbers <= set(re.findall(number, section)):
            return
    raise AssertionError(f"docs/datasets.md does not tell {sorted(numbers)} together")


@pytest.mark.parametrize("name", PRICED)
def test_units_of_work_are_named(name, tmp_path):
    """A reading whose run counts fits says so before it."""
    task = TASKS[name]
    p = protocols.load_protocol(task.recipe, protocols.all_kinds())
    probe = probe_of(p.kind)
    paths = tuple(f"{n}.png" for n in range(4))
    images = MultiLabelList(tmp_path, paths, (0, 1, 0, 1), ("a", "b"), ("0",) * 4)
    found = Splits(images, images, images, held_out=False)
    units = probe.work(p, "x", found, 1)
    for unit, word in (("fit", "fit"), ("step", "steps")):
        if units.get(unit):
            assert word in task.price
