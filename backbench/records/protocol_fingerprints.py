"""Fingerprints of protocols: a row's protocol is its resolved recipe, not its name.

A copy of a shipped recipe with another crop can keep the name, so the *fingerprint* decides: 12 hex
digits of a row's recipe, without its name, keys that change no number (`FREE`), and keys at their
defaults, so a new key with a default changes none. `shipped.json` binds shipped names to their
fingerprints; tools/bind_protocols.py writes it, and a test keeps it current.
"""

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
UNKNOWN = "unknown"  # stands for the fingerprint of a row that does not hold its recipe
DIGITS = 4  # of a fingerprint in a column's name; more where two would look alike
# How often a run saves and how much it reads at once change no value.
FREE = {"protocol", "save_minutes", "feature_batch", "chunk"}
FREE_OF_ANALYZE = FREE | {"batch"}  # images at a time
# Detection names a config that is not shipped by its fingerprint.
_NAMED_BY_FINGERPRINT = re.compile(r"detection-([0-9a-f]{12})")

Leaves = dict[str, Any]  # "geometry.crop" -> 224


class Shipped(TypedDict):
    """The content of shipped.json."""

    defaults: dict[str, Leaves]  # by kind of protocol
    # Name of a protocol -> kind of task -> fingerprint
    fingerprints: dict[str, dict[str, str]]
    # Defaults of a recipe, of crops, and of each method by its name
    pretraining: dict[str, Leaves]
    # Name in configs/pretrain -> digest of the recipe, bases included
    trainings: dict[str, str]


@functools.cache
def shipped() -> Shipped:
    """Return the bound names and defaults, read once."""
    data: Shipped = json.loads(FILE.read_text())
    return data


def kind_of(task: str, recipe: Mapping[str, Any]) -> str:
    """Return the kind whose defaults a recipe has: its own `kind`; its backbone for a detection
    config."""
    if TASKS[task].detects or TASKS[task].explains:
        return str(recipe.get("MODEL.BACKBONE.NAME"))
    return str(recipe.get("kind", task))


def measures(task: str) -> str:
    """Return the kind of probe, or the detection task: a name is bound to one fingerprint for
    each."""
    return TASKS[task].kind or task


def leaves(recipe: object, prefix: str = "") -> Leaves:
    """Nested groups as one level of dotted keys; a list is one value, an empty group too."""
    if not isinstance(recipe, Mapping) or not recipe:
        return {prefix: _comparable(recipe)}
    out: Leaves = {}
    for key, value in recipe.items():
        out |= leaves(value, f"{prefix}.{key}" if prefix else str(key))
    return out


def _comparable(value: Any) -> Any:
    """Return a value in the form in which it is compared: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    return value


def decisive(
    recipe: Mapping[str, Any], kind: str, defaults: Mapping[str, Leaves]
) -> Leaves:
    """Return the leaves of a resolved recipe that decide its numbers and differ from their
    defaults."""
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
    """Return the default's key for all groups of one mapping: parts.*.list for parts.10.list."""
    parts = key.split(".")
    for group in range(1, len(parts) - 1):
        pattern = ".".join((*parts[:group], "*", *parts[group + 1 :]))
        if pattern in defaults:
            return pattern
    return None


def fingerprint_of(
    recipe: Mapping[str, Any], kind: str, defaults: Mapping[str, Leaves]
) -> str:
    """Return 12 hex digits that are equal exactly when everything decisive is."""
    return digest(decisive(recipe, kind, defaults))


def digest(value: object) -> str:
    """Return 12 hex digits of any JSON-able value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def of_recipe(
    task: str, name: str, recipe: Mapping[str, Any] | None, chosen_on: object
) -> str | None:
    """Return the fingerprint to show behind a protocol's name: None if `recipe` is the shipped one
    of that name, UNKNOWN if the row has none. `chosen_on` is the split that chose
    hyper-parameters."""
    own_name = _NAMED_BY_FINGERPRINT.fullmatch(name)
    if not recipe:
        return None if own_name else UNKNOWN
    if own_name and config.fingerprint(recipe) == own_name[1]:
        return None
    bound = shipped()
    kind = kind_of(task, recipe)
    # A choice made on another split than the recipe says is another way to measure.
    if chosen_on not in (None, recipe.get("select", "val")):
        return digest([decisive(recipe, kind, bound["defaults"]), str(chosen_on)])
    fingerprint = fingerprint_of(recipe, kind, bound["defaults"])
    names = bound["fingerprints"].get(name, {})
    # What is computed from what a protocol kept has that protocol's name and recipe.
    row = TASKS[task]
    is_derived = row.from_scores or row.from_predictions
    measured = kind if is_derived else measures(row.explains or task)
    if names.get(measured) == fingerprint:
        return None
    # A protocol that names no dataset measures on any; the row itself names the dataset.
    without_dataset = {**recipe, "dataset": None}
    if names.get(measured) == fingerprint_of(without_dataset, kind, bound["defaults"]):
        return None
    return fingerprint
