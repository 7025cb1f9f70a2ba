"""Reads COCO's annotation files as records.

The files come from strangers, so they are checked here, once, before a run: whatever training or
scoring would fail on is refused in one line.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, cast

from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    PlainValidator,
    StrictInt,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import NotRequired, TypedDict  # noqa: UP035 - the only one pydantic takes

from backbench.detection.data.dataset_dicts import (
    LARGEST,
    XYWH,
    Annotation,
    ImageRecord,
)
from backbench.detection.data.split import DatasetFiles, Split, is_marked
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.untrusted import opening, printable

LARGEST_FILE = 8 * opening.GIGABYTE  # COCO's own files have half a gigabyte
LAYOUT = "COCO is ROOT/coco/{annotations,train2017,val2017}"
# Dataset name -> (annotation file, folder of the images), both below ROOT. The names of COCO's
# datasets are Detectron2's; "scenes" are the embedded ones.
DATASETS: dict[str, tuple[str, str]] = {}
for _folder, _stem in (("coco", "coco_2017"), ("scenes", "scenes")):
    for _part in ("train", "val"):
        _annotations = f"{_folder}/annotations"
        _images = f"{_folder}/{_part}2017"
        DATASETS[f"{_stem}_{_part}"] = (
            f"{_annotations}/instances_{_part}2017.json",
            _images,
        )
        DATASETS[f"keypoints_{_stem}_{_part}"] = (
            f"{_annotations}/person_keypoints_{_part}2017.json",
            _images,
        )


def _identifier(value: object) -> int | str:
    """Check that an id can be printed in a line: it has at most some 200 digits or characters."""
    if isinstance(value, str):
        allowed = len(value) <= 200 and printable.control_in(value) is None
    elif isinstance(value, int) and not isinstance(value, bool):
        allowed = value.bit_length() < 600
    else:
        allowed = False
    if not allowed:
        raise ValueError("is neither a whole number nor a text of one short line")
    return cast(int | str, value)


def _crowd(value: object) -> int:
    if isinstance(value, int) and value in (0, 1):
        return int(value)
    raise ValueError("is neither 0 nor 1")


def _box(value: list[float]) -> list[float]:
    _, _, width, height = value
    if width < 0 or height < 0:
        raise ValueError("has a negative width or height")
    return value


def _printable(value: str) -> str:
    if character := printable.control_in(value):
        raise ValueError(f"holds the control character {character}")
    return value


Identifier: TypeAlias = Annotated[int | str, PlainValidator(_identifier)]
Number = Annotated[float, Field(strict=True, gt=-LARGEST, lt=LARGEST)]
NotNegative = Annotated[float, Field(strict=True, ge=0, lt=LARGEST)]
# A whole number, written as 480 or 480.0
Side = Annotated[float, Field(strict=True, ge=1, lt=1 << 31, multiple_of=1)]
Name = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_printable)]


class CocoImage(TypedDict):
    id: Identifier
    file_name: Name
    height: Side
    width: Side


class CocoCategory(TypedDict):
    id: StrictInt  # contiguous labels follow the order of these
    name: Name
    keypoints: NotRequired[list[str] | None]


class CocoBox(TypedDict):
    """An object as every task needs it. Its `area` decides whether it counts in APs, APm or APl."""

    id: Identifier
    image_id: Identifier
    category_id: Identifier
    bbox: Annotated[
        list[Number], Field(min_length=4, max_length=4), AfterValidator(_box)
    ]
    iscrowd: NotRequired[Annotated[int, PlainValidator(_crowd)]]
    area: NotRequired[NotNegative]


class CocoRunLength(TypedDict):
    """The mask of a crowd, as run lengths over the whole image."""

    size: list[StrictInt]  # height, width
    counts: str | list[Annotated[StrictInt, Field(ge=0)]]  # compressed, or plain


class CocoOutline(CocoBox):
    segmentation: list[list[Number]] | CocoRunLength


class CocoKeypoints(CocoBox):
    keypoints: NotRequired[list[Number] | None]
    num_keypoints: NotRequired[NotNegative]


class CocoObject(CocoOutline, CocoKeypoints):
    """An object with the fields of every task. Only those that the run's task reads were checked."""


Checked = TypeVar("Checked", bound=CocoBox)


class CocoFile(TypedDict, Generic[Checked]):
    """The lists of an annotation file; anything else in it is ignored."""

    images: Annotated[list[CocoImage], FailFast()]
    categories: Annotated[list[CocoCategory], FailFast()]
    annotations: Annotated[list[Checked], FailFast()]


def parse(text: bytes, files: DatasetFiles, task: DetectionTask) -> Split:
    """Check an annotation file and give every image its objects.

    The images keep the file's names; `reading.find_images` turns them into paths. What COCO's
    tools skip is skipped here, too: outlines of fewer than three points, and in training crowds
    and empty boxes. Raises BadInput that names the first row and key that would train wrongly.
    """
    data = _lists(text, task)
    # 1. Categories get labels from 0 in the order of their ids, because COCO's ids have gaps.
    categories = sorted(data["categories"], key=lambda category: category["id"])
    ids = tuple(category["id"] for category in categories)
    names = tuple(category["name"] for category in categories)
    if len(set(names)) < len(names):
        raise BadInput(f"two categories have the name '{max(names, key=names.count)}'")
    label_of: dict[int | str, int] = {id: label for label, id in enumerate(ids)}
    keypoints: tuple[str, ...] = ()
    if task.keypoints:
        keypoints = _keypoint_names(categories)
    # 2. Images, without their objects
    records: dict[int | str, ImageRecord] = {}
    for image in data["images"]:
        records[image["id"]] = {
            "file_name": image["file_name"],
            "image_id": image["id"],
            "height": int(image["height"]),
            "width": int(image["width"]),
            "annotations": [],
        }
    # 3. Every object goes to its image, in the order of the file.
    dropped = 0
    for row in data["annotations"]:
        where = f"annotation {row['id']}"
        if row["category_id"] not in label_of:
            raise BadInput(
                f"{where}: category {row['category_id']} is not among the file's "
                f"{len(names)} categories"
            )
        if row["image_id"] not in records:
            raise BadInput(
                f"{where}: image {row['image_id']} is not in the file's 'images'"
            )
        record = records[row["image_id"]]
        annotation: Annotation = {
            "bbox": row["bbox"],
            "bbox_mode": XYWH,
            "category_id": label_of[row["category_id"]],
            "iscrowd": row.get("iscrowd", 0),
        }
        if task.keypoints:
            values = row.get("keypoints")
            annotation["keypoints"] = _keypoints(values, len(keypoints), where)
        if task.outlines:
            outline = row["segmentation"]
            if isinstance(outline, list):
                # Fewer than three points make no polygon.
                polygons = [p for p in outline if len(p) % 2 == 0 and len(p) >= 6]
                if not polygons:
                    dropped += 1
                    continue
                annotation["segmentation"] = polygons
            else:
                # Only a crowd has run lengths. It is not trained on, so they are not kept.
                _check_run_lengths(outline, record, annotation, where)
        record["annotations"].append(annotation)
    # 4. Images in the order of their ids, as many as are wanted
    in_order = [records[id] for id in sorted(records)][: files.limit]
    if task.keypoints:
        annotations = [a for record in in_order for a in record["annotations"]]
        if not any(is_marked(annotation) for annotation in annotations):
            raise BadInput(
                "no annotation has keypoints; the keypoint task needs a person_keypoints file"
            )
    notes: tuple[str, ...] = ()
    if dropped:
        notes = (f"{dropped} objects without a valid outline left out",)
    return Split(files, names, ids, in_order, keypoints, notes)


def _lists(text: bytes, task: DetectionTask) -> CocoFile[CocoObject]:
    """Parse the lists of a file, and check every field that the task reads."""
    if task.outlines:
        kind: Any = CocoFile[CocoOutline]
    elif task.keypoints:
        kind = CocoFile[CocoKeypoints]
    else:
        kind = CocoFile[CocoBox]
    try:
        adapter: TypeAdapter[CocoFile[CocoObject]] = TypeAdapter(kind)
        data = adapter.validate_json(text)
    except ValidationError as error:
        raise _refusal(error) from None
    _refuse_ids([row["id"] for row in data["images"]], "images")
    _refuse_ids([row["id"] for row in data["categories"]], "categories")
    _refuse_ids([row["id"] for row in data["annotations"]], "annotations")
    if not data["categories"]:
        raise BadInput("'categories' is empty")
    if not data["images"]:
        raise BadInput("no images")
    return data


def _refusal(error: ValidationError) -> BadInput:
    """Say in a line what pydantic found wrong first."""
    first = error.errors(include_url=False, include_context=False)[0]
    said = first["msg"].removeprefix("Value error, ")
    value = printable.shown(repr(first["input"]), 60)
    # The path to the value: (), (list,), (list, row) or (list, row, key, ...)
    path = first["loc"]
    if not path:
        return BadInput(f"not JSON ({printable.shown(said, 100)})")
    if len(path) == 1:
        return BadInput(f"has no '{path[0]}' list; expected COCO's format")
    where = f"'{path[0]}' number {int(path[1]) + 1}"
    if len(path) == 2:
        return BadInput(f"{where}: {value} is not a row of `key: value`")
    if first["type"] == "missing" and len(path) == 3:
        return BadInput(f"{where} has no '{path[2]}'")
    return BadInput(f"{where}: {path[2]} {value}: {said}")


def _refuse_ids(ids: Sequence[int | str], key: str) -> None:
    """Raise BadInput unless the ids of a list are all numbers or all texts, and none is there twice."""
    if len({type(id) for id in ids}) > 1:
        raise BadInput(f"ids of '{key}': some are texts, some numbers; make them alike")
    if len(set(ids)) == len(ids):
        return
    seen: set[int | str] = set()
    for number, id in enumerate(ids, 1):
        if id in seen:
            raise BadInput(f"'{key}' number {number}: its id appears twice ({id})")
        seen.add(id)


def _keypoint_names(categories: Sequence[CocoCategory]) -> tuple[str, ...]:
    """Return the names of the only category's keypoints."""
    names = tuple(categories[0].get("keypoints") or ())
    if len(categories) != 1 or not names:
        first = ", ".join(category["name"] for category in categories[:3])
        raise BadInput(
            "keypoints need one category with a 'keypoints' list; "
            f"this has {len(categories)} ({first})"
        )
    if len(set(names)) < len(names):
        raise BadInput(
            f"category {categories[0]['id']}: two of its keypoints have one name"
        )
    return names


def _keypoints(values: list[float] | None, count: int, where: str) -> list[float]:
    """Return x, y and visibility of each keypoint; an object without keypoints gets unmarked ones."""
    if not values:
        values = [0.0] * 3 * count
    if len(values) != 3 * count:
        raise BadInput(f"{where}: {len(values)} keypoint values instead of {3 * count}")
    # COCO's keypoints are pixel indices; the middle of a pixel is half a pixel further
    # (detectron2/data/datasets/coco.py adds the same half).
    moved = list(values)
    for i in range(0, len(moved), 3):
        moved[i] += 0.5
        moved[i + 1] += 0.5
    return moved


def _check_run_lengths(
    mask: CocoRunLength, record: ImageRecord, annotation: Annotation, where: str
) -> None:
    """Raise BadInput unless the annotation is a crowd and its mask fills the image."""
    if not annotation["iscrowd"]:
        raise BadInput(
            f"{where}: a run-length mask of a single object; training needs polygons"
        )
    size = [record["height"], record["width"]]
    if mask["size"] != size:
        raise BadInput(
            f"{where}: the mask's size {mask['size']} is not the image's {size}"
        )
    lengths: list[int] | None
    if isinstance(mask["counts"], str):
        lengths = _uncompressed(mask["counts"])
    else:
        lengths = mask["counts"]
    if (
        lengths is None
        or min(lengths, default=0) < 0
        or sum(lengths) != math.prod(size)
    ):
        raise BadInput(f"{where}: the mask's run lengths do not fill the image")


def _uncompressed(text: str) -> list[int] | None:
    """Decode COCO's compressed run lengths; None if the text is damaged.

    A character, less 48, holds five bits of a number, the lowest first, and a sixth which says that
    more follow. From the fourth number on, each is stored as its difference to the one before last
    (pycocotools' maskApi.c, rleFrString).
    """
    lengths: list[int] = []
    number = 0  # the bits read so far of the next number
    shift = 0  # and how many they are
    more = False  # whether that number is incomplete
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            return None
        number |= (bits & 31) << shift
        shift += 5
        more = bool(bits & 32)
        if more:
            continue
        if bits & 16:
            number -= 1 << shift  # negative, in two's complement
        if len(lengths) > 2:
            number += lengths[-2]
        lengths.append(number)
        number = 0
        shift = 0
    return None if more else lengths
