"""Says whether a demo's own numbers lie where those of twenty other demos lay.

Training for seconds is a lottery: another seed, another number of threads or another make of
processor gives another number. So one draw promises nothing. `demo_ranges.csv` holds how far each
pretrained trunk stood above the random one in twenty runs (`benchmarks/demo_holds.py` makes it), and
the demo is held against that.
"""

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.records import store
from backbench.records.store import Result

FILE = Path(__file__).with_suffix(".csv")
CONTROL = "random"
# Detection trains for 200 iterations only: its runs show the path and compare nothing
COMPARED = ("linear", "knn", "fewshot", "semi_10pct")


@dataclass(frozen=True)
class Range:
    """The points by which a trunk stood above the random one, over several demos."""

    machine: str
    column: str  # without its protocol
    trunk: str
    runs: int
    above: int  # the runs in which it stood above
    least: float
    median: float
    most: float

    def holds(self, points: float) -> bool:
        """Return whether `points` lie in the range, to the tenth that it is written with."""
        return self.least - 0.05 <= points <= self.most + 0.05


def read() -> list[Range]:
    """Read the kept ranges."""
    with FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        Range(
            machine=row["machine"],
            column=row["column"],
            trunk=row["trunk"],
            runs=int(row["runs"]),
            above=int(row["above"]),
            least=float(row["least"]),
            median=float(row["median"]),
            most=float(row["most"]),
        )
        for row in rows
    ]


def write(ranges: Sequence[Range]) -> None:
    """Write the ranges that are kept."""
    with FILE.open("w", newline="") as file:
        names = [field.name for field in dataclasses.fields(Range)]
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        table.writerows(dataclasses.asdict(each) for each in ranges)


def told(results: Sequence[Result], ranges: Sequence[Range]) -> list[str]:
    """Say, in lines for the terminal, which of a demo's differences lie outside of the ranges."""
    points = above_random(results)
    inside = 0
    outside: list[str] = []
    for each in ranges:
        found = points.get((each.column, each.trunk))
        if found is None or not each.column.startswith(COMPARED):
            continue
        if each.holds(found):
            inside += 1
        else:
            outside.append(
                f"  {each.trunk} in {each.column}: {found:+.1f} points, there"
                f" {each.least:+.1f} to {each.most:+.1f}"
            )
    if not inside and not outside:
        return []
    others = sorted({f"{each.runs} demos on {each.machine}" for each in ranges})
    lines = [
        f"{inside} of {inside + len(outside)} differences to the random trunk lie where"
        f" {' and '.join(others)} had them"
    ]
    if outside:
        lines[0] += "; outside:"
    lines += outside
    lines.append(
        "detection here shows the path and compares nothing: its trainings are short"
    )
    return lines


def above_random(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """Return (column, trunk) -> the points by which the trunk stands above the random one."""
    values: dict[tuple[str, str], float] = {}
    for result in results:
        if result.value is not None:
            column = result.column.partition("@")[0]
            trunk = result.name.removesuffix("-demo").replace("-", "_")
            values[column, trunk] = result.value
    return {
        (column, trunk): value - values[column, CONTROL]
        for (column, trunk), value in values.items()
        if trunk != CONTROL and (column, CONTROL) in values
    }


def of_demo(out: Path) -> list[str]:
    """Read the results of a demo and hold them against the kept ranges."""
    results, _ = store.read(out)
    return told(results, read())
