"""A job is one command of the suite, and a way for anyone to see that it has been done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from backbench.errors import BadInput
from backbench.recipes import config
from backbench.records import owed_rows
from backbench.untrusted import printable

# No number in a record may be larger than this, which is far beyond any time or count.
LARGEST = 1e12
Amount = Annotated[float, Interval(ge=-LARGEST, le=LARGEST)]  # nan is outside as well
Kind = Literal["slurm", "local", "debug"]  # of a cluster, where jobs run
# These options decide neither whether a command is refused nor how its run goes.
_FREE_OPTIONS = ("--seed", "--out", "--checkpoint")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command of the suite, with what it delivers and what it waits for.

    A job is done when the file `makes` exists or, without `makes`, when the run folder's
    results.jsonl has all rows that the run owes.
    """

    name: str  # unique; also the job's run folder below RUNS
    argv: tuple[str, ...]  # the verb and its words
    like: str  # the job's kind, for people: linear-lorac-cifar10
    # The table's cells that it fills, CHECKPOINT/EVALUATION; several where checkpoints
    # share one pass over a dataset (a pack).
    cells: tuple[str, ...]
    # Names of jobs that must have succeeded before it starts
    needs: tuple[str, ...] = ()
    # Names of jobs that should be over by then, as they fill a cache
    after: tuple[str, ...] = ()
    makes: str | None = None  # a file, relative to RUNS
    # What it asks for beyond the cluster's row for its verb
    resources: Mapping[str, object] = field(default_factory=dict)

    @property
    def verb(self) -> str:
        return self.argv[0]

    @property
    def key(self) -> str:
        """Return the name as a short file name."""
        return config.fingerprint(self.name)


def finished(job: Job, runs: Path) -> bool:
    """Say whether the files that the job delivers are there."""
    if job.makes is not None:
        return (runs / job.makes).is_file()
    run = runs / job.name
    return owed_rows.owed(run) is not None and owed_rows.complete(run)


def command_kind(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command without its checkpoints, seed and folders.

    Jobs of one kind are refused or accepted together. Only the words are compared: a grid may
    have 20,000 jobs, and the command line's parser is too slow for so many.
    """
    verb, *words = argv
    # Every verb but `pretrain` begins with the files of its checkpoints.
    if verb != "pretrain":
        while words and not words[0].startswith("--"):
            words = words[1:]
    kept = [verb]
    previous = ""
    for word in words:
        is_free = (
            word in _FREE_OPTIONS
            or previous in _FREE_OPTIONS
            or word.startswith("seed=")
        )
        if not is_free:
            kept.append(word)
        previous = word
    return tuple(kept)


def check_recorded_command(job: Job, runs: Path) -> None:
    """Raise BadInput for a recorded command that writes outside of its job's own folder.

    A record in RUNS may have been written by anybody. Its verb was checked when it was read
    (`records`), and what stands before the verb comes from the cluster's file.
    """
    again = "`backbench launch run` with its grid makes it anew"
    # argparse takes the last --out of several, and accepts --out=X. Detectron2 has a key of
    # its own, OUTPUT_DIR, and takes any word after `--` for a key.
    others = []
    for word in job.argv[1:]:
        if word in ("OUTPUT_DIR", "--") or word.startswith("--out="):
            others.append(word)
    folders = []
    for option, value in zip(job.argv, job.argv[1:]):
        if option == "--out":
            folders.append(value)
    if others or len(folders) != 1:
        wrong = others[0] if others else f"{len(folders)} x --out"
        raise BadInput(
            f"{job.name}: its recorded command says where it writes by"
            f" {printable.shown(wrong, 80)}; {again}"
        )
    own = [(runs / job.name).resolve()]
    if job.makes is not None:
        own.append((runs / job.makes).resolve())
    if Path(folders[0]).resolve() not in own:
        raise BadInput(
            f"{job.name}: its recorded command writes to"
            f" {printable.shown(folders[0], 200)}, outside of its own folder below {runs};"
            f" {again}"
        )
