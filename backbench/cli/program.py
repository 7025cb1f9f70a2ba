"""Runs one command of `backbench`, from its words to its exit status."""

import sys
from collections.abc import Sequence

from backbench.cli import completion, verbs
from backbench.errors import BadInput
from backbench.requests import parsing
from backbench.requests.places import ProtocolsAsked
from backbench.runs.ending import guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's own) and return its exit status."""
    completion.answer(parsing.parser())
    try:
        invocation = parsing.invocation(sys.argv[1:] if argv is None else argv)
    except ProtocolsAsked as asked:
        verb = str(asked)
        return guarded(lambda: verbs.print_protocols(verb))
    except BadInput as error:
        refusal = error

        def refuse() -> None:
            raise refusal

        return guarded(refuse)
    except parsing.VersionAsked:
        return guarded(_print_version)
    except parsing.CompletionAsked as asked:
        shell = str(asked)
        return guarded(lambda: print(completion.script(shell)))
    return guarded(
        lambda: verbs.run(invocation.request),
        verbosity=invocation.verbosity,
        debug=invocation.debug,
    )


def _print_version() -> None:
    from importlib.metadata import version

    from backbench.records.origin import code_revision

    number = version("backbench")
    revision = code_revision()
    # Without a repository and a commit in the wheel the version is all there is
    known = f" ({revision})" if not revision.startswith("backbench") else ""
    print(f"backbench {number}{known}")
