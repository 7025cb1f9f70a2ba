"""Every command line of the README and the docs, as it stands: the real parser takes it, the real
recipes and configs that it names are read, and what takes seconds is run. The
lists and the eight processes are in test_commands_run.py."""

import contextlib
import os
from pathlib import Path

import pytest
import timm
import torch
from support.foreign_fixtures import known_resnet, moco
from support.layouts import class_folder, trunk_file
from support.pages import commands, words_of
from support.records import a_result

from backbench import cli
from backbench.datasets import availability, catalog
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.results import store
from backbench.runs.folder import CHECKPOINT_FILE, open_run
from detection import dialect as detection_config
from pretrain.recipe import PretrainConfig, overrides_of
from transfer.protocols import load_protocol, of_verb

HOME = Path(__file__).parents[2]
RUN = ("inspect", "import", "export", "leaderboard", "launch")  # seconds; the others are looked at


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Work in a folder with all that the pages name: real weights, data that is only there."""
    with contextlib.chdir(tmp_path_factory.mktemp("desk")):
        _lay_out()
        yield


def _lay_out():
    for name in ("runs/lorac/backbone.safetensors", "x.safetensors", "runs/moco_v2.safetensors"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        trunk_file(Path(name))
    with open_run("runs/pretrain/lorac", verb="pretrain", identity={}) as run:
        os.link("x.safetensors", run / CHECKPOINT_FILE)
    foreign = moco(known_resnet("resnet18"))
    for name in ("moco_v2_800ep_pretrain.pth.tar", "moco.pth", "foreign.pth", "my_resnet50.pth"):
        torch.save(foreign, name)
    class_folder(Path("DATA/mine"))
    class_folder(Path("mine"))
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    torch.save(vit.state_dict(), "my_vit.pth")
    os.link("x.safetensors", "my_vit.safetensors")
    for row in catalog.DATASETS.values():
        for need in row.needs:
            folder = (row.folders or (row.name,))[0]
            (Path("ROOT") / folder / need).mkdir(parents=True, exist_ok=True)
    Path("lists").mkdir()
    for percent in (1, 10):
        Path(f"lists/{percent}percent.txt").write_text("n01440764_1.JPEG\n")
    for folder in ("runs/linear", "runs/beta/one", "corpus/LAB"):
        Path(folder).mkdir(parents=True)
        store.append(folder, [a_result()])


def look_at(args):
    """What a verb that takes hours would read first."""
    if args.verb == "evaluate":
        cli.check(args)  # tells models from tasks
    if cli.VERBS[args.verb].check is not None:
        availability.refuse(args)
    if args.verb == "pretrain":
        config.load(PretrainConfig, args.recipe, overrides_of(args), kind="pretrain")
    elif args.verb == "linear" and args.protocol != OWN:
        load_protocol(args.protocol, of_verb("linear"))
    elif args.verb == "detect":
        detection_config.read(HOME / args.config_file, args.opts)


@pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in commands()])
def test_a_command_of_the_pages(line, desk, capsys):
    words = words_of(line)
    if words[:2] == ["launch", "run"]:
        # A dry run on this machine: Slurm has its own tests, and is not everywhere
        words = [word if word != "slurm" else "local" for word in words]
        words += ["--dry-run"] if "--dry-run" not in words else []
    args, rest = cli.parser().parse_known_args(words)
    assert not [word for word in rest if "=" not in word], rest
    if args.verb in RUN:
        assert cli.main(words) == 0, capsys.readouterr().err
    else:
        look_at(args)


def test_there_are_commands():
    assert len(commands()) >= 19
