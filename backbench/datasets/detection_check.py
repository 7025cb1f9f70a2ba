"""Checks for `data check` that all images that COCO's and VOC's lists name are there.

What `detect` would refuse, or warn of, is the caller's to find."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from backbench.containers import reading
from backbench.errors import BadInput
from backbench.untrusted import opening, printable

LARGEST = 8 * opening.GIGABYTE  # bytes of an annotation file; COCO's have half a GB


# Takes an annotation file and the folder of its images; returns what is wrong, and what is worth
# saying.
Inspection: TypeAlias = Callable[[Path, Path], tuple[list[str], list[str]]]


def check(name: str, root: Path, inspect: Inspection) -> list[str] | None:
    """Print what is there and what is missing, and what `inspect` finds in COCO's files.

    Return what is missing or wrong. None means that ROOT/<name> has neither layout."""
    base = root / name
    years = sorted(base.glob("VOC20??"))
    if not years and (base / "ImageSets" / "Main").is_dir():
        years = [base]
    if (base / "annotations").is_dir():
        lines = list(_coco(base, inspect))
    elif years:
        lines = [line for year in years for line in _voc(year)]
    else:
        return None
    problems = []
    for said, is_problem in lines:
        if is_problem:
            problems.append(said)
            print(f"{name}: PROBLEM: {said}")
        else:
            print(f"{name}: {said}")
    print(f"{name}: {len(problems)} problems" if problems else f"{name}: all right")
    return problems


def _coco(base: Path, inspect: Inspection) -> Iterator[tuple[str, bool]]:
    """Yield lines on the annotation files, and whether each is a problem.

    A file of which no image is missing is inspected, too."""
    files = sorted((base / "annotations").glob("*_*.json"))
    if not files:
        raise BadInput(
            f"{base / 'annotations'}: no file instances_<split>.json; get COCO's"
        )
    for file in files:
        folder = base / file.stem.rpartition("_")[2]
        needed, objects = _listed(file)
        missing = _missing_images(folder, needed)
        holds = f"{file.name}: {len(needed)} images, {objects} objects"
        yield f"{holds}{missing}", bool(missing)
        if missing:
            continue
        wrong, said = inspect(file, folder)
        for line in wrong:
            yield line, True
        for line in said:
            yield line, False


def _listed(file: Path) -> tuple[list[str], int]:
    """Return the names of an annotation file's images, and the number of its objects."""
    try:
        about = json.loads(opening.read_bytes(file, most=LARGEST))
        needed = [image["file_name"] for image in about["images"]]
        odd = [name for name in needed if not isinstance(name, str)]
        if odd:
            raise TypeError(f"file_name {odd[0]} is no text")
        return needed, len(about.get("annotations", ()))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        said = printable.shown(f"{type(error).__name__}: {error}", 100)
        raise BadInput(f"{file}: not COCO's format ({said})") from None


def _missing_images(folder: Path, names: list[str]) -> str:
    """Say which images are neither in the folder nor in its archive; '' where none is missing."""
    try:
        if reading.read_archived_folder(folder, names) is not None:
            return ""
    except BadInput as error:
        return f"; {error}"
    return _missing([folder / name for name in names])


def _voc(base: Path) -> Iterator[tuple[str, bool]]:
    """Yield a line on each list of images, and whether files are missing."""
    for file in sorted((base / "ImageSets" / "Main").glob("*.txt")):
        # cat_train.txt lists the images of one class, which train.txt has, too
        if "_" in file.stem:
            continue
        try:
            text = opening.read_bytes(file, most=LARGEST).decode()
        except (OSError, ValueError) as error:
            raise BadInput(f"{file}: not a list of images ({error})") from None
        names = [line.split()[0] for line in text.splitlines() if line.strip()]
        missing = _missing_images(
            base / "JPEGImages", [f"{name}.jpg" for name in names]
        )
        missing += _missing([base / "Annotations" / f"{name}.xml" for name in names])
        yield f"{base.name} {file.stem}: {len(names)} images{missing}", bool(missing)


def _missing(files: list[Path]) -> str:
    # Path.is_file() raises for a name that no file can have
    absent = [file for file in files if not os.path.isfile(file)]  # noqa: PTH113
    if not absent:
        return ""
    first = printable.shown(str(absent[0]), 300)
    return f"; {len(absent)} files are missing, {first} first"
