"""Reads the small files that the Hub, timm, OpenCLIP and `backbench export` write beside weights.

They tell what the tensors of a vision transformer do not.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from backbench.errors import BadInput
from backbench.images.preprocess import CLIP_MEAN, CLIP_STD, Pixels
from backbench.untrusted import jsons
from backbench.weights import readings
from backbench.weights.families.timm_model_names import PREFIX
from backbench.weights.family import TrunkMetadata

# How the Hub calls weights. A config.json counts only beside these: the folder of another file may
# hold anything.
_HUB_NAMES = re.compile(
    r"((open_clip_)?(pytorch_)?model|open_clip_model)\.(safetensors|bin|pt)"
)
_MOST = 1 << 20  # bytes of a configuration
Config = Mapping[str, Any]  # decoded JSON from a stranger: any value may be anything


def beside(path: Path) -> TrunkMetadata:
    """Read the files beside `path`; the metadata is empty where there are none."""
    exported = path.with_name(path.name + ".json")
    if exported.is_file():
        about = _read(exported)
        is_ours = {"digest", "arch", "pixels"} <= about.keys()
        if is_ours and str(about["arch"]).startswith(PREFIX):
            return _parsed(_ours, about, exported)
    if _HUB_NAMES.fullmatch(path.name):
        for name, parse in (
            ("open_clip_config.json", _openclip),
            ("config.json", _hub),
        ):
            file = path.with_name(name)
            if file.is_file():
                return _parsed(parse, _read(file), file)
    return TrunkMetadata()


Parser = Callable[[Config, Path], TrunkMetadata]


def _parsed(parse: Parser, config: Config, file: Path) -> TrunkMetadata:
    """Parse a configuration. BadInput names the file if anything in it is not as expected."""
    try:
        return replace(parse(config, file), source=file.name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(
            f"{file}: not a configuration that is known ({error!r:.80})"
        ) from None


def _read(file: Path) -> Config:
    try:
        value = jsons.read(file, most=_MOST)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{file}: not readable ({str(error)[:80]}); what it says is needed"
        ) from None
    if not isinstance(value, dict):
        raise BadInput(f"{file}: expected an object, not {type(value).__name__}")
    return value


def _pixels(about: Config, mean: str = "mean", std: str = "std") -> Pixels | None:
    """Return the pixels in a configuration; None where it does not have both statistics."""
    if not about.get(mean) or not about.get(std):
        return None
    return Pixels(tuple(about[mean]), tuple(about[std]), about.get("order", "RGB"))


def _ours(about: Config, file: Path) -> TrunkMetadata:
    """Parse what `backbench export` wrote."""
    return TrunkMetadata(
        arch=str(about["arch"]),
        reading=str(about.get("reading", "")),
        pixels=_pixels(about["pixels"]),
        names_model=True,
    )


# --- timm and the Hub: config.json ---

# transformers' name of an activation -> timm's
_ACTIVATIONS = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}


# Keys of the Hub's configurations that change a forward pass -> the value of every trunk here
_FIXED: dict[str, object] = {"rope_theta": 100.0, "rope_scaling": None}


def _hub(config: Config, file: Path) -> TrunkMetadata:
    """Parse the Hub's config.json, which timm and transformers write."""
    if "architecture" in config:
        return _timm(config)
    if "model_type" not in config:
        return TrunkMetadata()
    # A model of images and text has a configuration for each.
    vision = config.get("vision_config")
    model = vision if isinstance(vision, dict) else config
    options = {}
    if "num_attention_heads" in model:
        options["num_heads"] = str(int(model["num_attention_heads"]))
    if "layer_norm_eps" in model:
        options["eps"] = f"{float(model['layer_norm_eps']):g}"
    activation = str(model.get("hidden_act", ""))
    if activation and activation not in _ACTIVATIONS:
        raise BadInput(
            f"{file}: hidden_act '{activation[:40]}': expected one of"
            f" {', '.join(_ACTIVATIONS)}"
        )
    if activation:
        options["act_layer"] = _ACTIVATIONS[activation]
    for key, usual in _FIXED.items():
        if model.get(key, usual) != usual:
            raise BadInput(
                f"{file}: '{key}' is {str(model[key])[:40]}, and no trunk here has another than"
                f" {usual}; its features would differ"
            )
    preprocessor_file = file.with_name("preprocessor_config.json")
    preprocessor: Config = {}
    if preprocessor_file.is_file():
        preprocessor = _read(preprocessor_file)
    return TrunkMetadata(
        options=options,
        activation=_ACTIVATIONS.get(activation, ""),
        pixels=_pixels(preprocessor, "image_mean", "image_std"),
    )


# timm's way to pool -> the reading
_READINGS = {"token": "cls", "avg": "mean", "map": readings.MAP}


def _timm(config: Config) -> TrunkMetadata:
    about = {**config, **config.get("pretrained_cfg", {})}
    # The trunk's name has the options as words: timm:NAME,key=value,key=1-2-3
    words = [str(config["architecture"])]
    for key, value in config.get("model_args", {}).items():
        if key != "num_classes":
            text = "-".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{key}={text}")
    return TrunkMetadata(
        arch=PREFIX + ",".join(words),
        reading=_READINGS.get(str(config.get("global_pool", "")), ""),
        pixels=_pixels(about),
        licence=str(about.get("license") or ""),
        names_model=True,
    )


# --- OpenCLIP ---


def _openclip(config: Config, file: Path) -> TrunkMetadata:
    model = config["model_cfg"]
    vision = model["vision_cfg"]
    # Where a configuration has none, open_clip takes CLIP's pixels.
    pixels = _pixels(config.get("preprocess_cfg", {})) or Pixels(CLIP_MEAN, CLIP_STD)
    if isinstance(vision, dict) and vision.get("timm_model_name"):
        arch = f"{PREFIX}{vision['timm_model_name']}"
        return TrunkMetadata(arch=arch, pixels=pixels, names_model=True)
    return TrunkMetadata(
        activation="quick_gelu" if model.get("quick_gelu", False) else "gelu",
        pixels=pixels,
    )
