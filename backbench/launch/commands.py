"""The command lines of a grid's jobs, held to what their verbs would refuse at once.

A grid that names a key its recipe lacks, or a dataset that is not there, would else be submitted,
wait in a queue, and fail there job by job.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from backbench.datasets import availability
from backbench.errors import BadInput
from backbench.launch.job import Job
from backbench.runs.terminal import log

# The others name files that may be made before they start, or weigh as much as what they do
CHECKED = ("pretrain", "linear", "finetune", "semisup", "analyze")
FREE = ("--seed", "--out")  # options whose values decide nothing here


@dataclass(frozen=True)
class CommandLine:
    """What the command line knows of its verbs, for those below it."""

    parsed: Callable[[Sequence[str]], argparse.Namespace]
    check: Callable[[argparse.Namespace], None]
    seen: set[tuple[str, ...]] = field(default_factory=set)  # kinds of command, and what was said

    def refuse(self, jobs: Iterable[Job], where: str) -> None:
        """BadInput, with the name of the job, for a recipe or key that there is not. A dataset that
        is not there is said: it may be where the jobs run. Each kind of command is looked at once.
        """
        for job in jobs:
            if job.verb not in CHECKED:
                continue
            kind = _kind(job.argv)
            if kind in self.seen:
                continue
            self.seen.add(kind)
            args = self.parsed(job.argv)
            try:
                self.check(args)
            except BadInput as error:
                raise BadInput(f"{where}: {job.name}: {error}") from None
            try:
                availability.datasets_there(args)
            except BadInput as error:
                if (said := (str(error),)) not in self.seen:
                    self.seen.add(said)
                    log.warning("%s and jobs like it would stop here: %s", job.name, error)


def _kind(argv: Sequence[str]) -> tuple[str, ...]:
    """What decides whether it is refused: not its checkpoints, seed or folder. By the words alone,
    since a grid may have 20,000 jobs and a parser is slow."""
    verb, *words = argv
    if verb != "pretrain":  # checkpoints come first
        first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        words = words[first:]
    kept, behind = [verb], ""
    for word in words:
        if behind not in FREE and word not in FREE and not word.startswith("seed="):
            kept.append(word)
        behind = word
    return tuple(kept)
