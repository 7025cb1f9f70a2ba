"""RUN/scores/*.npz: what a head said of each image, small enough to keep for every number.

From it calibration, and later metrics, are computed without a pass over the images. Logits are kept
minus the largest of their image: a softmax does not change, and float32 holds them to 1e-7.
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
# Name -> kind and dimensions; N images, K = min(TOP, classes)
_ARRAYS = {
    "logits": (
        "f",
        2,
    ),  # (N, K) the largest ones, largest first; of equals the smaller class
    "classes": ("u", 2),  # (N, K) theirs
    "label": ("u", 1),  # (N,)
    "label_logit": ("f", 1),  # (N,)
    "logsumexp": ("f", 1),  # (N,)
    "square": ("f", 1),  # (N,) sum of squared probabilities
    "logsumexp_t": (
        "f",
        1,
    ),  # (N,) the last two of the logits divided by the temperature
    "square_t": ("f", 1),
    "temperature": ("f", 0),
    # What they are of: digests of the list of images, of the checkpoint and the head, the protocol
    "manifest": ("U", 0),
    "checkpoint": ("U", 0),
    "head": ("U", 0),
    "protocol": ("U", 0),
}
_AT_T = {
    "temperature",
    "logsumexp_t",
    "square_t",
}  # only where a temperature was fitted


def keep(run: Path, stem: str, arrays: Mapping[str, np.ndarray], **of: str) -> str:
    """Write RUN/scores/STEM.npz; returns its path relative to RUN, for `provenance["scores"]`."""
    relative = f"{SCORES}/{stem}.npz"
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays, **of)  # type: ignore[arg-type]  # one name is numpy's own
    atomic.write_bytes(run / relative, buffer.getvalue())
    return relative


def load(path: Path) -> Arrays | None:
    """The arrays of one file of scores; None where it is missing or (logged) damaged."""
    return predictions.read_arrays(path, "scores", _refuse)


def _refuse(arrays: Arrays) -> None:
    """Raises ValueError for arrays that cannot be scores."""
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
    protocol = str(x["protocol"]).partition("~")[
        0
    ]  # a changed recipe's has its fingerprint, too
    kept = {
        "checkpoint": str(x["checkpoint"]),
        "head": str(x["head"]),
        "protocol": protocol,
    }
    said = {
        "checkpoint": r.checkpoint,
        "head": r.facts.get("head_sha256"),
        "protocol": r.protocol,
    }
    return next((name for name in kept if kept[name] != said[name]), "")


def names(x: Arrays) -> list[str]:
    """The metrics of calibration that these scores give; _t: at the temperature."""
    found = list(METRICS)
    return found + [f"{name}_t" for name in METRICS] if "temperature" in x else found


def value(x: Arrays, metric: str) -> tuple[float, Interval | None]:
    """A metric and its interval, in percent but for nll, which is in nats. ECE has no interval, as
    that of a resample is biased upwards, and eaurc none of its own."""
    right = x["classes"][:, 0] == x["label"]
    name, _, at_t = metric.partition("_")
    suffix, scale = (f"_{at_t}", float(x["temperature"])) if at_t else ("", 1.0)
    # 1. p of the best class is exp(0 - logsumexp), as logits are minus the largest.
    normaliser = x[f"logsumexp{suffix}"].astype(np.float64)
    if name in ("nll", "brier"):
        losses = normaliser - x["label_logit"].astype(np.float64) / scale
        if name == "brier":  # sum over classes of (p - onehot)^2, from 0 to 2
            losses = 100 * (
                1 - 2 * np.exp(-losses) + x[f"square{suffix}"].astype(np.float64)
            )
        return float(losses.mean()), calibration.of_mean(losses)
    conf = np.minimum(np.exp(-normaliser), 1.0)
    found = 100 * getattr(calibration, name)(conf, right)
    if name != "aurc":
        return found, None
    # 2. The same resamples for all heads that were scored on one list
    seed = seeding.seed_of("calibration", str(x["manifest"]), len(right))
    low, high = calibration.of_aurc(conf, right, seed)
    return found, (100 * low, 100 * high)
