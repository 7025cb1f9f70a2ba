"""Checks that the files and names of a command line are there, before anything heavy is imported."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backbench.containers import finding
from backbench.datasets import catalog, hub_tables, outside
from backbench.datasets.boxes import box_folders
from backbench.errors import BadInput, no_folder
from backbench.images.folder_walk import subfolders
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.detect import DetectRequest
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.requests.options import Request
from backbench.requests.places import RunRequest
from backbench.requests.pretrain import PretrainRequest
from backbench.requests.probe import LinearRequest, OodRequest
from backbench.tasks import TASKS, by_kind
from backbench.weights import absent, archs, hub_files

FOUND, MISSING, UNUSABLE = "found", "missing", "unusable"


def refuse(request: RunRequest | DetectRequest | EvaluateRequest) -> None:
    """Refuse a request whose folder, file of weights or dataset is missing."""
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
            f"--data {request.data}: {no_folder(request.data)}; it holds one folder per dataset"
            " (`backbench data list`)"
        )
    # Of a dataset that its protocol names, the program of `semisup` looks at the lists of labels first
    by_protocol = isinstance(request, SemisupRequest) and request.dataset is None
    if not by_protocol:
        datasets_there(request)


def weight_files(request: Request) -> None:
    """Refuse a request for a file of weights that is not there; fetch it where that is asked."""
    files = [
        *getattr(request, "checkpoints", ()),
        getattr(request, "file", None),
        getattr(request, "checkpoint", None),
    ]
    # Words of `evaluate` are checkpoints or tasks; its own reading of them refuses a missing file.
    words = [word for word in getattr(request, "words", ()) if hub_files.is_name(word)]
    for file in [*files, *words]:
        if hub_files.is_name(file):
            if getattr(request, "download", False):
                hub_files.download(file)
            else:
                hub_files.held(file)
        elif file is not None and not archs.is_name(file) and not file.exists():
            raise BadInput(absent.refusal(file))


def datasets_there(request: Request) -> None:
    """Refuse a request for datasets that are not below its --data."""
    if isinstance(request, LinearRequest | OodRequest):
        names = [name for name in catalog.names(request.datasets) if name != OWN]
        all_there(names, request.data, multilabel=_takes_several_classes(request))
    elif isinstance(request, DetectRequest):
        if request.data is None:
            return
        if request.dataset is not None:
            box_folders.must_find(request.data / request.dataset)
            return
        for folder in _detected_in(request):
            if not (request.data / folder).is_dir():
                raise BadInput(
                    f"{request.data / folder}: {no_folder(request.data / folder)}; a config's dataset"
                    " lies there, and --dataset NAME is for boxes of your own"
                )
    elif isinstance(request, FinetuneRequest | AnalyzeRequest):
        all_there([request.dataset], request.data)
    elif isinstance(request, SemisupRequest):
        dataset = request.dataset or _labelled_in(request)
        if dataset is not None:
            all_there([dataset], request.data)
    elif isinstance(request, PretrainRequest):
        if request.images is not None or request.data is None:
            return
        for name in _pretrained_on(request):
            row = catalog.row(name)
            folders: Sequence[str] = (name,)
            if row is not None and row.folders:
                folders = row.folders
            # One split is enough to train on. Where there is a folder, reading it says what is missing
            if not any((request.data / folder).is_dir() for folder in folders):
                all_there([name], request.data)


def out_inside(request: Request) -> None:
    """Refuse a request whose --out lies in one of its datasets.

    `evaluation.wanted` does this for `evaluate`, as only its tasks say which datasets there are."""
    if not isinstance(request, RunRequest | DetectRequest):
        return
    if request.data is None or request.out is None:
        return
    names: list[str] = []
    if isinstance(request, LinearRequest | OodRequest):
        names = catalog.names(request.datasets)
    elif isinstance(request, FinetuneRequest | AnalyzeRequest):
        names = [request.dataset]
    elif isinstance(request, SemisupRequest):
        names = [request.dataset or _labelled_in(request) or "imagenet"]
    elif isinstance(request, PretrainRequest) and request.images is None:
        names = _pretrained_on(request)
    elif isinstance(request, DetectRequest) and request.dataset is not None:
        names = [request.dataset]
    outside.refuse_inside(request.data, names, request.out)


def _labelled_in(request: SemisupRequest) -> str | None:
    """Return the dataset that a protocol of `semisup` names; None where it names none or is no
    protocol, which is said where it is read."""
    try:
        recipe = config.read_recipe(config.find_recipe(request.protocol, "transfer"))
        dataset = config.apply_overrides(recipe, request.overrides).get("dataset")
    except BadInput:
        return None
    return dataset if isinstance(dataset, str) else None


def _pretrained_on(request: PretrainRequest) -> list[str]:
    """Return the name of the dataset that a pretraining's recipe names, as a list; none where the
    recipe is no recipe, which is said where it is read."""
    try:
        recipe = config.read_recipe(config.find_recipe(request.recipe, "pretrain"))
    except BadInput:
        return []
    data = config.apply_overrides(recipe, request.overrides).get("data")
    return [str(data.get("dataset"))] if isinstance(data, dict) else []


def _detected_in(request: DetectRequest) -> list[str]:
    """List the folders below ROOT that the datasets of a detector's config lie in; none where the
    config cannot be read or its datasets are replaced, which is judged where it is read."""
    if request.config_file is None or any(
        word.startswith("DATASETS.") for word in request.opts
    ):
        return []
    try:
        path = config.find_recipe(request.config_file, "detection")
        values = config.read_detector(path)
    except BadInput:
        return []
    names = [
        *(values.get("DATASETS.TRAIN") or ()),
        *(values.get("DATASETS.TEST") or ()),
    ]
    folders = [_folder_of(str(name)) for name in names]
    return [folder for folder in dict.fromkeys(folders) if folder is not None]


def _folder_of(name: str) -> str | None:
    """Return the folder below ROOT of a dataset that configs name; None for any other dataset."""
    words = name.split("_")
    if words[0] == "voc":  # voc_2007_trainval lies in VOC2007
        words = [f"VOC{year}" for year in words[1:2]]
    for folder in box_folders.NAMED_BY_CONFIGS:
        if folder in words:
            return folder
    return None


def _takes_several_classes(request: LinearRequest | OodRequest) -> bool:
    """Return whether a protocol of a request reads images that show several classes each."""
    kinds = by_kind(request.verb)
    for name in request.protocol.split(","):
        if name == OWN:
            continue
        recipe = config.read_recipe(config.find_recipe(name, "transfer"))
        task = kinds.get(str(recipe.get("kind")))
        if task is not None and TASKS[task].multilabel:
            return True
    return False


def all_there(names: Sequence[str], root: Path, *, multilabel: bool = False) -> None:
    """Refuse datasets that are not below `root`, all of them in one line that says what would run."""
    missing: dict[str, str] = {}
    for name in names:
        try:
            catalog.present(name, root, multilabel=multilabel)
        except BadInput as error:
            missing[name] = str(error)
    if not missing:
        return
    if len(names) == 1:
        raise BadInput(*missing.values())
    there = [name for name in names if name not in missing]
    line = (
        f"{root}: {len(missing)} of {len(names)} datasets are missing: {', '.join(missing)}; "
        f"`backbench data list --data {shlex.quote(str(root))}` says what to get"
    )
    if there:
        line += f"; what is there: --datasets {','.join(there)}"
    raise BadInput(line)


def listed(root: Path) -> list[dict[str, Any]]:
    """Return a row for each known dataset, and for each folder of classes or boxes below ROOT, with
    what is wrong."""
    known = catalog.known()
    boxes = _boxes_below(root)
    with_boxes = {row["name"] for row in boxes}
    rows = []
    for name in (*known, *catalog.own_folders(root)):
        if name in with_boxes:
            continue
        row: dict[str, Any] = {"name": name, "on_disk": UNUSABLE, "wrong": None}
        rows.append(row)
        try:
            # BadInput here is of an installed package that cannot be loaded
            dataset = catalog.find(name)
            row["classes"] = dataset.classes
            row["images"] = dataset.sizes
            row["metric"] = dataset.metric
            row["licence"] = dataset.licence
            try:
                base = dataset.base(root)
            except BadInput:
                row["on_disk"] = MISSING
                folder = (*dataset.folders, name)[0]
                row["wrong"] = (
                    f"get {dataset.get.rstrip(',')}; it belongs in {root / folder}"
                )
                continue
            splits = catalog.read_lists(dataset, root)
            row["container"] = hub_tables.described(dataset, base)
            if not row["container"]:
                where = base if name in known else root / name
                row["container"] = finding.described(where)
        except BadInput as error:
            row["wrong"] = str(error)
            continue
        row["on_disk"] = FOUND
        if name not in known:
            row["classes"] = len(splits.train.classes)
            row["images"] = [len(images) for _, images in splits.items()]
            row["licence"] = "your own"
    return rows + boxes


def _boxes_below(root: Path) -> list[dict[str, Any]]:
    """Return a row for each folder of boxes of one's own below ROOT; its lists are not read."""
    rows: list[dict[str, Any]] = []
    taken = {*catalog.known(), *box_folders.NAMED_BY_CONFIGS}
    names = subfolders(root) if root.is_dir() else []
    for name in names:
        if name in taken:
            continue
        row: dict[str, Any] = {"name": name, "on_disk": FOUND, "wrong": None}
        try:
            boxes = box_folders.find(root / name)
        except BadInput as error:
            row["on_disk"] = UNUSABLE
            row["wrong"] = str(error)
            rows.append(row)
            continue
        if boxes is None:
            continue
        row["metric"] = "AP"
        row["licence"] = "your own"
        parts = ", ".join(part for part in boxes.parts if part) or "no split"
        row["container"] = f"boxes in {boxes.layout}'s layout ({parts})"
        rows.append(row)
    return rows
