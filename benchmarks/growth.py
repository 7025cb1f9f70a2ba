"""Measure how time and memory grow with the work, and write docs/growth.md and docs/growth.svg.

python benchmarks/growth.py [WORK ...] [--most N] [--work FOLDER] [--again]

Each size is measured in processes of its own, and the fastest stands. What was measured is kept
in FOLDER/growth.jsonl, and a run that was stopped goes on there. The exponent is the slope in
logarithms between the two largest sizes: 1 where twice the work costs twice as much.
"""

import argparse
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
PAGE = HOME / "docs" / "growth.md"
DRAWING = HOME / "docs" / "growth.svg"
STEEP = 1.15  # an exponent above it is named on the page
TURNS = 2  # of each size; the fastest stands, as whatever else a machine does only adds
NOTE = (
    "A first start on a class folder of your own reads the ends of the files whose size train and"
    " test share. The more files, the more of them share one, so it grows faster until nearly all do;"
    " from then on each file is read once. The second start reads none. It runs in the process of the"
    " first, whose memory it uses again. The three readings are of ResNet-18s on 90 pictures of 32"
    " pixels; all checkpoints of one call are in memory, some 95 MB each."
)

Measured = Callable[[], object]


@dataclass(frozen=True)
class Growing:
    """One kind of work: how it is made in a folder at a size, and what is timed then."""

    title: str
    unit: str
    sizes: tuple[int, ...]
    make: Callable[[Path, int], Measured]
    most: int = 100_000  # the largest size that is measured unless another is asked for


# The kinds of work


def class_folder(base: Path, images: int, classes: int) -> None:
    """Write files that are named as images: train and a tenth as many for test, no two alike."""
    draw = random.Random(0)
    for split, share in (("train", 1.0), ("test", 0.1)):
        each = max(2, round(images * share / classes))
        for label in range(classes):
            folder = base / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for number in range(each):
                # Half of all sizes are shared by train and test, so that first bytes are compared
                content = draw.randbytes(16) + bytes(draw.randrange(2000))
                (folder / f"n{label:08d}_{number}.JPEG").write_bytes(content)


def many_names(base: Path, images: int, classes: int) -> None:
    """Write names of images alone: those of a class are links to one empty file.

    A million files of their own would take longer to make and to remove than all the rest."""
    each = images // classes
    for label in range(classes):
        folder = base / f"n{label:08d}"
        folder.mkdir(parents=True)
        first = folder / f"n{label:08d}_0.JPEG"
        first.touch()
        for number in range(1, each):
            os.link(first, folder / f"n{label:08d}_{number}.JPEG")


def listing(folder: Path, images: int) -> Measured:
    from backbench.images.image_list import scan_folder

    many_names(folder / "own", images, classes=100)
    return lambda: scan_folder(folder / "own")


def first_start(folder: Path, images: int) -> Measured:
    from backbench.datasets import catalog

    class_folder(folder / "own", images, classes=100)
    return lambda: catalog.load("own", folder)


def second_start(folder: Path, images: int) -> Measured:
    start = first_start(folder, images)
    start()
    return start


def classes(folder: Path, count: int) -> Measured:
    from backbench.datasets import catalog

    class_folder(folder / "own", 10 * count, classes=count)
    return lambda: catalog.load("own", folder)


def results(folder: Path, count: int) -> Measured:
    """Ten columns; each trunk has a file of its own."""
    from backbench.board.board import collect
    from backbench.records import store
    from backbench.records.result_line import Result

    draw = random.Random(0)
    for trunk in range(count // 10):
        rows = []
        for column in range(10):
            row = Result(
                checkpoint=f"{trunk:064x}",
                name=f"trunk{trunk}",
                method="moco",
                arch="resnet18",
                epochs=100,
                task="knn",
                dataset=f"set{column}",
                split="test",
                metric="top1",
                value=round(draw.uniform(20, 80), 2),
                protocol="knn-v1",
            )
            rows.append(row)
        store.append(folder / "runs" / f"trunk{trunk}", rows)
    return lambda: collect([folder / "runs"])


def jobs(folder: Path, count: int) -> Measured:
    """One pretraining for each seed, and one evaluation of each."""
    from backbench.launch.expansion import Expansion
    from backbench.launch.grid import read_grid

    file = folder / "many.yaml"
    seeds = list(range(count // 2))
    evaluate = "evaluate:\n  - {verb: linear, protocol: knn_demo, datasets: [digits]}\n"
    file.write_text(f"recipes: [demo_random]\nseeds: {seeds}\n{evaluate}")
    (folder / "data").mkdir()

    def expand() -> object:
        grid = read_grid(file)
        return Expansion(grid, folder / "runs", where=str(file), data=folder / "data")

    return expand


def readings(folder: Path, count: int) -> Measured:
    """Three readings of each trunk: neighbours, few labels and logistic regression."""
    import backbench

    pictures(folder / "own")
    files = []
    for seed in range(count):
        file = folder / f"trunk{seed}.safetensors"
        random_trunk(file, seed)
        files.append(file)
    # At their own size, so that the trunks' passes do not hide the rest
    own = {"data": folder / "own", "out": folder / "runs", "size": 32}
    return lambda: backbench.evaluate(files, **own)


def pictures(folder: Path) -> None:
    """Write 90 pictures of 32 pixels, of three classes, 20 of each for train and 10 for test."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, each in (("train", 20), ("test", 10)):
        for label in range(3):
            of_class = folder / split / f"class{label}"
            of_class.mkdir(parents=True)
            for number in range(each):
                noise = draw.integers(60 * label, 60 * label + 100, (32, 32, 3))
                picture = Image.fromarray(noise.astype(np.uint8))
                picture.save(of_class / f"{number}.png")


def random_trunk(file: Path, seed: int) -> None:
    """Write a ResNet-18 with random weights as a checkpoint."""
    import torch

    from backbench.weights.archs import build_trunk
    from backbench.weights.checkpoint import Checkpoint

    torch.manual_seed(seed)
    checkpoint = Checkpoint(
        state_dict=build_trunk("resnet18").state_dict(),
        arch="resnet18",
        method="random",
        provenance={"name": f"random{seed}"},
    )
    checkpoint.save(file)


WORKS = {
    "listing": Growing(
        "List a class folder",
        "images",
        (1000, 10_000, 100_000, 1_000_000),
        listing,
        most=1_000_000,
    ),
    "first": Growing(
        "First start on a class folder",
        "images",
        (1000, 10_000, 100_000, 1_000_000),
        first_start,
    ),
    "second": Growing(
        "Second start on a class folder",
        "images",
        (1000, 10_000, 100_000, 1_000_000),
        second_start,
    ),
    "classes": Growing(
        "First start, 10 images a class",
        "classes",
        (10, 100, 1000, 10_000),
        classes,
    ),
    "results": Growing(
        "Collect a leaderboard", "results", (100, 1000, 10_000, 100_000), results
    ),
    "readings": Growing(
        "Evaluate by three readings", "checkpoints", (1, 3, 10, 30), readings
    ),
    "jobs": Growing("Expand a grid", "jobs", (10, 100, 1000, 10_000), jobs),
}


# Measuring


def measure_here(name: str, size: int, folder: Path) -> None:
    """Print one measurement as JSON: CPU seconds, and by how much the work raised the memory."""
    os.environ["BACKBENCH_CACHE"] = str(folder / "cache")
    work = WORKS[name]
    # Imports are no part of the work
    warm_up = folder / "warm"
    warm_up.mkdir()
    work.make(warm_up, min(work.sizes))()
    real = folder / "real"
    real.mkdir()
    run = work.make(real, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    kept = run()
    seconds = time.process_time() - begin
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    del kept
    print(json.dumps({"seconds": seconds, "megabytes": megabytes}))


def measure(name: str, size: int, folder: Path) -> Mapping[str, float]:
    """Measure one size TURNS times, and return the turn that took the fewest seconds."""
    turns = [measure_once(name, size, folder) for _ in range(TURNS)]
    return min(turns, key=lambda turn: turn["seconds"])


def measure_once(name: str, size: int, folder: Path) -> Mapping[str, float]:
    """Measure one size in a process and a folder of its own."""
    place = folder / f"{name}-{size}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    command = [sys.executable, __file__, "--here", name, str(size), str(place)]
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return json.loads(done.stdout.splitlines()[-1])


Points = dict[str, dict[int, Mapping[str, float]]]


def kept_points(file: Path) -> Points:
    """Read what earlier runs have measured."""
    points: Points = {}
    if file.exists():
        for line in file.read_text().splitlines():
            row = json.loads(line)
            points.setdefault(row["work"], {})[row["size"]] = row
    return points


# The page


def exponent(points: Mapping[int, Mapping[str, float]]) -> float | None:
    """Return the slope between the two largest sizes; None for fewer than two."""
    if len(points) < 2:
        return None
    small, large = sorted(points)[-2:]
    ratio = points[large]["seconds"] / points[small]["seconds"]
    return math.log(ratio) / math.log(large / small)


def draw_all(points: Points) -> None:
    """Draw one small figure for each kind of work, both axes in powers of ten."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "growth"
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text, in a tenth of the bytes
    from matplotlib import pyplot as plt

    names = [name for name in WORKS if name in points]
    rows = -(-len(names) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(7.5, 2.1 * rows), squeeze=False)
    for place in axes.flat[len(names) :]:
        place.axis("off")
    for place, name in zip(axes.flat, names):
        sizes = sorted(points[name])
        place.loglog(
            sizes, [points[name][size]["seconds"] for size in sizes], "o-", ms=3
        )
        place.set_title(WORKS[name].title, fontsize=8)
        place.set_xlabel(WORKS[name].unit, fontsize=7)
        place.set_ylabel("CPU s", fontsize=7)
        place.minorticks_off()
        place.tick_params(labelsize=6)
    figure.tight_layout()
    figure.savefig(DRAWING, metadata={"Date": None})


def write_page(points: Points) -> None:
    """Write docs/growth.md: a table with one line for each kind of work and size."""
    lines = [
        "# Growth",
        "",
        "What does ten times the work cost? Each line is one size, measured in a process of its own,"
        f" the fastest of {TURNS}: CPU seconds without the imports, and the memory that the work adds."
        " The exponent is the"
        " slope between the two largest sizes: 1 where twice the work costs twice as much. The machine"
        " was shared with others, so the seconds are rough and the exponents good to about 0.1."
        " `python benchmarks/growth.py` makes this page.",
        "",
        "![CPU seconds against the size of the work](growth.svg)",
        "",
        "| work | size | CPU s | MB | exponent |",
        "|---|--:|--:|--:|--:|",
    ]
    steep = []
    for name, work in WORKS.items():
        of_work = points.get(name, {})
        slope = exponent(of_work)
        for size in sorted(of_work):
            one = of_work[size]
            shown = "" if slope is None or size != max(of_work) else f"{slope:.2f}"
            lines.append(
                f"| {work.title} | {size:,} {work.unit} | {one['seconds']:.2f} |"
                f" {one['megabytes']:.0f} | {shown} |"
            )
        if slope is not None and slope > STEEP:
            steep.append(f"{work.title.lower()} ({slope:.2f})")
    said = ", ".join(steep) or "nothing"
    lines += ["", f"Costs that grow faster than their work: {said}.", "", NOTE, ""]
    PAGE.write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="*", metavar="WORK", help=", ".join(WORKS))
    parser.add_argument("--most", type=int, help="the largest size")
    parser.add_argument("--work", type=Path, default=Path("runs/growth"))
    parser.add_argument("--again", action="store_true", help="measure all anew")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        name, size, folder = asked.here
        measure_here(name, int(size), Path(folder))
        return
    unknown = set(asked.works) - set(WORKS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; take {', '.join(WORKS)}")
    asked.work.mkdir(parents=True, exist_ok=True)
    file = asked.work / "growth.jsonl"
    if asked.again:
        file.unlink(missing_ok=True)
    points = kept_points(file)
    for name in asked.works or WORKS:
        most = asked.most or WORKS[name].most
        for size in WORKS[name].sizes:
            if size > most or size in points.get(name, {}):
                continue
            one = {"work": name, "size": size, **measure(name, size, asked.work)}
            with file.open("a") as out:
                out.write(json.dumps(one) + "\n")
            points.setdefault(name, {})[size] = one
            print(f"{name} {size}: {one['seconds']:.2f} CPU s", flush=True)
    draw_all(points)
    write_page(points)


if __name__ == "__main__":
    main()
