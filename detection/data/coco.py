"""Reads COCO's annotation files as records. They come from strangers, so they are checked here,
once, before a run: what training or scoring would fail on is refused in one line."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

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
    Polygon,
    RunLength,
)
from backbench.detection.data.split import DatasetFiles, Split, is_marked
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.untrusted import opening, printable

LARGEST_FILE = 8 * opening.GIGABYTE  # COCO's have half of one
LAYOUT = "COCO is ROOT/coco/{annotations,train2017,val2017}"
# Folder below ROOT -> how its datasets' names begin: Detectron2's, and the embedded scenes'
STEMS = {"coco": "coco_2017", "scenes": "scenes"}
# Dataset name -> (annotation file, folder of the images) below ROOT
DATASETS = {
    f"{kind}{stem}_{part}": (
        f"{folder}/annotations/{file}_{part}2017.json",
        f"{folder}/{part}2017",
    )
    for folder, stem in STEMS.items()
    for part in ("train", "val")
    for kind, file in (("", "instances"), ("keypoints_", "person_keypoints"))
}


def _identifier(value: object) -> int | str:
    """An id can be printed in a line: at most 200 digits or characters."""
    if (
        isinstance(value, str)
        and len(value) <= 200
        and printable.control_in(value) is None
    ):
        return value
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value.bit_length() < 600
    ):
        return value
    raise ValueError("is neither a whole number nor a text of one short line")


def _crowd(value: object) -> int:
    if isinstance(value, int) and value in (0, 1):
        return int(value)
    raise ValueError("is neither 0 nor 1")


def _box(value: list[float]) -> list[float]:
    if value[2] < 0 or value[3] < 0:
        raise ValueError("has a negative width or height")
    return value


def _printable(value: str) -> str:
    if character := printable.control_in(value):
        raise ValueError(f"holds the control character {character}")
    return value


Identifier: TypeAlias = Annotated[int | str, PlainValidator(_identifier)]
Number = Annotated[float, Field(strict=True, gt=-LARGEST, lt=LARGEST)]
NotNegative = Annotated[float, Field(strict=True, ge=0, lt=LARGEST)]
Side = Annotated[
    float, Field(strict=True, ge=1, lt=1 << 31, multiple_of=1)
]  # 480 or 480.0
Name = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_printable)]


class CocoImage(TypedDict):
    id: Identifier
    file_name: Name
    height: Side
    width: Side


class CocoCategory(TypedDict):
    id: StrictInt  # labels follow its order
    name: Name
    keypoints: NotRequired[list[str] | None]


class CocoBox(TypedDict):
    """An object as every task needs it. Its area decides in which AP by size it counts."""

    id: Identifier
    image_id: Identifier
    category_id: Identifier
    bbox: Annotated[
        list[Number], Field(min_length=4, max_length=4), AfterValidator(_box)
    ]
    iscrowd: NotRequired[Annotated[int, PlainValidator(_crowd)]]
    area: NotRequired[NotNegative]


class CocoRunLength(TypedDict):
    """The mask of a crowd: run lengths of the whole image, plain or compressed."""

    size: list[StrictInt]
    counts: str | list[Annotated[StrictInt, Field(ge=0)]]


class CocoOutline(CocoBox):
    segmentation: list[list[Number]] | CocoRunLength


class CocoKeypoints(CocoBox):
    keypoints: NotRequired[list[Number] | None]
    num_keypoints: NotRequired[NotNegative]


class CocoObject(CocoOutline, CocoKeypoints):
    """An object with all that any task reads; only what this run's task reads has been checked."""


Checked = TypeVar("Checked", bound=CocoBox)


class CocoFile(TypedDict, Generic[Checked]):
    """The lists of an annotation file; anything else in it is ignored."""

    images: Annotated[list[CocoImage], FailFast()]
    categories: Annotated[list[CocoCategory], FailFast()]
    annotations: Annotated[list[Checked], FailFast()]


def parse(text: bytes, files: DatasetFiles, task: DetectionTask) -> Split:
    """Check an annotation file and sort its objects to their images, whose names are still the
    file's. BadInput, one line, names the first row and key that would train wrongly. What COCO's
    tools skip (outlines under three points; in training crowds, empty boxes) is skipped."""
    data = _lists(text, task)
    # 1. Categories get labels from 0 in the order of their ids; COCO's ids have gaps
    categories = sorted(data["categories"], key=lambda category: category["id"])
    names = tuple(category["name"] for category in categories)
    if len(set(names)) < len(names):
        raise BadInput(f"two categories have the name '{max(names, key=names.count)}'")
    keypoints = _keypoint_names(categories) if task.keypoints else ()
    # 2. Images without objects
    records: dict[int | str, ImageRecord] = {}
    for image in data["images"]:
        records[image["id"]] = {
            "file_name": image["file_name"],
            "image_id": image["id"],
            "height": int(image["height"]),
            "width": int(image["width"]),
            "annotations": [],
        }
    # 3. Every object to its image, in the order of the file
    label_of: dict[int | str, int] = {
        c["id"]: label for label, c in enumerate(categories)
    }
    dropped = 0
    for a in data["annotations"]:
        where = f"annotation {a['id']}"
        label = label_of.get(a["category_id"])
        if label is None:
            category = f"category {a['category_id']}"
            raise BadInput(
                f"{where}: {category} is not among the file's {len(names)} categories"
            )
        if a["image_id"] not in records:
            raise BadInput(
                f"{where}: image {a['image_id']} is not in the file's 'images'"
            )
        record = records[a["image_id"]]
        out: Annotation = {
            "bbox": a["bbox"],
            "bbox_mode": XYWH,
            "category_id": label,
            "iscrowd": a.get("iscrowd", 0),
        }
        if task.keypoints:
            out["keypoints"] = _keypoints(a.get("keypoints"), len(keypoints), where)
        if task.outlines:
            polygons = _polygons(a["segmentation"], record, out["iscrowd"], where)
            if polygons:
                out["segmentation"] = polygons
            elif polygons is not None:
                dropped += 1
                continue
        record["annotations"].append(out)
    # 4. Images in the order of their ids, as many as are wanted
    ids = tuple(category["id"] for category in categories)
    notes = (f"{dropped} objects without a valid outline left out",) if dropped else ()
    in_order = [records[id] for id in sorted(records)][: files.limit]
    if task.keypoints and not any(
        is_marked(a) for r in in_order for a in r["annotations"]
    ):
        raise BadInput(
            "no annotation has keypoints; the keypoint task needs a person_keypoints file"
        )
    return Split(files, names, ids, in_order, keypoints, notes)


def _lists(text: bytes, task: DetectionTask) -> CocoFile[CocoObject]:
    """The lists of a file, with all that the task reads checked."""
    kind: Any = CocoFile[CocoBox]
    if task.outlines:
        kind = CocoFile[CocoOutline]
    elif task.keypoints:
        kind = CocoFile[CocoKeypoints]
    try:
        adapter: TypeAdapter[CocoFile[CocoObject]] = TypeAdapter(kind)
        data = adapter.validate_json(text)
    except ValidationError as error:
        raise _refusal(error) from None
    _refuse_ids([row["id"] for row in data["images"]], "images")
    _refuse_ids([row["id"] for row in data["categories"]], "categories")
    _refuse_ids([row["id"] for row in data["annotations"]], "annotations")
    if not data["categories"] or not data["images"]:
        raise BadInput("no images" if data["categories"] else "'categories' is empty")
    return data


def _refusal(error: ValidationError) -> BadInput:
    """The first thing that is wrong, in a line."""
    first = error.errors(include_url=False, include_context=False)[0]
    place, said = first["loc"], first["msg"].removeprefix("Value error, ")
    value = printable.shown(repr(first["input"]), 60)
    if not place:
        return BadInput(f"not JSON ({printable.shown(said, 100)})")
    if len(place) == 1:
        return BadInput(f"has no '{place[0]}' list; expected COCO's format")
    where = f"'{place[0]}' number {int(place[1]) + 1}"
    if len(place) == 2:
        return BadInput(f"{where}: {value} is not a row of `key: value`")
    if first["type"] == "missing" and len(place) == 3:
        return BadInput(f"{where} has no '{place[2]}'")
    return BadInput(f"{where}: {place[2]} {value}: {said}")


def _refuse_ids(ids: Sequence[int | str], key: str) -> None:
    """The ids of a list must be all whole numbers or all texts, none twice."""
    if len({type(id) for id in ids}) > 1:
        raise BadInput(f"ids of '{key}': some are texts, some numbers; make them alike")
    if len(set(ids)) == len(ids):
        return
    seen: set[int | str] = set()
    for i, id in enumerate(ids, 1):
        if id in seen:
            raise BadInput(f"'{key}' number {i}: its id appears twice ({id})")
        seen.add(id)


def _keypoint_names(categories: Sequence[CocoCategory]) -> tuple[str, ...]:
    """The keypoints of the only category, by name."""
    names = tuple(categories[0].get("keypoints") or ())
    if len(categories) != 1 or not names:
        first = ", ".join(category["name"] for category in categories[:3])
        need = "keypoints need one category with a 'keypoints' list"
        raise BadInput(f"{need}; this has {len(categories)} ({first})")
    if len(set(names)) < len(names):
        raise BadInput(
            f"category {categories[0]['id']}: two of its keypoints have one name"
        )
    return names


def _keypoints(values: list[float] | None, count: int, where: str) -> list[float]:
    """x, y, visibility of each keypoint; an object without any has unmarked ones."""
    if values and len(values) != 3 * count:
        raise BadInput(f"{where}: {len(values)} keypoint values instead of {3 * count}")
    # COCO's keypoints are pixel indices; the middle of a pixel is half a pixel further
    # (detectron2/data/datasets/coco.py adds the same half).
    moved = list(values or [0.0] * 3 * count)
    for i in range(0, len(moved), 3):
        moved[i] += 0.5
        moved[i + 1] += 0.5
    return moved


def _polygons(
    outline: list[Polygon] | RunLength, record: ImageRecord, crowd: int, where: str
) -> list[Polygon] | None:
    """The polygons of three points or more; None for a crowd, which is not trained on."""
    if isinstance(outline, list):
        return [p for p in outline if len(p) % 2 == 0 and len(p) >= 6]
    if not crowd:
        raise BadInput(
            f"{where}: a run-length mask of a single object; training needs polygons"
        )
    size = [record["height"], record["width"]]
    if outline["size"] != size:
        raise BadInput(
            f"{where}: the mask's size {outline['size']} is not the image's {size}"
        )
    counts = outline["counts"]
    lengths = _uncompressed(counts) if isinstance(counts, str) else counts
    if (
        lengths is None
        or min(lengths, default=0) < 0
        or sum(lengths) != math.prod(size)
    ):
        raise BadInput(f"{where}: the mask's run lengths do not fill the image")
    return None


def _uncompressed(text: str) -> list[int] | None:
    """Return COCO's compressed run lengths as numbers; None if the text is damaged. A character
    holds 5 bits from chr(48) on; its sixth says that more follow. From the third number on each is
    a difference to the one before last (pycocotools' maskApi.c, rleFrString)."""
    out: list[int] = []
    at = 0
    while at < len(text):
        number = shift = 0
        more = True
        while more:
            if at == len(text) or not 0 <= ord(text[at]) - 48 < 64:
                return None
            bits = ord(text[at]) - 48
            number |= (bits & 31) << shift
            more = bool(bits & 32)
            at, shift = at + 1, shift + 5
            if not more and bits & 16:
                number -= 1 << shift  # two's complement
        out.append(number + out[-2] if len(out) > 2 else number)
    return out
