"""Reads test sets for ImageNet's classifiers; nothing is trained or chosen on them. Labels are
places in their own lists; `Splits.imagenet` says which of ImageNet's 1000 classes they mean."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backbench.containers import containers
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
    """A set whose labels are places in `synsets`."""
    place = {synset: i for i, synset in enumerate(class_list("imagenet"))}
    return _only_test(images, InImageNet(tuple((place[synset],) for synset in synsets)))


def _only_test(images: ImageList, ids: InImageNet) -> Splits:
    none = ImageList(images.root, (), (), images.classes)
    return Splits(none, none, images, False, imagenet=ids)


def _v2(folder: str) -> Reader:
    """An ImageNet-V2 set: FOLDER/<0..999>/<40 hex>.jpeg, folders by number and not as text."""

    def read(base: Path, seed: int) -> Splits:
        numbers = [str(number) for number in range(len(class_list("imagenet")))]
        images = scan_folder(base / folder, classes=numbers)
        counts = [0] * len(numbers)
        for label in images.labels:
            counts[label] += 1
        odd = [
            number for number, count in enumerate(counts) if count != PER_CLASS_OF_V2
        ]
        if odd:
            raise BadInput(
                f"{base / folder / numbers[odd[0]]}: {counts[odd[0]]} images, not 10; an older"
                " unpacking has 20: remove the folder and unpack the archive again"
            )
        synsets = class_list("imagenet")
        return _of_classes(replace(images, classes=tuple(synsets)), synsets)

    return read


def _of_synsets(folder: str, name: str) -> Reader:
    """FOLDER/<synset>/*; labels are places in the sorted list of that name."""

    def read(base: Path, seed: int) -> Splits:
        synsets, every = class_list(name), class_list("imagenet")
        if folder == "val":  # as ImageNet's own reader takes it
            images = containers.read_split(base, "val", classes=synsets, every=every)
        else:
            images = scan_folder(base / folder, classes=synsets)
        return _of_classes(images, synsets)

    return read


def _real(base: Path, seed: int) -> Splits:
    """Read ImageNet's val with the labels of real.json, which counts the files ILSVRC2012_val_%08d
    from 1. An image may have several; those without any are left out."""
    file = base / "real.json"
    answers = jsons.read(file)
    if hashlib.sha256(json.dumps(answers).encode()).hexdigest() != REAL:
        raise BadInput(
            f"{file}: not the published labels; get it from reassessed-imagenet again"
        )
    paths, labels, of_image, known = [], [], [], set()
    for path in sorted((base / "val").rglob("ILSVRC2012_val_*")):
        name = _VAL_NAME.fullmatch(path.name)
        number = int(name[1]) if name else 0
        if name and (number in known or not 1 <= number <= len(answers)):
            raise BadInput(
                f"{path}: no image of val, or a second copy of one; remove it"
            )
        known.add(number)
        of_file = answers[number - 1] if name else ()
        if of_file:
            paths.append(path.relative_to(base).as_posix())
            labels.append(of_file[0])
            of_image.append(tuple(of_file))
    synsets = class_list("imagenet")
    images = ImageList(base, tuple(paths), tuple(labels), tuple(synsets))
    ids = tuple((i,) for i in range(len(synsets)))
    return _only_test(images, InImageNet(ids, tuple(of_image)))


def _objectnet(base: Path, seed: int) -> Splits:
    """The images of the 113 classes that ImageNet has, too, by the files of mappings/."""
    folder, mappings = (
        base / "objectnet-1.0" / "images",
        base / "objectnet-1.0" / "mappings",
    )
    label_of_folder = _mapping(mappings / "folder_to_objectnet_label.json")
    names_of_label = _mapping(mappings / "objectnet_to_imagenet_1k.json")
    # imagenet_to_label_2012_v2 is in ILSVRC's own order: its line l is class c where c has the
    # value l in this file
    lines_of_class = _mapping(mappings / "pytorch_to_imagenet_2012_id.json")
    class_of_line = {line: int(c) for c, line in lines_of_class.items()}
    text = opening.read_bytes(
        mappings / "imagenet_to_label_2012_v2", most=opening.MEGABYTE
    )
    lines = text.decode().splitlines()
    class_of_name = {line.strip(): class_of_line[n] for n, line in enumerate(lines)}
    folders, ids = [], []
    for name, label in sorted(label_of_folder.items()):
        if label in names_of_label:
            folders.append(name)
            ids.append(
                tuple(
                    class_of_name[each]
                    for each in str(names_of_label[label]).split("; ")
                )
            )
    return _only_test(scan_folder(folder, classes=folders), InImageNet(tuple(ids)))


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
