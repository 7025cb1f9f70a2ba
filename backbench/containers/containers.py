"""Finds the container that holds a split and names its images as a class folder would. So a list's
digest, its hold-out and the key of its cached features do not depend on the container."""

from __future__ import annotations

import functools
import glob
import gzip
import hashlib
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.errors import BadInput
from backbench.images.image_list import ImageList, Names, missing_classes, scan_folder
from backbench.untrusted import opening, printable

# Finding a container needs no numpy, so that the catalog stays cheap to import
if TYPE_CHECKING:
    import numpy as np

    from backbench.containers.spans import Mark, SpanList, Table

KEY = "container"  # of a row's provenance
# A split's names in files of others
WORDS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid"),
    "test": ("test", "testing"),
}
SPLIT_OF = {word: split for split, words in WORDS.items() for word in words}
# Kind -> where a split's files may lie below the dataset's folder. Never `*.arrow`: the library's
# cache-*.arrow beside the data are results of its `map`
PATTERNS = {
    "tar": ("{}.tar", "{}/*.tar", "*_{}.tar", "{}-*.tar", "*-{}-*.tar"),
    "zip": ("{}.zip", "{}/*.zip", "*_{}.zip", "{}-*.zip"),
    "parquet": (
        "{}.parquet",
        "{}/*.parquet",
        "{}-*.parquet",
        "data/{}-*.parquet",
        "*/{}/*.parquet",
    ),
    "arrow": ("{}.arrow", "{}/data-*.arrow", "*-{}.arrow", "*-{}-*-of-*.arrow"),
    "lmdb": ("{}.lmdb", "{}.lmdb/data.mdb", "{}_lmdb/data.mdb", "{}/data.mdb"),
}
# Kind -> endings of a file that holds a dataset
WHOLE: dict[str, tuple[str, ...]] = {kind: (f".{kind}",) for kind in PATTERNS}
WHOLE["lmdb"] = (".lmdb", "data.mdb")
_PACKED_TAR = (
    "a compressed tar can only be read from its beginning; unpack it, or gunzip it"
)
_HDF5 = (
    "HDF5 has no convention for images; write them as class folders or as a zip file"
)
REFUSED = {
    ".tar.gz": _PACKED_TAR,
    ".tgz": _PACKED_TAR,
    ".beton": "FFCV holds other pixels than the images, resized and encoded again; use the images",
    ".tfrecord": "TFRecord is not read; use the tar files that it was made from, or class folders",
    ".h5": _HDF5,
    ".hdf5": _HDF5,
}
LARGEST_NAMES = (
    4 * opening.GIGABYTE
)  # bytes of names.tsv, unpacked; ImageNet's train has 80 MB
_SHARD = re.compile(
    r"(.*[-_.])?\d{3,}"
)  # the name of a WebDataset shard, not that of a class
_PART = re.compile(r"-\d{5}-of-(\d{5})\b")  # train-00003-of-00294.parquet
_IMAGENET = re.compile(r"(?:(n\d{8})_\d+|ILSVRC2012_val_\d{8})(?:_(n\d{8}))?\.\w+")
_HUB_TAIL = re.compile(
    r"_n\d{8}(?=\.\w+$)"
)  # the Hub writes the synset behind each file's name


@dataclass(frozen=True)
class Container:
    """The files that hold a split; `inside` is its folder there, where they hold several."""

    kind: str
    files: tuple[Path, ...]
    inside: str = ""

    def __post_init__(self) -> None:
        folder = self.files[0].parent
        for file in self.files:
            if file.parent != folder:
                raise BadInput(
                    f"{folder}: and {file.parent} hold the same split, twice; move one away"
                )
            part = _PART.search(file.name)
            if part and int(part[1]) != len(self.files):
                raise BadInput(
                    f"{file}: is one of {int(part[1])} files, and {len(self.files)} are there;"
                    " get all of them, and only them"
                )


def find(base: Path, split: str) -> Container | None:
    """Return the container of a split of the dataset in BASE (or in BASE.zip, BASE.tar); None where
    there is none, or a class folder. BadInput for a split that is there twice."""
    found: list[tuple[str, str, list[Path]]] = []
    for kind, pattern, files in _files_of(base, split):
        if files not in [others for _, _, others in found]:
            found.append((kind, pattern, files))
    folder = base / split
    if folder.is_dir() and any(
        p.is_dir() and p.name[0] != "." for p in folder.iterdir()
    ):
        # A class folder wins over the archives that it was unpacked from
        for _, pattern, files in found:
            unpacked = pattern == "{}/*.tar" and all(
                (folder / f.stem).is_dir() for f in files
            )
            if not unpacked and pattern != "*_{}.tar":
                raise BadInput(
                    f"{base}: '{split}' is there twice, {folder} and {files[0]}; move one"
                )
        return None
    if len(found) > 1:
        first, second = found[0][2][0], found[1][2][0]
        raise BadInput(
            f"{base}: '{split}' is there twice, {first} and {second}; move one away"
        )
    if found:
        return Container(found[0][0], tuple(found[0][2]))
    if (container := whole(base)) is None:
        return None
    from backbench.containers.spans import mark_of

    inside = _splits_inside(container, tuple(map(mark_of, container.files)))
    return replace(container, inside=inside[split]) if split in inside else None


def _files_of(base: Path, split: str) -> Iterator[tuple[str, str, list[Path]]]:
    """Yield (kind, pattern, files) for each pattern that files of a split have."""
    for word in WORDS.get(split, (glob.escape(split),)):
        for kind, patterns in PATTERNS.items():
            for pattern in patterns:
                files = [
                    p for p in sorted(base.glob(pattern.format(word))) if _usable(p)
                ]
                if files:
                    yield kind, pattern, files


def whole(base: Path) -> Container | None:
    """The container that holds a dataset: BASE.zip, BASE.tar, or such files alone in BASE."""
    found: list[Container] = []
    if base.is_dir():
        children = [p for p in sorted(base.iterdir()) if p.name[0] != "."]
        if any(p.is_dir() for p in children) or any(
            any(_files_of(base, s)) for s in WORDS
        ):
            return None
        for kind, endings in WHOLE.items():
            files = [
                p for p in children if p.name.lower().endswith(endings) and _usable(p)
            ]
            if files:
                found.append(Container(kind, tuple(files)))
    for kind, endings in WHOLE.items():
        for ending in endings:
            file = base.with_name(base.name + ending)
            if _usable(file):
                found.append(Container(kind, (file,)))
    if len(found) > 1:
        names = " and ".join(str(container.files[0]) for container in found)
        raise BadInput(f"{base}: the dataset is there twice, {names}; move one away")
    return found[0] if found else None


def splits_of(base: Path) -> list[str]:
    """The splits that are in containers."""
    return [split for split in WORDS if find(base, split)]


def described(base: Path) -> str:
    """The containers of a dataset in words; empty where it has none."""
    found = {split: container for split in WORDS if (container := find(base, split))}
    if not found and (container := whole(base)):
        found[container.files[0].name] = container
    return "; ".join(
        f"{which}: {c.kind}, {len(c.files)} files" for which, c in found.items()
    )


def _usable(file: Path) -> bool:
    # What is no regular file is refused when it is opened
    there = file.exists() and not file.is_dir()
    return there and not file.name.startswith((".", "cache-"))


def refusal(base: Path, split: str) -> str | None:
    """Why the files that BASE has in place of a split are not read; None where it has none."""
    for folder in (base, base / split, base.parent):
        for file in sorted(folder.iterdir()) if folder.is_dir() else []:
            ours = folder != base.parent or file.name.startswith(f"{base.name}.")
            if ours and (why := refused(file)):
                return why
    return None


def refused(file: Path) -> str | None:
    """Why a file of this name is not read; None for any other name."""
    for ending, why in REFUSED.items():
        if file.name.lower().endswith(ending) or f"{ending}-" in file.name:
            return f"{file}: {why}"
    return None


def provenance(
    splits: Iterable[tuple[str, ImageList]],
) -> dict[str, dict[str, dict[str, object]]]:
    """A row's note on its containers, which decides no column; empty where there are none."""
    from backbench.containers.spans import NamedImages, SpanList

    out: dict[str, dict[str, object]] = {}
    for name, images in splits:
        marks: tuple[Mark, ...] = ()
        if isinstance(images, SpanList):
            kind, marks = images.kind, images.marks
        elif isinstance(images, NamedImages) and images.containers:
            kind = Path(next(iter(images.containers))).suffix[1:]
            marks = tuple(images.containers.values())
        if marks:
            index = hashlib.sha256(repr(marks).encode()).hexdigest()[:16]
            out[name] = {"kind": kind, "files": len(marks), "index": index}
    return {KEY: out} if out else {}


# Reading


def read_split(
    base: Path,
    split: str,
    *,
    classes: Sequence[str] | None = None,
    every: Sequence[str] = (),
) -> ImageList:
    """Read a split from its class folder BASE/<split> or its container; an empty `split` means an
    undivided dataset. `classes` are taken in this label order, and others ignored; `every` is the
    class list that numbers in a container refer to."""
    container = find(base, split) if split else whole(base)
    if container is not None:
        return read(container, base, split, classes=classes, every=every)
    if not (base / split).is_dir() and (why := refusal(base, split)):
        raise BadInput(why)
    return scan_folder(base / split, classes=classes)


def read(
    container: Container,
    base: Path,
    split: str = "",
    *,
    classes: Sequence[str] | None = None,
    every: Sequence[str] = (),
) -> SpanList:
    """The images of a container, or of one split of it, in the order of a class folder."""
    import numpy as np

    from backbench.containers.spans import SpanList

    tables, marks = _tables(container)
    tables = _named_by_contents(container, tables, base, split)
    listed = _listed_labels(base, split)
    rows = _Rows(container, tables, split, listed)
    if not rows.names:
        raise BadInput(
            f"{container.files[0]}: no images in {len(container.files)} files"
        )
    stated = next((table.classes for table in tables if table.classes), ())
    named = _class_of_label(rows, stated, None if classes is None else every)
    paths, places = _placed(rows, named, container, imagenet=bool(every))
    # Sorted as `scan_folder` sorts: by class, then by path
    if classes is None:
        classes = sorted({name for name in places if name})
    elif absent := sorted(set(classes) - set(places)):
        if not any(places):
            raise BadInput(
                f"{container.files[0]}: states no labels; put {split}_map.txt beside it (a line an"
                " image: name, tab, number of the class), or sort the images into class folders"
            )
        raise BadInput(missing_classes(base / split, absent, len(classes)))
    label_of = {name: label for label, name in enumerate(classes)}
    order = []
    for i, (name, path) in enumerate(zip(places, paths)):
        if name in label_of or not name or not classes:  # no name: unlabelled
            order.append((label_of.get(name, -1), path, i))
    order.sort()
    for (_, one, _), (_, other, _) in itertools.pairwise(order):
        if one == other:
            raise BadInput(
                f"{container.files[0]}: {one} is there twice; two images have one name"
            )
    notes = dict.fromkeys(note for table in tables for note in table.notes)
    return SpanList(
        base / split if split else base,
        Names(path for _, path, _ in order),
        tuple(label for label, _, _ in order),
        tuple(classes),
        np.concatenate(rows.spans)[[i for _, _, i in order]],
        tuple(map(str, container.files)),
        tuple(marks),
        container.kind,
        tuple(notes),
    )


def archived(folder: Path, names: Sequence[str]) -> SpanList | None:
    """The images of FOLDER in FOLDER.zip or FOLDER.tar; None where there is the folder, or neither."""
    for kind in ("zip", "tar") if not folder.is_dir() else ():
        file = Path(f"{folder}.{kind}")
        if file.is_file():
            return held(
                ImageList(folder, tuple(names), (), ()), file, names, [folder.name]
            )
    return None


def held(
    images: ImageList, file: Path, names: Sequence[str], words: Iterable[str]
) -> SpanList:
    """Return the images as members of an archive; `names` are theirs there, below folders of
    `words`. BadInput where one is missing."""
    from backbench.containers.spans import SpanList

    kind = file.suffix[1:]
    (table,), marks = _tables(Container(kind, (file,)))
    begin = _common(table.names, words)
    row_of = {name[begin:]: row for row, name in enumerate(table.names)}
    missing = [name for name in names if name not in row_of]
    if missing:
        raise BadInput(
            f"{file}: {len(missing)} of {len(names)} images are missing, first {missing[0]}"
        )
    spans = table.spans[[row_of[name] for name in names]]
    about = images.root, images.paths, images.labels, images.classes
    return SpanList(*about, spans, (str(file),), tuple(marks), kind, table.notes)


def _tables(container: Container) -> tuple[list[Table], list[Mark]]:
    from backbench.containers import scan_archives, scan_columns, spans

    kind = container.kind
    own = {"tar": scan_archives.scan_tars, "zip": scan_archives.scan_zips}
    scan = own.get(kind) or functools.partial(scan_columns.scan, kind)
    return spans.tables_of(container.files, kind, scan)


class _Rows:
    """The images of several tables as columns: names without what all have in common, labels."""

    def __init__(
        self,
        container: Container,
        tables: Sequence[Table],
        split: str,
        listed: Mapping[str, int],
    ) -> None:
        self.names: list[str] = []
        self.labels: list[int] = []
        self.spans: list[np.ndarray] = []
        for number, (file, table) in enumerate(zip(container.files, tables)):
            of_class = len(container.files) > 1 and not _SHARD.fullmatch(file.stem)
            words = (split, *WORDS.get(split, ()))
            begin = _common(table.names, words, "" if of_class else file.stem)
            alone = of_class and not any("/" in name[begin:] for name in table.names)
            kept = []
            for row, (name, label) in enumerate(
                zip(table.names, table.labels.tolist())
            ):
                short = name[begin:]
                if container.inside:
                    if not short.startswith(f"{container.inside}/"):
                        continue
                    short = short[len(container.inside) + 1 :]
                # One tar for each class, as DINOv2 reads ImageNet-22k
                self.names.append(
                    f"{file.stem}/{short}" if alone and label < 0 else short
                )
                self.labels.append(listed.get(short, listed.get(name, label)))
                kept.append(row)
            spans = table.spans[kept]
            spans["file"] = number
            self.spans.append(spans)
        tops = {name.partition("/")[0] for name in self.names if "/" in name}
        unlabelled = max(self.labels, default=0) < 0
        if (
            unlabelled
            and of_class
            and not alone
            and len(container.files) > 1
            and len(tops) == 1
        ):
            raise BadInput(
                f"{container.files[0].parent}: each of its {len(container.files)} tar files holds the"
                f" one folder '{printable.shown(min(tops), 80)}', so there are no classes; leave the"
                " folder out of a tar file that is named by its class"
            )


def _common(names: Sequence[str], words: Iterable[str], own: str = "") -> int:
    """Count the characters of all names that are folders above the classes, up to one of `words`:
    ILSVRC/Data/CLS-LOC/train/. `own` is the container's name, which may be a class's, too."""
    if not names:
        return 0
    first, last = min(names).split("/")[:-1], max(names).split("/")[:-1]
    shared = []
    for one, other in zip(first, last):
        if one != other:
            break
        shared.append(one)
    shallow = min(name.count("/") for name in names)
    keep = 0
    for count, word in enumerate(shared, 1):
        if word in words or (word == own and shallow > count):
            keep = count
    below = {
        name.split("/")[len(shared)] for name in names if name.count("/") > len(shared)
    }
    if not keep and below and below <= SPLIT_OF.keys():
        keep = len(shared)
    return len("/".join(shared[:keep])) + 1 if keep else 0


@functools.lru_cache(maxsize=64)  # a dataset's container is looked for ten times
def _splits_inside(container: Container, marks: tuple[Mark, ...]) -> dict[str, str]:
    """Return split -> its folder in a container that holds several; empty where it is not divided.
    `marks` tell a file from another one of its name."""
    rows = _Rows(container, _tables(container)[0], "", {})
    tops = {name.partition("/")[0] for name in rows.names}
    if not tops <= SPLIT_OF.keys():
        # Beside others, as `unlabeled`, a split is what holds class folders
        deep = {name.partition("/")[0] for name in rows.names if name.count("/") > 1}
        tops = deep & SPLIT_OF.keys()
    out: dict[str, str] = {}
    for top in sorted(tops):
        split = SPLIT_OF[top]
        if out.setdefault(split, top) != top:
            raise BadInput(
                f"{container.files[0]}: '{split}' is there twice, as {out[split]} and {top};"
                " take one out"
            )
    return out


def _named_by_contents(
    container: Container, tables: list[Table], base: Path, split: str
) -> list[Table]:
    """The tables with the names that BASE/names.tsv.gz (`data check --record` writes it as
    contents.tsv.gz beside a copy that has names) gives to images of these bytes."""
    file = base / "names.tsv.gz"
    if not file.exists():
        return tables
    from backbench.containers.spans import contents_of

    paths: dict[str, list[str]] = {}
    try:
        with opening.open_regular(file) as raw, gzip.open(raw) as lines:
            for line in lines.read(LARGEST_NAMES).decode().splitlines():
                part, path, digest = line.split("\t")
                if part == split:
                    paths.setdefault(digest, []).append(path)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        said = printable.shown(str(error), 100)
        raise BadInput(
            f"{file}: not as `data check --record` writes it ({said})"
        ) from None
    out: list[Table] = []
    strange = 0
    for held_in, table in zip(container.files, tables):
        names = []
        for name, digest in zip(table.names, contents_of(held_in, table)):
            # Images of equal bytes may have several names, and each is given once
            left = paths.get(digest)
            strange += not left
            names.append(left.pop() if left else name)
        out.append(replace(table, names=names, labels=table.labels * 0 - 1, classes=()))
        out[-1].check(1 << 62)
    if strange:
        total = sum(len(table.names) for table in tables)
        raise BadInput(
            f"{file}: {strange} of {total} images of '{split}' are not in it"
        )
    return out


def _listed_labels(base: Path, split: str) -> dict[str, int]:
    """Swin's `val_map.txt`: file name -> label; empty where there is none."""
    file = base / f"{split}_map.txt"
    if not split or not file.is_file():
        return {}
    out: dict[str, int] = {}
    try:
        for line in (
            opening.read_bytes(file, most=opening.GIGABYTE).decode().splitlines()
        ):
            name, _, label = line.partition("\t")
            out[name] = int(label)
    except (OSError, ValueError) as error:
        said = printable.shown(str(error), 100)
        raise BadInput(
            f"{file}: a line is name, tab, number of the class ({said})"
        ) from None
    return out


def _class_of_label(
    rows: _Rows, stated: Sequence[str], every: Sequence[str] | None
) -> Mapping[int, str]:
    """Return the class that each label stands for, by the class names that the container states and
    the list `every` that its numbers refer to; `every` is None for classes of its own."""
    labels = set(rows.labels) - {-1}
    if not labels:
        return {}
    if every is not None:
        # A synset is taken from the position, never from a name: `crane` is two classes. Another
        # number of classes is a choice of them, in an order of its own
        if len(stated) in (0, len(every)):
            return dict(enumerate(every))
        synsets = sorted(
            {m[2] or m[1] for m in map(_IMAGENET.fullmatch, rows.names) if m} - {None}
        )
        return dict(enumerate(synsets))
    if stated:
        # Two classes of one name stay two: ImageNet has two cranes
        count = Counter(stated)
        return {
            i: name if count[name] == 1 else f"{name} {i}"
            for i, name in enumerate(stated)
        }
    # Numbers alone: folders beside them name the classes, where each has one label
    pairs = set(
        zip(
            rows.labels,
            (name.rpartition("/")[0].partition("/")[0] for name in rows.names),
        )
    )
    of_label = dict(pairs)
    folders = set(of_label.values())
    if "" not in folders and len(folders) == len(pairs) == len(of_label):
        return of_label
    return {label: str(label) for label in labels}


def _placed(
    rows: _Rows, named: Mapping[int, str], container: Container, *, imagenet: bool
) -> tuple[list[str], list[str]]:
    """(path in the class folder, class or '') of every image."""
    paths, places = [], []
    known = set(named.values())
    for name, label in zip(rows.names, rows.labels):
        folder, _, base = name.rpartition("/")
        top = folder.partition("/")[0]
        match = _IMAGENET.fullmatch(base)
        synset = (match[2] or match[1] or "") if match else ""
        own = top if top in known else synset
        if not named:
            place = top or synset
        elif label < 0:
            place = own if own in known else ""
        else:
            place = named.get(label, "")
            if not place or (own in known and own != place):
                raise BadInput(
                    f"{container.files[0]}: {printable.shown(name, 100)} has label {label}, which"
                    f" is class '{place}' by sorted names, another order than the labels'; write"
                    " the labels as positions of sorted class names, or leave them out"
                )
        short = _HUB_TAIL.sub("", name)
        if imagenet and match:  # shards say .jpg or .jpeg
            short = f"{short.rpartition('.')[0]}.JPEG"
        paths.append(short if top == place else f"{place}/{short}")
        places.append(place)
    return paths, places
