"""The published formats as data: where each keeps its trunks, what it calls the tensors, what else it implies.

A trunk is found by its names, not by the file's extension: `find_trunks` looks under every prefix of every table of
tensors for a ResNet in one of four dialects, and `recognise` says which format has its trunks in exactly those places.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backbench.backbones import ARCHS, build_backbone
from backbench.preprocess import SWAV_STD, Pixels

# --- the names that a trunk's tensors have ---


@functools.cache
def trunk_shapes(arch: str, stem: str = "imagenet") -> dict[str, tuple[int, ...]]:
    """Our names (torchvision's, without fc) and shapes: 318 for a ResNet-50."""
    with torch.device("meta"):
        return {k: tuple(v.shape) for k, v in build_backbone(arch, stem).state_dict().items()}


def is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var"))


def _sequential(first_layer: int) -> Callable[[str], str]:
    def rename(key: str) -> str:
        part, rest = key.split(".", 1)
        position = {"conv1": 0, "bn1": 1}.get(part, first_layer + int(part[-1]) - 1 if part[-1].isdigit() else 0)
        return f"{position}.{rest}"

    return rename


def detectron2_name(key: str) -> str:
    """layer1.0.bn2.weight -> res2.0.conv2.norm.weight; detectron2/modeling/backbone/resnet.py names the modules."""
    parts = key.split(".")
    if parts[0] == "conv1":
        return f"stem.{key}"
    if parts[0] == "bn1":
        return f"stem.conv1.norm.{parts[1]}"
    stage, block, part, *rest = parts
    inner = {"downsample.0": "shortcut", "downsample.1": "shortcut.norm"}
    name = inner[f"{part}.{rest.pop(0)}"] if part == "downsample" else re.sub(r"^bn(\d)$", r"conv\1.norm", part)
    return ".".join([f"res{int(stage[-1]) + 1}", block, name, *rest])


@dataclass(frozen=True)
class Dialect:
    name: str
    rename: Callable[[str], str]  # our name -> this dialect's
    inside: str  # regex of a name's start: such a tensor is part of the trunk, whether known or not


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


# --- finding trunks ---

Tables = dict[str, dict[str, Tensor]]


def tables(tree: Any) -> Tables:
    """Every dict in the file that holds tensors under text keys, by its dotted path ('' for the file itself)."""
    out: Tables = {}
    seen: set[int] = set()

    def walk(value: Any, path: str, depth: int) -> None:
        if id(value) in seen or depth > 20:
            return
        if isinstance(value, Mapping):
            seen.add(id(value))
            found = {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, Tensor)}
            if found:
                out[path] = found
            for key, child in value.items():
                if isinstance(child, Mapping | list | tuple):
                    walk(child, f"{path}.{key}" if path else str(key), depth + 1)
        elif isinstance(value, list | tuple):
            seen.add(id(value))
            for index, child in enumerate(value):
                if isinstance(child, Mapping | list | tuple):
                    walk(child, f"{path}.{index}" if path else str(index), depth + 1)

    walk(tree, "", 0)
    return out


def unwrapped(key: str) -> str:
    """The key without what DistributedDataParallel and torch.compile put before it."""
    return re.sub(r"^((module|_orig_mod)\.)+", "", key)


@dataclass(frozen=True)
class FoundTrunk:
    """A ResNet under one prefix of one table. `keys`: our name -> the file's key."""

    table: str
    prefix: str
    dialect: Dialect
    arch: str
    keys: Mapping[str, str]
    extra: tuple[str, ...]  # keys inside the trunk that no ResNet of this architecture has
    heads: tuple[str, ...]  # the other keys under the prefix

    @property
    def place(self) -> str:
        """'table:prefix', the prefix without `module.`: what formats are recognised by."""
        return f"{self.table}:{unwrapped(self.prefix)}"

    @property
    def label(self) -> str:
        return f"{self.table + ': ' if self.table else ''}{self.prefix or '(no prefix)'}"

    @property
    def missing(self) -> list[str]:
        return [k for k in trunk_shapes(self.arch) if k not in self.keys and not is_counter(k)]


def find_trunks(found: Tables) -> list[FoundTrunk]:
    """All ResNets in the file of which at least half the tensors are there, in the file's order."""
    out = []
    for table, tensors in found.items():
        votes: Counter[tuple[str, int]] = Counter()
        for key in tensors:
            starts = [0, *(m.end() for m in re.finditer(r"\.", key))]
            for index, dialect in enumerate(DIALECTS):
                known = _all_names(dialect)
                start = next((s for s in starts if key[s:] in known), None)
                if start is not None:
                    votes[key[:start], index] += 1
        best: dict[str, tuple[int, FoundTrunk]] = {}
        for (prefix, index), count in votes.items():
            if count < 20:
                continue
            score, trunk = _fit(table, prefix, DIALECTS[index], tensors)
            if score > 0 and score > best.get(prefix, (0, None))[0]:
                best[prefix] = score, trunk
        out += [trunk for _, trunk in best.values()]
    return out


@functools.cache
def _all_names(dialect: Dialect) -> frozenset[str]:
    return frozenset(name for arch in ("resnet34", "resnet152") for name in names(dialect, arch))


def _fit(table: str, prefix: str, dialect: Dialect, tensors: Mapping[str, Tensor]) -> tuple[int, FoundTrunk]:
    """The architecture that explains most of the names under the prefix; score: tensors there minus tensors absent."""
    local = {key[len(prefix) :]: key for key in tensors if key.startswith(prefix)}
    scores = {}
    for arch in ARCHS:
        wanted = {name for name in names(dialect, arch) if not is_counter(name)}
        here = sum(name in local for name in wanted)
        beyond = sum(name not in wanted for name in local if re.match(dialect.inside, name) and not is_counter(name))
        scores[arch] = 2 * here - len(wanted) - beyond
    arch = max(scores, key=lambda name: scores[name])
    ours = names(dialect, arch)
    wanted_here = sum(name in local for name in ours if not is_counter(name))
    unknown = [name for name in local if name not in ours]
    inside = [name for name in unknown if re.match(dialect.inside, name)]
    trunk = FoundTrunk(
        table,
        prefix,
        dialect,
        arch,
        {ours[name]: key for name, key in local.items() if name in ours},
        tuple(local[name] for name in inside),
        tuple(local[name] for name in unknown if name not in set(inside)),
    )
    return 2 * wanted_here - sum(not is_counter(name) for name in ours), trunk


# --- the formats ---


@dataclass(frozen=True, kw_only=True)
class Format:
    """`encoders`: name -> places 'table:prefix' of that trunk; several places are the same weights written twice.

    A place without a table stands for the usual ones (`_USUAL`). `needs`: patterns of other keys, or of '@key' at the
    file's top, that must be there. The first format that fits is the one, so special ones stand before general ones.
    """

    name: str
    source: str  # repository and file that write it
    method: str | None = None
    encoders: Mapping[str, tuple[str, ...]]
    default: str
    needs: tuple[str, ...] = ()
    test: Callable[[Tables], bool] | None = None
    pixels: Pixels = field(default_factory=Pixels)
    conv3: str = "conv3"  # what a 3x3 conv1 means here; the padding is not in the file
    epoch: tuple[str, ...] = ("epoch",)


_USUAL = ("", "state_dict", "model", "model_state_dict", "net")

FORMATS: tuple[Format, ...] = (
    Format(
        name="detectron2",
        source="facebookresearch/detectron2 detectron2/modeling/backbone/resnet.py",
        encoders={"backbone": ("model:", "model:backbone.bottom_up.", "model:backbone.")},
        default="backbone",
        needs=("res2.0.conv1.norm.weight",),
    ),
    Format(
        name="moco",
        source="facebookresearch/moco moco/builder.py, main_moco.py",
        method="moco",
        encoders={"query": ("encoder_q.",), "key": ("encoder_k.",)},
        default="query",
    ),
    Format(
        name="torchvision",
        source="pytorch/vision torchvision/models/resnet.py",
        encoders={"trunk": ("",)},
        default="trunk",
    ),
)


def _places(spec: str) -> tuple[str, ...]:
    return (spec,) if ":" in spec else tuple(f"{table}:{spec}" for table in _USUAL)


def recognise(trunks: list[FoundTrunk], found: Tables, tree: Any) -> tuple[Format, dict[str, list[FoundTrunk]]] | None:
    """The format that accounts for every trunk in the file, with its encoders; None where there is none."""
    marks = {unwrapped(key) for tensors in found.values() for key in tensors}
    if isinstance(tree, Mapping):
        marks |= {f"@{key}" for key in tree}
    for form in FORMATS:
        encoders: dict[str, list[FoundTrunk]] = {}
        for trunk in trunks:
            for name, specs in form.encoders.items():
                if any(trunk.place in _places(spec) for spec in specs):
                    encoders.setdefault(name, []).append(trunk)
        if sum(map(len, encoders.values())) != len(trunks) or not trunks:
            continue
        if all(fnmatch.filter(marks, need) for need in form.needs) and (form.test is None or form.test(found)):
            return form, encoders
    return None


def nearest_format(found: Tables) -> Format | None:
    """The format whose places look most like the prefixes in this file, for error messages."""
    prefixes = {unwrapped(key).split(".")[0] for tensors in found.values() for key in tensors}
    best, score = None, 0.6
    for form in FORMATS:
        for spec in (spec for specs in form.encoders.values() for spec in specs):
            start = spec.split(":")[-1].split(".")[0]
            for prefix in prefixes if start else ():
                ratio = difflib.SequenceMatcher(None, start, prefix).ratio()
                if ratio > score:
                    best, score = form, ratio
    return best


def first_names(items: Iterable[str], count: int = 3) -> str:
    """'a, b, c and 7 more'"""
    listed = list(items)
    return ", ".join(listed[:count]) + (f" and {len(listed) - count} more" if len(listed) > count else "")


SWAV_PIXELS = Pixels(std=SWAV_STD)
