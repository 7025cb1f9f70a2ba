"""The SGD probe: linear heads on a frozen trunk, all rates in one pass, the best scored on test.

A protocol decides by its rates and its `select` in which of three ways a head is found:

    one rate             it trains on train + val
    a grid, select val   every rate trains on train, val chooses one, which trains again on
                         train + val
    a grid, select test  every rate trains on train + val, and the best on test is reported: what
                         some papers did, comparable with nothing else, and only under a protocol
                         of that name

Where `patience` stops a training early, val is what it watches, so val trains nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backbench.datasets.row import Dataset
from backbench.results.store import Result
from backbench.runs import atomic
from backbench.runs.folder import STATES
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log
from backbench.stats import confidence
from transfer import metrics, scoring
from transfer.devices import Machine
from transfer.feature_rows import FeatureRows
from transfer.features import Extractor
from transfer.frozen import FrozenTrunk
from transfer.heads import AdamHeads, LinearHeads
from transfer.probe_kind import Probe
from transfer.probe_training import ProbeTraining, Watched
from transfer.protocols import Sgd
from transfer.scoring import Assignment, CheckpointPredictions, best_of

TRAIN_SCORE = "train_top1"  # the metric of `train_score`
ROWS = 8192  # of features whose logits are held at a time


@dataclass(frozen=True)
class FinalHead:
    """What a way of training ends with: one head of `heads`, and how its rate was found."""

    heads: LinearHeads
    place: int  # of the head among them
    lr: float  # as declared
    scores: list[float] | None = None  # of every rate, where one was chosen


def measure(
    task: Assignment[Sgd], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    """The rows of all trunks, on rank 0; the other ranks take part until the end, and have none."""
    p, name = task.protocol, task.dataset.name
    probe = SgdProbe(task, extractor, machine, stop)
    if machine.main:
        used = ", ".join(f"{p.used(lr):g}" for lr in p.lr)
        log.info(
            f"{name}: {p.name}: learning rates as used {used}"
            f" (declared for {p.reference_batch} images, times {p.batch_size}/{p.reference_batch})"
        )
    # 1. A head per trunk, in one of the three ways.
    if len(p.lr) == 1:
        finals = probe.one_rate()
    elif p.select == "val":
        finals = probe.chosen_on_val()
    else:
        finals = probe.chosen_on_test()
    # 2. The one look at test, by trunks that are still what they were.
    test = extractor(task.splits.test, f"{name} test features")
    measured = []
    for trunk, final, features in zip(extractor.trunks, finals, test):
        trunk.verify()
        (ranking,) = rankings(final.heads, features, [final.place])
        measured.append(
            CheckpointPredictions(
                checkpoint=trunk.checkpoint,
                ranking=ranking,
                chosen=_chosen(task, trunk, final),
                provenance={"trunk_sha256": trunk.state, "trunk_unchanged": True},
            )
        )
    # Features are computed by all ranks together.
    trained = probe.features(with_val=True) if p.train_score else None
    if not machine.main:
        return []
    # 3. Once the rows are there, what they were chosen by is in them.
    rows = scoring.write(task, measured)
    if trained is not None:
        rows += probe.train_rows(finals, trained)
    probe.choice_file.unlink(missing_ok=True)
    return rows


@dataclass(frozen=True)
class SgdProbe:
    """The three ways; each returns the final head of every trunk."""

    task: Assignment[Sgd]
    extractor: Extractor
    machine: Machine
    stop: StopFlag

    @property
    def choice_file(self) -> Path:
        """Every rate's val score, by digest: a refit that was stopped does not choose again."""
        return self.task.run / STATES / f"{self.task.dataset.name}.chosen.json"

    def one_rate(self) -> list[FinalHead]:
        rates, trunks = self.task.protocol.lr, self.extractor.trunks
        trained = self._train("train", [rates] * len(trunks), with_val=True)
        return [FinalHead(heads, 0, rates[0]) for heads in trained]

    def chosen_on_val(self) -> list[FinalHead]:
        grid, trunks = self.task.protocol.lr, self.extractor.trunks
        # 1. Every rate on train, scored on val. A run that was stopped behind this point left the
        #    scores: it does not choose again.
        scores = self._kept_scores()
        if any(trunk.digest not in scores for trunk in trunks):
            candidates = self._train("select", [grid] * len(trunks), with_val=False)
            scores = self._scores(candidates, "val")
            if self.machine.main:
                atomic.write_json(self.choice_file, scores)
        # 2. Each trunk's best rate again, from the start, on all that may be trained on.
        of_trunks = [scores[trunk.digest] for trunk in trunks]
        chosen = [grid[best_of(of_rates)] for of_rates in of_trunks]
        trained = self._train("refit", [(lr,) for lr in chosen], with_val=True)
        finals = []
        for heads, lr, of_rates in zip(trained, chosen, of_trunks):
            finals.append(FinalHead(heads, 0, lr, of_rates))
        return finals

    def chosen_on_test(self) -> list[FinalHead]:
        grid, trunks = self.task.protocol.lr, self.extractor.trunks
        trained = self._train("train", [grid] * len(trunks), with_val=True)
        scores = self._scores(trained, "test")
        finals = []
        for trunk, heads in zip(trunks, trained):
            best = best_of(scores[trunk.digest])
            finals.append(FinalHead(heads, best, grid[best], scores[trunk.digest]))
        return finals

    def train_rows(
        self, finals: Sequence[FinalHead], trained: Sequence[FeatureRows]
    ) -> list[Result]:
        """Top-1 of each trunk's final head on the images that it was trained on, whose features
        are `trained`; appended to the run's rows."""
        task, splits = self.task, self.task.splits
        label = np.asarray(splits.train.labels + splits.val.labels)
        rows = []
        for trunk, final, features in zip(self.extractor.trunks, finals, trained):
            (ranking,) = rankings(final.heads, features, [final.place])
            right = ranking[:, 0].numpy() == label
            rows.append(
                scoring.row(
                    task,
                    trunk.checkpoint,
                    split="train",
                    metric=TRAIN_SCORE,
                    value=100.0 * float(right.mean()),
                    ci95=confidence.of_hits(right),
                    chosen=_chosen(task, trunk, final),
                    provenance={"trunk_sha256": trunk.state},
                )
            )
        task.keep(rows)
        return rows

    def _train(
        self, phase: str, rates: Sequence[Sequence[float]], *, with_val: bool
    ) -> list[LinearHeads]:
        """Heads of every trunk, one per rate of its `rates` (declared), on train or train + val."""
        task, p, device = self.task, self.task.protocol, self.machine.device
        classes, trunks = len(task.splits.train.classes), self.extractor.trunks
        with_val = with_val and p.patience is None
        images = task.splits.both() if with_val else task.splits.train
        heads, used = [], []
        for trunk, of_trunk in zip(trunks, rates):
            count, std = len(of_trunk), p.init_std
            kind = AdamHeads if p.optimizer == "adam" else LinearHeads
            heads.append(kind(count, classes, trunk.dim, std=std, seed=task.seed, device=device))
            used.append(torch.tensor([p.used(lr) for lr in of_trunk], device=device))
        ProbeTraining(
            phase=phase,
            task=task,
            trunks=trunks,
            heads=heads,
            rates=used,
            images=images,
            features=self.features(with_val) if p.augment is None else None,
            watched=self._watched() if p.patience is not None else None,
            machine=self.machine,
            stop=self.stop,
        ).run()
        return heads

    def features(self, with_val: bool) -> list[FeatureRows]:
        """Per trunk, of the images that are trained on, in their order: train, then val."""
        task, name = self.task, self.task.dataset.name
        parts = [self.extractor(task.splits.train, f"{name} train features")]
        if with_val:
            parts.append(self.extractor(task.splits.val, f"{name} val features"))
        return [FeatureRows(of_trunk) for of_trunk in zip(*parts)]

    def _watched(self) -> Watched:
        val = self.task.splits.val
        features = self.extractor(val, f"{self.task.dataset.name} val features")
        return Watched(features, torch.tensor(val.labels))

    def _scores(self, candidates: Sequence[LinearHeads], split: str) -> dict[str, list[float]]:
        """Digest -> the dataset's metric on `split` for every rate."""
        task = self.task
        images = dict(task.splits.items())[split]
        label = np.asarray(images.labels)
        features = self.extractor(images, f"{task.dataset.name} {split} features")
        out = {}
        metric, classes = task.dataset.metric, len(images.classes)
        for trunk, heads, of_trunk in zip(self.extractor.trunks, candidates, features):
            values = []
            for ranking in rankings(heads, of_trunk, range(heads.count)):
                values.append(metrics.score(metric, ranking[:, 0].numpy(), label, classes))
            out[trunk.digest] = values
            rates = "  ".join(f"{lr:g}: {v:.2f}" for lr, v in zip(task.protocol.lr, values))
            name = trunk.checkpoint.name
            log.info(f"{name} on {task.dataset.name} {split}, by learning rate: {rates}")
        return out

    def _kept_scores(self) -> dict[str, list[float]]:
        if not self.choice_file.exists():
            return {}
        return json.loads(self.choice_file.read_text())


def rankings(
    heads: LinearHeads, features: Tensor | FeatureRows, places: Sequence[int]
) -> list[Tensor]:
    """The five best classes (N, 5) of (N, D) `features` by each of the heads at `places`."""
    parts: list[list[Tensor]] = [[] for _ in places]
    for rows in features.split(ROWS):
        logits = heads.logits(rows.to(heads.weight.device))
        for place, out in zip(places, parts):
            out.append(scoring.rank_classes(logits[:, place]))
    return [torch.cat(part) for part in parts]


def _chosen(task: Assignment[Sgd], trunk: FrozenTrunk, final: FinalHead) -> dict[str, object]:
    """`chosen` of the rows: the rate, how it was found, and what the others would have given."""
    p = task.protocol
    choice: dict[str, object] = {
        "lr": final.lr,
        "lr_used": p.used(final.lr),
        "reference_batch": p.reference_batch,
        "batch_size": p.batch_size,
        "on": None if final.scores is None else p.select,
        "trained_on": "train+val" if p.patience is None else "train",
    }
    if final.scores is not None:
        choice["scores"] = {f"{lr:g}": score for lr, score in zip(p.lr, final.scores)}
        edge = scoring.warn_edge(task, trunk.checkpoint, "learning rate", final.lr, p.lr)
        choice["at_edge"] = edge
    return choice


def metric_names(p: Sgd, dataset: Dataset) -> list[str]:
    return [*dataset.metrics, *([TRAIN_SCORE] if p.train_score else [])]


PROBE = Probe(measure=measure, metrics=metric_names, together=True)
