"""One job: a command of the suite, and how anyone can see that it has been done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from backbench.errors import BadInput
from backbench.recipes import config
from backbench.records import store
from backbench.untrusted import printable

LARGEST = 1e12  # of a number in a record: far beyond any time or count
Amount = Annotated[float, Interval(ge=-LARGEST, le=LARGEST)]  # which nan is not
# Options of a command that change neither what it computes for how long nor whether it is refused
_FREE_OPTIONS = ("--seed", "--out", "--checkpoint")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command of the suite. `name` is unique and is its run folder below RUNS. `cells` are the
    (checkpoint, evaluation) pairs that it delivers. It is done when the file `makes` exists, or
    else when its results.jsonl has all rows that the run owes. `needs` must have succeeded before
    it starts, `after` should be over (they fill a cache). `like` names its kind for people; `arch`
    and `units` (epochs, or checkpoints of an evaluation) serve the estimate of its cost."""

    name: str
    argv: tuple[str, ...]
    like: str
    cells: tuple[str, ...]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    makes: str | None = None
    resources: Mapping[str, object] = field(
        default_factory=dict
    )  # over the cluster's for its verb
    arch: str | None = None
    units: Amount = 1.0

    @property
    def verb(self) -> str:
        return self.argv[0]

    @property
    def key(self) -> str:
        """The name as a short file name."""
        return config.fingerprint(self.name)


def finished(job: Job, runs: Path) -> bool:
    """Say whether the run folder already holds what the job delivers."""
    if job.makes is not None:
        return (runs / job.makes).is_file()
    run = runs / job.name
    return store.owed(run) is not None and store.complete(run)


def command_kind(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command without its checkpoints, seed and folders: jobs of one kind work alike. It
    looks at the words alone, since a grid may have 20,000 jobs and a parser is slow."""
    verb, *words = argv
    if verb != "pretrain":  # checkpoints come first
        first = next(
            (i for i, word in enumerate(words) if word.startswith("--")), len(words)
        )
        words = words[first:]
    kept, previous = [verb], ""
    for word in words:
        free = (
            previous in _FREE_OPTIONS
            or word in _FREE_OPTIONS
            or word.startswith("seed=")
        )
        if not free:
            kept.append(word)
        previous = word
    return tuple(kept)


def check_recorded_command(job: Job, runs: Path) -> None:
    """Refuse a recorded command that writes beside its job's own folder, or reads more than a grid
    may name. Its verb is checked earlier; what stands before the verb comes from the cluster."""
    again = "`backbench launch run` with its grid makes it anew"
    folders = [value for word, value in zip(job.argv, job.argv[1:]) if word == "--out"]
    # argparse takes the last of several, and Detectron2's own key stands for it too
    others = [
        w for w in job.argv[1:] if w in ("OUTPUT_DIR", "--") or w.startswith("--out=")
    ]
    if len(folders) != 1 or others:
        wrong = printable.shown(others[0] if others else f"{len(folders)} x --out", 80)
        raise BadInput(
            f"{job.name}: its recorded command says where it writes by {wrong}; {again}"
        )
    own = [(runs / job.name).resolve()]
    if job.makes is not None:
        own.append((runs / job.makes).resolve())
    if Path(folders[0]).resolve() not in own:
        there = printable.shown(folders[0], 200)
        outside = f"its recorded command writes to {there}, outside of its own folder below {runs}"
        raise BadInput(f"{job.name}: {outside}; {again}")
