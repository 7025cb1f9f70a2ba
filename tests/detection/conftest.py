"""The embedded scenes, and runs of the command as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backbench import embedded

ROOT = Path(__file__).parent.parent.parent
TRAIN_NET = (sys.executable, str(ROOT / "detection" / "train_net.py"))


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """ROOT/scenes with 12 training and 4 validation images."""
    return embedded.build(tmp_path_factory.mktemp("data"), "tiny")


def command(config, data, out, *more):
    """The arguments of one run; what follows the flags in `more` are KEY VALUE overrides."""
    return [*TRAIN_NET, "--config-file", config, "--data", str(data), "--out", str(out), *map(str, more)]


@pytest.fixture(scope="session")
def detect():
    """detect(config, data, out, *more) -> the finished process."""

    def start(config, data, out, *more, timeout=300):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        args = command(config, data, out, *more)
        return subprocess.run(args, capture_output=True, text=True, env=env, timeout=timeout, check=False)

    return start
