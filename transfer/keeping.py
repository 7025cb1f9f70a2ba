"""Keeps what is measured: the rows of a run, and the files beside them (predictions, scores, heads).
`write` makes the rows of finetuning and of all probes that predict one class per image."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from backbench.containers.provenance import container_provenance
from backbench.images import contents
from backbench.recipes import config, fast
from backbench.records import (
    kept_scores,
    label_tables,
    predictions,
    protocol_fingerprints,
    store,
)
from backbench.records.data_manifests import OF_THE_SEED, PATH_ORDER
from backbench.records.store import Origin, Result
from backbench.runs import atomic
from backbench.runs.folder import HEADS_FILE, PREDICTIONS, RESULTS_FILE
from backbench.runs.forward_clock import clock
from backbench.transfer import drawing, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.head_scores import Scores
from backbench.transfer.protocol import Geometry, Protocol
from backbench.weights import kept_heads, trunk_facts
from backbench.weights.checkpoint import PIXELS_FROM, Checkpoint
from backbench.weights.kept_heads import KeptHead
from backbench.weights.own_size import own_size

# Rows


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
    """Make one number of a checkpoint, in percent, into a row with all that repeats it."""
    # How fast the trunk was while the number was made; unknown if its features were cached.
    speed = clock.rate(checkpoint.digest)
    origin: Origin = {} if speed is None else {"images_per_second": speed}
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
            **({"labelled_from": OF_THE_SEED} if task.splits.drawn_labels else {}),
            "val": "held out of train" if task.splits.held_out else "official",
            contents.KEY: task.test_contents,
            **({PATH_ORDER: task.path_order} if task.path_order else {}),
            "notes": list(task.splits.notes),
            **container_provenance(task.splits.items()),
            "trunk": trunk_facts.facts(checkpoint, task.geometry.crop),
            "pixels": {
                **dataclasses.asdict(checkpoint.pixels),
                "from": checkpoint.provenance.get(PIXELS_FROM, "the checkpoint"),
            },
            "size": size_facts(checkpoint, task.geometry.crop),
            **provenance,
        },
        origin=origin,
    )


def recorded(run: Path) -> list[Result]:
    """Return the rows that RUN has already; lines that cannot be read are left out."""
    file = run / RESULTS_FILE
    if not file.exists():
        return []
    return [row for row in store.read_file(file) if isinstance(row, Result)]


def show(rows: Iterable[Result]) -> None:
    """Print one line per number on standard output."""
    for r in rows:
        value = "undefined" if r.value is None else f"{r.value:6.2f}%"
        interval = f" [{r.ci95[0]:.2f}, {r.ci95[1]:.2f}]" if r.ci95 else ""
        # A row has at most one of these: its learning rate, its penalty, its neighbours.
        chosen = r.chosen or {}
        choice = ""
        for name in ("lr", "l2", "k"):
            if chosen.get(name) is not None:
                choice = f"  {name} {chosen[name]:g}"
                if chosen.get("on"):
                    choice += f" chosen on {chosen['on']}"
        if "reading" in chosen:
            choice = f"  {chosen['reading']}{choice}"
        print(
            f"{r.name:<16} {r.task:<10} {r.dataset:<12} {r.metric:<16} {value}{interval} "
            f" {r.protocol}{choice}"
        )


# Rows with their predictions


@dataclass(frozen=True, kw_only=True)
class CheckpointPredictions:
    """The classes that one checkpoint predicts for the test images."""

    checkpoint: Checkpoint
    ranking: Tensor  # (N, up to 5): the best classes, best first; -1 for none
    chosen: Mapping[str, object] | None = None
    provenance: Mapping[str, object] = field(default_factory=dict)
    suffix: str = ""  # of the metric, where one protocol gives several: _k20


def write(
    task: Assignment[Protocol], measured: Sequence[CheckpointPredictions]
) -> list[Result]:
    """Append a row per metric and checkpoint, with predictions and pictures beside them."""
    label = np.asarray(task.splits.test.labels, dtype=np.int64)
    names = task.splits.test.classes
    metrics = task.dataset.metrics
    rows: list[Result] = []
    for one in measured:
        ranking = one.ranking.numpy().astype(np.int64)
        prediction = ranking[:, 0]
        # 1. What is kept beside the rows: predictions, so that checkpoints can be compared image by
        #    image, the classes' accuracies, and a picture of the confusion.
        arrays = {"prediction": prediction, "label": label}
        if "top5" in metrics:
            arrays["hits5"] = (ranking == label[:, None]).any(1)
        table = drawing.per_class_table(prediction, label, names)
        picture = drawing.confusion_picture(
            scoring.confusion(prediction, label, len(names)),
            names,
            f"{one.checkpoint.name}: {task.task} on {task.dataset.name}",
        )
        stem = task.stem(one.checkpoint, one.suffix)
        kept = {
            "predictions": f"{PREDICTIONS}/{stem}.npz",
            "per_class": f"per_class/{stem}.csv",
            "confusion": f"confusion/{stem}.png",
        }
        # 2. Each metric with its interval becomes a row.
        for metric in metrics:
            value, ci95 = scoring.score_ranking(metric, ranking, label, len(names))
            of_metric = row(
                task,
                one.checkpoint,
                metric=metric + one.suffix,
                value=value,
                ci95=ci95,
                chosen=one.chosen,
                provenance={**kept, **one.provenance},
            )
            rows.append(of_metric)
        # 3. The files. The rows come last: a run that was killed before makes all of it again.
        atomic.write_text(task.run / kept["per_class"], table)
        atomic.write_bytes(task.run / kept["confusion"], picture)
        predictions.keep(task.run, stem, manifest=task.hashes["test"], **arrays)
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
    suffix: str = "",
) -> list[Result]:
    """Append a row for each metric of a checkpoint, from its value and its provenance; keep
    `arrays` and the test images' labels beside the rows. `suffix` ends the metrics' names and the
    file's, where one protocol gives several of each."""
    kept = predictions.keep(
        task.run,
        task.stem(checkpoint, suffix),
        manifest=task.hashes["test"],
        label=np.asarray(task.splits.test.labels),
        **arrays,
    )
    rows = []
    for metric, (value, facts) in values.items():
        one = row(
            task,
            checkpoint,
            metric=metric + suffix,
            value=value,
            ci95=ci95,
            chosen=chosen,
            provenance={"predictions": kept, **facts},
        )
        rows.append(one)
    store.append(task.run, rows, skip_known=True)
    return rows


def write_tables(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    arrays: Mapping[str, NDArray[np.generic]],
    chosen: Mapping[str, object],
) -> list[Result]:
    """Keep the tables of scores and classes, and append a row for each metric of images that show
    several classes."""
    kept = predictions.keep(task.run, task.stem(checkpoint), **arrays)
    rows = []
    for metric in label_tables.METRICS:
        value, ci95 = label_tables.value(arrays, metric)
        result = row(
            task,
            checkpoint,
            metric=metric,
            value=value,
            ci95=ci95,
            chosen=chosen,
            provenance={"predictions": kept},
        )
        rows.append(result)
    store.append(task.run, rows, skip_known=True)
    return rows


# Scores and heads


def keep_scores(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    head: str,
    scores: Scores,
    split: str,
) -> str:
    """Write the scores that the head of a digest gives a split; return their path in the run."""
    stem = task.stem(checkpoint)
    return kept_scores.keep(
        task.run,
        stem if split == "test" else f"{stem}-{split}",
        scores,
        manifest=task.hashes[split],
        checkpoint=checkpoint.digest,
        head=head,
        protocol=print_of(task.task, task.protocol, None),
    )


def keep_said(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    head: KeptHead | str,
    scores: Scores | None,
) -> dict[str, str]:
    """Write the scores that a head gives the test images, unless it has diverged; return what the
    rows say of the head and the scores. A classifier that is not kept is given by its digest."""
    if isinstance(head, str):
        about = {"head_sha256": head}
    else:
        about = {"head_sha256": head.digest}
        if head.temperature_from is not None:
            about["temperature_from"] = head.temperature_from
    if scores is not None:
        about["scores"] = keep_scores(
            task, checkpoint, about["head_sha256"], scores, "test"
        )
    return about


def keep_trained(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    head: KeptHead,
    scores: Scores | None,
    chosen: Mapping[str, object],
) -> dict[str, str]:
    """Add a trained head to RUN/heads.safetensors, and write its scores; neither if it has
    diverged, which `scores` None means. Return what the rows say of both."""
    if scores is not None:
        protocol = print_of(task.task, task.protocol, chosen.get("on"))
        place = f"s{task.seed}-{checkpoint.digest[:12]}"
        name = "/".join(
            (task.task, task.dataset.name, checkpoint.trunk, protocol, place)
        )
        bound = bound_to(
            checkpoint,
            protocol,
            reads=task.protocol,
            geometry=task.geometry,
            classes=task.splits.train.classes,
            seed=task.seed,
        )
        about = {**bound, "lists": task.hashes, "chosen": dict(chosen)}
        kept_heads.keep(task.run / HEADS_FILE, name, head, about)
    return keep_said(task, checkpoint, head, scores)


def print_of(task: str, protocol: Protocol, chosen_on: object) -> str:
    """Return the protocol's name, with its fingerprint where it is not the shipped one of that
    name. `chosen_on` is the split that chose hyper-parameters."""
    recipe = config.to_dict(protocol)
    other = protocol_fingerprints.of_recipe(task, protocol.name, recipe, chosen_on)
    return protocol.name if other is None else f"{protocol.name}~{other}"


def size_facts(checkpoint: Checkpoint, measured: int) -> dict[str, object]:
    """Return the side of the images that were read, in pixels, and the one of the training."""
    own = own_size(checkpoint)
    return {
        "measured": measured,
        "trained": own.pixels if own.known else None,
        "from": own.source,
    }


def bound_to(
    checkpoint: Checkpoint,
    protocol: str,
    *,
    reads: Protocol,
    geometry: Geometry,
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
        "geometry": config.to_dict(geometry),
        "precision": reads.precision,
        "space": reads.space,
        "classes": kept_heads.classes_digest(classes),
    }
