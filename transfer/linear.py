"""`backbench linear`: what a frozen trunk's features are worth to a linear head, its neighbours or a few labels.

The SGD probe trains the heads of all learning rates in one pass of the trunk: their weights are one (H C, D) matrix, so
a step is two matrix products whatever H is. Several checkpoints see the same decoded and augmented images.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from backbench import config
from backbench.datasets import catalog, splits
from backbench.errors import BadInput, Preempted
from backbench.images.files import ImageList
from backbench.knn import knn_scores
from backbench.results.store import Result
from backbench.runs import atomic, distributed, seeding
from backbench.runs.folder import Progress, log, open_run
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.tasks import by_kind
from backbench.weights.checkpoint import Checkpoint
from transfer import fewshot, logreg, metrics, scoring
from transfer.config import Augment, FewShot, Knn, LogReg, Protocol, Sgd, load_protocol
from transfer.features import Extractor, Frozen, Store, forward_all, loader, stopping_together
from transfer.machine import Machine, read_checkpoints, start_for
from transfer.scoring import Measured, Task

TASKS = by_kind("linear")  # kind of protocol -> task


def run(args: argparse.Namespace) -> int:
    """The verb `linear`."""
    protocol = load_protocol(args.protocol, tuple(TASKS))
    names = catalog.names(args.datasets)
    checkpoints = read_checkpoints(args.checkpoints)
    machine = start_for(args)
    rows = evaluate(
        checkpoints, names, protocol, data=args.data, out=args.out, seed=args.seed, machine=machine
    )
    if machine.main:
        scoring.show(rows)
    return 0


def evaluate(
    checkpoints: Sequence[Checkpoint],
    names: Sequence[str],
    protocol: Protocol,
    *,
    data: Path,
    out: Path,
    seed: int,
    machine: Machine,
) -> list[Result]:
    """All `checkpoints` on all datasets by one protocol -> the rows, which are in OUT/results.jsonl too."""
    found = {name: catalog.load(name, data, seed=seed) for name in names}
    hashes = {
        name: {part: splits.digest(images) for part, images in found[name].items()}
        for name in names
    }
    for name in names:
        _enough(protocol, name, found[name])
    if machine.main:
        identity = {
            "recipe": config.to_dict(protocol),
            "checkpoints": [c.digest for c in checkpoints],
            "datasets": hashes,
            "seed": seed,
        }
        open_run(out, verb="linear", identity=identity)
        for name in names:
            splits.write_manifests(out, name, found[name])
    tasks = [
        Task(
            run=out,
            task=TASKS[protocol.kind],
            dataset=catalog.find(name),
            splits=found[name],
            hashes=hashes[name],
            protocol=protocol,
            seed=seed,
        )
        for name in names
    ]
    with StopFlag() as stop:
        if machine.world > 1 and not isinstance(protocol, Sgd):
            # All ranks compute features; what follows is one process's work, and may outlast a collective's patience.
            for task in tasks:
                if pending := task.pending(checkpoints, metric_names(task)):
                    _features(task, _extractor(task, pending, machine, stop))
            machine = machine.alone()
            if not machine.main:
                return []
        return [row for task in tasks for row in _one_dataset(task, checkpoints, machine, stop)]


def _enough(protocol: Protocol, name: str, found: splits.Splits) -> None:
    """Refuse what would fail only after hours of features: more neighbours or shots than there are images."""
    if isinstance(protocol, Knn) and max(protocol.k) > (count := len(found.train) + len(found.val)):
        raise BadInput(
            f"{name}: k = {max(protocol.k)} neighbours of {count} images; use a smaller k"
        )
    if isinstance(protocol, FewShot):
        splits.draw(found.both(), protocol.shots, 0, what=f"{protocol.shots} shots")


def _extractor(
    task: Task, checkpoints: Sequence[Checkpoint], machine: Machine, stop: StopFlag
) -> Extractor:
    protocol = task.protocol
    return Extractor(
        trunks=[
            Frozen.build(c, device=machine.device, precision=protocol.precision)
            for c in checkpoints
        ],
        geometry=config.to_dict(protocol.geometry),
        store=Store.default(),
        workers=machine.workers,
        batch=protocol.feature_batch,
        run=task.run if machine.main else None,
        stop=stop,
    )


def _one_dataset(
    task: Task, checkpoints: Sequence[Checkpoint], machine: Machine, stop: StopFlag
) -> list[Result]:
    done = task.done(checkpoints, metric_names(task))
    pending = [c for c in checkpoints if c.digest not in done]
    fresh: list[Result] = []
    if pending:
        runs: dict[type[Protocol], Callable[..., list[Result]]] = {
            Sgd: _sgd,
            LogReg: _logreg,
            Knn: _knn,
            FewShot: _fewshot,
        }
        extractor = _extractor(task, pending, machine, stop)
        fresh = runs[type(task.protocol)](task, task.protocol, extractor, machine, stop)
        (task.run / "state" / f"{task.dataset.name}.state").unlink(missing_ok=True)
    by_digest = {
        c.digest: done.get(c.digest) or [r for r in fresh if r.checkpoint == c.digest]
        for c in checkpoints
    }
    return [r for c in checkpoints for r in by_digest[c.digest]]


def metric_names(task: Task) -> list[str]:
    """The metrics of the rows that this task appends for each checkpoint."""
    protocol, dataset = task.protocol, task.dataset
    if isinstance(protocol, Knn):
        return [f"{metric}_k{k}" for k in protocol.k for metric in dataset.metrics]
    if isinstance(protocol, FewShot):
        return [dataset.metric]
    return list(dataset.metrics)


# SGD


class Heads:
    """H linear heads with C classes on one trunk's D features, trained by SGD with momentum as torch.optim.SGD does.

    The weights of all heads are one matrix, and the gradient of the cross-entropy is written down instead of traced:
    with G = (softmax - one-hot) / N for the logits (N, H C), the gradient is G^T F. Each head's numbers are those that
    it would have alone; one that diverges to nan does not touch the others.
    """

    def __init__(
        self, heads: int, classes: int, dim: int, *, std: float, seed: int, device: torch.device
    ) -> None:
        self.heads, self.classes, self.dim = heads, classes, dim
        one = torch.empty(classes, dim).normal_(
            0, std, generator=seeding.generator(seed, "head", classes, dim)
        )
        self.weight = one.repeat(heads, 1).to(
            device
        )  # the same start for every rate, as separate runs have
        self.bias = torch.zeros(heads * classes, device=device)
        self.weight_momentum = torch.zeros_like(self.weight)
        self.bias_momentum = torch.zeros_like(self.bias)

    def logits(self, features: Tensor) -> Tensor:
        """(N, D) -> (N, H, C)."""
        return torch.addmm(self.bias, features, self.weight.T).view(-1, self.heads, self.classes)

    @torch.no_grad()
    def step(
        self,
        features: Tensor,
        labels: Tensor,
        rates: Tensor,
        *,
        momentum: float,
        decay: float,
        batch: int,
    ) -> Tensor:
        """One step on this rank's share (n, D) of a batch of `batch` images; `rates` (H,). Returns the summed losses
        (H,) of the share."""
        probability = torch.log_softmax(self.logits(features), 2)
        index = labels.view(-1, 1, 1).expand(-1, self.heads, 1)
        losses = -probability.gather(2, index).sum((0, 2))
        probability = probability.exp_().scatter_add_(
            2, index, -torch.ones_like(index, dtype=probability.dtype)
        )
        gradient = probability.view(len(features), -1).div_(batch)
        if distributed.world_size() == 1 and not decay:
            self.weight_momentum.addmm_(
                gradient.T, features, beta=momentum
            )  # m v + G^T F in one pass
            self.bias_momentum.mul_(momentum).add_(gradient.sum(0))
        else:
            whole = torch.cat((gradient.T @ features, gradient.sum(0)[:, None]), 1)
            if distributed.world_size() > 1:
                dist.all_reduce(whole)
            self.weight_momentum.mul_(momentum).add_(whole[:, :-1]).add_(self.weight, alpha=decay)
            self.bias_momentum.mul_(momentum).add_(whole[:, -1]).add_(self.bias, alpha=decay)
        self.weight.view(self.heads, -1).addcmul_(
            self.weight_momentum.view(self.heads, -1), rates[:, None], value=-1
        )
        self.bias.view(self.heads, -1).addcmul_(
            self.bias_momentum.view(self.heads, -1), rates[:, None], value=-1
        )
        return losses

    def state(self) -> dict[str, Tensor]:
        named = ("weight", "bias", "weight_momentum", "bias_momentum")
        return {name: getattr(self, name).cpu() for name in named}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            getattr(self, name).copy_(value)


def positions(
    seed: int, images: int, batch: int, first: int, last: int
) -> Iterator[list[tuple[int, int]]]:
    """The global batches of steps first..last-1 as (epoch, index) lists: one endless stream of seeded permutations."""
    epoch, order = -1, torch.empty(0)
    for step in range(first, last):
        out = []
        for position in range(step * batch, (step + 1) * batch):
            if position // images != epoch:
                epoch = position // images
                order = torch.randperm(images, generator=seeding.generator(seed, "order", epoch))
            out.append((epoch, int(order[position % images])))
        yield out


def share(batch: list[tuple[int, int]], rank: int, world: int) -> list[tuple[int, int]]:
    """This rank's contiguous part of a global batch; the parts differ by one image at most."""
    return batch[len(batch) * rank // world : len(batch) * (rank + 1) // world]


class CropFlip:
    """The training view of image `index` in `epoch`: RandomResizedCrop and flip, a pure function of the seed."""

    def __init__(self, augment: Augment, seed: int) -> None:
        self.augment, self.seed = augment, seed

    def __call__(self, picture: Any, key: tuple[int, int]) -> Any:
        from PIL import Image

        from backbench.images.views import crop_box

        a = self.augment
        generator = seeding.generator(self.seed, "crop", *key)
        top, left, height, width = crop_box(
            generator, picture.height, picture.width, a.scale, a.ratio
        )
        flip = torch.rand(1, generator=generator).item() < a.flip
        out = picture.crop((left, top, left + width, top + height)).resize(
            (a.size, a.size), Image.Resampling.BILINEAR
        )
        return out.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else out


@dataclass
class Training:
    """One pass over `steps` batches that trains the heads of all trunks, stoppable and continuable at any step."""

    name: str  # select or refit
    protocol: Sgd
    trunks: Sequence[Frozen]
    heads: list[Heads]
    rates: list[Tensor]  # per trunk (H,), as used
    images: ImageList
    features: list[Tensor] | None  # when there is no augmentation
    watch: (
        tuple[list[Tensor], Tensor] | None
    )  # validation features per trunk and labels, for `patience`
    seed: int
    machine: Machine
    stop: StopFlag
    file: Path
    run: Path
    dataset: str

    def __post_init__(self) -> None:
        length = self.protocol.length.get(self.dataset, self.protocol.length["default"])
        self.steps = length.steps(len(self.images), self.protocol.batch_size)
        self.per_epoch = len(self.images) / self.protocol.batch_size
        self.labels = torch.tensor(self.images.labels)
        count = len(self.heads[0].weight) // self.heads[0].classes
        self.best = [
            {"loss": torch.full((count,), torch.inf), "epoch": torch.zeros(count), **_kept(h)}
            for h in self.heads
        ]

    def __call__(self) -> None:
        p, machine = self.protocol, self.machine
        first, loss = self._resume(), 0.0
        saved = time.monotonic()
        progress = Progress(
            self.run if machine.main else None,
            self.steps,
            f"{self.dataset} {self.name}",
            done=first,
        )
        for step, (features, labels) in zip(range(first, self.steps), self._batches(first)):
            factor = p.schedule.factor(step, self.steps, self.per_epoch)
            losses = [
                head.step(
                    f,
                    labels,
                    rate * factor,
                    momentum=p.momentum,
                    decay=p.weight_decay,
                    batch=p.batch_size,
                )
                for head, f, rate in zip(self.heads, features, self.rates)
            ]
            if machine.main:
                if step % 50 == first % 50:  # reading a loss waits for the device
                    loss = float(losses[0].min()) * machine.world / p.batch_size
                progress.advance(1, loss=loss)
            exhausted = self.watch is not None and self._watched(step)
            stopping = stopping_together(self.stop, machine.device)
            if exhausted:
                break
            if stopping or time.monotonic() - saved > 60 * p.save_minutes:
                self._save(step + 1)
                saved = time.monotonic()
            if stopping and step + 1 < self.steps:
                raise Preempted(
                    f"stopped by {stopping} at step {step + 1} of {self.steps}; the same command continues"
                )
        if self.watch is not None:
            for head, best in zip(self.heads, self.best):
                head.weight.copy_(best["weight"])
                head.bias.copy_(best["bias"])

    def _batches(self, first: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Features per trunk and labels of this rank's share of each global batch."""
        p, machine = self.protocol, self.machine
        stream = positions(self.seed, len(self.images), p.batch_size, first, self.steps)
        mine = (share(batch, machine.rank, machine.world) for batch in stream)
        if self.features is not None:
            for batch in mine:
                index = torch.tensor([i for _, i in batch])
                yield (
                    [f[index].to(machine.device) for f in self.features],
                    self.labels[index].to(machine.device),
                )
            return
        assert p.augment is not None
        keyed = ([((epoch, i), i) for epoch, i in batch] for batch in mine)
        view = CropFlip(p.augment, self.seed)
        for pixels, index in loader(self.images, view, keyed, workers=machine.workers):
            yield (
                forward_all(self.trunks, pixels.to(machine.device, non_blocking=True)),
                self.labels[index].to(machine.device),
            )

    def _watched(self, step: int) -> bool:
        """At the end of an epoch: keep each head's weights of the lowest validation loss. True when all gave up."""
        p = self.protocol
        epoch = int((step + 1) / self.per_epoch)
        if epoch == int(step / self.per_epoch) or self.watch is None or p.patience is None:
            return False
        features, labels = self.watch
        given_up = True
        for head, best, f in zip(self.heads, self.best, features):
            logits = head.logits(f.to(self.machine.device))
            index = labels.to(self.machine.device).view(-1, 1, 1).expand(-1, head.heads, 1)
            loss = -torch.log_softmax(logits, 2).gather(2, index).mean((0, 2)).cpu()
            waiting = epoch - best["epoch"] <= p.patience
            better = (loss < best["loss"]) & waiting
            best["loss"] = torch.where(better, loss, best["loss"])
            best["epoch"] = torch.where(better, torch.tensor(float(epoch)), best["epoch"])
            rows = better.repeat_interleave(head.classes)
            best["weight"][rows] = head.weight.cpu()[rows]
            best["bias"][rows] = head.bias.cpu()[rows]
            given_up &= bool((epoch - best["epoch"] > p.patience).all())
        return given_up

    def _save(self, step: int) -> None:
        if self.machine.main:
            heads = {t.digest: h.state() for t, h in zip(self.trunks, self.heads)}
            best = {t.digest: b for t, b in zip(self.trunks, self.best)}
            save_state(self.file, {"phase": self.name, "step": step, "heads": heads, "best": best})

    def _resume(self) -> int:
        """The step to start at: 0, or where a saved state of this phase ends."""
        if not self.file.exists():
            return 0
        state = load_state(self.file)
        if state["phase"] != self.name or not {t.digest for t in self.trunks} <= set(
            state["heads"]
        ):
            return 0
        for i, (trunk, head) in enumerate(zip(self.trunks, self.heads)):
            head.load(state["heads"][trunk.digest])
            self.best[i] = state["best"][trunk.digest]
        return int(state["step"])


def _kept(heads: Heads) -> dict[str, Tensor]:
    return {"weight": heads.weight.cpu().clone(), "bias": heads.bias.cpu().clone()}


def _sgd(
    task: Task, p: Sgd, extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    """Choose on val, train again on train + val, score test once."""
    trunks, name = extractor.trunks, task.dataset.name
    classes = len(task.splits.train.classes)
    grid = len(p.lr) > 1
    on_val = grid and p.select == "val"
    used = ", ".join(f"{p.used(lr):g}" for lr in p.lr)
    if machine.main:
        log.info(
            f"{name}: {task.protocol.name}: learning rates as used {used}"
            f" (declared for {p.reference_batch} images, times {p.batch_size}/{p.reference_batch})"
        )
    state = task.run / "state" / f"{name}.state"
    choice_file = task.run / "state" / f"{name}.chosen.json"
    watched = p.patience is not None

    def train(phase: str, images: ImageList, rates: list[list[float]]) -> list[Heads]:
        heads = [
            Heads(len(r), classes, t.dim, std=p.init_std, seed=task.seed, device=machine.device)
            for r, t in zip(rates, trunks)
        ]
        features = None
        if p.augment is None:
            parts = [extractor(task.splits.train, f"{name} train features")]
            if images is not task.splits.train:
                parts.append(extractor(task.splits.val, f"{name} val features"))
            features = [torch.cat(rows) for rows in zip(*parts)]
        watch = None
        if watched:
            watch = (
                extractor(task.splits.val, f"{name} val features"),
                torch.tensor(task.splits.val.labels),
            )
        Training(
            name=phase,
            protocol=p,
            trunks=trunks,
            heads=heads,
            rates=[torch.tensor([p.used(lr) for lr in r], device=machine.device) for r in rates],
            images=images,
            features=features,
            watch=watch,
            seed=task.seed,
            machine=machine,
            stop=stop,
            file=state,
            run=task.run,
            dataset=name,
        )()
        return heads

    everything = task.splits.train if watched else task.splits.both()
    scores: dict[str, list[float]] = {}
    if on_val:
        if choice_file.exists():
            scores = _read_scores(choice_file)
        if not {t.digest for t in trunks} <= set(scores):
            heads = train("select", task.splits.train, [list(p.lr)] * len(trunks))
            scores = _scores(task, heads, extractor, "val")
            if machine.main:
                atomic.write_json(choice_file, scores)
        best = [best_of(scores[t.digest]) for t in trunks]
        heads = train("refit", everything, [[p.lr[b]] for b in best])
        final = [0] * len(trunks)
    else:
        heads = train("train", everything, [list(p.lr)] * len(trunks))
        if grid:
            scores = _scores(task, heads, extractor, "test")
        best = [best_of(scores[t.digest]) if grid else 0 for t in trunks]
        final = best
    test = extractor(task.splits.test, f"{name} test features")
    measured = []
    for trunk, head, b, column, features in zip(trunks, heads, best, final, test):
        trunk.verify()
        lr = p.lr[b]
        choice: dict[str, Any] = {
            "lr": lr,
            "lr_used": p.used(lr),
            "reference_batch": p.reference_batch,
            "batch_size": p.batch_size,
            "on": (p.select if grid else None),
            "trained_on": "train" if watched else "train+val",
        }
        if grid:
            choice["scores"] = {
                f"{rate:g}": score for rate, score in zip(p.lr, scores[trunk.digest])
            }
            choice["at_edge"] = scoring.warn_edge(task, trunk.checkpoint, "learning rate", lr, p.lr)
        ranking = torch.cat(
            [
                scoring.rank_classes(head.logits(f.to(machine.device))[:, column])
                for f in features.split(8192)
            ]
        )
        about = {"trunk_sha256": trunk.state, "trunk_unchanged": True}
        measured.append(
            Measured(checkpoint=trunk.checkpoint, ranking=ranking, chosen=choice, provenance=about)
        )
    if not machine.main:
        return []
    rows = scoring.write(task, measured)
    choice_file.unlink(missing_ok=True)
    return rows


def _read_scores(path: Path) -> dict[str, list[float]]:
    import json

    return {
        str(k): [float(v) for v in values] for k, values in json.loads(path.read_text()).items()
    }


def _scores(
    task: Task, heads: Sequence[Heads], extractor: Extractor, split: str
) -> dict[str, list[float]]:
    """Digest -> the dataset's metric on `split` for every rate."""
    images = getattr(task.splits, split)
    label = np.asarray(images.labels)
    out = {}
    for trunk, head, features in zip(
        extractor.trunks, heads, extractor(images, f"{task.dataset.name} {split} features")
    ):
        rankings: list[list[Tensor]] = [[] for _ in range(head.heads)]
        for part in features.split(8192):
            logits = head.logits(part.to(head.weight.device))
            for i in range(head.heads):
                rankings[i].append(scoring.rank_classes(logits[:, i])[:, 0])
        values = [
            metrics.score(task.dataset.metric, torch.cat(r).numpy(), label, len(images.classes))
            for r in rankings
        ]
        out[trunk.digest] = values
        rates = "  ".join(f"{lr:g}: {v:.2f}" for lr, v in zip(task.protocol.lr, values))  # type: ignore[attr-defined]
        log.info(
            f"{trunk.checkpoint.name} on {task.dataset.name} {split}, by learning rate: {rates}"
        )
    return out


def best_of(scores: Sequence[float]) -> int:
    """The first (smallest) of the best."""
    return max(range(len(scores)), key=lambda i: scores[i])


# On features computed once. The other ranks only help to compute the features.


def _features(task: Task, extractor: Extractor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    name = task.dataset.name
    train = extractor(task.splits.train, f"{name} train features")
    val = extractor(task.splits.val, f"{name} val features")
    test = extractor(task.splits.test, f"{name} test features")
    for trunk in extractor.trunks:
        trunk.verify()
    return train, val, test


def _logreg(
    task: Task, p: LogReg, extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    features = _features(task, extractor)
    if not machine.main:
        return []
    classes, name = len(task.splits.train.classes), task.dataset.name
    y_train, y_val = torch.tensor(task.splits.train.labels), torch.tensor(task.splits.val.labels)
    label = np.asarray(task.splits.val.labels)
    state_file = task.run / "state" / f"{name}.state"
    state = load_state(state_file) if state_file.exists() else {}
    measured = []
    options: dict[str, Any] = {
        "classes": classes,
        "device": machine.device,
        "chunk": p.chunk,
        "max_iterations": p.max_iterations,
        "tolerance": p.tolerance,
    }
    for trunk, train, val, test in zip(extractor.trunks, *features):
        mine = state.setdefault(trunk.digest, {"scores": [], "converged": [], "best": -1.0})
        last: logreg.Fit | None = None
        if "weight" in mine:
            last = logreg.Fit(
                mine["weight"].to(machine.device), mine["bias"].to(machine.device), 0.0, 0, True
            )
        progress = Progress(
            task.run, len(p.penalties), f"{name} logreg", unit="fit", done=len(mine["scores"])
        )
        for l2 in p.penalties[len(mine["scores"]) :]:
            last = logreg.fit([(train, y_train)], l2=l2, start=last, **options)
            ranking = scoring.rank_classes(last.logits(val, p.chunk))[:, 0].numpy()
            score = metrics.score(task.dataset.metric, ranking, label, classes)
            mine["scores"].append(score)
            mine["converged"].append(last.converged)
            mine |= {"weight": last.weight.cpu(), "bias": last.bias.cpu()}
            if score > mine["best"]:  # of equal scores the stronger penalty
                mine |= {
                    "best": score,
                    "best_weight": last.weight.cpu(),
                    "best_bias": last.bias.cpu(),
                }
            save_state(state_file, state)
            progress.advance(1, l2=l2, val=score)
            if stop.requested:
                raise Preempted(
                    f"stopped by {stop.requested} after l2 {l2:g}; the same command continues"
                )
        best = best_of(mine["scores"])
        l2 = p.penalties[best]
        warm = logreg.Fit(
            mine["best_weight"].to(machine.device),
            mine["best_bias"].to(machine.device),
            0.0,
            0,
            True,
        )
        final = logreg.fit([(train, y_train), (val, y_val)], l2=l2, start=warm, **options)
        choice = {
            "l2": l2,
            "on": "val",
            "trained_on": "train+val",
            "scores": {f"{v:g}": s for v, s in zip(p.penalties, mine["scores"])},
            "at_edge": scoring.warn_edge(task, trunk.checkpoint, "penalty", l2, p.penalties),
            "converged": all(mine["converged"]) and final.converged,
        }
        ranking_test = scoring.rank_classes(final.logits(test, p.chunk))
        measured.append(Measured(checkpoint=trunk.checkpoint, ranking=ranking_test, chosen=choice))
    return scoring.write(task, measured)


def _knn(
    task: Task, p: Knn, extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    features = _features(task, extractor)
    if not machine.main:
        return []
    labels = torch.tensor(task.splits.train.labels + task.splits.val.labels)
    measured = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        votes = knn_scores(
            test.to(machine.device),
            (train, val),
            labels,
            classes=len(task.splits.train.classes),
            k=p.k,
            temperature=p.temperature,
        )
        for k in p.k:
            ranking = scoring.rank_classes(votes[k])
            about = {"k": k, "temperature": p.temperature, "bank": "train+val"}
            measured.append(
                Measured(
                    checkpoint=trunk.checkpoint, ranking=ranking, provenance=about, suffix=f"_k{k}"
                )
            )
    return scoring.write(task, measured)


def _fewshot(
    task: Task, p: FewShot, extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    from backbench.results.store import keep_predictions

    features = _features(task, extractor)
    if not machine.main:
        return []
    both = task.splits.both()
    chosen = fewshot.draws(both, shots=p.shots, count=p.draws, seed=task.seed)
    rows = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        values = fewshot.accuracies(
            torch.cat((train, val)),
            both.labels,
            test,
            task.splits.test.labels,
            chosen,
            metric=task.dataset.metric,
            classes=len(both.classes),
            l2=p.l2,
            max_iterations=p.max_iterations,
            tolerance=p.tolerance,
        )
        stem = f"fewshot-{task.dataset.name}-{p.name}-s{task.seed}-{trunk.digest[:12]}"
        kept = keep_predictions(
            task.run, stem, manifest=task.hashes["test"], values=np.asarray(values)
        )
        rows.append(
            scoring.row(
                task,
                trunk.checkpoint,
                metric=metric_names(task)[0],
                value=float(np.mean(values)),
                ci95=metrics.mean_ci(values),
                chosen=None,
                provenance={
                    "predictions": kept,
                    "draws": values,
                    "shots": p.shots,
                    "labelled_from": "train+val",
                },
            )
        )
    task.keep(rows)
    return rows
