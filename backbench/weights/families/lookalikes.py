"""Names the networks whose tensors an unrecognised file holds, and how they differ.

Several networks may have the same tensors: their eps, padding, heads or pixels leave no trace in a
file. Which of them it is, only its user can say, or pictures of known classes (`picture_check`).
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from backbench.errors import BadInput
from backbench.untrusted.printable import shown
from backbench.weights.families import architectures
from backbench.weights.families.architectures import IndexRow
from backbench.weights.families.timm_model_names import PREFIX
from backbench.weights.family import Shape, Tables
from backbench.weights.tensor_names import is_counter

BY_ORDER = "by-order"
# Last parts of names that mean the same wherever they stand
_KINDS = ("weight", "bias", "running_mean", "running_var")
FEWEST = 10  # tensors; the shapes of fewer tell nothing
MOST_TENSORS = 20_000  # in a table; a file may be made to delay its reader
MOST_PREFIXES = 16  # that are tried in a table
_LONGEST = 300  # characters of a name
_SHOWN = (
    8  # networks, and names of one network, that a message names: as yet all of them
)
# The modules that libraries call their classifiers
_CLASSIFIER = re.compile(
    r"(^|\.)(head|heads|head_dist|fc|_fc|classifier|last_linear|linear|logits|output)"
    r"(\.fc|\.head|\.\d+)?\.(weight|bias)$"
)
# What is told of two networks that differ, the most telling attribute first
_TELLING = (
    "eps",
    "padding",
    "class",
    "num_heads",
    "stride",
    "kernel_size",
    "approximate",
)


class Lookalikes(NamedTuple):
    """The networks whose tensors stand in a file, and where they stand."""

    table: str
    prefix: str
    keys: tuple[str, ...]  # of the trunk, in the file's order
    beside: tuple[str, ...]  # of a classifier
    by_names: bool  # the names are the networks' own, not the shapes alone
    rows: tuple[IndexRow, ...]

    @property
    def names(self) -> list[str]:
        """The names of timm's networks among them."""
        return [row.name for row in self.rows if row.library == "timm"]


def find(tables: Tables, model: str = "") -> Lookalikes | None:
    """Find the networks whose tensors a file holds, with or without a classifier; None for none.

    Where several places of the file hold one, the one with the most tensors counts; timm's networks
    count before torchvision's, and names before shapes alone. With `model`, only timm's network of
    that name counts.
    """
    best = None
    best_score = (-1, False, 0)
    for table, tensors in tables.items():
        if len(tensors) > MOST_TENSORS:
            continue
        shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        for prefix in _prefixes(tensors):
            for keys, beside in _bodies(tensors, prefix):
                local = {key[len(prefix) :]: shapes[key] for key in keys}
                for by_names in (True, False):
                    rows = _rows(local, by_names=by_names)
                    if model:
                        rows = tuple(row for row in rows if row[:2] == ("timm", model))
                    if not rows:
                        continue
                    in_timm = sum(row.library == "timm" for row in rows)
                    score = (min(in_timm, 1), by_names, len(keys))
                    if score > best_score:
                        best_score = score
                        best = Lookalikes(table, prefix, keys, beside, by_names, rows)
    return best


def shapes_of(model: str, classes: int) -> dict[str, Shape]:
    """Return the names and shapes of a network with so many classes, in timm's order; those of its
    classifier are the last, and counters are left out."""
    import timm

    from backbench.weights.undrawn import without_memory

    with without_memory():
        trunk = timm.create_model(model, pretrained=False, num_classes=0)
        whole = trunk
        if classes:
            whole = timm.create_model(model, pretrained=False, num_classes=classes)
    in_trunk = trunk.state_dict()
    state = whole.state_dict()
    of_trunk = [key for key in in_trunk if key in state]
    of_classifier = [key for key in state if key not in in_trunk]
    found = {}
    for key in (*of_trunk, *of_classifier):
        if not is_counter(key):
            found[key] = tuple(state[key].shape)
    return found


def _prefixes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the prefixes, of up to four parts, below which a network may stand."""
    counts = Counter({"": len(tensors)})
    for key in tensors:
        if len(key) > _LONGEST:
            continue
        parts = key.split(".")
        for i in range(1, min(len(parts), 5)):
            counts[".".join(parts[:i]) + "."] += 1
    common = counts.most_common(MOST_PREFIXES)
    return [prefix for prefix, count in common if count >= FEWEST]


def _bodies(
    tensors: Mapping[str, Tensor], prefix: str
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield (the trunk's keys, the classifier's keys) for each way to take a classifier off."""
    keys = []
    for key in tensors:
        if key.startswith(prefix) and not is_counter(key):
            keys.append(key)
    named = [key for key in keys if _CLASSIFIER.search(key[len(prefix) :])]
    # The last one named so, as in VGG's three layers
    last_module = named[-1].rpartition(".")[0] if named else None
    last_named = [key for key in named if key.rpartition(".")[0] == last_module]
    for classifier in ([], named, last_named, keys[-2:], keys[-1:], keys[-4:]):
        of_classifier = set(classifier)
        left = tuple(key for key in keys if key not in of_classifier)
        if len(left) < FEWEST:
            continue
        # A number alone, as a loss's temperature, stands beside a trunk and names no class
        names_classes = all(tensors[key].dim() > 0 for key in classifier)
        yield left, tuple(classifier) if names_classes else ()


def _rows(shapes: Mapping[str, Shape], *, by_names: bool) -> tuple[IndexRow, ...]:
    """Return the networks with these names and shapes, or with these shapes in any order."""
    of_names, of_shapes = _by_digest()
    # Most parts of a file have as many tensors as no network has.
    if len(shapes) not in _counts():
        return ()
    if by_names:
        return tuple(of_names.get(architectures.digest_of_names(shapes), ()))
    return tuple(of_shapes.get(architectures.digest_of_shapes(shapes.values()), ()))


@functools.cache
def _by_digest() -> tuple[dict[str, list[IndexRow]], dict[str, list[IndexRow]]]:
    """Return the index by the digests of names, and by those of shapes."""
    of_names: dict[str, list[IndexRow]] = {}
    of_shapes: dict[str, list[IndexRow]] = {}
    for row in architectures.rows():
        of_names.setdefault(row.names, []).append(row)
        of_shapes.setdefault(row.shapes, []).append(row)
    return of_names, of_shapes


@functools.cache
def _counts() -> frozenset[int]:
    """Return the numbers of tensors that the index's networks have."""
    return frozenset(row.tensors for row in architectures.rows())


def in_order(
    found: Lookalikes, tensors: Mapping[str, Tensor], model: str
) -> dict[str, str]:
    """Return the file's key -> the network's name, for the trunk and its classifier. BadInput names
    the first two that do not belong together."""
    # 1. The network with a classifier of so many classes. One that is not the network's own keeps
    # its names
    keys = [*found.keys, *found.beside]
    classes = tensors[found.beside[0]].shape[0] if found.beside else 0
    wanted = shapes_of(model, classes)
    if len(wanted) != len(keys):
        keys = list(found.keys)
        wanted = shapes_of(model, 0)
    # 2. One by one
    out = {}
    for key, (name, shape) in zip(keys, wanted.items(), strict=True):
        there = tuple(tensors[key].shape)
        if there != shape:
            raise BadInput(
                f"--rename {BY_ORDER}: {shown(key)} {there} stands where {model} has {name} {shape}:"
                " the order is another one; write the rules of its names into a file (--rename FILE)"
            )
        kind = name.rpartition(".")[2]
        own = key.rpartition(".")[2]
        if kind in _KINDS and own in _KINDS and kind != own:
            raise BadInput(
                f"--rename {BY_ORDER}: {shown(key)} stands where {model} has {name}: the order is"
                " another one; write the rules of its names into a file (--rename FILE)"
            )
        out[key] = name
    # 3. A counter belongs to the statistics beside it
    for key in tensors:
        if is_counter(key):
            module = key.rpartition(".")[0]
            name = out.get(f"{module}.running_mean", "")
            if name:
                out[key] = f"{name.rpartition('.')[0]}.num_batches_tracked"
    return out


# --- how they differ ---


class Group(NamedTuple):
    """Names of timm that mean one network with one mean and std."""

    names: tuple[str, ...]
    network: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int


def groups(names: Sequence[str]) -> list[Group]:
    """Put names together that mean the same network and pixels, those with the most names first."""
    import timm

    together: dict[tuple[Any, ...], list[str]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for name in names:
        row = architectures.row_of("timm", name)
        about = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
        if row is None or about is None:
            continue
        key = row.network, tuple(about.mean), tuple(about.std)
        together.setdefault(key, []).append(name)
        sizes.setdefault(key, about.input_size[-1])
    out = []
    for key, alike in together.items():
        # The shortest name is the plainest one.
        alike.sort(key=lambda name: (len(name), name))
        out.append(Group(tuple(alike), *key, sizes[key]))
    return sorted(out, key=lambda group: -len(group.names))


def differences(told: Sequence[Group]) -> list[str]:
    """Say of each group what the others have not: 'eps 0.001, padding same, mean 0.5/0.5/0.5'."""
    # 1. The settings of each network, built without memory
    built: dict[str, Mapping[str, Any]] = {}
    for group in told:
        if group.network not in built:
            built[group.network] = _settings(group.names[0])
    # 2. Of each attribute that differs anywhere, its most frequent value among the differing modules.
    # Attributes that tell less count where no other tells the networks apart
    first, *others = built.values()
    differing = set()
    for other in others:
        for path in first.keys() | other.keys():
            if first.get(path) != other.get(path):
                differing.add(path)
    values = _values(built, sorted(differing), _TELLING)
    pixels_differ = len({(group.mean, group.std) for group in told}) > 1
    sizes_differ = len({group.size for group in told}) > 1
    if not values and not pixels_differ and not sizes_differ:
        names = sorted({path.rpartition(".")[2] for path in differing})
        values = _values(built, sorted(differing), names)
    # 3. The words
    out = []
    for group in told:
        words = []
        for attribute, of_networks in list(values.items())[:4]:
            if group.network in of_networks:
                words.append(f"{attribute} {of_networks[group.network]}")
        if pixels_differ:
            words.append(f"mean {_joined(group.mean)}, std {_joined(group.std)}")
        if sizes_differ:
            words.append(f"{group.size} pixels")
        out.append(", ".join(words))
    return out


def _values(
    built: Mapping[str, Mapping[str, Any]],
    differing: Sequence[str],
    attributes: Sequence[str],
) -> dict[str, dict[str, str]]:
    """Return attribute -> network -> its most frequent value among the differing modules, for the
    attributes that tell at least two networks apart."""
    out = {}
    for attribute in attributes:
        paths = [path for path in differing if path.rpartition(".")[2] == attribute]
        of_networks = {}
        for network, settings in built.items():
            counted = Counter(str(settings[path]) for path in paths if path in settings)
            if counted:
                of_networks[network] = counted.most_common(1)[0][0]
        if len(set(of_networks.values())) > 1:
            out[attribute] = of_networks
    return out


@functools.lru_cache(maxsize=16)
def _settings(name: str) -> Mapping[str, Any]:
    import timm

    from backbench.weights.undrawn import without_memory

    with without_memory():
        model = timm.create_model(name, pretrained=False, num_classes=0)
    return dict(architectures.settings(model))


def _joined(values: Sequence[float]) -> str:
    return "/".join(f"{value:g}" for value in values)


# --- words ---


def advice(found: Lookalikes, tensors: Mapping[str, Tensor]) -> str:
    """Say which networks have the file's tensors (those of its table), how they differ, and what to
    type."""
    named = groups(found.names)
    count = f"its {len(found.keys)} tensors are those of"
    if not named:
        alike = ", ".join(row.name for row in found.rows[:_SHOWN])
        return (
            f"{count} torchvision's {alike}, which timm does not build in this way; docs/add.md says how"
            " to measure a module of your own"
        )
    how = ""
    if not found.by_names:
        rules = (
            BY_ORDER if _fits_in_order(found, tensors, named[0].names[0]) else "RULES"
        )
        how = f" --rename {rules}"
    by = "" if found.by_names else ", by shapes and not by names"
    command = f"`backbench import FILE --arch timm:NAME{how} --out X.safetensors`"
    # 1. One network, whatever its names
    first = named[0]
    if len(named) == 1:
        return (
            f"{count} timm's {_names(first)}{by}; import it with"
            f" {command.replace('NAME', first.names[0])}"
        )
    # 2. Several, which differ
    first_few = named[:_SHOWN]
    described = []
    for group, words in zip(first_few, differences(first_few)):
        described.append(f"{_names(group)} ({words})" if words else _names(group))
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    check = ""
    if found.beside:
        check = "; its classifier can tell: --check FOLDER scores pictures of known classes under each"
    return (
        f"{count} several of timm's networks{by}: {'; '.join(described)}{more}; choose one with"
        f" {command}{check}"
    )


def _fits_in_order(
    found: Lookalikes, tensors: Mapping[str, Tensor], model: str
) -> bool:
    try:
        in_order(found, tensors, model)
    except BadInput:
        return False
    return True


def _names(group: Group) -> str:
    first = group.names[0]
    others = len(group.names) - 1
    return first if not others else f"{first} (the same: {_listed(group.names[1:])})"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def twins(arch_name: str, *, pixels_told: bool) -> str:
    """Say which other networks of timm have the tensors of this one; empty where all are alike.

    Where the user has told the pixels, those that differ in pixels alone are left out.
    """
    row = architectures.row_of("timm", arch_name)
    if row is None:
        return ""
    alike = [
        other.name
        for other in architectures.rows()
        if other.library == "timm" and other.names == row.names
    ]
    own = next((g for g in groups(alike) if arch_name in g.names), None)
    if own is None:
        return ""
    others = []
    for group in groups(alike):
        if group.network != own.network or (
            not pixels_told and (group.mean, group.std) != (own.mean, own.std)
        ):
            others.append(group)
    if not others:
        return ""
    told = [own, *others[:_SHOWN]]
    words = differences(told)
    described = []
    for group, said in zip(told, words):
        name = arch_name if group is own else group.names[0]
        described.append(f"{name} ({said})" if said else name)
    first, *rest = described
    return f"has the tensors of {PREFIX}{first}, but also of {', '.join(rest)}"
