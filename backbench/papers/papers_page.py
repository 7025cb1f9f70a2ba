"""docs/papers.md: every printed table and figure with its command, what is judged, and where it
deviates. Written from the grids, so that it says what they do; a test holds it current."""

from __future__ import annotations

from collections import Counter

from backbench.papers.catalogue import PrintedItem, coverage, items
from backbench.results import judging_rules, published

HEAD = """# The papers' tables and figures

Made by `backbench paper --markdown docs/papers.md` from the grids; a test holds it current. A row's
grid measures all of it and, started again, what is missing; `backbench paper lorac:2 RUNS` shows
one table with what is measured, running and missing there, `backbench leaderboard RUNS --latex DIR`
prints the tables. With `fast=true` behind its name a grid pretrains the fast way, and its verdicts say
so ([fast.md](fast.md)). Choices that are ours, over all of them: [choices.md](choices.md).
"""


def markdown() -> str:
    lines = [HEAD, *_coverage(), ""]
    for paper in dict.fromkeys(item.prints.partition(":")[0] for item in items()):
        lines += [f"## {paper.upper()}", "", *_table(paper), ""]
    return "\n".join(lines)


def _coverage() -> list[str]:
    found = coverage()
    judged = found.pop(None, 0)
    lines = [f"Of {len(published.rows())} printed numbers {judged} are judged. The others:", ""]
    lines += ["| why | numbers | |", "|---|---:|---|"]
    for why, count in found.most_common():
        lines.append(
            f"| {why} | {count} | {judging_rules.WHY.get(str(why), 'no recipe expects it')} |"
        )
    return lines


def _table(paper: str) -> list[str]:
    lines = ["| | shows | command | numbers | deviations |", "|---|---|---|---|---|"]
    for item in items():
        if item.prints.startswith(f"{paper}:"):
            said = "; ".join(item.grid.deviations)
            cells = (item.name, item.grid.title, f"`{item.command}`", status(item), said)
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def status(item: PrintedItem) -> str:
    """`30 judged`, `18 judged, 24 unbuilt`; a figure without numbers has points."""
    if not item.numbers:
        return f"none printed; {item.points} points"
    count = Counter(item.why_not(number) for number in item.numbers)
    judged = count.pop(None, 0)
    return ", ".join([f"{judged} judged", *(f"{n} {why}" for why, n in count.most_common())])
