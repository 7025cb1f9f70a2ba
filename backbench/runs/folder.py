"""A run's folder: who it belongs to, its metrics, its progress and ETA, and what it prints."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypedDict

from backbench.errors import BadInput
from backbench.runs import atomic, failures, lock
from backbench.untrusted import jsons, opening, printable

log = logging.getLogger("backbench")
# Every file that a run's folder may hold, by the name that all of the suite knows it by
RUN_FILE = "run.json"  # whose run it is: verb, identity, command
PROGRESS_FILE = "progress.json"  # how far it is, for whoever watches
METRICS_FILE = "metrics.jsonl"  # one row per logged step
STATE_FILE = "state.pt"  # what it continues from
RECIPE_FILE = "recipe.yaml"
CHECKPOINT_FILE = "backbone.safetensors"  # what a pretraining is for
RESULTS_FILE = "results.jsonl"  # what an evaluation is for
OWED_FILE = "owed.json"  # how many rows of it the run must deliver
PREDICTIONS = "predictions"  # folder: the predictions behind the results
PICTURES = "pictures"  # folder
STATES = "state"  # folder: what evaluations continue from
# Folders in a run that files are written to, beside its own
PARTS = (PREDICTIONS, PICTURES, STATES, "manifests", "per_class", "confusion")

# A terminal shows progress live; a log gets a line at a time; a file is for whoever polls it
TERMINAL_SECONDS, LOG_SECONDS, FILE_SECONDS = 0.2, 10.0, 1.0
QUIET_SECONDS = 3.0  # of looking at data before it is worth a line


class _Terminal:
    """Whether a live line stands on the terminal, without an end yet."""

    live = False


def end_live_line() -> None:
    """What is said next stands on a line of its own."""
    if _Terminal.live:
        _Terminal.live = False
        sys.stderr.write("\n")


class _OwnLines(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        end_live_line()
        super().emit(record)


def setup_logging(verbosity: int = 0) -> None:
    """-q warnings only, -v debug; plain lines on stderr."""
    level = {-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG)
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[_OwnLines(sys.stderr)]
    )
    log.setLevel(level)


@contextlib.contextmanager
def open_run(
    out: str | Path,
    *,
    verb: str,
    identity: Mapping[str, object],
    dropped: Collection[str] = (),
    added: Collection[str] = (),
) -> Iterator[Path]:
    """`with open_run(...) as run`: the run folder, made or recognised as the same run continued,
    and nobody else at work in it.

    `identity` is whatever decides the numbers (recipe, checkpoint digests, data fingerprint),
    JSON-able. A folder that holds a run of another verb or identity is refused, naming what
    differs; one where another process is at work, naming that. `dropped` are keys that an older
    folder's identity may have and this one's has not; `added` those that it may lack.
    """
    out = Path(out)
    keys = {"dropped": dropped, "added": added}
    known = recognise(out, verb=verb, identity=identity, **keys)
    if not known:
        out.mkdir(parents=True, exist_ok=True)
    with lock.held(out):
        # What writers killed in the middle of a file have left; ours alone is the folder
        atomic.remove_leftovers(out, *(out / part for part in PARTS))
        # Still: there may have been two
        if not recognise(out, verb=verb, identity=identity, **keys):
            about = {
                "verb": verb,
                "identity": _plain(identity),
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "command": command_line(),
                "cwd": str(Path.cwd()),
            }
            atomic.write_json(out / RUN_FILE, about)
        yield out


def recognise(
    out: Path,
    *,
    verb: str,
    identity: Mapping[str, object],
    dropped: Collection[str] = (),
    added: Collection[str] = (),
) -> bool:
    """Whether `out` holds this very run; BadInput where it holds another, or is no folder."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out}: is a file; --out needs a folder")
    file = out / RUN_FILE
    if not file.exists():
        return False
    _refuse_another_run(file, verb, _plain(identity), dropped, added)
    return True


def _plain(identity: Mapping[str, object]) -> dict[str, object]:
    """Through JSON and back, so that tuples and numbers compare as they will when they are read."""
    return json.loads(json.dumps(identity))


def _refuse_another_run(
    file: Path,
    verb: str,
    identity: Mapping[str, object],
    dropped: Collection[str],
    added: Collection[str],
) -> None:
    """BadInput unless RUN_FILE `file` tells of this verb with this identity."""
    out = file.parent
    try:
        then = jsons.read(file)
        before = dict(then["identity"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{file}: damaged; remove {out} or choose another --out") from None
    if then.get("verb") != verb:
        raise BadInput(
            f"{out}: holds a run of '{then.get('verb')}', not '{verb}'; choose another --out"
        )
    for key in dropped:
        if key not in identity:
            before.pop(key, None)
    identity = {k: v for k, v in identity.items() if k not in added or k in before}
    differing = sorted(k for k in {*before, *identity} if before.get(k) != identity.get(k))
    if differing:
        # Of the first difference what it is, of the others that they are there
        named = [_difference(differing[0], before, identity), *differing[1:]]
        kept = out / RECIPE_FILE
        same = f", or continue it with its own recipe, {kept}" if kept.exists() else ""
        raise BadInput(
            f"{out}: holds another run's state (differs in {', '.join(named)}); "
            f"choose another --out{same}"
        )


def _difference(key: str, then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The difference at `key`, followed down: recipe.optim.lr (0.1 there, 0.2 now)."""
    a, b = then.get(key), now.get(key)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        # A key that is missing differs from one that is null
        inner = sorted(k for k in {*a, *b} if (k in a, a.get(k)) != (k in b, b.get(k)))
        return f"{key}.{_difference(inner[0], a, b)}"
    return f"{key} ({a!s:.40} there, {b!s:.40} now)"


def command_line() -> str:
    """What was typed to start this process, with this interpreter's path left out."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":  # python -m PACKAGE
        package = program.parent.name
        words = ["backbench"] if package == "backbench" else ["python", "-m", package]
    elif program.suffix == ".py":
        words = ["python", sys.argv[0]]
    else:  # an installed script
        words = [program.name]
    return shlex.join([*words, *sys.argv[1:]])


class Metrics:
    """RUN/metrics.jsonl: one JSON object per logged step.

    Opening it at a step drops what a lost future had written: a run that died after its last
    saved state makes those steps again.
    """

    def __init__(self, run: Path, *, from_step: int = 0) -> None:
        self.path = Path(run) / METRICS_FILE
        kept = [row for row in read_metrics(run) if row.get("step", -1) < from_step]
        atomic.write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, **values: float | None) -> None:
        with failures.naming(self.path), self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """The rows of RUN/metrics.jsonl; a torn last line is left out, and whatever else is no row."""
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
        if isinstance(row, dict) and isinstance(row.get("step", 0), int | float):
            rows.append(row)
    return rows


class Progress:
    """Steps done of `total`, with rate and ETA: a live line on a terminal, a line every 10 s
    elsewhere, and RUN/progress.json (at most once a second) for whoever watches from outside.

    `done` at construction is where a continued run starts; the rate counts only what was done
    since. What is over within `after` seconds shows no line at all.
    """

    def __init__(
        self,
        run: str | Path | None,
        total: int,
        what: str,
        *,
        unit: str = "step",
        done: int = 0,
        after: float = 0.0,
    ) -> None:
        self.run, self.total, self.what, self.unit = run, total, what, unit
        self.after = after
        self.first = self.done = done
        self.start = time.monotonic()
        self._shown = self._written = 0.0
        self._tty = sys.stderr.isatty()

    @property
    def eta(self) -> float:
        """Seconds left, inf while nothing is known."""
        made = self.done - self.first
        left = self.total - self.done
        if made:
            return left * (time.monotonic() - self.start) / made
        return math.inf if left else 0.0

    def advance(self, count: int = 1, **info: float | str) -> None:
        """`count` more steps are done; `info` is shown behind the rate."""
        self.done += count
        now = time.monotonic()
        last = self.done >= self.total
        due = last or now - self._shown > (TERMINAL_SECONDS if self._tty else LOG_SECONDS)
        if due and now - self.start >= self.after:
            self._shown = now
            self._print(info, last)
        if self.run is not None and (last or now - self._written > FILE_SECONDS):
            self._written = now
            with contextlib.suppress(OSError):  # whoever watches is not worth a run
                self._write(Path(self.run) / PROGRESS_FILE)

    def _write(self, path: Path) -> None:
        eta = self.eta
        state = {
            "what": self.what,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "eta_s": None if eta == math.inf else round(eta, 1),
            "time": time.time(),
        }
        atomic.write_json(path, state)

    def _print(self, info: Mapping[str, float | str], last: bool) -> None:
        if log.level > logging.INFO:
            return
        took = time.monotonic() - self.start
        rate = (self.done - self.first) / took if took else 0.0
        end = f"took {seconds(took)}" if last else f"ETA {seconds(self.eta)}"
        line = f"{self.what}: {self.done}/{self.total} {self.unit}s  {rate:.3g}/s  {end}  "
        line = (line + _shown(info)).rstrip()
        if self._tty:
            # One less than fits: some terminals begin a new line behind the last column
            wide = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{line[:wide]}" + ("\n" if last else ""))
            _Terminal.live = not last
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _shown(info: Mapping[str, float | str]) -> str:
    """loss 0.1234  what else, floats with four digits."""
    words = []
    for name, value in info.items():
        words.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return "  ".join(words)


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
        note = jsons.read(Path(run) / PROGRESS_FILE)
        left = note["eta_s"]
        out = ProgressNote(
            what=printable.shown(str(note["what"])),
            done=int(note["done"]),
            total=int(note["total"]),
            unit=printable.shown(str(note["unit"])),
            eta_s=None if left is None else float(left),
            time=float(note["time"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    # As a progress line counts them; a time that is none would spread to whatever it is added to
    counts = 0 <= out["done"] < 1 << 62 and 0 <= out["total"] < 1 << 62
    times = math.isfinite(out["time"]) and not math.isnan(out["eta_s"] or 0.0)
    return out if counts and times else None


def seconds(value: float) -> str:
    """75.2 -> 1:15; 0.42 -> 0.4 s."""
    if value == math.inf:
        return "?"
    if value < 10:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
