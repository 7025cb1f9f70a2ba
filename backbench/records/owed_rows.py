"""Says which numbers a run has, and whether these are all that it owes.

It stands apart from `store`, whose results need pydantic: every job of a launch asks this."""

from pathlib import Path
from typing import Any

from backbench.runs import atomic
from backbench.runs.folder import OWED_FILE, RESULTS_FILE
from backbench.untrusted import jsons, opening

LARGEST_FILE = 4 * opening.GIGABYTE  # of results: a million of them

# The keys of a line that tell one number of a run from another
KEY_NAMES = (
    "checkpoint",
    "task",
    "dataset",
    "split",
    "metric",
    "protocol",
    "engine",
    "seed",
)
NumberKey = tuple[object, ...]


def number_key(line: dict[str, Any]) -> NumberKey:
    """Return what tells the number of a line from the others of its run."""
    return tuple(line.get(name) for name in KEY_NAMES)


def numbers(run: str | Path) -> set[NumberKey]:
    """Return the numbers that RUN/results.jsonl has a line of; unreadable lines have none."""
    try:
        return numbers_of(
            opening.read_bytes(Path(run) / RESULTS_FILE, most=LARGEST_FILE)
        )
    except OSError:
        return set()


def numbers_of(content: bytes) -> set[NumberKey]:
    """Return the keys of the lines of a results file."""
    keys = set()
    for text in content.split(b"\n"):
        try:
            line = jsons.decode(text)
            if line.get("checkpoint") and line.get("dataset"):
                keys.add(number_key(line))
        except (ValueError, AttributeError, TypeError):
            # The line is torn, damaged or no object: it is no result. The leaderboard reports it.
            continue
    return keys


def owe(run: str | Path, rows: int) -> None:
    """Note that RUN will have this many rows when it is done. Called before the first is written."""
    if owed(run) != rows:
        atomic.write_json(Path(run) / OWED_FILE, {"rows": rows})


def owed(run: str | Path) -> int | None:
    """Return how many rows RUN must deliver; None where nothing was noted."""
    try:
        rows = jsons.read(Path(run) / OWED_FILE)["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rows if isinstance(rows, int) else None


def complete(run: str | Path) -> bool:
    """Return True once RUN has every row that it owes; at least one, where nothing was noted."""
    return len(numbers(run)) >= max(1, owed(run) or 1)
