"""RUN/metrics.jsonl: one JSON object for each logged step."""

import json
import math
from pathlib import Path

from backbench.runs import atomic, failures
from backbench.runs.folder import METRICS_FILE
from backbench.untrusted import jsons, opening


class Metrics:
    """Writes RUN/metrics.jsonl, without old rows from `from_step` on, which are made again."""

    def __init__(self, run: Path, *, from_step: int = 0) -> None:
        self.path = Path(run) / METRICS_FILE
        kept = [row for row in read_metrics(run) if row.get("step", -1) < from_step]
        atomic.write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, **values: float) -> None:
        with failures.naming(self.path), self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """The rows of RUN/metrics.jsonl; lines that are no rows, as a torn last one, are left out."""
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
        step = row.get("step", 0) if isinstance(row, dict) else None
        if isinstance(step, int | float) and math.isfinite(step):
            rows.append(row)
    return rows
