"""A tiny pretraining of a narrow ResNet-18 on the pictures `shapes`, and its command in a process."""

import json
import os
import subprocess
import sys

from backbench.errors import EXIT_BAD_INPUT
from backbench.pretrain.method_config import MethodConfig
from backbench.pretrain.recipe import Data, Optim, PretrainConfig
from backbench.weights.checkpoint import Checkpoint

ARCH = "resnet18,width=0.25"
HEAD = {"hidden": 32, "dim": 16}
SIMCLR = {"name": "simclr", "head": HEAD}
MOCO = "method={name: moco, queue: 64, head: {hidden: 32, dim: 16, batchnorm: false}}"


def crops(size=16, count=2, **settings):
    return {"crops": [{"count": count, "size": size, **settings}]}


def recipe(**changes):
    """Its recipe as JSON, which is YAML; a change to None leaves the key out."""
    keys = {
        "name": "tiny",
        "arch": ARCH,
        "method": SIMCLR,
        "views": crops(blur_p=0.0),
        "data": {"dataset": "shapes", "workers": 0},
        "optim": {"name": "sgd", "lr": 0.05},
        "epochs": 2,
        "batch_size": 8,
        "log_every": 1,
        **changes,
    }
    return json.dumps({key: value for key, value in keys.items() if value is not None})


def config(**changes):
    """A recipe as a value, of a method that trains nothing."""
    keys = {
        "name": "test",
        "method": MethodConfig(name="random"),
        "optim": Optim(lr=0.1),
        "data": Data(dataset="shapes", workers=0),
        "epochs": 1,
        "batch_size": 8,
        **changes,
    }
    return PretrainConfig(**keys)


def start(root, out, file, *words):
    """`backbench pretrain ROOT/FILE` in a process of its own."""
    command = [sys.executable, "-m", "backbench", "pretrain", str(root / file), *words]
    command += ["--data", str(root), "--out", str(out), "--accelerator", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def refused(answer, *parts):
    """It ended with bad input and with these parts in what it said."""
    status, said = answer
    assert status == EXIT_BAD_INPUT
    assert all(part in said for part in parts), said
    return said


def digest(out):
    return Checkpoint.load(out / "backbone.safetensors").digest
