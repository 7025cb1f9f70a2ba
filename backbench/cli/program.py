"""Runs one command of `backbench`, from its words to its exit status."""

import sys
from collections.abc import Sequence

from backbench.cli import verbs
from backbench.errors import BadInput
from backbench.requests import parsing
from backbench.requests.places import ProtocolsAsked
from backbench.runs.ending import guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's own) and return its exit status."""
    try:
        invocation = parsing.invocation(sys.argv[1:] if argv is None else argv)
    except ProtocolsAsked as asked:
        verbs.print_protocols(str(asked))
        return 0
    except BadInput as error:
        refusal = error

        def refuse() -> None:
            raise refusal

        return guarded(refuse)
    return guarded(
        lambda: verbs.run(invocation.request),
        verbosity=invocation.verbosity,
        debug=invocation.debug,
    )
