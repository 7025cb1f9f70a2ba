"""`backbench analyze`: what checkpoints do to the features of a dataset's images, in the papers' figures and numbers.

One pass over the images: each is decoded once and seen by every checkpoint in one plain and N augmented views. All that
is kept are sums, histograms and the plain features of a bounded sample of images, so memory does not grow with the
dataset. Every statistic is taken on the trunk's features and, where the checkpoint has kept it, on its projector's.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from backbench import config
from backbench.datasets import catalog, splits
from backbench.errors import BadInput, Preempted
from backbench.images import views
from backbench.images.files import ImageList, Images
from backbench.images.preprocess import eval_geometry
from backbench.images.views import Crops
from backbench.knn import knn_scores
from backbench.results import store
from backbench.results.store import Result
from backbench.runs import atomic, seeding
from backbench.runs.folder import RESULTS_FILE, Progress, open_run, read_metrics
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.weights import header
from backbench.weights.checkpoint import Checkpoint
from transfer import analyze_pictures, fewshot, metrics
from transfer import feature_statistics as stats
from transfer.config import Geometry
from transfer.features import Frozen, fingerprint, forward_all
from transfer.machine import Machine, read_checkpoints, start_for
from transfer.projector import build_projector

STATE, SUMMARY = "state/analyze.state", "analysis.json"
TRUNK, PROJECTOR = "trunk", "projector"
NOT_DRAWN = ("step", "epoch", "images_per_s", "waiting")  # of metrics.jsonl: time, not training


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """configs/transfer/analyze*.yaml. `{space}` in the protocol's name becomes `trunk` or `projector`."""

    protocol: str = "analyze-{space}-v1"
    split: Literal["train", "val", "test"] = "test"
    images: int | None = None  # a seeded choice of so many; null: all
    augmentations: int = 32
    crops: Crops
    geometry: Geometry
    sample: int = (
        4096  # images whose plain features are kept, for distances between images and the probes
    )
    batch: int = 4  # images at a time, each with all its views
    neighbours: int = 20
    temperature: float = 0.07
    shots: int = 2
    draws: int = 20
    l2: float = 0.01
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        if "{space}" not in self.protocol:
            raise ValueError(
                f"protocol '{self.protocol}' needs {{space}} in it, so that spaces do not share a column"
            )
        if self.crops.size != self.geometry.crop:
            raise ValueError(
                f"crops.size {self.crops.size} and geometry.crop {self.geometry.crop} must be equal"
            )
        if self.augmentations < 2 or self.sample < 2 or self.batch < 1:
            raise ValueError("augmentations and sample must be at least 2, batch at least 1")

    def name(self, space: str) -> str:
        return self.protocol.replace("{space}", space)


def load_config(recipe: str, augmentations: int | None) -> AnalyzeConfig:
    """The recipe; another number of augmentations than its own becomes part of the protocol's name."""
    found = config.load(AnalyzeConfig, recipe, kind="transfer")
    if augmentations is None or augmentations == found.augmentations:
        return found
    data = config.to_dict(found) | {"augmentations": augmentations}
    data["protocol"] = found.protocol.replace("{space}", f"{{space}}-{augmentations}views")
    return config.build(AnalyzeConfig, data, where="--augmentations")


def run(args: argparse.Namespace) -> int:
    """The verb `analyze`."""
    recipe = load_config(args.recipe, args.augmentations)
    if args.devices * args.nodes > 1:
        raise BadInput(
            "--devices: analyze runs in one process; analyze other checkpoints beside it instead"
        )
    found = catalog.load(args.dataset, args.data, seed=args.seed)
    images = choose_images(dict(found.items())[recipe.split], recipe.images, args.seed)
    checkpoints = read_checkpoints(args.checkpoints)
    identity = {
        "recipe": config.to_dict(recipe),
        "checkpoints": [c.digest for c in checkpoints],
        "dataset": args.dataset,
        "images": splits.digest(images),
        "content": fingerprint(images),
        "seed": args.seed,
    }
    machine = start_for(args)
    out = open_run(args.out, verb="analyze", identity=identity)
    file = out / RESULTS_FILE
    rows = [r for r in store.read_file(file) if isinstance(r, Result)] if file.exists() else []
    if rows:
        (out / STATE).unlink(missing_ok=True)
    else:
        curves = training_curves(args.checkpoints, checkpoints)
        rows = analyze(
            checkpoints,
            images,
            recipe,
            dataset=args.dataset,
            out=out,
            seed=args.seed,
            machine=machine,
            curves=curves,
        )
    show(rows, out)
    return 0


def choose_images(images: ImageList, count: int | None, seed: int) -> ImageList:
    if count is None or count >= len(images):
        return images
    order = torch.randperm(len(images), generator=seeding.generator(seed, "images to analyze"))
    return images.subset(sorted(order[:count].tolist()))


# The pass over the images


class Augment:
    """PIL image, index -> uint8 (1 + N, 3, s, s): the plain view, then N augmented ones.

    The views are a function of the seed and of the image's path, so they depend on no order, worker or checkpoint.
    """

    def __init__(self, images: ImageList, recipe: AnalyzeConfig, seed: int) -> None:
        self.images, self.recipe, self.seed = images, recipe, seed
        self.plain = eval_geometry(**config.to_dict(recipe.geometry))

    def __call__(self, image: Any, index: int) -> Tensor:
        generator = seeding.generator(self.seed, "views to analyze", self.images.paths[index])
        pixels = np.asarray(image)
        height, width = pixels.shape[:2]
        out = [np.asarray(self.plain(image))]
        for _ in range(self.recipe.augmentations):
            view = views.draw(generator, height, width, self.recipe.crops)
            out.append(views.render_fast(pixels, view, self.recipe.crops))
        return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2)


class Space:
    """What is accumulated for one checkpoint in one space."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, dim: int, recipe: AnalyzeConfig, sample: int
    ) -> None:
        self.checkpoint, self.name, self.dim = checkpoint, name, dim
        self.views = stats.Views(recipe.augmentations, dim)
        self.moments = stats.Moments(dim)
        self.sample = torch.zeros(sample, dim)

    def add(self, features: Tensor, rows: Tensor) -> None:
        """(B, 1 + N, dim) of B images; `rows` (B,) is each image's place in the sample, or -1."""
        self.views.add(features[:, 1:])
        self.moments.add(features[:, 0])
        chosen = rows >= 0
        self.sample[rows[chosen]] = features[:, 0].cpu()[chosen]

    def state(self) -> dict[str, Any]:
        return {"views": self.views.state(), "moments": self.moments.state(), "sample": self.sample}

    def restore(self, state: dict[str, Any]) -> None:
        self.views.restore(state["views"])
        self.moments.restore(state["moments"])
        self.sample = state["sample"]


def accumulate(
    checkpoints: Sequence[Checkpoint],
    images: ImageList,
    recipe: AnalyzeConfig,
    *,
    out: Path,
    seed: int,
    machine: Machine,
) -> tuple[list[Space], ImageList]:
    """One pass -> the filled spaces (trunk, then projector, of each checkpoint) and the sampled images."""
    trunks = [Frozen.build(c, device=machine.device) for c in checkpoints]
    projectors: list[nn.Sequential | None] = []
    for checkpoint, trunk in zip(checkpoints, trunks):
        projector = build_projector(checkpoint.heads, trunk.dim)
        projectors.append(None if projector is None else projector.to(machine.device))
    picked = sorted(
        torch.randperm(len(images), generator=seeding.generator(seed, "sample to analyze"))[
            : recipe.sample
        ].tolist()
    )
    place = torch.full((len(images),), -1)
    place[picked] = torch.arange(len(picked))
    spaces: list[list[Space]] = []
    for checkpoint, trunk, head in zip(checkpoints, trunks, projectors):
        own = [Space(checkpoint, TRUNK, trunk.dim, recipe, len(picked))]
        if head is not None:
            dim = next(m.out_features for m in reversed(head) if isinstance(m, nn.Linear))
            own.append(Space(checkpoint, PROJECTOR, dim, recipe, len(picked)))
        spaces.append(own)
    flat = [space for own in spaces for space in own]

    state = out / STATE
    first = 0
    if state.exists():
        saved = load_state(state)
        first = int(saved["images"])
        for space, data in zip(flat, saved["spaces"], strict=True):
            space.restore(data)

    def save(done: int) -> None:
        save_state(state, {"images": done, "spaces": [space.state() for space in flat]})

    starts = range(first, len(images), recipe.batch)
    batches = [list(range(i, min(i + recipe.batch, len(images)))) for i in starts]
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        Images(images, Augment(images, recipe, seed)),  # type: ignore[arg-type]
        batch_sampler=batches,
        num_workers=machine.workers,
        pin_memory=machine.device.type == "cuda",
        multiprocessing_context="fork" if machine.workers else None,
        worker_init_fn=_one_thread,
    )
    progress = Progress(out, len(images), "analyze", unit="image", done=first)
    saved_at = time.monotonic()
    with StopFlag() as stop, torch.no_grad():
        for pixels, _, index in loader:
            b, v = pixels.shape[:2]
            every = forward_all(trunks, pixels.flatten(0, 1).to(machine.device, non_blocking=True))
            for own, head, features in zip(spaces, projectors, every):
                outputs = [features] if head is None else [features, head(features)]
                for space, output in zip(own, outputs):
                    space.add(output.view(b, v, -1), place[index])
            progress.advance(b)
            done = int(index[-1]) + 1
            if done < len(images) and (
                stop.requested or time.monotonic() - saved_at > 60 * recipe.save_minutes
            ):
                save(done)
                saved_at = time.monotonic()
                if stop.requested:
                    raise Preempted(
                        f"stopped by {stop.requested} after {done} images; the same command continues"
                    )
    for trunk in trunks:
        trunk.verify()
    save(len(images))
    return flat, images.subset(picked)


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


# From the sums to the numbers


@dataclass(frozen=True)
class Number:
    """One metric of one space; `about` goes to the provenance."""

    metric: str
    value: float
    ci95: tuple[float, float] | None = None
    about: str = ""


def halves(labels: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sample's labelled images in two halves, every other image of each class."""
    seen: dict[int, int] = {}
    parts: tuple[list[int], list[int]] = ([], [])
    for i, label in enumerate(labels):
        if label >= 0:
            parts[seen.get(label, 0) % 2].append(i)
            seen[label] = seen.get(label, 0) + 1
    return parts


def neighbours(sample: Tensor, images: ImageList, recipe: AnalyzeConfig) -> Number | None:
    """Weighted kNN accuracy of each half of the sample by the other, in percent."""
    a, b = halves(images.labels)
    if not a or not b:
        return None
    k = min(recipe.neighbours, len(a), len(b))
    labels = torch.tensor(images.labels)
    right, truth = [], []
    for bank, queries in ((a, b), (b, a)):
        scores = knn_scores(
            sample[queries],
            sample[bank],
            labels[bank],
            classes=len(images.classes),
            k=(k,),
            temperature=recipe.temperature,
        )
        right.append(scores[k].argmax(1) == labels[queries])
        truth.append(labels[queries])
    hits, known = torch.cat(right).numpy(), torch.cat(truth).numpy()
    interval = metrics.bootstrap_ci(
        "top1",
        hits,
        known,
        len(images.classes),
        resamples=2000,
        seed=seeding.seed_of("bootstrap", len(known)),
    )
    return Number(
        "knn",
        100 * float(hits.mean()),
        interval,
        f"k {k}, each half of {len(known)} images by the other",
    )


def few_labels(
    sample: Tensor, images: ImageList, recipe: AnalyzeConfig, seed: int
) -> Number | None:
    """Accuracy on one half of the sample of logistic regression on `shots` labels per class of the other half."""
    a, b = halves(images.labels)
    counts = np.bincount([images.labels[i] for i in a], minlength=len(images.classes))
    known = {c for c in {images.labels[i] for i in b} if counts[c] >= recipe.shots}
    if len(known) < 2:
        return None
    a, b = ([i for i in part if images.labels[i] in known] for part in (a, b))
    bank, test = images.subset(a), images.subset(b)
    values = fewshot.accuracies(
        sample[a],
        bank.labels,
        sample[b],
        test.labels,
        fewshot.draws(bank, shots=recipe.shots, count=recipe.draws, seed=seed),
        metric="top1",
        classes=len(images.classes),
        l2=recipe.l2,
        max_iterations=500,
        tolerance=1e-6,
    )
    about = (
        f"{recipe.shots} labels of {len(known)} classes, {recipe.draws} draws, {len(b)} test images"
    )
    return Number("fewshot", float(np.mean(values)), metrics.mean_ci(values), about)


def summarise(
    space: Space, images: ImageList, recipe: AnalyzeConfig, seed: int
) -> tuple[list[Number], dict[str, Any]]:
    """The numbers of one space, and the curves that its pictures are drawn from."""
    sample, labels = space.sample, torch.tensor(images.labels)
    order = torch.randperm(space.dim, generator=seeding.generator(seed, "coordinates", space.dim))
    found = stats.pairs(sample, labels)
    curve = stats.min_max(sample, order)
    noise = torch.randn(sample.shape, generator=seeding.generator(seed, "gaussian", *sample.shape))
    gaussian = stats.min_max(noise, order)  # what no structure at all gives in as many dimensions
    spectrum = space.moments.spectrum()
    singular = space.moments.singular_values()
    collapse = stats.collapse(space.moments)
    per_image = {name: space.views.mean(name) for name in stats.PER_IMAGE}
    diagonal = per_image["covariance_diagonal"]
    scaled = None if diagonal.ci95 is None else (1e4 * diagonal.ci95[0], 1e4 * diagonal.ci95[1])
    numbers = [
        Number("nuclear_norm", per_image["nuclear_norm"].value, per_image["nuclear_norm"].ci95),
        Number("view_cosine", per_image["view_cosine"].value, per_image["view_cosine"].ci95),
        Number("covariance_diagonal_e4", 1e4 * diagonal.value, scaled, "in units of 1e-4"),
        Number("alignment", per_image["alignment"].value, per_image["alignment"].ci95),
        Number("uniformity", found.uniformity),
        Number("within_class_distance", found.within_mean),
        Number("between_class_distance", found.between_mean),
        Number(
            "class_overlap", 100 * found.overlap, None, "shared area of the two histograms, percent"
        ),
        Number(
            "min_max_contrast",
            curve.contrast[-1],
            None,
            "(D_max - D_min) / D_min, mean over anchors",
        ),
        Number("rankme", stats.entropy_rank(singular)),
        Number("effective_rank", stats.entropy_rank(spectrum.sqrt())),
        Number(
            "live_directions",
            100 * collapse.live / collapse.possible,
            None,
            f"percent of {collapse.possible}",
        ),
        Number("collapse", float(collapse.kind), None, "0 none, 1 dimensional, 2 complete"),
    ]
    numbers += [
        n
        for n in (neighbours(sample, images, recipe), few_labels(sample, images, recipe, seed))
        if n
    ]
    curves = {
        "histograms": {name: h.to_json() for name, h in space.views.histograms.items()},
        "within": found.within.to_json(),
        "between": found.between.to_json(),
        "spectrum": [_finite(v) for v in (spectrum / spectrum.sum()).tolist()],
        "min_max": _min_max_json(curve),
        "min_max_gaussian": _min_max_json(gaussian),
    }
    return numbers, curves


def _min_max_json(curve: stats.MinMax) -> dict[str, Any]:
    contrast, variance = (
        [_finite(v) for v in values] for values in (curve.contrast, curve.variance)
    )
    return {"dims": curve.dims, "contrast": contrast, "variance": variance}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def analyze(
    checkpoints: Sequence[Checkpoint],
    images: ImageList,
    recipe: AnalyzeConfig,
    *,
    dataset: str,
    out: Path,
    seed: int,
    machine: Machine,
    curves: Sequence[dict[str, Any]] = (),
) -> list[Result]:
    """Everything for `checkpoints` on `images`: OUT/analysis.json, OUT/pictures and the rows, which are returned."""
    spaces, sample = accumulate(checkpoints, images, recipe, out=out, seed=seed, machine=machine)
    labels = unique_names(checkpoints)
    rows: list[Result] = []
    summaries = []
    for space in spaces:
        checkpoint = space.checkpoint
        numbers, drawn = summarise(space, sample, recipe, seed)
        summaries.append(
            {
                "name": labels[checkpoint.digest],
                "checkpoint": checkpoint.digest,
                "method": checkpoint.method,
                "space": space.name,
                "dim": space.dim,
                "numbers": {n.metric: _finite(n.value) for n in numbers},
                **drawn,
            }
        )
        rows += [
            Result(
                checkpoint=checkpoint.digest,
                name=checkpoint.name,
                method=checkpoint.method,
                arch=checkpoint.arch,
                epochs=checkpoint.epochs,
                task="analyze",
                dataset=dataset,
                split=recipe.split,
                metric=number.metric,
                value=number.value,
                ci95=number.ci95,
                protocol=recipe.name(space.name),
                seed=seed,
                provenance={
                    "recipe": config.to_dict(recipe),
                    "manifest": splits.digest(images),
                    "images": len(images),
                    "sample": len(sample),
                    "space": f"{space.name}, {space.dim} dimensions",
                    **({"about": number.about} if number.about else {}),
                },
            )
            for number in numbers
        ]
    summary = {
        "dataset": dataset,
        "images": len(images),
        "augmentations": recipe.augmentations,
        "spaces": summaries,
    }
    summary["training"] = [{**curve, "name": labels[curve["checkpoint"]]} for curve in curves]
    atomic.write_json(out / SUMMARY, json.loads(json.dumps(summary, allow_nan=False)))
    analyze_pictures.draw(summary, out / "pictures")
    store.append(out, rows)
    (out / STATE).unlink(missing_ok=True)
    return rows


def unique_names(checkpoints: Sequence[Checkpoint]) -> dict[str, str]:
    """Digest -> name; with the start of the digest where two share a name."""
    names = [c.name for c in checkpoints]
    return {
        c.digest: c.name if names.count(c.name) == 1 else f"{c.name} {c.digest[:6]}"
        for c in checkpoints
    }


def training_curves(
    files: Sequence[Path], checkpoints: Sequence[Checkpoint]
) -> list[dict[str, Any]]:
    """metrics.jsonl beside each checkpoint file, where it is still in its pretraining's folder (ARB Fig. 3)."""
    out: list[dict[str, Any]] = []
    known = {c.digest for c in checkpoints}
    for file in files:
        rows = [r for r in read_metrics(file.parent) if "step" in r]
        digest = header.digest(file)
        if len(rows) < 2 or digest not in known or any(c["checkpoint"] == digest for c in out):
            continue
        names = sorted(
            {
                k
                for r in rows
                for k, v in r.items()
                if k not in NOT_DRAWN and isinstance(v, int | float)
            }
        )
        size = math.ceil(len(rows) / 300)
        bins = [rows[i : i + size] for i in range(0, len(rows), size)]
        terms: dict[str, list[float | None]] = {}
        for name in names:
            of_bins = [
                [r[name] for r in part if isinstance(r.get(name), int | float)] for part in bins
            ]
            terms[name] = [_finite(sum(v) / len(v)) if v else None for v in of_bins]
        out.append(
            {"checkpoint": digest, "step": [part[-1]["step"] for part in bins], "terms": terms}
        )
    return out


def show(rows: Sequence[Result], out: Path) -> None:
    """A line per metric and space, a column per checkpoint, on standard output."""
    digests = list(dict.fromkeys(r.checkpoint for r in rows))
    names = {r.checkpoint: r.name for r in rows}
    lines: dict[tuple[str, str], dict[str, Result]] = {}
    for r in rows:
        lines.setdefault((r.protocol, r.metric), {})[r.checkpoint] = r
    protocol = None
    for (of, metric), found in lines.items():
        if of != protocol:
            protocol = of
            print(f"{of:<28}" + "".join(f"{names[d][:16]:>18}" for d in digests))
        cells = []
        for d in digests:
            one = found.get(d)
            cells.append(
                "" if one is None else "undefined" if one.value is None else f"{one.value:.4g}"
            )
        print(f"  {metric:<26}" + "".join(f"{c:>18}" for c in cells))
    print(f"pictures: {out / 'pictures'}")
