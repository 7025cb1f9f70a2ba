"""Declares what each detection task needs beyond boxes, in a row a task.

backbench.tasks has the task's title, table and tolerance. A new task is a row in both, its head in
each engine, and a reader for an annotation field that no task has read before.
"""

from dataclasses import dataclass

from backbench.detection.dialect import Given
from backbench.errors import BadInput
from backbench.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class DetectionTask:
    name: str
    heads: tuple[str, ...]  # the config's groups below MODEL for the heads it trains
    # The config's key that turns the task's own head on; None for boxes alone
    switch: str | None = None
    outlines: bool = False  # every object needs a `segmentation`
    keypoints: bool = False  # there is one category, with keypoints

    @property
    def aps(self) -> tuple[str, ...]:
        """The kinds of AP that the task is scored by (keys of evaluate.AP_KINDS), its own first."""
        return TASKS[self.name].ious


# A test compares these with the detection tasks of backbench.tasks.
FASTER_RCNN = DetectionTask(name="faster_rcnn", heads=("ROI_BOX_HEAD",))
MASK_RCNN = DetectionTask(
    name="mask_rcnn",
    heads=("ROI_BOX_HEAD", "ROI_MASK_HEAD"),
    switch="MODEL.MASK_ON",
    outlines=True,
)
KEYPOINT_RCNN = DetectionTask(
    name="keypoint_rcnn",
    heads=("ROI_BOX_HEAD", "ROI_KEYPOINT_HEAD"),
    switch="MODEL.KEYPOINT_ON",
    keypoints=True,
)
DETECTION_TASKS = {task.name: task for task in (FASTER_RCNN, MASK_RCNN, KEYPOINT_RCNN)}


def task_of(given: Given) -> DetectionTask:
    """Return the task whose switch is on in a config. Raises BadInput if several are on."""
    on = []
    for task in DETECTION_TASKS.values():
        if task.switch and given.get(task.switch):
            on.append(task)
    if len(on) > 1:
        switches = " and ".join(str(task.switch).removeprefix("MODEL.") for task in on)
        raise BadInput(
            f"{given.path}: {switches} together; choose one, each is a table of its own"
        )
    if on:
        return on[0]
    return FASTER_RCNN
