"""Attentive probes pool a frozen trunk's tokens by learned queries, followed by a linear layer.

Tokens of ImageNet would be 385 GB, so all heads train on the stream, in one pass, without making
keys and values of tokens x_t. A score q . K x_t is (K^T q) . x_t (a bias of K cancels in the
softmax); values V x_t + b with weights a_t sum to V (sum of a_t x_t) + b. So a head is a few query
vectors u over the tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.datasets import splits
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList
from backbench.parallel import distributed
from backbench.parallel.batchnorm import SyncBatchNorm
from backbench.records.store import Result
from backbench.runs import seeding
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.transfer import head_scores, scoring
from backbench.transfer.devices import Machine
from backbench.transfer.features.batches import Pictures, centred, equal_shares, loader
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.head_scores import Scores
from backbench.transfer.heads import TokenHeads, copies
from backbench.transfer.probes.kind import Probe
from backbench.transfer.probes.sgd import best_heads, chosen_rate, train_on_tokens
from backbench.transfer.protocols import Attentive
from backbench.transfer.scoring import Assignment, CheckpointPredictions
from backbench.weights.kept_heads import KeptHead

PIECE = 2**26  # numbers that are pooled at a time: 256 MB


class QueryPoolHeads(TokenHeads):
    """Trains H heads with C classes on one trunk's tokens of D channels, each as alone. `pool:
    capi` has Q = D / 64 queries of 64 numbers, a key and a value matrix with biases
    (facebookresearch/capi, eval_classification.py, AttnPoolClassifier). `pool: ep` has Q = 32
    queries of D numbers, a value matrix, and a batch norm before the linear layer
    (billpsomas/efficient-probing, poolings/ep.py). Query j reads slice j of the values. `pool:
    mean` is a linear layer on the mean token."""

    def __init__(
        self, p: Attentive, classes: int, dim: int, *, seed: int, machine: Machine
    ) -> None:
        self.p, self.count, self.dim, self.machine = p, len(p.grid), dim, machine
        self.queries = {"capi": dim // 64, "ep": 32, "mean": 1}[p.pool]
        if dim % {"capi": 64, "ep": 32, "mean": 1}[p.pool]:
            raise BadInput(
                f"tokens of {dim} numbers do not divide into the slices of {p.name}"
            )
        generator = seeding.generator(seed, "attentive", classes, dim)
        self.heads = copies(
            _start(p.pool, classes, dim, generator), self.count, machine.device
        )
        self.norm = None
        if p.pool == "ep":
            self.norm = SyncBatchNorm(self.count * dim, eps=1e-6, affine=False).to(
                machine.device
            )
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        """Two groups of parameters for each head, which has its own rate; biases do not decay."""
        p, groups = self.p, []
        for head, (_, of_head) in zip(self.heads, self.p.grid):
            for decays in (True, False):
                chosen = [
                    each
                    for name, each in head.items()
                    if name.endswith("bias") != decays
                ]
                decay = of_head if decays else 0.0
                groups.append({"params": chosen, "weight_decay": decay})
        if p.optimizer == "lars":
            return Lars(groups, momentum=p.momentum)
        return torch.optim.AdamW(groups, betas=(p.momentum, p.beta2))

    def _all(self, name: str) -> Tensor:
        """A tensor of every head, (H, ...)."""
        return torch.stack([head[name] for head in self.heads])

    def logits(self, tokens: Tensor) -> Tensor:
        """Tokens (N, T, D) -> (N, H, C)."""
        n, _, dim = tokens.shape
        if self.p.pool == "mean":
            mean = tokens.mean(1)
            return torch.einsum("nd,hcd->nhc", mean, self._all("weight")) + self._all(
                "bias"
            )
        count, queries, own = self.count, self.queries, dim // self.queries
        # 1. Each query's weights over the tokens, (N, H Q, T), and what it pools
        weights = torch.softmax(
            self._over_tokens().view(-1, dim) @ tokens.transpose(1, 2), 2
        )
        pooled = (weights @ tokens).view(n, count, queries, dim)
        # 2. Each query's slice of the values, side by side, and the linear layer
        values = self._all("value").view(count, queries, own, dim)
        x = torch.einsum("nhqd,hqsd->nhqs", pooled, values).reshape(n, count, dim)
        if self.norm is None:
            x = x + self._all("value_bias")
        else:
            x = self.norm(x.reshape(n, -1)).view(n, count, dim)
        return torch.einsum("nhd,hcd->nhc", x, self._all("weight")) + self._all("bias")

    def _over_tokens(self) -> Tensor:
        """The queries over tokens, (H, Q, D)."""
        count, queries, dim = self.count, self.queries, self.dim
        u = self._all("query")
        if self.p.pool == "ep":
            return u * dim**-0.5
        keys, u = (
            self._all("key").view(count, queries, -1, dim),
            u.view(count, queries, -1),
        )
        return torch.einsum("hqsd,hqs->hqd", keys, u) * (dim // queries) ** -0.5

    @torch.no_grad()
    def kept(self, index: int) -> KeptHead:
        """Fold one head's keys, value bias and batch norm into its queries and linear layer."""
        head = {
            name: tensor.detach().cpu() for name, tensor in self.heads[index].items()
        }
        weight, bias, query = head["weight"], head["bias"], None
        if self.p.pool != "mean":
            query = self._over_tokens()[index].cpu()
        if "value_bias" in head:
            bias = bias + weight @ head["value_bias"]
        if self.norm is not None:
            own = slice(index * self.dim, (index + 1) * self.dim)
            state = {
                name: tensor.cpu() for name, tensor in self.norm.state_dict().items()
            }
            weight = weight / (state["running_var"][own] + self.norm.eps).sqrt()
            bias = bias - weight @ state["running_mean"][own]
        return KeptHead(weight, bias, query=query, value=head.get("value"))

    @torch.no_grad()
    def scores(self, tokens: Tensor) -> Tensor:
        """The logits (N, H, C) of the heads as they are, for maps (N, h, w, D)."""
        if self.norm is not None:
            self.norm.eval()
        return torch.cat([self.logits(part) for part in self._pieces(tokens)])

    def _pieces(self, tokens: Tensor) -> Sequence[Tensor]:
        return tokens.flatten(1, 2).split(
            max(1, PIECE // (self.count * self.queries * self.dim))
        )

    def step(
        self, tokens: Tensor, labels: Tensor, rates: Tensor, *, batch: int, **_: float
    ) -> Tensor:
        """Step on this share: maps (n, h, w, D), labels (n,); return its summed losses (H,)."""
        # 1. The gradients of pieces add up; a batch norm must see the whole batch.
        pieces = self._pieces(tokens)
        if self.norm is not None:
            self.norm.train()
            pieces = [tokens.flatten(1, 2)]
        losses = torch.zeros(self.count, device=tokens.device)
        for piece, known in zip(pieces, labels.split([len(each) for each in pieces])):
            logits = self.logits(piece)
            truth = known[:, None].expand(-1, self.count)
            of_heads = F.cross_entropy(
                logits.transpose(1, 2), truth, reduction="none"
            ).sum(0)
            (of_heads.sum() / batch).backward()
            losses += of_heads.detach()
        # 2. The step
        self.descend(rates)
        return losses


def _start(
    pool: str, classes: int, dim: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """The parameters that every head begins with. A bias of the keys would cancel."""
    # 1. What is drawn, in the order of the draws; EP's bias is drawn, too.
    drawn: dict[str, tuple[int, ...]] = {"weight": (classes, dim)}
    if pool == "capi":
        drawn = {"query": (dim,), "key": (dim, dim), "value": (dim, dim), **drawn}
    if pool == "ep":
        drawn = {"query": (32, dim), "value": (dim, dim), **drawn, "bias": (classes,)}
    start = {}
    for name, shape in drawn.items():
        start[name] = torch.empty(shape)
        if pool != "ep":
            nn.init.trunc_normal_(start[name], std=0.02, generator=generator)
        elif name == "query":
            start[name].normal_(0, 0.02, generator=generator)
        else:  # torch's default of a linear layer
            start[name].uniform_(-(dim**-0.5), dim**-0.5, generator=generator)
    # 2. What begins at 0
    if pool == "capi":
        start["value_bias"] = torch.zeros(dim)
    start.setdefault("bias", torch.zeros(classes))
    return start


class HeadsOfProtocols:
    """The heads of several protocols on one trunk: each steps as alone, on the same tokens."""

    def __init__(self, parts: Mapping[str, QueryPoolHeads]) -> None:
        self.parts = parts  # by the protocol's name
        self.counts = [heads.count for heads in parts.values()]

    def step(
        self, tokens: Tensor, labels: Tensor, rates: Tensor, *, batch: int, **_: float
    ) -> Tensor:
        losses = []
        for heads, own in zip(self.parts.values(), rates.split(self.counts)):
            losses.append(heads.step(tokens, labels, own, batch=batch))
        return torch.cat(losses)

    def scores(self, tokens: Tensor) -> Tensor:
        return torch.cat([heads.scores(tokens) for heads in self.parts.values()], 1)

    def state(self) -> dict[str, object]:
        return {name: heads.state() for name, heads in self.parts.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, heads in self.parts.items():
            heads.load(state[name])


class Lars(torch.optim.Optimizer):
    """LARS as in MAE and EP (util/lars.py): the gradient of a tensor of two dimensions and more is
    scaled by 0.001 |p| / |g|, then momentum, then the step."""

    TRUST = 0.001

    def __init__(self, groups: Iterable[dict[str, object]], *, momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                if p.ndim > 1:
                    g = g.add(p, alpha=group["weight_decay"])
                    ratio = self.TRUST * p.norm() / g.norm()
                    g = g * torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0)
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["momentum"]).add_(g)
                p.add_(mean, alpha=-group["lr"])


def measure(
    task: Assignment[Attentive], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    """The rows of all trunks by one protocol."""
    return measure_several([task], extractor, machine, stop)[0]


def measure_several(
    tasks: Sequence[Assignment[Attentive]],
    extractor: Extractor,
    machine: Machine,
    stop: StopFlag,
) -> list[list[Result]]:
    """Return, on rank 0, the rows of all trunks by each protocol; one stream serves them all."""
    task, trunks = tasks[0], extractor.trunks
    p = task.protocol
    if p.batch_size % machine.world and any(t.protocol.pool == "ep" for t in tasks):
        raise BadInput(
            f"--devices: {machine.world} do not divide a batch of {p.batch_size} images"
        )
    # 1. All heads in one pass; one alone has nothing to choose, and trains on all of train.
    train, held = _parts(task.splits, p)
    heads, classes = [], len(train.classes)
    for trunk in trunks:
        dim, parts = trunk.module.token_dim, {}
        for t in tasks:
            own = QueryPoolHeads(t.protocol, classes, dim, seed=t.seed, machine=machine)
            parts[t.protocol.name] = own
        heads.append(HeadsOfProtocols(parts))
    train_on_tokens(tasks, trunks, heads, train, machine=machine, stop=stop)
    # 2. The rates, by what was held out
    stream = TokenLogits(task, trunks, heads, machine, stop)
    scores = None if held is None else _held_out_scores(task, stream, held)
    finals, columns = [], [0]  # where each protocol's heads begin
    for t in tasks:
        mine = slice(columns[-1], columns[-1] + len(t.protocol.grid))
        columns.append(mine.stop)
        of_protocol = [each.parts[t.protocol.name] for each in heads]
        own_scores = None if scores is None else [of_trunk[mine] for of_trunk in scores]
        finals.append(best_heads(t.protocol, of_protocol, own_scores))
    # 3. The one look at test, by the chosen heads
    picked = []
    for n in range(len(trunks)):
        picked.append([begin + final[n].index for begin, final in zip(columns, finals)])
    answers = _answers(stream, task.splits.test, picked)
    for trunk in trunks:
        trunk.verify()
    if not machine.main:
        return [[] for _ in tasks]
    # 4. Heads and rows
    rows = []
    for k, t in enumerate(tasks):
        measured = []
        for n, (trunk, final) in enumerate(zip(trunks, finals[k])):
            ranking, scores_of_test = answers[n][k]
            chosen = chosen_rate(t, trunk, final)
            head = heads[n].parts[t.protocol.name].kept(final.index)
            one = CheckpointPredictions(
                checkpoint=trunk.checkpoint,
                ranking=ranking,
                chosen=chosen,
                provenance={
                    **scoring.keep_trained(
                        t, trunk.checkpoint, head, scores_of_test, chosen
                    ),
                    "trunk_sha256": trunk.state,
                    "tokens": trunk.module.strides[-1:],
                    "held_out": 0 if held is None else len(held),
                },
            )
            measured.append(one)
        rows.append(scoring.write(t, measured))
    return rows


def _held_out_scores(
    task: Assignment[Attentive], stream: "TokenLogits", held: ImageList
) -> list[list[float]]:
    """Per trunk, the dataset's metric of every head on the images that were held out."""
    label, classes = np.asarray(held.labels), len(held.classes)
    firsts: list[list[Tensor]] = [[] for _ in stream.trunks]  # (n, H) of each batch
    for _, of_trunks in stream(held):
        for logits, out in zip(of_trunks, firsts):
            best = scoring.rank_classes(logits.flatten(0, 1))[:, 0]
            out.append(best.view(logits.shape[:2]))
    scores = []
    for of_trunk in firsts:
        by_head = torch.cat(of_trunk).T.numpy()
        scores.append(
            [scoring.score(task.dataset.metric, b, label, classes) for b in by_head]
        )
    return scores


def _answers(
    stream: "TokenLogits", test: ImageList, picked: Sequence[Sequence[int]]
) -> list[list[tuple[Tensor, Scores | None]]]:
    """The best classes and the scores of the test images, per trunk by each of its `picked` heads."""
    parts: list[list[list[tuple[Tensor, Scores | None]]]] = [
        [[] for _ in own] for own in picked
    ]
    for first, of_trunks in stream(test):
        for by_head, own, out in zip(of_trunks, picked, parts):
            for index, of_head in zip(own, out):
                logits = by_head[:, index]
                facts = head_scores.compact(
                    [logits], test.labels[first:][: len(logits)], None
                )
                of_head.append((scoring.rank_classes(logits), facts))
    answers = []
    for out in parts:
        whole = [tuple(zip(*of_head)) for of_head in out]
        answers.append(
            [(torch.cat(ranked), head_scores.joined(facts)) for ranked, facts in whole]
        )
    return answers


def _parts(found: Splits, p: Attentive) -> tuple[ImageList, ImageList | None]:
    """The images to train on, and those that choose: official val, or a share of each class."""
    if len(p.grid) == 1:
        return found.both(), None
    if not found.held_out:
        return found.train, found.val
    everything = found.both()
    train, held = splits.hold_out(everything, share=p.holdout)
    return everything.subset(train), everything.subset(held)


@dataclass(frozen=True)
class TokenLogits:
    """The heads of all trunks on images, batch by batch, on every rank."""

    task: Assignment[Attentive]
    trunks: Sequence[FrozenTrunk]
    heads: Sequence[HeadsOfProtocols]
    machine: Machine
    stop: StopFlag

    def __call__(self, images: ImageList) -> Iterator[tuple[int, list[Tensor]]]:
        """A batch's first image, and per trunk its logits (n, H, C)."""
        machine, batch, count = (
            self.machine,
            self.task.protocol.feature_batch,
            len(images),
        )
        shares = equal_shares(0, count, batch, machine.rank, machine.world)
        what = f"{self.task.dataset.name} tokens"
        progress = Progress(
            self.task.run if machine.main else None, count, what, unit="image"
        )
        view = centred(self.task.protocol.geometry)
        pictures = loader(Pictures(images, view), shares, machine=machine)
        for begin, (pixels, _) in zip(range(0, count, batch), pictures):
            size = min(batch, count - begin)  # the rest is padding
            here = pixels.to(machine.device, non_blocking=True)
            logits = []
            for maps, own in zip(
                forward_all(self.trunks, here, tokens=True), self.heads
            ):
                logits.append(
                    distributed.gather_without_gradient(own.scores(maps))[:size]
                )
            yield begin, logits
            progress.advance(size)
            machine.preempt(self.stop, f"at {what}")


def _work(p: Attentive, name: str, found: Splits, _: int) -> dict[str, int]:
    train, held = _parts(found, p)
    scored = len(found.test) + (0 if held is None else len(held))
    return {"step": p.steps(name, len(train)), "image": scored}


PROBE = Probe(
    measure=measure,
    measure_several=measure_several,
    stream=Attentive.stream,
    together=True,
    words=lambda p: f"{p.pool}, {len(p.grid)} heads, {p.batch_size} images a step",
    work=_work,
)
