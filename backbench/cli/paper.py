"""`backbench paper`: a printed table, its measured numbers, and the command for the rest."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput
from backbench.published import catalogue, claims, printed_recipes
from backbench.published.catalogue import PrintedItem
from backbench.published.judge import Judged
from backbench.published.published import Published, expected_keys_in
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
    for run in request.runs:
        if not run.exists():
            raise BadInput(
                f"{run}: no such folder; give the RUNS of `backbench launch run --out`"
            )
    if request.markdown:
        kept = (
            request.markdown.parent / "records"
        )  # docs/records, beside docs/papers.md
        runs = request.runs or ([kept] if kept.is_dir() else [])
        atomic.write_text(request.markdown, catalogue.markdown(runs))
        print(request.markdown)
    elif request.item in (None, ALL):
        return Outcome(document=_list(request.runs))
    else:
        return Outcome(document=_show(catalogue.find(request.item), request.runs))
    return Outcome()


def _list(runs: Sequence[Path]) -> list[dict[str, object]]:
    """Prints a line for each table and figure and for each source; returns the same as fields."""
    listed: list[dict[str, object]] = []
    board, judged = catalogue.measured(runs)
    measured = catalogue.by_number(judged)
    for item in catalogue.items():
        status = catalogue.status(item, measured)
        print(f"{item.prints:<12} {item.name:<18} {status:<36} {item.grid.title}")
        listed.append({"item": item.prints, "name": item.name, "status": status})
    counts = catalogue.coverage()
    others = ", ".join(f"{count} {why}" for why, count in counts.most_common() if why)
    known = f"{counts[None]} judgeable, {len(measured)} measured"
    print(f"{counts.total()} printed numbers: {known}; {others}")
    for source in catalogue.sources(board, judged):
        print(source.words)
        about = dataclasses.asdict(source)
        listed.append({"source": about.pop("name"), **about})
    return listed


def _show(item: PrintedItem, runs: Sequence[Path]) -> "list[NumberState]":
    """Prints one table: every number with its state, what is missing, and the deviations."""
    print(f"{item.name}: {item.grid.title}")
    board, judged = catalogue.measured(runs)
    numbers = number_states(item, runs, judged)
    for one in numbers:
        n, said = one.number, one.state
        for j in one.judged:
            said += f"  {j.measured:.2f} {j.verdict_and_way} ({printable.shown(j.row.name, 60)})"
        what = f"{n.task}/{n.dataset}/{n.metric}"
        print(f"  {n.printed_row:<56} {what:<34} {n.value:>7g}  {said}")
    if not numbers:
        print(f"  no number is printed; {item.points} points")
    if not item.grid.evaluate:
        for name, speed_and_memory in _pretraining_costs(item, runs):
            print(f"  {printable.shown(name, 60):<60} {speed_and_memory}")
    if numbers:
        count = Counter(one.state for one in numbers).items()
        print(
            f"{len(numbers)} numbers: "
            + ", ".join(f"{k} {state}" for state, k in count)
        )
    made = claims.of_table(item.numbers, board, judged)
    for claim in made:
        if claim.verdict != claims.NOT_MEASURED:
            print(f"  claim {claim.words}")
    if made:
        print(claims.counted(made))
    out = str(runs[0]) if runs else "RUNS"
    command = f"{item.in_command} --data ROOT --out {out} --cluster slurm"
    print(f"what is missing: backbench launch run {command}")
    for text in item.grid.deviations:
        print(f"deviation: {text}")
    for text in item.grid.choices:
        print(f"choice: {text} (docs/choices.md)")
    return numbers


@dataclass(frozen=True)
class NumberState:
    """One printed number: its state, and its measurements (one per checkpoint)."""

    number: Published
    state: str  # measured, running or missing, or why it cannot be judged
    judged: tuple[Judged, ...] = ()


def number_states(
    item: PrintedItem, runs: Sequence[Path], judged: Sequence[Judged]
) -> list[NumberState]:
    """The state of every number of a table or figure, in its order."""
    by_number = catalogue.by_number(judged)
    # Keys that pretrainings below `runs` must reach, finished or not
    begun = {
        key for _, recipe in _recipes_below(runs) for key in expected_keys_in(recipe)
    }
    states = []
    for n in item.numbers:
        own = by_number.get(catalogue.name_of(n), [])
        state = item.why_not(n) or (RUNNING if n.key in begun else MISSING)
        states.append(NumberState(n, MEASURED if own else state, tuple(own)))
    return states


def _pretraining_costs(
    item: PrintedItem, runs: Sequence[Path]
) -> list[tuple[str, str]]:
    """(name, median speed, peak memory) of a grid's pretrainings, from their metrics.jsonl."""
    overrides = [
        text for sweep in printed_recipes.sweeps(item.grid) for text in sweep.overrides
    ]
    names = tuple(
        f"{t.removeprefix('name=')} " for t in overrides if t.startswith("name=")
    )
    costs = []
    for folder, recipe in _recipes_below(runs):
        name = str(recipe.get("name"))
        if "batch_size" not in recipe or not name.startswith(names):
            continue
        rows = [row for row in read_metrics(folder) if "images_per_s" in row]
        if rows:
            speed = statistics.median(row["images_per_s"] for row in rows)
            peak = max(row.get("memory_gib", 0.0) for row in rows)
            costs.append((name, f"{speed:9.1f} images/s {peak:7.2f} GiB"))
    return sorted(costs)


def _recipes_below(runs: Sequence[Path]) -> Iterator[tuple[Path, Mapping[str, object]]]:
    """Each run folder with its recipe; a recipe that was torn while its run began is skipped."""
    for run in runs:
        for file in run.rglob(RECIPE_FILE):
            try:
                yield file.parent, config.read_yaml(file)
            except BadInput:
                continue  # `backbench launch` names it
