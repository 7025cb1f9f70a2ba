"""The short list on fabricated files with small images: refused, killed, continued, bundled."""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import foreign_fixtures as made
from support import small_verbs
from support.layouts import Trees

from backbench.cli import program
from backbench.launch.records import Ledger
from backbench.published import reproduction_lists
from backbench.recipes import config
from backbench.records import store


def without_counters(net):
    return {k: v for k, v in net.state_dict().items() if "tracked" not in k}


LAYOUTS = {
    "byol_300": made.byol_deepmind,
    # github.com/ajtejankar/byol-convert writes torchvision's names, `fc` and no counters
    "byol_1000": without_counters,
    "supervised": made.torchvision,
    "simsiam_100": made.simsiam,
    "swav_200": made.swav,
    "lorac": made.lorac,
    "moco_m": made.lorac,
    "moco_v1_200": made.moco,
    "moco_v2_200": made.moco,
    "moco_v2_800": made.moco,
    "jcl": made.moco,
    "barlow_twins_1000": made.plain,
    "vicreg_1000": made.plain,
    "dino": made.plain,
}
# These are made as ResNet-50s, the others as small networks of the same layout
LARGE = ("dino", "moco_v2_200")
DATA = ("imagenet", "cifar10", "dtd", "flowers", "pets")


def fabricate(folder: Path) -> dict[str, Path]:
    """Write FILES/NAME/FILE of every checkpoint of the short list; return their paths."""
    paths = {}
    for seed, (name, about) in enumerate(
        reproduction_lists.read_list("short").files.items()
    ):
        torch.manual_seed(seed)
        net = made.BUILDERS["resnet50" if name in LARGE else "resnet18"]()
        paths[name] = about.path_below(folder, name)
        paths[name].parent.mkdir(parents=True)
        torch.save(LAYOUTS[name](net), paths[name])
    return paths


def with_digests_of(paths: dict[str, Path], folder: Path) -> Path:
    """Write the short list with the digests of these files in place of the printed ones."""
    shipped = config.configs_dir() / reproduction_lists.KIND
    text = (shipped / "_checkpoints.yaml").read_text()
    for name, about in reproduction_lists.read_list("short").files.items():
        for what in ("md5", "sha256"):
            printed = getattr(about, what)
            if printed:
                digest = hashlib.new(what, paths[name].read_bytes()).hexdigest()
                own = digest[: len(printed)]
                text = text.replace(f"{what}: {printed}", f'{what}: "{own}"')
    folder.mkdir()
    (folder / "_checkpoints.yaml").write_text(text)
    (folder / "short.yaml").write_text((shipped / "short.yaml").read_text())
    return folder / "short.yaml"


@pytest.fixture
def field(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trees = Trees(tmp_path / "ROOT", monkeypatch)
    for name in DATA:
        trees(name)
    cluster = {
        "name": "small",
        "kind": "local",
        "jobs": 2,
        "signal_s": 20,
        "command": shlex.join([sys.executable, small_verbs.__file__]),
    }
    Path("small.yaml").write_text(json.dumps(cluster))
    return fabricate(tmp_path / "checkpoints")


def started(words):
    """Start backbench in a process group of its own, which can be killed whole."""
    command = [sys.executable, "-m", "backbench", *words]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def rows():
    """(checkpoint, column) of each number; none was appended twice."""
    found, problems = store.read(Path("runs"))
    assert not problems
    keys = [(r.checkpoint, r.column) for r in found]
    assert len(keys) == len(set(keys)), "a number was appended twice"
    return keys


def done_jobs():
    statuses = Ledger(Path("runs")).statuses()
    return {name for name, status in statuses.items() if status["state"] == "done"}


def attempts_by_job():
    statuses = Ledger(Path("runs")).statuses()
    return {name: len(status["attempts"]) for name, status in statuses.items()}


def until(run, condition):
    while not condition():
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_short_list_end_to_end(field, capsys, tmp_path):
    where = ["--data", "ROOT", "--cluster", "small.yaml", "--out", "runs"]

    # 1. As shipped, these are not the published files: nothing is imported or run
    assert program.main(["reproduce", "short", *where]) == 2
    assert "printed is b251726a" in capsys.readouterr().err
    assert not Path("runs/checkpoints").exists()

    # 2. With their own digests; killed while files are imported, stopped while jobs run
    mine = with_digests_of(field, tmp_path / "lists-of-mine")
    words = ["reproduce", str(mine), *where]
    run = started(words)
    until(run, lambda: len(list(Path("runs/checkpoints").glob("*.safetensors"))) >= 3)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    imported = Path("runs/checkpoints").glob("*.safetensors")
    kept = {path: path.stat().st_mtime_ns for path in imported}
    run = started(words)
    until(run, lambda: len(done_jobs()) >= 3)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.stderr.read()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    before = done_jobs()
    assert not Path("runs/reproduce/short.zip").exists()

    # 3. The same command to its end: what was done is not done again
    attempts = attempts_by_job()
    assert program.main(words) == 0, capsys.readouterr().err
    after = attempts_by_job()
    assert all(after[name] == attempts[name] for name in before)
    # DINO's kNN, and of all 14 checkpoints kNN and few labels on four sets
    of_dino = {name for _, name in rows() if name.startswith("knn/imagenet/top1")}
    assert of_dino == {
        f"knn/imagenet/top1_k{k}@knn-dino-v1" for k in (10, 20, 100, 200)
    }
    for dataset in ("cifar10", "dtd", "flowers", "pets"):
        for task in ("knn", "fewshot"):
            start = f"{task}/{dataset}/"
            measured = {digest for digest, name in rows() if name.startswith(start)}
            assert len(measured) == len(field), (task, dataset)

    # 4. The table says that small images are another measurement; the bundle holds together
    page = Path("runs/reproduce/short.md").read_text()
    assert page in capsys.readouterr().out
    assert "1 printed numbers: 1 unlike" in page
    assert "measured as knn/imagenet" in page
    assert program.main(["reproduce", "--check", "runs/reproduce/short.zip"]) == 0
    assert "its table follows from its rows" in capsys.readouterr().out

    # 5. Again: nothing to do, the same table
    assert program.main(words) == 0
    assert Path("runs/reproduce/short.md").read_text() == page
    assert attempts_by_job() == after

    # 6. A file that became another one: refused, whatever is there of it
    field["supervised"].write_bytes(field["simsiam_100"].read_bytes())
    assert program.main(words) == 2
    assert "supervised" in capsys.readouterr().err
