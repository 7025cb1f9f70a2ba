"""RUN/scores/*.npz: what a head said of each image, small enough to keep for every number.

Calibration, and whatever metric comes later, is computed from it without a pass over the images.
The largest logit of an image is subtracted from all of its logits: its softmax stays the same, and
float32 holds them to 1e-7.
"""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from backbench.records import predictions
from backbench.records.predictions import Arrays
from backbench.records.result_line import Result
from backbench.runs import atomic, seeding
from backbench.runs.folder import SCORES
from backbench.stats import calibration
from backbench.stats.confidence import Interval

TOP = 10  # logits of an image
METRICS = ("ece", "aece", "nll", "brier", "aurc", "eaurc")
# Name -> kind of dtype and number of dimensions; N images, K = min(TOP, classes)
_ARRAYS = {
    # (N, K) the largest logits, largest first; of equal ones that of the smaller class first
    "logits": ("f", 2),
    "classes": ("u", 2),  # (N, K) the classes of these logits
    "label": ("u", 1),  # (N,)
    "label_logit": ("f", 1),  # (N,)
    "logsumexp": ("f", 1),  # (N,)
    "square": ("f", 1),  # (N,) sum of squared probabilities
    # The last two, of the logits divided by the temperature
    "logsumexp_t": ("f", 1),
    "square_t": ("f", 1),
    "temperature": ("f", 0),
    # What they are of: digests of the list of images, of the checkpoint and the head, the protocol
    "manifest": ("U", 0),
    "checkpoint": ("U", 0),
    "head": ("U", 0),
    "protocol": ("U", 0),
}
# These are there only where a temperature was fitted.
_AT_T = {"temperature", "logsumexp_t", "square_t"}


def keep(run: Path, stem: str, arrays: Mapping[str, np.ndarray], **of: str) -> str:
    """Write RUN/scores/STEM.npz; returns its path relative to RUN, for `provenance["scores"]`."""
    relative = f"{SCORES}/{stem}.npz"
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays, **of)  # type: ignore[arg-type]  # one name is numpy's own
    atomic.write_bytes(run / relative, buffer.getvalue())
    return relative


def load(path: Path) -> Arrays | None:
    """Return the arrays of one file of scores; None where it is missing or (logged) damaged."""
    return predictions.read_arrays(path, "scores", _refuse)


def _refuse(arrays: Arrays) -> None:
    """Raise ValueError for arrays that cannot be scores."""
    if arrays.keys() not in (_ARRAYS.keys(), _ARRAYS.keys() - _AT_T):
        odd = sorted(arrays.keys() ^ _ARRAYS.keys())
        raise ValueError(f"arrays missing or unknown: {', '.join(odd)}")
    images, top = arrays["classes"].shape
    for name, array in arrays.items():
        kind, dimensions = _ARRAYS[name]
        shape = (images, top)[:dimensions]
        if array.dtype.kind != kind or array.shape != shape or not array.size:
            raise ValueError(f"'{name}' is {array.dtype} of shape {array.shape}")
        if kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"'{name}' holds a value that is not finite")
    if top > TOP or arrays.get("temperature", 1) <= 0:
        raise ValueError(
            f"{top} logits an image, temperature {arrays.get('temperature')}"
        )


def owner(x: Arrays, r: Result) -> str:
    """Name the first of checkpoint, head and protocol that differs from the row's; else ""."""
    # The name of a changed recipe ends with its fingerprint, which a row's protocol has not.
    protocol = str(x["protocol"]).partition("~")[0]
    if str(x["checkpoint"]) != r.checkpoint:
        return "checkpoint"
    if str(x["head"]) != r.facts.get("head_sha256"):
        return "head"
    return "protocol" if protocol != r.protocol else ""


def names(x: Arrays) -> list[str]:
    """Return the metrics of calibration that these scores give; those with _t are at the
    temperature."""
    found = list(METRICS)
    if "temperature" in x:
        found += [f"{name}_t" for name in METRICS]
    return found


def value(x: Arrays, metric: str) -> tuple[float, Interval | None]:
    """Return a metric and its interval, in percent; nll is in nats.

    ECE and AECE have no interval: resampling biases ECE upwards. EAURC has none of its own.
    """
    right = x["classes"][:, 0] == x["label"]
    name, _, at_t = metric.partition("_")
    suffix = f"_{at_t}" if at_t else ""
    temperature = float(x["temperature"]) if at_t else 1.0
    # 1. Of the logits the largest is 0, so p of the best class is exp(0 - logsumexp).
    normaliser = x[f"logsumexp{suffix}"].astype(np.float64)
    if name in ("nll", "brier"):
        losses = normaliser - x["label_logit"].astype(np.float64) / temperature
        if name == "brier":
            # The sum over classes of (p - onehot)^2, from 0 to 2
            squares = x[f"square{suffix}"].astype(np.float64)
            losses = 100 * (1 - 2 * np.exp(-losses) + squares)
        return float(losses.mean()), calibration.of_mean(losses)
    confidence = np.minimum(np.exp(-normaliser), 1.0)
    found = 100 * getattr(calibration, name)(confidence, right)
    if name != "aurc":
        return found, None
    # 2. The same resamples for all heads that were scored on one list
    seed = seeding.seed_of("calibration", str(x["manifest"]), len(right))
    low, high = calibration.of_aurc(confidence, right, seed)
    return found, (100 * low, 100 * high)
