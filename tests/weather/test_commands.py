"""Every command line of the README and docs is parsed, and run where that takes seconds; the whole
suite also runs, on tiny data in one process, what takes hours or the network."""

import contextlib
import hashlib
import http.server
import os
import re
import threading
import time
from pathlib import Path

import pytest
import timm
import torch
from support import own_boxes
from support.foreign_fixtures import known_resnet, moco
from support.layouts import Trees, class_folder, trunk_file
from support.pages import commands, words_of
from support.records import a_result
from support.small_verbs import smaller

from backbench.cli import data as list_data
from backbench.cli import program, verbs
from backbench.datasets import availability, catalog
from backbench.datasets.catalog import TWELVE
from backbench.detection import dialect as detection_config
from backbench.pretrain.recipe import PretrainConfig, overrides_of
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.records import store
from backbench.requests import parsing
from backbench.requests.detect import DetectRequest
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.places import RunRequest
from backbench.runs.folder import CHECKPOINT_FILE, open_run
from backbench.tasks import by_kind
from backbench.transfer.protocols import load_protocol

HOME = Path(__file__).parents[2]
# Those that take seconds; of the others only the words are looked at
RUN = ("inspect", "import", "export", "leaderboard", "launch")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Work in a folder with all that the pages name: real weights, data that is only there."""
    with contextlib.chdir(tmp_path_factory.mktemp("desk")):
        _lay_out()
        yield


def lay_out_strangers():
    """Files of other projects, a trunk, one's own images, and a result as `launch run` makes it."""
    for name in (
        "moco_v2_800ep_pretrain.pth.tar",
        "moco.pth",
        "foreign.pth",
        "my_resnet50.pth",
    ):
        torch.save(moco(known_resnet("resnet18")), name)
    torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), "my_vit.pth")
    trunk_file(Path("x.safetensors"), arch="resnet18")
    os.link("x.safetensors", "lite0.safetensors")
    class_folder(Path("DATA/mine"), per=6)
    Path("mine").symlink_to("DATA/mine")
    class_folder(Path("cells"), per=6)
    own_boxes.coco(Path("data/mine"), outlines=True)
    Path("lists").mkdir()
    Path("runs/beta/one").mkdir(parents=True)
    store.append("runs/beta/one", [a_result()])


def _lay_out():
    lay_out_strangers()
    with open_run("runs/lorac", verb="pretrain", identity={}) as run:
        os.link("x.safetensors", run / CHECKPOINT_FILE)
    trunk_file(Path("runs/moco_v2.safetensors"))
    os.link("x.safetensors", "my_vit.safetensors")
    for row in catalog.DATASETS.values():
        for need in row.needs:
            folder = (row.folders or (row.name,))[0]
            (Path("ROOT") / folder / need).mkdir(parents=True, exist_ok=True)
    for percent in (1, 10):
        Path(f"lists/{percent}percent.txt").write_text("n01440764_1.JPEG\n")
    for folder in ("runs/linear", "corpus/LAB"):
        Path(folder).mkdir(parents=True)
        store.append(folder, [a_result()])


def look_at(args):
    """What a verb that takes hours would read first."""
    own = getattr(args, "images", None) or getattr(args, "dataset", None) == "mine"
    if args.verb == "evaluate" or own:
        verbs.check(args)  # tells models from tasks
    if isinstance(args, RunRequest | DetectRequest | EvaluateRequest):
        availability.refuse(args)
    if own:
        return  # its recipe follows from the folder
    if args.verb == "pretrain":
        config.load(PretrainConfig, args.recipe, overrides_of(args), kind="pretrain")
    elif args.verb == "linear" and args.protocol != OWN:
        load_protocol(args.protocol, by_kind("linear"))
    elif args.verb == "detect":
        detection_config.read(HOME / args.config_file, args.opts)


@pytest.mark.parametrize(
    "line", [pytest.param(line, id=name) for name, line in commands()]
)
def test_a_command_of_the_pages(line, desk, capsys):
    words = words_of(line)
    if words[:2] == ["launch", "run"]:
        # A dry run on this machine: Slurm has its own tests, and is not everywhere
        words = [word if word != "slurm" else "local" for word in words]
        words += ["--dry-run"] if "--dry-run" not in words else []
    args = parsing.parse(words)
    if args.verb.split()[0] in RUN:
        assert program.main(words) == 0, capsys.readouterr().err
    else:
        look_at(args)


def test_there_are_commands():
    assert len(commands()) >= 19


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=name)
        for name, line in commands()
        if "fetch-splits" in line
    ],
)
def test_fetch_splits(line, tmp_path, monkeypatch, capsys):
    """From a server of this machine, with the recipe's hashes replaced by those of what it has."""
    served = {p: f"n01440764_{p}.JPEG\n".encode() for p in (1, 10)}

    class Lists(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(served[int(re.sub(r"\D", "", self.path))])

        def log_message(self, *_):
            return

    read = config.read_recipe

    def with_our_hashes(path):
        recipe = read(path)
        for percent, data in served.items():
            about = {"lines": 1, "sha256": hashlib.sha256(data).hexdigest()}
            recipe["parts"][str(percent)]["list"] = about
        return recipe

    monkeypatch.setattr(config, "read_recipe", with_our_hashes)
    with http.server.HTTPServer(("127.0.0.1", 0), Lists) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{{percent}}percent.txt"
        monkeypatch.setattr(list_data, "LISTS_URL", address)
        words = words_of(line)
        monkeypatch.chdir(tmp_path)
        assert program.main(words) == 0, capsys.readouterr().err
        server.shutdown()
    out = Path(words[words.index("--out") + 1])
    found = {file.name: file.read_bytes() for file in out.iterdir()}
    assert found == {f"{percent}percent.txt": data for percent, data in served.items()}


SMALL_PRETRAINING = (
    "arch=resnet18",
    "views.crops=[{count: 3, size: 32}, {count: 5, size: 24}]",
)
SMALL_PRETRAINING += ("batch_size=16", "method.queue=64", "method.groups=1", "epochs=1")
SMALL_PRETRAINING += ("data.hold_out=0.98",)  # 40 images are left
SMALL_DETECTOR = """
    MODEL.RESNETS.DEPTH 18 MODEL.RESNETS.RES2_OUT_CHANNELS 64 MODEL.FPN.OUT_CHANNELS 32
    MODEL.ROI_BOX_HEAD.FC_DIM 32 MODEL.ROI_MASK_HEAD.CONV_DIM 16 MODEL.ROI_HEADS.NUM_CLASSES 10
    MODEL.RPN.POST_NMS_TOPK_TRAIN 50 MODEL.RPN.POST_NMS_TOPK_TEST 20 DATALOADER.NUM_WORKERS 0
    INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64 DATASETS.TEST ['coco_2017_val_2']
    SOLVER.IMS_PER_BATCH 2 SOLVER.MAX_ITER 2 SOLVER.STEPS (1,) SOLVER.WARMUP_ITERS 1
    TEST.PRECISE_BN.NUM_ITER 1
"""
HERE = ("--accelerator", "cpu", "--workers", "0")
MEASURE = ("linear", "semisup", "analyze", "detect")
# Pages with a set of their own, whose commands run in tests/detection/test_own_boxes.py and
# tests/pretrain/test_own_images.py
OF_THEIR_OWN = ("boxes.md", "pretrain.md")
VERBS = ("pretrain", "inspect", "import", *MEASURE, "merge", "leaderboard")


@pytest.fixture(scope="module")
def field(tmp_path_factory, tiny_root):
    """A folder as the README wants it: ROOT with the datasets, lists, foreign checkpoints."""
    read = config.read_recipe
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(tmp_path_factory.mktemp("field")),
    ):
        patch.setattr(
            config, "read_recipe", lambda *args, **more: smaller(read(*args, **more))
        )
        trees = Trees(Path("ROOT").absolute(), patch)
        for name in (*TWELVE, "imagenet", "voc2007"):
            trees(name)
        Path("ROOT/coco").symlink_to(tiny_root / "scenes")
        Path("configs").symlink_to(config.configs_dir())  # as in a clone
        lay_out_strangers()
        images = sorted(path.name for path in Path("ROOT/imagenet/train").glob("*/*"))
        Path("lists/1percent.txt").write_text("\n".join(images) + "\n")
        yield


def small(line):
    """The command's arguments, made small."""
    words = words_of(line)
    words = [f"{words[0]}-run" if word == "RUN" else word for word in words]
    for option in ("--devices", "--num-gpus", "--num-machines"):
        if option in words:
            words[words.index(option) + 1] = "1"
    if "--dist-url" in words:
        words[words.index("--dist-url") + 1] = "tcp://127.0.0.1:29512"
    if words[0] == "analyze":
        words[words.index("--augmentations") + 1] = "2"
    if words[0] == "detect":
        words = [word for word in words if word not in ("--resume", "--eval-only")]
        overrides = words.index("SEED") if "SEED" in words else len(words)
        return [*words[:overrides], *SMALL_DETECTOR.split(), *words[overrides:]]
    if words[0] == "pretrain":
        return [*words, *SMALL_PRETRAINING, *HERE]
    return [*words, *HERE] if words[0] in MEASURE else words


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_pages_from_top_to_bottom(field, capsys):
    """The tutorial first, whose files the others go on with."""
    measured = []
    for name, line in commands():
        words = small(line)
        if words[0] not in VERBS or name.startswith(OF_THEIR_OWN):
            continue
        began = time.monotonic()
        assert program.main(words) == 0, f"{line}: {capsys.readouterr().err}"
        print(f"{time.monotonic() - began:.0f} s  {line}")
        if words[0] in MEASURE:
            rows, problems = store.read(Path(words[words.index("--out") + 1]))
            assert rows and not problems, line
            measured.append(words[0])
    assert measured == [
        *("linear", "linear", "linear", "semisup", "detect"),  # the tutorial
        *("analyze", "linear", "detect", "linear"),  # the other pages
    ]
