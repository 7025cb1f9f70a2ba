"""The projection head that a checkpoint has kept, built from its tensors alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

NAMES = (
    "projector",
    "projection_head",
    "projection",
    "fc",
    "head",
    "mlp",
    "g",
)  # how the published files call it
_KEY = re.compile(r"(.*?)\.(\d+)\.(weight|bias|running_mean|running_var|num_batches_tracked)")


def build_projector(heads: Mapping[str, Tensor], width: int) -> nn.Sequential | None:
    """The chain NAME.0.weight, NAME.1..., from (N, width), in eval mode; None where there is none of this form.

    Two-dimensional weights are linear maps, running statistics batch norms, and a missing position is a ReLU, the only
    module without tensors in these heads. Heads with anything else under their name (DINO's) are left alone.
    """
    chains: dict[str, dict[int, dict[str, Tensor]]] = {}
    for key, tensor in heads.items():
        match = _KEY.fullmatch(key)
        if match:
            root, index, part = match.groups()
            chains.setdefault(root, {}).setdefault(int(index), {})[part] = tensor
    for name in NAMES:
        for root, layers in sorted(chains.items()):
            known = sum(len(parts) for parts in layers.values())
            whole = sum(key == root or key.startswith(f"{root}.") for key in heads) == known
            if (
                root.rpartition(".")[2] == name
                and whole
                and (module := _chain(layers, width)) is not None
            ):
                return module
    return None


def _chain(layers: Mapping[int, Mapping[str, Tensor]], width: int) -> nn.Sequential | None:
    modules: list[nn.Module] = []
    for index in range(max(layers) + 1):
        parts = layers.get(index)
        if parts is None:
            modules.append(nn.ReLU())
            continue
        weight = parts.get("weight")
        module: nn.Module
        if "running_mean" in parts and len(parts["running_mean"]) == width:
            module = nn.BatchNorm1d(width, affine=weight is not None)
        elif weight is not None and weight.ndim == 2 and weight.shape[1] == width:
            width = len(weight)
            module = nn.Linear(weight.shape[1], width, bias="bias" in parts)
        else:
            return None
        needed = {k for k in module.state_dict() if k != "num_batches_tracked"}
        if needed - parts.keys() or parts.keys() - module.state_dict().keys():
            return None
        state = {k: v for k, v in module.state_dict().items() if k == "num_batches_tracked"}
        module.load_state_dict({**state, **parts})
        modules.append(module)
    return nn.Sequential(*modules).eval().requires_grad_(False)
