"""Pictures to pretrain on."""

import os

import numpy as np
import pytest
from PIL import Image

from backbench.pretrain import monitor
from backbench.runs.run_progress import Progress


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """shapes(count, classes, size) -> ROOT with shapes/train/<class>/<number>.png."""

    def make(count=24, classes="abc", size=24):
        root = tmp_path_factory.mktemp("data")
        rng = np.random.default_rng(0)
        for n in range(count):
            folder = root / "shapes" / "train" / classes[n % len(classes)]
            folder.mkdir(parents=True, exist_ok=True)
            low = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            low.resize((size, size), Image.BICUBIC).save(folder / f"{n:02}.png")
        return root

    return make


@pytest.fixture
def kill_at_step():
    """kill_at_step(n, signal): this process gets the signal when the loop has made step n."""
    # Its own: what a test has replaced stays replaced behind the signal
    patch = pytest.MonkeyPatch()

    def arm(step, number):
        def advance(self, count=1, **info):
            original(self, count, **info)
            if self.unit == "step" and self.done == step:
                patch.undo()
                os.kill(os.getpid(), number)

        original = Progress.advance
        patch.setattr(Progress, "advance", advance)

    yield arm
    patch.undo()


@pytest.fixture
def with_curves():
    """Ask for this where a run's drawings matter."""


@pytest.fixture
def no_curves(request, monkeypatch):
    """Let runs draw no curves: that is half of a run of seconds."""
    if "with_curves" not in request.fixturenames:
        monkeypatch.setattr(monitor, "plot_curves", lambda run, name: None)
