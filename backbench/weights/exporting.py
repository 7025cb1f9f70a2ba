"""Checkpoint -> files of other libraries, and Detectron2's names back into ours."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.runs import atomic
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_names import detectron2_name, find_trunks
from backbench.weights.tensor_names import first_names

AUTHOR = "backbench"


def about(checkpoint: Checkpoint) -> dict[str, object]:
    """Everything but the tensors, as plain values: what an exported file carries, or has beside
    it."""
    values: dict[str, object] = {
        "digest": checkpoint.digest,
        "name": checkpoint.name,
        "method": checkpoint.method,
        "arch": checkpoint.arch,
        "stem": checkpoint.stem,
        "epochs": checkpoint.epochs,
        "pixels": dataclasses.asdict(checkpoint.pixels),
        "provenance": dict(checkpoint.provenance),
    }
    if not checkpoint.family.tensors_say_all:
        values["reading"] = checkpoint.reading
    return json.loads(json.dumps(values))


def write_state_dict(checkpoint: Checkpoint, out: Path) -> None:
    """For torchvision and timm, which share names. Neither has a place for pixel statistics, so
    those lie beside the weights, in OUT.json."""
    atomic.write_json(out.with_name(out.name + ".json"), about(checkpoint))
    with atomic.atomic_path(out) as temporary:
        if out.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(dict(checkpoint.state_dict), temporary, metadata={"format": "pt"})
        else:
            torch.save(dict(checkpoint.state_dict), temporary)


# --- Detectron2 ---


class Detectron2Pixels(TypedDict):
    """Pixel statistics in Detectron2's units: 0..255, in the order of INPUT.FORMAT."""

    input_format: str
    pixel_mean: list[float]
    pixel_std: list[float]


def detectron2_pixels(pixels: Pixels) -> Detectron2Pixels:
    return {
        "input_format": pixels.order,
        "pixel_mean": [255 * v for v in pixels.mean],
        "pixel_std": [255 * v for v in pixels.std],
    }


def to_detectron2(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names -> Detectron2's (stem.conv1.weight, res2.0.conv1.norm.weight, ...); every tensor of
    the trunk."""
    return {detectron2_name(key): tensor for key, tensor in state_dict.items()}


def from_detectron2(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detectron2's names, bare or under a prefix such as `backbone.bottom_up.` -> ours. BadInput
    unless whole."""
    tensors = dict(model)
    trunks = [t for t in find_trunks({"": tensors}) if t.dialect == "detectron2"]
    if len(trunks) != 1:
        raise BadInput(
            f"{len(trunks)} Detectron2 trunks among {len(tensors)} tensors; expected one"
        )
    trunk = trunks[0]
    if trunk.missing or trunk.extra:
        wrong = [f"missing {k}" for k in trunk.missing] + [f"extra {k}" for k in trunk.extra]
        raise BadInput(f"not a whole {trunk.arch}: {first_names(wrong)}")
    return {ours: tensors[key] for ours, key in trunk.keys.items()}


def write_detectron2(checkpoint: Checkpoint, out: Path) -> None:
    """A model file for MODEL.WEIGHTS. Detectron2 reads `model`; importing restores the rest from
    `backbench`."""
    if checkpoint.stem != "imagenet":
        raise BadInput(
            f"Detectron2's ResNet has the imagenet stem; '{checkpoint.name}' has '{checkpoint.stem}'"
        )
    header = about(checkpoint)
    pixels = dataclasses.asdict(checkpoint.pixels)
    header["pixels"] = json.loads(json.dumps(pixels | detectron2_pixels(checkpoint.pixels)))
    model = to_detectron2(checkpoint.state_dict)
    content = {
        "model": {name: np.asarray(tensor.numpy()) for name, tensor in model.items()},
        # with `model`, what makes detectron2/checkpoint/detection_checkpoint.py read the file as it
        # is
        "__author__": AUTHOR,
        # it then finds backbone.bottom_up.* by the ends of the names
        "matching_heuristics": True,
        "backbench": header,
    }
    with atomic.atomic_path(out) as temporary, temporary.open("wb") as file:
        pickle.dump(content, file, protocol=4)


def own_detectron2(
    path: Path, header: Mapping[str, object], arch: str, state_dict: Mapping[str, Tensor]
) -> Checkpoint:
    """The Checkpoint that `write_detectron2` wrote into `path`, its digest verified."""
    from backbench.weights.checkpoint import from_about

    try:
        name = header["name"]
        checkpoint = from_about({**header, "arch": arch}, state_dict=state_dict)
        recorded = header["digest"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"{error!r:.100}"
        raise BadInput(f"{path}: its `backbench` header is incomplete ({said})") from None
    checkpoint = checkpoint.replace(provenance={**checkpoint.provenance, "name": name})
    if checkpoint.digest != recorded:
        raise BadInput(
            f"{path}: the weights do not match the digest in its header; it was changed after the export"
        )
    return checkpoint
