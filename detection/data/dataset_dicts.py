"""Declares the rows that go into an engine (Detectron2's "standard dataset dicts") and those that
come out of it (COCO's results format, which one evaluator reads)."""

from typing import NotRequired, TypeAlias, TypedDict

XYWH = 1  # detectron2.structures.BoxMode.XYWH_ABS
LARGEST = 1e12  # a larger coordinate is a mistake, and would overflow on the way

Polygon: TypeAlias = list[float]  # x1, y1, x2, y2, ... in pixels of the file


class RunLength(TypedDict):
    """A mask as COCO stores it."""

    size: list[int]  # height, width
    counts: str | list[int]  # a compressed string, or a crowd's plain numbers


Outline: TypeAlias = list[Polygon] | RunLength


class Annotation(TypedDict):
    """One object of an image."""

    bbox: list[float]  # x, y, width, height in pixels of the file
    bbox_mode: int
    category_id: int  # a label from 0 on: an index into Split.categories
    iscrowd: int
    difficult: NotRequired[bool]  # VOC's: trained on; neither hit nor miss when scored
    segmentation: NotRequired[Outline]
    # x, y, visibility of each keypoint; the middle of a pixel is at .5
    keypoints: NotRequired[list[float]]


class ImageRecord(TypedDict):
    """One image and its objects."""

    file_name: str
    image_id: int | str  # in VOC it is a name
    height: int
    width: int
    annotations: list[Annotation]


class Detection(TypedDict):
    """One found object in COCO's results format."""

    image_id: int | str
    category_id: int  # from an engine a label from 0 on; in a file the file's own id
    bbox: list[float]  # x, y, width, height in pixels of the file
    score: float
    segmentation: NotRequired[RunLength]
    # x, y, score of each keypoint; the middle of a pixel is at .0, as COCO has it
    keypoints: NotRequired[list[float]]
