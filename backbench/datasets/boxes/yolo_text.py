"""Finds and reads boxes in YOLO's format: a text file for each image, and a list of class names.

The file that describes a folder is Ultralytics' data.yaml or Darknet's obj.data, which CVAT writes.
A line is a class number and either a box (centre x, centre y, width, height) or an outline (x y x y
...), as shares of the image's sides. Where data.yaml has `kpt_shape: [K, 2]` or `[K, 3]`, K keypoints
follow the box: x and y of each, and perhaps its visibility.
"""

from __future__ import annotations

import concurrent.futures
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backbench.datasets.boxes.parts import (
    LARGEST_LABELS,
    LARGEST_LIST,
    UNDIVIDED,
    BoxFolder,
    BoxPart,
    CocoContent,
    Keypoints,
    LabelledImage,
    below,
    files_in,
    one_each,
    pictures_in,
    read_text,
    refuse_unlike,
    split_folders,
)
from backbench.errors import BadInput
from backbench.images.decoding import opened, readable, upright_size
from backbench.images.file_names import is_image
from backbench.images.folder_walk import subfolders
from backbench.untrusted import opening, printable, yamls

SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}
NAME_FILES = ("classes.txt", "obj.names")
LARGEST_DESCRIPTION = opening.MEGABYTE
# Darknet is started from above the folder, which it calls so
DARKNETS = "data/"
# A coordinate may leave the image by this share of its side: exporters round
SLACK = 1e-3
# Digits behind the point of a pixel: shares of sides give 20.000000000000004
DIGITS = 6
# With fewer label files than this share of the images, they are not those of these images
FEWEST_LABELLED = 0.5
MOST_KEYPOINTS = 1000
THREADS = 16


def find(base: Path) -> BoxFolder | None:
    """Return the images of each split with their label files. None where there are none."""
    described = _described(base) or _described_for_darknet(base)
    if described is not None:
        file, about = described
        classes = _names_of(about.get("names"), file, about.get("nc"))
        keypoints = _keypoints_of(about, file, classes)
        parts = _described_parts(file, about, base)
        if not parts and not _has_labels(base):
            return None
    else:
        names = [base / name for name in NAME_FILES]
        names += [base / "labels" / name for name in NAME_FILES]
        there = [file for file in names if file.is_file()]
        parts = {}
        if not there:
            if any(_label_files(base / "labels", below_too=True)):
                raise BadInput(
                    f"{base}: has label files in labels/, and neither data.yaml nor classes.txt;"
                    " write classes.txt, a class a line"
                )
            return None
        # Folders of classes may have a list of their names, too
        if not _has_labels(base):
            return None
        classes = _listed_names(there[0])
        keypoints = None
    parts = parts or _usual_parts(base)
    if not parts:
        return None
    return BoxFolder(base, "YOLO", parts, classes, keypoints)


# Names


def _described(base: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the one YAML file of a folder that names classes, and what it holds."""
    found = []
    for file in files_in(base, ".yaml", ".yml"):
        try:
            about = yamls.read(file)
        except (OSError, ValueError) as error:
            if file.stem == "data":
                said = printable.shown(str(error), 100)
                raise BadInput(f"{file}: no YAML ({said}); write it again") from None
            continue
        if isinstance(about, dict) and ("names" in about or file.stem == "data"):
            found.append((file, about))
    return _only(found, base)


def _only(
    found: Sequence[tuple[Path, Mapping[str, Any]]], base: Path
) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the one description of a folder; None where there is none. BadInput names two."""
    if len(found) > 1:
        raise BadInput(
            f"{base}: {found[0][0].name} and {found[1][0].name} both name classes; move one away"
        )
    return found[0] if found else None


def _described_for_darknet(base: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the one file of Darknet's `key = value` lines in a folder, and what it says, in the
    words of data.yaml."""
    found = []
    for file in files_in(base, ".data"):
        try:
            lines = read_text(file, most=LARGEST_DESCRIPTION).splitlines()
        except BadInput:  # other programs' numbers are called so, too
            continue
        about: dict[str, Any] = {}
        for line in lines:
            key, equals, value = line.partition("#")[0].partition("=")
            if equals:
                about[key.strip()] = value.strip()
        if "names" in about:
            found.append((file, about))
    only = _only(found, base)
    if only is None:
        return None
    file, stated = only
    names = _placed(stated["names"], stated, file, base)
    if not names.is_file():
        raise BadInput(f"{file}: names is no file; write `names = obj.names`")
    count = stated.get("classes", "")
    in_words_of_yaml = {
        **stated,
        "names": list(_listed_names(names).values()),
        # No number of classes has ten digits, and Python reads no number of thousands
        "nc": int(count[:10]) if count.isdecimal() else None,
    }
    return file, in_words_of_yaml


def _names_of(names: object, file: Path, count: object) -> dict[int, str]:
    """Return class number -> name, from a list or from `number: name`."""
    if isinstance(names, list):
        found: dict[object, object] = dict(enumerate(names))
    elif isinstance(names, dict):
        found = dict(names)
    else:
        raise BadInput(f"{file}: has no 'names'; write `names: [...]`, a name a class")
    classes = {}
    for number, name in found.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise BadInput(
                f"{file}: names: {number!r:.40} is no class number; they count from 0"
            )
        # `names: [1, 2]` and `[yes, no]` are what some people call their classes
        classes[number] = str(name)
    if isinstance(count, int) and not isinstance(count, bool) and count != len(classes):
        raise BadInput(
            f"{file}: says {count} classes, but {len(classes)} names are there; correct one of the two"
        )
    _refuse_names(list(classes.values()), file)
    return classes


def _listed_names(file: Path) -> dict[int, str]:
    """Read classes.txt, a name a line."""
    lines = read_text(file, most=LARGEST_LIST).splitlines()
    names = [line.strip() for line in lines if line.strip()]
    _refuse_names(names, file)
    return dict(enumerate(names))


def _refuse_names(names: Sequence[str], file: Path) -> None:
    if not names:
        raise BadInput(f"{file}: names no class; write them, a name a class")
    for name in names:
        if names.count(name) > 1:
            raise BadInput(
                f"{file}: two classes are called '{printable.shown(name, 60)}'; rename one"
            )
        if character := printable.control_in(name):
            raise BadInput(f"{file}: a class name holds {character}; take it out")


# Keypoints


def _keypoints_of(
    about: Mapping[str, Any], file: Path, classes: Mapping[int, str]
) -> Keypoints | None:
    """Return what a YAML file says of keypoints; None where it says nothing of them."""
    shape = about.get("kpt_shape")
    if shape is None:
        stated = [key for key in ("flip_idx", "kpt_names") if about.get(key)]
        if stated:
            raise BadInput(
                f"{file}: has {stated[0]} and no kpt_shape; write `kpt_shape: [K, 3]` for K"
                " keypoints of x, y and visibility, or `[K, 2]` for x and y alone"
            )
        return None
    types = [type(number) for number in shape] if isinstance(shape, list) else []
    if types != [int, int] or not 1 <= shape[0] <= MOST_KEYPOINTS:
        raise BadInput(
            f"{file}: kpt_shape {shape!r:.40} is not [K, 2] or [K, 3], K from 1 to"
            f" {MOST_KEYPOINTS}; write the number of keypoints, and the numbers of each"
        )
    count, numbers = shape
    if numbers not in (2, 3):
        raise BadInput(
            f"{file}: kpt_shape {shape}: a keypoint has 2 numbers (x y) or 3 (x y visibility);"
            " correct the second one"
        )
    names = _names_of_keypoints(about.get("kpt_names"), count, file, classes)
    return Keypoints(
        file,
        numbers,
        count,
        names,
        _partners(about.get("flip_idx"), count, file),
        named=bool(about.get("kpt_names")),
    )


def _names_of_keypoints(
    stated: object, count: int, file: Path, classes: Mapping[int, str]
) -> dict[int, tuple[str, ...]]:
    """Return class number -> the names of its keypoints, by their place where none are stated."""
    if not stated:
        by_place = tuple(f"keypoint_{place}" for place in range(1, count + 1))
        return dict.fromkeys(classes, by_place)
    of_class = stated if isinstance(stated, dict) else dict.fromkeys(classes, stated)
    found = {}
    for number in classes:
        names = of_class.get(number)
        if not isinstance(names, list) or len(names) != count:
            has = len(names) if isinstance(names, list) else "no"
            raise BadInput(
                f"{file}: kpt_names has {has} names for class {number}, and kpt_shape says"
                f" {count}; write a name for each keypoint"
            )
        texts = tuple(str(name) for name in names)
        for name in texts:
            if texts.count(name) > 1:
                raise BadInput(
                    f"{file}: kpt_names: two keypoints of class {number} are called"
                    f" '{printable.shown(name, 60)}'; rename one"
                )
            if character := printable.control_in(name):
                raise BadInput(
                    f"{file}: kpt_names: a name holds {character}; take it out"
                )
        found[number] = texts
    return found


def _partners(stated: object, count: int, file: Path) -> tuple[int, ...] | None:
    """Return the index of each keypoint's partner in a mirrored image; None for an empty list."""
    if stated is None or stated == []:
        return None
    numbers = stated if isinstance(stated, list) else []
    whole = all(type(number) is int for number in numbers)
    if not whole or sorted(numbers) != list(range(count)):
        raise BadInput(
            f"{file}: flip_idx {printable.shown(str(stated), 60)} does not have each of 0 to"
            f" {count - 1} once, as kpt_shape's {count} keypoints ask for; correct it"
        )
    for place, partner in enumerate(numbers):
        if numbers[partner] != place:
            raise BadInput(
                f"{file}: flip_idx: keypoint {place} becomes {partner}, but {partner} becomes"
                f" {numbers[partner]}; two that change places have each other's number"
            )
    return tuple(numbers)


# Images and their label files


def _described_parts(
    file: Path, about: Mapping[str, Any], base: Path
) -> dict[str, BoxPart]:
    """Return the splits that a YAML file names, by its folders or lists of images."""
    parts: dict[str, BoxPart] = {}
    for split, keys in SPLIT_KEYS.items():
        stated = [about[key] for key in keys if about.get(key)]
        if len(stated) > 1:
            raise BadInput(f"{file}: states {' and '.join(keys)}; keep one of the two")
        if not stated:
            continue
        places = stated[0] if isinstance(stated[0], list) else [stated[0]]
        pairs: list[LabelledImage] = []
        for place in places:
            if not isinstance(place, str):
                raise BadInput(f"{file}: {split}: {place!r:.60} is no folder's name")
            pairs += _pairs_at(_placed(place, about, file, base), base)
        for other, part in parts.items():
            if pairs and set(part.pairs) == set(pairs):
                drawn = ""
                if not about.get("test"):
                    drawn = ", and a fifth of the images is drawn for test"
                raise BadInput(
                    f"{file}: {other} and {split} are the same images; leave {split} out{drawn}"
                )
        parts[split] = BoxPart(file, base, tuple(pairs))
    return parts


def _placed(place: str, about: Mapping[str, Any], file: Path, base: Path) -> Path:
    """Return the folder or list of images that a YAML file names, inside of `base`."""
    above = str(about.get("path") or ".")
    tried = [
        base / above / place,
        base / place,
        # Exporters write ../train/images where train/images is meant
        base / re.sub(r"^(\.\./)+", "", place),
        base / place.removeprefix(DARKNETS),
    ]
    for path in tried:
        normal = Path(re.sub(r"/\./", "/", str(path)))
        if normal.exists() and normal.is_relative_to(base) and ".." not in normal.parts:
            return normal
    shown = printable.shown(place, 100)
    raise BadInput(
        f"{file}: '{shown}' is no folder of images, and no list, below {base}; correct the path"
    )


def _usual_parts(base: Path) -> dict[str, BoxPart]:
    """Return the splits by the usual folders: images/<split> and labels/<split>, <split>/images and
    <split>/labels, images and labels, or images with their label files beside them."""
    divided = one_each(split_folders(base / "images"))
    if not divided:
        for split, folder in one_each(split_folders(base)).items():
            inner = folder / "images"
            divided[split] = inner if inner.is_dir() else folder
    if not divided:
        divided = {UNDIVIDED: base / "images" if (base / "images").is_dir() else base}
    parts = {}
    for split, folder in divided.items():
        pairs = _pairs_at(folder, base)
        if pairs:
            parts[split] = BoxPart(folder, base, tuple(pairs))
    return parts


def _pairs_at(place: Path, base: Path) -> list[LabelledImage]:
    """Pair the images of a folder, or those that a list names, with their label files."""
    if place.is_file():
        return _listed_pairs(place, base)
    pictures = pictures_in(place)
    folder = _labels_beside(place, base)
    labels = _label_files(folder)
    refuse_unlike(pictures, labels, folder, ".txt")
    if not pictures:
        raise BadInput(f"{place}: holds no image; put the images there")
    for name in subfolders(place):
        if pictures_in(place / name):
            raise BadInput(
                f"{place / name}: holds images, too; a split's images lie in one folder: move"
                f" them to {place}"
            )
    pairs = []
    for stem, picture in pictures.items():
        pairs.append(LabelledImage(below(picture, base), labels.get(stem)))
    _refuse_unlabelled(pairs, place, f" in {folder}")
    return pairs


def _refuse_unlabelled(
    pairs: Sequence[LabelledImage], place: Path, where: str = ""
) -> None:
    """Raise BadInput where most images have no label file."""
    missing = [pair for pair in pairs if pair.labels is None]
    if len(pairs) - len(missing) < FEWEST_LABELLED * len(pairs):
        raise BadInput(
            f"{place}: {len(missing)} of {len(pairs)} images have no label file{where}; write"
            " one for each image (an empty one, if it has no object)"
        )


def _listed_pairs(file: Path, base: Path) -> list[LabelledImage]:
    """Read a list of images, a path a line, below `base` or beside the list."""
    pairs = []
    for number, line in enumerate(read_text(file, most=LARGEST_LIST).splitlines(), 1):
        name = line.strip().removeprefix("./")
        if not name:
            continue
        where = f"{file}: line {number}: '{printable.shown(name, 100)}'"
        if not is_image(name) or ".." in Path(name).parts:
            raise BadInput(f"{where} is no image below {base}; correct the path")
        tried = [base / name, file.parent / name, base / name.removeprefix(DARKNETS)]
        there = [path for path in tried if path.is_file() and path.is_relative_to(base)]
        if not there:
            raise BadInput(f"{where} is no image below {base}; correct the path")
        picture = there[0]
        labels = _labels_beside(picture.parent, base) / f"{picture.stem}.txt"
        found = labels if labels.is_file() else None
        pairs.append(LabelledImage(below(picture, base), found))
    if not pairs:
        raise BadInput(f"{file}: lists no image; write one path a line")
    _refuse_unlabelled(pairs, file)
    return pairs


def _labels_beside(images: Path, base: Path) -> Path:
    """Return the folder of the label files: `images` in the path becomes `labels`, the last of them;
    else they lie beside the images."""
    parts = list(images.relative_to(base).parts)
    for place in reversed(range(len(parts))):
        if parts[place] == "images":
            parts[place] = "labels"
            labels = base.joinpath(*parts)
            if labels.is_dir():
                return labels
    return images


def _label_files(folder: Path, *, below_too: bool = False) -> dict[str, Path]:
    """Return stem -> label file of a folder."""
    files = files_in(folder, ".txt")
    if below_too:
        for _, inner in split_folders(folder):
            files += files_in(inner, ".txt")
    return {file.stem: file for file in files if file.name not in NAME_FILES}


def _has_labels(base: Path) -> bool:
    """Return True if a label file lies where the usual folders have them."""
    folders = [base / "labels"]
    for above in (base, base / "labels"):
        for _, folder in split_folders(above):
            folders += [folder, folder / "labels"]
    if pictures_in(base):
        folders.append(base)
    return any(_label_files(folder) for folder in folders)


# Values


def read(
    part: BoxPart,
    classes: Mapping[int, str],
    *,
    outlines: bool = False,
    keypoints: Keypoints | None = None,
) -> CocoContent:
    """Read the label files of a part, as COCO's lists. `outlines` asks for them; `keypoints` says
    which ones follow each box."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        paths = [part.folder / pair.image for pair in part.pairs]
        sizes = list(pool.map(_size_of, paths))
    images = []
    rows: list[dict[str, Any]] = []
    shapes: dict[str, str] = {}
    like_keypoints = _LikeKeypoints()
    for pair, (width, height) in zip(part.pairs, sizes, strict=True):
        images.append(
            {
                "id": pair.image,
                "file_name": pair.image,
                "width": width,
                "height": height,
            }
        )
        if pair.labels is None:
            continue
        lines = read_text(pair.labels, most=LARGEST_LABELS).splitlines()
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{pair.labels}: line {number}"
            label, words = _label_of(line, where, classes)
            if keypoints is not None:
                row = _posed(words, keypoints, width, height, where)
            else:
                like_keypoints.add(words, where)
                values = _values(words, where)
                shape = "boxes" if len(values) == 4 else "outlines"
                shapes.setdefault(shape, where)
                if len(shapes) > 1:
                    raise BadInput(
                        f"{where}: {len(values)} numbers ({shape}), but others have"
                        f" {' or '.join(each for each in shapes if each != shape)}; give all"
                        " objects a box, or all an outline"
                    )
                row = _object(values, width, height, where)
            row |= {
                "id": len(rows) + 1,
                "image_id": pair.image,
                "category_id": label,
                "iscrowd": 0,
            }
            rows.append(row)
    like_keypoints.refuse()
    if outlines and keypoints is not None:
        raise BadInput(
            f"{keypoints.file}: describes boxes with keypoints, but Mask R-CNN needs outlines"
            " (class x y x y x y ...); take faster_rcnn, or --config-file keypoint_rcnn_own"
        )
    if outlines and "boxes" in shapes:
        raise BadInput(
            f"{shapes['boxes']}: a box, but Mask R-CNN needs outlines (class x y x y x y ...);"
            " take faster_rcnn"
        )
    categories: list[dict[str, Any]] = []
    for number, name in classes.items():
        category: dict[str, Any] = {"id": number, "name": name}
        if keypoints is not None:
            category["keypoints"] = list(keypoints.names[number])
        categories.append(category)
    return {"images": images, "categories": categories, "annotations": rows}


class _LikeKeypoints:
    """Tells keypoints that nothing describes from outlines: each third number is a visibility."""

    FEWEST = 3  # objects; two outlines may look so by chance

    def __init__(self) -> None:
        self.first = ""
        self.lines = 0
        self.counts: set[int] = set()
        self.alike = True

    def add(self, words: Sequence[str], where: str) -> None:
        """Add the numbers of an object. BadInput for a visibility of 2, which no outline has."""
        self.first = self.first or where
        self.lines += 1
        self.counts.add(len(words))
        marks = words[6::3]
        stated = {_number(mark) for mark in marks}
        fits = len(words) > 4 and len(words) % 3 == 1 and stated <= {0.0, 1.0, 2.0}
        self.alike = self.alike and fits
        if fits and 2.0 in stated:
            self._refuse(where, len(marks))

    def refuse(self) -> None:
        """Raise BadInput where all objects look like boxes with keypoints."""
        if self.alike and self.lines >= self.FEWEST and len(self.counts) == 1:
            self._refuse(self.first, (self.counts.pop() - 4) // 3)

    def _refuse(self, where: str, count: int) -> None:
        raise BadInput(
            f"{where}: a box and {count} keypoints with their visibility, it seems; write"
            f" `kpt_shape: [{count}, 3]` into data.yaml"
        )


def _size_of(image: Path) -> tuple[int, int]:
    """Return (width, height) of an image as it is shown."""
    with readable(image) as file, opened(file, image) as source:
        return upright_size(source)


def _label_of(
    line: str, where: str, classes: Mapping[int, str]
) -> tuple[int, list[str]]:
    """Split a line into its class number, and the words behind it."""
    words = line.split()
    try:
        label = int(words[0])
    except ValueError:
        shown = printable.shown(words[0], 40)
        raise BadInput(
            f"{where}: class '{shown}' is no whole number; write one of data.yaml's"
        ) from None
    if label not in classes:
        numbers = sorted(classes)
        shown = printable.shown(words[0], 40)
        raise BadInput(
            f"{where}: class {shown} is none of the {len(classes)} named, {numbers[0]} to"
            f" {numbers[-1]}; name it in data.yaml (or classes.txt), or correct the line"
        )
    return label, words[1:]


def _number(word: str) -> float:
    """Return the number that a word states; NaN for any other word."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def _share(word: str, where: str) -> float:
    """Return a share of the image's side. BadInput for any other word."""
    value = _number(word)
    if not -SLACK <= value <= 1 + SLACK:
        shown = printable.shown(word, 40)
        raise BadInput(
            f"{where}: '{shown}' is no share of the image's side, from 0 to 1; divide x by its"
            " width and y by its height"
        )
    return value


def _values(words: Sequence[str], where: str) -> list[float]:
    """Return the shares of the image's sides that make a box or an outline."""
    values = [_share(word, where) for word in words]
    is_outline = len(values) >= 6 and len(values) % 2 == 0
    if len(values) != 4 and not is_outline:
        raise BadInput(
            f"{where}: {len(values)} numbers behind the class; a box has 4 (centre x, centre y,"
            " width, height), an outline 6 or more (x y x y x y ...), and keypoints need"
            " kpt_shape in data.yaml"
        )
    return values


def _posed(
    words: Sequence[str], keypoints: Keypoints, width: int, height: int, where: str
) -> dict[str, Any]:
    """Read the words of a box with keypoints."""
    each = keypoints.numbers
    wanted = 4 + keypoints.count * each
    if len(words) != wanted:
        raise BadInput(
            f"{where}: {len(words)} numbers behind the class; kpt_shape [{keypoints.count},"
            f" {each}] asks for {wanted}: 4 of the box and {each} of each keypoint"
        )
    row = _object([_share(word, where) for word in words[:4]], width, height, where)
    points: list[float] = []
    for place in range(4, wanted, each):
        x = _share(words[place], where)
        y = _share(words[place + 1], where)
        if each == 3:
            visibility = _number(words[place + 2])
            if visibility not in (0, 1, 2):
                shown = printable.shown(words[place + 2], 40)
                raise BadInput(
                    f"{where}: keypoint {(place - 4) // each}: visibility '{shown}'; it is 0 (not"
                    " marked), 1 (hidden) or 2 (visible)"
                )
        else:
            # Without a visibility, Ultralytics takes a negative coordinate for no mark. COCO's points
            # without one lie at 0 0, and stay there where an exporter drops the third number
            unmarked = x < 0 or y < 0 or (x == 0 and y == 0)
            visibility = 0 if unmarked else 2
        points += [
            round(x * width, DIGITS),
            round(y * height, DIGITS),
            int(visibility),
        ]
    return row | {"keypoints": points}


def _object(
    values: Sequence[float], width: int, height: int, where: str
) -> dict[str, Any]:
    """Turn shares of the image's sides into a box in pixels, and into an outline."""
    if len(values) == 4:
        x, y, w, h = values
        left = (x - w / 2) * width
        top = (y - h / 2) * height
        box = [left, top, w * width, h * height]
        if box[2] <= 0 or box[3] <= 0:
            raise BadInput(
                f"{where}: a box of {w:g} x {h:g}; width and height are above 0"
            )
        box = [round(value, DIGITS) for value in box]
        return {"bbox": box, "area": box[2] * box[3]}
    polygon = []
    for place, value in enumerate(values):
        side = height if place % 2 else width
        polygon.append(round(value * side, DIGITS))
    across = polygon[0::2]
    down = polygon[1::2]
    box = [
        min(across),
        min(down),
        max(across) - min(across),
        max(down) - min(down),
    ]
    return {"bbox": box, "area": _area(across, down), "segmentation": [polygon]}


def _area(across: Sequence[float], down: Sequence[float]) -> float:
    """Return the area of a polygon by the shoelace formula."""
    twice = 0.0
    for place in range(len(across)):
        before = place - 1
        twice += across[before] * down[place] - across[place] * down[before]
    return abs(twice) / 2
