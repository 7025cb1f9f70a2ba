"""The commands of a grid's jobs are checked before they are submitted.

A grid that names a key its recipe lacks, or a dataset that is not there, would otherwise wait in a
queue and fail there job by job.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from backbench.datasets import availability
from backbench.errors import BadInput
from backbench.launch.job import Job, command_kind
from backbench.runs.terminal import log

# The others name files that may be made before they start, or weigh as much as what they do
CHECKED = ("pretrain", "linear", "finetune", "semisup", "analyze")


@dataclass(frozen=True)
class CommandLine:
    """The command line's parser and its check of one command; each kind is checked once."""

    parsed: Callable[[Sequence[str]], argparse.Namespace]
    check: Callable[[argparse.Namespace], None]
    seen: set[tuple[str, ...]] = field(default_factory=set)  # kinds of commands, and warnings

    def refuse(self, jobs: Iterable[Job], where: str) -> None:
        """Raise BadInput with the job's name for a recipe or key that does not exist.

        A missing dataset is only a warning: it may be where the jobs run.
        """
        for job in jobs:
            kind = command_kind(job.argv)
            if job.verb not in CHECKED or kind in self.seen:
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
                if (str(error),) not in self.seen:
                    self.seen.add((str(error),))
                    log.warning("%s and jobs like it would stop here: %s", job.name, error)
