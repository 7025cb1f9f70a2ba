"""CMC: contrastive multiview coding (arXiv:1906.05849) of luminance and colour, with a memory bank.
The trunk that is handed on, `arch: lab:ARCH` (`backbench.weights.families.pair`), has an encoder
for each; its feature is that of luminance, then that of colour."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.errors import BadInput
from backbench.parallel import distributed
from backbench.pretrain import method
from backbench.pretrain.method import Batch, MethodConfig, Setup
from backbench.pretrain.methods._heads import CMC_HEAD, Head, build_head
from backbench.pretrain.methods._precision import unit
from backbench.pretrain.methods.moco import infonce_loss
from backbench.requests.bounds import Positive
from backbench.runs import seeding
from backbench.weights.families.pair_trunk import LabPair
from backbench.weights.trunk import Trunk


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    head: Head = CMC_HEAD
    temperature: Positive = 0.07
    # Drawn from the memory in each step, the same for the whole batch
    negatives: int = 4096
    momentum: float = 0.5  # of the memory


class Method(method.Method):
    views = 1  # whose channels are split
    memory: Tensor

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        if not isinstance(backbone, LabPair):
            raise BadInput(
                f"cmc trains a pair of networks, on luminance and on colour, not one {backbone.arch}; "
                "set arch to lab:resnet50,width=0.5 or another pair, with views.mean 0 and views.std 1"
            )
        self.config = config
        self.seed = setup.seed
        self.backbone = backbone
        self.width = backbone.feature_dim // 2
        self.projector = build_head(config.head, self.width)
        self.colour_projector = build_head(config.head, self.width)
        generator = seeding.generator(setup.seed, "memory")
        # A vector for each of the two senses of each image
        size = (2, setup.images, config.head.dim)
        memory = torch.randn(*size, generator=generator, device="cpu")
        self.register_buffer("memory", F.normalize(memory, dim=2))
        self._new: list[tuple[Tensor, Tensor]] = []

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config = self.config
        luminance, colour = self.backbone(batch.views[0]).split(self.width, dim=1)
        projected = [self.projector(luminance), self.colour_projector(colour)]
        z = unit(torch.stack(projected))  # (2, n, d)
        # Each sense finds its image's other sense in the memory, among images that were drawn
        generator = seeding.generator(self.seed, "negatives", batch.step)
        drawn = torch.randint(
            self.memory.shape[1], (config.negatives,), generator=generator
        )
        drawn = distributed.sent(drawn, z.device)
        losses = []
        for own, other in ((0, 1), (1, 0)):
            keys = self.memory[other][batch.index]
            queue = self.memory[other][drawn]
            losses.append(
                infonce_loss(z[own], keys, queue, temperature=config.temperature)
            )
        # After the step the memory moves, on every rank for the images of all of them
        index = distributed.gather_without_gradient(batch.index)
        new = distributed.gather_without_gradient(z.transpose(0, 1)).transpose(0, 1)
        self._new.append((index, new))
        return {"loss": distributed.mean_over_ranks(torch.stack(losses).sum())}

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        momentum = self.config.momentum
        for index, z in self._new:
            old = self.memory[:, index]
            moved = momentum * old + (1 - momentum) * z.to(old.dtype)
            self.memory[:, index] = F.normalize(moved, dim=2)
        self._new.clear()
