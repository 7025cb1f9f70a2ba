"""YAML from elsewhere: bounded before it is built, and resolved from nothing but itself.

A few bytes of YAML can stand for gigabytes (aliases of aliases), for minutes (a number of a
million digits) or for the environment (OmegaConf's `${oc.env:NAME}`). Here a text is first looked
at as events, which costs what its length costs; then OmegaConf reads it; then `${a.b}` is replaced
by the value of key a.b of the same file, and nothing else is.
"""

from __future__ import annotations

import copy
import functools
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbench.untrusted import opening

LARGEST = opening.MEGABYTE // 2  # bytes of a file
DEEPEST = 40  # levels
MOST = 20_000  # values and characters / 100, with every alias and reference written out
REMEMBERED = 1 << 14  # characters of the longest text whose values are kept for the next time
MOST_BITS = 128  # of a whole number: one of 1024 is no float, and ends arithmetic
LONGEST_PLAIN = 4096  # characters of a scalar without quotes: reading a longer number takes minutes

REFERENCE = re.compile(r"\$\{\s*(\.*)([\w-]+(?:(?:\.[\w-]+)|(?:\[\d+\]))*)\s*\}")


def read(path: str | Path) -> Any:
    """A YAML file as plain values, or ValueError with one line; OSError where it cannot be read."""
    return decode(opening.read_bytes(path, most=LARGEST).decode())


def decode(text: str) -> Any:
    """As `read`, of a text."""
    if len(text) > REMEMBERED:
        return _decode(text)
    return copy.deepcopy(_remembered(text))


@functools.lru_cache(maxsize=1024)
def _remembered(text: str) -> Any:
    # A base stands below many recipes, and a grid names a recipe many times
    return _decode(text)


def _decode(text: str) -> Any:
    from omegaconf import OmegaConf

    check(text)
    try:
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        refuse_long_numbers(tree)
        return _References(tree).resolved()
    except RecursionError:  # a thousand references, each to the next
        raise ValueError("its references go too deep") from None


def check(text: str) -> None:
    """ValueError for a text that could cost more than its length, or asks for what is not its
    own."""
    import yaml

    # The C parser where PyYAML has it: ten times as fast, the same events
    parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    sizes: dict[str, int] = {}  # anchor -> values below it, aliases written out
    # One entry per open list or mapping: (its anchor, values so far); the first is the whole text
    open_: list[tuple[str | None, int]] = [(None, 0)]

    def add(count: int) -> None:
        anchor, so_far = open_[-1]
        open_[-1] = anchor, so_far + count
        if so_far + count > MOST:
            raise ValueError(f"stands for more than {MOST} values (aliases of aliases?)")

    for event in yaml.parse(text, Loader=parser):
        if isinstance(event, yaml.ScalarEvent):
            _check_scalar(event.value, plain=not event.style)
            size = 1 + len(event.value) // 100
            if event.anchor:
                sizes[event.anchor] = size
            add(size)
        elif isinstance(event, yaml.AliasEvent):
            add(sizes.get(str(event.anchor), MOST))  # an alias inside its own anchor has no end
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(open_) > DEEPEST:
                raise ValueError(f"nested more than {DEEPEST} levels deep")
            open_.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
            if anchor:
                sizes[anchor] = size
            add(size)


def _check_scalar(value: str, *, plain: bool) -> None:
    if plain and len(value) > LONGEST_PLAIN:
        raise ValueError(f"'{value[:20]}...' has {len(value)} characters; quote long texts")
    refuse_resolvers(value)


def refuse_resolvers(text: str) -> None:
    """ValueError for a `${...}` that is not a key: `${oc.env:HOME}` reads the environment."""
    if "${" not in text:
        return
    rest = REFERENCE.sub("", text)
    if "${" in rest:
        asked = rest[rest.index("${") :][:40]
        raise ValueError(f"'{asked}' is refused: only keys of the same file, as ${{a.b}}, resolve")


def refuse_long_numbers(value: Any) -> None:
    """ValueError for a whole number of more than MOST_BITS, also below keys and in lists."""
    if isinstance(value, Mapping):
        refuse_long_numbers([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            refuse_long_numbers(each)
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"a whole number of {value.bit_length()} bits")


class _References:
    """`${a.b}`, `${a[0]}` and, from where it stands, `${.b}`: the value of that key."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._under_way: set[tuple[str, ...]] = set()
        self._spent = 0  # values and characters / 100 that references brought in

    def resolved(self) -> Any:
        return self._value(self.tree, ())

    def _value(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._value(below, (*path, str(key))) for key, below in value.items()}
        if isinstance(value, list):
            return [self._value(below, (*path, str(n))) for n, below in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = REFERENCE.fullmatch(value)
        if whole:  # the value itself, whatever its type
            return self._named(whole, path)
        return REFERENCE.sub(lambda found: str(self._named(found, path)), value)

    def _named(self, found: re.Match[str], path: tuple[str, ...]) -> Any:
        """What one reference, in the value at `path`, stands for."""
        dots, name = found.groups()
        target = tuple(re.split(r"[.\[]", name.replace("]", "")))
        if dots:  # one dot: beside it; each more one level up
            target = (*path[: max(0, len(path) - len(dots))], *target)
        if target in self._under_way:
            raise ValueError(f"'{found[0]}' goes in a circle")
        self._under_way.add(target)
        value = self._value(self._at(target, found[0]), target)
        self._under_way.discard(target)
        self._spent += _size(value)
        if self._spent > MOST:
            raise ValueError(f"its references stand for more than {MOST} values")
        return value

    def _at(self, target: tuple[str, ...], said: str) -> Any:
        node = self.tree
        for place, part in enumerate(target):
            whole = REFERENCE.fullmatch(node) if isinstance(node, str) else None
            if whole:  # on the way lies another reference
                node = self._named(whole, target[:place])
            if isinstance(node, Mapping) and part in node:
                node = node[part]
                continue
            if isinstance(node, Mapping) and part.isdigit() and int(part) in node:
                node = node[int(part)]
                continue
            if isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
                continue
            raise ValueError(f"'{said}': this file has no such key")
        return node


def _size(value: Any) -> int:
    if isinstance(value, Mapping):
        return 1 + sum(map(_size, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_size, value))
    return 1 + len(value) // 100 if isinstance(value, str) else 1
