"""Which rows may stand in one column: protocol, data and split as the column's name says them.

linear-lorac-v1            the shipped protocol of that name
linear-lorac-v1~1a2b       another recipe under that name, or one that is not shipped
linear-lorac-v1~unknown    the row does not hold its recipe
cifar10                    the test split, of the lists that most checkpoints were measured on
cifar10:val                another split; it is always named
cifar10:test~n500+50       not as many images (labelled, test) as the dataset has
cifar10:test~9f3c          other lists than the column without it
"""

from __future__ import annotations

import marshal
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from backbench.results import data_manifests, protocol_fingerprints
from backbench.results.data_manifests import Lists
from backbench.results.store import Result

USUAL_SPLIT = "test"


class Place(NamedTuple):
    """What of a column's name its rows' recipes and lists decide."""

    protocol: str
    split: str | None  # None: the test split, nothing to be said of it

    @property
    def plain(self) -> bool:
        """Whether this is a shipped protocol on whole data, as far as the rows tell."""
        return "~" not in self.protocol and "~" not in (self.split or "")


class _Manner(NamedTuple):
    """What must be equal before lists are compared."""

    task: str
    dataset: str
    protocol: str
    print: str | None
    engine: str | None
    split: str
    size: str


class _Kind(NamedTuple):
    """All that decides a place and that a row says of itself; its seed is not part of it."""

    manner: _Manner
    lists: Lists | None


# What of a row's provenance is looked at, before anything is known of it
_LISTS = ("manifests", "manifest", "images", "val", "train", "labelled")
_LOOKED_AT: tuple[str, ...] = ("recipe", *_LISTS, *data_manifests.MANNER)


def of_rows(rows: Sequence[Result]) -> list[Place]:
    """The place of each row among these: unlike ones never have the same."""
    # 1. Most rows hold what others do: each kind is worked out once.
    numbers: dict[bytes, int] = {}  # what decides, as bytes -> number of its kind
    kinds: list[_Kind] = []
    checkpoints: dict[tuple[int, int], set[str]] = defaultdict(set)  # of (kind, seed)
    which: list[tuple[int, int]] = []
    for r in rows:
        content = _content(r)
        number = numbers.setdefault(content, len(kinds))
        if number == len(kinds):
            kinds.append(_kind_of(r))
        which.append((number, r.seed))
        checkpoints[number, r.seed].add(r.checkpoint)
    # 2. What tells the lists of one manner apart; those of most checkpoints need no mark.
    marks = _marks_of_lists(kinds, checkpoints)
    # 3. Names; digits enough to tell all marks of these rows apart.
    shorten = _shortest({kind.manner.print for kind in kinds} | set(marks.values()))
    places = {where: _place(kinds[where[0]], mark, shorten) for where, mark in marks.items()}
    return [places[where] for where in which]


def _content(r: Result) -> bytes:
    """What decides, as bytes that are equal only where it is."""
    p = r.provenance
    chosen = r.chosen or {}
    what: tuple[Any, ...] = (r.task, r.dataset, r.protocol, r.engine, r.split, chosen.get("on"))
    what += tuple(map(p.get, _LOOKED_AT))
    if not p.get("recipe"):
        what += (p, chosen)
    try:
        return marshal.dumps(what, 2)  # later versions depend on who else holds an object
    except ValueError:  # an object that no JSON can hold
        return repr(what).encode()


def _kind_of(r: Result) -> _Kind:
    chosen_on = r.chosen.get("on") if r.chosen else None
    print_ = protocol_fingerprints.of_recipe(
        r.task, r.protocol, r.provenance.get("recipe"), chosen_on
    )
    found = data_manifests.of_row(r, print_)
    size = found.size if found else ""
    return _Kind(_Manner(r.task, r.dataset, r.protocol, print_, r.engine, r.split, size), found)


def _place(kind: _Kind, mark: str | None, shorten: dict[str, str]) -> Place:
    manner = kind.manner
    protocol, said = manner.protocol, [manner.size]
    if manner.print is not None:
        protocol += f"~{shorten[manner.print]}"
    # A row without recipe and without lists says it once.
    if kind.lists is None and manner.print != protocol_fingerprints.UNKNOWN:
        said.append(protocol_fingerprints.UNKNOWN)
    if mark is not None:
        said.append(shorten[mark])
    split = "~".join(filter(None, (manner.split, *said)))
    return Place(protocol, None if split == USUAL_SPLIT else split)


def _marks_of_lists(
    kinds: Sequence[_Kind], checkpoints: Mapping[tuple[int, int], set[str]]
) -> dict[tuple[int, int], str | None]:
    """(kind, seed) -> None for the lists that go unmarked, else their digest."""
    by_manner: dict[_Manner, list[tuple[int, int]]] = defaultdict(list)
    marks: dict[tuple[int, int], str | None] = {}
    for number, seed in checkpoints:
        by_manner[kinds[number].manner].append((number, seed))
    for wheres in by_manner.values():
        held = {(n, seed): found for n, seed in wheres if (found := kinds[n].lists) is not None}
        alike = data_manifests.kinds((found, seed) for (_, seed), found in held.items())
        measured: dict[str, set[str]] = defaultdict(set)
        for where, found in held.items():
            measured[alike[found, where[1]]] |= checkpoints[where]
        most = min(measured, key=lambda kind: (-len(measured[kind]), kind), default=None)
        for where in wheres:
            kind = alike[held[where], where[1]] if where in held else None
            marks[where] = None if kind == most else kind
    return marks


def _shortest(prints_: Iterable[str | None]) -> dict[str, str]:
    """Each print by its first digits, as many as tell all of them apart."""
    full = {p for p in prints_ if p is not None}
    digits = protocol_fingerprints.DIGITS
    while (
        max(Counter(p[:digits] for p in full - {protocol_fingerprints.UNKNOWN}).values(), default=1)
        > 1
    ):
        digits += 1
    return {p: p if p == protocol_fingerprints.UNKNOWN else p[:digits] for p in full}
