"""Batch norm statistics as true averages at the final weights: Detectron2's PreciseBN hook."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence

import torch

from backbench.runs import seeding
from detection.data.dataset_dicts import ImageRecord
from detection.engine import DetectionEngine


def reestimate(
    engine: DetectionEngine, records: Sequence[ImageRecord], *, batches: int, after: int
) -> None:
    """Re-estimate the statistics over the training batches that would have been iterations `after`,
    `after` + 1, ..."""
    with warnings.catch_warnings():
        # fvcore.nn scripts its losses on import, which torch calls deprecated.
        warnings.simplefilter("ignore")
        from fvcore.nn.precise_bn import update_bn_stats

    engine.start(records, after, after + batches)

    def iterations() -> Iterator[int]:
        for iteration in range(after, after + batches):
            seeding.seed_everything(engine.seed, "precise batch norm", iteration)
            yield iteration

    module = _Forward(engine).train()
    with torch.no_grad(), _errors_only("fvcore"):
        update_bn_stats(module, iterations(), batches)


class _Forward(torch.nn.Module):
    """update_bn_stats calls this with each item of the stream; the engine brings its own batch."""

    def __init__(self, engine: DetectionEngine) -> None:
        super().__init__()
        self.model = engine.model  # whose batch norms update_bn_stats finds
        self._losses = engine.losses

    def forward(self, _: int) -> None:
        self._losses()


@contextlib.contextmanager
def _errors_only(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
