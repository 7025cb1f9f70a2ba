"""The one judge: it puts a verdict on each measured number that has a printed one beside it.

Two commands ask it, and both get the words and the comparison below:

    judge        the papers' rows that a checkpoint must reach: `backbench leaderboard --check`
                 and `backbench paper`
    judge_list   every printed number of a reproduction list, also those on the files' own pages
                 and the printed counts of right images: `backbench reproduce`
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backbench.board.board import Board, Cell, Column, Row, collect
from backbench.errors import BadInput
from backbench.published import grid_recipes, judging_rules, published, timm_scores
from backbench.published.judging_rules import column_of
from backbench.published.published import Published
from backbench.published.reproduction_lists import (
    Covered,
    PrintedBeside,
    PublicFile,
    ReproductionList,
    Wanted,
    judged_rows,
)
from backbench.published.timm_scores import PrintedScore
from backbench.records import protocol_fingerprints
from backbench.records.store import Result
from backbench.stats import confidence

# Verdicts
WITHIN, OUTSIDE = "within", "outside"  # the tolerance around the printed number
ANOTHER = "another"  # the trunk is not the printed one: another architecture or length
CHANGED = "changed"  # it was pretrained by another recipe than the printed one
# Reasons for having no verdict
UNLIKE = "unlike"  # measured in another way than the printed number
MISSING = "not measured"
NO_FILE = "no file"


def compare(measured: float, printed: float, tolerance: tuple[float, float]) -> str:
    """Return WITHIN or OUTSIDE. `tolerance` says how far `measured` may lie below `printed`, and
    how far above it, in the unit of both."""
    below, above = tolerance
    return WITHIN if -below <= measured - printed <= above else OUTSIDE


# ---- the papers' rows


@dataclass(frozen=True)
class Judged:
    """A measured number in percent, and the published one that it must reproduce.

    Several pretrainings by one recipe, each with its own seed, are judged once, by their mean:
    `rows` has all of them, and `row` is the first, with their count in its name.
    """

    row: Row
    column: Column
    key: str
    published: float
    measured: float
    ci95: tuple[float, float] | None
    tolerance: float
    hardware: str
    # How the measured trunk differs from the printed one, in words
    other_trunk: tuple[str, ...] = ()
    # How its pretraining differs from the paper's letter (recipes/fast.py)
    way: str = ""
    # The keys in which its recipe differs from that of the printed number
    changed: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    # False: the checkpoint holds no recipe, so nobody can check how it was trained
    by_recipe: bool = True

    @property
    def verdict(self) -> str:
        """ANOTHER, CHANGED, WITHIN or OUTSIDE: a trunk that is not the printed one is not compared."""
        if self.other_trunk:
            return ANOTHER
        if self.changed:
            return CHANGED
        allowed = (self.tolerance, self.tolerance)
        return compare(self.measured, self.published, allowed)

    @property
    def within(self) -> bool:
        return self.verdict == WITHIN

    @property
    def verdict_and_way(self) -> str:
        """The verdict with the changed keys and the way of pretraining: `changed: beta, lr (fast)`."""
        said = self.verdict
        if said == CHANGED:
            said += f": {', '.join(self.changed)}"
        return f"{said} ({self.way})" if self.way else said

    @property
    def notes(self) -> tuple[str, ...]:
        """How the trunk differs from the printed one, and whether its recipe is unknown."""
        if self.by_recipe:
            return self.other_trunk
        return (*self.other_trunk, "its pretraining recipe is not known")

    def on_page(self) -> dict[str, object]:
        """Return the fields that page_sections.js reads."""
        low, high = None, None
        if self.ci95 is not None:
            low, high = (round(end, 4) for end in self.ci95)
        return {
            "name": self.row.name,
            "column": self.column.name,
            "key": self.key,
            "measured": round(self.measured, 4),
            "published": self.published,
            "low": low,
            "high": high,
            "tolerance": self.tolerance,
            "verdict": self.verdict,
            "said": self.verdict_and_way,
            "others": self.notes,
            "hardware": self.hardware,
        }


def judge(board: Board, expected: Mapping[str, Sequence[str]]) -> list[Judged]:
    """Judge each measured number whose checkpoint must reach a published one by the same protocol.

    `expected` has the keys of the published rows by checkpoint digest (expected_rows.py). Keys that
    nobody published are added to `board.problems`.
    """
    # 1. A verdict for each checkpoint. Those that were pretrained alike are kept together: the same
    #    number, column, recipe, way and trunk.
    pretrainings: dict[tuple[object, ...], list[Judged]] = {}
    number_of: dict[tuple[object, ...], Published] = {}
    for row, number in _expected_numbers(board, expected, board.problems):
        verdict = _judge(board, row, number)
        if verdict is None:
            continue
        recipe = board.recipes.get(row.checkpoint)
        if recipe:
            trained_by = protocol_fingerprints.digest(grid_recipes.settings(recipe))
        else:
            # Without recipes nobody knows that two checkpoints are seeds of one training.
            trained_by = row.checkpoint
        alike = (
            number.key,
            verdict.column,
            trained_by,
            verdict.way,
            verdict.other_trunk,
        )
        pretrainings.setdefault(alike, []).append(verdict)
        number_of.setdefault(alike, number)
    # 2. One verdict on the mean of each.
    return [_mean(number_of[alike], seeds) for alike, seeds in pretrainings.items()]


def _expected_numbers(
    board: Board, expected: Mapping[str, Sequence[str]], unknown: list[str]
) -> Iterator[tuple[Row, Published]]:
    """Yield each row with each number that it must reach.

    Keys that nobody published go to `unknown`: a typing error in one recipe must not stop the
    whole board.
    """
    rows = {row.checkpoint: row for row in board.measured_rows}
    for digest, keys in expected.items():
        for key in keys:
            try:
                numbers = published.lookup(key)
            except BadInput as error:
                unknown.append(f"{rows[digest].name}: {error}")
                continue
            for number in numbers:
                yield rows[digest], number


def _judge(board: Board, row: Row, number: Published) -> Judged | None:
    """Judge a row by one printed number; None if it was not measured or is never judged."""
    column = column_of(number)
    cell = board.cell(row, column)
    tolerance = judging_rules.tolerance(number)
    if cell is None or cell.value is None or tolerance is None:
        return None
    hardware = set()
    for result, _ in cell.parts:
        hardware.add(str(result.origin.get("hardware", "unknown")))
    recipe = board.recipes.get(row.checkpoint)
    return Judged(
        row=row,
        column=column,
        key=number.key,
        published=judging_rules.as_measured(number).value,
        measured=cell.value,
        ci95=cell.ci95,
        tolerance=tolerance,
        # A cell that averages other cells has no parts, and so no hardware.
        hardware=", ".join(sorted(hardware)) or "-",
        other_trunk=_trunk_differences(row, cell, number),
        way=board.ways.get(row.checkpoint, ""),
        changed=grid_recipes.changes(recipe, number.key) if recipe else (),
        rows=(row,),
        by_recipe=recipe is not None,
    )


def _trunk_differences(row: Row, cell: Cell, number: Published) -> tuple[str, ...]:
    """Say how the measured trunk differs from the printed one in architecture and epochs."""
    measured = {(result.arch, result.epochs) for result, _ in cell.parts}
    if not measured:
        # A cell that averages other cells has no results of its own: its row says it.
        measured = {(row.arch, row.epochs)}
    differences = []
    for arch, epochs in sorted(measured, key=str):
        in_tables = published.slug(published.arch_in_tables(arch))
        if number.arch and in_tables != published.slug(number.arch):
            differences.append(f"arch {arch} instead of {number.arch}")
        if number.epochs is not None and epochs != number.epochs:
            differences.append(f"epochs {epochs} instead of {number.epochs}")
    return tuple(differences)


def _mean(number: Published, seeds: Sequence[Judged]) -> Judged:
    """Return one verdict on the mean of checkpoints that were pretrained by one recipe."""
    first = seeds[0]
    if len(seeds) == 1:
        return first
    values = [one.measured for one in seeds]
    return replace(
        first,
        row=replace(first.row, name=f"{first.row.name}, {len(seeds)} pretrainings"),
        rows=tuple(one.row for one in seeds),
        measured=sum(values) / len(values),
        ci95=confidence.of_seeds(values),
        tolerance=judging_rules.tolerance(number, len(seeds)) or 0.0,
        hardware=", ".join(dict.fromkeys(one.hardware for one in seeds)),
    )


def not_judged(board: Board, expected: Mapping[str, Sequence[str]]) -> list[str]:
    """Say why `--check` fails beside the verdicts: unknown keys, undefined or unlike numbers."""
    lines: list[str] = []
    for row, number in _expected_numbers(board, expected, lines):
        if judging_rules.tolerance(number) is not None:
            lines += _undefined_or_unlike(board, row, number)
    return lines


def _undefined_or_unlike(board: Board, row: Row, number: Published) -> Iterator[str]:
    """Name the row's cells that could answer for this number, but for a value, for the images that
    they were measured on, or for a changed protocol."""
    wanted = column_of(number)
    for column in board.columns:
        cell = board.cell(row, column)
        if cell is None:
            continue
        undefined = len(cell.parts) - len(cell.values)
        if column != wanted:
            if column.without_marks == wanted.without_marks:
                yield f"{row.name}: {number.key} is of {wanted.name}, not of {column.name}"
        elif cell.value is None:
            yield f"{row.name}: {column.name} is undefined, {number.key} is not"
        elif undefined:
            seeds = f"{undefined} of {len(cell.parts)} seeds"
            yield f"{row.name}: {column.name} is undefined for {seeds}"


# ---- the numbers of a reproduction list


@dataclass(kw_only=True)
class ListVerdict:
    """One printed number of a list with its verdict, and the reason for it. Values are in percent.

    Bundles and RUNS/reproduce/<list>.json hold these fields under these names.
    """

    checkpoint: str = ""  # its name in the list
    column: str
    printed: float
    source: str
    verdict: str = ""
    measured: float | None = None
    ci95: tuple[float, float] | None = None
    # Points below the printed number, and above it
    tolerance: tuple[float, float] | None = None
    why: str = ""


def judge_list(
    listed: ReproductionList,
    covered: Covered,
    digests: Mapping[str, str],
    runs: Sequence[Path],
) -> list[ListVerdict]:
    """Judge every printed number that the list measures for the checkpoints of `covered`.

    `digests` are those of the checkpoints that are on this machine, by their name in the list.
    """
    board = collect(runs)
    verdicts: list[ListVerdict] = []
    for name, wanted in covered.items():
        about = listed.files[name]
        digest = digests.get(name, "")
        of_file = [
            *_on_papers_rows(board, about, wanted, digest),
            *_on_its_page(board, about, wanted, digest),
        ]
        for model in (about.timm, about.testbed):
            if model is not None:
                for _, dataset in sorted(wanted):
                    of_file += _on_counts(board, model, dataset, digest)
        for one in of_file:
            one.checkpoint = name
            if not one.verdict:
                one.verdict = MISSING if digest else NO_FILE
        verdicts += of_file
    return verdicts


def _on_papers_rows(
    board: Board, about: PublicFile, wanted: Wanted, digest: str
) -> Iterator[ListVerdict]:
    """Judge the numbers of the papers' tables by `judge`, as the leaderboard does."""
    judged: dict[tuple[str, Column], Judged] = {}
    if any(row.checkpoint == digest for row in board.measured_rows):
        for one in judge(board, {digest: about.rows}):
            judged[one.key, one.column] = one
    for number in judged_rows(about):
        if (number.task, number.dataset) not in wanted:
            continue
        column = column_of(number)
        points = judging_rules.tolerance(number) or 0.0
        found = ListVerdict(
            column=column.name,
            printed=judging_rules.as_measured(number).value,
            source=number.key,
            tolerance=(points, points),
        )
        by_row = judged.get((number.key, column))
        if by_row is None:
            _add_measured_otherwise(board, found, column, digest)
        else:
            found.verdict = by_row.verdict
            found.measured = by_row.measured
            found.ci95 = by_row.ci95
            found.why = "; ".join((*by_row.other_trunk, *by_row.changed))
        yield found


def _on_its_page(
    board: Board, about: PublicFile, wanted: Wanted, digest: str
) -> Iterator[ListVerdict]:
    """Judge the numbers that are printed on the file's own page."""
    for number in about.beside:
        if (number.task, number.dataset) in wanted:
            yield _beside(board, number, digest)


def _beside(board: Board, number: PrintedBeside, digest: str) -> ListVerdict:
    found = ListVerdict(
        column=number.column.name,
        printed=number.value,
        source=number.source,
        tolerance=number.allowed,
    )
    cell = board.cells.get((digest, number.column))
    if cell is None or cell.value is None:
        _add_measured_otherwise(board, found, number.column, digest)
        return found
    found.measured = cell.value
    found.ci95 = cell.ci95
    if number.allowed is None:
        found.verdict = UNLIKE
        found.why = number.unlike or "no tolerance"
    else:
        found.verdict = compare(cell.value, number.value, number.allowed)
    return found


def _add_measured_otherwise(
    board: Board, found: ListVerdict, column: Column, digest: str
) -> None:
    """Fill in the first number that was measured on other images or by a changed protocol."""
    for (checkpoint, other), cell in board.cells.items():
        if checkpoint == digest and other.without_marks == column.without_marks:
            found.verdict = UNLIKE
            if cell.value is None:
                found.why = "undefined"
            else:
                found.measured = cell.value
                found.ci95 = cell.ci95
                found.why = f"measured as {other.name}"
            return


# ---- the printed counts of right images


def _on_counts(
    board: Board, model: str, dataset: str, digest: str
) -> Iterator[ListVerdict]:
    """Judge the printed counts of one model on one set: there is one for each image size."""
    for score in timm_scores.of_model(model, dataset):
        points = score.printed.tolerance
        found = ListVerdict(
            column=f"ood/{dataset}/top1@own-{score.printed.rule}, {score.size} pixels",
            printed=score.top1,
            source=f"{score.source}, {score.right:,} of {score.printed.images:,} right",
            tolerance=(points, points),
        )
        result = _measured_at(board, score, digest)
        if result is not None:
            facts: Mapping[str, Any] = result.provenance
            found.measured = result.value
            found.ci95 = result.ci95
            found.verdict, found.why = judge_count(
                score,
                right=facts["right"]["top1"],
                images=facts["images"]["test"],
                crop_pct=facts["own_geometry"]["crop_pct"],
                interpolation=facts["own_geometry"]["interpolation"],
            )
        yield found


def _measured_at(board: Board, score: PrintedScore, digest: str) -> Result | None:
    """Return the checkpoint's result by its own classifier, at the printed size and by the rule."""
    for (checkpoint, column), cell in board.cells.items():
        if checkpoint != digest or (column.task, column.metric) != ("ood", "top1"):
            continue
        result = cell.parts[0].result
        facts: Mapping[str, Any] = result.provenance
        if "own_geometry" not in facts or facts["recipe"]["rule"] != score.printed.rule:
            continue
        size = facts["own_geometry"]["input_size"][-1]
        if (result.dataset, size) == (score.dataset, score.size):
            return result
    return None


def judge_count(
    score: PrintedScore, *, right: int, images: int, crop_pct: float, interpolation: str
) -> tuple[str, str]:
    """Return the verdict on a measured count of right images, and the reason if it is UNLIKE."""
    if score.unlike:
        return UNLIKE, score.unlike
    # Interpolation alone moves ImageNet-A by up to 0.49 points and V2 by up to 0.94, so another one
    # makes another measurement. timm's csv files cut crop_pct to three decimals.
    if interpolation != score.interpolation or abs(crop_pct - score.crop_pct) > 0.001:
        return UNLIKE, (
            f"{interpolation} at {crop_pct:g}, printed for {score.interpolation}"
            f" at {score.crop_pct:g}"
        )
    if images != score.printed.images:
        return UNLIKE, f"{images:,} images, printed of {score.printed.images:,}"
    allowed = score.printed.tolerance * images / 100  # from points to images
    return compare(right, score.right, (allowed, allowed)), ""
