"""Looks a network up by the shapes of its tensors, among all that timm and torchvision build.

`architectures.tsv` has a row for each network, made by tools/index_architectures.py. It holds digests,
so that a file is compared with 1,400 networks without building one of them.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from backbench.runs import atomic
from backbench.weights.family import Shape
from backbench.weights.tensor_names import is_counter, without_wrapped_parts

INDEX = Path(__file__).with_suffix(".tsv")
DIGITS = 12  # hex digits of a digest: 48 bits for 1,400 networks
Simple = bool | int | float | str | None


class IndexRow(NamedTuple):
    """A network that a library builds, as the index has it."""

    library: str  # timm | torchvision
    name: str
    tensors: int  # without a classifier's, and without counters
    shapes: str  # the digest of their shapes, in any order
    names: str  # the digest of their names and shapes
    # The digest of what its modules compute (`settings`); empty where no other has these shapes
    network: str


def write(rows: Sequence[IndexRow]) -> None:
    """Write the index."""
    alike = Counter(row.shapes for row in rows)
    lines = ["\t".join(IndexRow._fields)]
    for row in rows:
        kept = row if alike[row.shapes] > 1 else row._replace(network="")
        lines.append("\t".join(map(str, kept)))
    atomic.write_text(INDEX, "\n".join(lines) + "\n")


@functools.cache
def rows() -> tuple[IndexRow, ...]:
    """Read the index."""
    out = []
    for line in INDEX.read_text().splitlines()[1:]:
        library, name, tensors, *digests = line.split("\t")
        out.append(IndexRow(library, name, int(tensors), *digests))
    return tuple(out)


@functools.cache
def row_of(library: str, name: str) -> IndexRow | None:
    """Return the row of a network; None where the index has none."""
    for row in rows():
        if (row.library, row.name) == (library, name):
            return row
    return None


def row(library: str, name: str, shapes: Mapping[str, Shape], model: Any) -> IndexRow:
    """Make the row of a network: of its trunk's tensors, and its module."""
    counted = {key: shape for key, shape in shapes.items() if not is_counter(key)}
    return IndexRow(
        library,
        name,
        len(counted),
        digest_of_shapes(counted.values()),
        digest_of_names(counted),
        _digest(f"{key} {value}" for key, value in settings(model).items()),
    )


def digest_of_shapes(shapes: Iterable[Shape]) -> str:
    """Return the digest of shapes in any order: safetensors sorts by name."""
    return _digest(sorted(map(str, shapes)))


def digest_of_names(shapes: Mapping[str, Shape]) -> str:
    """Return the digest of names with their shapes, in any order. Tables of files have the names
    without what wrappers add, so these have none, either."""
    return _digest(
        sorted(f"{without_wrapped_parts(key)} {shape}" for key, shape in shapes.items())
    )


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


# --- what the modules compute ---

# Attributes that change nothing in eval(), or that the shapes tell
_NOT_TOLD = (
    "training",
    "inplace",
    "p",
    "drop_prob",
    "drop_rate",
    "scale_by_keep",
    "momentum",
    "num_classes",
    "grad_checkpointing",
    "fused_attn",
    "dump_patches",
    "call_super_init",
)


def settings(model: Any) -> dict[str, Simple | tuple[object, ...]]:
    """Return 'module.attribute' -> value for all that tells one module of torch from another of the
    same tensors: its class, eps, stride, padding, number of heads, ..."""
    out: dict[str, Simple | tuple[object, ...]] = {}
    for path, module in model.named_modules():
        out[f"{path}.class"] = type(module).__name__
        for key, value in vars(module).items():
            if key.startswith("_") or key in _NOT_TOLD or "drop" in key:
                continue
            if isinstance(value, list | tuple) and all(
                isinstance(element, Simple) for element in value
            ):
                out[f"{path}.{key}"] = tuple(value)
            elif isinstance(value, Simple):
                out[f"{path}.{key}"] = value
    return out


# --- networks ---


def of_timm(name: str) -> IndexRow:
    """Build timm's network without its classifier, on no memory, and make its row."""
    import timm

    from backbench.weights.undrawn import without_memory

    with without_memory():
        model = timm.create_model(name, pretrained=False, num_classes=0)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    return row("timm", name, shapes, model)


def of_torchvision(name: str) -> IndexRow:
    """Build torchvision's network, mostly on no memory, and make its row without its classifiers."""
    import torch
    from torchvision.models import get_model

    from backbench.weights.undrawn import Undrawn

    classes = 1000
    # A RegNet computes its widths with tensors, which need memory.
    device = "cpu" if name.startswith("regnet") else "meta"
    with torch.device(device), Undrawn():
        model = get_model(name, weights=None, num_classes=classes)
    shapes = {}
    for key, value in model.state_dict().items():
        if value.ndim == 0 or value.shape[0] != classes:
            shapes[key] = tuple(value.shape)
    return row("torchvision", name, shapes, model)
