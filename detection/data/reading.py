"""Reads a config's datasets: found by Detectron2's names, parsed, and each image found."""

import os
from pathlib import Path

from fvcore.common.config import CfgNode

from backbench.containers import containers
from backbench.containers.spans import spelled
from backbench.detection.data import coco, voc
from backbench.detection.data.split import DatasetFiles, Split, join
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput, nearest
from backbench.untrusted import opening, printable

DATASETS = coco.DATASETS | voc.DATASETS


def root_folder(data: Path | None) -> Path:
    """--data, or Detectron2's $DETECTRON2_DATASETS."""
    root = data or os.environ.get("DETECTRON2_DATASETS")
    if not root:
        tree = "ROOT/coco/{annotations,train2017,val2017}"
        raise BadInput(
            f"no data: give --data ROOT with {tree} (or $DETECTRON2_DATASETS)"
        )
    return Path(root)


def read_splits(
    config: Path, names: CfgNode, root: Path, task: DetectionTask
) -> tuple[Split, Split]:
    """Read the images that a config's DATASETS (`names`) train on and score on."""
    for part in ("TRAIN", "TEST"):
        if not names[part]:
            raise BadInput(f"{config}: DATASETS.{part} is empty")
    if len(names.TEST) != 1:
        tests = f"DATASETS.TEST {list(names.TEST)}"
        raise BadInput(f"{config}: {tests}: one dataset is scored in a run")
    train = join([read(find(name, root), task) for name in names.TRAIN])
    return train, read(find(names.TEST[0], root), task)


def find(name: str, root: Path) -> DatasetFiles:
    """The files of a dataset; coco_2017_val_100 is the first 100 images of coco_2017_val."""
    base, _, tail = name.rpartition("_")
    limit = int(tail) if tail.isdigit() and base in coco.DATASETS else None
    key = base if limit else name
    if key not in DATASETS:
        raise BadInput(f"DATASETS: unknown dataset '{name}'; {nearest(name, DATASETS)}")
    file, folder = DATASETS[key]
    return DatasetFiles(name, root / file, root / folder, limit)


def read(files: DatasetFiles, task: DetectionTask) -> Split:
    """Read and check a dataset. Raises BadInput, one line, for what would train wrongly."""
    kind = voc if files.name in voc.DATASETS else coco
    if kind is voc and (task.outlines or task.keypoints):
        raise BadInput(
            f"{files.name}: VOC has boxes only; the {task.name} task needs COCO"
        )
    file = files.file
    try:
        split = kind.parse(
            opening.read_bytes(file, most=kind.LARGEST_FILE), files, task
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise BadInput(f"{file}: no such file; {kind.LAYOUT}") from None
    except OSError as error:
        raise BadInput(f"{file}: {printable.shown(str(error), 100)}") from None
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from None
    find_images(split)
    return split


def find_images(split: Split) -> None:
    """Give each record its image's path, or its place in FOLDER.zip or FOLDER.tar. BadInput for a
    path outside the dataset's folder (maybe another split's image), and for missing images."""
    folder, records = split.folder, split.records
    found = containers.archived(folder, [record["file_name"] for record in records])
    if found is not None:
        for index, record in enumerate(records):
            record["file_name"] = spelled(found, index)
        return
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such image folder (dataset {split.name})")
    root = str(folder)  # as it is: `link/..` may be another folder than no link at all
    # One listing, and a look-up only for what is not in it (below a subfolder, say): 118,000
    # look-ups take long on a network disk.
    there = {str(path) for path in Path(root).iterdir()}
    missing = []
    for record in records:
        name = record["file_name"]
        below = os.path.normpath(
            os.path.relpath(name, root) if name.startswith("/") else name
        )
        if below in (".", "..") or below.startswith("../"):
            raise BadInput(f"{split.file}: file_name '{name}' is outside of {folder}")
        path = record["file_name"] = f"{root}/{below}"
        if path not in there and not os.path.isfile(path):  # noqa: PTH113 - any name at all
            missing.append(name)
    if missing:
        gone = (
            f"{len(missing)} of {len(records)} images of {split.file.name} are missing"
        )
        raise BadInput(f"{folder}: {gone}, first {missing[0]}")
