"""Finds the classifier that stands beside a trunk in a file, under the names of timm's whole model.

Authors call their classifiers differently (`head`, `fc`, `classifier.2`), and put it beside the trunk
or below another prefix. A trunk that goes in with it can answer as its authors' model does
(`timm_classifier`).
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from backbench.weights.families import timm_trunk
from backbench.weights.families.timm_model_names import parse
from backbench.weights.family import Shape
from backbench.weights.tensor_names import is_counter
from backbench.weights.undrawn import without_memory

# The names that a classifier has where its model stands
_NAMES = re.compile(
    r"(_?(fc|head|heads|classifier|last_linear|linear|logits|output))"
    r"(\.(fc|head|l|linear|\d+))?\.(weight|bias)"
)

_USUAL = 1000  # classes; a classifier of other names may have them, too
_MOST_CLASSES = 1_000_000
_MOST_COUNTS = 4  # numbers of classes that are tried beside the usual one


class Classifier(NamedTuple):
    """A classifier in a file."""

    classes: int
    names: dict[str, str]  # the file's key -> the name in timm's model


def found(
    arch: str, prefix: str, tensors: Mapping[str, Tensor], trunk: Collection[str]
) -> Classifier | None:
    """Find the whole classifier of a trunk that stands below `prefix`; None where the file has none
    of that shape, or two.

    `trunk` are the keys that the trunk takes.
    """
    taken = set(trunk)
    free = [key for key in tensors if key not in taken and not is_counter(key)]
    return _by_timms_names(arch, prefix, tensors, free) or _by_other_names(
        arch, prefix, tensors, free
    )


def _by_timms_names(
    arch: str, prefix: str, tensors: Mapping[str, Tensor], free: Sequence[str]
) -> Classifier | None:
    below = {key[len(prefix) :]: key for key in free if key.startswith(prefix)}
    # The first numbers of shapes that may be the number of classes, and ImageNet's
    counts = []
    for name, key in below.items():
        if _NAMES.fullmatch(name) and tensors[key].dim() > 0:
            counts.append(tensors[key].shape[0])
    tried = list(dict.fromkeys(counts))[:_MOST_COUNTS]
    if below and _USUAL not in tried:
        tried.append(_USUAL)
    for classes in tried:
        wanted = _of_model(arch, classes)
        fits = bool(wanted)
        for name, shape in wanted.items():
            if name not in below or tuple(tensors[below[name]].shape) != shape:
                fits = False
        if fits:
            return Classifier(classes, {below[name]: name for name in wanted})
    return None


def _by_other_names(
    arch: str, prefix: str, tensors: Mapping[str, Tensor], free: Sequence[str]
) -> Classifier | None:
    """Take the one linear layer that is as wide as timm's, beside the trunk or around it."""
    # 1. The layers whose names are a classifier's. Of several, none can be told for it: a projector
    # has more than one
    layers: dict[str, dict[str, str]] = {}
    for around in _prefixes_around(prefix):
        for key in free:
            if key.startswith(around) and _NAMES.fullmatch(key[len(around) :]):
                layer, _, part = key.rpartition(".")
                layers.setdefault(layer, {})[part] = key
    linear = []
    for parts in layers.values():
        if "weight" in parts and tensors[parts["weight"]].dim() > 1:
            linear.append(parts)
    if len(linear) != 1:
        return None
    (parts,) = linear
    # 2. timm's classifier is one such layer, too
    classes = tensors[parts["weight"]].shape[0]
    wanted = _of_model(arch, classes)
    names = {name.rpartition(".")[2]: name for name in wanted}
    if len(wanted) != len(parts) or names.keys() != parts.keys():
        return None
    for part, key in parts.items():
        if tuple(tensors[key].shape) != wanted[names[part]]:
            return None
    return Classifier(classes, {key: names[part] for part, key in parts.items()})


def _of_model(arch: str, classes: int) -> dict[str, Shape]:
    """Return the names and shapes of the classifier of timm's model with so many classes."""
    if not 0 < classes <= _MOST_CLASSES:
        return {}
    trunk = _shapes(arch, 0)
    whole = _shapes(arch, classes)
    return {key: shape for key, shape in whole.items() if key not in trunk}


@functools.lru_cache(maxsize=16)
def _shapes(arch: str, classes: int) -> dict[str, Shape]:
    """Return the names and shapes of timm's model with so many classes, without counters."""
    with without_memory():
        state = timm_trunk.create(parse(arch), classes).state_dict()
    return {
        key: tuple(value.shape) for key, value in state.items() if not is_counter(key)
    }


def _prefixes_around(prefix: str) -> list[str]:
    """Return the prefix, and those of the modules around it: 'a.b.' -> 'a.b.', 'a.', ''."""
    parts = prefix.split(".")[:-1]
    out = []
    for count in range(len(parts), -1, -1):
        out.append("".join(f"{part}." for part in parts[:count]))
    return out
