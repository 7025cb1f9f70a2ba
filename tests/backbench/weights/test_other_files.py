"""Files that are often taken for weights: each is named, with what to do."""

import pytest

from backbench.errors import BadInput
from backbench.weights import weight_file

TAR = bytes(257) + b"ustar" + bytes(250)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "a Git LFS pointer, not the file: fetch it",
        ),
        (b"\x1f\x8b\x08\0", "a gzip archive: unpack it first"),
        (b"BZh91AY", "a bzip2 archive: unpack it first"),
        (b"\xfd7zXZ\0", "an xz archive: unpack it first"),
        (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive: unpack it first"),
        (b"\x28\xb5\x2f\xfd", "a Zstandard archive: unpack it first"),
        (b"Rar!\x1a", "a RAR archive: unpack it first"),
        (
            b"\x89HDF\r\n",
            "an HDF5 file (Keras); only files of torch, safetensors and pickle are",
        ),
        (b"\x93NUMPY\x01", "a numpy array; only files of torch"),
        (b"GGUF\x03", "a GGUF file; only files of torch"),
        (b"\x89PNG\r\n", "a picture, not weights; give the file of the weights"),
        (b"\xff\xd8\xff\xe0", "a picture, not weights"),
        (b"%PDF-1.7", "a PDF, not weights"),
        (
            b"<!DOCTYPE html>",
            "a web page, not weights: the download went wrong; fetch the file",
        ),
        (b"\xef\xbb\xbf \r\n<html>", "a web page, not weights"),
        (TAR, "a tar archive: unpack it first"),
        (
            (40).to_bytes(8, "big") + b"{" + bytes(60),
            "safetensors with a big-endian header",
        ),
        (b"", "the file is empty; copy or download it again"),
    ],
)
def test_a_file_of_another_kind_is_told_by_its_first_bytes(tmp_path, content, says):
    file = tmp_path / "a.pth"
    file.write_bytes(content)
    with pytest.raises(BadInput) as error:
        weight_file.open_file(file)
    assert str(error.value).startswith(f"{file}: {says}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.onnx", "an ONNX file"),
        ("a.tflite", "a TensorFlow Lite file"),
        ("a.pb", "a TensorFlow file"),
        ("model.ckpt.index", "a TensorFlow checkpoint"),
        ("model.ckpt.data-00000-of-00001", "a TensorFlow checkpoint"),
        ("flax_model.msgpack", "a Flax file"),
    ],
)
def test_a_file_of_another_library_is_told_by_its_name(tmp_path, name, says):
    file = tmp_path / name
    file.write_bytes(b"\x08\x03\x12\x07pytorch")
    with pytest.raises(BadInput) as error:
        weight_file.open_file(file)
    assert str(error.value).startswith(f"{file}: {says}")


def test_a_folder_is_answered_by_its_files(tmp_path):
    with pytest.raises(BadInput, match="is a folder without a weight file"):
        weight_file.open_file(tmp_path)
    for number in range(5):
        (tmp_path / f"{number}.pth").touch()
    with pytest.raises(BadInput) as error:
        weight_file.open_file(tmp_path)
    assert "give one of its files: 0.pth, 1.pth, 2.pth and 2 more" in str(error.value)
    (tmp_path / "saved_model.pb").touch()
    with pytest.raises(BadInput, match="a TensorFlow model; "):
        weight_file.open_file(tmp_path)
