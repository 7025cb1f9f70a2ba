"""Makes compact scores per image from the logits of a head, and fits the temperature that
calibrates it."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backbench.records.kept_scores import TOP

Scores = dict[str, NDArray[np.generic]]
ROWS = 8192  # of features whose logits are held at a time
_LOG_T = 4.0  # log T is sought in [-4, 4]
_PRECISION = 1e-10  # of log T
_GOLDEN = (math.sqrt(5) - 1) / 2


def compact(
    logits: Iterable[Tensor], labels: Sequence[int], temperature: float | None
) -> Scores | None:
    """Make the arrays of one file of scores from chunks of logits (n, C); `labels` are the images'
    columns in them. None where the head has diverged."""
    parts: dict[str, list[Tensor]] = {}
    begin = 0
    for z in logits:
        if not bool(torch.isfinite(z).all()):
            return None
        label = torch.tensor(labels[begin : begin + len(z)], device=z.device)
        begin += len(z)
        # 1. The largest logits. The sort is stable, so that of equal ones the smaller class is
        #    first.
        ordered = z.sort(dim=1, descending=True, stable=True)
        top = min(TOP, z.shape[1])
        # 2. All logits minus the largest of the image. They are computed in float64 and kept in
        #    float32.
        shifted = z.double() - ordered.values[:, :1].double()
        found = {
            "logits": shifted.gather(1, ordered.indices[:, :top]),
            "classes": ordered.indices[:, :top],
            "label": label,
            "label_logit": shifted.gather(1, label[:, None])[:, 0],
            **_sums(shifted, ""),
        }
        if temperature is not None:
            found |= _sums(shifted / temperature, "_t")
        for name, values in found.items():
            parts.setdefault(name, []).append(values.cpu())
    out: Scores = {}
    for name, of_name in parts.items():
        kept_as = np.uint16 if name in ("classes", "label") else np.float32
        out[name] = torch.cat(of_name).numpy().astype(kept_as)
    if temperature is not None:
        out["temperature"] = np.asarray(temperature)
    return out


def joined(parts: Sequence[Scores | None]) -> Scores | None:
    """Join the arrays of consecutive images; None where the head has diverged on some."""
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    out: Scores = {}
    for name in whole[0]:
        out[name] = np.concatenate([part[name] for part in whole])
    return out


def _sums(shifted: Tensor, suffix: str) -> dict[str, Tensor]:
    """Return log(sum of exp(z)) and the sum of p^2 for each image, p = softmax(z)."""
    normaliser = torch.logsumexp(shifted, 1)
    square = torch.exp(2 * (shifted - normaliser[:, None])).sum(1)
    return {f"logsumexp{suffix}": normaliser, f"square{suffix}": square}


def fit_temperature(logits: Iterable[Tensor], labels: Sequence[int]) -> float | None:
    """Find the T that minimises the mean cross-entropy of logits / T, by golden section on log T in
    float64; None where the head has diverged. The labels must not have trained the head."""
    held = []
    for z in logits:
        if not bool(torch.isfinite(z).all()):
            return None
        held.append(z - z.amax(1, keepdim=True))
    of_chunk = torch.tensor(labels).split([len(z) for z in held])

    def loss(log_t: float) -> float:
        total = 0.0
        for z, label in zip(held, of_chunk):
            scaled = z.double() / math.exp(log_t)
            of_label = scaled.gather(1, label.to(z.device)[:, None])[:, 0]
            total += float((torch.logsumexp(scaled, 1) - of_label).sum())
        return total

    # The minimum lies in [low, high]. Its inner points a < b divide it in the golden ratio from
    # both ends. Of the part that is kept, one of them is an inner point again, so each turn needs
    # the loss at one new point only.
    low = -_LOG_T
    high = _LOG_T
    a = high - _GOLDEN * (high - low)
    b = low + _GOLDEN * (high - low)
    at_a = loss(a)
    at_b = loss(b)
    while high - low > _PRECISION:
        if at_a <= at_b:  # keep [low, b]
            high = b
            b, at_b = a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = loss(a)
        else:  # keep [a, high]
            low = a
            a, at_a = b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = loss(b)
    return math.exp((low + high) / 2)
