"""What the columns of a metric are called, where they stand, and what the page does with them."""

import pytest

from backbench.board import metrics
from backbench.board.board import Column


@pytest.mark.parametrize(
    ("metric", "heading", "ranks"),
    [
        ("top1", "top-1", True),
        ("top1_k20", "top-1 k20", True),
        ("top5", "top-5", False),
        ("mean_per_class_k5", "mean/class k5", True),
        ("average_k20", "mean of 12 k20", True),
        ("segm_AP", "segm AP", True),
        ("keypoints_AP50", "keypoints AP50", False),
        ("bbox_APs", "bbox APs", False),
        ("train_top1", "train top1", False),
        ("nuclear_norm", "nuclear norm", False),
    ],
)
def test_a_column_is_named_and_ranked_by_its_metric(metric, heading, ranks):
    assert metrics.heading(metric) == heading
    assert metrics.kind_of(metric).ranks == ranks
    assert metrics.kind_of(metric).by_size == metric.endswith(("APs", "APm", "APl"))


def test_the_metrics_of_one_measurement_stand_in_their_order():
    """The task's own detections first; of each kind of them AP, AP50, AP75, then by size."""
    shown = ["segm_AP", "segm_AP50", "segm_AP75", "segm_APl", "segm_APs"]
    shown += ["bbox_AP", "bbox_AP50"]
    detected = [Column("mask_rcnn", "coco2017", metric, "v1") for metric in shown]
    assert sorted(detected, key=lambda column: column.order) == detected
    top5 = Column("linear", "cifar10", "top5", "v1")
    top1 = Column("linear", "cifar10", "top1", "v1")
    assert sorted([top5, top1], key=lambda column: column.order) == [top1, top5]
