"""Any timm model as a trunk (`timm_model_names` has its names), and timm's own weights where a
checkpoint is expected, from the local cache alone:

    timm:convnext_tiny                  the weights of timm's default tag
    timm:convnext_tiny.fb_in22k         of another tag
    timm:vit_small_patch16_224@random   none: drawn anew, always the same

No network: where the cache has no such file, the message says how to fetch it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.weights.families import sidecar_metadata
from backbench.weights.families.resnet_tables import ARCHS
from backbench.weights.families.timm_formats import TIMM, TIMM_FORMATS
from backbench.weights.families.timm_model_names import PREFIX, parse
from backbench.weights.family import (
    NamedWeights,
    Tables,
    Tree,
    TrunkFamily,
    TrunkInFile,
    TrunkMetadata,
    native_stem,
)

if TYPE_CHECKING:
    from torch import nn

    from backbench.weights.trunk import Trunk

_FILE = "model.safetensors"
_RANDOM = "@random"
_NAME = re.compile(r"timm:(\w{1,80})(?:\.(\w{1,80}))?((?:,[^,@]*)*)(@random)?")


class TimmFamily(TrunkFamily):
    """timm's vision transformers, ConvNeXts and all else that it registers."""

    prefix = PREFIX
    named_for_files = True
    formats = TIMM_FORMATS

    # Names

    def canonical(self, arch: str, stem: str) -> tuple[str, str]:
        stem = native_stem(arch, stem)
        return str(parse(arch)), stem

    def with_options(self, arch: str, options: Mapping[str, str]) -> str:
        name = parse(arch)
        return str(parse(str(name._replace(options={**name.options, **options}))))

    def dialect(self, arch: str) -> str:
        names = self.tensors(*self.canonical(arch, "imagenet"))
        return (
            "timm's convnext"
            if {"stem.0.weight", "stem.1.weight"} <= names.keys()
            else "timm's"
        )

    # The trunk

    def build(self, arch: str, stem: str, reading: str) -> Trunk:
        from backbench.weights.families.timm_trunk import TimmTrunk

        return TimmTrunk(arch, reading or self.default_reading(arch))

    def default_reading(self, arch: str) -> str:
        """The reading of timm's own head."""
        from backbench.weights.families import timm_trunk

        name = parse(arch)
        return timm_trunk.default_reading(name.model)

    def default_pixels(self, arch: str) -> Pixels:
        """The statistics of timm's default weights; imported files have their format's."""
        from backbench.weights.families import timm_trunk

        about = timm_trunk.registered(parse(arch).model).pretrained_cfg
        return Pixels(tuple(about["mean"]), tuple(about["std"]))

    def loaded_by(self, arch: str, library: str) -> str | None:
        from backbench.weights.families import timm_trunk

        return timm_trunk.call(parse(arch)) if library == "timm" else None

    # Files and modules

    def find(
        self, tables: Tables, tree: Tree, path: Path, metadata: TrunkMetadata
    ) -> list[TrunkInFile]:
        from backbench.weights.families import timm_files

        metadata = metadata.over(sidecar_metadata.beside(path))
        # A checkpoint of timm's training names its model: {'arch': ..., 'version': 2, ...}
        training = ""
        if isinstance(tree, Mapping) and "version" in tree and "state_dict" in tree:
            named = tree.get("arch")
            training = PREFIX + named if isinstance(named, str) else ""
        metadata = metadata.over(TrunkMetadata(arch=training))
        form = TIMM if metadata.names_model or training else None
        return list(timm_files.find(self, tables, metadata, form))

    def of_module(self, module: nn.Module) -> tuple[str, Pixels] | None:
        """A module that timm made. BadInput where the trunk of its name is not this module: built
        with other arguments, or changed."""
        about = getattr(module, "pretrained_cfg", None)
        if about is None or "architecture" not in about:
            return None
        from backbench.weights.families import timm_trunk

        arch = f"{PREFIX}{about['architecture']}"
        trunk = timm_trunk.TimmTrunk(arch, self.default_reading(arch))
        timm_trunk.refuse_other_module(module, trunk, int(about["input_size"][-1]))
        if (
            about["architecture"] in ARCHS
        ):  # a ResNet is a trunk here under its own name
            arch = about["architecture"]
        return arch, Pixels(tuple(about["mean"]), tuple(about["std"]))

    # Names that stand for weights

    def named_weights(self, name: str, metadata: TrunkMetadata) -> NamedWeights | None:
        if not name.startswith(PREFIX):
            return None
        parts = _NAME.fullmatch(name)
        if parts is None:
            forms = "timm:NAME, timm:NAME.TAG or timm:NAME@random, with ,key=value before the @"
            raise BadInput(f"'{name[:120]}': expected {forms}")
        model, tag, options, random = (
            parts[1],
            parts[2] or "",
            parts[3] or "",
            bool(parts[4]),
        )
        # A ResNet is a trunk here under its own name
        ours = model in ARCHS and not options
        if random:
            if tag:
                raise BadInput(f"{name}: what is random has no tag; leave out .{tag}")
            arch = model if ours else str(parse(PREFIX + model + options))
            return NamedWeights(name, TrunkMetadata(arch=arch).over(metadata))
        # The metadata that timm keeps with its weights
        about = _about(model, tag)
        kept = TrunkMetadata(pixels=Pixels(tuple(about.mean), tuple(about.std)))
        if not ours:
            arch, licence = (
                str(parse(PREFIX + model + options)),
                str(about.license or ""),
            )
            source = str(about.hf_hub_id)
            kept = replace(
                kept, arch=arch, licence=licence, source=source, names_model=True
            )
        file = _cached_file(name, model + options, about)
        return NamedWeights(f"{model}.{about.tag}", metadata.over(kept), file)

    def cached_names(self) -> list[str]:
        if importlib.util.find_spec("huggingface_hub") is None:
            return []
        from huggingface_hub import constants

        out = []
        for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--timm--*")):
            if any(folder.glob(f"snapshots/*/{_FILE}")):
                out.append(PREFIX + folder.name.removeprefix("models--timm--"))
        return out


def _about(model: str, tag: str) -> Any:
    """timm's own record of a model's weights."""
    from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg

    parse(PREFIX + model)  # a name that it registers
    tags = [name.partition(".")[2] for name in get_arch_pretrained_cfgs(model)]
    if tag and tag not in tags:
        raise BadInput(f"{PREFIX}{model} has no weights '{tag}'; {nearest(tag, tags)}")
    about = get_pretrained_cfg(f"{model}.{tag}" if tag else model)
    if about is None or not about.hf_hub_id:
        none = f"{PREFIX}{model}{_RANDOM} is the trunk without any"
        raise BadInput(f"{PREFIX}{model} has no weights on the Hub; {none}")
    return about


def _cached_file(name: str, model: str, about: Any) -> Path:
    """The file in the Hub's local cache. BadInput with the command to fetch it if absent."""
    from huggingface_hub import try_to_load_from_cache

    repository = str(about.hf_hub_id)
    file = try_to_load_from_cache(repository, about.hf_hub_filename or _FILE)
    if not isinstance(file, str) or not Path(file).is_file():
        raise BadInput(
            f"{name}: {repository} is not in the local cache ($HF_HUB_CACHE or $HF_HOME), and nothing"
            f" is downloaded here; fetch it with `hf download {repository}`, or use"
            f" {PREFIX}{model}{_RANDOM} for no weights"
        )
    return Path(file)
