"""Checks COCO and VOC for `data check`: are all listed images there? `detect` checks the rest."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from backbench.containers import containers
from backbench.errors import BadInput
from backbench.untrusted import opening, printable

LARGEST = 8 * opening.GIGABYTE  # bytes of an annotation file; COCO's have half of one


def check(name: str, root: Path) -> int | None:
    """Print what is there and what is missing; 1 where something is, None for no such layout."""
    base = root / name
    if (base / "annotations").is_dir():
        lines = list(_coco(base))
    elif (years := sorted(base.glob("VOC20??"))) or (
        base / "ImageSets" / "Main"
    ).is_dir():
        lines = [line for year in years or [base] for line in _voc(year)]
    else:
        return None
    problems = 0
    for said, missing in lines:
        problems += bool(missing)
        print(f"{name}: {'PROBLEM: ' if missing else ''}{said}{missing}")
    print(f"{name}: {problems} problems" if problems else f"{name}: all right")
    return 1 if problems else 0


def _coco(base: Path) -> Iterator[tuple[str, str]]:
    """(what an annotation file holds, which of its images are missing: empty where none is)."""
    files = sorted((base / "annotations").glob("*_*.json"))
    if not files:
        raise BadInput(
            f"{base / 'annotations'}: no file instances_<split>.json; get COCO's"
        )
    for file in files:
        folder = base / file.stem.rpartition("_")[2]
        try:
            about = json.loads(opening.read_bytes(file, most=LARGEST))
            needed = [image["file_name"] for image in about["images"]]
            if odd := [name for name in needed if not isinstance(name, str)]:
                raise TypeError(f"file_name {odd[0]} is no text")
            objects = len(about.get("annotations", ()))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            what = printable.shown(f"{type(error).__name__}: {error}", 100)
            raise BadInput(f"{file}: not COCO's format ({what})") from None
        said = f"{file.name}: {len(needed)} images, {objects} objects"
        yield said, _missing_images(folder, needed)


def _missing_images(folder: Path, names: list[str]) -> str:
    """The images that are neither in the folder nor in its archive."""
    try:
        if containers.archived(folder, names) is not None:
            return ""
    except BadInput as error:
        return f"; {error}"
    return _missing([folder / name for name in names])


def _voc(base: Path) -> Iterator[tuple[str, str]]:
    for file in sorted((base / "ImageSets" / "Main").glob("*.txt")):
        if "_" in file.stem:  # of one class
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
        yield f"{base.name} {file.stem}: {len(names)} images", missing


def _missing(files: list[Path]) -> str:
    absent = [file for file in files if not os.path.isfile(file)]  # noqa: PTH113 - any name at all
    first = printable.shown(str(absent[0]), 300) if absent else ""
    return f"; {len(absent)} files are missing, {first} first" if absent else ""
