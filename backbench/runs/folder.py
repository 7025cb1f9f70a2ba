"""Run folders: the names of their files, and which run a folder belongs to."""

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from backbench.errors import BadInput
from backbench.runs import atomic, lock
from backbench.untrusted import jsons

# Every file that a run's folder may hold, by the name that the whole suite uses
RUN_FILE = "run.json"  # whose run it is: verb, identity, command
PROGRESS_FILE = "progress.json"  # how far it is, for whoever watches
METRICS_FILE = "metrics.jsonl"  # one row per logged step
STATE_FILE = "state.pt"  # what it continues from
RECIPE_FILE = "recipe.yaml"
CHECKPOINT_FILE = "backbone.safetensors"  # what a pretraining is for
RESULTS_FILE = "results.jsonl"  # what an evaluation is for
OWED_FILE = "owed.json"  # how many rows of it the run must deliver
DEMO_FILE = "demo.json"  # of a folder of runs: that the demo made it
PREDICTIONS = "predictions"  # folder: the predictions behind the results
SCORES = "scores"  # folder: what heads said of each image, for metrics that come later
HEADS_FILE = "heads.safetensors"  # trained heads, each bound to its trunk and protocol
PICTURES = "pictures"  # folder
STATES = "state"  # folder: what evaluations continue from
# Folders in a run that files are written to, beside its own
PARTS = (PREDICTIONS, SCORES, PICTURES, STATES, "manifests", "per_class", "confusion")

Identity = Mapping[str, object]


def cache_folder() -> Path:
    """The folder of what is computed once: $BACKBENCH_CACHE, by default ~/.cache/backbench."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("BACKBENCH_CACHE") or Path(home) / "backbench")


@contextlib.contextmanager
def open_run(out: str | Path, *, verb: str, identity: Identity) -> Iterator[Path]:
    """`with open_run(...) as run`: make the run folder, or recognise it, and work in it alone.
    `identity` (JSON-able) is all that decides the numbers: recipe, checkpoint digests, data
    fingerprint. A busy folder is refused, and one of another verb or identity, by what differs."""
    out = Path(out)
    if not recognise(out, verb=verb, identity=identity):
        out.mkdir(parents=True, exist_ok=True)
    with lock.held(out):
        # Writers that were killed in the middle of a file left temporary ones
        atomic.remove_leftovers(out, *(out / part for part in PARTS))
        # Asked again under the lock: two processes may have found the folder empty
        if not recognise(out, verb=verb, identity=identity):
            now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            about = {"verb": verb, "identity": identity, "created": now}
            about |= {"command": command_line(), "cwd": str(Path.cwd())}
            atomic.write_json(out / RUN_FILE, about)
        yield out


def recognise(out: Path, *, verb: str, identity: Identity) -> bool:
    """True if `out` holds this very run; BadInput where it holds another, or is no folder."""
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
        held = f"holds a run of '{there.get('verb')}', not '{verb}'"
        raise BadInput(f"{out}: {held}; choose another --out")
    # Through JSON, so that tuples and numbers compare as they will when they are read
    now = json.loads(json.dumps(identity))
    differing = sorted(
        key for key in {*before, *now} if before.get(key) != now.get(key)
    )
    if differing:
        # The first difference is shown, the others are named
        named = [_difference(differing[0], before, now), *differing[1:]]
        kept = out / RECIPE_FILE
        same = f", or continue it with its own recipe, {kept}" if kept.exists() else ""
        held = f"holds another run's state (differs in {', '.join(named)})"
        raise BadInput(f"{out}: {held}; choose another --out{same}")
    return True


def _difference(key: str, there: Identity, now: Identity) -> str:
    """The difference at `key`, followed down: recipe.optim.lr (0.1 there, 0.2 now)."""
    a, b = there.get(key), now.get(key)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        # A key that is missing differs from one that is null
        inner = sorted(k for k in {*a, *b} if (k in a, a.get(k)) != (k in b, b.get(k)))
        return f"{key}.{_difference(inner[0], a, b)}"
    return f"{key} ({a!s:.40} there, {b!s:.40} now)"


def command_line() -> str:
    """The command that started this process, without this interpreter's path."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":  # python -m PACKAGE
        package = program.parent.name
        words = ["backbench"] if package == "backbench" else ["python", "-m", package]
    elif program.suffix == ".py":
        words = ["python", sys.argv[0]]
    else:  # an installed script
        words = [program.name]
    return shlex.join([*words, *sys.argv[1:]])
