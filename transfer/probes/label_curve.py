"""The label curve fits the logistic regression of the few-label probe on 1, 2, 5, ... and on all
labels of each class. A row is one point of the curve, the mean over its draws. Draws are nested (the
draw of five labels holds that of two) and the same for all trunks, so that two curves can be compared
draw by draw: `records/label_curve.py` says how many labels one trunk needs to do as well as another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from backbench.datasets import splits
from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList
from backbench.records import label_curve
from backbench.records.label_curve import ALL
from backbench.records.store import Result
from backbench.requests.bounds import Count, Repeats
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.stats import confidence
from backbench.transfer import keeping, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor, FeatureRows
from backbench.transfer.probes import fewshot
from backbench.transfer.probes.fewshot import DrawnLabels
from backbench.transfer.probes.kind import Probe
from backbench.weights.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class LabelCurve(DrawnLabels):
    """The points of the curve, in labels per class; one with all labels follows them."""

    labels: Annotated[tuple[Count, ...], Field(min_length=1)] = (
        1,
        2,
        5,
        10,
        20,
        50,
        100,
        200,
        500,
    )
    draws: Repeats = 10

    def __post_init__(self) -> None:
        if list(self.labels) != sorted(set(self.labels)):
            raise ValueError(f"labels must grow from point to point, not {self.labels}")

    @property
    def points(self) -> list[int | None]:
        """The numbers of labels per class, and ALL."""
        return [*self.labels, ALL]


def refuse(p: LabelCurve, name: str, found: Splits) -> None:
    """Raise BadInput if a class has fewer images than a point of the curve."""
    by_class = splits.ranked(found.both(), 0)
    smallest = min(by_class, key=lambda label: len(by_class[label]))
    fewest = len(by_class[smallest])
    if p.labels[-1] > fewest:
        possible = [str(k) for k in p.labels if k <= fewest] or ["1"]
        raise BadInput(
            f"{name}: labels = {p.labels[-1]} of each class, and"
            f" '{found.train.classes[smallest]}' has {fewest} images;"
            f" write --protocol label_curve labels={','.join(possible)}"
        )


def measure(
    task: Assignment[LabelCurve],
    extractor: Extractor,
    machine: Machine,
    stop: StopFlag,
) -> list[Result]:
    p = task.protocol
    features = extractor.of_splits(task.splits, task.dataset.name)
    both = task.splits.both()  # train and val: the images whose labels are drawn
    drawn = nested_draws(both, p, task.seed)
    fits = sum(len(draws) for draws in drawn.values()) * len(extractor.trunks)
    progress = Progress(task.run, fits, f"{task.dataset.name} curve", unit="fit")
    rows = []
    # `features` are of train, of val and of test, each with a tensor for each trunk
    for trunk, train, val, test in zip(extractor.trunks, *features):
        bank = FeatureRows((train, val))
        for labels, draws in drawn.items():
            predicted, gradient = fewshot.predictions(
                bank,
                both.labels,
                test,
                draws,
                classes=len(both.classes),
                p=p,
                stop=stop,
            )
            progress.advance(len(draws))
            chosen = None
            if gradient > p.tolerance:
                chosen = {"converged": False, "gradient": gradient}
            rows += write_point(task, trunk.checkpoint, labels, predicted, chosen)
    return rows


def write_point(
    task: Assignment[LabelCurve],
    checkpoint: Checkpoint,
    labels: int | None,
    predicted: NDArray[np.int64],
    chosen: Mapping[str, object] | None,
) -> list[Result]:
    """Append the row of a point from the classes (D, N) that its draws predict."""
    metric = task.dataset.metric
    classes = len(task.splits.test.classes)
    label = np.asarray(task.splits.test.labels)
    by_class = label if metric == "mean_per_class" else None
    values = [scoring.score(metric, one, label, classes) for one in predicted]
    images = len(task.splits.train) + len(task.splits.val)
    about: dict[str, object] = {
        # Classes of unlike sizes have so many labels in the mean
        label_curve.LABELS: labels or images / classes,
        "labelled_from": "train+val",
    }
    arrays = {"prediction": predicted.astype(np.int32)}
    if labels is ALL:
        # One fit, and so its interval is over test images
        arrays = {"prediction": arrays["prediction"][0]}
    else:
        about["draws"] = values
        arrays["values"] = np.asarray(values)
    return keeping.write_plain(
        task,
        checkpoint,
        {metric: (float(np.mean(values)), about)},
        arrays,
        ci95=confidence.of_draws(predicted == label, by_class),
        chosen=chosen,
        suffix=label_curve.suffix(labels),
    )


def nested_draws(
    images: ImageList, p: LabelCurve, seed: int
) -> dict[int | None, list[list[int]]]:
    """Return the indices of each draw at each point. All labels have one draw, which is no chance."""
    drawn: dict[int | None, list[list[int]]] = {labels: [] for labels in p.labels}
    for draw in range(p.draws):
        # The first k of a class: so each draw holds those of fewer labels
        by_class = splits.ranked(images, fewshot.seed_of_draw(seed, draw))
        for labels in p.labels:
            chosen: list[int] = []
            for indices in by_class.values():
                chosen += indices[:labels]
            drawn[labels].append(sorted(chosen))
    drawn[ALL] = [list(range(len(images)))]
    return drawn


def metrics(p: LabelCurve, dataset: Dataset) -> list[str]:
    """List a metric for each point: top1_labels1, top1_labels2, ..., top1_labels_all."""
    return [dataset.metric + label_curve.suffix(labels) for labels in p.points]


def work(p: LabelCurve, name: str, found: Splits, count: int) -> dict[str, int]:
    """Return the number of images, and of the fits of the curves of `count` checkpoints."""
    images = sum(len(part) for _, part in found.items())
    return {"image": images, "fit": (len(p.labels) * p.draws + 1) * count}


PROBE = Probe(
    protocol=LabelCurve,
    measure=measure,
    metrics=metrics,
    refuse=refuse,
    words=lambda p: (
        f"{', '.join(map(str, p.labels))} and all labels per class, {p.draws} draws"
    ),
    work=work,
    sayings=label_curve.sayings,
)
