"""The projection head that a checkpoint has kept, built from its tensors alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

# How the published files call it, the surest name first
NAMES = ("projector", "projection_head", "projection", "fc", "head", "mlp", "g")
_KEY = re.compile(r"(.*?)\.(\d+)\.(weight|bias|running_mean|running_var|num_batches_tracked)")
Layers = dict[int, dict[str, Tensor]]  # position in the chain -> the module's tensors


def build_projector(
    heads: Mapping[str, Tensor], width: int, names: Sequence[str] = NAMES
) -> nn.Sequential | None:
    """The chain NAME.0.weight, NAME.1..., from (N, width), in eval
    mode; None where there is none of this form.

    Two-dimensional weights are linear maps, running statistics batch norms, and a missing
    position is a ReLU, the only module without tensors in these heads. Heads with
    anything else under their name (DINO's) are left alone.
    """
    chains: dict[str, Layers] = {}
    for key, tensor in heads.items():
        match = _KEY.fullmatch(key)
        if match:
            root, index, part = match.groups()
            chains.setdefault(root, {}).setdefault(int(index), {})[part] = tensor
    for name in names:
        for root, layers in sorted(chains.items()):
            if root.rpartition(".")[2] != name or not _is_whole(root, layers, heads):
                continue
            module = _chain(layers, width)
            if module is not None:
                return module
    return None


def output_dim(projector: nn.Sequential) -> int:
    return next(m.out_features for m in reversed(projector) if isinstance(m, nn.Linear))


def _is_whole(root: str, layers: Layers, heads: Mapping[str, Tensor]) -> bool:
    """Whether `layers` are all that there is below `root`."""
    below = sum(key == root or key.startswith(f"{root}.") for key in heads)
    return below == sum(len(tensors) for tensors in layers.values())


def _chain(layers: Layers, width: int) -> nn.Sequential | None:
    modules: list[nn.Module] = []
    for index in range(max(layers) + 1):
        tensors = layers.get(index)
        if tensors is None:
            modules.append(nn.ReLU())
            continue
        module = _module(tensors, width)
        if module is None or not _fill(module, tensors):
            return None
        modules.append(module)
        if isinstance(module, nn.Linear):
            width = module.out_features
    return nn.Sequential(*modules).eval().requires_grad_(False)


def _module(tensors: Mapping[str, Tensor], width: int) -> nn.Module | None:
    """What takes (N, width) and has tensors of these shapes."""
    weight = tensors.get("weight")
    if "running_mean" in tensors and len(tensors["running_mean"]) == width:
        return nn.BatchNorm1d(width, affine=weight is not None)
    if weight is not None and weight.ndim == 2 and weight.shape[1] == width:
        return nn.Linear(width, len(weight), bias="bias" in tensors)
    return None


def _fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Load them, none missing and none left over; only the counter of
    batches may be missing, as it changes nothing."""
    state = module.state_dict()
    counter = {name: value for name, value in state.items() if name == "num_batches_tracked"}
    if state.keys() - counter.keys() - tensors.keys() or tensors.keys() - state.keys():
        return False
    module.load_state_dict({**counter, **tensors})
    return True
