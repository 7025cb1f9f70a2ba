"""Gives the tensors of a file the names of a timm network: by their order and shapes, or by rules.

Names tell which tensor is which. Without them the order in which a network registers its tensors
does, if it is the same: all shapes must then agree one by one, and weights must stand where weights
stand, biases where biases do.
"""

import re
from pathlib import Path

from backbench.errors import BadInput
from backbench.untrusted.printable import shown
from backbench.weights.families import lookalikes
from backbench.weights.families.lookalikes import BY_ORDER
from backbench.weights.family import Tables
from backbench.weights.tensor_names import first_names


def renamed(tables: Tables, model: str, rules: str) -> tuple[Tables, dict[str, str]]:
    """Return the tables with other names, and the map of all names that have changed.

    `rules` is `by-order`, or a file with a rule a line: a regular expression of the file's names, an
    arrow and what takes its place. BadInput for what is not one to one.
    """
    if rules != BY_ORDER:
        return _by_rules(tables, Path(rules))
    found = lookalikes.find(tables, model)
    if found is None:
        raise BadInput(
            f"--rename {BY_ORDER}: no place in it has just the shapes of timm's {model}; `backbench"
            " inspect` names the networks that it may be"
        )
    tensors = tables[found.table]
    names = lookalikes.in_order(found, tensors, model)
    table = {names.get(key, key): tensor for key, tensor in tensors.items()}
    if len(table) < len(tensors):
        raise BadInput(
            f"--rename {BY_ORDER}: it has {model}'s names for other tensors as well; write the rules of"
            " its names into a file (--rename FILE)"
        )
    return {found.table: table}, names


def _by_rules(tables: Tables, file: Path) -> tuple[Tables, dict[str, str]]:
    # 1. The rules
    if not file.is_file():
        raise BadInput(
            f"--rename {file}: no such file of rules, a line each: REGEX -> NAME; or {BY_ORDER}"
        )
    rules = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, arrow, replacement = line.partition("->")
        try:
            if not arrow:
                raise ValueError("no arrow ->")
            rules.append((re.compile(pattern.strip()), replacement.strip()))
        except (re.error, ValueError) as error:
            raise BadInput(
                f"{file}:{number}: {error}; expected REGEX -> NAME"
            ) from None
    # 2. The first rule that a name fits counts, and no two names may become one
    out: Tables = {}
    names: dict[str, str] = {}
    for table, tensors in tables.items():
        out[table] = {}
        for key, tensor in tensors.items():
            name = key
            for regex, replacement in rules:
                try:
                    name, hits = regex.subn(replacement, key)
                except re.error as error:
                    raise BadInput(f"{file}: {replacement}: {error}") from None
                if hits:
                    names[key] = name
                    break
            if name in out[table]:
                raise BadInput(
                    f"{file}: {first_names([key])} and another tensor both become {shown(name)}"
                )
            out[table][name] = tensor
    return out, names
