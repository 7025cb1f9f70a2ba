"""Full, read-only and forbidden disks: a plain line with path and next step; then it continues."""

import errno
import os
import subprocess

import numpy as np
import pytest
from support.weather import VERBS, command, disk, fill, warm

from backbench.errors import BadInput, Failed
from backbench.runs import atomic, failures, lock
from backbench.runs.ending import guarded
from backbench.transfer.features.cache import FeatureCache, PartFiles

FAULT = "fault of backbench"


@pytest.mark.parametrize("number", sorted(failures._DISK))
def test_what_a_disk_says_is_a_plain_line(number, capsys):
    def refused(args):
        raise OSError(number, os.strerror(number), "/runs/a/state.pt")

    status = guarded(lambda: refused(None))
    said = capsys.readouterr().err
    assert status in (1, 2)
    assert said.startswith("backbench: /runs/a/state.pt: ") and said.count("\n") == 1
    assert FAULT not in said and "Errno" not in said


def test_what_is_no_disks_doing_stays_a_fault(capsys):
    def broken():
        raise OSError(errno.EINVAL, "Invalid argument")

    assert guarded(broken) == 1
    assert FAULT in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: ... })",
        "[enforce fail at inline_container.cc:626] . PytorchStreamWriter failed writing file data/0",
        "I/O error: No space left on device (os error 28)",
    ],
)
def test_libraries_that_write_by_themselves_are_understood(tmp_path, text):
    with (
        pytest.raises(OSError) as found,
        atomic.atomic_path(tmp_path / "x.safetensors"),
    ):
        raise RuntimeError(text)
    line, status = failures.explain(found.value)
    assert line.startswith(f"{tmp_path / 'x.safetensors'}: the disk is full; make room")
    assert status == 1
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_what_was_there(tmp_path):
    with disk(tmp_path / "small") as small:
        atomic.write_text(small / "state", "old")
        fill(small)
        with pytest.raises(OSError) as found:
            atomic.write_bytes(small / "state", bytes(100_000))
        assert failures.explain(found.value)[0].startswith(
            f"{small / 'state'}: the disk is full"
        )
        assert (small / "state").read_text() == "old"
        (small / "filling").unlink()
        atomic.write_text(small / "state", "new")
        assert {p.name for p in small.iterdir()} == {"state"}


def test_a_read_only_disk_is_bad_input(tmp_path):
    with disk(tmp_path / "small", options="ro") as small:
        with pytest.raises(OSError) as found, lock.held(small):
            pass
        line, status = failures.explain(found.value)
        assert status == 2
        assert "the disk is read-only; choose a place that can be written to" in line


def unseen(count):
    return {"keep": [], "seen": np.zeros((count, 3), np.int64), "still": lambda _: True}


def test_the_cache_takes_its_place_before_it_is_written_to(tmp_path):
    rows = {"checkpoint": "a"}
    with disk(tmp_path / "small") as small:
        cache = FeatureCache(small / "features", 10**12)
        said = r"the disk is full; .*or set BACKBENCH_CACHE"
        with cache.try_lock([rows]), pytest.raises(Failed, match=said):
            PartFiles(cache, [rows], [512], 5000, **unseen(5000))  # 10 MB
        assert not list(cache.folder.glob("*.part"))
        with cache.try_lock([rows]):  # once it fits
            parts = PartFiles(cache, [rows], [4], 100, **unseen(100))
            fill(small)
            for part in parts.rows:
                part[:] = np.ones(part.shape)  # no SIGBUS: the place is ours
            (small / "filling").unlink()
            parts.finish()
            assert cache.open(rows).sum() == 400


def test_a_cache_that_cannot_be_written_to(tmp_path):
    with disk(tmp_path / "small", options="ro") as small:
        cache = FeatureCache(small / "features", 10**12)
        with pytest.raises(BadInput, match=r"read-only.*or set BACKBENCH_CACHE"):
            cache.try_lock([{"checkpoint": "a"}])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with warm(tmp_path_factory.mktemp("warm")) as runs:
        yield runs


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_on_every_disk(run, verb, tiny_root, trunk, tmp_path):
    with disk(tmp_path / "small", "400m") as small:
        # 1. No room in --out; the same command, once there is
        words = command(verb, tiny_root, trunk, small / "run")
        fill(small)
        status, said = run(words)
        assert status == 1 and "the disk is full" in said.splitlines()[-1], said
        assert FAULT not in said
        (small / "filling").unlink()
        status, said = run(words)
        assert status == 0, said
        # 2. No room for features, and none for temporary files
        elsewhere = command(verb, tiny_root, trunk, tmp_path / "out")
        fill(small)
        status, said = run(
            elsewhere, BACKBENCH_CACHE=str(small / "c"), TMPDIR=str(small)
        )
        assert status in (0, 1) and FAULT not in said, said
        (small / "filling").unlink()
        # 3. Read-only
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        status, said = run(command(verb, tiny_root, trunk, small / "new"))
        assert status == 2 and "read-only" in said.splitlines()[-1], said
        assert FAULT not in said
