"""Reads Detectron2's dialect of YAML, with `_BASE_` and `KEY VALUE` overrides, by fvcore's CfgNode.

There is no copy of Detectron2's defaults. configs/detection/_base_rcnn_fpn.yaml states every key
that the torchvision engine reads; a config that has others, or leaves one out, is refused by name.
The Detectron2 engine merges the same files over its own defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fvcore.common.config import CfgNode

from backbench.datasets import availability
from backbench.errors import BadInput, nearest
from backbench.recipes import config
from backbench.recipes.config import Value, flat, read_detector
from backbench.requests.detect import OWN_CONFIG, DetectRequest

KIND = "detection"
BASE = "_base_rcnn_fpn.yaml"
DEVICE_KEY = "MODEL.DEVICE"
AMP_ENABLED = "SOLVER.AMP.ENABLED"
MASK_FORMAT = "INPUT.MASK_FORMAT"
AMP_PRECISION = "SOLVER.AMP.PRECISION"
# So many times all images are trained on; MAX_ITER, STEPS and WARMUP_ITERS then say shares of the run
EPOCHS = "SOLVER.EPOCHS"
COUNTED = ("SOLVER.MAX_ITER", "SOLVER.STEPS")

PIXELS = ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "INPUT.FORMAT")
# Keys that any config may leave out, because the checkpoint owns the pixels and the trunk's name,
# and the machine the device. The values only say of which type a stated one must be.
OPTIONAL: dict[str, Value] = {
    "MODEL.PIXEL_MEAN": [0.0],
    "MODEL.PIXEL_STD": [1.0],
    "INPUT.FORMAT": "RGB",
    DEVICE_KEY: "auto",
    "MODEL.TRUNK.ARCH": "",
}
# Keys of our backbones (see `backbones.is_resnet`), which Detectron2 does not have
OURS: dict[str, Value] = {
    "MODEL.TRUNK.FROZEN": False,  # else the trunk is trained
    "MODEL.TRUNK.DROP_PATH": 0.0,  # the rate of stochastic depth in the trunk's last block
    "MODEL.TRUNK.MAP_NORM": False,  # a layer norm on each of its maps, trained with the heads
    "SOLVER.OPTIMIZER": "SGD",  # or ADAMW
    "SOLVER.LAYER_DECAY": 1.0,  # the factor on the rate from one layer to the one before it
}
# Other keys that a config may leave out, and the values that they then have. They are Detectron2's
# own defaults, so stating one of them changes nothing.
DEFAULTS: dict[str, Value] = {
    "SOLVER.LR_SCHEDULER_NAME": "WarmupMultiStepLR",
    "SOLVER.WARMUP_METHOD": "linear",
    "SOLVER.BASE_LR_END": 0.0,
    "SOLVER.BIAS_LR_FACTOR": 1.0,
    EPOCHS: 0.0,
    AMP_ENABLED: False,
    AMP_PRECISION: "fp16",
    "TEST.EVAL_PERIOD": 0,
    MASK_FORMAT: "polygon",
    **OURS,
}


@dataclass(frozen=True)
class Given:
    """The keys that the user's file and overrides state, before an engine has read them."""

    path: Path
    values: Mapping[str, Value]  # flat: MODEL.RPN.NMS_THRESH -> 0.7

    def get(self, key: str, default: Value = None) -> Value:
        return self.values.get(key, default)


def _as_list(value: Value) -> Value:
    """Return a tuple as a list, and any other value as it is."""
    return list(value) if isinstance(value, tuple) else value


def read(name: str, opts: Sequence[str]) -> Given:
    """Read a config by its path or name, with `KEY VALUE` overrides.

    Raises BadInput that names the file or the key.
    """
    path = config.find_recipe(name, KIND)
    values = read_detector(path)
    # The shipped bases state ImageNet's pixels, for those who use Detectron2 alone. The user has not
    # stated them, so they are no claim about the checkpoint.
    base = read_detector(config.configs_dir() / KIND / BASE)
    for key in PIXELS:
        if key in values and _as_list(values[key]) == _as_list(base[key]):
            del values[key]
    words = [word for word in opts if word != "--"]
    for word in words:
        if word.startswith("--"):
            raise BadInput(
                f"'{word}' stands behind the overrides (KEY VALUE); flags go before them"
            )
    for word in words[::2]:
        _refuse_equals(word)
    if len(words) % 2:
        raise BadInput(f"overrides come as KEY VALUE pairs; '{words[-1]}' has no value")
    for key, text in zip(words[::2], words[1::2]):
        if not _is_key(key):
            raise BadInput(
                f"override '{key} {text}': expected KEY VALUE as in SOLVER.BASE_LR 0.01; "
                "flags go before them"
            )
        values[key] = CfgNode._decode_cfg_value(text)
    _refuse_iterations(values, set(words[::2]))
    return Given(path, values)


def _refuse_equals(word: str) -> None:
    """Raise BadInput for KEY=VALUE, as other programs spell an override."""
    key, equals, value = word.partition("=")
    if equals and _is_key(key):
        raise BadInput(
            f"override '{word}': write the value behind a space, {key} {value or 'VALUE'}"
        )


def _refuse_iterations(values: Mapping[str, Value], overridden: set[str]) -> None:
    """Raise BadInput for overrides that count iterations where SOLVER.EPOCHS counts the length.

    MAX_ITER would then not say how long the run is, and STEPS would be stretched from another length
    than the one that they were written for. Who gives all three means shares of the epochs."""
    epochs = values.get(EPOCHS)
    given = [key for key in COUNTED if key in overridden]
    all_three = len(given) == len(COUNTED) and EPOCHS in overridden
    if not epochs or not given or all_three:
        return
    raise BadInput(
        f"{given[0]} {values[given[0]]}: the length is {EPOCHS} {epochs} here, and {given[0]} would be"
        f" stretched to it; leave {' and '.join(given)} out and give {EPOCHS}, or add {EPOCHS} 0 to"
        " count iterations"
    )


def _is_key(word: str) -> bool:
    """Return True for a key, False for a flag or a file among the overrides."""
    parts = word.split(".")
    return all(part.isupper() and part.replace("_", "").isalnum() for part in parts)


def check(request: DetectRequest) -> None:
    """Refuse a wrong config, override or checkpoint of `detect` before torch is imported."""
    read(request.config_file or OWN_CONFIG, request.opts)
    availability.weight_files(request)


def shipped(path: Path) -> Given:
    """Read a config file without overrides."""
    return Given(path, read_detector(path))


def embedded(given: Given) -> CfgNode:
    """Make the torchvision engine's config.

    Raises BadInput for a key that is unknown, missing or of a wrong type.
    """
    # The keys that the engine takes, each with a value of its type
    known = {
        **read_detector(config.configs_dir() / KIND / BASE),
        **OPTIONAL,
        **DEFAULTS,
    }
    for key in given.values:
        if key not in known:
            raise BadInput(
                f"{given.path}: the torchvision engine has no key '{key}'; {nearest(key, known)}"
            )
    for key in known:
        if key not in given.values and key not in OPTIONAL and key not in DEFAULTS:
            raise BadInput(
                f"{given.path}: does not state {key}; begin it with `_BASE_: {BASE}`"
            )
    tree: dict[str, Value] = {}
    for key, value in known.items():
        *groups, last = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value
    cfg = CfgNode(tree)
    merge(cfg, given)
    return cfg


# Type of a value -> what it is called
KINDS: dict[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list",
    list: "a list",
}


def merge(cfg: CfgNode, given: Given) -> None:
    """Set the given values in `cfg`. Raises BadInput for an unknown key or a value of a wrong type."""
    known = flat(cfg)
    for key, value in given.values.items():
        if key not in known:
            raise BadInput(f"{given.path}: no such key '{key}'; {nearest(key, known)}")
        # CfgNode compares types, so it would refuse `SOLVER.BASE_LR 1`.
        whole = isinstance(known[key], float) and type(value) is int
        try:
            cfg.merge_from_list([key, float(value) if whole else value])
        except (
            ValueError,
            AssertionError,
            KeyError,
            RecursionError,
            MemoryError,
        ) as error:
            if "Type mismatch" in str(error):
                wanted = KINDS[type(known[key])]
                raise BadInput(
                    f'{given.path}: {key} {value}: must be {wanted}, as "{known[key]}"'
                ) from None
            said = " ".join(str(error).split())[:160] or type(error).__name__
            raise BadInput(f"{given.path}: {key}: {said}") from None
