"""Reads COCO's annotation files as records.

The files come from strangers, so they are checked here, once, before a run: whatever training or
scoring would fail on is refused in one line.
"""

import codecs
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
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

from backbench.detection.data import box_format, outlines
from backbench.detection.data.dataset_dicts import (
    LARGEST,
    XYWH,
    Annotation,
    ImageRecord,
    RunLength,
)
from backbench.detection.data.split import DatasetFiles, Split, is_marked
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.untrusted import opening, printable

SAMPLED = 20_000  # outlines that are compared with their boxes
LARGEST_FILE = 8 * opening.GIGABYTE  # COCO's own files have half a gigabyte
OUTLINES_NEEDED = "masks need an outline of each object; add it, or take faster_rcnn"
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


class CocoOwned(TypedDict):
    """What every object has: its ids, and perhaps whether it is a crowd, and its area.

    Its `area` decides whether it counts in APs, APm or APl, and how near a keypoint must be.
    """

    id: Identifier
    image_id: Identifier
    category_id: Identifier
    iscrowd: NotRequired[Annotated[int, PlainValidator(_crowd)]]
    area: NotRequired[NotNegative | None]


Bbox = Annotated[list[Number], Field(min_length=4, max_length=4), AfterValidator(_box)]


class CocoBox(CocoOwned):
    """An object as every task needs it."""

    bbox: Bbox


class CocoRunLength(TypedDict):
    """A mask as run lengths over the whole image."""

    size: list[StrictInt]  # height, width
    counts: str | list[Annotated[StrictInt, Field(ge=0)]]  # compressed, or plain


Segmentation: TypeAlias = list[list[Number]] | CocoRunLength


class CocoOutline(CocoBox):
    segmentation: Segmentation


class CocoKeypoints(CocoBox):
    keypoints: NotRequired[list[Number] | None]
    num_keypoints: NotRequired[NotNegative | None]


class CocoUnboxed(CocoOwned):
    """An object of a file in which some have no box: it is computed from the outline."""

    bbox: NotRequired[Bbox | None]
    segmentation: NotRequired[Segmentation | None]
    keypoints: NotRequired[list[Number] | None]
    num_keypoints: NotRequired[NotNegative | None]


class CocoObject(CocoOutline, CocoKeypoints):
    """An object with the fields of every task. Only those that the run's task reads were checked."""


Checked = TypeVar("Checked", bound=CocoOwned)


class CocoFile(TypedDict, Generic[Checked]):
    """The lists of an annotation file; anything else in it is ignored."""

    images: Annotated[list[CocoImage], FailFast()]
    categories: Annotated[list[CocoCategory], FailFast()]
    annotations: Annotated[list[Checked], FailFast()]


# In refusals
ROWS_NEED = {
    "images": "id, file_name, height and width",
    "categories": "id and name",
    "annotations": "id, image_id, category_id and bbox",
}


def parse(text: bytes, files: DatasetFiles, task: DetectionTask) -> Split:
    """Check an annotation file and give every image its objects.

    The images keep the file's names; `reading.find_images` turns them into paths. What COCO's
    tools skip is skipped here, too: outlines of fewer than three points, and in training crowds
    and empty boxes. Raises BadInput that names the first row and key that would train wrongly.
    """
    data = _lists(text, task)
    # 1. Categories get labels from 0 in the order of their ids, because COCO's ids have gaps.
    categories = _categories(data, task)
    ids = tuple(category["id"] for category in categories)
    names = tuple(category["name"] for category in categories)
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
    boxes = _Boxes()
    counted = Counter[str]()
    sampled = range(
        0, len(data["annotations"]), 1 + len(data["annotations"]) // SAMPLED
    )
    for number, row in enumerate(data["annotations"]):
        where = f"annotation {row['id']}"
        if row["category_id"] not in label_of:
            raise BadInput(
                f"{where}: category {row['category_id']} is not among the file's "
                f"{len(names)} categories"
            )
        if row["image_id"] not in records:
            raise BadInput(
                f"{where}: image {row['image_id']!r} is not in the file's 'images'"
            )
        record = records[row["image_id"]]
        outline = row.get("segmentation")
        if isinstance(outline, dict):
            _check_run_lengths(outline, record, where)
        if row.get("bbox") is None:
            row["bbox"] = box_of(row, where)
            counted["boxes"] += 1
        boxes.add(row, record)
        annotation: Annotation = {
            "bbox": row["bbox"],
            "bbox_mode": XYWH,
            "category_id": label_of[row["category_id"]],
            "iscrowd": row.get("iscrowd", 0),
        }
        if not row.get("area"):
            counted["areas"] += 1
        if task.keypoints:
            values = row.get("keypoints")
            annotation["keypoints"] = _keypoints(values, len(keypoints), where)
            stated = row.get("num_keypoints")
            if stated is not None and stated != marks_of(row):
                counted["marks"] += 1
        if task.outlines:
            if number in sampled and _leaves_its_box(row):
                counted["leaving"] += 1
            kept = _kept_outline(outline, annotation["iscrowd"])
            if kept is None:
                counted["dropped"] += 1
                continue
            if kept:
                annotation["segmentation"] = kept
        record["annotations"].append(annotation)
    # 4. What is plainly wrong with the file as a whole
    notes = box_format.check(boxes.collected())
    if 2 * counted["leaving"] > len(sampled):
        raise BadInput(
            f"{counted['leaving']} of {len(sampled)} outlines leave their box; {box_format.COCO}, "
            "the same as the outlines'"
        )
    if task.keypoints:
        notes += box_format.check_keypoints(list(records.values()))
    notes += _notes(counted, len(data["annotations"]), len(sampled))
    # 5. Images in the order of their ids, as many as are wanted
    in_order = [records[id] for id in sorted(records)][: files.limit]
    if task.keypoints:
        _refuse_unmarked(in_order)
    return Split(
        files,
        names,
        ids,
        in_order,
        keypoints,
        tuple(notes),
        objects=len(data["annotations"]),
    )


def _categories(data: CocoFile[CocoObject], task: DetectionTask) -> list[CocoCategory]:
    """Return the categories in the order of their ids. Raises BadInput for two of one name with
    objects.

    Roboflow lists the group of the classes as one more category, which has no object. It is left out
    where it has the name of a class, and where the task is keypoints and it has none."""
    used = {row["category_id"] for row in data["annotations"]}
    # 1. Those with objects first, so that a group is known by the class that is there
    by_use = sorted(
        data["categories"],
        key=lambda category: (category["id"] not in used, category["id"]),
    )
    of_names: dict[str, CocoCategory] = {}
    for category in by_use:
        first = of_names.setdefault(category["name"], category)
        if first is not category and category["id"] in used:
            raise BadInput(
                f"two categories have the name '{category['name']}' (ids {first['id']} and"
                f" {category['id']}), and objects; rename one, or give the objects of both one id"
            )
    # 2. Keypoints are of the classes alone
    categories = list(of_names.values())
    if task.keypoints and any(category.get("keypoints") for category in categories):
        categories = [
            category
            for category in categories
            if category["id"] in used or category.get("keypoints")
        ]
    return sorted(categories, key=lambda category: category["id"])


class _Boxes:
    """Collects the boxes of a file, in its order."""

    def __init__(self) -> None:
        self.ids: list[int | str] = []
        self.values: list[list[float]] = []
        self.sizes: list[tuple[int, int]] = []
        self.areas: list[float] = []

    def add(self, row: CocoBox, record: ImageRecord) -> None:
        self.ids.append(row["id"])
        self.values.append(row["bbox"])
        self.sizes.append((record["width"], record["height"]))
        self.areas.append(row.get("area") or math.nan)

    def collected(self) -> box_format.Boxes:
        values = np.array(self.values, float).reshape(-1, 4)
        sizes = np.array(self.sizes, float).reshape(-1, 2)
        areas = np.array(self.areas, float)
        return box_format.Boxes("annotation", self.ids, values, sizes, areas)


def box_of(row: Mapping[str, Any], where: str) -> list[float]:
    """Return an object's box: as stated, or else around its outline."""
    if row.get("bbox") is not None:
        return row["bbox"]
    box = outlines.bounding_box(row.get("segmentation"))
    if box is None:
        raise BadInput(f"{where} has no 'bbox', and no outline to compute it from")
    return box


def area_of(row: Mapping[str, Any], box: Sequence[float]) -> float:
    """Return an object's area: as stated, or else its outline's, or else its box's.

    An area of 0 is none: exporters write it where they have not computed it. With it no keypoint
    would ever be near enough, and every object would be small.
    """
    if row.get("area"):
        return row["area"]
    from_outline = outlines.area(row.get("segmentation"))
    if from_outline is not None:
        return from_outline
    _, _, width, height = box
    return width * height


def marks_of(row: Mapping[str, Any]) -> int:
    """Count an object's marked keypoints. Scoring leaves out objects without any.

    The file's own `num_keypoints` is not trusted: with 0 in all of them nothing would be scored.
    """
    visibilities = (row.get("keypoints") or [])[2::3]
    return sum(visibility > 0 for visibility in visibilities)


def _kept_outline(
    outline: Segmentation | None, is_crowd: int
) -> list[list[float]] | RunLength | None:
    """Return an outline to train on, empty for a crowd's run lengths, None for no valid outline."""
    if isinstance(outline, dict):
        if is_crowd:
            # It is not trained on, so it is not kept.
            return []
        return _compressed(outline)
    return valid_polygons(outline or []) or None


def valid_polygons(outline: Sequence[list[float]]) -> list[list[float]]:
    """Leave out what is no polygon: fewer than three points, or half a point."""
    return [p for p in outline if len(p) % 2 == 0 and len(p) >= 6]


def _compressed(mask: CocoRunLength) -> RunLength:
    """Return a mask with compressed run lengths, as Detectron2 wants them."""
    from pycocotools import mask as mask_api

    height, width = mask["size"]
    counts = mask["counts"]
    if isinstance(counts, list):
        counts = mask_api.frPyObjects(mask, height, width)["counts"].decode()
    return {"size": [height, width], "counts": counts}


def _leaves_its_box(row: CocoObject) -> bool:
    """Return True if an object's outline is not inside its box."""
    around = outlines.bounding_box(row["segmentation"])
    if around is None:
        return False
    left, top, width, height = around
    x, y, box_width, box_height = row["bbox"]
    most = box_format.TOLERANCE
    return (
        left < x - most
        or top < y - most
        or left + width > x + box_width + most
        or top + height > y + box_height + most
    )


def _refuse_unmarked(records: Sequence[ImageRecord]) -> None:
    """Raise BadInput if no object has a keypoint that is marked."""
    annotations = [a for record in records for a in record["annotations"]]
    if any(is_marked(annotation) for annotation in annotations):
        return
    # Half a pixel was added when they were read.
    if any(value not in (0, 0.5) for a in annotations for value in a["keypoints"]):
        raise BadInput(
            "every keypoint has visibility 0, so none is marked; COCO's visibility is 2 for a "
            "visible keypoint and 1 for a hidden one"
        )
    raise BadInput(
        "no annotation has keypoints; the keypoint task needs a person_keypoints file"
    )


def _notes(counted: Mapping[str, int], objects: int, sampled: int) -> list[str]:
    """Say what was computed or left out."""
    notes = []
    if count := counted["boxes"]:
        notes.append(f"{count} of {objects} boxes are missing: computed from outlines")
    if count := counted["areas"]:
        notes.append(
            f"{count} of {objects} areas are missing or 0: computed from the outline, or else the box"
        )
    if count := counted["marks"]:
        notes.append(
            f"{count} of {objects} num_keypoints are not the number of keypoints with a visibility "
            "above 0: counted anew"
        )
    if counted["leaving"] >= max(2, box_format.MANY * sampled):
        notes.append(
            f"{counted['leaving']} of {sampled} outlines leave their box; {box_format.COCO}"
        )
    if count := counted["dropped"]:
        notes.append(
            f"{count} objects without a valid outline left out of the training; scoring misses them"
        )
    return notes


def _lists(text: bytes, task: DetectionTask) -> CocoFile[CocoObject]:
    """Parse the lists of a file, and check every field that the task reads."""
    if task.outlines:
        kind: Any = CocoFile[CocoOutline]
    elif task.keypoints:
        kind = CocoFile[CocoKeypoints]
    else:
        kind = CocoFile[CocoBox]
    try:
        data = _validated(text, kind)
    except ValidationError as error:
        if not _lacks_a_box(error):
            raise _refusal(error) from None
        data = _without_boxes(text, task)
    _refuse_ids([row["id"] for row in data["images"]], "images")
    _refuse_ids([row["id"] for row in data["categories"]], "categories")
    _refuse_ids([row["id"] for row in data["annotations"]], "annotations")
    if not data["categories"]:
        raise BadInput("'categories' is empty")
    if not data["images"]:
        raise BadInput("no images")
    return data


def _validated(text: bytes, kind: Any) -> CocoFile[CocoObject]:
    # Programs of Windows put a mark of the byte order first
    return _adapter(kind).validate_json(text.removeprefix(codecs.BOM_UTF8))


@functools.cache  # each takes longer to make than a short file to read
def _adapter(kind: Any) -> TypeAdapter[CocoFile[CocoObject]]:
    return TypeAdapter(kind)


def _lacks_a_box(error: ValidationError) -> bool:
    """Return True if the file's first mistake is an object without a box."""
    first = error.errors(include_url=False, include_context=False)[0]
    lacking = first["type"] == "missing" or first["input"] is None
    return lacking and first["loc"][0::2] == ("annotations", "bbox")


def _without_boxes(text: bytes, task: DetectionTask) -> CocoFile[CocoObject]:
    """Parse a file in which objects have no box, with the outlines from which it is computed.

    Files with boxes are not read so, because outlines take gigabytes that only masks need.
    """
    try:
        data = _validated(text, CocoFile[CocoUnboxed])
    except ValidationError as error:
        raise _refusal(error) from None
    for number, row in enumerate(data["annotations"], 1):
        where = f"'annotations' number {number}"
        if row.get("bbox") is None and row.get("segmentation") is None:
            raise BadInput(f"{where} has no 'bbox', and no outline to compute it from")
        if task.outlines and row.get("segmentation") is None:
            raise BadInput(f"{where} has no 'segmentation'; {OUTLINES_NEEDED}")
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
        needed = f"each row there needs {ROWS_NEED[str(path[0])]}"
        if path[2] == "segmentation":
            needed = OUTLINES_NEEDED
        return BadInput(f"{where} has no '{path[2]}'; {needed}")
    needed = "; an outline is a list of polygons, [[x, y, x, y, ...]]"
    cure = needed if path[2] == "segmentation" else ""
    return BadInput(f"{where}: {path[2]} {value}: {said}{cure}")


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
    if len(categories) == 1 and not names:
        raise BadInput(
            f"category '{categories[0]['name']}' has no 'keypoints' list; write their names into it, in"
            " the order of each object's keypoints"
        )
    if len(categories) != 1:
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
    for place, visibility in enumerate(values[2::3]):
        if visibility not in (0, 1, 2):
            raise BadInput(
                f"{where}: keypoint {place}: visibility {visibility:g}; it is 0 (not marked), 1"
                " (hidden) or 2 (visible)"
            )
    # COCO's keypoints are pixel indices; the middle of a pixel is half a pixel further
    # (detectron2/data/datasets/coco.py adds the same half).
    moved = list(values)
    for i in range(0, len(moved), 3):
        moved[i] += 0.5
        moved[i + 1] += 0.5
    return moved


def _check_run_lengths(mask: CocoRunLength, record: ImageRecord, where: str) -> None:
    """Raise BadInput unless a mask fills its image."""
    size = [record["height"], record["width"]]
    if mask["size"] != size:
        raise BadInput(
            f"{where}: the mask's size {mask['size']} is not the image's {size}"
        )
    lengths = outlines.run_lengths(mask["counts"])
    if lengths is None or sum(lengths) != math.prod(size):
        raise BadInput(f"{where}: the mask's run lengths do not fill the image")
