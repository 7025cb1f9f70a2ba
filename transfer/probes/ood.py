"""Scores ImageNet's classifiers on other pictures: a kept head of `linear`, or a timm model's own.

Nothing is trained. A rule says when an answer is right, and is part of the protocol's name:

    all       the best of ImageNet's 1000 classes is the label
    subset    the best of the set's own classes is the label; the logit of such a class is the
              largest of those of ImageNet's classes that belong to it
    any       the best of 1000 is one of the image's labels (ReaL)
    official  the best of 1000 is one of those that the image's class stands for (ObjectNet)
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from backbench.datasets import catalog
from backbench.datasets.readers import class_list
from backbench.datasets.splits import InImageNet, Splits
from backbench.errors import BadInput
from backbench.records.store import Result
from backbench.runs.state import StopFlag
from backbench.transfer import head_scores, keeping
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.features.frozen import FrozenTrunk, TokenFeature, state_digest
from backbench.transfer.keeping import CheckpointPredictions
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Geometry, Protocol
from backbench.weights import kept_heads, trunk_facts
from backbench.weights.families import timm_classifier
from backbench.weights.kept_heads import KeptHead

if TYPE_CHECKING:
    from PIL import Image

CLASSES = 1000
BEST = 5
OWN_HEAD = "own"  # the classifier that a timm model came with
RULES = ("all", "subset", "any", "official")


@dataclass(frozen=True, kw_only=True)
class ModelGeometry(Geometry):
    """Brings images to size as timm does to evaluate a model: by its input_size, crop_pct,
    crop_mode and interpolation."""

    evaluation: dict[str, Any]

    def transform(self) -> "Callable[[Image.Image], Image.Image]":
        return timm_classifier.view(self.evaluation)


@dataclass(frozen=True, kw_only=True)
class TrimmedGeometry(Geometry):
    """Cuts `trim` pixels from each side, then brings the image to size as `of` does."""

    trim: int
    of: Geometry

    def transform(self) -> "Callable[[Image.Image], Image.Image]":
        cut = self.trim
        inner = self.of.transform()
        return lambda x: inner(x.crop((cut, cut, x.width - cut, x.height - cut)))


@dataclass(frozen=True, kw_only=True)
class Ood(Protocol):
    """ImageNet's classifiers on other pictures; nothing is trained or chosen."""

    of: str = OWN_HEAD  # or the protocol whose kept heads are used
    reads: Literal["trunk", "tokens"] = "trunk"  # what those heads read
    rule: str | None = None  # of RULES; null: each that a set has
    # A model's own head has the model's geometry. Some models are tested at a larger size than they
    # were trained at: true takes that size.
    test_size: bool = True

    @property
    def name(self) -> str:
        name = self.of
        # The protocol of heads on bfloat16 features has that in its name already.
        if self.precision != "fp32" and not name.endswith(f"-{self.precision}"):
            name += f"-{self.precision}"
        if not self.test_size:
            name += "-train-size"
        return f"{name}-{self.rule}"

    @property
    def space(self) -> str:
        return self.reads


@dataclass(frozen=True)
class Ruled:
    """A set's labels under a rule, by which logits over 1000 classes become answers among the set's
    classes."""

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
        """Return the logits (n, C) that compete: all, or the largest of each of the set's classes."""
        if self.rule != "subset":
            return logits
        columns = [logits[:, list(ids)].amax(1) for ids in self.of.ids]
        return torch.stack(columns, dim=1)

    def ranking(self, logits: Tensor, begin: int) -> Tensor:
        """Return the five best answers (n, 5) as labels, for images from `begin` on. Of equal logits
        the smaller class is better; -1 is none of the set's classes."""
        competing = self.scores(logits)
        ordered = competing.sort(dim=1, descending=True, stable=True)
        best = ordered.indices[:, :BEST].cpu()
        found = best if self.rule == "subset" else self.meaning[best]
        # Where several answers are right, each of them becomes the image's label.
        if self.rule != "subset" and self.of.answers is not None:
            for row, answer in enumerate(best.tolist()):
                right = self.of.answers[begin + row]
                hits = torch.tensor([each in right for each in answer])
                found[row, hits] = self.labels[begin + row]
        # A head that has diverged has no answer.
        broken = ~torch.isfinite(competing).all(1).cpu()
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
    """Raise BadInput for a dataset that is no such set, or has no such rule."""
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
    p = task.protocol
    where = task.heads or task.run.parent
    classes = class_list("imagenet")
    heads = {}
    for checkpoint in task.checkpoints:
        if p.of == OWN_HEAD:
            if task.seed:  # equal numbers would pass for trainings that agree
                raise BadInput(
                    f"--seed {task.seed}: {checkpoint.name} has one own head; leave it out"
                )
            # It refuses a checkpoint without a whole classifier; the model itself is made later
            timm_classifier.classifier(checkpoint)
            continue
        bound = keeping.bound_to(
            checkpoint,
            p.of,
            reads=p,
            geometry=task.geometry,
            classes=classes,
            seed=task.seed,
        )
        blank = checkpoint.blank()
        width = blank.feature_dim if p.reads == "trunk" else blank.token_dim
        heads[checkpoint.digest] = kept_heads.load(where, bound, width, CLASSES)
    return heads


def measure(
    task: Assignment[Ood], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    p = task.protocol
    test = task.splits.test
    trim = task.dataset.trim
    assert p.rule is not None and task.splits.imagenet is not None
    ruled = Ruled(p.rule, test.labels, task.splits.imagenet)
    # 1. Which trunks are read in one pass over the images, and how images are cut for them.
    heads = task.found
    passes: list[tuple[Extractor, Geometry]] = []
    if p.of == OWN_HEAD:
        # Each model has a geometry of its own. Its features are its logits.
        for trunk in extractor.trunks:
            whole = dataclasses.replace(extractor, trunks=[own_classifier(trunk)])
            passes.append((whole, _of_model(trunk, p)))
    elif p.reads == "tokens":
        # Tokens are too many to be kept, so features are logits here, too.
        trunks = []
        for trunk in extractor.trunks:
            kept = heads[trunk.digest]
            logits = TokenFeature(kept.logits, CLASSES, kept.digest)
            trunks.append(dataclasses.replace(trunk, of_tokens=logits))
        passes.append((dataclasses.replace(extractor, trunks=trunks), p.geometry))
    else:
        passes.append((extractor, p.geometry))
    # 2. The features of each pass, and the answers that follow from them
    measured = []
    for of_pass, geometry in passes:
        cut = TrimmedGeometry(trim=trim, of=geometry) if trim else geometry
        cutting = dataclasses.replace(of_pass, geometry=cut)
        found = cutting(test, f"{task.dataset.name} images")
        for trunk, features in zip(of_pass.trunks, found):
            trunk.verify()
            if not machine.main:
                continue
            head = heads.get(trunk.digest)
            one = _predictions(task, ruled, trunk, head, features)
            if isinstance(geometry, ModelGeometry):
                # The model's own size, and not that of the recipe, is what was read
                side = geometry.evaluation["input_size"][-1]
                own = {
                    **one.provenance,
                    "own_geometry": dict(geometry.evaluation),
                    "trunk": trunk_facts.facts(trunk.checkpoint, side),
                    "size": keeping.size_facts(trunk.checkpoint, side),
                }
                one = dataclasses.replace(one, provenance=own)
            measured.append(one)
    return keeping.write(task, measured) if machine.main else []


def _logits(
    head: KeptHead | None, features: Tensor, trunk: FrozenTrunk
) -> Iterator[Tensor]:
    """Yield the logits (n, 1000) of some rows of features at a time."""
    for rows in features.split(head_scores.ROWS):
        sent = rows.to(trunk.device)
        if head is None or trunk.of_tokens is not None:  # features are logits already
            yield sent
        else:
            yield head.logits(sent)


def _predictions(
    task: Assignment[Ood],
    ruled: Ruled,
    trunk: FrozenTrunk,
    head: KeptHead | None,
    features: Tensor,
) -> CheckpointPredictions:
    """Return one classifier's answers, and keep its scores of each image."""
    rankings = []
    begin = 0
    for logits in _logits(head, features, trunk):
        rankings.append(ruled.ranking(logits, begin))
        begin += len(logits)
    ranking = torch.cat(rankings)
    scores = None
    if ruled.columns is not None:
        competing = map(ruled.scores, _logits(head, features, trunk))
        temperature = None if head is None else head.temperature
        scores = head_scores.compact(competing, ruled.columns, temperature)
    hits = ranking == torch.tensor(ruled.labels)[:, None]
    right = {"top1": int(hits[:, 0].sum()), "top5": int(hits.any(1).sum())}
    said = keeping.keep_said(
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
        self.model = model
        self.memory_format = memory_format

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)


def own_classifier(trunk: FrozenTrunk) -> FrozenTrunk:
    """Return the whole model of a trunk's checkpoint, in the place of the trunk. Its own forward
    pass gives the logits, as some heads have two classifiers, convolutions or a norm."""
    model, head = timm_classifier.classifier(trunk.checkpoint)
    whole: Any = _WholeModel(model, trunk.module.memory_format).to(trunk.device).eval()
    return dataclasses.replace(
        trunk,
        module=whole,
        state=state_digest(whole),
        own_head=head.digest,
    )


def _of_model(trunk: FrozenTrunk, p: Ood) -> ModelGeometry:
    """Return the size, crop and interpolation that timm evaluates the weights by."""
    about: Mapping[str, Any] = timm_classifier.evaluation(
        trunk.checkpoint, test_size=p.test_size
    )
    size = int(about["input_size"][-1])
    return ModelGeometry(resize=size, crop=size, evaluation=dict(about))


PROBE = Probe(
    protocol=Ood,
    measure=measure,
    refuse=refuse,
    fits=heads_of,
    together=True,
    words=lambda p: f"{p.of}, rule {p.rule}",
)
