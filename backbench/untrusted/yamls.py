"""Reads YAML from elsewhere as plain values, bounded before it is built. A few bytes can stand for
gigabytes (aliases of aliases) or minutes (a number of a million digits), so a text is first read as
events, which costs what its length costs. Then mappings, lists, text, numbers, true, false and null
are built; no other tag is known."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.untrusted import opening

if TYPE_CHECKING:
    import yaml

LARGEST = opening.MEGABYTE // 2  # bytes of a file
REMEMBERED = (
    1 << 14
)  # characters of the longest text whose values are kept for the next time
DEEPEST = 40  # levels
MOST = 20_000  # values and characters / 100, with every alias written out
MOST_BITS = 128  # of a whole number: one of 1024 is no float, and ends arithmetic
LONGEST_PLAIN = (
    4096  # characters of a scalar without quotes: reading a longer number takes minutes
)

# 1e-4 is a number here, and text in YAML 1.1, which wants a dot and a sign
_SCIENTIFIC = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
_PLAIN_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")


def read(path: str | Path) -> Any:
    """Read a YAML file as plain values. ValueError with one line; OSError where it cannot be read."""
    return decode(opening.read_bytes(path, most=LARGEST).decode())


def decode(text: str) -> Any:
    """Read one YAML document as plain values; ValueError for anything else."""
    if len(text) > REMEMBERED:
        return _decode.__wrapped__(text)
    return copy.deepcopy(_decode(text))


# A base and a family stand below many recipes, and a grid names many of them
@functools.lru_cache(maxsize=256)
def _decode(text: str) -> Any:
    import yaml

    try:
        _refuse_costly(text)
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ValueError(said.replace('in "<unicode string>", ', "at ")) from None


def encode(value: object) -> str:
    """Write plain values as YAML that `decode` reads back as themselves."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes text that `decode` would take for a number."""

    _add_scientific(Dumper)
    # Text for us, and a number for other readers
    Dumper.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile("(inf|nan)$"), ["i", "n"]
    )
    return yaml.dump(
        value,
        Dumper=Dumper,
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
    )


def _add_scientific(cls: type[yaml.SafeDumper] | type[yaml.SafeLoader]) -> None:
    cls.add_implicit_resolver(
        "tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789")
    )


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    """PyYAML's safe loader for plain values; a key that stands twice is refused."""
    import yaml

    # The C parser where PyYAML has it: ten times as fast, the same values
    base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]
        def construct_mapping(
            self, node: yaml.MappingNode, deep: bool = False
        ) -> dict[object, object]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise ValueError(f"the key '{key.value}' stands twice in one group")
                if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                    seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            number = super().construct_yaml_int(node)
            if number.bit_length() > MOST_BITS:
                raise ValueError(f"a whole number of {number.bit_length()} bits")
            return number

    tags = {f"tag:yaml.org,2002:{name}" for name in _PLAIN_TAGS}
    known = {
        tag: make
        for tag, make in base.yaml_constructors.items()
        if tag in {*tags, None}
    }
    Loader.yaml_constructors = known
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    # A date is text: no recipe has any use for the day as a value
    Loader.yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if not tag.endswith(":timestamp")
        ]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }
    _add_scientific(Loader)
    return Loader


def _refuse_costly(text: str) -> None:
    """ValueError for a text that could cost more than its length."""
    import yaml

    parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    sizes: dict[str, int] = {}  # anchor -> values below it, aliases written out
    # One entry per open list or mapping: (its anchor, values so far); the first is the whole text
    open_: list[tuple[str | None, int]] = [(None, 0)]

    def add(count: int) -> None:
        anchor, so_far = open_[-1]
        open_[-1] = anchor, so_far + count
        if so_far + count > MOST:
            raise ValueError(
                f"stands for more than {MOST} values (aliases of aliases?)"
            )

    for event in yaml.parse(text, Loader=parser):
        if isinstance(event, yaml.ScalarEvent):
            length = len(event.value)
            if not event.style and length > LONGEST_PLAIN:
                start = event.value[:20]
                raise ValueError(
                    f"'{start}...' has {length} characters; quote long texts"
                )
            size = 1 + length // 100
            if event.anchor:
                sizes[event.anchor] = size
            add(size)
        elif isinstance(event, yaml.AliasEvent):
            add(
                sizes.get(str(event.anchor), MOST)
            )  # an alias inside its own anchor has no end
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(open_) > DEEPEST:
                raise ValueError(f"nested more than {DEEPEST} levels deep")
            open_.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
            if anchor:
                sizes[anchor] = size
            add(size)
