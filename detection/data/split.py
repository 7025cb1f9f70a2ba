"""Split: a dataset, or several joined, as records; and which of them are trained on."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backbench.containers.spans import NamedImages
from backbench.detection.data.dataset_dicts import Annotation, ImageRecord
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.images import contents
from backbench.images.image_list import ImageList

LEFT_RIGHT = (("left", "right"), ("right", "left"))
# Folder of the data -> the dataset's name in results, where they differ
RESULT_NAMES = {"coco": "coco2017", "VOC2007": "voc2007"}


@dataclass(frozen=True)
class DatasetFiles:
    """Where a dataset lies: its annotation file, or VOC's list of images, and its images."""

    name: str  # Detectron2's
    file: Path
    folder: Path  # of the images
    limit: int | None = None  # only so many images


@dataclass(frozen=True)
class Split:
    """Holds the images of a dataset, or of several joined, with their objects. `categories` are
    names by contiguous label; `ids` are the file's own, in the same order."""

    files: DatasetFiles
    categories: tuple[str, ...]
    ids: tuple[int, ...]
    records: list[ImageRecord]
    keypoints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was left out, in words
    more_files: tuple[Path, ...] = ()  # of the datasets joined to this one

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def file(self) -> Path:
        return self.files.file

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def flip(self) -> list[int]:
        """The keypoint that each one becomes in a mirrored image: left_eye takes right_eye's."""
        return [self.keypoints.index(self._partner(name)) for name in self.keypoints]

    def _partner(self, name: str) -> str:
        """left_eye for right_eye; a name without a side is its own partner."""
        for side, other in LEFT_RIGHT:
            if side in name:
                partner = name.replace(side, other)
                return partner if partner in self.keypoints else name
        return name

    @functools.cached_property
    def fingerprint(self) -> str:
        """The images and annotations: the files' sha256 and the number of images taken."""
        digest = hashlib.sha256()
        for file in (self.file, *self.more_files):
            digest.update(file.read_bytes())
        return f"{self.name}:{digest.hexdigest()[:16]}:{len(self.records)}"

    @functools.cached_property
    def contents(self) -> str:
        """A digest of a sample of the images' bytes: it changes if other files get the same names."""
        return contents.sample(self.images)

    @property
    def images(self) -> ImageList:
        """The images without their objects."""
        names = tuple(record["file_name"] for record in self.records)
        return NamedImages(Path(), names, (-1,) * len(names), ())

    @property
    def part(self) -> str:
        """The part of the dataset as results call it: val, test, trainval."""
        names = [word for word in self.name.split("_") if not word.isdigit()]
        return names[-1]

    @property
    def dataset(self) -> str:
        """The dataset's name in the results."""
        folder = self.folder.parent.name
        return RESULT_NAMES.get(folder, folder)


def join(splits: Sequence[Split]) -> Split:
    """Join several training sets in the order given. Raises BadInput if their categories differ."""
    first, *others = splits
    for other in others:
        if (other.categories, other.ids) != (first.categories, first.ids):
            raise BadInput(
                f"{other.file}: its categories are not those of {first.file}"
            )
    records, notes = list(first.records), list(first.notes)
    for other in others:
        records += other.records
        notes += other.notes
    return replace(
        first,
        files=replace(first.files, name="+".join(s.name for s in splits)),
        records=records,
        notes=tuple(notes),
        more_files=tuple(s.file for s in others),
    )


def training_records(split: Split, task: DetectionTask) -> list[ImageRecord]:
    """Keep the images with at least one object that is no crowd, and for keypoints at least one
    marked keypoint. These are the filters of detectron2/data/build.py."""
    kept = []
    for record in split.records:
        objects = [a for a in record["annotations"] if not a["iscrowd"]]
        if task.keypoints:
            objects = [a for a in objects if is_marked(a)]
        if objects:
            kept.append(record)
    if not kept:
        raise BadInput(f"{split.file}: no image has an object to train on")
    return kept


def is_marked(annotation: Annotation) -> bool:
    """True if the object has a keypoint to learn."""
    return any(v > 0 for v in annotation.get("keypoints", ())[2::3])
