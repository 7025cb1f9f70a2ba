"""The name that a run's numbers carry, and what decides it.

A changed learning rate or size never lands in the column of a published protocol: a config has a
shipped protocol's name only where every key that can change the numbers has that config's value.
"""

from __future__ import annotations

from pathlib import Path

from backbench import config as recipes
from detection import amp, config
from detection.config import Given, Value

# What may differ between two runs of one protocol: where it runs, how often it saves, the seed, and
# the trunk's size, which the row names; and what the checkpoint owns.
FREE = (
    "MODEL.WEIGHTS",
    "MODEL.RESNETS.DEPTH",
    "MODEL.RESNETS.RES2_OUT_CHANNELS",
    "DATALOADER.NUM_WORKERS",
    "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_PERIOD",
    "OUTPUT_DIR",
    "SEED",
    "VERSION",
    *config.OPTIONAL,
)


def decisive(given: Given) -> dict[str, Value]:
    """Every key that decides the protocol, sorted, as plain values. A key stated with the value
    that it has anyway is left out, like one that is not stated."""
    out = {}
    for key, value in sorted(given.values.items()):
        if key not in FREE and not (key in config.DEFAULTS and value == config.DEFAULTS[key]):
            out[key] = list(value) if isinstance(value, tuple) else value
    return out


def protocol(given: Given) -> str:
    """A shipped protocol's name where every decisive key is its own, else a fingerprint's. In mixed
    precision detection-1x-v1 is detection-1x-bf16-v1."""
    mine = decisive(given)
    plain = {k: v for k, v in mine.items() if k not in (amp.ENABLED, amp.PRECISION)}
    for path in sorted((recipes.configs_dir() / config.KIND).glob("[!_]*.yaml")):
        if decisive(config.shipped(path)) == plain:
            return _in_precision(_name_of(path), given)
    return f"detection-{recipes.fingerprint(mine)}"


def _in_precision(name: str, given: Given) -> str:
    if not given.get(amp.ENABLED):
        return name
    stem, version = name.rsplit("-", 1)
    return f"{stem}-{given.get(amp.PRECISION, config.DEFAULTS[amp.PRECISION])}-{version}"


def _name_of(path: Path) -> str:
    """mask_rcnn_R_50_FPN_1x is detection-1x-v1, faster_rcnn_R_50_C4_VOC detection-c4-voc-v1.

    The only place that knows how a protocol is named. No shipped yaml says its own name or version
    yet: both are cut out of the file's name, and the version is 1 for all of them. So whoever edits
    the decisive keys of a shipped yaml in place must also give it another name; nothing here would
    notice. (Overrides on the command line are noticed.)
    """
    first, last = path.stem.split("_")[0], path.stem.rsplit("_", 1)[1]
    # Demo sizes go by the first word (demo_mask_rcnn_R_18_FPN), papers by the last, the schedule.
    scale = first if first in ("demo", "tiny") else last.lower()
    variant = "-c4" if "_C4" in path.stem else ""
    return f"detection{variant}-{scale}-v1"
