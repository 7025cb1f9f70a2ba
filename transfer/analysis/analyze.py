"""`backbench analyze` measures and draws what checkpoints do to features, as the papers do.

One pass over the images (`accumulate`) decodes each once and shows it to every checkpoint in 1 + N
views. It keeps sums, histograms and the plain features of a bounded sample of images, so memory
does not grow with the dataset. Every statistic is taken on the features of the trunk and, where the
checkpoint has kept its projector, on the output of that.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from backbench.containers.provenance import container_provenance
from backbench.datasets import catalog, splits
from backbench.errors import BadInput
from backbench.images import augmentations, contents
from backbench.images.image_list import ImageList
from backbench.knn import knn_scores
from backbench.parallel import loading
from backbench.recipes import config, fast
from backbench.records import store
from backbench.records.store import Result
from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.options import Outcome
from backbench.runs import atomic, price, seeding
from backbench.runs.folder import PICTURES, STATES, open_run
from backbench.runs.resumable import ResumableSteps
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.stats import confidence
from backbench.transfer.analysis import pictures as analyze_pictures
from backbench.transfer.analysis import statistics as stats
from backbench.transfer.analysis.pictures import (
    PROJECTOR,
    TRUNK,
    SpaceCurves,
    Summary,
    training_curves,
)
from backbench.transfer.analysis.protocol import AnalyzeConfig, load_analysis
from backbench.transfer.analysis.statistics import finite
from backbench.transfer.devices import Machine, read_checkpoints, start_for
from backbench.transfer.features.extractor import FeatureRows
from backbench.transfer.features.frozen import (
    FrozenTrunk,
    build_projector,
    forward_all,
    output_dim,
)
from backbench.transfer.keeping import recorded
from backbench.transfer.probes import fewshot as probe_fewshot
from backbench.transfer.probes.fewshot import FewShot
from backbench.weights.checkpoint import Checkpoint

SUMMARY = "analysis.json"
STATE = f"{STATES}/analyze.state"  # below the run's folder


def run(request: AnalyzeRequest, loaded: Sequence[Checkpoint] | None = None) -> Outcome:
    """Run the verb `analyze`; `loaded` are the files' checkpoints, where the caller has read
    them."""
    recipe = load_analysis(request.recipe, request.augmentations)
    if request.devices * request.nodes > 1:
        raise BadInput(
            "--devices: analyze runs in one process; analyze other checkpoints beside it instead"
        )
    dataset = catalog.load(request.dataset, request.data, seed=request.seed)
    every_image = dict(dataset.items())[recipe.split]
    images = choose_images(every_image, recipe.images, request.seed)
    checkpoints = loaded or read_checkpoints(request.checkpoints)
    # All that decides the numbers: the list of images, and what they hold.
    identity = {
        "recipe": config.to_dict(recipe),
        "checkpoints": [c.digest for c in checkpoints],
        "dataset": request.dataset,
        "images": splits.digest(images),
        contents.KEY: contents.sample(images),
        "seed": request.seed,
    }
    machine = start_for(request)
    with open_run(request.out, verb="analyze", identity=identity) as out:
        if not store.complete(out):
            analyze(request, checkpoints, images, recipe, machine)
        (out / STATE).unlink(missing_ok=True)
        rows = recorded(out)
    show(rows, request.out)
    return Outcome(document=rows)


def choose_images(images: ImageList, count: int | None, seed: int) -> ImageList:
    """Choose `count` images by the seed, and keep them in their order."""
    if count is None or count >= len(images):
        return images
    generator = seeding.generator(seed, "images to analyze")
    order = torch.randperm(len(images), generator=generator)
    return images.subset(sorted(order[:count].tolist()))


def analyze(
    request: AnalyzeRequest,
    checkpoints: Sequence[Checkpoint],
    images: ImageList,
    recipe: AnalyzeConfig,
    machine: Machine,
) -> None:
    """Measure the checkpoints on the images; write OUT/analysis.json, OUT/pictures and the rows."""
    out = request.out
    seed = request.seed
    cheaper = ""
    if machine.device.type == "cpu":
        cheaper = "`--augmentations 4` costs less"
    price.announce(
        f"analyze on {request.dataset}",
        f"{request.recipe} ({recipe.augmentations} views of each image)",
        price.plural(len(checkpoints), "checkpoint"),
        work={"image": len(images)},
        cheaper=cheaper,
    )
    # 1. The pass over the images, which can be stopped and continued.
    spaces, sample = accumulate(
        checkpoints, images, recipe, out=out, seed=seed, machine=machine
    )
    # 2. The numbers of each space, as rows and as what the pictures are drawn from.
    names = unique_names(checkpoints)
    summary: Summary = {
        "dataset": request.dataset,
        "images": len(images),
        "augmentations": recipe.augmentations,
        "spaces": [],
        "training": training_curves(request.checkpoints, names),
    }
    rows: list[Result] = []
    for space in spaces:
        checkpoint = space.checkpoint
        numbers, drawn = summarise(space, sample, recipe, seed)
        summary["spaces"].append(
            {
                "name": names[checkpoint.digest],
                "checkpoint": checkpoint.digest,
                "method": checkpoint.method,
                "space": space.name,
                "dim": space.dim,
                "numbers": {n.metric: finite(n.value) for n in numbers},
                **drawn,
            }
        )
        about = {
            "recipe": config.to_dict(recipe),
            "manifest": splits.digest(images),
            "images": len(images),
            "sample": len(sample),
            **container_provenance([(recipe.split, images)]),
            **fast.of_trunk(checkpoint.provenance),
            "space": f"{space.name}, {space.dim} dimensions",
        }
        for number in numbers:
            made = row(
                space,
                number,
                about=about,
                recipe=recipe,
                dataset=request.dataset,
                seed=seed,
            )
            rows.append(made)
    # 3. The files; the rows last, as a run with rows is done. What is undefined is null by now, and
    #    must be: JSON has no nan.
    atomic.write_json(out / SUMMARY, json.loads(json.dumps(summary, allow_nan=False)))
    analyze_pictures.draw(summary, out / PICTURES)
    store.owe(out, len(rows))
    store.append(out, rows, skip_known=True)


def row(
    space: "Space",
    number: "Number",
    *,
    about: Mapping[str, object],
    recipe: AnalyzeConfig,
    dataset: str,
    seed: int,
) -> Result:
    """Make one number of a space a row; `about` is its provenance."""
    checkpoint = space.checkpoint
    if number.about:
        about = {**about, "about": number.about}
    return Result(
        checkpoint=checkpoint.digest,
        name=checkpoint.name,
        method=checkpoint.method,
        arch=checkpoint.trunk,
        epochs=checkpoint.epochs,
        task="analyze",
        dataset=dataset,
        split=recipe.split,
        metric=number.metric,
        value=number.value,
        ci95=number.ci95,
        protocol=recipe.name(space.name),
        seed=seed,
        provenance=about,
    )


def unique_names(checkpoints: Sequence[Checkpoint]) -> dict[str, str]:
    """Return digest -> name, followed by the start of the digest where two share a name."""
    names = [c.name for c in checkpoints]
    out = {}
    for checkpoint, name in zip(checkpoints, names):
        digest = checkpoint.digest
        out[digest] = name if names.count(name) == 1 else f"{name} {digest[:6]}"
    return out


def show(rows: Sequence[Result], out: Path) -> None:
    """Print a line per metric and space, a column per checkpoint."""
    names = {r.checkpoint: r.name[:16] for r in rows}  # digests in their order
    table: dict[tuple[str, str], dict[str, str]] = {}
    for r in rows:
        cell = "undefined" if r.value is None else f"{r.value:.4g}"
        table.setdefault((r.protocol, r.metric), {})[r.checkpoint] = cell
    shown = None
    for (protocol, metric), cells in table.items():
        if protocol != shown:
            shown = protocol
            print(f"{protocol:<28}" + "".join(f"{name:>18}" for name in names.values()))
        columns = "".join(f"{cells.get(digest, ''):>18}" for digest in names)
        print(f"  {metric:<26}{columns}")
    print(f"pictures: {out / PICTURES}")


# The pass over the images


class AnalyzedViews(Dataset[tuple[Tensor, int]]):
    """Item i is (uint8 (1 + N, 3, s, s), i): image i's plain view, then N augmented ones, a
    function of the seed and of the image's path alone."""

    def __init__(self, images: ImageList, recipe: AnalyzeConfig, seed: int) -> None:
        self.images, self.recipe, self.seed = images, recipe, seed
        self.plain = recipe.geometry.transform()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images.open(index)
        crops = self.recipe.crops
        generator = seeding.generator(
            self.seed, "views to analyze", self.images.paths[index]
        )
        pixels = np.asarray(image)
        height, width = pixels.shape[:2]
        out = [np.asarray(self.plain(image))]
        for _ in range(self.recipe.augmentations):
            view = augmentations.draw(generator, height, width, crops)
            out.append(augmentations.render_fast(pixels, view, crops))
        return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2), index


class Space:
    """The sums over one checkpoint's features in one space, and the sample of its features."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        dim: int,
        recipe: AnalyzeConfig,
        sample: int,
    ) -> None:
        self.checkpoint = checkpoint
        self.name = name
        self.dim = dim
        self.views = stats.ViewStatistics(recipe.augmentations, dim)
        self.moments = stats.Moments(dim)
        self.groups = stats.Groups(dim)
        self.sample = torch.zeros(sample, dim)

    def add(self, features: Tensor, rows: Tensor) -> None:
        """Add the features (B, 1 + N, dim) of B images; `rows` (B,) is each image's place in the
        sample, or -1."""
        self.views.add(features[:, 1:])
        self.moments.add(features[:, 0])
        self.groups.add(features[:, 1:])
        chosen = rows >= 0
        self.sample[rows[chosen]] = features[:, 0].cpu()[chosen]

    def tensors(self) -> list[Tensor]:
        """Return all that is accumulated; filling these in place continues a stopped pass."""
        return [
            *self.views.tensors(),
            *self.moments.tensors(),
            *self.groups.tensors(),
            self.sample,
        ]


class AnalyzedCheckpoint:
    """A trunk, the projector that the checkpoint has kept, and the sums over each one's output."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: AnalyzeConfig,
        sample: int,
        device: torch.device,
    ) -> None:
        # That a trunk has collapsed is what is measured here, and no bad input
        self.trunk = FrozenTrunk.build(checkpoint, device=device, may_collapse=True)
        self.spaces = [Space(checkpoint, TRUNK, self.trunk.dim, recipe, sample)]
        self.projector = build_projector(checkpoint.heads, self.trunk.dim)
        if self.projector is not None:
            self.projector.to(device)
            dim = output_dim(self.projector)
            self.spaces.append(Space(checkpoint, PROJECTOR, dim, recipe, sample))

    def add(self, features: Tensor, images: int, rows: Tensor) -> None:
        """Add the trunk's features (B (1 + N), dim) of B images; `rows` is as in `Space.add`."""
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
    """Make one pass over the images. Return the filled spaces (trunk, then projector, of each
    checkpoint) and the sample."""
    # 1. A seeded choice of images whose plain features are kept, in their order. `row_of` is an
    #    image's row of the sample, or -1.
    generator = seeding.generator(seed, "sample to analyze")
    order = torch.randperm(len(images), generator=generator)
    picked = sorted(order[: recipe.sample].tolist())
    row_of = torch.full((len(images),), -1)
    row_of[picked] = torch.arange(len(picked))
    analyzed = [
        AnalyzedCheckpoint(checkpoint, recipe, len(picked), machine.device)
        for checkpoint in checkpoints
    ]
    spaces = [space for one in analyzed for space in one.spaces]
    trunks = [one.trunk for one in analyzed]

    # 2. Sums do not depend on where a pass was cut, so the state is the sums and the number of
    #    images in them.
    file = out / STATE

    def save(done: int) -> None:
        sums = [space.tensors() for space in spaces]
        save_state(file, {"images": done, "spaces": sums})

    first = _restore(file, spaces) if file.exists() else 0
    starts = range(first, len(images), recipe.batch)
    loaded: Iterator[tuple[Tensor, Tensor] | loading.Unreadable] = loading.batches(
        AnalyzedViews(images, recipe, seed),
        [range(i, min(i + recipe.batch, len(images))) for i in starts],
        workers=machine.workers,
        pin=machine.device.type == "cuda",
    )
    with StopFlag() as stop, torch.no_grad():
        batches = ResumableSteps(
            first,
            len(images),
            size=recipe.batch,
            stop=stop,
            agreement=machine.agreement,
            progress=Progress(out, len(images), "analyze", unit="image", done=first),
            save=save,
            due=lambda done, age: age > 60 * recipe.save_minutes,
            place="after {done} images",
        )
        for _, batch in zip(batches, loaded):
            pixels, index = machine.readable(batch)
            # 3. All views of the batch at once, (B (1 + N), 3, s, s), through every trunk.
            flat = pixels.flatten(0, 1).to(machine.device, non_blocking=True)
            for one, features in zip(analyzed, forward_all(trunks, flat)):
                one.add(features, len(pixels), row_of[index])
    for trunk in trunks:
        trunk.verify()
    save(len(images))  # what follows takes minutes too
    return spaces, images.subset(picked)


def _restore(file: Path, spaces: Sequence[Space]) -> int:
    """Fill the spaces with the sums of a stopped pass, and return how many images are in them."""
    stopped = load_state(file)
    for space, saved_tensors in zip(spaces, stopped["spaces"], strict=True):
        for tensor, saved_tensor in zip(space.tensors(), saved_tensors, strict=True):
            tensor.copy_(saved_tensor)
    return int(stopped["images"])


# From the sums of a space to its numbers, and to the curves of its pictures


@dataclass(frozen=True)
class Number:
    """One metric of one space; `about` goes to the provenance."""

    metric: str
    value: float | None
    ci95: tuple[float, float] | None = None
    about: str = ""


def summarise(
    space: Space, images: ImageList, recipe: AnalyzeConfig, seed: int
) -> tuple[list[Number], SpaceCurves]:
    """Return the numbers of one space, and the curves of its pictures. `images` is the sample."""
    sample = space.sample
    # 1. Over pairs of images of the sample. Beside their contrast stands that of Gaussian noise,
    #    which is what no structure at all gives in as many dimensions.
    distances = stats.pairs(sample, torch.tensor(images.labels))
    of_order = seeding.generator(seed, "coordinates", space.dim)
    order = torch.randperm(space.dim, generator=of_order)
    contrast = stats.min_max(sample, order)
    of_noise = seeding.generator(seed, "gaussian", *sample.shape)
    noise = torch.randn(sample.shape, generator=of_noise)
    gaussian = stats.min_max(noise, order)
    # 2. Over all images.
    spectrum = space.moments.spectrum()
    numbers = _view_numbers(space.views)
    numbers += _space_numbers(space, distances, contrast, spectrum)
    # 3. Over the labels of the sample, where there are enough.
    knn = neighbours(sample, images, recipe)
    if knn is not None:
        numbers.append(knn)
    fewshot = few_labels(sample, images, recipe, seed)
    if fewshot is not None:
        numbers.append(fewshot)
    curves: SpaceCurves = {
        "histograms": {name: h.to_json() for name, h in space.views.histograms.items()},
        "within": distances.within.to_json(),
        "between": distances.between.to_json(),
        "spectrum": [finite(share) for share in (spectrum / spectrum.sum()).tolist()],
        "min_max": contrast,
        "min_max_gaussian": gaussian,
    }
    return numbers, curves


def _view_numbers(views: stats.ViewStatistics) -> list[Number]:
    """Return the means of the statistics of an image's views."""
    numbers = []
    for name in stats.PER_IMAGE:
        mean, ci95 = views.mean(name)
        if name == "covariance_diagonal":
            # It is so small that a table would show 0.
            ends = None
            if ci95 is not None:
                low, high = ci95
                ends = (1e4 * low, 1e4 * high)
            numbers.append(Number(f"{name}_e4", 1e4 * mean, ends, "in units of 1e-4"))
        else:
            numbers.append(Number(name, mean, ci95))
    return numbers


def _space_numbers(
    space: Space,
    distances: stats.Pairs,
    contrast: stats.MinMaxSummary,
    spectrum: Tensor,
) -> list[Number]:
    """Return the numbers over pairs of the sample, those of ranks, and those that are said to
    predict a probe."""
    collapse = stats.collapse(space.moments)
    live = 100 * collapse.live / collapse.possible
    n = space.groups.means.count
    q = space.groups.around.count // n
    first, last = stats.ALPHA_RANKS
    return [
        Number("uniformity", distances.uniformity),
        Number("within_class_distance", distances.within_mean),
        Number("between_class_distance", distances.between_mean),
        Number(
            "class_overlap",
            100 * distances.overlap,
            about="shared area of the two histograms, percent",
        ),
        Number(
            "min_max_contrast",
            contrast["contrast"][-1],  # in all dimensions
            about="(D_max - D_min) / D_min, mean over anchors",
        ),
        Number("rankme", stats.entropy_rank(space.moments.singular_values())),
        # Roots of the covariance's eigenvalues: the singular values of the centred features, up to
        # a factor that no rank notices.
        Number("effective_rank", stats.entropy_rank(spectrum.sqrt())),
        Number("live_directions", live, about=f"percent of {collapse.possible}"),
        Number(
            "collapse", float(collapse.kind), about="0 none, 1 dimensional, 2 complete"
        ),
        Number(
            "lidar",
            space.groups.lidar(),
            about=f"n {n} images, q {q} views, D {space.dim}",
        ),
        Number(f"alpha_req_{first}_{last}", stats.alpha_req(spectrum)),
    ]


# Probes on the sample: one half of it predicts the other


def halves(labels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the indices of the labelled images in two halves; of each class every other image is
    in the first."""
    seen: dict[int, int] = {}
    first: list[int] = []
    second: list[int] = []
    for i, label in enumerate(labels):
        if label < 0:
            continue
        before = seen.get(label, 0)
        half = first if before % 2 == 0 else second
        half.append(i)
        seen[label] = before + 1
    return first, second


def neighbours(
    sample: Tensor, images: ImageList, recipe: AnalyzeConfig
) -> Number | None:
    """Measure weighted kNN: the accuracy of each half of the sample by the other, in percent. None
    where a half is empty."""
    a, b = halves(images.labels)
    if not a or not b:
        return None
    k = min(recipe.neighbours, len(a), len(b))
    labels = torch.tensor(images.labels)
    right = []
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
    hits = torch.cat(right).numpy()
    about = f"k {k}, each half of {len(hits)} images by the other"
    return Number("knn", 100 * float(hits.mean()), confidence.of_hits(hits), about)


def few_labels(
    sample: Tensor, images: ImageList, recipe: AnalyzeConfig, seed: int
) -> Number | None:
    """Measure the accuracy on one half of the sample with `shots` labels per class of the other
    half. None where fewer than two classes have enough labels."""
    bank_half, test_half = halves(images.labels)
    # 1. The classes that the test half has, and that the bank has enough of
    banked = [images.labels[i] for i in bank_half]
    counts = np.bincount(banked, minlength=len(images.classes))
    tested = {images.labels[i] for i in test_half}
    known = {label for label in tested if counts[label] >= recipe.shots}
    if len(known) < 2:
        return None
    a = [i for i in bank_half if images.labels[i] in known]
    b = [i for i in test_half if images.labels[i] in known]
    bank = images.subset(a)
    label = np.asarray(images.subset(b).labels)
    # 2. The few-label probe on them
    p = FewShot(
        kind="fewshot",
        protocol="sample",
        shots=recipe.shots,
        draws=recipe.draws,
        l2=recipe.l2,
    )
    drawn = probe_fewshot.draws(bank, shots=p.shots, count=p.draws, seed=seed)
    predicted, _ = probe_fewshot.predictions(
        FeatureRows((sample[a],)),
        bank.labels,
        sample[b],
        drawn,
        classes=len(images.classes),
        p=p,
    )
    hits = predicted == label
    about = f"{p.shots} labels of {len(known)} classes, {p.draws} draws, {len(b)} test images"
    return Number("fewshot", 100 * float(hits.mean()), confidence.of_draws(hits), about)
