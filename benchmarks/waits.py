"""Time what a user waits for: the code of today beside that of an earlier commit, in turns.

    python benchmarks/waits.py [WORK ...] [--before COMMIT] [--data FOLDER] [--turns N] [--save]

Each time is that of a process of its own, from its start to its end or within it, and the least of
the turns stands. A process that takes longer than LIMIT_S is stopped. `--save` keeps what is
printed in docs/benchmarks.md.
"""

import argparse
import contextlib
import datetime
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
PAGE = HOME / "docs" / "benchmarks.md"
BEGIN, END = "<!-- waits.py -->\n", "<!-- end of waits.py -->\n"
# The commit at which these waits were found
FOUND_AT = "41ecb762"
LIMIT_S = 300
STOPPED = float("inf")

Seconds = Mapping[str, float]


@dataclass(frozen=True)
class Waiting:
    """One thing that is waited for.

    `make` writes what it needs into a folder. `wait` takes the tree of some code and that folder,
    and returns the seconds of each part. `plain` takes the folder alone: it is a script as others
    write it, for the same parts.
    """

    title: str
    make: Callable[[Path], None]
    wait: Callable[[Path, Path], Seconds]
    plain: Callable[[Path], Seconds] | None = None


# Processes


def run_in(tree: Path, command: list[str], folder: Path) -> tuple[float, str]:
    """Run Python with the code of `tree`; return its seconds and what it printed.

    A command that fails is an error, but for a refusal (exit 2), which is an answer."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "BACKBENCH_CACHE": tempfile.mkdtemp(dir=folder),
    }
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return STOPPED, ""
    seconds = time.perf_counter() - begin
    if done.returncode not in (0, 2):
        raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
    return seconds, done.stdout


def verb(tree: Path, folder: Path, *words: str) -> float:
    """Return the seconds of `backbench WORDS`, its start included."""
    return run_in(tree, ["-m", "backbench", *words], folder)[0]


def inside(tree: Path, folder: Path, part: str) -> Seconds:
    """Return the seconds that a function of PARTS took, without its start."""
    command = [__file__, "--inside", part, str(folder)]
    seconds, printed = run_in(tree, command, folder)
    if seconds == STOPPED:
        return {}
    return json.loads(printed.splitlines()[-1])


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# evaluate, on a folder of one's own


def make_own_folder(folder: Path, pictures: Path | None) -> None:
    """Write a ResNet-50 with random weights, and `pictures` or 400 photographs of 500 x 375."""
    import torch

    from backbench.weights.archs import build_trunk
    from backbench.weights.checkpoint import Checkpoint

    torch.manual_seed(0)
    trunk = build_trunk("resnet50").state_dict()
    checkpoint = Checkpoint(arch="resnet50", method="random", state_dict=trunk)
    checkpoint.save(folder / "trunk.safetensors")
    if pictures is not None:
        (folder / "own").symlink_to(pictures.resolve())
        return
    from views import photographs

    for number, jpeg in enumerate(photographs(400)):
        split = "test" if number % 4 == 0 else "train"
        place = folder / "own" / split / f"class{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.jpg").write_bytes(jpeg)


def evaluate(tree: Path, folder: Path) -> Seconds:
    """Three readings: neighbours, few labels, logistic regression."""
    out = tempfile.mkdtemp(dir=folder)
    words = ("evaluate", "trunk.safetensors", "--data", "own", "--out", out)
    return {"evaluate, three readings": verb(tree, folder, *words)}


def plain_script(folder: Path) -> Seconds:
    command = [__file__, "--inside", "three_readings", str(folder)]
    return {"evaluate, three readings": run_in(HOME, command, folder)[0]}


def three_readings(folder: Path) -> Seconds:
    """Take the same three readings as a script of torchvision and scikit-learn takes them."""
    import numpy as np
    import torch
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from torch import nn
    from torchvision import datasets, models

    # 1. Features of each split, once
    network = models.resnet50()
    network.fc = nn.Identity()
    network.eval()
    as_documented = models.ResNet50_Weights.IMAGENET1K_V1.transforms()
    features, labels = {}, {}
    for split in ("train", "test"):
        images = datasets.ImageFolder(folder / "own" / split, as_documented)
        batches = torch.utils.data.DataLoader(images, batch_size=64, num_workers=2)
        with torch.inference_mode():
            rows = [network(pixels) for pixels, _ in batches]
        features[split] = nn.functional.normalize(torch.cat(rows), dim=1).numpy()
        labels[split] = np.array(images.targets)
    # 2. Neighbours
    neighbours = KNeighborsClassifier(20, metric="cosine")
    neighbours.fit(features["train"], labels["train"])
    neighbours.score(features["test"], labels["test"])
    # 3. Few labels, in 20 draws
    draw = np.random.default_rng(0)
    for _ in range(20):
        few = []
        for label in np.unique(labels["train"]):
            of_class = np.flatnonzero(labels["train"] == label)
            few += list(draw.choice(of_class, 2, replace=False))
        head = LogisticRegression(max_iter=1000)
        head.fit(features["train"][few], labels["train"][few])
        head.score(features["test"], labels["test"])
    # 4. Logistic regression: 45 penalties, chosen on a fifth of train
    held_out = draw.random(len(labels["train"])) < 0.2
    head = LogisticRegression(max_iter=1000, warm_start=True)
    scores = {}
    for c in np.logspace(-5, 6, 45):
        head.C = c
        head.fit(features["train"][~held_out], labels["train"][~held_out])
        scores[c] = head.score(features["train"][held_out], labels["train"][held_out])
    head.C = max(scores, key=scores.__getitem__)
    head.fit(features["train"], labels["train"])
    head.score(features["test"], labels["test"])
    return {}


# Hostile files


def make_hostile(folder: Path) -> None:
    """Write a safetensors file of 300,000 names, and a pickle of 6 MB that is no network."""
    header = {}
    for number in range(300_000):
        place = [4 * number, 4 * number + 4]
        name = f"layer{number % 50}.block.{number}.weight"
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": place}
    text = json.dumps(header).encode()
    data = bytes(4 * len(header))
    names = folder / "names.safetensors"
    names.write_bytes(struct.pack("<Q", len(text)) + text + data)
    many = {"log": [[] for _ in range(3_000_000)]}
    (folder / "steps.pth").write_bytes(pickle.dumps(many))


def hostile(tree: Path, folder: Path) -> Seconds:
    return {
        "a header of 300,000 names": verb(tree, folder, "inspect", "names.safetensors"),
        "a pickle of 6 MB": verb(tree, folder, "inspect", "steps.pth"),
    }


# Class folders


def make_class_folders(folder: Path) -> None:
    from growth import class_folder

    class_folder(folder / "own", 100_000, classes=100)


def class_folders(tree: Path, folder: Path) -> Seconds:
    return inside(tree, folder, "starts")


def starts(folder: Path) -> Seconds:
    from backbench.datasets import catalog

    def walk() -> None:
        for _ in os.walk(folder / "own"):
            pass

    def start() -> None:
        catalog.load("own", folder)

    walk()  # the kernel's memory of the folders is warm from here on
    return {
        "os.walk": timed(walk),
        "110,000 files, first start": timed(start),
        "110,000 files, second start": timed(start),
    }


# A machine that others use, too


def nothing_to_make(folder: Path) -> None:
    """The features are drawn where they are used."""


def beside_others(tree: Path, folder: Path) -> Seconds:
    """Five fits, alone and beside two busy processes, with as many threads as it takes by itself."""
    alone = inside(tree, folder, "five_fits")
    with busy_processes(2):
        beside = inside(tree, folder, "five_fits")
    return {
        "five logistic regressions, alone": alone.get("fits", STOPPED),
        "the same, two others busy": beside.get("fits", STOPPED),
    }


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def five_fits(folder: Path) -> Seconds:
    """Fit 2,448 features of 1,280 dimensions in 102 classes, for five penalties."""
    from backbench import __main__ as program

    # What the program does before torch is loaded; the earlier code did nothing
    for name in ("wait_without_spinning", "keep_freed_memory"):
        getattr(program, name, int)()
    import torch

    try:
        from backbench.transfer import logreg
    except ImportError:  # before the packages moved
        from transfer import logreg

    generator = torch.Generator().manual_seed(0)
    means = torch.randn(102, 1280, generator=generator)
    labels = torch.arange(2448) % 102
    noise = torch.randn(2448, 1280, generator=generator)
    features = torch.relu(means[labels] + 2 * noise)
    features = torch.nn.functional.normalize(features, dim=1)

    def fits() -> None:
        fitted = None
        for l2 in (10.0, 1.0, 0.1, 0.01, 0.001):
            fitted = logreg.fit([(features, labels)], classes=102, l2=l2, start=fitted)

    fits()
    return {"fits": timed(fits)}


# AP's intervals

IMAGES = 5000
CATEGORIES = 80


def make_detections(folder: Path) -> None:
    """Write COCO's lists of 5,000 images, and detections near their objects and elsewhere.

    Some categories are a hundred times as frequent as others, as in COCO."""
    draw = random.Random(0)
    shares = [1 / (1 + number) for number in range(CATEGORIES)]
    objects, found = [], []
    for image in range(IMAGES):
        for _ in range(draw.randrange(15)):
            category = draw.choices(range(CATEGORIES), shares)[0]
            box = [draw.uniform(0, 300), draw.uniform(0, 300)]
            box += [draw.uniform(8, 300), draw.uniform(8, 150)]
            known = {"id": len(objects) + 1, "iscrowd": 0, "area": box[2] * box[3]}
            objects.append(on_image(image, category, box, **known))
            for _ in range(5):
                near = [max(1.0, side + draw.gauss(0, 12)) for side in box]
                found.append(on_image(image, category, near, score=draw.random()))
        for _ in range(19):
            category = draw.choices(range(CATEGORIES), shares)[0]
            box = [draw.uniform(1, 300) for _ in range(4)]
            found.append(on_image(image, category, box, score=draw.random() / 2))
    size = {"width": 640, "height": 480}
    names = range(CATEGORIES)
    lists = {
        "images": [{"id": i, "file_name": f"{i}.jpg", **size} for i in range(IMAGES)],
        "annotations": objects,
        "categories": [{"id": number, "name": f"c{number}"} for number in names],
    }
    (folder / "objects.json").write_text(json.dumps(lists))
    (folder / "found.json").write_text(json.dumps(found))


def on_image(
    image: int, category: int, box: list[float], **more: float
) -> dict[str, object]:
    return {"image_id": image, "category_id": category, "bbox": box, **more}


def average_precision(tree: Path, folder: Path) -> Seconds:
    return inside(tree, folder, "draws")


def draws(folder: Path) -> Seconds:
    """Score 272,010 detections of 35,402 objects, as the end of a training does."""
    try:
        from backbench.detection import evaluate, task_rows
        from backbench.detection.data import coco
        from backbench.detection.data import split as of_split
    except ImportError:  # before the packages moved
        from detection import evaluate, task_rows
        from detection.data import coco
        from detection.data import split as of_split

    file = folder / "objects.json"
    files = of_split.DatasetFiles("made", file, folder)
    split = coco.parse(file.read_bytes(), files, task_rows.FASTER_RCNN)
    found = json.loads((folder / "found.json").read_text())

    def score(manifest: str | None) -> None:
        evaluate.score(split, found, "bbox", [], manifest=manifest)

    score(None)
    return {
        "AP alone": timed(lambda: score(None)),
        "AP with 500 draws": timed(lambda: score("made")),
    }


# All of it

PARTS = {part.__name__: part for part in (three_readings, starts, five_fits, draws)}


def works(pictures: Path | None) -> Mapping[str, Waiting]:
    return {
        "evaluate": Waiting(
            "one's own folder, ResNet-50",
            lambda folder: make_own_folder(folder, pictures),
            evaluate,
            plain_script,
        ),
        "hostile": Waiting("hostile files", make_hostile, hostile),
        "folders": Waiting("class folders", make_class_folders, class_folders),
        "busy": Waiting("others on the machine", nothing_to_make, beside_others),
        "ap": Waiting(
            "COCO's AP and its intervals", make_detections, average_precision
        ),
    }


def is_commit(name: str) -> bool:
    known = ["git", "rev-parse", "-q", "--verify", f"{name}^{{commit}}"]
    done = subprocess.run(known, cwd=HOME, capture_output=True, check=False)
    return done.returncode == 0


def tree_of(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder."""
    tree = folder / f"tree-{commit}"
    if not tree.exists():
        packed = folder / "tree.tar"
        subprocess.run(
            ["git", "archive", "-o", str(packed), commit], cwd=HOME, check=True
        )
        with tarfile.open(packed) as archive:
            archive.extractall(tree, filter="data")
        packed.unlink()
    return tree


def least(seen: list[Seconds]) -> Seconds:
    """Return the least seconds of each part over all turns."""
    parts = dict.fromkeys(part for seconds in seen for part in seconds)
    return {part: min(seconds.get(part, STOPPED) for seconds in seen) for part in parts}


def compare(work: Waiting, before: Path, folder: Path, turns: int) -> list[str]:
    """Measure the plain script and both codes in turns; return the lines to print."""
    work.make(folder)
    by_script, by_old, by_new = [], [], []
    for _ in range(turns):
        if work.plain is not None:
            by_script.append(work.plain(folder))
        by_old.append(work.wait(before, folder))
        by_new.append(work.wait(HOME, folder))
    script = least(by_script)
    old = least(by_old)
    lines = [work.title]
    for part, now in least(by_new).items():
        line = f"  {part:40} now {shown(now)}"
        line += f"   before {against(old.get(part, STOPPED), now)}"
        if part in script:
            line += f"   a plain script {against(script[part], now)}"
        lines.append(line)
    return lines


def shown(seconds: float) -> str:
    return f"over {LIMIT_S} s" if seconds == STOPPED else f"{seconds:6.2f} s"


def against(other: float, now: float) -> str:
    """Return another way's time, and how many times as fast as it today's code is."""
    least_ratio = min(other, LIMIT_S) / now
    return f"{shown(other)} ({'over ' if other == STOPPED else ''}{least_ratio:.2f}x)"


def write_page(lines: list[str]) -> None:
    """Put the lines into docs/benchmarks.md, in place of those of an earlier run."""
    text = PAGE.read_text()
    above, _, rest = text.partition(BEGIN)
    _, _, below = rest.partition(END)
    block = "\n".join(["```text", *lines, "```", ""])
    PAGE.write_text(above + BEGIN + block + END + below)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("works", nargs="*", metavar="WORK", help=", ".join(works(None)))
    parser.add_argument("--before", default=FOUND_AT, help=f"default: {FOUND_AT}")
    parser.add_argument("--data", type=Path, help="a folder with train and test")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--save", action="store_true", help=f"keep it in {PAGE.name}")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        part, folder = asked.inside
        print(json.dumps(PARTS[part](Path(folder))))
        return
    known = works(asked.data)
    unknown = set(asked.works) - set(known)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; take {', '.join(known)}")
    if asked.data is not None and not (asked.data / "train").is_dir():
        parser.error(f"--data {asked.data}: no folder with train and test")
    if not is_commit(asked.before):
        parser.error(f"--before {asked.before}: no commit of this clone")
    from machine import describe

    today = datetime.date.today().isoformat()
    pictures = asked.data.name if asked.data else "400 photographs of noise"
    lines = [describe(), f"{today}, before: {asked.before}, pictures: {pictures}"]
    print(*lines, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as place:
        before = tree_of(asked.before, Path(place))
        for name in asked.works or known:
            folder = Path(place) / name
            folder.mkdir()
            of_work = compare(known[name], before, folder, asked.turns)
            print(*of_work, sep="\n", flush=True)
            lines += of_work
    if asked.save:
        write_page(lines)


if __name__ == "__main__":
    main()
