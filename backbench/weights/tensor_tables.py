"""Finds the tables of tensors in a file: dicts of tensors, at any depth."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from backbench.weights.family import Tables, Tree
from backbench.weights.tensor_names import without_wrapped_parts

DEEPEST = 20  # deeper levels of nesting in a file are not looked at


def _without_wrapped_parts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name a table's tensors as if no part of the model had been wrapped. A table in which two
    tensors would then have one name stays as it is."""
    renamed = {without_wrapped_parts(key): value for key, value in tensors.items()}
    return renamed if len(renamed) == len(tensors) else tensors


def tables_of(tree: Tree) -> Tables:
    """Find every dict of tensors in the file, by its dotted path (the file's top has path '').

    Tensors are named without the wrappers of the model's parts.
    """
    out: Tables = {}
    # A file may refer to one object many times, or to itself; each is walked once.
    seen: set[int] = set()

    def walk(value: Tree, path: str, depth: int) -> None:
        if id(value) in seen or depth > DEEPEST:
            return
        if isinstance(value, Mapping):
            seen.add(id(value))
            tensors = {}
            for key, child in value.items():
                if isinstance(key, str) and isinstance(child, Tensor):
                    # Some files hold nn.Parameter, not plain tensors. Nothing is trained here, so
                    # the gradient is dropped
                    tensors[key] = child.detach()
            if tensors:
                out[path] = _without_wrapped_parts(tensors)
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


def holds_nameless(tree: Tree) -> bool:
    """Return True if a file is a tensor, or a list of them, as `list(model.parameters())` is."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    inside = tree if isinstance(tree, list | tuple) else [tree]
    return any(isinstance(one, Tensor) for one in inside)
