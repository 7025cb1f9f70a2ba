"""The reproduction gate: which published numbers checkpoints must reach, and whether they do."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.board.board import Board, Cell, Column, Row, column_of
from backbench.errors import BadInput
from backbench.recipes import fast
from backbench.results import judging_rules, published
from backbench.untrusted import printable, walking
from backbench.weights import header


@dataclass(frozen=True)
class Judged:
    """A measured number beside the published one that its checkpoint must reproduce, in percent."""

    row: Row
    column: Column
    key: str
    published: float
    measured: float
    ci95: tuple[float, float] | None
    tolerance: float
    hardware: str
    others: tuple[str, ...] = ()  # what was measured is not what was printed: another trunk
    way: str = ""  # in what it was not pretrained to the paper's letter (weights/fast.py)

    @property
    def within(self) -> bool:
        return not self.others and abs(self.measured - self.published) <= self.tolerance

    @property
    def verdict(self) -> str:
        """One word."""
        if self.others:
            return "another"
        return "within" if self.within else "outside"

    @property
    def said(self) -> str:
        """The verdict with what must stand beside it: within (fast)."""
        return f"{self.verdict} ({self.way})" if self.way else self.verdict


def expected_keys(board: Board, runs: Iterable[str | Path]) -> dict[str, list[str]]:
    """Checkpoint digest -> keys of the published rows it must reproduce: a recipe's `expected`,
    `import --published`. Digests without a key are left out.

    Looked for in the results' provenance, in checkpoint files below `runs` and in those that the
    commands name. What these say of how they were pretrained, the board is told (Board.ways).
    """
    # 1. What the results themselves say of their checkpoint, and which checkpoints there are.
    keys: dict[str, set[str]] = {}
    for cell in board.cells.values():
        for result, _ in cell.parts:
            keys.setdefault(result.checkpoint, set()).update(published.keys_in(result.provenance))
    # 2. What the checkpoint files say: only headers are read, and others' checkpoints left alone.
    for file in _checkpoints_below(runs) | _checkpoints_named(board):
        about = header.about(file)
        digest, provenance = about.get("digest"), about.get("provenance")
        if isinstance(digest, str) and digest in keys and isinstance(provenance, Mapping):
            keys[digest].update(published.keys_in(provenance))
            if way := fast.word(fast.of_trunk(provenance)):
                board.ways[digest] = way
    return {digest: sorted(found) for digest, found in keys.items() if found}


def _checkpoints_below(runs: Iterable[str | Path]) -> set[Path]:
    files: set[Path] = set()
    for run in map(Path, runs):
        if run.is_dir():
            files.update(f for f in walking.files(run) if f.suffix == ".safetensors")
    return files


def _checkpoints_named(board: Board) -> set[Path]:
    """The checkpoint files among the words of the commands that made the board's numbers."""
    commands: set[tuple[str, str]] = set()  # most numbers share theirs with others
    for cell in board.cells.values():
        for result, _ in cell.parts:
            command = result.origin.get("command") or ""
            if isinstance(command, list):
                command = shlex.join(command)
            commands.add((result.origin.get("cwd") or ".", command))
    files: set[Path] = set()
    for cwd, command in commands:
        for word in printable.of_command(command):
            if word.endswith(".safetensors"):
                files.add(Path(cwd) / word)
    return files


def _printed(
    board: Board, expected: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Row, str, Sequence[published.Published] | BadInput]]:
    """Each row with each key that it must reach, and the key's printed numbers; or why there are
    none: a key mistyped in a recipe must not end the board that its run is one row of."""
    rows = {row.checkpoint: row for row in board.measured_rows}
    for digest, keys in expected.items():
        for key in keys:
            try:
                yield rows[digest], key, published.lookup(key)
            except BadInput as error:
                yield rows[digest], key, error


def judge(board: Board, expected: Mapping[str, Sequence[str]]) -> list[Judged]:
    """Every measured number whose checkpoint has a published one by the same protocol (and engine).

    Keys that no published row has are named among the board's problems.
    """
    judged = []
    for row, _, numbers in _printed(board, expected):
        if isinstance(numbers, BadInput):
            board.problems.append(f"{row.name}: {numbers}")
            continue
        verdicts = [_judge(board, row, number) for number in numbers]
        judged += [verdict for verdict in verdicts if verdict is not None]
    return judged


def _judge(board: Board, row: Row, number: published.Published) -> Judged | None:
    """One printed number against the row's; None where it was not measured or is not judged."""
    column = column_of(number)
    cell = board.cell(row, column)
    tolerance = judging_rules.tolerance(number)
    if cell is None or cell.value is None or tolerance is None:
        return None
    return Judged(
        row,
        column,
        number.key,
        judging_rules.as_measured(number).value,
        cell.value,
        cell.ci95,
        tolerance,
        _hardware(cell),
        _others(row, cell, number),
        board.ways.get(row.checkpoint, ""),
    )


def _others(row: Row, cell: Cell, number: published.Published) -> tuple[str, ...]:
    """In what the measured trunk is not the printed one, in words."""
    # As the measurements themselves say it; an average has none, and goes by its row.
    said = {(r.arch, r.epochs) for r, _ in cell.parts} or {(row.arch, row.epochs)}
    found = []
    for arch, epochs in sorted(said, key=str):
        called = published.slug(published.arch_in_tables(arch))
        if number.arch and called != published.slug(number.arch):
            found.append(f"arch {arch} instead of {number.arch}")
        if number.epochs is not None and epochs != number.epochs:
            found.append(f"epochs {epochs} instead of {number.epochs}")
    return tuple(found)


def not_judged(board: Board, expected: Mapping[str, Sequence[str]]) -> list[str]:
    """What a check must not pass over in silence, a line each: keys that nothing has, numbers that
    are undefined, and those that were measured in another way than their protocol's name says."""
    lines = []
    for row, _, numbers in _printed(board, expected):
        if isinstance(numbers, BadInput):
            lines.append(f"{row.name}: {numbers}")
            continue
        for number in numbers:
            if judging_rules.tolerance(number) is not None:
                lines += _unlike(board, row, number)
    return lines


def not_measured(board: Board, expected: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each printed row that a checkpoint must reach and of which numbers are missing."""
    lines = []
    for row, key, numbers in _printed(board, expected):
        if isinstance(numbers, BadInput):
            continue  # `not_judged` says it
        judged = [n for n in numbers if judging_rules.tolerance(n) is not None]
        missing = [n for n in judged if board.cell(row, column_of(n)) is None]
        if missing:
            first = column_of(missing[0]).name
            lines.append(
                f"{row.name}: {len(missing)} of the {len(judged)} numbers of {key} have no"
                f" measurement here, first {first}"
            )
    return lines


def _unlike(board: Board, row: Row, number: published.Published) -> list[str]:
    """The row's cells that would be this number's, were they defined and measured alike."""
    wanted = column_of(number)
    lines = []
    for column in board.columns:
        cell = board.cell(row, column)
        if cell is None:
            continue
        if column == wanted:
            undefined = sum(result.value is None for result, _ in cell.parts)
            if cell.value is None:
                lines.append(f"{row.name}: {column.name} is undefined, {number.key} is not")
            elif undefined:
                seeds = f"{undefined} of {len(cell.parts)} seeds"
                lines.append(f"{row.name}: {column.name} is undefined for {seeds}")
        elif _would_be(column) == _would_be(wanted):
            lines.append(f"{row.name}: {number.key} is of {wanted.name}, not of {column.name}")
    return lines


def _would_be(column: Column) -> tuple[object, ...]:
    """A column without the marks of another recipe, other lists or another split."""
    protocol = column.protocol.partition("~")[0]
    return (column.task, column.dataset, column.metric, protocol, column.engine)


def _hardware(cell: Cell) -> str:
    """What measured the number, a dash for what was computed from others."""
    names = {str(result.origin.get("hardware", "unknown")) for result, _ in cell.parts}
    return ", ".join(sorted(names)) or "-"
