"""`timm:NAME` where a checkpoint is expected: timm's own weights, from the local cache alone.

    timm:convnext_tiny                  the weights of timm's default tag
    timm:convnext_tiny.fb_in22k         of another tag
    timm:vit_small_patch16_224@random   none: drawn anew, always the same

No network: where the cache has no such file, the message says how to fetch it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.runs import seeding
from backbench.weights import archs, timm_trunk
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.sidecar_metadata import Told

RANDOM = "@random"
_FILE = "model.safetensors"
_NAME = re.compile(r"timm:(\w{1,80})(?:\.(\w{1,80}))?((?:,[^,@]*)*)(@random)?")


def is_name(text: object) -> bool:
    """Whether this is a name and no file: `timm:...`, as a text or as a path made of one."""
    return str(text).startswith(timm_trunk.PREFIX)


def random(text: object, told: Told) -> Checkpoint | None:
    """A freshly drawn trunk, the same each time; None where the name asks for weights."""
    model, tag, options, drawn = _parts(text)
    if not drawn:
        return None
    if tag:
        raise BadInput(f"{text}: what is random has no tag; leave out .{tag}")
    arch = model if archs.is_resnet(model) and not options else _arch(model, options, told)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.seed_of("timm@random"))
        trunk = archs.build_trunk(arch, reading=told.reading)
    return Checkpoint(
        arch=arch,
        method="random",
        epochs=0,
        reading=trunk.reading,
        state_dict=trunk.state_dict(),
        pixels=told.pixels or Pixels(),
        provenance={"name": str(text)},
    )


def cached(text: object, told: Told) -> tuple[Path, Told]:
    """The file of a name's weights in the local cache, and what timm says of them.

    BadInput, with the command that fetches it, where the cache has none.
    """
    from huggingface_hub import try_to_load_from_cache

    model, tag, options, _ = _parts(text)
    about = _about(model, tag)
    repository = str(about.hf_hub_id)
    arch = _arch(model, options, told)
    found = try_to_load_from_cache(repository, about.hf_hub_filename or _FILE)
    if not isinstance(found, str) or not Path(found).is_file():
        raise BadInput(
            f"{text}: {repository} is not in the local cache ($HF_HUB_CACHE or $HF_HOME), and nothing"
            f" is downloaded here; fetch it with `hf download {repository}`, or use"
            f" {timm_trunk.PREFIX}{model}{options}{RANDOM} for no weights"
        )
    pixels = Pixels(tuple(about.mean), tuple(about.std))
    said = Told(
        arch=arch, pixels=pixels, licence=str(about.license or ""), by=repository, names=True
    )
    if archs.is_resnet(model) and not options:  # one of ours, under its one name
        said = Told(pixels=pixels)
    return Path(found), told.over(said)


def name_of(text: object) -> str:
    """What a row of it is called: the model and its tag."""
    model, tag, _, _ = _parts(text)
    return f"{model}.{_about(model, tag).tag}"


def _arch(model: str, options: str, told: Told) -> str:
    arch = str(timm_trunk.parse(timm_trunk.PREFIX + model + options))
    return archs.with_options(arch, told.options) if told.options else arch


def _parts(text: object) -> tuple[str, str, str, bool]:
    """(model, tag, ',key=value,...', random)"""
    found = _NAME.fullmatch(str(text))
    if found is None:
        raise BadInput(
            f"'{str(text)[:120]}': expected timm:NAME, timm:NAME.TAG or timm:NAME@random,"
            " with ,key=value before the @"
        )
    return found[1], found[2] or "", found[3] or "", found[4] is not None


def _about(model: str, tag: str) -> Any:
    """What timm keeps with a model's weights."""
    from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg

    timm_trunk.parse(timm_trunk.PREFIX + model)  # a name that it registers
    tags = [name.partition(".")[2] for name in get_arch_pretrained_cfgs(model)]
    if tag and tag not in tags:
        raise BadInput(f"timm:{model} has no weights '{tag}'; {nearest(tag, tags)}")
    about = get_pretrained_cfg(f"{model}.{tag}" if tag else model)
    if about is None or not about.hf_hub_id:
        raise BadInput(
            f"timm:{model} has no weights on the Hub;"
            f" {timm_trunk.PREFIX}{model}{RANDOM} is the trunk without any"
        )
    return about
