"""Finds ResNets in files by the names of their tensors, which publishers write in five dialects."""

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
    """Return the renaming to an nn.Sequential of a ResNet's children, layer1 at `first_layer`."""

    def rename(key: str) -> str:
        part, rest = key.split(".", 1)
        if part == "conv1":
            return f"0.{rest}"
        if part == "bn1":
            return f"1.{rest}"
        stage = int(part.removeprefix("layer"))
        return f"{first_layer + stage - 1}.{rest}"

    return rename


@dataclass(frozen=True)
class Dialect:
    """One way to name the tensors of a ResNet."""

    name: str
    rename: Callable[[str], str]  # our name -> this dialect's
    inside: str  # a regex for the start of any name within the trunk, known or not


DIALECTS = (
    Dialect("torchvision", lambda key: key, r"(conv|bn|norm|layer|downsample)\d"),
    # kuangliu/pytorch-cifar: models/resnet.py, and what was built from it (SupContrast)
    Dialect(
        "torchvision, shortcut",
        lambda key: key.replace("downsample", "shortcut"),
        r"(conv|bn|norm|layer|shortcut)\d",
    ),
    # An nn.Sequential of a ResNet's children: conv1 is 0, bn1 1, relu 2, max-pool 3, layer1 4
    Dialect("sequential", _sequential(4), r"\d+\."),
    # The same for a ResNet without max-pool: layer1 is 3
    Dialect("sequential without max-pool", _sequential(3), r"\d+\."),
    Dialect("detectron2", detectron2_name, r"(stem\.conv|res\d)"),
)


@functools.cache
def names(dialect: Dialect, arch: str) -> dict[str, str]:
    """Return the dialect's name -> ours, for every tensor of the trunk."""
    return {dialect.rename(key): key for key in trunk_shapes(arch)}


@functools.cache
def _all_names(dialect: Dialect) -> frozenset[str]:
    """Return the dialect's names of all ResNets."""
    # ResNet-34 has all names of basic blocks, and ResNet-152 has all names of bottlenecks.
    return frozenset(names(dialect, "resnet34") | names(dialect, "resnet152"))


@functools.cache
def _counted_names(dialect: Dialect, arch: str) -> frozenset[str]:
    """Return the dialect's names of the tensors that must be there."""
    return frozenset(name for name in names(dialect, arch) if not is_counter(name))


# --- trunks ---


@dataclass(frozen=True, kw_only=True)
class ResNetInFile(TrunkInFile):
    """A ResNet under one prefix of one table."""

    if_misshaped = "; a wide, grouped or deep-stem ResNet is one of timm's: --arch timm:NAME --pixels P"
    names: Dialect
    conv1: Shape  # of its first convolution

    @property
    def small(self) -> bool:
        """True if its first convolution is that of a conv3 stem, for small images."""
        return self.conv1 == SMALL_CONV1

    def shapes(self) -> Mapping[str, Shape]:
        return trunk_shapes(self.arch, "conv3" if self.small else "imagenet")

    def name_in_file(self, key: str) -> str:
        return self.names.rename(key)

    def stem(self, wanted: str | None = None) -> str | None:
        """Tell the stem by the shape of conv1; None for a 3x3 one whose padding nothing tells."""
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
        """Return everything in the table beside the trunks, such as a projector, but no queues."""
        own = set(self.keys.values())
        heads = []
        for key in tensors:
            if key not in own and "queue" not in key and not key.startswith(others):
                heads.append(key)
        return heads


LONGEST = 5  # parts of the longest names: layer1.0.downsample.0.weight, res2.0.conv1.norm.bias


def find_trunks(tables: Tables, metadata: TrunkMetadata) -> list[ResNetInFile]:
    """Find all ResNets, in the file's order. One counts if at least half of its tensors are there."""
    fit = functools.partial(_fit, tables, metadata)
    return find_by_votes(tables, _candidates, fit, fewest=20, most=32)


def _candidates(key: str) -> list[tuple[str, Dialect]]:
    """Return (prefix, dialect) for each dialect that has a name with which this key ends."""
    parts = key.rsplit(".", LONGEST)[-LONGEST:]
    # The longest name counts: layer1.0.conv1.weight also ends with conv1.weight.
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    out = []
    for dialect in DIALECTS:
        known = _all_names(dialect)
        for end in ends:
            if end in known:
                out.append((key.removesuffix(end), dialect))
                break
    return out


def _fit(
    tables: Tables, metadata: TrunkMetadata, table: str, prefix: str, dialect: Dialect
) -> tuple[int, ResNetInFile]:
    """Return the ResNet that fits the names under the prefix best, and its score.

    The score is the number of its tensors that are there, minus the number of those that are not.
    Counters do not count, as they are often left out.
    """
    # 1. The names under the prefix, and those of them that can only be the trunk's
    local = {key[len(prefix) :]: key for key in tables[table] if key.startswith(prefix)}
    inside = {name for name in local if re.match(dialect.inside, name)}
    decisive = {name for name in inside if not is_counter(name)}
    # 2. The architecture with the best score, where a name that it cannot explain costs one, too
    scores: dict[str, int] = {}
    explained: dict[str, int] = {}
    for arch in ARCHS:
        wanted = _counted_names(dialect, arch)
        scores[arch] = 2 * len(wanted & local.keys()) - len(wanted)
        explained[arch] = scores[arch] - len(decisive - wanted)
    arch = max(ARCHS, key=explained.__getitem__)
    # 3. The trunk
    ours = names(dialect, arch)
    keys = {}
    extra = []
    for name, key in local.items():
        if name in ours:
            keys[ours[name]] = key
        elif name in inside:
            extra.append(key)
    trunk = ResNetInFile(
        table=table,
        prefix=prefix,
        dialect=dialect.name,
        names=dialect,
        arch=arch,
        keys=keys,
        extra=tuple(extra),
        conv1=conv1_shape(keys, tables[table]),
        metadata=metadata,
    )
    return scores[arch], trunk
