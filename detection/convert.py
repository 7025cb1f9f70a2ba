"""From a Checkpoint to a detector's trunk, and the proof that it arrived: equal maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.runs import seeding
from backbench.weights import archs, importing
from backbench.weights.checkpoint import Checkpoint
from detection import trunks

TOLERANCE = 1e-4  # of an engine's own ResNet, whose operations are others
SAME = 1e-5  # of the trunk itself
SIDES = (64, 64)
RANDOM = "random"


class TrunkRow(TypedDict):
    """What a result's row says of the trunk."""

    checkpoint: str  # digest
    name: str
    method: str
    arch: str
    epochs: int | None


def weights(checkpoint: Path | None, model_weights: str, fresh: str, seed: int) -> Checkpoint:
    """The trunk to start from: --checkpoint X, MODEL.WEIGHTS FILE, or MODEL.WEIGHTS random for the
    random row, of the architecture `fresh`.

    No weights at all is refused: a detector that trains from scratch by mistake only looks a bit
    low.
    """
    if checkpoint is not None and model_weights:
        raise BadInput(
            f"both --checkpoint {checkpoint} and MODEL.WEIGHTS {model_weights}; give one"
        )
    if model_weights == RANDOM:
        if not fresh:
            raise BadInput(
                f"MODEL.WEIGHTS {RANDOM}: of which trunk? say MODEL.TRUNK.ARCH timm:NAME"
            )
        seeding.seed_everything(seed, "random row")
        return Checkpoint(
            arch=fresh,
            method=RANDOM,
            state_dict=archs.build_trunk(fresh).state_dict(),
            pixels=archs.default_pixels(fresh),
            provenance={"name": "random"},
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
    checkpoint: Checkpoint,
    stages: Callable[[Tensor], Sequence[Tensor]],
    engine: str,
    *,
    sides: tuple[int, int] = SIDES,
    tolerance: float = TOLERANCE,
    device: torch.device | None = None,
) -> float:
    """The largest relative difference of C2..C5, or of a plain trunk's one map, between the
    Checkpoint's own trunk on `device` and the loaded detector's, for images of `sides` pixels.

    Raises BadInput above the tolerance: a map that matched half of the names, a stride in the other
    convolution.
    """
    # Noise of 64 px reaches every weight, and C5 is still 2 x 2. It is what the trunk sees after
    # normalisation; how the engine normalises is not looked at here.
    x = torch.randn(2, 3, *sides, generator=seeding.generator(0, "feature check")).to(device)
    with torch.no_grad():
        trunk = checkpoint.backbone().eval().to(device)
        own = [stage.cpu().float() for stage in trunk.stages(trunks.scaled(x, trunk))]
    worst = 0.0
    loaded = [stage.detach().cpu().float() for stage in stages(x)]
    names = trunks.MAPS if len(own) == len(trunks.MAPS) else ("map",)
    for name, a, b in zip(names, own, loaded, strict=True):
        if a.shape != b.shape:
            raise BadInput(
                f"{engine}: {name} of the detector is {tuple(b.shape)}, "
                f"the checkpoint's {tuple(a.shape)}"
            )
        difference = float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))
        if not difference <= tolerance:  # not `>`: NaN is refused too
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
