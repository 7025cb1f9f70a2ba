"""Wrong weights end `import` in one line: the file, what is wrong with it, and what to write."""

import pickle

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from support import timm_fixtures as fx

from backbench.cli import program
from backbench.weights.families.resnet_trunk import trunk_shapes

VIT = "timm:vit_tiny_patch16_224" + fx.SMALL_VIT
NAMED = ("--arch", VIT, "--pixels", "half")


def state(**changes):
    """Return a small transformer's tensors; a change of None leaves one out."""
    out = fx.known(VIT)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del out[key]
        else:
            out[key] = tensor
    return out


def of_bytes(name, content):
    def write(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def of_torch(content, name="x.pth"):
    def write(folder):
        torch.save(content(), folder / name)
        return folder / name

    return write


def a_picture(folder):
    Image.new("RGB", (8, 8)).save(folder / "x.png")
    return folder / "x.png"


def arrays(folder):
    np.savez(folder / "x.npz", weight=np.ones(3))
    return folder / "x.npz"


def a_script(folder):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), folder / "x.pt")
    return folder / "x.pt"


def cut_in_half(folder):
    torch.save(state(), folder / "whole.pth")
    content = (folder / "whole.pth").read_bytes()
    (folder / "whole.pth").unlink()
    (folder / "x.pth").write_bytes(content[: len(content) // 2])
    return folder / "x.pth"


def one_of_three(folder):
    file = folder / "model-00001-of-00003.safetensors"
    save_file({"blocks.0.norm1.weight": torch.ones(3)}, file)
    return file


def a_list_of_files(folder):
    file = folder / "model.safetensors.index.json"
    file.write_text('{"weight_map": {}}')
    return file


def a_folder_of_pieces(folder):
    (folder / "run").mkdir()
    (folder / "run" / "__0_0.distcp").write_bytes(b"x")
    return folder / "run"


def a_program(folder):
    content = pickle.dumps({"hook": eval})
    (folder / "x.pkl").write_bytes(content)
    return folder / "x.pkl"


def misspelt(folder):
    (folder / "resnet50.pth").write_bytes(b"x")
    return folder / "resnet5O.pth"


def sized(width, classes=0, **more):
    """Return the tensors of a transformer of one block, for pictures of 24 pixels."""
    options = {"embed_dim": width, "num_heads": 1, "depth": 1, "img_size": 24} | more
    model = timm.create_model(
        "vit_tiny_patch16_224", patch_size=8, num_classes=classes, **options
    )
    return model.state_dict()


def resnet18(channels):
    """Return a ResNet-18's tensors, whose first convolution takes so many channels."""
    tensors = {
        key: torch.ones(shape) for key, shape in trunk_shapes("resnet18").items()
    }
    return tensors | {"conv1.weight": torch.ones(64, channels, 7, 7)}


def lite(classes=0):
    return timm.create_model("tf_efficientnet_lite0", num_classes=classes).state_dict()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
ONNX = b"\x08\x07\x12\x07pytorch\x1a\x052.1.0" + bytes(99)
NAN = torch.full((32,), float("nan"))
LAYER = torch.ones(32, dtype=torch.int8)
# What it is: (the file, options, its value in the line, what the line says to write)
CASES = {
    "no file": (misspelt, (), "no such file", "did you mean"),
    "empty": (of_bytes("x.pth", b""), (), "empty", "download it again"),
    "cut": (cut_in_half, (), "truncated", "download it again"),
    "LFS": (of_bytes("x.pth", POINTER), (), "LFS pointer", "`git lfs pull`"),
    "HTML": (of_bytes("x.pth", b"<!DOCTYPE html>"), (), "web page", "fetch the file"),
    "ONNX": (of_bytes("x.onnx", ONNX), (), "ONNX", "state_dict() with torch.save"),
    "Keras": (of_bytes("x.h5", b"\x89HDF\r\n\x1a\n"), (), "HDF5", "torch.save"),
    "gzip": (of_bytes("x.pth", b"\x1f\x8b\x08\x00a"), (), "gzip", "unpack it first"),
    "text": (of_bytes("x.pth", b"lr: 1\n" * 9), (), "'lr: 1'", "give the file of the"),
    "picture": (a_picture, (), "a picture", "give the file of the weights"),
    "npz": (arrays, (), "numpy archive", "torch.save"),
    "script": (a_script, (), "TorchScript", "save model.state_dict()"),
    "model": (
        of_torch(lambda: torch.nn.Linear(2, 2)),
        (),
        "torch.nn.modules.linear.Linear",
        "write model.state_dict()",
    ),
    "program": (a_program, (), "builtins.eval", "write the tensors alone"),
    "no tensors": (of_torch(dict), (), "no tensors", "save model.state_dict()"),
    "head": (
        of_torch(lambda: {"fc.weight": torch.ones(5, 9), "fc.bias": torch.ones(5)}),
        (),
        "fc.weight",
        "give the file of the whole model",
    ),
    "text model": (
        of_torch(lambda: {f"layers.{i}.w": torch.ones(3) for i in range(30)}),
        (),
        "30 tensors: layers.0.w",
        "--arch timm:NAME",
    ),
    "bare": (of_torch(state), (), "no known format", "--method dino, ibot or mae"),
    "missing": (
        of_torch(lambda: state(blocks__1__norm1__weight=None)),
        NAMED,
        "1 missing: blocks.1.norm1.weight",
        "give the whole file",
    ),
    "extra": (
        of_torch(lambda: state(blocks__0__gate=torch.ones(3))),
        NAMED,
        "1 extra inside the trunk: blocks.0.gate",
        "--arch timm:NAME",
    ),
    "not finite": (
        of_torch(lambda: state(norm__weight=NAN)),
        NAMED,
        "norm.weight (not finite)",
        "give an earlier checkpoint",
    ),
    "integers": (
        of_torch(lambda: state(norm__weight=LAYER)),
        NAMED,
        "norm.weight (int8)",
        "in floating point",
    ),
    "no such network": (
        of_torch(state),
        ("--arch", "timm:vit_tiny_patch16_225"),
        "'vit_tiny_patch16_225'",
        "did you mean",
    ),
    "timm's name alone": (
        of_torch(state),
        ("--arch", "vit_tiny_patch16_224,patch_size=8"),
        "'vit_tiny_patch16_224,patch_size=8'",
        "did you mean 'timm:vit_tiny_patch16_224,patch_size=8'?",
    ),
    "another size": (
        of_torch(lambda: fx.prefixed("net.", sized(192, classes=7))),
        (),
        "by shapes it is timm's vit_tiny_patch16_224",
        "--arch timm:vit_tiny_patch16_224,depth=1,img_size=24,patch_size=8 --out"
        " X.safetensors` (num_heads=N says",
    ),
    "another size than named": (
        of_torch(lambda: {"model": sized(192)}),
        ("--arch", "timm:vit_tiny_patch16_224,depth=1"),
        "2 of the wrong shape: pos_embed (1, 10, 192)",
        "--arch timm:vit_tiny_patch16_224,depth=1,img_size=24,patch_size=8 --out",
    ),
    "another width": (
        of_torch(lambda: sized(48, mlp_ratio=2.5)),
        (),
        "with N heads, as it was trained",
        "timm:vit_tiny_patch16_224,depth=1,embed_dim=48,img_size=24,mlp_ratio=2.5,"
        "num_heads=N,patch_size=8 --out",
    ),
    "gray transformer": (
        of_torch(lambda: sized(192, in_chans=1)),
        (),
        "takes 1 channel, and",
        "with `features` that make 1 of three (docs/python.md)",
    ),
    "four channels": (
        of_torch(lambda: resnet18(channels=4)),
        (),
        "1 of the wrong shape: conv1.weight (64, 4, 7, 7) instead of (64, 3, 7, 7)",
        "takes 4 channels, and pictures are read as three (RGB); measure the module",
    ),
    "two networks": (
        of_torch(lite),
        (),
        "tf_efficientnet_lite0 (eps 0.001",
        "--arch timm:NAME --out",
    ),
    "another order": (
        of_torch(
            lambda: {f"net.{key}": value for key, value in sorted(lite().items())}
        ),
        ("--arch", "timm:tf_efficientnet_lite0", "--rename", "by-order"),
        "stands where tf_efficientnet_lite0 has",
        "--rename FILE",
    ),
    "no rules": (
        of_torch(state),
        (*NAMED, "--rename", "rules.txt"),
        "rules.txt: no such file of rules",
        "REGEX -> NAME",
    ),
    "rename to whom": (
        of_torch(state),
        ("--rename", "by-order"),
        "--rename by-order",
        "by --arch",
    ),
    "no classifier": (
        of_torch(lite),
        ("--check", "."),
        "no classifier",
        "leave out --check",
    ),
    "a third": (one_of_three, (), "3 files", "join them with `python -c"),
    "list": (a_list_of_files, (), "the list of a model's files", "`backbench inspect"),
    "pieces": (a_folder_of_pieces, (), ".distcp", "dcp_to_torch"),
    "two trunks": (
        of_torch(lambda: fx.prefixed("a.", state()) | fx.prefixed("b.", state())),
        NAMED,
        "'a.' and 'b.'",
        "--encoder a or b",
    ),
    "reading": (
        of_torch(state),
        (*NAMED, "--reading", "last"),
        "last",
        "cls",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_names_file_value_and_next_step(case, tmp_path, monkeypatch, capsys):
    make, options, value, step = CASES[case]
    folder = tmp_path / "given"
    folder.mkdir()
    monkeypatch.chdir(folder)
    file = make(folder)
    before = sorted(folder.rglob("*"))
    out = folder / "out.safetensors"
    assert program.main(["import", str(file), "--out", str(out), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    for word in (value, step):
        assert word in printed.err
    if "--arch" not in options and "--rename" not in options:
        assert str(file) in printed.err
    assert sorted(folder.rglob("*")) == before
