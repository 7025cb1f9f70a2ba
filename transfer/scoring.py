"""Turns a checkpoint's predictions on test into numbers in percent, kept files and Result rows.
`write` makes the rows of finetuning and of all probes that predict one class per image."""

import csv
import dataclasses
import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backbench.containers import containers
from backbench.datasets import splits
from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.images import contents
from backbench.recipes import config, fast
from backbench.records import kept_scores, protocol_fingerprints, store
from backbench.records.store import Origin, Result
from backbench.runs import atomic
from backbench.runs.folder import HEADS_FILE, PREDICTIONS, RESULTS_FILE, STATES
from backbench.runs.forward_clock import clock
from backbench.runs.terminal import log
from backbench.stats import confidence
from backbench.transfer.head_scores import Scores
from backbench.transfer.protocols import Protocol
from backbench.untrusted import printable
from backbench.weights import kept_heads, trunk_facts
from backbench.weights.checkpoint import PIXELS_FROM, Checkpoint
from backbench.weights.kept_heads import KeptHead

# The kind of protocol: a probe that measures an Assignment[Sgd] finds an Sgd in it
Kind_co = TypeVar("Kind_co", bound=Protocol, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Assignment(Generic[Kind_co]):
    """One thing to measure: a protocol on a dataset for some checkpoints, in a run folder."""

    run: Path
    task: str  # of backbench/tasks.toml
    dataset: Dataset
    splits: Splits
    protocol: Kind_co
    seed: int
    checkpoints: tuple[Checkpoint, ...]
    heads: Path | None = None  # where kept heads are looked for; None: beside the run
    found: Mapping[str, KeptHead] = field(
        default_factory=dict
    )  # there, by checkpoints' digests

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """Digests of the lists of images, by split."""
        return splits.digests(self.splits)

    @property
    def state_file(self) -> Path:
        """The file that this measurement, unfinished, continues from."""
        name = f"{self.dataset.name}-{self.protocol.name}.state".replace("/", "_")
        return self.run / STATES / name

    def stem(self, checkpoint: Checkpoint, suffix: str = "") -> str:
        """The name of the files that are kept beside the rows of a checkpoint."""
        stem = (
            f"{self.task}-{self.dataset.name}-{self.protocol.name}{suffix}-s{self.seed}"
        )
        return f"{stem}-{checkpoint.digest[:12]}".replace("/", "_")

    @functools.cached_property
    def test_contents(self) -> str:
        """A digest of what all test images hold: other images under the same names are other data."""
        return contents.whole(self.splits.test)

    def done(
        self, rows: Iterable[Result], metrics: Iterable[str]
    ) -> dict[str, list[Result]]:
        """Digest -> its part of a run's `rows`, for the checkpoints that have all `metrics`."""
        mine = (self.task, self.dataset.name, self.protocol.name, self.seed)
        by_digest: dict[str, list[Result]] = {c.digest: [] for c in self.checkpoints}
        for row in rows:
            same = (row.task, row.dataset, row.protocol, row.seed) == mine
            if same and row.checkpoint in by_digest:
                by_digest[row.checkpoint].append(row)
        wanted, complete = set(metrics), {}
        for digest, own in by_digest.items():
            if wanted <= {row.metric for row in own}:
                complete[digest] = own
        return complete


def identity_of(tasks: Sequence[Assignment[Protocol]]) -> dict[str, object]:
    """All that decides a run's numbers. Several protocols give several recipes; others give one."""
    recipes: list[dict[str, object]] = []
    digests: list[str] = []
    for task in tasks:
        recipe = config.to_dict(task.protocol)
        if recipe not in recipes:
            recipes.append(recipe)
        digests += [c.digest for c in task.checkpoints]
    # Only where heads are used: runs without any are the same as before
    heads = {
        digest: head.digest for task in tasks for digest, head in task.found.items()
    }
    return {
        **({"heads": heads} if heads else {}),
        "recipe": recipes[0] if len(recipes) == 1 else recipes,
        "checkpoints": list(dict.fromkeys(digests)),
        "datasets": {task.dataset.name: task.hashes for task in tasks},
        "seed": tasks[0].seed,
        contents.KEY: {
            t.dataset.name: contents.of_splits(t.splits.items()) for t in tasks
        },
    }


def recorded(run: Path) -> list[Result]:
    """The rows that RUN has already; lines that cannot be read are left out."""
    file = run / RESULTS_FILE
    if not file.exists():
        return []
    return [row for row in store.read_file(file) if isinstance(row, Result)]


@dataclass(frozen=True, kw_only=True)
class CheckpointPredictions:
    """The classes that one checkpoint predicts for the test images."""

    checkpoint: Checkpoint
    ranking: Tensor  # (N, up to 5): the best classes, best first; -1 for none
    chosen: Mapping[str, object] | None = None
    provenance: Mapping[str, object] = field(default_factory=dict)
    suffix: str = ""  # of the metric, where one protocol gives several: _k20


def rank_classes(logits: Tensor) -> Tensor:
    """(N, C) -> the five best classes (N, min(5, C)); -1 where a head has diverged."""
    # nan would rank before every number, and a diverged head would seem to have an opinion.
    ranking = logits.topk(min(5, logits.shape[1]), dim=1).indices.cpu()
    broken = ~torch.isfinite(logits).all(1).cpu()
    ranking[broken] = -1
    return ranking


# Metrics: predictions (N,) and labels (N,) -> percent


def per_class(
    prediction: NDArray[np.integer], label: NDArray[np.integer], classes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of right images and of all images of each class, (classes,) each."""
    total = np.bincount(label, minlength=classes)
    right = np.bincount(label[prediction == label], minlength=classes)
    return right.astype(np.int64), total.astype(np.int64)


def score(
    metric: str,
    prediction: NDArray[np.integer],
    label: NDArray[np.integer],
    classes: int,
) -> float:
    """`top1`, or `mean_per_class` over the classes that have test images."""
    if metric == "top1":
        return 100.0 * float((prediction == label).mean())
    right, total = per_class(prediction, label, classes)
    there = total > 0
    return 100.0 * float((right[there] / total[there]).mean())


def confusion(
    prediction: NDArray[np.integer], label: NDArray[np.integer], classes: int
) -> NDArray[np.int64]:
    """Counts (classes, classes) of true by predicted class; predictions of no class are left out."""
    inside = (prediction >= 0) & (prediction < classes)
    # The pair (true, predicted) as one number, so that one count over images fills the matrix.
    pairs = label[inside] * classes + prediction[inside]
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


# Rows, and the files beside them


def write(
    task: Assignment[Protocol], measured: Sequence[CheckpointPredictions]
) -> list[Result]:
    """Append a row per metric and checkpoint, with predictions and pictures beside them."""
    label = np.asarray(task.splits.test.labels, dtype=np.int64)
    names, metrics = task.splits.test.classes, task.dataset.metrics
    rows: list[Result] = []
    for one in measured:
        # 1. Which images are right, by the best class and by the five best.
        ranking = one.ranking.numpy().astype(np.int64)
        prediction = ranking[:, 0]
        hits, hits5 = prediction == label, (ranking == label[:, None]).any(1)
        # 2. What is kept beside the rows: predictions, so that checkpoints can be compared image by
        #    image, the classes' accuracies, and a picture of the confusion.
        arrays = {"prediction": prediction, "label": label}
        if "top5" in metrics:
            arrays["hits5"] = hits5
        table = per_class_table(prediction, label, names)
        title = f"{one.checkpoint.name}: {task.task} on {task.dataset.name}"
        picture = confusion_picture(
            confusion(prediction, label, len(names)), names, title
        )
        stem = task.stem(one.checkpoint, one.suffix)
        kept = {
            "predictions": f"{PREDICTIONS}/{stem}.npz",
            "per_class": f"per_class/{stem}.csv",
            "confusion": f"confusion/{stem}.png",
        }
        # 3. Each metric with its interval becomes a row.
        for metric in metrics:
            if metric == "top5":
                value, ci95 = 100.0 * float(hits5.mean()), confidence.of_hits(hits5)
            else:
                value = score(metric, prediction, label, len(names))
                ci95 = confidence.of_hits(
                    hits, label if metric == "mean_per_class" else None
                )
            rows += [
                row(
                    task,
                    one.checkpoint,
                    metric=metric + one.suffix,
                    value=value,
                    ci95=ci95,
                    chosen=one.chosen,
                    provenance={**kept, **one.provenance},
                )
            ]
        # 4. The files. The rows come last: a run that was killed before makes all of it again.
        atomic.write_text(task.run / kept["per_class"], table)
        atomic.write_bytes(task.run / kept["confusion"], picture)
        store.keep_predictions(task.run, stem, manifest=task.hashes["test"], **arrays)
    store.append(task.run, rows, skip_known=True)
    return rows


def write_plain(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    values: Mapping[str, tuple[float, Mapping[str, object]]],
    arrays: Mapping[str, NDArray[np.generic]],
    *,
    ci95: tuple[float, float] | None = None,
    chosen: Mapping[str, object] | None = None,
) -> list[Result]:
    """Append a row for each metric of a checkpoint, from its value and its provenance; keep
    `arrays` and the test images' labels beside the rows."""
    label, manifest = np.asarray(task.splits.test.labels), task.hashes["test"]
    stem = task.stem(checkpoint)
    kept = store.keep_predictions(
        task.run, stem, manifest=manifest, label=label, **arrays
    )
    rows = []
    for metric, (value, facts) in values.items():
        about = {"predictions": kept, **facts}
        one = row(
            task,
            checkpoint,
            metric=metric,
            value=value,
            ci95=ci95,
            chosen=chosen,
            provenance=about,
        )
        rows.append(one)
    store.append(task.run, rows, skip_known=True)
    return rows


def keep_said(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    head: KeptHead | str,
    scores: Scores | None,
) -> dict[str, str]:
    """Write the scores of a head, or of a classifier of this digest, on the test images; return
    what the rows say of both."""
    about = {"head_sha256": head if isinstance(head, str) else head.digest}
    if isinstance(head, KeptHead) and head.temperature_from is not None:
        about["temperature_from"] = head.temperature_from
    if scores is not None:
        about["scores"] = keep_scores(
            task, checkpoint, about["head_sha256"], scores, "test"
        )
    return about


def keep_scores(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    head: str,
    scores: Scores,
    split: str,
) -> str:
    """Write the scores that the head of a digest gives a split; return their path in the run."""
    return kept_scores.keep(
        task.run,
        task.stem(checkpoint) + ("" if split == "test" else f"-{split}"),
        scores,
        manifest=task.hashes[split],
        checkpoint=checkpoint.digest,
        head=head,
        protocol=print_of(task.task, task.protocol, None),
    )


def print_of(task: str, protocol: Protocol, chosen_on: object) -> str:
    """The protocol's name, with its fingerprint where it is not the shipped one of that name."""
    recipe = config.to_dict(protocol)
    other = protocol_fingerprints.of_recipe(task, protocol.name, recipe, chosen_on)
    return protocol.name if other is None else f"{protocol.name}~{other}"


def bound_to(
    checkpoint: Checkpoint,
    protocol: str,
    reads: Protocol,
    classes: Sequence[str],
    seed: int,
) -> dict[str, object]:
    """Return all that a head is bound to: a checkpoint, a protocol's fingerprint, how features are
    read, the classes, and the seed of its training."""
    return {
        "seed": seed,
        "checkpoint": checkpoint.digest,
        "trunk": checkpoint.trunk,
        "protocol": protocol,
        "geometry": config.to_dict(reads.geometry),
        "precision": reads.precision,
        "space": reads.space,
        "classes": kept_heads.classes_digest(classes),
    }


def keep_trained(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    head: KeptHead,
    scores: Scores | None,
    chosen: Mapping[str, object],
) -> dict[str, str]:
    """Add a trained head to RUN/heads.safetensors unless diverged; the rest is `keep_said`'s."""
    if scores is not None:
        protocol = print_of(task.task, task.protocol, chosen.get("on"))
        place = f"s{task.seed}-{checkpoint.digest[:12]}"
        name = "/".join(
            (task.task, task.dataset.name, checkpoint.trunk, protocol, place)
        )
        classes, seed = task.splits.train.classes, task.seed
        bound = bound_to(checkpoint, protocol, task.protocol, classes, seed)
        about = {**bound, "lists": task.hashes, "chosen": dict(chosen)}
        kept_heads.keep(task.run / HEADS_FILE, name, head, about)
    return keep_said(task, checkpoint, head, scores)


def per_class_table(
    prediction: NDArray[np.int64], label: NDArray[np.int64], names: Sequence[str]
) -> str:
    """A csv: each class with its images, how many are right, and the share in percent."""
    right, total = per_class(prediction, label, len(names))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("class", "images", "right", "accuracy"))
    for name, good, count in zip(names, right.tolist(), total.tolist()):
        accuracy = f"{100 * good / count:.2f}" if count else ""
        table.writerow((printable.spreadsheet(name), count, good, accuracy))
    return text.getvalue()


def confusion_picture(
    matrix: NDArray[np.int64], names: Sequence[str], title: str
) -> bytes:
    """Draw row-normalised confusion as png, with names up to 60 classes and counts up to 20."""
    # Pillow draws it in milliseconds, where matplotlib took half of a cached evaluation.
    import cv2
    from PIL import Image, ImageDraw, ImageFont

    count = len(matrix)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    colors = cv2.applyColorMap((255 * shares).astype(np.uint8), cv2.COLORMAP_VIRIDIS)
    side = max(1, min(48, 800 // count))  # pixels of a cell
    cells = Image.fromarray(colors[..., ::-1]).resize((side * count, side * count), 0)
    font = ImageFont.load_default(11)
    left, top = (130, 30) if count <= 60 else (20, 30)
    picture = Image.new(
        "RGB", (max(left + cells.width, 420) + 10, top + cells.height + left), "white"
    )
    picture.paste(cells, (left, top))
    draw = ImageDraw.Draw(picture)
    draw.text(
        (left, 8), f"{title}; rows: true class, columns: predicted class", "black", font
    )
    if count <= 60:
        labels = Image.new("RGB", (left - 6, side * count), "white")
        for row, name in enumerate(names):
            middle = (labels.width, int(side * (row + 0.5)))
            ImageDraw.Draw(labels).text(middle, name[:18], "black", font, anchor="rm")
        picture.paste(labels, (0, top))
        picture.paste(labels.rotate(90, expand=True), (left, top + cells.height + 6))
    if count <= 20:
        for true, predicted in zip(*matrix.nonzero()):
            middle = (
                left + int(side * (predicted + 0.5)),
                top + int(side * (true + 0.5)),
            )
            # viridis is bright where shares are high
            color = "black" if shares[true, predicted] > 0.6 else "white"
            draw.text(middle, str(matrix[true, predicted]), color, font, anchor="mm")
    png = io.BytesIO()
    picture.save(png, "PNG")
    return png.getvalue()


def row(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    *,
    metric: str,
    value: float,
    ci95: tuple[float, float] | None,
    chosen: Mapping[str, object] | None,
    provenance: Mapping[str, object],
    split: str = "test",
) -> Result:
    """One number of a checkpoint, with all that is needed to repeat it."""
    # How fast the trunk was while the number was made; unknown if its features were cached
    speed = clock.rate(checkpoint.digest)
    origin: Origin = {} if speed is None else {"images_per_second": speed}
    trunk = trunk_facts.facts(checkpoint, task.protocol.geometry.crop)
    return Result(
        checkpoint=checkpoint.digest,
        name=checkpoint.name,
        method=checkpoint.method,
        arch=checkpoint.trunk,
        epochs=checkpoint.epochs,
        task=task.task,
        dataset=task.dataset.name,
        split=split,
        metric=metric,
        value=value,
        ci95=ci95,
        protocol=task.protocol.name,
        seed=task.seed,
        chosen=chosen,
        provenance={
            **fast.of_trunk(checkpoint.provenance),
            "recipe": config.to_dict(task.protocol),
            "manifests": task.hashes,
            "images": {name: len(images) for name, images in task.splits.items()},
            "labelled": task.splits.labelled,
            "val": "held out of train" if task.splits.held_out else "official",
            contents.KEY: task.test_contents,
            "notes": list(task.splits.notes),
            **containers.provenance(task.splits.items()),
            "trunk": trunk,
            "pixels": {
                **dataclasses.asdict(checkpoint.pixels),
                "from": checkpoint.provenance.get(PIXELS_FROM, "the checkpoint"),
            },
            **provenance,
        },
        origin=origin,
    )


def show(rows: Iterable[Result]) -> None:
    """Print one line per number on standard output."""
    for r in rows:
        value = "undefined" if r.value is None else f"{r.value:6.2f}%"
        interval = f" [{r.ci95[0]:.2f}, {r.ci95[1]:.2f}]" if r.ci95 else ""
        # The learning rate, penalty or neighbours, and the split that chose
        choice, chosen = "", r.chosen or {}
        for name in ("lr", "l2", "k"):
            if chosen.get(name) is not None:
                on = f" chosen on {chosen['on']}" if chosen.get("on") else ""
                choice = f"  {name} {chosen[name]:g}{on}"
        print(
            f"{r.name:<16} {r.task:<10} {r.dataset:<12} {r.metric:<16} {value}{interval} "
            f" {r.protocol}{choice}"
        )


# Choices


def best_of(scores: Sequence[float]) -> int:
    """Return the index of the best score; a tie goes to the smallest rate or strongest penalty."""
    return max(range(len(scores)), key=lambda i: scores[i])


def warn_edge(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    what: str,
    best: float,
    grid: Sequence[float],
) -> bool:
    """Warn if the best value is the first or last of its grid, as a better one may lie outside."""
    edge = len(grid) > 1 and best in (min(grid), max(grid))
    if edge:
        which = "largest" if best == max(grid) else "smallest"
        log.warning(
            f"{checkpoint.name} on {task.dataset.name}: the best {what} {best:g} is the {which} of"
            " the grid; a better one may lie outside it"
        )
    return edge
