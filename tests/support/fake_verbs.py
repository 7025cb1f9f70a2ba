"""A stand-in for `python -m backbench VERB`: run folders, stop flag, results, and no science.
ROOT/<dataset>.json may hold {"steps", "step_s", "save_every", "fault", "times", "rows": per
checkpoint, "die_at": the steps after which it is killed, one an attempt, "tell": an environment
variable to write down, "fault_rank": the task that breaks, "until": a file without which the last
step is not made}."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from backbench.errors import BadInput, Failed, Preempted
from backbench.records import store
from backbench.requests import parsing
from backbench.requests.pretrain import PretrainRequest
from backbench.requests.probe import LinearRequest
from backbench.requests.weights import ExportRequest, ImportRequest
from backbench.runs import atomic
from backbench.runs.ending import guarded
from backbench.runs.folder import CHECKPOINT_FILE, open_run
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.weights import header


def behaviour(root: Path, name: str) -> dict:
    file = root / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def work(out: Path, plan: dict, start: str) -> str:
    """`steps` steps of a hash chain: however often it was stopped, it ends with one word."""
    steps, step_s = plan.get("steps", 1), plan.get("step_s", 0.0)
    state_file = out / "state.json"
    state = {"step": 0, "word": start}
    if state_file.exists():
        state = json.loads(state_file.read_text())
    fail_as_ordered(out, plan)
    if plan.get("tell"):
        (out / "told").write_text(os.environ.get(plan["tell"], "not set"))
    progress = Progress(out, steps, "walking", done=state["step"])
    with StopFlag() as stop:
        while state["step"] < steps:
            time.sleep(step_s)
            if state["step"] == steps - 1 and not Path(plan.get("until", "/")).exists():
                if stop.requested:
                    raise Preempted(f"stopped by {stop.requested} before its last step")
                continue
            word = hashlib.sha256(state["word"].encode()).hexdigest()
            state = {"step": state["step"] + 1, "word": word}
            progress.advance()
            if plan.get("save_every") and state["step"] % plan["save_every"] == 0:
                atomic.write_json(state_file, state)
            if state["step"] in plan.get("die_at", ()) and first_time(
                out, f"died {state['step']}"
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            if stop.requested:
                atomic.write_json(state_file, state)
                raise Preempted(f"stopped by {stop.requested} at step {state['step']}")
    return state["word"]


def first_time(out: Path, what: str) -> bool:
    file = out / what
    seen = file.exists()
    file.touch()
    return not seen


def fail_as_ordered(out: Path, plan: dict) -> None:
    """The first `times` attempts; how many there were is kept beside the run's folder."""
    faults = out.parent / f"{out.name}.faults"
    count = int(faults.read_text()) if faults.exists() else 0
    if not plan.get("fault") or count >= plan.get("times", 99):
        return
    faults.parent.mkdir(parents=True, exist_ok=True)
    faults.write_text(str(count + 1))
    if plan["fault"] == "bad":
        raise BadInput("the fault that was ordered")
    # Another number in every message: the launcher must see the same reason in all of them
    raise Failed(f"{plan['fault']} (attempt at {time.time():.3f})")


def linear(args: LinearRequest) -> None:
    files = [Path(f) for f in args.checkpoints]
    digests = [
        header.digest(f) or hashlib.sha256(f.read_bytes()).hexdigest() for f in files
    ]
    identity = {"x": digests, "d": args.datasets, "seed": args.seed}
    with open_run(args.out, verb="linear", identity=identity) as out:
        if store.complete(out):
            print("already there")
            return
        plan = behaviour(args.data, args.datasets)
        metrics = [f"top{i}" for i in range(1, 1 + plan.get("rows", 1))]
        store.owe(out, len(files) * len(metrics))
        word = work(out, plan, f"{digests} {args.datasets} {args.protocol} {args.seed}")
        same = {"method": "fake", "arch": "resnet18", "epochs": 1, "task": "linear"}
        same |= {"dataset": args.datasets, "split": "test", "seed": args.seed}
        same |= {"protocol": f"{args.protocol}-fake-v1"}
        rows = []
        for file, digest in zip(files, digests):
            for metric in metrics:
                # The number depends on the whole walk and on the checkpoint, and on nothing else
                end = hashlib.sha256(f"{word} {digest} {metric}".encode()).hexdigest()
                value = int(end[:6], 16) / 0xFFFFFF * 100
                who = {"checkpoint": digest, "name": file.parent.name}
                rows.append(store.Result(**who, metric=metric, value=value, **same))
        store.append(out, rows, skip_known=True)


def pretrain(args: PretrainRequest) -> None:
    if os.environ.get("SLURM_PROCID", "none") == behaviour(args.data, "pretrain").get(
        "fault_rank"
    ):
        raise Failed("this rank breaks")
    if os.environ.get("SLURM_PROCID", "0") != "0":
        follow(args.out)
        return
    identity = {"recipe": args.recipe, "overrides": args.overrides}
    with open_run(args.out, verb="pretrain", identity=identity) as out:
        word = work(
            out, behaviour(args.data, "pretrain"), f"{args.recipe} {args.overrides}"
        )
        write_checkpoint(out / CHECKPOINT_FILE, word)


def follow(out: Path) -> None:
    """Another rank: it has nothing to save, and ends with the first."""
    with StopFlag() as stop:
        while not (out / CHECKPOINT_FILE).exists():
            time.sleep(0.1)
            if stop.requested:
                raise Preempted(f"stopped by {stop.requested}")


def write_checkpoint(path: Path, word: str) -> None:
    """A file with the header of a checkpoint and no tensors."""
    digest = hashlib.sha256(word.encode()).hexdigest()
    about = json.dumps({"digest": digest, "schema": 1, "arch": "resnet18"})
    head = json.dumps(
        {"__metadata__": {"format": "backbench-checkpoint", "about": about}}
    ).encode()
    atomic.write_bytes(path, len(head).to_bytes(8, "little") + head)


def copy(args: ImportRequest | ExportRequest) -> None:
    source = getattr(args, "file", None) or args.checkpoint
    atomic.write_bytes(args.out, Path(source).read_bytes())


VERBS = {"linear": linear, "pretrain": pretrain, "import": copy, "export": copy}


def main() -> int:
    args = parsing.parse(sys.argv[1:])
    return guarded(lambda: VERBS[args.verb](args))


if __name__ == "__main__":
    raise SystemExit(main())
