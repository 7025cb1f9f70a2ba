"""Holds where the boxes of a folder lie: a part for each split, with its images and label files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from backbench.containers.container import split_of
from backbench.errors import BadInput
from backbench.images.file_names import is_image
from backbench.images.folder_walk import subfolders
from backbench.untrusted import jsons, opening, printable

Layout = Literal["COCO", "VOC", "YOLO"]
# What COCO's annotation files hold, as json gives it
CocoContent: TypeAlias = dict[str, list[dict[str, Any]]]

UNDIVIDED = ""  # the name of the only part of a folder without a split
LARGEST_LABELS = 64 * opening.MEGABYTE  # bytes of one image's label file
LARGEST_LIST = opening.GIGABYTE
LARGEST_JSON = 8 * opening.GIGABYTE  # COCO's own have half a GB


class LabelledImage(NamedTuple):
    """An image, and the file of its boxes; None where YOLO has none, which means no objects."""

    image: str  # below the part's folder
    labels: Path | None


@dataclass(frozen=True)
class BoxPart:
    """One split of a folder."""

    file: Path  # the annotation file, or the file or folder that lists the images
    folder: Path  # its images lie below it
    pairs: tuple[LabelledImage, ...] = ()  # of VOC and YOLO
    keypoints: Path | None = (
        None  # COCO's annotation file for keypoints, if it is another
    )

    @property
    def pictures(self) -> Path:
        """The folder of its first image."""
        if not self.pairs:
            return self.folder
        return (self.folder / self.pairs[0].image).parent


@dataclass(frozen=True)
class Keypoints:
    """The keypoints that YOLO's data.yaml describes."""

    file: Path  # which describes them
    numbers: Literal[2, 3]  # of a keypoint: x and y, and perhaps its visibility
    count: int
    names: Mapping[int, tuple[str, ...]]  # a class number's
    # The index of each keypoint's partner in a mirrored image; None where nothing is said of it
    partners: tuple[int, ...] | None
    named: bool  # by the file, and not by their place alone


@dataclass(frozen=True)
class BoxFolder:
    """A folder with boxes."""

    base: Path
    layout: Layout
    parts: Mapping[str, BoxPart]  # train, val, test, or UNDIVIDED
    classes: Mapping[int, str] | None = None  # YOLO's: a number's name
    keypoints: Keypoints | None = None  # YOLO's

    def has_outlines(self) -> bool:
        """Return True if all objects have an outline. In YOLO's layout the first object tells it:
        boxes and outlines together are refused where they are read."""
        if self.layout == "COCO":
            outlines: list[object] = []
            try:
                for part in self.parts.values():
                    content = opening.read_bytes(part.file, most=LARGEST_JSON)
                    rows = jsons.decode(content)["annotations"]
                    outlines += [row.get("segmentation") for row in rows]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                return False  # reading it says what is wrong
            # [[]] is one polygon without a point
            return bool(outlines) and all(each and each != [[]] for each in outlines)
        if self.layout == "VOC" or self.keypoints is not None:
            return False
        first_part = next(iter(self.parts.values()))
        for pair in first_part.pairs:
            text = ""
            if pair.labels is not None:
                text = read_text(pair.labels, most=LARGEST_LABELS)
            if text.strip():
                return len(text.strip().splitlines()[0].split()) > 5
        return False


def split_named(name: str) -> str | None:
    """Return the split that a word names, a year behind it or not: `val` for val2017."""
    return split_of(re.sub(r"\d+$", "", name))


def split_folders(base: Path) -> list[tuple[str, Path]]:
    """List the folders in `base` that are called as a split is, each with its split."""
    if not base.is_dir():
        return []
    found = []
    for name in subfolders(base):
        split = split_named(name)
        if split is not None:
            found.append((split, base / name))
    return found


def one_each(found: Iterable[tuple[str, Path]]) -> dict[str, Path]:
    """Return split -> its file or folder. BadInput names a split that is there twice."""
    out: dict[str, Path] = {}
    for split, path in found:
        if split in out:
            raise BadInput(
                f"{path.parent}: '{split}' is there twice, as {out[split].name} and {path.name};"
                " move one away"
            )
        out[split] = path
    return out


def files_in(folder: Path, *suffixes: str) -> list[Path]:
    """List the files of a folder that end so, sorted; none where there is no such folder."""
    if not folder.is_dir():
        return []
    # A Path is made of few of them: there may be a million images beside
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    matches = [name for name in names if name.lower().endswith(suffixes)]
    files = [folder / name for name in sorted(matches) if not name.startswith(".")]
    return [file for file in files if file.is_file()]


def pictures_in(folder: Path) -> dict[str, Path]:
    """Return stem -> image of a folder. BadInput for two images that share a label file."""
    found: dict[str, Path] = {}
    if not folder.is_dir():
        return found
    for file in sorted(folder.iterdir()):
        if not is_image(file.name):
            continue
        if file.stem in found:
            raise BadInput(
                f"{file}: {found[file.stem].name} beside it would have the same label file; rename"
                " one of the two"
            )
        found[file.stem] = file
    return found


def last_of(name: str) -> str:
    """Return the last part of a path that a list states, as Windows or POSIX spell it."""
    return re.split(r"[/\\]", name)[-1]


def near(name: str, folder: Path) -> str:
    """Return the image of `folder` that a wrong name means: the same one but for the folders before
    it, the case of its letters, or its ending. Empty where there is none."""
    if not folder.is_dir():
        return ""
    wanted = last_of(name).lower()
    there = sorted(file.name for file in folder.iterdir() if is_image(file.name))
    same = [each for each in there if each.lower() == wanted]
    stem = wanted.rpartition(".")[0] if is_image(wanted) else wanted
    alike = [each for each in there if Path(each).stem.lower() == stem]
    meant = [*same, *alike]
    return meant[0] if meant else ""


def below(image: Path, base: Path) -> str:
    """Return an image's path below `base`, by its spelling."""
    return image.relative_to(base).as_posix()


def refuse_unlike(
    pictures: Iterable[str], labels: Iterable[str], where: Path, kind: str
) -> None:
    """Raise BadInput for label files without an image; both are stems."""
    alone = sorted(set(labels) - set(pictures))
    if alone:
        first = printable.shown(alone[0], 100)
        raise BadInput(
            f"{where}: {len(alone)} label files have no image, first {first}{kind}; put the images"
            " there, or take the files away"
        )


def read_text(file: Path, *, most: int) -> str:
    """Read a text file of others. BadInput names the file."""
    try:
        return opening.read_bytes(file, most=most).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{file}: is no text in UTF-8; save it as UTF-8") from None
    except OSError as error:
        said = printable.shown(error.strerror or str(error), 100)
        raise BadInput(f"{file}: not readable ({said})") from None
