"""Names the images of a container as a class folder would: <class>/<file>.

So a list's digest, its hold-out and the key of its cached features do not depend on the container.
ImageNet has names in many forms; all forms of one image become one name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.containers.container import SPLIT_WORDS, Container, split_of
from backbench.errors import BadInput
from backbench.untrusted import opening, printable

# Finding a container needs no numpy, so that the catalog stays cheap to import
if TYPE_CHECKING:
    import numpy as np

    from backbench.containers.tables import Table

# The name of a WebDataset shard (own-train-0003), which is not the name of a class
_SHARD = re.compile(r"(.*[-_.])?\d{3,}")
# A file of ImageNet's train (its synset is group 1) or val; the Hub appends the synset (group 2)
_IMAGENET = re.compile(r"(?:(n\d{8})_\d+|ILSVRC2012_val_\d{8})(?:_(n\d{8}))?\.\w+")
_HUB_TAIL = re.compile(r"_n\d{8}(?=\.\w+$)")


class Rows:
    """The images of several tables in columns. Folders above the classes are cut off the names."""

    def __init__(
        self,
        container: Container,
        tables: Sequence[Table],
        split: str,
        listed: Mapping[str, int],
    ) -> None:
        """`listed` has labels by name, which come before those that the container states."""
        self.names: list[str] = []
        self.labels: list[int] = []  # -1: unlabelled
        self.spans: list[np.ndarray] = []  # a part for each table
        words = (split, *SPLIT_WORDS.get(split, ()))
        # Whether a file named by its class holds folders; of several, the last one stands for all
        folders_in_class = False
        for number, (file, table) in enumerate(zip(container.files, tables)):
            # One tar file for each class, named by it, as DINOv2 reads ImageNet-22k
            of_class = len(container.files) > 1 and not _SHARD.fullmatch(file.stem)
            begin = shared_length(table.names, words, "" if of_class else file.stem)
            flat = of_class and not any("/" in name[begin:] for name in table.names)
            folders_in_class = of_class and not flat
            kept = []
            for row, (name, label) in enumerate(
                zip(table.names, table.labels.tolist())
            ):
                short = name[begin:]
                if container.inside:
                    if not short.startswith(f"{container.inside}/"):
                        continue
                    short = short[len(container.inside) + 1 :]
                path = short
                if flat and label < 0:
                    path = f"{file.stem}/{short}"
                self.names.append(path)
                # A list has the image under its short name, under its whole name, or not at all.
                by_whole_name = listed.get(name, label)
                self.labels.append(listed.get(short, by_whole_name))
                kept.append(row)
            spans = table.spans[kept]
            spans["file"] = number
            self.spans.append(spans)
        tops = {name.partition("/")[0] for name in self.names if "/" in name}
        unlabelled = max(self.labels, default=0) < 0
        if unlabelled and folders_in_class and len(tops) == 1:
            raise BadInput(
                f"{container.files[0].parent}: each of its {len(container.files)} {container.kind}"
                f" files holds the one folder '{printable.shown(min(tops), 80)}', so there are no"
                f" classes; leave the folder out of a {container.kind} file that is named by its class"
            )


def shared_length(names: Sequence[str], words: Iterable[str], own: str = "") -> int:
    """Count the leading characters, shared by all names, that are folders above the classes.

    These are the shared folders down to the last one called as `words`: in
    ILSVRC/Data/CLS-LOC/train/n01440764/1.JPEG all up to train/. `own` is the container's own name;
    it counts as such a word, unless the images lie directly in it: then it is a class."""
    if not names:
        return 0
    # What the first and the last name in sorted order share, all names share
    first = min(names).split("/")[:-1]
    last = max(names).split("/")[:-1]
    shared = []
    for one, other in zip(first, last):
        if one != other:
            break
        shared.append(one)
    shallow = min(name.count("/") for name in names)
    keep = 0
    for count, word in enumerate(shared, 1):
        named = word in words or word.lower() in words
        if named or (word == own and shallow > count):
            keep = count
    # Folders above train/ and val/ are above the classes, whatever they are called
    below = {
        name.split("/")[len(shared)] for name in names if name.count("/") > len(shared)
    }
    if not keep and below and all(split_of(folder) is not None for folder in below):
        keep = len(shared)
    return len("/".join(shared[:keep])) + 1 if keep else 0


def listed_labels(base: Path, split: str) -> dict[str, int]:
    """Read Swin's `val_map.txt`: file name -> label. Empty where there is no such file."""
    file = base / f"{split}_map.txt"
    if not split or not file.is_file():
        return {}
    out: dict[str, int] = {}
    try:
        text = opening.read_bytes(file, most=opening.GIGABYTE).decode()
        for line in text.splitlines():
            name, _, label = line.partition("\t")
            out[name] = int(label)
    except (OSError, ValueError) as error:
        said = printable.shown(str(error), 100)
        raise BadInput(
            f"{file}: a line is name, tab, number of the class ({said})"
        ) from None
    return out


def class_of_label(
    rows: Rows, stated: Sequence[str], every: Sequence[str] | None
) -> Mapping[int, str]:
    """Return the class that each label stands for; empty where no image has a label.

    `stated` are the class names that the container gives. `every` is the class list that its
    numbers refer to; None means that the container has classes of its own."""
    labels = set(rows.labels) - {-1}
    if not labels:
        return {}
    if every is not None:
        # A synset is taken from the position, never from a name: `crane` is two classes
        if len(stated) in (0, len(every)):
            return dict(enumerate(every))
        # Another number of classes is a choice of them; the file names tell which
        synsets = set()
        for name in rows.names:
            match = _IMAGENET.fullmatch(name)
            if match:
                synsets.add(match[2] or match[1])
        return dict(enumerate(sorted(synsets - {None})))
    if stated:
        # Two classes of one name stay two: ImageNet has two cranes
        count = Counter(stated)
        return {
            label: name if count[name] == 1 else f"{name} {label}"
            for label, name in enumerate(stated)
        }
    # There are numbers alone: the folders of the images name the classes, where each folder has one
    # label and each label one folder
    folders = [name.rpartition("/")[0].partition("/")[0] for name in rows.names]
    pairs = set(zip(rows.labels, folders))
    of_label = dict(pairs)
    names = set(of_label.values())
    if "" not in names and len(names) == len(pairs) == len(of_label):
        return of_label
    return {label: str(label) for label in labels}


def placed(
    rows: Rows,
    named: Mapping[int, str],
    container: Container,
    *,
    imagenet: bool,
    by_text: bool = False,
) -> tuple[list[str], list[str]]:
    """Return the path in a class folder, and the class ('' for none), of every image.

    `named` is what `class_of_label` returns. BadInput for a label that contradicts its image's
    folder or file name: a number counts the classes in another order, and a text (`by_text`) is
    another class."""
    paths: list[str] = []
    classes: list[str] = []
    known = set(named.values())
    for name, label in zip(rows.names, rows.labels):
        # 1. What the name says of the class: its first folder, or the synset in ImageNet's names
        folder, _, base = name.rpartition("/")
        top = folder.partition("/")[0]
        match = _IMAGENET.fullmatch(base)
        synset = (match[2] or match[1] or "") if match else ""
        own = top if top in known else synset
        # 2. The class, by name and label
        if not named:
            its_class = top or synset
        elif label < 0:
            its_class = own if own in known else ""
        else:
            its_class = named.get(label, "")
            if by_text and own in known and own != its_class:
                raise BadInput(
                    f"{container.files[0]}: {printable.shown(name, 100)} has the label"
                    f" '{printable.shown(its_class, 60)}' and lies in '{printable.shown(own, 60)}';"
                    " write one class in both, or leave the folders out"
                )
            if not its_class or (own in known and own != its_class):
                raise BadInput(
                    f"{container.files[0]}: {printable.shown(name, 100)} has label {label}, which"
                    f" is class '{its_class}' by sorted names, another order than the labels';"
                    " write the labels as positions of sorted class names, or leave them out"
                )
        # 3. The file's name, as ImageNet's own archives have it: shards also say .jpg and .jpeg
        short = _HUB_TAIL.sub("", name)
        if imagenet and match:
            short = f"{short.rpartition('.')[0]}.JPEG"
        paths.append(short if top == its_class else f"{its_class}/{short}")
        classes.append(its_class)
    return paths, classes
