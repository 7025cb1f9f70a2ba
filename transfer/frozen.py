"""Trunks that only give features: eval(), batch norm folded into
the convolutions, no gradients, and a guard."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backbench.errors import BadInput, Failed
from backbench.images.preprocess import Pixels, normalise
from backbench.parallel import precision as precisions
from backbench.parallel.precision import Precision
from backbench.runs.forward_clock import clock
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk
from transfer.projector import build_projector, output_dim


def state_digest(module: nn.Module) -> str:
    """sha256 over names and bytes of all parameters and buffers."""
    sha = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


@dataclass(frozen=True)
class FrozenTrunk:
    """A trunk for inference: eval(), batch norm folded, channels
    last, no gradients. `verify` guards it."""

    checkpoint: Checkpoint
    module: Trunk
    device: torch.device
    precision: Precision
    state: str  # digest of the module as it was built
    head: nn.Sequential | None = None  # what follows the trunk

    @staticmethod
    def build(
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        precision: Precision = "fp32",
        head: str | None = None,
    ) -> FrozenTrunk:
        """With `head`, the name of one that the checkpoint has kept, features are its output.

        All trunks of a process have one precision.
        """
        precisions.use(precision)
        module = checkpoint.backbone().eval().requires_grad_(False)
        module.fuse()
        module = module.to(device).to(memory_format=module.memory_format)
        follows = kept_head(checkpoint, head).to(device) if head else None
        return FrozenTrunk(checkpoint, module, device, precision, state_digest(module), follows)

    @property
    def digest(self) -> str:
        """Of the checkpoint."""
        return self.checkpoint.digest

    @property
    def dim(self) -> int:
        return self.module.feature_dim if self.head is None else output_dim(self.head)

    @property
    def pixels(self) -> Pixels:
        return self.checkpoint.pixels

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images (N, 3, H, W) -> features (N, dim) float32."""
        images = images.contiguous(memory_format=self.module.memory_format)
        autocast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == "bf16"
        )
        with autocast, clock.around(self.digest, len(images), self.device):
            features = self.module(images).float()
        return features if self.head is None else self.head(features)

    def verify(self) -> None:
        """Raises Failed when a weight or buffer is not what it was at the start."""
        if self.module.training or state_digest(self.module) != self.state:
            raise Failed(
                f"the frozen trunk of '{self.checkpoint.name}' has changed;"
                " its results cannot be used"
            )


def kept_head(checkpoint: Checkpoint, name: str) -> nn.Sequential:
    """The head of that name on the checkpoint's trunk; BadInput where it has none."""
    width = checkpoint.backbone().feature_dim
    head = build_projector(checkpoint.heads, width, (name,))
    if head is None:
        kept = sorted({key.partition(".")[0] for key in checkpoint.heads})
        raise BadInput(
            f"'{checkpoint.name}' has no head '{name}' (it keeps: {', '.join(kept) or 'none'}); "
            "use a protocol without `head`"
        )
    return head


def forward_all(trunks: Sequence[FrozenTrunk], pixels: Tensor) -> list[Tensor]:
    """uint8 RGB (N, 3, H, W) -> features per trunk; trunks with the
    same statistics share the normalised images."""
    ready: dict[Pixels, Tensor] = {}
    out = []
    for trunk in trunks:
        if trunk.pixels not in ready:
            ready[trunk.pixels] = normalise(pixels, trunk.pixels)
        out.append(trunk(ready[trunk.pixels]))
    return out
