"""Reads each dataset: (its folder, the hold-out's seed) -> its splits. torchvision's classes do it
where they are right. Own readers: CIFAR and STL-10 (nothing is unpickled), Caltech101 (gray images,
no split, no background class), SUN397 (no split, unsorted), Birdsnap (none), ImageNet (needs no
devkit). Heavy imports stay in the readers: the table of datasets is cheap to import."""

import csv
import importlib.resources
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backbench.containers import archives, containers
from backbench.datasets import splits
from backbench.datasets.row import Reader, SplitReader
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.dense import IGNORED, DenseList
from backbench.images.image_list import ImageList, scan_folder
from backbench.untrusted import opening, printable

# What torchvision reads


def _torchvision(kind: Any, base: Path, *args: object, **options: object) -> Any:
    """kind(base, ...); its exceptions as one line that says what is wrong with the folder."""
    try:
        return kind(base, *args, **options)
    except Exception as error:  # of half a dozen formats, each with errors of its own
        what = " ".join(str(error).split())
        what = what.replace("You can use download=True to download it", "").strip()
        raise BadInput(
            f"{base}: not in the layout that torchvision reads"
            f" ({type(error).__name__}: {printable.shown(what, 300)})"
        ) from None


def _listed(
    base: Path,
    files: Iterable[str | Path],
    labels: Iterable[int],
    classes: Sequence[str],
) -> ImageList:
    paths = tuple(Path(file).relative_to(base).as_posix() for file in files)
    _refuse_outside(base, paths)
    return ImageList(base, paths, tuple(map(int, labels)), tuple(classes))


def _refuse_outside(base: Path, paths: Iterable[str]) -> None:
    for path in paths:
        if path.startswith("/") or ".." in path.split("/"):
            raise BadInput(
                f"{base}: its lists name {printable.shown(path, 200)}, outside of it"
            )


# Official splits, where there are any; they are read in their order, so that of several missing
# files train's is named.


_TWO = {"train": "train", "test": "test"}
_THREE = {"train": "train", "val": "val", "test": "test"}


def _official(
    kind: str,
    parts: Mapping[str, str],
    *lists: str,
    files: str = "_image_files",
    **options: object,
) -> Reader:
    """Return the reader of a data set that torchvision's class `kind` lists: `parts` has its words
    for our splits, `lists` are patterns of the files that it opens unseen, `files` is its attribute
    with the images, or with pairs of image and label."""

    def read(base: Path, seed: int) -> Splits:
        from torchvision import datasets

        for pattern in lists:
            for file in base.glob(pattern):
                if not file.is_file():  # torchvision would wait for a FIFO's writer
                    raise BadInput(
                        f"{file}: not a regular file; unpack the archive again"
                    )
        found: dict[str, ImageList] = {}
        for name, official in parts.items():
            d = _torchvision(getattr(datasets, kind), base, official, **options)
            listed = getattr(d, files)
            images, labels = (
                zip(*listed) if files == "_samples" else (listed, d._labels)
            )
            found[name] = _listed(base, images, labels, d.classes)
        return splits.with_hold_out(
            found["train"], found["test"], found.get("val"), seed=seed
        )

    return read


_VARIANTS = "fgvc-aircraft-2013b/data/*.txt"
_MAT = ("stanford_cars/*.mat", "stanford_cars/devkit/*.mat")
_TRAINVAL = {"train": "trainval", "test": "test"}
aircraft = _official("FGVCAircraft", _THREE, _VARIANTS, annotation_level="variant")
cars = _official("StanfordCars", _TWO, *_MAT, files="_samples")
dtd = _official("DTD", _THREE, "dtd/dtd/labels/*.txt", partition=1)
flowers = _official("Flowers102", _THREE)
food = _official("Food101", _TWO, "food-101/meta/*.json")
pets = _official(
    "OxfordIIITPet", _TRAINVAL, "oxford-iiit-pet/annotations/*.txt", files="_images"
)


def _of_arrays(kind: str, read: Callable[[Path, str], ImageList]) -> Reader:
    """The reader of images in one array: the files must be those of torchvision's class `kind`."""

    def read_published(base: Path, seed: int) -> Splits:
        from torchvision import datasets
        from torchvision.datasets.utils import check_md5

        published = getattr(datasets, kind)
        folder = base / published.base_folder
        files = [*published.train_list, *published.test_list]
        if meta := getattr(published, "meta", None):  # the classes' names
            files.append([meta["filename"], meta["md5"]])
        for name, md5 in files:
            file = folder / name
            if file.is_file() and not check_md5(file, md5):
                raise BadInput(
                    f"{base}: the files are not as they were published (the checksum of {name}"
                    " differs): unpack the archive again"
                )
        return splits.with_hold_out(
            read(folder, "train"), read(folder, "test"), seed=seed
        )

    return read_published


cifar10 = _of_arrays("CIFAR10", archives.read_cifar)
cifar100 = _of_arrays("CIFAR100", archives.read_cifar)
stl10 = _of_arrays("STL10", archives.read_stl10)


def places365(base: Path, seed: int) -> Splits:
    """Read Places365-Standard from folders or tars, at 256 pixels if there; its val is our test."""
    from torchvision.datasets import Places365

    def tar(size: str) -> Path:
        return base / f"train_{size}_places365standard.tar"

    small = (base / "data_256_standard").is_dir() or tar("256").exists()
    size = "256" if small else "large"
    if (
        not small
        and not (base / "data_large_standard").is_dir()
        and not tar(size).exists()
    ):
        get = "get train_256_places365standard.tar"
        raise BadInput(f"{base}: no data_256_standard or data_large_standard; {get}")

    def part(split: str) -> ImageList:
        d = _torchvision(Places365, base, split, small=small)
        images = _listed(base, [file for file, _ in d.imgs], d.targets, d.classes)
        folder = images.paths[0].partition("/")[0]
        if (base / folder).is_dir():
            return images
        # torchvision's folder is data_256_standard, the archive's data_256
        archive = base / f"val_{size}.tar" if split == "val" else tar(size)
        names = [path.partition("/")[2] for path in images.paths]
        return containers.held(
            images, archive, names, [folder.removesuffix("_standard")]
        )

    note = "256-pixel images" if small else "large images"
    train, test = part("train-standard"), part("val")
    return splits.with_hold_out(train=train, test=test, seed=seed, notes=(note,))


# What has a reader of its own


# Of what has no official lists: drawn once for all runs. The rows of several seeds are means over
# one test list, and so is what two checkpoints are compared on.
_DRAWN_ONCE = 0


def birdsnap(base: Path, seed: int) -> Splits:
    """LORAC's split: of every species' images that are still there 5 for val, 5 for test."""
    folder = base / "birdsnap"
    species = sorted(
        _table(folder / "species.txt", ("id", "dir")), key=lambda row: int(row["id"])
    )
    listed = _table(folder / "images.txt", ("path", "species_id"))
    images = _first_there(folder / "images", folder / "download" / "images")
    if images is None:
        run = "run the dataset's own get_birdsnap.py, or copy the images there"
        raise BadInput(f"{folder}: no folder 'images'; {run}")

    # 1. What is left of the list: pictures vanish from Flickr; a failed download is an empty file.
    there = []
    for path, kind in sorted((row["path"], row["species_id"]) for row in listed):
        file = images / path
        if file.is_file() and file.stat().st_size:
            there.append((path, kind))
    # 2. A label is the species' place by id, whichever folders are there.
    place = {row["id"]: label for label, row in enumerate(species)}
    strange = [path for path, kind in there if kind not in place]
    if strange:
        raise BadInput(
            f"{folder}/images.txt: {strange[0]} is of a species that is not listed"
        )
    labels = [place[kind] for _, kind in there]
    classes = [row["dir"] for row in species]
    absent = sorted(set(range(len(species))) - set(labels))
    if absent:
        raise BadInput(
            f"{images}: no image of {len(absent)} species, '{classes[absent[0]]}' first"
        )
    everything = _listed(images, [images / path for path, _ in there], labels, classes)
    # 3. Val and test are drawn from what is there, equally many of each species.
    val: list[int] = []
    test: list[int] = []
    for label, indices in splits.ranked(everything, _DRAWN_ONCE).items():
        if len(indices) < 11:
            name = everything.classes[label]
            raise BadInput(
                f"{images}: species '{name}' has {len(indices)} images; 5 + 5 and training need 11"
            )
        val += indices[:5]
        test += indices[5:10]
    train = splits.others(everything, {*val, *test})
    share = 100 * len(there) / max(1, len(listed))
    note = f"coverage {len(there)} of {len(listed)} listed images ({share:.1f}%)"
    return Splits(
        train=everything.subset(train),
        val=everything.subset(sorted(val)),
        test=everything.subset(sorted(test)),
        held_out=False,
        notes=(note,),
    )


def _table(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """A tab-separated file with a header line."""
    rows = list(csv.DictReader(_text(file).splitlines(), delimiter="\t"))
    if not rows or any(column not in rows[0] for column in columns):
        raise BadInput(
            f"{file}: expected tab-separated columns {', '.join(columns)} under a header line"
        )
    return rows


def caltech101(base: Path, seed: int) -> Splits:
    """Draw 30 images per class for training, the rest is test; the seed picks the hold-out of the
    30. BACKGROUND_Google is a class, as sizes 3,060 + 6,084 say. Gray images are decoded as RGB."""
    # torchvision's class would drop the background, and has no split.
    everything = scan_folder(base / "caltech101" / "101_ObjectCategories")
    train, test = splits.draw(
        everything, 30, _DRAWN_ONCE, what="caltech101's training split"
    )
    return splits.with_hold_out(
        everything.subset(train), everything.subset(test), seed=seed
    )


def sun397(base: Path, seed: int) -> Splits:
    """Partition 01 of the official lists; labels in the order of ClassName.txt."""
    images = base / "SUN397"
    classes = _lines(images / "ClassName.txt")
    label_of = {name: label for label, name in enumerate(classes)}

    def part(file: str) -> ImageList:
        listing = _first_there(base / "Partitions" / file, images / file)
        if listing is None:
            raise BadInput(
                f"{base / 'Partitions' / file} is missing; get SUN's Partitions.zip and unpack it there"
            )
        lines = _lines(listing)
        # /a/apse/indoor/sun_x.jpg is of class /a/apse/indoor
        labels = [label_of.get(line.rpartition("/")[0], -1) for line in lines]
        if -1 in labels:
            odd = lines[labels.index(-1)]
            raise BadInput(
                f"{listing}: {odd} is of no class in {images / 'ClassName.txt'}"
            )
        return _listed(
            images, [images / line.lstrip("/") for line in lines], labels, classes
        )

    train, test = part("Training_01.txt"), part("Testing_01.txt")
    return splits.with_hold_out(train, test, seed=seed)


def _first_there(*paths: Path) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def _lines(file: Path) -> list[str]:
    """The lines that are not empty."""
    return [line for line in map(str.strip, _text(file).splitlines()) if line]


def _text(file: Path) -> str:
    try:
        text = opening.read_bytes(file, most=opening.GIGABYTE).decode()
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: not readable as a text ({error})") from None
    if found := printable.control_in(text, allowed="\n\r\t"):
        raise BadInput(f"{file}: holds the control character {found}")
    return text


def imagenet(base: Path, seed: int) -> Splits:
    return _synsets(base, class_list("imagenet"), seed)


def imagenet100(base: Path, seed: int) -> Splits:
    return _synsets(base, sorted(class_list("imagenet100")), seed)


def class_list(name: str) -> list[str]:
    """The synsets of imagenet or imagenet100, in label order: sorted."""
    text = (importlib.resources.files("backbench.datasets") / f"{name}.txt").read_text()
    return [
        line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"
    ]


def _synsets(folder: Path, classes: Sequence[str], seed: int) -> Splits:
    """FOLDER/{train,val}/<synset>/*.JPEG, or containers; the official val is the test split."""
    every = class_list("imagenet")
    for part in ("train", "val"):
        # The archives of ImageNet's val unpack flat; that is the usual mistake.
        contained = containers.find(folder, part) is not None
        if not contained and not any(p.is_dir() for p in (folder / part).iterdir()):
            sort = f"sort them as {part}/<synset>/*.JPEG"
            raise BadInput(f"{folder / part}: images lie in no class folders; {sort}")
    train = containers.read_split(folder, "train", classes=classes, every=every)
    test = containers.read_split(folder, "val", classes=classes, every=every)
    return splits.with_hold_out(train, test, seed=seed)


# Images with label maps. A tenth of train is held out, as CAPI does (eval_segmentation.py)

DENSE_HOLDOUT = 0.1
VOC_CLASSES = ["background", *map(str, range(1, 21))]
# cityscapesscripts, helpers/labels.py: the ids of the 19 classes that are scored, in their order
CITYSCAPES_IDS = (
    7,
    8,
    11,
    12,
    13,
    17,
    19,
    20,
    21,
    22,
    23,
    24,
    25,
    26,
    27,
    28,
    31,
    32,
    33,
)


def _dense(
    base: Path,
    classes: Sequence[str],
    values: Mapping[int, int],
    parts: Sequence[Sequence[tuple[str, str]]],
    seed: int,
) -> Splits:
    """Make splits of (image, label map) pairs; refuse a missing map, or an image in both parts."""
    shared = {image for image, _ in parts[0]} & {image for image, _ in parts[1]}
    if shared:
        clash = f"{len(shared)} images of train are test images, {min(shared)} first"
        raise BadInput(f"{base}: {clash}; take them out of the list of train")
    lists = []
    for pairs in parts:
        images, maps = (
            tuple(pair[0] for pair in pairs),
            tuple(pair[1] for pair in pairs),
        )
        _refuse_outside(base, (*images, *maps))
        missing = [each for each in maps if not (base / each).is_file()]
        if missing:
            raise BadInput(
                f"{base / missing[0]} is missing ({len(missing)} label maps are)"
            )
        lists.append(
            DenseList(base, images, (0,) * len(images), tuple(classes), maps, values)
        )
    return splits.with_hold_out(*lists, seed=seed, share=DENSE_HOLDOUT)


def _voc(train_list: str, train_maps: str) -> Reader:
    """The reader of a train list and the official val; 255, the border of objects, is ignored."""

    def read(base: Path, seed: int) -> Splits:
        folder = base / "VOCdevkit" / "VOC2012"
        parts = []
        for name, maps in ((train_list, train_maps), ("val", "SegmentationClass")):
            stems = _lines(folder / "ImageSets" / "Segmentation" / f"{name}.txt")
            parts.append(
                [(f"JPEGImages/{stem}.jpg", f"{maps}/{stem}.png") for stem in stems]
            )
        values = {value: value for value in (*range(len(VOC_CLASSES)), IGNORED)}
        return _dense(folder, VOC_CLASSES, values, parts, seed)

    return read


voc2012 = _voc("train", "SegmentationClass")
# VOC's and SBD's train without VOC's val: 1,103 images of it are in SBD, so `_dense` refuses a list
# that was not cleaned
voc2012aug = _voc("trainaug", "SegmentationClassAug")


def ade20k(base: Path, seed: int) -> Splits:
    """The 150 classes of the scene parsing challenge; 0, everything else, is ignored."""
    folder = base / "ADEChallengeData2016"
    parts = []
    for part in ("training", "validation"):
        maps = sorted(
            each.stem for each in (folder / "annotations" / part).glob("ADE_*.png")
        )
        parts.append(
            [(f"images/{part}/{m}.jpg", f"annotations/{part}/{m}.png") for m in maps]
        )
    values = {0: IGNORED, **{value: value - 1 for value in range(1, 151)}}
    return _dense(folder, [str(value) for value in range(1, 151)], values, parts, seed)


def cityscapes(base: Path, seed: int) -> Splits:
    """The fine annotations: 34 ids, of which 19 are scored."""
    parts = []
    for part in ("train", "val"):
        pairs = []
        for file in sorted((base / "gtFine" / part).glob("*/*_gtFine_labelIds.png")):
            name = f"{part}/{file.parent.name}/{file.name.removesuffix('_gtFine_labelIds.png')}"
            maps = file.relative_to(base).as_posix()
            pairs.append((f"leftImg8bit/{name}_leftImg8bit.png", maps))
        parts.append(pairs)
    values = dict.fromkeys(range(34), IGNORED)
    values |= {value: label for label, value in enumerate(CITYSCAPES_IDS)}
    return _dense(base, [str(value) for value in CITYSCAPES_IDS], values, parts, seed)


def scenes(base: Path, seed: int) -> Splits:
    """The demo's scenes of digits: the background and ten digits (datasets/embedded.py)."""
    parts = []
    for part in ("train2017", "val2017"):
        stems = sorted(each.stem for each in (base / "maps" / part).glob("*.png"))
        parts.append(
            [(f"{part}/{stem}.jpg", f"maps/{part}/{stem}.png") for stem in stems]
        )
    values = {value: value for value in (*range(11), IGNORED)}
    return _dense(base, ["background", *map(str, range(10))], values, parts, seed)


# One split, for pretraining: no hold-out is cut off, and unlabelled images count


def _split_in(folder: str, read: SplitReader) -> SplitReader:
    return lambda root, split: read(root / folder, split)


cifar10_split = _split_in("cifar10/cifar-10-batches-py", archives.read_cifar)
cifar100_split = _split_in("cifar100/cifar-100-python", archives.read_cifar)
stl10_split = _split_in("stl10/stl10_binary", archives.read_stl10)


def imagenet100_split(root: Path, split: str) -> ImageList:
    """ImageNet's own folder will do; the labels follow the list's order (evaluation sorts it)."""
    folder = root / "imagenet100"
    if not folder.is_dir():
        folder = root / "imagenet"
    every = class_list("imagenet")
    return containers.read_split(
        folder, split, classes=class_list("imagenet100"), every=every
    )


def imagenet_split(root: Path, split: str) -> ImageList:
    """A class folder as it is, a subset too; containers count the synsets."""
    folder, every = root / "imagenet", class_list("imagenet")
    inside = containers.find(folder, split) is not None
    return containers.read_split(
        folder, split, classes=every if inside else None, every=every
    )
