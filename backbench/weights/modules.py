"""A torch module that a program holds -> Checkpoint."""

from torch import nn

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import archs
from backbench.weights.checkpoint import PIXELS_FROM, Checkpoint, assumed_pixels
from backbench.weights.family import NATIVE
from backbench.weights.trunk import Trunk


def checkpoint_of(module: nn.Module, pixels: Pixels | None = None) -> Checkpoint | None:
    """The checkpoint of a module that some family of trunks knows; None for any other module.
    `pixels` are the statistics that it takes, where they are not the family's own."""
    kind, reading, stem = type(module).__name__, "", "imagenet"  # a family without stems knows it
    given: tuple[str, Pixels] | None = None
    if isinstance(module, Trunk):
        kind = type(getattr(module, "model", module)).__name__
        try:  # a trunk that its name builds
            arch, stem = archs.canonical(
                getattr(module, "arch", ""), getattr(module, "stem", NATIVE)
            )
            given, reading = (arch, archs.default_pixels(arch)), module.reading
        except BadInput:
            pass  # its family gives it one
    for family in archs.FAMILIES:
        given = given or family.of_module(module)
    if given is None:
        return None
    arch, own_pixels = given
    name, state_dict = kind, module.state_dict()
    if not isinstance(module, Trunk):  # timm's, whose classifier is not part of the trunk
        name, inside = arch.rpartition(":")[2], archs.tensors(arch, stem)
        state_dict = {key: tensor for key, tensor in state_dict.items() if key in inside}
    provenance = {"name": name, "source": f"module {kind}"}
    if pixels is None and not archs.family_of(arch).elsewhere:  # no name has this one's
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
