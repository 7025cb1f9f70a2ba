"""Kept scores of a head: whose they are, what of a stranger is left out, and what they give."""

import math

import numpy as np
import pytest
from support.records import a_result

from backbench.records import kept_scores
from backbench.stats import calibration

# Three images of three classes; the third is wrong
LOGITS = np.array([[0.0, -1.0, -3.0], [0.0, -0.5, -2.0], [0.0, -0.1, -4.0]])
CLASSES = np.array([[2, 0, 1], [1, 2, 0], [0, 1, 2]], dtype=np.uint16)
LABEL = np.array([2, 1, 1], dtype=np.uint16)
OF_LABEL = np.array([0.0, 0.0, -0.1])
T = 2.0


def scores(**changes):
    """The arrays of these images, at a temperature of two."""
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    cold = np.exp(LOGITS / T) / np.exp(LOGITS / T).sum(1, keepdims=True)
    arrays = {
        "logits": LOGITS.astype(np.float32),
        "classes": CLASSES,
        "label": LABEL,
        "label_logit": OF_LABEL.astype(np.float32),
        "logsumexp": np.log(np.exp(LOGITS).sum(1)).astype(np.float32),
        "square": (p**2).sum(1).astype(np.float32),
        "logsumexp_t": np.log(np.exp(LOGITS / T).sum(1)).astype(np.float32),
        "square_t": (cold**2).sum(1).astype(np.float32),
        "temperature": np.float32(T),
        "manifest": "m",
        "checkpoint": "a" * 64,
        "head": "h" * 64,
        "protocol": "linear-demo-v1",
    }
    arrays |= changes
    return {name: array for name, array in arrays.items() if array is not None}


def kept(folder, **changes):
    return kept_scores.load(folder / kept_scores.keep(folder, "x", scores(**changes)))


def test_what_was_kept_is_read_again(tmp_path):
    relative = kept_scores.keep(tmp_path, "top1-0", scores(), note="mine")
    assert relative == "scores/top1-0.npz"
    with np.load(tmp_path / relative) as file:
        assert str(file["note"]) == "mine"
    found = kept(tmp_path)
    assert found.keys() == scores().keys()
    np.testing.assert_array_equal(found["classes"], CLASSES)


@pytest.mark.parametrize("at", [1.0, T])
def test_losses_follow_from_the_logits_and_the_label(tmp_path, at):
    found = kept(tmp_path)
    suffix = "" if at == 1 else "_t"
    # Of each image the probabilities by class, and the label
    log_loss, brier = [], []
    for logits, classes, label in zip(LOGITS, CLASSES, LABEL):
        p = {int(c): math.exp(logit / at) for c, logit in zip(classes, logits)}
        p = {c: share / sum(p.values()) for c, share in p.items()}
        log_loss.append(-math.log(p[int(label)]))
        brier.append(100 * sum((p[c] - (c == label)) ** 2 for c in p))
    for name, losses in (("nll", log_loss), ("brier", brier)):
        value, ci95 = kept_scores.value(found, name + suffix)
        assert value == pytest.approx(np.mean(losses), abs=1e-5)
        assert ci95 == pytest.approx(calibration.of_mean(np.array(losses)), abs=1e-4)
    confidence = np.exp(LOGITS[:, 0] / at) / np.exp(LOGITS / at).sum(1)
    right = np.array([True, True, False])
    assert kept_scores.value(found, "ece" + suffix) == (
        pytest.approx(100 * calibration.ece(confidence, right), abs=1e-4),
        None,
    )
    # The least sure image is the wrong one in the mean of three
    order = np.argsort(-confidence)
    risks = np.cumsum(~right[order]) / [1, 2, 3]
    value, (low, high) = kept_scores.value(found, "aurc" + suffix)
    assert value == pytest.approx(100 * risks.mean())
    assert 0 <= low <= value <= high <= 100 and high - low > 1


def test_metrics_at_a_temperature_are_there_where_one_was_fitted(tmp_path):
    metrics = ["ece", "aece", "nll", "brier", "aurc", "eaurc"]
    assert kept_scores.names(kept(tmp_path)) == [*metrics, *(f"{m}_t" for m in metrics)]
    plain = kept(tmp_path, temperature=None, logsumexp_t=None, square_t=None)
    assert kept_scores.names(plain) == metrics


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, ""),
        # A changed recipe's fingerprint is no part of the row's name
        ({"protocol": "linear-demo-v1~1a2b"}, ""),
        ({"protocol": "linear-other-v1"}, "protocol"),
        ({"head": "g" * 64, "protocol": "linear-other-v1"}, "head"),
        ({"checkpoint": "b" * 64, "head": "g" * 64}, "checkpoint"),
    ],
)
def test_scores_belong_to_one_checkpoint_head_and_protocol(tmp_path, changes, differs):
    row = a_result(provenance={"head_sha256": "h" * 64})
    assert kept_scores.owner(kept(tmp_path, **changes), row) == differs


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"square_t": None}, "arrays missing or unknown: square_t"),
        ({"square": None, "more": 1}, "arrays missing or unknown: more, square"),
        ({"label": LABEL[:2]}, "'label' is uint16 of shape (2,)"),
        ({"label": LABEL.astype(np.int64)}, "'label' is int64 of shape (3,)"),
        ({"logits": LOGITS[:, :2]}, "'logits' is float64 of shape (3, 2)"),
        (
            {"square": np.array([0.5, np.inf, 0.5])},
            "'square' holds a value that is not",
        ),
        ({"temperature": np.float32(0)}, "3 logits an image, temperature 0.0"),
        ({"temperature": np.float32(-1)}, "temperature -1.0"),
        (
            {
                "logits": np.zeros((3, 11)),
                "classes": np.zeros((3, 11), dtype=np.uint16),
            },
            "11 logits an image, temperature 2.0",
        ),
    ],
)
def test_what_cannot_be_scores_is_left_out(tmp_path, caplog, changes, says):
    assert kept(tmp_path, **changes) is None
    assert "x.npz: scores left out: " in caplog.text and says in caplog.text


def test_ten_logits_an_image_are_kept(tmp_path):
    ten = np.zeros((3, 10))
    assert kept(tmp_path, logits=ten, classes=ten.astype(np.uint16)) is not None
    assert kept_scores.load(tmp_path / "scores" / "none.npz") is None
