"""Draws, names and checks splits.

A split is a pure function of sorted relative paths, labels and a seed: an image's rank within its
class is the sha256 of (seed, relative path). A random stream could change between versions; so
everyone who has the same files derives the same split."""

import dataclasses
import functools
import hashlib
import os
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput
from backbench.images.dense import DenseList
from backbench.images.image_list import ArrayList, ImageList, Joined
from backbench.images.multilabel import MultiLabelList
from backbench.runs import atomic
from backbench.untrusted import printable

HOLDOUT = 0.2


@dataclass(frozen=True)
class InImageNet:
    """The meaning of a test set's labels among ImageNet's 1000 classes."""

    ids: tuple[tuple[int, ...], ...]  # of each class of the set
    # Of each test image, where several classes are right (ReaL)
    answers: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Splits:
    """A dataset as the protocols use it."""

    train: ImageList
    val: ImageList
    test: ImageList
    held_out: bool  # whether val was drawn from the official train split here
    # Coverage and the like; they go into every result's provenance
    notes: tuple[str, ...] = ()
    # Whether the seed chose which images have a label, where nobody published a list
    drawn_labels: bool = False
    # Of sets that ImageNet's classifiers are tested on; their train and val are empty
    imagenet: InImageNet | None = None

    def both(self) -> ImageList:
        """Return train, then val: what the final heads are trained on."""
        return concatenate(self.train, self.val)

    @functools.cached_property
    def labelled(self) -> str:
        """Digest of train and val together, whichever images a seed held out of train."""
        lines = sorted(line for part in (self.train, self.val) for line in _lines(part))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def items(self) -> Iterable[tuple[str, ImageList]]:
        """Return (name, images) of train, val and test."""
        return (("train", self.train), ("val", self.val), ("test", self.test))


def concatenate(a: ImageList, b: ImageList) -> ImageList:
    """Return the list of `a`, then `b`; they may have different roots."""
    if a.classes != b.classes:
        raise BadInput(f"{a.root} and {b.root} have different class lists")
    if isinstance(a, ArrayList) and isinstance(b, ArrayList):
        import numpy as np

        pixels = np.concatenate((a.pixels, b.pixels))
        paths = [*a.paths, *b.paths]
        return ArrayList(a.root, paths, a.labels + b.labels, a.classes, pixels)
    if isinstance(a, DenseList) and isinstance(b, DenseList):
        return dataclasses.replace(
            a,
            paths=[*a.paths, *b.paths],
            labels=a.labels + b.labels,
            maps=a.maps + b.maps,
        )
    if isinstance(a, MultiLabelList) and isinstance(b, MultiLabelList):
        joined = _joined_paths(a, b)
        return MultiLabelList(
            *joined, a.labels + b.labels, a.classes, marks=a.marks + b.marks
        )
    root, paths = _joined_paths(a, b)
    if type(a) is type(b) is ImageList:
        return ImageList(root, paths, a.labels + b.labels, a.classes)
    return Joined.of((a, b), root=root, paths=paths)


def _joined_paths(a: ImageList, b: ImageList) -> tuple[Path, list[str]]:
    """Return a root that both lists lie below, and their paths relative to it."""
    root = Path(os.path.commonpath((a.root, b.root)))
    paths = []
    for part in (a, b):
        below = ""
        if part.root != root:
            below = f"{part.root.relative_to(root).as_posix()}/"
        paths += [below + path for path in part.paths]
    return root, paths


def ranked(images: ImageList, seed: int) -> dict[int, list[int]]:
    """Return label -> indices of its images, in a fixed shuffled order: by sha256 of 'seed path'."""
    hashed = [
        hashlib.sha256(f"{seed} {path}".encode()).digest() for path in images.paths
    ]
    groups: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(images.labels):
        groups[label].append(index)
    out = {}
    for label, indices in sorted(groups.items()):
        out[label] = sorted(indices, key=hashed.__getitem__)
    return out


def draw(
    images: ImageList, per_class: int, seed: int, *, what: str = "draw"
) -> tuple[list[int], list[int]]:
    """Return (`per_class` indices of each class, the rest), both in the list's order.

    BadInput names a class with fewer images; `what` is what needs them."""
    chosen: set[int] = set()
    for label, indices in ranked(images, seed).items():
        if len(indices) < per_class:
            known = 0 <= label < len(images.classes)
            name = images.classes[label] if known else str(label)
            raise BadInput(
                f"{images.root}: {what} needs {per_class} images of class '{name}',"
                f" found {len(indices)}"
            )
        chosen |= set(indices[:per_class])
    return sorted(chosen), others(images, chosen)


def others(images: ImageList, chosen: set[int]) -> list[int]:
    """Return the indices that are not in `chosen`, in the list's order."""
    return [i for i in range(len(images)) if i not in chosen]


def hold_out(
    images: ImageList, seed: int = 0, *, share: float = HOLDOUT
) -> tuple[list[int], list[int]]:
    """Return (train, val) indices.

    Of a class with n images, floor(n * share + 1/2) go to val: at least one, and at most all but
    one. A single image stays in train."""
    val: set[int] = set()
    for indices in ranked(images, seed).values():
        if len(indices) < 2:
            continue
        # Rounded half up, as round() would not
        count = int(len(indices) * share + 0.5)
        count = min(max(count, 1), len(indices) - 1)
        val |= set(indices[:count])
    return others(images, val), sorted(val)


def with_hold_out(
    train: ImageList,
    test: ImageList,
    val: ImageList | None = None,
    *,
    seed: int = 0,
    notes: tuple[str, ...] = (),
    share: float = HOLDOUT,
) -> Splits:
    """Make splits with the official `val`, or with a share of train held out for it."""
    if val is not None:
        return Splits(train, val, test, held_out=False, notes=notes)
    kept, held = hold_out(train, seed, share=share)
    return Splits(
        train.subset(kept), train.subset(held), test, held_out=True, notes=notes
    )


# What identifies a split


def manifest(images: ImageList) -> str:
    """Write one line per image, in order: path, tab, label (of a dense list the label map, of one
    with several labels an image its mark)."""
    return "".join(_lines(images))


def _lines(images: ImageList) -> Iterator[str]:
    last: Sequence[object] = images.labels
    if isinstance(images, DenseList):
        last = images.maps
    elif isinstance(images, MultiLabelList):
        last = images.marks
    return (f"{path}\t{label}\n" for path, label in zip(images.paths, last))


def digest(images: ImageList) -> str:
    """Return the sha256 of the manifest."""
    return hashlib.sha256(manifest(images).encode()).hexdigest()


def by_path(images: ImageList) -> ImageList:
    """Return the same images in the order of their paths, which is no copy's own."""
    paths = list(images.paths)
    order = sorted(range(len(paths)), key=paths.__getitem__)
    if order == list(range(len(paths))):
        return images
    return images.subset(order)


def digests(splits: Splits) -> dict[str, str]:
    """Return, by split, the sha256 of its manifest."""
    return {name: digest(images) for name, images in splits.items()}


def write_manifests(run: Path, dataset: str, splits: Splits) -> None:
    """Write RUN/manifests/<dataset>-<split>.tsv for the three splits, where they changed."""
    for name, images in splits.items():
        text = manifest(images)
        file = run / "manifests" / f"{dataset}-{name}.tsv"
        if not file.exists() or file.read_text() != text:
            atomic.write_text(file, text)


# Checks


def check(dataset: str, splits: Splits) -> None:
    """Refuse an empty split, labels outside the classes, classes unlike train's, and a class that
    is tested and never learned; read no file."""
    for name, images in splits.items():
        # Sets that are only tested on have an empty train and val
        if splits.imagenet is not None and name != "test":
            continue
        if not len(images):
            hint = "put images there"
            if name == "val":
                hint = "where val is held out of train, a class needs two images there"
            raise BadInput(
                f"{dataset}: the {name} split is empty ({images.root}); {hint}"
            )
        if not images.classes and not images.root.is_dir():
            raise BadInput(
                f"{dataset}: the table of {name} states no classes ({images.root}); write a column"
                " `label` of numbers or names, or paths as class/file"
            )
        if not images.classes:
            raise BadInput(
                f"{dataset}: no class folders in {images.root}; sort the images as"
                f" {images.root}/<class>/<image>"
            )
        by_class = not isinstance(images, DenseList | MultiLabelList)
        if name == "train" and by_class and len(images.classes) < 2:
            raise BadInput(
                f"{dataset}: one class alone, '{printable.shown(images.classes[0], 60)}'"
                f" ({images.root}); a reading tells classes apart: give it two or more"
            )
        limit = len(images.classes) - 1
        # Only a wrong label makes it worth while to go over a million paths
        if min(images.labels) < 0 or max(images.labels) > limit:
            for path, label in zip(images.paths, images.labels):
                if not 0 <= label <= limit:
                    raise BadInput(
                        f"{dataset}: {name} image {path} has label {label};"
                        f" the class list allows 0..{limit}"
                    )
        if images.classes != splits.train.classes:
            raise BadInput(
                f"{dataset}: {name} ({images.root}) and train have different class lists"
                f" ({_difference(images.classes, name, splits.train.classes)});"
                " give both the same classes"
            )
    if classes := unlearned(splits):
        more = f" and {len(classes) - 1} more" if len(classes) > 1 else ""
        raise BadInput(
            f"{dataset}: class '{classes[0]}'{more}: has test images, and none in train to learn"
            f" from ({splits.train.root}); add some, or remove the class"
        )


def unlearned(splits: Splits) -> list[str]:
    """Return the classes that have test images and none to learn from."""
    learned = {*splits.train.labels, *splits.val.labels}
    return _named(splits, set(splits.test.labels) - learned)


def unscored(splits: Splits) -> list[str]:
    """Return the classes that have images to learn from and none in test."""
    learned = {*splits.train.labels, *splits.val.labels}
    return _named(splits, learned - set(splits.test.labels))


def _named(splits: Splits, labels: set[int]) -> list[str]:
    # An image with a label map, or of several classes, has no label of its own
    images = splits.test
    if splits.imagenet is not None or isinstance(images, DenseList | MultiLabelList):
        return []
    return [images.classes[label] for label in sorted(labels)]


def _difference(own: Sequence[str], name: str, train: Sequence[str]) -> str:
    """Say how two class lists differ: only in test: a, b; only in train: c."""
    only_own = sorted(set(own) - set(train))
    only_train = sorted(set(train) - set(own))
    parts = []
    for where, only in ((name, only_own), ("train", only_train)):
        if only:
            more = f" and {len(only) - 5} more" if len(only) > 5 else ""
            parts.append(f"only in {where}: {', '.join(only[:5])}{more}")
    return "; ".join(parts) or "in another order"


def refuse_untrainable(dataset: str, splits: Splits) -> None:
    """Refuse a set that holds test images alone."""
    if splits.imagenet is not None:
        raise BadInput(
            f"{dataset}: has no train images; `backbench ood` tests ImageNet's heads on it"
        )


# Lists of labelled images


def read_list(
    path: Path, *, lines: int | None = None, sha256: str | None = None
) -> dict[str, int]:
    """Read a local list: each image with the number of its line.

    A name is SimCLR's `n04235860_14959.JPEG`, or `class/file`. BadInput for a name that is listed
    twice, and for a list that has not the published `sha256` and number of `lines`, if given."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(
            f"{path}: no such list; `backbench data fetch-splits --out"
            f" {shlex.quote(str(path.parent))}` fetches it"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(
            f"{path}: is no text; write an image a line, as class/file.jpg"
        ) from None
    names: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name = line.strip()
        if name in names:
            raise BadInput(
                f"{path}:{number}: '{printable.shown(name, 100)}' is listed twice, first in line"
                f" {names[name]}; remove one"
            )
        if name:
            names[name] = number
    if sha256 is not None and (
        hashlib.sha256(data).hexdigest() != sha256 or len(names) != lines
    ):
        raise BadInput(
            f"{path}: not the published list (sha256 or length {len(names)} instead of {lines});"
            f" `backbench data fetch-splits --out {shlex.quote(str(path.parent))}` fetches the right"
            " one"
        )
    if not names:
        raise BadInput(
            f"{path}: the list is empty; write an image a line, as class/file.jpg"
        )
    return names


def drawn_list(images: ImageList, percent: float, seed: int) -> dict[str, int]:
    """Draw a list as `read_list` gives it.

    Of a class with n images, take the first floor(n * percent / 100 + 1/2) by sha256 of 'seed
    path', at least two: one to learn from, one to choose by."""
    chosen: list[int] = []
    for indices in ranked(images, seed).values():
        chosen += indices[: max(2, int(len(indices) * percent / 100 + 0.5))]
    return {images.paths[i]: line for line, i in enumerate(sorted(chosen), 1)}


def select(images: ImageList, names: Mapping[str, int], *, where: str) -> list[int]:
    """Return the indices of the listed images (name -> its line in the file `where`), in that order.

    BadInput names one that is not among `images`."""
    index = {path: i for i, path in enumerate(images.paths)}
    folders = {path.split("/")[0] for path in images.paths}
    out = []
    for name, line in names.items():
        # n04235860_14959.JPEG is in the class folder n04235860
        path = name if "/" in name else f"{name.split('_')[0]}/{name}"
        if path not in index:
            # Where the class is there, one image is missing; otherwise the list is of other data
            folder = path.split("/")[0]
            if folder in folders:
                what = "is not on disk"
            else:
                what = f"has a label '{folder}' outside the class list"
            raise BadInput(
                f"{where}:{line}: '{printable.shown(name, 100)}' {what} (looked for"
                f" {printable.shown(str(images.root / path), 300)}); a line is class/file.jpg"
            )
        out.append(index[path])
    listed = {images.labels[place] for place in out}
    absent = [name for label, name in enumerate(images.classes) if label not in listed]
    if absent:
        raise BadInput(
            f"{where}: no image of {len(absent)} classes, '{printable.shown(absent[0], 60)}' first;"
            " nothing can be learnt of them: list one of each"
        )
    return out
