"""A detection task is one row here and one in backbench.tasks."""

import pytest

from backbench.errors import BadInput
from backbench.tasks import DETECTION
from detection import dialect
from detection.evaluate import AP_KINDS
from detection.task_rows import DETECTION_TASKS, task_of

SHIPPED = {
    "faster_rcnn_R_50_FPN_1x": "faster_rcnn",
    "faster_rcnn_R_50_C4_VOC": "faster_rcnn",
    "mask_rcnn_R_50_C4_2x": "mask_rcnn",
    "demo_keypoint_rcnn_R_18_FPN": "keypoint_rcnn",
}


def test_every_detection_task_has_its_row():
    assert tuple(DETECTION_TASKS) == DETECTION
    for name, task in DETECTION_TASKS.items():
        assert task.name == name
        assert set(task.aps) <= set(AP_KINDS)


@pytest.mark.parametrize(("recipe", "name"), SHIPPED.items())
def test_a_config_says_its_task_by_a_switch(recipe, name):
    assert task_of(dialect.read(recipe, [])).name == name


def test_two_switches_are_refused():
    given = dialect.read("mask_rcnn_R_50_FPN_1x", ["MODEL.KEYPOINT_ON", "True"])
    with pytest.raises(BadInput, match="MASK_ON and KEYPOINT_ON together; choose one"):
        task_of(given)
