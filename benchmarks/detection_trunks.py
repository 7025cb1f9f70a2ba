"""A small vision transformer and a small ConvNeXt, frozen under Faster R-CNN, as drawn and trained on
the labels of the embedded digits, by both engines. Frozen, because a hundred iterations at a rate
for new heads teach any trunk of this size what there is in the scenes.

Kept in detection_trunks.txt; about fifteen minutes of one core beside the pretraining, which
trunks_on_digits.py shares (what lies in --out is not trained again):

    python benchmarks/detection_trunks.py --out runs/trunks
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch

from backbench import cli
from backbench.datasets import embedded
from backbench.results import store
from backbench.runs.folder import CHECKPOINT_FILE

RECIPES = {
    "ViT": ("demo_supervised_vit", "demo_faster_rcnn_ViT_SFP"),
    "ConvNeXt": ("demo_supervised_convnext", "demo_faster_rcnn_ConvNeXt_FPN"),
}
DRAWN = ("epochs=0",)
KINDS = {"drawn": DRAWN, "trained": ()}
FROZEN = ("MODEL.TRUNK.FROZEN", "True")
METRICS = ("bbox_AP", "bbox_AP50")


def run(*words: object) -> None:
    status = cli.main([str(word) for word in words])
    if status:
        raise SystemExit(status)


def trunks(out: Path, data: Path) -> dict[tuple[str, str], Path]:
    """Recipe and kind -> its checkpoint."""
    files = {}
    for name, (recipe, _) in RECIPES.items():
        for kind, changes in KINDS.items():
            folder = out / f"{recipe}-{kind}"
            files[name, kind] = folder / CHECKPOINT_FILE
            if not files[name, kind].exists():
                title = f"name={name} {kind}"
                run("pretrain", recipe, *changes, title, "--data", data, "--out", folder)
    return files


def cell(row: store.Result) -> str:
    """'17.0 [12.9, 21.9]'"""
    assert row.value is not None and row.ci95 is not None
    low, high = row.ci95
    return f"{row.value:.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/trunks"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    data = embedded.build(out / "data")
    engines = ["torchvision"]
    if importlib.util.find_spec("detectron2") is not None:
        engines.append("detectron2")
    lines = [f"{'':20}" + "".join(f"{e + ' ' + m:>24}" for e in engines for m in METRICS)]
    for (name, kind), file in trunks(out, data).items():
        line = f"{name + ' ' + kind:20}"
        for engine in engines:
            folder = out / f"detect-{name}-{kind}-{engine}"
            words = ("--config-file", RECIPES[name][1], "--checkpoint", file, "--data", data)
            run("detect", *words, "--engine", engine, "--out", folder, *FROZEN)
            rows, problems = store.read(folder)
            assert not problems, problems
            of = {row.metric: row for row in rows}
            line += "".join(f"{cell(of[metric]):>24}" for metric in METRICS)
        lines.append(line)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
