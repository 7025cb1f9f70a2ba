"""Which rows may stand in one column: the protocol, data and split that the column's name states.

linear-lorac-v1            the shipped protocol of that name
linear-lorac-v1~1a2b       another recipe under that name, or one that is not shipped
linear-lorac-v1~unknown    the row does not hold its recipe
cifar10                    the test split, with the lists that most checkpoints were measured on
cifar10:val                another split; it is always named
cifar10:test~n500+50       another number of images (labelled, test) than the dataset has
cifar10:test~9f3c          other lists than the column without this mark
cifar10:test~images-1a2b   other images under the names of those lists than most checkpoints saw
"""

import marshal
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from backbench.images import contents
from backbench.records import data_manifests, protocol_fingerprints
from backbench.records.data_manifests import Lists
from backbench.records.result_line import Result

USUAL_SPLIT = "test"


class ColumnKey(NamedTuple):
    """The parts of a column's name that depend on its rows' recipes and lists."""

    protocol: str
    split: str | None  # None: the test split, without marks

    @property
    def unmarked(self) -> bool:
        """True for a shipped protocol on whole data, as far as the rows tell."""
        return "~" not in self.protocol and "~" not in (self.split or "")


class _Protocol(NamedTuple):
    """The part of a row that must be equal before lists are compared."""

    task: str
    dataset: str
    protocol: str
    fingerprint: str | None
    engine: str | None
    split: str
    size: str


class _Kind(NamedTuple):
    """Everything in a row that decides its column, but for its seed."""

    protocol: _Protocol
    lists: Lists | None


# The keys of provenance that decide a column; without a recipe all keys do.
_DECISIVE = ("recipe", contents.KEY, *data_manifests.LISTS, *data_manifests.MANNER)


def of_rows(rows: Sequence[Result]) -> list[ColumnKey]:
    """Return the column key of each row among these; rows measured differently never share one."""
    orders = data_manifests.one_order(rows)
    # 1. Most rows are of few kinds, so each kind is worked out once.
    numbers: dict[bytes, int] = {}  # decisive content -> number of its kind
    kinds: list[_Kind] = []
    checkpoints: dict[tuple[int, int], set[str]] = defaultdict(set)  # by (kind, seed)
    kind_and_seed: list[tuple[int, int]] = []
    for r in rows:
        content = _decisive_content(r)
        number = numbers.setdefault(content, len(kinds))
        if number == len(kinds):
            kinds.append(_kind_of(r, orders))
        kind_and_seed.append((number, r.seed))
        checkpoints[number, r.seed].add(r.checkpoint)
    # 2. A mark for each list of images; the lists of most checkpoints need none.
    list_marks = _marks_of_lists(kinds, checkpoints)
    # 3. Another mark for what the images of one list hold.
    content_marks = _marks_of_contents(kinds, checkpoints, list_marks)
    # 4. Names, with as many digits as tell all marks of these rows apart.
    prints = {kind.protocol.fingerprint for kind in kinds}
    digits = _digits_needed(
        prints | set(list_marks.values()) | set(content_marks.values())
    )
    keys = {}
    for where, mark in list_marks.items():
        kind = kinds[where[0]]
        keys[where] = _column_key(kind, mark, content_marks[where], digits)
    return [keys[where] for where in kind_and_seed]


def _decisive_content(r: Result) -> bytes:
    """Return bytes that are equal only where everything decisive is."""
    provenance = r.provenance
    chosen = r.chosen or {}
    decisive = [r.task, r.dataset, r.protocol, r.engine, r.split, chosen.get("on")]
    decisive += [provenance.get(key) for key in _DECISIVE]
    if not provenance.get("recipe"):
        decisive += [dict(provenance), dict(chosen)]
    try:
        # The bytes of later versions than 2 depend on who else holds an object.
        return marshal.dumps(decisive, 2)
    except ValueError:  # an object that no JSON can hold, from Python
        return repr(decisive).encode()


def _kind_of(r: Result, orders: data_manifests.OneOrder) -> _Kind:
    fingerprint = protocol_fingerprints.of_recipe(
        r.task, r.protocol, r.facts.get("recipe"), (r.chosen or {}).get("on")
    )
    lists = data_manifests.of_row(
        r,
        has_recipe=fingerprint != protocol_fingerprints.UNKNOWN,
        orders=orders,
    )
    size = lists.size if lists else ""
    protocol = _Protocol(
        r.task, r.dataset, r.protocol, fingerprint, r.engine, r.split, size
    )
    return _Kind(protocol, lists)


def _column_key(
    kind: _Kind, list_mark: str | None, content_mark: str | None, digits: int
) -> ColumnKey:
    protocol = kind.protocol.protocol
    fingerprint = kind.protocol.fingerprint
    if fingerprint is not None:
        protocol += f"~{_short(fingerprint, digits)}"
    parts = [kind.protocol.split]
    if kind.protocol.size:
        parts.append(kind.protocol.size)
    # A row without recipe and without lists says `unknown` once.
    if kind.lists is None and fingerprint != protocol_fingerprints.UNKNOWN:
        parts.append(protocol_fingerprints.UNKNOWN)
    if list_mark is not None:
        parts.append(_short(list_mark, digits))
    if content_mark is not None:
        parts.append(f"images-{_short(content_mark, digits)}")
    split = "~".join(part for part in parts if part)
    return ColumnKey(protocol, None if split == USUAL_SPLIT else split)


def _marks_of_lists(
    kinds: Sequence[_Kind], checkpoints: Mapping[tuple[int, int], set[str]]
) -> dict[tuple[int, int], str | None]:
    """Return (kind, seed) -> the digest of its lists; None for the lists that go unmarked."""
    by_protocol: dict[_Protocol, list[tuple[int, int]]] = defaultdict(list)
    for number, seed in checkpoints:
        by_protocol[kinds[number].protocol].append((number, seed))
    marks: dict[tuple[int, int], str | None] = {}
    for members in by_protocol.values():
        lists: dict[tuple[int, int], Lists] = {}
        for number, seed in members:
            own = kinds[number].lists
            if own is not None:
                lists[number, seed] = own
        digests = data_manifests.digests(
            (own, seed) for (_, seed), own in lists.items()
        )
        measured: dict[str, set[str]] = defaultdict(set)  # digest -> checkpoints
        for (number, seed), own in lists.items():
            measured[digests[own, seed]] |= checkpoints[number, seed]
        usual = _of_most(measured)
        for number, seed in members:
            digest = None
            if (number, seed) in lists:
                digest = digests[lists[number, seed], seed]
            marks[number, seed] = None if digest == usual else digest
    return marks


def _marks_of_contents(
    kinds: Sequence[_Kind],
    checkpoints: Mapping[tuple[int, int], set[str]],
    marks: Mapping[tuple[int, int], str | None],
) -> dict[tuple[int, int], str | None]:
    """Return (kind, seed) -> the digest of what its images hold; None for what most checkpoints of one
    list saw, and where no row of the list says it."""
    measured: dict[tuple[object, ...], dict[str, set[str]]] = defaultdict(dict)
    for (number, seed), of_kind in checkpoints.items():
        lists = kinds[number].lists
        if lists is not None and lists.contents:
            same_list = (kinds[number].protocol, marks[number, seed])
            measured[same_list].setdefault(lists.contents, set()).update(of_kind)
    out: dict[tuple[int, int], str | None] = {}
    for number, seed in checkpoints:
        protocol, lists = kinds[number]
        of_list = measured.get((protocol, marks[number, seed]))
        out[number, seed] = None
        if lists is not None and of_list and lists.contents != _of_most(of_list):
            out[number, seed] = lists.contents or protocol_fingerprints.UNKNOWN
    return out


def _of_most(measured: Mapping[str, set[str]]) -> str | None:
    """Return the digest that most checkpoints have."""
    return min(
        measured, key=lambda digest: (-len(measured[digest]), digest), default=None
    )


def _digits_needed(marks: Iterable[str | None]) -> int:
    """Return how many first digits tell all of these marks apart."""
    full = {mark for mark in marks if mark not in (None, protocol_fingerprints.UNKNOWN)}
    digits = protocol_fingerprints.DIGITS
    while max(Counter(str(mark)[:digits] for mark in full).values(), default=1) > 1:
        digits += 1
    return digits


def _short(mark: str, digits: int) -> str:
    return mark if mark == protocol_fingerprints.UNKNOWN else mark[:digits]
