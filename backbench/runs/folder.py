"""Names the files of a run's folder, and tells which run a folder belongs to."""

import contextlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from backbench.errors import BadInput
from backbench.runs import atomic, failures, lock
from backbench.untrusted import jsons

# Every file that a run's folder may hold, by the name that the whole suite uses
RUN_FILE = "run.json"  # whose run it is: verb, identity, command
PROGRESS_FILE = "progress.json"  # how far it is, for whoever watches
METRICS_FILE = "metrics.jsonl"  # one row per logged step
STATE_FILE = "state.pt"  # what a pretraining or a detector continues from
RECIPE_FILE = "recipe.yaml"
CHECKPOINT_FILE = "backbone.safetensors"  # what a pretraining is for
RESULTS_FILE = "results.jsonl"  # what an evaluation is for
OWED_FILE = "owed.json"  # how many rows of it the run must deliver
DEMO_FILE = "demo.json"  # marks a folder of runs as made by the demo
PREDICTIONS = "predictions"  # folder: the predictions behind the results
SCORES = "scores"  # folder: the heads' scores of each image, for later metrics
HEADS_FILE = "heads.safetensors"  # trained heads, each bound to its trunk and protocol
PICTURES = "pictures"  # folder
STATES = "state"  # folder: what evaluations continue from
MANIFESTS = "manifests"  # folder: which images were used
# The folders in a run's folder that files are written to
PARTS = (PREDICTIONS, SCORES, PICTURES, STATES, MANIFESTS, "per_class", "confusion")
# What a run has written before it has measured anything, beside its manifests
ANNOUNCED = (RUN_FILE, OWED_FILE, PROGRESS_FILE, RECIPE_FILE)

Identity = Mapping[str, object]


def kept_checkpoint(out: Path, digest: str) -> Path:
    """Return the file in which `evaluate` keeps one of several models below its folder OUT."""
    return out / f"checkpoint-{digest[:12]}.safetensors"


def cache_folder() -> Path:
    """Return the folder of what is computed once: $BACKBENCH_CACHE, else backbench in
    $XDG_CACHE_HOME, else ~/.cache/backbench."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("BACKBENCH_CACHE") or Path(home) / "backbench")


@contextlib.contextmanager
def open_run(out: str | Path, *, verb: str, identity: Identity) -> Iterator[Path]:
    """Make the run folder `out`, or recognise it, and work in it alone until the block ends.

    `identity` (JSON-able) holds all that decides the numbers: recipe, checkpoint digests, data
    fingerprint. Raise BadInput where another process is at work in the folder, and where it holds
    a run of another verb or identity; the message names what differs.

    A new run whose input is refused before anything was measured leaves no folder."""
    out = Path(out)
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    if not recognise(out, verb=verb, identity=identity):
        failures.make_folder(out)
    is_new = False
    try:
        with lock.held(out):
            is_new = _begun(out, verb=verb, identity=identity)
            yield out
    except BadInput:
        # A picture that cannot be read, say
        if is_new:
            _take_back(out, missing)
        raise


def _begun(out: Path, *, verb: str, identity: Identity) -> bool:
    """Write whose run it is, and return True; False where that stands there."""
    # Writers that were killed in the middle of a file left temporary ones
    atomic.remove_leftovers(out, *(out / part for part in PARTS))
    # Asked again under the lock: two processes may have found the folder empty
    if recognise(out, verb=verb, identity=identity):
        return False
    about = {
        "verb": verb,
        "identity": identity,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command_line(),
        "cwd": str(Path.cwd()),
    }
    atomic.write_json(out / RUN_FILE, about)
    return True


def _take_back(out: Path, made: Sequence[Path]) -> None:
    """Remove a run that only says what it is about to measure, with the folders made for it."""
    there = {file.name for file in out.iterdir()}
    if not there <= {*ANNOUNCED, MANIFESTS}:
        return
    for name in ANNOUNCED:
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / MANIFESTS, ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody else writes there
        for folder in made:
            folder.rmdir()


def recognise(out: Path, *, verb: str, identity: Identity) -> bool:
    """Return True if `out` holds this very run, False where it holds none. Raise BadInput where it
    holds another, or is no folder."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out}: is a file; --out needs a folder")
    file = out / RUN_FILE
    if not file.exists():
        return False
    try:
        there = jsons.read(file)
        before = dict(there["identity"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(
            f"{file}: damaged; remove {out} or choose another --out"
        ) from None
    if there.get("verb") != verb:
        raise BadInput(
            f"{out}: holds a run of '{there.get('verb')}', not '{verb}'; choose another --out"
        )
    # Through JSON and back, so that tuples and numbers compare as those that were read
    now = json.loads(json.dumps(identity))
    differing = sorted(
        key for key in {*before, *now} if before.get(key) != now.get(key)
    )
    if differing:
        # The first difference is shown, the others are named
        named = [_difference(differing[0], before, now), *differing[1:]]
        or_else = ""
        if (out / RECIPE_FILE).exists():
            or_else = f", or continue it with its own recipe, {out / RECIPE_FILE}"
        raise BadInput(
            f"{out}: holds another run's state (differs in {', '.join(named)});"
            f" choose another --out{or_else}"
        )
    return True


def _difference(key: str, there: Identity, now: Identity) -> str:
    """Follow the difference at `key` down to a value, as recipe.optim.lr (0.1 there, 0.2 now)."""
    a, b = there.get(key), now.get(key)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        # A key that is missing differs from one that is null
        inner = min(k for k in {*a, *b} if (k in a, a.get(k)) != (k in b, b.get(k)))
        return f"{key}.{_difference(inner, a, b)}"
    return f"{key} ({a!s:.40} there, {b!s:.40} now)"


def command_line() -> str:
    """Return the command that started this process, without the interpreter's path."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":  # python -m PACKAGE
        package = program.parent.name
        words = ["backbench"] if package == "backbench" else ["python", "-m", package]
    elif program.suffix == ".py":
        words = ["python", sys.argv[0]]
    else:  # an installed script
        words = [program.name]
    return shlex.join([*words, *sys.argv[1:]])
