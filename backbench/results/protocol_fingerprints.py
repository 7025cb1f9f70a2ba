"""The protocol of a row as a fingerprint of its resolved recipe, and the name that it may bear.

A protocol's name alone decides nothing: a copy of a shipped recipe with another crop can keep the
name. What decides is the *print*, 12 hex digits of the recipe that a row holds, without its name,
without what decides no number (`FREE`), and without keys at their defaults, so that a key that is
added with a default changes no print. `shipped.json` binds the name of each shipped protocol to its
print; tools/bind_protocols.py writes it, and a test keeps it current.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from backbench.recipes import config
from backbench.tasks import TASKS

FILE = Path(__file__).parent / "shipped.json"
UNKNOWN = "unknown"  # the print of a row that does not hold its recipe
DIGITS = 4  # of a print where it stands in a name; more where two would look alike
# How often a run saves, how much it reads at once, the interval's resamples: no value changes.
FREE = {"protocol", "save_minutes", "feature_batch", "chunk", "bootstrap"}
FREE_OF_ANALYZE = FREE | {"batch"}  # images at a time
# Detection's names for a config that is no shipped one are prints themselves.
_OWN_PRINT = re.compile(r"detection-([0-9a-f]{12})")

Leaves = dict[str, Any]  # "geometry.crop" -> 224


class Shipped(TypedDict):
    """What shipped.json holds."""

    defaults: dict[str, Leaves]  # by kind of protocol
    prints: dict[str, dict[str, str]]  # name of a protocol -> what it measures -> print


@functools.cache
def shipped() -> Shipped:
    """The bound names."""
    data: Shipped = json.loads(FILE.read_text())
    return data


def kind_of(task: str, recipe: Mapping[str, Any]) -> str:
    """Whose defaults a recipe has: its own `kind`; a detection config goes by its backbone."""
    if TASKS[task].detects:
        return str(recipe.get("MODEL.BACKBONE.NAME"))
    return str(recipe.get("kind", task))


def measures(task: str) -> str:
    """What one name may be bound to once: a kind of probe, or a detection task."""
    return TASKS[task].kind or task


def leaves(recipe: object, prefix: str = "") -> Leaves:
    """Nested groups as one level of dotted keys; a list is one value, an empty group too."""
    if not isinstance(recipe, Mapping) or not recipe:
        return {prefix: _plain(recipe)}
    out: Leaves = {}
    for key, value in recipe.items():
        out |= leaves(value, f"{prefix}.{key}" if prefix else str(key))
    return out


def _plain(value: Any) -> Any:
    """A value as it is compared: 1.0 is 1, however it was written."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def decisive(recipe: Mapping[str, Any], kind: str, defaults: Mapping[str, Leaves]) -> Leaves:
    """The leaves of a resolved recipe that decide its numbers and are not at their defaults."""
    free = FREE_OF_ANALYZE if kind == "analyze" else FREE
    of_kind = defaults.get(kind, {})
    out: Leaves = {}
    for key, value in leaves(recipe).items():
        if key in free:
            continue
        known = key if key in of_kind else _in_any_group(key, of_kind)
        if known is None or of_kind[known] != value:
            out[key] = value
    return out


def _in_any_group(key: str, defaults: Leaves) -> str | None:
    """The default that stands for all groups of one mapping: parts.*.list of parts.10.list."""
    parts = key.split(".")
    for place in range(1, len(parts) - 1):
        pattern = ".".join((*parts[:place], "*", *parts[place + 1 :]))
        if pattern in defaults:
            return pattern
    return None


def print_of(recipe: Mapping[str, Any], kind: str, defaults: Mapping[str, Leaves]) -> str:
    """12 hex digits: equal exactly when what decides is."""
    return digest(decisive(recipe, kind, defaults))


def digest(value: object) -> str:
    """12 hex digits of any JSON-able value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def of_recipe(task: str, name: str, recipe: object, chosen_on: object) -> str | None:
    """What must stand behind a protocol's name: None where `recipe`, as a row holds it, is the
    shipped one of that name, else its print, or UNKNOWN. `chosen_on` is the split of the choice."""
    own = _OWN_PRINT.fullmatch(name)
    if not isinstance(recipe, Mapping) or not recipe:
        return None if own else UNKNOWN
    if own and config.fingerprint(recipe) == own[1]:
        return None
    bound = shipped()
    kind = kind_of(task, recipe)
    # A choice made on another split than the recipe says is another way to measure.
    if chosen_on not in (None, recipe.get("select", "val")):
        return digest([decisive(recipe, kind, bound["defaults"]), str(chosen_on)])
    found = print_of(recipe, kind, bound["defaults"])
    return None if found == bound["prints"].get(name, {}).get(measures(task)) else found
