"""Makes one class list of the lists that the files of one split state.

A file whose labels are texts states the classes of its own rows, so two files may count unlike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.errors import BadInput

# Finding a container needs no numpy, so that the catalog stays cheap to import
if TYPE_CHECKING:
    from backbench.containers.tables import Table


def joined(
    files: Sequence[Path], tables: Sequence[Table]
) -> tuple[list[Table], tuple[str, ...]]:
    """Return the tables with labels by one list of classes, and that list.

    Texts are sorted, as folders are. BadInput for files whose numbers count other classes."""
    said = [(file, table) for file, table in zip(files, tables) if table.labelled]
    if said and all(table.by_text for _, table in said):
        names = tuple(sorted({name for _, table in said for name in table.classes}))
        return [_relabelled(table, names) for table in tables], names
    lists = {(table.by_text, table.classes): file for file, table in said}
    if len(lists) > 1:
        first, second = list(lists.values())[:2]
        raise BadInput(
            f"{second}: its classes are not those of {first.name} beside it; get both from one"
            " source"
        )
    stated = next((table.classes for table in tables if table.classes), ())
    return list(tables), stated


def _relabelled(table: Table, classes: Sequence[str]) -> Table:
    """Count the labels of a table whose labels are texts by a list that has its classes."""
    import numpy as np

    place = {name: label for label, name in enumerate(classes)}
    # The last place is that of the label -1
    new = [*(place[name] for name in table.classes if name in place), -1]
    return replace(
        table, labels=np.array(new, np.int64)[table.labels], classes=tuple(classes)
    )
