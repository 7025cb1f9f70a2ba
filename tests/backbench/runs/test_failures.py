"""What a failure of the machine is called, who is to blame, and which errors are none of its."""

import errno
import sys
from pathlib import Path

import pytest
import torch

from backbench.errors import EXIT_BAD_INPUT, EXIT_FAILED, BadInput, Preempted, Stopped
from backbench.runs import atomic, failures, folder, forward_clock, state
from backbench.runs.folder import open_run

FULL = "make room (`backbench clean RUNS` lists what can go); the same command continues then"


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (
            OSError(errno.ENOSPC, "x", "/d/f"),
            f"/d/f: the disk is full; {FULL}",
            EXIT_FAILED,
        ),
        (
            OSError(errno.EDQUOT, "x"),
            f"your quota of this disk is used up; {FULL}",
            EXIT_FAILED,
        ),
        (
            OSError(errno.EROFS, "x", "/d/f"),
            "/d/f: the disk is read-only; choose a place that can be written to",
            EXIT_BAD_INPUT,
        ),
        # Of a move, the place that it goes to
        (
            OSError(errno.EACCES, "x", "/from", None, "/to"),
            "/to: permission denied; choose a place that can be written to",
            EXIT_BAD_INPUT,
        ),
        (
            OSError(errno.EMFILE, "x"),
            "too many open files; raise `ulimit -n`; the same command continues",
            EXIT_FAILED,
        ),
        (
            OSError("No usable temporary directory found in ['/tmp']"),
            "no folder for temporary files can be written to; set TMPDIR; the same command"
            " continues",
            EXIT_FAILED,
        ),
        (
            MemoryError(),
            "out of memory (of the machine); use a smaller batch or fewer loader workers"
            " (--workers; in `detect` DATALOADER.NUM_WORKERS); the same command continues",
            EXIT_FAILED,
        ),
        (
            RuntimeError(f"can't allocate memory: {'x' * 200}"),
            f"out of memory (can't allocate memory: {'x' * 77}); use a smaller batch or fewer"
            " loader workers (--workers; in `detect` DATALOADER.NUM_WORKERS); the same command"
            " continues",
            EXIT_FAILED,
        ),
        (
            RuntimeError("received 0 items of ancdata"),
            "too many open files; raise `ulimit -n`; the same command continues",
            EXIT_FAILED,
        ),
        (
            RuntimeError("[gloo] Connection closed by peer"),
            "another process of this run is gone; where it has one, its own line says why;"
            " the same command continues",
            EXIT_FAILED,
        ),
    ],
)
def test_a_failure_of_the_machine_is_one_line_with_what_to_do(error, line, status):
    assert failures.explain(error) == (line, status)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        *((code, EXIT_FAILED) for code in (errno.EFBIG, errno.EIO, errno.ESTALE)),
        *((code, EXIT_FAILED) for code in (errno.ENFILE, errno.ENOMEM)),
        *((code, EXIT_BAD_INPUT) for code in (errno.EPERM, errno.EISDIR, errno.EEXIST)),
        *((code, EXIT_BAD_INPUT) for code in (errno.ENOTDIR, errno.ENAMETOOLONG)),
    ],
)
def test_what_was_wrong_from_the_start_is_bad_input(number, status):
    line, found = failures.explain(OSError(number, "x", "/d/f"))
    assert line.startswith("/d/f: ") and line.count("; ") >= 1 and found == status


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "x", "/d/f"),
        ValueError("Too many open files"),
        ValueError("Broken pipe"),
        RuntimeError("shapes differ"),
        KeyError("x"),
    ],
)
def test_what_is_no_failure_of_the_machine_is_not_explained(error):
    assert failures.explain(error) is None


@pytest.mark.parametrize(
    ("raised", "number", "named"),
    [
        (OSError(errno.EIO, "x"), errno.EIO, "/d/f"),
        (OSError(errno.EIO, "x", "/own"), errno.EIO, "/own"),
        (ValueError("I/O error: (os error 28)"), errno.ENOSPC, "/d/f"),
        (RuntimeError("code: 13, kind: x"), errno.EACCES, "/d/f"),
        (RuntimeError("PytorchStreamWriter failed writing file"), errno.ENOSPC, "/d/f"),
        # A number that says nothing of a disk is left
        (ValueError("os error 2"), None, None),
        (ValueError("shape 28"), None, None),
    ],
)
def test_an_error_of_a_library_gets_the_files_name(raised, number, named):
    with (
        pytest.raises(type(raised) if number is None else OSError) as caught,
        failures.naming(Path("/d/f")),
    ):
        raise raised
    if number is None:
        assert caught.value is raised
    else:
        assert (caught.value.errno, caught.value.filename) == (number, named)


# ---- whole files


def test_a_file_is_for_all_whom_the_mask_allows(tmp_path):
    for mask, mode in ((0, 0o666), (0o027, 0o640)):
        old = atomic.os.umask(mask)
        try:
            atomic.write_text(tmp_path / "deep" / "x", "a")
            assert atomic.os.umask(mask) == mask
        finally:
            atomic.os.umask(old)
        assert (tmp_path / "deep" / "x").stat().st_mode & 0o777 == mode
    atomic.write_json(tmp_path / "y", {"b": [1], "a": 2})
    assert (tmp_path / "y").read_text() == '{\n "a": 2,\n "b": [\n  1\n ]\n}\n'
    for part in ("", "deep"):
        (tmp_path / part / ".x.1.tmp").touch()
        (tmp_path / part / "x.tmp").touch()
    atomic.remove_leftovers(tmp_path, tmp_path / "deep", tmp_path / "none")
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["x", "x.tmp", "x.tmp", "y"]


def test_what_a_killed_writer_leaves_lies_beside_the_file_and_is_removed(tmp_path):
    file = tmp_path / "x.json"
    atomic.write_text(file, "before")
    with pytest.raises(KeyboardInterrupt), atomic.atomic_path(file) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.match(".x.json.*.tmp")
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert file.read_text() == "before"
    # One that was killed cannot remove it
    temporary.write_text("half")
    atomic.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


# ---- whose run a folder is


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/x/backbench/__main__.py", "rank", "a b"], "backbench rank 'a b'"),
        (["/x/train/__main__.py", "-v"], "python -m train -v"),
        (["tools/a.py", "--x=1"], "python tools/a.py --x=1"),
        (["/usr/bin/backbench", "demo"], "backbench demo"),
    ],
)
def test_a_command_is_written_as_it_can_be_given_again(monkeypatch, argv, command):
    monkeypatch.setattr(sys, "argv", argv)
    assert folder.command_line() == command


def test_another_run_is_told_by_the_first_difference_and_the_names_of_others(tmp_path):
    out = tmp_path / "run"
    before = {
        "b": {"x": 1, "y": {"deep": [1, 2]}},
        "c": "same",
        "d": "x" * 50,
        "e": None,
    }
    with open_run(out, verb="linear", identity=before):
        pass

    def told(**identity):
        with (
            pytest.raises(BadInput) as refused,
            open_run(out, verb="linear", identity=before | identity),
        ):
            pass
        return str(refused.value)

    start = f"{out}: holds another run's state (differs in "
    end = "); choose another --out"
    other = {"x": 1, "y": {"deep": (1, 3)}}
    assert told(b=other, d="y") == (
        f"{start}b.y.deep ([1, 2] there, [1, 3] now), d{end}"
    )
    assert told(d="y") == f"{start}d ({'x' * 40} there, y now){end}"
    # A key that is missing is another than one that is null
    assert told(b={"x": 1, "y": {"deep": [1, 2], "z": None}}) == (
        f"{start}b.y.z (None there, None now){end}"
    )
    assert told(f=3) == f"{start}f (None there, 3 now){end}"
    (out / "recipe.yaml").touch()
    assert told(c="other").endswith(
        f"{end}, or continue it with its own recipe, {out / 'recipe.yaml'}"
    )
    with open_run(out, verb="linear", identity=before | {"b": before["b"]}):
        assert (out / "run.json").exists()


def test_a_cache_lies_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("BACKBENCH_CACHE", "/a/b")
    assert folder.cache_folder() == Path("/a/b")
    monkeypatch.delenv("BACKBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert folder.cache_folder() == Path("/c/backbench")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder.cache_folder() == Path.home() / ".cache" / "backbench"
    kept = folder.kept_checkpoint(Path("out"), "0123456789abcdef")
    assert kept == Path("out/checkpoint-0123456789ab.safetensors")


# ---- clocks and signals


def test_images_a_second_are_of_the_last_batches_but_the_first(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(forward_clock.time, "perf_counter", lambda: now[0])
    clock = forward_clock.ForwardClock()
    monkeypatch.setattr(clock, "KEPT", 3)

    def passed(digest, images, seconds):
        with clock.around(digest, images, torch.device("cpu")):
            now[0] += seconds

    assert clock.rate("a") is None
    passed("a", 8, 100.0)
    assert clock.rate("a") is None, "the first batch sets the machine up"
    passed("a", 8, 2.0)
    passed("b", 5, 9.0)
    assert (clock.rate("a"), clock.rate("b")) == (4.0, None)
    passed("a", 3, 1.0)
    assert clock.rate("a") == 3.7
    passed("a", 1, 1.0)
    # The fourth pushes the oldest out
    passed("a", 20, 0.5)
    assert clock.rate("a") == 9.6


def test_a_stop_is_obeyed_where_there_is_nothing_to_save(monkeypatch):
    flag = state.StopFlag()
    flag.end_here("in the middle")
    flag.requested = "SIGTERM"
    with pytest.raises(Preempted) as stopped:
        flag.end_here("in the middle")
    assert str(stopped.value) == (
        "stopped by SIGTERM in the middle; the same command continues"
    )
    now = [50.0]
    monkeypatch.setattr(state.time, "monotonic", lambda: now[0])
    with state.StopFlag() as first, state.StopFlag() as second:
        state.stop_if_asked_for(0)
        first._handle(15, None)
        now[0] += 3
        state.stop_if_asked_for(3.5)
        with pytest.raises(Stopped, match="SIGTERM"):
            state.stop_if_asked_for(3)
        assert (first.requested, first.requested_at, second.requested) == (
            "SIGTERM",
            50.0,
            None,
        )
    state.stop_if_asked_for(0)


def test_a_folder_that_cannot_be_made_is_an_error_of_the_system():
    """A cache in such a place is passed over, a run is refused as bad input."""
    folder = Path("/proc/none/x")
    with pytest.raises(PermissionError) as caught:
        failures.make_folder(folder)
    said, status = failures.explain(caught.value)
    assert said == f"{folder}: not permitted; {failures.ELSEWHERE}"
    assert status == EXIT_BAD_INPUT
