"""The datasets: one row each, and how each is read from disk. `backbench data` lists, checks and records them.

torchvision's classes read what they read rightly; the others have readers of their own: Caltech101 (gray images, no
split, no background class), SUN397 (no split, unsorted), Birdsnap (none), ImageNet (its devkit is not needed).
torchvision's root is ROOT/<name>; ROOT itself is looked at too. Nothing here downloads images.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.resources
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from backbench import resume
from backbench.errors import BadInput, nearest
from backbench.images import ArrayList, ImageList, scan_folder
from transfer import splits
from transfer.splits import Splits

log = logging.getLogger("backbench")
Metric = Literal["top1", "mean_per_class"]
Reader = Callable[[Path, int], Splits]  # (folder that holds what `needs` names, seed of the hold-out)
RECORD = "backbench-splits.json"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    name: str
    classes: int | None
    sizes: tuple[int | None, int | None, int | None]  # train, val, test; None where held out, or not fixed
    metric: Metric
    read: Reader
    needs: tuple[str, ...] = ()  # files or folders that tell that the dataset is there
    folders: tuple[str, ...] = ()  # where to look below ROOT; default: ROOT/<name>, then ROOT
    get: str = ""  # which files to get, and from whom
    licence: str = "as its owner states"
    top5: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, "top5") if self.top5 else (self.metric,)

    def base(self, root: Path) -> Path:
        """The folder that holds all of `needs`. Raises BadInput that names what is missing and how to get it."""
        if not self.needs:
            return root
        folders = [root / folder for folder in self.folders or (self.name, ".")]
        for base in folders:
            if all((base / need).exists() for need in self.needs):
                return base
        missing = next(need for need in self.needs if not (folders[0] / need).exists())
        raise BadInput(f"{self.name}: {folders[0] / missing} is missing; get {self.get} and unpack it there")


# Readers


def _torchvision(read: Callable[[], Any], base: Path) -> Any:
    """A torchvision dataset object; its exceptions as one line that names the folder and what is wrong with it."""
    try:
        return read()
    except (RuntimeError, OSError, KeyError, ValueError, IndexError) as error:
        what = " ".join(str(error).split()).replace("You can use download=True to download it", "").strip()
        raise BadInput(f"{base}: not in the layout that torchvision reads ({type(error).__name__}: {what})") from None


def _listed(base: Path, files: Sequence[Any], labels: Sequence[Any], classes: Sequence[str]) -> ImageList:
    paths = tuple(Path(file).relative_to(base).as_posix() for file in files)
    return ImageList(base, paths, tuple(int(label) for label in labels), tuple(classes))


def _aircraft(base: Path, seed: int) -> Splits:
    from torchvision.datasets import FGVCAircraft

    parts = []
    for split in ("train", "val", "test"):
        d = _torchvision(lambda split=split: FGVCAircraft(base, split, annotation_level="variant"), base)  # type: ignore[misc]
        parts.append(_listed(base, d._image_files, d._labels, d.classes))
    return splits.with_hold_out(parts[0], parts[2], parts[1])


def _birdsnap(base: Path, seed: int) -> Splits:
    """LORAC's split: of every species' images that are still there, 5 drawn for val and 5 for test."""
    folder = base / "birdsnap"
    species = sorted(_table(folder / "species.txt", ("id", "dir")), key=lambda row: int(row["id"]))
    label_of = {row["id"]: label for label, row in enumerate(species)}
    listed = _table(folder / "images.txt", ("path", "species_id"))
    images = next((p for p in (folder / "images", folder / "download" / "images") if p.is_dir()), None)
    if images is None:
        raise BadInput(f"{folder}: no folder 'images'; run the dataset's own get_birdsnap.py, or copy the images there")
    rows = sorted((row["path"], row["species_id"]) for row in listed)
    there = [(path, kind) for path, kind in rows if (images / path).is_file() and (images / path).stat().st_size]
    for path, kind in there:
        if kind not in label_of:
            raise BadInput(f"{folder}/images.txt: {path} has species '{kind}', which species.txt does not list")
    labels = tuple(label_of[kind] for _, kind in there)
    everything = ImageList(images, tuple(p for p, _ in there), labels, tuple(row["dir"] for row in species))
    absent = sorted(set(range(len(species))) - set(labels))
    if absent:
        raise BadInput(f"{images}: no image of {len(absent)} species, '{everything.classes[absent[0]]}' first")
    val, test = [], []
    for label, indices in splits.ranked(everything, seed).items():
        if len(indices) < 11:
            name = everything.classes[label]
            raise BadInput(f"{images}: species '{name}' has {len(indices)} images; 5 + 5 and training need 11")
        val += indices[:5]
        test += indices[5:10]
    held = {*val, *test}
    train = everything.subset([i for i in range(len(everything)) if i not in held])
    note = f"coverage {len(there)} of {len(rows)} listed images ({100 * len(there) / max(1, len(rows)):.1f}%)"
    return Splits(train, everything.subset(sorted(val)), everything.subset(sorted(test)), False, (note,))


def _table(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """A tab-separated file with a header line."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    if not rows or any(column not in rows[0] for column in columns):
        raise BadInput(f"{file}: expected tab-separated columns {', '.join(columns)} under a header line")
    return rows


def _caltech101(base: Path, seed: int) -> Splits:
    """30 images per class drawn for training, the rest is test; BACKGROUND_Google is a class, as sizes 3,060 + 6,084
    say. Gray images become RGB like all others when they are decoded."""
    everything = scan_folder(base / "caltech101" / "101_ObjectCategories")
    train, test = splits.draw(everything, 30, seed, what="caltech101's training split")
    return splits.with_hold_out(everything.subset(train), everything.subset(test), seed=seed)


def _cars(base: Path, seed: int) -> Splits:
    from torchvision.datasets import StanfordCars

    parts = []
    for split in ("train", "test"):
        d = _torchvision(lambda split=split: StanfordCars(base, split), base)  # type: ignore[misc]
        parts.append(_listed(base, [f for f, _ in d._samples], [n for _, n in d._samples], d.classes))
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


def _cifar(name: Literal["CIFAR10", "CIFAR100"]) -> Reader:
    def read(base: Path, seed: int) -> Splits:
        from torchvision import datasets as tv

        parts = []
        for split in ("train", "test"):
            d = _torchvision(lambda split=split: getattr(tv, name)(base, train=split == "train"), base)  # type: ignore[misc]
            names = tuple(f"{split}/{i:05d}" for i in range(len(d.data)))
            parts.append(ArrayList(base, names, tuple(map(int, d.targets)), tuple(d.classes), d.data))
        return splits.with_hold_out(parts[0], parts[1], seed=seed)

    return read


def _stl10(base: Path, seed: int) -> Splits:
    from torchvision.datasets import STL10

    parts = []
    for split in ("train", "test"):
        d = _torchvision(lambda split=split: STL10(base, split), base)  # type: ignore[misc]
        names = tuple(f"{split}/{i:05d}" for i in range(len(d.data)))
        pixels = d.data.transpose(0, 2, 3, 1)
        parts.append(ArrayList(base, names, tuple(map(int, d.labels)), tuple(d.classes), pixels))
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


def _dtd(base: Path, seed: int) -> Splits:
    from torchvision.datasets import DTD

    parts = []
    for split in ("train", "val", "test"):
        d = _torchvision(lambda split=split: DTD(base, split, partition=1), base)  # type: ignore[misc]
        parts.append(_listed(base, d._image_files, d._labels, d.classes))
    return splits.with_hold_out(parts[0], parts[2], parts[1])


def _flowers(base: Path, seed: int) -> Splits:
    from torchvision.datasets import Flowers102

    parts = []
    for split in ("train", "val", "test"):
        d = _torchvision(lambda split=split: Flowers102(base, split), base)  # type: ignore[misc]
        names = getattr(d, "classes", None) or [f"flower {i + 1}" for i in range(102)]
        parts.append(_listed(base, d._image_files, d._labels, names))
    return splits.with_hold_out(parts[0], parts[2], parts[1])


def _food(base: Path, seed: int) -> Splits:
    from torchvision.datasets import Food101

    parts = []
    for split in ("train", "test"):
        d = _torchvision(lambda split=split: Food101(base, split), base)  # type: ignore[misc]
        parts.append(_listed(base, d._image_files, d._labels, d.classes))
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


def _pets(base: Path, seed: int) -> Splits:
    from torchvision.datasets import OxfordIIITPet

    parts = []
    for split in ("trainval", "test"):
        d = _torchvision(lambda split=split: OxfordIIITPet(base, split), base)  # type: ignore[misc]
        parts.append(_listed(base, d._images, d._labels, d.classes))
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


def _places365(base: Path, seed: int) -> Splits:
    """Places365-Standard; the official val is the test split. The 256-pixel images where they are there."""
    from torchvision.datasets import Places365

    small = (base / "data_256_standard").is_dir()
    if not small and not (base / "data_large_standard").is_dir():
        raise BadInput(f"{base}: no data_256_standard or data_large_standard; get train_256_places365standard.tar")
    parts = []
    for split in ("train-standard", "val"):
        d = _torchvision(lambda split=split: Places365(base, split, small=small), base)  # type: ignore[misc]
        parts.append(_listed(base, [f for f, _ in d.imgs], d.targets, d.classes))
    note = ("256-pixel images" if small else "large images",)
    return splits.with_hold_out(parts[0], parts[1], seed=seed, notes=note)


def _sun397(base: Path, seed: int) -> Splits:
    """Partition 01 of the official lists; labels in the order of ClassName.txt."""
    images = base / "SUN397"
    classes = [line.strip() for line in (images / "ClassName.txt").read_text().splitlines() if line.strip()]
    label_of = {name: label for label, name in enumerate(classes)}
    parts = []
    for file in ("Training_01.txt", "Testing_01.txt"):
        listing = next((p for p in (base / "Partitions" / file, images / file) if p.is_file()), None)
        if listing is None:
            raise BadInput(f"{base / 'Partitions' / file} is missing; get SUN's Partitions.zip and unpack it there")
        lines = [line.strip() for line in listing.read_text().splitlines() if line.strip()]
        for line in lines:
            if line.rsplit("/", 1)[0] not in label_of:
                raise BadInput(f"{listing}: {line} is of no class in {images / 'ClassName.txt'}")
        labels = tuple(label_of[line.rsplit("/", 1)[0]] for line in lines)
        parts.append(ImageList(images, tuple(line.lstrip("/") for line in lines), labels, tuple(classes)))
    return splits.with_hold_out(parts[0], parts[1], seed=seed)


def class_list(name: str) -> list[str]:
    """The synsets of imagenet or imagenet100, in label order: sorted."""
    text = (importlib.resources.files("backbench.data") / f"{name}.txt").read_text()
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _imagenet(base: Path, seed: int) -> Splits:
    return _synsets(base, class_list("imagenet"), seed)


def _imagenet100(base: Path, seed: int) -> Splits:
    return _synsets(base, sorted(class_list("imagenet100")), seed)


def _synsets(folder: Path, classes: Sequence[str], seed: int) -> Splits:
    """FOLDER/{train,val}/<synset>/*.JPEG; the official val is the test split."""
    for part in ("train", "val"):
        if not any(p.is_dir() for p in (folder / part).iterdir()):
            raise BadInput(f"{folder / part}: images lie in no class folders; sort them as {part}/<synset>/*.JPEG")
    train, test = (scan_folder(folder / part, classes=classes) for part in ("train", "val"))
    return splits.with_hold_out(train, test, seed=seed)


def class_folder(name: str) -> Dataset:
    """The row of a class folder ROOT/<name>/{train,val,test}/<class>/<image>; val is optional."""

    def read(root: Path, seed: int) -> Splits:
        return _read_class_folder(name, root, seed)

    return Dataset(name=name, classes=None, sizes=(None, None, None), metric="top1", read=read)


def _read_class_folder(name: str, root: Path, seed: int) -> Splits:
    base = root / name
    if not base.is_dir():
        hint = nearest(name, DATASETS)
        raise BadInput(f"{base}: no such folder; expected {base}/train/<class>/<image>, or a known dataset: {hint}")
    parts: dict[str, ImageList] = {}
    for split in ("train", "val", "test"):
        if (base / split).is_dir():
            parts[split] = scan_folder(base / split)
        elif split != "val":
            raise BadInput(f"{base}: no folder '{split}'; expected {base}/{{train,val,test}}/<class>/<image>")
    return splits.with_hold_out(parts["train"], parts["test"], parts.get("val"), seed=seed)


# Rows. Sizes and metrics: LORAC, section 6.1 and Table 2; Caltech's 102 classes include BACKGROUND_Google.

_RESEARCH = "non-commercial research"
DATASETS: dict[str, Dataset] = {
    row.name: row
    for row in (
        Dataset(
            name="aircraft",
            classes=100,
            sizes=(3334, 3333, 3333),
            metric="mean_per_class",
            read=_aircraft,
            needs=("fgvc-aircraft-2013b/data/variants.txt", "fgvc-aircraft-2013b/data/images"),
            get="fgvc-aircraft-2013b.tar.gz (VGG, Oxford)",
            licence=_RESEARCH,
        ),
        Dataset(
            name="birdsnap",
            classes=500,
            sizes=(35447, 2500, 2500),
            metric="top1",
            read=_birdsnap,
            needs=("birdsnap/species.txt", "birdsnap/images.txt"),
            get="birdsnap.tgz, version 1.1 (T. Berg et al.)",
            licence="photographs of Flickr users, each its own",
        ),
        Dataset(
            name="caltech101",
            classes=102,
            sizes=(3060, None, 6084),
            metric="mean_per_class",
            read=_caltech101,
            needs=("caltech101/101_ObjectCategories",),
            get="101_ObjectCategories.tar.gz (CaltechDATA)",
            licence="CC BY 4.0",
        ),
        Dataset(
            name="cars",
            classes=196,
            sizes=(8144, None, 8041),
            metric="top1",
            read=_cars,
            needs=(
                "stanford_cars/devkit/cars_train_annos.mat",
                "stanford_cars/devkit/cars_meta.mat",
                "stanford_cars/cars_test_annos_withlabels.mat",
                "stanford_cars/cars_train",
                "stanford_cars/cars_test",
            ),
            get="cars_{train,test}.tgz, car_devkit.tgz, cars_test_annos_withlabels.mat (a mirror; Stanford's is gone)",
            licence=_RESEARCH,
        ),
        Dataset(
            name="cifar10",
            classes=10,
            sizes=(50000, None, 10000),
            metric="top1",
            read=_cifar("CIFAR10"),
            needs=("cifar-10-batches-py",),
            get="cifar-10-python.tar.gz (A. Krizhevsky, Toronto)",
            licence="none stated",
        ),
        Dataset(
            name="cifar100",
            classes=100,
            sizes=(50000, None, 10000),
            metric="top1",
            read=_cifar("CIFAR100"),
            needs=("cifar-100-python",),
            get="cifar-100-python.tar.gz (A. Krizhevsky, Toronto)",
            licence="none stated",
        ),
        Dataset(
            name="dtd",
            classes=47,
            sizes=(1880, 1880, 1880),
            metric="top1",
            read=_dtd,
            needs=("dtd/dtd/labels/train1.txt", "dtd/dtd/images"),
            get="dtd-r1.0.1.tar.gz (VGG, Oxford), into a folder dtd",
            licence="research",
        ),
        Dataset(
            name="flowers",
            classes=102,
            sizes=(1020, 1020, 6149),
            metric="mean_per_class",
            read=_flowers,
            needs=("flowers-102/setid.mat", "flowers-102/imagelabels.mat", "flowers-102/jpg"),
            get="102flowers.tgz, imagelabels.mat, setid.mat (VGG, Oxford)",
            licence="none stated",
        ),
        Dataset(
            name="food",
            classes=101,
            sizes=(75750, None, 25250),
            metric="top1",
            read=_food,
            needs=("food-101/meta/train.json", "food-101/meta/test.json", "food-101/images"),
            get="food-101.tar.gz (ETH Zurich)",
            licence="scientific fair use; the pictures are Foodspotting's",
        ),
        Dataset(
            name="pets",
            classes=37,
            sizes=(3680, None, 3669),
            metric="mean_per_class",
            read=_pets,
            needs=(
                "oxford-iiit-pet/annotations/trainval.txt",
                "oxford-iiit-pet/annotations/test.txt",
                "oxford-iiit-pet/images",
            ),
            get="images.tar.gz and annotations.tar.gz (VGG, Oxford)",
            licence="CC BY-SA 4.0",
        ),
        Dataset(
            name="places365",
            classes=365,
            sizes=(1803460, None, 36500),
            metric="top1",
            read=_places365,
            needs=("categories_places365.txt", "places365_train_standard.txt", "places365_val.txt"),
            get="filelist_places365-standard.tar, train_256_places365standard.tar (as data_256_standard), val_256.tar",
            licence=_RESEARCH + " and education",
        ),
        Dataset(
            name="sun397",
            classes=397,
            sizes=(19850, None, 19850),
            metric="top1",
            read=_sun397,
            needs=("SUN397/ClassName.txt",),
            get="SUN397.tar.gz and Partitions.zip (Princeton)",
            licence="research",
        ),
        Dataset(
            name="imagenet",
            classes=1000,
            sizes=(1281167, None, 50000),
            metric="top1",
            read=_imagenet,
            needs=("train", "val"),
            folders=("imagenet",),
            get="ILSVRC2012_img_train.tar and _val.tar (image-net.org), sorted into {train,val}/<synset>/,",
            licence=_RESEARCH + " and education, on application",
            top5=True,
        ),
        Dataset(
            name="imagenet100",
            classes=100,
            sizes=(None, None, 5000),
            metric="top1",
            read=_imagenet100,
            needs=("train", "val"),
            folders=("imagenet100", "imagenet"),
            get="imagenet (its 100 classes of JCL's appendix D are used), or those classes alone",
            licence=_RESEARCH + " and education, on application",
            top5=True,
        ),
        Dataset(
            name="stl10",
            classes=10,
            sizes=(5000, None, 8000),
            metric="top1",
            read=_stl10,
            needs=("stl10_binary/train_X.bin", "stl10_binary/test_X.bin"),
            get="stl10_binary.tar.gz (Stanford)",
            licence="as ImageNet's",
        ),
    )
}
TWELVE = tuple(DATASETS)[:12]  # LORAC's Table 2


def names(text: str) -> list[str]:
    """`all` (the 12 of LORAC's Table 2) or a comma-separated list."""
    out = list(TWELVE) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not out:
        raise BadInput(f"--datasets '{text}': give names, or `all`")
    return list(dict.fromkeys(out))


def find(name: str) -> Dataset:
    """A row of DATASETS, or that of a class folder of this name."""
    return DATASETS.get(name) or class_folder(name)


def build(root: str | Path, name: str, split: Literal["train", "val", "test"], *, seed: int = 0) -> ImageList:
    """One split of a dataset below ROOT."""
    return getattr(load(name, Path(root), seed=seed), split)


def load(name: str, root: Path, *, seed: int = 0) -> Splits:
    """Read and check a dataset: every file there, labels, no test image in training data, and what was recorded.

    A split of another size than the row's is used with a warning, and the result's provenance says so.
    """
    dataset = find(name)
    base = dataset.base(root)
    found = dataset.read(base, seed)
    splits.check(name, found)
    _all_there(found)
    if name not in DATASETS:  # official splits hold known duplicates, which `data check` reports
        splits.check_content(name, found)
    _compare_record(name, root, found, seed)
    odd = tuple(_sizes(dataset, found))
    for line in odd:
        log.warning(f"{name}: {line}")
    return replace(found, notes=(*found.notes, *odd))


def _all_there(found: Splits) -> None:
    for which, images in found.items():
        if isinstance(images, ArrayList):
            continue
        missing = [i for i in range(len(images)) if not images.file(i).is_file()]
        if missing:
            raise BadInput(f"{images.file(missing[0])} is missing ({len(missing)} of {len(images)} {which} images are)")


def _sizes(dataset: Dataset, found: Splits) -> list[str]:
    """A line for each split whose size is not the row's; with a hold-out, train counts with it."""
    train, val, test = dataset.sizes
    counts = {
        "train": (len(found.train) + (len(found.val) if found.held_out else 0), train),
        "val": (len(found.val), val),
        "test": (len(found.test), test),
    }
    out = [f"{which} has {n} images, not {size}" for which, (n, size) in counts.items() if size not in (None, n)]
    if dataset.classes is not None and len(found.train.classes) != dataset.classes:
        out.append(f"{len(found.train.classes)} classes, not {dataset.classes}")
    return out


def _record_file(name: str, root: Path) -> Path:
    return root / name / RECORD


def _digests(found: Splits) -> dict[str, dict[str, Any]]:
    return {which: {"images": len(images), "sha256": splits.digest(images)} for which, images in found.items()}


def _compare_record(name: str, root: Path, found: Splits, seed: int) -> None:
    file = _record_file(name, root)
    if not file.exists():
        return
    then = json.loads(file.read_text())
    if then["seed"] != seed:
        return
    for which, now in _digests(found).items():
        if then["splits"][which] != now:
            was = then["splits"][which]
            raise BadInput(
                f"{name}: the {which} split is not the recorded one ({now['images']} images, {was['images']} in {file})"
                "; restore the data, or record it again with `backbench data check --record`"
            )


# The verb


def run(args: argparse.Namespace) -> int:
    """The verb `data`."""
    if args.action == "list":
        _list(args.data)
        return 0
    if args.action == "fetch-splits":
        _fetch(args.out)
        return 0
    return _check(args.name, args.data, args.record)


def _list(root: Path) -> None:
    line = "{:<12} {:>7} {:>9} {:>6} {:>6}  {:<14} {:<8} {}"
    print(line.format("name", "classes", "train", "val", "test", "metric", "on disk", "licence"))
    for row in DATASETS.values():
        try:
            row.base(root)
            where = "found"
        except BadInput:
            where = "missing"
        train, val, test = ("-" if n is None else n for n in row.sizes)
        val = "held" if row.sizes[1] is None else val
        print(line.format(row.name, row.classes, train, val, test, row.metric, where, row.licence))
        if where == "missing":
            print(f"{'':<12} get {row.get}; it belongs in {root / row.name}")
    print("Any other name is a class folder: ROOT/NAME/{train,val,test}/<class>/<image>.")


def _check(name: str, root: Path, record: bool) -> int:
    """Print what is there and everything that is wrong; 1 when something is."""
    dataset = find(name)
    found = dataset.read(dataset.base(root), 0)
    splits.check(name, found)
    _all_there(found)
    if not record:
        _compare_record(name, root, found, 0)
    problems = _sizes(dataset, found)
    print(f"{name}: {len(found.train.classes)} classes, {found.train.classes[0]} .. {found.train.classes[-1]}")
    for note in found.notes:
        print(f"{name}: {note}")
    by_content: dict[str, dict[str, str]] = {}
    for which, images in found.items():
        print(f"{name} {which}: {len(images)} images, sha256 of the list {splits.digest(images)}")
        empty = [images.classes[label] for label in range(len(images.classes)) if label not in set(images.labels)]
        if empty:
            problems.append(f"{which} has no image of {len(empty)} classes, '{empty[0]}' first")
        twice = [path for path, count in Counter(images.paths).items() if count > 1]
        if twice:
            problems.append(f"{which} lists {len(twice)} images twice, {twice[0]} first")
        contents, unreadable = _read_all(images)
        problems += [f"{which}: unreadable {line}" for line in unreadable[:5]]
        if len(unreadable) > 5:
            problems.append(f"{which}: {len(unreadable) - 5} more unreadable images")
        groups = Counter(contents.values())
        copies = sum(count - 1 for count in groups.values() if count > 1)
        if copies:
            problems.append(f"{which} holds {copies} copies of other images of it")
        by_content[which] = {content: path for path, content in contents.items()}
    for a, b in (("train", "test"), ("val", "test"), ("train", "val")):
        shared = sorted(by_content[a].keys() & by_content[b].keys())
        if shared:
            problems.append(
                f"{a} and {b} share {len(shared)} images: {by_content[a][shared[0]]} is {by_content[b][shared[0]]}"
            )
    for line in problems:
        print(f"{name}: PROBLEM: {line}")
    if record:
        resume.write_json(_record_file(name, root), {"seed": 0, "splits": _digests(found)})
        print(f"{name}: recorded in {_record_file(name, root)}")
    print(f"{name}: {len(problems)} problems" if problems else f"{name}: all right")
    return 1 if problems else 0


def _read_all(images: ImageList) -> tuple[dict[str, str], list[str]]:
    """Path -> sha256 of the content, and a line per image that cannot be decoded."""

    def read(index: int) -> tuple[str, str, str | None]:
        path = images.paths[index]
        if isinstance(images, ArrayList):
            return path, hashlib.sha256(images.pixels[index].tobytes()).hexdigest(), None
        try:
            images.open(index)
        except BadInput as error:
            return path, splits.file_digest(images.file(index)), str(error)
        return path, splits.file_digest(images.file(index)), None

    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(read, range(len(images))))
    return {path: content for path, content, _ in rows}, [error for _, _, error in rows if error]


LISTS_URL = "https://raw.githubusercontent.com/google-research/simclr/master/imagenet_subsets/{percent}percent.txt"


def _fetch(out: Path) -> None:
    """SimCLR's lists, verified before they are written."""
    import urllib.error
    import urllib.request

    from transfer.config import Finetune, load_protocol

    protocol = load_protocol("semisup", ("finetune",))
    assert isinstance(protocol, Finetune)
    for percent, part in protocol.parts.items():
        url, file = LISTS_URL.format(percent=percent), out / f"{percent}percent.txt"
        assert part.list is not None
        if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == part.list.sha256:
            print(f"{file}: there already, {part.list.lines} lines")
            continue
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                data = answer.read()
        except (urllib.error.URLError, OSError) as error:
            raise BadInput(f"{url}: cannot be fetched ({error}); copy the file to {file} by other means") from None
        if hashlib.sha256(data).hexdigest() != part.list.sha256:
            raise BadInput(f"{url}: not the published list (its sha256 differs); nothing was written")
        resume.write_bytes(file, data)
        print(f"{file}: {part.list.lines} lines")
