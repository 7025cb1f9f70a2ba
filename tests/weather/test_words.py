"""The mistakes of a first day, each with what must be in the last line of stderr."""

import io
import json
import signal
import subprocess
import sys

import pytest
import torch
from support.layouts import class_folder
from support.records import a_result

from backbench.cli import program
from backbench.records import store
from backbench.runs import run_progress
from backbench.runs import terminal as terminal_output
from backbench.runs.ending import guarded
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.weights.checkpoint import Checkpoint

KNN = "kind: knn\nprotocol: near-test-v1\nk: [1]\ngeometry: {resize: 16, crop: 16}\n"

SGD = "kind: sgd\nprotocol: s-v1\nlr: {}\nlength: {{default: {{epochs: {}}}}}\n"


@pytest.fixture
def shapes(tmp_path):
    """ROOT/shapes: two classes, three images of each in train and in test."""
    class_folder(tmp_path / "data" / "shapes", classes="ab", per=3)
    return tmp_path / "data"


@pytest.fixture
def said(capfd):
    """Run a command; its status, its last line on stderr and all of its stdout."""

    def run(*words):
        capfd.readouterr()
        status = program.main([str(word) for word in words])
        out, err = capfd.readouterr()
        lines = err.strip().splitlines()
        assert "Traceback" not in err
        return status, lines[-1] if lines else "", out

    return run


def refused(answer, *parts):
    status, line, _ = answer
    assert status == 2, line
    assert "fault of backbench" not in line
    for part in parts:
        assert str(part) in line, f"'{part}' is not in: {line}"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_truncated_image(shapes, trunk, tmp_path, said, workers):
    (tmp_path / "near.yaml").write_text(KNN)
    victim = shapes / "shapes" / "test" / "b" / "001.jpg"
    victim.write_bytes(victim.read_bytes()[:200])
    words = [
        "linear",
        trunk,
        "--datasets",
        "shapes",
        "--protocol",
        tmp_path / "near.yaml",
    ]
    answer = said(
        *words, "--data", shapes, "--out", tmp_path / "run", "--workers", workers
    )
    refused(answer, f"backbench: {victim}: corrupt image")
    assert len(answer[1]) < 300


# Words of a command in a folder with data/shapes -> what is said of them
BEFORE_TORCH = {
    "pretrain lorac_imagenet --data data": "did you mean 'lorac/lorac_imagenet'?",
    "linear x.pth --datasets cars --data data": "x.pth: no such file",
    "finetune data --dataset shape --data data": "did you mean 'shapes'?",  # a folder in ROOT
    "analyze data --dataset shapes --data nowhere": "--data nowhere: no such folder",
    "linear data --datasets x --protocol knm --data data": "did you mean 'knn'?",
    "semisup data --percent 1 --lists data --protocol lorac --data data": "a protocol of kind 'sgd'",
    "analyze data --dataset shapes --recipe a.yaml --data data": "unknown key 'views'",
    "pretrain demo_simclr epohs=3 --data data": "unknown key 'epohs'; did you mean 'epochs'?",
    "pretrain demo_simclr optim.lr=fast --data data": "'optim.lr' must be a number, not 'fast'",
    "pretrain demo_simclr method.name=simclrr --data data": "method: unknown method 'simclrr'; did",
    'pretrain demo_simclr views.crops=[{"size":32,"blur_p":7}] --data data': "is a probability",
    "pretrain demo_lorac --data data": "data/digits: no such folder",
    "detect --config-file nosuch --data data": "no recipe 'nosuch'",
    "detect --checkpoint gone.pth --config-file tiny_faster_rcnn_R_18_FPN": "gone.pth: no such file",
    "inspect gone.pth": "gone.pth: no such file",
    "import gone.pth": "gone.pth: no such file",
    "export gone.pth --format timm": "gone.pth: no such file",
    "launch run nosuch": "no recipe 'nosuch'",
    "leaderboard gone": "gone",
}


def test_names_are_looked_up_before_torch_is_imported(tmp_path, shapes):
    (tmp_path / "a.yaml").write_text(
        "crops: {size: 16}\ngeometry: {crop: 16}\nviews: 4\n"
    )
    wrong = [line.split() for line in BEFORE_TORCH]
    for words in wrong:
        if words[0] not in ("inspect", "leaderboard"):
            words.extend(["--out", "run"])
    code = (
        "import json, sys\nfrom backbench.cli import program\n"
        "for words in json.loads(sys.argv[1]): assert program.main(words) == 2\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    command = [sys.executable, "-c", code, json.dumps(wrong)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for line, said in zip(done.stderr.splitlines(), BEFORE_TORCH.values(), strict=True):
        assert said in line
    assert not (tmp_path / "run").exists()


def test_all_datasets_where_nine_are_missing(trees, trunk, tmp_path, said):
    for name in ("cifar10", "flowers", "pets"):
        trees(name)
    where = ("--data", trees.root, "--out", tmp_path / "run")
    names = (
        "aircraft, birdsnap, caltech101, cars, cifar100, dtd, food, places365, sun397"
    )
    parts = (
        f"9 of 12 datasets are missing: {names}",
        "--datasets cifar10,flowers,pets",
    )
    refused(said("linear", trunk, "--datasets", "all", *where), *parts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (KNN.replace("[1]", "[0]"), "'k[0]' must be greater than or equal to 1, not 0"),
        (KNN.replace("[1]", "[]"), "'k' must be a list that is not empty"),
        (
            KNN.replace("near-test-v1", "''"),
            "'protocol' must be text that is not empty",
        ),
        (
            "kind: logreg\nprotocol: l-v1\nl2: [-1.0, 10, 3]\n",
            "l2 is the smallest and the",
        ),
        (SGD.format("[.inf]", 1), "'lr[0]' must be less than inf"),
        (SGD.format("[1]", 0), "'length.default.epochs' must be greater than 0"),
        (KNN.replace("resize: 16, ", "resize: -16, "), "'geometry.resize' must be"),
        (
            KNN.replace("resize: 16, ", "resize: 1000000, "),
            "'geometry.resize' must be less than or equal to 4096, not 1000000",
        ),
        (SGD.format("[1]", 10**9), "epochs' must be less than or equal to 1000000"),
        (
            "kind: logreg\nprotocol: l-v1\nl2: [1.0, 10, 1000000000]\n",
            "'l2[2]' must be less than or equal to 10000",
        ),
        (
            "kind: fewshot\nprotocol: f-v1\ndraws: 1000000000\n",
            "'draws' must be less than or equal to 10000",
        ),
    ],
)
def test_numbers_of_a_protocol_that_mean_nothing(text, words, tmp_path, said):
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "x.pth").touch()  # a file that is not there would be said first
    command = [
        "linear",
        tmp_path / "x.pth",
        "--datasets",
        "shapes",
        "--protocol",
        tmp_path / "mine.yaml",
    ]
    refused(
        said(*command, "--data", tmp_path, "--out", tmp_path / "run"),
        "mine.yaml",
        words,
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["leaderboard", ".", "--csv", "folder"],
            ["folder: a folder is there; choose a file"],
        ),
        (
            ["leaderboard", ".", "--tidy", "notes.txt/x.csv"],
            ["notes.txt: a file is there"],
        ),
        (
            ["leaderboard", ".", "--latex", "notes.txt"],
            ["notes.txt: a file is there; choose"],
        ),
        (["paper", "--markdown", "folder"], ["folder: a folder is there"]),
        (
            ["launch", "run", "notes.txt"],
            ["notes.txt: recipes are .yaml files; give one"],
        ),
        (
            ["launch", "run", "table2", "pack=0"],
            ["override 'pack=0': 'pack' must be greater than or equal"],
        ),
        (
            ["launch", "run", "table2", "checkpoints=x.pth"],
            ["'checkpoints' must be a list, not"],
        ),
        (
            ["launch", "run", "table2", "--watch", "--interval", "-1"],
            ["--interval -1.0: from 0.1 to 86400"],
        ),
        (
            ["pretrain", "demo_simclr", "views.crops=3", "--data", ".", "--out", "run"],
            ["a list"],
        ),
        (["paper", "lorac:99"], ["no table or figure 'lorac:99'; did you mean"]),
        (
            ["paper", "MIO"],
            ["'MIO' is a paper; name one of its items: mio:4, mio:4.1, mio:fig"],
        ),
        (
            ["inspect", "https://x.org/a.pth"],
            ["https://x.org/a.pth: is an address; download the file and give"],
        ),
        (
            ["leaderboard", ".", "--csv", "/proc/y/x.csv"],
            ["/proc/y: not permitted; choose a place that can be written to"],
        ),
        (
            ["clean", "notes.txt"],
            ["notes.txt: is a file, no folder; give one or more run folders"],
        ),
    ],
)
def test_paths_and_values_of_the_wrong_kind(words, parts, tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("a note")
    store.append(tmp_path, [a_result()])
    refused(said(*words), *parts)


def test_classes_that_differ_are_named(shapes, said):
    (shapes / "shapes" / "test" / "b").rename(shapes / "shapes" / "test" / "c")
    refused(
        said("data", "check", "shapes", "--data", shapes),
        "only in test: c; only in train: b",
    )


def test_ignored_files_are_reported(shapes, said):
    base = shapes / "shapes" / "train"
    (base / "a" / "moving.gif").write_bytes(b"GIF89a")
    (base / "notes").write_text("?")
    status, _, out = said("data", "check", "shapes", "--data", shapes)
    assert status == 1
    assert (
        "train: 2 files are ignored (1 .gif, 1 without a suffix), a/moving.gif first"
        in out
    )


def test_coco_and_voc(tiny_root, tmp_path, said):
    (tmp_path / "coco").symlink_to(tiny_root / "scenes")
    status, _, out = said("data", "check", "coco", "--data", tmp_path)
    assert status == 0, out
    assert "instances_train2017.json" in out and "all right" in out
    main = tmp_path / "voc" / "VOC2007" / "ImageSets" / "Main"
    main.mkdir(parents=True)
    (main / "trainval.txt").write_text("000005\n")
    status, _, out = said("data", "check", "voc", "--data", tmp_path)
    assert status == 1
    assert "VOC2007 trainval: 1 images; 1 files are missing" in out
    assert "000005.jpg first; 1 files are missing" in out and "000005.xml first" in out


def test_the_leaderboard_names_what_it_wrote_or_why_not(tmp_path, caplog):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    store.append(tmp_path / "runs" / "one", [a_result()])
    words = ["leaderboard", str(tmp_path / "runs")]
    for option in ("csv", "tidy", "html", "latex", "markdown", "figures"):
        words += [f"--{option}", str(tmp_path / option)]
    assert program.main(words) == 0
    said = caplog.text
    wrote = ("csv: a row per checkpoint", "tidy: a row per number", "html: the page")
    own = "the board's own table (board) and the papers'"
    for what in (*wrote, f"latex: {own}", f"markdown: {own}"):
        assert f"wrote {tmp_path / what}" in said
        assert (tmp_path / what.partition(":")[0]).exists()
    assert (
        f"nothing for {tmp_path / 'figures'}: an ablation needs a recipe with" in said
    )
    assert not (tmp_path / "figures").exists()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_line_fits_and_messages_have_their_own(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(run_progress, "TERMINAL_SECONDS", 0.0)
    monkeypatch.setattr(terminal_output.log, "level", 20)
    progress = Progress(None, 3, "a name that is rather long for it", unit="image")
    progress.advance(loss=1.0, and_more=2.0)
    assert len(terminal.getvalue().removeprefix("\r\x1b[K")) < 40
    record = terminal_output.log.makeRecord("x", 30, "", 0, "a word", (), None)
    terminal_output._Handler(terminal).handle(record)
    assert "\na word\n" in terminal.getvalue()
    progress.advance()
    terminal_output.end_live_line()
    assert terminal.getvalue().endswith("\n")


def test_a_second_ctrl_c_says_that_the_same_command_continues(capsys):
    def looping():
        with StopFlag():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    assert guarded(looping) == 75
    assert "stopped by SIGINT; the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "DataLoader worker (pid 7) is killed by signal: Killed. ",
            "a loader worker was killed",
        ),
        (
            "DataLoader worker (pid 7) is killed by signal: Segmentation fault. ",
            "crashed (Segmentation fault)",
        ),
        ("received 0 items of ancdata", "raise `ulimit -n`"),
        (
            "DataLoader worker (pid(s) 7) exited unexpectedly",
            "try fewer loader workers",
        ),
        (
            "DataLoader worker (pid 7) is killed by signal: Bus error.",
            "make /dev/shm larger",
        ),
        (
            "DataLoader worker (pid 7) is killed by signal: Bus error.",
            "DATALOADER.NUM_WORKERS",
        ),
        (
            "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1",
            "is gone",
        ),
    ],
)
def test_killed_workers_and_neighbours(text, words, capsys):
    def loading():
        raise RuntimeError(text)

    assert guarded(loading) == 1
    line = capsys.readouterr().err
    assert words in line and "the same command continues" in line
    assert "fault of backbench" not in line


GRID = """
name: mine
recipes: [{recipe: tiny_lorac, vary: {KEY: [0.1, 0.2]}, seeds: [0]}]
evaluate: [{verb: linear, protocol: knn_demo, datasets: [cifar10]}]
"""


def test_a_grid_whose_keys_are_none(shapes, tmp_path, said):
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.replace("KEY", "optim.lrr"))
    words = ("launch", "run", grid, "--data", shapes, "--out", tmp_path / "runs")
    for more in (["--dry-run"], []):
        answer = said(*words, *more)
        refused(
            answer,
            "lrr-0.1-s0",
            "unknown key 'optim.lrr'; did you mean 'lr'?",
            tmp_path,
        )
    assert not (tmp_path / "runs" / "pretrain").exists()


def test_a_grid_whose_data_are_elsewhere(shapes, tmp_path, said, caplog):
    """No job is started for them, unless they are where the jobs run; each set is named once."""
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.replace("KEY", "optim.lr"))
    words = (
        "launch",
        "run",
        grid,
        "--data",
        shapes,
        "--out",
        tmp_path / "runs",
    )
    for more in ((), ("--dry-run",)):
        status, line, out = said(*words, *more)
        assert status == 2 and ("4 jobs" in out) == bool(more)
        assert f"{shapes}/digits: no such folder (for pretrain/" in line
        assert "cifar-10-batches-py is missing (for " in line, line
        assert "no job is started" in line
    assert not (tmp_path / "runs" / "pretrain").exists()
    status, _, out = said(*words, "--dry-run", "--data-later")
    assert status == 0 and "4 jobs" in out
    told = [
        r.getMessage() for r in caplog.records if "would stop here" in r.getMessage()
    ]
    assert [f"{shapes}/digits: no such folder" in line for line in told] == [
        True,
        False,
    ]
    assert "cifar-10-batches-py is missing" in told[1]


def test_no_epochs_are_known_epochs(tmp_path, said, trunk):
    torch.save(Checkpoint.load(trunk).state_dict, tmp_path / "weights.pt")
    words = ["import", tmp_path / "weights.pt", "--out", tmp_path / "x.safetensors"]
    status, line, out = said(*words, "--epochs", "0")
    assert status == 0, line
    assert "epochs 0;" in " ".join((out + line).split())
