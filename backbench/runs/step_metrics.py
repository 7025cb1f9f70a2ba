"""Writes and reads RUN/metrics.jsonl, which has one JSON object for each logged step."""

import json
import math
from pathlib import Path

from backbench.runs import atomic, failures
from backbench.runs.folder import METRICS_FILE
from backbench.untrusted import jsons, opening


class Metrics:
    """Appends to RUN/metrics.jsonl. Old rows from `from_step` on go first, as their steps are made
    again."""

    def __init__(self, run: Path, *, from_step: int = 0) -> None:
        self.path = Path(run) / METRICS_FILE
        kept = [row for row in read_metrics(run) if row.get("step", -1) < from_step]
        atomic.write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, **values: float) -> None:
        with failures.naming(self.path), self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """Read the rows of RUN/metrics.jsonl. Lines that are no rows (a torn last one) are left out."""
    rows: list[dict[str, float]] = []
    try:
        text = opening.read_bytes(Path(run) / METRICS_FILE, most=opening.GIGABYTE)
    except OSError:
        return rows
    for line in text.splitlines():
        try:
            row = jsons.decode(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        step = row.get("step", 0)
        if isinstance(step, int | float) and math.isfinite(step):
            rows.append(row)
    return rows
