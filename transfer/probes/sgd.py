"""The SGD probe trains linear heads on a frozen trunk, all rates in one pass, and scores the best.

A protocol decides by its rates and its `select` in which of three ways a head is found:

    one rate             it trains on train + val
    a grid, select val   every rate trains on train, val chooses one, which trains again on
                         train + val
    a grid, select test  every rate trains on train + val, and the best on test is reported, as in
                         some papers: comparable with nothing else, and under a name of its own

Where `patience` stops a training early, val is what it watches, so val trains nothing; nor does it
on the datasets of `train_only`.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.images.image_list import ImageList
from backbench.parallel.distributed import sent
from backbench.records import store
from backbench.records.store import Result
from backbench.runs import atomic, price
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.stats import confidence
from backbench.transfer import head_scores, scoring
from backbench.transfer.devices import Machine, preempted
from backbench.transfer.features.batches import rank_batches, training_pictures
from backbench.transfer.features.extractor import Extractor, FeatureRows
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.heads import AdamHeads, BestHeads, LinearHeads
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocols import Sgd
from backbench.transfer.scoring import Assignment, CheckpointPredictions, best_of
from backbench.weights.kept_heads import KeptHead

TRAIN_SCORE = "train_top1"  # the metric of `train_score`
SHOW_EVERY = 50  # steps; reading a loss waits for the device


@dataclass(frozen=True)
class FinalHead:
    """The head that a trunk is scored by: one of `heads`, and how its rate was chosen."""

    heads: LinearHeads
    index: int  # of the head among them
    lr: float  # as declared
    scores: list[float] | None = None  # of every head of the grid, where one was chosen
    temperature: float | None = (
        None  # of itself, or of its twin that did not see the hold-out
    )

    @property
    def kept(self) -> KeptHead:
        """The head alone, as it is kept."""
        heads, classes = self.heads, self.heads.classes
        own = slice(self.index * classes, (self.index + 1) * classes)
        source = "hold-out" if self.scores is None else "hold-out, twin"
        return KeptHead(
            heads.weight[own].cpu().clone(),
            heads.bias[own].cpu().clone(),
            self.temperature,
            None if self.temperature is None else source,
        )

    def logits(self, features: Tensor) -> Iterator[Tensor]:
        """Those of `features` (N, D), some rows (n, C) at a time."""
        for rows in features.split(head_scores.ROWS):
            yield self.heads.logits(rows.to(self.heads.weight.device))[:, self.index]


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
        (ranking,) = rankings(final.heads, features, [final.index])
        chosen, said = chosen_rate(task, trunk, final), {}
        if machine.main:
            labels = task.splits.test.labels
            scores = head_scores.compact(
                final.logits(features), labels, final.temperature
            )
            said = scoring.keep_trained(
                task, trunk.checkpoint, final.kept, scores, chosen
            )
        one = CheckpointPredictions(
            checkpoint=trunk.checkpoint,
            ranking=ranking,
            chosen=chosen,
            provenance={**said, "trunk_sha256": trunk.state, "trunk_unchanged": True},
        )
        measured.append(one)
    # Features are computed by all ranks together.
    trained = probe.features(with_val=True) if p.train_score else None
    if not machine.main:
        return []
    # 3. The rows hold the scores that the rates were chosen by, so their file is not needed now.
    rows = scoring.write(task, measured)
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
        """Every rate's val score by digest, so that a stopped refit does not choose again."""
        return self.task.state_file.with_suffix(".chosen.json")

    def one_rate(self) -> list[FinalHead]:
        rates, trunks = self.task.protocol.lr, self.extractor.trunks
        trained = self._train("train", [rates] * len(trunks), with_val=True)
        finals = best_heads(self.task.protocol, trained, None)
        if self.task.protocol.trains_on_val(self.task.dataset.name):
            return finals
        temperatures = self._temperatures(finals)
        return [replace(final, temperature=t) for final, t in zip(finals, temperatures)]

    def chosen_on_val(self) -> list[FinalHead]:
        grid, trunks = self.task.protocol.lr, self.extractor.trunks
        # 1. Every rate on train, scored on val; a run that was stopped after this left the scores,
        #    and the temperature of each trunk's best head, which saw nothing of val.
        scores: dict[str, list[float]] = {}
        temperatures: dict[str, float | None] = {}
        if self.choice_file.exists():
            chosen_before = json.loads(self.choice_file.read_text())
            scores, temperatures = (
                chosen_before["scores"],
                chosen_before["temperatures"],
            )
        if all(trunk.digest in scores for trunk in trunks):
            steps = self.task.protocol.steps(
                self.task.dataset.name, len(self.task.splits.train)
            )
            price.skip("step", steps)
        else:
            candidates = self._train("select", [grid] * len(trunks), with_val=False)
            scores = self._scores(candidates, "val")
            best = best_heads(self.task.protocol, candidates, scores.values())
            twins = [
                replace(head, scores=None) for head in best
            ]  # none is the chosen head
            temperatures = dict(zip(scores, self._temperatures(twins)))
            if self.machine.main:
                kept = {"scores": scores, "temperatures": temperatures}
                atomic.write_json(self.choice_file, kept)
        # 2. Each trunk's best rate again, from the start, on all that may be trained on.
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
        grid, trunks = self.task.protocol.lr, self.extractor.trunks
        trained = self._train("train", [grid] * len(trunks), with_val=True)
        return best_heads(
            self.task.protocol, trained, self._scores(trained, "test").values()
        )

    def _temperatures(self, heads: Sequence[FinalHead]) -> list[float | None]:
        """Fit each head's temperature on val, which did not train it; keep its scores (rank 0)."""
        task, val = self.task, self.task.splits.val
        features = self.extractor(val, f"{task.dataset.name} val features")
        if not self.machine.main:
            return [None] * len(heads)
        out = []
        for trunk, head, of_trunk in zip(self.extractor.trunks, heads, features):
            fitted = replace(
                head,
                temperature=head_scores.fit_temperature(
                    head.logits(of_trunk), val.labels
                ),
            )
            scores = head_scores.compact(
                head.logits(of_trunk), val.labels, fitted.temperature
            )
            if scores is not None:
                scoring.keep_scores(
                    task, trunk.checkpoint, fitted.kept.digest, scores, "val"
                )
            out.append(fitted.temperature)
        return out

    def train_rows(
        self, finals: Sequence[FinalHead], trained: Sequence[FeatureRows]
    ) -> list[Result]:
        """Append each final head's top-1 on the images that it was trained on (`trained`)."""
        task, splits = self.task, self.task.splits
        label = np.asarray(splits.train.labels + splits.val.labels)
        rows = []
        for trunk, final, features in zip(self.extractor.trunks, finals, trained):
            (ranking,) = rankings(final.heads, features, [final.index])
            right = ranking[:, 0].numpy() == label
            about = scoring.row(
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
        """Heads of every trunk, one per rate of its `rates` (declared), on train or train + val."""
        task, p, device = self.task, self.task.protocol, self.machine.device
        classes, trunks = len(task.splits.train.classes), self.extractor.trunks
        with_val = with_val and p.trains_on_val(task.dataset.name)
        images = task.splits.both() if with_val else task.splits.train
        kind = AdamHeads if p.optimizer == "adam" else LinearHeads
        heads, used = [], []
        for trunk, of_trunk in zip(trunks, rates):
            count, std = len(of_trunk), p.init_std
            heads.append(
                kind(count, classes, trunk.dim, std=std, seed=task.seed, device=device)
            )
            used.append(torch.tensor([p.used(lr) for lr in of_trunk], device=device))
        watched = None
        if p.patience is not None:
            watched = self.extractor(
                task.splits.val, f"{task.dataset.name} val features"
            )
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
        """Per trunk, of the images that are trained on, in their order: train, then val."""
        task, name = self.task, self.task.dataset.name
        parts = [self.extractor(task.splits.train, f"{name} train features")]
        if with_val:
            parts.append(self.extractor(task.splits.val, f"{name} val features"))
        return [FeatureRows(of_trunk) for of_trunk in zip(*parts)]

    def _scores(
        self, candidates: Sequence[LinearHeads], split: str
    ) -> dict[str, list[float]]:
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
                values.append(
                    scoring.score(metric, ranking[:, 0].numpy(), label, classes)
                )
            out[trunk.digest] = values
            rates = "  ".join(
                f"{lr:g}: {v:.2f}" for lr, v in zip(task.protocol.lr, values)
            )
            name = trunk.checkpoint.name
            log.info(
                f"{name} on {task.dataset.name} {split}, by learning rate: {rates}"
            )
        return out


def rankings(
    heads: LinearHeads, features: Tensor | FeatureRows, indices: Sequence[int]
) -> list[Tensor]:
    """The five best classes (N, 5) of `features` (N, D), by each of the heads at `indices`."""
    parts: list[list[Tensor]] = [[] for _ in indices]
    for rows in features.split(head_scores.ROWS):
        logits = heads.logits(rows.to(heads.weight.device))
        for index, out in zip(indices, parts):
            out.append(scoring.rank_classes(logits[:, index]))
    return [torch.cat(part) for part in parts]


def chosen_rate(
    task: Assignment[Sgd], trunk: FrozenTrunk, final: FinalHead
) -> dict[str, object]:
    """`chosen` of the rows: the rate, how it was found, and what the others would have given."""
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
        names = [f"{lr:g}" for lr in p.lr]
        if len(p.grid) > len(p.lr):  # verification.py knows these names
            choice["weight_decay"] = p.grid[final.index][1]
            names = [f"{lr:g} wd {decay:g}" for lr, decay in p.grid]
        choice["scores"] = dict(zip(names, final.scores))
        edge = scoring.warn_edge(
            task, trunk.checkpoint, "learning rate", final.lr, p.lr
        )
        choice["at_edge"] = edge
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
    tokens: bool = (
        False  # the heads take maps; what follows is long, so the end is saved too
    )

    def __post_init__(self) -> None:
        p = self.task.protocol
        self.steps = p.steps(self.task.dataset.name, len(self.images))
        self.per_epoch = (
            len(self.images) / p.batch_size
        )  # broken, where the batch does not divide
        self.labels = torch.tensor(self.images.labels)
        watched = self.watched is not None
        self.best = [BestHeads(heads) for heads in self.heads if watched]

    def run(self) -> None:
        """All steps that are left; with `patience` the heads end as they were at their best."""
        p, machine = self.task.protocol, self.machine
        first, loss = self._resume(), 0.0
        progress = Progress(
            self.task.run if machine.main else None,
            self.steps,
            f"{self.task.dataset.name} {self.phase}",
            done=first,
        )
        saved = time.monotonic()
        for step, (features, labels) in zip(
            range(first, self.steps), self._batches(first)
        ):
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
            if machine.main:
                if step % SHOW_EVERY == first % SHOW_EVERY:
                    loss = float(losses[0].min()) * machine.world / p.batch_size
                progress.advance(1, loss=loss)
            # 2. Every rank has the same heads and finds the same about their patience; a signal
            #    reaches one of them, so all vote on it, in every step.
            exhausted = self._exhausted(step)
            stopping = machine.stopping(self.stop)
            if exhausted:
                break
            # 3. Rank 0 saves, now and then and before a stop.
            if stopping or time.monotonic() - saved > 60 * p.save_minutes:
                self._save(step + 1)
                saved = time.monotonic()
            if stopping and step + 1 < self.steps:
                raise preempted(stopping, f"at step {step + 1} of {self.steps}")
        if self.watched is not None:
            for heads, best in zip(self.heads, self.best):
                best.restore(heads)
        if self.tokens:
            self._save(self.steps)

    def _batches(self, first: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Features per trunk and labels of this rank's share of each global batch."""
        p, machine = self.task.protocol, self.machine
        count, seed = len(self.images), self.task.seed
        shares = rank_batches(
            seed, count, p.batch_size, first, self.steps, machine=machine
        )
        if self.features is not None:
            for share in shares:
                index = torch.tensor([i for _, i in share])
                mine = [
                    sent(of_trunk.take(index), machine.device)
                    for of_trunk in self.features
                ]
                yield mine, sent(self.labels[index], machine.device)
            return
        assert p.augment is not None
        pictures = training_pictures(
            self.images, p.augment, shares, seed=seed, machine=machine
        )
        for pixels, index in pictures:
            here = pixels.to(machine.device, non_blocking=True)
            mine = forward_all(self.trunks, here, tokens=self.tokens)
            yield mine, sent(self.labels[index], machine.device)

    def _exhausted(self, step: int) -> bool:
        """True at the end of an epoch if all heads have given up; keeps those that got better."""
        patience = self.task.protocol.patience
        epoch = int((step + 1) / self.per_epoch)
        ended = epoch > int(step / self.per_epoch)
        if self.watched is None or patience is None or not ended:
            return False
        device = self.machine.device
        labels = torch.tensor(self.task.splits.val.labels, device=device)
        given_up = []  # by trunk; all are asked, since asking is what keeps the best
        for heads, best, features in zip(self.heads, self.best, self.watched):
            loss = heads.mean_loss(features.to(device), labels).cpu()
            given_up.append(best.update(heads, loss, epoch=epoch, patience=patience))
        return all(given_up)

    def _save(self, step: int) -> None:
        if not self.machine.main:
            return
        heads = {t.digest: h.state() for t, h in zip(self.trunks, self.heads)}
        best = {t.digest: b.state() for t, b in zip(self.trunks, self.best)}
        state = {"phase": self.phase, "step": step, "heads": heads, "best": best}
        save_state(self.task.state_file, state)

    def _resume(self) -> int:
        """The step to start at: 0, or where a saved state of this phase ends."""
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
    """Train the heads of each trunk, one for each rate of each protocol, on its tokens of images."""
    rates = torch.tensor(
        [t.protocol.used(lr) for t in tasks for lr, _ in t.protocol.grid]
    )
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
    """The head of each trunk by the `scores` of its grid; without scores the only one."""
    if scores is None:
        return [FinalHead(each, 0, p.lr[0]) for each in heads]
    finals = []
    for each, of_rates in zip(heads, scores):
        best = best_of(of_rates)
        finals.append(FinalHead(each, best, p.grid[best][0], of_rates))
    return finals


def _words(p: Sgd) -> str:
    several = (
        f"best of {len(p.lr)} learning rates by {p.select}, " if len(p.lr) > 1 else ""
    )
    return f"{several}{p.batch_size} images a step"


def _work(p: Sgd, name: str, splits: Splits, _: int) -> dict[str, int]:
    """Steps of all trainings, and images whose features are computed once."""
    train, val, test = len(splits.train), len(splits.val), len(splits.test)
    steps = p.steps(name, train + val if p.trains_on_val(name) else train)
    chooses = len(p.lr) > 1 and p.select == "val"
    if chooses:
        steps += p.steps(name, train)
    if p.augment is None or p.train_score:
        return {"step": steps, "image": train + val + test}
    return {
        "step": steps,
        "image": test + (val if chooses or p.patience is not None else 0),
    }


PROBE = Probe(
    measure=measure,
    metrics=lambda p, dataset: [
        *dataset.metrics,
        *([TRAIN_SCORE] if p.train_score else []),
    ],
    together=True,
    words=_words,
    work=_work,
)
