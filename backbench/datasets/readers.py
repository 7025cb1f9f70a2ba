"""Reads each dataset: (its folder, the hold-out's seed) -> its splits.

torchvision's classes do it where they are right. These have readers of their own, because
torchvision's
  CIFAR and STL-10  unpickle what they read (cifar_stl10.py reads them instead),
  Caltech101        fails on gray images, has no split and drops the background class,
  SUN397            has no split, and takes the files in no fixed order,
  Birdsnap          does not exist,
  ImageNet          needs the devkit.
Heavy imports stay in the readers, so that the table of datasets is cheap to import."""

import csv
import functools
import importlib.resources
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backbench.containers import finding, reading
from backbench.datasets import box_labels, cifar_stl10, splits
from backbench.datasets.row import Reader, SplitReader
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.dense import IGNORED, DenseList
from backbench.images.image_list import ImageList, scan_folder
from backbench.images.multilabel import MultiLabelList, mark
from backbench.untrusted import jsons, opening, printable

# What torchvision reads


def _torchvision(kind: Any, base: Path, *args: object, **options: object) -> Any:
    """Return kind(base, ...). Its exceptions become one line: what is wrong with the folder."""
    try:
        return kind(base, *args, **options)
    except Exception as error:  # each of half a dozen formats has errors of its own
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
    """List files below `base`; BadInput for one that is outside of it."""
    paths = tuple(Path(file).relative_to(base).as_posix() for file in files)
    _refuse_outside(base, paths)
    return ImageList(base, paths, tuple(map(int, labels)), tuple(classes))


def _refuse_outside(base: Path, paths: Iterable[str]) -> None:
    for path in paths:
        if path.startswith("/") or ".." in path.split("/"):
            raise BadInput(
                f"{base}: its lists name {printable.shown(path, 200)}, outside of it"
            )


# Our split -> torchvision's word for it. They are read in this order, so that of several missing
# files train's is named
_TWO = {"train": "train", "test": "test"}
_THREE = {"train": "train", "val": "val", "test": "test"}


def _official(
    kind: str,
    parts: Mapping[str, str],
    *lists: str,
    files: str = "_image_files",
    **options: object,
) -> Reader:
    """Return the reader of a dataset that torchvision's class `kind` lists.

    `parts` has its words for our splits. `lists` are patterns of the files that it opens. `files`
    is its attribute with the images, or with pairs of image and label ("_samples"); `options` are
    the class's own."""

    def read(base: Path, seed: int) -> Splits:
        from torchvision import datasets

        for pattern in lists:
            for file in base.glob(pattern):
                # torchvision would wait for a FIFO's writer
                if not file.is_file():
                    raise BadInput(
                        f"{file}: not a regular file; unpack the archive again"
                    )
        found: dict[str, ImageList] = {}
        for name, official in parts.items():
            data = _torchvision(getattr(datasets, kind), base, official, **options)
            images = getattr(data, files)
            if files == "_samples":
                images, labels = zip(*images)
            else:
                labels = data._labels
            found[name] = _listed(base, images, labels, data.classes)
        return splits.with_hold_out(
            found["train"], found["test"], found.get("val"), seed=seed
        )

    return read


aircraft = _official(
    "FGVCAircraft",
    _THREE,
    "fgvc-aircraft-2013b/data/*.txt",
    annotation_level="variant",
)
cars = _official(
    "StanfordCars",
    _TWO,
    "stanford_cars/*.mat",
    "stanford_cars/devkit/*.mat",
    files="_samples",
)
dtd = _official("DTD", _THREE, "dtd/dtd/labels/*.txt", partition=1)
flowers = _official("Flowers102", _THREE)
food = _official("Food101", _TWO, "food-101/meta/*.json")
pets = _official(
    "OxfordIIITPet",
    {"train": "trainval", "test": "test"},
    "oxford-iiit-pet/annotations/*.txt",
    files="_images",
)


def _of_arrays(kind: str, read: Callable[[Path, str], ImageList]) -> Reader:
    """Return the reader of images in arrays: `read` reads a split of the folder that torchvision's
    class `kind` names. BadInput for files whose checksum is not the published one."""

    def read_published(base: Path, seed: int) -> Splits:
        from torchvision import datasets
        from torchvision.datasets.utils import check_md5

        published = getattr(datasets, kind)
        folder = base / published.base_folder
        files = [*published.train_list, *published.test_list]
        meta = getattr(published, "meta", None)  # the file with the classes' names
        if meta:
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


cifar10 = _of_arrays("CIFAR10", cifar_stl10.read_cifar)
cifar100 = _of_arrays("CIFAR100", cifar_stl10.read_cifar)
stl10 = _of_arrays("STL10", cifar_stl10.read_stl10)


def places365(base: Path, seed: int) -> Splits:
    """Read Places365-Standard from folders or tars, at 256 pixels if there; its val is our test."""
    from torchvision.datasets import Places365

    def train_tar(size: str) -> Path:
        return base / f"train_{size}_places365standard.tar"

    def there(size: str) -> bool:
        return (base / f"data_{size}_standard").is_dir() or train_tar(size).exists()

    small = there("256")
    size = "256" if small else "large"
    if not there(size):
        raise BadInput(
            f"{base}: no data_256_standard or data_large_standard;"
            " get train_256_places365standard.tar"
        )

    def part(split: str) -> ImageList:
        data = _torchvision(Places365, base, split, small=small)
        files = [file for file, _ in data.imgs]
        images = _listed(base, files, data.targets, data.classes)
        folder = images.paths[0].partition("/")[0]
        if (base / folder).is_dir():
            return images
        # torchvision's folder is data_256_standard, the archive's data_256
        archive = base / f"val_{size}.tar" if split == "val" else train_tar(size)
        names = [path.partition("/")[2] for path in images.paths]
        return reading.read_members(
            images, archive, names, [folder.removesuffix("_standard")]
        )

    note = "256-pixel images" if small else "large images"
    train = part("train-standard")
    test = part("val")
    return splits.with_hold_out(train=train, test=test, seed=seed, notes=(note,))


# What has a reader of its own


def places205(base: Path, seed: int) -> Splits:
    """Read Places205's lists of its images at 256 pixels; its val is our test.

    A line of a list is a path and the number of its class, which is its folder: a/abbey/x.jpg 0."""
    lists = base / "trainvalsplit_places205"
    unpacked = base / "data" / "vision" / "torralba" / "deeplearning" / "images256"
    folder = _first_there(unpacked, base / "images256")
    if folder is None:
        raise BadInput(
            f"{unpacked} is missing; get imagesPlaces205_resize.tar.gz and unpack it in {base}"
        )

    def part(split: str) -> tuple[list[str], list[int]]:
        file = lists / f"{split}_places205.csv"
        paths = []
        labels = []
        for line in _lines(file):
            path, _, label = line.rpartition(" ")
            if not path or not label.isdecimal() or len(label) > 4:
                raise BadInput(
                    f"{file}: '{printable.shown(line, 100)}' is no path and number of a class;"
                    " get trainvalsplit_places205.tar.gz again"
                )
            paths.append(path)
            labels.append(int(label))
        return paths, labels

    of_train = part("train")
    of_test = part("val")
    # 1. The folder of each class, as train has it
    names: dict[int, str] = {}
    for path, label in zip(*of_train):
        names.setdefault(label, path.rpartition("/")[0])
    absent = sorted(set(range(len(names))) - names.keys())
    if absent:
        raise BadInput(
            f"{lists / 'train_places205.csv'}: no image of class {absent[0]}, but of class"
            f" {max(names)}; get trainvalsplit_places205.tar.gz again"
        )
    classes = [names[label] for label in range(len(names))]
    # 2. No image is of another class than its folder
    for split, (paths, labels) in (("train", of_train), ("val", of_test)):
        table = lists / f"{split}_places205.csv"
        for path, label in zip(paths, labels):
            if names.get(label) != path.rpartition("/")[0]:
                raise BadInput(
                    f"{table}: {printable.shown(path, 200)} is of class"
                    f" {label}, {names.get(label, 'which train has not')}; get"
                    " trainvalsplit_places205.tar.gz again"
                )
    _refuse_outside(folder, [*of_train[0], *of_test[0]])
    train, test = (
        ImageList(folder, tuple(paths), tuple(labels), tuple(classes))
        for paths, labels in (of_train, of_test)
    )
    return splits.with_hold_out(train, test, seed=seed)


def inat18(base: Path, seed: int) -> Splits:
    """Read iNaturalist 2018's lists, in COCO's format; its val is our test.

    The classes are the numbers of `categories`, as the folders of the images are."""

    def part(split: str) -> ImageList:
        file = base / f"{split}2018.json"
        try:
            about = jsons.read(file, most=opening.GIGABYTE)
            numbers = sorted(int(category["id"]) for category in about["categories"])
            label_of = {number: label for label, number in enumerate(numbers)}
            class_of = {
                one["image_id"]: label_of[one["category_id"]]
                for one in about["annotations"]
            }
            paths = [str(image["file_name"]) for image in about["images"]]
            labels = [class_of[image["id"]] for image in about["images"]]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"{file}: no list of images with a category each ({error!r:.80}); get"
                f" {split}2018.json.tar.gz again"
            ) from None
        _refuse_outside(base, paths)
        classes = tuple(str(number) for number in numbers)
        return ImageList(base, tuple(paths), tuple(labels), classes)

    train = part("train")
    test = part("val")
    if test.classes != train.classes:
        raise BadInput(
            f"{base / 'val2018.json'}: has other categories than train2018.json; get both again"
        )
    return splits.with_hold_out(train, test, seed=seed)


# The seed of a test list that is drawn because there is no official one. It is one for all runs: the
# rows of several seeds are means over one test list, and two checkpoints are compared on it
_TEST_SEED = 0


def birdsnap(base: Path, seed: int) -> Splits:
    """Draw LORAC's split: of the images of each species that are still there, 5 are val, 5 test."""
    folder = base / "birdsnap"
    species = birdsnap_species(folder / "species.txt")
    listed = _table(folder / "images.txt", ("path", "species_id"))
    images = _first_there(folder / "images", folder / "download" / "images")
    if images is None:
        raise BadInput(
            f"{folder}: no folder 'images'; run the dataset's own get_birdsnap.py, or copy the"
            " images there"
        )

    # 1. What is left of the list: pictures vanish from Flickr, and a failed download is an empty file
    there = []
    for path, kind in sorted((row["path"], row["species_id"]) for row in listed):
        file = images / path
        if file.is_file() and file.stat().st_size:
            there.append((path, kind))
    # 2. A label is the species' place by id, whichever folders are there
    place = {row["id"]: label for label, row in enumerate(species)}
    strange = [path for path, kind in there if kind not in place]
    if strange:
        raise BadInput(
            f"{folder}/images.txt: {strange[0]} is of a species that is not listed"
        )
    labels = [place[kind] for _, kind in there]
    classes = [row["dir"] for row in species]
    everything = _listed(images, [images / path for path, _ in there], labels, classes)
    return drawn_birdsnap(everything, images, len(listed))


def birdsnap_species(file: Path) -> list[dict[str, str]]:
    """Read the owner's list of species, in the order of their ids."""
    rows = _table(file, ("id", "common", "dir"))
    return sorted(rows, key=lambda row: int(row["id"]))


def birdsnap_images(file: Path) -> int:
    """Count the images that the owner's list has."""
    return len(_table(file, ("path", "species_id")))


def drawn_birdsnap(everything: ImageList, images: Path, listed: int | None) -> Splits:
    """Draw Birdsnap's splits from the list of all images that are there, of `listed` ones."""
    present = set(everything.labels)
    absent = [
        name for label, name in enumerate(everything.classes) if label not in present
    ]
    if absent:
        raise BadInput(
            f"{images}: no image of {len(absent)} species, '{absent[0]}' first"
        )
    # Val and test are drawn from what is there, equally many of each species
    val: list[int] = []
    test: list[int] = []
    for label, indices in splits.ranked(everything, _TEST_SEED).items():
        if len(indices) < 11:
            name = everything.classes[label]
            raise BadInput(
                f"{images}: species '{name}' has {len(indices)} images; 5 + 5 and training need 11"
            )
        val += indices[:5]
        test += indices[5:10]
    train = splits.others(everything, {*val, *test})
    notes: tuple[str, ...] = ()
    if listed is not None:
        count = len(everything)
        share = 100 * count / max(1, listed)
        notes = (f"coverage {count} of {listed} listed images ({share:.1f}%)",)
    return Splits(
        train=everything.subset(train),
        val=everything.subset(sorted(val)),
        test=everything.subset(sorted(test)),
        held_out=False,
        notes=notes,
    )


def _table(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Read a tab-separated file with a header line; BadInput where one of `columns` is missing."""
    rows = list(csv.DictReader(_text(file).splitlines(), delimiter="\t"))
    if not rows or any(column not in rows[0] for column in columns):
        raise BadInput(
            f"{file}: expected tab-separated columns {', '.join(columns)} under a header line"
        )
    return rows


def caltech101(base: Path, seed: int) -> Splits:
    """Draw 30 images per class for training; the rest is test. The seed picks the hold-out of the 30.

    BACKGROUND_Google is a class, as LORAC's sizes 3,060 + 6,084 say. Gray images are decoded as
    RGB."""
    return drawn_caltech101(
        scan_folder(base / "caltech101" / "101_ObjectCategories"), seed
    )


def drawn_caltech101(everything: ImageList, seed: int) -> Splits:
    """Draw Caltech-101's splits from the list of all its images."""
    train, test = splits.draw(
        everything, 30, _TEST_SEED, what="caltech101's training split"
    )
    return splits.with_hold_out(
        everything.subset(train), everything.subset(test), seed=seed
    )


def sun397(base: Path, seed: int) -> Splits:
    """Read partition 01 of the official lists; labels are in the order of ClassName.txt."""
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
        files = [images / line.lstrip("/") for line in lines]
        return _listed(images, files, labels, classes)

    train = part("Training_01.txt")
    test = part("Testing_01.txt")
    return splits.with_hold_out(train, test, seed=seed)


def _first_there(*paths: Path) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def _lines(file: Path) -> list[str]:
    """Read a file's lines, stripped, without empty ones."""
    lines = (line.strip() for line in _text(file).splitlines())
    return [line for line in lines if line]


def _text(file: Path) -> str:
    try:
        text = opening.read_bytes(file, most=opening.GIGABYTE).decode()
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: not readable as a text ({error})") from None
    found = printable.control_in(text, allowed="\n\r\t")
    if found:
        raise BadInput(f"{file}: holds the control character {found}")
    return text


def imagenet(base: Path, seed: int) -> Splits:
    return _synsets(base, class_list("imagenet"), seed)


def imagenet100(base: Path, seed: int) -> Splits:
    return _synsets(base, sorted(class_list("imagenet100")), seed)


def class_list(name: str) -> list[str]:
    """Return the synsets that NAME.txt beside this file lists, in its order."""
    return list(_synsets_in(name))


@functools.cache
def _synsets_in(name: str) -> tuple[str, ...]:
    text = (importlib.resources.files("backbench.datasets") / f"{name}.txt").read_text()
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _synsets(folder: Path, classes: Sequence[str], seed: int) -> Splits:
    """Read FOLDER/{train,val}/<synset>/*.JPEG, or containers; the official val is the test split."""
    every = class_list("imagenet")
    for part in ("train", "val"):
        # The archives of ImageNet's val unpack flat; that is the usual mistake
        contained = finding.find(folder, part) is not None
        if not contained and not any(p.is_dir() for p in (folder / part).iterdir()):
            raise BadInput(
                f"{folder / part}: images lie in no class folders; sort them as"
                f" {part}/<synset>/*.JPEG"
            )
    train = reading.read_split(folder, "train", classes=classes, every=every)
    test = reading.read_split(folder, "val", classes=classes, every=every)
    return splits.with_hold_out(train, test, seed=seed)


# Images with label maps. A tenth of train is held out, as CAPI does (eval_segmentation.py)

DENSE_HOLDOUT = 0.1
VOC07_CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
VOC_CLASSES = ["background", *map(str, range(1, 21))]
# cityscapesscripts, helpers/labels.py: the ids of the 19 classes that are scored, in their order
CITYSCAPES_IDS = (
    7,  # road
    8,  # sidewalk
    11,  # building
    12,  # wall
    13,  # fence
    17,  # pole
    19,  # traffic light
    20,  # traffic sign
    21,  # vegetation
    22,  # terrain
    23,  # sky
    24,  # person
    25,  # rider
    26,  # car
    27,  # truck
    28,  # bus
    31,  # train
    32,  # motorcycle
    33,  # bicycle
)


def _dense(
    base: Path,
    classes: Sequence[str],
    values: Mapping[int, int],
    parts: Sequence[Sequence[tuple[str, str]]],
    seed: int,
) -> Splits:
    """Make splits of (image, label map) pairs, `parts` train and test; `values` as in DenseList.

    BadInput for a missing map, and for an image in both parts."""
    train_pairs, test_pairs = parts
    shared = {image for image, _ in train_pairs} & {image for image, _ in test_pairs}
    if shared:
        raise BadInput(
            f"{base}: {len(shared)} images of train are test images, {min(shared)} first;"
            " take them out of the list of train"
        )

    def listed(pairs: Sequence[tuple[str, str]]) -> DenseList:
        images = tuple(image for image, _ in pairs)
        maps = tuple(label_map for _, label_map in pairs)
        _refuse_outside(base, (*images, *maps))
        missing = [each for each in maps if not (base / each).is_file()]
        if missing:
            raise BadInput(
                f"{base / missing[0]} is missing ({len(missing)} label maps are)"
            )
        labels = (0,) * len(images)
        return DenseList(base, images, labels, tuple(classes), maps, values)

    return splits.with_hold_out(
        listed(train_pairs), listed(test_pairs), seed=seed, share=DENSE_HOLDOUT
    )


def _voc(train_list: str, train_maps: str) -> Reader:
    """Return the reader of a train list and the official val. 255, objects' border, is ignored."""

    def read(base: Path, seed: int) -> Splits:
        folder = base / "VOCdevkit" / "VOC2012"

        def pairs(name: str, maps: str) -> list[tuple[str, str]]:
            stems = _lines(folder / "ImageSets" / "Segmentation" / f"{name}.txt")
            return [(f"JPEGImages/{stem}.jpg", f"{maps}/{stem}.png") for stem in stems]

        parts = [pairs(train_list, train_maps), pairs("val", "SegmentationClass")]
        values = {value: value for value in (*range(len(VOC_CLASSES)), IGNORED)}
        return _dense(folder, VOC_CLASSES, values, parts, seed)

    return read


voc2012 = _voc("train", "SegmentationClass")
# VOC's and SBD's train without VOC's val. 1,103 images of VOC's val are in SBD, so `_dense` refuses
# a list from which they were not taken
voc2012aug = _voc("trainaug", "SegmentationClassAug")


def voc2007(base: Path, seed: int) -> Splits:
    """Read the classification lists of the VOC 2007 challenge, the official train, val and test.

    ImageSets/Main/<class>_<split>.txt says 1 of an image that shows the class, -1 of one that does
    not, and 0 where all of its objects there are difficult."""
    folder = base / "VOCdevkit" / "VOC2007"
    classes = VOC07_CLASSES

    def part(split: str) -> MultiLabelList:
        present: dict[str, list[int]] = {}
        difficult: dict[str, list[int]] = {}
        for label, name in enumerate(classes):
            file = folder / "ImageSets" / "Main" / f"{name}_{split}.txt"
            said = dict(line.split() for line in _lines(file))
            if label and said.keys() != present.keys():
                raise BadInput(
                    f"{file}: lists other images than {classes[0]}_{split}.txt; unpack the"
                    " archive again"
                )
            for stem, value in said.items():
                if value not in ("1", "0", "-1"):
                    raise BadInput(
                        f"{file}: '{printable.shown(value, 20)}' of image"
                        f" {printable.shown(stem, 40)} is not 1, 0 or -1"
                    )
                shown = present.setdefault(stem, [])
                unsure = difficult.setdefault(stem, [])
                if value == "1":
                    shown.append(label)
                elif value == "0":
                    unsure.append(label)
        paths = [f"JPEGImages/{stem}.jpg" for stem in present]
        _refuse_outside(folder, paths)
        marks = [mark(present[stem], difficult[stem]) for stem in present]
        labels = (0,) * len(paths)
        return MultiLabelList(folder, paths, labels, tuple(classes), tuple(marks))

    return Splits(part("train"), part("val"), part("test"), held_out=False)


def coco2017(base: Path, seed: int) -> Splits:
    """Read which of its 80 classes COCO's images show: train, of which a fifth chooses, and val."""
    return box_labels.read(base, seed)


def ade20k(base: Path, seed: int) -> Splits:
    """Read the 150 classes of the scene parsing challenge; 0, everything else, is ignored."""
    folder = base / "ADEChallengeData2016"
    parts = []
    for part in ("training", "validation"):
        maps = (folder / "annotations" / part).glob("ADE_*.png")
        parts.append(
            [
                (f"images/{part}/{stem}.jpg", f"annotations/{part}/{stem}.png")
                for stem in sorted(file.stem for file in maps)
            ]
        )
    numbers = range(1, 151)
    values = {0: IGNORED}
    for label, number in enumerate(numbers):
        values[number] = label
    return _dense(folder, [str(number) for number in numbers], values, parts, seed)


def cityscapes(base: Path, seed: int) -> Splits:
    """Read the fine annotations: 34 ids, of which 19 are scored."""
    ending = "_gtFine_labelIds.png"
    parts = []
    for part in ("train", "val"):
        pairs = []
        for file in sorted((base / "gtFine" / part).glob(f"*/*{ending}")):
            name = f"{part}/{file.parent.name}/{file.name.removesuffix(ending)}"
            label_map = file.relative_to(base).as_posix()
            pairs.append((f"leftImg8bit/{name}_leftImg8bit.png", label_map))
        parts.append(pairs)
    values = dict.fromkeys(range(34), IGNORED)
    for label, number in enumerate(CITYSCAPES_IDS):
        values[number] = label
    return _dense(base, [str(number) for number in CITYSCAPES_IDS], values, parts, seed)


def scenes(base: Path, seed: int) -> Splits:
    """Read the demo's scenes of digits: the background and ten digits (datasets/embedded.py)."""
    parts = []
    for part in ("train2017", "val2017"):
        stems = sorted(file.stem for file in (base / "maps" / part).glob("*.png"))
        pairs = [(f"{part}/{stem}.jpg", f"maps/{part}/{stem}.png") for stem in stems]
        parts.append(pairs)
    values = {value: value for value in (*range(11), IGNORED)}
    return _dense(base, ["background", *map(str, range(10))], values, parts, seed)


# One split, for pretraining: no hold-out is cut off, and unlabelled images count


def _split_in(folder: str, read: SplitReader) -> SplitReader:
    return lambda root, split: read(root / folder, split)


cifar10_split = _split_in("cifar10/cifar-10-batches-py", cifar_stl10.read_cifar)
cifar100_split = _split_in("cifar100/cifar-100-python", cifar_stl10.read_cifar)
stl10_split = _split_in("stl10/stl10_binary", cifar_stl10.read_stl10)


def imagenet100_split(root: Path, split: str) -> ImageList:
    """Read a split of ImageNet-100, from its own folder or ImageNet's.

    The labels follow the list's order, where evaluation (`imagenet100`) sorts it."""
    folder = root / "imagenet100"
    if not folder.is_dir():
        folder = root / "imagenet"
    every = class_list("imagenet")
    return reading.read_split(
        folder, split, classes=class_list("imagenet100"), every=every
    )


def imagenet_split(root: Path, split: str) -> ImageList:
    """Read a class folder as it is (it may be a subset), or all 1000 classes of a container."""
    folder = root / "imagenet"
    every = class_list("imagenet")
    contained = finding.find(folder, split) is not None
    return reading.read_split(
        folder, split, classes=every if contained else None, every=every
    )
