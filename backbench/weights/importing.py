"""Turns published checkpoint files, names of weights, and a program's modules into Checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from backbench.errors import BadInput
from backbench.images.preprocess import PIXELS, Pixels
from backbench.runs import seeding
from backbench.weights import archs, assembling, hub_files, readings
from backbench.weights.assembling import PIXEL_CHOICES
from backbench.weights.checkpoint import (
    PIXELS_FROM,
    Checkpoint,
    assumed_pixels,
    from_safetensors,
)
from backbench.weights.choosing import choose
from backbench.weights.family import NATIVE, POSITION_RULES, NamedWeights, TrunkMetadata
from backbench.weights.file_contents import FileContents
from backbench.weights.leftovers import left_behind
from backbench.weights.trunk import Trunk
from backbench.weights.weight_file import open_file


def read(
    path: str | Path,
    *,
    encoder: str | None = None,
    method: str | None = None,
    epochs: int | None = None,
    name: str | None = None,
    published: str | Sequence[str] | None = None,
    stem: str | None = None,
    allow_missing_statistics: bool = False,
    arch: str | None = None,
    reading: str | None = None,
    pixels: str | None = None,
    pos: str | None = None,
    rename: str | None = None,
) -> Checkpoint:
    """Open a Checkpoint file or any published format (docs/checkpoints.md), executing none of it.

    `encoder` chooses among several trunks and `stem` among the paddings of a 3x3 first convolution;
    `arch`, `reading`, `pixels` (`PIXEL_CHOICES`) and `pos` tell what no file of a vision transformer
    tells; `rename` (`by-order`, or a file of rules) gives the tensors the names of `arch`; `method`,
    `epochs`, `name` and `published` override or add to the file. BadInput names the
    tensor, key or prefix for anything that is not exactly one whole trunk.
    """
    if rename and not arch:
        raise BadInput(f"{path}: --rename {rename}: say whose names it gets, by --arch")
    asked = _metadata(arch, reading, pixels, pos, method)
    added: dict[str, object] = {}
    if published is not None:
        added["published"] = (
            published if isinstance(published, str) else list(published)
        )
    # 1. `path` may name a cached file, or a trunk that is drawn anew. A file of the Hub's cache is
    #    read like any other
    if hub_files.is_name(path):
        cached = hub_files.held(path)
        path = cached.path
        name = name or cached.name
        added["hub"] = cached.source
    named = archs.named_weights(path, asked)
    if named is None:
        named = NamedWeights("", asked, Path(path))
    elif encoder is not None or stem is not None or arch:
        raise BadInput(
            f"{path}: names one trunk; leave out the choice of encoder, stem, arch"
        )
    elif named.file is not None:
        name = name or named.name
        added["timm_weights"] = named.name
    # 2. The trunk: drawn, or from a file, ours or somebody else's
    if named.file is None:
        checkpoint = drawn(named.name, named.metadata)
    else:
        opened = open_file(named.file)
        metadata = named.metadata
        chosen = encoder is not None or stem is not None
        if opened.own_tensors is None:
            contents = FileContents(opened, metadata, rename or "")
            trunk = choose(contents, encoder)
            checkpoint = assembling.checkpoint(
                contents, trunk, stem, allow_missing_statistics
            )
            left = left_behind(contents, trunk)
            if left:
                added["left_behind"] = left
            if contents.renamed:
                added["renamed"] = dict(contents.renamed)
        elif chosen or metadata.arch or metadata.pixels:
            raise BadInput(
                f"{opened.path}: a backbench checkpoint holds one trunk; leave out the choice of"
                " encoder, stem, arch and pixels"
            )
        else:
            checkpoint = from_safetensors(
                opened.path, opened.own_tensors, opened.metadata
            )
            if metadata.reading:
                checkpoint = checkpoint.replace(reading=metadata.reading)
    # 3. Options that override what the file tells
    if reading and checkpoint.reading != reading:
        raise BadInput(
            f"{path}: --reading {reading}: {checkpoint.arch} is read by '{checkpoint.reading}' alone;"
            " leave it out"
        )
    if pos:
        # The rule is part of the trunk's name: with another rule the same tensors give other
        # features for images of other sizes.
        arch = checkpoint.family.with_options(checkpoint.arch, {"pos": pos})
        checkpoint = checkpoint.replace(arch=arch)
    return checkpoint.described(name, method, epochs, **added)


def _metadata(
    arch: str | None,
    reading: str | None,
    pixels: str | None,
    pos: str | None,
    method: str | None,
) -> TrunkMetadata:
    """Collect what the command line tells. BadInput for values that do not exist."""
    if arch and not archs.family_of(arch).named_for_files:
        raise BadInput(
            f"--arch {arch[:80]}: a trunk of this kind is known by its tensors; leave out --arch"
        )
    if reading and reading not in (readings.POOLED, readings.MAP):
        readings.tokens(reading)  # refuses what is no reading
    if pixels and pixels not in PIXEL_CHOICES:
        raise BadInput(f"--pixels {pixels[:40]}: expected {', '.join(PIXEL_CHOICES)}")
    if pos and pos not in POSITION_RULES:
        raise BadInput(f"--pos {pos[:40]}: expected {', '.join(POSITION_RULES)}")
    return TrunkMetadata(
        arch=arch or "",
        reading=reading or "",
        pixels=PIXELS[pixels] if pixels else None,
        method=method or "",
    )


def drawn(name: str, metadata: TrunkMetadata) -> Checkpoint:
    """Make a checkpoint of random weights, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.seed_of("timm@random"))
        trunk = archs.build_trunk(metadata.arch, reading=metadata.reading)
    return Checkpoint(
        arch=metadata.arch,
        method="random",
        epochs=0,
        reading=trunk.reading,
        state_dict=trunk.state_dict(),
        pixels=metadata.pixels or archs.default_pixels(metadata.arch),
        provenance={"name": name},
    )


def checkpoint_of(module: nn.Module, pixels: Pixels | None = None) -> Checkpoint | None:
    """Return the checkpoint of a known family's module, or None. `pixels` override the family's."""
    module_class = type(module).__name__
    stem = "imagenet"  # a family without stems takes this for its own
    reading = ""
    given: tuple[str, Pixels] | None = None
    # 1. The trunk that the module is: one that its own name builds, or one that a family knows
    if isinstance(module, Trunk):
        module_class = type(getattr(module, "model", module)).__name__
        try:
            arch, stem = archs.canonical(
                getattr(module, "arch", ""), getattr(module, "stem", NATIVE)
            )
            given = arch, archs.default_pixels(arch)
            reading = module.reading
        except BadInput:
            # No name builds it; `of_module` gives it one.
            pass
    for family in archs.FAMILIES:
        given = given or family.of_module(module)
    if given is None:
        return None
    arch, own_pixels = given
    # 2. Its weights
    name = module_class
    state_dict = module.state_dict()
    if not isinstance(module, Trunk):
        # The module is timm's; its classifier is not part of the trunk.
        name = arch.rpartition(":")[2]
        inside = archs.tensors(arch, stem)
        state_dict = {key: value for key, value in state_dict.items() if key in inside}
    # 3. Where they come from. A module that other processes cannot build has no usual pixels
    provenance = {"name": name, "source": f"module {module_class}"}
    if pixels is None and not archs.family_of(arch).elsewhere:
        provenance[PIXELS_FROM] = assumed_pixels(arch, own_pixels, "the module")
    return Checkpoint(
        arch=arch,
        stem=stem,
        reading=reading,
        method="module",
        state_dict=state_dict,
        pixels=pixels or own_pixels,
        provenance=provenance,
    )
