"""python tools/bind_protocols.py: binds the name of each shipped protocol to its fingerprint, and of
each pretraining recipe to a digest of what is written there.

Run it after a change in configs/transfer, configs/detection or configs/pretrain, or after giving a
recipe a new key, and read which lines of the file changed: a base changes all recipes above it. A
protocol that measures something else needs another name first: rows that were measured before hold
the old fingerprint, and would stand apart under the old name.
"""

import dataclasses
import json
import sys
import typing
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backbench.recipes import config  # noqa: E402 - as a script, from any folder
from backbench.records import protocol_fingerprints  # noqa: E402
from backbench.records.protocol_fingerprints import Leaves, Shipped  # noqa: E402
from backbench.runs import atomic  # noqa: E402

SPACES = ("trunk", "projector")  # of `analyze`, each with a name of its own


class Recipe(NamedTuple):
    name: str  # of the protocol
    file: str
    task: str  # one of those that it measures
    recipe: dict[str, Any]  # resolved, as a row holds it


def bound() -> Shipped:
    """Compute the contents of shipped.json from the recipes and dataclasses as they are."""
    defaults: dict[str, Leaves] = {}
    recipes: list[Recipe] = []
    for read in (_probes, _detectors):
        of_kind, more = read()
        defaults |= of_kind
        recipes += more
    names: dict[str, dict[str, str]] = {}
    files: dict[tuple[str, str], str] = {}
    for r in recipes:
        kind = protocol_fingerprints.kind_of(r.task, r.recipe)
        measures = protocol_fingerprints.measures(r.task)
        other = files.setdefault((r.name, measures), r.file)
        if other != r.file:
            raise SystemExit(
                f"{other} and {r.file} are both called {r.name}; rename one"
            )
        fingerprint = protocol_fingerprints.fingerprint_of(r.recipe, kind, defaults)
        names.setdefault(r.name, {})[measures] = fingerprint
    trainings = {}
    for name in config.recipe_names("pretrain"):
        written = config.read_recipe(config.find_recipe(name, "pretrain"))
        trainings[name] = protocol_fingerprints.digest(written)
    return {
        "defaults": defaults,
        "fingerprints": names,
        "pretraining": _pretraining(),
        "trainings": trainings,
    }


def _pretraining() -> dict[str, Leaves]:
    """Return the defaults of a pretraining recipe; its crops and its method have some of their own,
    and so has a group of a method that is written in part (`simclr.head`)."""
    from backbench.images.crops import Crops
    from backbench.pretrain import method_config
    from backbench.pretrain.recipe import PretrainConfig

    methods = {
        n: method_config.method_module(n).Config for n in method_config.shipped_names()
    }
    classes: dict[str, Any] = {"recipe": PretrainConfig, "crops": Crops, **methods}
    for name, cls in methods.items():
        for field, hint in typing.get_type_hints(cls).items():
            if dataclasses.is_dataclass(hint):
                classes[f"{name}.{field}"] = hint
    return {name: _defaults(cls) for name, cls in classes.items()}


def _probes() -> tuple[dict[str, Leaves], list[Recipe]]:
    """Reads every recipe of configs/transfer by the dataclass of its kind."""
    from backbench.tasks import TASKS
    from backbench.transfer.analysis.protocol import AnalyzeConfig
    from backbench.transfer.probes.kind import shipped_kinds
    from backbench.transfer.probes.ood import RULES
    from backbench.transfer.protocols import class_of

    classes: dict[str, Any] = {"analyze": AnalyzeConfig}
    for kind in (*shipped_kinds(), "finetune"):
        classes[kind] = class_of(kind)
    tasks = {"analyze": "analyze"}  # kind -> a task
    for task in TASKS.values():
        if task.kind is not None:
            tasks[task.kind] = task.name
    recipes = []
    for name in sorted(config.recipe_names("transfer")):
        data = config.read_recipe(config.find_recipe(name, "transfer"))
        kind = str(data.get("kind", "analyze"))
        recipe = config.build(classes[kind], data, where=name)
        if kind == "ood":  # a name for each rule
            ruled = [dataclasses.replace(recipe, rule=rule) for rule in RULES]
            recipes += [
                Recipe(r.name, name, tasks[kind], config.to_dict(r)) for r in ruled
            ]
            continue
        named = (
            [recipe.name]
            if kind != "analyze"
            else [recipe.name(space) for space in SPACES]
        )
        recipes += [
            Recipe(each, name, tasks[kind], config.to_dict(recipe)) for each in named
        ]
    return {kind: _defaults(cls) for kind, cls in classes.items()}, recipes


def _defaults(cls: Any, prefix: str = "") -> Leaves:
    """Return the leaves of a recipe of this dataclass that sets nothing."""
    out: Leaves = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = prefix + field.name
        hint = hints[field.name]
        # dict[str, Part]: the fields of a Part have their defaults in each of its groups
        if typing.get_origin(hint) is dict and dataclasses.is_dataclass(
            typing.get_args(hint)[1]
        ):
            out |= _defaults(typing.get_args(hint)[1], f"{path}.*.")
        # a group that must be given: its fields have theirs all the same
        elif dataclasses.is_dataclass(hint) and field.default is dataclasses.MISSING:
            out |= _defaults(hint, f"{path}.")
        if field.default is not dataclasses.MISSING:
            group = dataclasses.is_dataclass(field.default)
            value = config.to_dict(field.default) if group else field.default
            out |= protocol_fingerprints.leaves(value, path)
        elif field.default_factory is not dataclasses.MISSING:
            out |= protocol_fingerprints.leaves(field.default_factory(), path)
    return out


def _detectors() -> tuple[dict[str, Leaves], list[Recipe]]:
    """Reads every config of configs/detection; a base file has the defaults of its backbone."""
    from backbench.detection import dialect as detection
    from backbench.detection import protocol, task_rows

    defaults: dict[str, Leaves] = {}
    recipes: list[Recipe] = []
    for path in sorted((config.configs_dir() / detection.KIND).glob("*.yaml")):
        given = detection.shipped(path)
        recipe = protocol.decisive(given)
        task = task_rows.task_of(given).name
        if path.name.startswith("_"):
            kind = protocol_fingerprints.kind_of(task, recipe)
            leaves = protocol_fingerprints.leaves(recipe)
            # Nothing but what all bases of one backbone agree on is every such config's default.
            known = defaults.get(kind, leaves).items()
            defaults[kind] = {k: v for k, v in known if k in leaves and leaves[k] == v}
        else:
            recipes.append(Recipe(protocol.protocol(given), path.stem, task, recipe))
    return defaults, recipes


def text_of(data: Shipped) -> str:
    """Return the file: a line for each default and each print, so that changes are read line by
    line."""
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    atomic.write_text(protocol_fingerprints.FILE, text_of(bound()))
    print(
        f"{protocol_fingerprints.FILE.relative_to(ROOT)}: {len(bound()['fingerprints'])} protocols bound"
    )
