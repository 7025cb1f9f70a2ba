"""`backbench paper`: a printed table, its measured numbers, and the command for the rest."""

import dataclasses
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.board.board import Board, Column
from backbench.errors import BadInput
from backbench.published import catalogue, claims, grid_recipes, judging_rules
from backbench.published.catalogue import PrintedItem
from backbench.published.expected_rows import expected_keys_in
from backbench.published.judge import Judged
from backbench.published.judging_rules import column_of
from backbench.published.published import Published
from backbench.recipes import config
from backbench.requests.options import Outcome
from backbench.requests.published import PaperRequest
from backbench.runs import atomic
from backbench.runs.folder import RECIPE_FILE
from backbench.runs.step_metrics import read_metrics
from backbench.untrusted import printable

MEASURED, RUNNING, MISSING = "measured", "running", "missing"
ALL = "all"  # in place of a table


def run(request: PaperRequest) -> Outcome:
    for folder in request.runs:
        if not folder.exists():
            raise BadInput(
                f"{folder}: no such folder; give the RUNS of `backbench launch run --out`"
            )
    if request.markdown:
        runs: Sequence[Path] = request.runs
        kept = request.markdown.parent / "records"  # docs/records, for docs/papers.md
        if not runs and kept.is_dir():
            runs = [kept]
        atomic.write_text(request.markdown, catalogue.markdown(runs))
        print(request.markdown)
        return Outcome()
    if request.item in (None, ALL):
        return Outcome(document=_list(request.runs))
    return Outcome(document=_show(catalogue.find(request.item), request.runs))


def _list(runs: Sequence[Path]) -> list[dict[str, object]]:
    """Print a line for each table and figure and for each source; return the same as fields."""
    listed: list[dict[str, object]] = []
    board, judged = catalogue.measured(runs)
    measured = catalogue.by_number(judged)
    for item in catalogue.items():
        status = catalogue.status(item, measured)
        print(f"{item.prints:<12} {item.name:<18} {status:<36} {item.grid.title}")
        listed.append({"item": item.prints, "name": item.name, "status": status})
    counts = catalogue.coverage()
    others = ", ".join(f"{count} {why}" for why, count in counts.most_common() if why)
    sources = catalogue.sources(board, judged)
    papers = sources[0]
    print(
        f"{counts.total()} printed numbers: {counts[None]} judgeable"
        f"{catalogue.words_of_those_apart(papers)}, {len(measured)} measured; {others}"
    )
    for source in sources:
        print(source.words)
        about = dataclasses.asdict(source)
        listed.append({"source": about.pop("name"), **about})
    return listed


@dataclass(frozen=True)
class NumberState:
    """One printed number: its state, and its measurements (one per checkpoint)."""

    number: Published
    state: str  # measured, running or missing, or why it cannot be judged
    judged: tuple[Judged, ...] = ()


def _show(item: PrintedItem, runs: Sequence[Path]) -> list[NumberState]:
    """Print one table: every number with its state, what is missing, and the deviations."""
    print(f"{item.name}: {item.grid.title}")
    board, judged = catalogue.measured(runs)
    # 1. The numbers, or the speed and memory of pretrainings that nothing evaluates
    numbers = number_states(item, runs, judged)
    for one in numbers:
        n = one.number
        said = one.state
        for verdict in one.judged:
            name = printable.shown(verdict.row.name, 60)
            said += f"  {verdict.measured:.2f} {verdict.verdict_and_way} ({name})"
        what = f"{n.task}/{n.dataset}/{n.metric}"
        print(f"  {n.printed_row:<56} {what:<34} {n.value:>7g}  {said}")
    if not numbers:
        print(f"  no number is printed; {item.points} points")
    if not item.grid.evaluate:
        for name, speed_and_memory in _pretraining_costs(item, runs):
            print(f"  {printable.shown(name, 60):<60} {speed_and_memory}")
    if numbers:
        count = Counter(one.state for one in numbers)
        counted = ", ".join(f"{times} {state}" for state, times in count.items())
        print(f"{len(numbers)} numbers: {counted}")
    if item.on_lost_projection:
        print(
            f"{item.on_lost_projection} of them rest on a lost L: CLLR's penalty takes it away,"
            " and little is left to probe (docs/choices.md, CLLR: alpha 10)"
        )
    if item.on_exploding_training:
        print(
            f"{item.on_exploding_training} of them rest on a training that explodes and ends without"
            " a number (docs/choices.md, CLLR: lambda from 0.1 on)"
        )
    for line in _beside(item, board):
        print(f"  {line}")
    # 2. The claims
    made = claims.of_table(item.numbers, board, judged)
    for claim in made:
        if claim.verdict != claims.NOT_MEASURED:
            print(f"  claim {claim.words}")
    if made:
        print(claims.counted(made))
    # 3. The command for the rest, and what differs from the paper
    out = shlex.quote(str(runs[0])) if runs else "RUNS"
    if not numbers or any(one.state != MEASURED for one in numbers):
        print(
            f"what is missing: backbench launch run {item.in_command} --data ROOT --out {out}"
            " --cluster slurm"
        )
    for text in item.grid.deviations:
        print(f"deviation: {text}")
    for text in item.grid.choices:
        print(f"choice: {text} (docs/choices.md)")
    return numbers


def number_states(
    item: PrintedItem, runs: Sequence[Path], judged: Sequence[Judged]
) -> list[NumberState]:
    """Return the state of every number of a table or figure, in its order."""
    by_number = catalogue.by_number(judged)
    # The keys that pretrainings below `runs` must reach, finished or not
    begun: set[str] = set()
    for _, recipe in _recipes_below(runs):
        begun.update(expected_keys_in(recipe))
    states = []
    for number in item.numbers:
        own = by_number.get(catalogue.name_of(number), [])
        why_not = item.why_not(number)
        if own:
            state = MEASURED
        elif why_not is not None:
            state = why_not
        elif number.key in begun:
            state = RUNNING
        else:
            state = MISSING
        states.append(NumberState(number, state, tuple(own)))
    return states


def _beside(item: PrintedItem, board: Board) -> Iterator[str]:
    """Yield a line for each recipe that no printed number judges, with its measured numbers in the
    columns of the table."""
    columns: dict[Column, None] = {}  # a set that keeps its order
    for number in item.numbers:
        if judging_rules.reason(number) is None:
            columns[column_of(number)] = None
    for name in item.beside:
        trained_so = grid_recipes.settings(config.flat(grid_recipes.shipped(name)))
        measured = []
        for row in board.measured_rows:
            recipe = board.recipes.get(row.checkpoint)
            if not recipe or grid_recipes.settings(recipe) != trained_so:
                continue
            for column in columns:
                cell = board.cell(row, column)
                if cell is not None and cell.value is not None:
                    what = f"{column.task}/{column.dataset}/{column.metric}"
                    called = printable.shown(row.name, 60)
                    measured.append(f"{what} {cell.value:.2f} ({called})")
        said = ", ".join(measured) or "not measured"
        yield f"beside, judged by no number: {name}  {said}"


def _pretraining_costs(
    item: PrintedItem, runs: Sequence[Path]
) -> list[tuple[str, str]]:
    """Return (name, median speed and peak memory) of a grid's pretrainings, from metrics.jsonl."""
    # The grid's overrides name its pretrainings; the rest of a run's name says the point.
    beginnings = []
    for sweep in grid_recipes.sweeps(item.grid):
        for text in sweep.overrides:
            if text.startswith("name="):
                beginnings.append(f"{text.removeprefix('name=')} ")
    costs = []
    for folder, recipe in _recipes_below(runs):
        name = str(recipe.get("name"))
        if "batch_size" not in recipe or not name.startswith(tuple(beginnings)):
            continue
        rows = [row for row in read_metrics(folder) if "images_per_s" in row]
        if rows:
            speed = statistics.median(row["images_per_s"] for row in rows)
            peak = max(row.get("memory_gib", 0.0) for row in rows)
            costs.append((name, f"{speed:9.1f} images/s {peak:7.2f} GiB"))
    return sorted(costs)


def _recipes_below(runs: Sequence[Path]) -> Iterator[tuple[Path, Mapping[str, object]]]:
    """Yield each run folder with its recipe. A recipe that was torn while its run began is skipped:
    `backbench launch` names it."""
    for run in runs:
        for file in run.rglob(RECIPE_FILE):
            try:
                recipe = config.read_yaml(file)
            except BadInput:
                continue
            yield file.parent, recipe
