"""Opens 2,400 files by strangers, drawn from seeds (`make test` opens the first of each kind).

A command ends with exit 0, or with one line and exit 2, at once, and it runs, reads and changes
nothing else.
"""

import csv
import functools
import io
import json
import os
import pickle
import random
import resource
import shutil
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import save
from support.boards import DEMO, synthetic
from support.strangers import Calls, door, record, write_cifar10

from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.published import bundle
from backbench.recipes import config
from backbench.weights.families.resnet_trunk import build_backbone

SECRET = "hunter2-of-the-environment"
# Kind of file, a method of `Campaign` -> how many are opened
COUNTS = {
    "results": 600,
    "records": 300,
    "recipes": 400,
    "grids": 200,
    "configs": 150,
    "weights": 250,
    "datasets": 100,
    "shared": 200,
    "csvs": 100,
    "bundles": 100,
}
FAST = 4  # of each kind in the fast tests

VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    10**4000,
    float("nan"),
    float("inf"),
    -1e308,
    "",
    "x",
    "abc\ndef",
    "\x1b[2J",
    "\ud800",
    "\u202e",
    "x" * 5000,
    "=1+1",
    "<script>",
    "${oc.env:SECRET}",
    "$(touch called)",
    "../../x",
    "/dev/zero",
    "/etc/passwd",
    [],
    [1],
    ["x"] * 3,
    {},
    {"a": 1},
    [[[[]]]],
    "%s%n",
    "'",
    "{0.__class__}",
    "$\\frac$",
    "!!python/object/apply:os.system ['touch called']",
    "`touch called`",
]


def mutated(tree, rng):
    """Copy the tree with one to three of its places changed, left out or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, 3)):
        # 1. Walk down to a place
        node = None
        key = None
        below = tree
        while isinstance(below, dict | list) and below and rng.random() < 0.8:
            node = below
            if isinstance(node, dict):
                key = rng.choice(list(node))
            else:
                key = rng.randrange(len(node))
            below = node[key]
        if node is None:
            continue
        # 2. Change it
        how = rng.random()
        if how < 0.7:
            node[key] = rng.choice(VALUES)
        elif how < 0.85:
            del node[key]
        elif isinstance(node, dict):
            node[str(rng.choice(VALUES))[:300]] = rng.choice(VALUES)
        else:
            node.append(rng.choice(VALUES))
    return tree


def damaged(data, rng):
    """Cut, flip, insert, remove or repeat some of the bytes."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data)) if data else 0
        how = rng.randrange(5)
        if how == 0:
            del data[place:]
        elif how == 1 and data:
            data[place] ^= 1 << rng.randrange(8)
        elif how == 2:
            data[place:place] = rng.randbytes(rng.randint(1, 40))
        elif how == 3:
            data[place : place + rng.randint(1, 200)] = b""
        else:
            data[place:place] = data[place : place + 200] * rng.randint(1, 20)
    return bytes(data)


def yaml_text(tree, rng):
    """Write a recipe as text; some texts have what only YAML can say."""
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.2:
        text = "a: &a [x, x]\nb: [" + "*a, " * rng.randint(1, 3000) + "]\n"
    elif rng.random() < 0.2:
        start = rng.choice(["[", "{a: ", "- ", "? ", "&a ", "!!set {", "'"])
        text = start * rng.randint(1, 5000)
    return text.encode(errors="surrogatepass")


@functools.cache
def a_few_weights():
    return dict(list(build_backbone("resnet18").state_dict().items())[:6])


class Campaign:
    """A campaign writes a file, opens it with commands, and asserts what must not have happened."""

    def __init__(self, root, good):
        self.root = root
        self.good = good
        self.ended = Counter()  # exit status -> commands
        self.before = self.rows(good)

    def rows(self, runs):
        out = self.root / "board.csv"
        said = door("leaderboard", runs, "--csv", out, "--markdown", self.root / "md")
        self.judge(said)
        assert said.status == 0, said.err
        with out.open(newline="") as file:
            return {row["checkpoint"]: row for row in csv.DictReader(file)}

    def judge(self, said, allowed=(0, 2)):
        self.ended[said.status] += 1
        assert said.status in allowed, (said.status, said.err[-1500:])
        for text in (said.out, said.err):
            assert "Traceback" not in text and "Logging error" not in text, text[-1500:]
            assert SECRET not in text
        if said.status == 2:
            lines = said.err.splitlines()
            told = [line for line in lines if line.startswith("backbench")]
            assert len(told) == 1 and said.last == told[0], said.err
            assert said.last.isprintable() or SECRET not in said.last
        assert not list(self.root.rglob("called")) and not os.path.lexists("called")

    def results(self, rng):
        file = rng.choice(sorted(self.good.rglob("results.jsonl")))
        line = json.loads(file.read_text().splitlines()[0]) | {"checkpoint": "f" * 64}
        line["provenance"].pop("predictions", None)
        data = json.dumps(mutated(line, rng)).encode() + b"\n"
        if rng.random() < 0.3:
            data = damaged(data, rng)
        folder = self.good / "stranger"
        folder.mkdir()
        (folder / "results.jsonl").write_bytes(data)
        try:
            now = self.rows(self.good)
        finally:
            shutil.rmtree(folder)
        for digest, row in self.before.items():
            assert digest in now
            for column, value in row.items():
                # A stranger's row may share a column's name; the good value stays.
                assert now[digest].get(column, value) == value

    def records(self, rng):
        status = {"state": "done", "attempts": [{"start": 1.0, "end": 2.0}]}
        out = record(self.root / "runs", status, cluster_overrides=["jobs=1"])
        for file in sorted((out / ".launch").glob("s*/*.json")):
            text = json.dumps(mutated(json.loads(file.read_text()), rng)).encode()
            file.write_bytes(damaged(text, rng) if rng.random() < 0.3 else text)
        self.judge(door("launch", "status", "--once", "--out", out))
        self.judge(door("launch", "cancel", "nothing", "--out", out))

    def recipes(self, rng):
        recipe = config.read_recipe(config.find_recipe("tiny_simclr", "pretrain"))
        data = self.root / "none"
        self._yaml(
            rng, mutated(recipe, rng), lambda file: ("pretrain", file, "--data", data)
        )

    def grids(self, rng):
        one = {"verb": "linear", "datasets": ["digits"], "resources": {"account": "a"}}
        grid = {"checkpoints": ["x.pth"], "evaluate": [one], "data": "none"}
        command = ("launch", "run", "--dry-run", "--cluster", "local")
        self._yaml(rng, mutated(grid, rng), lambda file: (*command, file))

    def configs(self, rng):
        tree = {
            "_BASE_": "x.yaml",
            "MODEL": {"DEVICE": "cpu"},
            "SOLVER": {"BASE_LR": "1e-3"},
        }
        command = ("detect", "--data", self.root / "none", "--config-file")
        self._yaml(rng, mutated(tree, rng), lambda file: (*command, file))

    def _yaml(self, rng, tree, command):
        file = self.root / "x.yaml"
        text = yaml_text(tree, rng)
        file.write_bytes(damaged(text, rng) if rng.random() < 0.3 else text)
        self.judge(door(*command(file), "--out", self.root / "run"))
        for made in (self.root / "run").rglob("*"):
            assert not made.is_file() or SECRET not in made.read_text(errors="replace")

    def weights(self, rng):
        state = a_few_weights()
        kind = rng.randrange(4)
        buffer = io.BytesIO()
        if kind == 0:
            torch.save({"state_dict": state}, buffer)
        elif kind == 1:
            torch.save(state, buffer, _use_new_zipfile_serialization=False)
        elif kind == 2:
            model = {k: v.numpy() for k, v in state.items()}
            call = Calls(os.system, "touch called") if rng.random() < 0.5 else 5
            pickle.dump({"model": model, "x": call}, buffer, protocol=rng.randint(0, 5))
        else:
            metadata = {"format": "backbench-checkpoint", "about": "{}"}
            buffer.write(save(state, metadata=metadata))
        file = self.root / "x.pth"
        data = buffer.getvalue()
        file.write_bytes(damaged(data, rng) if rng.random() < 0.8 else data)
        self.judge(door("import", file, "--out", self.root / "x.safetensors"))

    def datasets(self, rng):
        shutil.rmtree(self.root / "cifar10", ignore_errors=True)
        folder = write_cifar10(self.root)
        file = rng.choice(sorted(folder.iterdir()))
        content = {
            "data": np.zeros((4, 3072), rng.choice(["u1", "f8", "i4"])),
            "labels": [0] * 4,
        }
        calls = Calls(os.system, "touch called")
        content[rng.choice(["data", "labels", "x"])] = rng.choice([*VALUES[:20], calls])
        data = pickle.dumps(content, protocol=rng.randint(0, 5))
        file.write_bytes(damaged(data, rng) if rng.random() < 0.6 else data)
        status = 0
        try:
            catalog.open_split(self.root, "cifar10", "train")
        except BadInput as error:
            status = 2
            assert "\n" not in str(error)
        self.ended[status] += 1
        assert not os.path.lexists("called")

    def shared(self, rng):
        """Verify and merge another lab's runs, with rows and kept predictions."""
        theirs = self.root / "theirs"
        shutil.rmtree(theirs, ignore_errors=True)
        shutil.rmtree(self.root / "merged", ignore_errors=True)
        shutil.copytree(self.good, theirs)
        names = "*.npz" if rng.random() < 0.4 else "results.jsonl"
        file = rng.choice(sorted(theirs.rglob(names)))
        if file.suffix == ".jsonl" and rng.random() < 0.8:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            rows[0] = mutated(rows[0], rng)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            file.write_bytes(damaged(file.read_bytes(), rng))
        self.judge(door("verify", theirs), allowed=(0, 1, 2))
        merged = self.root / "merged"
        self.judge(door("merge", f"a={self.good}", f"b={theirs}", "--out", merged))

    def csvs(self, rng):
        table = [["model", "a", "b"]]
        for i in range(6):
            table.append([f"m{i}", str(i), f"{i / 3:.2f}"])
        for _ in range(rng.randint(1, 4)):
            row = rng.choice(table)
            row[rng.randrange(3)] = str(rng.choice(VALUES))[:4000]
        text = "\n".join(",".join(row) for row in table).encode(errors="replace")
        file = self.root / "x.csv"
        file.write_bytes(damaged(text, rng) if rng.random() < 0.5 else text)
        self.judge(door("rank", file))

    def bundles(self, rng):
        manifest = {
            "format": bundle.FORMAT,
            "files": {"list.json": "0" * 64},
            "covered": [],
            "checkpoints": {},
        }
        members = {
            "manifest.json": manifest,
            "list.json": {"name": "short", "checkpoints": [], "files": {}},
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, json.dumps(mutated(content, rng)))
            name = rng.choice(["../called", "runs/results.jsonl", "x" * 300])
            archive.writestr(name, bytes(10**7))
        file = self.root / "x.zip"
        data = buffer.getvalue()
        file.write_bytes(damaged(data, rng) if rng.random() < 0.6 else data)
        self.judge(door("reproduce", "short", "--check", file))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    synthetic(root, ["good-one", "good-two"], DEMO[:1], images=60)
    return root


def run(kind, numbers, good, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    campaign = Campaign(tmp_path, good)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    for number in numbers:
        try:
            getattr(campaign, kind)(random.Random(f"{kind} {number}"))
        except BaseException as error:
            error.add_note(f"{kind} {number}")
            raise
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2**20
    print(f"{kind}: {len(numbers)} files, exits {dict(campaign.ended)}")


@pytest.mark.parametrize("kind", COUNTS)
def test_the_first_of_each_kind(kind, good, tmp_path, monkeypatch):
    run(kind, range(FAST), good, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_all_files_by_strangers(kind, good, tmp_path, monkeypatch):
    assert sum(COUNTS.values()) == 2400
    run(kind, range(COUNTS[kind]), good, tmp_path, monkeypatch)
