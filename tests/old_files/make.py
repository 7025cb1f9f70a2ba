"""Wrote the files in this folder, with backbench at commit 019b527; it refuses any other. Kept for the record.

    PYTHONPATH=CHECKOUT python tests/old_files/make.py [PART ...]

Everything happens in the folder ROOM, by commands as a user types them, so that no path of a machine is in a file. The
tensors of states and checkpoints are then replaced by a number pattern that repeats (`patterned`) and saved again by
the code's own functions: 270 MB become 90 kB.
"""

import contextlib
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pictures
import torch

from backbench import features, results, resume
from backbench.checkpoint import Checkpoint

COMMIT = "019b5278cc1957f6ea0f868c4503a0dcf6a1ff8f"
HERE, ROOM = Path(__file__).parent, Path("/tmp/backbench-old-runs")
FIRST, SECOND = (
    "first.safetensors",
    "lorac/backbone.safetensors",
)  # only the first checkpoint is kept
HERE_TOO = ("--data", "data", "--accelerator", "cpu", "--workers", "0")
BOARD = ("linear", "semisup", "detect", "knn", "fewshot")
LEARNS = ("SOLVER.MAX_ITER", "80", "SOLVER.STEPS", "(70,)", "DATASETS.TEST", "('scenes_val',)")
SMALL = ("run.json", "recipe.yaml", "metrics.jsonl", "progress.json", "state/shapes.chosen.json")

# `python -m backbench ...` that sends itself a signal after the step STOP_AT of its STOP_PART-th progress line
STOPPED = """
import os, runpy, signal
from backbench import runlog
advance, seen = runlog.Progress.advance, []
def stopping(self, count=1, **info):
    advance(self, count, **info)
    if self not in seen:
        seen.append(self)
    if (len(seen), self.done) == (int(os.environ["STOP_PART"]), int(os.environ["STOP_AT"])):
        os.kill(os.getpid(), signal.SIGUSR2)
runlog.Progress.advance = stopping
runpy.run_module("backbench", run_name="__main__", alter_sys=True)
"""


def backbench(
    *words: str, stop_at: int | None = None, part: int = 1, status: int = 0
) -> tuple[str, str]:
    """(printed, said) of one command in ROOM; with `stop_at` it is stopped by a signal after that step."""
    start = ["-m", "backbench"] if stop_at is None else ["-c", STOPPED]
    environment = {**os.environ, "STOP_AT": str(stop_at), "STOP_PART": str(part)}
    command = [sys.executable, *start, *words]
    done = subprocess.run(
        command, cwd=ROOM, env=environment, capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr)
    assert done.returncode == (status if stop_at is None else 75), words
    return done.stdout, done.stderr


def patterned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, type and layout and of about the same centre and spread, whose numbers repeat."""
    spread = (
        float(tensor.double().std()) if tensor.is_floating_point() and tensor.numel() > 1 else 0.0
    )
    if not spread:
        return tensor
    n = torch.arange(tensor.numel()) % (1021 if tensor.dim() > 1 else 61)
    wave = (7 * n**3 + 31 * n**2 + 17 * n) % 1021 / 1024 - 0.5
    mean = float(tensor.double().mean())
    always = abs(mean) > 2 * spread or bool((tensor >= 0).all())  # variances stay positive
    centre = 2.0 ** round(np.log2(abs(mean))) * np.sign(mean) if always else 0.0
    step = 2.0 ** round(np.log2(3.5 * spread))
    values = centre + (min(step, abs(centre) / 2) if centre else step) * wave
    out = torch.empty_like(
        tensor
    )  # also in channels_last, whose storage has another order than its shape
    out.as_strided((out.numel(),), (1,)).copy_(values)
    return out


def everywhere(value: object) -> object:
    """`patterned` on all tensors of a state."""
    if isinstance(value, torch.Tensor):
        return patterned(value)
    if isinstance(value, dict):
        return {k: everywhere(v) for k, v in value.items()}
    return [everywhere(v) for v in value] if isinstance(value, list) else value


def pack(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_name(target.name + ".xz").write_bytes(lzma.compress(file.read_bytes()))


def copy(names: tuple[str, ...], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def stop(
    run: str, words: tuple[str, ...], states: tuple[str, ...], *, at: int, part: int = 1
) -> str:
    """Keep the run as it was stopped, its states with a pattern. Then bring it to its end from there, stopped once more
    after a step, and give what it says then."""
    backbench(*words, "--out", run, stop_at=at, part=part)
    copy(SMALL, ROOM / run, HERE / run)
    for name in states:
        file = ROOM / run / name
        resume.save_state(file, everywhere(resume.load_state(file)))
        pack(file, HERE / run / name)
    if words[0] != "pretrain":
        backbench(*words, "--out", run, stop_at=at + 1)
    return backbench(*words, "--out", run)[1]


# The parts


def pretrain(name: str) -> None:
    words = ("pretrain", f"{name}.yaml", "--data", "data", "--accelerator", "cpu")
    stop(name, words, ("state.pt",), at=4)  # the next step is made, and saved
    trunk = Checkpoint.load(ROOM / name / "backbone.safetensors").state_dict
    norm = (
        sum(float(v.double().square().sum()) for v in trunk.values() if v.is_floating_point())
        ** 0.5
    )
    kept = ("step", "epoch", "lr", "loss", "nuclear_norm", "feature_std", "effective_rank")
    steps = [{k: row[k] for k in kept if k in row} for row in rows(ROOM / name / "metrics.jsonl")]
    resume.write_json(HERE / name / "expected.json", {"rows": steps, "trunk_norm": norm})


def checkpoint() -> None:
    made = Checkpoint.load(ROOM / "simclr" / "backbone.safetensors")
    tensors, heads = everywhere(dict(made.state_dict)), everywhere(dict(made.heads))
    about = {**made.provenance, "name": "first"}
    made.replace(state_dict=tensors, heads=heads, provenance=about).save(ROOM / FIRST)
    pack(ROOM / FIRST, HERE / "checkpoint" / FIRST)
    (HERE / "checkpoint" / "inspected.json").write_text(backbench("inspect", FIRST, "--json")[0])


def command(kind: str, file: str) -> tuple[str, ...]:
    if kind == "detect":
        return (
            "detect",
            "--config-file",
            "tiny_faster_rcnn_R_18_FPN",
            "--checkpoint",
            file,
            "--data",
            "data",
        )
    if kind == "semisup":
        return (
            "semisup",
            file,
            "--percent",
            "10",
            "--lists",
            "data/lists",
            "--protocol",
            "semisup.yaml",
            *HERE_TOO,
        )
    recipe = {"linear": "probe.yaml"}.get(kind, f"{kind}.yaml")
    return ("linear", file, "--datasets", "shapes", "--protocol", recipe, *HERE_TOO)


def evaluation(kind: str, states: tuple[str, ...], *, at: int, part: int) -> None:
    said = stop(kind, command(kind, FIRST), states, at=at, part=part)
    found = rows(ROOM / kind / "results.jsonl")
    kept = ("task", "dataset", "metric", "protocol", "engine", "split", "value", "chosen")
    expected = {"rows": [{k: row[k] for k in kept} for row in found], "stopped_at": at}
    expected["loss"] = float(re.findall(r"/\d+ (?:steps|iterations) .* loss ([\d.]+)", said)[-1])
    if kind != "detect":
        (file,) = (ROOM / kind / "predictions").iterdir()
        expected["prediction"] = np.load(file)["prediction"].tolist()
    resume.write_json(HERE / kind / "expected.json", expected)


def board() -> None:
    """Results of two checkpoints with predictions, and what the leaderboard makes of them.

    Nothing at this commit writes schema 1: its rows are those of schema 2 without what came with it."""
    for which, file in (("first", FIRST), ("second", SECOND)):
        for kind in BOARD:
            run = f"{kind}-{which}"
            backbench(*command(kind, file), "--out", run, *(LEARNS if kind == "detect" else ()))
            kept = (
                "results.jsonl",
                *(f"predictions/{f.name}" for f in (ROOM / run / "predictions").iterdir()),
            )
            copy(kept, ROOM / run, ROOM / "board" / run)
        top5(
            ROOM / "board" / f"top5-{which}",
            Checkpoint.load(ROOM / file),
            each=5 if which == "first" else 3,
        )
    for run in ("knn-second", "fewshot-second"):
        file = ROOM / "board" / run / "results.jsonl"
        old = [
            {k: v for k, v in {**row, "schema": 1}.items() if k != "origin"} for row in rows(file)
        ]
        file.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in old))
    shutil.copytree(ROOM / "board", HERE / "board", dirs_exist_ok=True)
    files = (
        "--csv",
        "board.csv",
        "--tidy",
        "tidy.csv",
        "--markdown",
        "tables",
        "--html",
        "page.html",
    )
    backbench("leaderboard", "board", *files)
    copy(("board.csv", "tidy.csv", "tables/board.md"), ROOM, HERE / "leaderboard")
    pairs = re.findall(r'"pairs":(\[.*?\]\])', (ROOM / "page.html").read_text())[0]
    (HERE / "leaderboard" / "pairs.json").write_text(pairs + "\n")


def top5(run: Path, one: Checkpoint, *, each: int) -> None:
    """Only ImageNet has top-5 numbers, so these are made up: every `each`-th of 60 images is wrong. Two seeds."""
    label = np.arange(60) % 10
    about = {
        "name": one.name,
        "method": one.method,
        "arch": one.arch,
        "epochs": one.epochs,
        "split": "test",
    }
    about |= {
        "checkpoint": one.digest,
        "task": "linear",
        "dataset": "imagenet",
        "protocol": "linear-imagenet-old-v1",
    }
    for seed in (0, 1):
        wrong = (np.arange(60) + seed) % each == 0
        arrays = {
            "label": label,
            "prediction": (label + wrong) % 10,
            "hits5": ~wrong | (np.arange(60) % 2 == 0),
        }
        kept = results.keep_predictions(run, f"imagenet-s{seed}", manifest="0" * 64, **arrays)
        values = {"top1": 100 * np.mean(~wrong), "top5": 100 * np.mean(arrays["hits5"])}
        new = [
            results.Result(
                metric=k,
                value=float(v),
                ci95=(v - 5.0, v + 5.0),
                seed=seed,
                provenance={"predictions": kept},
                **about,
            )
            for k, v in values.items()
        ]
        results.append(run, new)


def cache() -> None:
    """The features of the first checkpoint, as kNN left them, with a pattern; kNN on these has another value."""
    store = features.Store(ROOM / "cache" / "features", 10**9)
    digest = Checkpoint.load(ROOM / FIRST).digest
    for about in store.folder.glob("*.json"):
        description = json.loads(about.read_text())["description"]
        if description["checkpoint"] == digest:
            part = about.with_suffix(".part")
            with part.open("wb") as file:
                np.save(
                    file, patterned(torch.from_numpy(np.load(about.with_suffix(".npy")))).numpy()
                )
            store.finish(description, part)
            pack(about.with_suffix(".npy"), HERE / "cache" / f"{about.stem}.npy")
            shutil.copy(about, HERE / "cache" / about.name)
    backbench(*command("knn", FIRST), "--out", "knn-cached")
    value = rows(ROOM / "knn-cached" / "results.jsonl")[0]["value"]
    resume.write_json(HERE / "cache.json", {"value": value})
    shutil.rmtree(ROOM / "cache")


def record() -> None:
    backbench("data", "check", "shapes", "--data", "data", "--record")
    copy(("backbench-splits.json",), ROOM / "data" / "shapes", HERE / "record")


# The launcher


def job(protocol: str, dataset: str = "shapes", seed: int = 0) -> dict:
    return {"verb": "linear", "datasets": [dataset], "protocol": protocol, "seeds": [seed]}


def slow(*seeds: int) -> dict:
    return {
        "checkpoints": [FIRST],
        "evaluate": [job("slow_probe.yaml", seed=seed) for seed in seeds],
    }


def grid(name: str, **content: object) -> str:
    (ROOM / name).write_text(
        json.dumps({"name": name.removesuffix(".yaml"), "data": "data", **content}, indent=1) + "\n"
    )
    (HERE / "launch").mkdir(exist_ok=True)
    shutil.copy(ROOM / name, HERE / "launch" / name)
    return name


def launch(out: str, file: str, *more: str, status: int = 0) -> None:
    backbench("launch", "run", file, "--cluster", f"{out}.yaml", "--out", out, *more, status=status)


def cancel(out: str, *names: str) -> None:
    backbench("launch", "cancel", *names, "--out", out)


def states(out: str) -> dict[str, dict[str, str]]:
    return json.loads(backbench("launch", "status", "--json", "--out", out)[0])


def until(out: str, wanted: str, part: str) -> None:
    """Wait until the job whose name has `part` is in that state, and a running one has made some steps."""
    end = time.monotonic() + 120
    while True:
        now = [s for n, s in states(out).items() if part in n and s["name"] == wanted]
        if now and (wanted != "running" or now[0]["detail"]):
            return
        assert time.monotonic() < end, states(out)
        time.sleep(0.5)


@contextlib.contextmanager
def launcher(seed: int) -> Iterator[subprocess.Popen]:
    """A local launcher that runs one slow job."""
    file = grid(f"grid_local{seed}.yaml", **slow(seed))
    words = ["launch", "run", file, "--cluster", "local.yaml", "--out", "local"]
    process = subprocess.Popen([sys.executable, "-m", "backbench", *words], cwd=ROOM)
    until("local", "running", f"-s{seed}-")
    yield process
    process.wait()


def local() -> None:
    """done, failed, blocked; then one job cancelled, one stopped with its launcher, one lost with it."""
    evaluate = [job("knn.yaml"), job("knn.yaml", "nowhere")]
    launch(
        "local",
        grid("grid_local.yaml", checkpoints=[FIRST, "broken.pth"], evaluate=evaluate),
        status=1,
    )
    with launcher(1):
        cancel("local", "slow_probe-shapes-s1")
    with launcher(2) as process:
        process.send_signal(signal.SIGTERM)
    with launcher(3) as process:
        statuses = [json.loads(f.read_text()) for f in (ROOM / "local/.launch/status").iterdir()]
        (attempt,) = (s["attempts"][-1]["pid"] for s in statuses if s["state"] == "running")
        (child,) = Path(f"/proc/{attempt}/task/{attempt}/children").read_text().split()
        for pid in (process.pid, attempt, int(child)):
            os.kill(pid, signal.SIGKILL)
    keep_launched("local")


def slurm() -> None:
    """done, failed, blocked, cancelled, running, queued and waiting, on a Slurm of our own."""
    sys.path.append(str(HERE.parent / "backbench"))
    import slurm_cluster

    with slurm_cluster.running_slurm():
        evaluate = [job("knn.yaml"), job("fewshot.yaml"), job("knn.yaml", "nowhere")]
        launch(
            "slurm", grid("grid_slurm.yaml", checkpoints=[FIRST, "broken.pth"], evaluate=evaluate)
        )
        for wanted, part in (
            ("done", "fewshot"),
            ("done", "knn-shapes"),
            ("failed", "nowhere"),
            ("blocked", "broken"),
        ):
            until("slurm", wanted, part)
        launch("slurm", grid("grid_slurm1.yaml", **slow(1)))
        until("slurm", "running", "slow_probe-shapes-s1")
        cancel("slurm", "slow_probe-shapes-s1")
        until("slurm", "cancelled", "slow_probe-shapes-s1")
        launch("slurm", grid("grid_slurm2.yaml", **slow(2, 3)), "cluster.jobs=1")
        launch(
            "slurm",
            grid("grid_slurm3.yaml", recipes=["slow_simclr.yaml"], evaluate=[job("knn.yaml")]),
        )
        running = (("running", "slow_probe-shapes-s2"), ("queued", "slow_probe-shapes-s3"))
        for wanted, part in (*running, ("running", "pretrain"), ("waiting", "slow_simclr-s0")):
            until("slurm", wanted, part)
        queue = ["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%k"]
        (HERE / "launch" / "squeue.txt").write_text(subprocess.check_output(queue, text=True))
        keep_launched("slurm")
        cancel("slurm")


def keep_launched(out: str) -> None:
    """The launcher's records, and of the run folders what it reads; with what it says of them."""
    target = HERE / "launch" / out
    for path in (ROOM / out).rglob("*"):
        read = (
            path.name in ("run.json", "progress.json", "results.jsonl")
            or path.parent.parent.name == ".launch"
        )
        if path.is_file() and (read or path.name.endswith("_submitted.pkl")):
            copy((str(path.relative_to(ROOM / out)),), ROOM / out, target)
    plans = {}
    for file in sorted(f.name for f in ROOM.glob(f"grid_{out}*.yaml")):
        words = ("launch", "run", file, "--dry-run", "--cluster", "local.yaml", "--out", out)
        plans[file] = backbench(*words)[0].splitlines()
    now = states(str(target))  # of the copy: in ROOM a job may be a step further by now
    resume.write_json(HERE / "launch" / f"{out}.json", {"states": now, "plans": plans})


PARTS = {
    "simclr": lambda: pretrain("simclr"),
    "lorac": lambda: pretrain("lorac"),
    "checkpoint": checkpoint,
    "linear": lambda: evaluation(
        "linear", ("state/shapes.state",), at=5, part=3
    ),  # select, val features, refit
    "semisup": lambda: evaluation(
        "semisup", ("state/training.state", "state/grid.state"), at=2, part=2
    ),
    "detect": lambda: evaluation("detect", ("state.pt",), at=1, part=1),
    "board": board,
    "cache": cache,
    "record": record,
    "local": local,
    "slurm": slurm,
}


def main() -> None:
    assert results.code_revision() == COMMIT, f"made at {COMMIT}, this is {results.code_revision()}"
    ROOM.mkdir(exist_ok=True)
    os.environ["BACKBENCH_CACHE"] = str(ROOM / "cache")
    pictures.write_all(ROOM / "data")
    for file in (HERE / "recipes").iterdir():
        shutil.copy(file, ROOM / file.name)
    (ROOM / "broken.pth").write_bytes(b"not a checkpoint")
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
