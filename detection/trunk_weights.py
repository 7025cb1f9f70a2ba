"""The checkpoint that a detector starts from, and the proof that it arrived: equal maps."""

from pathlib import Path

import torch

from backbench.errors import BadInput
from backbench.runs import seeding
from backbench.weights import archs, importing
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk
from detection import backbones
from detection.engine import DetectionEngine

TOLERANCE = 1e-5  # of a map's size: the operations are the same in the same order
RANDOM = "random"  # MODEL.WEIGHTS of the random row


def read(checkpoint: Path | None, model_weights: str, arch: str, seed: int) -> Checkpoint:
    """The trunk to start from: --checkpoint X, MODEL.WEIGHTS FILE, or MODEL.WEIGHTS random for the
    random row, a fresh trunk of the architecture `arch`. No weights at all is refused: a detector
    that trains from scratch by mistake only looks a bit low."""
    if checkpoint is not None and model_weights:
        raise BadInput(f"--checkpoint {checkpoint} and MODEL.WEIGHTS {model_weights}; give one")
    if model_weights == RANDOM:
        if not arch:
            raise BadInput(f"MODEL.WEIGHTS {RANDOM}: which trunk? say MODEL.TRUNK.ARCH timm:NAME")
        seeding.seed_everything(seed, "random row")
        return Checkpoint(
            arch=arch,
            method=RANDOM,
            state_dict=archs.build_trunk(arch).state_dict(),
            pixels=archs.default_pixels(arch),
            provenance={"name": "random"},
        )
    if "://" in model_weights:
        raise BadInput(f"MODEL.WEIGHTS {model_weights}: a run downloads nothing; give a local file")
    file = checkpoint or (Path(model_weights) if model_weights else None)
    if file is None:
        raise BadInput(
            f"no weights: give --checkpoint X, MODEL.WEIGHTS OUT.pkl or MODEL.WEIGHTS {RANDOM}"
        )
    return importing.read(file)


def check_features(
    checkpoint: Checkpoint, trunk: Trunk, engine: DetectionEngine, sides: tuple[int, int]
) -> float:
    """The largest relative difference between the maps of the checkpoint's own `trunk` and those of
    the loaded detector, on the detector's device, for images of (height, width) `sides`. Raises
    BadInput above the tolerance: half of the names matched, or another convolution strides."""
    # The noise is what the trunk sees after normalisation; how the engine normalises is not looked
    # at here. At the size of testing, where position embeddings are resized.
    noise = torch.randn(2, 3, *sides, generator=seeding.generator(0, "feature check"))
    x = noise.to(engine.device)
    with torch.no_grad():
        own = trunk.eval().to(engine.device).stages(backbones.scaled(x, trunk))
    trunk.cpu()
    worst = 0.0
    names = ("C2", "C3", "C4", "C5") if len(own) > 1 else ("map",)
    for name, a, b in zip(names, own, engine.stages(x), strict=True):
        if a.shape != b.shape:
            shapes = f"{tuple(b.shape)}, the checkpoint's {tuple(a.shape)}"
            raise BadInput(f"{engine.name}: {name} of the detector is {shapes}")
        difference = float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))
        if not difference <= TOLERANCE:  # not `>`: NaN is refused too
            raise BadInput(
                f"{engine.name}: the loaded {name} is off from {checkpoint.name}'s by "
                f"{difference:.2g} of its size; weights or stride did not arrive, nothing was trained"
            )
        worst = max(worst, difference)
    return worst
