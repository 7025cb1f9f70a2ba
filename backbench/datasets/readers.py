"""How each dataset is read from disk: (the folder that holds it, the hold-out's seed) -> its splits.

torchvision's classes read what they read rightly; the others have readers of their own: Caltech101 (gray images, no
split, no background class), SUN397 (no split, unsorted), Birdsnap (none), ImageNet (its devkit is not needed).
"""

from __future__ import annotations

import csv
import importlib.resources
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from backbench.datasets import splits
from backbench.datasets.row import Reader, SplitReader
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images import archives
from backbench.images.files import ArrayList, ImageList, scan_folder


def _torchvision(read: Callable[[], Any], base: Path) -> Any:
    """A torchvision dataset object; its exceptions as one line that names the folder and what is wrong with it."""
    try:
        return read()
    except (RuntimeError, OSError, KeyError, ValueError, IndexError) as error:
        what = (
            " ".join(str(error).split())
            .replace("You can use download=True to download it", "")
            .strip()
        )
        raise BadInput(
            f"{base}: not in the layout that torchvision reads ({type(error).__name__}: {what})"
        ) from None


def _listed(
    base: Path, files: Sequence[Any], labels: Sequence[Any], classes: Sequence[str]
) -> ImageList:
    paths = tuple(Path(file).relative_to(base).as_posix() for file in files)
    return ImageList(base, paths, tuple(int(label) for label in labels), tuple(classes))


def aircraft(base: Path, seed: int) -> Splits:
    from torchvision.datasets import FGVCAircraft

    parts = []
    for split in ("train", "val", "test"):
        d = _torchvision(
            lambda split=split: FGVCAircraft(base, split, annotation_level="variant"), base
        )  # type: ignore[misc]
        parts.append(_listed(base, d._image_files, d._labels, d.classes))
    return splits.with_hold_out(parts[0], parts[2], parts[1])


def birdsnap(base: Path, seed: int) -> Splits:
    """LORAC's split: of every species' images that are still there, 5 drawn for val and 5 for test."""
    folder = base / "birdsnap"
    species = sorted(_table(folder / "species.txt", ("id", "dir")), key=lambda row: int(row["id"]))
    label_of = {row["id"]: label for label, row in enumerate(species)}
    listed = _table(folder / "images.txt", ("path", "species_id"))
    images = next(
        (p for p in (folder / "images", folder / "download" / "images") if p.is_dir()), None
    )
    if images is None:
        raise BadInput(
            f"{folder}: no folder 'images'; run the dataset's own get_birdsnap.py, or copy the images there"
        )
    rows = sorted((row["path"], row["species_id"]) for row in listed)
    there = [
        (path, kind)
        for path, kind in rows
        if (images / path).is_file() and (images / path).stat().st_size
    ]
    for path, kind in there:
        if kind not in label_of:
            raise BadInput(
                f"{folder}/images.txt: {path} has species '{kind}', which species.txt does not list"
            )
    labels = tuple(label_of[kind] for _, kind in there)
    everything = ImageList(
        images, tuple(p for p, _ in there), labels, tuple(row["dir"] for row in species)
    )
    absent = sorted(set(range(len(species))) - set(labels))
    if absent:
        raise BadInput(
            f"{images}: no image of {len(absent)} species, '{everything.classes[absent[0]]}' first"
        )
    val, test = [], []
    for label, indices in splits.ranked(everything, seed).items():
        if len(indices) < 11:
            name = everything.classes[label]
            raise BadInput(
                f"{images}: species '{name}' has {len(indices)} images; 5 + 5 and training need 11"
            )
        val += indices[:5]
        test += indices[5:10]
    held = {*val, *test}
    train = everything.subset([i for i in range(len(everything)) if i not in held])
    note = f"coverage {len(there)} of {len(rows)} listed images ({100 * len(there) / max(1, len(rows)):.1f}%)"
    return Splits(
        train, everything.subset(sorted(val)), everything.subset(sorted(test)), False, (note,)
    )


def _table(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """A tab-separated file with a header line."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    if not rows or any(column not in rows[0] for column in columns):
        raise BadInput(
            f"{file}: expected tab-separated columns {', '.join(columns)} under a header line"
        )
    return rows


def caltech101(base: Path, seed: int) -> Splits:
    """30 images per class drawn for training, the rest is test; BACKGROUND_Google is a class, as sizes 3,060 + 6,084
    say. Gray images become RGB like all others when they are decoded."""
    everything = scan_folder(base / "caltech101" / "101_ObjectCategories")
    train, test = splits.draw(everything, 30, seed, what="caltech101's training split")
    return splits.with_hold_out(everything.subset(train), everything.subset(test), seed=seed)


def cars(base: Path, seed: int) -> Splits:
    from torchvision.datasets import StanfordCars

    parts = []
    for split in ("train", "test"):
        d = _torchvision(lambda split=split: StanfordCars(base, split), base)  # type: ignore[misc]
        parts.append(
            _listed(base, [f for f, _ in d._samples], [n for _, n in d._samples], d.classes)
        )
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


def cifar(name: Literal["CIFAR10", "CIFAR100"]) -> Reader:
    def read(base: Path, seed: int) -> Splits:
        from torchvision import datasets as tv

        parts = []
        for split in ("train", "test"):
            d = _torchvision(
                lambda split=split: getattr(tv, name)(base, train=split == "train"), base
            )  # type: ignore[misc]
            names = tuple(f"{split}/{i:05d}" for i in range(len(d.data)))
            parts.append(
                ArrayList(base, names, tuple(map(int, d.targets)), tuple(d.classes), d.data)
            )
        return splits.with_hold_out(parts[0], parts[1], seed=seed)

    return read


def stl10(base: Path, seed: int) -> Splits:
    from torchvision.datasets import STL10

    parts = []
    for split in ("train", "test"):
        d = _torchvision(lambda split=split: STL10(base, split), base)  # type: ignore[misc]
        names = tuple(f"{split}/{i:05d}" for i in range(len(d.data)))
        pixels = d.data.transpose(0, 2, 3, 1)
        parts.append(ArrayList(base, names, tuple(map(int, d.labels)), tuple(d.classes), pixels))
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


def dtd(base: Path, seed: int) -> Splits:
    from torchvision.datasets import DTD

    parts = []
    for split in ("train", "val", "test"):
        d = _torchvision(lambda split=split: DTD(base, split, partition=1), base)  # type: ignore[misc]
        parts.append(_listed(base, d._image_files, d._labels, d.classes))
    return splits.with_hold_out(parts[0], parts[2], parts[1])


def flowers(base: Path, seed: int) -> Splits:
    from torchvision.datasets import Flowers102

    parts = []
    for split in ("train", "val", "test"):
        d = _torchvision(lambda split=split: Flowers102(base, split), base)  # type: ignore[misc]
        names = getattr(d, "classes", None) or [f"flower {i + 1}" for i in range(102)]
        parts.append(_listed(base, d._image_files, d._labels, names))
    return splits.with_hold_out(parts[0], parts[2], parts[1])


def food(base: Path, seed: int) -> Splits:
    from torchvision.datasets import Food101

    parts = []
    for split in ("train", "test"):
        d = _torchvision(lambda split=split: Food101(base, split), base)  # type: ignore[misc]
        parts.append(_listed(base, d._image_files, d._labels, d.classes))
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


def pets(base: Path, seed: int) -> Splits:
    from torchvision.datasets import OxfordIIITPet

    parts = []
    for split in ("trainval", "test"):
        d = _torchvision(lambda split=split: OxfordIIITPet(base, split), base)  # type: ignore[misc]
        parts.append(_listed(base, d._images, d._labels, d.classes))
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


def places365(base: Path, seed: int) -> Splits:
    """Places365-Standard; the official val is the test split. The 256-pixel images where they are there."""
    from torchvision.datasets import Places365

    small = (base / "data_256_standard").is_dir()
    if not small and not (base / "data_large_standard").is_dir():
        raise BadInput(
            f"{base}: no data_256_standard or data_large_standard; get train_256_places365standard.tar"
        )
    parts = []
    for split in ("train-standard", "val"):
        d = _torchvision(lambda split=split: Places365(base, split, small=small), base)  # type: ignore[misc]
        parts.append(_listed(base, [f for f, _ in d.imgs], d.targets, d.classes))
    note = ("256-pixel images" if small else "large images",)
    return splits.with_hold_out(parts[0], parts[1], seed=seed, notes=note)


def sun397(base: Path, seed: int) -> Splits:
    """Partition 01 of the official lists; labels in the order of ClassName.txt."""
    images = base / "SUN397"
    classes = [
        line.strip() for line in (images / "ClassName.txt").read_text().splitlines() if line.strip()
    ]
    label_of = {name: label for label, name in enumerate(classes)}
    parts = []
    for file in ("Training_01.txt", "Testing_01.txt"):
        listing = next(
            (p for p in (base / "Partitions" / file, images / file) if p.is_file()), None
        )
        if listing is None:
            raise BadInput(
                f"{base / 'Partitions' / file} is missing; get SUN's Partitions.zip and unpack it there"
            )
        lines = [line.strip() for line in listing.read_text().splitlines() if line.strip()]
        for line in lines:
            if line.rsplit("/", 1)[0] not in label_of:
                raise BadInput(f"{listing}: {line} is of no class in {images / 'ClassName.txt'}")
        labels = tuple(label_of[line.rsplit("/", 1)[0]] for line in lines)
        parts.append(
            ImageList(images, tuple(line.lstrip("/") for line in lines), labels, tuple(classes))
        )
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


# One split, for pretraining: no hold-out is cut off, and unlabelled images count


def cifar_split(name: str) -> SplitReader:
    def read(root: Path, split: str) -> ImageList:
        return archives.read_cifar(root / name, split)

    return read


def stl10_split(root: Path, split: str) -> ImageList:
    return archives.read_stl10(root / "stl10", split)


def imagenet100_split(root: Path, split: str) -> ImageList:
    """ImageNet's own folder will do; the labels follow the list's order (evaluation sorts it)."""
    folder = root / "imagenet100"
    folder = folder if folder.is_dir() else root / "imagenet"
    return folder_or_shards(folder / split, classes=class_list("imagenet100"))


def folder_or_shards(folder: Path, *, classes: Sequence[str] | None = None) -> ImageList:
    """FOLDER/*.tar in WebDataset's layout where there are any, FOLDER/<class>/<image> otherwise."""
    shards = sorted(folder.glob("*.tar"))
    return archives.scan_shards(shards) if shards else scan_folder(folder, classes=classes)


def class_list(name: str) -> list[str]:
    """The synsets of imagenet or imagenet100, in label order: sorted."""
    text = (importlib.resources.files("backbench.datasets") / f"{name}.txt").read_text()
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def imagenet(base: Path, seed: int) -> Splits:
    return _synsets(base, class_list("imagenet"), seed)


def imagenet100(base: Path, seed: int) -> Splits:
    return _synsets(base, sorted(class_list("imagenet100")), seed)


def _synsets(folder: Path, classes: Sequence[str], seed: int) -> Splits:
    """FOLDER/{train,val}/<synset>/*.JPEG; the official val is the test split."""
    for part in ("train", "val"):
        if not any(p.is_dir() for p in (folder / part).iterdir()):
            raise BadInput(
                f"{folder / part}: images lie in no class folders; sort them as {part}/<synset>/*.JPEG"
            )
    train, test = (scan_folder(folder / part, classes=classes) for part in ("train", "val"))
    return splits.with_hold_out(train, test, seed=seed)
