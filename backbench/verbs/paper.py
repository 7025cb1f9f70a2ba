"""`backbench paper`: one printed table, what of it is measured, and the command for the rest."""

from __future__ import annotations

import argparse
from collections import Counter

from backbench.errors import BadInput
from backbench.papers import catalogue, papers_page, progress
from backbench.papers.catalogue import PrintedItem
from backbench.runs import atomic
from backbench.untrusted import printable


def run(args: argparse.Namespace) -> int:
    """The verb `paper`."""
    if args.markdown:
        atomic.write_text(args.markdown, papers_page.markdown())
        print(args.markdown)
        return 0
    if args.item is None:
        _list()
        return 0
    for run in args.runs:
        if not run.exists():
            raise BadInput(f"{run}: no such folder; give the RUNS of `backbench launch run --out`")
    _show(catalogue.find(args.item), args)
    return 0


def _list() -> None:
    for item in catalogue.items():
        print(f"{item.prints:<12} {item.name:<18} {papers_page.status(item):<28} {item.grid.title}")
    found = catalogue.coverage()
    others = ", ".join(f"{count} {why}" for why, count in found.most_common() if why)
    print(f"{found.total()} printed numbers: {found[None]} judged; {others}")


def _show(item: PrintedItem, args: argparse.Namespace) -> None:
    print(f"{item.name}: {item.grid.title}")
    found = progress.states(item, args.runs)
    for one in found:
        n = one.number
        told = ""
        for j in one.judged:
            told += f"  {j.measured:.2f} {j.said} ({printable.shown(j.row.name, 60)})"
        what = f"{n.task}/{n.dataset}/{n.metric}"
        print(f"  {n.printed_row:<56} {what:<34} {n.value:>7g}  {one.state}{told}")
    if not found:
        print(f"  no accuracy is printed; {item.points} points")
    if not item.grid.evaluate:
        for one_run in progress.speeds(item, args.runs):
            took = f"{one_run.images_per_s:9.1f} images/s {one_run.memory_gib:7.2f} GiB"
            print(f"  {printable.shown(one_run.name, 60):<60} {took}")
    count = Counter(one.state for one in found)
    if found:
        print(f"{len(found)} numbers: " + ", ".join(f"{k} {state}" for state, k in count.items()))
    runs = str(args.runs[0]) if args.runs else "RUNS"
    print(f"what is missing: {item.command.replace('RUNS', runs)} --cluster slurm")
    for text in item.grid.deviations:
        print(f"deviation: {text}")
