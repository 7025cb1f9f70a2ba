"""Scores ImageNet's classifiers on other pictures: a kept head of `linear`, or a timm model's own.

Nothing is trained. A rule says when an answer is right; it is part of the protocol's name:

    all       the best of ImageNet's 1000 classes is the label
    subset    the best of the set's own classes is, each with the largest of its logits
    any       the best of 1000 is one of the image's labels (ReaL)
    official  the best of 1000 is one of those that the image's class stands for (ObjectNet)
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from backbench.datasets import catalog
from backbench.datasets.readers import class_list
from backbench.datasets.splits import InImageNet, Splits
from backbench.errors import BadInput
from backbench.records.store import Result
from backbench.runs.state import StopFlag
from backbench.transfer import head_scores, scoring
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.features.frozen import FrozenTrunk, TokenFeature, state_digest
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocols import (
    OWN_HEAD,
    Geometry,
    ModelGeometry,
    Ood,
    TrimmedGeometry,
)
from backbench.transfer.scoring import Assignment, CheckpointPredictions
from backbench.weights import kept_heads
from backbench.weights.families import timm_classifier
from backbench.weights.kept_heads import KeptHead

CLASSES = 1000
BEST = 5


@dataclass(frozen=True)
class Ruled:
    """A set's labels under a rule: logits over 1000 classes -> answers among the set's classes."""

    rule: str
    labels: tuple[int, ...]  # (N,) places in the set's classes
    of: InImageNet

    @cached_property
    def meaning(self) -> Tensor:
        """(1000,): the class of the set that each of ImageNet's stands for; -1 for none."""
        out = torch.full((CLASSES,), -1)
        for label, ids in enumerate(self.of.ids):
            out[list(ids)] = label
        return out

    def scores(self, logits: Tensor) -> Tensor:
        """The logits (n, C) that compete: all, or the largest of each of the set's classes."""
        if self.rule != "subset":
            return logits
        columns = [logits[:, list(ids)].amax(1) for ids in self.of.ids]
        return torch.stack(columns, dim=1)

    def ranking(self, logits: Tensor, begin: int) -> Tensor:
        """Return the five best answers (n, 5) as labels, for images from `begin` on; of equal
        logits the smaller class is better, and -1 is none of the set's."""
        competing = self.scores(logits)
        best = (
            competing.sort(dim=1, descending=True, stable=True).indices[:, :BEST].cpu()
        )
        broken = ~torch.isfinite(competing).all(1).cpu()
        if self.rule == "subset":
            found = best
        else:
            found = self.meaning[best]
            if (
                self.of.answers is not None
            ):  # an answer that is right is the label itself
                for row, answer in enumerate(best.tolist()):
                    right = self.of.answers[begin + row]
                    hits = torch.tensor([each in right for each in answer])
                    found[row, hits] = self.labels[begin + row]
        found[broken] = -1
        return found

    @property
    def columns(self) -> list[int] | None:
        """The column of `scores` that is each image's label; None where several are right."""
        if self.rule == "subset":
            return list(self.labels)
        if self.rule != "all":
            return None
        return [self.of.ids[label][0] for label in self.labels]


def refuse(p: Ood, name: str, splits: Splits) -> None:
    """BadInput for a dataset that is no such set, or has no such rule."""
    rules = catalog.find(name).rules
    if splits.imagenet is None:
        sets = ", ".join(n for n, row in catalog.DATASETS.items() if row.rules)
        raise BadInput(f"{name}: no set for ImageNet's classifiers; there are {sets}")
    if p.rule not in rules:
        raise BadInput(
            f"{name}: has no rule '{p.rule}'; write rule={' or rule='.join(rules)}"
        )


def heads_of(task: Assignment[Ood]) -> dict[str, KeptHead]:
    """Return the kept head of each checkpoint, by its digest; none where each brings its own.
    BadInput for a checkpoint without one."""
    p, heads = task.protocol, {}
    where, classes = task.heads or task.run.parent, class_list("imagenet")
    for checkpoint in task.checkpoints:
        if p.of == OWN_HEAD:
            if task.seed:  # equal numbers would pass for trainings that agree
                raise BadInput(
                    f"--seed {task.seed}: {checkpoint.name} has one own head; leave it out"
                )
            timm_classifier.classifier(checkpoint)
            continue
        bound = scoring.bound_to(checkpoint, p.of, p, classes, task.seed)
        module = checkpoint.backbone()
        width = module.feature_dim if p.reads == "trunk" else module.token_dim
        heads[checkpoint.digest] = kept_heads.load(where, bound, width, CLASSES)
    return heads


def measure(
    task: Assignment[Ood], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    p, test, trim = task.protocol, task.splits.test, task.dataset.trim
    assert p.rule is not None and task.splits.imagenet is not None
    ruled = Ruled(p.rule, test.labels, task.splits.imagenet)
    # 1. How images are cut for the heads.
    heads = task.found
    passes: list[tuple[Extractor, Geometry]] = [(extractor, p.geometry)]
    if p.of == OWN_HEAD:
        passes.clear()
        for trunk in extractor.trunks:
            whole = dataclasses.replace(extractor, trunks=[own_classifier(trunk)])
            passes.append((whole, _of_model(trunk, p)))
    elif (
        p.reads == "tokens"
    ):  # these are too many to be kept, so features are logits here, too
        trunks = []
        for trunk in extractor.trunks:
            kept = heads[trunk.digest]
            logits = TokenFeature(kept.logits, CLASSES, kept.digest)
            trunks.append(dataclasses.replace(trunk, of_tokens=logits))
        passes = [(dataclasses.replace(extractor, trunks=trunks), p.geometry)]
    # 2. Features of all trunks of one geometry in a pass; a whole model's are its logits.
    measured = []
    for of_pass, geometry in passes:
        cut = TrimmedGeometry(trim=trim, of=geometry) if trim else geometry
        found = dataclasses.replace(of_pass, geometry=cut)(
            test, f"{task.dataset.name} images"
        )
        for trunk, features in zip(of_pass.trunks, found):
            trunk.verify()
            if not machine.main:
                continue
            head = heads.get(trunk.digest)
            one = _predictions(task, ruled, trunk, head, features)
            if isinstance(geometry, ModelGeometry):
                own = {**one.provenance, "own_geometry": dict(geometry.evaluation)}
                one = dataclasses.replace(one, provenance=own)
            measured.append(one)
    return scoring.write(task, measured) if machine.main else []


def _logits(
    head: KeptHead | None, features: Tensor, trunk: FrozenTrunk
) -> Iterator[Tensor]:
    for rows in features.split(head_scores.ROWS):
        sent = rows.to(trunk.device)
        yield sent if head is None or trunk.of_tokens is not None else head.logits(sent)


def _predictions(
    task: Assignment[Ood],
    ruled: Ruled,
    trunk: FrozenTrunk,
    head: KeptHead | None,
    features: Tensor,
) -> CheckpointPredictions:
    """One classifier's answers, and its facts on each image."""
    rankings, begin = [], 0
    for logits in _logits(head, features, trunk):
        rankings.append(ruled.ranking(logits, begin))
        begin += len(logits)
    ranking, labels = torch.cat(rankings), torch.tensor(ruled.labels)[:, None]
    scores = None
    if ruled.columns is not None:
        competing = map(ruled.scores, _logits(head, features, trunk))
        temperature = None if head is None else head.temperature
        scores = head_scores.compact(competing, ruled.columns, temperature)
    hits = ranking == labels
    right = {"top1": int(hits[:, 0].sum()), "top5": int(hits.any(1).sum())}
    said = scoring.keep_said(
        task, trunk.checkpoint, head or trunk.own_head or "", scores
    )
    return CheckpointPredictions(
        checkpoint=trunk.checkpoint,
        ranking=ranking,
        provenance={**said, "trunk_sha256": trunk.state, "right": right},
    )


# A timm model with its own classifier


class _WholeModel(torch.nn.Module):
    """A timm model whose features are its logits, in the place of a trunk."""

    feature_dim = CLASSES

    def __init__(
        self, model: torch.nn.Module, memory_format: torch.memory_format
    ) -> None:
        super().__init__()
        self.model, self.memory_format = model, memory_format

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)


def own_classifier(trunk: FrozenTrunk) -> FrozenTrunk:
    """Return the whole model of a trunk's checkpoint. Its forward pass, not a product with pooled
    features, gives logits: some heads have two classifiers, convolutions or a norm."""
    model, head = timm_classifier.classifier(trunk.checkpoint)
    whole: Any = _WholeModel(model, trunk.module.memory_format).to(trunk.device).eval()
    parts = torch.nn.ParameterDict({k.replace(".", "/"): v for k, v in head.items()})
    digest = state_digest(parts)
    return dataclasses.replace(
        trunk, module=whole, state=state_digest(whole), own_head=digest
    )


def _of_model(trunk: FrozenTrunk, p: Ood) -> ModelGeometry:
    """The size, crop and interpolation that timm evaluates the weights by."""
    about: Mapping[str, Any] = timm_classifier.evaluation(
        trunk.checkpoint, test_size=p.test_size
    )
    size = int(about["input_size"][-1])
    return ModelGeometry(resize=size, crop=size, evaluation=dict(about))


PROBE = Probe(
    measure=measure,
    refuse=refuse,
    fits=heads_of,
    together=True,
    words=lambda p: f"{p.of}, rule {p.rule}",
)
