"""Holds a dataset, or several joined, as records, and says which of them are trained on."""

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backbench.containers.spans import NamedImages, plain_name
from backbench.detection.data import coco_lists, sides
from backbench.detection.data.dataset_dicts import Annotation, ImageRecord
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.images import contents
from backbench.images.image_list import ImageList

# Folder of the data -> the dataset's name in results, where the two differ
RESULT_NAMES = {"coco": "coco2017", "VOC2007": "voc2007"}


@dataclass(frozen=True)
class DatasetFiles:
    """Says where a dataset lies."""

    name: str  # Detectron2's
    file: Path  # the annotation file, or VOC's list of images
    folder: Path  # of the images
    limit: int | None = None  # only the first so many images
    dataset: str = ""  # its name in results, where that is not its folder's


@dataclass(frozen=True)
class Split:
    """Holds the images of a dataset, or of several joined, with their objects."""

    files: DatasetFiles
    categories: tuple[str, ...]  # a label's name
    ids: tuple[int, ...]  # a label's category id in the file
    records: list[ImageRecord]
    keypoints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # say what was left out
    more_files: tuple[Path, ...] = ()  # of the datasets joined to this one
    objects: int = 0  # in the annotation file, those of images beyond the limit too
    # Of boxes of one's own: their annotations in COCO's format, which their file may not have, and a
    # digest of what is said of each image
    content: bytes | None = None
    lists_digest: str = ""
    # Of YOLO's keypoints: their partners where data.yaml states them, or that neither it nor names do
    partners: tuple[int, ...] | None = None
    partners_unknown: bool = False

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
        """The index of each keypoint's partner: left_eye has right_eye's, the nose has its own."""
        if self.partners is not None:
            return list(self.partners)
        return sides.partners(self.keypoints)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The name, the annotation files' sha256 (16 digits) and the number of images taken."""
        if self.lists_digest:
            return f"{self.name}:{self.lists_digest[:16]}:{len(self.records)}"
        digest = hashlib.sha256()
        for file in (self.file, *self.more_files):
            digest.update(file.read_bytes())
        return f"{self.name}:{digest.hexdigest()[:16]}:{len(self.records)}"

    def annotations(self) -> bytes:
        """Return the annotations in COCO's format, as text."""
        return self.file.read_bytes() if self.content is None else self.content

    @functools.cached_property
    def contents(self) -> str:
        """A digest of a sample of the images' bytes. Other files under the same names change it."""
        return contents.sample(self.images)

    @property
    def images(self) -> ImageList:
        """The images alone, without labels."""
        names = tuple(record["file_name"] for record in self.records)
        unlabelled = (-1,) * len(names)
        return NamedImages(Path(), names, unlabelled, ())

    @property
    def part(self) -> str:
        """The part of the dataset as results call it: val, test, trainval."""
        # The name may end in a number of images: coco_2017_val_100.
        words = [word for word in self.name.split("_") if not word.isdigit()]
        return words[-1]

    @functools.cached_property
    def dataset(self) -> str:
        """The dataset's name in the results. COCO's lists alone have COCO's."""
        if self.files.dataset:
            return self.files.dataset
        folder = self.folder.parent.name
        if folder == "coco" and not self._is_coco():
            return folder
        return RESULT_NAMES.get(folder, folder)

    def _is_coco(self) -> bool:
        """Return True for COCO's classes on COCO's images, all of them with as many objects as there
        are, or some of them, which the number of images then tells."""
        names = [Path(plain_name(record["file_name"])).name for record in self.records]
        ids = [record["image_id"] for record in self.records]
        return coco_lists.are_cocos(self.categories, self.ids, names, ids, self.objects)


def join(splits: Sequence[Split]) -> Split:
    """Join several training sets in the order given. Raises BadInput if their categories differ."""
    first, *others = splits
    for other in others:
        if (other.categories, other.ids) != (first.categories, first.ids):
            raise BadInput(
                f"{other.file}: its categories are not those of {first.file}"
            )
        refuse_unlike_keypoints(first, other)
    records = list(first.records)
    notes = list(first.notes)
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


def refuse_unlike_keypoints(first: Split, other: Split) -> None:
    """Raise BadInput where two lists name other keypoints, or in another order."""
    if first.keypoints == other.keypoints:
        return
    pairs = itertools.zip_longest(first.keypoints, other.keypoints, fillvalue="nothing")
    place, (ours, theirs) = next(
        (place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]
    )
    raise BadInput(
        f"{other.file}: its keypoint {place} is '{theirs}', and '{ours}' in {first.file}; give both"
        " the same names in one order"
    )


def training_records(split: Split, task: DetectionTask) -> list[ImageRecord]:
    """Keep the images that have an object to train on.

    Such an object is no crowd, and for the keypoint task it has a marked keypoint. These are the
    filters of detectron2/data/build.py. Raises BadInput if no image is left.
    """
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
    """Return True if the object has a keypoint to learn."""
    visibilities = annotation.get("keypoints", ())[2::3]
    return any(value > 0 for value in visibilities)
