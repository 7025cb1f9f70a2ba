"""Attentive probes pool a frozen trunk's tokens by learned queries, followed by a linear layer.

ImageNet's tokens would take 385 GB, so all heads train on the stream of images, in one pass. Keys
and values of the tokens x_t are never made. The score q . K x_t equals (K^T q) . x_t, and a bias of
K cancels in the softmax. Values V x_t + b with weights a_t sum to V (sum of a_t x_t) + b. So the
pooling of a head needs only a few vectors u = K^T q over the tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from backbench.datasets import splits
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList
from backbench.parallel import distributed
from backbench.parallel.batchnorm import SyncBatchNorm
from backbench.records.store import Result
from backbench.requests.bounds import NotNegative
from backbench.runs import seeding
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.transfer import head_scores, keeping, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.batches import Pictures, centred, equal_shares, loader
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.head_scores import Scores
from backbench.transfer.heads import TokenHeads, copies
from backbench.transfer.keeping import CheckpointPredictions
from backbench.transfer.probes.kind import Probe
from backbench.transfer.probes.sgd import (
    TokenProbe,
    best_heads,
    chosen_rate,
    train_on_tokens,
)
from backbench.weights.kept_heads import KeptHead

PIECE = 2**26  # numbers that are pooled at a time: 256 MB


@dataclass(frozen=True, kw_only=True)
class Attentive(TokenProbe):
    """Learned queries pool the tokens, or `pool: mean` takes their mean; a linear layer follows."""

    pool: Literal["capi", "ep", "mean"] = "capi"
    beta2: Annotated[float, Field(ge=0, lt=1)] = (
        0.95  # AdamW's; its first is `momentum`
    )
    # Each of these goes with each rate, in the place of `weight_decay`.
    weight_decays: tuple[NotNegative, ...] = ()
    # An official val chooses the rate; without one, this share of train does.
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment is None:
            raise ValueError("attentive heads train on views: give `augment`")

    @property
    def space(self) -> str:
        return "tokens"

    @property
    def grid(self) -> list[tuple[float, float]]:
        decays = self.weight_decays or (self.weight_decay,)
        return [(lr, decay) for lr in self.lr for decay in decays]

    def stream(self) -> str:
        """Name all that decides which tokens a step sees; protocols of one stream share a pass."""
        of_heads = {
            "protocol",
            "pool",
            "optimizer",
            "lr",
            "weight_decay",
            "weight_decays",
            "momentum",
            "beta2",
        }
        keys = {}
        for f in fields(self):
            if f.name not in of_heads:
                keys[f.name] = getattr(self, f.name)
        # A grid holds images out, so it sees others than a single rate does.
        return repr((len(self.grid) > 1, keys))


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
        self.p = p
        self.count = len(p.grid)
        self.dim = dim
        self.machine = machine
        self.queries = {"capi": dim // 64, "ep": 32, "mean": 1}[p.pool]
        if dim % {"capi": 64, "ep": 32, "mean": 1}[p.pool]:
            raise BadInput(
                f"tokens of {dim} numbers do not divide into the slices of {p.name}"
            )
        generator = seeding.generator(seed, "attentive", classes, dim)
        start = _start(p.pool, classes, dim, generator)
        self.heads = copies(start, self.count, machine.device)
        self.norm = None
        if p.pool == "ep":
            # One norm for all heads, each of which has its own channels
            norm = SyncBatchNorm(self.count * dim, eps=1e-6, affine=False)
            self.norm = norm.to(machine.device)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        """Make the optimiser, with two groups of parameters for each head: biases do not decay."""
        p = self.p
        groups: list[dict[str, object]] = []
        for head, (_, decay) in zip(self.heads, p.grid):
            biases = [each for name, each in head.items() if name.endswith("bias")]
            others = [each for name, each in head.items() if not name.endswith("bias")]
            groups.append({"params": others, "weight_decay": decay})
            groups.append({"params": biases, "weight_decay": 0.0})
        if p.optimizer == "lars":
            return Lars(groups, momentum=p.momentum)
        return torch.optim.AdamW(groups, betas=(p.momentum, p.beta2))

    def _all(self, name: str) -> Tensor:
        """Stack the tensor of that name of every head, (H, ...)."""
        return torch.stack([head[name] for head in self.heads])

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (N, H, C) of tokens (N, T, D)."""
        n, _, dim = tokens.shape
        weight, bias = self._all("weight"), self._all("bias")
        if self.p.pool == "mean":
            return torch.einsum("nd,hcd->nhc", tokens.mean(1), weight) + bias
        count, queries = self.count, self.queries
        # 1. Each query's weights over the tokens, (N, H Q, T), and what it pools
        u = self._over_tokens().view(-1, dim)
        weights = torch.softmax(u @ tokens.transpose(1, 2), 2)
        pooled = (weights @ tokens).view(n, count, queries, dim)
        # 2. Each query's slice of the values, side by side, and the linear layer
        values = self._all("value").view(count, queries, dim // queries, dim)
        x = torch.einsum("nhqd,hqsd->nhqs", pooled, values).reshape(n, count, dim)
        if self.norm is None:
            x = x + self._all("value_bias")
        else:
            x = self.norm(x.reshape(n, -1)).view(n, count, dim)
        return torch.einsum("nhd,hcd->nhc", x, weight) + bias

    def _over_tokens(self) -> Tensor:
        """Return the vectors u over tokens, (H, Q, D), scaled as attention scales scores."""
        count, queries, dim = self.count, self.queries, self.dim
        query = self._all("query")
        if self.p.pool == "ep":
            return query * dim**-0.5
        # Query j reads slice j of the keys: u_j = K_j^T q_j.
        slices = self._all("key").view(count, queries, -1, dim)
        query = query.view(count, queries, -1)
        u = torch.einsum("hqsd,hqs->hqd", slices, query)
        return u * (dim // queries) ** -0.5

    @torch.no_grad()
    def kept(self, index: int) -> KeptHead:
        """Fold one head's keys, value bias and batch norm into its queries and linear layer."""
        head = {}
        for name, tensor in self.heads[index].items():
            head[name] = tensor.detach().cpu()
        weight, bias = head["weight"], head["bias"]
        query = None
        if self.p.pool != "mean":
            query = self._over_tokens()[index].cpu()
        # W (v + b_v) + b = W v + (b + W b_v)
        if "value_bias" in head:
            bias = bias + weight @ head["value_bias"]
        # W (v - mean) / std + b = (W / std) v + (b - (W / std) mean)
        if self.norm is not None:
            own = slice(index * self.dim, (index + 1) * self.dim)
            state = self.norm.state_dict()
            variance = state["running_var"][own].cpu()
            weight = weight / (variance + self.norm.eps).sqrt()
            bias = bias - weight @ state["running_mean"][own].cpu()
        return KeptHead(weight, bias, query=query, value=head.get("value"))

    @torch.no_grad()
    def scores(self, tokens: Tensor) -> Tensor:
        """Return the logits (N, H, C) of the heads as they are, for maps (N, h, w, D)."""
        if self.norm is not None:
            self.norm.eval()
        return torch.cat([self.logits(part) for part in self._pieces(tokens)])

    def _pieces(self, maps: Tensor) -> Sequence[Tensor]:
        """Split maps (N, h, w, D) into tokens (n, h w, D) of as many images as memory allows."""
        images = max(1, PIECE // (self.count * self.queries * self.dim))
        return maps.flatten(1, 2).split(images)

    def step(
        self, tokens: Tensor, labels: Tensor, rates: Tensor, *, batch: int, **_: float
    ) -> Tensor:
        """Step on this share: maps (n, h, w, D), labels (n,); return its summed losses (H,)."""
        # 1. The gradients of pieces add up. A batch norm must see the whole batch at once.
        if self.norm is None:
            pieces = self._pieces(tokens)
        else:
            self.norm.train()
            pieces = [tokens.flatten(1, 2)]
        losses = torch.zeros(self.count, device=tokens.device)
        for piece, known in zip(pieces, labels.split([len(each) for each in pieces])):
            logits = self.logits(piece).transpose(1, 2)  # (n, C, H)
            truth = known[:, None].expand(-1, self.count)
            of_images = F.cross_entropy(logits, truth, reduction="none")
            of_heads = of_images.sum(0)
            (of_heads.sum() / batch).backward()
            losses += of_heads.detach()
        # 2. The step
        self.descend(rates)
        return losses


def _start(
    pool: str, classes: int, dim: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw the parameters that every head begins with. Keys have no bias, as it would cancel."""
    # 1. What is drawn, in the order of the draws. EP draws its bias, too.
    drawn: dict[str, tuple[int, ...]] = {}
    if pool == "capi":
        drawn["query"] = (dim,)
        drawn["key"] = (dim, dim)
        drawn["value"] = (dim, dim)
    if pool == "ep":
        drawn["query"] = (32, dim)
        drawn["value"] = (dim, dim)
    drawn["weight"] = (classes, dim)
    if pool == "ep":
        drawn["bias"] = (classes,)
    start = {}
    for name, shape in drawn.items():
        start[name] = torch.empty(shape)
        if pool != "ep":
            nn.init.trunc_normal_(start[name], std=0.02, generator=generator)
        elif name == "query":
            start[name].normal_(0, 0.02, generator=generator)
        else:  # torch's default of a linear layer
            start[name].uniform_(-(dim**-0.5), dim**-0.5, generator=generator)
    # 2. What begins at 0.
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
    """Return the rows of all trunks by one protocol."""
    return measure_several([task], extractor, machine, stop)[0]


def measure_several(
    tasks: Sequence[Assignment[Attentive]],
    extractor: Extractor,
    machine: Machine,
    stop: StopFlag,
) -> list[list[Result]]:
    """Return, on rank 0, the rows of all trunks by each protocol; one stream serves them all."""
    task = tasks[0]  # of whose stream all are
    p = task.protocol
    trunks = extractor.trunks
    if p.batch_size % machine.world and any(t.protocol.pool == "ep" for t in tasks):
        raise BadInput(
            f"--devices: {machine.world} do not divide a batch of {p.batch_size} images"
        )
    # 1. All heads train in one pass. A single rate has nothing to choose, and trains on all of train.
    train, held = _parts(task.splits, p)
    classes = len(train.classes)
    heads = []
    for trunk in trunks:
        parts = {}
        for t in tasks:
            parts[t.protocol.name] = QueryPoolHeads(
                t.protocol,
                classes,
                trunk.module.token_dim,
                seed=t.seed,
                machine=machine,
            )
        heads.append(HeadsOfProtocols(parts))
    train_on_tokens(tasks, trunks, heads, train, machine=machine, stop=stop)
    # 2. What was held out chooses a rate of each protocol. The heads of all protocols are columns
    #    side by side: those of each begin at one of `columns`.
    stream = TokenLogits(task, trunks, heads, machine, stop)
    scores = None
    if held is not None:
        scores = _held_out_scores(task, stream, held)
    columns = []
    finals = []
    begin = 0
    for t in tasks:
        end = begin + len(t.protocol.grid)
        own_scores = None
        if scores is not None:
            own_scores = [of_trunk[begin:end] for of_trunk in scores]
        of_protocol = [each.parts[t.protocol.name] for each in heads]
        finals.append(best_heads(t.protocol, of_protocol, own_scores))
        columns.append(begin)
        begin = end
    # 3. The one look at test, by the chosen heads
    picked = []
    for n in range(len(trunks)):
        picked.append([first + final[n].index for first, final in zip(columns, finals)])
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
            said = keeping.keep_trained(
                t, trunk.checkpoint, head, scores_of_test, chosen
            )
            one = CheckpointPredictions(
                checkpoint=trunk.checkpoint,
                ranking=ranking,
                chosen=chosen,
                provenance={
                    **said,
                    "trunk_sha256": trunk.state,
                    "tokens": trunk.module.strides[-1:],
                    "held_out": 0 if held is None else len(held),
                },
            )
            measured.append(one)
        rows.append(keeping.write(t, measured))
    return rows


def _held_out_scores(
    task: Assignment[Attentive], stream: "TokenLogits", held: ImageList
) -> list[list[float]]:
    """Return per trunk the dataset's metric of every head on the images that were held out."""
    metric = task.dataset.metric
    label = np.asarray(held.labels)
    classes = len(held.classes)
    firsts: list[list[Tensor]] = [[] for _ in stream.trunks]  # (n, H) of each batch
    for _, of_trunks in stream(held):
        for logits, out in zip(of_trunks, firsts):
            best = scoring.rank_classes(logits.flatten(0, 1))[:, 0]
            out.append(best.view(logits.shape[:2]))
    scores = []
    for of_trunk in firsts:
        by_head = torch.cat(of_trunk).T.numpy()
        scores.append([scoring.score(metric, b, label, classes) for b in by_head])
    return scores


def _answers(
    stream: "TokenLogits", test: ImageList, picked: Sequence[Sequence[int]]
) -> list[list[tuple[Tensor, Scores | None]]]:
    """Return, per trunk and for each of its `picked` heads, the best classes (N, 5) of the test
    images and their scores."""
    # 1. The parts of each batch, in lists by trunk and head
    rankings: list[list[list[Tensor]]] = [[[] for _ in own] for own in picked]
    scores: list[list[list[Scores | None]]] = [[[] for _ in own] for own in picked]
    for first, of_trunks in stream(test):
        for n, by_head in enumerate(of_trunks):
            for k, index in enumerate(picked[n]):
                logits = by_head[:, index]
                labels = test.labels[first : first + len(logits)]
                rankings[n][k].append(scoring.rank_classes(logits))
                scores[n][k].append(head_scores.compact([logits], labels, None))
    # 2. All test images of each head
    answers = []
    for rankings_of_trunk, scores_of_trunk in zip(rankings, scores):
        of_heads = []
        for ranked, facts in zip(rankings_of_trunk, scores_of_trunk):
            of_heads.append((torch.cat(ranked), head_scores.joined(facts)))
        answers.append(of_heads)
    return answers


def _parts(found: Splits, p: Attentive) -> tuple[ImageList, ImageList | None]:
    """Return the images to train on, and those that choose: official val, or a share of each class
    of train. Nothing chooses where there is only one head."""
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
        """Yield the first image of each batch, and per trunk the logits (n, H, C) of the batch."""
        machine = self.machine
        batch = self.task.protocol.feature_batch
        count = len(images)
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
            of_trunks = forward_all(self.trunks, here, tokens=True)
            logits = []
            for maps, own in zip(of_trunks, self.heads):
                everybodys = distributed.gather_without_gradient(own.scores(maps))
                logits.append(everybodys[:size])
            yield begin, logits
            progress.advance(size)
            machine.preempt(self.stop, f"at {what}")


def _work(p: Attentive, name: str, found: Splits, _: int) -> dict[str, int]:
    train, held = _parts(found, p)
    scored = len(found.test)
    if held is not None:
        scored += len(held)
    return {"step": p.steps(name, len(train)), "image": scored}


PROBE = Probe(
    protocol=Attentive,
    measure=measure,
    measure_several=measure_several,
    stream=Attentive.stream,
    together=True,
    words=lambda p: f"{p.pool}, {len(p.grid)} heads, {p.batch_size} images a step",
    work=_work,
)
