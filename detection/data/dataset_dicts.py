"""Declares the rows that go into an engine, Detectron2's "standard dataset dicts", and those that
come out of it, COCO's results for one evaluator."""

from typing import NotRequired, TypeAlias, TypedDict

XYWH = 1  # detectron2.structures.BoxMode.XYWH_ABS
LARGEST = 1e12  # of a coordinate; what is larger is a mistake, and overflows on the way

Polygon: TypeAlias = list[float]  # x1, y1, x2, y2, ... in pixels of the file


class RunLength(TypedDict):
    """A mask as COCO stores it: `counts` is a compressed string, or a crowd's plain numbers."""

    size: list[int]  # height, width
    counts: str | list[int]


Outline: TypeAlias = list[Polygon] | RunLength


class Annotation(TypedDict):
    """One object of an image."""

    bbox: list[float]  # x, y, width, height in pixels of the file
    bbox_mode: int
    category_id: int  # a label: contiguous from 0, a place in Split.categories
    iscrowd: int
    difficult: NotRequired[bool]  # VOC's: trained on; neither hit nor miss when scored
    segmentation: NotRequired[list[Polygon]]
    keypoints: NotRequired[
        list[float]
    ]  # x, y, visibility of each; a pixel's middle is at .5


class ImageRecord(TypedDict):
    """One image and its objects."""

    file_name: str
    image_id: int | str  # VOC's are names
    height: int
    width: int
    annotations: list[Annotation]


class Detection(TypedDict):
    """One found object in COCO's results format; engines number categories from 0, files do not."""

    image_id: int | str
    category_id: int
    bbox: list[float]  # x, y, width, height in pixels of the file
    score: float
    segmentation: NotRequired[RunLength]
    # x, y, score of each; a pixel's middle is at .0, COCO's way
    keypoints: NotRequired[list[float]]
