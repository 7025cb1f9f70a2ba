"""Writes a Checkpoint as files of other libraries."""

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.runs import atomic
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.tensor_names import detectron2_name


def write_state_dict(checkpoint: Checkpoint, out: Path) -> None:
    """Write a file for torchvision and timm; they keep no pixel statistics, so OUT.json does."""
    atomic.write_json(out.with_name(out.name + ".json"), checkpoint.about())
    with atomic.atomic_path(out) as temporary:
        if out.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(dict(checkpoint.state_dict), temporary, metadata={"format": "pt"})
        else:
            torch.save(dict(checkpoint.state_dict), temporary)


def detectron2_pixels(pixels: Pixels) -> dict[str, list[float]]:
    """Pixel statistics in Detectron2's units, 0..255."""
    mean, std = (
        [255 * value for value in values] for values in (pixels.mean, pixels.std)
    )
    return {"pixel_mean": mean, "pixel_std": std}


def to_detectron2(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names -> Detectron2's (res2.0.conv1.norm.weight, ...); every tensor of the trunk."""
    return {detectron2_name(key): tensor for key, tensor in state_dict.items()}


def write_detectron2(checkpoint: Checkpoint, out: Path) -> None:
    """A file for MODEL.WEIGHTS: Detectron2 reads `model`, our import also `backbench`."""
    if checkpoint.stem != "imagenet":
        raise BadInput(
            f"Detectron2's ResNet has the imagenet stem; '{checkpoint.name}' has '{checkpoint.stem}'"
        )
    header = checkpoint.about()
    pixels = checkpoint.pixels
    header["pixels"] |= {"input_format": pixels.order, **detectron2_pixels(pixels)}
    model = to_detectron2(checkpoint.state_dict)
    content = {
        "model": {name: tensor.numpy() for name, tensor in model.items()},
        # With `model`, this makes detectron2/checkpoint/detection_checkpoint.py read the file as is,
        # and find backbone.bottom_up.* by the ends of the names
        "__author__": "backbench",
        "matching_heuristics": True,
        "backbench": header,
    }
    with atomic.atomic_path(out) as temporary, temporary.open("wb") as file:
        pickle.dump(content, file, protocol=4)
