"""Trains many linear heads on one trunk's features: a step is two matrix products, however many
heads there are."""

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

    # The tensors of a state
    named: tuple[str, ...] = ("weight", "bias", "weight_momentum", "bias_momentum")

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
        # All heads begin alike, as they do in separate runs with one seed.
        self.weight = one.repeat(count, 1).to(device)
        self.bias = torch.zeros(count * classes, device=device)
        self.weight_momentum = torch.zeros_like(self.weight)
        self.bias_momentum = torch.zeros_like(self.bias)
        self.prepare()

    def prepare(self) -> None:
        """Make what this kind of optimiser keeps beside the momentum."""

    def logits(self, features: Tensor) -> Tensor:
        """Features (N, D) -> logits (N, H, C)."""
        flat = torch.addmm(self.bias, features, self.weight.T)
        return flat.view(-1, self.count, self.classes)

    def log_probability(
        self, features: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return every head's log softmax (N, H, C), and the index of the labels in it (N, H, 1)."""
        log_p = torch.log_softmax(self.logits(features), 2)
        true_class = labels.view(-1, 1, 1).expand(-1, self.count, 1)
        return log_p, true_class

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
        #    logits. It is computed in place: log_p becomes p, and p becomes G.
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
        # 1. m v + gradient. With one rank the product itself adds to the momentum.
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
        """Step each head by its own rate: w <- w - rate * v."""
        # Rows h C .. (h + 1) C - 1 are head h, so in the (H, ...) view a row is a head.
        by_head = momentum.view(self.count, -1)
        values.view(self.count, -1).addcmul_(by_head, rates[:, None], value=-1)

    def mean_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy (H,) of each head over features (N, D)."""
        log_p, true_class = self.log_probability(features, labels)
        return -log_p.gather(2, true_class).mean((0, 2))

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).cpu() for name in self.named}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            getattr(self, name).copy_(value)


def _of_all_ranks(gradient: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient by the weights (H C, D) and by the biases (H C,), summed over ranks."""
    rows = gradient.shape[1]
    dim = features.shape[1]
    # Both lie in one tensor, so that one exchange sums them.
    whole = gradient.new_empty(rows * dim + rows)
    weight = whole[: rows * dim].view(rows, dim)
    bias = whole[rows * dim :]
    torch.mm(gradient.T, features, out=weight)
    torch.sum(gradient, 0, out=bias)
    if distributed.world_size() > 1:
        dist.all_reduce(whole)
    return weight, bias


def copies(
    start: Mapping[str, Tensor], count: int, device: torch.device
) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of `count` heads that begin alike, by name."""
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
        """Sum the gradients over ranks and take one step with `rates` (H,)."""
        if distributed.world_size() > 1:
            for head in self.heads:
                for parameter in head.values():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
        # Each head has equally many groups, and they follow one another.
        groups = self.optimizer.param_groups
        for n, group in enumerate(groups):
            group["lr"] = float(rates[n * len(rates) // len(groups)])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, object]:
        heads = []
        for head in self.heads:
            heads.append({name: each.detach().cpu() for name, each in head.items()})
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
            # 2. Both means began at 0, and that is divided out:
            #    w <- w - rate * m' / (sqrt(v') + eps).
            made = int(self.steps)
            root = square.div(1 - self.beta2**made).sqrt_().add_(self.eps)
            self._descend(values, mean.div(1 - momentum**made).div_(root), rates)


class BestHeads:
    """The weights of each head at its lowest validation loss so far, and the epoch of that."""

    def __init__(self, heads: LinearHeads) -> None:
        self.loss = torch.full((heads.count,), torch.inf)
        self.epoch = torch.zeros(heads.count)
        self.weight = heads.weight.cpu().clone()
        self.bias = heads.bias.cpu().clone()

    def update(
        self, heads: LinearHeads, loss: Tensor, *, epoch: int, patience: int
    ) -> bool:
        """Keep the heads whose `loss` (H,) is lower now; return whether all have given up."""
        # A head that went `patience` epochs without a lower loss has given up and stays as it was
        # best, even if its loss falls again: what it becomes must not depend on the other heads.
        waiting = epoch - self.epoch <= patience
        better = (loss < self.loss) & waiting
        self.loss = torch.where(better, loss, self.loss)
        self.epoch = torch.where(better, torch.tensor(float(epoch)), self.epoch)
        # Head h has rows h C .. (h + 1) C - 1.
        rows = better.repeat_interleave(heads.classes)
        self.weight[rows] = heads.weight.cpu()[rows]
        self.bias[rows] = heads.bias.cpu()[rows]
        return bool((epoch - self.epoch > patience).all())

    def restore(self, heads: LinearHeads) -> None:
        """Set the heads to what they were at their best."""
        heads.weight.copy_(self.weight)
        heads.bias.copy_(self.bias)

    def state(self) -> dict[str, Tensor]:
        return dict(vars(self))

    def load(self, state: Mapping[str, Tensor]) -> None:
        vars(self).update(state)
