"""What a file is, by its first bytes, its records and its header; and what a checkpoint counts."""

import hashlib
import json
import tarfile
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import checkpoint as checkpoints
from backbench.weights import header, weight_file
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint

SMALL = "resnet18,width=0.25"


@pytest.fixture(scope="module")
def trunk():
    torch.manual_seed(0)
    return build_trunk(SMALL).state_dict()


def made(trunk, **changes):
    fields = {"arch": SMALL, "method": "demo", "state_dict": trunk}
    return Checkpoint(**fields | changes)


# Headers


def test_a_header_tells_the_whole_files_size(trunk, tmp_path):
    file = tmp_path / "x.safetensors"
    made(trunk, epochs=3).save(file)
    read = header.read(file)
    assert read.size == file.stat().st_size
    assert (read.about["arch"], read.about["epochs"]) == (SMALL, 3)
    assert header.digest(file) == made(trunk).digest
    file.write_bytes(file.read_bytes()[:-1])
    assert header.read(file).size == file.stat().st_size + 1


def test_other_files_have_no_description(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, file, metadata={"format": "pt"})
    read = header.read(file)
    assert (read.about, read.size) == ({}, file.stat().st_size)
    assert header.about(file) == {} and header.digest(file) is None

    def written(entries, length=None):
        text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
        size = len(text) if length is None else length
        file.write_bytes(size.to_bytes(8, "little") + text)
        return header.read(file)

    assert written({}).size == 8 + 2
    ours = {"format": header.FORMAT, "about": '{"digest": 3}'}
    assert written({"__metadata__": ours}).about == {"digest": 3}
    assert header.digest(file) is None
    for wrong in (
        b"[1]",
        b"{",
        {"a": {}},
        {"a": {"data_offsets": [0]}},
        {"a": {"data_offsets": [0, "4"]}},
        {"__metadata__": {**ours, "about": "[]"}},
        {"__metadata__": {"format": header.FORMAT}},
        {"__metadata__": []},
    ):
        assert written(wrong) is None
    # A length up to a limit; the text that is there counts
    assert written(b"{}", header.LONGEST).size == 8 + header.LONGEST
    assert written(b"{}", header.LONGEST + 1) is None
    assert header.read(tmp_path / "none") is None
    assert header.about(tmp_path) == {}


# Checkpoints


def test_trained_values_are_counted(trunk):
    count = sum(p.numel() for p in build_trunk(SMALL).parameters())
    assert made(trunk).parameters == count


def by_hand(tensors, first=""):
    sha = hashlib.sha256(first.encode())
    for name in sorted(tensors):
        if tensors[name].is_floating_point():
            sha.update(f"{name} {tuple(tensors[name].shape)}\n".encode())
            sha.update(tensors[name].numpy().tobytes())
    return sha.hexdigest()


def test_a_digest_has_pixels_that_are_not_imagenets(trunk):
    assert made(trunk).digest == by_hand(trunk)
    pixels = Pixels((0, 0.5, 1), (1, 0.25, 0.5), "BGR")
    first = "pixels (0.0, 0.5, 1.0) (1.0, 0.25, 0.5) BGR\n"
    assert made(trunk, pixels=pixels).digest == by_hand(trunk, first)


def test_what_is_told_of_a_checkpoint(trunk):
    one = made(trunk, provenance={"name": "mine", "a": (1, 2)}, epochs=0)
    assert one.about() == {
        "digest": one.digest,
        "name": "mine",
        "method": "demo",
        "arch": SMALL,
        "stem": one.stem,
        "epochs": 0,
        "pixels": {
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
            "order": "RGB",
        },
        "provenance": {"name": "mine", "a": [1, 2]},
    }
    assert made(trunk).name == "demo" and one.name == "mine"
    assert one.trunk == SMALL
    other = one.described("yours", None, 7, source="x")
    assert (other.name, other.method, other.epochs) == ("yours", "demo", 7)
    assert other.provenance == {"name": "yours", "a": (1, 2), "source": "x"}
    same = one.described(None, "moco", None)
    assert (same.name, same.method, same.epochs) == ("mine", "moco", 0)


@pytest.mark.parametrize("epochs", [None, 0, 10**9 - 1])
def test_epochs_are_a_count(trunk, epochs):
    assert made(trunk, epochs=epochs, provenance={"name": None}).epochs == epochs
    for wrong in (-1, 10**9, True, 3.0, "3"):
        with pytest.raises(BadInput, match=f"epochs are {str(wrong)!r}, not a whole"):
            made(trunk, epochs=wrong)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": None}, None),
        ({"method": ["a"]}, "the checkpoint's method is no text but \"['a']\""),
        ({"provenance": {"name": 3}}, "the checkpoint's name is no text but '3'"),
        ({"provenance": {"name": "a\tb"}}, "name holds the control character '\\t'"),
    ],
)
def test_texts_are_of_one_line(trunk, change, says):
    if says is None:
        made(trunk, **change)
        return
    with pytest.raises(BadInput) as refused:
        made(trunk, **change)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("bn.weight", [1.0, float("nan")], "not finite"),
        ("bn.weight", [1.0, float("-inf")], "not finite"),
        ("bn.weight", [3e38, 3e38], ""),  # a sum that overflows, of numbers that do not
        ("bn.weight", [1e300, 1.0], "beyond float32"),
        ("bn.weight", [-1.0, 0.0], ""),
        ("bn.running_var", [1.0, -1e-9], "negative"),
        ("bn.running_var", [0.0, 1.0], ""),
        ("bn.running_mean", [-1.0, 1.0], ""),
    ],
)
def test_which_numbers_cannot_be_a_tensors(name, value, why):
    tensor = torch.tensor(value, dtype=torch.float64)
    assert checkpoints.unusable(name, tensor) == why


def test_a_remark_on_assumed_pixels():
    pixels = Pixels((0.5, 0.25, 1), (0.1, 0.2, 0.3))
    assert checkpoints.assumed_pixels("vit", pixels, "x.pth").startswith(
        "x.pth does not say its pixels; taken are vit's usual, mean 0.5/0.25/1, std 0.1/0.2/0.3;"
    )


# Kinds of files


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com\n", "a Git LFS pointer, not the file"),
        (b"BZh91AY", "a bzip2 archive: unpack it first"),
        (b"\xfd7zXZ\x00\x00", "an xz archive: unpack it first"),
        (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive: unpack it first"),
        (b"\x28\xb5\x2f\xfd\x00\x00", "a Zstandard archive: unpack it first"),
        (b"Rar!\x1a\x07\x00", "a RAR archive: unpack it first"),
        (b"GGUF\x03\x00\x00\x00", "a GGUF file; only files of torch, safetensors"),
        (b"\x89PNG\r\n\x1a\n", "a picture, not weights; give the file of the weights"),
        (b"\xff\xd8\xff\xe0\x00\x00", "a picture, not weights"),
        (b"%PDF-1.7\n\x00\x00", "a PDF, not weights"),
        (b" \r\n\t<html>", "a web page, not weights: the download went wrong"),
    ],
)
def test_first_bytes_tell_what_is_no_file_of_weights(tmp_path, content, says):
    file = tmp_path / "x.pth"
    file.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        weight_file.open_file(file)
    assert str(refused.value).startswith(f"{file}: {says}")


def test_archives_say_what_is_in_them(tmp_path):
    inside = tmp_path / "a.txt"
    inside.write_text("x")
    with tarfile.open(tmp_path / "x.tar", "w") as out:
        out.add(inside, "a.txt")
    wanted = {"x.tar": "a tar archive: unpack it first"}
    for name, member in (("k.keras", "config.json"), ("h.keras", "model.weights.h5")):
        with zipfile.ZipFile(tmp_path / name, "w") as out:
            out.writestr(member, "{}")
        wanted[name] = "a Keras file; only files of torch"
    for name, says in wanted.items():
        with pytest.raises(BadInput) as refused:
            weight_file.open_file(tmp_path / name)
        assert str(refused.value).startswith(f"{tmp_path / name}: {says}")


def test_a_folder_names_three_of_its_files(tmp_path):
    def said():
        with pytest.raises(BadInput) as refused:
            weight_file.open_file(tmp_path)
        return str(refused.value).removeprefix(f"{tmp_path}: ")

    assert said().startswith("is a folder without a weight file (")
    for name in ("c.pth", "a.pt", "b.bin", "note.txt"):
        (tmp_path / name).touch()
    listed = "is a folder, not a weight file; give one of its files: a.pt, b.bin, c.pth"
    assert said() == listed
    (tmp_path / "d.safetensors").touch()
    assert said() == f"{listed} and 1 more"
    (tmp_path / "saved_model.pb").touch()
    assert said().startswith("a TensorFlow model; only files of torch")


def rezipped(source, target, change):
    """Copy a torch zip, with each record as change(name, data) gives it; None leaves it out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            data = change(info.filename.partition("/")[2], old.read(info))
            if data is not None:
                new.writestr(info.filename, data)
    return target


def test_a_record_is_as_long_as_its_tensors(tmp_path):
    source = tmp_path / "source.pth"
    content = {"a": torch.ones(4), "b": torch.ones(3, dtype=torch.float16)}
    torch.save(content, source)

    def opened(name, change):
        def only(record, data):
            return change(data) if record == name else data

        return weight_file.open_file(rezipped(source, tmp_path / "x.pth", only)).tree

    assert torch.equal(opened("version", bytes)["a"], content["a"])
    assert torch.equal(
        opened("data/0", lambda data: data + bytes(4))["a"], content["a"]
    )
    for name, size in (("data/0", 16), ("data/1", 6)):
        with pytest.raises(BadInput, match=f"damaged: record {name} is missing; down"):
            opened(name, lambda _: None)
        with pytest.raises(BadInput) as refused:
            opened(name, lambda data: data[:-1])
        assert str(refused.value).endswith(
            f"damaged: record {name} has {size - 1} bytes, its tensor {size}; download it again"
        )
    with pytest.raises(
        BadInput, match="written on a big-endian machine; write it again"
    ):
        opened("byteorder", lambda _: b"big")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "torch.distributed._shard.x.ShardedTensor",
            "; it holds one process's part of the",
        ),
        (
            "my_lab.models.Net",
            "; if it is a whole model, write model.state_dict() with",
        ),
        ("my_lab.models.make", "; where you trust the file, load it where it is from"),
        ("collections.Counter", "; where you trust the file, load it where it is from"),
        ("numpy.random.RandomState", "; where you trust the file, load it"),
    ],
)
def test_a_refused_class_comes_with_advice(name, advice):
    assert weight_file._of_class(name).startswith(advice)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (EOFError(), "damaged or truncated (EOFError); download it again"),
        (zipfile.BadZipFile("Bad  CRC"), "damaged or truncated (Bad CRC); download it"),
        (ValueError("central directory"), "damaged or truncated (central directory)"),
        (
            ValueError("x" * 90),
            f"not a readable weight file, damaged or truncated (ValueError: {'x' * 80}); download"
            " it again, or write its state_dict() with torch.save",
        ),
        (
            RuntimeError("Unsupported GLOBAL posix.getcwd whose module"),
            "refused: it names posix.getcwd, which is not on the list of harmless names;",
        ),
    ],
)
def test_what_went_wrong_is_one_line(error, says):
    assert weight_file._explain(error).startswith(says)
