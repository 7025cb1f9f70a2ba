"""A ResNet's tensors as published files call them, in four dialects, and where in a file such names
stand: a trunk is found by its names, never by the file's extension."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights.families.resnet_tables import (
    ARCHS,
    SMALL_CONV1,
    check_stem,
    conv1_shape,
)
from backbench.weights.families.resnet_trunk import trunk_shapes
from backbench.weights.family import (
    Shape,
    Tables,
    TrunkInFile,
    TrunkMetadata,
    find_by_votes,
)
from backbench.weights.tensor_names import detectron2_name, is_counter

# --- dialects ---


def _sequential(first_layer: int) -> Callable[[str], str]:
    """Names in an nn.Sequential of a ResNet's children, where layer1 stands at `first_layer`."""

    def rename(key: str) -> str:
        part, rest = key.split(".", 1)
        position = {"conv1": 0, "bn1": 1}.get(part, first_layer + int(part[-1]) - 1)
        return f"{position}.{rest}"

    return rename


@dataclass(frozen=True)
class Dialect:
    """`rename` takes our name to this dialect's; `inside` is the start (a regex) of any name within
    the trunk, known or not."""

    name: str
    rename: Callable[[str], str]
    inside: str


DIALECTS = (
    Dialect("torchvision", lambda key: key, r"(conv|bn|norm|layer|downsample)\d"),
    # nn.Sequential of a ResNet's children: conv1 0, bn1 1, relu 2, max-pool 3, layer1 4
    Dialect("sequential", _sequential(4), r"\d+\."),
    # the same of a ResNet without max-pool: layer1 3
    Dialect("sequential without max-pool", _sequential(3), r"\d+\."),
    Dialect("detectron2", detectron2_name, r"(stem\.conv|res\d)"),
)


@functools.cache
def names(dialect: Dialect, arch: str) -> dict[str, str]:
    """The dialect's name -> ours, for every tensor of the trunk."""
    return {dialect.rename(key): key for key in trunk_shapes(arch)}


# --- trunks ---


@dataclass(frozen=True, kw_only=True)
class ResNetInFile(TrunkInFile):
    """A ResNet under one prefix of one table. `conv1` is the shape of its first convolution."""

    if_misshaped = "; a wide, grouped or deep-stem ResNet is one of timm's: --arch timm:NAME --pixels P"
    names: Dialect
    conv1: Shape

    @property
    def small(self) -> bool:
        return self.conv1 == SMALL_CONV1

    def shapes(self) -> Mapping[str, Shape]:
        return trunk_shapes(self.arch, "conv3" if self.small else "imagenet")

    def name_in_file(self, key: str) -> str:
        return self.names.rename(key)

    def stem(self, wanted: str | None = None) -> str | None:
        """The stem from the shape of conv1; None for a 3x3 one whose padding nothing tells."""
        if wanted is not None:
            check_stem(wanted)
            if (wanted == "imagenet") == self.small:
                raise BadInput(f"its conv1 has shape {self.conv1}, not '{wanted}'")
            return wanted
        if not self.small:
            return "imagenet"
        return self.form.conv3 if self.form else None

    def pixels(self) -> Pixels | None:
        if self.form is None:
            return Pixels()
        if self.small and self.form.small_pixels is not None:
            return self.form.small_pixels
        return self.form.pixels

    def head_keys(
        self, tensors: Mapping[str, Tensor], others: tuple[str, ...]
    ) -> list[str]:
        """Everything in the table beside the trunks: projector, predictor; no queues."""
        free = [key for key in tensors if key not in set(self.keys.values())]
        return [
            key for key in free if "queue" not in key and not key.startswith(others)
        ]


LONGEST = 5  # parts of the longest names: layer1.0.downsample.0.weight, res2.0.conv1.norm.bias


def find_trunks(tables: Tables, metadata: TrunkMetadata) -> list[ResNetInFile]:
    """All ResNets in the file of which at least half the tensors are there, in the file's order."""
    fit = functools.partial(_fit, tables, metadata)
    return find_by_votes(tables, _candidates, fit, fewest=20, most=32)


def _candidates(key: str) -> list[tuple[str, Dialect]]:
    """(prefix, dialect) for each dialect with a name that ends this key; the longest counts."""
    parts = key.rsplit(".", LONGEST)[-LONGEST:]
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    out = []
    for dialect in DIALECTS:
        # ResNet-34 has all names of basic blocks, ResNet-152 all of bottlenecks
        known = names(dialect, "resnet34"), names(dialect, "resnet152")
        longest = next(
            (end for end in ends if any(end in each for each in known)), None
        )
        if longest is not None:
            out.append((key.removesuffix(longest), dialect))
    return out


def _fit(
    tables: Tables, metadata: TrunkMetadata, table: str, prefix: str, dialect: Dialect
) -> tuple[int, ResNetInFile]:
    """The architecture that explains most names under the prefix; score: present minus absent."""
    local = {key[len(prefix) :]: key for key in tables[table] if key.startswith(prefix)}
    inside = {name for name in local if re.match(dialect.inside, name)}
    decisive = {name for name in inside if not is_counter(name)}
    scores: dict[str, int] = {}
    explained: dict[str, int] = {}
    for arch in ARCHS:
        # A trunk is recognised by all names but the counters, which are often left out
        wanted = {name for name in names(dialect, arch) if not is_counter(name)}
        scores[arch] = 2 * len(wanted & local.keys()) - len(wanted)
        explained[arch] = scores[arch] - len(decisive - wanted)
    arch = max(ARCHS, key=explained.__getitem__)
    ours = names(dialect, arch)
    keys = {ours[name]: key for name, key in local.items() if name in ours}
    trunk = ResNetInFile(
        table=table,
        prefix=prefix,
        dialect=dialect.name,
        names=dialect,
        arch=arch,
        keys=keys,
        extra=tuple(
            key for name, key in local.items() if name in inside and name not in ours
        ),
        conv1=conv1_shape(keys, tables[table]),
        metadata=metadata,
    )
    return scores[arch], trunk
