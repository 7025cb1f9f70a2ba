"""How far AP of the demo's detection goes apart where nothing differs but rounding.

    python benchmarks/rounding.py [--task mask] [--iterations 200] [KEY VALUE ...]

The demo's recipe, with overrides of the config if any, from one random trunk, with one seed, on one
machine: by another number of
threads, without oneDNN, with oneDNN's kernels for an older processor, and from weights that differ
in the seventh digit. Beside it other seeds of heads and order of images. Each is a process of its
own. Printed are AP, and how far the loss has gone from the first run's after 1, 10, 50, ...
iterations, as a part of it. The last output is kept beside this script in rounding.txt.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import describe

from backbench.datasets import embedded
from backbench.runs.state import StopFlag
from backbench.runs.step_metrics import read_metrics
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import build_backbone
from detection import dialect, measure, train_net

SHOWN = (1, 10, 50, 100, 200)  # iterations


@dataclass(frozen=True)
class Variant:
    name: str
    threads: int = 1
    onednn: bool = True
    isa: str = ""  # oneDNN's newest instructions, all where empty
    nudge: int = 0  # seed of a change in the weights' seventh digit, none where 0
    seed: int = 0

    @property
    def rounding(self) -> bool:
        """Whether only rounding tells it from the first."""
        return self.seed == 0


VARIANTS = (
    Variant("1 thread"),
    *(Variant(f"weights x (1 + 1e-7 noise {n})", nudge=n) for n in (1, 2)),
    Variant("oneDNN's AVX2", isa="AVX2"),
    Variant("without oneDNN", onednn=False),
    *(Variant(f"seed {n}", seed=n) for n in (1, 2, 3)),
    Variant("2 threads", threads=2),
)


def trained(
    variant: Variant, task: str, iterations: int, folder: Path, opts: list[str]
) -> dict[str, object]:
    """Its losses and AP."""
    torch.set_num_threads(variant.threads)
    torch.backends.mkldnn.enabled = variant.onednn
    words = ["SOLVER.MAX_ITER", str(iterations), "SOLVER.STEPS", f"({int(0.8 * iterations)},)"]
    given = dialect.read(f"demo_{task}_rcnn_R_18_FPN", [*words, *opts, "SEED", str(variant.seed)])
    out = folder / variant.name.replace("'", "").replace(" ", "_")
    out.mkdir()
    trunk, root = folder / "trunk.safetensors", folder / "data"
    run = train_net.new_run(given, engine="torchvision", checkpoint=trunk, root=root, out=out)
    p = train_net.prepare(run)
    engine = train_net.build_engine(run, p, torch.device("cpu"))
    if variant.nudge:
        noise = torch.Generator().manual_seed(variant.nudge)
        with torch.no_grad():
            for weight in engine.model.parameters():
                weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=noise))
    train_net.train(run, p, engine, 0, StopFlag())
    found = measure.predict(run, p, engine, 0)
    kind = p.task.aps[0]
    ap = measure._scores(kind, p, found, None).values["AP"]
    return {"losses": [row["loss"] for row in read_metrics(out)], "kind": kind, "AP": ap}


def in_a_process(
    variant: Variant, task: str, iterations: int, folder: str, opts: list[str]
) -> dict[str, object]:
    env = dict(os.environ, OMP_NUM_THREADS=str(variant.threads))
    if variant.isa:
        env["ONEDNN_MAX_CPU_ISA"] = variant.isa
    words = [json.dumps(asdict(variant)), task, str(iterations), folder, *opts]
    command = [sys.executable, __file__, "--child", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="mask", choices=["faster", "mask", "keypoint"])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("opts", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(describe())
    print(f"{args.task}, {args.iterations} iterations {' '.join(args.opts)}")
    with tempfile.TemporaryDirectory() as folder:
        embedded.build(Path(folder) / "data")
        torch.manual_seed(0)
        trunk = build_backbone("resnet18").state_dict()
        Checkpoint(arch="resnet18", method="random", state_dict=trunk).save(
            Path(folder) / "trunk.safetensors"
        )
        steps = [step for step in SHOWN if step <= args.iterations]
        aps: dict[bool, list[float]] = {True: [], False: []}
        first: list[float] = []
        pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
        asked = (args.task, args.iterations, folder, args.opts)
        runs = [pool.submit(in_a_process, variant, *asked) for variant in VARIANTS]
        for variant, done in zip(VARIANTS, runs, strict=True):
            found = done.result()
            losses, ap = found["losses"], found["AP"]
            assert isinstance(losses, list) and isinstance(ap, float)
            first = first or losses
            apart = [abs(losses[s - 1] / first[s - 1] - 1) for s in steps]
            aps[variant.rounding].append(ap)
            shown = "  ".join(f"{s}: {a:.0e}" for s, a in zip(steps, apart))
            print(f"  {variant.name:28} {found['kind']} AP {ap:5.2f}   loss {shown}", flush=True)
    for rounding, name in ((True, "rounding"), (False, "other seeds")):
        values = aps[rounding]
        print(
            f"{name}: {min(values):.1f} to {max(values):.1f}, "
            f"standard deviation {statistics.stdev(values):.1f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        warnings.simplefilter("ignore")
        of, task, length, folder, *opts = sys.argv[2:]
        variant = Variant(**json.loads(of))
        print(json.dumps(trained(variant, task, int(length), Path(folder), opts)))
    else:
        main()
