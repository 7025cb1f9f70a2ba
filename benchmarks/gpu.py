"""The cost of the suite on a GPU: every table of it, in one run.

    python benchmarks/gpu.py [--only steps,loop] [--small] [--keep]

steps: pretraining by the papers' recipes at ResNet-50 and 224 px, beside the encoders alone; peers:
MoCo beside lightly's; losses: their time beside the two matrix products that nothing can do
without; loop: the whole loop with its loader; cores: how many feed each recipe; probe: extraction,
and seven rates on three checkpoints; detection: an iteration of both engines beside plain
Detectron2 and torchvision.

With --small each line runs at sizes for a CPU, or for a GPU in half a minute: the figures then mean
nothing. With --keep, as `make gpu` asks for it, the output is kept in gpu-<hardware>.txt.

No GPU has run it yet. By estimate (calls of a fifth of a second, five rounds, 2,000 images/s) it
takes six minutes on one H200 with 12 cores, compiling 90 s of them and detection 75 s, and the tests
before it under two with six workers: `make gpu` under nine.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import gpu_detection
import torch
import views as fed
from gpu_steps import RECIPES, Scale, beside_lightly, losses, steps
from machine import Work, describe
from probe import checkpoint

from backbench.cli import program
from backbench.parallel import precision
from backbench.pretrain.recipe import PretrainConfig
from backbench.recipes import config as recipes
from backbench.recipes import fast
from backbench.runs import atomic
from backbench.runs.step_metrics import read_metrics
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.heads import LinearHeads

TABLES = ("steps", "peers", "losses", "loop", "cores", "probe", "detection")
RATES = torch.tensor([0.1, 0.316, 1.0, 3.16, 10.0, 31.6, 100.0])


# The whole loop


def cores_needed(scale: Scale, steps_of: dict[str, float]) -> None:
    """Cores that make views as fast as the GPU takes them in bf16: by the reference pipeline, by
    the fast one, and by the fast one with colour on the GPU."""
    jpegs = fed.photographs(2 if scale.small else 16)
    print(
        "\ncores that feed one GPU (bf16): reference, fast, fast with colour on the GPU"
    )
    for name, recipe in RECIPES.items():
        config = recipes.load(PretrainConfig, recipe, [], kind="pretrain")
        ways = fed.ways(config.views.crops)
        ways = {way: ways[way] for way in ways if way.startswith(("reference", "fast"))}
        seconds = fed.measure(ways, jpegs, 1 if scale.small else 2)
        of_image = [each / len(jpegs) for each in seconds.values()]
        rate = scale.batch / steps_of[name] if name in steps_of else float("nan")
        print(
            f"  {name:26}" + "".join(f"{rate * each:9.1f}" for each in of_image),
            flush=True,
        )


def loop(scale: Scale) -> None:
    """`backbench pretrain --fast` of MoCo v2, by its rows behind the first."""
    workers = max(1, min(12, len(os.sched_getaffinity(0)) - 1))
    # Batches that are made while the GPU still starts are not waited for: two rows are left out
    rows, each = (3, 2) if scale.small else (8, 10)
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder) / "data", Path(folder) / "run"
        count = scale.batch * (2 if scale.small else 8)
        train = root / "photographs" / "train"
        fed.write_photographs(train, count, distinct=4 if scale.small else 64)
        epochs = rows * each * scale.batch // count
        words = [
            *scale.words,
            "data.dataset=photographs",
            f"epochs={epochs}",
            f"log_every={each}",
        ]
        if scale.small:
            words += [
                "views.crops=[{count: 2, size: 32}]",
                f"method.queue={scale.queue}",
            ]
            words += ["method.groups=2"]
        command = [
            "pretrain",
            RECIPES["MoCo v2"],
            "--fast",
            "--data",
            root,
            "--out",
            out,
        ]
        command += ["--accelerator", scale.device, "--workers", workers, *words]
        if code := program.main(list(map(str, command))):
            raise SystemExit(code)
        kept = [row for row in read_metrics(out) if "images_per_s" in row][2:]
    speed = sum(row["images_per_s"] for row in kept) / len(kept)
    waiting = sum(row["waiting"] for row in kept) / len(kept)
    about = f"{workers} workers (goal: < 2% waiting with 12)"
    print(f"\nthe whole loop, MoCo v2 {fast.SWITCH}, {about}")
    memory = kept[-1]["memory_gib"]
    print(
        f"  {speed:9.0f} images/s, waiting {waiting:.1%}, peak {memory:.1f} GiB",
        flush=True,
    )


# Evaluation


def probe(scale: Scale) -> None:
    arch, side, classes = (
        ("resnet18", 32, 10) if scale.small else ("resnet50", 224, 1000)
    )
    shape = (scale.batch, 3, side, side)
    pixels = torch.randint(256, shape, dtype=torch.uint8, device=scale.device)
    labels = torch.arange(scale.batch, device=scale.device) % classes
    rates = RATES.to(scale.device)
    device = torch.device(scale.device)
    print(f"\nfrozen {arch}, batch {scale.batch}: images/s, peak GiB")
    ways: tuple[precision.Precision, ...] = ("fp32", "tf32", "bf16")
    for way in ways:
        trunks = [
            FrozenTrunk.build(checkpoint(arch, s), device=device, precision=way)
            for s in range(3)
        ]
        heads = [
            LinearHeads(7, classes, t.dim, std=0.01, seed=0, device=device)
            for t in trunks
        ]

        def train(trunks=trunks, heads=heads) -> None:
            for of_trunk, features in zip(heads, forward_all(trunks, pixels)):
                settings = {"momentum": 0.9, "decay": 0.0, "batch": scale.batch}
                of_trunk.step(features, labels, rates, **settings)

        def extract(trunks=trunks) -> None:
            forward_all(trunks[:1], pixels)

        scale.forget_peak()
        found = scale.least({"extraction": extract, "7 rates x 3 checkpoints": train})
        for name, each in found.items():
            rate = scale.batch / each
            print(f"  {name:26}{way:8}{rate:9.0f}{scale.peak_gib():8.1f}", flush=True)


class Both(io.StringIO):
    """A stream that also keeps all that is printed."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)
        sys.__stdout__.flush()
        return super().write(text)


def run(names: list[str], scale: Scale) -> int:
    """One table after the other; a failure of one does not cost the others."""
    print(describe() + ("; --small: these figures mean nothing" if scale.small else ""))
    steps_of: dict[str, float] = {}
    parts: dict[str, Work] = {
        "steps": lambda: steps_of.update(steps(scale)),
        "peers": lambda: beside_lightly(scale),
        "losses": lambda: losses(scale, steps_of),
        "loop": lambda: loop(scale),
        "cores": lambda: cores_needed(scale, steps_of),
        "probe": lambda: probe(scale),
        "detection": lambda: gpu_detection.table(scale),
    }
    failed = []
    for name in names:
        began = time.perf_counter()
        try:
            parts[name]()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"[{name}: {time.perf_counter() - began:.0f} s]")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--only", default=",".join(TABLES))
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(TABLES):
        parser.error(f"--only {', '.join(sorted(unknown))}: of {', '.join(TABLES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.small:
        parser.error("torch finds no GPU here; --small runs every line on the CPU")
    told = Both()
    with contextlib.redirect_stdout(told):
        code = run(names, Scale(args.small, device))
    if args.keep and device == "cuda":
        hardware = torch.cuda.get_device_name().lower().replace(" ", "-")
        atomic.write_text(
            Path(__file__).with_name(f"gpu-{hardware}.txt"), told.getvalue()
        )
    return code


if __name__ == "__main__":
    raise SystemExit(main())
