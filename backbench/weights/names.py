"""How a ResNet's tensors are called by those who publish them, and where in a file such names are
found.

A trunk is found by its names, never by the file's extension: `find_trunks` looks under every prefix
of every table of tensors for a ResNet in one of four dialects.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from backbench.weights.resnet import ARCHS, trunk_shapes

Tables = dict[str, dict[str, Tensor]]  # dotted path in the file -> its tensors by key
# What a file holds: nested dicts and lists with tensors and plain values at the leaves
Tree = object

DEEPEST = 20  # levels of nesting that are looked at


def is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var"))


# --- dialects ---


def _sequential(first_layer: int) -> Callable[[str], str]:
    """Names in an nn.Sequential of a ResNet's children, where layer1 stands at `first_layer`."""
    stem = {"conv1": 0, "bn1": 1}

    def rename(key: str) -> str:
        part, rest = key.split(".", 1)
        position = stem[part] if part in stem else first_layer + int(part[-1]) - 1
        return f"{position}.{rest}"

    return rename


_DETECTRON2_PARTS = {"downsample.0": "shortcut", "downsample.1": "shortcut.norm"}


def detectron2_name(key: str) -> str:
    """layer1.0.bn2.weight -> res2.0.conv2.norm.weight; detectron2/modeling/backbone/resnet.py names
    the modules."""
    parts = key.split(".")
    if parts[0] == "conv1":
        return f"stem.{key}"
    if parts[0] == "bn1":
        return f"stem.conv1.norm.{parts[1]}"
    stage, block, part, *rest = parts
    if part == "downsample":
        name = _DETECTRON2_PARTS[f"{part}.{rest.pop(0)}"]
    else:
        # A norm belongs to the convolution it follows
        name = re.sub(r"^bn(\d)$", r"conv\1.norm", part)
    return ".".join([f"res{int(stage[-1]) + 1}", block, name, *rest])


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


# --- tables ---


def tables(tree: Tree) -> Tables:
    """Every dict in the file that holds tensors under text keys, by its dotted path ('' for the
    file itself)."""
    out: Tables = {}
    seen: set[int] = set()  # a file may refer to one object many times, or to itself

    def walk(value: Tree, path: str, depth: int) -> None:
        if id(value) in seen or depth > DEEPEST:
            return
        if isinstance(value, Mapping):
            seen.add(id(value))
            found = {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, Tensor)}
            if found:
                out[path] = found
            children: Iterable[tuple[object, object]] = value.items()
        elif isinstance(value, list | tuple):
            seen.add(id(value))
            children = enumerate(value)
        else:
            return
        for key, child in children:
            if isinstance(child, Mapping | list | tuple):
                walk(child, f"{path}.{key}" if path else str(key), depth + 1)

    walk(tree, "", 0)
    return out


def unwrapped(key: str) -> str:
    """The key without what DistributedDataParallel and torch.compile put before it."""
    return re.sub(r"^((module|_orig_mod)\.)+", "", key)


# --- trunks ---


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
        table = f"{self.table}: " if self.table else ""
        return shown(f"{table}{self.prefix or '(no prefix)'}")

    @property
    def missing(self) -> list[str]:
        """Names (as in `keys`) of the tensors that the file does not have; a counter is never
        missed."""
        out = []
        for key in self.shapes():
            if key not in self.keys and not is_counter(key):
                out.append(key)
        return out

    def shapes(self, small: bool = False) -> Mapping[str, tuple[int, ...]]:
        """Of each tensor that a whole trunk has, named as in `keys`; `small` with a 3x3 conv1."""
        return trunk_shapes(self.arch, "conv3" if small else "imagenet")

    def named(self, key: str) -> str:
        """What the file would call a tensor, below the prefix."""
        return self.dialect.rename(key)

    def assembled(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The trunk's own state dict from those of its table."""
        return {ours: tensors[key].detach() for ours, key in self.keys.items()}


# Parts of the longest names: layer1.0.downsample.0.weight, res2.0.conv1.norm.running_mean
LONGEST = 5
FEWEST = 20  # names under a prefix before it is looked at
MOST = 32  # prefixes looked at in a table: a file may have been made to delay


def find_trunks(found: Tables) -> list[FoundTrunk]:
    """All ResNets in the file of which at least half the tensors are there, in the file's order."""
    out = []
    for table, tensors in found.items():
        # 1. Each key that ends in a name of some dialect votes for what stands before that name.
        votes: Counter[tuple[str, Dialect]] = Counter()
        for key in tensors:
            votes.update(_candidates(key))
        # 2. Of the dialects of one prefix, the one that explains most counts.
        best: dict[str, tuple[int, FoundTrunk]] = {}
        for (prefix, dialect), count in votes.most_common(MOST):
            if count < FEWEST:
                break
            score, trunk = _fit(table, prefix, dialect, tensors)
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
    starts = [len(key) - len(rest) for rest in _ends(key)]
    out = []
    for dialect in DIALECTS:
        known = _all_names(dialect)
        for start in starts:
            if key[start:] in known:
                out.append((key[:start], dialect))
                break
    return out


def _ends(key: str) -> list[str]:
    """'a.b.c' -> ['a.b.c', 'b.c', 'c']; of a long key the last LONGEST + 1 parts only, the first of
    them with all that stands before it."""
    first, *parts = key.rsplit(".", LONGEST)
    out = [key]
    rest = key[len(first) + 1 :]
    for part in parts:
        out.append(rest)
        rest = rest[len(part) + 1 :]
    return out


def _fit(
    table: str, prefix: str, dialect: Dialect, tensors: Mapping[str, Tensor]
) -> tuple[int, FoundTrunk]:
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
    trunk = FoundTrunk(table, prefix, dialect, arch, keys, tuple(extra), tuple(heads))
    return there_minus_absent(arch), trunk


# --- a stranger's names in messages ---


def shown(text: str) -> str:
    """A stranger's text for the terminal: printable, and not longer than a line."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 160 else f"{text[:150]}..."


def first_names(items: Iterable[str], count: int = 3) -> str:
    """'a, b, c and 7 more'"""
    listed = [shown(item) for item in items]
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more
