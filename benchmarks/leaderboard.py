"""How fast the leaderboard is: 10^5 results over 10^3 checkpoints to csv and to the page, and the page in a browser.

    python benchmarks/leaderboard.py [--checkpoints 1000] [--columns 100]

Also the home of `synthetic`, results with a known truth, which the tests use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from backbench.board.board import TWELVE, collect, write_csv
from backbench.board.page import write_page
from backbench.results import store
from backbench.results.store import Result

Kind = tuple[str, str, str, str, str | None]  # task, dataset, metric, protocol, engine

DEMO: list[Kind] = [
    ("linear", "digits", "top1", "linear-demo-v1", None),
    ("knn", "digits", "top1_k20", "knn-demo-v1", None),
    ("fewshot", "digits", "top1", "fewshot-demo-v1", None),
    ("semi_10pct", "digits", "top1", "semisup-demo-v1", None),
    ("semi_10pct", "digits", "top5", "semisup-demo-v1", None),
    *[
        ("faster_rcnn", "scenes", f"bbox_{m}", "detection-demo-v1", "torchvision")
        for m in ("AP", "AP50", "AP75")
    ],
    *[
        ("mask_rcnn", "scenes", f"segm_{m}", "detection-demo-v1", "torchvision")
        for m in ("AP", "AP50", "AP75")
    ],
    *[
        ("keypoint_rcnn", "scenes", f"keypoints_{m}", "detection-demo-v1", "torchvision")
        for m in ("AP", "AP50", "AP75")
    ],
]
PAPER: list[Kind] = [
    ("linear", "imagenet", "top1", "linear-lorac-imagenet-v1", None),
    ("linear", "imagenet", "top5", "linear-lorac-imagenet-v1", None),
    *[("linear", name, metric, "linear-lorac-v1", None) for name, metric in TWELVE.items()],
    *[
        (f"semi_{p}pct", "imagenet", m, "semisup-v1", None)
        for p in (1, 10)
        for m in ("top1", "top5")
    ],
    *[
        ("faster_rcnn", "coco2017", f"bbox_{m}", "detection-1x-v1", "detectron2")
        for m in ("AP", "AP50", "AP75")
    ],
    *[
        ("mask_rcnn", "coco2017", f"segm_{m}", "detection-1x-v1", "detectron2")
        for m in ("AP", "AP50", "AP75")
    ],
    *[
        ("keypoint_rcnn", "coco2017", f"keypoints_{m}", "detection-1x-v1", "detectron2")
        for m in ("AP", "AP50", "AP75")
    ],
]


def digest_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def synthetic(
    root: Path,
    names: list[str],
    kinds: list[Kind],
    *,
    seed: int = 0,
    images: int = 720,
    gap: float = 2.0,
    kept: bool = True,
    seeds: int = 1,
) -> None:
    """Runs below `root` in which each next name is `gap` points better than the one before, with kept predictions.

    Images have a difficulty that all checkpoints share, as real ones do; 60 classes where the metric is a class mean.
    """
    for kind in kinds:
        task, dataset, metric, protocol, engine = kind
        rng = np.random.default_rng(int(digest_of(f"{seed} {dataset} {task} {metric}")[:12], 16))
        base, hard = rng.uniform(45, 85), rng.normal(size=images)
        label = rng.integers(0, 60 if metric == "mean_per_class" else 10, size=images)
        manifest = digest_of(f"{dataset} {images} {seed}")
        for nth, name in enumerate(names):
            run = root / f"{task}-{dataset}" / name
            rows = []
            for s in range(seeds):
                own = np.random.default_rng(int(digest_of(f"{seed} {kind} {name} {s}")[:12], 16))
                share = min(0.99, (base + gap * nth) / 100)
                score = hard + own.normal(size=images)
                hit = (
                    score > np.quantile(score, 1 - share)
                    if gap
                    else score > np.quantile(hard, 1 - share)
                )
                prediction = np.where(hit, label, (label + 1) % 1000)
                value, half = (
                    100 * hit.mean(),
                    196 * (hit.mean() * (1 - hit.mean()) / images) ** 0.5,
                )
                provenance = {"manifest": manifest, "recipe": {"protocol": protocol, "batch": 256}}
                if kept and task.endswith("_rcnn"):
                    resample = np.random.default_rng(int(manifest[:12], 16)).integers(
                        0, images, size=(500, images)
                    )
                    arrays = {
                        f"bootstrap_{metric}": 100 * hit[resample].mean(1),
                        "manifest": manifest,
                    }
                    provenance["predictions"] = store.keep_predictions(
                        run, f"{metric}-{s}", **arrays
                    )
                elif kept:
                    provenance["predictions"] = store.keep_predictions(
                        run,
                        f"{metric}-{s}",
                        prediction=prediction,
                        label=label,
                        hits5=hit,
                        manifest=manifest,
                    )
                rows.append(
                    Result(
                        checkpoint=digest_of(name),
                        name=name,
                        method=name.split("-")[0],
                        arch="resnet18" if "demo" in protocol else "resnet50",
                        epochs=None if name == "random" else 200,
                        task=task,
                        dataset=dataset,
                        split="val" if dataset in ("imagenet", "coco2017") else "test",
                        metric=metric,
                        value=value,
                        ci95=(value - half, value + half),
                        protocol=protocol,
                        engine=engine,
                        seed=s,
                        chosen={
                            "lr": 3.16,
                            "split": "val",
                            "scores": {"1": 70.1, "3.16": 72.3, "10": 71.8},
                        },
                        provenance=provenance,
                        origin={
                            "command": f"backbench {task} {name}.safetensors --datasets {dataset} --out {run}"
                        },
                    )
                )
            store.append(run, rows)


def many(root: Path, checkpoints: int, columns: int) -> None:
    """checkpoints x columns results without predictions, 100 checkpoints to a file."""
    rng = np.random.default_rng(0)
    kinds = [
        ("linear", f"set{c // 2:02}", ("top1", "top5")[c % 2], f"linear-v{c % 3}", None)
        for c in range(columns)
    ]
    values = rng.uniform(20, 90, size=(checkpoints, columns))
    for start in range(0, checkpoints, 100):
        rows = [
            Result(
                checkpoint=digest_of(str(i)),
                name=f"checkpoint-{i}",
                method=("moco_v2", "lorac", "simclr")[i % 3],
                arch="resnet50",
                epochs=200,
                task=task,
                dataset=dataset,
                split="test",
                metric=metric,
                value=float(values[i, c]),
                ci95=(float(values[i, c]) - 1, float(values[i, c]) + 1),
                protocol=protocol,
                engine=engine,
                chosen={
                    "lr": 3.16,
                    "split": "val",
                    "scores": {str(n): float(values[i, n]) for n in range(7)},
                },
                provenance={"manifest": digest_of(dataset), "recipe": {"protocol": protocol}},
                origin={
                    "command": f"backbench linear {i}.safetensors --datasets {dataset} --out runs/{i}"
                },
            )
            for i in range(start, min(start + 100, checkpoints))
            for c, (task, dataset, metric, protocol, engine) in enumerate(kinds)
        ]
        store.append(root / f"run{start}", rows)


def chromium() -> str | None:
    return (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )


FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
]


def browse(page: Path, *flags: str, size: str = "1280,900", timeout: float = 120) -> str:
    """Open a page in headless Chromium and return the document after its scripts have run."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            str(chromium()),
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={size}",
            *flags,
        ]
        command += ["--dump-dom"] if not any(f.startswith("--screenshot") for f in flags) else []
        done = subprocess.run(
            [*command, page.resolve().as_uri()],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.stdout


PROBE = """<script>
addEventListener("load", () => {
  const k = D.columns.length - 1;
  sortBy(k);
  document.getElementById("board").offsetHeight;
  const sorted_ms = performance.now(), list = sorted(measured).map(r => cell[k].get(r.i)[1]);
  const ok = list.every((v, i) => !i || list[i - 1] >= v);
  const requests = performance.getEntriesByType("resource").filter(e => !e.name.startsWith("data:")).length;
  const said = JSON.stringify({sorted_ms, ok, requests});
  document.body.insertAdjacentHTML("beforeend", `<output id="probe">${said}</output>`);
});
</script>"""


def sort_in_browser(page: Path) -> dict[str, float]:
    """Load the page, sort its last column at once, and say when that was done: {"sorted_ms", "ok", "requests"}."""
    probed = page.with_name(f"probe-{page.name}")
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    found = re.findall(r'<output id="probe">({".*?})</output>', browse(probed))
    probed.unlink()
    assert found, "the page did not run"
    return json.loads(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--columns", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        many(root / "runs", args.checkpoints, args.columns)
        start = time.perf_counter()
        board = collect([root / "runs"])
        read = time.perf_counter() - start
        write_csv(board, root / "leaderboard.csv")
        csv_s = time.perf_counter() - start
        start = time.perf_counter()
        write_page(board, root / "leaderboard.html", runs=[root / "runs"])
        page_s = time.perf_counter() - start
        size = (root / "leaderboard.html").stat().st_size / 1e6
        numbers = args.checkpoints * args.columns
        print(f"{numbers} results over {args.checkpoints} checkpoints, {args.columns} columns")
        print(f"read {read:.2f} s, read and written as csv {csv_s:.2f} s (limit 5)")
        print(f"page written in {page_s:.2f} s, {size:.1f} MB (limit 40)")
        if chromium() is None:
            print("no Chromium here: sorting not measured", file=sys.stderr)
            return
        probe = sort_in_browser(root / "leaderboard.html")
        print(
            f"sorted {probe['sorted_ms'] / 1000:.2f} s after navigation (limit 2), in order: {probe['ok']}"
        )


if __name__ == "__main__":
    main()
