"""`backbench analyze`: what checkpoints do to features, in the papers' figures and numbers.

One pass over the images (`analyze_pass`) keeps sums, histograms and the plain features of a bounded
sample of images, so memory does not grow with the dataset; from these come the numbers
(`analyze_numbers`) and pictures (`analyze_pictures`). Every statistic is taken on the trunk's
features and, where the checkpoint has kept it, on its projector's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from backbench.datasets import catalog, splits
from backbench.errors import BadInput
from backbench.images import contents
from backbench.images.image_list import ImageList
from backbench.recipes import config, fast
from backbench.results import store
from backbench.results.store import Result
from backbench.runs import atomic, seeding
from backbench.runs.folder import PICTURES, open_run
from backbench.weights.checkpoint import Checkpoint
from transfer import analyze_pictures
from transfer.analyze_curves import training_curves
from transfer.analyze_numbers import Number, summarise
from transfer.analyze_pass import STATE, Space, accumulate
from transfer.analyze_recipe import AnalyzeConfig, load_config
from transfer.analyze_summary import CheckpointCurve, SpaceSummary, Summary, finite
from transfer.devices import Machine, read_checkpoints, start_for
from transfer.scoring import recorded

SUMMARY = "analysis.json"


def run(args: argparse.Namespace) -> int:
    """The verb `analyze`."""
    recipe = load_config(args.recipe, args.augmentations)
    if args.devices * args.nodes > 1:
        raise BadInput(
            "--devices: analyze runs in one process; analyze other checkpoints beside it instead"
        )
    found = catalog.load(args.dataset, args.data, seed=args.seed)
    images = choose_images(dict(found.items())[recipe.split], recipe.images, args.seed)
    checkpoints = read_checkpoints(args.checkpoints)
    # What decides the numbers: the list of images, and what they hold.
    identity = {
        "recipe": config.to_dict(recipe),
        "checkpoints": [c.digest for c in checkpoints],
        "dataset": args.dataset,
        "images": splits.digest(images),
        contents.KEY: contents.sample(images),
        "seed": args.seed,
    }
    machine = start_for(args)
    # Once it was what the file system said of the images
    keys = {"dropped": ("content",), "added": (contents.KEY,)}
    with open_run(args.out, verb="analyze", identity=identity, **keys) as out:
        rows = recorded(out)
        if store.complete(out):
            (out / STATE).unlink(missing_ok=True)
        else:
            curves = training_curves(args.checkpoints, checkpoints)
            rows = analyze(
                checkpoints,
                images,
                recipe,
                dataset=args.dataset,
                out=out,
                seed=args.seed,
                machine=machine,
                curves=curves,
            )
    show(rows, args.out)
    return 0


def choose_images(images: ImageList, count: int | None, seed: int) -> ImageList:
    """A seeded choice of `count` images, in their order."""
    if count is None or count >= len(images):
        return images
    order = torch.randperm(len(images), generator=seeding.generator(seed, "images to analyze"))
    return images.subset(sorted(order[:count].tolist()))


def analyze(
    checkpoints: Sequence[Checkpoint],
    images: ImageList,
    recipe: AnalyzeConfig,
    *,
    dataset: str,
    out: Path,
    seed: int,
    machine: Machine,
    curves: Sequence[CheckpointCurve] = (),
) -> list[Result]:
    """Everything for `checkpoints` on `images`: OUT/analysis.json, OUT/pictures and the rows."""
    # 1. The pass over the images, which can be stopped and continued.
    spaces, sample = accumulate(checkpoints, images, recipe, out=out, seed=seed, machine=machine)
    # 2. The numbers of each space, as rows and as what the pictures are drawn from.
    names = unique_names(checkpoints)
    about = {
        "recipe": config.to_dict(recipe),
        "manifest": splits.digest(images),
        "images": len(images),
        "sample": len(sample),
    }
    rows: list[Result] = []
    summary: Summary = {
        "dataset": dataset,
        "images": len(images),
        "augmentations": recipe.augmentations,
        "spaces": [],
        "training": [{**curve, "name": names[curve["checkpoint"]]} for curve in curves],
    }
    for space in spaces:
        numbers, drawn = summarise(space, sample, recipe, seed)
        one: SpaceSummary = {
            "name": names[space.checkpoint.digest],
            "checkpoint": space.checkpoint.digest,
            "method": space.checkpoint.method,
            "space": space.name,
            "dim": space.dim,
            "numbers": {n.metric: finite(n.value) for n in numbers},
            **drawn,
        }
        summary["spaces"].append(one)
        for number in numbers:
            rows.append(_row(space, number, recipe, dataset=dataset, seed=seed, about=about))
    # 3. The files; the rows last, as a run with rows is done. What is undefined is null by now, and
    #    must be: JSON has no nan.
    atomic.write_json(out / SUMMARY, json.loads(json.dumps(summary, allow_nan=False)))
    analyze_pictures.draw(summary, out / PICTURES)
    store.owe(out, len(rows))
    store.append_missing(out, rows)
    (out / STATE).unlink(missing_ok=True)
    return rows


def _row(
    space: Space,
    number: Number,
    recipe: AnalyzeConfig,
    *,
    dataset: str,
    seed: int,
    about: Mapping[str, object],
) -> Result:
    checkpoint = space.checkpoint
    of_trunk = fast.of_trunk(checkpoint.provenance)
    provenance = {**about, **of_trunk, "space": f"{space.name}, {space.dim} dimensions"}
    if number.about:
        provenance["about"] = number.about
    return Result(
        checkpoint=checkpoint.digest,
        name=checkpoint.name,
        method=checkpoint.method,
        arch=checkpoint.trunk,
        epochs=checkpoint.epochs,
        task="analyze",
        dataset=dataset,
        split=recipe.split,
        metric=number.metric,
        value=number.value,
        ci95=number.ci95,
        protocol=recipe.name(space.name),
        seed=seed,
        provenance=provenance,
    )


def unique_names(checkpoints: Sequence[Checkpoint]) -> dict[str, str]:
    """Digest -> name; with the start of the digest where two share a name."""
    names = [c.name for c in checkpoints]
    out = {}
    for checkpoint, name in zip(checkpoints, names):
        digest = checkpoint.digest
        out[digest] = name if names.count(name) == 1 else f"{name} {digest[:6]}"
    return out


def show(rows: Sequence[Result], out: Path) -> None:
    """A line per metric and space, a column per checkpoint, on standard output."""
    names = {r.checkpoint: r.name[:16] for r in rows}  # digests in their order
    lines: dict[tuple[str, str], dict[str, Result]] = {}
    for r in rows:
        lines.setdefault((r.protocol, r.metric), {})[r.checkpoint] = r
    shown = None
    for (protocol, metric), found in lines.items():
        if protocol != shown:
            shown = protocol
            print(_line(f"{protocol:<28}", names.values()))
        cells = [_cell(found.get(digest)) for digest in names]
        print(_line(f"  {metric:<26}", cells))
    print(f"pictures: {out / PICTURES}")


def _line(start: str, cells: Iterable[str]) -> str:
    return start + "".join(f"{cell:>18}" for cell in cells)


def _cell(r: Result | None) -> str:
    if r is None:
        return ""
    return "undefined" if r.value is None else f"{r.value:.4g}"
