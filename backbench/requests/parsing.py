"""Parses a command line into the request that it is."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from backbench.errors import EXIT_BAD_INPUT
from backbench.requests import hints
from backbench.requests.every import GROUPS, REQUESTS
from backbench.requests.options import Request, declare, made, spellings

SHELLS = ("bash", "zsh", "fish")
CHANGE = re.compile(r"[a-z_][\w.]*=")  # the beginning of k=5,20
LIKE_A_FLAG = re.compile(r"--?[A-Za-z]")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    request: type[Request] | None = None  # that its words become
    words: tuple[str, ...] = ()  # that it was given

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse `args`, and keep them for what an error says."""
        self.words = tuple(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Write the help, with what the request adds below it."""
        text = super().format_help()
        more = "" if self.request is None else self.request.more_help()
        return f"{text}\n{more}\n" if more else text

    def error(self, message: str) -> NoReturn:
        told = [f"{self.prog}: {message}", *self._hints(), f"see {self.prog} --help"]
        self.exit(EXIT_BAD_INPUT, "; ".join(told) + "\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a word that is none of the choices; of a verb, say what may be meant."""
        if action.dest == "verb" and value not in (action.choices or ()):
            meant = hints.for_verb(str(value), tuple(action.choices or ()))
            if meant:
                raise argparse.ArgumentError(None, f"{value}: no such verb; {meant}")
        super()._check_value(action, value)

    def _hints(self) -> list[str]:
        """Say what may be meant by the options that this parser does not have."""
        if self.request is None:
            return []
        known = self._option_string_actions
        bare = {one.field.name for one in spellings(self.request) if one.flag is None}
        found = []
        for word in self.words:
            flag = word.partition("=")[0]
            if not LIKE_A_FLAG.match(flag) or flag in known:
                continue
            meant = hints.for_option(
                word,
                flags=[each for each in known if each.startswith("--")],
                bare=bare,
                changes="overrides" in bare,
            )
            if meant and meant not in found:
                found.append(meant)
        return found


class VersionAsked(Exception):
    """`--version` asks which version and commit this is, and for no verb."""


class CompletionAsked(Exception):
    """`--completion SHELL` asks for the shell's script, its only argument, and for no verb."""


class _AskVersion(argparse.Action):
    """`--version`; finding it out takes longer than all of --help, so only this asks."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, *_: object) -> NoReturn:
        raise VersionAsked


class _AskCompletion(argparse.Action):
    """`--completion bash`."""

    def __call__(
        self, parser: object, namespace: object, values: Any, *_: object
    ) -> NoReturn:
        raise CompletionAsked(values)


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A command line: what it asks for, and how much it wants to be told."""

    request: Request
    verbosity: int = 0  # -1 with -q
    debug: bool = False


def _add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add the options that may stand before the verb or after it."""
    parser.add_argument("-v", dest="verbosity", action="count", help="more output")
    parser.add_argument("-q", dest="quiet", action="store_true", help="warnings only")
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error"
    )


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line."""
    question = "What is a self-supervised ResNet-50 worth?"
    top = Parser(prog="backbench", description=question, allow_abbrev=False)
    _add_verbosity(top)
    top.add_argument(
        "--version", action=_AskVersion, help="print the version and its commit"
    )
    top.add_argument(
        "--completion",
        action=_AskCompletion,
        choices=SHELLS,
        help='print what makes Tab complete words: eval "$(backbench --completion bash)"',
    )
    top.set_defaults(verbosity=0, quiet=False, debug=False)
    # A verb's own defaults would undo what stands before it, so it has none
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_verbosity(common)
    verbs = top.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=Parser
    )
    groups: dict[str, Any] = {}
    for request in REQUESTS:
        verb, _, action = request.verb.partition(" ")
        beside = verbs
        if action:
            if verb not in groups:
                group = verbs.add_parser(verb, **_about(GROUPS[verb]))
                names = [
                    r.verb.split()[1] for r in REQUESTS if r.verb.split()[0] == verb
                ]
                groups[verb] = group.add_subparsers(
                    dest="action", required=True, metavar="|".join(names)
                )
            beside = groups[verb]
        child = beside.add_parser(
            action or verb,
            **_about(str(request.__doc__)),
            parents=[common],
            allow_abbrev=False,
        )
        declare(child, request)
        child.request = request
        child.set_defaults(request=request, asked=child)
    return top


def _about(docstring: str) -> dict[str, Any]:
    about = docstring.rstrip(".")
    # argparse formats the help, and not the description
    return {"help": about.replace("%", "%%"), "description": about}


def parse(argv: Sequence[str]) -> Request:
    """Parse the words of a request, as `Request.argv` writes them."""
    return invocation(argv).request


def invocation(argv: Sequence[str]) -> Invocation:
    """Parse a command line. Raises SystemExit, with argparse's own text, for words that it does not
    understand, and BadInput for a number outside its bounds."""
    top = parser()
    args, rest = top.parse_known_args(list(argv))
    request: Any = made(args.request, args)
    names = {spelling.field.name for spelling in spellings(args.request)}
    changed: dict[str, tuple[Any, ...]] = {}
    # `linear --protocol knn k=5,20 X`: argparse takes k=5,20 for a checkpoint
    if {"checkpoints", "overrides"} <= names:
        words = request.checkpoints
        changes = [w for w in words if CHANGE.match(str(w)) and not w.exists()]
        changed["checkpoints"] = tuple(w for w in words if w not in changes)
        changed["overrides"] = tuple(map(str, changes))
        if not changed["checkpoints"]:
            args.asked.error(
                f"{changes[0]} is no checkpoint; name one before --protocol"
            )
    # argparse takes words without a flag in one place only, before the options or after them; here
    # both will do
    flags = [word for word in rest if word.startswith("-")]
    if "words" in names and not flags:
        changed["words"] = (*request.words, *rest)
    elif "overrides" in names and not flags and all("=" in word for word in rest):
        before = changed.get("overrides", request.overrides)
        changed["overrides"] = (*before, *rest)
    elif rest:
        line = f"unrecognized arguments: {' '.join(rest)}"
        if "checkpoint" in names and not flags:
            line += f" (`{args.asked.prog}` takes one checkpoint; give each a command of its own)"
        args.asked.error(line)
    return Invocation(
        request=dataclasses.replace(request, **changed),
        verbosity=-1 if args.quiet else args.verbosity,
        debug=args.debug,
    )
