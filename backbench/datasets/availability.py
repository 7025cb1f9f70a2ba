"""Checks that the files and names of a command line are there, before anything heavy is imported."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backbench.containers import containers
from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.detect import DetectRequest
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.finetune import FinetuneRequest
from backbench.requests.options import Request
from backbench.requests.places import RunRequest
from backbench.requests.pretrain import PretrainRequest
from backbench.requests.probe import LinearRequest, OodRequest
from backbench.weights import archs

FOUND, MISSING, UNUSABLE = "found", "missing", "unusable"


def refuse(request: RunRequest | DetectRequest | EvaluateRequest) -> None:
    """Raise BadInput if a folder, file or dataset that a verb would read images from is missing."""
    if request.data is None:
        return
    if request.out is not None and request.out.exists() and not request.out.is_dir():
        raise BadInput(f"{request.out}: is a file; --out needs a folder")
    if isinstance(request, EvaluateRequest):
        there = request.data.exists()  # one archive is a dataset, too
    else:
        weight_files(request)
        there = request.data.is_dir()
    if not there:
        raise BadInput(
            f"--data {request.data}: no such folder; it holds one folder per dataset "
            "(`backbench data list`)"
        )
    datasets_there(request)


def weight_files(request: Request) -> None:
    """BadInput for a file of weights on the command line that is not there."""
    one = [getattr(request, name, None) for name in ("file", "checkpoint")]
    for file in (*getattr(request, "checkpoints", ()), *one):
        if file is not None and not archs.is_name(file) and not file.exists():
            raise BadInput(f"{file}: no such file")


def datasets_there(request: Request) -> None:
    """BadInput for datasets that the command names and that are not below its --data."""
    if isinstance(request, LinearRequest | OodRequest):
        names = [name for name in catalog.names(request.datasets) if name != OWN]
        all_there(names, request.data)
    elif isinstance(request, FinetuneRequest | AnalyzeRequest):
        all_there([request.dataset], request.data)
    elif isinstance(request, PretrainRequest):
        recipe = config.read_recipe(config.find_recipe(request.recipe, "pretrain"))
        data = config.apply_overrides(recipe, request.overrides).get("data") or {}
        name = str(data.get("dataset"))
        known = catalog.row(name)
        folders = (known.folders if known else ()) or (name,)
        # One split is enough to train on: where the folder is, reading it says what is missing
        if not any((request.data / folder).is_dir() for folder in folders):
            all_there([name], request.data)


def all_there(names: Sequence[str], root: Path) -> None:
    """Refuse datasets that are not below `root`: all of them at once, with what would run."""
    missing: dict[str, str] = {}
    for name in names:
        try:
            catalog.present(name, root)
        except BadInput as error:
            missing[name] = str(error)
    if not missing:
        return
    if len(names) == 1:
        raise BadInput(*missing.values())
    there = [name for name in names if name not in missing]
    line = (
        f"{root}: {len(missing)} of {len(names)} datasets are missing: {', '.join(missing)}; "
        f"`backbench data list --data {root}` says what to get"
    )
    raise BadInput(
        f"{line}; what is there: --datasets {','.join(there)}" if there else line
    )


def listed(root: Path) -> list[dict[str, Any]]:
    """Return a row for each known dataset and each class folder below ROOT, with what is wrong."""
    known = catalog.known()
    rows = []
    for name in (*known, *catalog.own_folders(root)):
        row: dict[str, Any] = {"name": name, "on_disk": UNUSABLE, "wrong": None}
        rows.append(row)
        try:
            dataset = catalog.find(
                name
            )  # BadInput: an installed package that cannot be loaded
            row |= {"classes": dataset.classes, "images": dataset.sizes}
            row |= {"metric": dataset.metric, "licence": dataset.licence}
            try:
                base = dataset.base(root)
            except BadInput:
                get = f"get {dataset.get}; it belongs in {root / name}"
                row |= {"on_disk": MISSING, "wrong": get}
                continue
            splits = catalog.read_lists(dataset, root)
            row["container"] = containers.described(
                base if name in known else root / name
            )
        except BadInput as error:
            row["wrong"] = str(error)
            continue
        row["on_disk"] = FOUND
        if name not in known:
            counts = [len(images) for _, images in splits.items()]
            row |= {
                "classes": len(splits.train.classes),
                "images": counts,
                "licence": "your own",
            }
    return rows
