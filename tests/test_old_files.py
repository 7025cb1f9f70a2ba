"""Files that an earlier version wrote are read and continued as it did: runs stopped on the way,
checkpoints, results, cached features, recorded splits, and what the launcher had submitted.
tests/old_files/README.md says what they are.

Only commands and files are used here, so that the test outlives the modules' names.
"""

import dataclasses
import hashlib
import json
import lzma
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import backbench
from backbench.cli import main
from backbench.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED

OLD = Path(__file__).parent / "old_files"
ROOM = "/tmp/backbench-old-runs"  # where the old files were written
CLOSE = 1e-6  # in fp64, where convolutions of other processors differ by less; losses are logged as float32
NEAR = 0.001  # of a loss, in fp32, as it is printed
ONE_PICTURE = 100 / 18 + 0.01  # of the test pictures, in percent
sys.path.insert(0, str(OLD))

import pictures  # noqa: E402 - beside the old files


def unpacked(name, target):
    """A folder of old files, ready to be written to; what lies packed is unpacked."""
    shutil.copytree(OLD / name, target, ignore=shutil.ignore_patterns("*.xz"))
    for file in (OLD / name).rglob("*.xz"):
        (target / file.relative_to(OLD / name).with_suffix("")).write_bytes(
            lzma.decompress(file.read_bytes())
        )
    return target


def read_json(file):
    return json.loads(Path(file).read_text())


def rows(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@pytest.fixture(scope="session")
def room(tmp_path_factory):
    """The folder that the old commands were typed in, as far as they read it."""
    room = tmp_path_factory.mktemp("room")
    pictures.write_all(room / "data")
    unpacked("checkpoint", room / "checkpoint")
    shutil.copytree(OLD / "recipes", room, dirs_exist_ok=True)
    (room / "first.safetensors").symlink_to(room / "checkpoint" / "first.safetensors")
    (room / "broken.pth").write_bytes(b"not a checkpoint")
    yield room
    shutil.rmtree(room)


@pytest.fixture(autouse=True)
def in_the_room(room, tmp_path, monkeypatch):
    """What a test leaves is removed: hundreds of megabytes, which pytest would keep for three
    sessions."""
    monkeypatch.chdir(room)
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "cache"))
    yield
    shutil.rmtree(tmp_path)


@pytest.fixture
def say(capsys, caplog):
    """say(words) -> (exit status, what was printed, what was said), through the command line's own
    entry."""

    def run(*words):
        caplog.clear()
        capsys.readouterr()
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err + caplog.text

    return run


@pytest.fixture
def stop_at_first_picture(monkeypatch):
    """arm(): this process gets a signal when it opens its next picture, so that a training stops
    after one step."""
    opened, armed = Image.open, []

    def open_(*args, **options):
        if armed:
            armed.clear()
            os.kill(os.getpid(), signal.SIGUSR2)
        return opened(*args, **options)

    monkeypatch.setattr(Image, "open", open_)
    # Outside a training the signal does nothing
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    yield lambda: armed.append(True)
    signal.signal(signal.SIGUSR2, before)


def the_same_command(run):
    """What was typed for an old run, with the folder that it is in now."""
    words = shlex.split(read_json(run / "run.json")["command"])
    assert words.pop(0) == "backbench"
    words[words.index("--out") + 1] = str(run)
    return words + (["MODEL.DEVICE", "cpu"] if words[0] == "detect" else [])


@pytest.mark.parametrize("name", [pytest.param("simclr", marks=pytest.mark.slow), "lorac"])
def test_pretraining_continues(name, tmp_path, say):
    run = unpacked(name, tmp_path / name)
    before = {
        file: (run / file).read_text() for file in ("run.json", "recipe.yaml", "metrics.jsonl")
    }
    expected = read_json(run / "expected.json")
    status, _, said = say(*the_same_command(run), "optim.lr=0.1")
    assert status == EXIT_BAD_INPUT and "recipe.optim.lr (0.05 there, 0.1 now)" in said
    status, _, said = say(*the_same_command(run))
    assert status == 0, said
    assert "continuing at step 5 of 8" in said
    assert (run / "metrics.jsonl").read_text().startswith(before.pop("metrics.jsonl"))
    assert {file: (run / file).read_text() for file in before} == before
    steps = rows(run / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 3, 5, 7]
    for row, wanted in zip(steps, expected["rows"], strict=True):
        assert {key: row[key] for key in wanted} == pytest.approx(wanted, rel=CLOSE)
    checkpoint = backbench.Checkpoint.load(run / "backbone.safetensors")
    assert (checkpoint.name, checkpoint.method, checkpoint.epochs) == (f"old-{name}", name, 2)
    assert checkpoint.provenance["recipe"]["optim"]["lr"] == 0.05
    norms = [
        float(v.double().norm()) for v in checkpoint.state_dict.values() if v.is_floating_point()
    ]
    assert float(torch.tensor(norms, dtype=torch.float64).norm()) == pytest.approx(
        expected["trunk_norm"], rel=CLOSE
    )
    assert "already finished" in say(*the_same_command(run))[2]


@pytest.mark.parametrize("name", ["linear", "semisup", "detect"])
def test_evaluation_continues(name, tmp_path, say, stop_at_first_picture):
    """Stopped again after one step, whose number tells where it went on; then to the end."""
    run = unpacked(name, tmp_path / name)
    expected = read_json(run / "expected.json")
    before = {
        file: (run / file).read_text()
        for file in ("run.json", "metrics.jsonl")
        if (run / file).exists()
    }
    status, _, said = say(
        *the_same_command(run), *(("SEED", "1") if name == "detect" else ("--seed", "1"))
    )
    assert status == EXIT_BAD_INPUT and "seed (0 there, 1 now)" in said
    stop_at_first_picture()
    status, _, said = say(*the_same_command(run))
    assert status == EXIT_PREEMPTED, said
    assert re.search(
        rf"stopped by SIGUSR2 (at step|after iteration) {expected['stopped_at'] + 1}\b", said
    ), said
    status, _, said = say(*the_same_command(run))
    assert status == 0, said
    # the loss of the step after that one: of the old weights and the old momentum
    losses = re.findall(r"/\d+ (?:steps|iterations) .* loss ([\d.]+)", said)
    assert float(losses[-1]) == pytest.approx(expected["loss"], rel=NEAR)
    assert all((run / file).read_text().startswith(text) for file, text in before.items())
    found = rows(run / "results.jsonl")
    assert [row["schema"] for row in found] == [2] * len(expected["rows"])
    for row, wanted in zip(found, expected["rows"], strict=True):
        value, scores = wanted.pop("value"), (wanted["chosen"] or {}).pop("scores", None)
        assert (row["value"] is None) == (value is None)
        assert value is None or row["value"] == pytest.approx(value, abs=ONE_PICTURE)
        if scores:
            got = row["chosen"].pop("scores")
            first = next(iter(scores))
            assert got[first] == scores[first], "the score that was written down before"
            assert got == pytest.approx(scores, abs=100 / 12 + 0.01)
        assert {key: row[key] for key in wanted} == wanted
    if name != "detect":
        import numpy as np

        with np.load(run / found[0]["provenance"]["predictions"]) as kept:
            assert (kept["prediction"] == expected["prediction"]).sum() >= 17
    assert not list((run / "state").glob("*")) and not (run / "state.pt").exists()


def test_checkpoint_is_the_same(room, say):
    noted = read_json(OLD / "checkpoint" / "inspected.json")
    status, out, _ = say("inspect", "first.safetensors", "--json")
    now = json.loads(out)
    assert status == 0 and {key: now.get(key) for key in noted} == noted
    checkpoint = backbench.load(room / "first.safetensors")
    assert (checkpoint.digest, checkpoint.name) == (noted["digest"], "first")
    assert len(checkpoint.heads) == 8 and checkpoint.heads["projector.3.weight"].shape == (16, 32)
    assert checkpoint.provenance == noted["provenance"]
    module = checkpoint.backbone().eval()
    with torch.no_grad():
        assert module(torch.zeros(1, 3, 32, 32)).shape == (1, 512)


@pytest.mark.parametrize("kind", ["torchvision", "timm", "detectron2"])
def test_checkpoint_exports(kind, tmp_path, say):
    digest = read_json(OLD / "checkpoint" / "inspected.json")["digest"]
    file = tmp_path / {"detectron2": "first.pkl"}.get(kind, "first.pth")
    assert say("export", "first.safetensors", "--format", kind, "--out", file)[0] == 0
    assert json.loads(say("inspect", file, "--json")[1])["digest"] == digest
    if kind != "detectron2":
        sha = hashlib.sha256()
        for name, tensor in sorted(torch.load(file, weights_only=True).items()):
            if tensor.is_floating_point():
                sha.update(f"{name} {tuple(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
        assert sha.hexdigest() == digest


# The same numbers, in columns that say more: a recipe that is not shipped goes by its print, a row
# that does not hold its recipe says so, and a split that is not test is named.
RENAMED = {
    "linear-imagenet-old-v1": "linear-imagenet-old-v1~unknown",
    "linear-old-v1": "linear-old-v1~760a",
    "knn-old-v1": "knn-old-v1~f56e",
    "fewshot-old-v1": "fewshot-old-v1~9e1f",
    "semisup-old-v1": "semisup-old-v1~6f82",
    "/scenes/": "/scenes:val/",
}


# 7 of 18 pictures to 1: p = 0.07 by the exact sign test, 0.048 without a part of what was observed.
TOLD_APART = {"| 44.4 ±22.2 | 77.8 ±19.4 |": "| 44.4 ±22.2 | **77.8** ±19.4 |"}


# By column. Of two seeds both the seeds and the images vary now; sign tests leave out a part of the
# probability of what was observed.
PAIRS = {
    0: [0, 0, 1, 13.3333, 4.3222, 22.3445, 0.00441, 1, "draws and images", 60],
    1: [1, 0, 1, 6.6667, -0.0421, 13.3754, 0.0514, 0, "draws and images", 60],
    2: [2, 0, 1, -33.3333, -62.1421, -4.5246, 0.04844, 1, "images", 18],
    3: [3, 0, 1, 5.5556, -9.628, 20.7391, 0.65, 0, "images", 18],
}


def test_leaderboard_of_old_results(tmp_path, say, monkeypatch):
    """Rows of schema 1 and 2 with their predictions: the table, where each number comes from, and
    what is tested."""
    monkeypatch.chdir(OLD)
    made = {
        "--csv": "board.csv",
        "--tidy": "tidy.csv",
        "--markdown": "tables",
        "--html": "page.html",
    }
    files = [word for option, name in made.items() for word in (option, tmp_path / name)]
    status, _, said = say("leaderboard", "board", *files)
    assert status == 0
    assert "not counted" not in said and "schema" not in said
    for name in ("board.csv", "tidy.csv", "tables/board.md"):
        expected = (OLD / "leaderboard" / name).read_text()
        for old, new in (RENAMED | TOLD_APART).items():
            expected = expected.replace(old, new)
        found = (tmp_path / name).read_text()
        if name == "tables/board.md":  # the answer and the ranks stand before the table
            above, bar, table = found.partition("| column |")
            assert "Ranks over all" in above and "nothing separates" in above
            found = bar + table
        assert found == expected, name
    page = (tmp_path / "page.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    pairs = [list(pair) for pair in zip(*json.loads(data)["pairs"].values(), strict=True)]
    expected = read_json(OLD / "leaderboard" / "pairs.json")
    assert {pair[8] for pair in expected} == {"images", "draws", "resamples"}
    expected = [PAIRS.get(pair[0], pair) for pair in expected]
    for pair, wanted in zip(pairs, expected, strict=True):
        assert (pair[:8], pair[8:]) == (pytest.approx(wanted[:8], abs=1e-3), wanted[8:])
    schemas = {
        row["schema"] for file in (OLD / "board").rglob("results.jsonl") for row in rows(file)
    }
    assert schemas == {1, 2}
    board = backbench.collect([OLD / "board"])
    assert len(board.rows) == 2 and not board.problems


def test_features_cached_without_their_contents_are_made_anew(tmp_path, say, monkeypatch):
    """Names, sizes and times vouch for no image. The old features are a pattern, with which the
    neighbours are others than with the real ones; what made them stays on the disk."""
    cache = unpacked("cache", tmp_path / "cache" / "features")
    about = read_json(next(cache.glob("*.json")))["description"]
    # Features are kept for one version of torch
    monkeypatch.setattr(torch, "__version__", about["torch"])
    before = {file.name: file.read_bytes() for file in cache.glob("*.npy")}
    words = ("--protocol", "knn.yaml", "--data", "data", "--accelerator", "cpu", "--workers", "0")
    assert (
        say(
            "linear", "first.safetensors", "--datasets", "shapes", *words, "--out", tmp_path / "knn"
        )[0]
        == 0
    )
    (row,) = rows(tmp_path / "knn" / "results.jsonl")
    with_the_pattern = read_json(OLD / "cache.json")["value"]
    assert row["value"] > with_the_pattern + 10
    after = {file.name: file.read_bytes() for file in cache.glob("*.npy")}
    assert len(before) == 3 and before.items() <= after.items()


def test_recorded_splits_are_held_to(tmp_path, say):
    pictures.write_shapes(tmp_path)
    shutil.copy(OLD / "record" / "backbench-splits.json", tmp_path / "shapes")
    status, out, _ = say("data", "check", "shapes", "--data", tmp_path)
    assert status == 0 and "shapes: all right" in out
    next((tmp_path / "shapes" / "test" / "star").iterdir()).unlink()
    status, _, said = say("data", "check", "shapes", "--data", tmp_path)
    assert (
        status == EXIT_BAD_INPUT
        and "the test split is not the recorded one (17 images, 18 in" in said
    )


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """launched(kind) -> the folder of all runs with the launcher's old records; squeue says what it
    said then."""

    def restore(kind):
        return unpacked(f"launch/{kind}", tmp_path / kind)

    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\nexec cat {shlex.quote(str(OLD / 'launch' / 'squeue.txt'))}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    for grid in (OLD / "launch").glob("*.yaml"):
        shutil.copy(grid, tmp_path)
    return restore


def without_eta(states):
    return {
        name: (state["name"], re.split(", ETA|, no news", state["detail"])[0])
        for name, state in states.items()
    }


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_submitted_jobs_stand_as_they_did(kind, launched, say):
    runs = launched(kind)
    expected = without_eta(read_json(OLD / "launch" / f"{kind}.json")["states"])
    names = {name for name, _ in expected.values()}
    assert names >= {"done", "failed", "blocked", "cancelled"}
    assert names >= {"local": {"stopped", "lost"}, "slurm": {"running", "queued", "waiting"}}[kind]
    status, out, _ = say("launch", "status", "--json", "--out", runs)
    assert status == 0 and without_eta(json.loads(out)) == expected
    for file in (runs / ".launch" / "status").iterdir():
        if read_json(file)["state"] == "cancelled":
            file.unlink()  # the mark that `cancel` made is still there
    assert without_eta(json.loads(say("launch", "status", "--json", "--out", runs)[1])) == expected
    status, out, _ = say("launch", "status", "--once", "--out", runs)
    assert status == 0
    if kind == "local":  # the last line of a job's log
        assert re.search(
            r"lost .*-s3-a978dd  started, not there any more \| shapes select: \d+/1000000 steps",
            out,
        )


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_grids_know_their_old_jobs(kind, launched, say, tmp_path):
    runs = launched(kind)
    for grid, plan in read_json(OLD / "launch" / f"{kind}.json")["plans"].items():
        words = ("--dry-run", "--cluster", "local.yaml", "--out", runs)
        status, out, said = say("launch", "run", tmp_path / grid, *words)
        assert status == 0, said
        # What it would cost was guessed from other recipes then, and is unknown now
        (*jobs, _), (*jobs_then, _) = out.splitlines(), plan
        assert jobs == [re.sub(r"^(  \S+  ).*", r"\1unknown", line) for line in jobs_then]


def queued():
    """(pickle that submitit wrote, the job as the launcher's record has it) for every job given to
    Slurm."""
    out = []
    for file in (OLD / "launch" / "slurm" / ".launch" / "submissions").glob("*.json"):
        record = read_json(file)
        folder = OLD / "launch" / "slurm" / ".launch" / "submitit" / record["uid"]
        out += [
            (folder / f"{i}_submitted.pkl", job)
            for i, job in zip(record["ids"], record["jobs"], strict=True)
        ]
    return sorted(out)


def test_jobs_that_wait_in_slurm_still_load():
    from submitit.helpers import DelayedSubmission

    assert len(queued()) == 12
    for file, job in queued():
        task = DelayedSubmission.load(file).function
        now = json.loads(json.dumps(dataclasses.asdict(task.job)))
        assert {key: now[key] for key in job} == job
        assert task.job.verb == job["argv"][0]
        assert task.runs == f"{ROOM}/slurm"
        assert task.command == ("python", "-m", "backbench")
        options = () if task.job.verb == "import" else ("--accelerator", "cpu", "--workers", "0")
        assert (task.machine, task.limit_s, task.grace_s, task.tasks) == (options, 3600.0, 20.0, 1)
        assert callable(task) and callable(task.checkpoint)


@pytest.mark.slow
def test_a_job_that_waited_in_slurm_runs(launched, room):
    """As Slurm starts it, without Slurm: submitit reads the pickle, with this machine's folders in
    it."""
    from submitit.helpers import DelayedSubmission

    runs = launched("slurm")
    (old,) = [
        f
        for f, job in queued()
        if job["like"] == "linear-fewshot-shapes" and job["name"].startswith("first")
    ]
    file = runs / old.relative_to(OLD / "launch" / "slurm")
    delayed = DelayedSubmission.load(file)
    task = delayed.function
    results = runs / task.job.name / "results.jsonl"
    (before,) = rows(results)
    results.unlink()
    words = (
        word.replace(f"{ROOM}/slurm", str(runs)).replace(ROOM, str(room)) for word in task.job.argv
    )
    task.job, task.runs = dataclasses.replace(task.job, argv=tuple(words)), str(runs)
    task.command = (sys.executable, "-m", "backbench")
    file.unlink()
    delayed.dump(file)
    slurm = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": file.name.partition("_")[0]}
    slurm |= {f"SLURM_{name}": "0" for name in ("NODEID", "PROCID", "LOCALID")}
    slurm |= {f"SLURM_{name}": "1" for name in ("NTASKS", "JOB_NUM_NODES")}
    command = [sys.executable, "-m", "submitit.core._submit", str(file.parent)]
    done = subprocess.run(
        command, env={**os.environ, **slurm}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (row,) = rows(results)
    assert row["value"] == pytest.approx(before["value"], abs=ONE_PICTURE)


def test_clean_lists_old_runs(tmp_path, say, room):
    """Two pretrainings stopped on the way keep their state; a finished one can do without."""
    runs = tmp_path / "runs"
    for name in ("simclr", "lorac", "linear", "detect"):
        shutil.copytree(OLD / name, runs / name)
        (runs / name / "state.pt").write_bytes(b"state")
    shutil.copytree(OLD / "simclr", runs / "finished")
    (runs / "finished" / "state.pt").write_bytes(b"state")
    (runs / "finished" / "backbone.safetensors").symlink_to(
        room / "checkpoint" / "first.safetensors"
    )
    status, out, said = say("clean", runs, OLD / "board")
    assert status == 0, said
    states = dict(re.findall(r"runs/(\w+) +(?:\w+) +(finished|unfinished) ", out))
    assert states == {
        "finished": "finished",
        **dict.fromkeys(("simclr", "lorac", "linear", "detect"), "unfinished"),
    }
    assert re.findall(r"^can go +(\S+)", out, re.MULTILINE) == [str(runs / "finished" / "state.pt")]
