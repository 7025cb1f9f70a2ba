"""A row says what a detection task needs beyond boxes; backbench.tasks has its title, table and
tolerance. A new task is a row in both, plus what is really new: its head in each engine, and a
reader of an annotation field that no task has read before."""

from dataclasses import dataclass

from backbench.detection.dialect import Given
from backbench.errors import BadInput
from backbench.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class DetectionTask:
    name: str
    heads: tuple[str, ...]  # the config's groups below MODEL for the heads it trains
    switch: str | None = (
        None  # the config's key that turns its own head on; None: boxes alone
    )
    outlines: bool = False  # every object needs a `segmentation`
    keypoints: bool = False  # the only category names keypoints, and objects have them

    @property
    def aps(self) -> tuple[str, ...]:
        """The kinds of AP that it is scored by (keys of evaluate.AP_KINDS), its own first."""
        return TASKS[self.name].ious


# A test holds these to the tasks of backbench.tasks that detect.
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
    """The task whose switch is on in a config. Raises BadInput where several are."""
    on = [
        task
        for task in DETECTION_TASKS.values()
        if task.switch and given.get(task.switch)
    ]
    if len(on) > 1:
        switches = " and ".join(str(task.switch).removeprefix("MODEL.") for task in on)
        raise BadInput(
            f"{given.path}: {switches} together; choose one, each is a table of its own"
        )
    return on[0] if on else FASTER_RCNN
