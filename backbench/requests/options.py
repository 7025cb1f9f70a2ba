"""Turns the fields of a request into options of the command line, and back into words.

    @dataclass(frozen=True, kw_only=True)
    class CleanRequest(Request):
        "List what runs hold on disk, and what can go."
        verb: ClassVar[str] = "clean"
        runs: tuple[Path, ...] = argument("RUNS", "run folders")
        yes: bool = option("remove what can go; without it, only list", default=False)

A field's type decides how its words are read: bool is a switch, a tuple takes several words, Literal
has choices. `declare` and `Request.argv` both follow this one table, so neither can know an option
that the other does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
import typing
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Literal

from backbench.errors import BadInput

KEY = "option"  # of a field's metadata

# How many words a tuple takes. "+": one or more, as where nothing is said; "*": any number; "each":
# one, and the flag may be repeated; "rest": all words to the end of the line; "loose": words such
# as k=5 that stand anywhere and that no other option takes
Several = Literal["+", "*", "each", "rest", "loose"]


@dataclass(frozen=True)
class Option:
    """How a field is spelled on the command line."""

    help: str
    metavar: str | None
    flagged: bool  # False: its words stand without a flag
    several: Several | None
    hidden: bool = False
    action: type[argparse.Action] | None = None  # in place of keeping the word
    least: float | None = None  # of a number
    most: float | None = None


def option(
    help: str,
    metavar: str | None = None,
    *,
    default: Any = MISSING,
    several: Several | None = None,
    hidden: bool = False,
    action: type[argparse.Action] | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare a field with the flag --name. Without a default it must be given. A number below
    `least` or above `most` is refused."""
    spelled = Option(help, metavar, True, several, hidden, action, least, most)
    return dataclasses.field(default=default, metadata={KEY: spelled})


def argument(
    metavar: str,
    help: str | None = None,
    *,
    several: Several | None = None,
    default: Any = MISSING,
) -> Any:
    """Declare a field whose words stand without a flag; a tuple takes one or more of them."""
    spelled = Option(help or "", metavar, False, several)
    return dataclasses.field(default=default, metadata={KEY: spelled})


@dataclass(frozen=True)
class Spelling:
    """A field, its option, and the type of one word of it."""

    field: dataclasses.Field[Any]
    option: Option
    word: type
    many: bool  # the field is a tuple of words
    switch: bool
    choices: tuple[Any, ...] | None

    @property
    def flag(self) -> str | None:
        if not self.option.flagged:
            return None
        return f"--{self.field.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        return self.field.default is MISSING

    def check(self, value: Any) -> None:
        """Raise BadInput if `value`, a number, is outside the option's bounds."""
        least = self.option.least
        most = self.option.most
        if least is None or most is None or value is None:
            return
        if not least <= value <= most:
            raise BadInput(f"{self.flag} {str(value)[:40]}: from {least} to {most}")


_SPELLINGS: dict[type[Request], tuple[Spelling, ...]] = {}


def spellings(request: type[Request]) -> tuple[Spelling, ...]:
    """Return the options of a request: its own, in the order of its fields, then those that it
    shares with others. They are worked out once for each request."""
    if request not in _SPELLINGS:
        hints = typing.get_type_hints(request)
        left = {field.name: field for field in dataclasses.fields(request)}
        found = []
        # The classes from the request itself up to its bases; a field that a base and the request
        # both declare is the request's
        for owner in request.__mro__:
            for name in inspect.get_annotations(owner):
                field = left.pop(name, None)
                if field is not None and KEY in field.metadata:
                    found.append(_spelling(field, hints[name]))
        _SPELLINGS[request] = tuple(found)
    return _SPELLINGS[request]


def _spelling(field: dataclasses.Field[Any], hint: Any) -> Spelling:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # int | None
        (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
    many = typing.get_origin(hint) is tuple
    if many:
        hint = typing.get_args(hint)[0]
    choices = None
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        hint = type(choices[0])
    return Spelling(field, field.metadata[KEY], hint, many, hint is bool, choices)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request is what one command asks for. Its docstring's first line says what the verb does."""

    # "linear"; with a blank where it is one of several: "launch run"
    verb: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise BadInput for a number outside its bounds, whoever makes the request."""
        for spelling in spellings(type(self)):
            spelling.check(getattr(self, spelling.field.name))

    @classmethod
    def more_help(cls) -> str:
        """Return what stands below the options in --help, laid out as it is."""
        return ""

    def argv(self) -> tuple[str, ...]:
        """Write the words behind `backbench` that parse into this request."""
        bare: list[str] = []
        flagged: list[str] = []
        rest: list[str] = []
        for spelling in spellings(type(self)):
            value = getattr(self, spelling.field.name)
            if value == spelling.field.default:
                continue
            words = [str(one) for one in value] if spelling.many else [str(value)]
            several = spelling.option.several
            if several == "rest":
                rest += words if spelling.flag is None else [spelling.flag, *words]
            elif several == "loose":
                flagged += words
            elif spelling.flag is None:
                bare += words
            elif spelling.switch:
                flagged.append(spelling.flag)
            elif several == "each":
                flagged += [f"{spelling.flag}={word}" for word in words]
            elif not spelling.many and words[0].startswith("-"):
                flagged.append(f"{spelling.flag}={words[0]}")  # --seed=-1
            else:
                flagged += [spelling.flag, *words]
        return (*self.verb.split(), *bare, *flagged, *rest)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A verb ends with this."""

    status: int = 0
    document: object = None  # what --json prints; None on all processes but the first


def declare(parser: argparse.ArgumentParser, request: type[Request]) -> None:
    """Add the options of a request to the parser of its verb."""
    for spelling in spellings(request):
        several = spelling.option.several
        if several == "loose":
            continue  # no argument: such words are what the parser leaves over
        settings: dict[str, Any] = {"help": spelling.option.help or None}
        if spelling.option.hidden:
            settings["help"] = argparse.SUPPRESS
        if spelling.flag is None:
            name = spelling.field.name
        else:
            name = spelling.flag
            settings |= {"dest": spelling.field.name, "required": spelling.required}
        if spelling.switch:
            parser.add_argument(name, action="store_true", **settings)
            continue
        settings |= {"type": spelling.word, "metavar": spelling.option.metavar}
        if spelling.choices is not None:
            settings["choices"] = spelling.choices
        if several == "each":
            parser.add_argument(name, action="append", **settings)
            continue
        if spelling.option.action is not None:
            settings["action"] = spelling.option.action
        if several == "rest":
            settings["nargs"] = argparse.REMAINDER
        elif spelling.many:
            settings["nargs"] = several or "+"
            if several == "*" and spelling.flag is None:
                # argparse takes words without a default for required
                settings["default"] = []
        elif spelling.flag is None and not spelling.required:
            settings["nargs"] = "?"
        parser.add_argument(name, **settings)


def made(request: type[Request], namespace: argparse.Namespace) -> Request:
    """Make the request that a parsed command line is. Raises BadInput for a number outside its
    bounds."""
    values: dict[str, Any] = {}
    for spelling in spellings(request):
        value = getattr(namespace, spelling.field.name, None)
        if value is None:  # nothing was said of it
            value = spelling.field.default
        elif spelling.many:
            value = tuple(value)
        values[spelling.field.name] = value
    return request(**values)
