"""Reads YAML from elsewhere as plain values: mappings, lists, text, numbers, true, false and null.

A few bytes can stand for gigabytes (aliases of aliases) or cost minutes (a number of a million
digits). So a text is first read as events, whose cost grows with its length alone, and values are
built only if the events promise few. Other tags are refused.
"""

from __future__ import annotations

import functools
import marshal
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.untrusted import opening, printable

if TYPE_CHECKING:
    import yaml

LARGEST = opening.MEGABYTE // 2  # bytes of a file
# The values of longer texts are not kept for the next time; in characters
REMEMBERED = 1 << 14
DEEPEST = 40  # levels of nesting
# Values, and one more for each 100 characters of text, with every alias written out
MOST = 20_000
# Bits of a whole number. One of 1024 bits is no float, so that arithmetic with it fails.
MOST_BITS = 128
# Characters of a scalar without quotes. It may be a number, and reading a long one takes minutes.
LONGEST_PLAIN = 4096

# 1e-4 is a number here. In YAML 1.1 it is text, because it has neither a dot nor a sign.
_SCIENTIFIC = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
_PLAIN_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")


def read(path: str | Path) -> Any:
    """Read a YAML file as plain values. ValueError with one line; OSError where it cannot be read."""
    return decode(text_of(path))


def text_of(path: str | Path) -> str:
    """Read a YAML file as text; ValueError and OSError as `read` raises them."""
    return opening.read_bytes(path, most=LARGEST).decode()


def decode(text: str) -> Any:
    """Read one YAML document as plain values; ValueError for anything else."""
    if len(text) > REMEMBERED:
        return _values(text)
    return marshal.loads(_written(text))


def control_below(text: str, values: object) -> tuple[str, str] | None:
    """Find the first control character in the values of a text: (path, character). It is looked for
    once in a text that is remembered."""
    if len(text) > REMEMBERED:
        return printable.control_below(values)
    return _control_below(text)


# Many recipes have the same base, and a grid names many recipes. Each reader gets values of its own,
# which are read from bytes ten times as fast as copy.deepcopy makes them.
@functools.lru_cache(maxsize=256)
def _written(text: str) -> bytes:
    return marshal.dumps(_values(text))


@functools.lru_cache(maxsize=256)
def _control_below(text: str) -> tuple[str, str] | None:
    return printable.control_below(decode(text))


def _values(text: str) -> Any:
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
        """Quotes text that a reader would take for a number."""

    _add_scientific(Dumper)
    # `inf` and `nan` are text for `decode`, but numbers for some other readers.
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
    """Let a loader or dumper take 1e-4 for a number."""
    cls.add_implicit_resolver(
        "tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789")
    )


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    """Return PyYAML's safe loader, reduced to plain values. It refuses a key that stands twice."""
    import yaml

    # PyYAML's parser in C, where there is one, is ten times as fast and gives the same values.
    base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]
        def construct_mapping(
            self, node: yaml.MappingNode, deep: bool = False
        ) -> dict[object, object]:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in seen:
                    raise ValueError(f"the key '{key.value}' stands twice in one group")
                # `<<` merges another mapping, and may stand more than once.
                if not key.tag.endswith(":merge"):
                    seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            number = super().construct_yaml_int(node)
            if number.bit_length() > MOST_BITS:
                raise ValueError(f"a whole number of {number.bit_length()} bits")
            return number

    # 1. Tags of plain values only. PyYAML keeps under None what it does with any other tag, and its
    #    safe loader refuses it
    known = {None, *(f"tag:yaml.org,2002:{name}" for name in _PLAIN_TAGS)}
    Loader.yaml_constructors = {
        tag: make for tag, make in base.yaml_constructors.items() if tag in known
    }
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    # 2. A date is text: no recipe has any use for the day as a value
    implicit = {}
    for first_character, resolvers in base.yaml_implicit_resolvers.items():
        implicit[first_character] = [
            (tag, pattern)
            for tag, pattern in resolvers
            if not tag.endswith(":timestamp")
        ]
    Loader.yaml_implicit_resolvers = implicit
    # 3. 1e-4 is a number
    _add_scientific(Loader)
    return Loader


def _refuse_costly(text: str) -> None:
    """Raise ValueError for a text whose values could cost more than its length."""
    import yaml

    parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    sizes: dict[str, int] = {}  # anchor -> values below it, aliases written out
    # (anchor, values so far) of each list or mapping that is open; the first is the whole text
    open_: list[tuple[str | None, int]] = [(None, 0)]

    def add(count: int) -> None:
        """Add values to the innermost open list or mapping."""
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
                raise ValueError(
                    f"'{event.value[:20]}...' has {length} characters; quote long texts"
                )
            size = 1 + length // 100
            if event.anchor:
                sizes[event.anchor] = size
            add(size)
        elif isinstance(event, yaml.AliasEvent):
            # An alias inside its own anchor has no end. Its size is not known yet: MOST refuses it.
            add(sizes.get(str(event.anchor), MOST))
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(open_) > DEEPEST:
                raise ValueError(f"nested more than {DEEPEST} levels deep")
            open_.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
            if anchor:
                sizes[anchor] = size
            add(size)
