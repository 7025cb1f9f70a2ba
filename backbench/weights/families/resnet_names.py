"""A ResNet's tensors as published files call them, and where in a file such names stand.

A trunk is found by its names, never by the file's extension: `find_trunks` looks under every prefix
of every table of tensors for a ResNet in one of four dialects.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
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
from backbench.weights.family import Shape, Tables, TrunkInFile
from backbench.weights.tensor_names import detectron2_name, is_counter

# --- dialects ---


def _sequential(first_layer: int) -> Callable[[str], str]:
    """Names in an nn.Sequential of a ResNet's children, where layer1 stands at `first_layer`."""
    stem = {"conv1": 0, "bn1": 1}

    def rename(key: str) -> str:
        part, rest = key.split(".", 1)
        position = stem[part] if part in stem else first_layer + int(part[-1]) - 1
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


@functools.cache
def _decisive(dialect: Dialect, arch: str) -> frozenset[str]:
    """The names by which a trunk is recognised: all but the counters, which many files leave
    out."""
    return frozenset(name for name in names(dialect, arch) if not is_counter(name))


@functools.cache
def _all_names(dialect: Dialect) -> frozenset[str]:
    # ResNet-34 has all names of basic blocks, ResNet-152 all of bottlenecks
    return frozenset(names(dialect, "resnet34")) | frozenset(names(dialect, "resnet152"))


# --- trunks ---


@dataclass(frozen=True, kw_only=True)
class ResNetInFile(TrunkInFile):
    """A ResNet under one prefix of one table. `conv1` is the shape of its first convolution."""

    names: Dialect
    conv1: Shape
    stated_pixels: Pixels | None

    @property
    def small(self) -> bool:
        return self.conv1 == SMALL_CONV1

    def shapes(self) -> Mapping[str, Shape]:
        return trunk_shapes(self.arch, "conv3" if self.small else "imagenet")

    def name_in_file(self, key: str) -> str:
        return self.names.rename(key)

    def assembled(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {ours: tensors[key].detach() for ours, key in self.keys.items()}

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
        if self.stated_pixels is not None:
            return self.stated_pixels
        if self.form is None:
            return Pixels()
        if self.small and self.form.small_pixels is not None:
            return self.form.small_pixels
        return self.form.pixels

    def head_keys(self, tensors: Mapping[str, Tensor], others: tuple[str, ...]) -> list[str]:
        """Everything in the table beside the trunks: projector, predictor; no queues."""
        inside = set(self.keys.values())
        out = []
        for key in tensors:
            if key not in inside and "queue" not in key and not key.startswith(others):
                out.append(key)
        return out


# Parts of the longest names: layer1.0.downsample.0.weight, res2.0.conv1.norm.running_mean
LONGEST = 5
FEWEST = 20  # names under a prefix before it is looked at
MOST = 32  # prefixes looked at in a table: a file may have been made to delay


def find_trunks(tables: Tables, pixels: Pixels | None = None) -> list[ResNetInFile]:
    """All ResNets in the file of which at least half the tensors are there, in the file's order."""
    out = []
    for table, tensors in tables.items():
        # 1. Each key that ends in a name of some dialect votes for what stands before that name.
        votes: Counter[tuple[str, Dialect]] = Counter()
        for key in tensors:
            votes.update(_candidates(key))
        # 2. Of the dialects of one prefix, the one that explains most counts.
        best: dict[str, tuple[int, ResNetInFile]] = {}
        for (prefix, dialect), count in votes.most_common(MOST):
            if count < FEWEST:
                break
            score, trunk = _fit(table, prefix, dialect, tensors, pixels)
            if score > 0 and (prefix not in best or score > best[prefix][0]):
                best[prefix] = score, trunk
        # 3. In the order in which their first tensors stand in the file.
        place = {key: position for position, key in enumerate(tensors)}
        trunks = [trunk for _, trunk in best.values()]
        out += sorted(trunks, key=lambda trunk: min(map(place.__getitem__, trunk.keys.values())))
    return out


def _candidates(key: str) -> list[tuple[str, Dialect]]:
    """(prefix, dialect) for each dialect that has a name with which this key ends; the longest such
    name counts."""
    # Where a name may begin, from the left: after each of the last dots. Further left it would be
    # longer than any name.
    starts: list[int] = []
    end = len(key)
    while end >= 0 and len(starts) < LONGEST:
        end = key.rfind(".", 0, end)
        starts.insert(0, end + 1)
    if end >= 0:
        starts.insert(0, 0)
    out = []
    for dialect in DIALECTS:
        known = _all_names(dialect)
        for start in starts:
            if key[start:] in known:
                out.append((key[:start], dialect))
                break
    return out


def _fit(
    table: str,
    prefix: str,
    dialect: Dialect,
    tensors: Mapping[str, Tensor],
    pixels: Pixels | None,
) -> tuple[int, ResNetInFile]:
    """The architecture that explains most of the names under the prefix; score: tensors there minus
    tensors absent."""
    local = {key[len(prefix) :]: key for key in tensors if key.startswith(prefix)}
    inside = {name for name in local if re.match(dialect.inside, name)}
    decisive = {name for name in inside if not is_counter(name)}

    def there_minus_absent(arch: str) -> int:
        wanted = _decisive(dialect, arch)
        there = len(wanted & local.keys())
        return there - (len(wanted) - there)

    def explained(arch: str) -> int:
        return there_minus_absent(arch) - len(decisive - _decisive(dialect, arch))

    arch = max(ARCHS, key=explained)
    ours = names(dialect, arch)
    keys, extra, heads = {}, [], []
    for name, key in local.items():
        if name in ours:
            keys[ours[name]] = key
        elif name in inside:
            extra.append(key)
        else:
            heads.append(key)
    trunk = ResNetInFile(
        table=table,
        prefix=prefix,
        dialect=dialect.name,
        names=dialect,
        arch=arch,
        keys=keys,
        extra=tuple(extra),
        heads=tuple(heads),
        conv1=conv1_shape(keys, tensors),
        stated_pixels=pixels,
    )
    return there_minus_absent(arch), trunk
