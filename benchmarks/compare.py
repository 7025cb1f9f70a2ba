"""Time our ways against named baselines, in turns, on one thread, and print ratios.

    python benchmarks/compare.py [NAME ...] [--quick] [--save]

NAMEs are losses, probe, views, step, start, launcher and leaderboard; none: all of them. Ratios carry
over between machines, seconds do not. `--save` keeps the ratios in ratios.csv, in place of those of
this machine, and makes the table of docs/benchmarks.md anew.
"""

import argparse
import csv
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from machine import SEEN, Ratio, describe

NAMES = ("losses", "probe", "views", "step", "start", "launcher", "leaderboard")
COMMANDS = NAMES[4:]  # functions of commands.py; each other one is a file
FILE = Path(__file__).parent / "ratios.csv"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- ratios.csv -->\n", "<!-- end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes, whose figures mean little"
    )
    parser.add_argument(
        "--save", action="store_true", help="keep the ratios, and make the page"
    )
    args = parser.parse_args()
    unknown = set(args.names) - set(NAMES)
    if unknown or (args.quick and args.save):
        parser.error(
            f"no such NAME: {', '.join(unknown)}" if unknown else "--quick is not saved"
        )
    # Libraries read it when they are loaded
    if os.environ.get("OMP_NUM_THREADS") != "1":
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            os.environ | {"OMP_NUM_THREADS": "1"},
        )
    print(describe(), flush=True)
    for name in args.names or NAMES:
        del SEEN[:]
        module = importlib.import_module("commands" if name in COMMANDS else name)
        getattr(module, name if name in COMMANDS else "run")(args.quick)
        if args.save:
            save(name, SEEN)
            write_page(read())


def read() -> list[dict[str, str]]:
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


def save(script: str, seen: Sequence[Ratio]) -> None:
    """The file with this machine's ratios of a script in place of its earlier ones."""
    machine = seen[0].machine if seen else ""
    rows = [r for r in read() if (r["script"], r["machine"]) != (script, machine)]
    rows += [{"script": script, **one._asdict()} for one in seen]
    rows.sort(key=lambda row: NAMES.index(row["script"]))  # a stable order within each
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["script", *Ratio._fields], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_page(rows: Sequence[dict[str, str]]) -> None:
    """The table of docs/benchmarks.md: a line for each way, a column for each machine."""
    machines = sorted({row["machine"] for row in rows})
    heads = []
    for machine in machines:
        dates = sorted({row["date"] for row in rows if row["machine"] == machine})
        first_and_last = dict.fromkeys((dates[0], dates[-1]))
        heads.append(f"{machine} ({' to '.join(first_and_last)})")
    lines = [
        f"| work | way | against | {' | '.join(heads)} |",
        "|---|---|---|" + "---:|" * len(heads),
    ]
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        of_way = cells.setdefault((row["work"], row["way"], row["against"]), {})
        of_way[row["machine"]] = row["ratio"]
    for key, ratios in cells.items():
        lines.append(
            f"| {' | '.join([*key, *(ratios.get(m, '') for m in machines)])} |"
        )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


if __name__ == "__main__":
    main()
