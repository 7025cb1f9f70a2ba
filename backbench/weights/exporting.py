"""Writes a Checkpoint as files of other libraries."""

import pickle
import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.runs import atomic
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.family import NATIVE
from backbench.weights.tensor_names import detectron2_name

LIBRARIES = ("torchvision", "timm", "detectron2")


def loaded_by(checkpoint: Checkpoint, library: str, file: Path) -> str:
    """Return how the library loads the checkpoint once it is written. BadInput for a library that
    does not have such a trunk names those that do; `file` is the checkpoint's, for the command."""
    calls = {}
    for each in LIBRARIES:
        call = checkpoint.family.loaded_by(checkpoint.arch, checkpoint.stem, each)
        if call is not None:
            calls[each] = call
    if library in calls:
        return calls[library]
    kind = checkpoint.arch
    if checkpoint.stem not in (NATIVE, "imagenet"):
        kind += f" with the stem {checkpoint.stem}"
    word = shlex.quote(str(file))
    lacks = f"{file}: '{checkpoint.name}' is a {kind}, which {library} does not have"
    if calls:
        commands = [
            f"`backbench export {word} --format {each} --out F`" for each in calls
        ]
        raise BadInput(f"{lacks}; write {' or '.join(commands)}")
    raise BadInput(
        f"{lacks}, nor has any other library here; `backbench inspect {word}` says what backbench"
        f" itself does with it, and in Python backbench.load('{file}').backbone() builds it"
    )


def write_state_dict(checkpoint: Checkpoint, out: Path) -> None:
    """Write a file for torchvision and timm, and OUT.json with what such a file does not tell."""
    atomic.write_json(out.with_name(out.name + ".json"), checkpoint.about())
    with atomic.atomic_path(out) as temporary:
        if out.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(dict(checkpoint.state_dict), temporary, metadata={"format": "pt"})
        else:
            torch.save(dict(checkpoint.state_dict), temporary)


def detectron2_pixels(pixels: Pixels) -> dict[str, list[float]]:
    """Return pixel statistics in Detectron2's units, 0..255."""
    return {
        "pixel_mean": [255 * value for value in pixels.mean],
        "pixel_std": [255 * value for value in pixels.std],
    }


def to_detectron2(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename every tensor of the trunk to Detectron2's names (res2.0.conv1.norm.weight, ...)."""
    return {detectron2_name(key): tensor for key, tensor in state_dict.items()}


def write_detectron2(checkpoint: Checkpoint, out: Path) -> None:
    """Write a file for MODEL.WEIGHTS: Detectron2 reads `model`, our import `backbench`, too."""
    header = checkpoint.about()
    pixels = checkpoint.pixels
    header["pixels"] |= {"input_format": pixels.order, **detectron2_pixels(pixels)}
    model = to_detectron2(checkpoint.state_dict)
    content = {
        "model": {name: tensor.numpy() for name, tensor in model.items()},
        # With `model` and these two keys, detectron2/checkpoint/detection_checkpoint.py reads the
        # file as it is, and finds backbone.bottom_up.* by the ends of the names.
        "__author__": "backbench",
        "matching_heuristics": True,
        "backbench": header,
    }
    with atomic.atomic_path(out) as temporary, temporary.open("wb") as file:
        pickle.dump(content, file, protocol=4)
