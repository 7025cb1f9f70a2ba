"""Optimisers, parameter groups and schedules. Recipes speak epochs; from here on everything is
counted in steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config import Optim, PretrainConfig

Group = dict[str, Any]  # a parameter group, as torch's optimisers keep them


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose steps are scaled layer by layer (You et al., arXiv:1708.03888, Eq. 6).

    Where a group's `adapt` is true, a parameter's gradient becomes
    (g + wd p) * trust * |p| / (|g| + wd |p| + 1e-8), as in NVIDIA's LARC with clip=False, which
    LORAC uses: where |p| or |g| is zero the gradient stays as it is, without weight decay.
    Elsewhere it is g + wd p. Momentum is torch's: buffer = m buffer + gradient; p -= lr buffer. With
    `clip` the layer's rate is at most lr, min(trust |p| / ..., lr), as in LARC's default and in
    solo-learn.

    fused: all tensors in a handful of kernels, so that nothing waits for the device; by default on a
    GPU.
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
            if params[0].is_cuda if self.fused is None else self.fused:
                self._step_fused(group, params)
            else:
                for p in params:
                    self._step_one(group, p)

    def _step_one(self, group: Group, p: Tensor) -> None:
        """One tensor on the CPU, where reading a norm costs nothing and a temporary would."""
        decay, grad, buffer = group["weight_decay"], p.grad, self.state[p]["momentum_buffer"]
        assert grad is not None
        # 1. The layer's scale: trust |p| / (|g| + wd |p|), which multiplies gradient and decay
        scale = 1.0
        if group["adapt"]:
            size, slope = float(torch.linalg.vector_norm(p)), float(torch.linalg.vector_norm(grad))
            if size and slope:
                scale = group["trust"] * size / (slope + decay * size + 1e-8)
                if group["clip"]:  # lr min(scale / lr, 1) = min(scale, lr)
                    scale = min(scale / group["lr"], 1.0) if group["lr"] else 1.0
            else:
                decay = 0.0
        # 2. buffer = m buffer + scale (g + wd p);  p -= lr buffer
        buffer.mul_(group["momentum"]).add_(grad, alpha=scale)
        if decay:
            buffer.add_(p, alpha=scale * decay)
        p.add_(buffer, alpha=-group["lr"])

    def _step_fused(self, group: Group, params: list[Tensor]) -> None:
        """The same for all tensors at once; the scales stay on the device."""
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
            torch._foreach_add_(buffers, torch._foreach_mul(grads, list(scale.unbind())))
            if decay:
                decayed = torch.where(usable, scale * decay, 0.0)
                torch._foreach_add_(buffers, torch._foreach_mul(params, list(decayed.unbind())))
        else:
            torch._foreach_add_(buffers, grads)
            if decay:
                torch._foreach_add_(buffers, params, alpha=decay)
        torch._foreach_add_(params, buffers, alpha=-group["lr"])


def parameter_groups(
    module: nn.Module,
    *,
    weight_decay: float,
    decay_1d: bool = True,
    adapt_1d: bool = True,
    lr_1d: float | None = None,
) -> list[Group]:
    """Trainable parameters as at most two groups: tensors of two or more dimensions, and the rest
    (biases, norms).

    Each group keeps what is special about it: `weight_decay`, `adapt` (LARS) and `peak`, its own
    learning rate.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
    if decay_1d and adapt_1d and lr_1d is None:
        return [{"params": params, "weight_decay": weight_decay, "adapt": True, "peak": None}]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "adapt": True, "peak": None},
        {
            "params": vectors,
            "weight_decay": weight_decay if decay_1d else 0.0,
            "adapt": adapt_1d,
            "peak": lr_1d,
        },
    ]
    return [group for group in groups if group["params"]]


def build(
    name: str,
    groups: list[Group],
    *,
    lr: float,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    trust: float = 0.001,
    clip: bool = False,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """`name` is sgd, adam, adamw or lars. torch's own run fused, unless a gradient scaler and
    clipping are around them: the fused form unscales gradients by itself, after they were to be
    clipped."""
    if name == "lars":
        return LARS(groups, lr, momentum=momentum, trust=trust, clip=clip)
    if name == "sgd":
        return torch.optim.SGD(groups, lr, momentum=momentum, fused=fused)
    cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    return cls(groups, lr, betas=betas, fused=fused)


def schedule(
    step: int,
    *,
    steps_per_epoch: int,
    epochs: int,
    name: str,
    peak: float,
    final: float = 0.0,
    warmup_epochs: float = 0.0,
    warmup_lr: float = 0.0,
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
) -> float:
    """The learning rate of optimiser step `step`, counted from 0.

    cosine: from `peak` at the end of warm-up to `final` at the last step, per step; cosine_epoch:
    the same curve, held during each epoch (JCL, MIO); step: times `gamma` at each milestone, in
    epochs; constant. Warm-up is linear from `warmup_lr`, per step, or per epoch with cosine_epoch.
    """
    now, total, warmup = float(step), epochs * steps_per_epoch, warmup_epochs * steps_per_epoch
    if name == "cosine_epoch":
        now = float(step // steps_per_epoch * steps_per_epoch)
    if now < warmup:
        return warmup_lr + (peak - warmup_lr) * now / warmup
    if name == "constant":
        return peak
    if name == "step":
        return peak * gamma ** sum(now >= m * steps_per_epoch for m in milestones)
    done = min(1.0, (now - warmup) / max(1.0, total - warmup))
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * done))


def _scale(o: Optim, batch_size: int) -> float:
    return batch_size / o.reference_batch if o.reference_batch else 1.0


def peak_of_recipe(config: PretrainConfig) -> float:
    """The highest learning rate, at the recipe's batch size."""
    return config.optim.lr * _scale(config.optim, config.batch_size)


def of_recipe(config: PretrainConfig, method: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimiser for what the method trains."""
    o = config.optim
    groups = parameter_groups(
        method,
        weight_decay=o.weight_decay,
        decay_1d=o.decay_1d,
        adapt_1d=o.adapt_1d,
        lr_1d=None if o.lr_1d is None else o.lr_1d * _scale(o, config.batch_size),
    )
    return build(
        o.name,
        groups,
        lr=peak_of_recipe(config),
        momentum=o.momentum,
        betas=o.betas,
        trust=o.trust,
        clip=o.clip,
        fused=config.precision != "fp16",
    )


def rate_of_recipe(config: PretrainConfig, steps_per_epoch: int) -> Callable[[int], float]:
    """step -> learning rate."""
    o = config.optim
    scale = _scale(o, config.batch_size)
    return functools.partial(
        schedule,
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs,
        name=o.schedule,
        peak=peak_of_recipe(config),
        final=o.final_lr * scale,
        warmup_epochs=o.warmup_epochs,
        warmup_lr=o.warmup_lr * scale,
        milestones=o.milestones,
        gamma=o.gamma,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float, peak: float) -> None:
    """Every group at `lr`; a group with a peak of its own follows the same curve at its own
    height."""
    for group in optimizer.param_groups:
        own = group.get("peak")
        group["lr"] = lr if own is None or peak == 0 else lr * own / peak
