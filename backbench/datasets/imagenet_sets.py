"""Reads test sets for ImageNet's classifiers; nothing is trained or chosen on them.

A label is a place in the set's own class list; `Splits.imagenet` says which of ImageNet's 1000
classes it means."""

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backbench.containers import reading
from backbench.datasets.readers import class_list
from backbench.datasets.row import Reader
from backbench.datasets.splits import InImageNet, Splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList, scan_folder
from backbench.untrusted import jsons, opening

# sha256 of google-research/reassessed-imagenet's real.json, as json.dumps writes its lists
REAL = "d83e9bff374c631aae8439eb064c7019acc56e1b3bc3f56b8380c2a710b0220b"
PER_CLASS_OF_V2 = 10
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


def _of_classes(images: ImageList, synsets: Sequence[str]) -> Splits:
    """Make a set whose labels are places in `synsets`."""
    place = {synset: i for i, synset in enumerate(class_list("imagenet"))}
    return _only_test(images, InImageNet(tuple((place[synset],) for synset in synsets)))


def _only_test(images: ImageList, ids: InImageNet) -> Splits:
    none = ImageList(images.root, (), (), images.classes)
    return Splits(none, none, images, held_out=False, imagenet=ids)


def _v2(folder: str) -> Reader:
    """Return the reader of an ImageNet-V2 set: FOLDER/<0..999>/<40 hex>.jpeg, sorted by number."""

    def read(base: Path, seed: int) -> Splits:
        numbers = [str(number) for number in range(len(class_list("imagenet")))]
        images = scan_folder(base / folder, classes=numbers)
        counts = [0] * len(numbers)
        for label in images.labels:
            counts[label] += 1
        for number, count in zip(numbers, counts):
            if count != PER_CLASS_OF_V2:
                raise BadInput(
                    f"{base / folder / number}: {count} images, not 10; an older"
                    " unpacking has 20: remove the folder and unpack the archive again"
                )
        synsets = class_list("imagenet")
        return _of_classes(replace(images, classes=tuple(synsets)), synsets)

    return read


def _of_synsets(folder: str, name: str) -> Reader:
    """Return the reader of FOLDER/<synset>/*; labels are places in the class list `name`."""

    def read(base: Path, seed: int) -> Splits:
        synsets = class_list(name)
        if folder == "val":
            # ImageNet's own val may be in a container, as in `readers.imagenet`
            every = class_list("imagenet")
            images = reading.read_split(base, "val", classes=synsets, every=every)
        else:
            images = scan_folder(base / folder, classes=synsets)
        return _of_classes(images, synsets)

    return read


@functools.lru_cache(maxsize=1)
def _published_answers(text: bytes) -> tuple[tuple[int, ...], ...] | None:
    """Return the labels of each file of val; None where `text` holds others than the published ones.

    A command opens the set several times, and the text is that of 50 000 lists."""
    answers = jsons.decode(text)
    if hashlib.sha256(json.dumps(answers).encode()).hexdigest() != REAL:
        return None
    return tuple(map(tuple, answers))


def _real(base: Path, seed: int) -> Splits:
    """Read ImageNet's val with the labels of real.json: a list for each file ILSVRC2012_val_%08d.

    Files count from 1. An image may have several labels; those without any are left out."""
    file = base / "real.json"
    answers = _published_answers(opening.read_bytes(file, most=64 * opening.MEGABYTE))
    if answers is None:
        raise BadInput(
            f"{file}: not the published labels; get it from reassessed-imagenet again"
        )
    paths: list[str] = []
    labels: list[int] = []
    right: list[tuple[int, ...]] = []  # all labels of an image
    seen: set[int] = set()
    for path in sorted((base / "val").rglob("ILSVRC2012_val_*")):
        name = _VAL_NAME.fullmatch(path.name)
        if name is None:
            continue
        number = int(name[1])
        if number in seen or not 1 <= number <= len(answers):
            raise BadInput(
                f"{path}: no image of val, or a second copy of one; remove it"
            )
        seen.add(number)
        of_file = answers[number - 1]
        if of_file:
            paths.append(path.relative_to(base).as_posix())
            labels.append(of_file[0])
            right.append(of_file)
    synsets = class_list("imagenet")
    images = ImageList(base, tuple(paths), tuple(labels), tuple(synsets))
    ids = tuple((i,) for i in range(len(synsets)))
    return _only_test(images, InImageNet(ids, tuple(right)))


def _objectnet(base: Path, seed: int) -> Splits:
    """Read the images of the 113 classes that ImageNet has, too, by the files of mappings/."""
    mappings = base / "objectnet-1.0" / "mappings"
    label_of_folder = _mapping(mappings / "folder_to_objectnet_label.json")
    names_of_label = _mapping(mappings / "objectnet_to_imagenet_1k.json")
    # 1. ImageNet's names -> our classes. The names are lines in ILSVRC's own order; a second file
    #    gives the line of each class
    line_of_class = _mapping(mappings / "pytorch_to_imagenet_2012_id.json")
    class_of_line = {line: int(number) for number, line in line_of_class.items()}
    text = opening.read_bytes(
        mappings / "imagenet_to_label_2012_v2", most=opening.MEGABYTE
    )
    class_of_name = {}
    for line, name in enumerate(text.decode().splitlines()):
        class_of_name[name.strip()] = class_of_line[line]
    # 2. The folders with classes of ImageNet's; one may be several: "a; b"
    folders = []
    ids = []
    for folder, label in sorted(label_of_folder.items()):
        if label in names_of_label:
            names = str(names_of_label[label]).split("; ")
            folders.append(folder)
            ids.append(tuple(class_of_name[name] for name in names))
    images = scan_folder(base / "objectnet-1.0" / "images", classes=folders)
    return _only_test(images, InImageNet(tuple(ids)))


def _mapping(file: Path) -> dict[str, Any]:
    value = jsons.read(file)
    if not isinstance(value, dict):
        raise BadInput(f"{file}: no mapping; unpack the archive again")
    return value


READERS: dict[str, Reader] = {
    "imagenet-v2-matched": _v2("imagenetv2-matched-frequency-format-val"),
    "imagenet-v2-threshold": _v2("imagenetv2-threshold0.7-format-val"),
    "imagenet-v2-top": _v2("imagenetv2-top-images-format-val"),
    "imagenet-a": _of_synsets("imagenet-a", "imagenet_a"),
    "imagenet-r": _of_synsets("imagenet-r", "imagenet_r"),
    "imagenet-sketch": _of_synsets("sketch", "imagenet"),
    "imagenet-real": _real,
    "objectnet": _objectnet,
    "imagenet-val": _of_synsets("val", "imagenet"),
    "imagenet-val-a": _of_synsets("val", "imagenet_a"),
    "imagenet-val-r": _of_synsets("val", "imagenet_r"),
}
