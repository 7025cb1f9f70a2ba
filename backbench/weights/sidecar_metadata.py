"""What the tensors of a vision transformer do not say: told on the command line, or by the small
files that the Hub, timm, OpenCLIP and we ourselves write beside weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backbench.errors import BadInput
from backbench.images.preprocess import CLIP_MEAN, CLIP_STD, HALF, Pixels
from backbench.untrusted import jsons
from backbench.weights import positions, readings

PIXELS = {"imagenet": Pixels(), "half": Pixels(HALF, HALF), "clip": Pixels(CLIP_MEAN, CLIP_STD)}
# Only beside weights that are called as the Hub calls them: another file's folder may hold anything
_HUB_NAMES = re.compile(r"((open_clip_)?(pytorch_)?model|open_clip_model)\.(safetensors|bin|pt)")
_MOST = 1 << 20  # bytes of a configuration


@dataclass(frozen=True, kw_only=True)
class Told:
    """`arch` is a whole `timm:` name; `options` change the one that the format has."""

    arch: str = ""
    reading: str = ""
    pixels: Pixels | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    activation: str = ""  # timm's name of it
    licence: str = ""
    by: str = ""  # the file that says it; empty for the command line
    names: bool = False  # whether that file names the model

    def over(self, other: Told) -> Told:
        """This, and the other where this says nothing."""
        return Told(
            arch=self.arch or other.arch,
            reading=self.reading or other.reading,
            pixels=self.pixels or other.pixels,
            options={**other.options, **self.options},
            activation=self.activation or other.activation,
            licence=self.licence or other.licence,
            by=self.by or other.by,
            names=self.names or other.names,
        )


def on_the_command_line(
    arch: str | None, reading: str | None, pixels: str | None, pos: str | None
) -> Told:
    """BadInput for what is no name of a trunk, a reading, statistics of pixels or a rule."""
    if arch and not arch.startswith("timm:"):
        raise BadInput(
            f"--arch {arch[:80]}: expected timm:NAME or timm:NAME,key=value,...;"
            " a ResNet is known by its tensors"
        )
    if reading and reading not in (readings.POOLED, readings.MAP):
        readings.tokens(reading)
    if pixels and pixels not in PIXELS:
        raise BadInput(f"--pixels {pixels[:40]}: expected {', '.join(PIXELS)}")
    if pos and pos not in positions.RULES:
        raise BadInput(f"--pos {pos[:40]}: expected {', '.join(positions.RULES)}")
    return Told(
        arch=arch or "",
        reading=reading or "",
        pixels=PIXELS[pixels] if pixels else None,
        options={"pos": pos} if pos else {},
    )


def beside(path: Path) -> Told:
    """What the files beside `path` say of it; nothing where there are none."""
    own = path.with_name(path.name + ".json")
    if own.is_file():
        about = _read(own)
        if {"digest", "arch", "pixels"} <= about.keys() and str(about["arch"]).startswith("timm:"):
            return _ours(about, own)
    if not _HUB_NAMES.fullmatch(path.name):
        return Told()
    for name, reader in (("open_clip_config.json", _openclip), ("config.json", _hub)):
        file = path.with_name(name)
        if file.is_file():
            try:
                return reader(_read(file), file)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise BadInput(
                    f"{file}: not a configuration that is known ({error!r:.80})"
                ) from None
    return Told()


def _read(file: Path) -> Mapping[str, Any]:
    try:
        value = jsons.read(file, most=_MOST)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{file}: not readable ({str(error)[:80]}); what it says is needed"
        ) from None
    if not isinstance(value, dict):
        raise BadInput(f"{file}: expected an object, not {type(value).__name__}")
    return value


def _ours(about: Mapping[str, Any], file: Path) -> Told:
    """`backbench export` writes it."""
    try:
        pixels = about["pixels"]
        return Told(
            arch=str(about["arch"]),
            reading=str(about.get("reading", "")),
            pixels=Pixels(tuple(pixels["mean"]), tuple(pixels["std"]), pixels["order"]),
            by=file.name,
            names=True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{file}: not what `backbench export` writes ({error!r:.80})") from None


# --- timm and the Hub: config.json ---


def _hub(config: Mapping[str, Any], file: Path) -> Told:
    if "architecture" in config:
        return _timm(config, file)
    if "model_type" not in config:
        return Told()
    inner = config.get("vision_config")
    model = inner if isinstance(inner, dict) else config
    options = {}
    if "num_attention_heads" in model:
        options["num_heads"] = str(int(model["num_attention_heads"]))
    if "layer_norm_eps" in model:
        options["eps"] = f"{float(model['layer_norm_eps']):g}"
    processor = file.with_name("preprocessor_config.json")
    return Told(
        options=options,
        activation=_activation(str(model.get("hidden_act", ""))),
        pixels=_processed(_read(processor)) if processor.is_file() else None,
        by=file.name,
    )


def _activation(name: str) -> str:
    known = {
        "": "",
        "gelu": "gelu",
        "quick_gelu": "quick_gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
    }
    if name not in known:
        raise BadInput(
            f"hidden_act '{name[:40]}': expected one of {', '.join(filter(None, known))}"
        )
    return known[name]


def _processed(config: Mapping[str, Any]) -> Pixels | None:
    if "image_mean" not in config or "image_std" not in config:
        return None
    return Pixels(tuple(config["image_mean"]), tuple(config["image_std"]))


# timm's way to pool -> what is read then
_POOLED = {"token": "cls", "avg": "mean", "map": readings.MAP}


def _timm(config: Mapping[str, Any], file: Path) -> Told:
    about = {**config, **config.get("pretrained_cfg", {})}
    arguments = config.get("model_args", {})
    words = [str(config["architecture"])]
    words += [f"{key}={_text(value)}" for key, value in arguments.items() if key != "num_classes"]
    pixels = None
    if "mean" in about and "std" in about:
        pixels = Pixels(tuple(about["mean"]), tuple(about["std"]))
    return Told(
        arch="timm:" + ",".join(words),
        reading=_POOLED.get(str(config.get("global_pool", "")), ""),
        pixels=pixels,
        licence=str(about.get("license") or ""),
        by=file.name,
        names=True,
    )


def _text(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


# --- OpenCLIP ---


def _openclip(config: Mapping[str, Any], file: Path) -> Told:
    model, process = config["model_cfg"], config.get("preprocess_cfg", {})
    vision = model["vision_cfg"]
    pixels = Pixels(CLIP_MEAN, CLIP_STD)  # open_clip's own default
    if process.get("mean") and process.get("std"):
        pixels = Pixels(tuple(process["mean"]), tuple(process["std"]))
    if isinstance(vision, dict) and vision.get("timm_model_name"):
        return Told(
            arch=f"timm:{vision['timm_model_name']}", pixels=pixels, by=file.name, names=True
        )
    quick = bool(model.get("quick_gelu", False))
    return Told(activation="quick_gelu" if quick else "gelu", pixels=pixels, by=file.name)
