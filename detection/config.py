"""Detectron2's dialect: YAML with `_BASE_`, `KEY VALUE` overrides, read with fvcore's CfgNode.

There is no copy of Detectron2's defaults here. configs/detection/_base_rcnn_fpn.yaml states every key that the
torchvision engine reads; a config that has others, or leaves one out, is refused by name. The Detectron2 engine merges
the same files over its own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from backbench import config
from backbench.errors import BadInput, nearest

KIND = "detection"
BASE = "_base_rcnn_fpn.yaml"
PIXEL_KEYS = ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "INPUT.FORMAT")  # owned by the checkpoint
DEVICE_KEY = "MODEL.DEVICE"
# What may differ between two runs of one protocol: where it runs, how often it saves, the seed, and the trunk's size,
# which the row names.
FREE = (
    "MODEL.WEIGHTS",
    "MODEL.RESNETS.DEPTH",
    "MODEL.RESNETS.RES2_OUT_CHANNELS",
    "DATALOADER.NUM_WORKERS",
    "SOLVER.CHECKPOINT_PERIOD",
    "OUTPUT_DIR",
    "SEED",
    "VERSION",
    DEVICE_KEY,
    *PIXEL_KEYS,
)


@dataclass(frozen=True)
class Given:
    """What the user's file and overrides say, before any engine has looked at it."""

    path: Path
    values: Mapping[str, Any]  # flat: MODEL.RPN.NMS_THRESH -> 0.7

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def tree(self) -> dict[str, Any]:
        """The values as nested groups again."""
        out: dict[str, Any] = {}
        for key, value in self.values.items():
            *groups, last = key.split(".")
            node = out
            for group in groups:
                node = node.setdefault(group, {})
            node[last] = value
        return out

    @property
    def task(self) -> str:
        if self.get("MODEL.MASK_ON") and self.get("MODEL.KEYPOINT_ON"):
            raise BadInput(
                f"{self.path}: MASK_ON and KEYPOINT_ON together; choose one, each is a table of its own"
            )
        kind = (
            "mask"
            if self.get("MODEL.MASK_ON")
            else "keypoint"
            if self.get("MODEL.KEYPOINT_ON")
            else "faster"
        )
        return f"{kind}_rcnn"


def read(name: str, opts: Sequence[str]) -> Given:
    """The config by path or name, with `KEY VALUE` overrides. Raises BadInput that names the file or the key."""
    path = config.find_recipe(name, KIND)
    values = _flat(_load(path))
    opts = [o for o in opts if o != "--"]
    if len(opts) % 2:
        raise BadInput(f"overrides come as KEY VALUE pairs; '{opts[-1]}' has no value")
    for key, text in zip(opts[::2], opts[1::2]):
        if not all(part.replace("_", "").isalnum() and part.isupper() for part in key.split(".")):
            raise BadInput(
                f"override '{key} {text}': expected KEY VALUE as in SOLVER.BASE_LR 0.01; flags go before them"
            )
        values[key] = CfgNode._decode_cfg_value(text)
    return Given(path, values)


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        return CfgNode.load_yaml_with_base(str(path))
    except FileNotFoundError as error:
        raise BadInput(f"{path}: _BASE_ '{error.filename}' is not there") from None
    except (yaml.YAMLError, AssertionError, AttributeError, TypeError) as error:
        raise BadInput(
            f"{path}: not readable as a config: {' '.join(str(error).split())[:160]}"
        ) from None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def accepted() -> dict[str, Any]:
    """The keys of the torchvision engine with a value of their type; pixel keys and the device may be left out."""
    pixels = {"MODEL.PIXEL_MEAN": [0.0], "MODEL.PIXEL_STD": [1.0], "INPUT.FORMAT": "RGB"}
    return {**_flat(_load(config.configs_dir() / KIND / BASE)), **pixels, DEVICE_KEY: "auto"}


def embedded(given: Given) -> CfgNode:
    """The config as the torchvision engine reads it. Raises BadInput for an unknown, missing or mistyped key."""
    known = accepted()
    for key in given.values:
        if key not in known:
            raise BadInput(
                f"{given.path}: the torchvision engine has no key '{key}'; {nearest(key, known)}"
            )
    for key in known:
        if key not in given.values and key not in (*PIXEL_KEYS, DEVICE_KEY):
            raise BadInput(
                f"{given.path}: does not state {key}; begin the file with `_BASE_: {BASE}`"
            )
    cfg = CfgNode(Given(given.path, known).tree())
    merge(cfg, given)
    return cfg


def merge(cfg: CfgNode, given: Given) -> None:
    """The given values over `cfg`; types must agree, whole numbers may stand for fractions."""
    for key, value in given.values.items():
        node = cfg
        *groups, last = key.split(".")
        for group in groups:
            node = node.get(group) if isinstance(node, CfgNode) else None
        if not isinstance(node, CfgNode) or last not in node:
            raise BadInput(f"{given.path}: no such key '{key}'; {nearest(key, _flat(cfg))}")
        whole = isinstance(node[last], float) and type(value) is int
        try:
            cfg.merge_from_list([key, float(value) if whole else value])
        except (ValueError, AssertionError, KeyError) as error:
            raise BadInput(f"{given.path}: {key}: {' '.join(str(error).split())[:160]}") from None


def decisive(given: Given) -> dict[str, Any]:
    """What decides the protocol, as plain values."""
    return {
        k: list(v) if isinstance(v, tuple) else v
        for k, v in sorted(given.values.items())
        if k not in FREE
    }


def protocol(given: Given) -> str:
    """The name that the numbers carry: a shipped protocol's where every decisive key is its own, else a fingerprint's.

    A changed learning rate or size never lands in the column of the published protocol.
    """
    mine = decisive(given)
    for path in sorted((config.configs_dir() / KIND).glob("[!_]*.yaml")):
        if decisive(Given(path, _flat(_load(path)))) == mine:
            first = path.stem.split("_")[0]
            scale = first if first in ("demo", "tiny") else path.stem.rsplit("_", 1)[1].lower()
            variant = "-c4" if "_C4_" in path.stem else ""
            return f"detection{variant}-{scale}-v1"
    return f"detection-{config.fingerprint(mine)}"
