"""A stand-in for `python -m backbench VERB`: run folders, a stop flag and results, and no science.

ROOT/<dataset>.json (and ROOT/pretrain.json) says how a run behaves. All keys may be left out:

    steps        how many there are; each takes `step_s` seconds
    save_every   the state is saved after so many steps, and at a signal
    rows         results per checkpoint
    until        a file without which the last step is not made
    tell         an environment variable whose value is written to RUN/told
    fault        how the run fails: "bad" for bad input, else its words; in the first `times` attempts
    fault_rank   the task of a Slurm job that fails
    die_at       the steps after which the run is killed, one an attempt
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from backbench.errors import BadInput, Failed, Preempted
from backbench.records import owed_rows
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
    """Make the steps of a hash chain: however often it was stopped, it ends with one word."""
    steps = plan.get("steps", 1)
    # 1. Continue where the run was stopped.
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
            time.sleep(plan.get("step_s", 0.0))
            # 2. The last step may have to wait.
            is_last = state["step"] == steps - 1
            if is_last and not Path(plan.get("until", "/")).exists():
                if stop.requested:
                    raise Preempted(f"stopped by {stop.requested} before its last step")
                continue
            # 3. Make the step.
            word = hashlib.sha256(state["word"].encode()).hexdigest()
            state = {"step": state["step"] + 1, "word": word}
            progress.advance()
            # 4. Save, die, stop.
            if plan.get("save_every") and state["step"] % plan["save_every"] == 0:
                atomic.write_json(state_file, state)
            is_deadly = state["step"] in plan.get("die_at", ())
            if is_deadly and is_first_time(out, f"died {state['step']}"):
                os.kill(os.getpid(), signal.SIGKILL)
            if stop.requested:
                atomic.write_json(state_file, state)
                raise Preempted(f"stopped by {stop.requested} at step {state['step']}")
    return state["word"]


def is_first_time(out: Path, what: str) -> bool:
    """Say whether this was never asked in this run folder."""
    file = out / what
    if file.exists():
        return False
    file.touch()
    return True


def fail_as_ordered(out: Path, plan: dict) -> None:
    """Fail in the first `times` attempts, which are counted beside the run's folder."""
    if not plan.get("fault"):
        return
    faults = out.parent / f"{out.name}.faults"
    count = int(faults.read_text()) if faults.exists() else 0
    if count >= plan.get("times", 99):
        return
    faults.parent.mkdir(parents=True, exist_ok=True)
    faults.write_text(str(count + 1))
    if plan["fault"] == "bad":
        raise BadInput("the fault that was ordered")
    # Another number in every message: the launcher must see the same reason in all of them.
    raise Failed(f"{plan['fault']} (attempt at {time.time():.3f})")


def linear(args: LinearRequest) -> None:
    files = [Path(name) for name in args.checkpoints]
    digests = []
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digests.append(header.digest(file) or content)
    identity = {"x": digests, "d": args.datasets, "seed": args.seed}
    with open_run(args.out, verb="linear", identity=identity) as out:
        if owed_rows.complete(out):
            print("already there")
            return
        plan = behaviour(args.data, args.datasets)
        metrics = [f"top{i}" for i in range(1, 1 + plan.get("rows", 1))]
        owed_rows.owe(out, len(files) * len(metrics))
        word = work(out, plan, f"{digests} {args.datasets} {args.protocol} {args.seed}")
        # A row needs pydantic, which takes as long to import as all else here; a run that fails or is
        # stopped has none
        from backbench.records import store

        rows = []
        for file, digest in zip(files, digests):
            for metric in metrics:
                # The number depends on the whole walk and on the checkpoint, and on nothing else.
                end = hashlib.sha256(f"{word} {digest} {metric}".encode()).hexdigest()
                row = store.Result(
                    checkpoint=digest,
                    name=file.parent.name,
                    method="fake",
                    arch="resnet18",
                    epochs=1,
                    task="linear",
                    dataset=args.datasets,
                    split="test",
                    metric=metric,
                    value=int(end[:6], 16) / 0xFFFFFF * 100,
                    protocol=f"{args.protocol}-fake-v1",
                    seed=args.seed,
                )
                rows.append(row)
        store.append(out, rows, skip_known=True)


def pretrain(args: PretrainRequest) -> None:
    plan = behaviour(args.data, "pretrain")
    rank = os.environ.get("SLURM_PROCID")  # None: not a task of Slurm
    if rank is not None and rank == plan.get("fault_rank"):
        raise Failed("this rank breaks")
    if rank not in (None, "0"):
        follow(args.out)
        return
    identity = {"recipe": args.recipe, "overrides": args.overrides}
    with open_run(args.out, verb="pretrain", identity=identity) as out:
        word = work(out, plan, f"{args.recipe} {args.overrides}")
        write_checkpoint(out / CHECKPOINT_FILE, word)


def follow(out: Path) -> None:
    """Be another rank than the first: it has nothing to save, and ends with the first."""
    with StopFlag() as stop:
        while not (out / CHECKPOINT_FILE).exists():
            time.sleep(0.1)
            if stop.requested:
                raise Preempted(f"stopped by {stop.requested}")


def write_checkpoint(path: Path, word: str, **more: object) -> None:
    """Write a file with the header of a checkpoint, `more` facts in it, and no tensors."""
    digest = hashlib.sha256(word.encode()).hexdigest()
    about = json.dumps({"digest": digest, "schema": 1, "arch": "resnet18", **more})
    metadata = {"format": "backbench-checkpoint", "about": about}
    head = json.dumps({"__metadata__": metadata}).encode()
    atomic.write_bytes(path, len(head).to_bytes(8, "little") + head)


def copy(args: ImportRequest | ExportRequest) -> None:
    """Import or export: both write a file of the same content."""
    source = args.file if isinstance(args, ImportRequest) else args.checkpoint
    atomic.write_bytes(args.out, Path(source).read_bytes())


VERBS = {"linear": linear, "pretrain": pretrain, "import": copy, "export": copy}


def main() -> int:
    args = parsing.parse(sys.argv[1:])
    return guarded(lambda: VERBS[args.verb](args))


if __name__ == "__main__":
    raise SystemExit(main())
