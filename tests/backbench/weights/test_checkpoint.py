"""A checkpoint is complete or refused, saved and loaded alike, and its digest tells the weights."""

import hashlib
import json

import pytest
import torch

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import importing
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import build_backbone, trunk_shapes


@pytest.fixture(scope="module")
def trunk():
    torch.manual_seed(0)
    return build_backbone("resnet18").state_dict()


def make(trunk, **changes):
    fields = {"arch": "resnet18", "method": "demo", "state_dict": trunk}
    return Checkpoint(**(fields | changes))


@pytest.fixture(scope="module")
def narrow():
    """Make a checkpoint of a sixteenth of the weights, for what its file is about."""
    torch.manual_seed(0)
    arch = "resnet18,width=0.25"
    return make(build_trunk(arch).state_dict(), arch=arch)


def test_saved_and_loaded_without_a_difference(trunk, tmp_path):
    heads = {
        "projector.0.weight": torch.randn(3, 4),
        "projector.1.steps": torch.tensor(7),
    }
    pixels = Pixels((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "BGR")
    provenance = {"name": "Demo, 5 epochs", "recipe": {"optim": {"lr": 0.1}}}
    original = make(trunk, epochs=5, heads=heads, pixels=pixels, provenance=provenance)
    original.save(tmp_path / "x.safetensors")
    loaded = Checkpoint.load(tmp_path / "x.safetensors")
    assert loaded.digest == original.digest
    about = (loaded.name, loaded.epochs, loaded.pixels, loaded.stem)
    assert about == ("Demo, 5 epochs", 5, original.pixels, "imagenet")
    assert loaded.provenance == original.provenance
    for part in ("state_dict", "heads"):
        mine = getattr(loaded, part)
        theirs = getattr(original, part)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        features = original.backbone().eval()(images)
        assert torch.equal(loaded.backbone().eval()(images), features)


def test_digest_is_sha256_over_sorted_names_shapes_and_bytes(trunk):
    sha = hashlib.sha256()
    for name in sorted(trunk):
        if not name.endswith("num_batches_tracked"):
            shape = tuple(trunk[name].shape)
            sha.update(f"{name} {shape}\n".encode() + trunk[name].numpy().tobytes())
    assert make(trunk).digest == sha.hexdigest()
    shuffled = dict(reversed(trunk.items()))
    other = make(shuffled, method="other", heads={"a": torch.ones(1)})
    assert other.digest == sha.hexdigest()
    counted = trunk | {"bn1.num_batches_tracked": torch.tensor(99)}
    assert make(counted).digest == sha.hexdigest()
    moved = trunk | {"bn1.running_mean": trunk["bn1.running_mean"] + 1e-7}
    assert make(moved).digest != sha.hexdigest()


def test_only_absent_counters_are_forgiven(trunk):
    bare = {k: v for k, v in trunk.items() if not k.endswith("num_batches_tracked")}
    made = make(bare)
    assert len(made.state_dict) == len(trunk_shapes("resnet18")) == 120
    assert made.state_dict["bn1.num_batches_tracked"].dtype == torch.int64
    without = {k: v for k, v in bare.items() if k != "layer1.0.bn1.running_mean"}
    with pytest.raises(
        BadInput, match=r"1 of 120 tensors missing: layer1\.0\.bn1\.running_mean"
    ):
        make(without)
    with pytest.raises(
        BadInput, match=r"1 of 120 tensors not part of the trunk: fc\.weight"
    ):
        make(bare | {"fc.weight": torch.ones(2)})
    said = (
        r"of the wrong shape: conv1\.weight \(64, 3, 7, 7\) instead of \(64, 3, 3, 3\)"
    )
    with pytest.raises(BadInput, match=said):
        make(bare, stem="conv3")
    with pytest.raises(BadInput, match=r"missing: .* and \d+ more"):
        make(bare, arch="resnet50")
    with pytest.raises(BadInput, match="cannot be used: not finite"):
        make(bare | {"conv1.weight": bare["conv1.weight"] * float("inf")})


def test_values_become_float32_on_the_cpu(trunk):
    half = {}
    for key, value in trunk.items():
        half[key] = value.to(torch.float16) if value.is_floating_point() else value
    fitted = make(half).state_dict
    assert fitted["conv1.weight"].dtype == torch.float32
    assert torch.equal(fitted["conv1.weight"], half["conv1.weight"].float())
    key = "layer1.0.conv1.weight"
    sideways = trunk | {key: trunk[key].transpose(0, 1)}
    assert make(sideways).state_dict[key].is_contiguous()


def rewritten(path, change):
    """Write the file again with its header changed: it is 8 bytes of length, JSON, then the data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["about"])
    change(about)
    header["__metadata__"]["about"] = json.dumps(about)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda about: about.update(schema=2),
            "checkpoint schema 2; this version reads 1",
        ),
        (lambda about: about.pop("pixels"), "header is incomplete"),
        (lambda about: about.update(digest="0" * 64), "do not match the digest"),
        (lambda about: about.update(arch="resnet34"), "tensors missing"),
        (lambda about: about.update(arch="vgg"), "unknown architecture 'vgg'"),
        (lambda about: about["pixels"].update(std=[0.2, 0.0, 0.2]), "std"),
        (lambda about: about["pixels"].update(mean=[0.5, 0.5, 1e999]), "mean"),
        (lambda about: about.update(method="a\nb"), "control character"),
        (lambda about: about.update(method=["a"]), "method"),
        (lambda about: about.update(epochs=1.5), "epochs"),
        (lambda about: about.update(provenance=[]), "header"),
        (
            lambda about: about.update(provenance={"name": "\x1b[2J"}),
            "control character",
        ),
    ],
)
def test_a_changed_header_is_refused(change, message, narrow, tmp_path):
    path = tmp_path / "x.safetensors"
    narrow.save(path)
    rewritten(path, change)
    with pytest.raises(BadInput, match=message) as error:
        Checkpoint.load(path)
    assert str(path) in str(error.value)


def test_damage_is_refused(narrow, tmp_path):
    path = tmp_path / "x.safetensors"
    narrow.save(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    said = "do not match the digest in the header; the file is damaged"
    with pytest.raises(BadInput, match=said):
        Checkpoint.load(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadInput, match="not a backbench checkpoint"):
        Checkpoint.load(path)
    with pytest.raises(BadInput, match="no such checkpoint file"):
        Checkpoint.load(tmp_path / "none.safetensors")


def test_a_file_is_hashed_once(narrow, tmp_path, monkeypatch):
    """When it is written, and when it is read under another name."""
    hashed = []
    digest_of_tensors = Checkpoint._digest_of_tensors

    def counted(checkpoint):
        hashed.append(checkpoint.name)
        return digest_of_tensors(checkpoint)

    monkeypatch.setattr(Checkpoint, "_digest_of_tensors", counted)
    narrow.replace().save(tmp_path / "x.safetensors")
    assert hashed == ["demo"]
    found = importing.read(tmp_path / "x.safetensors", name="Other", epochs=3)
    assert (found.name, found.digest) == ("Other", digest_of_tensors(narrow))
    assert hashed == ["demo", "demo"]
    moved = {key: value + 1 for key, value in found.state_dict.items()}
    assert found.replace(state_dict=moved).digest != found.digest


def test_a_failed_save_leaves_the_old_file(narrow, tmp_path):
    path = tmp_path / "x.safetensors"
    narrow.save(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        narrow.replace(provenance={"recipe": object()}).save(path)  # not JSON
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]
