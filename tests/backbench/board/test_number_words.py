"""What other places call our metrics, tasks, datasets and models."""

import pytest
from support.records import a_result

from backbench.board import number_words


def result(task, metric, dataset="cifar10"):
    return a_result(
        task=task, metric=metric, dataset=dataset, protocol="x-v1", provenance={}
    )


@pytest.mark.parametrize(
    ("task", "metric", "words"),
    [
        ("linear", "top1", ("accuracy", "Accuracy", {"k": 1})),
        ("linear", "top5", ("top_5_accuracy", "Top-5 accuracy", {"k": 5})),
        (
            "linear",
            "mean_per_class",
            ("balanced_accuracy", "Mean per-class accuracy", {}),
        ),
        (
            "knn",
            "top1_k20",
            ("accuracy", "Accuracy (20 neighbours)", {"k": 1, "neighbours": 20}),
        ),
        ("segmentation", "miou", ("mean_iou", "Mean IoU", {})),
        ("segmentation", "macc", ("mean_accuracy", "Mean accuracy", {})),
        ("segmentation", "pixel_acc", ("overall_accuracy", "Pixel accuracy", {})),
        (
            "faster_rcnn",
            "bbox_AP",
            ("mean_average_precision", "COCO AP (bbox)", {"iou_type": "bbox"}),
        ),
        (
            "mask_rcnn",
            "segm_AP50",
            ("mean_average_precision_50", "COCO AP50 (segm)", {"iou_type": "segm"}),
        ),
        (
            "mask_rcnn",
            "bbox_AP75",
            ("mean_average_precision_75", "COCO AP75 (bbox)", {"iou_type": "bbox"}),
        ),
        (
            "faster_rcnn",
            "bbox_APs",
            ("mean_average_precision_small", "COCO APs (bbox)", {"iou_type": "bbox"}),
        ),
        (
            "faster_rcnn",
            "bbox_APm",
            ("mean_average_precision_medium", "COCO APm (bbox)", {"iou_type": "bbox"}),
        ),
        (
            "faster_rcnn",
            "bbox_APl",
            ("mean_average_precision_large", "COCO APl (bbox)", {"iou_type": "bbox"}),
        ),
        ("linear", "mystery", ("backbench.linear.mystery", "mystery", {})),
    ],
)
def test_a_share_has_the_name_that_others_give_it(task, metric, words):
    found = number_words.metric_words(result(task, metric))
    assert (found.id, found.name, found.parameters) == words
    assert found.share and found.scale == 100.0


def test_what_only_describes_features_keeps_our_name_and_scale():
    found = number_words.metric_words(result("analyze", "nuclear_norm"))
    assert (found.id, found.name) == ("backbench.analyze.nuclear_norm", "nuclear_norm")
    assert (found.share, found.scale) == (False, 1.0)


@pytest.mark.parametrize(
    ("task", "metric", "name"),
    [
        ("linear", "top1", "image-classification"),
        ("knn", "top1_k20", "image-classification"),
        ("faster_rcnn", "bbox_AP", "object-detection"),
        ("mask_rcnn", "bbox_AP", "object-detection"),
        ("mask_rcnn", "segm_AP", "image-segmentation"),
        ("keypoint_rcnn", "keypoints_AP", "keypoint-detection"),
        ("keypoint_rcnn", "bbox_AP", "object-detection"),
        ("segmentation", "miou", "image-segmentation"),
        ("cluster", "nmi", "image-feature-extraction"),
        ("analyze", "nuclear_norm", "image-feature-extraction"),
    ],
)
def test_a_task_has_the_hubs_name(task, metric, name):
    assert number_words.hub_task(result(task, metric)) == name


def test_a_dataset_has_its_owners_repository():
    assert number_words.hub_dataset("no such set") is None
    assert "/" in number_words.hub_dataset("imagenet")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("LORAC beta=2, 200 ep.", "LORAC-beta-2-200-ep-12345678"),
        ("...", "model-12345678"),
        ("x" * 200, "x" * 80 + "-12345678"),
    ],
)
def test_a_models_name_is_one_for_folders(name, slug):
    assert number_words.model_slug(name, "123456789") == slug
