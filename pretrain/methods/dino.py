"""DINO (arXiv:2104.14294)."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.parallel import distributed
from backbench.pretrain import method
from backbench.pretrain.method import Batch, MethodConfig, Setup
from backbench.pretrain.methods._heads import forward_crops
from backbench.pretrain.methods._momentum import (
    momentum_at,
    momentum_copy,
    momentum_update,
)
from backbench.pretrain.methods._precision import full_precision
from backbench.requests.bounds import Positive
from backbench.weights.trunk import Trunk


class DinoHead(nn.Module):
    """Three layers with GELU, unit length, a linear map with unit rows (frozen weight norm)."""

    def __init__(
        self, width: int, hidden: int, bottleneck: int, dim: int, batchnorm: bool
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in (width, hidden):
            layers.append(nn.Linear(size, hidden))
            if batchnorm:
                layers.append(nn.BatchNorm1d(hidden))
            layers.append(nn.GELU())
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, bottleneck))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last = nn.Parameter(torch.empty(dim, bottleneck))
        nn.init.kaiming_uniform_(self.last, a=math.sqrt(5))

    def forward(self, x: Tensor, freeze_last: bool = False) -> Tensor:
        last: Tensor = self.last
        if freeze_last:
            # Every parameter must get a gradient; this one is zero
            last = last.detach() + 0.0 * last
        return F.linear(F.normalize(self.layers(x), dim=1), F.normalize(last, dim=1))


@full_precision
def dino_loss(
    student: Tensor,
    teacher: Tensor,
    center: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """Return the mean cross-entropy of student view s and teacher view t over all pairs s != t
    (Algorithm 1).

    The scores are student (S, N, D) and teacher (T, N, D), T <= S, whose first T views are the same;
    center is (D,). Only the student gets a gradient. lightly's DINOLoss moves the centre in each
    forward pass; this one leaves that to the caller."""
    # The centre keeps any one output from winning everywhere, and the low temperature keeps the
    # outputs from becoming all alike
    targets = F.softmax((teacher.detach() - center) / teacher_temperature, dim=-1)
    logs = F.log_softmax(student / student_temperature, dim=-1)
    # terms[t, s] = -1/N sum_n sum_d P_t(n, d) log P_s(n, d)
    terms = -torch.einsum("tnd,snd->ts", targets, logs) / student.shape[1]
    pairs = terms.numel() - len(teacher)  # all but each view with itself
    return (terms.sum() - terms.diagonal().sum()) / pairs


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    hidden: int = 2048
    bottleneck: int = 256
    dim: int = 65536
    batchnorm: bool = False
    teachers: int = 2  # views that the teacher sees: the first ones
    student_temperature: Positive = 0.1
    teacher_temperature: Positive = 0.04
    warmup_teacher_temperature: Positive = 0.04
    warmup_epochs: int = 0  # of the teacher's temperature
    center_momentum: float = 0.9
    momentum: float = 0.996  # rises to 1 by half a cosine
    freeze_epochs: int = 1  # the last layer stands still at first
    together: bool = True  # false: a forward pass for each view (solo-learn)


class Method(method.Method):
    center: Tensor

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        if not 1 <= config.teachers <= setup.views or setup.views < 2:
            raise BadInput(
                f"dino: {config.teachers} teacher views of {setup.views}; it takes at least two views"
            )
        self.config = config
        self.backbone = backbone
        self.projector = DinoHead(
            backbone.feature_dim,
            config.hidden,
            config.bottleneck,
            config.dim,
            config.batchnorm,
        )
        self.teacher = momentum_copy(nn.Sequential(backbone, self.projector))
        self.register_buffer("center", torch.zeros(config.dim))
        self._seen: list[Tensor] = []

    def teacher_temperature(self, epoch: int) -> float:
        """Return the temperature in `epoch`: W = warmup_epochs values, the first and the last of
        which are the two ends (the released code's np.linspace), and then the end."""
        config = self.config
        share = 1.0
        if epoch < config.warmup_epochs:
            share = epoch / max(1, config.warmup_epochs - 1)
        rise = config.teacher_temperature - config.warmup_teacher_temperature
        return config.warmup_teacher_temperature + share * rise

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config = self.config
        with torch.no_grad():
            seen = batch.views[: config.teachers]
            teacher = torch.stack(forward_crops(self.teacher, seen, config.together))
        features = torch.cat(forward_crops(self.backbone, batch.views, config.together))
        frozen = batch.epoch < config.freeze_epochs
        student = self.projector(features, frozen).unflatten(0, (len(batch.views), -1))
        loss = dino_loss(
            student,
            teacher,
            self.center,
            student_temperature=config.student_temperature,
            teacher_temperature=self.teacher_temperature(batch.epoch),
        )
        # The centre moves after the step, towards the mean of the teacher's scores over all ranks
        self._seen.append(distributed.mean_over_ranks(teacher.mean((0, 1))))
        return {"loss": distributed.mean_over_ranks(loss)}

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        momentum = momentum_at(progress, self.config.momentum, 1.0)
        source = [*self.backbone.parameters(), *self.projector.parameters()]
        momentum_update(self.teacher.parameters(), source, momentum)
        if self._seen:
            seen = torch.stack(self._seen).mean(0).to(self.center.dtype)
            self.center.lerp_(seen, 1 - self.config.center_momentum)
        self._seen.clear()
