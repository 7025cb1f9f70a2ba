"""The SGD probe trains linear heads on a frozen trunk, all rates in one pass, and scores the best.

A protocol decides by its rates and its `select` in which of three ways a head is found:

    one rate             it trains on train + val
    a grid, select val   every rate trains on train, val chooses one, which trains again on
                         train + val
    a grid, select test  every rate trains on train + val, and the best on test is reported, as in
                         some papers: comparable with nothing else, and under a name of its own

Val trains nothing where `patience` stops a training early, since val is what patience watches, and
on the datasets of `train_only`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.images.image_list import ImageList
from backbench.parallel.distributed import sent
from backbench.records import store
from backbench.records.store import Result
from backbench.runs import atomic, price
from backbench.runs.resumable import ResumableSteps
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.stats import confidence
from backbench.transfer import head_scores, keeping, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.batches import rank_batches, training_pictures
from backbench.transfer.features.extractor import Extractor, FeatureRows
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.heads import AdamHeads, BestHeads, LinearHeads
from backbench.transfer.keeping import CheckpointPredictions
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import (
    CropAugment,
    Length,
    Rates,
    RateSchedule,
    ScaledRates,
)
from backbench.transfer.scoring import best_of
from backbench.weights.kept_heads import KeptHead

TRAIN_SCORE = "train_top1"  # the metric of `train_score`
SHOW_EVERY = 50  # steps; reading a loss waits for the device


@dataclass(frozen=True, kw_only=True)
class Sgd(ScaledRates):
    """Linear heads train by SGD on a frozen trunk, all rates of `lr` in one pass. Without `augment`
    they train on features that are computed once."""

    # With one rate nothing is chosen, and nothing held out but what `patience` watches.
    lr: Rates
    # `adam` is torch's; its first beta is `momentum`.
    optimizer: Literal["sgd", "adam", "adamw", "lars"] = "sgd"
    schedule: RateSchedule = RateSchedule()
    length: dict[str, Length]  # by dataset, and `default`
    augment: CropAugment | None = CropAugment()
    init_std: float = 0.01
    # The training ends after so many epochs without a better validation loss; null: never early.
    patience: int | None = None
    # Datasets whose val stays out of the final head's training
    train_only: tuple[str, ...] = ()
    # The split that chooses a rate. `test` is the reported one, and needs a name that says so.
    select: Literal["val", "test"] = "val"
    # Whether there is also a row of the split `train`: top-1 on centre crops of the images that
    # were trained on
    train_score: bool = False
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        if self.select == "test" and "testsel" not in self.protocol:
            raise ValueError(
                "select: test needs a protocol name that says so, as in linear-lorac-testsel-v1"
            )
        if "default" not in self.length:
            raise ValueError("length needs a `default`")
        if self.optimizer in ("adamw", "lars") and self.kind == "sgd":
            raise ValueError(
                "optimizers adamw and lars are for maps and tokens; take sgd or adam"
            )
        if self.train_score and (
            len(self.lr) > 1 or self.patience is not None or self.train_only
        ):
            raise ValueError(
                "train_score needs one rate, no patience and no train_only: all labels train"
            )

    @property
    def grid(self) -> list[tuple[float, float]]:
        """The rate, as declared, and the weight decay of each head."""
        return [(lr, self.weight_decay) for lr in self.lr]

    def trains_on_val(self, dataset: str) -> bool:
        """Return whether the final heads train on train + val, and not on train alone."""
        return self.patience is None and dataset not in self.train_only

    def steps(self, dataset: str, images: int) -> int:
        """Return the optimiser steps of one training on so many images of a dataset."""
        length = self.length.get(dataset, self.length["default"])
        return length.steps(images, self.batch_size)


@dataclass(frozen=True, kw_only=True)
class TokenProbe(Sgd):
    """Base of protocols whose heads train on a frozen trunk's tokens, all rates in one pass. With
    one rate they train on all of train. With a grid a held-out part chooses a head, which is scored
    as it is, without another training."""

    optimizer: Literal["sgd", "adam", "adamw", "lars"] = "adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.optimizer not in ("adamw", "lars")
            or self.patience is not None
            or self.head
        ):
            raise ValueError(
                "heads on tokens have `optimizer: adamw` or lars, no patience, no head"
            )
        if self.select != "val" or self.train_score or self.train_only:
            raise ValueError(
                "heads on tokens have no select, train_score or train_only"
            )

    def trains_on_val(self, dataset: str) -> bool:
        return len(self.grid) == 1


@dataclass(frozen=True)
class FinalHead:
    """The head that a trunk is scored by: one of `heads`, and how its rate was chosen."""

    heads: LinearHeads
    index: int  # of the head among them
    lr: float  # as declared
    scores: list[float] | None = None  # of every head of the grid, where one was chosen
    # The head's own, or that of its twin, which has the same rate and did not see the hold-out
    temperature: float | None = None

    @property
    def kept(self) -> KeptHead:
        """The head alone, as it is kept."""
        heads = self.heads
        own = slice(self.index * heads.classes, (self.index + 1) * heads.classes)
        source = None
        if self.temperature is not None:
            source = "hold-out" if self.scores is None else "hold-out, twin"
        return KeptHead(
            heads.weight[own].cpu().clone(),
            heads.bias[own].cpu().clone(),
            self.temperature,
            source,
        )

    def logits(self, features: Tensor) -> Iterator[Tensor]:
        """Yield the logits (n, C) of some rows of `features` (N, D) at a time."""
        for rows in features.split(head_scores.ROWS):
            yield self.heads.logits(rows.to(self.heads.weight.device))[:, self.index]


def measure(
    task: Assignment[Sgd], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    """Return the rows of all trunks, on rank 0. The other ranks take part until the end, and return
    none."""
    p = task.protocol
    name = task.dataset.name
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
        (ranking,) = rankings(final.heads, features, [final.index])
        chosen = chosen_rate(task, trunk, final)
        said: dict[str, str] = {}
        if machine.main:
            labels = task.splits.test.labels
            scores = head_scores.compact(
                final.logits(features), labels, final.temperature
            )
            said = keeping.keep_trained(
                task, trunk.checkpoint, final.kept, scores, chosen
            )
        one = CheckpointPredictions(
            checkpoint=trunk.checkpoint,
            ranking=ranking,
            chosen=chosen,
            provenance={**said, "trunk_sha256": trunk.state, "trunk_unchanged": True},
        )
        measured.append(one)
    # All ranks compute features together, so this comes before the other ranks leave.
    trained = probe.features(with_val=True) if p.train_score else None
    if not machine.main:
        return []
    # 3. The rows hold the scores that the rates were chosen by, so their file is not needed now.
    rows = keeping.write(task, measured)
    if trained is not None:
        rows += probe.train_rows(finals, trained)
    probe.choice_file.unlink(missing_ok=True)
    return rows


@dataclass(frozen=True)
class SgdProbe:
    """The three ways to a final head; each returns that of every trunk."""

    task: Assignment[Sgd]
    extractor: Extractor
    machine: Machine
    stop: StopFlag

    @property
    def choice_file(self) -> Path:
        """The file of every rate's val scores: with it a stopped refit does not choose again."""
        return self.task.state_file.with_suffix(".chosen.json")

    def one_rate(self) -> list[FinalHead]:
        p, trunks = self.task.protocol, self.extractor.trunks
        trained = self._train("train", [p.lr] * len(trunks), with_val=True)
        finals = best_heads(p, trained, None)
        if p.trains_on_val(self.task.dataset.name):
            return finals
        temperatures = self._temperatures(finals)
        return [replace(final, temperature=t) for final, t in zip(finals, temperatures)]

    def chosen_on_val(self) -> list[FinalHead]:
        p, trunks = self.task.protocol, self.extractor.trunks
        grid = p.lr
        # 1. Every rate trains on train, and is scored on val. A run that was stopped after this has
        #    left the scores, and the temperature of each trunk's best head, which saw nothing of
        #    val.
        scores: dict[str, list[float]] = {}
        temperatures: dict[str, float | None] = {}
        if self.choice_file.exists():
            chosen_before = json.loads(self.choice_file.read_text())
            scores = chosen_before["scores"]
            temperatures = chosen_before["temperatures"]
        if all(trunk.digest in scores for trunk in trunks):
            steps = p.steps(self.task.dataset.name, len(self.task.splits.train))
            price.skip("step", steps)
        else:
            candidates = self._train("select", [grid] * len(trunks), with_val=False)
            scores = self._scores(candidates, "val")
            best = best_heads(p, candidates, scores.values())
            # These heads are not the final ones: each is the twin of one that trains again.
            twins = [replace(head, scores=None) for head in best]
            temperatures = dict(zip(scores, self._temperatures(twins)))
            if self.machine.main:
                kept = {"scores": scores, "temperatures": temperatures}
                atomic.write_json(self.choice_file, kept)
        # 2. Each trunk's best rate trains again, from the start, on all that may be trained on.
        of_trunks = [scores[trunk.digest] for trunk in trunks]
        chosen = [grid[best_of(of_rates)] for of_rates in of_trunks]
        trained = self._train("refit", [(lr,) for lr in chosen], with_val=True)
        finals = []
        for trunk, heads, lr, of_rates in zip(trunks, trained, chosen, of_trunks):
            finals.append(
                FinalHead(heads, 0, lr, of_rates, temperatures.get(trunk.digest))
            )
        return finals

    def chosen_on_test(self) -> list[FinalHead]:
        p, trunks = self.task.protocol, self.extractor.trunks
        trained = self._train("train", [p.lr] * len(trunks), with_val=True)
        return best_heads(p, trained, self._scores(trained, "test").values())

    def _temperatures(self, heads: Sequence[FinalHead]) -> list[float | None]:
        """Fit each head's temperature on val, which did not train it, and keep the scores that it
        gives val. Only rank 0 does; the others return None for each."""
        task = self.task
        val = task.splits.val
        features = self.extractor(val, f"{task.dataset.name} val features")
        if not self.machine.main:
            return [None] * len(heads)
        temperatures = []
        for trunk, head, of_trunk in zip(self.extractor.trunks, heads, features):
            temperature = head_scores.fit_temperature(head.logits(of_trunk), val.labels)
            scores = head_scores.compact(head.logits(of_trunk), val.labels, temperature)
            if scores is not None:
                kept = replace(head, temperature=temperature).kept
                keeping.keep_scores(task, trunk.checkpoint, kept.digest, scores, "val")
            temperatures.append(temperature)
        return temperatures

    def train_rows(
        self, finals: Sequence[FinalHead], trained: Sequence[FeatureRows]
    ) -> list[Result]:
        """Append a row for each final head: its top-1 on the images that it was trained on, whose
        features are `trained`."""
        task, splits = self.task, self.task.splits
        label = np.asarray(splits.train.labels + splits.val.labels)
        rows = []
        for trunk, final, features in zip(self.extractor.trunks, finals, trained):
            (ranking,) = rankings(final.heads, features, [final.index])
            right = ranking[:, 0].numpy() == label
            about = keeping.row(
                task,
                trunk.checkpoint,
                split="train",
                metric=TRAIN_SCORE,
                value=100.0 * float(right.mean()),
                ci95=confidence.of_hits(right),
                chosen=chosen_rate(task, trunk, final),
                provenance={"trunk_sha256": trunk.state},
            )
            rows.append(about)
        store.append(task.run, rows, skip_known=True)
        return rows

    def _train(
        self, phase: str, rates: Sequence[Sequence[float]], *, with_val: bool
    ) -> list[LinearHeads]:
        """Train the heads of every trunk, one for each of its `rates` (declared), on train, or with
        `with_val` on all that the protocol lets final heads train on."""
        task = self.task
        p, name = task.protocol, task.dataset.name
        device = self.machine.device
        trunks = self.extractor.trunks
        with_val = with_val and p.trains_on_val(name)
        images = task.splits.both() if with_val else task.splits.train
        kind = AdamHeads if p.optimizer == "adam" else LinearHeads
        heads = []
        used = []
        for trunk, of_trunk in zip(trunks, rates):
            of_rates = kind(
                len(of_trunk),
                len(task.splits.train.classes),
                trunk.dim,
                std=p.init_std,
                seed=task.seed,
                device=device,
            )
            heads.append(of_rates)
            used.append(torch.tensor([p.used(lr) for lr in of_trunk], device=device))
        watched = None
        if p.patience is not None:
            watched = self.extractor(task.splits.val, f"{name} val features")
        ProbeTraining(
            phase=phase,
            task=task,
            trunks=trunks,
            heads=heads,
            rates=used,
            images=images,
            features=self.features(with_val) if p.augment is None else None,
            watched=watched,
            machine=self.machine,
            stop=self.stop,
        ).run()
        return heads

    def features(self, with_val: bool) -> list[FeatureRows]:
        """Return the features of each trunk for train, then val, in the order of the images."""
        task, name = self.task, self.task.dataset.name
        parts = [self.extractor(task.splits.train, f"{name} train features")]
        if with_val:
            parts.append(self.extractor(task.splits.val, f"{name} val features"))
        return [FeatureRows(of_trunk) for of_trunk in zip(*parts)]

    def _scores(
        self, candidates: Sequence[LinearHeads], split: str
    ) -> dict[str, list[float]]:
        """Return a trunk's digest -> the dataset's metric on `split` for every rate."""
        task, name = self.task, self.task.dataset.name
        images = dict(task.splits.items())[split]
        label = np.asarray(images.labels)
        classes = len(images.classes)
        features = self.extractor(images, f"{name} {split} features")
        scores = {}
        for trunk, heads, of_trunk in zip(self.extractor.trunks, candidates, features):
            values = []
            for ranking in rankings(heads, of_trunk, range(heads.count)):
                best = ranking[:, 0].numpy()
                values.append(scoring.score(task.dataset.metric, best, label, classes))
            scores[trunk.digest] = values
            by_rate = [f"{lr:g}: {v:.2f}" for lr, v in zip(task.protocol.lr, values)]
            log.info(
                f"{trunk.checkpoint.name} on {name} {split}, by learning rate:"
                f" {'  '.join(by_rate)}"
            )
        return scores


def rankings(
    heads: LinearHeads, features: Tensor | FeatureRows, indices: Sequence[int]
) -> list[Tensor]:
    """Return the five best classes (N, 5) of `features` (N, D) by each of the heads at `indices`."""
    parts: list[list[Tensor]] = [[] for _ in indices]
    for rows in features.split(head_scores.ROWS):
        logits = heads.logits(rows.to(heads.weight.device))
        for index, out in zip(indices, parts):
            out.append(scoring.rank_classes(logits[:, index]))
    return [torch.cat(part) for part in parts]


def chosen_rate(
    task: Assignment[Sgd], trunk: FrozenTrunk, final: FinalHead
) -> dict[str, object]:
    """Return what rows say as `chosen`: the rate, what chose it, and the scores of all rates."""
    p = task.protocol
    choice: dict[str, object] = {
        "lr": final.lr,
        "lr_used": p.used(final.lr),
        "reference_batch": p.reference_batch,
        "batch_size": p.batch_size,
        "on": None if final.scores is None else p.select,
        "trained_on": "train+val" if p.trains_on_val(task.dataset.name) else "train",
    }
    if final.scores is not None:
        # backbench/verify/verification.py reads these names.
        names = [f"{lr:g}" for lr in p.lr]
        if len(p.grid) > len(p.lr):
            choice["weight_decay"] = p.grid[final.index][1]
            names = [f"{lr:g} wd {decay:g}" for lr, decay in p.grid]
        choice["scores"] = dict(zip(names, final.scores))
        choice["at_edge"] = scoring.warn_edge(
            task,
            trunk.checkpoint,
            "learning rate",
            final.lr,
            [lr for lr, _ in p.grid],
            scores=final.scores,
        )
    return choice


# The training pass: heads of several trunks and rates, one stream of images


@dataclass
class ProbeTraining:
    """One pass that trains the heads of all trunks, stoppable and continuable at any step."""

    phase: str  # select, refit or train; a state of another phase is not this one's
    task: Assignment[Sgd]
    trunks: Sequence[FrozenTrunk]
    heads: list[LinearHeads]
    rates: list[Tensor]  # per trunk (H,), as used
    images: ImageList
    features: list[FeatureRows] | None  # of the images, where they are not augmented
    watched: Sequence[Tensor] | None  # val's features per trunk, for `patience`
    machine: Machine
    stop: StopFlag
    # True: the heads take maps. What follows such a training is long, so its end is saved, too.
    tokens: bool = False

    def __post_init__(self) -> None:
        p = self.task.protocol
        self.steps = p.steps(self.task.dataset.name, len(self.images))
        # The steps of an epoch need not be a whole number.
        self.per_epoch = len(self.images) / p.batch_size
        self.labels = torch.tensor(self.images.labels)
        self.best: list[BestHeads] = []
        if self.watched is not None:
            self.best = [BestHeads(heads) for heads in self.heads]

    def run(self) -> None:
        """Take all steps that are left; with `patience` the heads end as they were at their best."""
        p, machine = self.task.protocol, self.machine
        first = self._resume()
        progress = None
        if machine.main:
            what = f"{self.task.dataset.name} {self.phase}"
            progress = Progress(self.task.run, self.steps, what, done=first)
        steps = ResumableSteps(
            first,
            self.steps,
            stop=self.stop,
            agreement=machine.agreement,
            progress=progress,
            save=self._save,
            due=self._state_is_due,
        )
        for step, (features, labels) in zip(steps, self._batches(first)):
            # 1. One step of the heads of every trunk.
            factor = p.schedule.factor(step, self.steps, self.per_epoch)
            losses = []
            for heads, of_trunk, rates in zip(self.heads, features, self.rates):
                of_heads = heads.step(
                    of_trunk,
                    labels,
                    rates * factor,
                    momentum=p.momentum,
                    decay=p.weight_decay,
                    batch=p.batch_size,
                )
                losses.append(of_heads)
            if machine.main and step % SHOW_EVERY == first % SHOW_EVERY:
                loss = float(losses[0].min()) * machine.world / p.batch_size
                steps.show(loss=loss)
            # 2. Every rank has the same heads and finds the same about their patience.
            if self._exhausted(step):
                break
        if self.watched is not None:
            for heads, best in zip(self.heads, self.best):
                best.restore(heads)

    def _batches(self, first: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield the features per trunk and the labels of this rank's share of each global batch."""
        p, machine = self.task.protocol, self.machine
        seed = self.task.seed
        shares = rank_batches(
            seed, len(self.images), p.batch_size, first, self.steps, machine=machine
        )
        # 1. Features that were computed once
        if self.features is not None:
            for share in shares:
                index = torch.tensor([i for _, i in share])
                mine = []
                for of_trunk in self.features:
                    mine.append(sent(of_trunk.take(index), machine.device))
                yield mine, sent(self.labels[index], machine.device)
            return
        # 2. Features, or maps, of augmented views
        assert p.augment is not None
        pictures = training_pictures(
            self.images, p.augment, shares, seed=seed, machine=machine
        )
        for pixels, index in pictures:
            here = pixels.to(machine.device, non_blocking=True)
            mine = forward_all(self.trunks, here, tokens=self.tokens)
            yield mine, sent(self.labels[index], machine.device)

    def _exhausted(self, step: int) -> bool:
        """At the end of an epoch, keep the heads that got better; return whether all have given up.
        Within an epoch, return False."""
        patience = self.task.protocol.patience
        # An epoch may have no whole number of steps; it ends within this step or does not.
        epochs_before = int(step / self.per_epoch)
        epoch = int((step + 1) / self.per_epoch)
        ended = epoch > epochs_before
        if self.watched is None or patience is None or not ended:
            return False
        device = self.machine.device
        labels = torch.tensor(self.task.splits.val.labels, device=device)
        given_up = []  # by trunk; all are asked, since asking is what keeps the best
        for heads, best, features in zip(self.heads, self.best, self.watched):
            loss = heads.mean_loss(features.to(device), labels).cpu()
            given_up.append(best.update(heads, loss, epoch=epoch, patience=patience))
        return all(given_up)

    def _state_is_due(self, done: int, age: float) -> bool:
        at_end = self.tokens and done == self.steps
        return at_end or age > 60 * self.task.protocol.save_minutes

    def _save(self, step: int) -> None:
        if not self.machine.main:
            return
        heads = {t.digest: h.state() for t, h in zip(self.trunks, self.heads)}
        best = {t.digest: b.state() for t, b in zip(self.trunks, self.best)}
        state = {"phase": self.phase, "step": step, "heads": heads, "best": best}
        save_state(self.task.state_file, state)

    def _resume(self) -> int:
        """Return the step to start at: 0, or where a saved state of this phase ends."""
        file = self.task.state_file
        if not file.exists():
            return 0
        state = load_state(file)
        # It may hold more trunks than are left: of a run that was killed between two rows.
        if state["phase"] != self.phase or any(
            t.digest not in state["heads"] for t in self.trunks
        ):
            return 0
        for trunk, heads in zip(self.trunks, self.heads):
            heads.load(state["heads"][trunk.digest])
        for trunk, best in zip(self.trunks, self.best):
            best.load(state["best"][trunk.digest])
        return int(state["step"])


def train_on_tokens(
    tasks: Sequence[Assignment[Any]],
    trunks: Sequence[FrozenTrunk],
    heads: Sequence[Any],
    images: ImageList,
    *,
    machine: Machine,
    stop: StopFlag,
    kind: type[ProbeTraining] = ProbeTraining,
) -> None:
    """Train heads on each trunk's tokens of the images: one for each rate of each protocol."""
    used = []
    for t in tasks:
        used += [t.protocol.used(lr) for lr, _ in t.protocol.grid]
    rates = torch.tensor(used)
    kind(
        phase=" ".join(["train", *(t.protocol.name for t in tasks)]),
        task=tasks[0],
        trunks=trunks,
        heads=list(heads),
        rates=[rates] * len(trunks),
        images=images,
        features=None,
        watched=None,
        machine=machine,
        stop=stop,
        tokens=True,
    ).run()


def best_heads(
    p: Sgd, heads: Sequence[Any], scores: Iterable[list[float]] | None
) -> list[FinalHead]:
    """Choose the head of each trunk by the `scores` of its grid; without scores it has only one."""
    if scores is None:
        return [FinalHead(each, 0, p.lr[0]) for each in heads]
    finals = []
    for each, of_rates in zip(heads, scores):
        best = best_of(of_rates)
        finals.append(FinalHead(each, best, p.grid[best][0], of_rates))
    return finals


def _metrics(p: Sgd, dataset: Dataset) -> list[str]:
    metrics = list(dataset.metrics)
    if p.train_score:
        metrics.append(TRAIN_SCORE)
    return metrics


def _words(p: Sgd) -> str:
    if len(p.lr) == 1:
        return f"{p.batch_size} images a step"
    return f"best of {len(p.lr)} learning rates by {p.select}, {p.batch_size} images a step"


def _work(p: Sgd, name: str, splits: Splits, _: int) -> dict[str, int]:
    """Return the steps of all trainings, and the images whose features are computed once."""
    train, val, test = len(splits.train), len(splits.val), len(splits.test)
    chooses = len(p.lr) > 1 and p.select == "val"
    steps = p.steps(name, train + val if p.trains_on_val(name) else train)
    if chooses:
        steps += p.steps(name, train)
    # One rate's temperature is fitted on val, unless its head has trained on that
    fits = len(p.lr) == 1 and not p.trains_on_val(name)
    images = test
    if p.augment is None or p.train_score:
        images += train + val
    elif chooses or fits or p.patience is not None:
        images += val
    return {"step": steps, "image": images}


PROBE = Probe(
    protocol=Sgd,
    measure=measure,
    metrics=_metrics,
    together=True,
    words=_words,
    work=_work,
)
