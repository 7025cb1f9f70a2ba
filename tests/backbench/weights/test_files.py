"""Files that lie, break or attack: one line, nothing executed, no output file."""

import json
import multiprocessing
import os
import pickle
import random
import struct
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import foreign_fixtures as fx
from support.strangers import Calls

from backbench.cli import program
from backbench.errors import BadInput
from backbench.untrusted import pickles
from backbench.weights import importing, inspecting
from backbench.weights.choosing import choose
from backbench.weights.file_contents import FileContents
from backbench.weights.tensor_tables import tables_of
from backbench.weights.weight_file import STAND_INS, Opened, open_file


def refused(path, capsys, *words):
    """Assert that inspect, import and export refuse the file in one line with these words, and leave
    nothing."""
    before = sorted(path.parent.iterdir())
    out = path.parent / "out.safetensors"
    commands = (
        ["inspect", str(path)],
        ["import", str(path), "--out", str(out)],
        ["export", str(path), "--format", "detectron2", "--out", str(out)],
    )
    for command in commands:
        assert program.main(command) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1, line
        assert str(path) in line
        assert all(word in line for word in words), line
    assert sorted(path.parent.iterdir()) == before


def torch_file(content, path, *, legacy=False):
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


def rezipped(source, target, change):
    """Copy a torch zip, with each record passed through change(name, data) -> (data, compression)."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            data, compression = change(info.filename, old.read(info))
            new.writestr(info.filename, data, compress_type=compression)
    return target


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_malicious_raw_pickle(protocol, tmp_path, capsys):
    marker = tmp_path / "marker"
    path = tmp_path / "x.pkl"
    content = {"model": Calls(os.system, f"touch {marker}"), "__author__": "x"}
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    refused(path, capsys, "it names posix.system", "nothing was executed")
    assert not marker.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_malicious_pickle_in_a_torch_file(legacy, tmp_path, capsys):
    marker = tmp_path / "marker"
    content = {"state_dict": {"conv1.weight": torch.ones(3)}}
    content["epoch"] = Calls(os.system, f"touch {marker}")
    path = torch_file(content, tmp_path / "x.pth", legacy=legacy)
    refused(path, capsys, "it names posix.system", "nothing was executed")
    assert not marker.exists()


@pytest.mark.parametrize(
    "target", [eval, subprocess.Popen, torch.load, pickle.loads, torch.hub.load]
)
def test_any_other_global_is_refused_by_name(target, tmp_path, capsys):
    named = target.__name__  # protocol 2 writes python 2's name of the module
    for path in (tmp_path / "x.pth", tmp_path / "x.pkl"):
        if path.suffix == ".pth":
            torch_file({"a": Calls(target, "1")}, path)
        else:
            path.write_bytes(pickle.dumps({"a": Calls(target, "1")}))
        refused(path, capsys, named, "not on the list of harmless names")
        path.unlink()


def test_allowed_names_stand_for_inert_values():
    import argparse

    for name, stand_in in STAND_INS.items():
        module, _, attribute = name.rpartition(".")
        real = getattr(sys.modules.get(module), attribute, None)
        assert stand_in is not real, f"{name} would be the real thing"
    assert STAND_INS["argparse.Namespace"] is not argparse.Namespace
    assert STAND_INS["builtins.getattr"](os, "system") is not os.system


def test_torch_names_that_weights_only_allows_cannot_make_a_tensor_from_nothing(
    tmp_path, capsys
):
    class Liar:
        """A tensor that claims a hundred thousand times more elements than its storage has."""

        def __reduce__(self):
            storage = torch.ones(10)._typed_storage()
            size = (1000, 1000)
            stride = (1000, 1)
            arguments = (storage, 0, size, stride, False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    for legacy in (False, True):
        path = torch_file({"a": Liar()}, tmp_path / "x.pth", legacy=legacy)
        refused(path, capsys, "damaged")


def test_zip_bombs(tmp_path, capsys):
    source = torch_file({"a": torch.zeros(1 << 20)}, tmp_path / "source.pth")
    bomb = rezipped(
        source, tmp_path / "packed.pth", lambda _, data: (data, zipfile.ZIP_DEFLATED)
    )
    assert bomb.stat().st_size < source.stat().st_size / 50
    refused(bomb, capsys, "compressed", "zip bomb")
    # Every record of the central directory points to the same bytes.
    data = source.read_bytes()
    overlapping = tmp_path / "overlap.pth"
    with zipfile.ZipFile(source) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("data/0"))
        start = archive.start_dir
    # An entry has 46 bytes before the name. Its lengths of name, extra field and comment are in them.
    entry_at = data.index(name.encode(), start) - 46
    entry_end = entry_at + 46 + sum(struct.unpack_from("<HHH", data, entry_at + 28))
    after = data[entry_end : data.index(b"PK\x05\x06", start)]
    entries = data[start:entry_at] + data[entry_at:entry_end] * 20 + after
    count = entries.count(b"PK\x01\x02")
    end = struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, len(entries), start, 0
    )
    overlapping.write_bytes(data[:start] + entries + end)
    refused(overlapping, capsys, "overlap")


def test_an_encrypted_archive_is_no_bomb(tmp_path, capsys):
    source = torch_file({"a": torch.zeros(4)}, tmp_path / "source.pth")
    target = tmp_path / "encrypted.pth"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
        for info in new.infolist():
            info.flag_bits |= 1  # as of a record with a password
    refused(target, capsys, "is encrypted; unpack the archive with its password")


def test_deeply_nested_and_self_similar_pickles(tmp_path, capsys):
    # A few hundred bytes in the file are 50**18 items when written out.
    layer = ["x"]
    for _ in range(18):
        layer = [layer] * 50
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"model": layer, "__author__": "x"}))
    with pytest.raises(BadInput, match="no trunk in it"):
        importing.read(tmp_path / "x.pkl")
    path = tmp_path / "deep.pkl"
    path.write_bytes(b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".")
    refused(path, capsys, "nested")
    loop = {}
    loop["self"] = loop
    torch_file(loop, tmp_path / "loop.pth")
    with pytest.raises(BadInput, match="no trunk in it"):
        importing.read(tmp_path / "loop.pth")


def small_trunk(tmp_path):
    state = {f"conv{i}.weight": torch.randn(4, 4) for i in range(30)}
    return torch_file({"state_dict": state}, tmp_path / "whole.pth")


def test_empty_truncated_and_flipped_files(tmp_path, bad_input, capsys):
    whole = small_trunk(tmp_path).read_bytes()
    path = tmp_path / "x.pth"
    path.write_bytes(b"")
    refused(path, capsys, "the file is empty")
    for share in (0.1, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        refused(path, capsys, "truncated")
    flipped = bytearray(whole)
    kernel = torch.load(tmp_path / "whole.pth")["state_dict"]["conv7.weight"]
    at = whole.index(kernel.numpy().tobytes())
    flipped[at + 5] ^= 0x10  # one bit of one weight
    path.write_bytes(flipped)
    refused(path, capsys, "damaged", "CRC")
    bad_input(program.main(["inspect", str(tmp_path / "none.pth")]), "no such file")
    bad_input(program.main(["inspect", str(tmp_path)]), "is a folder")


def test_checksums_that_torch_was_told_to_skip_are_no_damage(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = small_trunk(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert len(open_file(path).tree["state_dict"]) == 30


def test_wrong_endian_files(tmp_path, capsys):
    source = small_trunk(tmp_path)

    def big(name, data):
        return (b"big" if name.endswith("byteorder") else data), zipfile.ZIP_STORED

    refused(rezipped(source, tmp_path / "big.pth", big), capsys, "big-endian")
    legacy = torch_file(
        {"a": torch.ones(3)}, tmp_path / "legacy.pth", legacy=True
    ).read_bytes()
    at = legacy.index(b"little_endian") + len(b"little_endian")
    position = legacy.index(b"\x88", at)  # the pickled True that follows
    path = tmp_path / "legacy_big.pth"
    path.write_bytes(legacy[:position] + b"\x89" + legacy[position + 1 :])
    refused(path, capsys, "big-endian")
    path = tmp_path / "x.pkl"
    path.write_bytes(
        pickle.dumps({"model": {"a": np.ones(3, ">f4")}, "__author__": "x"})
    )
    refused(path, capsys, "big-endian")
    path = tmp_path / "x.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "big") + header + bytes(4))
    refused(path, capsys, "big-endian")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "LFS"),
        (b"<!DOCTYPE html><html><head><title>404</title>", "web page"),
        (b"\x1f\x8b\x08\x00aaaaaaaaaaaa", "gzip"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\xef\xbb\xbf\n <html>", "web page"),
        (b"\x93NUMPY\x01\x00v\x00", "numpy array"),
        (b"\x08\x07\x12\x07pytorch\x1a\x052.1.0" + bytes(99), "ONNX"),
        (b"\x1c\x00\x00\x00TFL3" + bytes(99), "TensorFlow Lite"),
        (b"just some text\n" * 10, "a text file"),
        (b"just some text\n" * 10, "it begins with 'just some text'"),
        ("# ünï\nmodel: resnet\n".encode() * 40, "a text file"),
        (b'{"architectures": ["ViT"]}', "a text file"),
        (b"\x80\x04.", "damaged"),
        pytest.param(np.random.default_rng(0).bytes(1000), "", id="noise"),
    ],
)
def test_other_files_are_named_for_what_they_are(content, word, tmp_path, capsys):
    path = tmp_path / "x.pth"
    path.write_bytes(content)
    refused(path, capsys, word)


def test_other_zip_archives(tmp_path, capsys):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(path, capsys, "not a torch checkpoint")
    path = tmp_path / "x.npz"
    np.savez(path, weight=np.ones(3))
    refused(path, capsys, "a numpy archive", "state_dict()")
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    refused(path, capsys, "TorchScript")


@pytest.mark.parametrize("name", ["x.onnx", "x.pb", "x.tflite", "x.index", "x.msgpack"])
def test_files_of_other_libraries_are_named_by_their_ends(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(bytes([7, 0, 1]) * 99)
    refused(path, capsys, "only files of torch, safetensors and pickle are read")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_whole_pickled_model_is_refused_with_what_to_save(legacy, tmp_path, capsys):
    for model in (torch.nn.Linear(2, 2), fx.known_resnet("resnet18")):
        path = torch_file(model, tmp_path / "x.pth", legacy=legacy)
        refused(path, capsys, "nothing was executed", "write model.state_dict()")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({}, "it holds no tensors: save model.state_dict()"),
        (
            {"state_dict": {}, "epoch": 3},
            "it holds no tensors: save model.state_dict()",
        ),
        (torch.ones(5, 9), "its tensors have no names"),
        ([torch.ones(5, 9), torch.ones(5)], "its tensors have no names"),
        ({0: torch.ones(5, 9)}, "its tensors have no names"),
        ({"fc.weight": torch.ones(5, 9), "fc.bias": torch.ones(5)}, "a head alone"),
        ({"projector.0.weight": torch.ones(5, 9)}, "a head alone"),
        ({"heads.head.weight": torch.ones(5, 9)}, "a head alone"),
    ],
)
def test_files_without_a_trunk_say_what_they_hold(content, word, tmp_path, bad_input):
    path = torch_file(content, tmp_path / "x.pth")
    out = tmp_path / "out.safetensors"
    bad_input(program.main(["import", str(path), "--out", str(out)]), word)


def test_a_folder_names_the_files_in_it(tmp_path, bad_input):
    command = ["import", str(tmp_path), "--out", str(tmp_path / "out.safetensors")]
    bad_input(program.main(command), "is a folder without a weight file")
    torch_file({}, tmp_path / "best.pth")
    bad_input(program.main(command), "give one of its files: best.pth")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_torch_file_under_the_name_of_another_format_is_read(legacy, tmp_path):
    weights = {"fc.weight": torch.nn.Parameter(torch.rand(2, 3))}
    file = torch_file(weights, tmp_path / "model.safetensors", legacy=legacy)
    assert open_file(file).tree["fc.weight"].equal(weights["fc.weight"])


def test_parameters_are_read_as_plain_tensors():
    table = {"fc.weight": torch.nn.Parameter(torch.rand(2, 3))}
    (tensor,) = tables_of({"model": table})["model"].values()
    assert not tensor.requires_grad


@pytest.mark.parametrize("container", ["torch", "legacy", "pickle"])
def test_a_pickle_of_very_many_steps_is_refused_before_it_is_read(
    container, tmp_path, capsys, monkeypatch
):
    """Such files are read for minutes by readers that are written in Python."""
    monkeypatch.setattr(pickles, "MOST_STEPS", 20_000)
    many = {"log": [[] for _ in range(pickles.MOST_STEPS)]}
    path = tmp_path / "many.pth"
    if container == "pickle":
        path.write_bytes(pickle.dumps(many))
    else:
        torch_file(many, path, legacy=container == "legacy")
    refused(path, capsys, "steps", "state dict alone")


def test_very_many_tensors_are_refused_by_their_number(tmp_path, capsys):
    path = tmp_path / "many.safetensors"
    header = {}
    for i in range(20_001):
        place = [4 * i, 4 * i + 4]
        header[f"layer.{i}"] = {"dtype": "F32", "shape": [1], "data_offsets": place}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(header)))
    refused(path, capsys, "holds 20,001 tensors")


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("layout", ["C", "F", "strided", "0-d"])
def test_numpy_pickles_are_read_without_numpy(protocol, layout, tmp_path):
    array = {
        "C": np.arange(6, dtype=np.float32).reshape(2, 3),
        "F": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "strided": np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
        "0-d": np.asarray(np.int64(7)),
    }[layout]
    path = tmp_path / "x.pkl"
    content = {"model": {"a": array}, "scalar": np.float64(0.5)}
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    tree = open_file(path).tree
    expected = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    assert torch.equal(tree["model"]["a"], expected)
    assert tree["scalar"] == 0.5


def test_numpy_pickles_with_objects_or_wrong_sizes_are_refused(tmp_path, capsys):
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"a": np.array([{}, []], dtype=object)}))
    refused(path, capsys, "refused", "not numbers")
    good = pickle.dumps({"a": np.arange(3, dtype=np.float32)}, protocol=4)
    path.write_bytes(good.replace(b"K\x03\x85", b"K\x09\x85"))  # a shape of nine
    refused(path, capsys, "damaged")
    # A shape of two thousand million
    path.write_bytes(good.replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85"))
    refused(path, capsys, "damaged")


FORBIDDEN = (
    "subprocess",
    "socket",
    "shutil",
    "ctypes",
    "exec",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
)
CHANGES = (b"", b"\xff" * 8, bytes(8), b"cos\nsystem", b"\x93R.\x81bu}(")


def mutated(data, rng, changes):
    """Change bytes in as many places, and sometimes cut off what is behind."""
    data = bytearray(data)
    for _ in range(changes):
        # Headers come first in a file.
        at = rng.randrange(min(len(data), rng.choice((2000, len(data)))))
        flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
        change = rng.choice((*CHANGES, flipped, rng.randbytes(rng.choice((1, 4, 100)))))
        data[at : at + rng.choice((0, 1, 1, 8, 100))] = change
        if rng.random() < 0.05:
            data = data[: max(at, 1)]
        data = data or bytearray(b"x")
    return data


def inspect_mutants(folder, answer):
    """Send how many of a thousand mutants of the folder's files get a report, and what was done
    that must not be. It is for a process of its own: nothing takes an audit hook away again."""
    target = folder / "mutant"
    files = [file.read_bytes() for file in sorted(folder.iterdir())]
    watching = False
    seen = []
    reports = 0

    def hook(event, arguments):
        if not watching or not (event.startswith(FORBIDDEN) or event == "open"):
            return
        if event == "open":
            # A file may be a number, if it is open already.
            file = arguments[0]
            if isinstance(file, int) or Path(str(file)).parent == folder:
                return
        # A module that torch imports late is no attack.
        frame = sys._getframe()
        while frame:
            if "importlib" in frame.f_code.co_filename:
                return
            frame = frame.f_back
        seen.append((event, str(arguments)[:200]))

    sys.addaudithook(hook)
    # pytest would keep a warning to itself.
    warnings.simplefilter("error")
    rng = random.Random(0)
    # Whole files come first, so that all imports come before the watch.
    for number in range(-len(files), 1000):
        changes = 0 if number < 0 else rng.choice((1, 1, 1, 2, 8, 64))
        target.write_bytes(mutated(files[number % len(files)], rng, changes))
        watching = number >= 0
        try:
            inspecting.inspect(target)
            reports += watching
        except BadInput as error:
            assert "\n" not in str(error) and str(target) in str(error), str(error)
        watching = False
    answer.send((reports, seen[:5]))


def test_a_thousand_mutated_files(tmp_path, capfd):
    """Small files of each container give a report or one line; nothing is run, nothing else read."""
    names = list(fx.known_resnet("resnet18").state_dict())[:40]
    tiny = {name: torch.randn(2, 2) for name in names}
    content = {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": tiny,
        "optimizer": fx.sgd_state(),
    }
    for legacy in (False, True):
        torch_file(content, tmp_path / f"{legacy}.pth", legacy=legacy)
    arrays = {"model": {k: v.numpy() for k, v in tiny.items()}, "__author__": "x"}
    for protocol in (2, 4):
        (tmp_path / f"{protocol}.pkl").write_bytes(
            pickle.dumps(arrays, protocol=protocol)
        )
    save_file(tiny, tmp_path / "x.safetensors", metadata={"format": "pt"})
    fork = multiprocessing.get_context("fork")
    answer, child_end = fork.Pipe(duplex=False)
    child = fork.Process(target=inspect_mutants, args=(tmp_path, child_end))
    child.start()
    child_end.close()
    reports, seen = answer.recv()
    child.join()
    assert not seen
    assert child.exitcode == 0
    assert reports < 500
    said = capfd.readouterr()
    assert not said.out and not said.err


MEASURE = """
import resource, sys, time
from backbench.weights import importing, inspecting

def kilobytes(name):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name)))

verb, small, file = sys.argv[1:]
act = {"read": importing.read, "inspect": inspecting.inspect}[verb]
act(small)  # imports and caches
open("/proc/self/clear_refs", "w").write("5")  # reset the high-water mark
base, start = kilobytes("VmRSS"), time.process_time()
kept = act(file)
print((kilobytes("VmHWM") - base) * 1024, time.process_time() - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="needs Linux's /proc to measure memory",
)
@pytest.mark.parametrize("legacy", [False, True])
def test_a_200_mb_file_is_read_in_less_than_one_and_a_half_times_its_size(
    legacy, tmp_path
):
    model = fx.known_resnet("resnet50")
    parameters = enumerate(model.parameters())
    momentum = {i: {"momentum_buffer": torch.randn_like(p)} for i, p in parameters}
    optimizer = {"state": momentum}
    # Each tensor has memory of its own, as that of a training has.
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    content = {
        "epoch": 90,
        "state_dict": fx.ddp(state),
        "optimizer": optimizer,
    }
    file = torch_file(content, tmp_path / "x.pth", legacy=legacy)
    state = fx.known_resnet("resnet18").state_dict()
    small = torch_file(state, tmp_path / "small.pth", legacy=legacy)
    size = file.stat().st_size
    assert size > 200e6
    for verb in ("read", "inspect"):
        command = [sys.executable, "-c", MEASURE, verb, str(small), str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        how = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
        done = subprocess.run(command, check=True, **how)
        peak, seconds = (float(word) for word in done.stdout.split())
        print(
            f"{verb}: peak {peak / size:.2f} of the file's size, {seconds:.2f} s of CPU"
        )
        assert peak < 1.5 * size
        assert verb == "read" or seconds < 2.0


def test_names_cannot_write_to_the_terminal_or_take_forever(tmp_path, capsys):
    names = ["\x1b[2J\nfake line", "." * 1_000_000, *(f"{i}.{i}" for i in range(300))]
    path = torch_file({name: torch.zeros(1) for name in names}, tmp_path / "x.pth")
    out = tmp_path / "out.safetensors"
    assert program.main(["import", str(path), "--out", str(out)]) == 2
    line = capsys.readouterr().err
    assert "no trunk in it; it holds 302 tensors: \\x1b[2J\\nfake line" in line
    assert "\x1b" not in line
    assert len(line) < 1000
    trunk = fx.known_resnet("resnet18").state_dict()
    many = {}
    for i in range(100):
        many |= {f"net{i}.{key}": torch.zeros(1) for key in trunk}
    found = FileContents(Opened(tmp_path / "many.pth", "torch zip", "", 0, many, {}))
    assert len(found.trunks) == 32
    with pytest.raises(BadInput, match="in no known format"):
        choose(found)


@pytest.mark.parametrize("length", [0x3C20, 0x13C20])
def test_the_length_of_a_header_is_no_web_page(tmp_path, length):
    """Of 15392 bytes the length begins with a blank and a "<"."""
    file = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(1)}, file, metadata={"note": ""})
    size = int.from_bytes(file.read_bytes()[:8], "little")
    save_file({"x": torch.ones(1)}, file, metadata={"note": "n" * (length - size)})
    assert int.from_bytes(file.read_bytes()[:8], "little") == length
    assert open_file(file).container == "safetensors"
