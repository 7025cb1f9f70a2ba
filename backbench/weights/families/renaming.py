"""Gives the tensors of a file the names of a timm network: by their order and shapes, or by rules.

Names tell which tensor is which. Without them the order in which a network registers its tensors
does, if it is the same: all shapes must then agree one by one, and weights must stand where weights
stand, biases where biases do.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from backbench.errors import BadInput
from backbench.untrusted import opening
from backbench.untrusted.printable import shown
from backbench.weights.families import lookalikes
from backbench.weights.families.lookalikes import BY_ORDER
from backbench.weights.family import Tables
from backbench.weights.tensor_names import first_names

_DEEPEST = 8  # parts of a name that may be a prefix


def renamed(
    tables: Tables, model: str, wanted: Sequence[str], rules: str
) -> tuple[Tables, dict[str, str]]:
    """Return the tables under the model's names, and the map from the file's names to these.
    `wanted` are the names of the model's tensors.

    `rules` is `by-order`, or a file with one rule a line: a regular expression for names in the file,
    an arrow and the replacement. BadInput is raised where two names of the file become one, and where
    a tensor of the model is left without one.
    """
    if rules != BY_ORDER:
        return _by_rules(tables, model, wanted, Path(rules))
    found = lookalikes.find(tables, model)
    if found is None:
        raise BadInput(
            f"--rename {BY_ORDER}: no place in it has just the shapes of timm's {model} as it is; `backbench"
            " inspect` names the networks that it may be, and --rename FILE takes rules for others"
        )
    tensors = tables[found.table]
    names = lookalikes.in_order(found, tensors, model)
    table = {names.get(key, key): tensor for key, tensor in tensors.items()}
    # Two tensors got the same name
    if len(table) < len(tensors):
        raise BadInput(
            f"--rename {BY_ORDER}: it has {model}'s names for other tensors as well; write the rules of"
            " its names into a file (--rename FILE)"
        )
    return {found.table: table}, names


class NameRule(NamedTuple):
    """A line of a file of rules."""

    line: int
    pattern: re.Pattern[str]
    replacement: str


def _by_rules(
    tables: Tables, model: str, wanted: Sequence[str], file: Path
) -> tuple[Tables, dict[str, str]]:
    rules = _read(file)
    # 1. The first rule that a name fits counts, and no two names may become one
    out: Tables = {}
    names: dict[str, str] = {}
    used = set()
    for table, tensors in tables.items():
        renamed_table = {}
        of_table = {}
        for key, tensor in tensors.items():
            name = key
            for rule in rules:
                try:
                    name, hits = rule.pattern.subn(rule.replacement, key)
                except re.error as error:
                    raise BadInput(f"{file}:{rule.line}: {error}") from None
                if hits:
                    used.add(rule)
                    break
            if name in renamed_table:
                raise BadInput(
                    f"{file}: {first_names([key])} and another tensor both become {shown(name)};"
                    " write a rule for each"
                )
            renamed_table[name] = tensor
            of_table[key] = name
        # A table in which no rule has found anything, such as an optimiser's, stays out of it
        if any(key != name for key, name in of_table.items()):
            out[table] = renamed_table
            names |= of_table
    # 2. Each rule is of use, and each of the model's tensors gets one
    for rule in rules:
        if rule not in used:
            some = first_names([key for tensors in tables.values() for key in tensors])
            raise BadInput(
                f"{file}:{rule.line}: '{shown(rule.pattern.pattern)}' fits none of the file's names"
                f" that the rules before it leave ({some}); write it anew, or leave it out"
            )
    missing = _missing(out, wanted)
    if missing:
        left = [key for key, name in names.items() if key == name]
        unchanged = f" (no rule fits {first_names(left)})" if left else ""
        raise BadInput(
            f"{file}: {len(missing)} of {model}'s tensors get none of the file's:"
            f" {first_names(missing)}{unchanged}; add rules for them"
        )
    return out, names


def _read(file: Path) -> list[NameRule]:
    """Read a file of rules."""
    if not file.is_file():
        raise BadInput(
            f"--rename {file}: no such file of rules, a line each: REGEX -> NAME; or {BY_ORDER}"
        )
    try:
        text = opening.read_bytes(file, most=opening.MEGABYTE).decode()
    except (OSError, UnicodeDecodeError):
        raise BadInput(
            f"--rename {file}: is no text; write rules, a line each: REGEX -> NAME"
        ) from None
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, arrow, replacement = line.partition("->")
        try:
            if not arrow:
                raise ValueError("no arrow ->")
            rule = NameRule(number, re.compile(pattern.strip()), replacement.strip())
        except (re.error, ValueError) as error:
            raise BadInput(
                f"{file}:{number}: {error}; expected REGEX -> NAME"
            ) from None
        rules.append(rule)
    return rules


def _missing(tables: Tables, wanted: Sequence[str]) -> list[str]:
    """Return the wanted names that are not there, below the prefix that has the most of them."""
    names = set(wanted)
    there: dict[tuple[str, str], set[str]] = {}
    for table, tensors in tables.items():
        for key in tensors:
            parts = key.split(".")
            for i in range(min(len(parts), _DEEPEST)):
                name = ".".join(parts[i:])
                if name in names:
                    prefix = key.removesuffix(name)
                    there.setdefault((table, prefix), set()).add(name)
    most = max(there.values(), key=len, default=set())
    return [name for name in wanted if name not in most]
