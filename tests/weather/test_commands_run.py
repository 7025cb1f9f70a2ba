"""Commands of the README and the docs that take hours or the network, run to their ends here: from
top to bottom on tiny data, with smaller images, fewer steps and one process in place of several
(eight have a test of their own); the lists from a server of this machine."""

import contextlib
import hashlib
import http.server
import re
import threading
import time
from pathlib import Path

import pytest
import timm
import torch
from support.foreign_fixtures import known_resnet, moco
from support.layouts import Trees, class_folder, trunk_file
from support.pages import commands, words_of
from support.records import a_result
from support.small_verbs import smaller

from backbench import cli
from backbench.datasets.catalog import TWELVE
from backbench.recipes import config
from backbench.results import store
from backbench.verbs import list_data

FETCH = [pytest.param(line, id=name) for name, line in commands() if "fetch-splits" in line]


@pytest.mark.parametrize("line", FETCH)
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
        assert cli.main(words) == 0, capsys.readouterr().err
        server.shutdown()
    out = Path(words[words.index("--out") + 1])
    found = {file.name: file.read_bytes() for file in out.iterdir()}
    assert found == {f"{percent}percent.txt": data for percent, data in served.items()}


# From top to bottom

SMALL_PRETRAINING = (
    "arch=resnet18",
    "views.crops=[{count: 3, size: 32}, {count: 5, size: 24}]",
    "batch_size=16",
    "method.queue=64",
    "method.groups=1",
    "epochs=1",
    "data.hold_out=0.98",  # 40 images are left
)
SMALL_DETECTOR = {
    "MODEL.RESNETS.DEPTH": "18",
    "MODEL.RESNETS.RES2_OUT_CHANNELS": "64",
    "MODEL.FPN.OUT_CHANNELS": "32",
    "MODEL.ROI_BOX_HEAD.FC_DIM": "32",
    "MODEL.ROI_MASK_HEAD.CONV_DIM": "16",
    "MODEL.ROI_HEADS.NUM_CLASSES": "10",
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": "50",
    "MODEL.RPN.POST_NMS_TOPK_TEST": "20",
    "INPUT.MIN_SIZE_TRAIN": "(64,)",
    "INPUT.MIN_SIZE_TEST": "64",
    "DATASETS.TEST": "['coco_2017_val_2']",
    "SOLVER.IMS_PER_BATCH": "2",
    "SOLVER.MAX_ITER": "2",
    "SOLVER.STEPS": "(1,)",
    "SOLVER.WARMUP_ITERS": "1",
    "TEST.PRECISE_BN.NUM_ITER": "1",
    "DATALOADER.NUM_WORKERS": "0",
}
HERE = ("--accelerator", "cpu", "--workers", "0")
MEASURE = ("linear", "semisup", "analyze", "detect")
VERBS = ("pretrain", "inspect", "import", *MEASURE, "merge", "leaderboard")


@pytest.fixture(scope="module")
def field(tmp_path_factory, tiny_root):
    """A folder as the README wants it: ROOT with the datasets, lists, foreign checkpoints."""
    read = config.read_recipe
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(tmp_path_factory.mktemp("field")):
        patch.setattr(config, "read_recipe", lambda *args, **more: smaller(read(*args, **more)))
        trees = Trees(Path("ROOT").absolute(), patch)
        for name in (*TWELVE, "imagenet"):
            trees(name)
        Path("ROOT/coco").symlink_to(tiny_root / "scenes")
        Path("configs").symlink_to(config.configs_dir())  # as in a clone
        Path("lists").mkdir()
        images = sorted(path.name for path in Path("ROOT/imagenet/train").glob("*/*"))
        Path("lists/1percent.txt").write_text("\n".join(images) + "\n")
        trunk_file(Path("x.safetensors"))
        for name in ("moco_v2_800ep_pretrain.pth.tar", "foreign.pth", "my_resnet50.pth"):
            torch.save(moco(known_resnet("resnet18")), name)
        torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), "my_vit.pth")
        class_folder(Path("DATA/mine"), per=6)
        Path("mine").symlink_to("DATA/mine")
        Path("runs/beta/one").mkdir(parents=True)  # what `launch run` would have made
        store.append("runs/beta/one", [a_result()])
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
        pairs = [word for pair in SMALL_DETECTOR.items() for word in pair]
        return [*words[:overrides], *pairs, *words[overrides:]]
    if words[0] == "pretrain":
        return [*words, *SMALL_PRETRAINING, *HERE]
    return [*words, *HERE] if words[0] in MEASURE else words


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_pages_from_top_to_bottom(field, capsys):
    """The tutorial first, whose files the others go on with."""
    measured = []
    for _, line in commands():
        words = small(line)
        if words[0] not in VERBS:
            continue
        began = time.monotonic()
        assert cli.main(words) == 0, f"{line}: {capsys.readouterr().err}"
        print(f"{time.monotonic() - began:.0f} s  {line}")
        if words[0] in MEASURE:
            rows, problems = store.read(Path(words[words.index("--out") + 1]))
            assert rows and not problems, line
            measured.append(words[0])
    assert measured == [
        *("linear", "linear", "linear", "semisup", "detect"),  # the tutorial
        *("analyze", "detect", "linear"),  # the other pages
    ]
