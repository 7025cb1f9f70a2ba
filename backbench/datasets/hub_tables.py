"""Reads a known dataset from the Parquet files that the Hugging Face Hub has of it.

An image gets the path that it has in its owner's archives, and its label the place of its class
there. So lists, hold-outs and rows are those of the archives where the pictures are the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.containers.container import Container, split_of
from backbench.datasets import readers, splits
from backbench.datasets.row import Dataset, HubTables, tables_below
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ArrayList, ImageList
from backbench.untrusted import printable

if TYPE_CHECKING:
    from backbench.containers.spans import Mark, SpanList
    from backbench.containers.tables import Table

# The first labels of CIFAR-10's batches 1 to 5. The Hub has the batches in the order in which they
# lie in the archive, torchvision in that of their numbers
BATCHES = (
    (6, 9, 9, 4, 1, 1, 2, 7, 8, 3, 4, 7, 7, 2, 9, 9, 9, 3, 2, 6),
    (1, 6, 6, 8, 8, 3, 4, 6, 0, 6, 0, 3, 6, 6, 5, 4, 8, 3, 2, 6),
    (8, 5, 0, 6, 9, 2, 8, 3, 6, 2, 7, 4, 6, 9, 0, 0, 7, 3, 7, 2),
    (0, 6, 0, 2, 7, 2, 1, 2, 4, 1, 5, 6, 6, 3, 1, 3, 5, 5, 8, 1),
    (8, 5, 1, 5, 7, 4, 3, 8, 2, 7, 2, 0, 1, 5, 9, 6, 2, 0, 8, 3),
)
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # train-00003-of-00294
NOTE = "read from the Hub's Parquet files"


def read(dataset: Dataset, base: Path, seed: int) -> Splits:
    """Read a dataset from BASE, in its owner's layout or in the Hub's; BadInput where both are."""
    # Where ROOT itself is the owner's folder, the tables below it are of other datasets
    own_folder = dataset.parquet is not None and base.name == dataset.name
    tables = tables_below(base) if own_folder else []
    if dataset.parquet is None or not tables:
        return dataset.read(base, seed)
    owners = [need for need in dataset.needs if (base / need).exists()]
    if owners:
        raise BadInput(
            f"{base}: {dataset.name} is there twice, as {owners[0]} and as"
            f" {tables[0].relative_to(base)}; move one away"
        )
    return _read(dataset, dataset.parquet, base, seed)


def described(dataset: Dataset, base: Path) -> str:
    """Describe the Hub's files of a dataset in words; empty where there are none."""
    if dataset.parquet is None or base.name != dataset.name or not tables_below(base):
        return ""
    found = _files_of(dataset, dataset.parquet, base)
    return "; ".join(
        f"{split}: parquet, {len(files)} files" for split, files in found.items()
    )


def _read(dataset: Dataset, layout: HubTables, base: Path, seed: int) -> Splits:
    found = _files_of(dataset, layout, base)
    parts = {
        split: _list_of(dataset, layout, base, split, files)
        for split, files in found.items()
    }
    if layout.order == "listed":
        return _drawn_birdsnap(parts["train"], base)
    wanted = dict(zip(("train", "val", "test"), dataset.sizes))
    if layout.whole:
        # The owner's archive is undivided, and so must be what is drawn from
        wanted = {"train": sum(size or 0 for size in dataset.sizes)}
    for split, images in parts.items():
        size = wanted.get(split)
        if size is not None and len(images) != size:
            raise BadInput(
                f"{found[split][0]}: {len(images)} images of '{split}', and {dataset.name} has"
                f" {size}: another division of it; get {dataset.get}"
            )
    train = parts["train"]
    notes: tuple[str, ...] = (NOTE,)
    if train.classes == tuple(str(label) for label in range(len(train.classes))):
        notes += (
            "the tables name no classes: labels are taken as the owner's numbers",
        )
    if layout.whole:
        return replace(readers.drawn_caltech101(train, seed), notes=notes)
    return splits.with_hold_out(
        train, parts["test"], parts.get("val"), seed=seed, notes=notes
    )


def _drawn_birdsnap(everything: ImageList, base: Path) -> Splits:
    """Draw Birdsnap's splits. However many of its pictures a copy still has, there is no size."""
    for pictures in (base / "images", base / "download"):
        if pictures.is_dir():
            raise BadInput(
                f"{base}: birdsnap is there twice, as {pictures.name} and as"
                f" {tables_below(base)[0].relative_to(base)}; move one away"
            )
    file = base / "images.txt"
    listed = readers.birdsnap_images(file) if file.is_file() else None
    found = readers.drawn_birdsnap(everything, base, listed)
    return replace(found, notes=(*found.notes, NOTE))


def read_split(dataset: Dataset, base: Path, split: str) -> ImageList:
    """Read one official split for pretraining; BadInput for one that the files do not have."""
    layout = dataset.parquet
    assert layout is not None
    found = _files_of(dataset, layout, base)
    if split not in found:
        raise BadInput(f"{base}: no split '{split}'; it has {', '.join(found)}")
    return _list_of(dataset, layout, base, split, found[split])


# Which files hold which split


def _files_of(
    dataset: Dataset, layout: HubTables, base: Path
) -> dict[str, tuple[Path, ...]]:
    """Return our split -> its files. BadInput for another configuration, and for a missing split."""
    # 1. The files of each configuration: plain_text/train-*.parquet, default/train/0000.parquet
    of_config: dict[str, dict[str, list[Path]]] = {}
    for file in tables_below(base):
        split = _split_of_file(file, base)
        if split is None:
            raise BadInput(
                f"{file}: its name tells no split; call it train-{file.name} or"
                f" test-{file.name}"
            )
        config = file.relative_to(base).parts[0]
        if config in ("data", file.name) or split_of(config) is not None:
            config = ""
        of_config.setdefault(config, {}).setdefault(split, []).append(file)
    # 2. The one that is asked for
    if layout.config in of_config and layout.config:
        chosen = of_config[layout.config]
    elif len(of_config) > 1:
        names = " and ".join(config or "data" for config in sorted(of_config)[:3])
        raise BadInput(
            f"{base}: holds the configurations {names}; keep the one of {dataset.name}"
        )
    else:
        ((config, chosen),) = of_config.items()
        if layout.config and config not in ("", "default"):
            raise BadInput(
                f"{base / config}: another configuration than {layout.config}, which"
                f" {dataset.name} is; get that one"
            )
    # 3. The splits that this dataset has
    if layout.order == "listed":
        # Our own splits are drawn of all images, however a copy divides them
        return {"train": tuple(sorted(file for of in chosen.values() for file in of))}
    wanted = ["train"] if layout.whole else ["train", "test"]
    if dataset.sizes[1] is not None:
        wanted.insert(1, "val")
    elif "val" in chosen and "test" not in chosen:
        # Food-101's test images are called validation there
        chosen["test"] = chosen.pop("val")
    for split in wanted:
        if split not in chosen:
            there = ", ".join(chosen)
            raise BadInput(
                f"{base}: no Parquet files of the split '{split}' beside {there}; get them, too"
            )
    more = [split for split in chosen if split not in wanted]
    if more:
        raise BadInput(
            f"{chosen[more[0]][0]}: {dataset.name} has no split '{more[0]}'; another division of"
            f" it: get {dataset.get}"
        )
    return {split: tuple(sorted(chosen[split])) for split in wanted}


def _split_of_file(file: Path, base: Path) -> str | None:
    """Return the split in a file's name or folder: train-00000-of-00001, cifar10-train, train/0000."""
    stem = _PART.sub("", file.stem)
    words = [stem, stem.partition("-")[0], stem.rpartition("-")[2]]
    if file.parent != base:
        words.append(file.parent.name)
    return next((split_of(word) for word in words if split_of(word)), None)


# What is in them


def _list_of(
    dataset: Dataset,
    layout: HubTables,
    base: Path,
    split: str,
    files: Sequence[Path],
) -> ImageList:
    """List the images of one split under the paths and labels of the owner's archives."""
    import numpy as np

    from backbench.containers import class_lists, table_cache
    from backbench.containers.spans import SpanList

    tables: list[Table] = []
    marks: list[Mark] = []
    groups = _groups(layout, files, base)
    files = [file for group in groups for file in group]  # in the order of their tables
    for group in groups:
        container = Container("parquet", group, labels=layout.labels)
        more_tables, more_marks = table_cache.tables_of(container)
        tables += more_tables
        marks += more_marks
    # 1. The rows of all files, their labels by one list of classes
    tables, class_names = class_lists.joined(files, tables)
    names: list[str] = []
    stated: list[int] = []
    spans = []
    for number, table in enumerate(tables):
        names += table.names
        stated += table.labels.tolist()
        part = table.spans.copy()
        part["file"] = number
        spans.append(part)
    if not names:
        raise BadInput(f"{files[0]}: holds no image")
    # 2. Labels as the archives count them
    if layout.order == "stated" and tables[0].by_text:
        raise BadInput(
            f"{files[0]}: its labels are names, and {dataset.name}'s classes are counted by the"
            f" owner's numbers; get {dataset.get}"
        )
    if layout.order == "listed":
        class_names, stated = _as_listed(base / layout.beside[0], class_names, stated)
    own_label = _places(dataset, layout, files[0], class_names)  # by the stated one
    for row, label in enumerate(stated):
        if label not in own_label:
            raise BadInput(
                f"{files[0]}: row {row} has label {label}; {dataset.name} allows"
                f" 0..{len(own_label) - 1}"
            )
    labels = [own_label[label] for label in stated]
    classes = [""] * len(own_label)
    for label, own in own_label.items():
        classes[own] = class_names[label] if class_names else str(own)
    # 3. Paths as in the archives. A table without names of its own is named by its rows
    paths = [
        layout.path.format_map(
            {"file": name.rpartition("/")[2], "class": classes[label], "split": split}
        )
        for name, label in zip(names, labels)
    ]
    if len(set(paths)) < len(paths) or layout.arrays:
        paths = [f"{split}/{row:05}" for row in range(len(names))]
    images = SpanList(
        base,
        paths,
        tuple(labels),
        tuple(classes),
        np.concatenate(spans),
        tuple(str(file) for file in files),
        tuple(marks),
        "parquet",
    )
    if layout.arrays:
        return _as_array(images, split)
    order = sorted(range(len(paths)), key=paths.__getitem__)
    return images.subset(order)


def _groups(
    layout: HubTables, files: Sequence[Path], base: Path
) -> list[tuple[Path, ...]]:
    """Return the files that count their parts together, as train-00000-of-00002. Several splits are
    one list only where ours are drawn from all of them."""
    if layout.order != "listed":
        return [tuple(files)]
    groups: dict[str | None, list[Path]] = {}
    for file in files:
        groups.setdefault(_split_of_file(file, base), []).append(file)
    return [tuple(group) for group in groups.values()]


def _as_listed(
    file: Path, names: Sequence[str], labels: Sequence[int]
) -> tuple[tuple[str, ...], list[int]]:
    """Return the classes of the owner's list, and labels by it. A table calls a species by its
    folder or by its common name."""
    if not file.is_file():
        raise BadInput(
            f"{file} is missing: the order of the classes is in it; get it from the same repository"
        )
    species = readers.birdsnap_species(file)
    place = {row["common"]: label for label, row in enumerate(species)}
    place |= {row["dir"]: label for label, row in enumerate(species)}
    for name in names:
        if name not in place:
            shown = printable.shown(name, 60)
            raise BadInput(
                f"{file}: lists no species '{shown}', which the tables have; get the owner's file"
            )
    classes = tuple(row["dir"] for row in species)
    return classes, [
        label if not 0 <= label < len(names) else place[names[label]]
        for label in labels
    ]


def _places(
    dataset: Dataset, layout: HubTables, file: Path, names: Sequence[str]
) -> Mapping[int, int]:
    """Return label in the table -> label in the archives. BadInput for other classes."""
    count = dataset.classes or len(names)
    if names and len(names) != count:
        shown = printable.shown(", ".join(names[:3]), 100)
        raise BadInput(
            f"{file}: {len(names)} classes ({shown}), and {dataset.name} has {count}: another"
            " configuration"
        )
    if names and all(name.isdigit() for name in names):
        # Folders of numbers, sorted as text: 1, 10, 100, 2
        order = sorted(range(count), key=lambda label: int(names[label]))
    elif names and layout.order == "names":
        order = sorted(range(count), key=lambda label: _plain(names[label]))
    elif names and layout.order == "text":
        order = sorted(range(count), key=names.__getitem__)
    else:
        order = list(range(count))
    return {label: own for own, label in enumerate(order)}


def _plain(name: str) -> str:
    """Return a class name as those who write it unlike agree: American Bulldog, american_bulldog."""
    return name.casefold().replace(" ", "_").replace("-", "_")


def _as_array(images: SpanList, split: str) -> ArrayList:
    """Decode small pictures into one array, in the order of the owner's batches."""
    import numpy as np

    order = archive_order(images.labels) if split == "train" else range(len(images))
    pixels = [images.array(index) for index in order]
    shapes = {picture.shape for picture in pixels}
    if len(shapes) > 1:
        raise BadInput(
            f"{images.containers[0]}: pictures of several sizes; they were changed: get the"
            " owner's files"
        )
    labels = tuple(images.labels[index] for index in order)
    return ArrayList(
        images.root, images.paths, labels, images.classes, np.stack(pixels)
    )


def archive_order(labels: Sequence[int]) -> Sequence[int]:
    """Return the rows by the numbers of CIFAR-10's batches, whose first labels tell them; all rows
    as they are where these are no such batches."""
    size = len(labels) // len(BATCHES)
    begin_of: dict[int, int] = {}
    for begin in range(0, size * len(BATCHES), max(1, size)):
        for number, first in enumerate(BATCHES):
            if tuple(labels[begin : begin + len(first)]) == first:
                begin_of[number] = begin
    if len(begin_of) < len(BATCHES) or size * len(BATCHES) != len(labels):
        return range(len(labels))
    return [
        row
        for number in range(len(BATCHES))
        for row in range(begin_of[number], begin_of[number] + size)
    ]
