"""`backbench evaluate`: one's own files, on one's own folder, to the table."""

import json
import os
import re
import shlex
import shutil
from collections import Counter

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from support import own_boxes
from support.layouts import picture, trunk_file
from support.records import rows_of
from support.timm_fixtures import put_in_hub

import backbench
from backbench.cli import evaluate as evaluate_verb
from backbench.cli import program
from backbench.datasets import catalog
from backbench.evaluation.plan import make_plan
from backbench.evaluation.wanted import parse_task
from backbench.images import image_list
from backbench.requests.parsing import parse
from backbench.transfer import finetune
from backbench.weights.checkpoint import Checkpoint

SMALL = "timm:vit_tiny_patch16_224,depth=2,img_size=32,patch_size=8"
# Of each class, where a ResNet sees images of 224 pixels: 20 are left to train on, as many as k
FEW = 9


def folder(base, *, per_class=20, classes=("cat", "dog", "owl"), side=40):
    """Class folders of noise, each class with a tint of its own."""
    draw = np.random.Generator(np.random.PCG64(0))
    for tint, name in enumerate(classes):
        (base / name).mkdir(parents=True)
        for i in range(per_class):
            pixels = draw.integers(0, 200, (side, side, 3), dtype=np.uint8)
            pixels[:, :, tint % 3] += 55
            Image.fromarray(pixels).save(base / name / f"{i}.png")
    return base


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What `home` holds, made once."""
    made = tmp_path_factory.mktemp("made")
    folder(made / "mine")
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18().state_dict(), made / "my_resnet.pth")
    return made


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    """A user's folder: 60 images without a split, and a ResNet's file."""
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "mine", tmp_path / "mine")
    # 45 MB that nobody writes to
    (tmp_path / "my_resnet.pth").hardlink_to(made / "my_resnet.pth")
    return tmp_path


@pytest.mark.slow
def test_the_first_ten_minutes(home, capsys, caplog):
    """The commands of docs/index.md, on tiny images."""
    caplog.set_level("INFO")
    # 1. A ViT's file does not say what it is: one line says what to write, and that line works
    vit = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, patch_size=8)
    torch.save(vit.state_dict(), home / "my_vit.pth")
    line = [
        "evaluate",
        "my_resnet.pth",
        "my_vit.pth",
        "--data",
        "mine",
        "--out",
        "runs",
    ]
    assert program.main(line) == 2
    assert (
        "my_vit.pth: holds" in (said := capsys.readouterr().err)
        and "--arch timm:NAME" in said
    )
    line = ["import", "my_vit.pth", "--arch", SMALL, "--out", "vit.safetensors"]
    assert program.main(line) == 0
    assert "my_vit.pth: the file does not say its pixels; taken are" in caplog.text
    # 2. Three models, three readings, one command
    models = ["my_resnet.pth", "vit.safetensors", f"{SMALL}@random"]
    assert program.main(["evaluate", *models, "--data", "mine", "--out", "runs"]) == 0
    out = capsys.readouterr().out
    assert "plan: nearest neighbours (knn_own), few labels" in caplog.text
    assert caplog.text.count("is drawn for test, by sha256 of '0 <path>'") == 1
    assert (
        "k is [5, 20], not [5, 20, 200] as in the shipped knn_own; its columns"
        in caplog.text
    )
    for word in (
        "my_resnet  ",
        "vit  ",
        "knn/mine/top1_k20@knn-own-v1~",
        "logreg/mine",
        "fewshot/",
    ):
        assert word in out
    # As long as the set is large: all 60 images once; 48 of them, in 10 epochs, for three rates and
    # the best one again, each at three forward passes; a tenth of them in 50 epochs, likewise
    prices = dict(re.findall(r"--protocol (\w+_own) .*?\(as ([\d,]+) images", out))
    assert prices == {
        "linear_own": "60",
        "semisup_own": "2,880",
        "finetune_own": "5,760",
    }
    assert out.index("Next, at most an hour") < out.index("linear_own")
    # The papers': 30,000 steps of 256 images, twice; 50 epochs of a tenth of the 48 images, for seven
    # rates and again; 20,000 steps, for five rates and again
    prices = re.findall(r"-(lorac|semisup|finetune)  \(as ([\d,]+) images", out)
    assert prices == [
        ("semisup", "5,760"),
        ("lorac", "15,360,000"),
        ("finetune", "92,160,000"),
    ]
    assert out.index("What takes longer:") < out.index("15,360,000")
    assert out.splitlines()[-1].endswith("page: runs/leaderboard.html")
    assert (home / "runs/leaderboard.html").stat().st_size > 10_000
    rows = rows_of(home / "runs")
    assert {row.task for row in rows} == {"knn", "fewshot", "logreg"}
    assert len({row.checkpoint for row in rows}) == 3
    assert all("is drawn for test" in row.provenance["notes"][0] for row in rows)
    # Trunks of 32 pixels see images of 32, in the same columns
    assert len({row.column for row in rows}) == len(rows) / 3
    sides = {(row.arch.split(":")[0], row.provenance["trunk"]["side"]) for row in rows}
    assert sides == {("resnet18", 224), ("timm", 32)}
    # 3. The same again measures nothing; another model joins the table
    caplog.clear()
    assert program.main(["evaluate", *models, "--data", "mine", "--out", "runs"]) == 0
    assert len(rows_of(home / "runs")) == len(rows) and "features:" not in caplog.text
    more = ["timm:resnet18@random", "knn", "--data", "mine", "--out", "runs"]
    assert program.main(["evaluate", *more]) == 0
    assert len({row.checkpoint for row in rows_of(home / "runs")}) == 4


def test_three_readings_are_one_pass_and_one_price(home, caplog):
    """Each image is decoded once; a trunk that this suite trained at 32 pixels is read at 32."""
    caplog.set_level("INFO")
    folder(home / "few", per_class=FEW)
    trained_at_32(home / "trained.safetensors")
    trunk_file(home / "untold.safetensors", 1)
    words = ["trained.safetensors", "untold.safetensors", "--data", "few"]
    words += ["--out", "runs"]
    opened = Counter()
    plain = image_list.ImageList.open

    def counted(images, index):
        opened[images.paths[index]] += 1
        return plain(images, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_list.ImageList, "open", counted)
        assert program.main(["evaluate", *words, "--workers", "0"]) == 0
    assert len(opened) == 27 and set(opened.values()) == {2}, "once for each size"
    (price_said,) = [text for text in caplog.messages if "; 2 checkpoints; " in text]
    assert "knn-own-v1" in price_said and "logreg-own-v1" in price_said
    assert "54 images" in price_said
    assert "read at 32 pixels, its own size (its pretraining recipe)" in caplog.text
    assert "read at 224 pixels; nobody says" in caplog.text
    rows = rows_of(home / "runs")
    columns = {
        row.checkpoint: {r.column for r in rows if r.checkpoint == row.checkpoint}
        for row in rows
    }
    assert len(columns) == 2 and len(set(map(frozenset, columns.values()))) == 1
    sizes = {
        (row.provenance["size"]["measured"], row.provenance["size"]["trained"])
        for row in rows
    }
    assert sizes == {(32, 32), (224, None)}
    # The tints tell the classes apart for one of the two, where each image is read under its own label
    of_five = [row.value for row in rows if row.metric == "top1_k5"]
    assert len(of_five) == 2 and max(of_five) > 80


def trained_at_32(path):
    """A trunk whose file says that this suite trained it at 32 pixels."""
    checkpoint = Checkpoint.load(trunk_file(path))
    recipe = {"views": {"crops": [{"count": 2, "size": 32}]}}
    provenance = {**checkpoint.provenance, "recipe": recipe}
    checkpoint.replace(provenance=provenance).save(path)
    return path


def test_a_small_set_has_a_linear_probe_of_its_own_length(home):
    """Trunks of two sizes share its column, and each has the number that it has alone."""
    trained_at_32(home / "trained.safetensors")
    models = ["trained.safetensors", f"{SMALL.replace('32', '48')}@random"]
    for out, of_run in {"both": models, "one": models[:1]}.items():
        words = ["linear", "--data", "mine", "--out", out, "--workers", "0"]
        assert program.main(["evaluate", *of_run, *words]) == 0
    rows = rows_of(home / "both")
    assert {row.protocol for row in rows} == {"linear-own-v1"}
    assert len(rows) == 2 and len({row.column for row in rows}) == 1
    assert {row.provenance["size"]["measured"] for row in rows} == {32, 48}
    (alone,) = rows_of(home / "one")
    by_checkpoint = {row.checkpoint: row.value for row in rows}
    assert by_checkpoint[alone.checkpoint] == alone.value
    # Seven rates were tried on val, and the steps are those of 100 epochs
    assert len(alone.chosen["scores"]) == 7


def test_the_command_that_settles_a_column_names_files_that_are_there(
    home, capsys, monkeypatch
):
    """A checkpoint's name need not be its file's: the command says where its weights are kept."""
    trained_at_32(home / "renamed.safetensors")
    models = ["renamed.safetensors", f"{SMALL}@random"]
    words = [*models, "linear", "--data", "mine", "--out", "runs", "--workers", "0"]
    # Rows record the command that the process was started by
    monkeypatch.setattr("sys.argv", ["backbench", "evaluate", *words])
    assert program.main(["evaluate", *words]) == 0
    (said,) = re.findall(
        r"`(backbench linear [^`]*--seeds 3)`", capsys.readouterr().out
    )
    request = parse(shlex.split(said)[1:])
    given = [str(file) for file in request.checkpoints]
    assert len(given) == 2
    for file in given:
        assert file.startswith("timm:") or (home / file).is_file(), file


def test_the_same_command_goes_on_beside_rows_that_follow_from_its_own(home, capsys):
    trunk_file(home / "small.safetensors")
    words = ["evaluate", "small.safetensors", "logreg", "calibration", "--size", "32"]
    words += ["--data", "mine", "--out", "runs"]
    assert program.main(words) == 0
    test = catalog.load("mine", home).test
    (home / "copies.tsv").write_text(f"{test.paths[0]}\tcopy\tanother.png\n")
    assert program.main(["rescore", "runs", "--list", "copies.tsv"]) == 0
    capsys.readouterr()
    assert program.main(words) == 0
    said = capsys.readouterr().out
    assert "calibration/mine/nll@logreg-own-v1" in said
    # Nats have two digits, and percent one
    nats = re.search(r"mine/nll@\S+\n  random0 +(\S+) ± (\S+)", said)
    assert nats is not None
    assert [len(number.partition(".")[2]) for number in nats.groups()] == [2, 2]
    assert "table: runs/leaderboard.csv" in said


def test_finetuning_a_small_set_reads_a_trunk_at_its_own_size(home, monkeypatch):
    trained_at_32(home / "trained.safetensors")
    protocol = "base: finetune_own\nhead_lr: [0.1]\nprotocol: short-v1\n"
    protocol += 'parts: {"100": {length: {epochs: 1}}}\n'
    (home / "short.yaml").write_text(protocol)
    sides = set()
    plain = finetune.normalise

    def watched(pixels, about):
        sides.add(tuple(pixels.shape[-2:]))
        return plain(pixels, about)

    monkeypatch.setattr(finetune, "normalise", watched)
    words = ["trained.safetensors", "finetune@short.yaml", "--data", "mine"]
    words += ["--out", "runs", "--workers", "0"]
    assert program.main(["evaluate", *words]) == 0
    assert sides == {(32, 32)}, "views that train, and images that are scored"
    (row,) = rows_of(home / "runs")
    assert row.provenance["size"]["measured"] == 32


def test_a_recipe_of_one_size_is_fitted_to_a_trunk_of_another(home):
    """`knn` reads 224 of 256 pixels; a transformer for 32 takes no others, a ResNet takes any."""
    assert program.main(["import", f"{SMALL}@random", "--out", "vit.safetensors"]) == 0
    trunk_file(home / "resnet.safetensors")
    files = [home / "vit.safetensors", home / "resnet.safetensors"]
    plan = make_plan(
        [parse_task("knn/mine@knn")],
        {file: Checkpoint.load(file) for file in files},
        root=home,
        out=home / "runs",
    )
    changed = {run.request.checkpoints: run.request.overrides for run in plan.runs}
    of_vit, of_resnet = (changed[(file,)] for file in files)
    assert {"geometry.resize=37", "geometry.crop=32"} <= set(of_vit)
    assert not [change for change in of_resnet if change.startswith("geometry.")]


def test_one_size_for_all_is_a_column_of_its_own(home, caplog, capsys):
    """A trunk that is measured away from its training size says so."""
    caplog.set_level("INFO")
    trained_at_32(home / "trained.safetensors")
    trunk_file(home / "untold.safetensors", 1)
    models = ["trained.safetensors", "untold.safetensors"]
    folder(home / "few", per_class=FEW)
    words = [*models, "knn", "--data", "few", "--out", "runs", "--workers", "0"]
    assert program.main(["evaluate", *words]) == 0
    assert program.main(["evaluate", *words, "--size", "64"]) == 0
    sizes = [row.provenance["size"] for row in rows_of(home / "runs")]
    measured = {(size["measured"], size["trained"]) for size in sizes}
    assert measured == {(32, 32), (224, None), (64, 32), (64, None)}
    printed = capsys.readouterr().out
    columns = set(re.findall(r"knn/few/top1_k5@knn-own-v1~\w+", printed))
    assert len(columns) == 2, "each trunk at its own size, and all at 64"
    assert "read at 64 pixels, away from its own size of 32" in caplog.text


@pytest.mark.parametrize(
    "task, size, said",
    [
        ("knn@knn", "64", "has a size of its own; leave --size out"),
        ("knn", "0", "--size 0: from 1 to 4096"),
        ("knn", "-3", "--size -3: from 1 to 4096"),
        ("knn", "1000000", "--size 1000000: from 1 to 4096"),
        ("knn", "9" * 20, "from 1 to 4096"),
        ("faster_rcnn/coco2017", "64", "has a size of its own"),
    ],
)
def test_a_size_that_a_protocol_does_not_take_is_refused(
    home, capsys, task, size, said
):
    words = ["my_resnet.pth", task, "--data", "mine", "--out", "runs"]
    assert program.main(["evaluate", *words, "--size", size]) == 2
    assert said in capsys.readouterr().err
    assert not (home / "runs").exists()


@pytest.mark.parametrize("task", ["knn", "layers"])
def test_a_size_that_a_trunk_does_not_take_is_refused(home, capsys, task):
    """Before the first file is written; the advice can be followed as it stands."""
    words = ["--data", "mine", "--out", "runs", "--size", "64"]
    assert program.main(["evaluate", f"{SMALL}@random", task, *words]) == 2
    said = capsys.readouterr().err
    assert (
        "takes images of 32 x 32 pixels, not 64 x 64; read it at its own size" in said
    )
    assert not (home / "runs").exists()
    resizable = re.search(r"or as (\S+),pos=RULE", said)[1]
    again = f"{resizable},pos=size@random"
    assert program.main(["evaluate", again, "knn", *words]) == 0


def test_a_recipe_is_held_to_the_same_sizes(home, capsys):
    words = ["my_resnet.pth", "knn@knn_own geometry.of=1000000", "--data", "mine"]
    assert program.main(["evaluate", *words, "--out", "runs"]) == 2
    assert "4096" in capsys.readouterr().err
    assert not list((home / "runs").rglob("results.jsonl"))


def test_views_have_no_size_of_the_trunk(home, capsys):
    """Heads that train on views of images are for one size; the line says so."""
    words = ["my_resnet.pth", "linear@lorac geometry.of=trunk", "--data", "mine"]
    assert program.main(["evaluate", *words, "--out", "runs"]) == 2
    said = capsys.readouterr().err
    assert "geometry.of is for readings of pooled features" in said
    assert "give resize and crop alone" in said


@pytest.mark.slow
def test_one_set_of_weights_has_one_number_by_every_door(home, monkeypatch):
    """A ViT with mean and std 0.5: beside config.json, by its name, by import, as a module."""
    torch.manual_seed(1)
    model = timm.create_model("test_vit", num_classes=7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    about = model.pretrained_cfg
    assert about["mean"] == about["std"] == (0.5, 0.5, 0.5)
    snapshot = put_in_hub(monkeypatch, home / "hub", "test_vit", model.state_dict())
    config = {"architecture": "test_vit", "pretrained_cfg": {"num_classes": 7}}
    (snapshot / "config.json").write_text(json.dumps(config))  # without mean and std
    torch.save(model.state_dict(), home / "bare.pth")
    words = ["--arch", "timm:test_vit", "--out", "imported.safetensors"]
    assert program.main(["import", "bare.pth", *words]) == 0
    doors = {"file": snapshot / "model.safetensors", "name": "timm:test_vit"}
    doors |= {"import": home / "imported.safetensors", "module": model}
    how = {"data": home / "mine"}
    found = {
        d: backbench.evaluate(m, "knn", out=home / d, **how) for d, m in doors.items()
    }
    for door, results in found.items():
        numbers = [(row.checkpoint, row.column, row.value) for row in results]
        assert numbers == [
            (row.checkpoint, row.column, row.value) for row in found["file"]
        ], door
        pixels = results[0].provenance["pixels"]
        assert pixels["mean"] == pixels["std"] == [0.5, 0.5, 0.5], door
    assert "does not say its pixels" in found["import"][0].provenance["pixels"]["from"]


@pytest.mark.slow
def test_refused_data_leaves_no_weights_behind(home, capsys):
    """A copy between train and test is found after the model is read."""
    for split in ("train", "test"):
        shutil.copytree("mine", f"divided/{split}")
        for index, image in enumerate(sorted((home / "divided" / split).rglob("*"))):
            if image.is_file() and split == "test":
                picture(image, index)
    shutil.copy("divided/train/cat/3.png", "divided/test/owl/copy.png")
    words = ["evaluate", f"{SMALL}@random", "--data", "divided", "--out"]
    for tasks in ((), ("knn",), ("finetune",)):
        assert program.main([*words[:2], *tasks, *words[2:], "runs/first"]) == 2
        assert "is also in training data" in capsys.readouterr().err
        assert not (home / "runs").exists()
    # What was there stays, and a refusal after the first number keeps what its rows name
    (home / "runs").mkdir()
    (home / "runs/note.txt").write_text("mine")
    assert program.main([*words, "runs"]) == 2
    assert [file.name for file in (home / "runs").iterdir()] == ["note.txt"]
    (home / "divided/test/owl/copy.png").unlink()
    assert program.main([*words[:2], "knn", *words[2:], "runs"]) == 0
    shutil.copy("divided/train/cat/3.png", "divided/test/owl/copy.png")
    assert program.main([*words, "runs"]) == 2
    assert (home / "runs/checkpoint.safetensors").exists()


def test_detection_is_a_task_beside_others(home, tiny_root):
    tasks = ["knn/digits@knn_demo", "faster_rcnn/scenes@tiny_faster_rcnn_R_18_FPN"]
    line = ["evaluate", "my_resnet.pth", *tasks, "--data", str(tiny_root)]
    assert program.main([*line, "--out", "runs"]) == 0
    assert {row.task for row in rows_of(home / "runs")} == {"knn", "faster_rcnn"}


def test_layouts_of_a_folder(tmp_path):
    plain = folder(tmp_path / "plain", per_class=5, classes=("a", "b"))
    splits = catalog.load("plain", tmp_path)
    assert [len(part) for _, part in splits.items()] == [6, 2, 2]
    assert splits.test.paths == catalog.load("plain", tmp_path, seed=3).test.paths
    assert "a fifth of each class (2 of 10 images) is drawn for test" in splits.notes[0]
    # train and val alone: val is scored
    two = tmp_path / "two"
    folder(two / "train", per_class=5, classes=("a", "b"))
    folder(two / "val", per_class=3, classes=("a", "b"), side=30)
    splits = catalog.load("two", tmp_path)
    assert len(splits.test) == 6 and splits.held_out
    assert "has no test folder: val is scored" in splits.notes[0]
    # A class may be called train
    os.rename(plain / "a", plain / "train")  # noqa: PTH104
    assert catalog.load("plain", tmp_path).train.classes == ("b", "train")
    assert catalog.own_folders(tmp_path) == {"plain": "", "two": ""}


def test_own_folders_are_shown(tmp_path, capsys):
    folder(tmp_path / "mine", per_class=5)
    (tmp_path / "half" / "train" / "a").mkdir(parents=True)
    for run in ("knn-mine", "logreg-mine"):  # a folder of folders is no dataset yet
        (tmp_path / "runs" / run).mkdir(parents=True)
    assert program.main(["data", "list", "--data", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("mine"))
    assert line.split()[:5] == ["mine", "3", "9", "3", "3"] and "your own" in line
    assert (
        "half: no folder 'test' or 'val' beside 'train'" in said
        and "knn-mine" not in said
    )


@pytest.fixture
def wrong(home):
    """Folders and files with one mistake each."""
    for empty in ("packed", "flat", "bare", "lists", "empty", "one/a", "one/b"):
        (home / empty).mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(home / "flat" / "1.png")
    folder(home / "single", per_class=3, classes=("a",))
    folder(home / "root" / "mine" / "train", per_class=3)
    folder(home / "only" / "train", per_class=3)
    for name in ("a,b", "all", "cifar10", "split/train", "split/test"):
        folder(home / name, per_class=3)
    own_boxes.yolo(home / "cells")
    files = {
        "notes.txt": "no weights",
        "packed/photos.zip": "PK",
        "base.yaml": "base: nobody",
    }
    files |= {"odd.yaml": "base: knn\nkk: [5]", "empty/1percent.txt": "\n"}
    files |= {"lists/1percent.txt": "cat/0.png\n\ncat/999.png\n"}
    files |= {"lists/10percent.txt": "cat/0.png\nbird/1.png\n"}
    for name, text in {
        **files,
        "empty/10percent.txt": "cat/0.png\ncat/0.png\n",
    }.items():
        (home / name).write_text(text)
    return home


EVALUATE = "evaluate my_resnet.pth {} --data {} --out runs"
LINEAR = "linear my_resnet.pth --datasets mine --data . --out runs --protocol {}"
SEMISUP = "semisup my_resnet.pth --data . --out runs --percent {}"
WRONG = [
    ("evaluate nobody.pth --data mine --out runs", "nobody.pth: no such file"),
    (
        "evaluate resnet18@random --data mine --out runs",
        "resnet18@random: no such file; did you mean timm:resnet18@random?",
    ),
    (
        "evaluate knm my_resnet.pth --data mine --out runs",
        "knm: no such file, and no task; did",
    ),
    (
        "evaluate KNN my_resnet.pth --data mine --out runs",
        "KNN: no such file, and no task; did you mean 'knn'?",
    ),
    (
        "evaluate knn,logreg my_resnet.pth --data mine --out runs",
        "no task; write a blank between tasks: knn logreg",
    ),
    (
        "evaluate my_resnet.pth knn k=5 --data mine --out runs",
        "stands in one word with its task: 'knn@knn_own k=5'",
    ),
    (
        "evaluate my_resnet.pth knn@k=5 --data mine --out runs",
        "knn@k=5: no recipe behind the @; write 'knn@knn k=5'",
    ),
    (
        "evaluate knn --data mine --out runs",
        "knn: is a task; name a checkpoint file or timm:NAME",
    ),
    (
        "evaluate timm:resnet5 --data mine --out runs",
        "has no model 'resnet5'; did you mean",
    ),
    ("evaluate notes.txt --data mine --out runs", "notes.txt: "),
    (
        EVALUATE.format("", "nowhere"),
        "--data nowhere: no such folder; give the folder with the im",
    ),
    (EVALUATE.format("", "notes.txt"), "--data notes.txt: is a file"),
    (EVALUATE.format("", "packed"), "photos.zip: not readable as a zip file"),
    (
        EVALUATE.format("", "flat"),
        "flat: 1 images lie in no class folder (1.png first); expected",
    ),
    (EVALUATE.format("", "bare"), "bare: no class folders in it; expected"),
    (EVALUATE.format("", "single"), "single: one class folder alone, 'a'; expected"),
    (
        EVALUATE.format("", "root"),
        "root: holds datasets (mine), no classes; name one of them",
    ),
    (
        EVALUATE.format("", "only"),
        "only: no folder 'test' or 'val' beside 'train'; expected",
    ),
    (
        EVALUATE.format("", "a,b"),
        "a dataset's name has no comma and is not 'all'; rename it",
    ),
    (
        EVALUATE.format("", "all"),
        "a dataset's name has no comma and is not 'all'; rename it",
    ),
    (
        EVALUATE.format("mask_rcnn --workers 1", "mine"),
        "mask_rcnn: --accelerator and --workers",
    ),
    (
        EVALUATE.format("", "cifar10"),
        "the name of the known dataset cifar10, and not its files",
    ),
    (EVALUATE.format("", "cells/images"), "lies inside the dataset HOME/cells; give"),
    (EVALUATE.format("", "cells/images/train"), "inside the dataset HOME/cells; give"),
    (EVALUATE.format("", "cells/labels"), "inside the dataset HOME/cells; give"),
    (EVALUATE.format("", "split/test/cat"), "inside the dataset HOME/split; give"),
    (
        "evaluate my_resnet.pth --data cells --out cells/runs",
        "lies in the dataset HOME/cells, so what is written there would be read as its",
    ),
    (
        LINEAR.format("knn").replace("mine", "cells"),
        "cells: holds boxes, no folder for each class; `backbench evaluate CHECKPOINT",
    ),
    (
        LINEAR.format("knn").replace("--data .", "--data notes.txt"),
        "--data notes.txt: is a file, no folder",
    ),
    (
        "pretrain tiny_simclr data.dataset=cells --data . --out runs",
        "`backbench pretrain METHOD --images cells/images/train` trains on its pic",
    ),
    (
        "pretrain tiny_simclr optim.lr=1 optim.lr=fast --data . --out runs",
        "override 'optim.lr=fast': 'optim.lr' must be a number, not 'fast'",
    ),
    (
        "pretrain tiny_simclr views.crops=[{sise:3}] --data . --out runs",
        "override 'views.crops=[{sise:3}]': ",
    ),
    (EVALUATE.format("", "one"), "one/a: class folder without images"),
    (EVALUATE.format("knn@nobody", "mine"), "no recipe 'nobody'"),
    (
        EVALUATE.format("finetune@finetune,semisup", "mine"),
        "no recipe 'finetune,semisup'",
    ),
    (EVALUATE.format("knn/other", "."), "other: no such folder; expected"),
    (
        "evaluate my_resnet.pth --data mine --out notes.txt",
        "notes.txt: is a file; --out needs",
    ),
    (
        LINEAR.format("knn"),
        "k = 200 neighbours of 48 images; write k=5,20 behind the protocol",
    ),
    (
        LINEAR.format("knn kk=5"),
        "--protocol knn kk=5: unknown key 'kk'; did you mean 'k'",
    ),
    (
        LINEAR.format("knn k=5,many"),
        "--protocol knn k=5,many: 'k[1]' must be a whole number",
    ),
    (
        LINEAR.format("own k=5"),
        "'k=5' after --protocol own: each checkpoint has another; name one",
    ),
    (LINEAR.format("base.yaml"), "base 'nobody' is not there (looked for"),
    (LINEAR.format("odd.yaml"), "odd.yaml: unknown key 'kk'"),
    (SEMISUP.format("1"), "measures on a published list of imagenet; give --lists DIR"),
    (
        SEMISUP.format("1 --dataset mine --lists lists"),
        "1percent.txt:3: 'cat/999.png' is not",
    ),
    (
        SEMISUP.format("10 --dataset mine --lists lists"),
        "10percent.txt:2: 'bird/1.png' has a",
    ),
    (
        SEMISUP.format("1 --dataset mine --lists empty"),
        "1percent.txt: the list is empty; write an",
    ),
    (
        SEMISUP.format("10 --dataset mine --lists empty"),
        "10percent.txt:2: 'cat/0.png' is listed",
    ),
    (SEMISUP.format("1 --dataset nothing"), "nothing: no such folder; expected"),
]


def test_a_mistake_is_one_line_that_names_it(wrong, capsys):
    for line, expected in WRONG:  # thirty, in one process
        assert program.main(line.split()) == 2, line
        error = capsys.readouterr().err.strip()
        assert expected.replace("HOME", str(wrong)) in error, f"{line}\n{error}"
        assert (
            len([text for text in error.splitlines() if text.startswith("backbench: ")])
            == 1
        )
        assert (
            "fault of backbench" not in error and len(error.splitlines()[-1]) < 800
        ), error
    assert not list(wrong.glob("runs/**/results.jsonl"))


def test_a_protocol_is_changed_on_the_command_line_or_in_a_file_anywhere(
    home, caplog, capsys
):
    caplog.set_level("INFO")
    trunk_file(home / "small.safetensors")
    (home / "mine.yaml").write_text("base: knn_demo\nk: [3]\n")
    (home / "knn.yaml").write_text(
        "base: knn\nk: [3]\ngeometry: {resize: 32, crop: 32}\n"
    )
    line = [
        "linear",
        "--protocol",
        "knn_demo",
        "k=3",
        "small.safetensors",
        "--datasets",
        "mine",
    ]
    assert program.main([*line, "--data", ".", "--out", "a"]) == 0
    said = "--protocol knn_demo: k is [3], not [5, 20] as in the shipped knn_demo; its columns"
    assert said in caplog.text
    caplog.clear()
    words = ["small.safetensors", "--datasets", "mine", "--data", "."]
    assert (
        program.main(["linear", *words, "--out", "b", "--protocol", "mine.yaml"]) == 0
    )
    assert (
        "k is [3], not [5, 20] as in the shipped knn_demo; its columns" in caplog.text
    )
    a, b = (rows_of(home / run) for run in "ab")
    assert [(row.column, row.value) for row in a] == [
        (row.column, row.value) for row in b
    ]
    caplog.clear()
    assert program.main(["linear", *words, "--out", "c", "--protocol", "knn.yaml"]) == 0
    assert "geometry.resize is 32, not 256" in caplog.text
    # A list of labels is drawn: 2 of each class at least, the same for every checkpoint
    more = ["length.epochs=1", "augment.size=32", "head_lr=0.01", "batch_size=4"]
    more = [f"parts.10.{more[0]}", *more[1:], "geometry.resize=32", "geometry.crop=32"]
    semisup = [
        "semisup",
        "small.safetensors",
        "--percent",
        "10",
        "--dataset",
        "mine",
        *more,
    ]
    assert program.main([*semisup, "--data", ".", "--out", "d"]) == 0, (
        capsys.readouterr().err
    )
    assert "no --lists, so 6 of 48 labels are drawn" in caplog.text
    (row,) = rows_of(home / "d")
    assert (
        row.dataset == "mine"
        and "6 labelled images from a list" in row.provenance["notes"][-1]
    )
    assert row.provenance["images"] == {"train": 3, "val": 3, "test": 12}
    assert row.provenance["labelled_from"] == "the seed's draw of train"


def test_a_run_folder_that_is_called_as_a_task_is_no_model(home):
    """Such folders lie beside the models of a demo; ./knn would be the folder."""
    (home / "knn").mkdir()
    words = [
        "evaluate",
        "my_resnet.pth",
        "knn",
        "./knn",
        "--data",
        "mine",
        "--out",
        "r",
    ]
    request = parse(words)
    models, tasks = evaluate_verb.models_and_tasks(request)
    assert tasks == ["knn"]
    assert [str(model) for model in models] == ["my_resnet.pth", "knn"]
