"""The classic reading of VOC 2007: a linear SVM for each class against all others, scored by mean
average precision.

LIBLINEAR fits the heads, by scikit-learn, on features of unit length. Each class has a cost of its own,
chosen by cross-validation within train + val: val chooses nothing by itself."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from pydantic import Field

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.multilabel import PRESENT, MultiLabelList
from backbench.records import label_tables
from backbench.records.store import Result
from backbench.requests.bounds import Count, Positive
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.transfer import keeping, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.probes import multilabel
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Protocol

if TYPE_CHECKING:
    from sklearn.svm import LinearSVC

# Added to a feature's length before it is divided by it, as VISSL does
_LENGTH = 1e-5


@dataclass(frozen=True, kw_only=True)
class Svm(Protocol):
    """Linear SVMs with squared hinge loss and penalty |w|^2, the intercept penalised like a weight.

    An image that shows a class weighs `positive_weight` in that class's fit. One whose objects of
    the class are all difficult trains like one without the class, and is not scored for it."""

    costs: Annotated[tuple[Positive, ...], Field(min_length=1)]
    folds: Annotated[int, Field(ge=2, le=100)] = 3
    positive_weight: Positive = 2.0
    max_iterations: Count = 2000
    tolerance: Positive = 1e-4

    def head_at(self, cost: float) -> "LinearSVC":
        """Return a head that is not fitted yet."""
        from sklearn.svm import LinearSVC

        return LinearSVC(
            C=cost,
            class_weight={True: self.positive_weight, False: 1.0},
            tol=self.tolerance,
            max_iter=self.max_iterations,
            # LIBLINEAR visits the images in a random order; this one is the same in every run
            random_state=0,
        )


class ClassHead(NamedTuple):
    """What became of one class of one checkpoint."""

    cost: float | None  # None: no image, or every image of train + val shows the class
    fold_ap: float  # of that cost, the mean over the folds
    scores: np.ndarray  # (N,): how surely each test image shows it
    converged: bool

    def state(self) -> dict[str, object]:
        """Return it as plain values and a tensor: a state file holds nothing else."""
        return {**self._asdict(), "scores": torch.from_numpy(self.scores)}

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> "ClassHead":
        """Make the head again of what `state` returned."""
        return ClassHead(**{**state, "scores": state["scores"].numpy()})


def refuse(p: Svm, name: str, found: Splits) -> None:
    """Raise BadInput where no class can be told apart, or one is too rare for the folds."""
    multilabel.refuse(p, name, found)
    table = np.concatenate([_table(found.train), _table(found.val)])
    for label, shown in enumerate((table == PRESENT).sum(0).tolist()):
        others = len(table) - shown
        # Each fold's test part needs an image that shows the class, and each fold's training part
        # one that does not
        if 0 < shown < p.folds or others == 1:
            raise BadInput(
                f"{name}: class '{found.train.classes[label]}' is shown by {shown} of {len(table)}"
                f" images of train and val, and {p.folds} folds need {p.folds} that show it and"
                " 2 others; take --protocol multilabel"
            )


def _table(part: object) -> np.ndarray:
    return cast(MultiLabelList, part).table()


def measure(
    task: Assignment[Svm], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    p = task.protocol
    features = extractor.of_splits(task.splits, task.dataset.name)
    of_train, of_val, of_test = (_table(part) for _, part in task.splits.items())
    shown = np.concatenate([of_train, of_val]) == PRESENT
    # Digest of the trunk -> the states of its heads so far. A stopped run goes on behind the last
    # class that it saved
    state = load_state(task.state_file) if task.state_file.exists() else {}
    rows = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        x = _unit_length(np.concatenate([train.numpy(), val.numpy()]))
        of = _unit_length(test.numpy())
        saved: list[dict[str, object]] = state.setdefault(trunk.digest, [])
        heads = [ClassHead.of_state(each) for each in saved]
        progress = Progress(
            task.run,
            shown.shape[1] * _fits(p),
            f"{trunk.checkpoint.name} heads of {task.dataset.name}",
            unit="fit",
            done=len(heads) * _fits(p),
        )
        # 1. The cost of each class, its head, and the one look at test
        for label in range(len(heads), shown.shape[1]):
            heads.append(_head(p, x, shown[:, label], of, stop))
            saved.append(heads[-1].state())
            save_state(task.state_file, dict(state))
            progress.advance(_fits(p), fold_ap=heads[-1].fold_ap)
        # 2. The rows
        scores = np.stack([head.scores for head in heads], 1)
        arrays = label_tables.kept(scores, of_test, task.hashes["test"])
        chosen = _chosen(task, heads)
        if not chosen["converged"]:
            log.warning(
                f"{trunk.checkpoint.name} on {task.dataset.name}: not converged within"
                f" {p.max_iterations} iterations; the row says so and never leads;"
                f" `backbench linear ... --protocol {p.recipe}"
                f" max_iterations={10 * p.max_iterations}` may help"
            )
        rows += keeping.write_tables(task, trunk.checkpoint, arrays, chosen)
    return rows


def _head(
    p: Svm, x: np.ndarray, shown: np.ndarray, of: np.ndarray, stop: StopFlag
) -> ClassHead:
    """Choose the cost of a class by cross-validation on all labelled features (N, d), fit that
    again on all of them, and score the features `of` the test images."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import cross_val_score

    if shown.all() or not shown.any():
        return ClassHead(None, float("nan"), np.zeros(len(of)), converged=True)
    with warnings.catch_warnings():
        # Of costs that are not chosen it tells nothing; the row says it of the chosen one
        warnings.simplefilter("ignore", ConvergenceWarning)
        # A fold in which all images show the class has the same AP at every cost
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        fold_aps = []
        for cost in p.costs:
            stop.end_here("within a class, which will begin again")
            of_folds = cross_val_score(
                p.head_at(cost), x, shown, cv=p.folds, scoring="average_precision"
            )
            fold_aps.append(float(of_folds.mean()))
        best = scoring.best_of(fold_aps)
        head = p.head_at(p.costs[best]).fit(x, shown)
    return ClassHead(
        cost=p.costs[best],
        fold_ap=100 * fold_aps[best],
        scores=head.decision_function(of),
        converged=bool(head.n_iter_ < p.max_iterations),
    )


def _unit_length(features: np.ndarray) -> np.ndarray:
    """Return (N, d) in double precision, each of length 1."""
    x = features.astype(np.float64)
    return x / (np.linalg.norm(x, axis=1, keepdims=True) + _LENGTH)


def _chosen(task: Assignment[Svm], heads: list[ClassHead]) -> dict[str, object]:
    """Say the cost of each class, and how it was chosen."""
    costs = {}
    for name, head in zip(task.splits.train.classes, heads, strict=True):
        if head.cost is not None:
            costs[name] = head.cost
    fitted = [head for head in heads if head.cost is not None]
    return {
        "costs": costs,
        "on": f"{task.protocol.folds} folds of train+val",
        "trained_on": "train+val",
        "fold_map": float(np.mean([head.fold_ap for head in fitted])),
        "converged": all(head.converged for head in fitted),
    }


def _fits(p: Svm) -> int:
    """Return the number of fits of a class."""
    return len(p.costs) * p.folds + 1


def work(p: Svm, name: str, found: Splits, count: int) -> dict[str, int]:
    """Return the number of images, and of the fits of all classes of `count` checkpoints."""
    images = sum(len(part) for _, part in found.items())
    return {"image": images, "fit": _fits(p) * len(found.train.classes) * count}


PROBE = Probe(
    protocol=Svm,
    measure=measure,
    refuse=refuse,
    words=lambda p: (
        f"an SVM of each class against all others, best of {len(p.costs)} costs by"
        f" {p.folds} folds"
    ),
    work=work,
    multilabel=True,
)
