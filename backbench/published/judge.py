"""The reproduction gate: published numbers that checkpoints must reach, and the verdicts."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backbench.board.board import PUBLISHED, Board, Cell, Column, Row, in_order
from backbench.errors import BadInput
from backbench.published import judging_rules, printed_recipes, published
from backbench.published.judging_rules import column_of
from backbench.published.published import Published
from backbench.recipes import config, fast
from backbench.records import protocol_fingerprints
from backbench.stats import confidence
from backbench.untrusted import printable, walking
from backbench.weights import header


def add_published(board: Board) -> None:
    """Add the papers' rows below the measured ones, in the same column where protocols agree."""
    columns = set(board.columns)
    rows: dict[str, Row] = {}
    for number in published.rows():
        if judging_rules.reason(number) in judging_rules.NO_SCORES:
            continue
        column = column_of(number)
        columns.add(column)
        name = f"{number.model} ({number.paper} Table {number.table})"
        row = Row(number.key, name, number.model, number.arch, number.epochs, PUBLISHED)
        rows.setdefault(number.key, row)
        value = judging_rules.as_measured(number).value
        board.cells[number.key, column] = Cell(value, note=number.note)
    board.rows.extend(rows.values())
    board.columns = in_order(columns)


@dataclass(frozen=True)
class Judged:
    """A measured number in percent and the published one to reproduce. Seeds of one recipe are one
    number, their mean: `row` is the first of `rows`, with their count in its name."""

    row: Row
    column: Column
    key: str
    published: float
    measured: float
    ci95: tuple[float, float] | None
    tolerance: float
    hardware: str
    other_trunk: tuple[
        str, ...
    ] = ()  # how the measured trunk differs from the printed one
    way: str = (
        ""  # how its pretraining differs from the paper's letter (recipes/fast.py)
    )
    changed: tuple[
        str, ...
    ] = ()  # keys of the recipe that are not those of the number's
    rows: tuple[Row, ...] = ()
    by_recipe: bool = (
        True  # False: the checkpoint has no recipe, so its word is all there is
    )

    @property
    def verdict(self) -> str:
        """One word: within, outside, another (not the printed trunk), changed (not its recipe)."""
        if self.other_trunk:
            return "another"
        if self.changed:
            return "changed"
        return (
            "within"
            if abs(self.measured - self.published) <= self.tolerance
            else "outside"
        )

    @property
    def within(self) -> bool:
        return self.verdict == "within"

    @property
    def verdict_and_way(self) -> str:
        """The verdict with changed keys (changed: beta, lr) and way of pretraining (fast)."""
        said = self.verdict
        if said == "changed":
            said += f": {', '.join(self.changed)}"
        return f"{said} ({self.way})" if self.way else said

    @property
    def notes(self) -> tuple[str, ...]:
        """How the trunk differs from the printed one; that nobody knows how it was trained."""
        unknown = "its pretraining recipe is not known"
        return self.other_trunk if self.by_recipe else (*self.other_trunk, unknown)

    def on_page(self) -> dict[str, object]:
        """The fields that page_sections.js reads."""
        low, high = (
            (None, None) if self.ci95 is None else (round(end, 4) for end in self.ci95)
        )
        about = {"name": self.row.name, "column": self.column.name, "key": self.key}
        numbers = {
            "measured": round(self.measured, 4),
            "published": self.published,
            "low": low,
        }
        said = {
            "verdict": self.verdict,
            "said": self.verdict_and_way,
            "others": self.notes,
        }
        numbers |= {"high": high, "tolerance": self.tolerance}
        return {**about, **numbers, **said, "hardware": self.hardware}


# ---- which rows a checkpoint must reach


def expected_keys(board: Board, runs: Iterable[str | Path]) -> dict[str, list[str]]:
    """Checkpoint digest -> keys of the published rows it must reach, if any. Keys are in
    provenance, in checkpoint files below `runs`, and in files that commands name. The files also
    say how they were pretrained, which goes to `Board.ways` and `Board.recipes`."""
    # 1. The results themselves: which checkpoints there are, and their keys.
    keys: dict[str, set[str]] = {}
    commands: set[tuple[str, str]] = set()  # most numbers share theirs with others
    for cell in board.cells.values():
        for result, _ in cell.parts:
            own = published.expected_keys_in(result.provenance)
            keys.setdefault(result.checkpoint, set()).update(own)
            command = result.origin.get("command") or ""
            if isinstance(command, list):
                command = shlex.join(command)
            commands.add((result.origin.get("cwd") or ".", command))
    # 2. The checkpoint files: only headers are read, and checkpoints without results are skipped.
    files: set[Path] = set()
    for cwd, command in commands:
        for word in printable.of_command(command):
            if word.endswith(".safetensors"):
                files.add(Path(cwd) / word)
    for run in map(Path, runs):
        if run.is_dir():
            files.update(f for f in walking.files(run) if f.suffix == ".safetensors")
    for file in files:
        about = header.about(file)
        digest, provenance = about.get("digest"), about.get("provenance")
        if (
            isinstance(digest, str)
            and digest in keys
            and isinstance(provenance, Mapping)
        ):
            keys[digest].update(published.expected_keys_in(provenance))
            if way := fast.word(fast.of_trunk(provenance)):
                board.ways[digest] = way
            recipe = provenance.get("recipe")
            if isinstance(recipe, Mapping):
                board.recipes.setdefault(digest, config.flat(recipe))
    return {digest: sorted(own) for digest, own in keys.items() if own}


# ---- verdicts


def _printed(
    board: Board, expected: Mapping[str, Sequence[str]], unknown: list[str]
) -> Iterator[tuple[Row, Published]]:
    """Yield each row with each number it must reach. Unknown keys go to `unknown`: a typing error
    in a recipe must not end the whole board."""
    rows = {row.checkpoint: row for row in board.measured_rows}
    for digest, keys in expected.items():
        for key in keys:
            try:
                numbers = published.lookup(key)
            except BadInput as error:
                unknown.append(f"{rows[digest].name}: {error}")
                continue
            yield from ((rows[digest], number) for number in numbers)


def judge(board: Board, expected: Mapping[str, Sequence[str]]) -> list[Judged]:
    """A verdict for each number with a published one by its protocol; one for all seeds."""
    judged: dict[tuple[object, ...], tuple[Published, list[Judged]]] = {}
    for row, number in _printed(board, expected, board.problems):
        verdict = _judge(board, row, number)
        if verdict is not None:
            recipe = board.recipes.get(row.checkpoint)
            # Without a recipe nobody knows that two checkpoints are seeds of one training
            alike = recipe and protocol_fingerprints.digest(
                printed_recipes.settings(recipe)
            )
            what = (number.key, verdict.column, alike or row.checkpoint, verdict.way)
            _, seeds = judged.setdefault((*what, verdict.other_trunk), (number, []))
            seeds.append(verdict)
    return [_mean(number, seeds) for number, seeds in judged.values()]


def _mean(number: Published, seeds: Sequence[Judged]) -> Judged:
    """One verdict on the mean of checkpoints that were pretrained by one recipe."""
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


def _judge(board: Board, row: Row, number: Published) -> Judged | None:
    """One printed number against the row's; None where it was not measured or is not judged."""
    column = column_of(number)
    cell = board.cell(row, column)
    tolerance = judging_rules.tolerance(number)
    if cell is None or cell.value is None or tolerance is None:
        return None
    recipe = board.recipes.get(row.checkpoint)
    hardware = {
        str(result.origin.get("hardware", "unknown")) for result, _ in cell.parts
    }
    of = judging_rules.as_measured(number).value, cell.value, cell.ci95, tolerance
    made_on = (
        ", ".join(sorted(hardware)) or "-"
    )  # a mean of other cells has no hardware
    return Judged(
        row,
        column,
        number.key,
        *of,
        made_on,
        other_trunk=_trunk_differences(row, cell, number),
        way=board.ways.get(row.checkpoint, ""),
        changed=printed_recipes.changes(recipe, number.key) if recipe else (),
        rows=(row,),
        by_recipe=recipe is not None,
    )


def _trunk_differences(row: Row, cell: Cell, number: Published) -> tuple[str, ...]:
    """How the measured trunk differs from the printed one, in words."""
    # The measurements themselves say it; an average has none, and goes by its row.
    measured = {(r.arch, r.epochs) for r, _ in cell.parts} or {(row.arch, row.epochs)}
    differences = []
    for arch, epochs in sorted(measured, key=str):
        in_tables = published.slug(published.arch_in_tables(arch))
        if number.arch and in_tables != published.slug(number.arch):
            differences.append(f"arch {arch} instead of {number.arch}")
        if number.epochs is not None and epochs != number.epochs:
            differences.append(f"epochs {epochs} instead of {number.epochs}")
    return tuple(differences)


def not_judged(board: Board, expected: Mapping[str, Sequence[str]]) -> list[str]:
    """Return why `--check` fails beside the verdicts: unknown keys, undefined or unlike numbers."""
    lines: list[str] = []
    for row, number in _printed(board, expected, lines):
        if judging_rules.tolerance(number) is not None:
            lines += _undefined_or_unlike(board, row, number)
    return lines


def _undefined_or_unlike(board: Board, row: Row, number: Published) -> Iterator[str]:
    """The row's cells that match this number except for recipe, split, lists or a value."""
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
