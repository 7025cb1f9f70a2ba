"""Names the protocol of a run's numbers. A config has a shipped protocol's name only where every
key that can change the numbers agrees, so a changed rate never lands in a published column."""

import functools
from pathlib import Path

from backbench.detection import dialect
from backbench.detection.dialect import Given, Value
from backbench.errors import Failed
from backbench.recipes import config as recipes

STATED = "# protocol: "
FROZEN = "MODEL.TRUNK.FROZEN"
LOOKING = "TEST.EVAL_PERIOD"  # stated in a run's folder all the same
# Where a run computes, how often it saves or is looked at, and the seed, which a row names
NEUTRAL = {
    "MODEL.DEVICE",
    "DATALOADER.NUM_WORKERS",
    "SOLVER.CHECKPOINT_PERIOD",
    LOOKING,
}
NEUTRAL |= {"OUTPUT_DIR", "SEED", "VERSION"}
# Two runs of one protocol may also differ in the trunk's size, which the row names, and in what the
# checkpoint owns.
TRUNK_SIZE = {"MODEL.WEIGHTS", "MODEL.RESNETS.DEPTH", "MODEL.RESNETS.RES2_OUT_CHANNELS"}
FREE = (NEUTRAL - {LOOKING}) | TRUNK_SIZE | dialect.OPTIONAL.keys()


def decisive(given: Given) -> dict[str, Value]:
    """Return the deciding keys, sorted, as plain values, without those stated at their default."""
    out = stated(given)
    for key, value in dialect.DEFAULTS.items():
        if key == LOOKING or (key in out and out[key] == value):
            out.pop(key, None)
    return out


def stated(given: Given) -> dict[str, Value]:
    """Every key that is not free, as the user stated it: what a run's folder keeps."""
    out = {}
    for key, value in sorted(given.values.items()):
        if key not in FREE:
            out[key] = list(value) if isinstance(value, tuple) else value
    return out


def protocol(given: Given) -> str:
    """Return the shipped protocol's name if every decisive key has its value, else a fingerprint.
    Mixed precision turns detection-1x-v1 into detection-1x-bf16-v1; a frozen trunk adds -frozen."""
    mine = decisive(given)
    plain = {
        k: v
        for k, v in mine.items()
        if k not in (dialect.AMP_ENABLED, dialect.AMP_PRECISION, FROZEN)
    }
    shipped = _shipped(recipes.configs_dir() / dialect.KIND)
    for name, theirs in shipped:
        if theirs == mine:  # the demo's are frozen by their own configs
            return name
    for name, theirs in shipped:
        if theirs == plain:
            stem, version = name.rsplit("-", 1)
            parts = [stem]
            if given.get(FROZEN):
                parts.append("frozen")
            if given.get(dialect.AMP_ENABLED):
                parts.append(
                    given.get(
                        dialect.AMP_PRECISION, dialect.DEFAULTS[dialect.AMP_PRECISION]
                    )
                )
            return "-".join([*parts, version])
    return f"detection-{recipes.fingerprint(mine)}"


@functools.cache
def _shipped(folder: Path) -> list[tuple[str, dict[str, Value]]]:
    """List the protocol of every shipped config that is no base, and its deciding keys. The name
    stands in a comment: Detectron2 alone reads the same files and refuses other keys."""
    out = []
    for path in sorted(folder.glob("[!_]*.yaml")):
        names = [
            line for line in path.read_text().splitlines() if line.startswith(STATED)
        ]
        if not names:
            raise Failed(
                f"{path}: does not state its protocol; add a line `{STATED}NAME-v1`"
            )
        keys = decisive(Given(path, recipes.read_detector(path)))
        out.append((names[0].removeprefix(STATED).strip(), keys))
    return out
