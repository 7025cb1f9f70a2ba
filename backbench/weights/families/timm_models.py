"""Offers any timm model as a trunk (`timm_model_names`), and timm's weights wherever a checkpoint is
expected:

    timm:convnext_tiny                  the weights of timm's default tag
    timm:convnext_tiny.fb_in22k         the weights of another tag
    timm:vit_small_patch16_224@random   random weights, always the same

Weights are taken from the local cache alone. Where it has no such file, the message says how to fetch
it.
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
    NATIVE,
    NamedWeights,
    Tables,
    Tree,
    TrunkFamily,
    TrunkInFile,
    TrunkMetadata,
    native_stem,
)
from backbench.weights.tensor_names import is_counter

if TYPE_CHECKING:
    from torch import nn

    from backbench.weights.trunk import Trunk

_FILE = "model.safetensors"
_RANDOM = "@random"
_NAME = re.compile(r"timm:(\w{1,80})(?:\.(\w{1,80}))?((?:,[^,@]*)*)(@random)?")


class TimmFamily(TrunkFamily):
    """timm's trunks are vision transformers, ConvNeXts and everything else that it registers."""

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
        names = self.tensors(*self.canonical(arch, "imagenet")).keys()
        is_convnext = {"stem.0.weight", "stem.1.weight"} <= names
        return "timm's convnext" if is_convnext else "timm's"

    # The trunk

    def build(self, arch: str, stem: str, reading: str) -> Trunk:
        from backbench.weights.families.timm_trunk import TimmTrunk

        return TimmTrunk(arch, reading or self.default_reading(arch))

    def default_reading(self, arch: str) -> str:
        """Return the reading of timm's own head."""
        from backbench.weights.families import timm_trunk

        name = parse(arch)
        return timm_trunk.default_reading(name.model)

    def default_pixels(self, arch: str) -> Pixels:
        """Return the statistics of timm's default weights; imported files have their format's."""
        from backbench.weights.families import timm_trunk

        about = timm_trunk.registered(parse(arch).model).pretrained_cfg
        return Pixels(tuple(about["mean"]), tuple(about["std"]))

    def loaded_by(self, arch: str, stem: str, library: str) -> str | None:
        from backbench.weights.families import timm_trunk

        return timm_trunk.call(parse(arch)) if library == "timm" else None

    # Files and modules

    def find(
        self, tables: Tables, tree: Tree, path: Path, metadata: TrunkMetadata
    ) -> list[TrunkInFile]:
        from backbench.weights.families import timm_files

        metadata = metadata.over(sidecar_metadata.beside(path))
        # A checkpoint of timm's training names its model: {'arch': ..., 'version': 2, ...}
        trained_arch = ""
        if isinstance(tree, Mapping) and "version" in tree and "state_dict" in tree:
            named = tree.get("arch")
            if isinstance(named, str):
                trained_arch = PREFIX + named
        metadata = metadata.over(TrunkMetadata(arch=trained_arch))
        form = TIMM if metadata.names_model or trained_arch else None
        return list(timm_files.find(self, tables, metadata, form))

    def meant_by(self, word: str) -> str:
        from backbench.weights.families import architectures

        # The index, and not timm, which takes seconds to import
        model = re.split(r"[.@,]", word)[0]
        known = architectures.row_of("timm", model) is not None
        return f"{PREFIX}{word}" if known else ""

    def advice(self, tables: Tables) -> str:
        from backbench.weights.families import lookalikes, vit_shapes

        found = lookalikes.find(tables)
        if found is None:
            return vit_shapes.advice(self, tables)
        return lookalikes.advice(found, tables[found.table])

    def twins(self, arch: str, *, pixels_told: bool) -> str:
        from backbench.weights.families import lookalikes

        name = parse(arch)
        # An option makes it another network than the index has.
        if name.options:
            return ""
        return lookalikes.twins(name.model, pixels_told=pixels_told)

    def renamed(
        self, tables: Tables, arch: str, rules: str
    ) -> tuple[Tables, Mapping[str, str]]:
        from backbench.weights.families import renaming

        arch, stem = self.canonical(arch, NATIVE)
        wanted = [key for key in self.tensors(arch, stem) if not is_counter(key)]
        return renaming.renamed(tables, parse(arch).model, wanted, rules)

    def of_module(self, module: nn.Module) -> tuple[str, Pixels] | None:
        """Return the name and pixels of a module that timm made; None for any other module.

        BadInput for a module that is not as timm's name of it says: it was built with other
        arguments, or changed.
        """
        about = getattr(module, "pretrained_cfg", None)
        if about is None or "architecture" not in about:
            return None
        from backbench.weights.families import timm_trunk

        arch = f"{PREFIX}{about['architecture']}"
        trunk = timm_trunk.TimmTrunk(arch, self.default_reading(arch))
        side = int(about["input_size"][-1])
        options = timm_trunk.options_of(module, trunk)
        if options:
            arch = self.with_options(arch, options)
            trunk = timm_trunk.TimmTrunk(arch, self.default_reading(arch))
            side = int(options.get("img_size", side))
        timm_trunk.refuse_other_module(module, trunk, side)
        if about["architecture"] in ARCHS:
            # A ResNet is a trunk here under its own name.
            arch = about["architecture"]
        return arch, Pixels(tuple(about["mean"]), tuple(about["std"]))

    # Names that stand for weights

    def named_weights(self, name: str, metadata: TrunkMetadata) -> NamedWeights | None:
        if not name.startswith(PREFIX):
            return None
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise BadInput(
                f"'{name[:120]}': expected timm:NAME, timm:NAME.TAG or timm:NAME@random, with"
                " ,key=value before the @"
            )
        model = parts[1]
        tag = parts[2] or ""
        options = parts[3] or ""
        is_random = parts[4] is not None
        # A ResNet is a trunk here under its own name.
        is_resnet = model in ARCHS and not options
        # 1. Random weights
        if is_random:
            if tag:
                raise BadInput(f"{name}: what is random has no tag; leave out .{tag}")
            arch = model if is_resnet else str(parse(PREFIX + model + options))
            return NamedWeights(name, TrunkMetadata(arch=arch).over(metadata))
        # 2. timm's weights, with what timm tells of them. A ResNet's file tells the rest itself
        about = _about(model, tag)
        kept = TrunkMetadata(pixels=Pixels(tuple(about.mean), tuple(about.std)))
        if not is_resnet:
            kept = replace(
                kept,
                arch=str(parse(PREFIX + model + options)),
                licence=str(about.license or ""),
                source=str(about.hf_hub_id),
                names_model=True,
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
    """Return timm's own record of a model's weights. BadInput where it has none on the Hub."""
    from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg

    parse(PREFIX + model)  # refuses a name that timm does not register
    tags = [name.partition(".")[2] for name in get_arch_pretrained_cfgs(model)]
    if tag and tag not in tags:
        raise BadInput(f"{PREFIX}{model} has no weights '{tag}'; {nearest(tag, tags)}")
    about = get_pretrained_cfg(f"{model}.{tag}" if tag else model)
    if about is None or not about.hf_hub_id:
        raise BadInput(
            f"{PREFIX}{model} has no weights on the Hub; {PREFIX}{model}{_RANDOM} is the trunk without"
            " any"
        )
    return about


def _cached_file(name: str, model: str, about: Any) -> Path:
    """Return the file in the Hub's local cache. BadInput has the command to fetch an absent one."""
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
