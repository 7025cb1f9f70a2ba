"""A ResNet-18, a small vision transformer and a small ConvNeXt, frozen under Faster R-CNN, as drawn
and trained on the labels of the embedded digits, by both engines. Frozen, because a hundred
iterations at a rate for new heads teach any trunk of this size what there is in the scenes.

Kept in detection_trunks.txt; about twenty minutes of one core beside the pretraining, which
trunks_on_digits.py shares (what lies in --out is not trained again):

    python benchmarks/detection_trunks.py --out runs/trunks
    python benchmarks/detection_trunks.py --only ViT --pictures 10 --seeds 0,1,2,3,4 \\
        SOLVER.MAX_ITER 300 SOLVER.STEPS '[240]'
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

import torch

from backbench import cli
from backbench.datasets import embedded
from backbench.results import store
from backbench.runs.folder import CHECKPOINT_FILE

RECIPES = {
    # On the ConvNeXt's protocol: the same pyramid, heads and schedule
    "ResNet-18": ("demo_supervised", "demo_faster_rcnn_ConvNeXt_FPN"),
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


def trunks(out: Path, data: Path, names: list[str]) -> dict[tuple[str, str], Path]:
    """Recipe and kind -> its checkpoint."""
    files = {}
    for name in names:
        recipe, _ = RECIPES[name]
        for kind, changes in KINDS.items():
            folder = out / f"{recipe}-{kind}"
            files[name, kind] = folder / CHECKPOINT_FILE
            if not files[name, kind].exists():
                title = f"name={name} {kind}"
                run("pretrain", recipe, *changes, title, "--data", data, "--out", folder)
    return files


def part_of(data: Path, pictures: int) -> Path:
    """A copy of `data` whose train scenes are the first so many."""
    part = data.with_name(f"{data.name}-{pictures}")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(data, part)
    file = part / "scenes" / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    content["images"] = content["images"][:pictures]
    kept = {image["id"] for image in content["images"]}
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] in kept]
    file.write_text(json.dumps(content))
    return part


def cell(row: store.Result) -> str:
    """'17.0 [12.9, 21.9]'"""
    assert row.value is not None and row.ci95 is not None
    low, high = row.ci95
    return f"{row.value:.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/trunks"))
    parser.add_argument("--only", choices=RECIPES, help="this trunk alone")
    parser.add_argument("--pictures", type=int, help="of train, instead of all")
    parser.add_argument("--seeds", default="0", help="of heads and order, separated by commas")
    parser.add_argument("changes", nargs="*", help="KEY VALUE ... of the detectors' configs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out, names = arguments.out, [arguments.only] if arguments.only else list(RECIPES)
    data = embedded.build(out / "data")
    files = trunks(out, data, names)
    if arguments.pictures is not None:
        data = part_of(data, arguments.pictures)
    engines = ["torchvision"]
    if importlib.util.find_spec("detectron2") is not None:
        engines.append("detectron2")
    lines = [f"{'':24}" + "".join(f"{e + ' ' + m:>24}" for e in engines for m in METRICS)]
    for (name, kind), file in files.items():
        for seed in arguments.seeds.split(","):
            changes = (*FROZEN, "SEED", seed, *arguments.changes)
            line = f"{name} {kind}, seed {seed}"
            line = f"{line:24}"
            for engine in engines:
                folder = out / "-".join(["detect", data.name, name, kind, seed, engine])
                words = ("--config-file", RECIPES[name][1], "--checkpoint", file, "--data", data)
                run("detect", *words, "--engine", engine, "--out", folder, *changes)
                rows, problems = store.read(folder)
                assert not problems, problems
                of = {row.metric: row for row in rows}
                line += "".join(f"{cell(of[metric]):>24}" for metric in METRICS)
            lines.append(line)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
