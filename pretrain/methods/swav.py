"""SwAV (arXiv:2006.09882)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.parallel import distributed
from backbench.pretrain import method
from backbench.pretrain.method import Batch, MethodConfig, Setup
from backbench.pretrain.methods._heads import SWAV_HEAD, Head, build_head, forward_crops
from backbench.pretrain.methods._momentum import Queue
from backbench.pretrain.methods._precision import unit
from backbench.requests.bounds import Count, Positive
from backbench.weights.trunk import Trunk


@torch.no_grad()
def sinkhorn(scores: Tensor, *, epsilon: float, iterations: int) -> Tensor:
    """Assign samples to prototypes, on average equally many to each (Eq. 3-5). `scores` (n, K) are
    of this rank's samples; so are the codes (n, K), each of which sums to one. The prototypes'
    shares are balanced over the samples of all ranks."""
    codes = (scores / epsilon).exp()
    # Eq. 4's two vectors scale columns and rows in turn, so any factor of all codes drops out
    for _ in range(iterations):
        codes /= distributed.sum_over_ranks(codes.sum(0))
        codes /= codes.sum(1, keepdim=True)
    return codes


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    """Views 0 .. assigned-1 are assigned codes; every other view predicts them (with three large
    crops the third has none)."""

    head: Head = SWAV_HEAD
    prototypes: Count = 3000
    temperature: Positive = 0.1
    epsilon: Positive = 0.05
    iterations: Count = 3
    assigned: int = 2
    # The prototypes stand still at first (1 epoch; 313 iterations in the code)
    freeze_epochs: int = 1
    queue: int = 0  # embeddings of earlier batches that join the assignment
    queue_from: int = 15  # epoch
    together: bool = True  # false: a forward pass for each view (solo-learn)


class Method(method.Method):
    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        if not 1 <= config.assigned <= setup.views or setup.views < 2:
            raise BadInput(
                f"swav: {config.assigned} assigned views of {setup.views}; it takes at least two views"
            )
        self.config = config
        self.backbone = backbone
        self.projector = build_head(config.head, backbone.feature_dim)
        self.prototypes = nn.Parameter(torch.empty(config.prototypes, config.head.dim))
        nn.init.normal_(self.prototypes)
        self._unit_prototypes()
        if config.queue:
            self.queue = Queue(
                config.queue,
                config.head.dim,
                batch_size=setup.batch_size,
                seed=setup.seed,
                names=[f"queue {i}" for i in range(config.assigned)],
            )
        self._new: list[Tensor] = []

    @torch.no_grad()
    def _unit_prototypes(self) -> None:
        self.prototypes.copy_(F.normalize(self.prototypes, dim=1))

    def network(self, images: Tensor) -> Tensor:
        return self.projector(self.backbone(images))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config = self.config
        weight: Tensor = self.prototypes
        if batch.epoch < config.freeze_epochs:
            # Every parameter must get a gradient; this one is zero
            weight = weight.detach() + 0.0 * weight
        embedded = [
            unit(z) for z in forward_crops(self.network, batch.views, config.together)
        ]
        with torch.autocast(weight.device.type, enabled=False):
            # 1. What every view predicts: log softmax of its scores with the prototypes
            logs = [
                F.log_softmax(z @ weight.T / config.temperature, dim=1)
                for z in embedded
            ]
            losses = []
            for a in range(config.assigned):
                # 2. What view a is assigned: codes over the batch of all ranks that use the
                #    prototypes equally (Eq. 3-5). Embeddings of earlier batches join the assignment
                with torch.no_grad():
                    scores = embedded[a] @ weight.T
                    if config.queue and batch.epoch >= config.queue_from:
                        earlier = distributed.local_slice(self.queue.keys[a])
                        scores = torch.cat(
                            [scores, earlier.to(scores.dtype) @ weight.T]
                        )
                    codes = sinkhorn(
                        scores, epsilon=config.epsilon, iterations=config.iterations
                    )[: len(embedded[a])]
                # 3. Every other view predicts it (Eq. 1, 2)
                for v, log in enumerate(logs):
                    if v != a:
                        losses.append(-(codes * log).sum(1).mean())
        if config.queue:
            new = torch.stack(embedded[: config.assigned], 1)  # (n, assigned, d)
            self._new.append(distributed.gather_without_gradient(new))
        return {"loss": distributed.mean_over_ranks(torch.stack(losses).mean())}

    def after_step(self, progress: float) -> None:
        self._unit_prototypes()
        for keys in self._new:
            self.queue.enqueue(keys)
        self._new.clear()
