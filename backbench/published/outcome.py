"""The outcome of a list: every printed number of its files beside the measured one."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbench.board.board import Board, Column, collect
from backbench.board.export import from_to, pipe_table
from backbench.published import judging_rules, timm_scores
from backbench.published.judge import Judged, judge
from backbench.published.judging_rules import column_of
from backbench.published.selection import PublicFile, ReproductionList, judged_rows
from backbench.published.timm_scores import PrintedScore
from backbench.records.store import Result
from backbench.untrusted import printable

WITHIN, OUTSIDE, ANOTHER = "within", "outside", "another"  # verdicts
UNLIKE, MISSING, NO_FILE = "unlike", "not measured", "no file"  # reasons for no verdict
Wanted = AbstractSet[tuple[str, str]]  # (task, dataset) to measure
Covered = Mapping[str, Wanted]  # by checkpoint


@dataclass(kw_only=True)
class OutcomeLine:
    """One printed number with its verdict, and the reason for it. Values are in percent."""

    checkpoint: str = ""  # its name in the list
    column: str
    printed: float
    source: str
    verdict: str = ""
    measured: float | None = None
    ci95: tuple[float, float] | None = None
    tolerance: tuple[float, float] | None = (
        None  # points below the printed number and above
    )
    why: str = ""


def outcome(
    listed: ReproductionList,
    covered: Covered,
    digests: Mapping[str, str],
    runs: Sequence[Path],
) -> list[OutcomeLine]:
    """The printed numbers that the list measures for each checkpoint of `covered`, with a verdict or
    the reason for none. `digests` are those of the checkpoints that are there, by name."""
    board = collect(runs)
    lines: list[OutcomeLine] = []
    for name, wanted in covered.items():
        about, digest = listed.files[name], digests.get(name, "")
        own = [
            *_of_papers(board, about, wanted, digest),
            *_of_pages(board, about, wanted, digest),
        ]
        for model in filter(None, (about.timm, about.testbed)):
            for _, dataset in sorted(wanted):
                own += _of_own_heads(board, model, dataset, digest)
        for line in own:
            line.checkpoint = name
            line.verdict = line.verdict or (MISSING if digest else NO_FILE)
        lines += own
    return lines


def _of_own_heads(
    board: Board, model: str, dataset: str, digest: str
) -> Iterator[OutcomeLine]:
    """The printed counts of right images, one for each size of the model."""
    for score in timm_scores.of_model(model, dataset):
        line = OutcomeLine(
            column=f"ood/{dataset}/top1@own-{score.printed.rule}, {score.size} pixels",
            printed=score.top1,
            source=f"{score.source}, {score.right:,} of {score.printed.images:,} right",
            tolerance=(score.printed.tolerance, score.printed.tolerance),
        )
        found = _measured_at(board, score, digest)
        if found is not None:
            facts: Mapping[str, Any] = found.provenance
            line.measured, line.ci95 = found.value, found.ci95
            line.verdict, line.why = timm_scores.verdict(
                score,
                right=facts["right"]["top1"],
                images=facts["images"]["test"],
                crop_pct=facts["own_geometry"]["crop_pct"],
                interpolation=facts["own_geometry"]["interpolation"],
            )
        yield line


def _measured_at(board: Board, score: PrintedScore, digest: str) -> Result | None:
    """The result of this checkpoint by its own classifier, at the printed size and by the rule."""
    for (checkpoint, column), cell in board.cells.items():
        if checkpoint != digest or (column.task, column.metric) != ("ood", "top1"):
            continue
        result = cell.parts[0].result
        about: Mapping[str, Any] = result.provenance
        if "own_geometry" not in about or about["recipe"]["rule"] != score.printed.rule:
            continue
        size = about["own_geometry"]["input_size"][-1]
        if (result.dataset, size) == (score.dataset, score.size):
            return result
    return None


def _of_papers(
    board: Board, about: PublicFile, wanted: Wanted, digest: str
) -> Iterator[OutcomeLine]:
    """The numbers of the papers' tables, judged by the reproduction gate (papers/judge.py)."""
    judged: dict[tuple[str, Column], Judged] = {}
    if any(row.checkpoint == digest for row in board.measured_rows):
        judged = {
            (one.key, one.column): one for one in judge(board, {digest: about.rows})
        }
    for number in judged_rows(about):
        if (number.task, number.dataset) not in wanted:
            continue
        column, points = column_of(number), judging_rules.tolerance(number) or 0.0
        printed = judging_rules.as_measured(number).value
        line = OutcomeLine(column=column.name, printed=printed, source=number.key)
        line.tolerance = (points, points)
        one = judged.get((number.key, column))
        if one is None:
            _add_measured_otherwise(board, line, column, digest)
        else:
            line.verdict, line.measured, line.ci95 = one.verdict, one.measured, one.ci95
            line.why = "; ".join((*one.other_trunk, *one.changed))
        yield line


def _of_pages(
    board: Board, about: PublicFile, wanted: Wanted, digest: str
) -> Iterator[OutcomeLine]:
    """The numbers that are printed on the file's own page."""
    for number in about.beside:
        if (number.task, number.dataset) not in wanted:
            continue
        line = OutcomeLine(
            column=number.column.name, printed=number.value, source=number.source
        )
        line.tolerance = number.allowed
        cell = board.cells.get((digest, number.column))
        if cell is None or cell.value is None:
            _add_measured_otherwise(board, line, number.column, digest)
        else:
            line.measured, line.ci95 = cell.value, cell.ci95
            if line.tolerance is None:
                line.verdict, line.why = UNLIKE, number.unlike or "no tolerance"
            else:
                below, above = line.tolerance
                within = -below <= cell.value - number.value <= above
                line.verdict = WITHIN if within else OUTSIDE
        yield line


def _add_measured_otherwise(
    board: Board, line: OutcomeLine, column: Column, digest: str
) -> None:
    """Fill in the first number that was measured on other images or by a changed recipe."""
    for (checkpoint, other), cell in board.cells.items():
        if checkpoint == digest and other.without_marks == column.without_marks:
            line.verdict, line.why = UNLIKE, "undefined"
            if cell.value is not None:
                line.measured, line.ci95 = cell.value, cell.ci95
                line.why = f"measured as {other.name}"
            return


def markdown(listed: ReproductionList, lines: Sequence[OutcomeLine]) -> str:
    """How many of the numbers have which verdict, and the reproduction table."""
    count = Counter(line.verdict for line in lines)
    order = (WITHIN, OUTSIDE, ANOTHER, UNLIKE, MISSING, NO_FILE)
    counts = [f"{count[word]} {word}" for word in order if count[word]]
    summary = f"{len(lines)} printed numbers: {', '.join(counts) or 'none'}."
    heads = (
        "checkpoint",
        "column",
        "printed",
        "measured",
        "95% interval",
        "tolerance",
        "verdict",
        "printed in",
        "why",
    )
    rows = []
    for line in lines:
        measured = "" if line.measured is None else f"{line.measured:.2f}"
        below, above = line.tolerance or (0, 0)
        tolerance = f"{above:g}" if below == above else f"-{below:g} +{above:g}"
        tolerance = "" if line.tolerance is None else tolerance
        numbers = (f"{line.printed:g}", measured, from_to(line.ci95), tolerance)
        cells = (
            line.checkpoint,
            line.column,
            *numbers,
            line.verdict,
            line.source,
            line.why,
        )
        rows.append([printable.shown(cell, 300) for cell in cells])
    page = [f"# {listed.name}: {listed.title}", "", summary, ""]
    page += pipe_table(dict.fromkeys(heads, "---"), rows)
    return "\n".join(page) + "\n"
