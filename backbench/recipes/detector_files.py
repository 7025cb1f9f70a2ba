"""Files in Detectron2's dialect, YAML over `_BASE_`: read by `detect`, and where a grid's cost is told
without torch or Detectron2."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from backbench.errors import BadInput
from backbench.untrusted import opening, printable, yamls

Value: TypeAlias = Any  # whatever YAML can say


def read_flat(path: Path) -> dict[str, Value]:
    """The keys of a file over its bases: MODEL.RPN.NMS_THRESH -> 0.7. Raises BadInput that names the
    file."""
    return flat(_load(path))


def _load(
    path: Path, _seen: tuple[Path, ...] = (), _done: dict[Path, dict[str, Value]] | None = None
) -> dict[str, Value]:
    """The file over its `_BASE_` (one, or a list), each relative to the file that names it, and
    read once however many name it.

    Read here, not by CfgNode.load_yaml_with_base, which reads whatever it is given to its end.
    """
    import yaml

    _done = {} if _done is None else _done
    if path.resolve() in _seen:
        raise BadInput(f"{path}: `_BASE_` goes in a circle")
    if path.resolve() in _done:
        return copy.deepcopy(_done[path.resolve()])
    try:
        text = opening.read_bytes(path, most=yamls.LARGEST).decode()
        yamls.check(text)
        own = yaml.safe_load(text)
        yamls.refuse_long_numbers(own)
    except FileNotFoundError:
        named = f"{_seen[-1]}: _BASE_ '{path}'" if _seen else str(path)
        raise BadInput(f"{named} is not there") from None
    except (yaml.YAMLError, OSError, ValueError, TypeError, RecursionError) as error:
        said = " ".join(str(error).split())[:160]
        raise BadInput(f"{path}: not readable as a config: {said}") from None
    if not isinstance(own, dict) or not all(isinstance(key, str) for key in own):
        raise BadInput(f"{path}: not readable as a config: expected `KEY: value` lines")
    if found := printable.control_below(own):
        raise BadInput(f"{path}: '{found[0]}' holds the control character {found[1]}")
    named = own.pop("_BASE_", [])
    tree: dict[str, Value] = {}
    for base in named if isinstance(named, list) else [named]:
        below = path.parent / Path(str(base)).expanduser()
        _merge_files(path, _load(below, (*_seen, path.resolve()), _done), tree)
    _merge_files(path, own, tree)
    _done[path.resolve()] = copy.deepcopy(tree)
    return tree


def _merge_files(path: Path, high: Mapping[str, Value], low: dict[str, Value]) -> None:
    """`high` into `low`, group by group; a value cannot stand where a group was."""
    for key, value in high.items():
        if isinstance(value, dict) and key in low:
            if not isinstance(low[key], dict):
                raise BadInput(f"{path}: '{key}' is a group here and a value in its _BASE_")
            _merge_files(path, value, low[key])
        else:
            low[key] = value


def flat(tree: Mapping[str, Value], prefix: str = "") -> dict[str, Value]:
    """{"MODEL": {"MASK_ON": True}} -> {"MODEL.MASK_ON": True}."""
    out: dict[str, Value] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
