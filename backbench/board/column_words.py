"""How a sentence names columns: as short as tells them from the others."""

from collections import Counter
from collections.abc import Mapping, Sequence

from backbench.board.board import Column, joined
from backbench.board.verdict import listed
from backbench.tasks import TASKS

PLACES = 4  # columns that a sentence names; of more, it says how many


def short_names(columns: Sequence[Column]) -> dict[Column, str]:
    """Name each column by its task. Columns of the same task have the dataset in their names, and
    those of the same dataset the protocol, too."""
    tasks = Counter(column.task for column in columns)
    datasets = Counter(
        (column.task, column.dataset, column.split) for column in columns
    )
    names = {}
    for column in columns:
        name = TASKS[column.task].title
        if tasks[column.task] > 1:
            name += f" on {joined(':', column.dataset, column.split)}"
        if datasets[column.task, column.dataset, column.split] > 1:
            name += f" by {joined('+', column.protocol, column.engine)}"
        names[column] = name
    return names


def as_places(
    some: Sequence[Column],
    columns: Sequence[Column],
    names: Mapping[Column, str],
    remarks: Mapping[Column, str] | None = None,
) -> str:
    """Some of the columns in a sentence: by name, or by their number if they are many.

    `remarks` stand in brackets behind those that have one."""
    remarks = remarks or {}
    remarked = [column for column in some if remarks.get(column)]
    if len(some) > PLACES or (len(some) > 1 and len(some) == len(columns)):
        where = f"{len(some)} measurements"
        if len(some) == len(columns):
            where = f"each of the {len(some)} measurements"
        if len(remarked) == len(some):
            where += " (in each a rival has no number)"
        elif remarked:
            where += f" (in {len(remarked)} of them a rival has no number)"
        return where
    # Neighbours with one remark share it: `a, b and c (2 of 5 measured)`
    runs: list[tuple[str, list[str]]] = []
    for column in some:
        remark = remarks.get(column, "")
        if not runs or runs[-1][0] != remark:
            runs.append((remark, []))
        runs[-1][1].append(names[column])
    words = []
    for remark, named in runs:
        of_tasks = _by_task(named)
        words.append(f"{of_tasks} ({remark})" if remark else of_tasks)
    return listed(words)


def _by_task(names: Sequence[str]) -> str:
    """Return names of columns in a sentence, each task once: `Linear probe on birds and boats`."""
    datasets: dict[str, list[str]] = {}
    for name in names:
        task, _, dataset = name.partition(" on ")
        datasets.setdefault(task, []).append(dataset)
    words = []
    for task, of_task in datasets.items():
        words.append(f"{task} on {listed(of_task)}" if of_task[0] else task)
    several = any(len(of_task) > 1 for of_task in datasets.values())
    return ", and ".join(words) if several else listed(words)
