"""Weight files and data sets by strangers: nothing in them is run or believed."""

import os
import pickle

import numpy as np
import torch
from support.strangers import Calls, Pointers, cut_record, door, opened, refused, write_cifar10

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
