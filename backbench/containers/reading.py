"""Reads a split from its class folder or container: the same list of images either way."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.containers import finding, naming
from backbench.containers.container import Container
from backbench.errors import BadInput
from backbench.images.image_list import (
    ImageList,
    Joined,
    Names,
    missing_classes,
    scan_folder,
)

# The catalog imports this file: numpy comes with the first container
if TYPE_CHECKING:
    from backbench.containers.spans import SpanList
    from backbench.containers.tables import Table


def read_split(
    base: Path,
    split: str,
    *,
    classes: Sequence[str] | None = None,
    every: Sequence[str] = (),
) -> ImageList:
    """Read a split from its class folder BASE/<split> or its container.

    An empty `split` means an undivided dataset. `classes` are taken in this label order, and others
    are ignored. `every` is the class list that numbers in a container refer to."""
    container = finding.find(base, split) if split else finding.whole(base)
    if container is not None:
        return read(container, base, split, classes=classes, every=every)
    folder = finding.split_folder(base, split) if split else base
    if not folder.is_dir():
        why = finding.refusal(base, split)
        if why:
            raise BadInput(why)
    images = scan_folder(folder, classes=classes)
    if split and folder != base / split:
        # Draws go by paths below BASE, so `valid` is called `val` there, as it is from a container
        return Joined.of((images,), root=base / split, paths=images.paths)
    return images


def read(
    container: Container,
    base: Path,
    split: str = "",
    *,
    classes: Sequence[str] | None = None,
    every: Sequence[str] = (),
) -> SpanList:
    """Read the images of a container, or of one split of it, in the order of a class folder."""
    import numpy as np

    from backbench.containers import class_lists, names_by_contents, table_cache
    from backbench.containers.spans import SpanList

    file = container.files[0]
    # 1. What the files hold, under names and labels of their own
    tables, marks = table_cache.tables_of(container)
    tables = names_by_contents.renamed(container, tables, base, split)
    tables, stated = class_lists.joined(container.files, tables)
    by_text = any(table.by_text and table.labelled for table in tables)
    if by_text and classes is not None and not set(stated) <= {*every, *classes}:
        # ImageNet's classes are synsets, and `crane` is two of them: paths tell which
        tables = [table.unlabelled() for table in tables]
        stated, by_text = (), False
    rows = naming.Rows(container, tables, split, naming.listed_labels(base, split))
    if not rows.names:
        raise BadInput(_empty(container, tables))
    # 2. The path and the class that each image would have in a class folder
    positions = None if classes is None or by_text else every
    named = naming.class_of_label(rows, stated, positions)
    paths, class_names = naming.placed(
        rows, named, container, imagenet=bool(every), by_text=by_text
    )
    if classes is None:
        classes = sorted({name for name in class_names if name})
    else:
        absent = sorted(set(classes) - set(class_names))
        if absent and not any(class_names):
            raise BadInput(
                f"{file}: states no labels; put {split}_map.txt beside it (a line an"
                " image: name, tab, number of the class), or sort the images into class folders"
            )
        if absent:
            raise BadInput(missing_classes(base / split, absent, len(classes)))
    # 3. Sorted as `scan_folder` sorts: by class, then by path. An image without a class is kept,
    #    unlabelled; one of a class that is not asked for is left out
    label_of = {name: label for label, name in enumerate(classes)}
    order = []
    for row, (name, path) in enumerate(zip(class_names, paths)):
        if name in label_of or not name or not classes:
            order.append((label_of.get(name, -1), path, row))
    order.sort()
    for (_, path, _), (_, following, _) in itertools.pairwise(order):
        if path == following:
            raise BadInput(f"{file}: {path} is there twice; two images have one name")
    notes = dict.fromkeys(note for table in tables for note in table.notes)
    return SpanList(
        base / split if split else base,
        Names(path for _, path, _ in order),
        tuple(label for label, _, _ in order),
        tuple(classes),
        np.concatenate(rows.spans)[[row for _, _, row in order]],
        tuple(str(each) for each in container.files),
        tuple(marks),
        container.kind,
        tuple(notes),
    )


def _empty(container: Container, tables: Sequence[Table]) -> str:
    """Say that a container holds no images, and what was passed over in it."""
    notes = "; ".join(dict.fromkeys(note for table in tables for note in table.notes))
    said = f" ({notes})" if notes else ""
    return f"{container.files[0]}: no images in {len(container.files)} files{said}"


def read_archived_folder(folder: Path, names: Sequence[str]) -> SpanList | None:
    """Read the images of FOLDER from FOLDER.zip or FOLDER.tar; None where FOLDER itself is there,
    or neither archive is."""
    if folder.is_dir():
        return None
    for kind in ("zip", "tar"):
        file = Path(f"{folder}.{kind}")
        if file.is_file():
            images = ImageList(folder, tuple(names), (), ())
            return read_members(images, file, names, [folder.name])
    return None


def read_members(
    images: ImageList, file: Path, names: Sequence[str], words: Iterable[str]
) -> SpanList:
    """Return the list `images` with the members `names` of an archive in place of its files.

    `names` are paths below the archive's folders that are called as `words`. BadInput where one is
    missing."""
    from backbench.containers import table_cache
    from backbench.containers.spans import SpanList

    container = Container(file.suffix[1:], (file,))
    (table,), marks = table_cache.tables_of(container)
    begin = naming.shared_length(table.names, words)
    row_of = {name[begin:]: row for row, name in enumerate(table.names)}
    missing = [name for name in names if name not in row_of]
    if missing:
        raise BadInput(
            f"{file}: {len(missing)} of {len(names)} images are missing, first {missing[0]}"
        )
    return SpanList(
        images.root,
        images.paths,
        images.labels,
        images.classes,
        table.spans[[row_of[name] for name in names]],
        (str(file),),
        tuple(marks),
        container.kind,
        table.notes,
    )
