"""Tab completion in bash, zsh and fish, by argcomplete.

The shell's script calls `backbench` at each Tab, with what stands on the line in the environment.
"""

import argparse
import os

from backbench.errors import BadInput

VARIABLE = "_ARGCOMPLETE"  # the shell's script sets it


def script(shell: str) -> str:
    """Return what the shell reads once: `eval "$(backbench --completion bash)"`."""
    try:
        import argcomplete
    except ImportError:
        raise BadInput(
            "--completion: argcomplete is not installed; pip install argcomplete"
        ) from None
    return str(argcomplete.shellcode(["backbench"], shell=shell))


def answer(parser: argparse.ArgumentParser) -> None:
    """Answer the shell at a Tab and end this process; do nothing for any other command."""
    if VARIABLE not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)
