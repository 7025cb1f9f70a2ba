"""CMC: contrastive multiview coding (arXiv:1906.05849) of luminance and colour, with a memory bank.

Each sense has an encoder of its own; the luminance encoder is the trunk that is handed on.
Luminance is the mean of the (normalised) channels, on all three; colour is what is left. The
paper's Lab split needs raw pixels, and its networks of half width are no torchvision trunk.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.runs import distributed, seeding
from backbench.weights.trunk import Trunk
from pretrain import method
from pretrain.method import Batch, MethodConfig, Setup
from pretrain.methods._heads import CMC_HEAD, Head, build_head
from pretrain.methods._precision import unit
from pretrain.methods.moco import infonce_loss


def split_channels(images: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 3, h, w) -> luminance and colour, both (N, 3, h, w); their sum is the image."""
    luminance = images.mean(1, keepdim=True).expand_as(images)
    return luminance, images - luminance


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    head: Head = CMC_HEAD
    temperature: float = 0.07
    negatives: int = 4096  # drawn from the memory in each step, the same for the whole batch
    momentum: float = 0.5  # of the memory


class Method(method.Method):
    memory: Tensor

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        if setup.views != 1:
            raise BadInput(
                f"cmc takes one view of each image and splits its channels, not {setup.views}"
            )
        self.config, self.seed = config, setup.seed
        self.backbone = backbone
        self.colour_backbone = copy.deepcopy(backbone)
        # Drawn anew as torchvision draws it; norms start alike
        for module in self.colour_backbone.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.projector = build_head(config.head, backbone.feature_dim)
        self.colour_projector = build_head(config.head, backbone.feature_dim)
        generator = seeding.generator(setup.seed, "memory")
        size = (2, setup.images, config.head.dim)  # a vector for each sense of each image
        memory = torch.randn(*size, generator=generator, device="cpu")
        self.register_buffer("memory", F.normalize(memory, dim=2))
        self._new: list[tuple[Tensor, Tensor]] = []

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config = self.config
        luminance, colour = split_channels(batch.views[0])
        z_luminance = self.projector(self.backbone(luminance))
        z_colour = self.colour_projector(self.colour_backbone(colour))
        z = unit(torch.stack([z_luminance, z_colour]))  # (2, n, d)
        # Each sense finds its image's other sense in the memory, among images that were drawn
        generator = seeding.generator(self.seed, "negatives", batch.step)
        drawn = torch.randint(self.memory.shape[1], (config.negatives,), generator=generator)
        drawn = distributed.sent(drawn, z.device)
        losses = []
        for own, other in ((0, 1), (1, 0)):
            bank = self.memory[other]
            keys, queue = bank[batch.index], bank[drawn]
            losses.append(infonce_loss(z[own], keys, queue, temperature=config.temperature))
        # After the step the memory moves, on every rank for the images of all of them
        index = distributed.gather_without_gradient(batch.index)
        new = distributed.gather_without_gradient(z.transpose(0, 1)).transpose(0, 1)
        self._new.append((index, new))
        return {"loss": distributed.mean_over_ranks(torch.stack(losses).sum())}

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        momentum = self.config.momentum
        for index, z in self._new:
            moved = momentum * self.memory[:, index] + (1 - momentum) * z.to(self.memory.dtype)
            self.memory[:, index] = F.normalize(moved, dim=2)
        self._new.clear()
