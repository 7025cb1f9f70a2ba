"""Images, annotations, weights and kept files by strangers: no program, no hang, no room."""

import io
import json
import os
import pickle
import random
import struct
import tarfile
import time
import zlib

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from safetensors.torch import save_file
from support import timm_fixtures as fx
from support.containers import add
from support.layouts import class_folder
from support.strangers import (
    Calls,
    Pointers,
    Said,
    cut_record,
    door,
    refused,
    write_cifar10,
)
from support.strangers import opened as opened_apart

from backbench.board import rank_csv
from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.images import image_list
from backbench.runs import atomic
from backbench.transfer.features.cache import FeatureCache, PartFiles
from backbench.untrusted import opening
from backbench.weights import assembling, importing
from backbench.weights.choosing import choose
from backbench.weights.families.resnet_trunk import build_backbone
from backbench.weights.family import TrunkMetadata
from backbench.weights.file_contents import FileContents
from backbench.weights.weight_file import Opened


def own(root):
    """ROOT/own with two classes in train and test; one of its images."""
    class_folder(root / "own", classes="ab", per=3)
    return root / "own" / "train" / "b" / "002.jpg"


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_an_image_that_is_no_file(tmp_path, kind):
    file = own(tmp_path)
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    changes = ("data.dataset=own", "batch_size=4", "epochs=1", "--data", tmp_path)
    refused(door("pretrain", "tiny_simclr", *changes, "--out", tmp_path / "run"), file)


def test_an_image_is_given_to_no_other_program(tmp_path, monkeypatch):
    """PIL hands PostScript to Ghostscript, whatever the file's name says."""
    file = own(tmp_path)
    Image.new("RGB", (20, 20)).save(file, "EPS")
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    # PIL looks for gs once a process.
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    said = door("data", "check", "own", "--data", tmp_path)
    assert not (tmp_path / "called").exists()
    assert said.status == 1 and f"{file}: corrupt image" in said.out, (
        said.out,
        said.err,
    )


def opened(root, name):
    """Open ROOT/name/train as a pretraining does."""
    try:
        catalog.open_split(root, name, "train")
    except BadInput as error:
        return Said(2, "", f"backbench: {error}", 0.0)
    return Said(0, "", "", 0.0)


def chunk(kind, data):
    length = struct.pack(">I", len(data))
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return length + kind + data + checksum


def png(width, height, *extra):
    """A black image of one bit per pixel, its `extra` chunks before the pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    pixels = zlib.compress(bytes((1 + (width + 7) // 8) * height), 1)
    body = b"".join([head, *extra, chunk(b"IDAT", pixels), chunk(b"IEND", b"")])
    return b"\x89PNG\r\n\x1a\n" + body


def test_an_image_of_a_gigapixel(tmp_path):
    data = png(14_000, 14_000)
    assert len(data) < 2_000_000
    with pytest.raises(BadInput, match="more than 178,956,970 pixels"):
        image_list.decode_array(data, "x.png")
    (tmp_path / "x.png").write_bytes(data)
    with pytest.raises(BadInput, match="more than 178,956,970 pixels"):
        image_list.decode(tmp_path / "x.png")


EXIF = b"MM\x00\x2a\x00\x00\x00\x08"
TAGS = {
    "endless": EXIF
    + struct.pack(">H", 65535)
    + struct.pack(">HHII", 0x0112, 3, 2**31, 8) * 2000,
    "circle": EXIF + struct.pack(">HHHIII", 1, 0x8769, 4, 1, 8, 8),
    "cut": EXIF[:7],
    "text": EXIF + struct.pack(">HHHI", 1, 0x0112, 2, 9) + b"abc\x00" + bytes(30),
    "ratio": EXIF + struct.pack(">HHHII", 1, 0x0112, 5, 1, 26) + bytes(40),
}


@pytest.mark.parametrize("case", TAGS)
def test_an_orientation_that_is_none(tmp_path, case):
    file = tmp_path / "x.png"
    file.write_bytes(png(8, 8, chunk(b"eXIf", TAGS[case])))
    try:
        assert image_list.decode(file, upright=True).size == (8, 8)
    except BadInput as error:
        assert "corrupt image" in str(error)


def shard(root, *members):
    folder = root / "own" / "train"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "0.tar", "w") as tar:
        for name, data in members:
            add(tar, name, data)
    return folder / "0.tar"


LABELS = {
    "large": ("x.cls", b"10000000"),
    "digits": ("x.cls", b"1" * 4000),
    "negative": ("x.cls", b"-5"),
    "true": ("x.cls", b"true"),
    "deep": ("x.json", b"[" * 100_000),
    "list": ("x.json", b'{"label": [1]}'),
    "escape": ("\x1b[2J.cls", b"0"),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_of_a_shard(tmp_path, case):
    name, content = LABELS[case]
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    key = name.partition(".")[0]
    file = shard(tmp_path, (f"{key}.png", picture.getvalue()), (name, content))
    refused(opened(tmp_path, "own"), file)


@pytest.mark.parametrize("case", ["fifo", "size", "names"])
def test_a_shard_that_is_none(tmp_path, case):
    file = shard(tmp_path, ("x.cls", b"0"))
    if case == "fifo":
        file.unlink()
        os.mkfifo(file)
    elif case == "size":  # a name of 8 exabytes
        data = bytearray(file.read_bytes())
        data[124:136] = b"\x80" + bytes(3) + (2**63 - 1).to_bytes(8, "big")
        data[156:157] = b"L"
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
        file.write_bytes(bytes(data))
    else:  # names of names of names
        info = tarfile.TarInfo("x")
        info.type = tarfile.GNUTYPE_LONGNAME
        info.size = 4
        file.write_bytes((info.tobuf() + b"abcd" + bytes(508)) * 3000)
    refused(opened(tmp_path, "own"), file)


@pytest.mark.parametrize("label", [3, -2, 10**12])
def test_cifar_labels_without_a_class(tmp_path, label):
    write_cifar10(tmp_path, labels=(0, 1, 2, label))
    refused(opened(tmp_path, "cifar10"), f"label {label}")


def scenes(root):
    """Write ROOT/scenes in COCO's layout with one image; return the file of its annotations and what
    it holds."""
    box = {
        "id": 1,
        "image_id": 1,
        "category_id": 1,
        "bbox": [1, 1, 9, 9],
        "area": 81,
        "iscrowd": 0,
        "segmentation": [[1, 1, 9, 1, 9, 9]],
    }
    image = {"id": 1, "file_name": "1.png", "height": 64, "width": 64}
    categories = [{"id": 1, "name": "disc"}]
    data = {"images": [image], "categories": categories, "annotations": [box]}
    notes = root / "scenes" / "annotations"
    notes.mkdir(parents=True)
    for part in ("train2017", "val2017"):
        (root / "scenes" / part).mkdir()
        Image.new("RGB", (64, 64)).save(root / "scenes" / part / "1.png")
        (notes / f"instances_{part}.json").write_text(json.dumps(data))
    return notes / "instances_train2017.json", data


COCO = {
    "deep": lambda data: "[" * 100_000,
    "rows": lambda data: json.dumps({**data, "images": [5]}),
    "number": lambda data: json.dumps({**data, "images": 5}),
    "name": lambda data: json.dumps(
        {**data, "images": [{**data["images"][0], "file_name": 5}]}
    ),
    "utf": lambda data: b"\xff\xfe{",
    "fifo": lambda data: None,
}
SLOW = pytest.mark.slow
BEYOND = {
    "file-long": ("images", "file_name", "x" * 3000),
    "box": ("annotations", "bbox", [1, 1, 10**4000, 1]),
}


def detect(root, out):
    how = (
        "--config-file",
        "tiny_mask_rcnn_R_18_FPN",
        "--engine",
        "torchvision",
        "--out",
        out,
    )
    return door("detect", *how, "--data", root, "MODEL.WEIGHTS", "random")


@pytest.mark.parametrize(
    "case",
    [
        "deep",
        "fifo",
        *(pytest.param(c, marks=SLOW) for c in ("rows", "number", "name", "utf")),
    ],
)
def test_annotations_that_are_none(tmp_path, case):
    file, data = scenes(tmp_path)
    text = COCO[case](data)
    file.unlink()
    if text is None:
        os.mkfifo(file)
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(door("data", "check", "scenes", "--data", tmp_path), file)
    refused(detect(tmp_path, tmp_path / "run"), file)


@pytest.mark.parametrize("case", ["box", pytest.param("file-long", marks=SLOW)])
def test_annotations_with_a_value_beyond_reason(tmp_path, case):
    file, data = scenes(tmp_path)
    name, key, value = BEYOND[case]
    data[name][0][key] = value
    file.write_text(json.dumps(data))
    said = door("data", "check", "scenes", "--data", tmp_path)
    assert said.status in (0, 1, 2) and "Traceback" not in said.err, said.err
    refused(detect(tmp_path, tmp_path / "run"), tmp_path / "scenes")


def test_a_stop_behind_fdopen_is_no_bad_descriptor(tmp_path, monkeypatch):
    (tmp_path / "results.jsonl").write_text("{}\n")
    real = os.fdopen

    def interrupted(descriptor, mode):
        real(descriptor, mode).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdopen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opening.open_regular(tmp_path / "results.jsonl")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("name,a\nx,1\ny," + "9" * 100_000 + "x\n", "a field of 100001 characters"),
        ("name," + "a" * 200_000 + "\nx,1\ny,2\n", "not read as CSV|a field of"),
        ("name,\x1b[31mok,\x1b[31mok\nx,1,1\ny,2,2\n", "two columns are called"),
        ("name,\x1b[31ma\nx,1\ny,2\nz,1e999\n", "is no number"),
    ],
)
def test_a_hostile_table_is_refused_soon_and_nothing_is_printed_raw(
    tmp_path, text, match
):
    file = tmp_path / "table.csv"
    file.write_text(text)
    start = time.process_time()
    with pytest.raises(BadInput, match=match) as error:
        rank_csv.read(file)
    assert "\x1b" not in str(error.value) and time.process_time() - start < 5


ABOUT = {"checkpoint": "a"}


def made(cache, value):
    """The entry of ABOUT, all `value`."""
    seen = np.zeros((3, 3), np.int64)
    parts = PartFiles(cache, [ABOUT], [4], 3, keep=[], seen=seen, still=lambda _: True)
    parts.rows[0][:] = value
    parts.finish()


TORN = {
    "empty": b"",
    "cut": b'{"description": {"check',
    "zeros": bytes(300),
    "list": b"[1]",
    "deep": b"[" * 100000,
    "types": b'{"description": 5, "shape": [3, 4], "sha256": "x"}',
    "shape": b'{"description": {}, "shape": "x", "sha256": "x"}',
    "keys": b"{}",
}


@pytest.fixture
def cache(tmp_path):
    cache = FeatureCache(tmp_path / "features", 10**6)
    with cache.try_lock([ABOUT]):
        yield cache


@pytest.mark.parametrize("case", TORN)
def test_a_torn_entry_is_named_and_made_anew(cache, caplog, case):
    made(cache, 1)
    about = cache.path(ABOUT).with_suffix(".json")
    about.write_bytes(TORN[case])
    assert cache.open(ABOUT) is None
    assert f"{about}: torn; its features are made anew" in caplog.text
    made(cache, 2)
    assert cache.open(ABOUT).sum() == 24


def test_an_entry_without_rows_is_none(cache):
    made(cache, 1)
    cache.path(ABOUT).unlink()
    assert cache.open(ABOUT) is None


def test_a_kill_while_an_entry_is_made_again_leaves_none(cache, monkeypatch):
    """The new rows are there then, and what is told of the old ones would call them damaged."""
    made(cache, 1)

    write_json = atomic.write_json

    def killed(path, about):
        if path == cache.path(ABOUT).with_suffix(".json"):
            raise KeyboardInterrupt
        write_json(path, about)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(atomic, "write_json", killed)
        made(cache, 2)
    assert cache.open(ABOUT) is None
    made(cache, 3)
    assert cache.open(ABOUT).sum() == 36


@pytest.mark.parametrize(
    "case", [b"", b"[1]", b'{"rows": 2}', b'{"rows": [], "parts": 1}']
)
def test_a_torn_marker_vouches_for_nothing(cache, case):
    cache.path(ABOUT).with_suffix(".rows.json").write_bytes(case)
    made(cache, 1)
    assert cache.open(ABOUT).sum() == 12


def endless():
    """Tuples of tuples as a key: two to the power of forty of them would be hashed."""
    pair: tuple = ()
    for _ in range(40):
        pair = (pair, pair)
    # Pickled as a value first, so that making the file does not hash it: then `{}[pair] = 1`
    start = pickle.dumps(pair, protocol=2)[:-1]
    return start[:2] + b"}" + start[2:] + b"K\x01s."


POINTERS = {"data": np.zeros((4, 3072), np.uint8), "labels": Pointers()}
CIFAR = {
    "pointers": (pickle.dumps(POINTERS, protocol=2), "data_batch_3"),
    "calls": (pickle.dumps({"data": Calls(os.system, "touch called")}), "posix.system"),
    "hash": (endless(), "refused"),
}


@pytest.mark.parametrize("case", CIFAR)
def test_a_cifar_batch_that_does_more_than_to_hold_images(tmp_path, monkeypatch, case):
    content, said = CIFAR[case]
    monkeypatch.chdir(tmp_path)
    (write_cifar10(tmp_path) / "data_batch_3").write_bytes(content)
    refused(opened_apart(tmp_path, "cifar10", "train", limit_s=60), said)
    assert not (tmp_path / "called").exists()


def test_zip_record_shorter_than_its_tensor(tmp_path):
    torch.save(build_backbone("resnet18").state_dict(), tmp_path / "whole.pth")
    cut_record(tmp_path / "whole.pth", tmp_path / "cut.pth", "data/3", 10)
    refused(
        door("import", tmp_path / "cut.pth", "--out", tmp_path / "x.safetensors"),
        "data/3",
    )
    assert not (tmp_path / "x.safetensors").exists()
    said = door("import", tmp_path / "whole.pth", "--out", tmp_path / "x.safetensors")
    assert said.status == 0, said.err


TIMM = {"architecture": "test_vit"}
HUB = {"model_type": "clip"}
HALF = {"mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architecture": "hf-hub:nobody/nothing"}, "no model 'hf-hub:nobody/nothing'"),
        ({"architecture": "../../etc/passwd"}, "no model"),
        ({"architecture": {"a": 1}}, "no model"),
        (TIMM | {"model_args": {"depth": 9999}}, "from 1 to 200"),
        (TIMM | {"model_args": {"img_size": 10**30}}, "whole number"),
        (TIMM | {"model_args": {"norm_layer": "os.system"}}, "norm_layer=os.system"),
        (TIMM | {"model_args": 3}, "not a configuration that is known"),
        (TIMM | {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0, 1, 1]}}, "above 0"),
        (
            TIMM | {"pretrained_cfg": {"mean": "abc", "std": [1, 1, 1]}},
            "finite numbers",
        ),
        (TIMM | {"pretrained_cfg": [1]}, "not a configuration that is known"),
        (
            HUB | {"vision_config": {"num_attention_heads": "many"}},
            "not a configuration",
        ),
        (
            HUB | {"vision_config": {"hidden_act": "__import__"}},
            "hidden_act '__import__'",
        ),
        ([1, 2], "expected an object"),
    ],
)
def test_configuration_beside_a_file(config, said, tmp_path):
    save_file(fx.known("timm:test_vit"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput) as error:
        importing.read(tmp_path / "model.safetensors")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def mutated(table, dice):
    """One change to one table of a file: of a name, a shape, a type, a size."""
    key = dice.choice(sorted(table))
    value = table.pop(key)
    kind = dice.choice(
        ["lost", "renamed", "cut", "scalar", "whole", "endless", "twice", "half"]
    )
    cut = value[..., :0] if value.dim() else value.reshape(1, 1)
    changed = {
        "renamed": {key.replace("weight", "wieght") + "s": value},
        "cut": {key: cut},
        "scalar": {key: torch.zeros(())},
        "whole": {key: value.to(torch.int8)},
        "endless": {
            key: torch.ones((), dtype=torch.half).expand(*value.shape[:-1], 10**13)
        },
        "twice": {key: value, f"module.{key}": value, f"blocks.0.{key}": value},
        "half": {key: value.half()},
    }
    table |= changed.get(kind, {})
    return kind


@pytest.mark.parametrize(
    "maker",
    [
        fx.dinov2_registers,
        fx.dinov3,
        fx.hub_clip,
        fx.hub_siglip,
        fx.convnext,
        fx.mae,
    ],
    ids=lambda maker: maker.__name__,
)
def test_mutated_files_are_whole_or_refused(maker, tmp_path):
    """Whatever is changed, the file is refused in one line, or every weight is what it was."""
    _, arch, *_ = fx.CASES[maker]
    state = fx.known(arch)
    metadata = TrunkMetadata(arch=arch)
    for seed in range(15):
        dice = random.Random(seed)
        # The dicts are copied, as the mutations change them.
        made = {}
        for key, value in maker(state).items():
            made[key] = dict(value) if isinstance(value, dict) else value
        tables = [v for v in made.values() if isinstance(v, dict)] or [made]
        kinds = [mutated(tables[0], dice) for _ in range(dice.choice([1, 1, 2]))]
        opened = Opened(tmp_path / "x.pth", "torch zip", "0" * 64, 0, made, {})
        try:
            found = FileContents(opened, metadata)
            checkpoint = assembling.checkpoint(found, choose(found))
        except BadInput as error:
            assert "\n" not in str(error), kinds
            continue
        for name, tensor in checkpoint.state_dict.items():
            assert torch.allclose(tensor, state[name], atol=2e-3), (kinds, name)
