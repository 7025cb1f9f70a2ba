"""Names the protocol of a run's numbers.

A run has a shipped protocol's name only if every key that can change the numbers agrees with the
shipped config. So a run with another learning rate never lands in a published column.
"""

import functools
from pathlib import Path

from backbench.detection import dialect
from backbench.detection.dialect import Given, Value
from backbench.errors import Failed
from backbench.recipes import config as recipes

STATED = recipes.STATES_PROTOCOL
FROZEN = "MODEL.TRUNK.FROZEN"
# How often a training is scored on the way changes no number, but a run's folder states it.
LOOKING = "TEST.EVAL_PERIOD"
# Two runs of one protocol may differ in these: where the run computes and writes, how often it saves
# or is scored, and the seed, which its rows name.
NEUTRAL = {
    "MODEL.DEVICE",
    "DATALOADER.NUM_WORKERS",
    "SOLVER.CHECKPOINT_PERIOD",
    LOOKING,
    "OUTPUT_DIR",
    "SEED",
    "VERSION",
}
# They may also differ in the trunk's size, which the rows name, and in what the checkpoint owns.
TRUNK_SIZE = {"MODEL.WEIGHTS", "MODEL.RESNETS.DEPTH", "MODEL.RESNETS.RES2_OUT_CHANNELS"}
FREE = (NEUTRAL - {LOOKING}) | TRUNK_SIZE | dialect.OPTIONAL.keys()


def decisive(given: Given) -> dict[str, Value]:
    """Return the keys that decide the numbers, sorted, without those stated at their default."""
    out = stated(given)
    out.pop(LOOKING, None)
    for key, value in dialect.DEFAULTS.items():
        if key in out and out[key] == value:
            del out[key]
    return out


def stated(given: Given) -> dict[str, Value]:
    """Return every key that is not free, as the user stated it: what a run's folder keeps."""
    out = {}
    for key, value in sorted(given.values.items()):
        if key not in FREE:
            out[key] = list(value) if isinstance(value, tuple) else value
    return out


def protocol(given: Given) -> str:
    """Return the shipped protocol's name if every decisive key has its value, else a fingerprint.

    Mixed precision turns detection-1x-v1 into detection-1x-bf16-v1, and a frozen trunk into
    detection-1x-frozen-v1.
    """
    mine = decisive(given)
    shipped = _shipped(recipes.configs_dir() / dialect.KIND)
    # 1. A config as it is shipped. This comes first, because some of the demo's freeze the trunk
    #    themselves.
    for name, theirs in shipped:
        if theirs == mine:
            return name
    # 2. A shipped config, but for mixed precision or a frozen trunk, which its name then says
    plain = dict(mine)
    for key in (dialect.AMP_ENABLED, dialect.AMP_PRECISION, FROZEN):
        plain.pop(key, None)
    for name, theirs in shipped:
        if theirs == plain:
            stem, version = name.rsplit("-", 1)
            parts = [stem]
            if given.get(FROZEN):
                parts.append("frozen")
            if given.get(dialect.AMP_ENABLED):
                default = dialect.DEFAULTS[dialect.AMP_PRECISION]
                parts.append(given.get(dialect.AMP_PRECISION, default))
            return "-".join([*parts, version])
    # 3. Any other config
    return f"detection-{recipes.fingerprint(mine)}"


@functools.cache
def _shipped(folder: Path) -> list[tuple[str, dict[str, Value]]]:
    """List the protocol's name and the decisive keys of every shipped config, bases left out.

    The name stands in a comment, because Detectron2 alone can read the same files, and would refuse
    a key for it.
    """
    out = []
    for path in sorted(folder.glob("[!_]*.yaml")):
        lines = path.read_text().splitlines()
        names = [line for line in lines if line.startswith(STATED)]
        if not names:
            raise Failed(
                f"{path}: does not state its protocol; add a line `{STATED}NAME-v1`"
            )
        keys = decisive(Given(path, recipes.read_detector(path)))
        out.append((names[0].removeprefix(STATED).strip(), keys))
    return out
