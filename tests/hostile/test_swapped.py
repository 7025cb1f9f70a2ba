"""Training images swapped between a stop and its continuation: every verb that continues refuses."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.layouts import trunk_file
from support.weather import command, warm

from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.run_progress import read_progress


def noise(root, seed, split):
    """Every image of these splits as noise, as PNGs of one size under their names and times."""
    rng = np.random.default_rng(seed)
    files = [
        p
        for p in sorted(root.rglob("*.[pj][np]g"))
        if split in str(p.relative_to(root))
    ]
    assert len(files) > 30
    for file in files:
        was = file.stat()
        with Image.open(file) as image:
            shape = (image.height, image.width, 3)
        picture = Image.fromarray(rng.integers(0, 256, shape, np.uint8))
        picture.save(file, "PNG", compress_level=0)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def ended(pid):
    """Whether a child of the warm process is over, and not yet waited for."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        )
    except OSError:
        return True


def stopped(runs, argv, out, cache):
    """A run that saved its state at SIGTERM, in the midst of what it does."""
    run = runs.start(argv, BACKBENCH_CACHE=str(cache))
    while not ended(run.pid):
        note = read_progress(out)
        if note and note["done"]:
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.pid, signal.SIGTERM)
    return run.wait()


# These verbs keep a state of their own; what the others keep is in the cache of features.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "verb", ["pretrain", "linear", "finetune", "semisup", "analyze", "detect"]
)
def test_images_swapped_after_a_stop(verb, tiny_root, tmp_path):
    # A detector has a config for the whole ResNet-18
    trunk = trunk_file(tmp_path / "trunk.safetensors", arch="resnet18")
    root = shutil.copytree(tiny_root, tmp_path / "data")
    split = "test" if verb == "analyze" else "train"
    before = noise(root, 1, split)
    with warm(tmp_path / "warm") as runs:
        for attempt in range(5):
            out = tmp_path / f"run-{attempt}"
            cache = tmp_path / f"cache-{attempt}"
            argv = command(verb, root, trunk, out)
            if verb == "detect":
                argv.insert(1, "--resume")
            status, said = stopped(runs, argv, out, cache)
            if status == 75:
                break
        assert status == 75, said
        assert noise(root, 2, split) == before, "names, sizes and times tell nothing"
        status, said = runs(argv, BACKBENCH_CACHE=str(cache))
    lines = [line for line in said.splitlines() if line.startswith("backbench: ")]
    assert status == 2 and len(lines) == 1 and "Traceback" not in said, said
    assert "images" in lines[0] or "data" in lines[0]
    assert not (out / "results.jsonl").exists() and not (out / CHECKPOINT_FILE).exists()
