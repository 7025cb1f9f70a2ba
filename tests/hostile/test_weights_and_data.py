"""Weight files and data sets by strangers: nothing in them is run or believed."""

import os
import pickle

import numpy as np
import pytest
import torch
from support.strangers import Calls, Pointers, cut_record, door, opened, refused, write_cifar10

from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import build_backbone


def state_dict():
    torch.manual_seed(0)
    return dict(build_backbone("resnet18").state_dict())


def test_cifar_batch_with_pointers_of_its_own(tmp_path):
    folder = write_cifar10(tmp_path)
    content = {"data": np.zeros((4, 3072), np.uint8), "labels": Pointers()}
    (folder / "data_batch_3").write_bytes(pickle.dumps(content, protocol=2))
    refused(opened(tmp_path, "cifar10", "train"), "data_batch_3")


def test_cifar_batch_that_calls(tmp_path):
    folder = write_cifar10(tmp_path)
    call = Calls(os.system, f"touch {tmp_path}/called")
    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": call}))
    refused(opened(tmp_path, "cifar10", "train"), "posix.system")
    assert not (tmp_path / "called").exists()


def test_zip_record_shorter_than_its_tensor(tmp_path):
    torch.save(state_dict(), tmp_path / "whole.pth")
    cut_record(tmp_path / "whole.pth", tmp_path / "cut.pth", "data/3", 10)
    refused(door("import", tmp_path / "cut.pth", "--out", tmp_path / "x.safetensors"), "data/3")
    assert not (tmp_path / "x.safetensors").exists()
    said = door("import", tmp_path / "whole.pth", "--out", tmp_path / "x.safetensors")
    assert said.status == 0, said.err


def test_hash_without_end(tmp_path):
    """Tuples of tuples: as a key, two to the power of forty of them would be hashed."""
    pair: tuple = ()
    for _ in range(40):
        pair = (pair, pair)
    folder = write_cifar10(tmp_path)
    # Pickled as a value first, so that making the file does not hash it: then `{}[pair] = 1`
    start = pickle.dumps(pair, protocol=2)[:-1]
    (folder / "data_batch_3").write_bytes(start[:2] + b"}" + start[2:] + b"K\x01s.")
    refused(opened(tmp_path, "cifar10", "train", limit_s=20), "refused")


def saved(path, **changes):
    """A torch file of a trunk with some tensors changed in place."""
    state = state_dict()
    for key, change in changes.items():
        name = key.replace("__", ".")
        state[name] = change(state[name])
    torch.save(state, path)
    return path


def first_element(value, dtype=torch.float32):
    def change(tensor):
        tensor = tensor.detach().to(dtype).clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("layer1__0__conv1__weight", first_element(float("nan")), "layer1.0.conv1.weight"),
        ("layer1__0__conv1__weight", first_element(1e300, torch.float64), "float32"),
        ("bn1__running_var", first_element(-1.0), "negative"),
    ],
)
def test_weights_that_no_number_can_come_of(tmp_path, key, change, said):
    file = saved(tmp_path / "x.pth", **{key: change})
    refused(door("import", file, "--out", tmp_path / "x.safetensors"), said)
    assert not (tmp_path / "x.safetensors").exists()


def own_checkpoint(path, about, state=None):
    """A checkpoint of ours whose header says `about`, its digest right."""
    import json

    from safetensors import safe_open
    from safetensors.torch import save_file

    Checkpoint(arch="resnet18", method="x", state_dict=state_dict()).save(path)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {k: file.get_tensor(k) for k in list(file.keys())}
    tensors |= state or {}
    metadata["about"] = json.dumps(json.loads(metadata["about"]) | about)
    save_file(tensors, path, metadata=metadata)
    return path


ZERO = {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.0, 0.2], "order": "RGB"}
ENDLESS = {"mean": [0.5, 0.5, 1e999], "std": [0.2, 0.2, 0.2], "order": "RGB"}


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"pixels": ZERO}, "std"),
        ({"pixels": ENDLESS}, "mean"),
        ({"method": "a\nb"}, "control character"),
        ({"method": ["a"]}, "method"),
        ({"epochs": 1.5}, "epochs"),
        ({"provenance": []}, "header"),
        ({"provenance": {"name": "\x1b[2J"}}, "control character"),
    ],
)
def test_header_of_a_checkpoint_of_ours(tmp_path, about, said):
    file = own_checkpoint(tmp_path / "x.safetensors", about)
    refused(door("export", file, "--format", "timm", "--out", tmp_path / "y.pth"), said)
    assert not (tmp_path / "y.pth").exists()


def test_weights_of_ours_that_are_not_finite(tmp_path):
    """With the digest made anew, so that nothing else gives them away."""
    import hashlib

    state = state_dict()
    broken = {**state, "conv1.weight": first_element(float("inf"))(state["conv1.weight"])}
    sha = hashlib.sha256()
    for name, tensor in sorted(broken.items()):
        if tensor.is_floating_point():
            sha.update(f"{name} {tuple(tensor.shape)}\n".encode())
            sha.update(tensor.contiguous().numpy().tobytes())
    tensors = {"trunk.conv1.weight": broken["conv1.weight"]}
    file = own_checkpoint(tmp_path / "x.safetensors", {"digest": sha.hexdigest()}, tensors)
    refused(door("export", file, "--format", "timm", "--out", tmp_path / "y.pth"), "conv1.weight")
