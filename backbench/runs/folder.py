"""A run's folder: who it belongs to, its metrics, its progress and ETA, and what it prints."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from backbench.errors import BadInput
from backbench.runs import atomic

log = logging.getLogger("backbench")
# Every file that a run's folder may hold, by the name that all of the suite knows it by
RUN_FILE = "run.json"  # whose run it is: verb, identity, command
PROGRESS_FILE = "progress.json"  # how far it is, for whoever watches
METRICS_FILE = "metrics.jsonl"  # one row per logged step
STATE_FILE = "state.pt"  # what it continues from
RECIPE_FILE = "recipe.yaml"
CHECKPOINT_FILE = "backbone.safetensors"  # what a pretraining is for
RESULTS_FILE = "results.jsonl"  # what an evaluation is for
PREDICTIONS = "predictions"  # folder: the predictions behind the results
PICTURES = "pictures"  # folder


def setup_logging(verbosity: int = 0) -> None:
    """-q warnings only, -v debug; plain lines on stderr."""
    level = {-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    log.setLevel(level)


def open_run(out: str | Path, *, verb: str, identity: Mapping[str, Any]) -> Path:
    """Create the run folder, or recognise it as the same run continued.

    `identity` is whatever decides the numbers (recipe, checkpoint digests, data fingerprint), JSON-able. A folder that
    holds a run of another verb or identity is refused, naming what differs. Returns the folder.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out}: is a file; --out needs a folder")
    file = out / RUN_FILE
    now = {"verb": verb, "identity": json.loads(json.dumps(identity))}
    if file.exists():
        try:
            then = json.loads(file.read_text())
            then_identity = dict(then["identity"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise BadInput(f"{file}: damaged; remove {out} or choose another --out") from None
        if then.get("verb") != verb:
            raise BadInput(
                f"{out}: holds a run of '{then.get('verb')}', not '{verb}'; choose another --out"
            )
        differing = sorted(
            k
            for k in {*then_identity, *now["identity"]}
            if then_identity.get(k) != now["identity"].get(k)
        )
        if differing:
            names = ", ".join(
                _differences(differing[0], then_identity, now["identity"]) + differing[1:]
            )
            raise BadInput(
                f"{out}: holds another run's state (differs in {names}); choose another --out"
            )
        return out
    out.mkdir(parents=True, exist_ok=True)
    about = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command_line(),
        "cwd": str(Path.cwd()),
    }
    atomic.write_json(file, {**now, **about})
    return out


def command_line() -> str:
    """What was typed to start this process, with this interpreter's path left out."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        words = (
            ["backbench"]
            if program.parent.name == "backbench"
            else ["python", "-m", program.parent.name]
        )
    else:
        words = ["python", sys.argv[0]] if program.suffix == ".py" else [program.name]
    return shlex.join([*words, *sys.argv[1:]])


def _differences(key: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The first differing key, followed down into nested groups: recipe.optim.lr (0.1 there, 0.2 now)."""
    a, b = then.get(key), now.get(key)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        inner = sorted(k for k in {*a, *b} if (k in a, a.get(k)) != (k in b, b.get(k)))
        return [f"{key}.{name}" for name in _differences(inner[0], a, b)]
    return [f"{key} ({a!s:.40} there, {b!s:.40} now)"]


class Metrics:
    """RUN/metrics.jsonl: one JSON object per logged step. Opening it at a step drops what a lost future had written."""

    def __init__(self, run: Path, *, from_step: int = 0) -> None:
        self.path = Path(run) / METRICS_FILE
        kept = [row for row in read_metrics(run) if row.get("step", -1) < from_step]
        atomic.write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The rows of RUN/metrics.jsonl; a torn last line is left out."""
    path = Path(run) / METRICS_FILE
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


class Progress:
    """Steps done of `total`, with rate and ETA: a live line on a terminal, a line every 10 s elsewhere, and
    RUN/progress.json (at most once a second) for whoever watches from outside.

    `done` at construction is where a continued run starts; the rate counts only what was done since.
    """

    def __init__(
        self, run: str | Path | None, total: int, what: str, *, unit: str = "step", done: int = 0
    ) -> None:
        self.run, self.total, self.what, self.unit = run, total, what, unit
        self.first = self.done = done
        self.start = time.monotonic()
        self._shown = self._written = 0.0
        self._tty = sys.stderr.isatty()

    @property
    def eta(self) -> float:
        """Seconds left, inf while nothing is known."""
        made = self.done - self.first
        left = self.total - self.done
        return (
            left * (time.monotonic() - self.start) / made
            if made
            else (float("inf") if left else 0.0)
        )

    def advance(self, count: int = 1, **info: Any) -> None:
        self.done += count
        now = time.monotonic()
        last = self.done >= self.total
        if last or now - self._shown > (0.2 if self._tty else 10):
            self._shown = now
            self._print(info, last)
        if self.run is not None and (last or now - self._written > 1):
            self._written = now
            eta = self.eta
            state = {
                "what": self.what,
                "done": self.done,
                "total": self.total,
                "unit": self.unit,
                "eta_s": None if eta == float("inf") else round(eta, 1),
                "time": time.time(),
            }
            atomic.write_json(Path(self.run) / PROGRESS_FILE, state)

    def _print(self, info: Mapping[str, Any], last: bool) -> None:
        if log.level > logging.INFO:
            return
        took = time.monotonic() - self.start
        rate = (self.done - self.first) / took if took else 0.0
        end = f"took {seconds(took)}" if last else f"ETA {seconds(self.eta)}"
        extra = "  ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in info.items()
        )
        line = f"{self.what}: {self.done}/{self.total} {self.unit}s  {rate:.3g}/s  {end}  {extra}".rstrip()
        if self._tty:
            sys.stderr.write(f"\r\x1b[K{line[:150]}" + ("\n" if last else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


class ProgressNote(TypedDict):
    """RUN/progress.json."""

    what: str
    done: int
    total: int
    unit: str
    eta_s: float | None  # seconds left at `time`; None while nothing is known
    time: float  # seconds since 1970


def read_progress(run: str | Path) -> ProgressNote | None:
    """What RUN/progress.json says; None where there is none, or none that can be read."""
    try:
        note = json.loads((Path(run) / PROGRESS_FILE).read_text())
        return ProgressNote(
            what=note["what"],
            done=note["done"],
            total=note["total"],
            unit=note["unit"],
            eta_s=note["eta_s"],
            time=note["time"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def seconds(value: float) -> str:
    """75.2 -> 1:15; 0.42 -> 0.4 s."""
    if value == float("inf"):
        return "?"
    if value < 10:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
