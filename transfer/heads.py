"""Many linear heads on one trunk's features: a step is two matrix products, however many."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backbench.parallel import distributed
from backbench.parallel.batchnorm import SyncBatchNorm
from backbench.runs import seeding

# A confident head gives most classes less than 1e-38, where a product on a CPU takes many times as
# long per number. Beside a gradient that can move a float32 weight, exp(-70) = 4e-31 is nothing.
LEAST_LOG_P = -70.0


class LinearHeads:
    """Trains H linear heads with C classes on one trunk's D features, as torch.optim.SGD does. All
    weights are one (H C, D) matrix, and the gradient of the cross-entropy is written down instead
    of traced. Each head trains as it would alone; a nan in one does not touch the others."""

    named: tuple[str, ...] = (
        "weight",
        "bias",
        "weight_momentum",
        "bias_momentum",
    )  # of a state

    def __init__(
        self,
        count: int,
        classes: int,
        dim: int,
        *,
        std: float,
        seed: int,
        device: torch.device,
    ) -> None:
        self.count, self.classes, self.dim = count, classes, dim
        generator = seeding.generator(seed, "head", classes, dim)
        one = torch.empty(classes, dim).normal_(0, std, generator=generator)
        self.weight = one.repeat(count, 1).to(
            device
        )  # one start for all, as separate runs have
        self.bias = torch.zeros(count * classes, device=device)
        self.weight_momentum = torch.zeros_like(self.weight)
        self.bias_momentum = torch.zeros_like(self.bias)
        self.prepare()

    def prepare(self) -> None:
        """Make what this kind of optimiser keeps beside the momentum."""

    def logits(self, features: Tensor) -> Tensor:
        """(N, D) -> (N, H, C)."""
        return torch.addmm(self.bias, features, self.weight.T).view(
            -1, self.count, self.classes
        )

    def log_probability(
        self, features: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Every head's log softmax (N, H, C), and the index of the labels in it (N, H, 1)."""
        log_p = torch.log_softmax(self.logits(features), 2)
        return log_p, labels.view(-1, 1, 1).expand(-1, self.count, 1)

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
        """Take one step with `rates` (H,) on this rank's share (n, D) of a batch of `batch` images.
        Returns the summed losses (H,) of the share."""
        # 1. The loss of head h on image i is -log p[i, h, y_i].
        log_p, true_class = self.log_probability(features, labels)
        losses = -log_p.gather(2, true_class).sum((0, 2))
        # 2. Its derivative by that head's logits is p - onehot(y). Divided by the global batch
        #    these are the rows of G (n, H C), the gradient of the mean over the batch by the
        #    logits. In place: log_p becomes p becomes G.
        minus_one = -torch.ones_like(true_class, dtype=log_p.dtype)
        p = log_p.clamp_(min=LEAST_LOG_P).exp_().scatter_add_(2, true_class, minus_one)
        gradient = p.view(len(features), -1).div_(batch)
        # 3. The update itself.
        self._update(gradient, features, rates, momentum=momentum, decay=decay)
        return losses

    def _update(
        self,
        gradient: Tensor,
        features: Tensor,
        rates: Tensor,
        *,
        momentum: float,
        decay: float,
    ) -> None:
        """Step as torch.optim.SGD does, by the gradient (n, H C) of this rank's logits: v <- m v +
        (gradient + decay * w), then w <- w - rate * v."""
        # logits = F W^T + b, so by W the gradient is G^T F, and by b the sum of G's rows; those of
        # all ranks add up. A matrix of 1,000 classes is larger than a cache, so what counts beside
        # the product is how often the weights and the momentum are gone through.
        # 1. m v + gradient. Of one rank the product itself adds to the momentum.
        if distributed.world_size() == 1:
            self.weight_momentum.addmm_(gradient.T, features, beta=momentum)
            self.bias_momentum.mul_(momentum).add_(gradient.sum(0))
        else:
            weight, bias = _of_all_ranks(gradient, features)
            self.weight_momentum.mul_(momentum).add_(weight)
            self.bias_momentum.mul_(momentum).add_(bias)
        # 2. The decay, and the step.
        for values, mean in (
            (self.weight, self.weight_momentum),
            (self.bias, self.bias_momentum),
        ):
            if decay:
                mean.add_(values, alpha=decay)
            self._descend(values, mean, rates)

    def _descend(self, values: Tensor, momentum: Tensor, rates: Tensor) -> None:
        """w <- w - rate * v, each head by its own rate."""
        # Rows h C .. (h + 1) C - 1 are head h, so in the (H, ...) view a row is a head.
        by_head = momentum.view(self.count, -1)
        values.view(self.count, -1).addcmul_(by_head, rates[:, None], value=-1)

    def mean_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of each head (H,) over (N, D) features."""
        log_p, true_class = self.log_probability(features, labels)
        return -log_p.gather(2, true_class).mean((0, 2))

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).cpu() for name in self.named}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            getattr(self, name).copy_(value)


def _of_all_ranks(gradient: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient by the weights (H C, D) and by the biases (H C,), summed over ranks."""
    rows, dim = gradient.shape[1], features.shape[1]
    whole = gradient.new_empty(rows * dim + rows)  # the weights', then the biases'
    weight, bias = whole[: rows * dim].view(rows, dim), whole[rows * dim :]
    torch.mm(gradient.T, features, out=weight)
    torch.sum(gradient, 0, out=bias)
    if distributed.world_size() > 1:
        dist.all_reduce(whole)  # one exchange for weights and biases
    return weight, bias


def copies(
    start: Mapping[str, Tensor], count: int, device: torch.device
) -> list[dict[str, nn.Parameter]]:
    """The parameters of `count` heads that begin alike."""
    heads: list[dict[str, nn.Parameter]] = [{} for _ in range(count)]
    for head in heads:
        for name, tensor in start.items():
            head[name] = nn.Parameter(tensor.clone().to(device))
    return heads


class TokenHeads:
    """Base of heads on tokens: the parameters of each by name, one batch norm for all of them, and
    torch's optimiser with groups that have each head's rate."""

    heads: list[dict[str, nn.Parameter]]
    norm: SyncBatchNorm | None
    optimizer: torch.optim.Optimizer

    def descend(self, rates: Tensor) -> None:
        """One step by the gradients of this rank, which are summed over ranks."""
        if distributed.world_size() > 1:
            for each in (each for head in self.heads for each in head.values()):
                assert each.grad is not None
                dist.all_reduce(each.grad)
        groups = self.optimizer.param_groups
        for n, group in enumerate(groups):
            group["lr"] = float(rates[n * len(rates) // len(groups)])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, object]:
        heads = [
            {name: each.detach().cpu() for name, each in head.items()}
            for head in self.heads
        ]
        norm = {} if self.norm is None else self.norm.state_dict()
        return {"heads": heads, "norm": norm, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        for head, before in zip(self.heads, state["heads"], strict=True):
            for name, parameter in head.items():
                parameter.copy_(before[name])
        if self.norm is not None:
            self.norm.load_state_dict(state["norm"])
        self.optimizer.load_state_dict(state["optimizer"])


class AdamHeads(LinearHeads):
    """The same heads, trained as torch.optim.Adam does: `momentum` is its first beta."""

    named = (*LinearHeads.named, "weight_square", "bias_square", "steps")
    beta2, eps = 0.999, 1e-8  # torch's defaults

    def prepare(self) -> None:
        self.weight_square = torch.zeros_like(self.weight)
        self.bias_square = torch.zeros_like(self.bias)
        self.steps = torch.zeros((), dtype=torch.int64)

    def _update(
        self,
        gradient: Tensor,
        features: Tensor,
        rates: Tensor,
        *,
        momentum: float,
        decay: float,
    ) -> None:
        self.steps += 1
        weight, bias = _of_all_ranks(gradient, features)
        for values, by_values, mean, square in (
            (self.weight, weight, self.weight_momentum, self.weight_square),
            (self.bias, bias, self.bias_momentum, self.bias_square),
        ):
            # 1. g <- gradient + decay * w; m and v are running means of g and g^2.
            slope = by_values.add(values, alpha=decay)
            mean.mul_(momentum).add_(slope, alpha=1 - momentum)
            square.mul_(self.beta2).addcmul_(slope, slope, value=1 - self.beta2)
            # 2. Both began at 0, which is divided out: w <- w - rate * m' / (sqrt(v') + eps).
            made = int(self.steps)
            root = square.div(1 - self.beta2**made).sqrt_().add_(self.eps)
            self._descend(values, mean.div(1 - momentum**made).div_(root), rates)


class BestHeads:
    """The weights of each head at its lowest validation loss so far, and the epoch of that."""

    def __init__(self, heads: LinearHeads) -> None:
        self.loss = torch.full((heads.count,), torch.inf)
        self.epoch = torch.zeros(heads.count)
        self.weight, self.bias = heads.weight.cpu().clone(), heads.bias.cpu().clone()

    def update(
        self, heads: LinearHeads, loss: Tensor, *, epoch: int, patience: int
    ) -> bool:
        """Take over the heads whose `loss` (H,) is lower now; returns whether all have given up."""
        # A head that went `patience` epochs without a lower loss has given up and stays as it was
        # best, even if its loss falls again: what it becomes must not depend on the other heads.
        waiting = epoch - self.epoch <= patience
        better = (loss < self.loss) & waiting
        self.loss = torch.where(better, loss, self.loss)
        self.epoch = torch.where(better, torch.tensor(float(epoch)), self.epoch)
        rows = better.repeat_interleave(
            heads.classes
        )  # head h has rows h C .. (h + 1) C - 1
        self.weight[rows] = heads.weight.cpu()[rows]
        self.bias[rows] = heads.bias.cpu()[rows]
        return bool((epoch - self.epoch > patience).all())

    def restore(self, heads: LinearHeads) -> None:
        """The heads as they were at their best."""
        heads.weight.copy_(self.weight)
        heads.bias.copy_(self.bias)

    def state(self) -> dict[str, Tensor]:
        return dict(vars(self))

    def load(self, state: Mapping[str, Tensor]) -> None:
        vars(self).update(state)
