"""Runs frozen trunks, which only give features, and the heads that checkpoints have kept."""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from backbench.errors import BadInput, Failed
from backbench.images.preprocess import Pixels, normalise
from backbench.parallel import precision as precisions
from backbench.parallel.precision import Precision
from backbench.runs.forward_clock import clock
from backbench.transfer.features import layer_cells
from backbench.transfer.features.layer_cells import LayerCells
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk

# What published files call a projector, the surest name first
NAMES = ("projector", "projection_head", "projection", "fc", "head", "mlp", "g")
_KEY = re.compile(
    r"(.*?)\.(\d+)\.(weight|bias|running_mean|running_var|num_batches_tracked)"
)
Layers = dict[int, dict[str, Tensor]]  # position in the chain -> the module's tensors


def state_digest(module: nn.Module) -> str:
    """Return the sha256 over names and bytes of all parameters and buffers."""
    sha = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


# Images that pass together through a trunk on a CPU at most. A batch of 256 gains nothing there, and
# its activations take gigabytes.
CPU_IMAGES = 32
ALIKE = 1e-6  # of a feature's largest number: what float32 does not tell apart


def refuse_unusable(features: Tensor, name: str, *, images_differ: bool = True) -> None:
    """Raise BadInput for features (N, ...) from which no number can be computed: not finite, too
    large to be squared, or, where the images differ, the same for all of them."""
    # 1. Distances and cosines need squares. Whatever is not finite reaches the norm, too
    unusable = 0
    for rows in features.split(65_536):
        norms = rows.flatten(1).float().norm(dim=1)
        unusable += int((~torch.isfinite(norms)).sum())
    if unusable:
        raise BadInput(
            f"'{name}': the features of {unusable} of {len(features)} images are not finite, or too"
            " large to be squared: diverged or damaged weights; measure an earlier checkpoint of"
            " that training"
        )
    # 2. All are compared with the first. Mostly the last one differs, and no other is looked at
    if not images_differ or len(features) < 2:
        return
    first = features[:1].flatten(1).float()
    largest = float(first.abs().max())
    for rows in (features[-1:], *features.split(65_536)):
        if float((rows.flatten(1).float() - first).abs().max()) > ALIKE * largest:
            return
    raise BadInput(
        f"'{name}': its features of all {len(features)} images are the same, so no image can be told"
        " from another: a collapsed training, or weights of another trunk; measure an earlier"
        " checkpoint of that training"
    )


class Watch:
    """Watches the features of a trunk. A look waits for the GPU, so only the first batch is looked
    at while it passes; what is known of the others stays on the device until `refuse`.

    Features that are the same for all images are refused unless the trunk `may_collapse`."""

    def __init__(self, *, may_collapse: bool = False) -> None:
        self.may_collapse = may_collapse
        self.finite: Tensor | None = None

    def see(self, features: Tensor, pixels: Tensor, name: str) -> None:
        """Look at the features of a batch of `pixels`."""
        if self.finite is None:
            must_differ = not self.may_collapse and bool(
                (pixels[0] != pixels[-1]).any()
            )
            refuse_unusable(features, name, images_differ=must_differ)
        norms = features.flatten(1).norm(dim=1)
        finite = torch.isfinite(norms).all()
        self.finite = finite if self.finite is None else self.finite & finite

    def refuse(self, name: str) -> None:
        """Raise BadInput if any batch held features that are not finite."""
        if self.finite is not None and not bool(self.finite):
            raise BadInput(
                f"'{name}': the features of some images are not finite, or too large to be squared:"
                " diverged or damaged weights; measure an earlier checkpoint of that training"
            )


@dataclass(frozen=True)
class TokenFeature:
    """A feature that is made of an image's tokens."""

    make: Callable[[Tensor], Tensor]  # tokens (N, T, C) -> (N, dim)
    dim: int
    name: str  # says in the cache what is made of the tokens


@dataclass(frozen=True)
class FrozenTrunk:
    """A trunk in eval mode, without gradients, channels last, with batch norm folded into the
    convolutions. `verify` shows that it has not changed."""

    checkpoint: Checkpoint
    module: Trunk
    device: torch.device
    precision: Precision
    state: str  # digest of the module as it was built
    head: nn.Sequential | None = None  # what follows the trunk
    # The digest of the classifier, where the module is a whole timm model and features are logits
    own_head: str | None = None
    of_tokens: TokenFeature | None = (
        None  # the feature, in the place of the trunk's own
    )
    of_layers: LayerCells | None = None  # the feature has these cells
    watch: Watch = field(default_factory=Watch, compare=False)

    @staticmethod
    def build(
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        precision: Precision = "fp32",
        head: str | None = None,
        may_collapse: bool = False,
    ) -> "FrozenTrunk":
        """Build the trunk of a checkpoint. With `head`, the name of one that the checkpoint has
        kept, features are its output. Equal features of all images are refused unless it
        `may_collapse`. All trunks of a process have one precision."""
        precisions.use(precision)
        if precision == "bf16":
            precisions.warn_if_slow(device.type)
        module = checkpoint.backbone().eval().requires_grad_(False)
        module.fuse()
        module = module.to(device).to(memory_format=module.memory_format)
        follows = kept_head(checkpoint, head).to(device) if head else None
        return FrozenTrunk(
            checkpoint,
            module,
            device,
            precision,
            state_digest(module),
            follows,
            watch=Watch(may_collapse=may_collapse),
        )

    @property
    def digest(self) -> str:
        """The checkpoint's digest."""
        return self.checkpoint.digest

    @property
    def dim(self) -> int:
        if self.of_tokens is not None:
            return self.of_tokens.dim
        if self.of_layers is not None:
            return self.of_layers.dim
        return self.module.feature_dim if self.head is None else output_dim(self.head)

    @property
    def pixels(self) -> Pixels:
        return self.checkpoint.pixels

    @torch.no_grad()
    def __call__(self, images: Tensor, *, tokens: bool = False) -> Tensor:
        """Normalised images (N, 3, H, W) -> features (N, dim) float32; with `tokens` the last map
        (N, h, w, C), after the final norm where the trunk has one behind its blocks."""
        images = images.contiguous(memory_format=self.module.memory_format)
        bf16 = self.precision == "bf16"
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)
        with autocast, clock.around(self.digest, len(images), self.device):
            of_parts = [self._pass(part, tokens) for part in self._parts(images)]
        features = of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts)
        if tokens:
            return features
        if self.of_tokens is not None:
            return self.of_tokens.make(features.flatten(1, 2))
        return features if self.head is None else self.head(features)

    def _parts(self, images: Tensor) -> Sequence[Tensor]:
        """Split images (N, 3, H, W) into those that pass together: all on a GPU, few on a CPU."""
        if self.device.type != "cpu":
            return [images]
        count = math.ceil(len(images) / CPU_IMAGES)
        return images.tensor_split(max(1, count))

    def _pass(self, images: Tensor, tokens: bool) -> Tensor:
        """Pass images (N, 3, H, W) through the trunk, up to its tokens or layers where these count."""
        if tokens or self.of_tokens is not None:
            return self.module.tokens(images).float()
        if self.of_layers is not None:
            return layer_cells.read(self.module.layers(images))
        return self.module(images).float()

    @torch.no_grad()
    def with_layers(self, side: int) -> "FrozenTrunk":
        """Return the trunk with all cells of its layers as its feature, on pictures of that side."""
        noise = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
        picture = noise.to(self.device, memory_format=self.module.memory_format)
        bf16 = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            cells = LayerCells.of(self.module, picture)
        return replace(self, of_layers=cells)

    def verify(self) -> None:
        """Raise Failed if a weight or buffer is not what it was at the start, BadInput if a feature
        was not finite."""
        self.watch.refuse(self.checkpoint.name)
        if self.module.training or state_digest(self.module) != self.state:
            raise Failed(
                f"the frozen trunk of '{self.checkpoint.name}' has changed;"
                " its results cannot be used"
            )


def kept_head(checkpoint: Checkpoint, name: str) -> nn.Sequential:
    """Return the head of that name on the checkpoint's trunk; BadInput where it has none."""
    width = checkpoint.blank().feature_dim
    head = build_projector(checkpoint.heads, width, (name,))
    if head is None:
        kept = sorted({key.partition(".")[0] for key in checkpoint.heads})
        raise BadInput(
            f"'{checkpoint.name}' has no head '{name}' (it keeps: {', '.join(kept) or 'none'}); "
            "use a protocol without `head`"
        )
    return head


def forward_all(
    trunks: Sequence[FrozenTrunk],
    pixels: Tensor,
    *,
    tokens: bool = False,
    inside: Tensor | None = None,
    watched: bool = True,
) -> list[Tensor]:
    """Return the features, or with `tokens` the maps, of uint8 RGB (N, 3, H, W) per trunk. Trunks
    with equal pixel statistics share the normalised images, which are 0 outside of `inside`
    (N, 1, H, W). BadInput for features from which no number can be computed; without `watched` the
    caller looks at them."""
    ready: dict[Pixels, Tensor] = {}
    out = []
    for trunk in trunks:
        if trunk.pixels not in ready:
            normalised = normalise(pixels, trunk.pixels)
            ready[trunk.pixels] = normalised if inside is None else normalised * inside
        features = trunk(ready[trunk.pixels], tokens=tokens)
        if watched:
            trunk.watch.see(features, pixels, trunk.checkpoint.name)
        out.append(features)
    return out


# The head that a checkpoint has kept, built from its tensors alone


def build_projector(
    heads: Mapping[str, Tensor], width: int, names: Sequence[str] = NAMES
) -> nn.Sequential | None:
    """Build the head NAME.0.weight, NAME.1... on features (N, width), in eval mode; None if there
    is none. Two-dimensional weights are linear maps, running statistics batch norms, and a missing
    position is a ReLU, the only module without tensors. Other heads (DINO's) are left alone."""
    chains: dict[str, Layers] = {}
    for key, tensor in heads.items():
        match = _KEY.fullmatch(key)
        if match:
            root, index, part = match.groups()
            layers = chains.setdefault(root, {})
            layers.setdefault(int(index), {})[part] = tensor
    for name in names:
        for root, layers in sorted(chains.items()):
            # A chain is a head only if it has all tensors below that name.
            below = sum(key == root or key.startswith(f"{root}.") for key in heads)
            whole = below == sum(len(tensors) for tensors in layers.values())
            if whole and root.rpartition(".")[2] == name:
                head = _chain(layers, width)
                if head is not None:
                    return head
    return None


def output_dim(projector: nn.Sequential) -> int:
    """Return the width of its last linear map."""
    return next(m.out_features for m in reversed(projector) if isinstance(m, nn.Linear))


def _chain(layers: Layers, width: int) -> nn.Sequential | None:
    """Build a chain on features (N, width); None if a position's tensors fit no module."""
    modules: list[nn.Module] = []
    for index in range(max(layers) + 1):
        tensors = layers.get(index)
        if tensors is None:  # the module of this position has no tensors
            modules.append(nn.ReLU())
            continue
        module = _module(tensors, width)
        if module is None:
            return None
        modules.append(module)
        if isinstance(module, nn.Linear):
            width = module.out_features
    return nn.Sequential(*modules).eval().requires_grad_(False)


def _module(tensors: Mapping[str, Tensor], width: int) -> nn.Module | None:
    """Return the module that takes (N, width) and holds exactly these tensors; None if none does."""
    weight = tensors.get("weight")
    if "running_mean" in tensors and len(tensors["running_mean"]) == width:
        module: nn.Module = nn.BatchNorm1d(width, affine=weight is not None)
    elif weight is not None and weight.ndim == 2 and weight.shape[1] == width:
        module = nn.Linear(width, len(weight), bias="bias" in tensors)
    else:
        return None
    try:
        # Strict, but torch lets BatchNorm's counter of batches be missing.
        module.load_state_dict(dict(tensors))
    except RuntimeError:
        return None
    return module
