"""From a Checkpoint to a detector's trunk, and the proof that it arrived: equal C2..C5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.runs import seeding
from backbench.weights import importing
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.resnet import build_backbone

TOLERANCE = 1e-4
RANDOM = "random"


class TrunkRow(TypedDict):
    """What a result's row says of the trunk."""

    checkpoint: str  # digest
    name: str
    method: str
    arch: str
    epochs: int | None


def weights(checkpoint: Path | None, model_weights: str, depth: int, seed: int) -> Checkpoint:
    """The trunk to start from: --checkpoint X, MODEL.WEIGHTS FILE, or MODEL.WEIGHTS random for the
    random row.

    No weights at all is refused: a detector that trains from scratch by mistake only looks a bit
    low.
    """
    if checkpoint is not None and model_weights:
        raise BadInput(
            f"both --checkpoint {checkpoint} and MODEL.WEIGHTS {model_weights}; give one"
        )
    if model_weights == RANDOM:
        arch = f"resnet{depth}"
        seeding.seed_everything(seed, "random row")
        trunk = build_backbone(arch)
        return Checkpoint(
            arch=arch, method=RANDOM, state_dict=trunk.state_dict(), provenance={"name": "random"}
        )
    if "://" in model_weights:
        raise BadInput(
            f"MODEL.WEIGHTS {model_weights}: nothing is downloaded in a run; give a local file"
        )
    file = checkpoint or (Path(model_weights) if model_weights else None)
    if file is None:
        raise BadInput(
            "no weights: give --checkpoint X, MODEL.WEIGHTS OUT.pkl, "
            f"or MODEL.WEIGHTS {RANDOM} for the random row"
        )
    return importing.read(file)


def check_features(
    checkpoint: Checkpoint, stages: Callable[[Tensor], Sequence[Tensor]], engine: str
) -> float:
    """The largest relative difference of C2..C5 between the Checkpoint's own trunk and the loaded
    detector's.

    Raises BadInput above 1e-4: a map that matched half of the names, a stride in the other
    convolution.
    """
    # Noise of 64 px reaches every weight, and C5 is still 2 x 2. It is what the trunk sees after
    # normalisation; how the engine normalises is not looked at here.
    x = torch.randn(2, 3, 64, 64, generator=seeding.generator(0, "feature check"))
    with torch.no_grad():
        own = checkpoint.backbone().eval().stages(x)
    worst = 0.0
    loaded = [stage.detach().cpu().float() for stage in stages(x)]
    for name, a, b in zip(("C2", "C3", "C4", "C5"), own, loaded, strict=True):
        if a.shape != b.shape:
            raise BadInput(
                f"{engine}: {name} of the detector is {tuple(b.shape)}, "
                f"the checkpoint's {tuple(a.shape)}"
            )
        difference = float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))
        if not difference <= TOLERANCE:  # not `>`: NaN is refused too
            raise BadInput(
                f"{engine}: the loaded {name} is off from {checkpoint.name}'s by {difference:.2g} "
                "of its size; weights or stride did not arrive, nothing was trained"
            )
        worst = max(worst, difference)
    return worst


def about(checkpoint: Checkpoint) -> TrunkRow:
    """What a detector's file keeps of the trunk it came from: enough for its results' rows."""
    return {
        "checkpoint": checkpoint.digest,
        "name": checkpoint.name,
        "method": checkpoint.method,
        "arch": checkpoint.arch,
        "epochs": checkpoint.epochs,
    }
