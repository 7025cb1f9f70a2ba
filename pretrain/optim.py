"""Builds optimisers, parameter groups and schedules. Recipes count epochs, this file steps."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from backbench.errors import BadInput, nearest
from backbench.pretrain.recipe import Optim, PretrainConfig
from backbench.weights.trunk import Trunk

Group = dict[str, Any]  # a parameter group, as torch's optimisers keep them


class LARS(torch.optim.Optimizer):
    """SGD with momentum, its steps scaled layer by layer (You et al., arXiv:1708.03888, Eq. 6).

    In a group with `adapt`, the gradient g of a parameter p becomes

        trust |p| / (|g| + wd |p| + 1e-8) (g + wd p)

    as in NVIDIA's LARC with clip=False, which LORAC uses. Where |p| or |g| is zero, g stays as it
    is, without weight decay. In a group without `adapt` it becomes g + wd p. Momentum is torch's:
    buffer = m buffer + g; p -= lr buffer. With `clip` the layer's rate is at most lr, as in LARC's
    default and in solo-learn. `fused` updates all tensors in a handful of kernels, so that nothing
    waits for the device; None is fused on a GPU.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        clip: bool = False,
        adapt: bool = True,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "clip": clip,
            "adapt": adapt,
        }
        super().__init__(params, defaults)
        self.fused = fused

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            if not params:
                continue
            fused = params[0].is_cuda if self.fused is None else self.fused
            if fused:
                self._step_fused(group, params)
            else:
                for p in params:
                    self._step_one(group, p)

    def _step_one(self, group: Group, p: Tensor) -> None:
        """Step one tensor on the CPU, where reading norms is free and temporaries are not."""
        decay = group["weight_decay"]
        buffer = self.state[p]["momentum_buffer"]
        grad = p.grad
        assert grad is not None
        # 1. The layer's scale: trust |p| / (|g| + wd |p|), which multiplies gradient and decay
        scale = 1.0
        if group["adapt"]:
            size = float(torch.linalg.vector_norm(p))
            slope = float(torch.linalg.vector_norm(grad))
            if size and slope:
                scale = group["trust"] * size / (slope + decay * size + 1e-8)
                if group["clip"]:
                    # The layer's rate, lr times this, is then min(scale, lr). Where lr is 0, it
                    # is 0 by any scale; 1 is the limit.
                    lr = group["lr"]
                    scale = min(scale / lr, 1.0) if lr else 1.0
            else:
                # Where the tensor or its gradient is all 0, there is neither scale nor decay.
                decay = 0.0
        # 2. buffer = m buffer + scale (g + wd p);  p -= lr buffer
        buffer.mul_(group["momentum"]).add_(grad, alpha=scale)
        if decay:
            buffer.add_(p, alpha=scale * decay)
        p.add_(buffer, alpha=-group["lr"])

    def _step_fused(self, group: Group, params: list[Tensor]) -> None:
        """Step all tensors at once, by the same algebra; the scales stay on the device."""
        decay = group["weight_decay"]
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_mul_(buffers, group["momentum"])
        if group["adapt"]:
            size = torch.stack(torch._foreach_norm(params))
            slope = torch.stack(torch._foreach_norm(grads))
            usable = (size > 0) & (slope > 0)
            scale = group["trust"] * size / (slope + decay * size + 1e-8)
            if group["clip"]:
                scale = (scale / group["lr"]).clamp_max(1.0)
            scale = torch.where(usable, scale, 1.0)
            scaled = torch._foreach_mul(grads, list(scale.unbind()))
            torch._foreach_add_(buffers, scaled)
            if decay:
                decays = torch.where(usable, scale * decay, 0.0)
                decayed = torch._foreach_mul(params, list(decays.unbind()))
                torch._foreach_add_(buffers, decayed)
        else:
            torch._foreach_add_(buffers, grads)
            if decay:
                torch._foreach_add_(buffers, params, alpha=decay)
        torch._foreach_add_(params, buffers, alpha=-group["lr"])


def parameter_groups(module: nn.Module, o: Optim, scale: float = 1.0) -> list[Group]:
    """Group the trainable parameters: matrices (of two or more dimensions), and vectors, which are
    biases, norms, and what else a trunk leaves undecayed, such as tokens and position embeddings.
    Each group has `weight_decay`, `adapt` (of LARS), `peak`, which is its own highest rate or None
    for the recipe's, and `constant`, which is true for the parts named in `constant_lr`."""
    # 1. The names of what a trunk leaves undecayed, wherever it stands in the module
    special = set()
    for prefix, inner in module.named_modules():
        if isinstance(inner, Trunk):
            special |= {f"{prefix}.{name}".lstrip(".") for name in inner.undecayed()}
    # 2. The settings of either kind
    matrices: Group = {"weight_decay": o.weight_decay, "adapt": True, "peak": None}
    vectors: Group = {
        "weight_decay": o.weight_decay if o.decay_1d else 0.0,
        "adapt": o.adapt_1d,
        "peak": None if o.lr_1d is None else o.lr_1d * scale,
    }
    # 3. The groups. Where their settings are alike, matrices and vectors are one group, in the
    #    module's own order
    alike = matrices == vectors
    groups: dict[tuple[bool, bool], Group] = {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            is_vector = (p.ndim <= 1 or name in special) and not alike
            is_constant = not set(o.constant_lr).isdisjoint(name.split("."))
            settings = vectors if is_vector else matrices
            group = {**settings, "constant": is_constant, "params": []}
            groups.setdefault((is_constant, is_vector), group)["params"].append(p)
    return [groups[kind] for kind in sorted(groups)]


def of_recipe(config: PretrainConfig, method: nn.Module) -> torch.optim.Optimizer:
    """Build the recipe's optimiser for what the method trains. Raise BadInput where `constant_lr`
    names a part that the method does not have."""
    o = config.optim
    lr = o.lr * _scale(config)
    parts: set[str] = set()
    for name, _ in method.named_parameters():
        parts.update(name.split("."))
    for part in o.constant_lr:
        if part not in parts:
            raise BadInput(
                f"optim.constant_lr: method '{config.method.name}' has no part '{part}';"
                f" {nearest(part, parts)}"
            )
    groups = parameter_groups(method, o, _scale(config))
    if o.name == "lars":
        return LARS(groups, lr, momentum=o.momentum, trust=o.trust, clip=o.clip)
    # torch's own run fused, but not in fp16: with a gradient scaler the fused form unscales the
    # gradients by itself, after the point where they were to be clipped
    fused = config.precision != "fp16"
    if o.name == "sgd":
        return torch.optim.SGD(groups, lr, momentum=o.momentum, fused=fused)
    cls = torch.optim.Adam if o.name == "adam" else torch.optim.AdamW
    return cls(groups, lr, betas=o.betas, fused=fused)


def _scale(config: PretrainConfig) -> float:
    """Return the factor on the recipe's rates at its batch size (Goyal et al., 2017)."""
    reference = config.optim.reference_batch
    return config.batch_size / reference if reference else 1.0


class LearningRates:
    """Sets the rate of each group to the schedule's share of its peak, which is its own (`lr_1d`)
    or the recipe's. Groups of `constant_lr` stay at their peak. Warm-up is linear from `warmup_lr`;
    after it the share follows the schedule:

        cosine         from 1 to `final_lr` at the last step, changed at every step
        cosine_epoch   the same curve and warm-up, changed at every epoch (JCL, MIO)
        step           times `gamma` at each milestone
        constant       1
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: PretrainConfig,
        steps_per_epoch: int,
    ) -> None:
        self.optimizer = optimizer
        self.optim = config.optim
        self.peak = config.optim.lr * _scale(config)
        self.steps_per_epoch = steps_per_epoch
        self.epochs = config.epochs

    def share(self, step: int) -> float:
        """Return the share of the peak at optimiser step `step`, counted from 0."""
        o = self.optim
        # 1. Everything in steps, and rates as shares of the peak; of a peak of 0 any share is 0
        now = float(step)
        total = self.epochs * self.steps_per_epoch
        warmup = o.warmup_epochs * self.steps_per_epoch
        start = o.warmup_lr / o.lr if o.lr else 0.0
        final = o.final_lr / o.lr if o.lr else 0.0
        if o.schedule == "cosine_epoch":  # time stands still during an epoch
            now = float(step // self.steps_per_epoch * self.steps_per_epoch)
        # 2. Warm-up: from `start` to 1
        if now < warmup:
            return start + (1 - start) * now / warmup
        # 3. The course itself
        if o.schedule == "constant":
            return 1.0
        if o.schedule == "step":
            passed = sum(now >= epoch * self.steps_per_epoch for epoch in o.milestones)
            return o.gamma**passed
        # 4. Half a cosine over what is left after warm-up: 1 at its beginning, `final` at its end
        done = min(1.0, (now - warmup) / max(1.0, total - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))

    def at(self, step: int) -> float:
        """Return the recipe's rate at `step`, which all groups without a peak of their own have."""
        return self.peak * self.share(step)

    def set(self, step: int) -> float:
        """Set every group's rate for `step`. Return the recipe's."""
        share = self.share(step)
        for group in self.optimizer.param_groups:
            peak = self.peak if group["peak"] is None else group["peak"]
            group["lr"] = peak if group["constant"] else peak * share
        return self.peak * share
