"""Batch norm statistics as true averages at the final weights: Detectron2's PreciseBN hook."""

import logging
import warnings
from collections.abc import Sequence

import torch

from backbench.runs import seeding
from detection.data.dataset_dicts import ImageRecord
from detection.engine import DetectionEngine


def reestimate(
    engine: DetectionEngine, records: Sequence[ImageRecord], *, batches: int, after: int
) -> None:
    """Re-estimate the statistics over the training batches of iterations `after`, `after + 1`..."""
    with warnings.catch_warnings():
        # fvcore.nn scripts its losses on import, which torch calls deprecated.
        warnings.simplefilter("ignore")
        from fvcore.nn.precise_bn import update_bn_stats

    engine.start(records, after, after + batches)
    logger = logging.getLogger("fvcore")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with torch.no_grad():
        update_bn_stats(_Forward(engine).train(), range(after, after + batches), batches)
    logger.setLevel(level)


class _Forward(torch.nn.Module):
    """update_bn_stats calls this with each iteration's number; the engine has the batch."""

    def __init__(self, engine: DetectionEngine) -> None:
        super().__init__()
        self.model = engine.model  # whose batch norms update_bn_stats finds
        self.engine = engine

    def forward(self, iteration: int) -> None:
        seeding.seed_everything(self.engine.seed, "precise batch norm", iteration)
        self.engine.losses()
