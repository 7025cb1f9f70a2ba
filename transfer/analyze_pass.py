"""The pass over the images: each decoded once, seen by every checkpoint in 1 + N views."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from backbench.errors import Preempted
from backbench.images import augmentations
from backbench.images.image_list import ImageList, Images
from backbench.parallel import loading
from backbench.parallel.loading import Unreadable
from backbench.runs import seeding
from backbench.runs.folder import STATES
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.weights.checkpoint import Checkpoint
from transfer import feature_statistics as stats
from transfer.analyze_recipe import AnalyzeConfig
from transfer.analyze_summary import PROJECTOR, TRUNK
from transfer.devices import Machine
from transfer.frozen import FrozenTrunk, forward_all
from transfer.projector import build_projector, output_dim

if TYPE_CHECKING:
    from PIL import Image

STATE = f"{STATES}/analyze.state"  # below the run's folder


class AnalyzedViews:
    """PIL image, index -> uint8 (1 + N, 3, s, s): the plain view, then N augmented ones.

    They are a function of the seed and of the image's path: of no order, worker or checkpoint.
    """

    def __init__(self, images: ImageList, recipe: AnalyzeConfig, seed: int) -> None:
        self.images, self.recipe, self.seed = images, recipe, seed
        self.plain = recipe.geometry.transform()

    def __call__(self, image: Image.Image, index: int) -> Tensor:
        generator = seeding.generator(self.seed, "views to analyze", self.images.paths[index])
        pixels = np.asarray(image)
        height, width = pixels.shape[:2]
        out = [np.asarray(self.plain(image))]
        for _ in range(self.recipe.augmentations):
            view = augmentations.draw(generator, height, width, self.recipe.crops)
            out.append(augmentations.render_fast(pixels, view, self.recipe.crops))
        return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2)


class SpaceState(TypedDict):
    views: stats.ViewState
    moments: stats.MomentState
    sample: Tensor


class Space:
    """What is accumulated for one checkpoint in one space."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, dim: int, recipe: AnalyzeConfig, sample: int
    ) -> None:
        self.checkpoint, self.name, self.dim = checkpoint, name, dim
        self.views = stats.ViewStatistics(recipe.augmentations, dim)
        self.moments = stats.Moments(dim)
        self.sample = torch.zeros(sample, dim)

    def add(self, features: Tensor, rows: Tensor) -> None:
        """(B, 1 + N, dim) of B images; `rows` (B,) is each image's place in the sample, or -1."""
        self.views.add(features[:, 1:])
        self.moments.add(features[:, 0])
        chosen = rows >= 0
        self.sample[rows[chosen]] = features[:, 0].cpu()[chosen]

    def state(self) -> SpaceState:
        return {"views": self.views.state(), "moments": self.moments.state(), "sample": self.sample}

    def restore(self, state: SpaceState) -> None:
        self.views.restore(state["views"])
        self.moments.restore(state["moments"])
        self.sample = state["sample"]


@dataclass(frozen=True)
class AnalyzedCheckpoint:
    """A trunk, the projector that the checkpoint has kept, and the sums over each one's output."""

    trunk: FrozenTrunk
    projector: nn.Sequential | None
    spaces: list[Space]  # trunk, projector

    @staticmethod
    def build(
        checkpoint: Checkpoint, recipe: AnalyzeConfig, sample: int, device: torch.device
    ) -> AnalyzedCheckpoint:
        trunk = FrozenTrunk.build(checkpoint, device=device)
        spaces = [Space(checkpoint, TRUNK, trunk.dim, recipe, sample)]
        projector = build_projector(checkpoint.heads, trunk.dim)
        if projector is not None:
            projector = projector.to(device)
            dim = output_dim(projector)
            spaces.append(Space(checkpoint, PROJECTOR, dim, recipe, sample))
        return AnalyzedCheckpoint(trunk, projector, spaces)

    def add(self, features: Tensor, images: int, rows: Tensor) -> None:
        """The trunk's (B (1 + N), dim) features of B images; `rows` as in `Space.add`."""
        outputs = [features]
        if self.projector is not None:
            outputs.append(self.projector(features))
        for space, output in zip(self.spaces, outputs):
            space.add(output.view(images, -1, output.shape[1]), rows)


def accumulate(
    checkpoints: Sequence[Checkpoint],
    images: ImageList,
    recipe: AnalyzeConfig,
    *,
    out: Path,
    seed: int,
    machine: Machine,
) -> tuple[list[Space], ImageList]:
    """One pass -> the filled spaces (trunk, then projector, of each checkpoint) and the sample."""
    # 1. Which images' plain features are kept, and in which row of the sample.
    picked = _sampled(len(images), recipe.sample, seed)
    place = torch.full((len(images),), -1)
    place[picked] = torch.arange(len(picked))
    analyzed: list[AnalyzedCheckpoint] = []
    spaces: list[Space] = []
    for checkpoint in checkpoints:
        one = AnalyzedCheckpoint.build(checkpoint, recipe, len(picked), machine.device)
        analyzed.append(one)
        spaces += one.spaces
    trunks = [one.trunk for one in analyzed]

    # 2. Sums do not depend on where a pass was cut, so the state is the
    #    sums and how many images are in them.
    file = out / STATE
    first = _restore(file, spaces)
    progress = Progress(out, len(images), "analyze", unit="image", done=first)
    saved = time.monotonic()
    with StopFlag() as stop, torch.no_grad():
        for pixels, index in _pictures(images, recipe, seed, first, machine):
            # 3. All views of all images of the batch at once, (B (1 + N), 3, s, s), through every
            #    trunk.
            flat = pixels.flatten(0, 1).to(machine.device, non_blocking=True)
            for one, features in zip(analyzed, forward_all(trunks, flat)):
                one.add(features, len(pixels), place[index])
            progress.advance(len(pixels))
            # 4. The state, now and then and before a stop.
            done = int(index[-1]) + 1
            due = time.monotonic() - saved > 60 * recipe.save_minutes
            if done < len(images) and (stop.requested or due):
                _save(file, spaces, done)
                saved = time.monotonic()
                if stop.requested:
                    raise Preempted(
                        f"stopped by {stop.requested} after {done} images;"
                        " the same command continues"
                    )
    for trunk in trunks:
        trunk.verify()
    _save(file, spaces, len(images))  # what follows takes minutes too
    return spaces, images.subset(picked)


def _sampled(images: int, sample: int, seed: int) -> list[int]:
    """A seeded choice of `sample` of the images, in their order."""
    generator = seeding.generator(seed, "sample to analyze")
    return sorted(torch.randperm(images, generator=generator)[:sample].tolist())


def _pictures(
    images: ImageList, recipe: AnalyzeConfig, seed: int, first: int, machine: Machine
) -> Iterable[tuple[Tensor, Tensor]]:
    """From image `first` on: (uint8 (B, 1 + N, 3, s, s), indices (B,))."""
    starts = range(first, len(images), recipe.batch)
    batches = [list(range(i, min(i + recipe.batch, len(images)))) for i in starts]
    found: Iterator[tuple[Tensor, Tensor, Tensor] | Unreadable] = loading.batches(
        Images(images, AnalyzedViews(images, recipe, seed)),  # type: ignore[arg-type]
        batches,
        workers=machine.workers,
        pin=machine.device.type == "cuda",
    )
    for batch in found:
        pixels, _, index = machine.readable(batch)
        yield pixels, index


def _restore(file: Path, spaces: Sequence[Space]) -> int:
    """The image to start at: 0, or where a saved state ends."""
    if not file.exists():
        return 0
    saved = load_state(file)
    for space, state in zip(spaces, saved["spaces"], strict=True):
        space.restore(state)
    return int(saved["images"])


def _save(file: Path, spaces: Sequence[Space], done: int) -> None:
    save_state(file, {"images": done, "spaces": [space.state() for space in spaces]})
